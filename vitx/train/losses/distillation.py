"""Learning from a teacher's predictions beside the labels (Touvron et al., DeiT, arXiv 2012.12877, §4).

Shape letters: B batch, S image size in pixels, C classes.
"""

from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, RunFolder
from vitx.models import load_run_model
from vitx.models.build import require_network
from vitx.models.public_checkpoint import load_whole_checkpoint, published_model
from vitx.models.source import weights_digest
from vitx.train.recipes.optimization_settings import Distillation

TIMM = "timm:"


def distillation_loss(student_BC: Tensor, teacher_BC: Tensor, settings: Distillation) -> Tensor:
    """Return the distillation loss of logits (B, C), docs/maths.md §2.7; a scalar in float32.

    Hard: the cross-entropy with the class that the teacher predicts (eq. 3). Soft: τ²·KL(teacher‖student) at
    temperature τ (eq. 2), the mean over the images; the authors' code divides by images and classes instead.
    """
    student_BC, teacher_BC = student_BC.float(), teacher_BC.float()
    if settings.kind == "hard":
        logits_B, classes_B = teacher_BC.max(dim=-1)
        # NaN counts as the largest: no class. Zero times it is NaN, as is the loss then, which ends the run.
        return F.cross_entropy(student_BC, classes_B) + 0 * logits_B.sum()
    tau = settings.temperature
    student_log_BC, teacher_log_BC = (F.log_softmax(logits / tau, dim=-1) for logits in (student_BC, teacher_BC))
    return F.kl_div(student_log_BC, teacher_log_BC, reduction="batchmean", log_target=True) * tau**2


class Teacher:
    """A network that is not trained, and the settings by which its predictions count.

    The student's images are normalised with `student.mean` and `student.std`; the teacher expects `mean` and `std`.
    """

    def __init__(
        self, network: nn.Module, settings: Distillation, *, student: Preprocessing, mean: object, std: object
    ) -> None:
        self.network, self.settings = network.eval().requires_grad_(False), settings
        mean_S, std_S, mean_T, std_T = map(_per_channel, (student.mean, student.std, mean, std))
        # x_T = (x_S·std_S + mean_S − mean_T)/std_T, from student (S) to teacher (T), as one scale and shift.
        self.scale, self.shift = std_S / std_T, (mean_S - mean_T) / std_T

    @property
    def sha256(self) -> str:
        """Of its weights: a run that goes on may have another best epoch by the time its student is resumed."""
        return weights_digest(self.network)

    def to(self, device: torch.device) -> "Teacher":
        self.network.to(device)
        self.scale, self.shift = self.scale.to(device), self.shift.to(device)
        return self

    def loss(self, student_BC: Tensor, images_B3SS: Tensor) -> Tensor:
        """The distillation loss of the student's logits on images normalised for the student."""
        with torch.no_grad():
            teacher_BC = self.network(images_B3SS * self.scale + self.shift)
        return distillation_loss(student_BC, teacher_BC, self.settings)


def load_teacher(settings: Distillation, preprocessing: Preprocessing, class_names: tuple[str, ...]) -> Teacher | None:
    """Return the teacher of `settings`, or None where `settings.teacher` is empty.

    The classes of a run must be the student's `class_names`; a network of timm must have as many outputs. Raises
    InputError for a teacher that does not exist, predicts other classes, or takes images of another size.
    """
    name = settings.teacher
    if not name:
        for field in settings.model_dump(exclude_defaults=True):
            raise InputError(f"distillation.{field} has no effect without distillation.teacher: leave it out")
        return None
    if name.startswith(TIMM):
        network = _timm_network(name, len(class_names))
        config: Any = network.pretrained_cfg  # timm's, on every network it makes
        teacher = Teacher(network, settings, student=preprocessing, mean=config["mean"], std=config["std"])
    else:
        run = RunFolder.open(Path(name))
        info = run.info
        if info.class_names != class_names:
            predicted = _list_classes(info.class_names)
            raise InputError(f"distillation.teacher '{name}' predicts {predicted}, the data has others")
        size = info.preprocessing.image_size
        if size != preprocessing.image_size:  # one that takes any size is worse at another
            raise InputError(
                f"distillation.teacher '{name}' was trained on images of {size} px, and preprocessing.image_size is "
                f"{preprocessing.image_size}: set it to {size}, or train a teacher of that size"
            )
        mean, std = info.preprocessing.mean, info.preprocessing.std
        teacher = Teacher(load_run_model(run)[0], settings, student=preprocessing, mean=mean, std=std)
    _check_outputs(teacher, preprocessing.image_size, len(class_names))
    return teacher


def _timm_network(name: str, classes: int) -> nn.Module:
    architecture, _, file = name.removeprefix(TIMM).partition("@")
    require_network(architecture, "teacher of timm")
    if not file:
        remedy = f"give weights of '{architecture}' with distillation.teacher={name}@FILE"
        published = timm.get_pretrained_cfg(architecture)
        if published is not None and published.num_classes != classes:
            known = published.num_classes
            raise InputError(f"'{name}' was published for {known} classes, the data has {classes}: {remedy}")
        return published_model(ModelSpec(name=architecture, num_classes=classes), remedy)
    network: nn.Module = timm.create_model(architecture, pretrained=False, num_classes=classes)
    load_whole_checkpoint(network, Path(file))
    return network


def _check_outputs(teacher: Teacher, size: int, classes: int) -> None:
    """Run one black image through the teacher, so that a wrong size or number of classes shows before training."""
    said = f"distillation.teacher '{teacher.settings.teacher}'"
    try:
        with torch.inference_mode():
            logits = teacher.network(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(f"{said} does not take images of {size} px: {error}") from None
    if logits.shape != (1, classes):
        raise InputError(f"{said} has {logits.shape[-1]} outputs, the data has {classes} classes")


def _list_classes(names: tuple[str, ...]) -> str:
    return f"{len(names)} classes ({', '.join(names[:3])}, …)" if len(names) > 3 else f"the classes {', '.join(names)}"


def _per_channel(values: object) -> Tensor:
    """Three numbers as (1, 3, 1, 1), which broadcasts over (B, 3, S, S)."""
    return torch.tensor(values).view(1, 3, 1, 1)
