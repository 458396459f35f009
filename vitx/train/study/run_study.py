"""A whole study of one kind: its variants, its result and its figure."""

from collections.abc import Sequence

from vitx.core.files import write_bytes
from vitx.core.panels import png
from vitx.train.study.build_up import study_alternet
from vitx.train.study.result import Kind, StudyResult
from vitx.train.study.study import DEPTHS, Study, ablation_variants, compare, depth_variants
from vitx.train.study.study_figures import draw_study

DEFAULT_RECIPES: dict[Kind, str] = {"ablation": "digits-deit", "depth": "digits-deit", "alternet": "digits-alternet"}


def run_study(study: Study, depths: Sequence[int] = DEPTHS) -> StudyResult:
    """Train the variants of `study.kind`, write study.json and study.png, and return the result.

    `depths` are the numbers of blocks of a study of depth. Raises InputError before anything is trained, CheckFailed
    when the build-up rule cannot go on, and TrainingStopped after SIGTERM or SIGINT.
    """
    if study.kind == "ablation":
        result = compare(study, ablation_variants(study.base))
    elif study.kind == "depth":
        result = compare(study, depth_variants(depths))
    else:
        result = study_alternet(study)
    if result.rows:
        write_bytes(study.out / "study.png", png(draw_study(result)))
    return result
