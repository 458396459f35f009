"""Energy of the GPU that sessions compute on, from the counter that NVML reads."""

from collections.abc import Callable

from vitx.core.machine import first_gpu_address


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
        address = first_gpu_address()
        if address is None:
            return None
        # By address: NVML's numbers are not CUDA's, and know nothing of CUDA_VISIBLE_DEVICES.
        device = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except pynvml.NVMLError:  # no driver, no GPU, or one without the counter
        return None

    def read() -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1000
        except pynvml.NVMLError:
            return float("nan")

    return read
