"""A model of `vitx predict`: stages with several servers and bounded room, in order, and the fleet that a rate needs.

Every stage admits items in order while it has room, serves them by the first free server, and passes them on in order;
one that is served stays until the next stage has room for it. So the time of each event is the latest of those that it
waits for (a recursion of max and plus), and the run is computed without a queue of events:

    admit[i][n]  = max(finish[i-1][n], admit[i][n-1], leave[i][n - places_i])
    finish[i][n] = max(admit[i][n], first free server of i) + service[i][n]
    leave[i][n]  = admit[i+1][n], or of the last stage max(finish[i][n], leave[i][n-1])
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitx.predict.pipeline.worker import BATCHES_AHEAD, BATCHES_TO_WRITE, STAGES, slice_size

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stage:
    """service: seconds of each of N items. places: items that have been admitted and have not left, at most."""

    name: str
    service: Times
    servers: int = 1
    places: int = 1


@dataclass(frozen=True)
class Run:
    """What became of a line of stages: seconds in all, and the part of that time in which each stage's servers work."""

    seconds: float
    busy: dict[str, float]

    @property
    def binding(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


class Line:
    """Stages that take one item after another; what each waits for is known when it comes."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self._entered = 0.0
        # When the last items left each stage, as many as it has places: the first of them made the room that is next.
        self._left = [deque([0.0] * stage.places, stage.places) for stage in stages]
        self._free = [[0.0] * stage.servers for stage in stages]

    def room(self) -> float:
        """When the next item is admitted."""
        return max(self._entered, self._left[0][0])

    def serve(self, seconds: Sequence[float]) -> float:
        """Admit an item that each stage serves for so long; return when it leaves the last."""
        self._entered = admitted = self.room()
        finished = 0.0
        for place, free in enumerate(self._free):
            if place:
                admitted = max(finished, self._left[place - 1][-1], self._left[place][0])
                self._left[place - 1].append(admitted)
            finished = max(admitted, free[0]) + seconds[place]
            heapq.heapreplace(free, finished)
        self._left[-1].append(max(finished, self._left[-1][-1]))
        return self._left[-1][-1]


def simulate(stages: Sequence[Stage]) -> Run:
    """Run all items through the stages; the first finds them all waiting."""
    line, seconds = Line(stages), 0.0
    for item in np.stack([stage.service for stage in stages], axis=1).tolist():
        seconds = line.serve(item)
    work = {stage.name: float(stage.service.sum()) / (seconds * stage.servers) for stage in stages}
    return Run(seconds, work)


@dataclass(frozen=True)
class Costs:
    """Seconds of one process's stages: read, decode and write an image (decode: of each of N), a batch in the model."""

    read: float
    decode: Times
    batch: float
    write: float
    batch_size: int
    model_threads: int = 1

    @property
    def processor_seconds(self) -> float:
        """Of one image, over all stages; for a model that runs on the processor."""
        return self.read + float(self.decode.mean()) + self.write + self.batch * self.model_threads / self.batch_size


def worker(costs: Costs, decode_threads: int, read_threads: int = 2) -> list[Stage]:
    """The stages of one process over the images of `costs`. An item is what one thread decodes at a time."""
    size = slice_size(costs.batch_size, decode_threads)
    per_batch = -(-costs.batch_size // size)
    starts = np.arange(0, len(costs.decode), size)
    decode = np.add.reduceat(costs.decode, starts)
    images = np.diff([*starts, len(costs.decode)])
    ends = np.arange(1, len(starts) + 1) % per_batch == 0
    ends[-1] = True
    whole = np.where(ends, costs.batch, 0.0)  # the model waits for the last item of a batch
    write = np.where(ends, costs.write * costs.batch_size, 0.0)
    ahead = max(per_batch, read_threads) + 1
    stages = (
        (costs.read * images, read_threads, ahead),
        (decode, decode_threads, BATCHES_AHEAD * per_batch),
        (whole, 1, 1),
        (write, 1, (BATCHES_TO_WRITE + 1) * per_batch),
    )
    # What is committed is not waited for: its time is a part of writing here.
    return [Stage(name, *stage) for name, stage in zip(STAGES, stages, strict=False)]


def processes_on_cores(costs: Costs, processes: int, cores: int, decode_threads: int, shard_size: int) -> float:
    """Seconds that some processes on one processor take for the images of `costs`, shard by shard.

    A process takes the next shard when its line has room. Where all together would keep more cores busy than there are,
    everything takes longer by as much.
    """
    stages = worker(costs, decode_threads)
    load = processes * len(costs.decode) * costs.processor_seconds / simulate(stages).seconds
    items = np.stack([stage.service for stage in stages], axis=1) * max(1.0, load / cores)
    per_shard = shard_size // slice_size(costs.batch_size, decode_threads)
    lines = [Line(stages) for _ in range(processes)]
    end = 0.0
    for start in range(0, len(items), per_shard):
        line = min(lines, key=Line.room)
        for item in items[start : start + per_shard].tolist():
            end = max(end, line.serve(item))
    return end
