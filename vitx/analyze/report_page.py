"""The page of an analysis: findings first, then what differs, then the evidence metric by metric."""

import html
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitx.analyze.analysis import Analysis
from vitx.analyze.findings.differences import Difference, differences
from vitx.analyze.findings.finding import Finding, Findings, effect_text, p_text
from vitx.analyze.intervals import with_interval
from vitx.analyze.metric import answer_names
from vitx.analyze.metric_figures import COLOURS
from vitx.analyze.metrics import METRICS
from vitx.analyze.metrics.confidence import Confidence, Mistake
from vitx.analyze.metrics.rollout import Rollout
from vitx.core.console import counted
from vitx.core.files import Record
from vitx.core.page import data_url, page, picture, section, table
from vitx.core.panels import elided
from vitx.core.preprocess import UInt8Array
from vitx.data.image_set import encode_png

Float32Array = npt.NDArray[np.float32]
BETWEEN = "cka-between"  # named as a metric, but it is of two networks
THUMBNAIL = 96  # pixels
_NO_INTERVAL = (
    "Numbers in brackets are 95 % intervals. A number without one repeats another, is of fewer than ten images or "
    "batches, or the text below it says why."
)
_BETWEEN_TITLE = "CKA between the two networks"


def report_page(
    names: Sequence[str],
    analyses: Sequence[Analysis],
    results: Mapping[str, Mapping[str, Record]],
    figures: Mapping[str, bytes],
) -> str:
    """results: metric → network → result; figures: metric → PNG."""
    body = [_networks_table(names, analyses), f'<p class="small">{_NO_INTERVAL}</p>']
    for name, analysis in zip(names, analyses, strict=True):
        body += _findings(f"Findings: {name}" if len(names) > 1 else "Findings", analysis.findings())
    if len(names) == 2:
        body += _differences(names, differences(analyses[0].results, analyses[1].results))
    body.append(_contents(results))
    for metric, found in results.items():
        body += _evidence(metric, found, figures)
        if metric in _IMAGES:
            for name, analysis in zip(names, analyses, strict=True):
                body += _IMAGES[metric](name, analysis)
    for name, analysis in zip(names, analyses, strict=True):
        if analysis.not_applicable:
            body.append(f"<h2>Not applicable to {html.escape(name)}</h2>")
            body.append(table([(METRICS[key].title, reason) for key, reason in analysis.not_applicable.items()]))
    return page(" and ".join(map(elided, names)), body)


def _networks_table(names: Sequence[str], analyses: Sequence[Analysis]) -> str:
    rows = []
    for name, analysis in zip(names, analyses, strict=True):
        source = analysis.source
        rows.append((name, f"{source.spec.name}, {source.checkpoint}, {source.checkpoint_sha256[:16]}…"))
    first = analyses[0]
    return table([*rows, ("images", f"{len(first.images)} of {first.images.name}")])


def _findings(title: str, findings: Findings) -> Iterator[str]:
    made = ", ".join(f"{kind} {count}" for kind, count in findings.tests.items()) or "none"
    tested = f"Tests made: {made}. All together they are wrong about one healthy network in twenty or fewer (Holm)."
    if not findings.found:
        yield section("findings", title, f"No finding. {tested}")
        return
    yield section("findings", title, tested)
    yield from map(_finding, findings.found)


def _finding(finding: Finding) -> str:
    return (
        f'<div class="finding"><h3>{html.escape(finding.statement)}</h3>'
        f"<p>{html.escape(f'{effect_text(finding)}. Baseline: {finding.baseline}. Adjusted {p_text(finding.p)}. ')}"
        f'<a href="#{finding.metric}">Evidence: {html.escape(METRICS[finding.metric].title)}</a></p></div>'
    )


def _differences(names: Sequence[str], found: Sequence[Difference]) -> Iterator[str]:
    count = sum(each.significant for each in found)
    yield section(
        "differences",
        f"What differs: {names[1]} less {names[0]}",
        f"{count} of {counted(len(found), 'number')} differ{'s' * (count == 1)} significantly (paired on the same "
        "images, p adjusted by Holm)."
        if found
        else "Nothing was measured of both networks on ten images or more.",
    )
    if found:
        yield table(
            (each.quantity, difference_text(each)) for each in sorted(found, key=lambda each: not each.significant)
        )


def difference_text(each: Difference) -> str:
    said = "differs" if each.significant else "no difference shown"
    change = with_interval(each.difference, each.interval, "+.3g")
    return f"{each.first:.3g} → {each.second:.3g}: {change}, {p_text(each.p)}: {said}"


def _contents(metrics: Mapping[str, object]) -> str:
    items = "".join(f'<li><a href="#{metric}">{html.escape(_title(metric))}</a></li>' for metric in metrics)
    return f'<nav aria-label="Evidence"><h2>Evidence</h2><ul>{items}</ul></nav>'


def _title(metric: str) -> str:
    return _BETWEEN_TITLE if metric == BETWEEN else METRICS[metric].title


def _evidence(metric: str, results: Mapping[str, Record], figures: Mapping[str, bytes]) -> Iterator[str]:
    yield section(metric, _title(metric))
    of = METRICS["cka" if metric == BETWEEN else metric]
    yield table([(name, of.line(result)) for name, result in results.items()])
    if metric in figures:
        yield picture(figures[metric], _title(metric))
    notes = [of.reading, f"Intervals (95 %): {of.precision}."]
    if of.claim:
        notes.append(f"A paper's claim about other networks: {of.claim}")
    yield "".join(f'<p class="small">{html.escape(note)}</p>' for note in notes)


def _mistakes(network: str, analysis: Analysis) -> Iterator[str]:
    found = analysis.results.get("confidence")
    if not isinstance(found, Confidence) or not found.mistakes:
        return
    looked = _looked_at(analysis)
    items = [_item(analysis, each, looked.get(each.image)) for each in found.mistakes]
    wrong = round(len(analysis.images) * (1 - found.accuracy))
    yield f"<h3>The surest of {counted(wrong, 'wrong answer')} of {html.escape(network)}</h3>"
    yield f'<ul class="images">{"".join(items)}</ul>'


def _examples(network: str, analysis: Analysis) -> Iterator[str]:
    found = analysis.results.get("rollout")
    if isinstance(found, Rollout):
        looked = _looked_at(analysis)
        yield f"<h3>Where {html.escape(network)} looks</h3>"
        items = "".join(_item(analysis, each, looked[each.image]) for each in found.examples)
        yield f'<ul class="images">{items}</ul>'


_IMAGES = {"confidence": _mistakes, "rollout": _examples}  # what follows a metric's evidence


def _looked_at(analysis: Analysis) -> dict[int, Float32Array]:
    """Image → its patches' shares of the rollout, (rows, columns)."""
    found = analysis.results.get("rollout")
    if not isinstance(found, Rollout):
        return {}
    every = (*found.examples, *found.mistakes)
    return {each.image: np.array(each.shares, np.float32).reshape(found.grid) for each in every}


def _item(analysis: Analysis, seen: Mistake, shares: Float32Array | None) -> str:
    """One image, what the network took it for, and beside it where it looked, if that is known."""
    images = analysis.images
    label = images.class_names[seen.label] if seen.label >= 0 else ""
    predicted = answer_names(analysis.source, images)[seen.predicted]
    taken = predicted if label in ("", predicted) else f"{label} taken for {predicted}"
    key = html.escape(images.keys[seen.image])
    pixels = analysis.source.preprocessing.from_bytes(images.read(seen.image))
    pictures = [(key, pixels)]
    if shares is not None:
        pictures.append((f"{key}: where it looks", _under_shares(pixels, shares)))
    shown = "".join(f'<img alt="{alt}" src="{_thumbnail(of)}">' for alt, of in pictures)
    return f"<li>{shown}<br>{html.escape(f'{taken}, {100 * seen.confidence:.1f} %')}</li>"


def _under_shares(pixels: UInt8Array, shares: Float32Array) -> UInt8Array:
    """The image (S, S, 3) in grey under the shares in colour, those of the image's largest share at the top."""
    from matplotlib import colormaps

    largest = Image.fromarray(shares / max(float(shares.max()), 1e-12))
    height = np.asarray(largest.resize(pixels.shape[1::-1], Image.Resampling.BILINEAR))
    grey = pixels.mean(axis=2, keepdims=True)
    return np.asarray((0.4 * grey + 0.6 * 255 * colormaps[COLOURS](height)[..., :3]).round(), np.uint8)


def _thumbnail(pixels: UInt8Array) -> str:
    return data_url(encode_png(np.asarray(Image.fromarray(pixels).resize((THUMBNAIL, THUMBNAIL))), compression=6))
