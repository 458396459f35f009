"""What a person sees: lines on standard error, tables and JSON on standard output, reports as pages."""

import io
import json
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from PIL import Image

from vitx.core import console
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, VitxError, missing_package, unknown_name
from vitx.core.lazy import lazy_names
from vitx.core.page import page, picture, section, table
from vitx.core.panels import LINES, panels, png


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr("vitx.core.console.time.monotonic", lambda: now)
    with console.progress("train", 30) as bar:
        for done, moment in ((1, 109.9), (2, 110.0), (3, 119.9), (4, 120.0)):
            now = moment
            bar.update(done, "loss 1" if done == 4 else "")
    with console.progress("train", 30, quiet=True) as bar:
        now = 1000.0
        bar.update(30)
    now = 100.0
    with console.progress("search", 0) as bar:
        now = 110.0
        bar.update(3, "two layers")
    captured = capsys.readouterr()
    first, second = "train: 2/30, about 140 s left", "train: 4/30, about 130 s left, loss 1"
    assert captured.err.splitlines() == [first, second, "search: 3, two layers"]
    assert captured.out == ""


def test_a_log_line_goes_to_standard_error_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console.log("one")
    console.log("two", quiet=True)
    assert capsys.readouterr() == ("", "one\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_line_that_standard_error_does_not_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> TextIO:
        return cast(TextIO, io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True))

    with full() as stream:
        monkeypatch.setattr("sys.stderr", stream)
        console.log("one")
        monkeypatch.setattr("sys.stderr", console.Forgiving(stream))
        print("two", file=sys.stderr, flush=True)
        assert sys.stderr.encoding == stream.encoding
        with pytest.raises(OSError, match="No space left"):
            stream.write("three")


def test_a_name_of_a_file_does_nothing_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither an escape sequence, nor a line of its own, nor text from right to left."""
    console.log("cannot open 'a\x1b]0;t\x07\r\nerror: b\x9b1m\u202egpj\tÄ'")
    said = capsys.readouterr().err
    assert said == r"cannot open 'a\x1b]0;t\x07\r\nerror: b\x9b1m\u202egpj" + "\tÄ'\n"
    console.print_table("T\x1b[1m", ("c\x1b[2m",), [("a\x1b[31mred\nb",)])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"a\x1b[31mred\nb" in shown


def test_json_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"name": "Größe", "values": [1, 2.5]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"name": "Größe", "values": [1, 2.5]}
    assert "Größe" in out
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json(float("nan"))


def test_a_table_has_its_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    title = f"evaluation of {'runs/digits/' * 20}"  # one line: who copies a path from it gets the path
    console.print_table(title, ("name", "value"), [("a", 1.23456789), ("long name", 10)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == title
    first = next(line for line in lines if "1.2346" in line)
    second = next(line for line in lines if "10" in line)
    assert "1.23456" not in first  # five digits
    assert first.index("1.2346") + len("1.2346") == second.index("10") + len("10")
    assert first.index("a") == second.index("long")


def test_a_page_shows_text_as_text() -> None:
    drawn = png(panels(1, width=1, height=0.5)[0])
    text = page("a<b", [section("x", "A & B", "one", "<i>"), table([("k<", "v&")]), picture(drawn, 'a"b')])
    assert text.count("a&lt;b") == 2
    assert '<h2 id="x">A &amp; B</h2><p>one</p><p>&lt;i&gt;</p>' in text
    assert '<tr><th scope="row">k&lt;</th><td>v&amp;</td></tr>' in text
    assert 'aria-label="a&quot;b"><img alt="a&quot;b" width="110" height="55" src="data:image/png;base64,iVBO' in text
    assert "<script" not in text


def test_panels_stand_beside_each_other() -> None:
    figure, axes = panels(3, width=2, height=1)
    assert len(axes) == 3
    assert Image.open(io.BytesIO(png(figure))).size == (2 * 3 * 2 * 110, 2 * 110)  # two pixels for one as shown


def test_errors_have_their_exit_codes() -> None:
    codes = {kind: kind("x").exit_code for kind in (VitxError, CheckFailed, InputError, EnvironmentMissing)}
    assert codes == {VitxError: 1, CheckFailed: 1, InputError: 2, EnvironmentMissing: 3}
    assert isinstance(InputError("x"), ValueError)
    assert str(missing_package("ray", "ray")) == (
        "this needs the package 'ray', which is not installed: pip install 'vitx[ray]'"
    )


def test_lazy_names_come_from_their_modules() -> None:
    get = lazy_names("pack", {"json": ["dumps"], "io": ["BytesIO"]})
    assert get("dumps") is json.dumps
    assert get("BytesIO") is io.BytesIO
    with pytest.raises(AttributeError, match="module 'pack' has no attribute 'loads'"):
        get("loads")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with console.progress("train", 30) as bar:
        bar.update(7, "loss 0.25")
    shown = terminal.getvalue()
    assert "train" in shown
    assert " 7/30" in shown
    assert "loss 0.25" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # the bar goes when it ends
    quiet = Terminal()
    monkeypatch.setattr("sys.stderr", quiet)
    with console.progress("train", 30, quiet=True) as silent:
        silent.update(7, "loss 0.25")
    assert quiet.getvalue() == ""


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich draws no bar there, and nothing in its place."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert console.can_redraw(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not console.can_redraw(terminal)
    with console.progress("train", 30) as bar:
        monkeypatch.setattr(bar, "next_time", 0)
        bar.update(7)
    assert terminal.getvalue().startswith("train: 7/30")


def test_a_table_on_a_terminal_is_as_wide_as_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 150
    console.print_table("T", ("a",), [(long,)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 120
    assert sum(line.count("x") for line in lines) == 150  # folded, not cut
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    console.print_table("T", ("a",), [(long,)])
    assert terminal.getvalue().count("x" * 56) == 2


def test_brackets_in_a_name_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """rich would take them for its markup, and raise for an end without a beginning."""
    console.print_table("of x[/b]", ("a[red]",), [("[bold]c[/d]",)])
    out = capsys.readouterr().out
    assert "of x[/b]" in out
    assert "[bold]c[/d]" in out
    assert "a[red]" in out


def test_fields_are_two_columns_without_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_fields("Title", {"images": 5, "name": "x"})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("Title")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [["images", "5"], ["name", "x"]]
    assert not any(line.startswith("┃") for line in lines)


def test_a_column_of_texts_and_an_empty_one_are_to_the_left(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("T", ("number or text", "whole"), [("a", 1), (2, 22)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1] for row in rows] == [" a              ", " 2              "]
    assert [row.split("│")[2] for row in rows] == ["     1 ", "    22 "]
    console.print_table("T", ("wide",), [])
    assert "┃ wide ┃" in capsys.readouterr().out


def test_json_is_indented_by_two(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": [1]})
    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'


def test_at_most_three_names_that_are_half_alike_are_suggested() -> None:
    error = unknown_name("size", "abcd", ["abcx", "abxy", "axyz", "abcde", "xbcd", "abce"])
    assert str(error) == (
        "unknown size 'abcd': did you mean abcde or xbcd or abcx? known: abcde, abce, abcx, abxy, axyz, xbcd"
    )
    assert str(unknown_name("size", "zzz", ["b", "a"])) == "unknown size 'zzz': known: a, b"
    assert str(unknown_name("size", "ab", ["ac"])) == "unknown size 'ab': did you mean ac? known: ac"


def test_the_whole_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<style>\n:root{color-scheme:light dark;" in page("T", [])
    monkeypatch.setattr("vitx.core.page._STYLE", "css{}")
    found = page("T", ["<p>a</p>", table([("k", 1), ("l", "v")]), section("i", "S", "x", "y")])
    assert found == (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>T</title><style>css{}</style></head>'
        '<body><main><h1>T</h1><p>a</p><table><tr><th scope="row">k</th><td>1</td></tr><tr><th scope="row">l</th>'
        '<td>v</td></tr></table><h2 id="i">S</h2><p>x</p><p>y</p></main></body></html>\n'
    )


def test_lines_differ_in_more_than_their_grey() -> None:
    assert LINES == (
        {"color": "black", "linestyle": "-", "marker": "o"},
        {"color": "0.45", "linestyle": "--", "marker": "s"},
        {"color": "0.25", "linestyle": ":", "marker": "^"},
    )


def test_a_panel_is_4_2_by_3_2_inches_and_a_png_whatever_matplotlib_is_told() -> None:
    import matplotlib

    figure, axes = panels(2)
    assert figure.get_size_inches().tolist() == [8.4, 3.2]
    assert figure.get_layout_engine() is not None
    places = [place for ax in axes if (place := ax.get_subplotspec()) is not None]
    assert [(place.colspan.start, place.rowspan.stop) for place in places] == [(0, 1), (1, 1)]
    with matplotlib.rc_context({"savefig.format": "svg", "savefig.dpi": 50}):
        picture = Image.open(io.BytesIO(png(figure)))
    assert (picture.format, picture.size) == ("PNG", (2 * 924, 2 * 352))  # for 924 as shown
