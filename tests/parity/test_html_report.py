"""The report as text: every number, the order of the flips, and where the lines of a plot lie."""

import base64
import io
import math
import re

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import certificate
from table_session import PIXEL, numbered_images
from vitx.core.certificate import Flip, TokenSimilarity
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet, encode_png
from vitx.parity import html_report
from vitx.parity.html_report import LayerPlot, render, summary

CLASSES = ("a<b", "b", "c")
IMAGES = numbered_images([0, 1, 2, 0], CLASSES)
CERTIFICATE = certificate(
    reasons=("first & last", "second"),
    flips=(
        Flip(key="image 1", label=0, reference=0, candidate=2, reference_margin=0.5, batch_size=7),
        Flip(key="image 3", label=1, reference=2, candidate=1, reference_margin=1.23456, batch_size=32),
    ),
    max_logit_error_by_batch_size={1: 0.25, 8: 1 / 3},
    batch_size=8,
    probe_images=200,
    probe_flips=3,
    probe_flip_rate_bound=0.0123456,
    max_position_error=0.75,
    min_cosine=0.875,
    mean_cosine=0.9375,
    ece_reference=0.1234567,
    ece_candidate=0.2,
)


def test_what_a_person_reads_first() -> None:
    expected = {
        "images": "300 of digits, batch size 8",
        "batch sizes": "1, 8 on 200 of them",
        "top-1 of the reference": 0.75,
        "top-1 of the candidate": 0.5,
        "flips": 2,
        "flip rate at most (95 %)": 0.01,
        "McNemar p": 1.0,
        "calibration error (ECE)": "0.12346 to 0.20000",
        "largest logit error": 1e-5,
        "mean logit error": 1e-6,
        "smallest cosine of logits": 0.875,
        "mean cosine of logits": 0.9375,
        "largest change by neighbours": 0.0,
        "largest change by place": 0.75,
        "class depends on batch": "3, rate at most 0.01235 (95 %)",
    }
    assert summary(CERTIFICATE) == expected
    tokens = TokenSimilarity(
        images=2, layers=("first", "last"), reference=(0.5, 0.25), candidate=(0.5, 0.75), allowed=0.1
    )
    found = summary(CERTIFICATE.model_copy(update={"token_similarity": tokens}))
    assert found == expected | {"CosSim of tokens, worst layer": "last: 0.2500 to 0.7500"}


def test_the_parts_of_a_report_are_in_their_order() -> None:
    plot = LayerPlot("Error <1>", ["x", "y"], {"own": [0.5, 0.25]})
    page = render(
        "A < B", CERTIFICATE, IMAGES, PIXEL, notes=("why & how",), plots=(plot,), tables={"More": {"a>b": 1 / 3}}
    )
    parts = [
        "<h1>A &lt; B</h1>",
        '<p class="finding pass">verdict: <strong>pass</strong></p>',
        "<ul><li>first &amp; last</li><li>second</li></ul><ul><li>why &amp; how</li></ul>",
        '<h2>Measurements</h2><table><tr><th scope="row">images</th>',
        '<tr><th scope="row">largest logit error</th><td>1e-05</td></tr>',
        '<h2>More</h2><table><tr><th scope="row">a&gt;b</th><td>0.333333</td></tr></table>',
        '<h2>Largest logit error by batch size</h2><table><tr><th scope="row">1</th><td>0.25</td></tr>'
        '<tr><th scope="row">8</th><td>0.333333</td></tr></table>',
        '<figure class="plot"><h2>Error &lt;1&gt;</h2><svg',
        "<h2>2 flips, the clearest 2 first</h2>",
    ]
    places = [page.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert "ul.images{" in page


def test_a_report_without_notes_tables_plots_and_flips() -> None:
    page = render("T", certificate(reasons=()), IMAGES, PIXEL, tables={"Empty": {}})
    assert '<p class="finding pass">verdict: <strong>pass</strong></p><h2>Measurements</h2>' in page
    assert "Empty" not in page
    assert page.endswith("<h2>Flips</h2><p>No image changed its class.</p></main></body></html>\n")


def test_what_fails_beside_the_certificate_is_the_verdict_too() -> None:
    """Over HTTP classes may change where the graph's do not: the page began with "pass"."""
    page = render("T", CERTIFICATE, IMAGES, PIXEL, failures=("over HTTP 3",), notes=("why",), tables={})
    assert (
        '<p class="finding fail">verdict: <strong>fail</strong></p>'
        "<ul><li>over HTTP 3</li></ul><ul><li>why</li></ul><h2>Measurements</h2>"
    ) in page


def test_pass_and_fail_have_colours_of_their_own_on_a_light_a_dark_and_a_printed_page() -> None:
    style = render("T", CERTIFICATE, IMAGES, PIXEL, tables={}).partition("</style>")[0]
    for verdict in ("pass", "fail"):
        light, dark, printed = re.findall(rf"--{verdict}:#([0-9a-f]{{6}})", style)
        assert light == printed
        for colour, paper in ((light, "ffffff"), (dark, "161616")):
            assert contrast(colour, paper) >= 4.5  # WCAG 2.2, 1.4.3
        assert f".{verdict} strong{{color:var(--{verdict})}}" in style
        assert f".finding.{verdict}{{border-color:var(--{verdict})}}" in style


def contrast(first: str, second: str) -> float:
    """WCAG 2.2's contrast ratio of two colours in sRGB."""

    def luminance(colour: str) -> float:
        shares = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def test_flips_are_listed_the_clearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = html_report._flips(CERTIFICATE.flips, IMAGES, PIXEL)
    items = re.findall(r'<li><img alt="(.*?)" src="data:image/png;base64,(.*?)">(.*?)</li>', text)
    assert [(key, said) for key, _, said in items] == [
        ("image 3", "<br>image 3<br>label b: c → b<br>margin 1.23, batch 32"),
        ("image 1", "<br>image 1<br>label a&lt;b: a&lt;b → c<br>margin 0.5, batch 7"),
    ]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).tolist() for _, data, _ in items]
    assert pixels == [[[[0, 0, 3]]], [[[0, 0, 1]]]]
    assert text.startswith('<h2>2 flips, the clearest 2 first</h2><ul class="images"><li>')
    assert text.endswith("</li></ul>")
    monkeypatch.setattr(html_report, "MAX_THUMBNAILS", 1)
    one = html_report._flips(CERTIFICATE.flips, IMAGES, PIXEL)
    assert one.startswith('<h2>2 flips, the clearest 1 first</h2><ul class="images">')
    assert (one.count("<li>"), "image 3" in one) == (1, True)


def test_keys_are_text_and_at_most_two_hundred_are_shown() -> None:
    images = ImageSet("x", CLASSES, ('<"k">',), IMAGES.labels[:1], IMAGES.read)
    odd = CERTIFICATE.flips[0].model_copy(update={"key": '<"k">'})
    assert 'alt="&lt;&quot;k&quot;&gt;"' in html_report._flips((odd,), images, PIXEL)
    many = html_report._flips(CERTIFICATE.flips[:1] * 201, IMAGES, PIXEL)
    assert many.startswith("<h2>201 flips, the clearest 200 first</h2>")
    assert many.count("<li>") == 200


def test_a_thumbnail_is_what_the_model_sees_at_most_96_pixels_wide() -> None:
    wide = encode_png(np.zeros((150, 300, 3), np.uint8))
    images = ImageSet("x", CLASSES, ("k",), IMAGES.labels[:1], lambda index: wide)
    for side, shown in ((192, 96), (40, 40)):
        text = html_report._thumbnail(images, 0, Preprocessing(image_size=side))
        kind, _, data = text.partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (shown, shown)


def lines_of(text: str) -> list[list[tuple[float, float]]]:
    """The points of each line."""
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]
        for points in re.findall(r'points="(.*?)"', text)
    ]


def ticks_of(text: str) -> list[tuple[float, str]]:
    """Height and text of each horizontal line."""
    found = re.findall(r'y1="(.*?)" y2="(.*?)" stroke.*?><text x="64" y="(.*?)" text-anchor="end">(.*?)</text>', text)
    assert all(float(y1) == float(y2) for y1, y2, *_ in found)
    assert all(abs(float(below) - float(y1) - 4) < 0.11 for y1, _, below, _ in found)
    return [(float(y), value) for y, _, _, value in found]


def test_the_lines_of_a_plot() -> None:
    """Values from 1 to 5 over heights 250 to 20, three layers from 70 to 840; what is not finite is left out."""
    plot = LayerPlot("P", ["x", "y", "z"], {"one <": [1, 3, 5], "two": [None, math.nan, 2]})
    text = html_report._plot(plot)
    assert lines_of(text) == [[(70, 250), (455, 135), (840, 20)], [(840, 192.5)]]
    assert ticks_of(text) == [(250, "1"), (192.5, "2"), (135, "3"), (77.5, "4"), (20, "5")]
    assert re.findall(r'stroke="(#.*?)" stroke-width="2"', text) == ["#1f6feb", "#d1660a"]
    assert '<text x="78" y="14" fill="#1f6feb">one &lt;</text>' in text
    assert '<text x="328" y="14" fill="#d1660a">two</text>' in text
    assert re.findall(r"translate\((.*?)\) rotate\(45\)\">(.*?)<", text) == [
        ("70.0,264", "x"),
        ("455.0,264", "y"),
        ("840.0,264", "z"),
    ]
    assert text.startswith('<figure class="plot"><h2>P</h2><svg viewBox="0 0 860 320" role="img"')
    assert '<line x1="70" x2="840" y1="250.0"' in text
    assert '<text x="64" y="254.0" text-anchor="end">1</text>' in text
    assert text.endswith("</svg></figure>")


def test_a_logarithmic_plot_ends_at_powers_of_ten() -> None:
    """From 0.002 to 0.5: 10⁻³ to 10⁰; nought has no logarithm."""
    plot = LayerPlot("P", ["x", "y", "z"], {"one": [0.002, 0, 0.5]}, logarithmic=True)
    text = html_report._plot(plot)
    heights = [20 + 230 * (0 - math.log10(value)) / 3 for value in (0.002, 0.5)]
    ((first, second),) = lines_of(text)
    assert (first[0], second[0]) == (70, 840)
    assert [first[1], second[1]] == pytest.approx(heights, abs=0.06)
    third = round(20 + 230 / 3, 1)
    assert ticks_of(text) == [
        (250, "1.0e-03"),
        (round(20 + 460 / 3, 1), "1.0e-02"),
        (third, "1.0e-01"),
        (20, "1.0e+00"),
    ]
    wide = html_report._plot(LayerPlot("P", ["x", "y"], {"one": [1e-9, 1.0]}, logarithmic=True))
    assert len(ticks_of(wide)) == 6


def test_one_value_lies_in_the_middle() -> None:
    text = html_report._plot(LayerPlot("P", ["x"], {"one": [2.0]}))
    assert lines_of(text) == [[(70, 135)]]
    assert [value for _, value in ticks_of(text)] == ["1.5", "1.75", "2", "2.25", "2.5"]
    power = html_report._plot(LayerPlot("P", ["x"], {"one": [0.01]}, logarithmic=True))
    assert lines_of(power) == [[(70, 135)]]
    assert len(ticks_of(power)) == 2
    for values in ([None, math.inf], [0.0, -1.0], []):
        empty = LayerPlot("P", ["x", "y"], {"one": values}, logarithmic=True)
        assert html_report._plot(empty) == ""


@pytest.mark.parametrize(("count", "named"), [(24, 24), (47, 47), (48, 24), (75, 25)])
def test_some_24_layers_are_named(count: int, named: int) -> None:
    names = [f"n{index}" for index in range(count)]
    text = html_report._plot(LayerPlot("P", names, {"one": [*range(count)]}))
    found = re.findall(r"rotate\(45\)\">(.*?)<", text)
    assert found == names[:: math.ceil(count / named)]
