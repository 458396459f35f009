"""How much each block adds to the residual stream, and whether it adds anything."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitx.analyze.activations import EMBEDDING, Activations, Layout
from vitx.analyze.intervals import LayerSamples, Measured, ends_text, rounded, with_interval
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metric_figures import Curve, draw_lines
from vitx.analyze.units import units_with_streams
from vitx.core.panels import WIDTH, Results, panels
from vitx.models.similarity import SHORTEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ours: a block that moves the stream by less than a hundredth of its length does nothing that later ones can read.
DEAD_BELOW = 0.01


class ResidualUpdate(Measured):
    """update: by block, ‖after − before‖/‖before‖ of the median token of an image, mean over the images; no unit.

    unchanged: by block, on how many images it is below `threshold`.
    """

    images: int
    threshold: float
    update: dict[str, float]
    unchanged: dict[str, int]


class ResidualUpdateMetric:
    """The length of what a block adds to a token (B, N, D) or a map, over its length before; the median token.

    Before is the block's own input, whatever stands between it and the block before. Blocks that change the stream's
    shape are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._blocks: list[tuple[str, str, str, str]] = []  # (the stream before, first unit, last unit, name)
        previous = before = first = EMBEDDING
        for unit in units_with_streams(model):
            if unit.block is not None:
                before, first = previous, unit.name
            if unit.layer is not None:
                self._blocks.append((before, first, unit.name, unit.layer))
            previous = unit.name
        self._updates = LayerSamples()

    def add(self, batch: Activations) -> None:
        for previous, first, last, layer in self._blocks:
            before, after = batch.stream_before(first, previous), batch.streams.get(last)
            if before is None or after is None:
                continue
            before, after = self._tokens(first, before), self._tokens(last, after)
            if before.shape == after.shape:
                self._updates.add(layer, _relative_update(before, after))

    def _tokens(self, name: str, stream: Tensor) -> Tensor:
        """The stream before or after the unit `name` as tokens (B, N, D); a map of channels is one."""
        if stream.ndim == 4 and name in self._layout.channels_last:
            return stream.flatten(1, 2)
        return stream if stream.ndim == 3 else stream.flatten(1).unsqueeze(1)

    def result(self) -> ResidualUpdate:
        values = self._updates.values()
        if not values:
            raise NotApplicable("the network has no blocks with a shortcut that are known")
        return ResidualUpdate(
            images=len(next(iter(values.values()))),
            threshold=DEAD_BELOW,
            update=self._updates.means(),
            unchanged={layer: int((found < DEAD_BELOW).sum()) for layer, found in values.items()},
            intervals={"update": self._updates.intervals()},
            per_image={"smallest update of a block": rounded(np.min([*values.values()], axis=0))},
        )


def _relative_update(before: Tensor, after: Tensor) -> Tensor:
    """The median over tokens (B, N, D) of ‖after − before‖/‖before‖: (B,).

    The median: a few tokens of trained transformers are a hundred times as long as the others. It is that of the tokens
    longer than SHORTEST before, unless none is.
    """
    lengths = torch.linalg.vector_norm(before, dim=-1)
    ratios: Tensor = torch.linalg.vector_norm(after - before, dim=-1) / lengths.clamp_min(SHORTEST)
    short = lengths <= SHORTEST
    return ratios.where(~short | short.all(dim=1, keepdim=True), torch.nan).nanquantile(0.5, dim=1)


def draw_residual_update(results: Results) -> "Figure":
    records: Mapping[str, ResidualUpdate] = results
    figure, (axes,) = panels(1, width=1.4 * WIDTH)
    curves = {network: Curve.of(found.update, found.intervals["update"]) for network, found in records.items()}
    draw_lines(axes, curves, "block", "length of the update / of the token")
    axes.set_ylim(bottom=0)
    return figure


def _update_line(found: ResidualUpdate) -> str:
    smallest = min(found.update, key=lambda layer: found.update[layer])
    least = with_interval(found.update[smallest], found.interval("update", smallest))
    return f"{ends_text(found.update, found.intervals['update'])}; least in {smallest}: {least}"


RESIDUAL_UPDATE_METRIC = Metric(
    title="Update of each block",
    reading="The length of what a block adds to a token, over the token's length before it; the median token.",
    precision="bootstrap over images",
    record=ResidualUpdate,
    line=_update_line,
    activation=lambda context: ResidualUpdateMetric(context.source.model),
    streams=True,
    figure=draw_residual_update,
)
