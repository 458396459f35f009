"""Lesion study: the accuracy without each unit (docs/maths.md §5.1)."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitx.analyze.accuracy import AccuracyCounter, labelled_batches
from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.intervals import Measured, paired_change, share_text
from vitx.analyze.metric import Metric, MetricContext, NotApplicable
from vitx.analyze.metric_figures import ACCURACY, HATCHES, NAMES, Curve, draw_curve, draw_lines, whole_numbers
from vitx.analyze.units import Kind, Unit, residual_units
from vitx.core.console import progress
from vitx.core.files import Record
from vitx.core.panels import WIDTH, Results, panels
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet
from vitx.models import image_tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Removal(Record):
    """The accuracy without something, 0 to 1; how many right answers that lost, and how many it gained."""

    accuracy: float
    lost: int
    gained: int


class Lesion(Removal):
    """The accuracy without one unit, and the kind of the unit."""

    kind: Kind


class Lesions(Measured):
    """Accuracy, 0 to 1, of the whole network, with each unit removed alone, and with each block and all behind it."""

    images: int
    accuracy: float
    units: dict[str, Lesion]
    depth: dict[str, Removal]


def lesion_study(
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, *, batch_size: int = 64, quiet: bool = False
) -> Lesions:
    """Top-1 accuracy of the whole network, and with branches replaced by zero so that their shortcuts are left.

    (Veit et al., arXiv 1605.06431, §4.1; Park & Kim, arXiv 2202.06709; docs/maths.md §5.1.) One unit at a time, and a
    block with all behind it. Each batch is decoded once. Modes and hooks are restored. Raises NotApplicable for a
    network whose units are not known.
    """
    units = residual_units(model)
    if not units:
        raise NotApplicable("the network has no residual units that are known")
    removals: dict[tuple[str, str], list[Unit]] = {("unit", unit.name): [unit] for unit in units}
    removals |= {("depth", layer): units[first:] for layer, first in _first_units(units).items()}
    parameter = next(model.parameters())  # pixels are of its device and dtype
    counter = AccuracyCounter()
    batches = -(-len(images) // batch_size)
    pixels_of = images.batches(preprocessing, batch_size)
    with in_evaluation_mode(model), torch.inference_mode(), progress("lesions", batches, quiet=quiet) as bar:
        for done, (_, pixels, labels) in enumerate(labelled_batches(pixels_of, images.labels), 1):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(parameter)
            counter.add(None, model(inputs).float().cpu().numpy(), labels)
            for name, removed in removals.items():
                with ExitStack() as restore:
                    for unit in removed:
                        restore.callback(unit.branch.register_forward_hook(_zeros).remove)
                    counter.add(name, model(inputs).float().cpu().numpy(), labels)
            bar.update(done)
    return Lesions(
        images=len(images),
        accuracy=counter.accuracy(None),
        units={unit.name: Lesion(kind=unit.kind, **_removal(counter, ("unit", unit.name))) for unit in units},
        depth={layer: Removal(**_removal(counter, ("depth", layer))) for layer in _first_units(units)},
    )


def _first_units(units: list[Unit]) -> dict[str, int]:
    """Block → the index of its first unit."""
    first, found = 0, {}
    for index, unit in enumerate(units):
        if unit.layer is not None:
            found[unit.layer] = first
            first = index + 1
    return found


def _removal(counter: AccuracyCounter, condition: tuple[str, str]) -> dict[str, Any]:
    whole, without = counter.correct(None), counter.correct(condition)
    lost, gained = int((whole & ~without).sum()), int((without & ~whole).sum())
    return {"accuracy": counter.accuracy(condition), "lost": lost, "gained": gained}


def _zeros(_branch: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def measure_lesions(context: MetricContext) -> Lesions:
    source, images, options, quiet, _ = context
    return lesion_study(source.model, images, source.preprocessing, batch_size=options.batch_size, quiet=quiet)


def draw_lesions(results: Results) -> "Figure":
    records: Mapping[str, Lesions] = results
    figure, axes_of = panels(2 * len(records), width=1.2 * WIDTH, height=3.8, columns=2)
    for (network, record), left, right in zip(records.items(), axes_of[::2], axes_of[1::2], strict=True):
        _draw_units(left, record)
        curve = Curve.of_shares([*(each.accuracy for each in record.depth.values()), record.accuracy], record.images)
        draw_lines(right, {network: curve}, "blocks kept, from the input on", ACCURACY)
        for axes in (left, right):
            axes.set(title=network, ylim=(0, 102))
    return figure


def _draw_units(axes: "Axes", record: Lesions) -> None:
    curve = Curve.of_shares((unit.accuracy for unit in record.units.values()), record.images)
    seen = set()
    for index, unit in enumerate(record.units.values()):
        axes.bar(
            index,
            curve.values[index],
            color="0.75" if unit.kind == "attention" else "white",
            edgecolor="black",
            hatch=HATCHES[unit.kind],
            label=None if unit.kind in seen else f"without one {NAMES[unit.kind]} unit",
        )
        seen.add(unit.kind)
    draw_curve(axes, range(len(curve.values)), curve, None, {"color": "black", "linestyle": "none"})
    axes.axhline(100 * record.accuracy, color="black", linestyle="--", linewidth=1, label="whole network")
    axes.set(xlabel="unit removed, from the input on", ylabel=ACCURACY)
    whole_numbers(axes.xaxis)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def change_text(removal: Removal, images: int) -> str:
    """The change of accuracy that a removal makes, in points with its paired interval: -1.2 [-2.5, +0.1]."""
    low, high = paired_change(removal.lost, removal.gained, images)
    return f"{100 * (removal.gained - removal.lost) / images:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] points"


def _lesions_line(found: Lesions) -> str:
    most, least = (choose(found.units, key=lambda name: found.units[name].accuracy) for choose in (min, max))
    said = [f"without {name} {change_text(found.units[name], found.images)}" for name in dict.fromkeys((most, least))]
    return "; ".join([share_text(found.accuracy, found.images), *said])


LESIONS_METRIC = Metric(
    title="Lesion study",
    reading="Left: accuracy with one unit removed, its shortcut left. Right: with only the first blocks kept.",
    claim="Veit et al. (1605.06431): most single units of a deep residual network can go at little cost.",
    precision="Wilson's for accuracies; changes are paired by image (Agresti & Min)",
    record=Lesions,
    line=_lesions_line,
    measure=measure_lesions,
    labels=True,
    figure=draw_lesions,
)
