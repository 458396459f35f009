"""Everything that the server changes for its whole process, a Ray replica's, or one that decodes; nothing else does."""

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from PIL import Image

from vitx.core.preprocess import ignore_image_warnings

_YOUNG_OBJECTS = 10_000  # allocations before the garbage collector runs: about a hundred requests, by default seven

# A thread that has computed a batch waits so long for the interpreter before it asks the event loop to let go of it, by
# default 5 ms: its core had nothing to do for a twelfth of the time.
_SWITCH_SECONDS = 0.0002

_LIBC = None if sys.platform == "win32" else ctypes.CDLL(None)
_ARENA_MAX = -8  # glibc's M_ARENA_MAX
_TRIM_SECONDS = 1.0
_TRIM_UNDER_LOAD = 30  # it takes a millisecond, and as much again until the freed pages are back


def configure_process() -> None:
    """Call once, before anything is loaded."""
    Image.MAX_IMAGE_PIXELS = None  # `--max-pixels` alone decides, before an image is decoded
    Image.init()  # its formats, which Pillow else imports with the first image: 0.2 s, while no other thread runs
    ignore_image_warnings()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # clients could fill the log with gRPC's warnings
    gc.set_threshold(_YOUNG_OBJECTS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(_ARENA_MAX, 1)  # of an arena for each thread every end stays; JPEGs are 2 % faster with one


def freeze_heap() -> None:
    """Collect garbage, and exclude what is left (modules, models) from later collections. Call after a model changed.

    What is left lives as long as the server; visiting it in every collection cost a quarter of a small request's time.
    """
    gc.unfreeze()  # a replaced model was frozen too
    gc.collect()
    gc.freeze()


async def return_freed_memory(busy: Callable[[], object]) -> None:
    """Give freed memory back to the system, until cancelled: every second when not `busy`, and every thirtieth second.

    glibc keeps what was freed below what is in use: of a burst of 64 bodies of a few MiB nearly all stayed.
    """
    trim: Any = getattr(_LIBC, "malloc_trim", None)
    for second in count(1) if trim is not None else ():
        await asyncio.sleep(_TRIM_SECONDS)
        if not busy() or second % _TRIM_UNDER_LOAD == 0:
            await asyncio.to_thread(trim, 0)
