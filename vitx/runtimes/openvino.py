"""OpenVINO on the CPU: the bundle's IR, or for further outputs its graph, which the IR cannot be joined to."""

from collections.abc import Sequence
from importlib.metadata import version
from io import BytesIO
from queue import Empty, LifoQueue
from typing import Any

from vitx.core.bundle import MODEL, Bundle, output_file, output_tensor
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.machine import openvino_core, threads_here
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import LOGITS, Float32Array, Session, check_images, image_shape

IR = "openvino/model.xml"
_WEIGHTS = "openvino/model.bin"


class OpenVinoSession(Session):
    """A bundle's IR, compiled for the CPU; with `bf16` its products take bfloat16 and the rest what OpenVINO chooses.

    With `outputs` OpenVINO reads model.onnx and their parts while it loads, and the IR is not used: it has no place for
    them. Raises InputError when the bundle has no IR and no outputs were asked for, or OpenVINO cannot load it;
    EnvironmentMissing for `bf16` where the processor has none.
    """

    artefacts: tuple[str, ...] = (IR, _WEIGHTS)

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, bf16: bool = False, outputs: Sequence[str] = ()
    ) -> None:
        super().__init__()
        bundle.require_outputs(outputs)
        if not outputs and IR not in bundle.manifest.files:
            raise InputError(
                f"'{bundle.path}' has no OpenVINO IR: export it again with --openvino, or choose onnxruntime-cpu"
            )
        core = openvino_core()
        # By default OpenVINO multiplies in bf16 where the CPU can; a bundle's precision is that of its graph.
        hint = "bf16" if bf16 else "f32"
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        # A mapped file that is then written to gives other weights than were verified; one that is cut, SIGBUS.
        options["ENABLE_MMAP"] = False
        if (threads := threads_here(threads)) is not None:
            # Pinned, each session of n threads takes the first n cores, and two of them share those.
            options |= {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
        self.outputs = tuple(outputs)
        if outputs:
            self.artefacts = (MODEL, *map(output_file, outputs))
        path = bundle.path / (MODEL if outputs else IR)
        try:
            read = core.read_model(BytesIO(bundle.graph_bytes(outputs))) if outputs else str(path)
            self._model = core.compile_model(read, "CPU", options)
        except RuntimeError as error:
            what = f"{path} with {', '.join(outputs)}" if outputs else path
            raise InputError(f"OpenVINO cannot load {what}: {error}") from None
        if bf16 and (taken := self._model.get_property("INFERENCE_PRECISION_HINT").get_type_name()) != "bf16":
            raise EnvironmentMissing(
                f"this processor has no bfloat16 products, OpenVINO would take {taken}: choose the runtime openvino"
            )
        given = [name for port in self._model.outputs for name in port.get_names()]
        for name in (bundle.manifest.output.name, *map(output_tensor, outputs)):
            if name not in given:
                raise InputError(f"the manifest names the output '{name}', but the graph has {', '.join(given)}")
        self._version = version("openvino")
        self._runtime = "openvino-bf16" if bf16 else "openvino"
        self._precision = "bf16" if bf16 else bundle.manifest.precision
        self._manifest = bundle.manifest
        self._shape = image_shape(bundle)
        self._threads = threads
        # A request runs one batch at a time. Each thread that infers takes an idle request, or makes another.
        self._idle: LifoQueue[Any] = LifoQueue()

    def _infer(self, images: UInt8Array) -> Float32Array:
        (logits,) = self._run([self._manifest.output.name], images)
        return logits

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        names = [self._manifest.output.name, *map(output_tensor, self.outputs)]
        return dict(zip((LOGITS, *self.outputs), self._run(names, images), strict=True))

    def _run(self, names: list[str], images: UInt8Array) -> list[Float32Array]:
        check_images(images, self._shape)
        try:
            request = self._idle.get_nowait()
        except Empty:
            request = self._model.create_infer_request()
        try:
            found = request.infer({self._manifest.input.name: images})
        except RuntimeError as error:
            what = "graph" if self.outputs else "IR"
            raise CheckFailed(
                f"the {what} of '{self._manifest.name}' fails on a batch of {len(images)}: {error}"
            ) from None
        self._idle.put(request)
        return [found[name] for name in names]

    def _close(self) -> None:
        del self._idle, self._model  # requests hold the model

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": self._runtime,
            "version": self._version,
            "provider": "CPU",
            "precision": self._precision,
            "threads": self._threads or "all cores",
            **({"outputs": list(self.outputs)} if self.outputs else {}),
        }
