"""One executable against the witness set: its classes and logits beside the checkpoint's, and the verdict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle, Precision, timestamp
from vitx.core.certificate import OutputVerdict, Verdict
from vitx.core.console import progress
from vitx.core.errors import InputError
from vitx.core.machine import describe_machine
from vitx.core.tolerance import allowed_logit_error, coarser
from vitx.parity.comparison import NOT_FINITE_ERROR
from vitx.parity.executables.outputs import judge_output, reasons_of
from vitx.parity.executables.witness import Witness
from vitx.parity.statistics import rounded_up, stratified_upper
from vitx.runtimes.session import LOGITS, Float32Array, Session, executable_of

BATCH = 16
ALONE = 8  # images that are also run one at a time


@dataclass(frozen=True)
class _Run:
    """logits (N, C) at batches of `BATCH`, `alone` (n, C) of the first images one at a time; seconds an image.

    outputs: of each further output the same two.
    """

    logits: Float32Array
    alone: Float32Array
    seconds: float
    outputs: dict[str, tuple[Float32Array, Float32Array]]


def judge_executable(
    bundle: Bundle, witness: Witness, session: Session, rate: float, *, must_prove: bool = False, quiet: bool = False
) -> Verdict:
    """Run the witness set through a session loaded from `bundle`, and say whether it passes.

    rate: the highest flip rate allowed. The flips of the split that were certified of the graph count as so many, and
    what flips in the set beside them as in `stratified_upper`. Where the set is too small to prove the rate, no image
    drawn by chance may flip beside them, and the verdict says what that proves; with `must_prove` InputError is raised
    instead. Raises what `Session.infer` does.
    """
    info, count = witness.info, len(witness)
    provable = _bound(witness, 0, 0, known=info.split_flips)
    if must_prove and provable > rate:
        raise InputError(
            f"the witness set of '{bundle.path}' is too small for a flip rate of at most {rate:g}: its {count} "
            f"of {info.population} images prove {rounded_up(provable):g} at best; export with more "
            "(--witness N), or compare with the run: vitx parity RUN BUNDLE --runtime NAME"
        )
    run = _run(witness, session, quiet=quiet)
    executable = executable_of(bundle.subject(), session)
    precision = coarser(bundle.manifest.precision, executable.precision)  # type: ignore[arg-type]  # others: as fp32
    allowed = allowed_logit_error(precision, info.logit_std)
    outputs = _judged_outputs(bundle, witness, run, precision)
    verdict_of = partial(
        Verdict,
        executable=executable,
        evidence="witness set",
        images=count,
        population=info.population,
        max_flip_rate=rate,
        max_logit_error_allowed=allowed,
        images_per_second=1 / run.seconds,
        outputs=outputs,
        machine=describe_machine(),
        created=timestamp(),
    )
    if run.logits.shape != witness.logits.shape:
        other = (f"logits {run.logits.shape} where the checkpoint has {witness.logits.shape}",)
        return verdict_of(verdict="fail", reasons=other, max_logit_error=NOT_FINITE_ERROR)
    finite = bool(np.isfinite(run.logits).all() and np.isfinite(run.alone).all())
    error = _largest_error(witness, run) if finite else NOT_FINITE_ERROR
    flipped = _flipped(witness, run)
    census, sample = _beside_certified(witness, flipped)
    bound = _bound(witness, census, sample, known=info.split_flips)
    # Too few images to prove the rate: then none of those drawn by chance may flip, and the others are held to it.
    few = provable > rate and sample == 0 and census + info.split_flips <= rate * info.population
    checks = (
        (
            bound <= rate or few,
            f"{flipped.sum()} of {count} witness images flipped"
            + (f", {census + sample} beside the {info.split_flips} certified of the split" if info.split_flips else "")
            + f": flip rate at most {bound:.6f} (95 %), allowed {rate:g}"
            + (f", and none by chance, as {count} images prove no less than {provable:.4f}" if few else ""),
        ),
        (error <= allowed, f"largest logit error {error:.3g}, allowed {allowed:.3g}"),
        (finite, "logits that are not finite, allowed none" if not finite else "all logits finite"),
        *((outputs[name].verdict == "pass", text) for name, text in reasons_of(outputs).items()),
    )
    failures = tuple(text for holds, text in checks if not holds)
    return verdict_of(
        verdict="fail" if failures else "pass",
        reasons=failures or tuple(text for _, text in checks),
        flips=int(flipped.sum()),
        flip_rate_bound=bound,
        max_logit_error=error,
    )


def _run(witness: Witness, session: Session, *, quiet: bool) -> _Run:
    pixels, found, seconds = witness.pixels, list[dict[str, Float32Array]](), []
    with progress("witness set", len(witness), quiet=quiet) as bar:
        for start in range(0, len(pixels), BATCH):
            block = pixels[start : start + BATCH]
            begun = time.perf_counter()
            found.append(session.infer_outputs(block))
            seconds.append((time.perf_counter() - begun) / len(block))
            bar.update(start + len(block))
    alone = [session.infer_outputs(pixels[row : row + 1]) for row in range(min(ALONE, len(pixels)))]
    outputs = {name: (_column(found, name), _column(alone, name)) for name in session.outputs}
    return _Run(_column(found, LOGITS), _column(alone, LOGITS), float(np.median(seconds)), outputs)


def _column(batches: Sequence[dict[str, Float32Array]], name: str) -> Float32Array:
    return np.concatenate([batch[name] for batch in batches])


def _judged_outputs(bundle: Bundle, witness: Witness, run: _Run, precision: Precision) -> dict[str, OutputVerdict]:
    """A verdict on each output that the bundle lists and the session gave."""

    def bound(exceeding: np.ndarray) -> float:
        census = witness.info.census
        return _bound(witness, int(exceeding[:census].sum()), int(exceeding[census:].sum()))

    return {
        spec.name: judge_output(witness.outputs[spec.name], *run.outputs[spec.name], precision, bound)
        for spec in bundle.manifest.outputs
        if spec.name in run.outputs
    }


def _largest_error(witness: Witness, run: _Run) -> float:
    return max(
        float(np.abs(run.logits - witness.logits).max()),
        float(np.abs(run.alone - witness.logits[: len(run.alone)]).max()),
    )


def _flipped(witness: Witness, run: _Run) -> npt.NDArray[np.bool_]:
    """Which images are in another class than the checkpoint's."""
    expected = witness.logits.argmax(axis=1)
    flipped: npt.NDArray[np.bool_] = run.logits.argmax(axis=1) != expected
    flipped[: len(run.alone)] |= run.alone.argmax(axis=1) != expected[: len(run.alone)]
    return flipped


def _beside_certified(witness: Witness, flipped: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Flips that the graph's certificate has not counted: of the census, and of those drawn by chance."""
    others = flipped.copy()
    others[[*witness.info.flipped]] = False
    census = witness.info.census
    return int(others[:census].sum()), int(others[census:].sum())


def _bound(witness: Witness, census_flips: int, sample_flips: int, *, known: int = 0) -> float:
    census, population = witness.info.census, witness.info.population
    sample = len(witness) - census
    return stratified_upper(
        census_flips, sample_flips, census=census, sample=sample, population=population, known=known
    )
