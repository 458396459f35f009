"""Everything that the server changes for its whole process. `serve` and Ray's replica call it; nothing else does."""

import gc
import os
import sys

from PIL import Image

_YOUNG_OBJECTS = 10_000  # allocations before the garbage collector runs: about a hundred requests, by default seven

# A thread that has computed a batch waits so long for the interpreter before it asks the event loop to let go of it, by
# default 5 ms: its core had nothing to do for a twelfth of the time.
_SWITCH_SECONDS = 0.0002


def configure_process() -> None:
    """Call once, before anything is loaded."""
    Image.MAX_IMAGE_PIXELS = None  # `--max-pixels` alone decides, before an image is decoded
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # clients could fill the log with gRPC's warnings
    gc.set_threshold(_YOUNG_OBJECTS)
    sys.setswitchinterval(_SWITCH_SECONDS)


def freeze_heap() -> None:
    """Collect garbage, and exclude what is left (modules, models) from later collections. Call after a model changed.

    What is left lives as long as the server; visiting it in every collection cost a quarter of a small request's time.
    """
    gc.unfreeze()  # a replaced model was frozen too
    gc.collect()
    gc.freeze()
