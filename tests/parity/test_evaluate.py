"""Evaluation of a bundle and of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from bundle_fixture import NumpySession
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.parity.evaluate import Evaluation, evaluate_path


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


def test_run_and_bundle_agree(tiny_bundle: Bundle, tiny_run: RunFolder, vitx: Vitx) -> None:
    results = []
    for path in (tiny_bundle.path, tiny_run.path):
        code, out, err = vitx("eval", path, "--device", "cpu", "--json")
        assert code == 0, err
        results.append(Evaluation.model_validate_json(out))
    assert results[0].top1 == results[1].top1 > 0.9
    assert results[0].nll == pytest.approx(results[1].nll, abs=1e-6)
    assert results[0].ece == pytest.approx(results[1].ece, abs=1e-6)


def test_table_of_the_command(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, out, _ = vitx("eval", tiny_bundle.path, "--quiet")
    assert code == 0
    assert all(name in out for name in ("top1", "nll", "ece", "brier"))


def test_folder_that_is_neither_run_nor_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is neither a run nor a bundle: it has no run\.json and no manifest\.json"):
        evaluate_path(tmp_path)
    with pytest.raises(InputError, match="no run at"):
        evaluate_path(tmp_path / "absent")


def test_data_with_other_classes_is_refused(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, _, err = vitx("eval", tiny_bundle.path, "--data", "digits")
    assert code == 2
    assert err == "error: 'digits' has 10 classes, the bundle has 4\n"


def test_data_that_is_not_there_is_refused(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, out, err = vitx("eval", tiny_bundle.path, "--data", "nowhere", "--json")
    assert (code, json.dumps(out)) == (2, '""')
    assert "no data at 'nowhere'" in err
