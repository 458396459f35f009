"""The Hessian's spectrum against the dense Hessian of three small networks, and everything left as it was."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import randomize_like_trained, seq
from run_fixture import digits_source, trained_deepvit
from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.curvature import augmented_batches, hessian, hessian_eigenvalues, mean_nll
from vitx.analyze.images import open_analysis_images
from vitx.analyze.lanczos import Eigenvalues
from vitx.analyze.metric import AnalysisOptions, MetricContext
from vitx.analyze.metrics.hessian import HESSIAN_METRIC, HessianSpectrum, hessian_spectrum
from vitx.analyze.metrics.hessian_density import hessian_density
from vitx.analyze.network_analyses import analyze_networks
from vitx.analyze.options import AnalysisRequest
from vitx.core.errors import InputError
from vitx.models import image_tensor

CLASSES = 3
NETWORKS = ("mlp", "vit", "conv")


def network(name: str) -> Any:
    """An MLP, a ViT of plain attention and Re-Attention, a conv net with BatchNorm: float64, 160 to 450 weights."""
    if name == "mlp":
        model: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    elif name == "vit":
        model = timm.create_model(
            "deepvit_digits",
            num_classes=CLASSES,
            img_size=8,
            patch_size=4,
            in_chans=1,
            embed_dim=4,
            depth=2,
            num_heads=2,
            mlp_ratio=1,
            attention=["plain", "re-attention"],
            patch_head=True,  # takes no part in the loss
        )
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2),
            nn.BatchNorm2d(3),
            nn.GELU(),
            nn.Conv2d(3, 4, 3),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        )
    return randomize_like_trained(model.double()).eval()


def batch() -> tuple[Tensor, Tensor]:
    return seq(0.3, 6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 0])


@cache
def dense_hessian(name: str) -> Tensor:
    """By autograd over one flat vector, without weight decay."""
    model = network(name)
    names, shapes = zip(*((key, value.shape) for key, value in model.named_parameters()), strict=True)
    images, labels = batch()

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {key: part.view(shape) for key, part, shape in zip(names, parts, shapes, strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.cross_entropy(torch.func.functional_call(model, weights, (images,)), labels)

    flat = torch.cat([value.detach().flatten() for value in model.parameters()])
    found: Tensor = torch.autograd.functional.hessian(loss, flat)  # type: ignore[no-untyped-call]
    return found


def largest(matrix: Tensor, k: int) -> Any:
    values = np.linalg.eigvalsh(matrix.numpy())
    return values[np.argsort(-np.abs(values))][:k]


@pytest.mark.parametrize("name", NETWORKS)
def test_product_is_that_of_the_dense_hessian(name: str) -> None:
    expected = dense_hessian(name)
    with hessian(network(name), *batch(), weight_decay=0.25) as operator:
        for k in range(3):
            vector = seq(k, operator.size)
            torch.testing.assert_close(operator.product(vector), expected @ vector + 0.25 * vector, atol=1e-12, rtol=0)
    with hessian(network(name), *batch()) as without:
        torch.testing.assert_close(without.product(vector), expected @ vector, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_spectrum_is_that_of_the_dense_hessian(name: str) -> None:
    """Values, signs and order."""
    expected = largest(dense_hessian(name), 8)
    assert expected.min() < 0 < expected.max()
    found = hessian_eigenvalues(network(name), *batch(), 8, tolerance=1e-9)
    assert found.converged
    np.testing.assert_allclose(found.values, expected, atol=1e-9 * abs(expected[0]))


@pytest.mark.parametrize("name", NETWORKS)
def test_weight_decay_shifts_every_eigenvalue(name: str) -> None:
    plain, shifted = (torch.linalg.eigvalsh(rows(network(name), weight_decay)) for weight_decay in (0.0, 0.05))
    torch.testing.assert_close(shifted - plain, torch.full_like(plain, 0.05), atol=1e-12, rtol=0)


def rows(model: Any, weight_decay: float) -> Tensor:
    with hessian(model, *batch(), weight_decay=weight_decay) as operator:
        return torch.stack([operator.product(row) for row in torch.eye(operator.size, dtype=operator.dtype)])


def test_all_eigenvalues() -> None:
    expected = np.linalg.eigvalsh(dense_hessian("conv").numpy())
    found = hessian_eigenvalues(network("conv"), *batch(), len(expected), max_products=len(expected))
    np.testing.assert_allclose(np.sort(found.values), expected, atol=1e-11)


def test_one_module_is_a_block_of_the_whole() -> None:
    model = network("vit")
    names = [name for name, value in model.named_parameters() for _ in range(value.numel())]
    inside = torch.tensor([name.startswith("blocks.1.attn.") for name in names])
    expected = largest(dense_hessian("vit")[inside][:, inside], 4)
    found = hessian_eigenvalues(model, *batch(), 4, module="blocks.1.attn", tolerance=1e-9)
    np.testing.assert_allclose(found.values, expected, atol=1e-9)


def test_spectrum_over_batches() -> None:
    model, (images, labels) = network("conv"), batch()
    parts = [(images[:3], labels[:3]), (images[3:], labels[3:]), (images, labels)]
    found = hessian_spectrum(model, iter(parts), 4, weight_decay=0.1)
    assert found.batches == [hessian_eigenvalues(model, *part, 4, weight_decay=0.1) for part in parts]
    assert (found.images, found.module, found.weight_decay) == (12, "", 0.1)
    assert found.parameters == len(dense_hessian("conv"))
    values = np.array([batch.values for batch in found.batches]).flatten()
    assert math.isclose(found.negative_share, (values < 0).mean())
    assert found.mean_positive is not None
    assert math.isclose(found.mean_positive, values[values > 0].mean())
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_density_has_the_moments_of_the_dense_hessian() -> None:
    matrix = dense_hessian("conv") + 0.1 * torch.eye(len(dense_hessian("conv")))
    found = hessian_density(network("conv"), [batch()] * 2, weight_decay=0.1, steps=24, probes=32)
    nodes, weights = np.array(found.nodes), np.array(found.weights)
    size = len(matrix)
    assert math.isclose(weights.sum(), 1, rel_tol=1e-12)
    assert math.isclose(weights @ nodes, float(matrix.trace()) / size, rel_tol=0.1)
    assert math.isclose(weights @ nodes**2, float((matrix @ matrix).trace()) / size, rel_tol=0.1)
    assert math.isclose(nodes.max(), max(np.linalg.eigvalsh(matrix.numpy())), rel_tol=1e-6)
    assert abs(np.trapezoid(found.smoothed.density, found.smoothed.grid) - 1) < 1e-12
    assert found.products <= 2 * 24 * 32
    assert found.images == 12


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_classes_of_any_whole_number_type(dtype: torch.dtype) -> None:
    """numpy's labels are often int32, and those of CIFAR's archives uint8."""
    images, labels = batch()
    assert mean_nll(network("mlp"), images, labels.to(dtype)) == mean_nll(network("mlp"), images, labels)


def test_probabilities_as_labels() -> None:
    model, (images, labels) = network("mlp"), batch()
    one_hot = F.one_hot(labels, CLASSES)
    soft = hessian_eigenvalues(model, images, one_hot.double(), 3, tolerance=1e-9)
    hard = hessian_eigenvalues(model, images, labels, 3, tolerance=1e-9)
    np.testing.assert_allclose(soft.values, hard.values, atol=1e-10)


def test_float32_is_close() -> None:
    found = hessian_eigenvalues(network("vit").float(), *batch(), 5)
    expected = largest(dense_hessian("vit"), 5)
    assert found.converged
    np.testing.assert_allclose(found.values, expected, atol=2e-3 * abs(expected[0]))


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode])
def test_attention_of_timm_and_a_callers_own_context(ambient: Any) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=12, depth=1, num_heads=2, num_classes=CLASSES
    )
    with ambient():
        found = hessian_eigenvalues(model, torch.randn(2, 3, 32, 32), torch.tensor([0, 1]), 2)
    assert found.converged


def test_everything_is_as_before() -> None:
    model = network("vit").train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    before = snapshot(model)
    hessian_spectrum(model, [batch()], 2, module="blocks.1")
    hessian_density(model, [batch()], steps=3)
    with pytest.raises(RuntimeError, match="stop"), hessian(model, *batch()):
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError, match="stop"), in_evaluation_mode(model):
        raise RuntimeError("stop")
    after = snapshot(model)
    assert all(torch.equal(old, new) for old, new in zip(before.pop("tensors"), after.pop("tensors"), strict=True))
    assert before == after


def snapshot(model: Any) -> dict[str, Any]:
    random_state = torch.get_rng_state()
    gradients = [(name, value.grad is not None) for name, value in model.named_parameters()]
    return {
        "tensors": [value.clone() for value in model.state_dict().values()] + [random_state, model.norm.weight.grad],
        "gradients": gradients,
        "required": [(name, value.requires_grad) for name, value in model.named_parameters()],
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "fused": [getattr(module, "fused_attn", None) for module in model.modules()],
        "grad": torch.is_grad_enabled(),
    }


def test_bad_input_is_refused() -> None:
    model, (images, labels) = network("vit"), batch()
    with pytest.raises(InputError, match=r"unknown module 'blocks\.7': did you mean blocks"):
        hessian_eigenvalues(model, images, labels, module="blocks.7")
    with pytest.raises(InputError, match=r"module 'head_drop' has no parameters"):
        hessian_eigenvalues(model, images, labels, module="head_drop")
    with pytest.raises(InputError, match="the loss does not depend on module 'patch_head'"):
        hessian_eigenvalues(model, images, labels, module="patch_head")
    with pytest.raises(InputError, match=r"labels \(5,\) torch.int64 of 6 images and 3 classes"):
        hessian_eigenvalues(model, images, labels[:5])
    with pytest.raises(InputError, match="labels reach from 0 to 3, but the network has 3 classes"):
        hessian_eigenvalues(model, images, labels + torch.tensor([0, 0, 1, 0, 0, 0]))
    with pytest.raises(InputError, match="at least one batch"):
        hessian_spectrum(model, [])
    with pytest.raises(InputError, match="the loss of the batch is nan"):
        hessian_eigenvalues(model, images * math.nan, labels)
    assert mean_nll(model, images, labels).isfinite()
    assert mean_nll(model, images, torch.zeros_like(labels)).isfinite()  # a batch of one class


def test_batches_of_images_that_are_listed_by_class_are_of_most_classes() -> None:
    source, images = digits_source("trained", trained_deepvit()), open_analysis_images("digits")
    by_class = images.subset(np.argsort(images.labels, kind="stable"))
    context = MetricContext(source, by_class, AnalysisOptions(loss_batches=6))
    batches = [labels.tolist() for _, labels in augmented_batches(context)]
    assert [len(labels) for labels in batches] == [16] * 6
    assert min(len(set(labels)) for labels in batches) >= 6  # of ten; as listed they would be of two or three
    together = [label for labels in batches for label in labels]
    assert sorted(together) == by_class.evenly_spaced(96).labels.tolist()
    assert [labels.tolist() for _, labels in augmented_batches(context)] == batches
    few = MetricContext(source, by_class.first(33), AnalysisOptions())
    assert [len(labels) for _, labels in augmented_batches(few)] == [11] * 3


def test_images_are_shifted_by_up_to_an_eighth_of_the_side_with_a_mirrored_border() -> None:
    source, images = digits_source("trained", trained_deepvit()), open_analysis_images("digits").first(100)
    side, most = source.preprocessing.image_size, source.preprocessing.image_size // 8
    assert most > 1
    context = MetricContext(source, images, AnalysisOptions(batch_size=100, loss_batches=1))
    ((shifted, _),) = augmented_batches(context)
    pixels = next(iter(images.shuffled(context.options.seed).batches(source.preprocessing, 100)))
    whole = image_tensor(pixels, source.preprocessing.mean, source.preprocessing.std)
    padded = F.pad(whole, (most,) * 4, mode="reflect")
    crops = padded.unfold(2, side, 1).unfold(3, side, 1)  # (B, 3, 2·most + 1, 2·most + 1, S, S)
    found = (crops == shifted[:, :, None, None]).all(dim=(1, 4, 5)).nonzero()
    assert set(found[:, 0].tolist()) == set(range(100))
    assert [(int(offsets.min()), int(offsets.max())) for offsets in (found[:, 1], found[:, 2])] == [(0, 2 * most)] * 2


def test_the_interval_of_a_share_of_two_batches_is_of_shares() -> None:
    """Student's for one degree of freedom: 12.7 standard errors to either side."""
    found = [
        Eigenvalues(values=values, residuals=[0.0] * 4, products=4, converged=True)
        for values in ([3.0, 2.0, 1.0, -1.0], [3.0, -2.0, -1.0, -1.0])
    ]
    spectrum = HessianSpectrum(
        module="", parameters=4, weight_decay=0.0, images=8, batches=found, negative_share=0.5, mean_positive=2.25
    )
    assert HESSIAN_METRIC.line(spectrum).endswith("negative 50 [0, 100] %")


def test_a_module_without_a_metric_of_the_hessian_is_refused() -> None:
    """Else a name that no module has would pass, and no Hessian be measured."""
    with pytest.raises(InputError, match=r"^--module blocks\.9 is for the metrics hessian and hessian-density"):
        analyze_networks(["run"], ("fourier",), AnalysisRequest(module="blocks.9"))
    with pytest.raises(InputError, match="no run at 'run'"):
        analyze_networks(["run"], ("hessian-density",), AnalysisRequest(module="blocks.9"))
