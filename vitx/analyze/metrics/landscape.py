"""The loss around the weights, along two random filter-normalised directions (docs/maths.md §5.4)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.curvature import LabelledBatch, augmented_batches, mean_nll
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import COLOURS
from vitx.analyze.metrics.trajectory import Checkpoints, of_checkpoints, require_finite_weights
from vitx.core.console import log, progress
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import Results
from vitx.core.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Grid = npt.NDArray[np.float64]


class LossLandscape(Record):
    """The loss on a grid: row i at axis[i] along the first direction, column j at axis[j] along the second.

    axis: at 1 every filter has moved by its own length. nll: mean over the images (nats), None where it is not finite.
    l2: ½·weight_decay·‖w‖². path: where the run's checkpoints lie, in the order of training, seen along the normal of
    the plane; path_share: how much of their squared distance from the weights lies in it, None without a path.
    """

    axis: list[float]
    nll: list[list[float | None]]
    l2: list[list[float]]
    weight_decay: float
    images: int
    seed: int
    path: list[tuple[float, float]] = Field(default_factory=list)
    path_share: float | None = None


def filter_normalized_direction(weight: Tensor, direction: Tensor) -> Tensor:
    """d_i ← d_i·‖w_i‖/‖d_i‖ for each output filter i, of tensors of the same shape (Li et al., arXiv 1712.09913, §4).

    Zeros for tensors of one axis or none (biases, norms), which are not moved, and for a filter whose direction is 0.
    """
    if weight.shape != direction.shape:
        raise InputError(f"a direction {tuple(direction.shape)} for a weight {tuple(weight.shape)}: shapes must agree")
    if weight.ndim < 2:
        return torch.zeros_like(direction)
    filters = direction.flatten(1)
    lengths, drawn = (torch.linalg.vector_norm(rows, dim=1, keepdim=True) for rows in (weight.flatten(1), filters))
    scaled: Tensor = (filters * torch.where(drawn > 0, lengths / drawn, 0)).view_as(direction)
    return scaled


def moved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that a direction moves, by name: those of layers, not biases, norms, positions or tokens.

    One that several layers share is there once, under its first name.
    """
    fixed = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.LayerNorm)]
    kept = {parameter for module in fixed for parameter in module.parameters(recurse=False)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and name.endswith("weight") and parameter not in kept
    }


def loss_landscape(
    model: nn.Module,
    batches: Sequence[LabelledBatch],
    *,
    radius: float = 1.0,
    points: int = 11,
    weight_decay: float = 0.0,
    seed: int = 0,
    quiet: bool = True,
) -> LossLandscape:
    """NLL and ½·λ·‖w‖² at w + a·d₁ + b·d₂ on a grid of `points`², a and b from −`radius` to `radius`.

    (Li et al., arXiv 1712.09913, §4; docs/maths.md §5.4.) Evaluation mode. batches: images (B, 3, S, S) normalised and
    labels (B,), read once for each point. The directions follow from `seed` and are drawn again for each point, so that
    memory holds one copy of the weights beside the model. The weights are the same bits afterwards. Raises InputError
    for no batch, a count of points that is even (the middle is the network itself) or below 3, a radius that is not
    above 0, and a network without weights to move.
    """
    if points < 3 or points % 2 == 0 or not 0 < radius < math.inf:
        raise InputError(f"{points} points within {radius:g}: expected an odd number from 3, and a radius above 0")
    if not len(batches):
        raise InputError("the loss landscape needs at least one batch of labelled images")
    moved = list(moved_parameters(model).values())
    if not moved:
        raise InputError(f"{type(model).__name__} has no weights of two or more axes: there is nothing to move")
    half = points // 2
    axis = [radius * (index - half) / half for index in range(points)]
    nll = np.empty((points, points))
    l2 = np.empty((points, points))
    with (
        torch.no_grad(),
        in_evaluation_mode(model),
        _restored(moved) as weights,
        progress("landscape", points**2, quiet=quiet) as bar,
    ):
        for done, point in enumerate(np.ndindex(points, points)):
            bar.update(done)
            _move(moved, weights, [axis[index] for index in point], seed)
            nll[point] = _mean_nll_over(model, batches)
            l2[point] = 0.5 * weight_decay * sum(float(part.double().square().sum()) for part in model.parameters())
    return LossLandscape(
        axis=axis,
        nll=[[value if math.isfinite(value) else None for value in row] for row in nll.tolist()],
        l2=l2.tolist(),
        weight_decay=weight_decay,
        images=sum(len(images) for images, _ in batches),
        seed=seed,
    )


def random_direction(weight: Tensor, seed: int, *indices: int) -> Tensor:
    """A filter-normalised Gaussian direction for `weight`, of its own for each seed and indices.

    Drawn on the CPU in float32, so that it is the same on every device.
    """
    state = int(np.random.SeedSequence([seed, *indices]).generate_state(1, np.uint64)[0])
    normal = torch.randn(weight.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(state))
    return filter_normalized_direction(weight, normal.to(weight))


def _move(moved: list[nn.Parameter], weights: list[Tensor], distances: list[float], seed: int) -> None:
    """Set the parameters to weights + Σ_d distances[d]·direction_d."""
    for index, (parameter, weight) in enumerate(zip(moved, weights, strict=True)):
        parameter.copy_(weight)
        for number, distance in enumerate(distances):
            if distance:
                parameter.add_(random_direction(weight, seed, number, index), alpha=distance)


def _mean_nll_over(model: nn.Module, batches: Sequence[LabelledBatch]) -> float:
    """The mean NLL over all images, which may be infinite or NaN far from the weights."""
    total, count = 0.0, 0
    for images, labels in batches:
        total += float(mean_nll(model, images, labels)) * len(images)
        count += len(images)
    return total / count


@contextmanager
def _restored(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Copies of the parameters, which are written back at the end of the block, also after an error."""
    copies = [parameter.detach().clone() for parameter in parameters]
    try:
        yield copies
    finally:
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)


def training_path(
    model: nn.Module, states: Iterable[Mapping[str, Tensor]], seed: int
) -> tuple[list[tuple[float, float]], float | None]:
    """The coordinates of weights in the plane of `loss_landscape`, and the share of their squared distance in it.

    The share is None where all are the model's own weights.
    """
    parameters = {name: weight.detach().cpu() for name, weight in moved_parameters(model).items()}
    path, inside, total = [], 0.0, 0.0
    for state in states:
        products, gram = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
        for index, (name, weight) in enumerate(parameters.items()):
            moved = (state[name].cpu() - weight).double().flatten()
            plane = torch.stack(
                [random_direction(weight, seed, number, index).flatten() for number in range(2)]
            ).double()
            products, gram = products + plane @ moved, gram + plane @ plane.T
            total += float(moved.square().sum())
        coordinates = torch.linalg.pinv(gram) @ products  # weights of 0 have directions of 0
        inside += float(coordinates @ products)
        path.append((float(coordinates[0]), float(coordinates[1])))
    return path, inside / total if total else None


def measure_landscape(context: MetricContext) -> LossLandscape:
    options = context.options
    found = loss_landscape(
        context.source.model,
        list(augmented_batches(context._replace(quiet=True))),
        points=options.landscape_points | 1,  # odd: the middle is the network itself
        weight_decay=options.weight_decay,
        seed=options.seed,
        quiet=context.quiet,
    )
    if context.source.recipe is None:
        return found

    def states(checkpoints: Checkpoints) -> Iterator[Mapping[str, Tensor]]:
        for state, folder in checkpoints:
            weights = load_file(folder / "model.safetensors")
            require_finite_weights(weights, moved_parameters(context.source.model), state.step)
            yield weights

    def path_of(checkpoints: Checkpoints) -> tuple[list[tuple[float, float]], float | None]:
        try:
            return training_path(context.source.model, states(checkpoints), found.seed)
        except InputError as error:  # of a training that diverged: the landscape is that of the network nevertheless
            log(f"warning: the path of the training is left out of the landscape: {error}")
            return [], None

    path, share = of_checkpoints(RunFolder.open(context.source.name), path_of)
    return found if share is None else found.model_copy(update={"path": path, "path_share": share})


def draw_landscape(results: Results) -> "Figure":
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    records: Mapping[str, LossLandscape] = results
    figure = Figure(figsize=(11.6, 5.6 * len(records)), layout="constrained")
    for row, (network, record) in enumerate(records.items()):
        nll = np.array([[np.nan if value is None else value for value in row] for row in record.nll])
        finite = nll[np.isfinite(nll)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        levels = _levels(low, high)
        colours: dict[str, Any] = {"cmap": COLOURS, "norm": BoundaryNorm(levels.tolist(), 256)}
        axes = figure.add_subplot(len(records), 2, 2 * row + 1)
        _draw_contour(figure, axes, record, nll, levels, colours)
        span = f"{low:.3g} to {high:.3g} nats" if finite.size else "not finite"
        axes.set_title(f"{network}\n{span}, + the weights", fontsize="medium")
        _draw_surface(figure.add_subplot(len(records), 2, 2 * row + 2, projection="3d"), record, nll, colours)
    return figure


def _draw_contour(
    figure: "Figure", axes: "Axes", record: LossLandscape, nll: Grid, levels: Grid, colours: dict[str, Any]
) -> None:
    drawn = axes.contourf(record.axis, record.axis, nll, levels=levels, **colours)
    lines = axes.contour(record.axis, record.axis, nll, levels=levels, colors="white", linewidths=0.5)
    axes.clabel(lines, fontsize="x-small", fmt="%.3g")
    axes.plot(0, 0, "+", color="white", markersize=12, markeredgewidth=2)
    axes.plot([b for _, b in record.path], [a for a, _ in record.path], "o-", color="white", markersize=4)
    axes.set(xlabel="second direction (filter norms)", ylabel="first direction (filter norms)", aspect="equal")
    figure.colorbar(drawn, ax=axes, label="NLL (nats)", format="%.3g")


def _draw_surface(axes: Any, record: LossLandscape, nll: Grid, colours: dict[str, Any]) -> None:
    """The same as a surface, its height logarithmic where the colours are; without faces where it is not finite."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    second, first = np.meshgrid(record.axis, record.axis)
    logarithmic = _is_wide(float(np.nanmin(nll, initial=np.inf)), float(np.nanmax(nll, initial=0.0)))
    shades = colormaps[COLOURS](colours["norm"](np.nan_to_num(nll)) / 255)
    shades[~np.isfinite(nll), 3] = 0
    grid = {"rcount": len(nll), "ccount": len(nll), "edgecolor": "0.3", "linewidth": 0.3, "shade": False}
    axes.plot_surface(second, first, np.log10(nll) if logarithmic else nll, facecolors=shades, **grid)
    axes.set(xlabel="second direction", ylabel="first direction", zlabel="log₁₀ NLL" if logarithmic else "NLL (nats)")
    axes.set_box_aspect(None, zoom=0.85)  # room for the labels
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_major_locator(MaxNLocator(4))


def _levels(low: float, high: float) -> Grid:
    """Even steps of the logarithm where the loss spans more than a factor of ten, of the loss itself elsewhere."""
    high = max(high, low + 1e-6 * max(1.0, low))
    return np.geomspace(low, high, 15) if _is_wide(low, high) else np.linspace(low, high, 15)


def _is_wide(low: float, high: float) -> bool:
    return 0 < low < high / 10


def _landscape_line(found: LossLandscape) -> str:
    middle = len(found.axis) // 2
    ends = (found.nll[0], found.nll[-1], *((row[0], row[-1]) for row in found.nll))
    edge = [value for side in ends for value in side if value is not None]
    reach = f"{min(edge):.3g} to {max(edge):.3g}" if edge else "not finite"
    own = found.nll[middle][middle]
    share = (
        "" if found.path_share is None else f"; {100 * found.path_share:.2g} % of the training path lies in the plane"
    )
    return f"NLL {'not finite' if own is None else f'{own:.3f}'} at the weights, {reach} at the edge{share}"


LANDSCAPE_METRIC = Metric(
    title="Loss landscape",
    reading="NLL around the weights along two random directions whose filters have the norms of the network's, from "
    "above and as a surface. Dots: the run's checkpoints, projected on the plane.",
    precision="none: the loss of these images along these two directions is exact; others would differ",
    record=LossLandscape,
    line=_landscape_line,
    measure=measure_landscape,
    labels=True,
    options=("seed", "loss_batches", "weight_decay", "landscape_points"),
    checkpoints=True,
    default=False,
    figure=draw_landscape,
)
