"""The ledger: what is left to do, what is recorded of it, and what becomes of a file that is not as it should be."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.predict import ledger as ledger_module
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.ledger import Claim, Ledger, Shard, ShardRecord
from vitx.predict.options import Share
from vitx.predict.pipeline.disk import is_full

SHARDS = tuple(Shard("images", "", 100 * index, 4) for index in range(3))
DONE = ShardRecord(sha256_bytes(b"rows"), 4, 1, {0: 2, 3: 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def created(path: Path, shards: Sequence[Shard] = SHARDS) -> Ledger:
    ledger = Ledger(path)
    ledger.create({}, shards)
    return ledger


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(created(path)) as opened:
        yield opened


def first(ledger: Ledger) -> Claim:
    return next(ledger.unfinished())


def test_unfinished_shards_come_in_order_and_those_that_are_done_do_not(ledger: Ledger, path: Path) -> None:
    assert list(ledger.unfinished()) == [Claim(number, shard) for number, shard in enumerate(SHARDS, 1)]
    ledger.commit(Claim(2, SHARDS[1]), DONE, lambda: None)
    with closing(Ledger(path)) as again:  # as after a stop
        assert list(again.unfinished()) == [Claim(1, SHARDS[0]), Claim(3, SHARDS[2])]


def test_shards_that_are_finished_meanwhile_change_nothing_for_who_reads_them(path: Path) -> None:
    """A thousand are read at once; here are two more, and every one is recorded as soon as it is known."""
    with closing(created(path, [Shard("images", "", index, 1) for index in range(1002)])) as ledger:
        for claim in ledger.unfinished():
            ledger.commit(claim, DONE, lambda: None)
        assert ledger.totals().done == 1002


def test_threads_share_a_ledger(path: Path) -> None:
    """One reads, the others record: no transaction has part of another."""
    with closing(created(path, [Shard("tar", f"{index}.tar") for index in range(200)])) as ledger:
        claims = ledger.unfinished()
        failed: list[BaseException] = []
        taken = threading.Lock()

        def work() -> None:
            try:
                while True:
                    with taken:
                        claim = next(claims, None)
                    if claim is None:
                        return
                    ledger.commit(claim, DONE, lambda: None)
                    ledger.totals()
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert ledger.totals()[:3] == (200, 200, 800)


def test_a_publication_that_fails_is_not_recorded(ledger: Ledger) -> None:
    claim = first(ledger)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        ledger.commit(claim, DONE, fail)
    assert ledger.totals().done == 0
    ledger.commit(claim, DONE, lambda: None)
    assert ledger.totals().done == 1


def test_a_file_that_was_published_and_not_recorded_is_recorded_at_the_next_start(path: Path, tmp_path: Path) -> None:
    """Before it was published its rows are not those of the file there."""

    def output(shard: int) -> Path:
        return tmp_path / str(shard)

    def killed(*, published: bool) -> Callable[[], None]:
        def publish() -> None:
            if published:
                output(1).write_bytes(b"rows")
            raise KeyboardInterrupt

        return publish

    with closing(created(path)) as ledger:
        for published, done in ((False, 0), (True, 1)):
            with pytest.raises(KeyboardInterrupt):
                ledger.commit(Claim(1, SHARDS[0]), DONE, killed(published=published))
            assert ledger.totals().done == 0
            assert ledger.verify(output) == []
            assert ledger.totals().done == done
        assert list(ledger.records()) == [(1, "images", DONE)]
        assert ledger.retry_errors() == 1
        assert ledger.verify(output) == []  # it is to be done again, though its last file is there
        assert next(ledger.unfinished()) == Claim(1, SHARDS[0], DONE.digest)


def test_verification_returns_what_was_changed_or_is_gone(ledger: Ledger, tmp_path: Path) -> None:
    def output(shard: int) -> Path:
        return tmp_path / str(shard)

    for shard in (1, 2, 3):
        claim = first(ledger)
        output(shard).write_bytes(b"rows")
        ledger.commit(claim, DONE, lambda: None)
    assert ledger.verify(output) == []
    output(1).unlink()
    output(3).write_bytes(b"other rows")
    assert ledger.verify(output) == [1, 3]
    assert [claim.id for claim in ledger.unfinished()] == [1, 3]


def test_totals_are_sums(ledger: Ledger) -> None:
    claim = first(ledger)
    ledger.commit(claim, DONE, lambda: None)
    assert ledger.totals() == (3, 1, 4, 1, 12)
    assert all(type(total) is int for total in ledger.totals())
    assert list(ledger.records()) == [(1, "images", DONE)]


def test_totals_leave_out_what_was_set_free(ledger: Ledger, tmp_path: Path) -> None:
    for _ in range(2):
        claim = first(ledger)
        (tmp_path / str(claim.id)).write_bytes(b"rows")
        ledger.commit(claim, DONE._replace(images=3), lambda: None)
    (tmp_path / "2").unlink()
    assert ledger.verify(lambda shard: tmp_path / str(shard)) == [2]
    # Of the second shard three images were there, which is more certain than the four that were expected.
    assert ledger.totals() == (3, 1, 3, 1, 10)
    assert list(ledger.records()) == [(1, "images", DONE._replace(images=3))]


def test_totals_of_containers_are_not_known_beforehand(path: Path) -> None:
    with closing(created(path, (Shard("tar", "a.tar"), Shard("tar", "b.tar")))) as one:
        assert one.totals() == (2, 0, 0, 0, None)
        for claim in one.unfinished():
            one.commit(claim, DONE, lambda: None)
        assert one.totals() == (2, 2, 8, 2, 8)


def test_a_creation_that_fails_leaves_no_run(path: Path) -> None:
    def torn() -> Iterator[Shard]:
        yield SHARDS[0]
        raise ValueError("no more images")

    with closing(Ledger(path)) as one:
        assert one.description() == {}
        with pytest.raises(ValueError, match="no more images"):
            one.create({}, torn())
        assert one.description() == {}
        one.create({"is": "later"}, SHARDS)
        assert (one.description(), one.totals().shards) == ({"is": "later"}, 3)


def test_names_of_any_bytes_come_back(path: Path) -> None:
    shard = Shard("tar", "caf\udce9/ö.tar", 1 << 40)
    with closing(created(path, [shard])) as one:
        assert first(one).shard == shard


def test_a_lock_that_is_never_freed_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created(path).close()
    monkeypatch.setattr(ledger_module, "BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with (
        closing(holder),
        closing(Ledger(path)) as one,
        pytest.raises(EnvironmentMissing, match=r"ledger\.sqlite was locked by another program for 0 s: end that one"),
    ):
        one.retry_errors()


def test_sqlite_says_that_the_disk_is_full(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "small.sqlite")
    database.execute("PRAGMA max_page_count = 2")
    with closing(database), pytest.raises(sqlite3.OperationalError) as raised:
        database.execute("CREATE TABLE rows AS SELECT randomblob(100000)")
    assert is_full(raised.value)


def test_a_ledger_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as older:
        older.execute("CREATE TABLE vitx_plan (run TEXT PRIMARY KEY)")
    for _ in range(2):
        with pytest.raises(InputError, match=r"ledger\.sqlite was written by another version of vitx: fin.*--overw"):
            Ledger(path)
    with pytest.raises(InputError, match=r"choose another folder, or remove that one$"):  # --overwrite is refused there
        Ledger(path, Share(2, 3))
    with closing(sqlite3.connect(path)) as older:
        assert older.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("vitx_plan",)]
    with closing(Ledger(tmp_path / "new")) as newer:
        newer._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="was written by another version"):
        Ledger(tmp_path / "new")


@pytest.mark.parametrize(("share", "numbers"), [((1, 1), [1, 2, 3]), ((2, 5), [2, 7, 12]), ((5, 5), [5, 10, 15])])
def test_the_shards_of_jobs_have_numbers_of_their_own(path: Path, share: tuple[int, int], numbers: list[int]) -> None:
    with closing(Ledger(path, Share(*share))) as one:
        one.create({}, SHARDS)
        assert [claim.id for claim in one.unfinished()] == numbers


def done(ledger: Ledger, **changes: Any) -> Claim:
    """The next shard, which was recorded."""
    claim = first(ledger)
    ledger.commit(claim, DONE._replace(**changes), lambda: None)
    return claim


def test_shards_with_errors_are_tried_again_and_know_their_file(ledger: Ledger) -> None:
    done(ledger)
    done(ledger, errors=0)
    done(ledger, digest="third", errors=2)
    assert ledger.retry_errors() == 2
    assert [record.errors for _, _, record in ledger.records()] == [0]
    again = [Claim(1, SHARDS[0], DONE.digest), Claim(3, SHARDS[2], "third")]
    assert list(ledger.unfinished()) == again
    ledger.commit(again[0], DONE._replace(digest="new", errors=0), lambda: None)
    assert ledger.retry_errors() == 0
    assert list(ledger.unfinished()) == again[1:]  # what was kept of it is still known
    ledger.commit(again[1], DONE._replace(errors=1), lambda: None)
    assert ledger.verify(lambda shard: Path("nowhere")) == [1, 2, 3]
    assert [claim.kept for claim in ledger.unfinished()] == [None] * 3  # a recorded file is all that counts


def test_records_are_of_finished_shards(path: Path) -> None:
    shards = (Shard("tar", "a"), Shard("images", "", 0, 4), Shard("tar", "b"), Shard("tar", "c"))
    with closing(created(path, shards)) as one:
        assert list(one.records()) == []
        texts, mixed = SkippedNames({".txt": 3}, ["a/x.txt"]), SkippedNames({".md": 1, ".txt": 1}, ["b/y.md"])
        first: dict[str, Any] = {"images": 5, "errors": 2, "listed": 8, "skipped": texts}
        third: dict[str, Any] = {"images": 7, "errors": 1, "listed": 9, "skipped": mixed}
        for changes in (first, {"listed": 4}, third):
            done(one, **changes)
        assert list(one.records()) == [
            (1, "tar", DONE._replace(**first)),
            (2, "images", DONE._replace(listed=4)),
            (3, "tar", DONE._replace(**third)),
        ]
        assert one.totals() == (4, 3, 16, 4, None)


def test_every_finished_shard_is_read_however_many_there_are(path: Path) -> None:
    """They are read a thousand at a time."""
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(2001))
    with closing(created(path, shards)) as one:
        one._change("SET digest = 'd', record = json_array('d', 1, 0, json_object(id || '', 1), 1, json('{}'), 0)")
        assert [record.classes for _, _, record in one.records()] == [{number: 1} for number in range(1, 2002)]


def test_what_is_no_fault_of_the_file_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ledger: Ledger) -> None:
        raise KeyboardInterrupt

    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        Ledger(tmp_path / "no" / "such" / "folder")
    monkeypatch.setattr(Ledger, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ledger(tmp_path / "ledger.sqlite")
    monkeypatch.undo()
    monkeypatch.setattr(Ledger, "_open", lambda _: (_ for _ in ()).throw(sqlite3.OperationalError("disk")))
    with pytest.raises(sqlite3.OperationalError, match=r"^disk$"):
        Ledger(tmp_path / "ledger.sqlite")


def test_a_transaction_that_is_over_does_not_hide_the_error(ledger: Ledger) -> None:
    """SQLite ends it by itself when the disk is full."""

    def work() -> None:
        with ledger._writing() as run:
            run("ROLLBACK")
            raise ValueError("full")

    with pytest.raises(ValueError, match=r"^full$"):
        work()
    assert ledger.totals().shards == 3
