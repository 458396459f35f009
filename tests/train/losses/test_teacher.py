"""A teacher without a training: what it predicts, where it is, and what is refused before a run begins."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.train.losses import distillation
from vitx.train.losses.distillation import Teacher, _check_outputs, _list_classes, distillation_loss, load_teacher
from vitx.train.recipes.optimization_settings import Distillation

HARD = Distillation(teacher="mine")
STUDENT = Preprocessing(image_size=4, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))


class ChannelMeans(nn.Module):
    """Logits (B, 3): the mean pixel of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) * self.weight


def teacher(network: nn.Module | None = None, settings: Distillation = HARD) -> Teacher:
    return Teacher(network or ChannelMeans(), settings, student=STUDENT, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25))


def test_a_channel_is_scaled_and_shifted_from_the_students_normalisation_to_its_own() -> None:
    found = teacher()
    assert found.scale.flatten().tolist() == [0.5, 0.5, 4.0]
    assert found.shift.flatten().tolist() == [0.5, -0.5, -4.0]
    assert found.scale.shape == (1, 3, 1, 1)


def test_the_loss_is_that_of_the_teachers_own_logits_and_teaches_the_student_alone() -> None:
    network = ChannelMeans().train()
    one = teacher(network, Distillation(teacher="mine", kind="soft", temperature=2.0))
    assert not network.training
    assert not network.weight.requires_grad
    images = torch.randn(2, 3, 4, 4)
    student = torch.randn(2, 3, requires_grad=True)
    loss = one.loss(student, images)
    logits = images.mean((2, 3)) * torch.tensor([0.5, 0.5, 4.0]) + torch.tensor([0.5, -0.5, -4.0])
    p, q = F.softmax(logits / 2, -1), F.softmax(student / 2, -1)
    torch.testing.assert_close(loss, 4 * (p * (p / q).log()).sum(1).mean())
    loss.backward()  # type: ignore[no-untyped-call]
    assert network.weight.grad is None
    assert student.grad is not None


def test_half_logits_are_compared_in_float32() -> None:
    for kind in ("hard", "soft"):
        settings = Distillation(teacher="x", kind=kind, temperature=3.0)
        student, other = torch.randn(4, 5).bfloat16(), torch.randn(4, 5).bfloat16()
        found = distillation_loss(student, other, settings)
        assert found.dtype == torch.float32
        assert found == distillation_loss(student.float(), other.float(), settings)


def test_it_moves_to_a_device_as_a_whole() -> None:
    one = teacher()
    assert one.to(torch.device("meta")) is one
    devices = {one.scale.device.type, one.shift.device.type, *(each.device.type for each in one.network.parameters())}
    assert devices == {"meta"}


def test_without_a_name_there_is_none() -> None:
    assert load_teacher(Distillation(), STUDENT, ("a", "b", "c")) is None


@pytest.mark.parametrize("file", ["", "weights.safetensors"])
def test_a_network_of_timm_has_the_datas_classes_and_its_own_normalisation(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    made: dict[str, Any] = {}
    loaded: list[tuple[nn.Module, str]] = []

    def create(name: str, **options: Any) -> nn.Module:
        made.update(name=name, **options)
        network: Any = ChannelMeans()
        network.pretrained_cfg = {"mean": (0.0, 0.5, 1.0), "std": (1.0, 0.5, 0.25)}
        return network  # type: ignore[no-any-return]

    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: None)
    monkeypatch.setattr(
        distillation, "load_whole_checkpoint", lambda network, path: loaded.append((network, str(path)))
    )
    name = "timm:resnet18" + (f"@{file}" if file else "")
    found = load_teacher(Distillation(teacher=name), STUDENT, ("a", "b", "c"))
    assert found is not None
    assert made == {"name": "resnet18", "pretrained": not file, "num_classes": 3}
    assert loaded == ([(found.network, file)] if file else [])
    assert (found.scale.flatten().tolist(), found.shift.flatten().tolist()) == ([0.5, 0.5, 4.0], [0.5, -0.5, -4.0])
    with pytest.raises(
        InputError, match=r"distillation\.teacher 'timm:resnet18.*' has 3 outputs, the data has 2 classes"
    ):
        load_teacher(Distillation(teacher=name), STUDENT, ("a", "b"))


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape == (1, 3, 32, 32)
        assert not images.any()
        raise self.error


@pytest.mark.parametrize("kind", [AssertionError, RuntimeError, ValueError])
def test_a_teacher_of_another_size_is_refused_with_its_own_words(kind: type[Exception]) -> None:
    with pytest.raises(InputError, match=r"^distillation\.teacher 'mine' does not take images of 32 px: too small$"):
        _check_outputs(teacher(Fails(kind("too small"))), 32, 3)


def test_other_errors_of_a_teacher_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        _check_outputs(teacher(Fails(ZeroDivisionError())), 32, 3)


class OneRow(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros(self.shape)


def test_logits_are_one_row_of_the_datas_classes() -> None:
    _check_outputs(teacher(OneRow((1, 3))), 8, 3)
    for shape in ((1, 4), (2, 3), (3,)):
        with pytest.raises(InputError, match=f"has {shape[-1]} outputs, the data has 3 classes"):
            _check_outputs(teacher(OneRow(shape)), 8, 3)


def test_few_classes_are_listed_and_many_are_counted() -> None:
    assert _list_classes(("a", "b", "c")) == "the classes a, b, c"
    assert _list_classes(("a", "b", "c", "d")) == "4 classes (a, b, c, …)"
