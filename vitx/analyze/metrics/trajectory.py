"""The path of a training through the space of weights, in polar coordinates (docs/maths.md §5.4)."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors.torch import load_file
from torch import Tensor

from vitx.analyze.metric import Metric, MetricContext, NotApplicable
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.core.files import Record, read_record
from vitx.core.panels import LINES, WIDTH, Results
from vitx.core.run import CheckpointState, RunFolder, verify_digests
from vitx.models import build_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

State = Mapping[str, Tensor]
Checkpoints = list[tuple[CheckpointState, Path]]
Result = TypeVar("Result")


class Trajectory(Record):
    """Of each checkpoint t = 0 … T: `radius` ‖w_t−w_0‖/‖w_T−w_0‖, no unit, and `angle` between w_t−w_0 and w_T−w_0.

    The angle is in radians, None where w_t = w_0. `steps` counts the optimizer's steps.
    """

    steps: list[int]
    radius: list[float]
    angle: list[float | None]


def polar_trajectory(
    states: Sequence[State], *, names: Collection[str] | None = None, steps: Sequence[int] | None = None
) -> Trajectory:
    """Polar coordinates of state dictionaries w_0 … w_T, in the order of training; three are in memory at a time.

    (Park & Kim, arXiv 2202.06709, §2; docs/maths.md §5.4.) names: the entries that are weights; by default every
    floating-point entry, running statistics included. steps: 0, 1, … by default. Raises InputError for fewer than two
    states, for states of different networks or that are not finite, and when the first and the last are equal.
    """
    if len(states) < 2:
        raise InputError(f"{len(states)} checkpoint of a training: a trajectory needs the first and the last at least")
    first, last = states[0], states[-1]
    chosen = _weights(first, names)
    total = _distance(first, last, chosen)
    if total == 0.0:
        raise InputError(
            "the first and the last checkpoint hold the same weights: there is no direction to compare with"
        )
    counted = list(range(len(states)) if steps is None else steps)
    radius: list[float] = []
    angle: list[float | None] = []
    for step, state in zip(counted, states, strict=True):
        if added := set(_weights(state, names)).difference(chosen):
            raise _different_networks(min(added))
        require_finite_weights(state, chosen, step)
        length = _distance(first, state, chosen)
        radius.append(length / total)
        angle.append(_angle(first, state, last, chosen, length, total) if length else None)
    return Trajectory(steps=counted, radius=radius, angle=angle)


def require_finite_weights(state: State, names: Iterable[str], step: int) -> None:
    """Raise InputError where one of these weights of the checkpoint of that step is NaN or infinite."""
    for name in names:
        if name in state and not state[name].isfinite().all():
            raise InputError(f"the checkpoint of step {step} has no place: '{name}' holds NaN or infinity")


def run_trajectory(run: RunFolder) -> Trajectory:
    """The trajectory of the checkpoints that a run folder holds; w_0 is the earliest of them.

    A run keeps its best and its last checkpoint, and with `keep_every` more. The sha256 of every file is verified.
    Raises what `polar_trajectory` does, and InputError for a checkpoint that is corrupt or of another network.
    """
    return of_checkpoints(run, lambda found: _trajectory_of(run, found))


def _trajectory_of(run: RunFolder, found: Checkpoints) -> Trajectory:
    if len(found) < 2:
        raise InputError(
            f"run '{run.path}' holds {len(found)} checkpoint: a trajectory needs the weights it began with, or another"
        )
    states = _LazyStates([folder / "model.safetensors" for _, folder in found])
    names = {name for name, _ in build_model(run.info.model).named_parameters()}
    return polar_trajectory(states, names=names, steps=[state.step for state, _ in found])


def checkpoints_by_step(run: RunFolder) -> Checkpoints:
    """Every checkpoint that the run holds, and its folder, in the order of training."""
    found = (
        (read_record(path, CheckpointState), path.parent) for path in run.path.glob("checkpoints/epoch-*/state.json")
    )
    return sorted(found, key=lambda pair: pair[0].step)


def of_checkpoints(run: RunFolder, measure: Callable[[Checkpoints], Result]) -> Result:
    """What `measure` makes of `checkpoints_by_step`; raise InputError for a file whose sha256 is another.

    Where a running training has removed one of them meanwhile, they are listed and measured again.
    """
    while True:
        listed = [*run.path.glob("checkpoints/epoch-*")]
        try:
            found = checkpoints_by_step(run)
            for state, folder in found:
                verify_digests(folder, state.sha256)
            return measure(found)
        except (InputError, FileNotFoundError):
            if all(folder.is_dir() for folder in listed):
                raise


class _LazyStates(Sequence[State]):
    """State dictionaries that are read from their files at each access."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> State:  # type: ignore[override]  # never sliced
        return load_file(self._paths[index])


def _weights(state: State, names: Collection[str] | None) -> list[str]:
    return [name for name in state if state[name].is_floating_point() and (names is None or name in names)]


def _different_networks(name: str) -> InputError:
    return InputError(f"the checkpoints are of different networks: '{name}' is not in all of them in the same shape")


def _distance(first: State, state: State, names: list[str]) -> float:
    """‖w_t − w_0‖ over the entries `names`."""
    return math.sqrt(sum(float(_step(first, state, name).square().sum()) for name in names))


def _angle(first: State, state: State, last: State, names: list[str], length: float, total: float) -> float:
    """2·atan2(‖û−v̂‖, ‖û+v̂‖) of unit vectors û and v̂: accurate for small angles too, where arccos is not."""
    apart = together = 0.0
    for name in names:
        here, there = _step(first, state, name) / length, _step(first, last, name) / total
        apart += float((here - there).square().sum())
        together += float((here + there).square().sum())
    return 2 * math.atan2(math.sqrt(apart), math.sqrt(together))


def _step(first: State, state: State, name: str) -> Tensor:
    """w_t − w_0 of one entry, float64."""
    if name not in state or state[name].shape != first[name].shape:
        raise _different_networks(name)
    return state[name].double() - first[name].double()


def measure_trajectory(context: MetricContext) -> Trajectory:
    if context.source.recipe is None:
        raise NotApplicable("a network without a training run has no trajectory")
    run = RunFolder.open(context.source.name)

    def measure(found: Checkpoints) -> Trajectory:
        try:
            return _trajectory_of(run, found)
        except InputError as error:
            raise NotApplicable(str(error)) from None

    return of_checkpoints(run, measure)  # damage is no property of the network


def draw_trajectory(results: Results) -> "Figure":
    from matplotlib.figure import Figure

    records: Mapping[str, Trajectory] = results
    figure = Figure(figsize=(WIDTH, WIDTH), layout="constrained")
    axes: Axes = figure.add_subplot(projection="polar")
    for (network, record), style in zip(records.items(), LINES, strict=False):
        angles = [0.0 if angle is None else angle for angle in record.angle]
        axes.plot(angles, record.radius, label=network, markersize=4, **style)
    axes.set(xlabel="angle to the direction of the last weights", ylabel="distance from the first weights")
    axes.legend(fontsize="small")
    return figure


def _trajectory_line(found: Trajectory) -> str:
    return f"{counted(len(found.steps), 'checkpoint')}, radius {found.radius[0]:.3g} → {found.radius[-1]:.3g}"


TRAJECTORY_METRIC = Metric(
    title="Trajectory of training",
    reading="Distance from the first weights, over that of the last weights, and the angle between the two directions.",
    precision="none: weights are known exactly",
    record=Trajectory,
    line=_trajectory_line,
    measure=measure_trajectory,
    checkpoints=True,
    default=False,
    figure=draw_trajectory,
)
