"""Any number of images through a bundle into Parquet: restartable, shared by several processes, each image once.

Never imports torch.
"""

from vitx.predict.job import predict
from vitx.predict.outputs.parts import PREDICTIONS
from vitx.predict.summary import SUMMARY, PredictionSummary

__all__ = ["PREDICTIONS", "SUMMARY", "PredictionSummary", "predict"]
