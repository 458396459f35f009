"""ONNX Runtime: the default runtime of a bundle, on the CPU or an NVIDIA GPU."""

from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.preprocess import UInt8Array
from vitx.serve.runtimes import Device, Float32Array
from vitx.serve.runtimes.cuda import cuda_device_count

# An fp32 bundle means fp32: on its own ONNX Runtime multiplies in TF32, which keeps 10 bits of 23.
_PROVIDERS: dict[str, tuple[str, dict[str, str]]] = {
    "cpu": ("CPUExecutionProvider", {}),
    "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"}),
}
# All derive from Exception alone; each is a verdict on the graph, whatever its name.
_LOAD_ERRORS = (
    native.Fail,
    native.InvalidArgument,
    native.InvalidGraph,
    native.InvalidProtobuf,
    native.NoSuchFile,
    native.NotImplemented,
    native.RuntimeException,
)
_RUN_ERRORS = (native.Fail, native.InvalidArgument, native.NotImplemented, native.RuntimeException)


class OnnxRuntimeSession:
    """A bundle's graph in ONNX Runtime. A GPU that was asked for and is not used is an error, never a fallback."""

    def __init__(self, bundle: Bundle, *, device: Device = "auto", threads: int | None = None) -> None:
        chosen = _choose_device(device)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        if bundle.manifest.precision == "fp8":
            # Its Q/DQ rewrites know no 8-bit floats and refuse the graph (microsoft/onnxruntime issue 22269).
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if chosen == "cuda" and hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        providers = [_PROVIDERS[chosen]] + ([_PROVIDERS["cpu"]] if chosen == "cuda" else [])
        try:
            self._session = onnxruntime.InferenceSession(str(bundle.model_path), options, providers=providers)
        except _LOAD_ERRORS as error:
            raise InputError(f"ONNX Runtime cannot load {bundle.model_path}: {error}") from None
        self.provider: str = self._session.get_providers()[0]
        if self.provider != providers[0][0]:
            raise EnvironmentMissing(
                f"ONNX Runtime would use {self.provider} instead of {providers[0][0]}: install the CUDA and cuDNN "
                "libraries of this onnxruntime-gpu (pip install 'onnxruntime-gpu[cuda,cudnn]'), or choose --device cpu"
            )
        self._manifest = bundle.manifest
        self._threads = threads
        self._shape = tuple(bundle.manifest.input.shape[1:])
        self._check_names()

    def _check_names(self) -> None:
        """The manifest's tensors are the graph's."""
        for kind, name, found in (
            ("input", self._manifest.input.name, [tensor.name for tensor in self._session.get_inputs()]),
            ("output", self._manifest.output.name, [tensor.name for tensor in self._session.get_outputs()]),
        ):
            if name not in found:
                raise InputError(f"the manifest names the {kind} '{name}', but the graph has {', '.join(found)}")

    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3).

        Raises InputError for another shape or dtype, CheckFailed when the graph refuses this batch.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != self._shape:
            expected = ", ".join(map(str, ("N", *self._shape)))
            raise InputError(f"images are {images.dtype} {images.shape}: expected uint8 ({expected})")
        try:
            (logits,) = self._session.run([self._manifest.output.name], {self._manifest.input.name: images})
        except _RUN_ERRORS as error:
            raise CheckFailed(
                f"the graph of '{self._manifest.name}' fails on a batch of {len(images)}: {error}"
            ) from None
        result: Float32Array = logits
        return result

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": "onnxruntime",
            "version": onnxruntime.__version__,
            "provider": self.provider,
            "precision": self._manifest.precision,
            "threads": self._threads or "all cores",
        }


def _choose_device(device: Device) -> str:
    if device == "auto":
        usable = "CUDAExecutionProvider" in onnxruntime.get_available_providers() and cuda_device_count() > 0
        return "cuda" if usable else "cpu"
    if device == "cuda" and cuda_device_count() == 0:
        raise EnvironmentMissing("device cuda was asked for, but the NVIDIA driver offers no GPU; choose --device cpu")
    return device
