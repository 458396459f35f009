"""A whole study of one kind: its variants, its result and its figure."""

from collections.abc import Sequence

from vitx.core.files import write_bytes
from vitx.core.panels import png
from vitx.train.study.build_up import study_alternet
from vitx.train.study.result import StudyResult
from vitx.train.study.study import Study, compare
from vitx.train.study.study_figures import draw_study
from vitx.train.study.variants import DEPTHS, STUDIES, depth_variants


def run_study(study: Study, depths: Sequence[int] = DEPTHS) -> StudyResult:
    """Train the variants of `study.kind`, write study.json and study.png, and return the result.

    `depths` are the numbers of blocks of a study of depth. Raises InputError before anything is trained, CheckFailed
    when the build-up rule cannot go on, and TrainingStopped after SIGTERM or SIGINT.
    """
    if study.kind == "alternet":
        result = study_alternet(study)
    else:
        chosen = depth_variants(depths) if study.kind == "depth" else STUDIES[study.kind].variants(study.base)
        result = compare(study, chosen)
    if result.rows:
        write_bytes(study.out / "study.png", png(draw_study(result)))
    return result
