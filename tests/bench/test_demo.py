"""`vitx demo`: what it refuses, and how a verb's failure ends it. `make demo` runs the whole of it."""

import sys
from pathlib import Path

import pytest

from cli_fixture import Vitx
from vitx.bench import demo
from vitx.core.errors import CheckFailed, InputError


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / demo.MARK).touch()
    with pytest.raises(InputError, match=r"holds 'thesis\.tex', which no demo made: choose another --out"):
        demo.run_demo(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_of_ones_own_is_left_alone_whatever_the_names_in_it(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.txt").touch()
    with pytest.raises(InputError, match=r"has no \.vitx-demo, so it is no demo's, or an older version's"):
        demo.run_demo(tmp_path)
    assert (tmp_path / "images" / "mine.txt").exists()


def test_the_exit_code_is_that_of_the_verb_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RECIPE", "no-such-recipe")
    with pytest.raises(demo.VerbFailed, match=r"^`vitx train` ended with exit code 2$") as failed:
        demo.run_demo(tmp_path / "demo")
    assert failed.value.exit_code == 2


def test_other_classes_over_http_or_a_failed_certificate_fail_the_demo() -> None:
    demo.DemoResult(0.975, 0.975, "pass", {}).check()
    with pytest.raises(CheckFailed, match=r"served top-1 0\.5 is not the checkpoint's 0\.975"):
        demo.DemoResult(0.975, 0.5, "pass", {}).check()
    with pytest.raises(CheckFailed, match="does not say pass"):
        demo.DemoResult(0.975, 0.975, "fail", {}).check()


def test_a_package_that_a_later_verb_needs_is_missed_at_once(
    tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda out: pytest.fail("it begins"))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    said = "error: this needs the package 'onnxscript', which is not installed: pip install 'vitx[all]'\n"
    assert vitx("demo", "--out", tmp_path / "demo") == (3, "", said)
