"""`--out` at the URL of an object store: it shows whole files of one run, all of them when the summary is there."""

import io
import itertools
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bundle_fixture import NumpySession, colour_image, png
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.inputs import remote
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import part_path

STORE = fsspec.filesystem("memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images in three shards."""
    (tmp_path / "in").mkdir()
    for index in range(10):
        image = png(colour_image(index % 4, np.random.default_rng(index)))
        (tmp_path / "in" / f"{index:02d}.png").write_bytes(image)
    return tmp_path / "in"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


class Stopped(NumpySession):
    """Stopped at the second batch, or later."""

    def __init__(self, batches: int = 1) -> None:
        super().__init__()
        self.batches = batches

    def _infer(self, images: Any) -> Any:
        self.batches -= 1
        if self.batches < 0:
            raise KeyboardInterrupt
        return super()._infer(images)


def run(
    bundle: Bundle, source: Path, url: str, state: Path | None, session: NumpySession | None = None, **options: Any
) -> PredictionSummary:
    given = PredictOptions(**{"shard_size": 4, "decode_threads": 1, "state": state} | options)
    return predict(bundle, session or NumpySession(), source, url, given, quiet=True)


def objects(url: str) -> dict[str, bytes]:
    root = url.removeprefix("memory:/")
    return {name.removeprefix(f"{root}/"): STORE.cat_file(name) for name in STORE.find(root)}


def names(*parts: int, summary: bool = True) -> set[str]:
    found = {f"{PREDICTIONS}/part-{number:08d}.parquet" for number in parts}
    return found | {".vitx.json"} | ({SUMMARY} if summary else set())


def keys(url: str) -> list[str]:
    found = [data for name, data in sorted(objects(url).items()) if name.endswith(".parquet")]
    return [key for data in found for key in pq.read_table(io.BytesIO(data))["path"].to_pylist()]


def test_the_store_has_what_the_folder_has(tiny_bundle: Bundle, folder: Path, url: str, state: Path) -> None:
    summary = run(tiny_bundle, folder, url, state)
    found = objects(url)
    assert set(found) == names(1, 2, 3)
    for name in found.keys() - {".vitx.json"}:
        assert found[name] == (state / name).read_bytes()
    assert json.loads(found[SUMMARY]) == summary.model_dump(mode="json")
    assert keys(url) == [f"{index:02d}.png" for index in range(10)]
    mark = json.loads(found[".vitx.json"])
    assert (mark["state"], mark["host"]) == (str(state), socket.gethostname())


@pytest.mark.parametrize("taken", [b"", b"{}"], ids=["by us", "by another"])
def test_a_run_begins_where_its_mark_was_taken_and_the_answer_lost(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, monkeypatch: pytest.MonkeyPatch, taken: bytes
) -> None:
    """The next attempt finds it there."""
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))
    put, lost = MemoryFileSystem.pipe_file, [True]

    def lose(self: Any, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        put(self, path, taken or value if lost else value, mode, **more)
        if lost:
            lost.pop()
            raise ConnectionResetError

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lose)
    if taken:
        with pytest.raises(EnvironmentMissing, match=r"FileExistsError.*run the same command again$"):
            run(tiny_bundle, folder, url, state)
    else:
        run(tiny_bundle, folder, url, state)
        assert set(objects(url)) == names(1, 2, 3)


def test_parts_are_put_once_and_the_summary_last(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    put = MemoryFileSystem.put_file

    def noted(self: Any, path: str, name: str, **more: Any) -> None:
        order.append(name.rpartition("/")[2])
        put(self, path, name, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noted)
    summary = run(tiny_bundle, folder, url, state)
    assert order == [*(f"part-{number:08d}.parquet" for number in (1, 2, 3)), SUMMARY]
    found = objects(url)
    order.clear()
    assert run(tiny_bundle, folder, f"{url}/", state) == summary
    assert order == [SUMMARY]
    assert objects(url) == found


def test_a_run_that_was_stopped_goes_on(tiny_bundle: Bundle, folder: Path, url: str, state: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, url, state, Stopped())
    assert set(objects(url)) <= names(1, 2, summary=False)
    assert run(tiny_bundle, folder, url, state).images == 10
    assert keys(url) == [f"{index:02d}.png" for index in range(10)]


@pytest.mark.parametrize("damage", ["removed", "shorter", "summary"])
def test_what_is_missing_in_the_store_is_put_again(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that has listed the store before: fsspec's stores keep their listings."""
    listings: dict[str, Any] = {}
    listed = MemoryFileSystem.ls
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: listings.clear())

    def kept(self: Any, path: str, **more: Any) -> Any:
        if path not in listings:
            listings[path] = listed(self, path, **more)
        return listings[path]

    run(tiny_bundle, folder, url, state)
    monkeypatch.setattr(MemoryFileSystem, "ls", kept)
    run(tiny_bundle, folder, url, state)
    before = objects(url)
    name = SUMMARY if damage == "summary" else f"{PREDICTIONS}/part-00000002.parquet"
    if damage == "shorter":
        STORE.pipe_file(f"{url}/{name}", b"PAR1")
    else:
        STORE.rm_file(f"{url}/{name}")
    assert run(tiny_bundle, folder, url, state).images == 10
    assert objects(url) == before


def test_a_part_that_is_made_again_is_put_again_and_the_old_summary_goes_first(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path
) -> None:
    (folder / "05.png").write_bytes(b"")
    run(tiny_bundle, folder, url, state)
    (folder / "05.png").write_bytes((folder / "06.png").read_bytes())
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, url, state, Stopped(0), retry_errors=True)
    assert set(objects(url)) == names(1, 2, 3, summary=False)
    assert run(tiny_bundle, folder, url, state).errors == 0
    assert all(
        objects(url)[f"{PREDICTIONS}/{path.name}"] == path.read_bytes() for path in (state / PREDICTIONS).iterdir()
    )
    assert set(objects(url)) == names(1, 2, 3)


def test_increments_reach_the_store(tiny_bundle: Bundle, folder: Path, url: str, state: Path) -> None:
    run(tiny_bundle, folder, url, state, incremental=True)
    before = objects(url)
    (folder / "10.png").write_bytes((folder / "06.png").read_bytes())
    (folder / "00.png").unlink()
    summary = run(tiny_bundle, folder, url, state, incremental=True)
    assert summary.increment is not None
    assert (summary.increment.new, summary.increment.gone) == (1, 1)
    found = objects(url)
    assert set(found) == names(1, 2, 3, 4)
    assert found.items() >= {name: data for name, data in before.items() if name not in (SUMMARY, ".vitx.json")}.items()
    assert keys(url) == [f"{index:02d}.png" for index in range(11)]
    again = run(tiny_bundle, folder, url, state, incremental=True)
    assert json.loads(objects(url)[SUMMARY]) == again.model_dump(mode="json")


def test_predictions_of_another_run_are_refused_and_overwritten_on_request(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, tmp_path: Path
) -> None:
    """Its ledger is elsewhere: this one would not know which of the parts are of what."""
    run(tiny_bundle, folder, url, state, shard_size=2)
    message = (
        rf"^'{url}' holds predictions of another run \(its ledger is in {state} of {socket.gethostname()}\): name that "
        "folder with --state, choose another URL, or pass --overwrite$"
    )
    with pytest.raises(InputError, match=message):
        run(tiny_bundle, folder, url, tmp_path / "other")
    assert set(objects(url)) == names(1, 2, 3, 4, 5)
    run(tiny_bundle, folder, url, tmp_path / "other", overwrite=True)
    assert set(objects(url)) == names(1, 2, 3)
    STORE.rm_file(f"{url}/.vitx.json")
    STORE.pipe_file(f"{url}/{PREDICTIONS}/other.parquet", b"")
    for number in (1, 2, 3):
        with pytest.raises(InputError, match=r"of another run \(nothing tells which\)"):
            run(tiny_bundle, folder, url, tmp_path / "third")
        STORE.rm_file(f"{url}/{PREDICTIONS}/part-{number:08d}.parquet")
    with pytest.raises(InputError, match=r"of another run \(nothing tells which\)"):
        run(tiny_bundle, folder, url, tmp_path / "third")
    for damage in (b"", b"3", b'{"run": 1}'):
        STORE.pipe_file(f"{url}/.vitx.json", damage)
        with pytest.raises(InputError, match=rf"^'{url}/\.vitx\.json', which says whose .* is damaged: choose another"):
            run(tiny_bundle, folder, url, tmp_path / "third")


@pytest.mark.parametrize("az", [False, True], ids=["mode", "overwrite"])
def test_of_two_runs_that_begin_at_once_one_is_refused(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, az: bool
) -> None:
    """The second looks before the first has put anything. az: adlfs has another option for it."""
    run(tiny_bundle, folder, url, state)
    before, pipe = objects(url), MemoryFileSystem.pipe_file

    def as_adlfs(self: Any, path: str, value: bytes, overwrite: bool = True, **_: Any) -> None:
        pipe(self, path, value, "overwrite" if overwrite else "create")

    def nothing(self: Any, path: str, **_: Any) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(remote, "REMOTE_WAITS", ())
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", nothing)
        patch.setattr(MemoryFileSystem, "cat_file", nothing)
        if az:
            patch.setattr(MemoryFileSystem, "pipe_file", as_adlfs)
        with pytest.raises(EnvironmentMissing, match=rf"^cannot write to '{url}': .*FileExistsError"):
            run(tiny_bundle, folder, url, tmp_path / "other", shard_size=2)
    assert objects(url) == before
    with pytest.raises(InputError, match="holds predictions of another run"):
        run(tiny_bundle, folder, url, tmp_path / "other", shard_size=2)


@pytest.mark.parametrize("at", [0, 2], ids=["before a part", "before the summary"])
def test_a_run_that_is_overwritten_from_another_machine_while_it_works_ends(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Both ended with exit code 0, and the store had rows of both."""
    few, put, puts = tmp_path / "few", MemoryFileSystem.put_file, itertools.count()
    few.mkdir()
    (few / "a.png").write_bytes((folder / "00.png").read_bytes())

    def overwritten_behind(self: Any, path: str, name: str, **more: Any) -> None:
        put(self, path, name, **more)
        if next(puts) == at:
            run(tiny_bundle, few, url, tmp_path / "other", overwrite=True)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", overwritten_behind)
        with pytest.raises(InputError, match=rf"^another run has overwritten what this one put into '{url}'"):
            run(tiny_bundle, folder, url, state)
    assert keys(url) == ["a.png"]
    assert set(objects(url)) == names(1)
    with pytest.raises(InputError, match="holds predictions of another run"):
        run(tiny_bundle, folder, url, state)


def test_a_part_that_another_run_puts_late_is_no_part_of_the_result(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path
) -> None:
    """It was begun before the other was overwritten, and there when this one had looked."""
    run(tiny_bundle, folder, url, state)
    (state / SUMMARY).unlink()
    STORE.rm_file(f"{url}/{SUMMARY}")
    STORE.cp_file(f"{url}/{PREDICTIONS}/part-00000003.parquet", f"{url}/{PREDICTIONS}/part-00000007.parquet")
    with pytest.raises(InputError, match=r"holds part-00000007.parquet, which is not of this run"):
        run(tiny_bundle, folder, url, state)
    assert SUMMARY not in objects(url)
    STORE.rm_file(f"{url}/{PREDICTIONS}/part-00000007.parquet")
    run(tiny_bundle, folder, url, state)
    assert set(objects(url)) == names(1, 2, 3)


def test_jobs_share_a_store(tiny_bundle: Bundle, folder: Path, url: str, tmp_path: Path) -> None:
    """Each with a ledger of its own, on a machine of its own."""
    for number in (2, 1, 3):
        run(tiny_bundle, folder, url, tmp_path / f"state-{number}", shard=(number, 3), shard_size=2)
    assert sorted(keys(url)) == [f"{index:02d}.png" for index in range(10)]
    assert {name for name in objects(url) if "parquet" not in name} == {
        f"{name}-{number:05d}-of-00003.json" for number in (1, 2, 3) for name in ("summary", ".vitx")
    }
    assert run(tiny_bundle, folder, url, tmp_path / "state-2", shard=(2, 3), shard_size=2).images == 3
    with pytest.raises(InputError, match=r"state-2 of .*, choose another URL, or remove them$"):
        run(tiny_bundle, folder, url, tmp_path / "lost", shard=(2, 3), shard_size=2)


def test_the_state_has_a_place_of_its_own_by_default(
    tiny_bundle: Bundle, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "cache"))
    run(tiny_bundle, folder, url, None)
    run(tiny_bundle, folder, f"{url}-2", None)
    found = list((tmp_path / "cache" / "predict").iterdir())
    assert len(found) == 2
    assert all(part_path(path, 3).is_file() for path in found)
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"Not a directory; name one that can be written with --state, or by VITX_C"):
        run(tiny_bundle, folder, url, None)


def test_a_state_may_have_a_colon(
    tiny_bundle: Bundle, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow takes a relative path with one for a URL."""
    monkeypatch.chdir(tmp_path)
    run(tiny_bundle, folder, url, Path("night:1"))
    assert part_path(tmp_path / "night:1", 3).is_file()


class Broken(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that cannot be written, at times."""

    protocol = "memory"
    fails = 0
    error: Exception = RuntimeError("SlowDown: reduce your request rate")

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        if Broken.fails:
            Broken.fails -= 1
            raise Broken.error
        super().put_file(lpath, rpath, **more)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Broken]:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))
    monkeypatch.setattr(
        "vitx.predict.outputs.mirror.remote_filesystem", lambda url: (Broken(), url.removeprefix("memory:/"))
    )
    monkeypatch.setattr(Broken, "fails", 0)
    return Broken


def test_a_store_that_fails_at_times_is_asked_again(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, broken: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, "fails", 2)
    assert run(tiny_bundle, folder, url, state).images == 10
    assert set(objects(url)) == names(1, 2, 3)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("SlowDown"), "it gives no answer: RuntimeError: SlowDown"),
        (FileNotFoundError(2, "The specified bucket does not exist"), "The specified bucket does not exist"),
        (PermissionError("Access Denied"), "Access Denied"),
    ],
)
def test_a_store_that_fails_is_one_error_and_the_run_goes_on_later(
    tiny_bundle: Bundle,
    folder: Path,
    url: str,
    state: Path,
    broken: type[Broken],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    text: str,
) -> None:
    monkeypatch.setattr(broken, "fails", 1000)
    monkeypatch.setattr(broken, "error", error)
    message = rf"^cannot write to '{url}': .*{text}\. Finished shards are kept: run the same command again$"
    with pytest.raises(EnvironmentMissing, match=message):
        run(tiny_bundle, folder, url, state)
    assert SUMMARY not in objects(url)
    monkeypatch.setattr(broken, "fails", 0)
    assert run(tiny_bundle, folder, url, state).images == 10
    assert set(objects(url)) == names(1, 2, 3)


@pytest.mark.parametrize("stop", ["before", "after"])
def test_a_kill_at_a_put_leaves_whole_parts_that_the_next_run_knows(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """Of the second part: before the store has it, or after, when the ledger does not know it yet."""
    put = MemoryFileSystem.put_file

    def killed(self: Any, path: str, name: str, **more: Any) -> None:
        if not name.endswith("part-00000002.parquet"):
            put(self, path, name, **more)
            return
        if stop == "after":
            put(self, path, name, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFileSystem, "put_file", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, url, state)
    monkeypatch.undo()
    assert set(objects(url)) == names(*((1, 2) if stop == "after" else (1,)), summary=False)
    assert [path.name for path in (state / PREDICTIONS).iterdir()] == ["part-00000001.parquet"]
    assert run(tiny_bundle, folder, url, state).images_here == 6
    assert keys(url) == [f"{index:02d}.png" for index in range(10)]
    for name in names(1, 2, 3) - {".vitx.json"}:
        assert objects(url)[name] == (state / name).read_bytes()


def test_an_interrupt_waits_for_no_store(
    tiny_bundle: Bundle, folder: Path, url: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalled(*_: Any, **__: Any) -> None:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.0, signal.pthread_kill, [main, signal.SIGINT]).start()
        assert threading.Event().wait(30), "not interrupted"

    monkeypatch.setattr(MemoryFileSystem, "put_file", stalled)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_bundle, folder, url, state)
    assert not list((state / PREDICTIONS).iterdir())


@pytest.mark.parametrize("given", ["http://x/y", "file:///tmp/x", "sftp://host/x", "foo://x"])
def test_what_is_no_object_store_is_refused(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path, vitx: Vitx, given: str
) -> None:
    code, _, err = vitx("predict", tiny_bundle.path, folder, "--out", given, "--state", tmp_path / "state")
    assert (code, err.count("error: ")) == (2, 1)
    assert f"--out '{given}': expected a folder of this machine or the URL of an object store (s3, s3a, gs, " in err
    assert not (tmp_path / "state").exists()


def test_a_state_is_of_a_url_and_a_url_is_a_text(tiny_bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--state .* is for a URL: '.*out' has its ledger within$"):
        run(tiny_bundle, folder, str(tmp_path / "out"), tmp_path / "state")
    with pytest.raises(InputError, match=r"^'s3://bucket/state' is a URL: expected a path of this machine"):
        run(tiny_bundle, folder, "memory://out", Path("s3://bucket/state"))
    with pytest.raises(InputError, match="in Python a URL is a text, not a Path"):
        predict(tiny_bundle, NumpySession(), folder, Path("s3://bucket/x"), quiet=True)


def test_the_command_names_the_url(tiny_bundle: Bundle, folder: Path, url: str, state: Path, vitx: Vitx) -> None:
    code, out, _ = vitx("predict", tiny_bundle.path, folder, "--out", url, "--state", state, "--device", "cpu")
    assert (code, f"{url}/{PREDICTIONS}" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "added", "named"),
    [
        ({"top_k": 3, "logits": True}, False, "another logits, top_k"),
        ({}, True, "another digest"),
        ({"shard": (2, 3)}, False, "another number of jobs"),
    ],
)
def test_jobs_of_machines_that_share_nothing_but_the_store_agree(
    tiny_bundle: Bundle, folder: Path, url: str, tmp_path: Path, options: dict[str, Any], added: bool, named: str
) -> None:
    """Each has a folder of its own for its state: images were left out or twice, with exit code 0."""
    run(tiny_bundle, folder, url, tmp_path / "a", shard=(1, 2))
    before = objects(url)
    if added:
        (folder / "00a.png").write_bytes((folder / "06.png").read_bytes())
    with pytest.raises(InputError, match=rf"of {named} \(\.vitx-00001-of-00002\.json, of {socket.gethostname()}\)"):
        run(tiny_bundle, folder, url, tmp_path / "b", **{"shard": (2, 2)} | options)
    assert objects(url) == before
    (folder / "00a.png").unlink(missing_ok=True)
    run(tiny_bundle, folder, url, tmp_path / "c", shard=(2, 2))
    assert len(keys(url)) == 10


def test_overwriting_removes_the_records_of_all_jobs(
    tiny_bundle: Bundle, folder: Path, url: str, tmp_path: Path
) -> None:
    for number in (1, 2):
        run(tiny_bundle, folder, url, tmp_path / str(number), shard=(number, 2))
    run(tiny_bundle, folder, url, tmp_path / "whole", overwrite=True, top_k=1)
    assert [name for name in objects(url) if "-of-" in name] == []
    with pytest.raises(InputError, match="holds predictions of another run"):
        run(tiny_bundle, folder, url, tmp_path / "1", shard=(1, 2))
    assert len(keys(url)) == 10
