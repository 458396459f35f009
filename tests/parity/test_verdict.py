"""`judge` exactly at each limit and one float beyond it, with the whole text of every reason."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from table_session import numbered_images
from vitx.core.certificate import Flip, TokenSimilarity
from vitx.core.errors import InputError
from vitx.parity.comparison import Comparison
from vitx.parity.statistics import clopper_pearson_upper
from vitx.parity.verdict import check_image_count, check_labels, check_rate, flips_remedy, judge

HONEST = Comparison(
    images=400,
    batch_size=32,
    batch_sizes=(1, 7, 32),
    probe_images=200,
    probe_flips=0,
    correct_reference=300,
    correct_candidate=300,
    only_reference_correct=0,
    only_candidate_correct=0,
    flips=(),
    max_logit_error_by_batch_size={1: 0.25, 7: 0.5, 32: 0.125},
    mean_logit_error=0.01,
    min_cosine=0.99,
    mean_cosine=0.999,
    ece_reference=0.1,
    ece_candidate=0.1,
    max_neighbour_error=0.0625,
    max_position_error=0.03125,
    not_finite=0,
    logit_std=1.0,
    classes_sha256="",
)
NO_FLIP = "0 of 400 images flipped: flip rate at most 0.007461 (95 %), allowed 0.5"
LOGITS = "largest logit error 0.5, at batch size 7, allowed 0.75"
MOVED = "a row's logits move by up to 0.0625 with other neighbours in its batch or another place, allowed 0.75"
UNSTABLE = (
    "0 of 200 images change class with the batch size or their neighbours: rate at most 0.0149 (95 %), allowed seen 0.5"
)
FINITE = "0 of 400 images have logits that are not finite, allowed 0"
TOKENS = TokenSimilarity(
    images=64, layers=("blocks.0", "blocks.1"), reference=(0.5, 0.25), candidate=(0.4375, 0.375), allowed=0.125
)
SIMILAR = (
    "the patch tokens after blocks.1 have CosSim 0.3750 where the reference's have 0.2500, allowed difference 0.125"
)


def judged(
    measured: Comparison, *, rate: float = 0.5, error: float = 0.75, tokens: TokenSimilarity | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return judge(measured, max_flip_rate=rate, max_logit_error=error, token_similarity=tokens)


def flip(image: int, margin: float) -> Flip:
    return Flip(key=f"{image}", label=0, reference=0, candidate=1, reference_margin=margin, batch_size=7)


def test_what_holds_is_said_with_every_number() -> None:
    assert judged(HONEST) == ((), (NO_FLIP, LOGITS, MOVED, UNSTABLE, FINITE))
    assert judged(HONEST, tokens=TOKENS) == ((), (NO_FLIP, LOGITS, MOVED, UNSTABLE, FINITE, SIMILAR))


def test_images_that_ran_alone_say_nothing_of_neighbours() -> None:
    alone = replace(HONEST, batch_sizes=(1,), max_logit_error_by_batch_size={1: 0.25})
    assert judged(alone) == ((), (NO_FLIP, LOGITS.replace("0.5, at batch size 7", "0.25, at batch size 1"), FINITE))


def test_everything_that_fails_is_said_and_nothing_else() -> None:
    worst = replace(
        HONEST,
        flips=(flip(0, 0.125), flip(1, 2.345678), flip(2, 1.0)),
        max_logit_error_by_batch_size={1: 9.0, 7: 8.0, 32: 1.0},
        max_neighbour_error=1.0,
        max_position_error=2.0,
        probe_flips=11,
        not_finite=2,
    )
    failures, findings = judged(worst, rate=0.01, tokens=TOKENS.model_copy(update={"allowed": 0.12}))
    # P(X ≤ 3 | 400, 0.019269) and P(X ≤ 11 | 200, 0.089396) are 0.05.
    assert failures == (
        "3 of 400 images flipped, the clearest with a reference margin of 2.35: "
        "flip rate at most 0.019269 (95 %), allowed 0.01",
        "largest logit error 9, at batch size 1, allowed 0.75",
        "a row's logits move by up to 2 with other neighbours in its batch or another place, allowed 0.75",
        "11 of 200 images change class with the batch size or their neighbours: "
        "rate at most 0.0894 (95 %), allowed seen 0.01",
        "2 of 400 images have logits that are not finite, allowed 0",
        SIMILAR.replace("0.125", "0.12"),
    )
    assert findings == ()
    one = replace(worst, flips=(flip(0, 1.0),), probe_flips=1, not_finite=1)
    said = judged(one, rate=0.001)[0]
    assert said[0].startswith("1 of 400 images flipped")
    assert said[3].startswith("1 of 200 images changes class with")
    assert said[4] == "1 of 400 images has logits that are not finite, allowed 0"


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"rate": clopper_pearson_upper(0, 400)}, "images flipped"),
        ({"flips": (flip(0, 1.0), flip(1, 1.0))}, {"rate": clopper_pearson_upper(2, 400)}, "images flipped"),
        ({}, {"error": 0.5}, "largest logit error"),
        ({"max_neighbour_error": 0.75, "max_logit_error_by_batch_size": {1: 0.0}}, {"error": 0.75}, "a row's logits"),
        ({"max_position_error": 0.75, "max_logit_error_by_batch_size": {1: 0.0}}, {"error": 0.75}, "a row's logits"),
        ({"probe_flips": 100}, {"rate": 0.5}, "100 of 200 images change class"),
        ({}, {"tokens": TOKENS}, "the patch tokens after blocks.1"),
    ],
)
def test_at_the_limit_passes_and_one_float_beyond_fails(
    changes: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    measured = replace(HONEST, **changes)
    assert judged(measured, **options)[0] == ()
    beyond: dict[str, Any]
    if "tokens" in options:
        beyond = {"tokens": TOKENS.model_copy(update={"allowed": math.nextafter(0.125, 0)})}
    else:
        beyond = {name: math.nextafter(limit, 0) for name, limit in options.items()}
    (failure,) = judged(measured, **beyond)[0]
    assert text in failure


def test_tokens_that_move_apart_fail_as_those_that_collapse() -> None:
    apart = TOKENS.model_copy(update={"candidate": (0.5, 0.0)})
    (failure,) = judged(HONEST, tokens=apart)[0]
    assert failure.startswith("the patch tokens after blocks.1 have CosSim 0.0000 where the reference's have 0.2500")


def test_one_image_that_is_not_finite_fails_whatever_the_rate() -> None:
    (failure,) = judged(replace(HONEST, not_finite=1), rate=0.999)[0]
    assert failure == "1 of 400 images has logits that are not finite, allowed 0"


@pytest.mark.parametrize(("count", "suggested"), [(1, "0.95"), (2, "0.777"), (298, "0.011")])
def test_too_few_images_name_a_rate_that_they_can_prove(count: int, suggested: str) -> None:
    with pytest.raises(InputError) as caught:
        check_image_count(count, 0.01)
    images = "1 image" if count == 1 else f"{count} images"
    assert str(caught.value) == (
        f"{images} cannot prove a flip rate of at most 0.01: it takes 299 without a flip; "
        f"give more with --data, or ask for --max-flip-rate {suggested}"
    )
    check_image_count(count, float(suggested))


def test_just_enough_images_are_taken() -> None:
    check_image_count(299, 0.01)
    bound = 1 - 0.05 ** (1 / 20)
    check_image_count(20, bound + 1e-12)
    with pytest.raises(InputError, match="20 images cannot prove"):
        check_image_count(20, bound - 1e-12)


def test_no_images_and_no_rate_say_so() -> None:
    with pytest.raises(InputError) as caught:
        check_image_count(0, 0.01)
    assert str(caught.value) == "no images: parity needs real images to compare on"
    with pytest.raises(InputError) as caught:
        check_image_count(0, 1.0)
    assert str(caught.value) == "max flip rate 1: expected a rate above 0 and below 1, such as 0.01"
    for rate in (float(np.nextafter(0, 1)), float(np.nextafter(1, 0))):
        check_rate(rate)
    for rate in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(InputError, match="expected a rate above 0 and below 1"):
            check_rate(rate)


def test_labels_must_be_the_images_classes_in_their_order() -> None:
    images = numbered_images([0], ("cat", "cow", "dog"), name="pets")
    check_labels(images, ["cat", "cow", "dog"])
    with pytest.raises(InputError) as caught:
        check_labels(images, ["cat", "dog", "cow"])
    assert str(caught.value) == "class 1 is 'cow' in 'pets' and 'dog' in the model: give the data it was trained on"
    for labels in (["cat", "cow"], ["cat", "cow", "dog", "eel"]):
        with pytest.raises(InputError) as caught:
            check_labels(images, labels)
        assert str(caught.value) == f"'pets' has 3 classes, the model has {len(labels)}"


def test_a_failure_by_flips_alone_says_what_to_do() -> None:
    """With the rate that it names the same images pass."""
    bound = clopper_pearson_upper(1, 360)

    def remedy(**changed: Any) -> tuple[str, ...]:
        failed = {"reasons": ("1 of 360 images flipped …",), "flip_rate_bound": bound, "max_flip_rate": 0.01, **changed}
        return flips_remedy(SimpleNamespace(**failed))  # type: ignore[arg-type]  # what it reads of a certificate

    (text,) = remedy()
    assert text == "the logits are within their limit: give more images with --data, or ask for --max-flip-rate 0.014"
    assert clopper_pearson_upper(0, 360) <= 0.01 < bound <= 0.014
    others = ({"reasons": ("flips", "logits")}, {"flip_rate_bound": 0.008}, {"flip_rate_bound": 1.0})
    assert [remedy(**changed) for changed in others] == [(), (), ()]
