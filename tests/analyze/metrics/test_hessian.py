"""What is said of the eigenvalues of a few batches, without a network."""

import pytest
import torch
from torch import nn

from vitx.analyze.lanczos import Eigenvalues
from vitx.analyze.metrics.hessian import HESSIAN_METRIC, HessianSpectrum, hessian_spectrum
from vitx.core.errors import InputError


def spectrum_of(monkeypatch: pytest.MonkeyPatch, *batches: list[float]) -> HessianSpectrum:
    found = [Eigenvalues(values=each, residuals=[0.0] * len(each), products=3, converged=True) for each in batches]
    answers = iter(found)
    monkeypatch.setattr("vitx.analyze.metrics.hessian.hessian_eigenvalues", lambda *_, **__: next(answers))
    images = torch.zeros(5, 3, 2, 2), torch.zeros(5, dtype=torch.int64)
    measured = hessian_spectrum(nn.Linear(3, 2), [images] * len(batches), 3)
    assert (measured.batches, measured.images, measured.parameters) == (found, 5 * len(batches), 8)
    return measured


def test_shares_and_means_are_of_the_values_on_either_side_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = spectrum_of(monkeypatch, [2.0, 0.0, -1.0], [0.5, 0.25, 0.0])
    assert measured.negative_share == 1 / 6
    assert measured.mean_positive == 2.75 / 3
    assert HESSIAN_METRIC.line(measured).endswith("negative 16.7 [0, 100] %")
    flat = spectrum_of(monkeypatch, [-2.0, 0.0])
    assert (flat.negative_share, flat.mean_positive) == (0.5, None)
    assert HESSIAN_METRIC.line(flat) == "largest 0, mean of the positive 0, negative 50 %"
    assert HESSIAN_METRIC.line(spectrum_of(monkeypatch, [2.0, 0.5])) == (
        "largest 2, mean of the positive 1.25, negative 0 %"
    )


def test_batches_whose_eigenvalues_did_not_converge_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = spectrum_of(monkeypatch, [2.0, 0.5], [2.0, 0.5])
    first, second = measured.batches
    rough = measured.model_copy(update={"batches": [first, second.model_copy(update={"converged": False})]})
    assert HESSIAN_METRIC.line(rough) == f"{HESSIAN_METRIC.line(measured)}, 1 of 2 batches did not converge"


def test_no_batch_is_refused() -> None:
    with pytest.raises(InputError, match="at least one batch of labelled images"):
        hessian_spectrum(nn.Linear(3, 2), [])
