"""The losses against reference numbers (docs/maths.md §2), slow formulas and numerical gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import seq
from vitx.core.errors import InputError
from vitx.models.similarity import token_similarity
from vitx.train.losses.patch_losses import (
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
    region_mixing_loss,
)

EARLY = seq(0, 2, 5, 4)
LATE = seq(1.5, 2, 5, 4) + 0.3
HEAD_WEIGHT, HEAD_BIAS = seq(2, 3, 4), seq(3, 3)
LABELS = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
# The official forms: a 4 × 4 grid whose rows 0:2, columns 1:4 came from the partner, and its soft labels.
GRID = seq(0.5, 2, 6, 4, 4).flatten(2).transpose(1, 2)
GRID_EARLY = seq(1, 2, 16, 6)
BOX = torch.zeros(4, 4, dtype=torch.bool)
BOX[0:2, 1:4] = True
PARTNER = BOX.flatten().expand(2, -1)
BOX_LABELS = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05]], dtype=torch.float64)
REST_LABELS = BOX_LABELS.flip(0)
REGION_WEIGHT, REGION_BIAS = seq(2, 3, 6), seq(3, 3)


def classify(pooled: Tensor) -> Tensor:
    return pooled @ REGION_WEIGHT.T + REGION_BIAS


def region_loss(patches: Tensor, partner: Tensor = PARTNER) -> Tensor:
    return region_mixing_loss(patches, classify, partner, REST_LABELS, BOX_LABELS)


def slow_cosine(patches: Tensor) -> Tensor:
    images = []
    for image in patches:
        n = len(image)
        pairs = [
            image[i] @ image[j] / (image[i].norm() * image[j].norm()) for i in range(n) for j in range(n) if i != j
        ]
        images.append(torch.stack(pairs).mean())
    return torch.stack(images).mean()


def slow_contrastive(early: Tensor, late: Tensor, *, exclude_self: bool = False) -> Tensor:
    terms = []
    for e, h in zip(early.detach(), late, strict=True):
        for i in range(len(h)):
            others = [h[j] for j in range(len(h)) if not (exclude_self and j == i)]
            positive, negative = torch.exp(e[i] @ h[i]), torch.exp(e[i] @ torch.stack(others).mean(0))
            terms.append(-torch.log(positive / (positive + negative)))
    return torch.stack(terms).mean()


def slow_official_contrastive(early: Tensor, late: Tensor, window: int = 3) -> Tensor:
    side = int(late.shape[1] ** 0.5)
    terms = []
    for e, h in zip(early.detach(), late, strict=True):
        for i in range(len(h)):
            row, column = divmod(i, side)
            near = [
                h[r * side + c]
                for r in range(row - window // 2, row + window // 2 + 1)
                for c in range(column - window // 2, column + window // 2 + 1)
                if 0 <= r < side and 0 <= c < side and (r, c) != (row, column)
            ]
            local = torch.stack(near).sum(0) / (window**2 - 1)
            others = torch.stack([h[j] for j in range(len(h)) if j != i]).mean(0)
            scores = torch.stack([e[i] @ h[i], e[i] @ others, e[i] @ local]).exp()
            terms.append(-torch.log(scores[0] / scores.sum() + 1e-8))
    return torch.stack(terms).mean()


def slow_region_mixing(patches: Tensor) -> Tensor:
    terms = []
    for image, box_label, rest_label in zip(patches, BOX_LABELS, REST_LABELS, strict=True):
        for label, inside in ((box_label, True), (rest_label, False)):
            region = [patch for patch, partner in zip(image, BOX.flatten(), strict=True) if bool(partner) == inside]
            pooled = torch.stack(region).sum(0) / (len(region) + 1e-4)
            scores = classify(pooled).exp()
            probability = scores / scores.sum()
            terms.append(len(region) / 16 * (label * (label.log() - (probability + 1e-8).log())).sum())
    return torch.stack(terms).sum() / 2


def slow_mixing(logits: Tensor, labels: Tensor) -> Tensor:
    terms = [
        -torch.log(torch.exp(row[label]) / torch.exp(row).sum())
        for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True)
    ]
    return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (patch_cosine_loss(LATE), -0.128733),
        (patch_cosine_loss(LATE, absolute=True), 0.693884),
        (patch_contrastive_loss(EARLY, LATE), 0.624027),
        (patch_contrastive_loss(EARLY, LATE, exclude_self=True), 0.609548),
        (patch_mixing_loss(LATE @ HEAD_WEIGHT.T + HEAD_BIAS, LABELS), 1.517196),
        (
            patch_contrastive_loss(seq(1, 2, 64, 6), seq(0, 2, 6, 8, 8).flatten(2).transpose(1, 2), variant="official"),
            1.491877,
        ),
        (patch_contrastive_loss(GRID_EARLY, GRID, variant="official"), 1.242206),
        (region_loss(GRID), 0.687337),
    ],
    ids=[
        "cosine",
        "absolute cosine",
        "contrastive",
        "contrastive without self",
        "mixing",
        "official contrastive, 8 × 8",
        "official contrastive, 4 × 4",
        "official mixing",
    ],
)
def test_reference_number(loss: Tensor, expected: float) -> None:
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("fast", "slow", "inputs"),
    [
        (patch_cosine_loss, slow_cosine, LATE),
        (lambda h: patch_contrastive_loss(EARLY, h), lambda h: slow_contrastive(EARLY, h), LATE),
        (
            lambda h: patch_contrastive_loss(EARLY, h, exclude_self=True),
            lambda h: slow_contrastive(EARLY, h, exclude_self=True),
            LATE,
        ),
        (lambda h: patch_mixing_loss(h, LABELS), lambda h: slow_mixing(h, LABELS), LATE),
        (
            lambda h: patch_contrastive_loss(GRID_EARLY, h, variant="official", window=3),
            lambda h: slow_official_contrastive(GRID_EARLY, h),
            GRID,
        ),
        (region_loss, slow_region_mixing, GRID),
    ],
    ids=["cosine", "contrastive", "contrastive without self", "mixing", "official contrastive", "official mixing"],
)
def test_value_and_gradient_equal_the_slow_formula(
    fast: Callable[[Tensor], Tensor], slow: Callable[[Tensor], Tensor], inputs: Tensor
) -> None:
    ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    loss, reference = fast(ours), slow(theirs)
    loss.backward()  # type: ignore[no-untyped-call]
    reference.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, reference, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(fast, (inputs.clone().requires_grad_(),))


def test_two_patches_are_one_pair() -> None:
    pair = torch.tensor([[[3.0, 4.0], [4.0, 3.0]], [[1.0, 0.0], [0.0, 2.0]]])
    assert patch_cosine_loss(pair).item() == pytest.approx((24 / 25 + 0) / 2)
    pair[1] *= -1
    pair[0, 0] *= -1
    assert patch_cosine_loss(pair).item() == pytest.approx(-12 / 25)
    assert patch_cosine_loss(pair, absolute=True).item() == pytest.approx(12 / 25)


@pytest.mark.parametrize("window", [3, 5, 7])
def test_the_neighbourhood_has_the_windows_size(window: int) -> None:
    found = patch_contrastive_loss(GRID_EARLY, GRID, variant="official", window=window)
    torch.testing.assert_close(found, slow_official_contrastive(GRID_EARLY, GRID, window), rtol=0, atol=1e-12)


def test_the_regions_are_weighted_in_float32_for_half_patches_too() -> None:
    patches = GRID.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = region_mixing_loss(
            patches, lambda pooled: classify(pooled.double()).float(), PARTNER, REST_LABELS, BOX_LABELS
        )
        assert patch_cosine_loss(patches).dtype == torch.float32
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(region_loss(GRID).item(), abs=0.01)


def test_the_sum_of_a_region_may_exceed_float16() -> None:
    head, patches = nn.Linear(8, 3), torch.randn(2, 1024, 8) * 100 + 300
    box, labels = torch.arange(1024).expand(2, -1) < 300, torch.eye(3)[:2]
    with torch.autocast("cpu", torch.float16):
        found = region_mixing_loss(patches, head, box, labels, labels.flip(0)).item()
    assert found == pytest.approx(region_mixing_loss(patches, head, box, labels, labels.flip(0)).item(), rel=0.01)


def test_the_cosine_keeps_no_copy_of_the_tokens() -> None:
    """Saved for the gradient: the tokens themselves, one number a token, and one vector an image."""
    patches = torch.randn(4, 49, 64, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch_cosine_loss(patches)
    copies = [tensor for tensor in saved if tensor.numel() >= patches.numel() and tensor is not patches]
    assert copies == []


def test_smoothing_the_patch_labels_equals_smooth_targets() -> None:
    soft = 0.9 * torch.nn.functional.one_hot(LABELS, 4).double() + 0.1 / 4
    smoothed = patch_mixing_loss(LATE, LABELS, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, patch_mixing_loss(LATE, soft), rtol=0, atol=1e-15)


def test_an_image_without_a_box_is_one_region() -> None:
    nothing = torch.zeros(2, 16, dtype=torch.bool)
    logits = classify(GRID.sum(1) / (16 + 1e-4))
    expected = torch.nn.functional.kl_div((logits.softmax(-1) + 1e-8).log(), REST_LABELS, reduction="batchmean")
    torch.testing.assert_close(region_loss(GRID, nothing), expected)


def test_no_gradient_flows_into_the_early_patches() -> None:
    early, late = EARLY.clone().requires_grad_(), LATE.clone().requires_grad_()
    patch_contrastive_loss(early, late).backward()  # type: ignore[no-untyped-call]
    assert early.grad is None
    assert late.grad is not None


def test_contrastive_survives_dot_products_that_overflow_exp() -> None:
    loss = patch_contrastive_loss((1e3 * EARLY).float(), (-1e3 * LATE).float())
    assert torch.isfinite(loss)


def test_soft_targets_that_are_one_hot_equal_indices() -> None:
    soft = torch.nn.functional.one_hot(LABELS, 4).double()
    torch.testing.assert_close(patch_mixing_loss(LATE, soft), patch_mixing_loss(LATE, LABELS), rtol=0, atol=1e-15)


def test_losses_are_float32_inside_autocast_and_for_half_inputs() -> None:
    early, late = EARLY.bfloat16(), LATE.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = patch_contrastive_loss(early, late)
        mixing = patch_mixing_loss(late, LABELS)
    outside = patch_contrastive_loss(early.float(), late.float())
    assert inside.dtype == mixing.dtype == torch.float32
    assert inside == outside


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patch_cosine_loss(LATE[0]), r"expected patches \(B, n, D\), got a tensor of shape \(5, 4\)"),
        (lambda: patch_cosine_loss(LATE[:, :1]), "needs at least 2 patches, got 1"),
        (
            lambda: patch_contrastive_loss(EARLY[:, :3], LATE),
            r"must have one shape, got \(2, 3, 4\) and \(2, 5, 4\)",
        ),
        (
            lambda: patch_contrastive_loss(EARLY, LATE, variant="papers"),  # type: ignore[arg-type]
            "unknown variant .* 'papers'.*did you mean paper",
        ),
        (
            lambda: patch_contrastive_loss(EARLY, LATE, variant="official"),
            "needs a square grid of patches, got 5 patches",
        ),
        (
            lambda: patch_contrastive_loss(GRID_EARLY, GRID, variant="official", window=4),
            "window 4 of the official contrastive loss: expected an odd number of at least 3",
        ),
        (
            lambda: patch_contrastive_loss(GRID_EARLY, GRID, variant="official", window=1),
            "window 1 of the official contrastive loss",
        ),
        (lambda: region_loss(GRID[0]), r"expected patches \(B, n, D\), got a tensor of shape \(16, 6\)"),
        (lambda: patch_contrastive_loss(EARLY[0], LATE[0]), r"expected late patches \(B, n, D\), got .* \(5, 4\)"),
        (lambda: patch_mixing_loss(LATE[0], LABELS), r"expected patch logits \(B, n, C\), got .* \(5, 4\)"),
        (lambda: region_loss(GRID, PARTNER[:, :9]), r"partner_Bn must be \(2, 16\) like the patches, got \(2, 9\)"),
        (lambda: patch_mixing_loss(LATE, LABELS[:, :4]), r"targets of patch logits \(2, 5, 4\) must be \(2, 5\)"),
        (lambda: patch_mixing_loss(LATE, LATE[..., :3]), r"must be \(2, 5, 4\), got \(2, 5, 3\)"),
    ],
)
def test_wrong_input_is_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_token_of_zeros_is_similar_to_none() -> None:
    """Its own cosine, which the closed form takes off, is not there; its gradient, which no direction has, is zero."""
    patches = EARLY.clone()
    patches[0, 2] = 0
    patches.requires_grad_()
    others = [0, 1, 3, 4]
    pairs = [F.cosine_similarity(patches[0, i], patches[0, j], dim=0) for i in others for j in others if i != j]
    expected = (torch.stack(pairs).sum() / 20 + slow_cosine(patches[1:])) / 2
    loss = patch_cosine_loss(patches)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert token_similarity(patches).item() == pytest.approx(expected.item(), abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, patches)
    (slow,) = torch.autograd.grad(expected, patches)
    torch.testing.assert_close(gradient, slow)
    assert gradient[0, 2].tolist() == [0, 0, 0, 0]
    assert patch_cosine_loss(torch.zeros(1, 3, 4)).item() == 0


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-20, 1e-13, 1e20, 1e30])
@pytest.mark.parametrize("absolute", [False, True])
def test_no_length_of_the_tokens_gives_more_than_a_bounded_gradient(length: float, absolute: bool) -> None:
    patches = (length * EARLY).float()
    patches[0, 1] = 0
    patches.requires_grad_()
    loss = patch_cosine_loss(patches, absolute=absolute)
    (gradient,) = torch.autograd.grad(loss, patches, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), patches)
    for tensor in (loss, gradient, second):
        assert tensor.isfinite().all()
    assert gradient[0, 1].tolist() == [0, 0, 0, 0]


BOTH_REGIONS = torch.tensor([[True, False, False, True, False], [False] * 5])
SECOND_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": patch_cosine_loss,
    "absolute cosine": lambda late: patch_cosine_loss(late, absolute=True),
    "contrastive": lambda late: patch_contrastive_loss(EARLY, late),
    "contrastive, others": lambda late: patch_contrastive_loss(EARLY, late, exclude_self=True),
    "contrastive, official": lambda late: patch_contrastive_loss(
        EARLY[:, :4], late[:, :4], variant="official", window=3
    ),
    "mixing": lambda late: patch_mixing_loss(late, torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])),
    "mixing, official": lambda late: region_mixing_loss(
        late, lambda pooled: pooled, BOTH_REGIONS, torch.eye(4)[:2], torch.eye(4)[2:]
    ),
}


@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_every_loss_has_a_second_derivative(name: str) -> None:
    assert torch.autograd.gradgradcheck(SECOND_DERIVATIVES[name], (LATE.clone().requires_grad_(),))


@pytest.mark.parametrize("options", [{"exclude_self": True}, {"variant": "official", "window": 3}])
def test_one_patch_has_no_others(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="without the patch itself needs at least 2 patches, got 1"):
        patch_contrastive_loss(EARLY[:, :1], LATE[:, :1], **options)
    # With itself alone, the mean of all is the patch.
    assert patch_contrastive_loss(EARLY[:, :1], LATE[:, :1]).item() == pytest.approx(math.log(2))
