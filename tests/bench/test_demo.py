"""`vitx demo`: what it refuses, and how a verb's failure ends it. `make demo` runs the whole of it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import colour_images
from cli_fixture import Vitx
from vitx.bench import demo
from vitx.core.errors import CheckFailed, InputError
from vitx.data.image_set import ImageSet

IMAGES = colour_images(8)
# Stands for a verb: tells people or machines, and makes the folder that it was given with --out, or ends by a signal.
VERB = """
import json, os, signal, sys
from pathlib import Path
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == {killed!r}:
    os.kill(os.getpid(), signal.SIGKILL)
if "--out" in words:
    Path(words[words.index("--out") + 1]).mkdir()
print(json.dumps({answers!r}.get(words[0])) if "--json" in words else "a table for people")
"""
ANSWERS = {
    "eval": {"top1": 0.75},
    "export": {"verdict": "pass", "flips": 0, "flip_rate_bound": 0.31, "max_logit_error": 2e-6},
    "bench": {"points": [{"batch_size": 1, "images_per_second": 10.6}, {"batch_size": 8, "images_per_second": 19.5}]},
    "predict": {"images_per_second": 7.4},
}


def of_known_verbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: str = "") -> Path:
    """Put known verbs, images and a server in the place of the real ones; return where the verbs' words are kept."""
    script, log = tmp_path / "verb.py", tmp_path / "log.txt"
    script.write_text(VERB.format(log=str(log), killed=killed, answers=ANSWERS))

    @contextmanager
    def serving(bundle: Path) -> Iterator[str]:
        yield f"url of {bundle}"

    def classify_all(url: str, images: ImageSet, *, quiet: bool) -> Any:
        assert (url, images, quiet) == (f"url of {tmp_path / 'demo' / demo.BUNDLE}", IMAGES, True)
        found = np.eye(4)[IMAGES.labels]
        found[:2] = np.roll(found[:2], 1, axis=1)
        return found

    def opened(name: str, split: str) -> ImageSet:
        assert (name, split) == ("digits", "val")
        return IMAGES

    monkeypatch.setattr(demo, "verb_command", lambda *words: [sys.executable, str(script), *words])
    monkeypatch.setattr(demo, "serving", serving)
    monkeypatch.setattr(demo, "classify_all", classify_all)
    monkeypatch.setattr(demo, "open_images", opened)
    return log


def test_what_a_verb_tells_people_is_not_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    of_known_verbs(monkeypatch, tmp_path)
    demo.run_demo(tmp_path / "demo").check()
    out, err = capfd.readouterr()
    assert out == ""
    assert "a table for people\n" in err


def test_each_verb_is_run_as_a_user_would(tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    log, out = of_known_verbs(monkeypatch, tmp_path), tmp_path / "demo"
    clock = iter([100.0, 101.25, 107.56])
    monkeypatch.setattr("vitx.bench.demo.time.monotonic", lambda: next(clock))
    code, printed, told = vitx("demo", "--out", out, "--json")
    assert code == 0, told
    bundle = str(out / demo.BUNDLE)
    verbs = [
        ["train", "digits-deepvit", "--out", str(out / "run")],
        ["eval", str(out / "run"), "--json"],
        ["export", str(out / "run"), "--out", bundle, "--json"],
        ["bench", bundle, "--json"],
        ["predict", bundle, str(out / "images"), "--out", str(out / "predictions"), "--json"],
    ]
    assert [json.loads(line) for line in log.read_text().splitlines()] == verbs
    shown = [*verbs[:4], ["serve", bundle, "--port", "0"], verbs[4]]
    assert told.splitlines() == [f"$ vitx {' '.join(words)}" for words in shown]
    assert json.loads(printed) == {
        "training seconds": 1.2,
        "checkpoint top-1": 0.75,
        "served top-1 (PNG over HTTP)": 0.75,
        "images": 8,
        "certificate": "pass",
        "changed classes": 0,
        "95 % bound on changed classes": 0.31,
        "largest logit error": 2e-6,
        "images/s at batch 1": 11,
        "images/s at batch 8": 20,
        "images/s of vitx predict": 7,
        "total seconds": 7.6,
    }
    assert {path.name: path.read_bytes() for path in (out / "images").iterdir()} == {
        key: IMAGES.read(index) for index, key in enumerate(IMAGES.keys)
    }
    monkeypatch.setattr("vitx.bench.demo.time.monotonic", lambda: 0.0)
    assert vitx("demo", "--out", out)[0] == 0  # what the first one made is emptied


def test_a_verb_that_a_signal_ended_has_a_shells_exit_code(
    tmp_path: Path, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Linux kills it for its memory."""
    of_known_verbs(monkeypatch, tmp_path, killed="export")
    code, out, err = vitx("demo", "--out", tmp_path / "new" / "demo")
    assert (code, out, err.splitlines()[-1]) == (137, "", "error: `vitx export` ended with exit code 137")


def test_what_has_a_demos_name_and_is_no_folder_is_left_alone(tmp_path: Path) -> None:
    """A link to a disk with more room, say: its folder is not the demo's to empty."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "mine.txt").touch()
    for name in ("link", "file"):
        out = tmp_path / name
        (out / "images").mkdir(parents=True)
        (out / demo.MARK).touch()
        if name == "link":
            (out / "run").symlink_to(tmp_path / "large")
        else:
            (out / "run").touch()
        with pytest.raises(InputError, match=r"holds 'run', which no demo made: choose another --out"):
            demo.run_demo(out)
        assert (out / "images").is_dir()
    assert (tmp_path / "large" / "mine.txt").exists()


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
