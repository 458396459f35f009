"""Evaluation of a bundle and of a run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import NumpySession
from cli_fixture import Vitx
from table_session import PIXEL, TableSession, numbered_images
from vitx.analyze.images import open_analysis_images
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.parity import evaluate as evaluating
from vitx.parity.evaluate import Evaluation, evaluate, evaluate_path
from vitx.parity.loaded_model import LoadedModel


def test_metrics_are_those_of_the_independent_function(tiny_bundle: Bundle, colours_folder: Path) -> None:
    result = evaluate_path(tiny_bundle.path, device="cpu", threads=1, quiet=True)
    images = open_images(str(colours_folder), "val")
    logits = NumpySession().infer(np.concatenate(list(images.batches(tiny_bundle.manifest.preprocessing, 64))))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert result.images == 360
    assert result.top1 == (logits.argmax(axis=1) == images.labels).mean()
    assert result.nll == pytest.approx(-np.log(probabilities[np.arange(360), images.labels]).mean(), abs=1e-5)
    one_hot = np.eye(4)[images.labels]
    assert result.brier == pytest.approx(((probabilities - one_hot) ** 2).sum(axis=1).mean(), abs=1e-5)
    assert 0 <= result.ece <= 1


def test_every_metric_of_five_images() -> None:
    """Probabilities whose logarithms are the logits: 0.7 and 0.65 right, 0.65, 0.7 and 0.9 wrong."""
    probabilities = [[0.7, 0.2, 0.1], [0.65, 0.25, 0.1], [0.25, 0.65, 0.1], [0.2, 0.7, 0.1], [0.05, 0.05, 0.9]]
    images = numbered_images((0, 1, 1, 2, 0), ("a", "b", "c"))
    session = TableSession(np.log(probabilities))
    found = evaluate(session, images, PIXEL, quiet=True)
    assert session.batches == [[0, 1, 2, 3, 4]]
    assert found.images == 5
    assert found.top1 == 0.4
    of_labels = [0.7, 0.25, 0.65, 0.1, 0.05]
    assert found.nll == pytest.approx(-sum(math.log(p) for p in of_labels) / 5, abs=1e-6)
    # Σ p² − 2·p(label) + 1, image by image.
    brier = [0.54 - 1.4 + 1, 0.495 - 0.5 + 1, 0.495 - 1.3 + 1, 0.54 - 0.2 + 1, 0.815 - 0.1 + 1]
    assert found.brier == pytest.approx(sum(brier) / 5, abs=1e-6)
    # Both 0.7 share a bin and one of them is right, so do both 0.65; 0.9 is wrong.
    assert found.ece == pytest.approx((abs(1 - 1.4) + abs(1 - 1.3) + 0.9) / 5, abs=1e-6)


def test_images_are_run_32_at_a_time_and_none_is_refused() -> None:
    session = TableSession(np.eye(40, 3))
    evaluate(session, numbered_images([0] * 40, ("a", "b", "c")), PIXEL, quiet=True)
    assert [len(batch) for batch in session.batches] == [32, 8]
    with pytest.raises(InputError) as caught:
        evaluate(session, numbered_images([], ("a", "b", "c")), PIXEL)
    assert str(caught.value) == "no images to evaluate on"


def test_logits_that_are_not_finite_have_no_accuracy() -> None:
    """They would count for class 0, and no JSON has their NLL."""
    session = TableSession(np.array([[2, 1], [math.nan, 1], [math.inf, 1]]))
    with pytest.raises(InputError, match=r"^logits of 2 of 3 images are not finite: .*\(--checkpoint\)$"):
        evaluate(session, numbered_images([0, 0, 0], ("a", "b")), PIXEL, quiet=True)


def test_what_was_asked_for_is_opened_and_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    session = TableSession([[2, 1]] * 4)

    def open_model(path: Path, **options: Any) -> LoadedModel:
        asked.append((path, options))
        run = RunFolder(tmp_path)
        return LoadedModel("model", session, PIXEL, ("a", "b"), data="its own", sha256="", run=run)

    def open_images(data: str, split: str, *, skip_bad: bool, check_size: object) -> Any:
        assert check_size == PIXEL.check_size
        asked.append((data, split, skip_bad))
        return numbered_images([0, 0, 0, 1], ("a", "b"))

    monkeypatch.setattr(evaluating, "open_model", open_model)
    monkeypatch.setattr(evaluating, "open_images", open_images)
    options: dict[str, Any] = {"runtime": "openvino", "which": "last", "device": "cpu", "threads": 3}
    found = evaluate_path(tmp_path, data="others", skip_bad=True, quiet=True, **options)
    assert asked == [(tmp_path, options), ("others", "val", True)]
    assert (found.top1, session.was_freed) == (0.75, True)
    session = TableSession([[2, 1]] * 4)
    evaluate_path(tmp_path, quiet=True)
    defaults = {"runtime": None, "which": "best", "device": "auto", "threads": None}
    assert asked[2:] == [(tmp_path, defaults), ("its own", "val", False)]


def test_run_and_bundle_agree(tiny_bundle: Bundle, tiny_run: RunFolder, vitx: Vitx) -> None:
    results = []
    for path in (tiny_bundle.path, tiny_run.path):
        code, out, err = vitx("eval", path, "--device", "cpu", "--json")
        assert code == 0, err
        results.append(Evaluation.model_validate_json(out))
    assert results[0].top1 == results[1].top1 > 0.9
    assert results[0].nll == pytest.approx(results[1].nll, abs=1e-6)
    assert results[0].ece == pytest.approx(results[1].ece, abs=1e-6)


def test_a_model_and_images_may_be_named_by_texts_or_paths(tiny_bundle: Bundle, colours_folder: Path) -> None:
    (of_text, of_path) = (
        evaluate_path(kind(tiny_bundle.path), data=kind(colours_folder), device="cpu", threads=1, quiet=True)
        for kind in (str, Path)
    )
    assert of_text == of_path
    digits = open_images("digits", "val").keys
    assert open_images(Path("digits"), "val").keys == digits
    assert open_analysis_images(Path("digits")).keys == digits


def test_a_bundle_has_no_checkpoint_to_choose(tiny_bundle: Bundle, vitx: Vitx) -> None:
    bundle = tiny_bundle.path
    for arguments in (("eval", bundle), ("parity", bundle, bundle)):
        code, _, err = vitx(*arguments, "--checkpoint", "last", "--device", "cpu")
        said = f"error: --checkpoint last is of a run, and '{bundle} in onnxruntime' is none: leave it out\n"
        assert (code, err) == (2, said)
    code, _, err = vitx("parity", "--verify", bundle, "--checkpoint", "last")
    assert (code, err) == (2, "error: --checkpoint has no effect with --verify and no run: leave it out\n")


def test_table_of_the_command(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, out, _ = vitx("eval", tiny_bundle.path, "--quiet")
    assert code == 0
    assert all(name in out for name in ("top1", "nll", "ece", "brier"))


def test_data_with_other_classes_is_refused(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, _, err = vitx("eval", tiny_bundle.path, "--data", "digits")
    assert code == 2
    assert err == "error: 'digits' has 10 classes, the model has 4\n"


def test_data_that_is_not_there_is_refused(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, out, err = vitx("eval", tiny_bundle.path, "--data", "nowhere", "--json")
    assert (code, json.dumps(out)) == (2, '""')
    assert "no data at 'nowhere'" in err


def test_image_too_thin_to_be_resized_is_named_or_left_out(
    tiny_run: RunFolder, tiny_bundle: Bundle, colours_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    shutil.copytree(colours_folder, tmp_path / "thin")
    folder = next(path for path in sorted((tmp_path / "thin" / "val").iterdir()) if path.is_dir())
    Image.new("RGB", (1, 60_000)).save(folder / "thin.png")
    data = ("--data", tmp_path / "thin", "--device", "cpu", "--quiet")
    for command in (
        ("eval", tiny_run.path),
        ("eval", tiny_bundle.path),
        ("parity", tiny_run.path, tiny_bundle.path),
    ):
        code, _, err = vitx(*command, *data)
        assert (code, "thin.png" in err, "too thin" in err) == (2, True, True), (command, err)
        code, _, err = vitx(*command, *data, "--skip-bad")
        assert code == 0, (command, err)
        assert f"left out 1 image: {folder / 'thin.png'}: " in err
