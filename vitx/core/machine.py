"""This machine: its GPUs, its cores, and what every measurement records of it and of the installed versions."""

import ctypes
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitx.core.errors import EnvironmentMissing, missing_package

PACKAGES = ("vitx", "torch", "timm", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy", "pillow")
AGAIN = "pip install --force-reinstall --no-deps"  # without the former pip holds that all is there
# ONNX Runtime and OpenVINO choose kernels by these, and their sums differ in the last bits. Linux's names.
_INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_FLAGS = "flags", "Features"  # the latter are ARM's
_LIMITS = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"  # to fewer of them, of OpenVINO's kernels
_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
# cuDeviceGetAttribute's CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA can use: its name, and its compute capability as `sm89`."""

    name: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"


@cache
def local_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA programs see here, in CUDA's order; empty without an NVIDIA driver or a GPU.

    The one check for a GPU outside of torch. It asks libcuda, the driver's own library, because every machine with a
    driver has it and a process needs no package for it. NVML would not do: it ignores CUDA_VISIBLE_DEVICES, numbers
    the GPUs in another order, and is missing in containers that were given the GPU for computing alone. Nothing is
    allocated on a GPU.
    """
    driver = _cuda_library()
    if driver is None:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def first_gpu_address() -> str | None:
    """The PCI address of the first of `local_gpus`, by which NVML knows it too, such as 0000:65:00.0; None without."""
    driver = _cuda_library()
    if driver is None or not local_gpus():
        return None
    address = ctypes.create_string_buffer(32)
    return address.value.decode() if driver.cuDeviceGetPCIBusId(address, len(address), 0) == 0 else None


def local_architectures() -> tuple[str, ...]:
    """The architecture of each of `local_gpus`."""
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
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        **({"gpu": ", ".join(map(str, gpus))} if gpus else {}),
    }


@cache
def sums_int8_exactly(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor is known to add products of uint8 and int8 in 32 bits (VNNI, AMX, or no x86 at all).

    Other x86 processors add two products in 16 bits, which saturates beyond 32,767: 255·127 + 255·127 is 64,770.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(_of_first_core(description, *_FLAGS).split())


# Rewrites of ONNX Runtime that take zero point 0 for the least code, as it is of uint8: before E4M3 one drops a Relu,
# the other refuses a Clip, and no session option turns them off.
_UNSIGNED_REWRITES = ["ReluQuantRewrite", "ClipQuantRewrite"]


def set_quantization(options: Any, *, fused: bool, on_cpu: bool = True) -> list[str] | None:
    """Set in ONNX Runtime's session `options` how Q and DQ run; return the session's `disabled_optimizers`.

    Without `fused` they run as they stand.
    """
    if on_cpu and not sums_int8_exactly():
        # uint8 by uint8 does not saturate: ranges and certificates must hold on every processor (docs/precision.md).
        options.add_session_config_entry("session.x64quantprecision", "1")
    if fused:
        return None
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return _UNSIGNED_REWRITES


@cache
def openvino_core() -> Any:
    """The process's `openvino.Core`; raise EnvironmentMissing where OpenVINO is not installed.

    One for all models, and for good: where the processor has AMX, loading the CPU plugin gives the calling thread a
    stack for signals, and unloading it, when the last model and core are gone, frees that stack, on whatever thread
    that happens. The first thread's next signal would then end the process (seen in OpenVINO 2026.4.1).
    """
    try:
        import openvino
    except ModuleNotFoundError:
        raise missing_package("openvino", "openvino") from None
    return openvino.Core()


@cache
def cpu_architecture() -> str:
    """This processor's machine name and the instruction sets that matter to a runtime: `x86_64 avx2 fma avx512f`.

    A variable that keeps OpenVINO from some of them is named too.
    """
    flags = _of_first_core(Path("/proc/cpuinfo"), *_FLAGS).split()
    limits = (f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name))
    return " ".join((platform.machine(), *(name for name in _INSTRUCTION_SETS if name in flags), *limits))


def _of_first_core(description: Path, *names: str) -> str:
    """What is said of the first core under one of these names; empty where the system has no such file."""
    lines = description.read_text().splitlines() if description.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


@cache
def cuda_driver() -> str:
    """The newest CUDA that the NVIDIA driver runs, such as 13.0; empty without a driver."""
    driver, version = _cuda_library(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _cuda_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def usable_cores() -> int:
    """Cores that this process may use: under `taskset`, or in a container with a limit of CPUs, not all of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(min(_cpu_limits(), default=cores))))


def _cpu_limits(system: Path = Path("/")) -> Iterator[float]:
    """How many cores' time the control groups (version 1 or 2) of this process may take, of those that have a limit.

    A container may see its own groups at the root and still be told the host's name of them, which is not there.
    """
    own = system / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, names = ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")) if controllers else ("", ("cpu.max",))
        for place in (Path(group), *Path(group).parents):
            files = [system / "sys/fs/cgroup" / root / place.relative_to("/") / name for name in names]
            try:
                quota, period = map(int, " ".join(file.read_text() for file in files).split())
            except (OSError, ValueError):  # there is none, it may not be read, or it is "max"
                continue
            if quota > 0:
                yield quota / period


def threads_here(given: int | None) -> int | None:
    """As given; else None, a library's own choice, or as many as `usable_cores` where those are not all.

    ONNX Runtime itself takes one for each core of the machine, and binds it there; OpenVINO too where time is limited.
    """
    cores = usable_cores()
    return given or (cores if cores < (os.cpu_count() or 1) else None)


def _processor() -> str:
    # platform.processor() is empty on many Linux distributions, or says x86_64.
    return _of_first_core(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The version of a package that is installed here, read without importing it; None for another."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def installed_versions() -> dict[str, str]:
    """The versions of the packages that a result depends on, as far as they are installed."""
    return {package: version for package in PACKAGES if (version := installed_version(package)) is not None}


def require_onnxruntime() -> None:
    """Raise EnvironmentMissing where onnxruntime was uninstalled beside onnxruntime-gpu: it takes the other's files."""
    spec = find_spec("onnxruntime")
    if spec is not None and spec.origin is None:  # folders are left
        name = "onnxruntime-gpu" if "onnxruntime-gpu" in installed_versions() else "onnxruntime"
        raise EnvironmentMissing(f"files of the package onnxruntime are missing: {AGAIN} {name}")


def require_socket_folder(name_length: int) -> None:
    """Raise EnvironmentMissing where a socket in the temporary folder, with a name so long, would have too long a path.

    Who makes one there fails, or waits without end for what was to connect to it.
    """
    folder, most = tempfile.gettempdir(), _LONGEST_SOCKET_PATH - name_length
    if len(os.fsencode(folder)) > most:
        raise EnvironmentMissing(f"TMPDIR '{folder}' is too long for sockets: set it to a path of at most {most} bytes")
