"""A report as one self-contained HTML page: no script, no link, pictures inside."""

import base64
import html
from collections.abc import Iterable

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.5rem}img{max-width:100%;height:auto}
table{border-collapse:collapse;margin:.8rem 0}th,td{border-bottom:1px solid #bbb;padding:.2rem .8rem;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}details{margin:.5rem 0}summary{cursor:pointer}
"""


def page(title: str, body: Iterable[str], *, style: str = _STYLE) -> str:
    """A whole document of a title (text), the pieces of its body (HTML) and a style sheet (CSS)."""
    title = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style></head>'
        f"<body><h1>{title}</h1>{''.join(body)}</body></html>\n"
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


def picture(png: bytes, description: str) -> str:
    """A PNG file as an image inside the page."""
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
