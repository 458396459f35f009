"""What a person sees: lines on standard error, tables and JSON on standard output, reports as pages."""

import io
import json

import pytest
from PIL import Image

from vitx.core import console
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, VitxError, missing_package
from vitx.core.lazy import lazy_names
from vitx.core.page import page, picture, section, table
from vitx.core.panels import panels, png


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
    captured = capsys.readouterr()
    assert captured.err == "train: 2/30\ntrain: 4/30 loss 1\n"
    assert captured.out == ""


def test_a_log_line_goes_to_standard_error_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console.log("one")
    console.log("two", quiet=True)
    assert capsys.readouterr() == ("", "one\n")


def test_json_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"name": "Größe", "values": [1, 2.5]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"name": "Größe", "values": [1, 2.5]}
    assert "Größe" in out
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json(float("nan"))


def test_a_table_has_its_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("Title", ("name", "value"), [("a", 1.23456789), ("long name", 10)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Title"
    first = next(line for line in lines if "1.2346" in line)
    second = next(line for line in lines if "10" in line)
    assert "1.23456" not in first  # five digits
    assert first.index("1.2346") + len("1.2346") == second.index("10") + len("10")
    assert first.index("a") == second.index("long")


def test_a_page_shows_text_as_text() -> None:
    text = page("a<b", [section("x", "A & B", "one", "<i>"), table([("k<", "v&")]), picture(b"\x00\x01", 'a"b')])
    assert text.count("a&lt;b") == 2
    assert '<h2 id="x">A &amp; B</h2><p>one</p><p>&lt;i&gt;</p>' in text
    assert '<tr><th scope="row">k&lt;</th><td>v&amp;</td></tr>' in text
    assert '<img alt="a&quot;b" src="data:image/png;base64,AAE=">' in text
    assert "<script" not in text


def test_panels_stand_beside_each_other() -> None:
    figure, axes = panels(3, width=2, height=1)
    assert len(axes) == 3
    assert Image.open(io.BytesIO(png(figure))).size == (3 * 2 * 110, 110)


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
