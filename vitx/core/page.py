"""A report as one self-contained HTML page: no script, nothing loaded, pictures inside; light, dark and on paper."""

import base64
import html
import struct
from collections.abc import Iterable

from vitx.core.console import shortened
from vitx.core.panels import PIXEL_RATIO

_LONGEST = 200  # characters of a value in a notebook
_STYLE = """
:root{color-scheme:light dark;--ink:#191919;--paper:#fff;--line:#b9b9b9;--soft:#f4f4f1;--accent:#0b5394;
--pass:#1a7f37;--fail:#b3261e}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:var(--ink);
background:var(--paper)}a{color:var(--accent)}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.5rem}h3{font-size:1rem;margin:0}
table{border-collapse:collapse;margin:.8rem 0}td{font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;
overflow-wrap:anywhere}th{min-width:6rem;overflow-wrap:break-word}
details{margin:.5rem 0}summary{cursor:pointer}
.plot{overflow-x:auto;margin:.8rem 0}.plot img{max-width:100%;height:auto}
.finding{background:var(--soft);border-left:4px solid var(--accent);padding:.6rem 1rem;margin:.8rem 0}
.finding.pass{border-color:var(--pass)}.finding.fail{border-color:var(--fail)}
.pass strong{color:var(--pass)}.fail strong{color:var(--fail)}
.finding p{margin:.2rem 0}.small{font-size:.9rem}nav ul{columns:3 14rem;padding-left:1.2rem}
ul.images{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:1rem}ul.images li{max-width:17rem}
ul.images img{width:8rem;height:8rem;margin-right:.25rem;image-rendering:pixelated}
@media (max-width:40rem){.plot img{max-width:none}body{margin:1rem auto}}
@media (prefers-color-scheme:dark){:root{--ink:#e9e9e6;--paper:#161616;--line:#4b4b4b;--soft:#232323;--accent:#8ab8ff;
--pass:#4ac26b;--fail:#ff8a80}
.plot img{filter:invert(.91) hue-rotate(180deg)}}
@media print{:root{--ink:#000;--paper:#fff;--line:#999;--soft:#fff;--accent:#000;color-scheme:light;
--pass:#1a7f37;--fail:#b3261e}nav{display:none}
.plot img{filter:none;max-width:100%}.plot,.finding,tr,li{break-inside:avoid}h2,h3{break-after:avoid}
body{margin:0;font-size:11pt}}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document of a title (text) and the pieces of its body (HTML)."""
    title = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>{''.join(body)}</main></body></html>\n"
    )


def section(identifier: str, title: str, *paragraphs: str) -> str:
    """A heading and paragraphs of text."""
    text = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
    return f'<h2 id="{html.escape(identifier)}">{html.escape(title)}</h2>{text}'


def table(rows: Iterable[tuple[str, object]]) -> str:
    """A table of names and values, both text."""
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in rows
    )
    return f"<table>{cells}</table>"


def fields(rows: Iterable[tuple[str, object]]) -> str:
    """The same for a notebook: floats at five digits, long values cut."""
    texts = ((name, f"{value:.5g}" if isinstance(value, float) else str(value)) for name, value in rows)
    return table((name, shortened(text, _LONGEST)) for name, text in texts)


def picture(png: bytes, description: str) -> str:
    """A plot, a PNG file of `panels.png`, inside the page; on a narrow screen it scrolls, by keyboard too."""
    width, height = struct.unpack(">II", png[16:24])
    name = html.escape(description)
    return (
        f'<div class="plot" role="region" tabindex="0" aria-label="{name}"><img alt="{name}" '
        f'width="{width // PIXEL_RATIO}" height="{height // PIXEL_RATIO}" src="{data_url(png)}"></div>'
    )


def data_url(png: bytes) -> str:
    """A PNG file as an address that needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
