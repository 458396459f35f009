"""The search for the size of a full batch by hand: how many batches of each size it asks for, one after another."""

from collections.abc import Callable, Sequence
from itertools import groupby

import pytest

from vitx.serve.batching.size_search import size_search

WINDOW = 3 + 8  # batches: the first three do not count


def asked(
    sizes: Sequence[int],
    best: int,
    seconds: Callable[[int], float],
    *,
    batches: int,
    instances: int = 1,
    others: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """(size, batches in a row), of batches that take `seconds(size)` each; those numbered `others` had other rows."""
    search = size_search(sizes, best, instances)
    found, now = [next(search)], 0.0
    for number in range(batches):
        size = found[-1]
        now += seconds(size)
        found.append(search.send((size + 1 if number in others else size, now)))
    return [(size, len([*run])) for size, run in groupby(found[:-1])]


def no_gain(size: int) -> float:
    """Two per cent more images a second by twice the size: too little for a larger one, too much for a smaller one."""
    return 0.1 * size / 8 * 0.98 ** (size.bit_length() - 4)


def test_three_votes_refuse_a_size_and_pauses_double() -> None:
    found = asked([4, 8, 16], 8, no_gain, batches=(4 + 6 + 8 + 6 + 16 + 6) * WINDOW)
    first, second, third = 4 * WINDOW, 8 * WINDOW, 16 * WINDOW
    three = [(8, WINDOW), (16, WINDOW)] * 2
    assert found == [
        *((8, first + WINDOW), (16, WINDOW), *three),
        *((8, second + WINDOW), (4, WINDOW), (8, WINDOW), (4, WINDOW), (8, WINDOW), (4, WINDOW)),
        *((8, third + WINDOW), (16, WINDOW), *three),
    ]


def test_three_votes_take_a_size_and_go_on_from_it_in_the_same_direction() -> None:
    def larger_is_faster(size: int) -> float:
        return 0.05 * (1 + size / 100)

    found = asked([2, 4, 8], 2, larger_is_faster, batches=(4 + 6 + 4 + 6 + 4) * WINDOW)
    two, four = [(2, WINDOW), (4, WINDOW)] * 2, [(4, WINDOW), (8, WINDOW)] * 2
    # What won stays for the pause, and for the first window of the next trial.
    assert found == [
        *((2, 5 * WINDOW), (4, WINDOW), *two[:-1], (4, WINDOW + 5 * WINDOW)),
        *((8, WINDOW), *four[:-1], (8, WINDOW + 4 * WINDOW)),
    ]


def test_a_smaller_size_that_is_almost_as_fast_is_taken() -> None:
    found = asked([4, 8], 8, lambda size: 0.1 * size / 8 * (1.009 if size == 4 else 1), batches=(4 + 8 + 6) * WINDOW)
    # 8 is the largest: after the first pause there is no larger one to try.
    assert found == [(8, (4 + 8 + 1) * WINDOW), (4, WINDOW), (8, WINDOW), (4, WINDOW), (8, WINDOW), (4, WINDOW)]


@pytest.mark.parametrize(
    ("others", "more"),
    [
        ([0, 1, 2], 0),  # they ran beside batches of the size before
        ([3], 4),  # the window begins again
        ([2 * WINDOW - 1], WINDOW),
        ([3, 7], 8),
    ],
)
def test_a_window_with_another_size_does_not_count(others: list[int], more: int) -> None:
    found = asked([8, 16], 8, no_gain, batches=100, others=others)
    assert found[:2] == [(8, 5 * WINDOW + more), (16, WINDOW)]


def test_a_window_of_the_usual_size_is_repeated_and_one_of_the_other_size_lost() -> None:
    """Where 16 has twice the rate; a batch of other rows ends a window. Of the other size that is want of requests."""
    pair = [(8, WINDOW), (16, WINDOW)]

    def trial(first: list[tuple[int, int]], pairs: int, disturbed: int) -> None:
        windows = [*first, *pair * pairs]
        batches = sum(count for _, count in windows) + 4 * WINDOW  # and a pause of what won
        found = asked([8, 16], 8, lambda _: 0.1, batches=batches, others=[disturbed])
        assert found == [*windows[:-1], (16, 5 * WINDOW)]

    trial([(8, 5 * WINDOW + 6), (16, WINDOW)], 2, disturbed=4 * WINDOW + 5)  # three votes
    trial([(8, 5 * WINDOW), (16, 6)], 4, disturbed=5 * WINDOW + 5)  # five: one was against it


def test_windows_last_a_quarter_of_a_second_and_count_for_each_instance() -> None:
    fast = asked([8, 16], 8, lambda size: 2.0**-10 * size / 8, batches=2000)
    assert fast[:2] == [(8, 5 * (3 + 256)), (16, 3 + 128)]
    two = asked([8, 16], 8, no_gain, batches=300, instances=2)
    assert two[:2] == [(8, 5 * 2 * WINDOW), (16, 2 * WINDOW)]


def test_the_longest_pause_is_512_windows_and_a_size_that_is_not_listed_is_tried_from() -> None:
    found = asked([4, 16], 8, no_gain, batches=3000 * WINDOW)
    pauses = [count // WINDOW - 1 for size, count in found if size == 8 and count > WINDOW]
    assert pauses[:10] == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512]
    assert {size for size, _ in found} == {4, 8, 16}
