"""What a run keeps: who creates it, who may go on with it, and what is removed when that fails."""

import errno
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.predict import PREDICTIONS, SUMMARY
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.ledger import COPY, Ledger, Shard, names_of
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.pipeline.lock import LOCK
from vitx.predict.state import AGREEMENT, LEDGER, NEW_LEDGER, STATE, Run, open_ledger, open_run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("b.png", "a.png", "c.png"):
        (folder / name).touch()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out" / STATE).mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture
def ledger(out: Path) -> Iterator[Ledger]:
    with closing(Ledger(out / STATE / LEDGER)) as opened:
        yield opened


def settings_of(images: Path, **changes: Any) -> dict[str, Any]:
    return {"input": str(images), "shard_size": 2, "top_k": 5} | changes


def opened_run(ledger: Ledger, out: Path, settings: dict[str, Any], measure: Any = None) -> Run:
    def take(share: Share | None) -> Inventory:
        return take_inventory(settings["input"], ledger, settings["shard_size"], share=share)

    given = {} if measure is None else {"measure": measure}
    return open_run(ledger, out, settings, take, **given)


def names(ledger: Ledger) -> list[str]:
    return list(names_of(Shard("images", "", 0, 9), ledger.path))


def test_the_first_call_creates_the_run_and_the_others_go_on_with_it(ledger: Ledger, out: Path, images: Path) -> None:
    measured: list[tuple[Inventory, list[str]]] = []

    def measure(inventory: Inventory) -> dict[str, Any]:
        measured.append((inventory, names(ledger)))
        return {"draft": {"flips": 1}}

    first = opened_run(ledger, out, settings_of(images), measure)
    assert (first.base, ledger.description()["measured"]) == (str(images), {"draft": {"flips": 1}})
    assert names(ledger) == ["a.png", "b.png", "c.png"]
    assert [(part.start, part.count) for part in measured[0][0].shards] == [(0, 2), (2, 1)]
    assert measured[0][1] == names(ledger)
    assert (out / PREDICTIONS).is_dir()
    assert first.created
    assert opened_run(ledger, out, settings_of(images), measure) == first._replace(created=False)
    assert len(measured) == 1


@pytest.mark.parametrize(("name", "value"), [("input", "/elsewhere"), ("shard_size", 3), ("top_k", 1), ("new", True)])
def test_a_run_of_other_settings_is_refused(ledger: Ledger, out: Path, images: Path, name: str, value: object) -> None:
    settings = settings_of(images)
    opened_run(ledger, out, settings)
    expected = (
        f"another run: {name} was {settings.get(name, False)}, is {value} now; choose another folder, or pass --o"
    )
    with pytest.raises(InputError, match=expected):
        opened_run(ledger, out, settings | {name: value})


def test_an_option_that_is_newer_than_the_run_was_off(ledger: Ledger, out: Path, images: Path) -> None:
    first = opened_run(ledger, out, settings_of(images))
    assert opened_run(ledger, out, settings_of(images) | {"new": False}) == first._replace(created=False)


def test_a_measurement_that_fails_leaves_no_run(ledger: Ledger, out: Path, images: Path) -> None:
    def measure(inventory: Inventory) -> dict[str, Any]:
        raise ValueError("classes change")

    with pytest.raises(ValueError, match="classes change"):
        opened_run(ledger, out, settings_of(images), measure)
    assert ledger.description() == {}
    assert not (out / PREDICTIONS).exists()
    (images / "d.png").touch()  # what was listed before counts no longer
    opened_run(ledger, out, settings_of(images))
    assert names(ledger) == ["a.png", "b.png", "c.png", "d.png"]


def test_the_description_of_a_run_is_its_settings_list_and_measurement(ledger: Ledger, out: Path, images: Path) -> None:
    run = opened_run(ledger, out, settings_of(images))
    beside: dict[str, Any] = {"source": "folder", "skipped": {"by_suffix": {}, "first": []}, "schema": None}
    beside |= {"digest": run.digest, "id": run.id, "measured": {}, "unread": []}
    assert ledger.description() == settings_of(images) | beside


def opened(out: Path, **options: Any) -> Any:
    return open_ledger(out, PredictOptions(**options))


def overwrite(out: Path, images: Path) -> None:
    with opened(out, overwrite=True) as ledger:
        opened_run(ledger, out, settings_of(images))


def test_a_ledger_is_closed_at_the_end(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as ledger:
        assert (tmp_path / "out" / STATE / LEDGER).is_file()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        ledger.totals()
    assert (tmp_path / "out" / STATE / LEDGER).is_file()


@pytest.mark.parametrize("made", ["", "out", f"out/{STATE}", f"out/{PREDICTIONS}", "out/notes.txt"])
def test_a_failure_removes_only_what_was_made_for_it(tmp_path: Path, made: str) -> None:
    """made: what was there before."""
    out = tmp_path / "out"
    if made:
        (tmp_path / made).mkdir(parents=True)
    before = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="later"), opened(out):
        raise ValueError("later")
    after = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    if made == f"out/{STATE}":
        before |= {f"out/{STATE}/{LEDGER}", f"out/{STATE}/{LOCK}"}
    assert after == before


def test_predictions_without_their_ledger_are_refused_and_overwritten_on_request(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    (out / PREDICTIONS).mkdir(parents=True)
    (out / PREDICTIONS / "part").touch()
    (out / SUMMARY).touch()
    with pytest.raises(InputError, match=rf"^'{out}' holds predictions\.parquet of another run: choose .*--overwrite$"):
        opened(out).__enter__()
    overwrite(out, images)
    assert sorted(path.name for path in out.iterdir()) == [STATE, PREDICTIONS]
    assert list((out / PREDICTIONS).iterdir()) == []


def test_a_file_in_the_place_of_the_predictions_is_refused_and_overwritten(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / PREDICTIONS).write_bytes(b"one file, as other tools write")
    with pytest.raises(InputError, match="of another run"):
        opened(out).__enter__()
    overwrite(out, images)
    assert (out / PREDICTIONS).is_dir()


def test_an_empty_folder_of_predictions_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS).mkdir()
    with opened(tmp_path) as ledger:
        assert ledger.totals().shards == 0


def test_what_is_there_stays_until_the_new_run_is_created(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as ledger:
        opened_run(ledger, out, settings_of(images))
    (out / SUMMARY).touch()
    (out / STATE / f"{NEW_LEDGER}-wal").touch()  # of a process that was killed
    (images / "d.png").touch()

    def refuse(inventory: Inventory) -> dict[str, Any]:
        assert [len(inventory.shards), (out / SUMMARY).exists()] == [2, True]
        raise ValueError("classes change")

    with pytest.raises(ValueError, match="classes change"), opened(out, overwrite=True) as ledger:
        opened_run(ledger, out, settings_of(images, top_k=1), refuse)
    assert sorted(path.name for path in (out / STATE).iterdir()) == [LEDGER, LOCK]
    assert (out / SUMMARY).exists()
    with opened(out) as ledger:
        assert names(ledger) == ["a.png", "b.png", "c.png"]
        assert not opened_run(ledger, out, settings_of(images)).created
    with opened(out, overwrite=True) as ledger:
        assert opened_run(ledger, out, settings_of(images, top_k=1)).created
        assert names(ledger) == ["a.png", "b.png", "c.png", "d.png"]
        assert [ledger.path, (out / SUMMARY).exists()] == [out / STATE / LEDGER, False]
    with opened(out) as ledger:
        assert not opened_run(ledger, out, settings_of(images, top_k=1)).created


def test_a_job_that_begins_while_the_input_is_listed_is_not_removed(tmp_path: Path, images: Path) -> None:
    (tmp_path / STATE / "shard-00001-of-00002").mkdir(parents=True)
    (tmp_path / SUMMARY).touch()
    with opened(tmp_path, overwrite=True) as ledger, opened(tmp_path, shard=Share(1, 2)):
        with pytest.raises(InputError, match="is writing to"):
            opened_run(ledger, tmp_path, settings_of(images))
        assert (tmp_path / SUMMARY).exists()


def test_overwriting_removes_the_summary_before_the_rest(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between must not leave it beside the predictions of another run."""
    (tmp_path / SUMMARY).touch()
    (tmp_path / STATE / "shard-1").mkdir(parents=True)
    removed: list[str] = []

    def fail(path: Path) -> None:
        removed.append(path.name)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("vitx.predict.state.shutil.rmtree", fail)
    with pytest.raises(InputError, match=r"cannot write to the folder '.*': Permission denied$"):
        overwrite(tmp_path, images)
    assert removed == ["shard-1"]
    assert not (tmp_path / SUMMARY).exists()


def test_overwriting_leaves_what_is_not_of_a_prediction(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    for name in (f"{STATE}/images-1", f"{PREDICTIONS}/part", SUMMARY, "notes.txt", "more/notes.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    overwrite(out, images)
    there = {path.relative_to(out).as_posix() for path in out.rglob("*") if STATE not in path.parts}
    assert there == {PREDICTIONS, "notes.txt", "more", "more/notes.txt"}
    assert not (out / STATE / "images-1").exists()


def job(
    out: Path, images: Path, share: Share, *, overwrite: bool = False, **changes: Any
) -> tuple[list[int], list[str]]:
    """One job of several: the numbers of its shards, and its names."""
    with opened(out, shard=None if share == WHOLE else share, overwrite=overwrite) as ledger:
        opened_run(ledger, out, settings_of(images, **changes))
        return [claim.id for claim in ledger.unfinished()], names(ledger)


def test_each_job_has_a_folder_and_a_list_and_all_have_one_agreement(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    assert job(out, images, Share(1, 2)) == ([1], ["a.png", "c.png"])
    assert (out / STATE / "shard-00001-of-00002" / LEDGER).is_file()
    agreed = json.loads((out / STATE / AGREEMENT).read_text())
    digest = agreed.pop("listing")
    assert len(digest) == 64
    assert agreed == settings_of(images, shards=2)
    assert job(out, images, Share(2, 2)) == ([2], ["b.png"])
    assert json.loads((out / STATE / AGREEMENT).read_text()) == agreed | {"listing": digest}
    assert job(out, images, Share(2, 2)) == ([2], ["b.png"])


@pytest.mark.parametrize(
    ("share", "changes", "expected"),
    [
        (Share(2, 3), {}, "another run: shards was 2, is 3 now; choose another folder, or remove that one"),
        (Share(2, 2), {"top_k": 1}, "another run: top_k was 5, is 1 now"),
        (Share(1, 2), {"top_k": 1}, "another run: top_k was 5, is 1 now"),
    ],
)
def test_a_job_with_other_settings_is_refused_before_it_lists_anything(
    tmp_path: Path, images: Path, share: Share, changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    monkeypatch.setattr(f"{__name__}.take_inventory", lambda *_, **__: pytest.fail("listed"))
    with pytest.raises(InputError, match=expected):
        job(out, images, share, **changes)
    assert [path.name for path in (out / STATE).iterdir() if path.is_dir()] == ["shard-00001-of-00002"]
    assert (out / PREDICTIONS).is_dir()


def test_a_job_that_finds_another_input_is_refused(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    (images / "d.png").touch()
    expected = rf"^images were added to '{images}' or removed since the first job listed it: the jobs would leave some"
    with pytest.raises(InputError, match=expected):
        job(out, images, Share(2, 2))
    assert not (out / STATE / "shard-00002-of-00002").exists()


def test_runs_with_and_without_shards_do_not_mix(tmp_path: Path, images: Path, ledger: Ledger, out: Path) -> None:
    job(tmp_path / "cut", images, Share(1, 2))
    with pytest.raises(InputError, match=rf"^'{tmp_path}/cut' holds predictions of a run with --shard: choose another"):
        opened(tmp_path / "cut").__enter__()
    with pytest.raises(InputError, match=r"or continue it with --shard$"):
        opened(tmp_path / "cut").__enter__()
    with pytest.raises(InputError, match=r"holds predictions of a run without --shard: .*, or continue it without$"):
        opened(out, shard=Share(1, 2)).__enter__()
    with pytest.raises(InputError, match=r"^--overwrite with --shard would remove what the other jobs did: remove the"):
        opened(tmp_path / "cut", shard=Share(1, 2), overwrite=True).__enter__()
    overwrite(tmp_path / "cut", images)
    assert sorted(path.name for path in (tmp_path / "cut" / STATE).iterdir()) == [LEDGER, LOCK]


def test_overwriting_removes_the_summaries_of_jobs(out: Path, images: Path) -> None:
    for name in ("summary-00001-of-00002.json", SUMMARY, "summary-of-mine.txt"):
        (out / name).touch()
    overwrite(out, images)
    assert sorted(path.name for path in out.iterdir()) == [STATE, PREDICTIONS, "summary-of-mine.txt"]


def test_a_job_that_fails_removes_its_own_folder_alone(tmp_path: Path, images: Path) -> None:
    """Predictions are there, those of the other job."""
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    with pytest.raises(ValueError, match="later"), opened(out, shard=Share(2, 2)):
        raise ValueError("later")
    assert sorted(path.name for path in (out / STATE).iterdir()) == ["shard-00001-of-00002", AGREEMENT]


def test_a_run_outlives_a_failure(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"

    def fail(ledger: Ledger) -> None:
        opened_run(ledger, out, settings_of(images))
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"), opened(out) as ledger:
        fail(ledger)
    assert (out / STATE / LEDGER).exists()


def test_a_copy_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    (tmp_path / STATE / f"{COPY}1").touch()
    with opened(tmp_path):
        assert not (tmp_path / STATE / f"{COPY}1").exists()


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=rf"^cannot write to the folder '{tmp_path}/file/out': Not a directory$"):
        opened(tmp_path / "file" / "out").__enter__()


@pytest.mark.parametrize("damage", [b"", b"{", b"1", b"\xff", b"[1]"])
def test_an_agreement_that_cannot_be_read_is_refused(tmp_path: Path, images: Path, damage: bytes) -> None:
    job(tmp_path, images, Share(1, 2))
    (tmp_path / STATE / AGREEMENT).write_bytes(damage)
    with pytest.raises(
        InputError, match=rf"^'{tmp_path}/\.vitx/shards\.json', in which the jobs agree, is damaged: ch"
    ):
        job(tmp_path, images, Share(2, 2))


def test_a_job_needs_hard_links_and_room(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EPERM, "Operation not permitted")]

    def fail(path: Path, data: bytes) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("vitx.predict.state.write_bytes_once", fail)
    with pytest.raises(OSError, match="No space left"):
        job(tmp_path / "out", images, Share(1, 2))
    with pytest.raises(
        InputError, match=rf"^--shard needs hard links, which the file system of '{tmp_path}/out' lacks: Operation not"
    ):
        job(tmp_path / "out", images, Share(1, 2))


@pytest.mark.parametrize("place", [0, 5000])
def test_a_damaged_ledger_is_refused_and_left_there(tmp_path: Path, images: Path, place: int) -> None:
    """At once, or where a page is read."""
    out = tmp_path / "out"
    with opened(out) as ledger:
        opened_run(ledger, out, settings_of(images))
    content = (out / STATE / LEDGER).read_bytes()
    damaged = content[:place] + b"\xff" * (len(content) - place)
    (out / STATE / LEDGER).write_bytes(damaged)
    message = r"ledger\.sqlite is damaged \(.*\): choose .* --overwrite$"
    with pytest.raises(InputError, match=message), opened(out) as ledger:
        names(ledger)
    assert (out / STATE / LEDGER).read_bytes() == damaged


@pytest.mark.parametrize("reason", ["unable to open database file", "attempt to write a readonly database"])
def test_a_ledger_that_may_not_be_written_is_not_called_damaged(tmp_path: Path, images: Path, reason: str) -> None:
    """Nobody shall be told to overwrite a finished run. Made so that it holds for root, whom no mode keeps out."""
    out = tmp_path / "out"
    with opened(out) as ledger:
        opened_run(ledger, out, settings_of(images))
    path = out / STATE / LEDGER
    if reason.startswith("unable"):
        path.unlink()
        path.mkdir()

    def work(ledger: Ledger) -> None:
        ledger._connection.execute("PRAGMA query_only = 1")
        ledger.retry_errors()

    with pytest.raises(InputError) as raised, opened(out) as ledger:
        work(ledger)
    assert str(raised.value) == (
        f"cannot write to '{path}' ({reason}): make that file and its folder writable for you, or choose another folder"
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("free", range(1, 5))
def test_too_many_open_files_are_no_folder_that_cannot_be_written(
    tmp_path: Path, images: Path, free: int, overwrite: bool
) -> None:
    """A finished run shall not be moved elsewhere for them; so many more can be opened."""
    resource = pytest.importorskip("resource")
    if overwrite:
        job(tmp_path / "out", images, WHOLE)
    taken = [os.dup(0) for _ in range(100)]  # also the numbers below, that are free
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
    try:
        for _ in range(free):
            os.close(taken.pop())
        with pytest.raises((EnvironmentMissing, OSError), match="open files"):
            job(tmp_path / "out", images, WHOLE, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


@pytest.mark.skipif(sys.platform == "win32", reason="modes of Unix")
@pytest.mark.parametrize("umask", [0o002, 0o027])
@pytest.mark.parametrize("again", [False, True])
def test_a_ledger_has_the_mode_of_the_umask(tmp_path: Path, images: Path, umask: int, again: bool) -> None:
    """SQLite would make it 0644, which keeps the others of a group from going on with the run."""
    before = os.umask(umask)
    try:
        with opened(tmp_path, overwrite=again) as ledger:
            opened_run(ledger, tmp_path, settings_of(images))
    finally:
        os.umask(before)
    assert (tmp_path / STATE / LEDGER).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_ledger_that_is_damaged_while_it_is_used_is_left_there(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"

    def fail(ledger: Ledger) -> None:
        opened_run(ledger, out, settings_of(images))
        ledger._connection.execute("DROP TABLE run")
        raise sqlite3.DatabaseError("torn")

    with pytest.raises(InputError, match=r"damaged \(torn\)"), opened(out) as ledger:
        fail(ledger)
    assert (out / STATE / LEDGER).exists()


@pytest.mark.parametrize(
    ("working", "refused", "number"),
    [(Share(2, 2), WHOLE, 4), (WHOLE, Share(1, 2), 7), (Share(2, 2), Share(1, 3), 4)],
)
def test_what_is_refused_removes_no_part_that_another_process_writes(
    tmp_path: Path, images: Path, working: Share, refused: Share, number: int
) -> None:
    out = tmp_path / "out"
    part = out / PREDICTIONS / f".part-{number:08d}.parquet.x"
    with opened(out, shard=None if working == WHOLE else working) as ledger:
        opened_run(ledger, out, settings_of(images))
        part.touch()
        with pytest.raises(InputError, match="holds predictions of"):
            job(out, images, refused)
        assert part.exists()
    assert not part.exists()


def test_an_overwrite_that_a_job_has_forestalled_removes_no_part_of_it(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    part = out / PREDICTIONS / ".part-00000001.parquet.x"
    job(out, images, Share(1, 2))
    overwriting = opened(out, overwrite=True)
    ledger = overwriting.__enter__()
    with opened(out, shard=Share(1, 2)):
        part.touch()
        with pytest.raises(InputError, match="is writing to") as refused:
            opened_run(ledger, out, settings_of(images))
        overwriting.__exit__(InputError, refused.value, None)
        assert part.exists()
