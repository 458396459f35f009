"""What a run notes of its machine, its images and its command."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.machine import describe_machine, installed_versions
from vitx.data.image_set import ImageSet
from vitx.train.loop import environment as module
from vitx.train.loop.environment import ENVIRONMENT_FILE, DataRecord, RunEnvironment

CPU = torch.device("cpu")
COMMIT = "0" * 40


def images(*labels: int, skipped: tuple[str, ...] = ()) -> ImageSet:
    keys = tuple(f"{number}.png" for number in range(len(labels)))
    return ImageSet("photos", ("a", "b"), keys, np.array(labels), lambda index: b"bytes", skipped)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """git is a stand-in; what it was asked for."""
    calls: list[Any] = []

    def run(command: Any, **named: Any) -> Any:
        calls.append((command, named))
        return subprocess.CompletedProcess(command, 0, stdout=f"{COMMIT}+changes\n")

    monkeypatch.setattr(subprocess, "run", run)
    module._commit.cache_clear()
    yield calls
    module._commit.cache_clear()


def test_all_is_noted(monkeypatch: pytest.MonkeyPatch, asked: list[Any], tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/vitx", "train", "digits"])
    monkeypatch.setattr(module, "__file__", str(tmp_path / "vitx" / "train" / "loop" / "environment.py"))
    (tmp_path / ".git").write_text("gitdir: elsewhere")  # of a work tree
    train, val = images(0, 1, skipped=("2.png: gone",)), images(1)
    found = RunEnvironment.now(CPU, train, val, processes=2, teacher="t")
    names = hashlib.sha256(b"0.png\x000\x001.png\x001\x00").hexdigest()
    seen = DataRecord(images=2, skipped=("2.png: gone",), names_sha256=names, sample_sha256=train.digest())
    assert found == RunEnvironment(
        machine=describe_machine(),
        versions=installed_versions(),
        device="cpu",
        threads=torch.get_num_threads(),
        processes=2,
        data={"train": seen, "val": DataRecord.of(val)},
        teacher="t",
        command="vitx train digits",
        commit=f"{COMMIT}+changes",
    )
    git = ("git", "-C", str(tmp_path), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    assert asked == [(git, {"capture_output": True, "text": True, "check": True, "timeout": 10})]
    module._commit()
    assert len(asked) == 1, "a study of many runs asks once"
    write_json(tmp_path / ENVIRONMENT_FILE, found)
    assert RunEnvironment.read(tmp_path) == found


def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    found = RunEnvironment.now(torch.device("cuda:1"), images(0), images(1))
    assert (found.device, found.processes, found.teacher) == ("name of cuda:1", 1, "")


def test_a_package_has_no_commit(monkeypatch: pytest.MonkeyPatch, asked: list[Any], tmp_path: Path) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "vitx" / "train" / "loop" / "environment.py"))
    assert (module._commit(), asked) == ("", [])


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_no_commit(
    monkeypatch: pytest.MonkeyPatch, asked: list[Any], tmp_path: Path, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "vitx" / "train" / "loop" / "environment.py"))
    monkeypatch.setattr(subprocess, "run", refuse)
    assert module._commit() == ""


@pytest.mark.parametrize("program", ["/usr/bin/vitx", "/site-packages/vitx/__main__.py"])
def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "--out", "my run"])
    assert module._command() == "vitx train --out 'my run'"


def test_the_file_of_an_older_run_is_read(tmp_path: Path) -> None:
    begun = RunEnvironment.now(CPU, images(0), images(1))
    later = {"processes", "teacher", "command", "commit"}
    write_json(tmp_path / ENVIRONMENT_FILE, begun.model_dump(mode="json", exclude=later))
    found = RunEnvironment.read(tmp_path)
    assert (found.processes, found.teacher, found.command, found.commit) == (1, "", "", "")


def test_what_rounds_differently_is_said() -> None:
    begun = RunEnvironment.now(CPU, images(0), images(1))
    begun = begun.model_copy(update={"versions": {"numpy": "1", "torch": "2"}, "threads": 4})
    changed = {"device": "H200", "threads": 2, "processes": 3, "versions": {"numpy": "1", "other": "1"}}
    assert begun.differences(begun) == []
    assert begun.differences(begun.model_copy(update=changed)) == [
        f"with {what}: the result may differ in its last bits"
        for what in (
            "device H200, begun with cpu",
            "threads 2, begun with 4",
            "processes 3, begun with 1",
            "torch None, begun with 2",
        )
    ]


def test_a_set_with_an_image_of_no_label_is_not_noted() -> None:
    whole = images(0, 1)
    with pytest.raises(ValueError, match="shorter"):
        DataRecord.of(ImageSet(whole.name, whole.class_names, whole.keys, whole.labels[:1], whole.read))


def test_other_labels_are_other_images() -> None:
    begun = RunEnvironment.now(CPU, images(0, 1), images(1))
    begun.check_same_data(RunEnvironment.now(CPU, images(0, 1, skipped=("elsewhere",)), images(1)))
    with pytest.raises(InputError, match=r"the val images changed since the run began \(1 then, 1 now\): restore them"):
        begun.check_same_data(RunEnvironment.now(CPU, images(0, 1), images(0)))
