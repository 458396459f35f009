"""Any number of images through a bundle into Parquet: restartable, shared by several processes, each image once.

Never imports torch.
"""

from vitx.serve.offline.job import predict
from vitx.serve.offline.outputs import PREDICTIONS
from vitx.serve.offline.summary import SUMMARY, PredictionSummary

__all__ = ["PREDICTIONS", "SUMMARY", "PredictionSummary", "predict"]
