"""The model of the pipeline against formulas that need no simulation, and a run that moves second by second."""

import numpy as np
import pytest

from support.pipeline import Costs, Stage, processes_on_cores, simulate, worker


def test_constant_times_give_the_slowest_stage() -> None:
    count = 2000
    stages = [
        Stage("decode", np.full(count, 6.0), servers=3, places=5),
        Stage("infer", np.full(count, 2.5)),
        Stage("write", np.full(count, 1.0), places=2),
    ]
    run = simulate(stages)
    assert run.seconds == 6.0 + 2.5 * count + 1.0
    assert run.binding == "infer"
    assert run.busy["decode"] == pytest.approx(2.0 / 2.5, rel=2e-3)


@pytest.mark.parametrize("room", [0, 1, 4])
@pytest.mark.parametrize("ratio", [1.0, 0.6, 1.7])
def test_two_exponential_servers_have_the_rate_of_their_markov_chain(room: int, ratio: float) -> None:
    """A first server that never waits for work and is blocked when `room` items wait before the second one.

    The number of items at the second, blocked one included, is a birth and death process on 0 … room + 2: its rate is
    that of the second server times the probability that it is not empty (Buzacott and Shanthikumar, Stochastic Models
    of Manufacturing Systems, 1993, §5.3); for equal servers (room + 2) / (room + 3).
    """
    rng, count = np.random.default_rng(5), 60_000
    first, second = rng.exponential(1 / ratio, count), rng.exponential(1.0, count)
    run = simulate([Stage("first", first), Stage("second", second, places=room + 1)])
    weights = ratio ** np.arange(room + 3)
    expected = 1 - weights[0] / weights.sum()
    if ratio == 1:
        assert expected == pytest.approx((room + 2) / (room + 3))
    assert count / run.seconds == pytest.approx(expected, rel=0.015)


def stepped(stages: list[Stage]) -> int:
    """The same line in whole seconds, one at a time: what moves, moves. Returns when the last item has left."""
    count, last = len(stages[0].service), len(stages) - 1
    entered, left = [0] * len(stages), [0] * len(stages)
    waiting: list[list[int]] = [[] for _ in stages]
    running: list[dict[int, int]] = [{} for _ in stages]
    served: list[set[int]] = [set() for _ in stages]
    clock = 0
    while True:
        moved = True
        while moved:  # until nothing more happens in this second
            moved = False
            for place, stage in enumerate(stages):
                for item in [item for item, end in running[place].items() if end == clock]:
                    del running[place][item]
                    served[place].add(item)
                    moved = True
                head = left[place]
                if head in served[place] and (
                    place == last or entered[place + 1] - left[place + 1] < stages[place + 1].places
                ):
                    served[place].remove(head)
                    left[place] += 1
                    if place < last:
                        waiting[place + 1].append(head)
                        entered[place + 1] += 1
                    moved = True
                if place == 0 and entered[0] < count and entered[0] - left[0] < stage.places:
                    waiting[0].append(entered[0])
                    entered[0] += 1
                    moved = True
                if waiting[place] and len(running[place]) < stage.servers:
                    item = waiting[place].pop(0)
                    running[place][item] = clock + int(stage.service[item])
                    moved = True
        if left[last] == count:
            return clock
        clock += 1


@pytest.mark.parametrize("seed", range(12))
def test_any_line_is_as_fast_as_one_that_moves_second_by_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = []
    for name in ("read", "decode", "infer", "write")[: rng.integers(1, 5)]:
        servers = int(rng.integers(1, 4))
        service = rng.integers(0, 9, 40).astype(float)
        stages.append(Stage(name, service, servers, servers + int(rng.integers(0, 4))))
    assert simulate(stages).seconds == stepped(stages)


def test_varying_decode_times_starve_a_model_that_their_mean_would_feed() -> None:
    """Four threads decode as fast as the model takes, on the mean: it waits where times vary, and not for eight."""
    batch = 16

    def busy(sigma: float, threads: int) -> float:
        times = np.random.default_rng(5).lognormal(sigma=sigma, size=8000)
        costs = Costs(0.0, 4.0 * times / times.mean(), float(batch), 0.0, batch)
        return simulate(worker(costs, threads)).busy["infer"]

    assert busy(0.0, 4) > 0.99
    assert busy(0.8, 4) < 0.98
    assert busy(0.8, 8) > 0.99
    # Images come out in order: one that takes longer than the batches that are decoded ahead holds all others up.
    assert busy(1.5, 8) < 0.9
    assert busy(1.5, 64) < 0.9


def test_processes_share_the_cores_and_the_shards() -> None:
    costs = Costs(0.0, np.full(640, 0.01), 0.48, 0.0, 16)  # 30 ms in the model, 10 ms to decode
    assert processes_on_cores(costs, 1, 2, 1, 16) == pytest.approx(640 * 0.03, rel=0.02)
    assert processes_on_cores(costs, 4, 2, 1, 16) == pytest.approx(640 * 0.04 / 2, rel=0.05)
    assert processes_on_cores(costs, 4, 8, 1, 16) == pytest.approx(640 * 0.03 / 4, rel=0.05)
    # Six shards of 96 images and one of 64, for two: one of them has 352 images.
    assert processes_on_cores(costs, 2, 8, 1, 96) == pytest.approx(352 * 0.03, rel=0.02)
