"""Energy of the first NVIDIA GPU, from the counter that NVML reads."""

from collections.abc import Callable


def gpu_energy() -> Callable[[], float] | None:
    """Return a function that reads joules used since the driver was loaded; None without a GPU that counts them.

    The GPU updates the counter ten to fifty times a second: use differences over seconds, not over one call. A later
    read that fails returns NaN.
    """
    try:
        import pynvml
    except ImportError:  # macOS, which has no NVIDIA GPUs
        return None
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except pynvml.NVMLError:  # no driver, no GPU, or one without the counter
        return None

    def read() -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1000
        except pynvml.NVMLError:
            return float("nan")

    return read
