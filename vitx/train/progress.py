"""`progress.json`: how far a run has come within its epoch, for whoever watches it."""

import os
import socket

from pydantic import Field

from vitx.core.files import Record

PROGRESS_FILE = "progress.json"
# Why a run ended before its last epoch, although nothing stopped it.
OUT_OF_PATIENCE = "none was better for selection.patience"


class RunProgress(Record):
    """step, steps: of the whole run. loss: of the latest tenth step, None before the first. ended: in order.

    failure: why it ended before its last epoch.
    """

    step: int
    steps: int
    epochs: int
    loss: float | None = None
    images_per_second: float | None = None
    seconds_left: float | None = None
    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    ended: bool = False
    failure: str = ""


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
