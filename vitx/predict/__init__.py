"""Any number of images through a bundle into Parquet: restartable, shared out by --shard, each image once.

Never imports torch.
"""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.predict.job import predict
    from vitx.predict.options import PredictOptions
    from vitx.predict.outputs.parts import PREDICTIONS
    from vitx.predict.summary import SUMMARY, PredictionSummary

__all__ = ["PREDICTIONS", "SUMMARY", "PredictOptions", "PredictionSummary", "predict"]


__getattr__ = lazy_names(
    __name__,
    {
        "vitx.predict.job": ("predict",),
        "vitx.predict.options": ("PredictOptions",),
        "vitx.predict.outputs.parts": ("PREDICTIONS",),
        "vitx.predict.summary": ("SUMMARY", "PredictionSummary"),
    },
)
