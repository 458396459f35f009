"""Whether this machine has a usable NVIDIA GPU, asked of the driver itself: no torch, no child process."""

import ctypes
import sys
from functools import cache


@cache
def cuda_device_count() -> int:
    """Number of GPUs the NVIDIA driver offers; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) != 0:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
