"""A run folder is opened only if it is one, and a checkpoint only whole."""

import shutil
from pathlib import Path

import pytest

from vitx.core.errors import InputError
from vitx.core.files import link_atomically, sha256_file, write_json
from vitx.core.preprocess import Preprocessing
from vitx.core.run import CheckpointState, ModelSpec, RunFolder, RunInfo, verify_digests, weights_file

INFO = RunInfo(
    name="run",
    recipe="tests",
    model=ModelSpec(name="tiny", num_classes=2),
    class_names=("a", "b"),
    preprocessing=Preprocessing(image_size=8),
    data="digits",
    seed=3,
)


def checkpoint(run: Path, epoch: int) -> CheckpointState:
    folder = run / "checkpoints" / f"epoch-{epoch:04d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"%d" % epoch)
    digests = {"model.safetensors": sha256_file(folder / "model.safetensors")}
    state = CheckpointState(epoch=epoch, step=10 * epoch, best_metric=0.5, best_epoch=1, sha256=digests)
    write_json(folder / "state.json", state)
    return state


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    write_json(tmp_path / "run.json", INFO)
    for link, epoch in (("best", 1), ("last", 2)):
        checkpoint(tmp_path, epoch)
        link_atomically(tmp_path / "checkpoints" / link, f"epoch-{epoch:04d}")
    return RunFolder.open(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        RunFolder.open(tmp_path / "none")
    assert str(caught.value) == f"no run at '{tmp_path}/none': expected a folder made by `vitx train`"
    with pytest.raises(InputError) as caught:
        RunFolder.open(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is not a run: it has no run.json"
    (tmp_path / "manifest.json").touch()
    with pytest.raises(InputError, match="is not a run: it is a bundle: give the run that it was exported from"):
        RunFolder.open(tmp_path)
    assert not RunFolder(tmp_path).exists()


def test_a_run_says_what_it_is(run: RunFolder) -> None:
    assert run.exists()
    assert run.info == INFO
    assert run.metrics_path == run.path / "metrics.jsonl"
    assert Path(run) == run.path


@pytest.mark.parametrize(
    ("data", "has_one", "own"), [("split.json", True, True), ("split.json", False, False), ("", True, False)]
)
def test_a_run_that_was_moved_has_its_own_split(run: RunFolder, data: str, has_one: bool, own: bool) -> None:
    written = str(run.path.with_name("before") / data)
    write_json(run.info_path, INFO.model_copy(update={"data": written}))
    if has_one:
        (run.path / "split.json").write_text("{}")
    assert run.info.data == (str(run.path / "split.json") if own else written)


def test_the_best_and_the_last_checkpoint_are_two(run: RunFolder) -> None:
    folder, state = run.checkpoint("last")
    assert (folder, state.epoch, state.step) == (run.path / "checkpoints" / "epoch-0002", 2, 20)
    assert run.checkpoint() == run.checkpoint("best")
    assert run.checkpoint("best")[1].epoch == 1


def test_the_link_is_followed_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that switches the link while it is read changes nothing of what is read."""

    def switch(path: Path) -> str:
        link_atomically(run.path / "checkpoints" / "best", "epoch-0002")
        return sha256_file(path)

    monkeypatch.setattr("vitx.core.run.sha256_file", switch)
    folder, state = run.checkpoint("best")
    assert (folder.name, state.epoch) == ("epoch-0001", 1)
    assert run.checkpoint("best")[1].epoch == 2


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_folder_that_a_training_removes_is_not_missed(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It switches the link to the new checkpoint, then removes the old one, whose files are being read."""

    def switch(path: Path) -> str:
        if "epoch-0001" in path.parts:
            link_atomically(run.path / "checkpoints" / "best", "epoch-0002")
            shutil.rmtree(path.parent)
            if moment == "before":
                raise InputError(f"{path} is missing")
        return sha256_file(path)

    monkeypatch.setattr("vitx.core.run.sha256_file", switch)
    folder, state = run.checkpoint("best")
    assert (folder.name, state.epoch) == ("epoch-0002", 2)


def test_a_checkpoint_that_is_not_there_or_not_whole_is_refused(run: RunFolder) -> None:
    tensors = run.path / "checkpoints" / "epoch-0001" / "model.safetensors"
    tensors.write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"model\.safetensors is corrupt"):
        run.checkpoint("best")
    tensors.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        run.checkpoint("best")
    (run.path / "checkpoints" / "best").unlink()
    with pytest.raises(InputError) as caught:
        run.checkpoint("best")
    assert str(caught.value) == f"run '{run.path}' has no 'best' checkpoint yet"
    assert run.checkpoint("last")[1].epoch == 2


def test_the_error_says_both_digests(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    verify_digests(tmp_path, {"a": empty, "b": empty})
    with pytest.raises(InputError, match="a is corrupt"):
        verify_digests(tmp_path, {"a": empty[:-1] + "4"})  # every digit counts
    with pytest.raises(InputError) as caught:
        verify_digests(tmp_path, {"a": empty, "b": "0" * 64})
    assert str(caught.value) == (
        f"{tmp_path}/b is corrupt: sha256 e3b0c44298fc1c14… but 0000000000000000… was recorded when it was written"
    )


def test_impossible_numbers_are_refused() -> None:
    for classes in (0, -1):
        with pytest.raises(ValueError, match="num_classes"):
            ModelSpec(name="tiny", num_classes=classes)
    for epoch, step in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="greater than or equal to 0"):
            CheckpointState(epoch=epoch, step=step, best_metric=0.0, best_epoch=0, sha256={})


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"nll": 0.25', '"nll": 1e999', "metrics: Value error, a number is infinite or NaN: expected finite ones"),
        ('"total": 0.5', '"total": -1e999', "metrics: Value error, a number is infinite or NaN: expected finite ones"),
        ('"best_metric": 0.5', '"best_metric": 1e999', "best_metric: Input should be a finite number"),
    ],
)
def test_a_state_with_an_infinite_number_is_refused(run: RunFolder, old: str, new: str, fault: str) -> None:
    folder, state = run.checkpoint("best")
    path = folder / "state.json"
    write_json(path, state.model_copy(update={"metrics": {"nll": 0.25, "losses": {"total": 0.5}}}))
    assert run.checkpoint("best")[1].metrics["nll"] == 0.25
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        run.checkpoint("best")
    assert str(caught.value) == f"{path} is not a valid CheckpointState: {fault}"


def test_as_many_class_names_as_classes() -> None:
    with pytest.raises(ValueError, match="3 class names of 2 classes"):
        RunInfo(**{**dict(INFO), "class_names": ("a", "b", "c")})


def test_weights_without_a_digest_are_refused(run: RunFolder) -> None:
    path = run.checkpoint("best")[0] / "state.json"
    write_json(path, run.checkpoint("best")[1].model_copy(update={"sha256": {}}))
    with pytest.raises(InputError, match=r"state\.json lists no sha256 of 'model\.safetensors'"):
        run.checkpoint("best")


def test_raw_names_the_trained_weights_of_the_same_checkpoint(run: RunFolder) -> None:
    folder, state = run.checkpoint("last-raw")
    assert (folder, state) == run.checkpoint("last")
    both = state.model_copy(update={"sha256": {"model.safetensors": "a", "ema.safetensors": "b"}})
    found = [weights_file(which, both) for which in ("best", "last", "best-raw", "last-raw")]
    assert found == ["ema.safetensors"] * 2 + ["model.safetensors"] * 2
    assert weights_file("best", state) == "model.safetensors", "a run that kept no average"
