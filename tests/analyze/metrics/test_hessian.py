"""What is said of the eigenvalues of a few batches, without a network."""

import pytest
import torch
from torch import Tensor, nn

from reference import seq
from vitx.analyze.curvature import hessian
from vitx.analyze.lanczos import Eigenvalues, lanczos_quadrature, smoothed_density
from vitx.analyze.metrics.hessian import HESSIAN_METRIC, HessianSpectrum, hessian_spectrum
from vitx.analyze.metrics.hessian_density import hessian_density
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
    # The page's number is the file's, and no mean of positive numbers is below 0.
    assert HESSIAN_METRIC.line(measured).endswith("mean of the positive 0.917 [0, 10.1], negative 16.7 [0, 100] %")
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
    for measure in (hessian_spectrum, hessian_density):
        with pytest.raises(InputError, match=r"^the Hessian needs at least one batch of labelled images$"):
            measure(nn.Linear(3, 2), [])


def test_without_other_wishes_five_eigenvalues_of_all_weights_and_no_decay() -> None:
    model, batch = linear()
    expected = hessian_spectrum(model, [batch], 5, weight_decay=0.0, module="", seed=0)
    assert hessian_spectrum(model, [batch]) == expected
    assert [len(each.values) for each in expected.batches] == [5]


def test_without_other_wishes_one_probe_of_64_products_and_no_decay() -> None:
    model, batch = linear()
    found = hessian_density(model, [batch])
    assert (found.products, found.weight_decay, found.module, found.images) == (64, 0.0, "", 60)
    assert found == hessian_density(model, [batch], weight_decay=0.0, module="", steps=64, probes=1, seed=0)
    assert found != hessian_density(model, [batch], seed=1)


def test_a_density_of_batches_is_the_mean_of_theirs() -> None:
    """Each batch draws a sign vector of its own, from one generator."""
    model, (images, labels) = linear()
    parts = [(images[:20], labels[:20]), (images[20:], labels[20:])]
    found, generator = (
        hessian_density(model, parts, weight_decay=0.5, steps=8, seed=3),
        torch.Generator().manual_seed(3),
    )
    pairs = []
    for part in parts:
        with hessian(model, *part, weight_decay=0.5) as operator:
            one = lanczos_quadrature(**operator._asdict(), steps=8, generator=generator)
        pairs += [(node, weight / 2) for node, weight in zip(one.nodes, one.weights, strict=True)]
    assert [*zip(found.nodes, found.weights, strict=True)] == sorted(pairs)
    assert (found.products, found.images, found.parameters, found.weight_decay) == (16, 60, 579, 0.5)
    assert found.smoothed == smoothed_density(found.nodes, found.weights)
    head = hessian_density(model, parts, module="1", steps=8)
    assert (head.module, head.parameters) == ("1", 579)


def linear() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network of 579 weights, and a batch whose Hessian has more than 64 different eigenvalues."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * seq(0.5, *parameter.shape))
    images = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return model, (images, torch.arange(60) % 3)
