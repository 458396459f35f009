"""`vitx report`: a page that needs no other file, with the numbers of the run."""

import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.cbook import is_math_text

from bundle_fixture import write_bundle
from cli_fixture import Vitx
from training_jobs import TINY_SETTINGS, metrics_of
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import link_atomically
from vitx.core.panels import png
from vitx.core.probabilities import wilson_interval
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.models import load_run_model
from vitx.train import report
from vitx.train.loop.result import TrainingResult
from vitx.train.report import _logits, confusion_matrix, most_confused
from vitx.train.report_figures import draw_confusion, draw_curves, draw_layers


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with all losses."""
    from vitx.train import resolve_recipe, train

    folder = tmp_path_factory.mktemp("finished") / "run <1>"
    recipe = resolve_recipe("digits-deepvit", overrides=[*TINY_SETTINGS[1::2], "epochs=2", "workers=0", "keep_every=1"])
    train(recipe, folder, device="cpu", quiet=True)
    assert {path.name for path in (folder / "checkpoints").glob("epoch-*")} == {f"epoch-000{i}" for i in range(3)}
    return folder


class Page(HTMLParser):
    """A page's links, headings, tags and table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self._place = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag == "tr":
            self.rows.append([])
        self._place = tag

    def handle_data(self, data: str) -> None:
        if self._place in ("th", "td") and self.rows:
            self.rows[-1].append(data)
        elif self._place in ("h1", "h2"):
            self.headings.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._place = ""


def test_the_page_shows_the_run_and_needs_no_other_file(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    code, printed, _ = vitx("report", finished, "--out", out, "--device", "cpu", "--json")
    assert code == 0
    summary, text = json.loads(printed), out.read_text()
    page = Page(text)
    assert len(page.links) == 4  # no icon, and three pictures
    assert all(link.startswith("data:") for link in page.links)
    assert "http" not in text
    assert "script" not in page.tags
    assert page.headings == ["run <1>", "Curves", "Layers", "Confusion matrix", "Recipe", "Environment"]

    history = metrics_of(finished)
    best = max(history, key=lambda row: row["top1"])
    assert summary["top1"] == best["top1"]
    assert summary["nll"] == pytest.approx(best["nll"], rel=1e-5)
    cells = {row[0]: row[1] for row in page.rows if len(row) == 2}
    low, high = wilson_interval(round(360 * best["top1"]), 360)
    interval = f"95 % interval {low:.1%} to {high:.1%} (Wilson)"
    assert cells["top-1"] == f"{best['top1']:.2%} of 360 images, {interval}"
    assert cells["best epoch"].startswith(f"{best['epoch']} by top1")
    assert cells["epochs *"] == "2"  # 30 in the recipe of that name
    assert cells["optimizer.lr"] == "0.002"
    assert cells["data.val.images"] == "360"
    assert len([name for name in cells if " taken for " in name]) == 10


@pytest.mark.parametrize("picture", ["curves", "layers"])
def test_a_picture_without_matplotlib_names_the_extra(
    finished: Path, monkeypatch: pytest.MonkeyPatch, picture: str
) -> None:
    monkeypatch.delitem(sys.modules, "vitx.train.report_figures")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    result = TrainingResult(RunFolder(finished), metrics_of(finished), resumed_from=0, images=8)
    with pytest.raises(EnvironmentMissing, match=r"package 'matplotlib.*pip install 'vitx\[analyze\]'"):
        getattr(result, picture)()


def test_figures_are_in_our_style_whatever_a_notebook_has_set(finished: Path, tmp_path: Path) -> None:
    """On a black ground black lines would not be seen, and TeX is not everywhere."""

    result = TrainingResult(RunFolder(finished), metrics_of(finished), resumed_from=0, images=8)

    def pictures() -> tuple[bytes, bytes, list[str]]:
        page = tmp_path / "page.html"
        report.write_report(RunFolder.open(finished), page, device=torch.device("cpu"), quiet=True)
        return result.curves(), result.layers(), Page(page.read_text()).links

    plain = pictures()
    with rc_context({"figure.facecolor": "black", "text.usetex": True}):
        assert pictures() == plain


def test_the_page_lies_in_the_run_by_default(vitx: Vitx, finished: Path) -> None:
    code, printed, _ = vitx("report", finished, "--checkpoint", "last", "--device", "cpu", "--quiet")
    assert code == 0
    assert "epoch-0002" in printed
    assert "epoch-0002, averaged weights" in (finished / "report.html").read_text()
    (finished / "report.html").unlink()


def test_the_page_of_the_trained_weights_says_so(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    """Their top-1 is another than that of the curves."""
    page = tmp_path / "page.html"
    chosen = ("--checkpoint", "last-raw", "--out", page, "--device", "cpu", "--quiet", "--json")
    code, printed, _ = vitx("report", finished, *chosen)
    found = json.loads(printed)
    assert (code, found["checkpoint"], found["weights"]) == (0, "epoch-0002", "trained")
    assert found["nll"] == pytest.approx(metrics_of(finished)[1]["raw"]["nll"], rel=1e-5)
    assert "epoch-0002, trained weights" in page.read_text()


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_training_that_goes_on_changes_nothing_of_a_page_begun(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: Literal["best", "last"]
) -> None:
    run, history = tmp_path / "run", metrics_of(finished)
    shutil.copytree(finished, run, symlinks=True)

    def link_to(epoch: int) -> None:
        for name in ("best", "last"):
            link_atomically(run / "checkpoints" / name, f"epoch-{epoch:04d}")

    def goes_on(opened: RunFolder, *args: object, **options: object) -> ImageSet:
        link_to(2)
        shutil.rmtree(run / "checkpoints" / "epoch-0001")
        return open_images("digits", "val")

    link_to(1)
    monkeypatch.setattr(report, "_images", goes_on)
    out = tmp_path / "page.html"
    found = report.write_report(RunFolder(run), out, which=which, device=torch.device("cpu"), quiet=True)
    assert (found["checkpoint"], found["epochs"]) == ("epoch-0001", "1 of 2")
    assert history[0]["nll"] != pytest.approx(history[1]["nll"], rel=1e-4)
    assert found["nll"] == pytest.approx(history[0]["nll"], rel=1e-5)


def test_the_confusion_matrix_is_that_of_the_averaged_weights(finished: Path) -> None:
    run, images = RunFolder.open(finished), open_images("digits", "val")
    model, state = load_run_model(run)
    p = run.info.preprocessing
    logits = _logits(model, p, images, torch.device("cpu"), quiet=True)
    matrix = confusion_matrix(images.labels, logits.argmax(axis=1), 10)
    slow = np.zeros((10, 10), dtype=int)
    for index, label in enumerate(images.labels):
        pixels = (p.from_bytes(images.read(index)) / 255 - np.array(p.mean)) / np.array(p.std)
        with torch.inference_mode():
            slow[label, model(torch.from_numpy(pixels).float().permute(2, 0, 1)[None]).argmax().item()] += 1
    assert (matrix == slow).all()
    assert np.trace(matrix) / 360 == metrics_of(finished)[state.epoch - 1]["top1"]


def test_a_network_whose_logits_are_not_finite_has_no_matrix(finished: Path) -> None:
    """Its answers would all be of class 0."""
    model, _ = load_run_model(RunFolder(finished), "best")
    with torch.no_grad():
        model.get_parameter("head.bias")[0] = torch.nan
    images = open_images("digits", "val").first(5)
    with pytest.raises(InputError, match=r"^logits of 5 of 5 images are not finite"):
        _logits(model, RunFolder(finished).info.preprocessing, images, torch.device("cpu"), quiet=True)


def test_the_most_confused_pairs() -> None:
    matrix = np.array([[5, 0, 2], [3, 9, 0], [2, 1, 4]])
    assert most_confused(matrix) == [(1, 0, 3), (0, 2, 2), (2, 0, 2), (2, 1, 1)]
    assert most_confused(np.diag([3, 4])) == []


def test_images_that_are_gone_cost_the_confusion_matrix_only(vitx: Vitx, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "data": str(tmp_path / "gone")}))
    code, _, said = vitx("report", run, "--device", "cpu")
    assert code == 0
    missing = f"No confusion matrix: no data at '{tmp_path / 'gone'}'"
    assert missing in said
    text = (run / "report.html").read_text()
    assert "No confusion matrix: no data at" in text
    assert text.count("<img") == 2
    code, _, said = vitx("report", run, "--data", tmp_path / "gone")
    assert (code, said.startswith("error: no data at")) == (2, True)


def test_bad_input_is_one_error(vitx: Vitx, finished: Path, image_folder: Path, tmp_path: Path) -> None:
    code, _, said = vitx("report", finished, "--data", image_folder)
    assert code == 2
    assert "has 3 classes that are not the 10 of" in said
    code, _, said = vitx("report", tmp_path / "nothing")
    assert (code, said) == (2, f"error: no run at '{tmp_path / 'nothing'}': expected a folder made by `vitx train`\n")
    shutil.copytree(finished, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    code, _, said = vitx("report", tmp_path / "begun")
    assert (code, said) == (2, f"error: run '{tmp_path / 'begun'}' has no 'best' checkpoint yet\n")
    code, _, said = vitx("report", finished, "--out", tmp_path)
    page = tmp_path / "report.html"
    assert (code, said) == (2, f"error: '{tmp_path}' is a folder: expected a file name, such as {page}\n")
    bundle = write_bundle(tmp_path / "b.vitx").path
    code, _, said = vitx("report", finished, "--out", bundle / "report.html")
    assert (code, f"would add to the bundle '{bundle}'" in said, (bundle / "report.html").exists()) == (2, True, False)


@pytest.mark.parametrize("classes", [2, 20, 300])
def test_confusion_of_few_and_of_many_classes(classes: int) -> None:
    matrix = np.arange(classes**2).reshape(classes, classes) % 7
    assert png(draw_confusion(matrix, [f"class {i}" for i in range(classes)])).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["$a_$", "$5 to $10", r"\$a$"])
def test_the_name_of_a_class_is_no_formula(name: str) -> None:
    figure = draw_confusion(np.eye(2, dtype=np.int64), [name, "other"])
    assert png(figure).startswith(b"\x89PNG")
    (axes,) = figure.axes
    shown = [label.get_text() for label in (axes.get_xticklabels()[0], axes.get_yticklabels()[0])]
    assert not any(map(is_math_text, shown))
    assert [text.replace(r"\$", "$") for text in shown] == [name, name]


def test_long_names_of_classes_leave_room_for_the_matrix() -> None:
    """As ImageNet's are; matplotlib warns where they leave none."""
    names = [f"great white shark, man-eater, Carcharodon {number} carcharias" for number in range(2)]
    figure = draw_confusion(np.eye(2, dtype=np.int64), names)
    assert png(figure).startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 100  # of 400 dots
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == ["great white…0 carcharias", "great white…1 carcharias"]


def test_figures_of_a_run_of_one_epoch(finished: Path) -> None:
    history = metrics_of(finished)[:1]
    for draw in (draw_curves, draw_layers):
        assert png(draw(history, 1)).startswith(b"\x89PNG")
