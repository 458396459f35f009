"""The machine and the installed versions, for every file that states a measurement."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("vitx", "torch", "timm", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy", "pillow")


def describe_machine() -> dict[str, str | int]:
    """Processor, cores usable by this process, memory in GiB, operating system and Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
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
