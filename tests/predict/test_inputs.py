"""Every kind of input gives the rows of its images; all else in it is left out or becomes a row with an error."""

import errno
import importlib
import io
import os
import subprocess
import sys
import tarfile
import tracemalloc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from bundle_fixture import LABELS, NumpySession, colour_image, listed, png
from cli_fixture import Vitx
from faulty_disk import unlistable
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError, UInt8Array
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.inputs.inventory import read_item, read_shard
from vitx.predict.ledger import Ledger, Shard, image_shards, names_of
from vitx.predict.options import WHOLE, PredictOptions
from vitx.predict.outputs.parts import Part, PartWriter, rank

CHAOS = Path(__file__).parents[2] / "benchmarks" / "predict" / "chaos.py"
IMAGES = {f"{index:02d}.png": png(colour_image(index % 4, np.random.default_rng(index))) for index in range(12)}


def logits_of(name: str) -> Any:
    index = int(name[:2])
    return NumpySession().infer(colour_image(index % 4, np.random.default_rng(index))[None])[0]


EXPECTED = {name: LABELS[logits_of(name).argmax()] for name in IMAGES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    made.mkdir()
    for name, data in IMAGES.items():
        (made / name).write_bytes(data)
    return made


def run(bundle: Bundle, source: str | Path, out: Path, **options: Any) -> PredictionSummary:
    asked = PredictOptions(**{"batch_size": 4, "shard_size": 5} | options)
    return predict(bundle, NumpySession(), source, out, asked, quiet=True)


def rows(out: Path) -> dict[str, dict[str, Any]]:
    listed = pq.read_table(out / PREDICTIONS).to_pylist()
    found = {row["path"]: row for row in listed}
    assert len(found) == len(listed)
    return found


def classes(out: Path) -> dict[str, str]:
    """Class by file name, without the folder or container before it."""
    return {path.rpartition("/")[2]: row["class"] for path, row in rows(out).items()}


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]  # a mode by parameter
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_folder_is_cut_into_shards(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    summary = run(tiny_bundle, folder, tmp_path / "out")
    assert classes(tmp_path / "out") == EXPECTED
    assert list(rows(tmp_path / "out")) == sorted(IMAGES)
    assert (summary.images, summary.shards, summary.images_here) == (12, 3, 12)
    assert summary.binding in summary.stages


def test_pattern(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    run(tiny_bundle, folder / "0*.png", tmp_path / "out")
    assert classes(tmp_path / "out") == {name: label for name, label in EXPECTED.items() if name.startswith("0")}


def test_text_list_is_relative_to_itself_and_keeps_its_order(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    lines = ["images/03.png", str(folder / "01.png"), f"file://{folder / '02.png'}", "images/absent.png"]
    (tmp_path / "list.txt").write_text("\r\n".join(lines) + "\n\n")
    run(tiny_bundle, tmp_path / "list.txt", tmp_path / "out")
    found = rows(tmp_path / "out")
    assert list(found) == lines
    assert [found[line]["class"] for line in lines[:3]] == [EXPECTED[f"0{index}.png"] for index in (3, 1, 2)]
    assert found[lines[3]]["error"] == "cannot open the image: No such file or directory"


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_tar(tiny_bundle: Bundle, tmp_path: Path, name: str, mode: str) -> None:
    (tmp_path / "in").mkdir()
    members = {f"x/{name}": data for name, data in IMAGES.items()}
    write_tar(tmp_path / "in" / name, members | {"x/00.cls": b"3", "x/._00.png": b"macOS"}, mode)
    summary = run(tiny_bundle, tmp_path / "in", tmp_path / "out")
    assert rows(tmp_path / "out").keys() == {f"{name}/{member}" for member in members}
    assert classes(tmp_path / "out") == EXPECTED
    assert summary.shards == 1


def test_damaged_tar_gives_what_is_whole_and_a_row_for_the_rest(tiny_bundle: Bundle, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", IMAGES)
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 1024 * 3 + 600])
    (tmp_path / "b.tar").write_bytes(b"no tar file at all")
    summary = run(tiny_bundle, tmp_path / "*.tar", tmp_path / "out")
    found = {path.removeprefix(f"{tmp_path}/"): row for path, row in rows(tmp_path / "out").items()}
    assert found["a.tar/00.png"]["class"] == EXPECTED["00.png"]
    assert "cannot read the tar file to its end" in found["a.tar"]["error"]
    assert "cannot read the tar file to its end" in found["b.tar"]["error"]
    assert summary.errors == 2


@pytest.mark.parametrize("structs", [False, True])
def test_parquet(tiny_bundle: Bundle, tmp_path: Path, structs: bool) -> None:
    data: list[Any] = list(IMAGES.values())
    if structs:  # as the Hugging Face library writes images; the second image is a file beside the table
        (tmp_path / "01.png").write_bytes(data[1])
        data = [{"bytes": None if index == 1 else one, "path": "01.png"} for index, one in enumerate(data)]
    pq.write_table(pa.table({"label": [0] * 12, "image": data}), tmp_path / "a.parquet", row_group_size=5)
    (tmp_path / "b.parquet").write_bytes(b"no Parquet file")
    summary = run(tiny_bundle, tmp_path / "?.parquet", tmp_path / "out")
    found = {path.removeprefix(f"{tmp_path}/"): row for path, row in rows(tmp_path / "out").items()}
    assert [found[f"a.parquet/{row:07d}"]["class"] for row in range(12)] == list(EXPECTED.values())
    assert "cannot read the Parquet file beyond row 0" in found["b.parquet"]["error"]
    assert (summary.shards, summary.images, summary.errors) == (4, 13, 1)


def test_parquet_column_that_must_be_named(tiny_bundle: Bundle, tmp_path: Path) -> None:
    data = list(IMAGES.values())
    pq.write_table(pa.table({"left": data, "right": data[::-1]}), tmp_path / "a.parquet")
    expected = r"columns left, right, of which left, right may hold .* name it with --image-column"
    with pytest.raises(InputError, match=expected):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "other", image_column="right")
    assert list(classes(tmp_path / "other").values()) == list(EXPECTED.values())[::-1]


def test_object_store(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name, data in IMAGES.items():
        store.pipe(f"/{tmp_path.name}/sub/{name}", data)
    store.pipe(f"/{tmp_path.name}/.hidden/00.png", b"")
    url = f"memory://{tmp_path.name}"
    run(tiny_bundle, url, tmp_path / "folder")
    assert rows(tmp_path / "folder").keys() == {f"sub/{name}" for name in IMAGES}
    run(tiny_bundle, f"{url}/sub/0*.png", tmp_path / "pattern")
    assert len(classes(tmp_path / "pattern")) == 10
    write_tar(tmp_path / "a.tar", IMAGES)
    store.pipe(f"/{tmp_path.name}/tars/a.tar", (tmp_path / "a.tar").read_bytes())
    run(tiny_bundle, f"{url}/tars/a.tar", tmp_path / "tar")
    for out in ("folder", "tar"):
        assert classes(tmp_path / out) == EXPECTED


def test_store_that_fails_twice_and_store_that_fails_always(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    from vitx.predict.inputs import remote, stores

    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))
    MemoryFileSystem().pipe("/flaky/a.png", b"bytes")
    calls = []

    def flaky(self: Any, path: str, **_: Any) -> bytes:
        calls.append(path)
        if len(calls) < 3:
            raise RuntimeError("connection reset")
        return b"bytes"

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    assert stores.read_bytes("memory://flaky/a.png") == b"bytes"
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("reset")))
    with pytest.raises(ImageError, match="cannot read the object: RuntimeError: reset"):
        stores.read_bytes("memory://flaky/a.png")


def test_unknown_protocol_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot open 'nowhere://bucket': Protocol not known: nowhere"):
        run(tiny_bundle, "nowhere://bucket", tmp_path / "out")


def test_missing_fsspec_names_the_extra(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fsspec" else find(name))
    with pytest.raises(EnvironmentMissing, match=r"'fsspec', which is not installed: pip install 'vitx\[serve\]'"):
        run(tiny_bundle, "s3://bucket/images", tmp_path / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")
def test_odd_files_are_rows(tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "sub" / "shared").symlink_to(tmp_path / "beside")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "linked.png").write_bytes(IMAGES["00.png"])
    (folder / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "self.png").symlink_to("self.png")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "new\nline ü 名.png").write_bytes(IMAGES["01.png"])
    (folder / "closed.png").write_bytes(IMAGES["02.png"])
    (folder / "huge.png").touch()
    os.truncate(folder / "huge.png", 500_000_000)  # a hole: no bytes on the disk
    real_open = os.open

    def guarded(path: Any, *arguments: Any, **options: Any) -> int:  # the tests may run as root, who may read all
        if str(path).endswith("closed.png"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", guarded)
    summary = run(tiny_bundle, folder, tmp_path / "out")
    found = rows(tmp_path / "out")
    assert {path: row["error"] for path, row in found.items() if row["error"]} == {
        "sub/up/": "a link to one of its own parent folders: not followed",
        "gone.png": "cannot open the image: No such file or directory",
        "self.png": "cannot open the image: Too many levels of symbolic links",
        "pipe.jpg": "not a regular file",
        "closed.png": "cannot open the image: Permission denied",
        "huge.png": "500000000 bytes or more: more than the 400,000,000 that an image may have",
    }
    assert found["sub/shared/linked.png"]["class"] == EXPECTED["00.png"]
    assert found["new\nline ü 名.png"]["class"] == EXPECTED["01.png"]
    assert (summary.images, summary.errors) == (12 + 8, 6)


@pytest.mark.skipif(sys.platform != "linux", reason="another user's rights")
def test_folder_that_cannot_be_listed_is_a_row(folder: Path, tmp_path: Path) -> None:
    (folder / "locked").mkdir()
    with unlistable("locked", PermissionError(13, "Permission denied")):
        inventory = listed(str(folder), tmp_path / "list", 100)
        items = [read_item(item) for item in read_shard(inventory.shards[0], inventory.base, tmp_path / "list")]
    assert {item.key: str(item.source) for item in items if not isinstance(item.source, bytes)} == {
        "locked/": "cannot list the folder: Permission denied"
    }


def test_too_many_open_files_are_no_fault_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """Its images would be missing from an output that is finished."""
    (folder / "below").mkdir()
    full = OSError(errno.EMFILE, "Too many open files")
    with unlistable("below", full), pytest.raises(OSError, match="Too many open files"):
        listed(str(folder), tmp_path / "list", 100)


def test_memory_does_not_grow_with_the_number_of_paths(tmp_path: Path) -> None:
    """Of Python's; what SQLite keeps has a limit of its own."""

    def peak(count: int) -> int:
        tracemalloc.start()
        with closing(Ledger(tmp_path / str(count))) as ledger:
            ledger.find((f"{index * 7919 % count:09d}/image.jpg", None) for index in range(count))
            shards = image_shards(0, ledger.number(WHOLE)[0], 4096)
        read = sum(1 for shard in shards for _ in names_of(shard, tmp_path / str(count)))
        assert read == count
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    small, large = peak(20_000), peak(60_000)
    assert large < 1.1 * small


def test_ranking_is_the_sorted_softmax() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (50, 40)).astype(np.float32)  # many ties
    for top_k in (1, 5, 40, 100):
        indices, scores = rank(logits, top_k)
        for row in range(50):
            best = sorted(range(40), key=lambda index, row=row: (-logits[row, index], index))[:top_k]  # type: ignore[misc]
            assert indices[row].tolist() == best
            np.testing.assert_allclose(scores[row], np.exp(logits[row, best]) / np.exp(logits[row]).sum(), rtol=1e-5)


def test_second_run_verifies_and_redoes_only_what_is_wrong(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(tiny_bundle, folder, out)
    again = run(tiny_bundle, folder, out)
    assert again == first
    parts = sorted((out / PREDICTIONS).iterdir())
    before = [part.read_bytes() for part in parts]
    parts[0].unlink()
    parts[2].write_bytes(b"damaged")
    summary = run(tiny_bundle, folder, out)
    assert [part.read_bytes() for part in parts] == before
    assert (summary.images, summary.images_here) == (12, 7)


def test_work_stopped_by_an_error_goes_on(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    class Fails(NumpySession):
        calls = 0

        def _infer(self, images: UInt8Array) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise RuntimeError("the GPU is gone")
            return super()._infer(images)

    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        predict(tiny_bundle, Fails(), folder, out, PredictOptions(batch_size=2, shard_size=4), quiet=True)
    assert not (out / SUMMARY).exists()
    assert not list((out / PREDICTIONS).glob(".*"))
    summary = run(tiny_bundle, folder, out, batch_size=2, shard_size=4)
    assert classes(out) == EXPECTED
    assert summary.images == 12


def test_a_full_disk_is_an_error_after_which_the_run_goes_on(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that were finished before are not made again."""
    calls, finish, out = 0, PartWriter.finish, tmp_path / "out"

    def full(self: PartWriter, *given: Any) -> Part:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        return finish(self, *given)

    monkeypatch.setattr(PartWriter, "finish", full)
    message = (
        rf"^the disk of '{out}' is full \(.*No space left on device\): make room and run the same command again; "
        "finished shards are kept$"
    )
    with pytest.raises(EnvironmentMissing, match=message):
        run(tiny_bundle, folder, out)
    assert not list((out / PREDICTIONS).glob(".*"))
    assert not (out / SUMMARY).exists()
    done = sum(pq.read_metadata(path).num_rows for path in (out / PREDICTIONS).iterdir())
    assert done
    assert run(tiny_bundle, folder, out).images_here == len(EXPECTED) - done
    assert classes(out) == EXPECTED


def test_other_refusals(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.zip").touch()
    with pytest.raises(InputError, match=r"is not a known kind of input: expected a folder, an image, \.tar"):
        run(tiny_bundle, tmp_path / "a.zip", tmp_path / "out")
    with pytest.raises(InputError, match=r"names no image: looked for"):
        run(tiny_bundle, tmp_path / "*.nothing", tmp_path / "out")
    with pytest.raises(ValidationError, match="decode_threads\n  Input should be greater than or equal to 1"):
        run(tiny_bundle, folder, tmp_path / "out", decode_threads=0)
    assert not (tmp_path / "out").exists()
    assert list(read_shard(Shard("images", "", 0, 0), "", folder / "00.png")) == []


def test_command_on_a_list_with_logits(tiny_bundle: Bundle, folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    (tmp_path / "list.txt").write_text("".join(f"images/{name}\n" for name in IMAGES))
    options = ("--out", tmp_path / "out", "--device", "cpu", "--logits", "--shard-size", 3, "--decode-threads", 1)
    code, out, err = vitx("predict", tiny_bundle.path, tmp_path / "list.txt", *options, "--quiet")
    assert code == 0, err
    assert "bound by" in out
    assert classes(tmp_path / "out") == EXPECTED


@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, forkserver, tmpfs")
@pytest.mark.parametrize("slow", ["0", "0.3"])
def test_chaos(tmp_path: Path, slow: str) -> None:
    """It is killed, stopped, and runs out of disk if a tmpfs can be mounted: 1,200 images, each once."""
    command = [sys.executable, str(CHAOS), "--images", "1200", "--seeds", "0", "--slow", slow]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert '"killed"' in finished.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="flock")
def test_chaos_knows_a_worker_that_ends_from_one_that_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take the lock of one whose name is still in the file."""
    import fcntl

    monkeypatch.syspath_prepend(str(CHAOS.parent))
    chaos = importlib.import_module("chaos").Chaos
    run = chaos.__new__(chaos)
    run._out, run._worker = tmp_path, SimpleNamespace(pid=os.getpid())
    assert not run._holds()
    (tmp_path / ".vitx").mkdir()
    path = tmp_path / ".vitx" / "lock"
    path.write_text(f"process {os.getpid()} on a machine")
    assert not run._holds()
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run._holds()
