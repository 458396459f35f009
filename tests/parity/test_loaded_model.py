"""What is opened for a path, in which runtime, and how an export is certified: without a network."""

import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import vitx.export.precision.half
import vitx.runtimes.onnxruntime
import vitx.runtimes.torch
from bundle_fixture import LABELS, PREPROCESSING, certificate, write_bundle
from table_session import PIXEL, TableSession, numbered_images
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.certificate import Executable, Verdict
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.run import ModelSpec, RunFolder, RunInfo
from vitx.export import ExportOptions, SourceRequest
from vitx.parity import exported, loaded_model
from vitx.parity.executables.listing import CANDIDATES, RUNTIMES_BY_DEFAULT
from vitx.parity.exported import certify_export, export_certified, model_from_source, sampling_plan, source_request
from vitx.parity.loaded_model import LoadedModel, model_from_bundle, open_model

SESSION = TableSession([[0.0]])


def note(seen: list[Any], what: Any, result: Any) -> Any:
    """Note what was asked for; return what was prepared."""
    seen.append(what)
    return result


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx", data="the data")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `load_session` was asked for."""
    asked: list[Any] = []

    def load_session(bundle: Bundle, runtime: str, **options: Any) -> TableSession:
        asked.append((bundle.path, runtime, options))
        return SESSION

    monkeypatch.setattr(loaded_model, "load_session", load_session)
    return asked


def test_a_bundle_says_what_it_is(bundle: Bundle, loaded: list[Any]) -> None:
    found = model_from_bundle(bundle)
    expected = {
        "name": f"{bundle.path} in onnxruntime",
        "session": SESSION,
        "preprocessing": PREPROCESSING,
        "labels": LABELS,
        "data": "the data",
        "sha256": sha256_file(bundle.path / MANIFEST),
        "precision": "fp32",
        "run": None,
        "bundle": bundle,
        "network": None,
        "renormalized": None,
        "twin": False,
    }
    assert {field.name: getattr(found, field.name) for field in fields(LoadedModel)} == expected
    assert loaded == [(bundle.path, "onnxruntime", {"device": "auto", "threads": None})]
    other = open_model(bundle.path, runtime="openvino", device="cpu", threads=3, use_twin=True)
    assert (other.name, other.session) == (f"{bundle.path} in openvino", SESSION)
    assert loaded[1:] == [(bundle.path, "openvino", {"device": "cpu", "threads": 3})]


def test_a_model_is_closed_at_the_end_of_its_block() -> None:
    session = TableSession([[0.0]])
    with LoadedModel("x", session, PIXEL, LABELS, "", "") as model:
        assert not session.was_freed
    assert (model.session, session.was_freed) == (session, True)


@pytest.mark.parametrize(
    ("precision", "device", "gpus", "runtime", "use_twin", "twin"),
    [
        ("fp16", "cpu", (), None, True, True),
        ("bf16", "auto", (), None, True, True),
        ("fp16", "cpu", ("GPU",), None, True, True),
        ("fp16", "auto", ("GPU",), None, True, False),
        ("fp16", "cuda", (), None, True, False),
        ("int8", "cpu", (), None, True, False),
        ("fp32", "cpu", (), None, True, False),
        ("fp16", "cpu", (), "onnxruntime", True, False),
        ("fp16", "cpu", (), None, False, False),
    ],
)
def test_a_half_graph_has_a_twin_on_a_processor(
    bundle: Bundle,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    device: str,
    gpus: tuple[str, ...],
    runtime: str | None,
    use_twin: bool,
    twin: bool,
) -> None:
    graphs: list[onnx.ModelProto] = []

    def twin_of(graph: onnx.ModelProto) -> onnx.ModelProto:
        changed = onnx.ModelProto()
        changed.CopyFrom(graph)
        changed.producer_name = "twin"
        return changed

    def session(bundle: Bundle, *, device: str, graph: Path) -> TableSession:
        graphs.append(onnx.load(str(graph)))
        assert device == "cpu"
        return TableSession([[1.0]])

    monkeypatch.setattr("vitx.core.machine.local_gpus", lambda: gpus)
    monkeypatch.setattr(vitx.export.precision.half, "cpu_twin", twin_of)
    monkeypatch.setattr(vitx.runtimes.onnxruntime, "OnnxRuntimeSession", session)
    half = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": precision}))
    found = model_from_bundle(half, runtime=runtime, device=device, use_twin=use_twin)
    assert (found.session is SESSION, found.precision, found.twin) == (not twin, precision, twin)
    assert [graph.producer_name for graph in graphs] == ["twin"] * twin
    assert len(loaded) == (not twin)


@pytest.mark.parametrize(("content", "reason"), [(b"no graph at all", ": "), (b"", ": it is of no operator set")])
def test_what_is_no_graph_has_no_twin(bundle: Bundle, tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    half = Bundle(tmp_path, bundle.manifest.model_copy(update={"precision": "fp16"}))
    with pytest.raises(InputError) as caught:
        model_from_bundle(half, device="cpu", use_twin=True)
    assert str(caught.value).startswith(f"'{half.model_path}' is not an ONNX graph{reason}")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    info = RunInfo(
        name="a run",
        recipe="tests",
        model=ModelSpec(name="tiny", num_classes=2),
        class_names=("a", "b"),
        preprocessing=PIXEL,
        data="numbers",
        seed=3,
    )
    write_json(tmp_path / "run" / "run.json", info)
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize(("runtime", "compiled"), [(None, False), ("torch", False), ("torch-compile", True)])
def test_a_run_says_what_it_is(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, runtime: str | None, compiled: bool
) -> None:
    asked: list[Any] = []
    session: Any = SimpleNamespace(network="network", with_normalization="normalised")

    def load_run(folder: RunFolder, which: str, **options: Any) -> Any:
        asked.append((folder.path, which, options))
        return session, "9" * 64

    monkeypatch.setattr(vitx.runtimes.torch, "load_run", load_run)
    found = open_model(run.path, runtime=runtime, which="last", device="cpu", threads=2)
    assert asked == [(run.path, "last", {"device": "cpu", "threads": 2, "compiled": compiled})]
    assert (found.name, found.session, found.preprocessing) == ("a run, checkpoint last", session, PIXEL)
    assert (found.labels, found.data, found.sha256) == (("a", "b"), "numbers", "9" * 64)
    assert (str(found.network), str(found.renormalized), found.bundle) == ("network", "normalised", None)
    assert (found.precision, found.run.path if found.run else None) == ("fp32", run.path)
    open_model(run.path)
    assert asked[1][1:] == ("best", {"device": "auto", "threads": None, "compiled": False})


def test_what_is_neither_run_nor_bundle_is_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_model(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is neither a run nor a bundle: it has no run.json and no manifest.json"
    with pytest.raises(InputError, match=r"^no run or bundle at '.*none': expected a folder made by `vitx train` or `"):
        open_model(tmp_path / "none")
    url = "'s3://bucket/tiny.vitx' is a URL: expected a path of this machine; copy it here first"
    for given in ("s3://bucket/tiny.vitx", Path("s3://bucket/tiny.vitx")):
        with pytest.raises(InputError, match=f"^{url}$"):
            open_model(given)
    with pytest.raises(InputError) as caught:
        open_model(run.path, runtime="openvino")
    assert str(caught.value) == ("runtime openvino: a run's checkpoint runs in torch; export it to a bundle for others")


IMAGES = numbered_images([0, 1] * 200, ("a", "b"))


def opening(asked: list[Any]) -> Any:
    """Stands for `open_images`, and notes whose sizes the images must have."""
    return lambda *a, skip_bad, check_size: note(asked, (*a, skip_bad, check_size.__self__), IMAGES)


def test_the_images_of_an_export_are_counted_before_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(exported, "open_images", opening(asked))
    plan = sampling_plan(SourceRequest(str(run.path)), None, 0.02)
    assert (plan.images, plan.flips) == (400, 3)  # the bound on three of 400 is 0.019269
    assert sampling_plan(SourceRequest(str(run.path)), "other", 0.01, skip_bad=True).flips == 0
    assert asked == [("numbers", "val", False, PIXEL), ("other", "val", True, PIXEL)]
    with pytest.raises(InputError, match=r"400 images cannot prove a flip rate of at most 0\.001"):
        sampling_plan(SourceRequest(str(run.path)), None, 0.001)
    with pytest.raises(InputError):
        sampling_plan(SourceRequest("model:no_such_network"), "other", 0.01)


def test_data_names_the_classes_of_a_model_and_is_the_images_of_a_run(run: RunFolder) -> None:
    images, last = ExportOptions(data="images"), ExportOptions(data="images", checkpoint="last")
    assert source_request("model:deit", images, "w") == SourceRequest("model:deit", weights="w", data="images")
    assert source_request("runs/x", last, "pretrained") == SourceRequest("runs/x", which="last", data=None)
    with pytest.raises(
        InputError, match=r"--weights w is of a model:NAME, and '.*' is a run: choose with --checkpoint"
    ):
        source_request(str(run.path), images, "w")
    with pytest.raises(InputError, match="no run at 'runs/x'"):
        source_request("runs/x", images, "w")
    with pytest.raises(InputError, match="--checkpoint last is of a run, and 'model:deit' is none: give --weights"):
        source_request("model:deit", last, "w")


class Exporting:
    """Stands for export, certificate and Triton's repository: what each was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> None:
        self.bundle = bundle
        self.calls: dict[str, Any] = {}
        self.labels = ["a", "b"]
        monkeypatch.setattr(exported, "_class_names", lambda request: self.labels)
        monkeypatch.setattr(exported, "export_bundle", self.export_bundle)
        monkeypatch.setattr(exported, "sampling_plan", self.sampling_plan)
        monkeypatch.setattr(exported, "certify_export", lambda *a, **o: self.calls.update(certify=(a, o)))
        monkeypatch.setattr(exported, "triton_repository", self.triton_repository)

    def triton_repository(self, *asked: Any, **options: Any) -> Path:
        self.calls["triton"] = (asked, options)
        return Path("repository/tiny")

    def sampling_plan(self, *asked: Any, skip_bad: bool) -> str:
        self.calls["plan"] = (*asked, skip_bad)
        return "the plan"

    def export_bundle(self, request: Any, out: Path, options: Any, *, plan: Any, quiet: bool, accept: Any) -> Bundle:
        self.calls["export"] = (request.target, out, options, plan, quiet)
        accept(self.bundle)
        return self.bundle


def test_an_export_is_certified_while_its_bundle_is_not_yet_there(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting = Exporting(monkeypatch, bundle)
    assert export_certified(Path("runs/x"), quiet=True) is bundle
    request = SourceRequest("runs/x", which="best", weights="pretrained", data=None)
    options = ExportOptions()
    assert exporting.calls == {
        "plan": (request, None, options.max_flip_rate, False),
        "export": ("runs/x", Path("runs/x.vitx"), options, "the plan", True),
        "certify": ((bundle, request, options), {"quiet": True}),
    }
    assert capsys.readouterr().err == ""
    options = ExportOptions(
        data="d", for_="cpu", witness=7, max_flip_rate=0.05, device="cpu", skip_bad=True, triton=Path("repository")
    )
    export_certified("model:deit_tiny", "o.vitx", options, weights="random")
    request = SourceRequest("model:deit_tiny", which="best", weights="random", data="d")
    assert exporting.calls["certify"] == ((bundle, request, options), {"quiet": False})
    assert exporting.calls["plan"] == (request, "d", 0.05, True)
    of_graph: dict[str, Any] = {"plan": None, "allow_uncertified": False}
    assert exporting.calls["triton"] == ((Path("o.vitx"), Path("repository")), of_graph)
    assert capsys.readouterr().err == (
        "export: model:deit_tiny to o.vitx\nexport: in 'repository/tiny' Triton runs the ONNX graph, on the CPU\n"
    )
    export_certified("runs/x", options=options.model_copy(update={"trt": True, "data": None}))
    of_plan = {"plan": bundle.path / "engines" / "tensorrt.plan", "allow_uncertified": False}
    assert exporting.calls["triton"] == ((Path("runs/x.vitx"), Path("repository")), of_plan)
    assert "in 'repository/tiny' Triton runs the TensorRT plan, on the GPU" in capsys.readouterr().err


def test_a_run_has_its_bundle_beside_it_however_it_is_named(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exporting = Exporting(monkeypatch, bundle)
    export_certified("runs/x/", quiet=True)
    assert exporting.calls["export"][1] == Path("runs/x.vitx")
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    for folder, target in (("x", "."), ("x/checkpoints", "..")):
        monkeypatch.chdir(tmp_path / folder)
        export_certified(target, quiet=True)
        assert exporting.calls["export"][1] == tmp_path.resolve() / "x.vitx"


def test_what_comes_after_the_bundle_is_checked_before_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An export may take hours, and its bundle would stand there with exit code 2."""
    exporting = Exporting(monkeypatch, bundle)
    (tmp_path / "o" / "1").mkdir(parents=True)
    (tmp_path / "file").touch()
    for options, message in (
        (ExportOptions(triton=tmp_path / "file"), "file/o' cannot be a folder: '.*file' is none"),
        (ExportOptions(sign=tmp_path / "none.pem"), r"none\.pem' is no private key of an elliptic curve"),
        (ExportOptions(triton=tmp_path), "o' exists and is no Triton model: choose another folder"),
        (ExportOptions(for_="cpu", calibration=str(tmp_path / "typo")), "no data at '.*typo'"),
    ):
        with pytest.raises(InputError, match=message):
            export_certified("runs/x", tmp_path / "o.vitx", options, quiet=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvironmentMissing, match="device cuda was asked for, but torch sees no GPU"):
        export_certified("runs/x", tmp_path / "o.vitx", ExportOptions(device="cuda"), quiet=True)
    exporting.labels = ["a", "b\nc"]
    with pytest.raises(InputError, match=r"the label 'b\\nc' does not fit a line of Triton's labels\.txt: rename"):
        export_certified("runs/x", tmp_path / "o.vitx", ExportOptions(triton=tmp_path / "models"), quiet=True)
    assert exporting.calls == {}


def test_what_triton_or_timm_cannot_read_is_refused_before_the_export(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting = Exporting(monkeypatch, bundle)
    monkeypatch.setattr(exported, "write_hub_folder", lambda request, bundle, out: out)
    out, models, hub = tmp_path / "o.vitx", tmp_path / "models", tmp_path / "hub"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    inside = re.escape(f"--out '{out}' and --hub '{out / 'hub'}' would be in one another: choose folders apart")
    for options, message in (
        (ExportOptions(hub=tmp_path / "full"), r"--hub .*full exists and holds no config\.json: choose another folder"),
        (ExportOptions(hub=out / "hub"), f"^{inside}$"),
        (ExportOptions(triton=models, precision="bf16"), "has no bfloat16 kernels on a CPU: give it a plan"),
    ):
        with pytest.raises(InputError, match=message):
            export_certified("runs/x", out, options, quiet=True)
    assert exporting.calls == {}
    export_certified("runs/x", out, ExportOptions(triton=models, precision="bf16", trt=True), quiet=True)
    assert exporting.calls["triton"][0] == (out, models)
    for quiet in (True, False):
        export_certified("runs/x", out, ExportOptions(hub=hub), quiet=quiet)
        said = f"export: runs/x to {out}\nexport: '{hub}' is a folder for timm\n"
        assert capsys.readouterr().err == ("" if quiet else said)


def test_the_class_names_are_those_of_the_run_or_of_the_data(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(exported, "open_images", lambda *a, skip_bad: note(asked, (*a, skip_bad), IMAGES))
    assert exported._class_names(SourceRequest(str(run.path), data="numbers")) == ("a", "b")
    assert exported._class_names(SourceRequest("model:deit")) == ()
    assert asked == []
    assert exported._class_names(SourceRequest("model:deit", data="numbers")) == IMAGES.class_names
    assert asked == [("numbers", "val", True)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), InputError("no")])
def test_a_bundle_whose_repository_cannot_be_written_is_named(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """It may have taken hours, and the error is of another folder."""

    def refuse(*asked: Any, **options: Any) -> Path:
        raise error

    Exporting(monkeypatch, bundle)
    monkeypatch.setattr(exported, "triton_repository", refuse)
    with pytest.raises(type(error)):
        export_certified("runs/x", "o.vitx", ExportOptions(triton=Path("repository")), quiet=True)
    assert capsys.readouterr().err == "export: 'o.vitx' is written and stays; what follows it failed\n"


def test_an_uncertified_export_looks_at_no_images(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    exporting = Exporting(monkeypatch, bundle)
    options = ExportOptions(uncertified=True, triton=Path("repository"))
    export_certified("model:deit_tiny", options=options, quiet=True)
    assert set(exporting.calls) == {"export", "triton"}
    assert exporting.calls["export"] == ("model:deit_tiny", Path("deit_tiny.vitx"), options, None, True)
    assert exporting.calls["triton"][1] == {"plan": None, "allow_uncertified": True}
    with pytest.raises(InputError) as caught:
        export_certified("model:deit_tiny", quiet=True)
    assert str(caught.value) == ("'model:deit_tiny' brings no images to certify on: give --data, or say --uncertified")


@pytest.mark.parametrize(("precision", "tokens"), [("fp32", False), ("int8", True)])
@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_the_certificate_of_an_export(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, precision: str, tokens: bool, verdict: str
) -> None:
    asked: list[Any] = []
    sides = [
        LoadedModel(name, TableSession([[0.0]]), PIXEL, LABELS, "its data", "") for name in ("reference", "candidate")
    ]
    bundle = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": precision}))
    digest = bundle.manifest.provenance.checkpoint_sha256
    request: Any = SimpleNamespace(load_again={digest: "the source"}.__getitem__)

    def certify_models(*models: Any, token_similarity: Any, **options: Any) -> Any:
        asked.append((models, options))
        assert token_similarity() == ("measured" if tokens else None)
        return certificate(verdict=verdict, reasons=("one", "two"))

    def measured(*models: Any, quiet: bool) -> str:
        assert models == (*sides, IMAGES)
        assert quiet
        return "measured"

    monkeypatch.setattr(exported, "model_from_source", lambda *a: note(asked, a, sides[0]))
    monkeypatch.setattr(exported, "model_from_bundle", lambda *a, **o: note(asked, (a, o), sides[1]))
    monkeypatch.setattr(exported, "open_images", opening(asked))
    monkeypatch.setattr(exported, "certify_models", certify_models)
    monkeypatch.setattr(exported, "measure_token_similarity", measured)
    monkeypatch.setattr(exported, "failure_notes", lambda *a, **o: (str(a[3].verdict), f"{a[4] is request} {o}"))
    for data, opened, for_ in (("other", "other", None), (None, "its data", "cpu")):
        asked.clear()
        for side in range(2):
            sides[side] = replace(sides[side], session=TableSession([[0.0]]))

        def certified(data: str | None = data, for_: Any = for_) -> None:
            options = ExportOptions(data=data, max_flip_rate=0.25, device="cpu", skip_bad=True, witness=0, for_=for_)
            certify_export(bundle, request, options, quiet=True)

        if verdict == "pass":
            certified()
        else:
            with pytest.raises(CheckFailed) as caught:
                certified()
            assert str(caught.value) == (
                "the graph is not the checkpoint's equal, no bundle written: one; two; fail; True {'quiet': True}"
            )
        options = {
            "device": "cpu",
            "max_flip_rate": 0.25,
            "write": True,
            "runtimes": (*RUNTIMES_BY_DEFAULT, *CANDIDATES) if for_ else RUNTIMES_BY_DEFAULT,
            "add_evidence": None,
            "quiet": True,
        }
        assert asked == [
            ("the source", "cpu"),
            ((bundle,), {"device": "cpu", "use_twin": True}),
            (opened, "val", True, PIXEL),
            ((*sides, IMAGES), options),
        ]
        assert all(side.session.was_freed for side in sides)  # type: ignore[attr-defined]


def test_what_fails_ends_an_export_unless_it_is_a_candidate_and_the_witness_set_is_of_its_images(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [LoadedModel(name, TableSession([[0.0]]), PIXEL, LABELS, "its data", "") for name in ("one", "other")]
    asked: list[Any] = []

    def exports(runtime: str) -> None:
        of: dict[str, Any] = dict.fromkeys(("version", "provider", "architecture", "precision"), "x")
        executable = Executable(runtime=runtime, artefacts={"a": "0"}, **of)
        fails = Verdict(executable=executable, verdict="fail", reasons=("1", "2"), evidence="witness set")
        found = certificate(verdict="pass", executables=(fails,))
        monkeypatch.setattr(exported, "certify_models", lambda *a, **o: note(asked, o["add_evidence"], found))
        request: Any = SimpleNamespace(load_again=lambda digest: "the source")
        certify_export(bundle, request, ExportOptions(device="cpu", witness=7), quiet=True)

    monkeypatch.setattr(exported, "model_from_source", lambda *a: sides[0])
    monkeypatch.setattr(exported, "model_from_bundle", lambda *a, **o: sides[1])
    monkeypatch.setattr(exported, "open_images", opening([]))
    exports(CANDIDATES[0])
    with pytest.raises(CheckFailed, match=r"^onnxruntime x .* is not the checkpoint's equal, no bundle written: 1; 2$"):
        exports("onnxruntime")
    monkeypatch.setattr(exported, "TorchSession", TableSession)
    monkeypatch.setattr(TableSession, "infer_float64", "exact", raising=False)
    monkeypatch.setattr(exported, "partial", lambda function, **options: (function, options))
    monkeypatch.setattr(exported, "add_witness", lambda *a, **o: (a, o))
    exact = ("exact", {"outputs": tuple(spec.name for spec in bundle.manifest.outputs)})
    given = (bundle, IMAGES, "comparison", "certificate", exact)
    assert asked[0](bundle, "comparison", "certificate") == (given, {"count": 7, "flops": None, "quiet": True})


def test_a_source_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(network="network", with_normalization="normalised")
    asked: list[Any] = []
    monkeypatch.setattr(exported, "TorchSession", lambda *a, **o: note(asked, (a, o), session))
    monkeypatch.setattr(exported, "device_name", {"auto": "cpu:0"}.__getitem__)
    source: Any = SimpleNamespace(
        model="m", preprocessing=PIXEL, name="n", checkpoint="c", class_names=LABELS, data="d", checkpoint_sha256="s"
    )
    found = model_from_source(source, "auto")
    assert asked == [(("m", PIXEL), {"device": "cpu:0"})]
    normalised: Any = "normalised"
    network: Any = "network"
    expected = LoadedModel(
        "n, checkpoint c", session, PIXEL, LABELS, "d", "s", network=network, renormalized=normalised
    )
    assert found == expected
