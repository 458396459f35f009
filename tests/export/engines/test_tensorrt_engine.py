"""TensorRT plans: built by the real TensorRT for RTX, which needs no GPU; sidecars, profiles, graphs and reports."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
from onnx import TensorProto, helper
from sklearn.datasets import load_sample_images

from engines import write_half
from reference import randomize, randomize_like_trained
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.machine import local_architectures
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.tensorrt_plan import Flavor, PlanInfo, PlanOptions, check_plan, sidecar_path
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.build_log import BuildLog, BuildProgress
from vitx.export.engines.profiles import DEFAULT_PROFILES, profiles_for, write_plan
from vitx.export.engines.tensorrt_engine import EngineReport, check_options, engine_from_onnx, known_issues
from vitx.export.engines.tensorrt_graph import load_for_tensorrt
from vitx.export.engines.tensorrt_library import Library, check_version, load_flavor
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HalfGraph
from vitx.export.precision.lower import lower_precision

RTX: Flavor = "tensorrt-rtx"
OPTIONS = PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False)
has_no_gpu = pytest.mark.skipif(bool(local_architectures()), reason="tests a machine without a GPU")


@pytest.fixture(scope="module")
def small_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks with random weights and statistics, in fp16."""
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    network = timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"])
    write_half(randomize(network).eval(), 32, path)
    return path


@pytest.fixture(scope="module")
def small_plan(small_graph: Path) -> EngineReport:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    plan = small_graph.with_name("model.plan")
    return engine_from_onnx(small_graph, plan, flavor=RTX, architectures=("sm120", "sm89"), quiet=True)


def crops(count: int, size: int) -> UInt8Array:
    """Random squares of two photographs, uint8 (count, size, size, 3)."""
    photos, generator = load_sample_images().images, np.random.default_rng(0)
    corners = [[int(generator.integers(0, side - size + 1)) for side in photos[0].shape[:2]] for _ in range(count)]
    return np.stack([photos[i % 2][top : top + size, left : left + size] for i, (top, left) in enumerate(corners)])


DEEPVIT_S: dict[str, Any] = {"depth": 2, "attention": ["plain", "re-attention"], "img_size": 64}
OPTIONS_OF: dict[str, dict[str, Any]] = {"deit_small_12": {"depth": 4}, "deepvit_s": DEEPVIT_S}


@pytest.mark.parametrize(("name", "options"), OPTIONS_OF.items(), ids=OPTIONS_OF)
def test_fp16_plans(name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of `vitx export --precision fp16 --trt-rtx`: float32 graph, islands, plan; DeiT-S at 224 px.

    Blocks repeat, so few are built. DeepViT-S needs no island (test_networks.py), so its search is left out.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    preprocessing = Preprocessing(image_size=options.get("img_size", 224))
    model = randomize_like_trained(timm.create_model(name, **options)).eval()
    exact = onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, (), tmp_path / "fp32.onnx")
    lowered = HalfGraph(Dataflow(exact), TensorProto.FLOAT16).build(())
    if name == "deit_small_12":
        monkeypatch.setattr("vitx.export.precision.lower.MIN_HALF_IMAGES", 8)
        found = lower_precision(exact, "fp16", crops(8, 224), quiet=True)
        assert found.graph == lowered
    graph, plan = tmp_path / "model.onnx", tmp_path / "model.plan"
    onnx.save(lowered, graph)
    profiles = profiles_for((1, 32))
    report = engine_from_onnx(graph, plan, flavor=RTX, architectures=("sm120",), profiles=profiles, quiet=True)
    assert report.info.precision == "fp16"
    assert report.info.size > graph.stat().st_size  # the weights are in it
    kinds = [kind for _, kind, _, _ in report.layers]
    assert kinds.count("SOFTMAX") == options["depth"]
    assert "SCALE" not in kinds  # no BatchNorm was left
    assert {kind for _, layer, kind, _ in report.layers if layer == "MATRIX_MULTIPLY"} == {"HALF"}
    assert check_plan(plan, architecture="sm120") == report.info


def test_the_sidecar_describes_the_plan(small_plan: EngineReport) -> None:
    info = small_plan.info
    assert PlanInfo.model_validate_json(sidecar_path(small_plan.path).read_bytes()) == info
    assert info.architectures == ("sm89", "sm120")
    assert info.profiles == DEFAULT_PROFILES
    assert info.flavor == RTX
    assert info.version.count(".") == 3
    assert info.size == small_plan.path.stat().st_size
    assert info.options == OPTIONS
    assert info.timing_cache_in_sha256 is None


def test_building_twice_gives_the_same_layers(small_graph: Path, small_plan: EngineReport, tmp_path: Path) -> None:
    again = engine_from_onnx(small_graph, tmp_path / "b.plan", flavor=RTX, architectures=("sm89", "sm120"), quiet=True)
    assert again.info.size == small_plan.info.size
    assert again.layers == small_plan.layers


def test_every_architecture_since_ampere_is_the_default() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    library = load_flavor(RTX)
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(library.architectures())
    assert library.targets(()) == tuple(n for n in library.architectures() if n != "sm75")


def test_a_plan_is_checked_before_it_is_loaded(small_plan: EngineReport, tmp_path: Path) -> None:
    plan = tmp_path / "copy.plan"
    plan.write_bytes(small_plan.path.read_bytes())
    with pytest.raises(InputError, match=r"has no 'copy\.plan\.json': build it with vitx export"):
        check_plan(plan)
    sidecar_path(plan).write_bytes(sidecar_path(small_plan.path).read_bytes())
    assert check_plan(plan) == small_plan.info
    with pytest.raises(CheckFailed, match="was built for sm89, sm120 and this GPU is sm90"):
        check_plan(plan, architecture="sm90")
    with pytest.raises(CheckFailed, match=r"and 1\.8\.0\.1 is installed: it loads with exactly that version"):
        check_plan(plan, version="1.8.0.1")
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    plan.write_bytes(content)
    with pytest.raises(CheckFailed, match="is not the plan its sidecar describes"):
        check_plan(plan)
    with pytest.raises(InputError, match="no plan at"):
        check_plan(tmp_path / "none.plan")


def fake_info(data: bytes, **changes: object) -> PlanInfo:
    import hashlib

    fields: dict[str, object] = {
        "flavor": "tensorrt",
        "version": "10.16.1.11",
        "architectures": ("sm89",),
        "profiles": DEFAULT_PROFILES,
        "precision": "fp16",
        "options": OPTIONS,
        "onnx_sha256": "0" * 64,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "build_seconds": 1.0,
        "layers": 1,
        "created": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    return PlanInfo.model_validate(fields)


@pytest.mark.parametrize(
    ("compatible", "installed", "loads"),
    [
        (False, "10.16.1.11", True),
        (False, "10.16.1.12", False),
        (True, "10.16.1.11", True),
        (True, "10.17.0.1", True),
        (True, "10.15.1.29", False),
        (True, "11.4.0.106", True),
        (True, "12.0.0.1", False),
    ],
)
def test_versions_that_load_a_plan(compatible: bool, installed: str, loads: bool, tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"version_compatible": compatible})
    write_plan(tmp_path / "a.plan", b"plan", fake_info(b"plan", options=options))
    if loads:
        check_plan(tmp_path / "a.plan", version=installed)
    else:
        with pytest.raises(CheckFailed, match="build it again, or install that version"):
            check_plan(tmp_path / "a.plan", version=installed)


def test_a_hardware_compatible_plan_runs_on_newer_gpus(tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"hardware_compatible": True})
    write_plan(tmp_path / "a.plan", b"plan", fake_info(b"plan", options=options))
    check_plan(tmp_path / "a.plan", architecture="sm120", version="10.16.1.11")
    with pytest.raises(CheckFailed, match="this GPU is sm75"):
        check_plan(tmp_path / "a.plan", architecture="sm75", version="10.16.1.11")


def test_no_tensorrt_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(EnvironmentMissing, match=r"cannot be imported .*: pip install 'vitx\[trt-rtx\]'") as caught:
        load_flavor(RTX)
    assert caught.value.exit_code == 3
    # Its module is there, and what it links to is not.
    (tmp_path / "tensorrt.py").write_text("import ctypes; ctypes.CDLL('libnvinfer-of-nowhere.so.10')")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        EnvironmentMissing, match=r"tensorrt cannot be imported \(libnvinfer-of.*: pip install 'vitx\[trt"
    ):
        load_flavor("tensorrt")
    write_plan(tmp_path / "a.plan", b"plan", fake_info(b"plan"))
    with pytest.raises(EnvironmentMissing, match=r"pip install 'tensorrt==10\.16\.1\.11'"):
        check_plan(tmp_path / "a.plan")
    with pytest.raises(InputError, match="unknown TensorRT 'tensort': did you mean tensorrt"):
        load_flavor("tensort")


@pytest.mark.parametrize(
    ("flavor", "version", "message"),
    [
        ("tensorrt", "10.0.0.6", "issues/3777"),
        ("tensorrt", "10.3.0", "issues/4419"),
        ("tensorrt", "10.7.0.23", "issues/4333"),
        ("tensorrt", "10.8.0.43", "is too old: vitx needs 10.9"),
        (RTX, "1.2.0.54", "is too old: vitx needs 1.4"),
    ],
)
def test_releases_with_known_errors_are_refused(flavor: Flavor, version: str, message: str) -> None:
    with pytest.raises(EnvironmentMissing, match=message):
        check_version(flavor, version)
    for good in ("10.9.0.34", "10.16.1.11", "11.4.0.106"):
        check_version("tensorrt", good)
    check_version(RTX, "1.7.1.116")


def test_an_architecture_that_the_library_does_not_know_writes_nothing(small_graph: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    with pytest.raises(InputError, match="cannot build for 'sm90'"):
        engine_from_onnx(small_graph, tmp_path / "a.plan", flavor=RTX, architectures=("sm90",), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_cannot_be_written_is_not_built_and_takes_no_graph_s_place(
    small_graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    monkeypatch.setattr(Library, "build", lambda *_: pytest.fail("it was built"))
    before = small_graph.read_bytes()
    (tmp_path / "link.plan").symlink_to(small_graph)
    for path, words in (
        (tmp_path, "is a folder"),
        (small_graph, "is the graph"),
        (tmp_path / "link.plan", "the graph"),
    ):
        with pytest.raises(InputError, match=words):
            engine_from_onnx(small_graph, path, flavor=RTX, architectures=("sm86",), quiet=True)
    assert small_graph.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"builder_level": 6}, "builder level 6"),
        ({"builder_level": 5}, "builder level 5: TensorRT for RTX builds the same plan at every level"),
        ({"version_compatible": True}, "version-compatible needs --trt"),
        ({"hardware_compatible": True}, "list them instead"),
    ],
)
def test_options_that_would_be_ignored_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_options(RTX, OPTIONS.model_copy(update=changes), None)


def test_a_timing_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no use for a timing cache"):
        check_options(RTX, OPTIONS, tmp_path / "cache")


def test_an_unconfirmed_report_is_a_warning() -> None:
    assert "issues/4837" in known_issues("tensorrt", ("sm120",), "fp16, fp32")[0]
    assert known_issues("tensorrt", ("sm89",), "fp16") == known_issues("tensorrt", ("sm120",), "fp32") == ()


def one_node_graph(path: Path, node: onnx.NodeProto, *, batch: int | str = "N", domain: str = "") -> Path:
    pixels = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 4, 4, 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(helper.make_graph([node], "g", [pixels], [result]), opset_imports=opsets), path)
    return path


def test_a_parser_error_names_the_node(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    node = helper.make_node("HeadMix", ["images"], ["y"], name="block7.attn.mix", domain="our.own")
    graph = one_node_graph(tmp_path / "g.onnx", node, domain="our.own")
    with pytest.raises(InputError, match=r"cannot parse the graph: node 'block7\.attn\.mix' \(HeadMix\)"):
        engine_from_onnx(graph, tmp_path / "a.plan", flavor=RTX, quiet=True)
    assert not (tmp_path / "a.plan").exists()


def test_a_parser_error_of_a_bf16_graph_names_the_precisions_that_take_more(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    path = one_node_graph(tmp_path / "g.onnx", helper.make_node("MatMul", ["half", "weight"], ["product"]))
    model = onnx.load(path)
    before = helper.make_node("Cast", ["images"], ["half"], to=TensorProto.BFLOAT16)
    model.graph.node.insert(0, before)
    model.graph.node.append(helper.make_node("HardSwish", ["product"], ["swish"], name="stem.act"))
    model.graph.node.append(helper.make_node("Cast", ["swish"], ["y"], to=TensorProto.FLOAT))
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.BFLOAT16, [3, 3], [1.0] * 9))
    model.opset_import[0].version = 22
    onnx.save(model, path)
    with pytest.raises(InputError, match=r"\(HardSwish\).*: it takes fewer operators in bf16, export with --precision"):
        engine_from_onnx(path, tmp_path / "a.plan", flavor=RTX, quiet=True)


def test_bad_graphs(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    frozen = one_node_graph(tmp_path / "f.onnx", helper.make_node("Relu", ["images"], ["y"]), batch=4)
    with pytest.raises(InputError, match="inputs images: expected one, with a dynamic batch first"):
        engine_from_onnx(frozen, tmp_path / "a.plan", flavor=RTX, quiet=True)
    (tmp_path / "text.onnx").write_text("no graph at all")
    with pytest.raises(InputError, match="is not an ONNX graph"):
        load_for_tensorrt(tmp_path / "text.onnx")
    with pytest.raises(InputError, match="no ONNX graph at"):
        load_for_tensorrt(tmp_path / "none.onnx")


def test_a_constant_that_is_an_input_too(tmp_path: Path) -> None:
    """As in files of IR 3: the parser takes its value, and it is no input of the plan."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    path = one_node_graph(tmp_path / "g.onnx", helper.make_node("MatMul", ["images", "weight"], ["y"]))
    model = onnx.load(path)
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.FLOAT, [3, 3], [1.0] * 9))
    model.graph.input.insert(0, helper.make_tensor_value_info("weight", TensorProto.FLOAT, [3, 3]))
    onnx.save(model, path)
    report = engine_from_onnx(path, tmp_path / "a.plan", flavor=RTX, architectures=("sm89",), quiet=True)
    assert [(kind, shape) for _, kind, _, shape in report.layers if kind == "MATRIX_MULTIPLY"] == [
        ("MATRIX_MULTIPLY", "Nx4x4x3")
    ]


@has_no_gpu
def test_a_failed_build_gives_the_librarys_reason(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    nodes = [
        helper.make_node("Cast", ["images"], ["low"], to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["low", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [16, 16], np.ones(256, np.float32))
    pixels = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 16, 16])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16, 16])
    graph = helper.make_graph(nodes, "g", [pixels], [result], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "g.onnx")
    plan = tmp_path / "a.plan"
    engine_from_onnx(tmp_path / "g.onnx", plan, flavor=RTX, architectures=("sm89",), quiet=True)
    before = plan.read_bytes()
    with pytest.raises(CheckFailed, match=r"could not build the plan: .*sm75"):  # Turing has no bf16
        engine_from_onnx(tmp_path / "g.onnx", plan, flavor=RTX, architectures=("sm75",), quiet=True)
    assert plan.read_bytes() == before
    check_plan(plan, architecture="sm89")


class Bar:
    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def update(self, done: int, note: str = "") -> None:
        self.seen.append((done, note))


def test_progress_is_one_number_that_never_falls() -> None:
    bar = Bar()
    steps = BuildProgress(bar)
    steps.start("build", None, 2)
    steps.complete("unknown", 3)
    steps.finish("unknown")
    assert bar.seen == []
    for phase in ("clone", "optimise"):
        steps.start(phase, "build", 4)
        for step in range(4):
            assert steps.complete(phase, step)
        steps.finish(phase)
        steps.complete("build", 0 if phase == "clone" else 1)
    done = [value for value, _ in bar.seen]
    assert done == sorted(done)
    assert done[:5] == [125, 250, 375, 500, 500]
    assert done[-1] == 1000


def test_progress_begins_at_nothing() -> None:
    bar = Bar()
    steps = BuildProgress(bar)
    steps.start("build", None, 4000)
    steps.complete("build", 0)
    assert bar.seen == [(0, "build")]


def test_ctrl_c_stops_the_build_and_not_the_process() -> None:
    class Impatient(Bar):
        def update(self, done: int, note: str = "") -> None:
            raise KeyboardInterrupt

    steps = BuildProgress(Impatient())
    steps.start("build", None, 3)
    assert steps.complete("build", 0) is False
    assert steps.interrupted


def test_messages_are_kept_once() -> None:
    log = BuildLog()
    assert log.errors() == "it gave no reason"
    for message in ("CUDA driver version is insufficient", "no kernel for node x", "no kernel for node x"):
        log.add("ERROR", message)
    log.add("WARNING", "slow")
    assert log.errors() == "no kernel for node x"
    log.add("INTERNAL_ERROR", " out of registers\n")
    assert log.errors() == "out of registers; no kernel for node x"
    assert log.warnings() == ("slow",)
