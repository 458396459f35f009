"""The verdict on a comparison, and whether an image set can prove it. Limits: docs/parity.md."""

from collections.abc import Iterator, Sequence

from vitx.core.certificate import Certificate, TokenSimilarity
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.data.image_set import ImageSet
from vitx.parity.comparison import Comparison
from vitx.parity.statistics import clopper_pearson_upper, images_needed, rounded_up

MAX_FLIP_RATE = 0.01


def judge(
    comparison: Comparison,
    *,
    max_flip_rate: float,
    max_logit_error: float,
    token_similarity: TokenSimilarity | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check the measurements against the limits; return (what failed, what holds) as sentences with the numbers."""
    checks = list(_checks(comparison, max_flip_rate, max_logit_error))
    if token_similarity is not None:
        checks.append(_token_check(token_similarity))
    return (
        tuple(text for holds, text in checks if not holds),
        tuple(text for holds, text in checks if holds),
    )


def _checks(measured: Comparison, max_flip_rate: float, max_logit_error: float) -> Iterator[tuple[bool, str]]:
    flips, n = len(measured.flips), measured.images
    largest = max((flip.reference_margin for flip in measured.flips), default=0.0)
    margin = f", the clearest with a reference margin of {largest:.3g}" if flips else ""
    by_size = measured.max_logit_error_by_batch_size
    worst_size = max(by_size, key=lambda size: by_size[size])
    yield (
        measured.flip_rate_bound <= max_flip_rate,
        f"{flips} of {counted(n, 'image')} flipped{margin}: flip rate at most {measured.flip_rate_bound:.6f} "
        f"(95 %), allowed {max_flip_rate:g}",
    )
    yield (
        measured.max_logit_error <= max_logit_error,
        f"largest logit error {measured.max_logit_error:.3g}, at batch size {worst_size}, allowed {max_logit_error:g}",
    )
    if max(measured.batch_sizes) > 1:  # images that run alone have no neighbours
        yield from _batch_checks(measured, max_flip_rate, max_logit_error)
    yield (
        measured.not_finite == 0,
        f"{measured.not_finite} of {counted(n, 'image')} {'has' if measured.not_finite == 1 else 'have'} logits that "
        "are not finite, allowed 0",
    )


def _batch_checks(measured: Comparison, max_flip_rate: float, max_logit_error: float) -> Iterator[tuple[bool, str]]:
    moved = max(measured.max_neighbour_error, measured.max_position_error)
    yield (
        moved <= max_logit_error,
        f"a row's logits move by up to {moved:.3g} with other neighbours in its batch or another place, "
        f"allowed {max_logit_error:g}",
    )
    yield (
        measured.probe_flips <= max_flip_rate * measured.probe_images,
        f"{measured.probe_flips} of {counted(measured.probe_images, 'image')} "
        f"change{'s' * (measured.probe_flips == 1)} class with the batch size or their neighbours: rate at most "
        f"{measured.probe_flip_rate_bound:.4f} (95 %), allowed seen {max_flip_rate:g}",
    )


def _token_check(tokens: TokenSimilarity) -> tuple[bool, str]:
    layer, reference, candidate = tokens.worst()
    return (
        abs(candidate - reference) <= tokens.allowed,
        f"the patch tokens after {layer} have CosSim {candidate:.4f} where the reference's have "
        f"{reference:.4f}, allowed difference {tokens.allowed:g}",
    )


def check_image_count(count: int, max_flip_rate: float) -> None:
    """Raise InputError when even no flip at all among `count` images would not prove `max_flip_rate`."""
    check_rate(max_flip_rate)
    if count == 0:
        raise InputError("no images: parity needs real images to compare on")
    if clopper_pearson_upper(0, count) > max_flip_rate:
        raise InputError(
            f"{counted(count, 'image')} cannot prove a flip rate of at most {max_flip_rate:g}: it takes "
            f"{images_needed(max_flip_rate)} without a flip; give more with --data, or ask for "
            f"--max-flip-rate {provable_rate(count):g}"
        )


def provable_rate(count: int) -> float:
    """The least flip rate, to three places, that `count` images prove when none of them flips."""
    return rounded_up(clopper_pearson_upper(0, count))


def flips_remedy(failed: Certificate) -> tuple[str, ...]:
    """What can be done about a certificate that failed by the bound on flips alone: near ties flip in any precision."""
    rate = rounded_up(failed.flip_rate_bound)
    if len(failed.reasons) > 1 or not failed.max_flip_rate < rate < 1:
        return ()
    return (f"the logits are within their limit: give more images with --data, or ask for --max-flip-rate {rate:g}",)


def check_rate(max_flip_rate: float) -> None:
    """Raise InputError unless the rate is above 0 and below 1."""
    if not 0 < max_flip_rate < 1:
        raise InputError(
            f"max flip rate {max_flip_rate:g}: expected a rate above 0 and below 1, such as {MAX_FLIP_RATE}"
        )


def check_labels(images: ImageSet, labels: Sequence[str]) -> None:
    """Raise InputError unless the image set has exactly these classes, a run's or a bundle's, in their order."""
    if tuple(images.class_names) == tuple(labels):
        return
    if len(images.class_names) != len(labels):
        raise InputError(f"'{images.name}' has {len(images.class_names)} classes, the model has {len(labels)}")
    index = next(i for i, name in enumerate(images.class_names) if name != labels[i])
    raise InputError(
        f"class {index} is '{images.class_names[index]}' in '{images.name}' and '{labels[index]}' in the model: "
        "give the data it was trained on"
    )
