"""What an export asks of each conversion and writes of it into the manifest: tracing, lowering and engines stand in."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from torch import nn

from bundle_fixture import write_bundle
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file
from vitx.core.machine import installed_versions
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec
from vitx.export import bundling
from vitx.export.bundling import Traced, bundle_name, check_output, export_bundle, trace_to_file
from vitx.export.engines.openvino_ir import openvino_from_onnx
from vitx.export.engines.targets import EngineRequest, LoweredFile, PrecisionRequest, build_engine, lower_file
from vitx.export.options import EngineOptions, ExportOptions
from vitx.export.rewrite.rewrites import ALL, ImageClassifier
from vitx.models.source import Source, SourceInfo, SourceRequest

PREPROCESSING = Preprocessing(image_size=24, crop_fraction=0.75, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
INFO = SourceInfo(
    name="model:deit_digits?depth=2",
    spec=ModelSpec(name="deit_digits", num_classes=3, kwargs={"depth": 2}),
    class_names=("a", "b", "c"),
    preprocessing=PREPROCESSING,
    data="source's data",
    checkpoint="weights.pth",
    checkpoint_sha256="7" * 64,
    recipe="digits-deepvit",
    metrics={"top1": 0.5},
)
REQUEST = SourceRequest("model:deit_digits", weights="random")
LIMITS: dict[str, Any] = {"seconds": 77.0, "memory_gib": 5.0}


class Conversions:
    """Stands for the processes of the conversions; notes what each was asked for, and writes what it would write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.untrained: tuple[str, ...] = ()
        monkeypatch.setattr(bundling, "run_limited", self.run)
        monkeypatch.setattr(bundling, "convert_limited", self.convert)
        monkeypatch.setattr(EngineRequest, "check", lambda *asked: self.asked.append(("check", *asked)))

    def run(self, title: str, function: Any, *arguments: Any, **limits: Any) -> Any:
        self.asked.append((title, function, arguments, limits))
        if function is trace_to_file:
            arguments[2].write_bytes(b"graph")
            return Traced(INFO, self.untrained, ("fold-a", "fold-b"), 21)
        return LoweredFile(("island",), {"target": "cpu"})

    def convert(self, target: str, function: Any, graph: Path, out: Path, *arguments: Any, **options: Any) -> None:
        self.asked.append((target, function, graph.name, out.relative_to(graph.parent).as_posix(), arguments, options))
        assert out.parent.is_dir()
        if target == "openvino":
            out.mkdir()
            out /= "model.xml"
        out.write_bytes(target.encode())

    def named(self, *titles: str) -> list[Any]:
        return [asked[1:] for asked in self.asked if asked[0] in titles]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    return Conversions(monkeypatch)


def test_every_field_of_the_manifest(
    conversions: Conversions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ExportOptions(without=("join-tokens",), with_=("pad-head-dim",), **LIMITS)
    bundle = export_bundle(REQUEST, tmp_path / "a.net.vitx", options)
    ((function, arguments, limits),) = conversions.named("tracing")
    assert (function, arguments[0], arguments[2].name, arguments[3]) == (trace_to_file, REQUEST, "model.onnx", 20)
    assert [*arguments[1]] == [name for name in (*ALL, "pad-head-dim") if name != "join-tokens"]
    assert (limits, len(conversions.asked)) == (LIMITS, 1)
    found = json.loads((tmp_path / "a.net.vitx" / MANIFEST).read_text())
    assert found.pop("provenance") == {
        "source": "model:deit_digits?depth=2",
        "checkpoint": "weights.pth",
        "checkpoint_sha256": "7" * 64,
        "recipe": "digits-deepvit",
        "versions": installed_versions(),
        "created": bundle.manifest.provenance.created,
    }
    assert bundle.manifest.provenance.created[:2] == "20"
    assert found == {
        "format_version": 1,
        "name": "a.net",
        "model": {"name": "deit_digits", "num_classes": 3, "kwargs": {"depth": 2}},
        "labels": ["a", "b", "c"],
        "preprocessing": json.loads(PREPROCESSING.model_dump_json()),
        "input": {"name": "images", "dtype": "uint8", "shape": ["N", 24, 24, 3]},
        "output": {"name": "logits", "dtype": "float32", "shape": ["N", 3]},
        "precision": "fp32",
        "islands": [],
        "lowering": {},
        "rewrites": ["fold-a", "fold-b"],
        "opset": 21,
        "data": "source's data",
        "files": {"model.onnx": {"sha256": sha256_file(bundle.model_path), "size": 5}},
        "training_metrics": {"top1": 0.5},
    }
    assert capsys.readouterr().err == ""


def test_norms_that_never_saw_a_batch_are_said(
    conversions: Conversions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversions.untrained = ("stem.norm", "other")
    export_bundle(REQUEST, tmp_path / "net.vitx")
    assert capsys.readouterr().err == (
        "warning: 2 BatchNorm layers never saw a batch, the first is 'stem.norm': their initial statistics are folded "
        "as they are\n"
    )


@pytest.mark.parametrize(
    ("options", "data", "target", "base", "opset"),
    [
        ({"precision": "int8", "data": "own"}, "own", "cpu", "fp32", 20),
        ({"precision": "int8", "data": "own", "calibration": "better"}, "better", "cpu", "fp32", 20),
        ({"precision": "int8", "data": "own", "trt": True}, "own", "tensorrt", "fp16", 20),
        ({"precision": "int8", "data": "own", "trt_rtx": True}, "own", "tensorrt", "fp16", 20),
        ({"precision": "int8", "data": "own", "target": "tensorrt", "base": "bf16"}, "own", "tensorrt", "bf16", 22),
        ({"precision": "int8", "data": "own", "trt": True, "base": "fp32"}, "own", "tensorrt", "fp32", 20),
        ({"precision": "fp8", "data": "own"}, "own", "tensorrt", "fp16", 20),
        ({"precision": "bf16", "data": "own", "trt": True}, "own", "tensorrt", "fp32", 22),
        ({"precision": "bf16", "data": "own"}, "own", "cpu", "fp32", 22),
    ],
)
def test_what_a_lower_precision_is_judged_on_and_written_for(
    conversions: Conversions, tmp_path: Path, options: dict[str, Any], data: str, target: Any, base: Any, opset: int
) -> None:
    plan: Any = "the certificate to come"
    given = ExportOptions(**options, **LIMITS)
    bundle = export_bundle(REQUEST, tmp_path / "net.vitx", given, plan=plan, quiet=True)
    precision = options["precision"]
    assert conversions.named("tracing")[0][1][3] == opset
    ((function, arguments, limits),) = conversions.named(f"lowering to {precision}")
    assert (function, arguments[0].name, arguments[2], limits) == (lower_file, "model.onnx", PREPROCESSING, LIMITS)
    assert arguments[1] == PrecisionRequest(precision, data, target, base, plan, True, False)
    manifest = bundle.manifest
    assert manifest.base == base
    assert (manifest.precision, manifest.islands, manifest.lowering) == (precision, ("island",), {"target": "cpu"})


def test_a_run_s_own_data_judge_and_a_network_alone_is_refused(
    conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(precision="int8")
    with pytest.raises(InputError, match=r"^int8 is judged on real images: give --data or --calibration-data$"):
        export_bundle(REQUEST, tmp_path / "net.vitx", options)
    assert (conversions.asked, [*tmp_path.iterdir()]) == ([], [])
    monkeypatch.setattr(SourceRequest, "require_known", lambda request: None)
    for request in (SourceRequest("runs/one"), SourceRequest("model:deit_digits", data="given")):
        conversions.asked.clear()
        export_bundle(request, tmp_path / "net.vitx", options)
        (lowering,) = conversions.named("lowering to int8")
        assert (lowering[1][1].data, lowering[1][1].quiet) == ("source's data", False)


def test_engines_are_checked_first_and_built_of_the_lowered_graph(conversions: Conversions, tmp_path: Path) -> None:
    engine = EngineOptions(batches=(1, 4))
    options = ExportOptions(trt=True, trt_rtx=True, arch=("sm89",), engine=engine, openvino=True, **LIMITS)
    bundle = export_bundle(REQUEST, tmp_path / "net.vitx", options, quiet=True)
    assert [asked[0] for asked in conversions.asked] == [
        *("check", "check", "tracing", "tensorrt", "tensorrt-rtx", "openvino")
    ]
    wanted = [EngineRequest("tensorrt", engine, ()), EngineRequest("tensorrt-rtx", engine, ("sm89",))]
    assert conversions.named("check") == [(request, "fp32", "fp32") for request in wanted]
    limits = {**LIMITS, "failed": tmp_path / "net.vitx.failed"}
    assert conversions.named("tensorrt", "tensorrt-rtx", "openvino") == [
        (build_engine, "model.onnx", "engines/tensorrt.plan", (wanted[0], True), limits),
        (build_engine, "model.onnx", "engines/tensorrt-rtx.plan", (wanted[1], True), limits),
        (openvino_from_onnx, "model.onnx", "openvino", (), limits),
    ]
    files = {name: entry.size for name, entry in bundle.manifest.files.items()}
    plans = {"engines/tensorrt.plan": 8, "engines/tensorrt-rtx.plan": 12}
    assert files == {"model.onnx": 5, "openvino/model.xml": 8, **plans}


@pytest.mark.parametrize(
    ("options", "targets"),
    [({}, []), ({"for_": "cpu"}, ["lowering to int8", "openvino"]), ({"trt": True}, ["tensorrt"])],
)
def test_only_what_was_asked_for_is_built(
    conversions: Conversions, tmp_path: Path, options: dict[str, Any], targets: list[str]
) -> None:
    export_bundle(REQUEST, tmp_path / "net.vitx", ExportOptions(**options))
    assert [asked[0] for asked in conversions.asked if asked[0] not in ("check", "tracing")] == targets


@pytest.mark.parametrize(("calibration", "judged_on"), [(None, "source's data"), ("photographs", "photographs")])
def test_a_bundle_for_a_processor_has_an_int8_graph_beside_its_own(
    conversions: Conversions, tmp_path: Path, calibration: str | None, judged_on: str
) -> None:
    options = ExportOptions(for_="cpu", calibration=calibration, trt=True, **LIMITS)
    plan: Any = "the certificate to come"
    manifest = export_bundle(REQUEST, tmp_path / "net.vitx", options, plan=plan, quiet=True).manifest
    ((_, arguments, limits),) = conversions.named("lowering to int8")
    assert (arguments[0].parts[-2:], arguments[2], limits) == (("int8", "model.onnx"), PREPROCESSING, LIMITS)
    # Written for the processor, whatever the plan is made for.
    assert arguments[1] == PrecisionRequest("int8", judged_on, "cpu", "fp32", plan, True, False)
    assert manifest.files["int8/model.onnx"] == manifest.files["model.onnx"]  # a copy, as the lowering stands in
    assert (manifest.precision, manifest.islands) == ("fp32", ())
    assert manifest.lowering == {"int8_candidate": {"target": "cpu"}}
    conversions.asked.clear()
    export_bundle(REQUEST, tmp_path / "net.vitx", ExportOptions(for_="cpu"), quiet=True)
    assert conversions.named("lowering to int8")[0][2]["seconds"] == 600  # not the hour of what was asked for


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"precision": "fp16", "data": "own"},
            "the graph is fp16: it is made beside a float32 graph that has a witness",
        ),
        ({"witness": 0}, "no witness set would judge it: it is made beside a float32 graph that has a witness set"),
        ({}, "no choice of layers passes"),
    ],
)
def test_where_there_is_no_int8_graph_the_export_says_why(
    conversions: Conversions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    reason: str,
) -> None:
    run = conversions.run

    def fail(title: str, *arguments: Any, **limits: Any) -> Any:
        if title == "lowering to int8":
            raise CheckFailed("no choice of layers passes")
        return run(title, *arguments, **limits)

    monkeypatch.setattr(bundling, "run_limited", fail)
    manifest = export_bundle(REQUEST, tmp_path / "net.vitx", ExportOptions(for_="cpu", **options)).manifest
    assert sorted(manifest.files) == ["model.onnx", "openvino/model.xml"]
    assert manifest.lowering["int8_candidate"]["left_out"].startswith(reason)
    assert f"export: no int8 candidate: {reason}" in capsys.readouterr().err


@pytest.mark.usefixtures("conversions")
def test_what_was_written_to_its_place_during_an_export_stays(tmp_path: Path) -> None:
    out = tmp_path / "net.vitx"

    def write(bundle: Bundle) -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")

    with pytest.raises(InputError, match="exists and is no bundle: choose another --out"):
        export_bundle(REQUEST, out, accept=write)
    assert ([*tmp_path.iterdir()], (out / "thesis.txt").read_text()) == ([out], "years of work")


def test_what_does_not_accept_the_bundle_keeps_the_old_one(conversions: Conversions, tmp_path: Path) -> None:
    out = tmp_path / "net.vitx"
    before = export_bundle(REQUEST, out)
    seen: list[Bundle] = []

    def refuse(bundle: Bundle) -> None:
        seen.append(bundle)
        assert bundle.path != out
        assert Bundle.open(bundle.path).manifest == bundle.manifest
        raise CheckFailed("no")

    with pytest.raises(CheckFailed, match="no"):
        export_bundle(REQUEST, out, ExportOptions(for_="cpu"), accept=refuse)
    assert ("openvino/model.xml" in seen[0].manifest.files, [*tmp_path.iterdir()]) == (True, [out])
    assert Bundle.open(out).manifest == before.manifest


def test_the_traced_network_is_the_source_s_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is loaded again for the check of the rewrites; norms that changed nothing are not named."""
    loaded: list[Source] = []
    asked: dict[str, Any] = {}

    def load(request: SourceRequest) -> Source:
        fields = {name: getattr(INFO, name) for name in INFO.__dataclass_fields__}
        loaded.append(Source(**fields, model=nn.Sequential(nn.BatchNorm2d(3)).train()))
        return loaded[-1]

    def rewritten(classifier: Any, rewrites: Any, size: int, *, rebuild: Any) -> dict[str, int]:
        asked["rewrite"] = (classifier, rewrites, size, rebuild())
        return {"fold-a": 2, "fold-b": 0, "fold-c": 1}

    def graph(classifier: Any, *arguments: Any, **options: Any) -> onnx.ModelProto:
        asked["graph"] = (classifier, arguments, options)
        return onnx.helper.make_model(
            onnx.helper.make_graph([], "empty", [], []), opset_imports=[onnx.helper.make_opsetid("", 19)]
        )

    monkeypatch.setattr(SourceRequest, "load", load)
    monkeypatch.setattr(bundling, "rewrite_checked", rewritten)
    monkeypatch.setattr(bundling, "onnx_from_model", graph)
    found = trace_to_file(REQUEST, ("fold-a",), tmp_path / "model.onnx", 23)
    assert found == Traced(INFO, ("0",), ("fold-a", "fold-c"), 19)
    classifier, rewrites, size, again = asked["rewrite"]
    assert (rewrites, size, len(loaded)) == (("fold-a",), 24, 2)
    for each, source in ((classifier, loaded[0]), (again, loaded[1])):
        assert isinstance(each, ImageClassifier)
        assert each.model is source.model
        assert not any(module.training for module in each.modules())
    expected = (PREPROCESSING, ("a", "b", "c"), tmp_path / "model.onnx")
    assert asked["graph"] == (classifier, expected, {"opset": 23})


def test_names_and_places_of_a_bundle(tmp_path: Path) -> None:
    assert [bundle_name(Path(name)) for name in ("x/net.vitx", "net", "a.b-c_1.vitx", "9")] == [
        "net",
        "net",
        "a.b-c_1",
        "9",
    ]
    for name in ("a b.vitx", ".vitx", "-a", "_a", "é", "a:b", "a\n", "a?b"):
        with pytest.raises(InputError, match=r"cannot be a bundle's name: use letters, digits, '\.', '_' and '-'"):
            check_output(tmp_path / name)
    with pytest.raises(InputError, match="/v2/models/stats are the statistics of all"):
        check_output(tmp_path / "stats.vitx")
    out = tmp_path / "net.vitx"
    check_output(out)
    out.mkdir()
    check_output(out)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"net\.vitx' exists and is no bundle: choose another --out"):
        check_output(out)
    (out / MANIFEST).mkdir()
    with pytest.raises(InputError, match="exists and is no bundle"):
        check_output(out)
    (out / MANIFEST).rmdir()
    (out / MANIFEST).write_text('{"name": "a web application", "icons": []}')
    with pytest.raises(InputError, match=r"exists and is no bundle: choose another --out \(.*not a valid Manifest"):
        check_output(out)
    bundle = write_bundle(tmp_path / "tiny.vitx")
    (bundle.path / "model.onnx").unlink()  # a damaged one may be made again
    check_output(bundle.path)
    (bundle.path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"exists and is no bundle: .*thesis\.txt is not listed"):
        check_output(bundle.path)
    (tmp_path / "file.vitx").write_text("")
    with pytest.raises(InputError, match="exists and is no bundle"):
        check_output(tmp_path / "file.vitx")
