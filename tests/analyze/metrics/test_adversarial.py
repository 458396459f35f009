"""FGSM and PGD: known answers of a linear network in float64, the ball, a trained network; nothing is left behind."""

import copy
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.analyze.metrics.adversarial import EPSILONS, adversarial_robustness, fgsm, pgd, random_start
from vitx.analyze.metrics.occlusion import gradient_saliency
from vitx.analyze.predictor import as_pixels, pixel_logits, predictor
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import open_images

PREPROCESSING = Preprocessing(image_size=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
LABELS = torch.tensor([0, 1, 0, 1, 1])


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).double()


def margin_gradient(model: nn.Module, labels: Tensor) -> Tensor:
    """∂(z_y − z_other)/∂pixels of the linear network, (B, 3, 8, 8)."""
    weight = model[1].weight.detach()  # type: ignore[index]  # a Sequential
    sign = torch.where(labels == 0, 1.0, -1.0).double().view(-1, 1)
    slope = (sign * (weight[0] - weight[1])).view(-1, 3, 8, 8)
    std = torch.tensor(PREPROCESSING.std, dtype=torch.float64).view(1, 3, 1, 1)
    return torch.div(slope, std)


def attacks(logits_of: Callable[[Tensor], Tensor], pixels: Tensor, epsilon: float) -> dict[str, Tensor]:
    return {
        "fgsm": fgsm(logits_of, pixels, LABELS, epsilon),
        "pgd": pgd(logits_of, pixels, LABELS, epsilon),
        "pgd from a random start": pgd(logits_of, pixels, LABELS, epsilon, start=random_start(pixels, seed=4)),
    }


@pytest.mark.parametrize("epsilon", [1 / 255, 0.03, 0.4])
def test_on_a_linear_network_every_attack_finds_the_optimum(epsilon: float) -> None:
    """The margin falls by ε‖∇‖₁ where no value is clipped; with clipping the optimum is the clipped corner."""
    model = linear()
    pixels = torch.rand(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slope = margin_gradient(model, LABELS)
    best = (pixels - epsilon * slope.sign()).clamp(0, 1)
    with pixel_logits(model, PREPROCESSING) as logits_of:
        for name, attacked in attacks(logits_of, pixels, epsilon).items():
            torch.testing.assert_close(attacked, best, msg=name)
        middle = torch.full_like(pixels, 0.5)
        attacked = pgd(logits_of, middle, LABELS, epsilon, start=random_start(middle, seed=1))
        before, after = (logits_of(images).detach() for images in (middle, attacked))
        rows = torch.arange(5)
        fall = (before - after)[rows, LABELS] - (before - after)[rows, 1 - LABELS]
        torch.testing.assert_close(fall, epsilon * slope.expand(5, -1, -1, -1).abs().sum(dim=(1, 2, 3)))


@pytest.mark.parametrize("epsilon", [0.0, 2 / 255, 0.1, 1.0])
def test_attacks_stay_in_the_ball_and_in_the_range(epsilon: float) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    pixels = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    pixels[0], pixels[1] = 0, 1
    with pixel_logits(model, PREPROCESSING) as logits_of:
        for attacked in attacks(logits_of, pixels, epsilon).values():
            assert attacked.min() >= 0
            assert attacked.max() <= 1
            # Half a unit in the last place of 1: x + ε is rounded to float32.
            assert (attacked.double() - pixels.double()).abs().max() <= epsilon + 6e-8
            assert not attacked.requires_grad
        assert epsilon == 0 or (pgd(logits_of, pixels, LABELS, epsilon) != pixels).any()


def test_pgd_is_its_steps_by_hand_from_the_random_start_of_each_image() -> None:
    """Where the loss bends, steps of another length end elsewhere; so does another start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    pixels, epsilon = as_pixels(images, model), 0.1
    start = random_start(pixels, seed=3)
    mean, std = (torch.tensor(values).double().view(1, 3, 1, 1) for values in (PREPROCESSING.mean, PREPROCESSING.std))

    def by_hand(steps: int) -> Tensor:
        attacked = (pixels + epsilon * start).clamp(0, 1)
        for _ in range(steps):
            inputs = attacked.clone().requires_grad_()
            F.cross_entropy(model((inputs - mean) / std), LABELS).backward()  # type: ignore[no-untyped-call]
            assert inputs.grad is not None
            moved = attacked + 2.5 * epsilon / steps * inputs.grad.sign()
            attacked = moved.clamp(pixels - epsilon, pixels + epsilon).clamp(0, 1)
        return attacked

    with pixel_logits(model, PREPROCESSING) as logits_of:
        torch.testing.assert_close(pgd(logits_of, pixels, LABELS, epsilon, start=start), by_hand(10))
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach() * std + mean))
    adversarial_robustness(model, [images], LABELS.numpy(), PREPROCESSING, epsilons=(epsilon,), steps=4, seed=3)
    attacked = seen[-1]
    torch.testing.assert_close(attacked, by_hand(4))


def test_the_radii_are_those_that_papers_quote() -> None:
    assert [255 * epsilon for epsilon in EPSILONS] == [1, 2, 4, 8]


def test_a_random_start_is_an_images_own() -> None:
    pixels = torch.zeros(4, 3, 8, 8)
    start = random_start(pixels, seed=1, first=10)
    torch.testing.assert_close(random_start(pixels[1:3], seed=1, first=11), start[1:3])
    assert start.abs().max() <= 1
    assert start.std() == pytest.approx(1 / np.sqrt(3), rel=0.1)
    assert (random_start(pixels, seed=2, first=10) != start).any()


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network of the 8 × 8 digits, 96 % right, in a second."""
    images = open_images("digits", "train").first(700)
    plain = Preprocessing(image_size=8)
    pixels = next(images.batches(plain, 700))
    labels = torch.as_tensor(images.labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
    model.append(nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    inputs = (as_pixels(pixels, model) - 0.5) / 0.5
    for _ in range(40):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def digits() -> tuple[UInt8Array, np.ndarray]:
    images = open_images("digits", "val").first(100)
    return next(images.batches(Preprocessing(image_size=8), 100)), images.labels


def test_pgd_is_stronger_than_fgsm_on_a_trained_network(
    trained: nn.Module, digits: tuple[UInt8Array, np.ndarray]
) -> None:
    images, labels = digits
    measured = adversarial_robustness(
        trained, [images[:30], images[30:]], labels, Preprocessing(image_size=8), epsilons=(0, 8 / 255, 24 / 255)
    )
    assert measured.clean > 0.9
    assert measured.fgsm[0] == measured.pgd[0] == measured.clean
    assert measured.clean > measured.fgsm[1] > measured.fgsm[2]
    assert measured.pgd[1] <= measured.fgsm[1]
    assert measured.pgd[2] < measured.fgsm[2]
    whole = adversarial_robustness(
        trained, [images], labels, Preprocessing(image_size=8), epsilons=(0, 8 / 255, 24 / 255)
    )
    assert whole.pgd == pytest.approx(measured.pgd, abs=0.02)  # batches round differently
    truth = torch.as_tensor(labels)
    with pixel_logits(trained, Preprocessing(image_size=8)) as logits_of:
        pixels = as_pixels(images, trained)
        losses = [
            F.cross_entropy(logits_of(attacked), truth).item()
            for attacked in (pixels, fgsm(logits_of, pixels, truth, 0.05), pgd(logits_of, pixels, truth, 0.05))
        ]
    assert losses == sorted(losses)
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)


def test_nothing_of_the_network_or_of_chance_is_left_changed(
    trained: nn.Module, digits: tuple[UInt8Array, np.ndarray]
) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    trained = copy.deepcopy(trained).train()
    trained[1].eval()  # type: ignore[index]  # a Sequential
    trained[0].weight.requires_grad_(False)  # type: ignore[index]
    for parameter in trained.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)

    def state() -> list[object]:
        return [
            [module.training for module in trained.modules()],
            [(parameter.requires_grad, parameter.grad.sum().item()) for parameter in trained.parameters()],  # type: ignore[union-attr]
            {name: value.double().sum().item() for name, value in trained.state_dict().items()},
            [len(module._forward_hooks) for module in trained.modules()],
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
            torch.is_grad_enabled(),
        ]

    before = state()
    plain = Preprocessing(image_size=8)
    for context in (torch.no_grad(), torch.inference_mode()):  # a caller's own does not stop an attack's gradients
        with context:
            adversarial_robustness(trained, [images], labels, plain, epsilons=[0.1], steps=2)
            gradient_saliency(trained, plain)(images, 2)
    predicted = predictor(trained, plain)(images)
    assert state() == before
    np.testing.assert_array_equal(predictor(trained, plain)(images), predicted)  # dropout is off
    with pytest.raises(RuntimeError, match="stop"), pixel_logits(trained, plain):
        raise RuntimeError("stop")
    assert state() == before


def test_bad_input_is_refused(digits: tuple[UInt8Array, np.ndarray]) -> None:
    images, labels = digits
    with pytest.raises(InputError, match=r"radii \(8,\), 10 steps: expected radii from 0 to 1"):
        adversarial_robustness(linear(), [images], labels, PREPROCESSING, epsilons=[8])
    with pytest.raises(InputError, match="at least one step"):
        adversarial_robustness(linear(), [images], labels, PREPROCESSING, steps=0)
