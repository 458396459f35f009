"""What a training that fails leaves and says: the batch of a bad loss, a full disk, a process that died."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from vitx.core.errors import EnvironmentMissing
from vitx.core.run import RunFolder
from vitx.train.loop.failures import explain_full_disk, explain_lost_process, save_failed_batch
from vitx.train.loop.inputs.training_data import Batch


def data_of(batches: list[Batch]) -> Any:
    """Stands for TrainingData: what `save_failed_batch` asks of it."""

    def made(epoch: int, first: int) -> Any:
        assert epoch == 7
        return iter(batches[first:])

    return SimpleNamespace(batches=made, seed=11, images=SimpleNamespace(class_names=("cat", "dog")))


def one_colour(*values: int) -> Any:
    return np.stack([np.full((2, 2, 3), value, np.uint8) for value in values])


def test_the_images_of_a_bad_batch_are_a_sheet_and_its_labels_are_named(tmp_path: Path) -> None:
    batches = [
        Batch(3, one_colour(1), np.array([0])),
        Batch(4, one_colour(10, 20, 30, 40, 50), np.array([1, 0, 1, 1, 0])),
    ]
    folder = save_failed_batch(RunFolder(tmp_path), data_of(batches), 7, 1)
    assert folder == str(tmp_path / "failed-batch")
    sheet = np.asarray(Image.open(tmp_path / "failed-batch" / "images.png"))
    assert sheet.shape == (4, 6, 3)  # three columns, two rows
    assert sheet[::2, ::2, 0].tolist() == [[10, 20, 30], [40, 50, 0]]
    assert (sheet.reshape(2, 2, 3, 2, 3) == sheet.reshape(2, 2, 3, 2, 3)[:, :1, :, :1]).all()
    kept = json.loads((tmp_path / "failed-batch" / "batch.json").read_text())
    names = ["dog", "cat", "dog", "dog", "cat"]
    assert kept == {
        "epoch": 7,
        "batch": 1,
        "seed": 11,
        "images": [{"label": int(name == "dog"), "class": name} for name in names],
    }


@pytest.mark.parametrize(
    ("count", "size"), [(1, (2, 2)), (2, (4, 2)), (3, (4, 4)), (4, (4, 4)), (5, (6, 4)), (9, (6, 6))]
)
def test_a_sheet_is_nearly_square(tmp_path: Path, count: int, size: tuple[int, int]) -> None:
    save_failed_batch(
        RunFolder(tmp_path), data_of([Batch(0, one_colour(*range(count)), np.zeros(count, np.int64))]), 7, 0
    )
    with Image.open(tmp_path / "failed-batch" / "images.png") as sheet:
        assert sheet.size == size


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_disk_that_takes_no_more_is_told_with_the_way_to_go_on(tmp_path: Path, number: int) -> None:
    remedies = {errno.EFBIG: "raise the limit of a file's size (ulimit -f)", errno.EROFS: "mount it for writing"}
    remedy = remedies.get(number, "make room")
    with pytest.raises(EnvironmentMissing) as nothing_saved, explain_full_disk(RunFolder(tmp_path)):
        raise OSError(number, "no more", "/disk/run.json")
    assert str(nothing_saved.value) == f"cannot write '/disk/run.json': no more; {remedy}, then begin again"
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(EnvironmentMissing) as error, explain_full_disk(RunFolder(tmp_path)):
        raise OSError(number, "no more", "/disk/model.safetensors")
    assert str(error.value) == (
        f"cannot write '/disk/model.safetensors': no more; '{tmp_path}' keeps what was saved: {remedy}, then "
        "go on with --resume"
    )
    with pytest.raises(EnvironmentMissing, match=r"^cannot write: no more; "), explain_full_disk(RunFolder(tmp_path)):
        raise OSError(number, "no more")


def test_other_errors_of_the_system_are_not_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explain_full_disk(RunFolder(tmp_path)):
        raise PermissionError(errno.EACCES, "denied")


GLOO = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer" + "!" * 300 + "\nmore"


@pytest.mark.parametrize(
    ("joined", "error", "explained"),
    [
        (True, RuntimeError(GLOO), True),
        (True, dist.DistNetworkError("no route"), True),
        (False, RuntimeError(GLOO), False),  # alone: then it is another error
        (True, RuntimeError("shapes differ"), False),
    ],
)
def test_a_process_that_died_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool, error: RuntimeError, explained: bool
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: joined)
    with (
        pytest.raises(EnvironmentMissing if explained else type(error)) as found,
        explain_lost_process(RunFolder(tmp_path)),
    ):
        raise error
    if explained:
        assert str(found.value) == (
            f"another process has died or cannot be reached: '{tmp_path}' keeps what was saved, go on with "
            f"--resume, with any number of processes ({str(error).splitlines()[0][:200]})"
        )
    else:
        assert found.value is error


def test_a_loader_that_was_killed_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentMissing, match=r"images was killed, perhaps for want of memory: .* with --resume"),
        explain_lost_process(RunFolder(tmp_path)),
    ):
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
