"""The build-up rule of AlterNet, automated (Park & Kim, How Do Vision Transformers Work?, arXiv 2202.06709, §4).

Every second convolution is replaced by self-attention (MSA), one after another from the end of the last stage. A
replacement that does not help is taken back, and the next one is at the end of the stage before. Late stages have more
heads.
"""

from collections.abc import Callable, Iterator, Sequence

from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import Record
from vitx.core.run import ModelSpec
from vitx.models import build_model
from vitx.models.alternet import STAGE_WIDTHS, AlterNet
from vitx.train.study.result import StudyResult, Variant, rows_of
from vitx.train.study.study import Study

Depths = tuple[int, ...]
# (top-1, −NLL): among equal accuracies the lower NLL is better, as for checkpoints. Both are rounded, so that means of
# the same numbers in another order are equal.
Quality = tuple[float, float]


class Replacement(Record):
    """A network to train, by its MSA units in each stage. `stage` has one more than before; None at the start."""

    stage: int | None
    attention_depths: Depths


class Step(Replacement):
    """A replacement that was trained, and whether it stays."""

    top1: float
    nll: float
    kept: bool


def next_replacement(depths: Depths, steps: Sequence[Step]) -> Replacement | None:
    """Return what the rule tries after `steps` on stages of `depths` units; None when nothing is left to try.

    A stage takes one MSA for every two units. The answer follows from the arguments alone, so a study that is resumed
    takes the same way.
    """
    if not steps:
        return Replacement(stage=None, attention_depths=(0,) * len(depths))
    last, kept = steps[-1], next(step.attention_depths for step in reversed(steps) if step.kept)
    # The same stage again after a success, the stage before it after a failure.
    start = len(depths) - 1 if last.stage is None else last.stage - (not last.kept)
    for stage in range(start, -1, -1):
        if 2 * (kept[stage] + 1) <= depths[stage]:
            more = tuple(count + (index == stage) for index, count in enumerate(kept))
            return Replacement(stage=stage, attention_depths=more)
    return None


def build_up(depths: Depths, train: Callable[[Replacement], Quality]) -> Iterator[Step]:
    """Follow the rule: yield each step when it is trained, and kept or, if it was no better, taken back."""
    steps: list[Step] = []
    best: Quality | None = None
    while (tried := next_replacement(depths, steps)) is not None:
        quality = train(tried)
        kept = best is None or quality > best
        best = quality if kept else best
        top1, negative_nll = quality
        steps.append(Step(**tried.model_dump(), top1=top1, nll=-negative_nll, kept=kept))
        yield steps[-1]


def study_alternet(study: Study) -> StudyResult:
    """Follow the rule from the recipe's network without attention, each step trained with all seeds.

    Raises InputError for a recipe of another network, CheckFailed when a step cannot be trained.
    """
    depths = _stage_depths(study)
    tried: list[Variant] = []
    steps: list[Step] = []

    def train(replacement: Replacement) -> Quality:
        tried.append(_variant(replacement.attention_depths))
        study.check(tried[-1:])
        study.run(tried[-1:])
        result = study.write(tried, [step.model_dump() for step in steps])
        if study.failed:
            name, reason = next(iter(study.failed.items()))
            raise CheckFailed(f"the rule cannot go on without {name}, which failed: {reason}")
        row = next(rows_of(tried[-1:], result.runs))
        return round(row.top1.mean, 9), -round(row.nll.mean, 9)

    for step in build_up(depths, train):
        steps.append(step)
        result = study.write(tried, [step.model_dump() for step in steps])
    return result


def _variant(attention_depths: Depths) -> Variant:
    text = "-".join(map(str, attention_depths))
    return Variant(
        f"msa-{text}",
        (f"model.kwargs.attention_depths={list(attention_depths)}",),
        {"attention_depths": list(attention_depths)},
    )


def _stage_depths(study: Study) -> Depths:
    """The number of units of each stage of the recipe's network."""
    recipe, classes = study.base, len(study.train_images.class_names)
    name, kwargs = recipe.model.name, recipe.model.kwargs
    if not isinstance(build_model(ModelSpec(name=name, num_classes=classes)), AlterNet):
        raise InputError(f"model '{name}' is no AlterNet: give --recipe digits-alternet or alternet-cifar")
    # Without attention: the recipe's own attention_depths need not fit the depths that --set gave.
    without_attention = {**kwargs, "attention_depths": (0,) * len(STAGE_WIDTHS)}
    model = build_model(ModelSpec(name=name, num_classes=classes, kwargs=without_attention))
    assert isinstance(model, AlterNet)
    depths = tuple(len(list(stage.children())) for stage in model.stages)
    most = tuple(units // 2 for units in depths)
    build_model(ModelSpec(name=name, num_classes=classes, kwargs={**kwargs, "attention_depths": most}))
    given = kwargs.get("num_heads") or ()  # of each stage that has attention a number, or that network was refused
    heads = [number for number, attention in zip(given, most, strict=False) if attention]
    if heads != sorted(heads):
        raise InputError(f"model.kwargs.num_heads={given}: the rule wants no fewer heads in later stages")
    return depths
