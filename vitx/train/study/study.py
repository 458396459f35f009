"""Studies: the same training in several variants and seeds, side by side. Specification: docs/studies.md."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitx.core.console import counted, log
from vitx.core.errors import InputError
from vitx.core.files import check_folder, make_folder, read_record, write_json
from vitx.core.machine import describe_machine, installed_versions
from vitx.core.run import RunFolder
from vitx.data.flat_folder import check_outside
from vitx.data.open import open_splits
from vitx.train.loop.environment import DataRecord
from vitx.train.loop.network import build_network, load_initial_weights, model_spec
from vitx.train.options import StudyKind
from vitx.train.recipes.recipe import apply_overrides
from vitx.train.recipes.registry import resolve_recipe
from vitx.train.study.result import Score, StudyResult, Variant, rows_of
from vitx.train.study.trials import Runner, Trial
from vitx.train.study.variants import STUDIES

# What may be in the folder of a study without study.json, which is written when its first run has finished.
WITHOUT_RESULT = ("runs", "logs", ".lock", "study.png")


@dataclass
class Study:
    """What all variants have in common, the folder of the runs, and the results so far.

    Raises InputError for bad arguments, and for an `out` that holds another study or something else.
    """

    kind: StudyKind
    recipe: str
    out: Path
    seeds: tuple[int, ...]
    data: str | None = None
    overrides: tuple[str, ...] = ()
    jobs: int = 1
    device: str = "auto"
    skip_bad: bool = False
    quiet: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    scores: dict[Trial, Score] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds:
            raise InputError("no seeds: give at least one, such as --seeds 0,1,2")
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"--seeds {','.join(map(str, self.seeds))}: each only once")
        if self.jobs < 1:
            raise InputError(f"--jobs {self.jobs}: expected at least 1")
        for override in self.overrides:
            if override.partition("=")[0] == "seed":
                raise InputError(f"--set {override}: a study has --seeds instead")
        _check_folder(self.out, self.kind)
        self.base = resolve_recipe(self.recipe, data=self.data, overrides=self.overrides, device=self.device)
        self.train_images, self.val_images = open_splits(
            self.base.data, skip_bad=self.skip_bad, check_size=self.base.preprocessing.check_size
        )
        check_outside(self.train_images, self.out)
        self.found = {"train": DataRecord.of(self.train_images), "val": DataRecord.of(self.val_images)}

    def trials(self, variants: Sequence[Variant]) -> list[Trial]:
        """A trial for each seed and variant, seed by seed: a stopped study has every row for its first seeds."""
        return [
            Trial(variant.name, seed, self.recipe, self.data, (*self.overrides, *variant.overrides), self.device)
            for seed in self.seeds
            for variant in variants
        ]

    def check(self, variants: Sequence[Variant]) -> None:
        """Raise InputError for a variant that cannot be built or begin, and for runs of other settings or images.

        A network depends on the variant alone, so it is built for the first seed only.
        """
        classes = len(self.train_images.class_names)
        for trial in self.trials(variants):
            trial.check_begun(self.out, self.train_images, self.found)
            if trial.seed == self.seeds[0]:
                recipe = trial.resolved()
                spec = model_spec(recipe, classes)
                network, weights = build_network(recipe, spec), recipe.model.initial_checkpoint
                if weights and not RunFolder(trial.folder(self.out)).exists():
                    load_initial_weights(network, spec, weights, quiet=True)

    def run(self, variants: Sequence[Variant], after_each: Callable[[], object] = lambda: None) -> None:
        """Train every trial to its end; failed ones are then in `failed`, the others in `scores`.

        Raises InputError when a run began on other images than the study, whose rows could not be compared.
        """
        make_folder(self.out)
        trials = self.trials(variants)
        runner = Runner(self.out, self.jobs, self.skip_bad)
        with closing(runner.run(trials)) as outcomes:
            for count, (trial, failure) in enumerate(outcomes, 1):
                if RunFolder(trial.folder(self.out)).exists():
                    trial.check_images(self.out, self.train_images, self.found)
                history = trial.history(self.out)
                if failure is None and history is not None:
                    metric = trial.resolved().selection.metric
                    self.scores[trial] = Score.of(trial.variant, trial.seed, history, metric)
                    self.failed.pop(trial.name, None)
                    outcome = _in_words(self.scores[trial])
                else:
                    self.failed[trial.name] = outcome = failure or "its run folder is gone"
                log(f"{count}/{len(trials)} {trial.name}: {outcome}", quiet=self.quiet)
                after_each()

    def write(self, variants: Sequence[Variant], steps: Sequence[dict[str, Any]] = ()) -> StudyResult:
        """Write the results so far into study.json and return them; `steps` are those of the build-up rule."""
        scores = [self.scores[trial] for trial in self.trials(variants) if trial in self.scores]
        result = StudyResult(
            study=self.kind,
            recipe=self.recipe,
            data=self.base.data,
            classes=len(self.train_images.class_names),
            images={"train": len(self.train_images), "val": len(self.val_images)},
            settings=self.overrides,
            seeds=self.seeds,
            jobs=self.jobs,
            machine=describe_machine(),
            versions=installed_versions(),
            seconds=round(math.fsum(score.seconds for score in scores), 1),
            rows=tuple(rows_of(variants, scores)),
            runs=tuple(scores),
            steps=tuple(steps),
            failed=dict(self.failed),
            paper=STUDIES[self.kind].paper,
            here=self._scale(variants),
        )
        write_json(self.out / "study.json", result)
        return result

    def _scale(self, variants: Sequence[Variant]) -> str:
        """What is trained here, to be read beside what the paper trained; the image size is the rows' own."""
        recipe, images = self.base, self.train_images
        sizes = {apply_overrides(recipe, variant.overrides).preprocessing.image_size for variant in variants}
        arguments = "".join(f", {name}={value}" for name, value in recipe.model.kwargs.items())
        epochs, seeds = counted(recipe.epochs, "epoch"), counted(len(self.seeds), "seed")
        return (
            f"{recipe.model.name}{arguments}; {len(images)} images of {len(images.class_names)} classes, "
            f"{', '.join(map(str, sorted(sizes)))} px, {epochs} at batch {recipe.batch_size}, {seeds}"
        )


def compare(study: Study, variants: Sequence[Variant]) -> StudyResult:
    """Train every variant with every seed, and write study.json after each run.

    Raises InputError before anything is trained, and TrainingStopped after SIGTERM or SIGINT.
    """
    study.check(variants)
    study.run(variants, lambda: study.write(variants))
    return study.write(variants)


def _in_words(score: Score) -> str:
    similarity = f", CosSim of the last block {score.cos_sim[-1]:.3f}" if score.cos_sim else ""
    return f"top-1 {score.top1:.2%}{similarity}, {score.seconds:.0f} s"


def _check_folder(out: Path, kind: StudyKind) -> None:
    """Raise InputError for a folder that holds another study, or something else, and where none can be."""
    check_folder(out)
    if (out / "study.json").is_file():
        try:
            stored = read_record(out / "study.json", StudyResult)
        except InputError as error:
            raise InputError(f"{error}; without this file the study goes on, and writes it again") from None
        if stored.study != kind:
            raise InputError(f"'{out}' holds a study of {stored.study}, not of {kind}: choose another --out")
    elif out.is_dir() and any(path.name not in WITHOUT_RESULT for path in out.iterdir()):
        raise InputError(f"'{out}' holds something that is no study: choose another --out")
