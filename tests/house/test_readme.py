"""The README's step-by-step block, run command by command, and its Python block against the same server; and the five
commands of docs/first-model.md on generated photographs, each of which has to print the next.

Training is a process of its own, forked from one that has imported PyTorch; the other verbs that need it run in this
process, which has imported it too.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pyarrow.parquet as parquet
import pytest
from PIL import Image

from cli_fixture import run_in_process
from server_process import HANG, free_port, wait_until
from training_jobs import TINY_SETTINGS, VitxProcess, context
from vitx.data.open import open_images

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What is tested is that the commands work, not the accuracy or the speed.
SHORTER = {"train": ["--set", "epochs=1", *TINY_SETTINGS], "bench": ["--seconds", "0.2"]}
FIRST_MODEL = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")
SHORTER_PHOTOS = (
    "epochs=1",
    "workers=0",
    "model.kwargs.depth=1",
    "model.kwargs.embed_dim=16",
    "model.kwargs.num_heads=2",
)
CLASSES, PHOTOS_OF_EACH = ("bark", "grass", "water"), 60
IN_THIS_PROCESS = ("eval", "analyze", "export", "parity")


def block(language: str, marker: str) -> str:
    found = re.search(rf"{re.escape(marker)}.*?```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no {language} block after '{marker}'"
    return found.group(1)


def commands() -> list[str]:
    lines = block("bash", "tests/house/test_readme.py runs this block").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


def run(command: str, folder: Path) -> str:
    finished = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=False, env=environment()
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def environment() -> dict[str, str]:
    """Environment variables with the console script of this Python on the path, and one thread for numerics."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def answers(port: int) -> bool:
    with suppress(OSError), urlopen(f"http://localhost:{port}/v2/health/ready", timeout=HANG):
        return True
    return False


@contextmanager
def serving(command: str, folder: Path, port: int) -> Iterator[None]:
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(shlex.split(command), cwd=folder, env=environment(), stdout=log, stderr=log)
        try:
            wait_until(lambda: answers(port) or process.poll() is not None)
            assert process.poll() is None, (folder / "server.log").read_text()
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG) == 0


def write_images(folder: Path) -> None:
    digits = open_images("digits", "val")
    (folder / "images").mkdir()
    for index in range(20):
        (folder / "images" / f"{index}.png").write_bytes(digits.read(index))
    (folder / "digit.png").write_bytes(digits.read(19))


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_the_steps_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path)
    context()  # started in the checkout, the fork server imports its vitx, and not an installed one
    monkeypatch.chdir(tmp_path)
    port = free_port()
    steps = [step.replace("8000", str(port)) for step in commands()]
    assert [step.split()[1] for step in steps if step.startswith("vitx")] == [
        *("train", "eval", "analyze", "export", "parity", "parity", "parity", "bench", "serve", "predict")
    ]
    serve = next(step for step in steps if step.startswith("vitx serve"))
    before, after = steps[: steps.index(serve)], steps[steps.index(serve) + 1 :]
    for step in before:
        verb = step.split()[1]
        if verb in IN_THIS_PROCESS:
            code, _, said = run_in_process(tuple(shlex.split(step)[1:]), monkeypatch, capsys)
            assert code == 0, f"{step}\n{said}"
        elif verb == "train":
            arguments = (*shlex.split(step)[1:], *SHORTER[verb])
            ended, said = VitxProcess(tmp_path, arguments, tmp_path / "train.log").wait()
            assert ended == 0, f"{step}\n{said}"
        else:
            run(shlex.join([*shlex.split(step), *SHORTER.get(verb, [])]), tmp_path)
    certificate = json.loads((tmp_path / "runs/digits.vitx/certificate.json").read_text())
    assert certificate["verdict"] == "pass"
    assert certificate["images"] == 360
    assert certificate["max_logit_error"] < 1e-4
    assert set(certificate["max_logit_error_by_batch_size"]) == {"1", "2", "7", "32"}
    with serving(serve, tmp_path, port):
        for step in after:
            printed = run(step, tmp_path)
            if step.startswith("curl"):
                assert json.loads(printed)["predictions"][0]["label"] in "0123456789"
        client = block("python", "Triton's clients").replace("8000", str(port))
        (tmp_path / "client.py").write_text(client)
        run(f"{sys.executable} client.py", tmp_path)
    table = parquet.read_table(next((tmp_path / "runs/predictions").glob("*.parquet"))).to_pydict()
    assert len(table["class"]) == 20
    assert not any(table["error"])


def write_photographs(folder: Path) -> None:
    """As many as on the page, so that the evaluation split proves the same rate."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(PHOTOS_OF_EACH):
            colour = (60 * label, 4 * number, 128)
            Image.new("RGB", (40, 32), colour).save(folder / name / f"{number:03d}.jpg")


def row_names(printed: str) -> list[str]:
    """The first cells of a table of two columns."""
    rows = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    return [cells[1].strip() for cells in rows if cells[1].strip()]


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_the_five_commands_of_the_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitx.export.bundling.run_limited", lambda title, function, *given, **_: function(*given))
    write_photographs(tmp_path / "photos")
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)```", FIRST_MODEL, re.DOTALL)
    commands = [command for command, _ in blocks]
    verbs = [command.split()[1] for command in commands]
    assert verbs[:5] == ["train", "report", "export", "parity", "serve"]
    for (command, shown), following in zip(blocks[:4], commands[1:], strict=False):
        words = tuple(shlex.split(command)[1:])
        if words[0] == "train":
            settings = [word for setting in SHORTER_PHOTOS for word in ("--set", setting)]
            ended, said = VitxProcess(tmp_path, (*words, *settings), tmp_path / "train.log").wait()
            printed = said
        else:
            monkeypatch.chdir(tmp_path)
            ended, printed, said = run_in_process(words, monkeypatch, capsys)
        assert ended == 0, f"{command}\n{said}"
        assert f"next: {following}" in said.splitlines(), said
        assert f"next: {following}" in shown.splitlines(), "the page shows what is printed"
        assert words[0] == "parity" or row_names(printed) == row_names(shown)
    port = free_port()
    with serving(f"{commands[4]} --port {port}", tmp_path, port):
        assert json.loads(run(commands[5].replace("8000", str(port)), tmp_path))["predictions"][0]["label"] in CLASSES
    address = f"http://127.0.0.1:{port}/v1/classify"
    assert f"next: curl --data-binary @IMAGE {address}" in (tmp_path / "server.log").read_text()


def test_the_tree_names_every_folder() -> None:
    tree = block("", "## The tree")
    lines = [
        line.split("  ")[0] if line[0] != " " else line[:2] + line[2:].split("  ")[0] for line in tree.splitlines()
    ]
    top = ""
    named = set()
    for line in lines:
        if line.startswith("  "):
            named.add(f"{top}/{line.strip().rstrip('/')}")
        elif line.endswith("/"):
            top = line.rstrip("/")
            named.add(top)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [line.split("/") for line in listed.splitlines() if "/" in line and not line.startswith(".")]
    inner = {"/".join(path[:2]) for path in paths if len(path) > 2 and path[0] == "vitx"}
    assert named == {path[0] for path in paths} | inner
