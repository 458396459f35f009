"""Energy of the first NVIDIA GPU, asked of NVML itself: no package, no child process. Not run on a GPU yet."""

import ctypes
import sys
from collections.abc import Callable


def gpu_energy() -> Callable[[], float] | None:
    """Return a function that reads joules used since the driver was loaded; None without a GPU that counts them.

    The counter is renewed some ten to fifty times a second: differences are good over seconds, not over a call.
    """
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None

    def read() -> float:
        if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            return float("nan")
        return millijoules.value / 1000

    return read if read() == read() else None
