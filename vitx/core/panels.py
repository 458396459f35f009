"""What all figures share: sizes, a line style for each network, PNG. No line is told from another by colour alone."""

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first network's line, the second's, the third's.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "0.45", "linestyle": "--", "marker": "s"},
    {"color": "0.25", "linestyle": ":", "marker": "^"},
)
WIDTH, HEIGHT = 4.2, 3.2  # inches, of one panel
DOTS_PER_INCH = 110  # as shown
PIXEL_RATIO = 2  # pixels of the file for one as shown: sharp on a phone and on paper

Results = Mapping[str, Any]  # network → its record


class Picture(bytes):
    """The bytes of a PNG file, which a notebook shows."""

    def _repr_png_(self) -> bytes:
        return bytes(self)

    def __repr__(self) -> str:
        return f"Picture of {len(self)} bytes"


@contextmanager
def own_style() -> Iterator[None]:
    """Inside the block figures are drawn in matplotlib's own style, whatever a notebook or a matplotlibrc has set.

    On a black ground our black lines would not be seen, and TeX would read the % and _ of our texts.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def panels(
    count: int, *, width: float = WIDTH, height: float = HEIGHT, columns: int | None = None
) -> tuple["Figure", list["Axes"]]:
    """A figure of `count` axes beside each other, or in rows of so many columns."""
    from matplotlib.figure import Figure

    columns = columns or count
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def as_text(name: str) -> str:
    """A name as matplotlib draws it to the letter: between two `$` it would read a formula.

    rcParams["text.parse_math"] is no way out: without it the 10⁻³ of a logarithmic axis are drawn as their source.
    It leaves what begins with `_` out of legends, so a blank stands before that.
    """
    return " " * name.startswith("_") + name.replace("$", r"\$")


def elided(name: str) -> str:
    """A name without its middle where it is longer than 24 characters: a legend of more would cover its axes."""
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def legend_names(names: Iterable[str]) -> list[str]:
    """Names as a figure has room for them; those that would be the same are numbered."""
    short = [elided(name) for name in names]
    return [f"{index}: {name}" if short.count(name) > 1 else name for index, name in enumerate(short, 1)]


def png(figure: "Figure", pixel_ratio: int = PIXEL_RATIO) -> Picture:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=pixel_ratio * DOTS_PER_INCH)
    return Picture(buffer.getvalue())
