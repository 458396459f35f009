"""The kinds of findings about one network, gravest first. Every bound is here or beside its metric."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from vitx.analyze.findings.finding import Finding, Rule
from vitx.analyze.intervals import Interval, few_events, paired_change, sign_test
from vitx.analyze.metrics.attention_collapse import AttentionCollapse
from vitx.analyze.metrics.confidence import Confidence
from vitx.analyze.metrics.lesions import Lesions, Removal
from vitx.analyze.metrics.over_smoothing import OverSmoothing
from vitx.analyze.metrics.residual_update import ResidualUpdate

# What may go loses fewer right answers than this share of the images: two points of accuracy.
MAY_COST = 0.02
# A network whose ECE is within two points of that of perfect calibration is not worth a word, however many images.
ECE_EXCESS = 0.02

_finding = partial(Finding, kind="", p=1.0, metric="")


def _dead(found: ResidualUpdate) -> dict[str, float]:
    return {layer: sign_test(count, found.images) for layer, count in found.unchanged.items()}


def _dead_block(found: ResidualUpdate, blocks: Sequence[str]) -> Finding:
    alive = [value for layer, value in found.update.items() if layer not in blocks]
    worst = max(blocks, key=lambda layer: found.update[layer])
    return _finding(
        statement=f"Dead: {_listed(blocks)}. Tokens leave as they came.",
        effect=found.update[worst],
        interval=found.interval("update", worst),
        unit="length of the update over that of the token",
        baseline=f"the other blocks' median, {median(alive):.3g}" if alive else "no other block is alive",
    )


def _from_the_end(counts: Mapping[str, int], images: int) -> dict[str, float]:
    """The last layer first: what begins at a layer reaches to the end."""
    return {layer: sign_test(count, images) for layer, count in reversed([*counts.items()])}


def _over_smoothing(found: OverSmoothing, blocks: Sequence[str]) -> Finding:
    first, last = blocks[-1], blocks[0]
    before = "" if found.embedding is None else f", {found.embedding:.3g} before the first block"
    return _finding(
        statement=f"Over-smoothing begins at {first}: to the end, {last}, the patch tokens of an image are nearly one.",
        effect=found.cos_sim[first],
        interval=found.interval("cos_sim", first),
        unit=f"mean cosine of different patches after {first}",
        baseline=f"bound {found.threshold:g}{before}",
    )


def _attention_collapse(found: AttentionCollapse, layers: Sequence[str]) -> Finding:
    first, last, neighbours = layers[-1], layers[0], found.neighbours()
    earlier = [value for layer, value in neighbours.items() if layer not in layers]
    rest = f", mean of the layers before {sum(earlier) / len(earlier):.3g}" if earlier else ""
    until = "" if first == last else f", and so on to {last}"
    return _finding(
        statement=f"Attention collapse begins at {first}: its {found.maps} maps repeat those of the layer before"
        f"{until}.",
        effect=neighbours[first],
        interval=found.interval("neighbours", first),
        unit=f"cosine of the maps of {first} and of the layer before",
        baseline=f"bound {found.threshold:g}{rest}",
    )


def _miscalibration(found: Confidence, _subjects: Sequence[str]) -> Finding | None:
    if found.ece - found.null_ece[0] < ECE_EXCESS:
        return None
    one_way = abs(found.signed_ece) > found.ece / 2
    how = ("overconfident" if found.signed_ece < 0 else "underconfident") if one_way else "miscalibrated both ways"
    mean, interval = found.accuracy - found.signed_ece, found.interval("ece")
    return _finding(
        statement=f"Miscalibrated: the network is {how}; mean confidence {100 * mean:.1f} %, "
        f"accuracy {100 * found.accuracy:.1f} %.",
        effect=100 * found.ece,
        interval=None if interval is None else (100 * interval[0], 100 * interval[1]),
        unit="points of ECE",
        baseline="perfect calibration on so many images: {:.1f}, up to {:.1f}".format(
            *(100 * x for x in found.null_ece)
        ),
    )


def _costless(removals: Mapping[str, Removal], images: int) -> dict[str, float]:
    return {name: few_events(removal.lost, images, MAY_COST) for name, removal in removals.items()}


def _units_that_can_go(found: Lesions, units: Sequence[str]) -> Finding:
    worst = min(units, key=lambda name: found.units[name].accuracy)
    many = f"{len(units)} of {len(found.units)} units can go, each alone" if len(units) > 1 else "A unit can go"
    return _removal_finding(found, found.units[worst], f"{many}: {_listed(units)}.", f"accuracy without {worst}")


def _depth(found: Lesions, blocks: Sequence[str]) -> Finding:
    first = blocks[-1]
    last = f"the last {len(blocks)} of {len(found.depth)} blocks" if len(blocks) > 1 else "the last block"
    statement = f"Depth that buys nothing: {last} (from {first}) can go together."
    return _removal_finding(found, found.depth[first], statement, f"accuracy without {first} and all behind it")


def _removal_finding(found: Lesions, removal: Removal, statement: str, what: str) -> Finding:
    low, high = paired_change(removal.lost, removal.gained, found.images)
    interval: Interval = (100 * low, 100 * high)
    return _finding(
        statement=statement,
        effect=100 * (removal.gained - removal.lost) / found.images,
        interval=interval,
        unit=f"points, change of {what}",
        baseline=f"the whole network, {100 * found.accuracy:.1f} %; may cost {100 * MAY_COST:g} points",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


RULES = (
    Rule("dead-block", ("residual-update",), _dead, _dead_block),
    Rule(
        "over-smoothing",
        ("over-smoothing",),
        lambda found: _from_the_end(found.smoothed, found.images),
        _over_smoothing,
        in_order=True,
    ),
    Rule(
        "attention-collapse",
        ("attention-collapse-mixed", "attention-collapse"),  # the maps that meet V, where a layer mixes them
        lambda found: _from_the_end(found.repeated, found.images),
        _attention_collapse,
        in_order=True,
    ),
    Rule("miscalibration", ("confidence",), lambda found: {"ece": found.ece_p}, _miscalibration),
    Rule("units", ("lesions",), lambda found: _costless(found.units, found.images), _units_that_can_go),
    Rule(
        "depth",
        ("lesions",),
        lambda found: _costless(dict(reversed([*found.depth.items()])), found.images),
        _depth,
        in_order=True,
    ),
)
