"""The losses against reference numbers (MATHS §2), slow formulas and numerical gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference import seq
from vitx.core.errors import InputError
from vitx.train.losses import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss

EARLY = seq(0, 2, 5, 4)
LATE = seq(1.5, 2, 5, 4) + 0.3
HEAD_WEIGHT, HEAD_BIAS = seq(2, 3, 4), seq(3, 3)
LABELS = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])


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
    ],
    ids=["cosine", "absolute cosine", "contrastive", "contrastive without self", "mixing"],
)
def test_reference_number(loss: Tensor, expected: float) -> None:
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (patch_cosine_loss, slow_cosine),
        (lambda h: patch_contrastive_loss(EARLY, h), lambda h: slow_contrastive(EARLY, h)),
        (
            lambda h: patch_contrastive_loss(EARLY, h, exclude_self=True),
            lambda h: slow_contrastive(EARLY, h, exclude_self=True),
        ),
        (lambda h: patch_mixing_loss(h, LABELS), lambda h: slow_mixing(h, LABELS)),
    ],
    ids=["cosine", "contrastive", "contrastive without self", "mixing"],
)
def test_value_and_gradient_equal_the_slow_formula(
    fast: Callable[[Tensor], Tensor], slow: Callable[[Tensor], Tensor]
) -> None:
    ours, theirs = LATE.clone().requires_grad_(), LATE.clone().requires_grad_()
    loss, reference = fast(ours), slow(theirs)
    loss.backward()  # type: ignore[no-untyped-call]
    reference.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, reference, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(fast, (LATE.clone().requires_grad_(),))


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
        (lambda: patch_mixing_loss(LATE, LABELS[:, :4]), r"targets of patch logits \(2, 5, 4\) must be \(2, 5\)"),
        (lambda: patch_mixing_loss(LATE, LATE[..., :3]), r"must be \(2, 5, 4\), got \(2, 5, 3\)"),
    ],
)
def test_wrong_input_is_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
