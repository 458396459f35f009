"""`vitx analyze`: metrics of one network or two, their cache and their report; the network is left unchanged."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from matplotlib.text import Text
from PIL import Image

from browser import PROGRAM, Browser, running_browser
from cli_fixture import Vitx
from training_jobs import TINY_SETTINGS
from vitx.analyze import METRICS, AnalysisOptions, NotApplicable, analyze, chosen_metrics, compare_representations
from vitx.analyze.analysis_report import draw, figure
from vitx.analyze.images import open_analysis_images
from vitx.analyze.metrics.lesions import lesion_study
from vitx.analyze.metrics.trajectory import checkpoints_by_step
from vitx.analyze.options import METRIC_NAMES
from vitx.core.errors import InputError
from vitx.core.run import ModelSpec
from vitx.data.image_set import ImageSet
from vitx.models.source import Source, SourceRequest

FAST = (
    *("over-smoothing", "attention-collapse", "attention-collapse-mixed", "feature-similarity"),
    *("fourier", "variance", "cka", "lesions"),
)
Runs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def run(make_run: Runs) -> Path:
    return make_run("first", 0)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return open_analysis_images("digits", 24)


def resnet(classes: int = 10) -> Source:
    torch.manual_seed(0)
    return Source(
        name="resnet",
        model=timm.create_model("resnet18", num_classes=classes),
        spec=ModelSpec(name="resnet18", num_classes=classes),
        class_names=tuple(map(str, range(classes))),
        preprocessing=SourceRequest("model:resnet18", weights="random")
        .load()
        .preprocessing.model_copy(update={"image_size": 32}),
        data="",
        checkpoint="random",
        checkpoint_sha256="0" * 64,
    )


def test_the_network_is_left_as_it_was(run: Path, images: ImageSet) -> None:
    source = SourceRequest(str(run)).load()
    model = source.model.train()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = analyze(source, images, FAST, AnalysisOptions(), quiet=True)
    assert set(found.results) == set(FAST)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with torch.autocast("cpu", torch.bfloat16):
        assert analyze(source, images, FAST, AnalysisOptions(), quiet=True).results == found.results
        assert torch.is_autocast_enabled("cpu")


def test_lesions_are_those_of_networks_without_the_unit(run: Path, images: ImageSet) -> None:
    source = SourceRequest(str(run)).load()
    found = lesion_study(source.model, images, source.preprocessing, batch_size=7, quiet=True)

    def accuracy(model: Any) -> float:
        correct = 0
        with torch.inference_mode():
            for index, pixels in enumerate(images.batches(source.preprocessing, 1)):
                inputs = torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 255
                mean, std = (
                    torch.tensor(v).view(1, 3, 1, 1) for v in (source.preprocessing.mean, source.preprocessing.std)
                )
                correct += int(model((inputs - mean) / std).argmax() == images.labels[index])
        return correct / len(images)

    assert found.accuracy == accuracy(source.model)
    for name, unit in found.units.items():
        lesioned: Any = SourceRequest(str(run)).load().model
        branch = lesioned.get_submodule(name)
        last = branch.proj if unit.kind == "attention" else branch.fc2
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
        assert unit.accuracy == accuracy(lesioned), name


def test_results_are_cached_and_measured_again_when_anything_changes(
    run: Path, images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceRequest(str(run)).load()
    names = ("over-smoothing", "attention-collapse", "lesions")
    first = analyze(source, images, names, AnalysisOptions(), cache=tmp_path, quiet=True)
    calls: list[int] = []
    source.model.register_forward_hook(lambda *_: calls.append(1))
    again = analyze(source, images, names, AnalysisOptions(), cache=tmp_path, quiet=True)
    assert not calls
    assert again.results == first.results
    assert again.seconds == first.seconds
    other_threshold = AnalysisOptions(similar_above=0.1)
    third = analyze(source, images, names, other_threshold, cache=tmp_path, quiet=True)
    assert calls
    assert len(list(tmp_path.iterdir())) == 4  # of the three only attention-collapse depends on the threshold
    assert third.results["attention-collapse"] != first.results["attention-collapse"]
    calls.clear()
    analyze(source, images.first(12), names, AnalysisOptions(), cache=tmp_path, quiet=True)
    assert calls


def test_the_same_weights_with_another_preprocessing_or_argument_are_measured_again(
    images: ImageSet, tmp_path: Path
) -> None:
    """Their digest is the same, and what they compute is not."""
    one, names = resnet(), ("variance",)
    paler = one.preprocessing.model_copy(update={"std": (2.0, 2.0, 2.0)})
    others = (replace(one, preprocessing=paler), replace(one, spec=one.spec.model_copy(update={"kwargs": {"a": 1}})))
    first = analyze(one, images, names, AnalysisOptions(), cache=tmp_path, quiet=True)
    for count, other in enumerate(others, 2):
        found = analyze(other, images, names, AnalysisOptions(), cache=tmp_path, quiet=True)
        assert len(list(tmp_path.iterdir())) == count
        assert (found.results != first.results) == (other.preprocessing is paler)


def test_labels_of_other_classes_are_not_used(images: ImageSet) -> None:
    named = replace(images, class_names=tuple("abcdefghij"))
    source = replace(resnet(), class_names=tuple("abdcefghij"))
    found = analyze(source, named, ("confidence",), AnalysisOptions(), quiet=True)
    assert found.not_applicable == {"confidence": "class 2 is 'c' of the images, and 'd' of the network"}
    for one, other in ((resnet(), named), (source, images)):  # without names there is nothing to compare
        assert "confidence" in analyze(one, other, ("confidence",), AnalysisOptions(), quiet=True).results


def test_a_cached_result_of_another_form_is_measured_again(images: ImageSet, tmp_path: Path) -> None:
    first = analyze(resnet(), images, ("variance",), AnalysisOptions(), cache=tmp_path, quiet=True)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"result":', '"result": {}, "before":').replace('"before"', '"metric"'))
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "metric": "variance", "result": {}}))
    assert (
        analyze(resnet(), images, ("variance",), AnalysisOptions(), cache=tmp_path, quiet=True).results == first.results
    )


@pytest.mark.parametrize("content", ["", "{}", "\0\0\0", "[1]"])
def test_a_damaged_cached_result_counts_as_absent(
    images: ImageSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """As a full disk or a power cut leaves it; one line says so, and other metrics are measured as ever."""
    first = analyze(resnet(), images, ("fourier", "variance"), AnalysisOptions(), cache=tmp_path, quiet=True)
    (path,) = tmp_path.glob("variance-*.json")
    path.write_text(content)
    other = analyze(resnet(), images, ("fourier",), AnalysisOptions(), cache=tmp_path)
    assert set(other.results) == {"fourier"}
    assert capsys.readouterr().err == f"analyze: '{path}' is damaged and counts as absent\n"
    again = analyze(resnet(), images, ("variance",), AnalysisOptions(), cache=tmp_path, quiet=True)
    assert again.results == first.results
    assert json.loads(path.read_text())["metric"] == "variance"


@pytest.mark.parametrize("metric", ["landscape", "trajectory"])
def test_the_states_of_checkpoints_are_read_once_for_the_cache(
    run: Path, images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    read: list[Any] = []

    def counted(found: Any) -> list[Any]:
        read.append(found)
        return checkpoints_by_step(found)

    monkeypatch.setattr("vitx.analyze.analysis.checkpoints_by_step", counted)
    options = AnalysisOptions(loss_batches=1, landscape_points=3)
    analyze(SourceRequest(str(run)).load(), images, (metric,), options, cache=tmp_path, quiet=True)
    assert len(read) == 1


@pytest.mark.parametrize("content", ["{", "{}", '{"networks": 3}'])
def test_a_report_that_cannot_be_read_is_replaced(vitx: Vitx, run: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    given = ("--images", "8", "--only", "variance", "--out", tmp_path, "--quiet")
    assert vitx("analyze", run, *given)[0] == 0
    assert json.loads((tmp_path / "report.json").read_text())["networks"]


@pytest.mark.parametrize("only", ["trajectory", "landscape"])
def test_a_damaged_checkpoint_is_an_error_and_not_a_property(vitx: Vitx, run: Path, tmp_path: Path, only: str) -> None:
    copied = shutil.copytree(run, tmp_path / "run", symlinks=True)
    second = shutil.copytree(copied / "checkpoints" / "epoch-0000", copied / "checkpoints" / "epoch-0001")
    given = ("analyze", copied, "--images", "8", "--only", only, "--out", tmp_path / "out", "--quiet")
    whole = (second / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:-1] + b"x"):
        (second / "model.safetensors").write_bytes(damaged)
        code, _, errors = vitx(*given)
        assert (code, "is corrupt" in errors) == (2, True)
    (second / "model.safetensors").write_bytes(whole)
    assert vitx(*given)[0] == 0


def test_what_does_not_apply_is_listed_with_its_reason(images: ImageSet) -> None:
    found = analyze(resnet(7), images, FAST, AnalysisOptions(), quiet=True)
    assert "no attention" in found.not_applicable["attention-collapse"]
    assert "no layer mixes" in found.not_applicable["attention-collapse-mixed"]
    assert "10 classes, the network knows 7" in found.not_applicable["lesions"]
    assert {"fourier", "variance", "cka"} <= set(found.results)


def test_a_folder_without_labels(run: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for index in range(5):
        Image.fromarray(generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    images = open_analysis_images(str(tmp_path))
    found = analyze(SourceRequest(str(run)).load(), images, FAST, AnalysisOptions(), quiet=True)
    assert found.not_applicable == {"lesions": "the images have no labels"}
    assert "over-smoothing" in found.results
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no image below"):
        open_analysis_images(str(tmp_path / "empty"))


def test_an_unreadable_image_without_a_label_is_named_or_left_out(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[:40])
    with pytest.raises(InputError, match=r"unreadable image .*b\.png: .*; repair or remove it, or pass --skip-bad"):
        open_analysis_images(str(tmp_path))
    found = open_analysis_images(str(tmp_path), skip_bad=True)
    assert (found.keys, found.class_names, found.labels.tolist()) == (("a.png",), (), [-1])
    assert [line.partition(":")[0] for line in found.skipped] == [str(tmp_path / "b.png")]
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        open_analysis_images(str(tmp_path), skip_bad=True)
    assert str(caught.value) == f"{tmp_path} has no readable image"


def test_a_named_set_is_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from `runs`, the run `digits` is a folder, whose one picture is its first batch."""
    (tmp_path / "digits").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "digits" / "first-batch.png")
    monkeypatch.chdir(tmp_path)
    found = open_analysis_images("digits")
    assert (len(found), len(found.class_names)) == (360, 10)


def test_a_folder_of_shards_has_its_labels(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for name, content in (("0.png", picture.getvalue()), ("0.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    (tmp_path / "classnames.txt").write_text("cat\ndog")
    found = open_analysis_images(str(tmp_path))
    assert (found.class_names, found.labels.tolist()) == (("cat", "dog"), [1])
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")  # and then it is a folder of images
    assert open_analysis_images(str(tmp_path)).class_names == ()


def test_limits_take_images_evenly() -> None:
    images = open_analysis_images("digits", 10)
    assert len(images) == 10
    assert len(set(images.labels.tolist())) > 4
    assert images.read(3) == open_analysis_images("digits").read(int(np.linspace(0, 359, 10)[3]))


def test_cka_between_a_network_and_itself_is_its_own(run: Path, images: ImageSet) -> None:
    source = SourceRequest(str(run)).load()
    own = analyze(source, images, ("cka",), AnalysisOptions(), quiet=True).results["cka"]
    between = compare_representations(source, SourceRequest(str(run)).load(), images, AnalysisOptions(), quiet=True)
    assert np.allclose(np.array(between.matrix), np.array(own.matrix), atol=1e-5)  # type: ignore[attr-defined]
    other = compare_representations(source, resnet(), images, AnalysisOptions(), quiet=True)
    assert (len(other.layers), len(other.columns)) == (7, 9)
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    blank = Source(**{**vars(resnet()), "model": linear})
    with pytest.raises(NotApplicable):
        compare_representations(source, blank, images, AnalysisOptions(), quiet=True)


def test_unknown_metrics_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean fourier"):
        chosen_metrics(["furier"])
    assert chosen_metrics(["cka", "over-smoothing"]) == ("over-smoothing", "cka")
    assert chosen_metrics(["all"]) == tuple(METRICS)
    assert chosen_metrics("all") == tuple(METRICS)
    assert chosen_metrics("cka") == ("cka",)


def test_analyze_takes_the_names_that_chosen_metrics_takes(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in (None, tmp_path):
        with pytest.raises(InputError, match="unknown metric 'furier': did you mean fourier"):
            analyze(resnet(), images, ["furier"], AnalysisOptions(), cache=cache, quiet=True)
    assert list(analyze(resnet(), images, "variance", AnalysisOptions(), quiet=True).results) == ["variance"]
    quick = {name: METRICS[name] for name in ("fourier", "variance")}  # all of them take long
    monkeypatch.setattr("vitx.analyze.analysis.METRICS", quick)
    assert list(analyze(resnet(), images, ["all"], AnalysisOptions(), quiet=True).results) == ["fourier", "variance"]


def test_a_wrong_name_is_refused_before_torch_is_imported() -> None:
    script = (
        "import sys, vitx.cli\nsys.argv = ['vitx', 'analyze', 'run', '--only', 'nonsense']\n"
        "try: vitx.cli.main()\nexcept SystemExit as end: sys.exit(100 if 'torch' in sys.modules else end.code)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "unknown metric 'nonsense': did you mean confidence?" in ended.stderr
    assert tuple(METRICS) == METRIC_NAMES


def test_only_adds_to_the_report_and_each_result_is_written_at_once(
    vitx: Vitx, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("analyze", run, "--images", 12, "--out", tmp_path / "report")

    def shown() -> set[str]:
        (network,) = json.loads((tmp_path / "report" / "report.json").read_text())["networks"]
        page = (tmp_path / "report" / "index.html").read_text()
        assert all(f'<h2 id="{name}">' in page for name in network["metrics"])
        return set(network["metrics"])

    assert vitx(*arguments, "--only", "variance")[0] == 0
    stopped = replace(METRICS["lesions"], measure=lambda context: (_ for _ in ()).throw(InputError("stopped")))
    with monkeypatch.context() as patched:
        patched.setitem(METRICS, "lesions", stopped)
        code, _, said = vitx(*arguments, "--only", "fourier,lesions")
    assert (code, "stopped" in said) == (2, True)
    assert shown() == {"variance", "fourier"}
    assert vitx(*arguments, "--only", "lesions")[0] == 0
    assert shown() == {"variance", "fourier", "lesions"}
    code, _, said = vitx(*arguments[:3], 13, *arguments[4:], "--only", "variance")
    assert (code, "is of other networks or images and is replaced" in said) == (0, True)
    assert shown() == {"variance"}


def test_every_metric_is_measured_described_and_drawn(run: Path, tmp_path: Path) -> None:
    options = AnalysisOptions(batch_size=4, eigenvalues=2, loss_batches=1, landscape_points=3)
    images = open_analysis_images("digits", 8)
    source = SourceRequest(str(run)).load()
    found = analyze(source, images, chosen_metrics(["all"]), options, cache=tmp_path, quiet=True)
    assert set(found.not_applicable) == {"trajectory"}
    assert "holds 1 checkpoint" in found.not_applicable["trajectory"]
    assert set(found.results) == set(METRICS) - {"trajectory"}
    for name, record in found.results.items():
        assert METRICS[name].line(record)
        assert METRICS[name].precision
        figure = draw(name, {"one": record, "other": record})
        assert figure is not None or name in ("temperature", "rollout")  # a table; pictures of the images
        if figure is not None:
            figure.savefig(tmp_path / "figure.png")
            assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes if not axes.get_label())
    json.dumps(found.as_json(), allow_nan=False)
    again = analyze(source, images, chosen_metrics(["all"]), options, cache=tmp_path, quiet=True)
    assert again.as_json() == found.as_json()


def test_the_hessian_of_one_module_and_published_copies(vitx: Vitx, run: Path, tmp_path: Path) -> None:
    labels = np.tile(np.arange(4, dtype=np.uint8), 5)
    np.save(tmp_path / "fog.npy", np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", labels)
    arguments = ("analyze", run, "--images", 4, "--batch", 4, "--only", "hessian,corruptions", "--json", "-q")
    code, printed, said = vitx(*arguments, "--module", "blocks.1.attn", "--corrupted", tmp_path)
    assert code == 0, said
    (network,) = json.loads(printed)["networks"]
    hessian, corrupted = network["metrics"]["hessian"], network["metrics"]["corruptions"]
    model = SourceRequest(str(run)).load().model
    assert hessian["parameters"] == sum(p.numel() for p in model.get_submodule("blocks.1.attn").parameters())
    assert (list(corrupted["accuracy"]), corrupted["images"]) == (["fog"], 4)
    code, _, said = vitx(*arguments, "--module", "blocks.9")
    assert code == 2
    assert "unknown module 'blocks.9'" in said
    code, _, said = vitx(*arguments, "--corrupted", tmp_path / "nothing")
    assert code == 2
    assert "no corrupted copies" in said


@pytest.mark.parametrize("metric", ["fourier", "variance", "cka"])
def test_the_name_of_a_network_is_no_formula(images: ImageSet, metric: str) -> None:
    """A folder may be called run$a_$, which is none that matplotlib can read."""
    found = analyze(resnet(), images, (metric,), AnalysisOptions(), quiet=True)
    one, other = replace(found, source=replace(found.source, name="runs/run$a_$")), found
    assert figure(metric, one, other).startswith(b"\x89PNG")
    drawn = draw(metric, {"run$a_$": found.results[metric], "other": found.results[metric]})
    assert drawn is not None
    assert any(r"run\$a_\$" in text.get_text() for text in drawn.findobj(Text))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine")
    with running_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small DeepViT on the digits, trained without the losses and with the cosine loss, two epochs each."""
    from vitx.train import resolve_recipe, train

    runs = tmp_path_factory.mktemp("trained")
    plain = ["losses.mixing=0", "losses.contrastive=0", "cutmix.probability=0"]
    for name, settings in (("baseline", plain), ("regularised", ["losses.cosine=1"])):
        recipe = resolve_recipe("digits-deepvit", overrides=[*TINY_SETTINGS[1::2], "epochs=2", *settings])
        train(recipe, runs / name, device="cpu", quiet=True)
    return runs / "baseline", runs / "regularised"


def test_the_report_of_two_trainings_opens_in_a_browser(
    vitx: Vitx, trained: tuple[Path, Path], tmp_path: Path, browser: Browser
) -> None:
    out = tmp_path / "report"
    arguments = ("analyze", *trained, "--images", 24, "--out", out)
    code, printed, said = vitx(*arguments, "--json")
    assert code == 0, said
    report = json.loads(printed)
    assert [network["images"] for network in report["networks"]] == [24, 24]
    assert set(report["networks"][0]["metrics"]) >= set(FAST)
    assert report == json.loads((out / "report.json").read_text())
    browser.open(f"file://{out / 'index.html'}")
    figures = browser.run("[...document.querySelectorAll('.plot img')].map((image) => image.naturalWidth)")
    assert len(figures) == len(list((out / "figures").glob("*.png"))) >= len(FAST) + 1
    assert min(figures) > 300
    for title in ("Attention collapse, softmax maps", "Attention collapse, mixed maps"):
        assert title in browser.run("document.body.innerText")
    collapses = [report["networks"][0]["metrics"][f"attention-collapse{end}"] for end in ("", "-mixed")]
    assert [found["maps"] for found in collapses] == ["softmax", "mixed"]
    assert collapses[0]["matrix"] != collapses[1]["matrix"]
    text = browser.run("document.body.innerText")
    assert "baseline and regularised" in text
    assert (
        text.index("Findings: baseline")
        < text.index("What differs: regularised less baseline")
        < text.index("Evidence")
    )
    assert report["differences"]
    assert browser.complaints == []
    code, printed, _ = vitx(*arguments)
    assert code == 0
    assert "over-smoothing" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("model:vit_tiny_patch16_224", "--weights", "random"), "give --data"),
        (("model:vit_tony", "--data", "digits"), "unknown model"),
        (("nowhere",), "no run at 'nowhere'"),
        (
            ("model:vit_tiny_patch16_224", "--weights", "random", "--data", "digits", "--only", "hesian"),
            "unknown metric",
        ),
    ],
)
def test_bad_input_is_one_clear_error(vitx: Vitx, arguments: tuple[str, ...], expected: str) -> None:
    code, _, said = vitx("analyze", *arguments)
    assert code == 2
    assert expected in said
    assert "Traceback" not in said
