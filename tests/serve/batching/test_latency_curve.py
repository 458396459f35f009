"""What is known of a model's speed: between and beyond the sizes that were measured, and as it changes."""

import pytest

from vitx.serve.batching.latency_curve import LatencyCurve


def test_the_curve_interpolates_and_follows_what_is_measured() -> None:
    known = LatencyCurve({2: 0.2, 8: 0.5})
    assert [known.seconds(rows) for rows in (1, 2, 5, 8, 16)] == pytest.approx([0.2, 0.2, 0.35, 0.5, 1.0])
    for _ in range(300):
        known.observe(8, 1.0)
    assert known.seconds(8) == pytest.approx(1.0, rel=0.01)
    assert 0.2 < known.seconds(2) < 0.4  # another size moves along, half as far
    assert known.at_most(8) >= known.seconds(8)
    fresh = LatencyCurve()
    assert (fresh.seconds(4), fresh.best_size(32)) == (0.0, 32)
    fresh.observe(4, 0.1)
    assert fresh.seconds(8) == pytest.approx(0.2)


def test_the_best_size_is_the_smallest_measured_one_that_is_nearly_the_fastest() -> None:
    known = LatencyCurve({1: 1.0, 4: 3.1, 8: 6.1, 32: 24.2})
    assert known.best_size(32) == 4  # 32 is 2.4 % faster an image
    assert known.best_size(3) == 1
    assert known.best_size(32, preferred=(8, 32)) == 8
    assert known.best_size(256, preferred=(64, 8)) == 8  # 64 was not measured
    assert known.best_size(256, preferred=(64,)) == 4
    assert LatencyCurve({1: 0.0002, 2: 0.0004, 4: 0.0008}).best_size(4) == 4  # every batch costs a hand-over
    assert LatencyCurve({4: 1.0}).best_size(2) == 2
    # Sizes are compared at their fastest, and what is measured live of one of them alone changes nothing.
    noisy = LatencyCurve({1: 1.0, 8: 8.0, 32: 25.0}, fastest={1: 1.0, 8: 6.0, 32: 24.0})
    assert noisy.best_size(32) == 8
    for _ in range(100):
        noisy.observe(8, 30.0)
    assert (noisy.best_size(32), round(noisy.seconds(8))) == (8, 30)
    assert LatencyCurve().best_size(32, preferred=(8, 16, 64)) == 16


@pytest.mark.parametrize(
    ("rows", "seconds", "two", "eight"),
    [
        (8, 1.0, 0.205, 0.525),  # twice the expected: a twentieth up, and half as far at the other size
        (8, 50.0, 0.205, 0.525),  # counts as twice the expected
        (8, 0.25, 0.1975, 0.4875),
        (2, 0.4, 0.21, 0.5125),
        (1, 0.4, 0.21, 0.5125),  # below the smallest size it is the smallest that moves
        (16, 2.0, 0.205, 0.525),  # beyond the last: 1 s was expected, and the last moves
        (6, 0.8, 0.205, 0.5 * (1 + 0.05 * 2 / 3)),  # two thirds of the way to 8; 0.4 s was expected
        (3, 0.5, 0.2 * (1 + 0.05 * 5 / 6), 0.5125),
    ],
)
def test_a_batch_moves_the_curve_by_a_twentieth(rows: int, seconds: float, two: float, eight: float) -> None:
    known = LatencyCurve({2: 0.2, 8: 0.5})
    known.observe(rows, seconds)
    assert (known.seconds(2), known.seconds(8)) == pytest.approx((two, eight))


def test_what_a_batch_rarely_exceeds_is_the_mean_and_twice_its_deviation() -> None:
    known = LatencyCurve({2: 0.2, 8: 0.5})
    assert known.at_most(8) == 0.5
    known.observe(8, 0.75)  # half above: the deviation is .05 of that
    assert known.at_most(8) == pytest.approx(0.5 * 1.025 * (1 + 2 * 0.025))
    known.observe(8, 0.5125 * 0.5)  # half below counts alike
    assert known.at_most(8) == pytest.approx(0.5125 * 0.975 * (1 + 2 * (0.025 + 0.05 * (0.5 - 0.025))))
    assert LatencyCurve().at_most(8) == 0


def test_a_size_is_worth_it_from_three_percent_on() -> None:
    def best(gain: float, smaller: int = 2) -> int:
        seconds = {smaller: smaller - 0.001, 2 * smaller: 2 * smaller / gain - 0.001}
        return LatencyCurve(seconds).best_size(8)

    assert (best(1.0299), best(1.0301)) == (2, 4)
    assert (best(0.9708, 1), best(0.9710, 1)) == (1, 2)  # one image must be as much better
    assert LatencyCurve({1: 0.3}).best_size(8) == 1


@pytest.mark.parametrize(
    ("rows", "instances", "size"),
    [
        (64, 2, 16),
        (48, 2, 16),  # two run and one stands by
        (44, 2, 16),  # 4 of the 48 are on their way
        (43, 2, 8),
        (1000, 2, 32),  # the best size
        (4, 2, 1),
        (2, 2, 32),  # two images, two instances: nothing can stand by
        (16, 1, 8),
        (64, 7, 8),
    ],
)
def test_a_batch_stands_by_if_the_requests_are_enough(rows: int, instances: int, size: int) -> None:
    known = LatencyCurve({size: 0.001 * size for size in (1, 2, 4, 8, 16, 32)})
    assert known.size_to_stand_by(rows, instances, best=32) == size
    assert LatencyCurve().size_to_stand_by(rows, instances, best=32) == 32


def test_no_batch_stands_by_where_small_ones_cost_more_than_the_time_between_two() -> None:
    def chosen(of_two: float) -> int:
        return LatencyCurve({1: 0.001, 2: of_two}).size_to_stand_by(4, instances=2, best=2)

    # Of a batch of two an image has to save .15 ms, and 3 % of what it takes.
    assert (chosen(2 * (0.001 - 0.000149) / 1.03), chosen(2 * (0.001 - 0.000151) / 1.03)) == (1, 2)
    assert LatencyCurve({1: 0.0340, 2: 2 * 0.0335}).size_to_stand_by(4, instances=2, best=2) == 1
    slow = LatencyCurve({1: 1.0, 2: 1.0, 4: 1.0})  # as on a GPU
    assert [slow.size_to_stand_by(rows, 1, best=4) for rows in (1, 2, 4, 8, 16)] == [4, 4, 4, 4, 4]
    flat = LatencyCurve({1: 0.001, 16: 0.016, 32: 0.032})
    assert [flat.size_to_stand_by(rows, 2, best=32, preferred=(32,)) for rows in (96, 60)] == [32, 32]


def test_a_batch_between_two_sizes_moves_these_two_most() -> None:
    known = LatencyCurve({2: 0.2, 4: 0.3, 8: 0.5, 16: 0.9})
    known.observe(7, 0.9)  # .45 s were expected: twice that; a quarter of the way from 8 to 4
    moved = [known.seconds(rows) / before - 1 for rows, before in ((2, 0.2), (4, 0.3), (8, 0.5), (16, 0.9))]
    assert moved == pytest.approx([0.025, 0.025, 0.0375, 0.025])
    known = LatencyCurve({2: 0.2, 4: 0.3, 8: 0.5, 16: 0.9})
    known.observe(5, 0.7)  # .35 s were expected
    moved = [known.seconds(rows) / before - 1 for rows, before in ((2, 0.2), (4, 0.3), (8, 0.5), (16, 0.9))]
    assert moved == pytest.approx([0.025, 0.0375, 0.025, 0.025])


def test_a_preferred_size_may_be_the_largest() -> None:
    known = LatencyCurve({1: 0.1, 8: 8.0})
    assert known.best_size(8, preferred=(8,)) == 8
    assert known.best_size(8) == 1
