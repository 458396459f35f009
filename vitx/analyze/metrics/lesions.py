"""Lesion study: the accuracy without each unit (docs/maths.md §5.1)."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitx.analyze.accuracy import AccuracyCounter, labelled_batches
from vitx.analyze.activations import in_evaluation_mode
from vitx.analyze.metric import Metric, MetricContext, NotApplicable
from vitx.analyze.metric_figures import HATCHES, NAMES, whole_numbers
from vitx.analyze.units import Kind, residual_units
from vitx.core.console import progress
from vitx.core.files import Record
from vitx.core.panels import WIDTH, Results, panels
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet
from vitx.models import image_tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Lesion(Record):
    """The accuracy without one unit, 0 to 1, and the kind of the unit."""

    kind: Kind
    accuracy: float


class Lesions(Record):
    """Accuracy, 0 to 1, of the whole network, and with each unit removed alone."""

    images: int
    accuracy: float
    units: dict[str, Lesion]


def lesion_study(
    model: nn.Module, images: ImageSet, preprocessing: Preprocessing, *, batch_size: int = 64, quiet: bool = False
) -> Lesions:
    """Top-1 accuracy of the whole network, and with one unit's branch replaced by zero so that its shortcut is left.

    (Veit et al., arXiv 1605.06431, §4.1; Park & Kim, arXiv 2202.06709; docs/maths.md §5.1.) Each batch is decoded once.
    Modes and hooks are restored. Raises NotApplicable for a network whose units are not known.
    """
    units = residual_units(model)
    if not units:
        raise NotApplicable("the network has no residual units that are known")
    device = next(model.parameters()).device
    counter = AccuracyCounter()
    batches = -(-len(images) // batch_size)
    pixels_of = images.batches(preprocessing, batch_size)
    with in_evaluation_mode(model), torch.inference_mode(), progress("lesions", batches, quiet=quiet) as bar:
        for done, (_, pixels, labels) in enumerate(labelled_batches(pixels_of, images.labels), 1):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            counter.add(None, model(inputs).cpu().numpy(), labels)
            for unit in units:
                with ExitStack() as restore:
                    restore.callback(unit.branch.register_forward_hook(_zeros).remove)
                    counter.add(unit.name, model(inputs).cpu().numpy(), labels)
            bar.update(done)
    return Lesions(
        images=len(images),
        accuracy=counter.accuracy(None),
        units={unit.name: Lesion(kind=unit.kind, accuracy=counter.accuracy(unit.name)) for unit in units},
    )


def _zeros(_branch: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def measure_lesions(context: MetricContext) -> Lesions:
    source, images, options, quiet = context
    return lesion_study(source.model, images, source.preprocessing, batch_size=options.batch_size, quiet=quiet)


def draw_lesions(results: Results) -> "Figure":
    records: Mapping[str, Lesions] = results
    figure, axes_of = panels(len(records), width=1.4 * WIDTH)
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        seen = set()
        for index, unit in enumerate(record.units.values()):
            axes.bar(
                index,
                100 * unit.accuracy,
                color="0.75" if unit.kind == "attention" else "white",
                edgecolor="black",
                hatch=HATCHES[unit.kind],
                label=None if unit.kind in seen else f"without one {NAMES[unit.kind]} unit",
            )
            seen.add(unit.kind)
        axes.axhline(100 * record.accuracy, color="black", linestyle="--", linewidth=1, label="whole network")
        axes.set(title=network, xlabel="unit removed, from the input on", ylabel="accuracy (%)", ylim=(0, 100))
        whole_numbers(axes.xaxis)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def _lesions_line(found: Lesions) -> str:
    name, worst = min(found.units.items(), key=lambda item: item[1].accuracy)
    return f"{100 * found.accuracy:.1f} %; without {name} {100 * worst.accuracy:.1f} %"


LESIONS_METRIC = Metric(
    title="Lesion study",
    reading="Accuracy with one unit removed, its shortcut left. Units whose removal changes nothing add nothing.",
    record=Lesions,
    line=_lesions_line,
    measure=measure_lesions,
    labels=True,
    figure=draw_lesions,
)
