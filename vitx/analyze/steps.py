"""What each unit changes: the number after it less the number before it, image by image."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from torch import Tensor, nn

from vitx.analyze.activations import Activations, Layout
from vitx.analyze.intervals import Interval, LayerSamples
from vitx.analyze.metric_figures import NAMES
from vitx.analyze.units import Kind
from vitx.core.probabilities import Float64Array


class MapSamples:
    """What `measure` says of the maps (B, D, S, S) of every stream, and of the streams in `Activations.before`.

    sizes, sizes_before: S by unit; 0 where the patches form no square, and nothing is measured then.
    """

    def __init__(self, model: nn.Module, measure: Callable[[Tensor], Tensor]) -> None:
        self._layout, self._measure = Layout.of(model), measure
        self.after, self.before = LayerSamples(), LayerSamples()
        self.sizes, self.sizes_before = dict[str, int](), dict[str, int]()

    def add(self, batch: Activations) -> None:
        self._add(batch.streams, self.after, self.sizes)
        self._add(batch.before, self.before, self.sizes_before)

    def _add(self, streams: Mapping[str, Tensor], samples: LayerSamples, sizes: dict[str, int]) -> None:
        for name, stream in streams.items():
            features = self._layout.feature_map(name, stream)
            sizes[name] = 0 if features is None else features.shape[-1]
            if features is not None:
                samples.add(name, self._measure(features))

    def steps(self, values: Mapping[str, Float64Array], before: Mapping[str, Float64Array]) -> dict[str, Float64Array]:
        """Unit → its values (N,) less those of the stream that it adds to, where the two maps have the same side.

        before: of the streams that are not those after the unit before (`Activations.before`); their side is 0 where
        they have no map, and no value then.
        """
        steps = {}
        for previous, name in pairwise(values):
            own = name in self.sizes_before
            size = self.sizes_before[name] if own else self.sizes[previous]
            if size == self.sizes[name]:
                steps[name] = values[name] - (before[name] if own else values[previous])
        return steps


def steps_text(steps: Mapping[str, float], intervals: Mapping[str, Interval], kinds: Mapping[str, Kind | None]) -> str:
    """How many units of each kind lower the number, and how many raise it, by more than their intervals."""
    texts = []
    for kind in dict.fromkeys(kinds[name] for name in steps):
        ends = [intervals.get(name) for name in steps if kinds[name] == kind]
        lower, higher = (
            sum(end is not None and end[1] < 0 for end in ends),
            sum(end is not None and end[0] > 0 for end in ends),
        )
        texts.append(f"{lower} of {len(ends)} {NAMES[kind]} units lower it, {higher} raise it")
    unsure = "" if intervals else " (too few images to tell)"
    return "; ".join(texts) + unsure if texts else "no two units have maps of one size"
