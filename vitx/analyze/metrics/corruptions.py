"""Accuracy under the fifteen common corruptions (Hendrycks & Dietterich, arXiv 1903.12261; docs/maths.md §5.3)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitx.analyze.accuracy import AccuracyCounter, Labels, Predict, labelled_batches
from vitx.analyze.corruption.constants import CORRUPTIONS
from vitx.analyze.corruption.copies import BlankForUnreadable, CorruptedCopies, open_corrupted_copies
from vitx.analyze.corruption.synthesis import SEVERITIES, check_corruption, corrupt
from vitx.analyze.intervals import Measured, mean_interval, rounded, share_text, with_interval
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import ACCURACY, whole_numbers
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.core.panels import LINES, WIDTH, Results, panels
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import log_skipped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# AlexNet's error on ImageNet-C, mean over the five severities: the baseline of the published mCE. No baseline for other
# images.
ALEXNET_ERRORS = dict(
    zip(
        CORRUPTIONS,
        (
            *(0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816),
            *(0.826572, 0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500),
        ),
        strict=True,
    )
)


class CorruptionRobustness(Measured):
    """Accuracies, 0 to 1: `accuracy[corruption][i]` at `severities[i]`, `clean` on the uncorrupted images.

    `clean` is None for published copies, which have no clean images. `mean_accuracy` is over corruptions and
    severities; `mce` the mean corruption error, in units of the baseline's error; None without a baseline.
    """

    images: int
    severities: tuple[int, ...]
    clean: float | None
    accuracy: dict[str, tuple[float, ...]]
    mean_accuracy: float
    mce: float | None


def corruption_robustness(
    predict: Predict,
    images: Iterable[UInt8Array],
    labels: Labels,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    *,
    seed: int = 0,
    baseline_errors: Mapping[str, float] | None = None,
) -> CorruptionRobustness:
    """Top-1 accuracy of every image clean and under each corruption at each severity; corruptions are computed here.

    images: batches uint8 (B, S, S, 3), as `ImageSet.batches` yields them, read once; labels (N,). The mean over 15
    corruptions and 5 severities is the number to compare networks by, beside `clean`.

    baseline_errors: by corruption, another classifier's error, mean over the same severities of the same images; then
    `mce = mean_c (Σ_s E_{c,s} / Σ_s E^baseline_{c,s})`, below 1 where this network errs less (Hendrycks & Dietterich,
    arXiv 1903.12261, §4; docs/maths.md §5.3). Raises InputError for unknown names, and for a baseline that lacks a
    corruption or has no error.
    """
    conditions = _conditions(corruptions, severities, baseline_errors)
    counter = AccuracyCounter()
    for first, pixels, truth in labelled_batches(images, labels):
        counter.add(None, predict(pixels), truth)
        for condition in conditions:
            counter.add(condition, predict(corrupt(pixels, *condition, seed=seed, first=first)), truth)
    return _result(counter, counter.accuracy(None), corruptions, severities, baseline_errors)


def copies_robustness(
    predict: Predict,
    copies: CorruptedCopies,
    preprocessing: Preprocessing,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    *,
    batch_size: int = 64,
    limit: int | None = None,
    skip_bad: bool = False,
    baseline_errors: Mapping[str, float] | None = None,
) -> CorruptionRobustness:
    """`corruption_robustness` on copies of CIFAR-C or ImageNet-C, by default on all corruptions that the folder has.

    The copies are cropped already: they are resized to the network's image size, and no border is cut off again. limit:
    at most so many images of each corruption and severity, evenly spaced. skip_bad: an image of which a copy cannot be
    read is left out under every corruption, and counted; otherwise it raises ImageError. mCE: see
    `corruption_robustness`; on ImageNet-C with `ALEXNET_ERRORS` it is the published measure.
    """
    corruptions = copies.corruptions if corruptions is None else corruptions
    whole = preprocessing.model_copy(update={"crop_fraction": 1.0})
    counter, count, first = AccuracyCounter(), 0, ""
    unreadable: dict[int, str] = {}
    for corruption, severity in _conditions(corruptions, severities, baseline_errors):
        images = copies.open(corruption, severity)
        count, first = count or len(images), first or images.name
        if len(images) != count:  # an archive that was unpacked in part: accuracies would be of other images
            raise InputError(f"{images.name} has {len(images)} images, but {first} {count}: unpack the copies again")
        images = images.evenly_spaced(limit)
        if skip_bad:
            images = replace(images, read=BlankForUnreadable(images, whole.check_size, unreadable))
        for _, pixels, truth in labelled_batches(images.batches(whole, batch_size), images.labels):
            counter.add((corruption, severity), predict(pixels), truth)
    if unreadable:
        kept = np.ones(len(images), dtype=np.bool_)
        kept[[*unreadable]] = False
        if not kept.any():
            raise InputError(f"of every image a copy is unreadable, such as {next(iter(unreadable.values()))}")
        counter.keep(kept)
        log_skipped(replace(images, skipped=tuple(unreadable.values())))
    return _result(counter, None, corruptions, severities, baseline_errors)


def mean_corruption_error(errors: Mapping[str, float], baseline_errors: Mapping[str, float]) -> float:
    """mCE: the mean over corruptions of the error over the baseline's error."""
    return float(np.mean([error / baseline_errors[corruption] for corruption, error in errors.items()]))


def _conditions(
    corruptions: Sequence[str], severities: Sequence[int], baseline_errors: Mapping[str, float] | None
) -> list[tuple[str, int]]:
    """Every (corruption, severity) to measure; raise InputError for what cannot be measured."""
    if not corruptions or not severities:
        raise InputError("no corruption or no severity to measure: expected at least one of each")
    conditions = [(corruption, severity) for corruption in corruptions for severity in severities]
    for condition in conditions:
        check_corruption(*condition)
    if baseline_errors is not None:
        missing = [name for name in corruptions if not baseline_errors.get(name)]
        if missing:
            raise InputError(f"the baseline has no error above 0 for {', '.join(missing)}: mCE divides by it")
    return conditions


def _result(
    counter: AccuracyCounter,
    clean: float | None,
    corruptions: Sequence[str],
    severities: Sequence[int],
    baseline_errors: Mapping[str, float] | None,
) -> CorruptionRobustness:
    accuracy = {name: tuple(counter.accuracy((name, severity)) for severity in severities) for name in corruptions}
    errors = {name: 1 - float(np.mean(values)) for name, values in accuracy.items()}
    # An image's answers under the corruptions go together, so images are resampled, not answers.
    of_image = np.mean([counter.correct((name, severity)) for name in corruptions for severity in severities], axis=0)
    return CorruptionRobustness(
        images=counter.images((corruptions[0], severities[0])),
        severities=tuple(severities),
        clean=clean,
        accuracy=accuracy,
        mean_accuracy=1 - float(np.mean(list(errors.values()))),
        mce=None if baseline_errors is None else mean_corruption_error(errors, baseline_errors),
        intervals={"mean_accuracy": mean_interval(of_image)},
        per_image={"mean accuracy under corruptions": rounded(of_image)},
    )


def measure_corruptions(context: MetricContext) -> CorruptionRobustness:
    source, images, options, *_ = context
    predict = predictor(source.model, source.preprocessing)
    if options.corrupted is None:
        return corruption_robustness(predict, context.batches(), images.labels, seed=options.seed)
    copies = open_corrupted_copies(options.corrupted, source.class_names)
    return copies_robustness(
        predict,
        copies,
        source.preprocessing,
        batch_size=options.batch_size,
        limit=len(images),
        skip_bad=options.skip_bad,
    )


def draw_corruptions(results: Results) -> "Figure":
    records: Mapping[str, CorruptionRobustness] = results
    figure, (left, right) = panels(2, width=1.2 * WIDTH, height=4.2)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        by_severity = 100 * np.mean(list(record.accuracy.values()), axis=0)
        left.plot(record.severities, by_severity, label=network, markersize=4, **style)
        means = [100 * float(np.mean(values)) for values in record.accuracy.values()]
        right.plot(list(record.accuracy), means, markersize=4, **{**style, "linestyle": "none"})
        if record.clean is not None:
            left.axhline(100 * record.clean, color=style["color"], linewidth=0.8, linestyle=":")
    left.set(xlabel="severity (dotted: clean)", ylabel=f"{ACCURACY}, mean of corruptions")
    whole_numbers(left.xaxis)
    left.legend(fontsize="small")
    right.set(xlabel="corruption", ylabel=f"{ACCURACY}, mean of severities")
    right.tick_params(axis="x", rotation=90)
    return figure


def _corruptions_line(found: CorruptionRobustness) -> str:
    name = min(found.accuracy, key=lambda key: sum(found.accuracy[key]))
    clean, worst = (
        "–" if share is None else share_text(share, found.images) for share in (found.clean, min(found.accuracy[name]))
    )
    mean = with_interval(found.mean_accuracy, found.interval("mean_accuracy"), ".1f", scale=100)
    of = f"{len(found.accuracy)} of {len(CORRUPTIONS)} corruptions"  # copies may be of a few
    return f"{clean} → {mean} % on average of {of}, {worst} under the worst severity of {name}"


CORRUPTIONS_METRIC = Metric(
    title="Corruptions",
    reading="Accuracy under corruptions at 5 severities. The mean over all of them is the number to compare.",
    precision="Wilson's for one corruption and severity; bootstrap over images for the mean; drawn means have none",
    record=CorruptionRobustness,
    line=_corruptions_line,
    measure=measure_corruptions,
    labels=True,
    options=("seed", "corrupted", "skip_bad"),
    default=False,
    figure=draw_corruptions,
)
