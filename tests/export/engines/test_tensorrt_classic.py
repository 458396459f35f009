"""The classic TensorRT's options, on a fake that records the calls: the library itself needs a GPU to build."""

import sys
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from vitx.core import console
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.core.tensorrt_plan import check_plan
from vitx.export.engines import tensorrt_engine, tensorrt_library
from vitx.export.engines.targets import CONVERT, EngineRequest, build_engine
from vitx.export.engines.tensorrt_engine import engine_from_onnx
from vitx.export.options import EngineOptions


class Names:
    """An enumeration whose members are their own names."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, name)


class Cache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"+timed"


class Config(SimpleNamespace):
    flags: list[str]
    cleared: list[str]

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def clear_flag(self, flag: str) -> None:
        self.cleared.append(flag)

    def create_timing_cache(self, content: bytes) -> Cache | None:
        return None if content == b"damaged" else Cache(content)

    def set_timing_cache(self, cache: Cache, *, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return cache.content != b"of another GPU"

    def get_timing_cache(self) -> Cache:
        return self.cache

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shape)
        return len(self.profiles) - 1


class Profile:
    def set_shape(self, name: str, low: list[int], best: list[int], high: list[int]) -> None:
        self.shape = (name, low[0], best[0], high[0], high[1:])


class Network:
    num_layers = 2

    def __init__(self, flags: int) -> None:
        assert flags == 1 << 1  # strongly typed

    def get_input(self, index: int) -> Any:
        return SimpleNamespace(name="images", shape=[-1, 4, 4, 3])

    def get_layer(self, index: int) -> Any:
        outputs = [SimpleNamespace(shape=[-1, 10], dtype=SimpleNamespace(name="HALF"))][index:]
        name, kind = (("head", "MATRIX_MULTIPLY"), ("check", "ASSERTION"))[index]
        return SimpleNamespace(
            name=name, type=SimpleNamespace(name=kind), num_outputs=len(outputs), get_output=lambda at: outputs[at]
        )


class ClassicTensorRT:
    """A fake with the names of TensorRT 10.16 that a build uses."""

    __version__ = "10.16.1.11"
    Dims = list
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    BuilderFlag = Names("VERSION_COMPATIBLE", "TF32")
    HardwareCompatibilityLevel = Names("AMPERE_PLUS")
    ProfilingVerbosity = Names("DETAILED")

    class ILogger:
        Severity = Names("ERROR")

    class IProgressMonitor:
        pass

    def __init__(self) -> None:
        self.config = Config(flags=[], cleared=[], profiles=[])

    def Builder(self, logger: Any) -> Any:
        def build(network: Network, config: Config) -> bytes:
            config.progress_monitor.phase_start("Building", None, 1)
            assert config.progress_monitor.step_complete("Building", 0)
            return b"a classic plan"

        return SimpleNamespace(
            create_network=Network,
            create_builder_config=lambda: self.config,
            create_optimization_profile=Profile,
            build_serialized_network=build,
        )

    def OnnxParser(self, network: Network, logger: Any) -> Any:
        return SimpleNamespace(parse=lambda content: onnx.load_from_string(content) is not None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ClassicTensorRT:
    fake = ClassicTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr(tensorrt_library, "local_architectures", lambda: ("sm89", "sm86"))
    return fake


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    pixels = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 4, 4, 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 4, 3])
    model = helper.make_model(
        helper.make_graph([helper.make_node("Relu", ["images"], ["y"])], "g", [pixels], [result]),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    onnx.save(model, tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


def test_every_option_reaches_the_builder(library: ClassicTensorRT, graph: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"yesterday")
    report = engine_from_onnx(
        graph,
        tmp_path / "a.plan",
        flavor="tensorrt",
        timing_cache=cache,
        builder_level=5,
        version_compatible=True,
        hardware_compatible=True,
        quiet=True,
    )
    config = library.config
    assert config.flags == ["VERSION_COMPATIBLE"]
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert config.profiling_verbosity == "DETAILED"
    assert config.builder_optimization_level == 5
    assert config.profiles[1] == ("images", 2, 8, 8, [4, 4, 3])
    assert len(config.profiles) == 4
    info = report.info
    assert info.architectures == ("sm89",)
    assert info.timing_cache_in_sha256 == sha256_bytes(b"yesterday")
    assert info.timing_cache_out_sha256 == sha256_bytes(b"yesterday+timed")
    assert cache.read_bytes() == b"yesterday+timed"
    assert report.layers == (("head", "MATRIX_MULTIPLY", "HALF", "Nx10"), ("check", "ASSERTION", "", ""))
    assert check_plan(tmp_path / "a.plan", architecture="sm120", version="10.17.0.1") == info


def test_defaults_set_no_flag(
    library: ClassicTensorRT, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_engine, "time", SimpleNamespace(perf_counter=partial(next, iter([100.0, 107.12345]))))
    report = engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", architectures=("sm89",), quiet=True)
    assert library.config.flags == []
    assert library.config.cleared == ["TF32"]  # fp32 is fp32
    assert not hasattr(library.config, "hardware_compatibility_level")
    assert not hasattr(library.config, "num_compute_capabilities")
    assert report.info.timing_cache_out_sha256 is None
    assert report.info.build_seconds == 7.123
    # It tells no layers of its own when it builds, so there is no table of them.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.plan", "a.plan.json", "g.onnx"]


def test_a_damaged_timing_cache_is_begun_anew(library: ClassicTensorRT, graph: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"damaged")
    report = engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", timing_cache=cache, quiet=True)
    assert "the timing cache is damaged: it was begun anew" in report.info.warnings
    assert cache.read_bytes() == b"+timed"


def test_a_timing_cache_of_another_gpu(library: ClassicTensorRT, graph: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"of another GPU")
    with pytest.raises(InputError, match="the timing cache is of another GPU or TensorRT"):
        engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", timing_cache=cache, quiet=True)
    assert cache.read_bytes() == b"of another GPU"
    assert not (tmp_path / "a.plan").exists()


def test_a_timing_cache_that_cannot_be_a_file(library: ClassicTensorRT, graph: Path, tmp_path: Path) -> None:
    """Refused before the build: it is written after the plan."""
    for place, reason in ((tmp_path, "is a folder: expected a file name"), (graph / "cache", "cannot be a folder")):
        with pytest.raises(InputError, match=reason):
            engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", timing_cache=place, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["g.onnx"]


def test_it_builds_for_this_machine_only(
    library: ClassicTensorRT, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="builds for this machine's sm89 only, not for sm120: leave --arch out"):
        engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", architectures=("sm120",), quiet=True)
    monkeypatch.setattr(tensorrt_library, "local_architectures", lambda: ())
    with pytest.raises(EnvironmentMissing, match=r"the NVIDIA driver offers none here: .*--trt-rtx") as caught:
        engine_from_onnx(graph, tmp_path / "a.plan", flavor="tensorrt", quiet=True)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("quiet", [True, False])
def test_a_request_is_built_with_all_its_options(
    library: ClassicTensorRT,
    graph: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool,
) -> None:
    cache = tmp_path / "timing.cache"
    options = EngineOptions(
        batches=(1, 4), builder_level=5, timing_cache=cache, version_compatible=True, hardware_compatible=True
    )
    request = EngineRequest("tensorrt", options, ("sm89",))
    request.check()
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=partial(next, count(0, 10))))  # each look a line
    build_engine(graph, tmp_path / "a.plan", request, quiet)
    assert capsys.readouterr().err.partition(": ")[0] == ("" if quiet else "tensorrt 10.16.1.11")
    config = library.config
    assert [shape[1:4] for shape in config.profiles] == [(1, 1, 1), (2, 4, 4)]
    assert (config.builder_optimization_level, config.flags) == (5, ["VERSION_COMPATIBLE"])
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert cache.read_bytes() == b"+timed"
    assert check_plan(tmp_path / "a.plan", version="10.16.1.11").architectures == ("sm89",)


@pytest.mark.parametrize(
    ("options", "architectures", "message"),
    [
        ({"batches": (8, 1)}, (), "^batch sizes 8, 1: "),
        ({"builder_level": 6}, (), "^builder level 6: expected 0"),
        ({"plugin": "flash", "hardware_compatible": True}, (), "^a plan with the flash plugin holds code for one GPU"),
        ({"timing_cache": Path("/")}, (), "is a folder: expected a file name"),
        ({}, ("sm120",), "^TensorRT builds for this machine's sm89 only, not for sm120"),
    ],
)
def test_a_request_that_cannot_be_built_is_refused_before_there_is_a_graph(
    library: ClassicTensorRT, options: dict[str, Any], architectures: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        EngineRequest("tensorrt", EngineOptions(**options), architectures).check()


def test_a_gpu_without_the_precision_is_refused_before_there_is_a_graph(
    library: ClassicTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    EngineRequest("tensorrt").check("fp8", "fp16")
    monkeypatch.setattr(tensorrt_library, "local_architectures", lambda: ("sm86",))
    EngineRequest("tensorrt").check("int8", "fp16")
    with pytest.raises(InputError, match=r"^fp8 needs compute capability 8\.9 or newer, and sm86 has none"):
        EngineRequest("tensorrt").check("fp8", "fp16")


def test_a_crash_is_shown_by_a_plan_that_is_thrown_away(
    library: ClassicTensorRT, graph: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONVERT["tensorrt"](graph)
    assert len(library.config.profiles) == 4
    assert [*temporary.iterdir()] == []
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(EnvironmentMissing, match=r"^tensorrt-rtx cannot be imported"):
        CONVERT["tensorrt-rtx"](graph)
