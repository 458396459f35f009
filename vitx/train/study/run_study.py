"""A whole study of one kind: its variants, its result and its figure."""

from collections.abc import Callable, Sequence

from vitx.core.errors import InputError
from vitx.core.files import write_bytes
from vitx.core.panels import own_style, png
from vitx.train.recipes.recipe import Recipe
from vitx.train.recipes.registry import resolve_recipe
from vitx.train.study.build_up import study_alternet
from vitx.train.study.result import StudyResult, Variant
from vitx.train.study.study import Study, compare
from vitx.train.study.study_figures import draw_study
from vitx.train.study.variants import DEPTHS, STUDIES, depth_variants


def run_study(study: Study, depths: Sequence[int] = DEPTHS) -> StudyResult:
    """Train the variants of `study.kind`, write study.json and study.png, and return the result.

    `depths` are the numbers of blocks of a study of depth. Raises InputError before anything is trained, also for a
    setting without effect, CheckFailed when the build-up rule cannot go on, and TrainingStopped after SIGTERM or
    SIGINT.
    """
    if study.kind == "alternet":
        result = study_alternet(study)
    else:
        variants = STUDIES[study.kind].variants if study.kind != "depth" else lambda _recipe: depth_variants(depths)
        chosen = variants(study.base)
        _refuse_without_effect(study, chosen, variants)
        result = compare(study, chosen)
    if result.rows:
        with own_style():
            write_bytes(study.out / "study.png", png(draw_study(result)))
    return result


def _refuse_without_effect(
    study: Study, chosen: Sequence[Variant], variants: Callable[[Recipe], Sequence[Variant]]
) -> None:
    """Raise InputError for a setting that each of the `chosen` rows changes, whatever it is in the recipe."""
    for setting in study.overrides:
        key = setting.partition("=")[0]
        if all(any(each.partition("=")[0] == key for each in row.overrides) for row in chosen):
            others = tuple(each for each in study.overrides if each != setting)
            recipe = resolve_recipe(study.recipe, data=study.data, overrides=others, device=study.device)
            if recipe != study.base and variants(recipe) == chosen:
                raise InputError(f"--set {setting} has no effect: every row of the study has a {key} of its own")
