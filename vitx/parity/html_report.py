"""`vitx parity --report`: one HTML file that loads nothing else, with verdict, numbers, flips, and plots by layer."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitx.core.certificate import Certificate, Flip
from vitx.core.page import data_url, page, table
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet, encode_png

# Flips that are shown; the certificate has all of them.
MAX_THUMBNAILS = 200
THUMBNAIL = 96  # pixels


@dataclass(frozen=True)
class LayerPlot:
    """A plot over named layers: a line for each of `series`, None where it has no value."""

    title: str
    layers: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    logarithmic: bool = False


def render(
    title: str,
    certificate: Certificate,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    failures: Sequence[str] = (),
    notes: Sequence[str] = (),
    plots: Sequence[LayerPlot] = (),
    tables: Mapping[str, Mapping[str, object]],
) -> str:
    """The report as HTML; sections without content are left out.

    Thumbnails are images of `images` as `preprocessing` prepares them, embedded as PNG files. failures: of all that was
    compared; without one the verdict is pass. notes: what explains them. tables: more tables by title.
    """
    verdict = "fail" if failures else "pass"
    body = [
        f'<p class="finding {verdict}">verdict: <strong>{verdict}</strong></p>',
        _list(failures or certificate.reasons),
        _list(notes),
        _table("Measurements", summary(certificate)),
        *(_table(name, rows) for name, rows in tables.items()),
        _table("Largest logit error by batch size", certificate.max_logit_error_by_batch_size),
        *(_plot(plot) for plot in plots),
        _flips(certificate.flips, images, preprocessing),
    ]
    return page(title, body)


def summary(certificate: Certificate) -> dict[str, object]:
    """The numbers of a certificate that a person reads first."""
    c = certificate
    rows: dict[str, object] = {
        "images": f"{c.images} of {c.data}, batch size {c.batch_size}",
        "batch sizes": f"{', '.join(map(str, c.batch_sizes))} on {c.probe_images} of them",
        "top-1 of the reference": c.accuracy_reference,
        "top-1 of the candidate": c.accuracy_candidate,
        "flips": len(c.flips),
        "flip rate at most (95 %)": c.flip_rate_bound,
        "McNemar p": c.mcnemar_p,
        "calibration error (ECE)": f"{c.ece_reference:.5f} to {c.ece_candidate:.5f}",
        "largest logit error": c.max_logit_error,
        "mean logit error": c.mean_logit_error,
        "smallest cosine of logits": c.min_cosine,
        "mean cosine of logits": c.mean_cosine,
    }
    if max(c.batch_sizes) > 1:
        rows |= {
            "largest change by neighbours": c.max_neighbour_error,
            "largest change by place": c.max_position_error,
            "class depends on batch": f"{c.probe_flips}, rate at most {c.probe_flip_rate_bound:.5f} (95 %)",
        }
    if c.token_similarity is not None:
        layer, reference, candidate = c.token_similarity.worst()
        rows["CosSim of tokens, worst layer"] = f"{layer}: {reference:.4f} to {candidate:.4f}"
    return rows


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>" if items else ""


def _table(title: str, rows: Mapping[str, object] | Mapping[int, float]) -> str:
    texts = [(str(name), f"{value:.6g}" if isinstance(value, float) else value) for name, value in rows.items()]
    return f"<h2>{html.escape(title)}</h2>{table(texts)}" if texts else ""


def _flips(flips: Sequence[Flip], images: ImageSet, preprocessing: Preprocessing) -> str:
    if not flips:
        return "<h2>Flips</h2><p>No image changed its class.</p>"
    shown = sorted(flips, key=lambda flip: flip.reference_margin, reverse=True)[:MAX_THUMBNAILS]
    index, labels = {key: row for row, key in enumerate(images.keys)}, images.class_names
    sources = {flip.key: _thumbnail(images, index[flip.key], preprocessing) for flip in shown}
    items = "".join(
        f'<li><img alt="{html.escape(flip.key, quote=True)}" src="{sources[flip.key]}">'
        f"<br>{html.escape(flip.key)}<br>label {html.escape(labels[flip.label])}: "
        f"{html.escape(labels[flip.reference])} → {html.escape(labels[flip.candidate])}"
        f"<br>margin {flip.reference_margin:.3g}, batch {flip.batch_size}</li>"
        for flip in shown
    )
    return f'<h2>{len(flips)} flips, the clearest {len(shown)} first</h2><ul class="images">{items}</ul>'


def _thumbnail(images: ImageSet, row: int, preprocessing: Preprocessing) -> str:
    picture = Image.fromarray(preprocessing.from_bytes(images.read(row)))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_url(encode_png(np.asarray(picture), compression=6))


_COLOURS = ("#1f6feb", "#d1660a")  # of a plot's lines, which are two at most
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 320, 70, 20, 70


def _plot(plot: LayerPlot) -> str:
    """Lines over the layers as inline SVG; nothing if no value can be drawn."""
    scaled = {name: [_scaled(value, plot.logarithmic) for value in line] for name, line in plot.series.items()}
    known = [value for line in scaled.values() for value in line if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    if plot.logarithmic:
        low, high = math.floor(low), math.ceil(high)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    across = (_WIDTH - _LEFT - 20) / max(1, len(plot.layers) - 1)

    def x(index: int) -> float:
        return _LEFT + index * across

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_axis(plot, low, high, x, y)]
    for number, (name, line) in enumerate(scaled.items()):
        colour = _COLOURS[number]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(line) if v is not None)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        parts.append(f'<text x="{_LEFT + 8 + 250 * number}" y="{_TOP - 6}" fill="{colour}">{html.escape(name)}</text>')
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="12" fill="currentColor">'
        f"<title>{html.escape(plot.title)}</title>{''.join(parts)}</svg>"
    )
    return f'<figure class="plot"><h2>{html.escape(plot.title)}</h2>{picture}</figure>'


def _axis(plot: LayerPlot, low: float, high: float, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    """Horizontal lines with their values, and the names of at most some 24 layers."""
    ticks = np.linspace(low, high, min(6, int(high - low) + 1) if plot.logarithmic else 5)
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{_LEFT - 6}" y="{y(t) + 4:.1f}" text-anchor="end">'
        f"{f'{10.0**t:.1e}' if plot.logarithmic else f'{t:.3g}'}</text>"
        for t in ticks
    ]
    every = max(1, len(plot.layers) // 24)
    lines += [
        f'<text transform="translate({x(i):.1f},{_HEIGHT - _BOTTOM + 14}) rotate(45)">{html.escape(name)}</text>'
        for i, name in enumerate(plot.layers)
        if i % every == 0
    ]
    return "".join(lines)


def _scaled(value: float | None, logarithmic: bool) -> float | None:
    """The value on the plot's axis; None where it is not finite or has no logarithm."""
    if value is None or not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    return math.log10(value) if logarithmic else value
