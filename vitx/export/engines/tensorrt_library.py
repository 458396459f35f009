"""All calls into TensorRT: one library object for the classic TensorRT 10 and 11 and TensorRT for RTX.

Type-checked against the stubs of 10.16, 11.4 and RTX 1.7 (typings/README.md): a name that one of them lacks is behind a
`hasattr`. Flags are always named, never numbered: some have other numbers in 11 than in 10.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, unknown_name
from vitx.core.machine import local_architectures
from vitx.core.tensorrt_plan import EXTRAS, FLAVORS, MODULES, Flavor, PlanOptions, Profile
from vitx.export.engines.architectures import parse_architectures
from vitx.export.engines.build_log import BuildLog, BuildProgress
from vitx.export.engines.tensorrt_graph import precision_of

if TYPE_CHECKING:
    import tensorrt as trt

# 10.9 is the oldest release whose parser we rely on; RTX 1.4 is the first that pip installs with all its libraries.
_OLDEST: dict[Flavor, tuple[int, int]] = {"tensorrt": (10, 9), "tensorrt-rtx": (1, 4)}
# Releases that compute attention wrongly, according to the maintainers, their bug tracker or the release notes.
_REFUSED: tuple[tuple[Flavor, str, str], ...] = (
    ("tensorrt", "10.0.0", "its fused fp16 attention differs from PyTorch's (github.com/NVIDIA/TensorRT/issues/3777)"),
    ("tensorrt", "10.3", "transformers with a dynamic batch come out wrong (github.com/NVIDIA/TensorRT/issues/4419)"),
    ("tensorrt", "10.7", "scaled dot-product attention comes out wrong (github.com/NVIDIA/TensorRT/issues/4333)"),
)
# A layer: its name, kind, and the type and shape (N is the batch) of its first output.
LayerRow = tuple[str, str, str, str]


@dataclass(frozen=True)
class BuiltPlan:
    """A serialised engine, the timing cache after the build, and the parsed layers."""

    plan: bytes
    timing_cache: bytes | None
    layers: tuple[LayerRow, ...]


@dataclass(frozen=True)
class BuildJob:
    """Everything that the library needs for one build."""

    model: onnx.ModelProto
    profiles: tuple[Profile, ...]
    options: PlanOptions
    architectures: tuple[str, ...]
    timing_cache: bytes | None
    keep_timing_cache: bool
    log: BuildLog
    steps: BuildProgress


class Library:
    """One TensorRT library, imported.

    Every call is made in a method through `self.trt`, where mypy knows the module's names.
    """

    def __init__(self, flavor: Flavor, module: Any) -> None:
        self.flavor: Flavor = flavor
        self.version: str = module.__version__
        if TYPE_CHECKING:
            self.trt = trt
        else:
            self.trt = module

    def architectures(self) -> tuple[str, ...]:
        """The GPUs that this library can build for: all it knows (RTX), or this machine's (classic)."""
        if hasattr(self.trt, "ComputeCapability"):  # TensorRT for RTX alone
            members: dict[str, Any] = self.trt.ComputeCapability.__members__
            return tuple(name.lower() for name in members if name.startswith("SM"))
        return local_architectures()[:1]

    def targets(self, asked: Sequence[str]) -> tuple[str, ...]:
        """The architectures to compile for, by default all but sm75; raise for those that cannot be built for here."""
        known = self.architectures()
        if self.flavor == "tensorrt":
            if not known:
                raise EnvironmentMissing(
                    "TensorRT builds for the GPU of the machine it runs on, and the NVIDIA driver offers none here: "
                    "build on that machine, or with --trt-rtx, which needs no GPU"
                )
            if asked and tuple(asked) != known:
                raise InputError(
                    f"TensorRT builds for this machine's {known[0]} only, not for {', '.join(asked)}: "
                    "leave --arch out, or use --trt-rtx"
                )
            return known
        # Turing (sm75) makes the plan slower on newer GPUs, so it is compiled for on request only.
        return parse_architectures(asked, known) or parse_architectures([n for n in known if n != "sm75"], known)

    def build(self, job: BuildJob) -> BuiltPlan:
        """Parse, configure, build. Raises InputError for a graph it cannot parse, CheckFailed if the build fails."""
        logger = self._logger(job.log)
        builder = self.trt.Builder(logger)
        network = self._parse(builder, logger, job)
        config = self._configure(builder, network, job)
        monitor = self._monitor(job.steps)
        config.progress_monitor = monitor
        # Returns None after an error or when the monitor has cancelled; the reason is in the log.
        memory = builder.build_serialized_network(network, config)
        if job.steps.interrupted:
            raise KeyboardInterrupt
        if memory is None:
            raise CheckFailed(f"{self.flavor} {self.version} could not build the plan: {job.log.errors()}")
        kept = bytes(config.get_timing_cache().serialize()) if job.keep_timing_cache else None
        return BuiltPlan(bytes(memory), kept, self.layers(network))

    def _parse(self, builder: "trt.Builder", logger: "trt.ILogger", job: BuildJob) -> "trt.INetworkDefinition":
        # The graph decides the precision, not the builder. TensorRT 10 must be asked for that; 11 and RTX have no other
        # kind of network, and still take the flag.
        kinds = self.trt.NetworkDefinitionCreationFlag
        flags = 1 << int(kinds.STRONGLY_TYPED)
        # Of a Python plugin take the compiled form, which runs without Python. 10.9 and newer; RTX has no such plugins.
        if job.options.plugin is not None and hasattr(kinds, "PREFER_AOT_PYTHON_PLUGINS"):
            flags |= 1 << int(kinds.PREFER_AOT_PYTHON_PLUGINS)
        network = builder.create_network(flags)
        parser = self.trt.OnnxParser(network, logger)
        if not parser.parse(job.model.SerializeToString()):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            # In bfloat16 it takes fewer operators, HardSwish not.
            half = "bf16" in precision_of(job.model)
            remedy = ": it takes fewer operators in bf16, export with --precision fp16 or fp32" if half else ""
            raise InputError(
                f"{self.flavor} {self.version} cannot parse the graph: "
                + "; ".join(f"node '{e.node_name()}' ({e.node_operator()}): {_first_line(e.desc())}" for e in errors)
                + remedy
            )
        return network

    def _configure(
        self, builder: "trt.Builder", network: "trt.INetworkDefinition", job: BuildJob
    ) -> "trt.IBuilderConfig":
        config = builder.create_builder_config()
        config.builder_optimization_level = job.options.builder_level
        # Without it the engine inspector shows the names of the fused layers only.
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED
        # TF32 is on by default, in strongly typed networks too: it rounds the inputs of fp32 products to 10 of 23 bits.
        config.clear_flag(self.trt.BuilderFlag.TF32)
        if job.options.version_compatible:  # puts the lean runtime, executable code, into the plan; classic only
            config.set_flag(self.trt.BuilderFlag.VERSION_COMPATIBLE)
        if job.options.hardware_compatible:
            config.hardware_compatibility_level = self.trt.HardwareCompatibilityLevel.AMPERE_PLUS
        self._set_architectures(config, job.architectures)
        if job.keep_timing_cache:
            self._set_timing_cache(config, job)
        self._add_profiles(builder, network, config, job)
        return config

    def _set_timing_cache(self, config: "trt.IBuilderConfig", job: BuildJob) -> None:
        """Take the cache that was read; one that TensorRT cannot read is begun anew, with a warning."""
        cache = config.create_timing_cache(job.timing_cache or b"")
        if cache is None:
            job.log.add("WARNING", "the timing cache is damaged: it was begun anew")
            cache = config.create_timing_cache(b"")
        # ignore_mismatch=False: a cache of another GPU or release is an error, not timings that mean nothing.
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise InputError("the timing cache is of another GPU or TensorRT: delete it, or name another file")

    def _set_architectures(self, config: "trt.IBuilderConfig", architectures: tuple[str, ...]) -> None:
        """Set what to compile for, which only TensorRT for RTX lets one choose."""
        if not hasattr(self.trt, "ComputeCapability") or not hasattr(config, "set_compute_capability"):
            return
        if hasattr(config, "num_compute_capabilities"):
            config.num_compute_capabilities = len(architectures)
        for index, name in enumerate(architectures):
            if not config.set_compute_capability(self.trt.ComputeCapability.__members__[name.upper()], index):
                raise CheckFailed(f"{self.flavor} {self.version} does not take the architecture {name}")

    def _add_profiles(
        self, builder: "trt.Builder", network: "trt.INetworkDefinition", config: "trt.IBuilderConfig", job: BuildJob
    ) -> None:
        """One profile for each range of batch sizes; the builder chooses kernels for its best size."""
        images = network.get_input(0)
        image = _sizes(images.shape)[1:]
        for profile in job.profiles:
            shapes = builder.create_optimization_profile()
            sizes = (profile.minimum, profile.optimum, profile.maximum)
            low, best, high = (self.trt.Dims([size, *image]) for size in sizes)
            shapes.set_shape(images.name, low, best, high)
            if config.add_optimization_profile(shapes) < 0:
                raise CheckFailed(f"{self.flavor} {self.version} does not take the profile {profile}")

    def layers(self, network: "trt.INetworkDefinition") -> tuple[LayerRow, ...]:
        """The layers that were parsed: name, kind, type and shape of the first output."""
        rows = []
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.num_outputs == 0:  # an assertion, say
                rows.append((layer.name, layer.type.name, "", ""))
                continue
            output = layer.get_output(0)
            shape = "x".join("N" if size < 0 else str(size) for size in _sizes(output.shape))
            rows.append((layer.name, layer.type.name, output.dtype.name, shape))
        return tuple(rows)

    # Subclasses of TensorRT's interfaces are defined in methods, because only there is the library known. Its
    # documentation asks for the explicit call of the base class's __init__.
    def _logger(self, log: BuildLog) -> "trt.ILogger":
        if TYPE_CHECKING:
            import tensorrt as trt
        else:
            trt = self.trt

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: trt.ILogger.Severity, message: str) -> None:
                log.add(severity.name, message)

        return Logger()

    def _monitor(self, steps: BuildProgress) -> "trt.IProgressMonitor":
        if TYPE_CHECKING:
            import tensorrt as trt
        else:
            trt = self.trt

        class Monitor(trt.IProgressMonitor):
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: Any) -> None:
                steps.start(phase_name, parent_phase, int(num_steps))

            def phase_finish(self, phase_name: str) -> None:
                steps.finish(phase_name)

            def step_complete(self, phase_name: str, step: Any) -> bool:
                return steps.complete(phase_name, int(step))

        return Monitor()


def _sizes(dims: "trt.Dims") -> list[int]:
    """The dimensions as numbers, -1 for a dynamic one. Indexed: the stubs do not say that Dims can be iterated."""
    return [dims[index] for index in range(len(dims))]


def _first_line(text: str) -> str:
    """The reason in a parser error, whose first line only repeats the node's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("Invalid Node")), "no reason given")


def load_flavor(flavor: str) -> "Library":
    """Import a TensorRT; raise EnvironmentMissing, saying what to install, if it is missing, too old or refused."""
    name = next((known for known in FLAVORS if known == flavor), None)
    if name is None:
        raise unknown_name("TensorRT", flavor, FLAVORS)
    try:
        module = importlib.import_module(MODULES[name])
    except (ImportError, OSError) as error:  # OSError: a library it links to is missing
        raise EnvironmentMissing(f"{name} cannot be imported ({error}): pip install 'vitx[{EXTRAS[name]}]'") from None
    check_version(name, module.__version__)
    return Library(name, module)


def check_version(flavor: Flavor, version: str) -> None:
    """Raise EnvironmentMissing for a release that is refused or too old."""
    for refused_flavor, release, reason in _REFUSED:
        if flavor == refused_flavor and f"{version}.".startswith(f"{release}."):
            raise EnvironmentMissing(f"{flavor} {version} is refused: {reason}; install a newer one")
    major, minor = _OLDEST[flavor]
    if tuple(int(part) for part in version.split(".")[:2]) < (major, minor):
        raise EnvironmentMissing(f"{flavor} {version} is too old: vitx needs {major}.{minor} or newer")
