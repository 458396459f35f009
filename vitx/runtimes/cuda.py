"""A stream of CUDA's first GPU, and arrays that are copied between host and GPU on it.

Memory and streams go through NVIDIA's own bindings, `cuda.bindings`. Not run yet: no GPU was here.
"""

import ctypes
import importlib
import math
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.errors import EnvironmentMissing


class CudaError(EnvironmentMissing):
    """A call into CUDA failed; the message names the function and the error, and quotes CUDA's description."""


class CudaStream:
    """A stream of the first GPU. Raises CudaError where there is none, EnvironmentMissing without the bindings."""

    def __init__(self) -> None:
        self._cuda = _bindings()
        self._stream = self.call("cudaStreamCreate")
        self.handle = int(self._stream)
        weakref.finalize(self, self._cuda.cudaStreamDestroy, self._stream)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of CUDA's runtime API; return its result, or raise CudaError for its error code."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            _, description = self._cuda.cudaGetErrorString(error)
            raise CudaError(f"{name} failed: {error.name} ({description.decode()})")
        return values[0] if values else None

    def synchronize(self) -> None:
        """Wait for all queued work; raise CudaError if any of it failed."""
        self.call("cudaStreamSynchronize", self._stream)

    def allocate(self, size: int) -> tuple[int, int]:
        """Return the addresses of `size` bytes of pinned host memory and of `size` bytes on the GPU.

        Both are freed with the stream.
        """
        host = self.call("cudaHostAlloc", size, self._cuda.cudaHostAllocDefault)
        weakref.finalize(self, self._cuda.cudaFreeHost, host)
        device = self.call("cudaMalloc", size)
        weakref.finalize(self, self._cuda.cudaFree, device)
        return int(host), int(device)

    def copy(self, target: int, source: int, size: int, *, to_gpu: bool) -> None:
        """Queue a copy of `size` bytes between pinned host memory and the GPU."""
        kinds = self._cuda.cudaMemcpyKind
        kind = kinds.cudaMemcpyHostToDevice if to_gpu else kinds.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target, source, size, kind, self._stream)


class MirroredArray:
    """An array in pinned host memory, `host`, and memory of the same size on the GPU, at the address `device`."""

    def __init__(self, stream: CudaStream, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._stream = stream
        size = array_bytes(shape, dtype)
        self._address, self.device = stream.allocate(size)
        memory = (ctypes.c_uint8 * size).from_address(self._address)
        self.host: npt.NDArray[Any] = np.frombuffer(memoryview(memory), dtype).reshape(shape)
        self._row = size // shape[0]

    def upload(self, rows: int) -> None:
        """Queue the copy of the first rows to the GPU."""
        self._stream.copy(self.device, self._address, rows * self._row, to_gpu=True)

    def download(self, rows: int) -> None:
        """Queue the copy of the first rows from the GPU; they are in `host` after `CudaStream.synchronize`."""
        self._stream.copy(self._address, self.device, rows * self._row, to_gpu=False)


def array_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    """Bytes of a contiguous array, as a Python int: numpy's own integers could overflow."""
    return math.prod((np.dtype(dtype).itemsize, *shape))


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EnvironmentMissing(
            f"TensorRT plans need NVIDIA's CUDA bindings, which cannot be imported ({error}): pip install "
            "'cuda-bindings'"
        ) from None
