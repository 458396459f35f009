"""ONNX Runtime, the default runtime of a bundle: on the CPU, or on an NVIDIA GPU through CUDA or TensorRT."""

import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from vitx.core.bundle import INT8_MODEL, MODEL, Bundle, Manifest, output_file, output_tensor
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, first_line
from vitx.core.machine import local_gpus, set_quantization, threads_here
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import Profile
from vitx.runtimes.plan_choice import split_batch
from vitx.runtimes.session import LOGITS, Device, Float32Array, Session, check_images, image_shape

Provider = tuple[str, dict[str, str]]
_CPU: Provider = ("CPUExecutionProvider", {})
# An fp32 bundle means fp32: by default ONNX Runtime multiplies in TF32, which keeps 10 of float32's 23 mantissa bits.
_CUDA: Provider = ("CUDAExecutionProvider", {"use_tf32": "0"})
# The batch sizes TensorRT compiles for. At any other it would compile again, which takes minutes.
TENSORRT_BATCHES = Profile(minimum=1, optimum=32, maximum=128)
_TENSORRT_PRECISION = {"fp32": (), "fp16": ("fp16",), "bf16": ("bf16",), "int8": ("int8",)}
# The operators that must run on the GPU; the arithmetic of shapes may stay on the CPU.
_COMPUTE = {"Attention", "Conv", "Gemm", "LayerNormalization", "MatMul", "MultiHeadAttention", "Softmax"}
# ONNX Runtime's errors have no base class but Exception. Each of these means that it rejects the graph.
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


def rewrites_break(manifest: Manifest) -> bool:
    """Whether ONNX Runtime's rewrites of Q/DQ pairs do not fit this graph.

    They do not know 8-bit floats and reject the graph (microsoft/onnxruntime#22269), and with float16 scales of uint8
    they compute something else (docs/precision.md).
    """
    return manifest.precision == "fp8" or manifest.base != "fp32"


class OnnxRuntimeSession(Session):
    """A bundle's graph in ONNX Runtime. A GPU that was asked for and is not used is an error, never a fallback.

    graph: another ONNX file with the same input and output to run in place of the bundle's; `describe` names it.
    int8: run the int8 graph that the bundle has beside its own, another executable.
    outputs: what it gives beside logits. parts: their parts of the graph, where the bundle has no files of them.
    tensorrt: let TensorRT compile the graph, for a GPU, into the folder `engine_cache` or a temporary one that `close`
    removes. Not run on a GPU yet.
    """

    concurrent = True

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: Device = "auto",
        threads: int | None = None,
        graph: Path | None = None,
        int8: bool = False,
        outputs: Sequence[str] = (),
        parts: Sequence[bytes] = (),
        tensorrt: bool = False,
        engine_cache: Path | None = None,
    ) -> None:
        super().__init__()
        self._manifest = bundle.manifest
        self._shape = image_shape(bundle)
        self._threads = threads_here(threads)
        if int8:
            if INT8_MODEL not in bundle.manifest.files:
                raise InputError(
                    f"'{bundle.path}' has no {INT8_MODEL}: export it again with --for cpu, which says why where it "
                    "makes none, or choose onnxruntime-cpu"
                )
            graph, self.artefacts = bundle.path / INT8_MODEL, (INT8_MODEL,)
        self._runtime, self._precision = (
            ("onnxruntime-int8", "int8") if int8 else ("onnxruntime", self._manifest.precision)
        )
        self._graph = graph
        chosen = _choose_device("cuda" if tensorrt else device)
        providers = [_CUDA, _CPU] if chosen == "cuda" else [_CPU]
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if tensorrt:
            if engine_cache is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="vitx-engines-")
                engine_cache = Path(self._temporary.name)
            providers.insert(0, self._tensorrt_provider(engine_cache))
        self.profiles = (TENSORRT_BATCHES,) if tensorrt else ()
        self.outputs = tuple(outputs)
        content: Path | bytes = graph or bundle.model_path
        if parts:
            content = b"".join((bundle.graph_bytes(), *parts))
        elif outputs:
            content = bundle.graph_bytes(outputs)
            self.artefacts = (MODEL, *map(output_file, outputs))
        self._session = self._load(content, providers)
        self.provider: str = self._session.get_providers()[0]
        self._check_provider(providers[0][0])
        self._check_names()

    def _load(self, graph: Path | bytes, providers: list[Provider]) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        disabled = set_quantization(options, fused=not rewrites_break(self._manifest), on_cpu=providers[0] == _CPU)
        if providers[0] != _CPU:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            _preload_libraries(tensorrt=self.profiles != ())
        try:
            # With fallback enabled, ONNX Runtime would drop a failing provider and only print a note.
            content = graph if isinstance(graph, bytes) else str(graph)
            return onnxruntime.InferenceSession(
                content, options, providers=providers, enable_fallback=0, disabled_optimizers=disabled
            )
        except _LOAD_ERRORS as error:
            if providers[0] == _CPU and "bf16" in (self._manifest.precision, self._manifest.base):
                raise EnvironmentMissing(
                    f"'{self._manifest.name}' is a bf16 bundle, and ONNX Runtime has no bf16 kernels for a CPU "
                    f"({first_line(error)}): run the fp32 or fp16 bundle on this machine, this one with the "
                    "runtime openvino (`vitx export --openvino`), or on an NVIDIA GPU"
                ) from None
            what = f"{MODEL} with {', '.join(self.outputs)}" if isinstance(graph, bytes) else graph
            raise InputError(f"ONNX Runtime cannot load {what}: {error}") from None
        except (RuntimeError, ValueError) as error:  # a provider's libraries are missing
            raise EnvironmentMissing(f"ONNX Runtime cannot use {providers[0][0]}: {first_line(error)}") from None

    def _tensorrt_provider(self, engine_cache: Path) -> Provider:
        precision = self._manifest.precision
        if precision not in _TENSORRT_PRECISION:
            raise InputError(
                f"ONNX Runtime's TensorRT provider takes no {precision} graph: run its plan with the runtime tensorrt"
            )
        engine_cache.mkdir(parents=True, exist_ok=True)
        if precision == "fp32":
            os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # the provider has no option for it
        return tensorrt_options(self._manifest.input.name, self._shape, precision, engine_cache, self._manifest.base)

    def _check_provider(self, wanted: str) -> None:
        """Raise EnvironmentMissing unless the provider that was asked for computes the whole graph."""
        if self.provider != wanted:
            remedy = (
                "install the TensorRT 10 libraries (pip install 'vitx[trt10]'), or choose onnxruntime-cuda"
                if wanted == "TensorrtExecutionProvider"
                else "install the CUDA and cuDNN libraries of this onnxruntime-gpu (pip install "
                "'onnxruntime-gpu[cuda,cudnn]'), or choose --device cpu"
            )
            raise EnvironmentMissing(f"ONNX Runtime would use {self.provider} instead of {wanted}: {remedy}")
        fallen = () if wanted == _CPU[0] else compute_elsewhere(self._session, wanted)
        if fallen:
            raise EnvironmentMissing(
                f"{wanted} does not compute all of the graph of '{self._manifest.name}', {', '.join(fallen)} would run "
                "elsewhere: choose another runtime"
            )

    def _check_names(self) -> None:
        """Raise InputError unless the graph has the manifest's input, no other, and the outputs."""
        inputs = [tensor.name for tensor in self._session.get_inputs()]
        outputs = [tensor.name for tensor in self._session.get_outputs()]
        for kind, name, found in (
            ("input", self._manifest.input.name, inputs),
            *(("output", name, outputs) for name in (self._manifest.output.name, *map(output_tensor, self.outputs))),
        ):
            if name not in found:
                raise InputError(f"the manifest names the {kind} '{name}', but the graph has {', '.join(found)}")
        if len(inputs) > 1:
            expected = self._manifest.input.name
            raise InputError(f"the graph has the inputs {', '.join(inputs)}: expected {expected} alone")

    def _infer(self, images: UInt8Array) -> Float32Array:
        (logits,) = self._chunks([self._manifest.output.name], images)
        return logits

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        names = [self._manifest.output.name, *map(output_tensor, self.outputs)]
        return dict(zip((LOGITS, *self.outputs), self._chunks(names, images), strict=True))

    def _chunks(self, names: list[str], images: UInt8Array) -> list[Float32Array]:
        """The named outputs; TensorRT takes a large batch in parts."""
        check_images(images, self._shape)
        if self.profiles and len(images) > TENSORRT_BATCHES.maximum:
            chunks = split_batch(len(images), self.profiles)
            parts = [self._run(names, images[chunk.start : chunk.stop]) for chunk in chunks]
            return [np.concatenate(values) for values in zip(*parts, strict=True)]
        return self._run(names, images)

    def _run(self, names: list[str], images: UInt8Array) -> list[Float32Array]:
        try:
            found: list[Float32Array] = self._session.run(names, {self._manifest.input.name: images})
        except _RUN_ERRORS as error:
            raise CheckFailed(
                f"the graph of '{self._manifest.name}' fails on a batch of {len(images)}: {error}"
            ) from None
        return found

    def _close(self) -> None:
        del self._session
        if self._temporary is not None:
            self._temporary.cleanup()

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": self._runtime,
            "version": onnxruntime.__version__,
            "provider": self.provider,
            "precision": self._precision,
            "threads": self._threads or "all cores",
            **({"graph": self._graph.name} if self._graph else {}),
            **({"outputs": list(self.outputs)} if self.outputs else {}),
            **({"profiles": [str(profile) for profile in self.profiles]} if self.profiles else {}),
        }


def tensorrt_options(
    name: str, image: tuple[int, ...], precision: str, engine_cache: Path, base: str = "fp32"
) -> Provider:
    """TensorRT's execution provider with its options, for a graph with the input `name` of images of shape `image`."""
    batches = {"min": TENSORRT_BATCHES.minimum, "opt": TENSORRT_BATCHES.optimum, "max": TENSORRT_BATCHES.maximum}
    shape = "x".join(map(str, image))
    return (
        "TensorrtExecutionProvider",
        {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(engine_cache),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(engine_cache),
            **{f"trt_profile_{kind}_shapes": f"{name}:{batch}x{shape}" for kind, batch in batches.items()},
            **{f"trt_{kind}_enable": "1" for kind in (*_TENSORRT_PRECISION[precision], *_TENSORRT_PRECISION[base])},
        },
    )


def compute_elsewhere(session: onnxruntime.InferenceSession, provider: str) -> tuple[str, ...]:
    """The types of the compute nodes that a session assigned to other providers than `provider`, sorted."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # ONNX Runtime before 1.24
        return ()
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != provider]
    return tuple(sorted({node.op_type for part in parts for node in part.get_nodes()} & _COMPUTE))


def _preload_libraries(*, tensorrt: bool) -> None:
    """Load the CUDA and TensorRT libraries that pip installed: the system's loader does not look among its packages."""
    onnxruntime.preload_dlls()
    if tensorrt:
        try:
            importlib.import_module("tensorrt")
        except (ImportError, OSError):
            return  # the system's loader may still find TensorRT


def _choose_device(device: Device) -> str:
    if device == "auto":
        usable = "CUDAExecutionProvider" in onnxruntime.get_available_providers() and local_gpus()
        return "cuda" if usable else "cpu"
    if device == "cuda" and not local_gpus():
        raise EnvironmentMissing("device cuda was asked for, but the NVIDIA driver offers no GPU; choose --device cpu")
    return device
