"""The machine and the installed versions, for every file that states a measurement."""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("vitx", "torch", "timm", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy", "pillow")
# cuDeviceGetAttribute's CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """A GPU that the NVIDIA driver offers: its name, and its architecture as `sm89`."""

    name: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"


def local_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, asked of the NVIDIA driver alone; empty without a driver or a GPU.

    The first one is CUDA's device 0; CUDA_VISIBLE_DEVICES is obeyed. Nothing is allocated on a GPU.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def local_architectures() -> tuple[str, ...]:
    """The architecture of each GPU that the NVIDIA driver offers; empty without a driver or a GPU."""
    return tuple(gpu.architecture for gpu in local_gpus())


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), index)
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        numbers.append(value.value)
    return Gpu(name.value.decode(errors="replace"), "sm{}{}".format(*numbers))


def describe_machine() -> dict[str, str | int]:
    """Processor, cores usable by this process, memory in GiB, operating system, Python; GPUs where there are any."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    gpus = local_gpus()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        **({"gpu": ", ".join(map(str, gpus))} if gpus else {}),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_versions() -> dict[str, str]:
    """The versions of the packages that decide a result, those of them that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
