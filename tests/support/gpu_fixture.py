"""TensorRT plans in a bundle, a stub of the GPU's driver, and CUDA and TensorRT over this machine's memory."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession
from vitx.core.bundle import MANIFEST, Bundle, FileEntry
from vitx.core.files import sha256_bytes, sha256_file, write_bytes, write_json
from vitx.core.tensorrt_plan import ENGINES_FOLDER, Flavor, PlanInfo, PlanOptions, Profile, sidecar_path
from vitx.runtimes.cuda import array_bytes

PLAN = b"plan"
OPTIONS = PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False)
PROFILES = tuple(Profile(minimum=low, optimum=high, maximum=high) for low, high in ((1, 1), (2, 8), (9, 32)))
# Reports two GPUs of architecture sm90, by the functions of the driver that vitx calls. Attributes 75 and 76 are the
# major and minor compute capability.
DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


def plan_info(**changes: object) -> PlanInfo:
    fields: dict[str, object] = {
        "flavor": "tensorrt",
        "version": "10.16.1.11",
        "architectures": ("sm89",),
        "profiles": PROFILES,
        "precision": "fp32",
        "options": OPTIONS,
        "onnx_sha256": "0" * 64,
        "sha256": sha256_bytes(PLAN),
        "size": len(PLAN),
        "build_seconds": 1.0,
        "layers": 1,
        "created": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    return PlanInfo.model_validate(fields)


def write_plan_files(path: Path, info: PlanInfo) -> Path:
    write_bytes(path, PLAN)
    write_json(sidecar_path(path), info)
    return path


def add_plan(bundle: Bundle, flavor: Flavor, *, name: str = "", **changes: object) -> Bundle:
    """Add a plan of the bundle's graph and list it in the manifest; the certificate then no longer covers all files."""
    graph = bundle.manifest.files["model.onnx"].sha256
    info = plan_info(**{"flavor": flavor, "onnx_sha256": graph, **changes})
    plan = write_plan_files(bundle.path / ENGINES_FOLDER / f"{name or flavor}.plan", info)
    added = {
        path.relative_to(bundle.path).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
        for path in (plan, sidecar_path(plan))
    }
    manifest = bundle.manifest.model_copy(update={"files": {**bundle.manifest.files, **added}})
    write_json(bundle.path / MANIFEST, manifest)
    return Bundle.open(bundle.path)


def build_driver(folder: Path) -> dict[str, str]:
    """Compile the fake driver; return the environment of a process that finds it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the fake driver is compiled, and found, on Linux")
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


class HostMemoryCuda:
    """The names of `cuda.bindings.runtime` that are used, over this machine's own memory; copies happen on a sync.

    failing: the function that answers with an error.
    """

    cudaHostAllocDefault = 0
    cudaError_t = SimpleNamespace(cudaSuccess="success")
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down")

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.on_gpu: set[int] = set()
        self.queue: list[Any] = []
        self.streams: list[int] = []
        self.failing = ""

    def _allocate(self, size: int, name: str) -> tuple[Any, ...]:
        if name == self.failing:
            return (SimpleNamespace(name="cudaErrorMemoryAllocation"),)
        memory = (ctypes.c_uint8 * size)()
        self.memory[ctypes.addressof(memory)] = memory
        return "success", ctypes.addressof(memory)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaHostAllocDefault
        return self._allocate(size, "cudaHostAlloc")

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        error, *address = self._allocate(size, "cudaMalloc")
        self.on_gpu.update(address)
        return error, *address

    def cudaGetErrorString(self, error: Any) -> tuple[str, bytes]:
        return "success", b"out of memory"

    def cudaFreeHost(self, address: int) -> tuple[str]:
        assert address not in self.on_gpu
        del self.memory[address]
        return ("success",)

    def cudaFree(self, address: int) -> tuple[str]:
        self.on_gpu.remove(address)
        del self.memory[address]
        return ("success",)

    def cudaStreamCreate(self) -> tuple[str, int]:
        self.streams.append(7)
        return "success", 7

    def cudaStreamDestroy(self, stream: int) -> tuple[str]:
        self.streams.remove(stream)
        return ("success",)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: str, stream: int) -> tuple[str]:
        assert (target in self.on_gpu, source in self.on_gpu, stream) == (kind == "up", kind == "down", 7)
        self.queue.append(lambda: ctypes.memmove(target, source, size))
        return ("success",)

    def cudaStreamSynchronize(self, stream: int) -> tuple[str]:
        while self.queue:
            self.queue.pop(0)()
        return ("success",)


class Context:
    """An execution context that computes the bundles' function, once its work is waited for."""

    def __init__(self, fake: "FakeTensorRT") -> None:
        self.fake = fake
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return self.fake.refuses != "profile"

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return self.fake.refuses != name

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "images"
        self.shape, profile = shape, self.fake.profiles[self.profile]
        return self.fake.refuses != "shape" and profile.minimum <= shape[0] <= profile.maximum

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert name == "logits"
        return (self.shape[0], self.fake.classes)

    def execute_async_v3(self, stream: int) -> bool:
        shape = self.shape
        self.fake.ran.append((self.profile, shape[0]))
        self.fake.cuda.queue.append(lambda: self._compute(shape))
        return self.fake.refuses != "execute"

    def _compute(self, shape: tuple[int, ...]) -> None:
        size = array_bytes(shape, np.uint8)
        images = np.frombuffer(ctypes.string_at(self.addresses["images"], size), np.uint8).reshape(shape)
        self.fake.seen = images
        logits = NumpySession().infer(images).tobytes()
        ctypes.memmove(self.addresses["logits"], logits, len(logits))


class FakeTensorRT:
    """The names of TensorRT that a session uses; its one engine has PROFILES.

    refuses: what it answers False or None for, with its errors in the log. seen: the last batch.
    """

    DataType = SimpleNamespace(UINT8=SimpleNamespace(name="UINT8"), FLOAT=SimpleNamespace(name="FLOAT"))
    ExecutionContextAllocationStrategy = SimpleNamespace(ON_PROFILE_CHANGE="on profile change")

    class ILogger:
        Severity = SimpleNamespace(**{name: SimpleNamespace(name=name) for name in ("INTERNAL_ERROR", "ERROR", "INFO")})

    def __init__(self, cuda: HostMemoryCuda) -> None:
        self.cuda = cuda
        self.ran: list[tuple[int, int]] = []
        self.seen: Any = None
        self.profiles = PROFILES
        self.output = self.DataType.FLOAT
        self.classes, self.size = len(LABELS), IMAGE_SIZE
        self.refuses = ""
        self.errors: tuple[tuple[str, str], ...] = ()
        kinds = {"images": lambda: self.DataType.UINT8, "logits": lambda: self.output}
        self.engine = SimpleNamespace(
            num_io_tensors=2,
            num_optimization_profiles=len(PROFILES),
            get_tensor_name=list(kinds).__getitem__,
            get_tensor_dtype=lambda name: kinds[name](),
            get_tensor_profile_shape=self._profile_shapes,
            create_execution_context=lambda strategy: None if self.refuses == "context" else Context(self),
        )

    def _profile_shapes(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert name == "images"
        profile = self.profiles[index]
        sizes = (profile.minimum, profile.optimum, profile.maximum)
        return [(size, self.size, self.size, 3) for size in sizes]

    def Runtime(self, logger: Any) -> Any:
        def deserialize(plan: bytes) -> Any:
            assert plan == b"plan"
            for severity, message in self.errors:
                logger.log(getattr(self.ILogger.Severity, severity), message)
            return None if self.refuses == "plan" else self.engine

        self.runtime = SimpleNamespace(engine_host_code_allowed=None, deserialize_cuda_engine=deserialize)
        return self.runtime
