"""TensorRT plans: the classic TensorRT 10 and 11, its lean runtime, and TensorRT for RTX.

The calls are checked against the typing stubs of each (typings/README.md). Not run on a GPU yet.
"""

import importlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.files import sha256_bytes
from vitx.core.machine import local_gpus
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import EXTRAS, Flavor, library_for
from vitx.runtimes.cuda import CudaStream, MirroredArray
from vitx.runtimes.plan_choice import Chunk, find_plan, largest_batch, split_batch
from vitx.runtimes.session import Float32Array, Session, check_images, image_shape

if TYPE_CHECKING:
    import tensorrt as trt


class TensorRTSession(Session):
    """A bundle's plan on the first GPU: an execution context for each profile, one stream, one batch at a time.

    A batch larger than the largest profile is run in parts. Raises EnvironmentMissing without a GPU, a TensorRT that
    loads the plan, or memory for it; what `find_plan` raises; CheckFailed for a plan that is not as its sidecar says.
    `infer` raises CudaError when the GPU fails.
    """

    def __init__(self, bundle: Bundle, flavor: Flavor) -> None:
        super().__init__()
        # First, because without a driver creating TensorRT's runtime may crash the process.
        gpus = local_gpus()
        if not gpus:
            raise EnvironmentMissing(
                f"a plan of {flavor} runs on an NVIDIA GPU, and the driver offers none here: choose onnxruntime-cpu"
            )
        self._gpu = gpus[0]
        self._plan, self._info = find_plan(bundle, flavor, self._gpu.architecture)
        self.artefacts = (self._plan.relative_to(bundle.path).as_posix(),)
        self._library = library_for(self._info)
        module = import_tensorrt(self._library.module, flavor)
        if TYPE_CHECKING:
            self.trt = trt
        else:
            self.trt = module
        self._manifest = bundle.manifest
        self._shape = image_shape(bundle)
        self._classes = len(bundle.manifest.labels)
        self._errors: deque[str] = deque(maxlen=4)
        self._batch_lock = threading.Lock()
        self._stream = CudaStream()
        self._logger = self._make_logger()
        self._engine = self._open()
        self._check_engine()
        self.profiles = self._info.profiles
        rows = largest_batch(self.profiles)
        self._images = MirroredArray(self._stream, (rows, *self._shape), np.uint8)
        self._logits = MirroredArray(self._stream, (rows, self._classes), np.float32)
        self._contexts = [self._context(index) for index in range(len(self._info.profiles))]

    def _infer(self, images: UInt8Array) -> Float32Array:
        check_images(images, self._shape)
        logits = np.empty((len(images), self._classes), dtype=np.float32)
        with self._batch_lock:
            for chunk in split_batch(len(images), self._info.profiles):
                logits[chunk.start : chunk.stop] = self._run(images[chunk.start : chunk.stop], chunk)
        return logits

    def _run(self, images: UInt8Array, chunk: Chunk) -> Float32Array:
        """Logits of one chunk. Black images fill it up to the profile's minimum; their logits are dropped."""
        count, context = len(images), self._contexts[chunk.profile]
        self._images.host[:count] = images
        self._images.host[count : chunk.rows] = 0
        self._images.upload(chunk.rows)
        if not context.set_input_shape(self._manifest.input.name, (chunk.rows, *self._shape)) or (
            not context.execute_async_v3(self._stream.handle)
        ):
            self._stream.synchronize()
            raise CheckFailed(f"the plan of '{self._manifest.name}' fails on a batch of {chunk.rows}: {self._reason()}")
        self._logits.download(chunk.rows)
        self._stream.synchronize()
        logits: Float32Array = self._logits.host[:count]
        return logits

    def _close(self) -> None:
        # In this order: a context needs its engine, an engine its runtime. The stream's end frees the buffers.
        del self._contexts, self._engine, self._runtime, self._images, self._logits, self._stream

    def describe(self) -> dict[str, Any]:
        """`library` is the module, which is `tensorrt_lean` for the lean runtime; `provider` is the GPU."""
        return {
            "runtime": self._info.flavor,
            "version": self._library.version,
            "provider": str(self._gpu),
            "precision": self._manifest.precision,
            "threads": "GPU",
            "library": self._library.module,
            "plan": self._plan.name,
            "profiles": [str(profile) for profile in self._info.profiles],
        }

    def _open(self) -> "trt.ICudaEngine":
        runtime = self.trt.Runtime(self._logger)
        plan = self._plan.read_bytes()
        # A version-compatible plan contains the lean runtime, which is code: what was verified is what is run.
        if sha256_bytes(plan) != self._manifest.files[self.artefacts[0]].sha256:
            raise CheckFailed(f"'{self._plan}' was changed while it was loaded: load it again")
        runtime.engine_host_code_allowed = self._info.options.version_compatible
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise CheckFailed(f"{self._name()} could not open '{self._plan}': {self._reason()}")
        self._runtime = runtime  # an engine needs its runtime
        return engine

    def _check_engine(self) -> None:
        """Raise CheckFailed unless the engine has the manifest's tensors and the sidecar's profiles."""
        engine, types = self._engine, self.trt.DataType
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        expected = {self._manifest.input.name: types.UINT8, self._manifest.output.name: types.FLOAT}
        found = {name: engine.get_tensor_dtype(name) for name in names}
        if found != expected:
            raise CheckFailed(f"'{self._plan}' has the tensors {_typed(found)}, and the manifest {_typed(expected)}")
        if engine.num_optimization_profiles != len(self._info.profiles):
            raise CheckFailed(
                f"'{self._plan}' has {engine.num_optimization_profiles} profiles, and its sidecar names "
                f"{len(self._info.profiles)}: export it again"
            )
        for index, profile in enumerate(self._info.profiles):
            shapes = engine.get_tensor_profile_shape(self._manifest.input.name, index)
            batches = tuple(shape[0] for shape in shapes)
            if batches != (profile.minimum, profile.optimum, profile.maximum):
                raise CheckFailed(f"profile {index} of '{self._plan}' is {batches}, and its sidecar says {profile}")
            if (size := _sizes(shapes[0])[1:]) != self._shape:
                raise CheckFailed(f"'{self._plan}' takes images {size}, and those of the manifest are {self._shape}")

    def _context(self, profile: int) -> "trt.IExecutionContext":
        """An execution context of one profile, with memory for that profile alone, bound to the buffers."""
        context = self._engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
        if context is None:
            raise EnvironmentMissing(f"{self._name()} could not make a context for '{self._plan}': {self._reason()}")
        taken = context.set_optimization_profile_async(profile, self._stream.handle)
        taken = taken and context.set_tensor_address(self._manifest.input.name, self._images.device)
        taken = taken and context.set_tensor_address(self._manifest.output.name, self._logits.device)
        rows = self._info.profiles[profile].maximum
        taken = taken and context.set_input_shape(self._manifest.input.name, (rows, *self._shape))
        self._stream.synchronize()
        if not taken:
            raise EnvironmentMissing(f"{self._name()} cannot use profile {profile} of '{self._plan}': {self._reason()}")
        # Of more classes it would write beyond the end of the buffer.
        if (given := _sizes(context.get_tensor_shape(self._manifest.output.name))) != (rows, self._classes):
            raise CheckFailed(f"'{self._plan}' gives {given} for {rows} images: expected ({rows}, {self._classes})")
        return context

    def _name(self) -> str:
        return f"{self._library.module} {self._library.version}"

    def _reason(self) -> str:
        """TensorRT's last errors, in one line."""
        return "; ".join(self._errors) or "it gave no reason"

    def _make_logger(self) -> "trt.ILogger":
        if TYPE_CHECKING:
            import tensorrt as trt
        else:
            trt = self.trt
        errors = self._errors

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: trt.ILogger.Severity, message: str) -> None:
                if severity.name in ("INTERNAL_ERROR", "ERROR"):
                    errors.append(message.strip())

        return Logger()


def import_tensorrt(module: str, flavor: Flavor) -> Any:
    """Import an installed TensorRT; raise EnvironmentMissing when the libraries it links to are missing."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library it links to is missing
        raise EnvironmentMissing(
            f"{module} cannot be imported ({error}): pip install 'vitx[{EXTRAS[flavor]}]'"
        ) from None


def _sizes(dims: "trt.Dims") -> tuple[int, ...]:
    return tuple(dims[index] for index in range(len(dims)))


def _typed(tensors: "dict[str, trt.DataType]") -> str:
    return ", ".join(f"{name} {kind.name}" for name, kind in sorted(tensors.items()))
