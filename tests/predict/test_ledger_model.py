"""The ledger against a dictionary: any order of claims, renewals, commits, give-backs, lost replies and crashes.

The ledger runs on a SQLite file with a clock of its own; the model below says what each call must return.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vitx.core.files import sha256_bytes
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.ledger.databases import SqliteDatabase, Transaction
from vitx.predict.ledger.ledger import Claim, Ledger, ShardRecord, Totals

T = TypeVar("T")
WORKERS, LEASE = 3, 10
NUMBERS = st.integers(0, 5)


class Clock:
    """Whole seconds, so that a lease may end exactly now."""

    def __init__(self) -> None:
        self.now = 1_000


class LosingDatabase(SqliteDatabase):
    """SQLite with a given clock, which may lose the connection in a transaction as a server does.

    lose: "reply": the next transaction is committed and then run again; "work": it is rolled back and run again.
    between: called between the two attempts.
    """

    now = "clock()"

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self.lose = ""
        self._connection.create_function("clock", 0, lambda: float(clock.now))
        self.between: Callable[[], None] = lambda: None

    def write(self, work: Callable[[Transaction], T], *, advisory_lock: str | None = None) -> T:
        lost, self.lose = self.lose, ""
        if lost == "reply":
            super().write(work)
            self.between()
        elif lost == "work":
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                work(self._connection)
            finally:
                self._connection.execute("ROLLBACK")
            self.between()
        return super().write(work)


@dataclasses.dataclass
class Entry:
    """What the model knows of a shard. lease: the second in which it ends; 0: free. images: of its last file."""

    shard: Shard
    owner: str | None = None
    lease: int = 0
    attempts: int = 0
    record: ShardRecord | None = None
    images: int | None = None


class LedgerMachine(RuleBasedStateMachine):
    """Workers of one run, and what they did so far by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.clock = Clock()
        self.workers: list[Ledger] = []
        self.databases: list[LosingDatabase] = []
        # The claims that each worker knows of, also those that it has lost meanwhile.
        self.known: list[list[Claim]] = []
        self.model: dict[int, Entry] = {}
        self.files: dict[int, bytes] = {}

    @initialize(counts=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=5))
    def create(self, counts: list[int | None]) -> None:
        shards = tuple(Shard("tar", f"{index}.tar", index, count) for index, count in enumerate(counts))
        self.model = {number: Entry(shard) for number, shard in enumerate(shards, 1)}
        for index in range(WORKERS):
            self._start(index)
        assert self.workers[0].create_or_join(lambda: ("plan", Inventory("/in", shards, "listing"))) == ("plan", "/in")
        assert self.workers[1].create_or_join(lambda: pytest.fail("created twice")) == ("plan", "/in")

    def _start(self, index: int) -> None:
        database = LosingDatabase(self.path / "ledger.sqlite", self.clock)
        ledger = Ledger(database, lease_seconds=LEASE)
        self.databases[index:], self.workers[index:], self.known[index:] = (
            [database, *self.databases[index + 1 :]],
            [ledger, *self.workers[index + 1 :]],
            [[], *self.known[index + 1 :]],
        )

    def _held(self, entry: Entry, index: int) -> bool:
        return entry.record is None and entry.owner == self.workers[index].worker

    @rule(seconds=st.sampled_from([1, LEASE - 1, LEASE, LEASE + 1]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(index=st.integers(0, WORKERS - 1), lose=st.sampled_from(["", "reply", "work"]))
    def claim(self, index: int, lose: str) -> None:
        free = [
            (entry.lease, number)
            for number, entry in self.model.items()
            if entry.record is None and entry.lease < self.clock.now
        ]
        self.databases[index].lose = lose
        found = self.workers[index].claim()
        if not free:
            assert found is None
            return
        number = min(free)[1]
        entry = self.model[number]
        assert found == Claim(number, entry.shard)
        entry.owner, entry.lease = self.workers[index].worker, self.clock.now + LEASE
        entry.attempts += 1
        self.known[index].append(found)

    @rule(index=st.integers(0, WORKERS - 1))
    def renew(self, index: int) -> None:
        self.workers[index].renew()
        for entry in self.model.values():
            if self._held(entry, index):
                entry.lease = self.clock.now + LEASE

    @rule(index=st.integers(0, WORKERS - 1))
    def release_all(self, index: int) -> None:
        self.workers[index].release()
        for entry in self.model.values():
            if self._held(entry, index):
                entry.owner, entry.lease = None, 0

    @rule(index=st.integers(0, WORKERS - 1), number=NUMBERS)
    def release_one(self, index: int, number: int) -> None:
        if not self.known[index]:
            return
        claim = self.known[index][number % len(self.known[index])]
        self.workers[index].release(claim)
        entry = self.model[claim.id]
        if self._held(entry, index):
            entry.owner, entry.lease = None, 0

    @rule(
        index=st.integers(0, WORKERS - 1),
        number=NUMBERS,
        images=st.integers(0, 9),
        errors=st.integers(0, 2),
        fails=st.booleans(),
        lose=st.sampled_from(["", "reply", "work"]),
    )
    def commit(self, index: int, number: int, images: int, errors: int, fails: bool, lose: str) -> None:
        if not self.known[index]:
            return
        claim = self.known[index][number % len(self.known[index])]
        content = b"%d %d %d %d" % (index, images, errors, self.clock.now)
        record = ShardRecord(sha256_bytes(content), images, errors, {index: images, 7: errors})
        held = self._held(self.model[claim.id], index)
        calls = 0

        def publish() -> None:
            nonlocal calls
            calls += 1
            if fails:
                raise OSError(28, "No space left on device")
            self.files[claim.id] = content

        if fails:
            if held:
                with pytest.raises(OSError, match="No space"):
                    self.workers[index].commit(claim, record, publish)
            else:
                assert not self.workers[index].commit(claim, record, publish)
            assert calls == held
            return
        self.databases[index].lose = lose
        assert self.workers[index].commit(claim, record, publish) is held
        assert calls == (0 if not held else 2 if lose == "work" else 1)
        if held:
            self.model[claim.id].record, self.model[claim.id].images = record, record.images

    @rule(index=st.integers(0, WORKERS - 1), images=st.integers(1, 9))
    def work(self, index: int, images: int) -> None:
        """A claim and its commit."""
        before = len(self.known[index])
        self.claim(index, "")
        if len(self.known[index]) > before:
            self.commit(index, before, images, 1, False, "")

    @rule(index=st.integers(0, WORKERS - 1))
    def crash(self, index: int) -> None:
        """Its shards stay held until their leases run out."""
        self.workers[index].close()
        self._start(index)

    @rule(index=st.integers(0, WORKERS - 1), number=NUMBERS, damage=st.sampled_from(["", "change", "remove", "folder"]))
    def verify(self, index: int, number: int, damage: str) -> None:
        done = sorted(one for one, entry in self.model.items() if entry.record is not None)
        for one in done:
            (self.path / str(one)).write_bytes(self.files[one])
        wrong = []
        if done and damage:
            wrong = [done[number % len(done)]]
            path = self.path / str(wrong[0])
            path.unlink()
            if damage == "change":
                path.write_bytes(b"other")
            elif damage == "folder":
                path.mkdir()
        assert self.workers[index].verify(lambda one: self.path / str(one)) == wrong
        for one in wrong:
            entry = self.model[one]
            entry.record, entry.owner, entry.lease = None, None, 0
            path = self.path / str(one)
            path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)

    @invariant()
    def what_it_tells_is_what_was_done(self) -> None:
        if not self.model:
            return
        ledger = self.workers[0]
        entries = self.model.values()
        records = [entry.record for entry in entries if entry.record is not None]
        known = [entry.shard.count if entry.images is None else entry.images for entry in entries]
        expected = sum(count for count in known if count is not None)
        assert ledger.totals() == Totals(
            len(self.model),
            len(records),
            sum(record.images for record in records),
            sum(record.errors for record in records),
            None if None in known else expected,
        )
        assert ledger.remaining() == len(self.model) - len(records)
        assert list(ledger.class_counts()) == [record.classes for record in records]
        bad = [number for number, entry in self.model.items() if entry.record is not None and entry.record.errors]
        assert ledger.first_shard_with_errors() == min(bad, default=None)
        rows = self.databases[0].read("SELECT id, attempts, digest FROM vitx_shard ORDER BY id")
        assert rows == [
            (number, entry.attempts, entry.record and entry.record.digest) for number, entry in self.model.items()
        ]
        # Whatever is recorded is the file that lies there.
        for number, entry in self.model.items():
            if entry.record is not None:
                assert sha256_bytes(self.files[number]) == entry.record.digest

    def teardown(self) -> None:
        for worker in self.workers:
            worker.close()
        self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
# The steps that fail are told as they were found: to find fewer would take minutes.
TestLedger.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, database=None, phases=(Phase.generate,)
)


SHARDS = tuple(Shard("tar", f"{index}.tar") for index in range(3))
OURS = ShardRecord("ours", 4, 1, {0: 3})
THEIRS = ShardRecord("theirs", 4, 1, {0: 3})


class Pair:
    """Two workers of a run of three shards; the first may lose its connection."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.database = LosingDatabase(folder / "ledger.sqlite", self.clock)
        self.first = Ledger(self.database, lease_seconds=LEASE)
        self.second = Ledger(LosingDatabase(folder / "ledger.sqlite", self.clock), lease_seconds=LEASE)
        self.first.create_or_join(lambda: ("plan", Inventory("", SHARDS, "")))

    def let_second_take(self, number: int) -> Claim:
        """The second worker claims all whose leases have run out, and returns one of its claims."""
        self.clock.now += LEASE + 1
        return next(claim for claim in iter(self.second.claim, None) if claim.id == number)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    with closing(made.first), closing(made.second):
        yield made


def test_a_claim_that_another_took_while_the_reply_was_lost_is_not_ours(pair: Pair) -> None:
    def other_takes_it() -> None:
        pair.clock.now += LEASE + 1
        assert [claim and claim.id for claim in (pair.second.claim(), pair.second.claim())] == [2, 3]
        claim = pair.second.claim()
        assert claim is not None
        assert claim.id == 1

    pair.database.lose, pair.database.between = "reply", other_takes_it
    assert pair.first.claim() is None


def test_a_claim_whose_reply_was_lost_is_found_by_its_ticket_alone(pair: Pair) -> None:
    """It holds another shard already, which must not be given out twice."""
    first = pair.first.claim()
    pair.database.lose = "reply"
    second = pair.first.claim()
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == (1, 2)


@pytest.mark.parametrize(("lose", "theirs", "free"), [("work", THEIRS, True), ("work", OURS, False)])
def test_a_file_that_may_have_replaced_anothers_is_made_again_unless_equal(
    pair: Pair, lose: str, theirs: ShardRecord, free: bool
) -> None:
    """The first attempt renamed the file and was rolled back; another worker finished the shard before the second."""
    claim = pair.first.claim()
    assert claim is not None
    published: list[str] = []

    def other_finishes() -> None:
        assert pair.second.commit(pair.let_second_take(1), theirs, lambda: published.append("theirs"))

    pair.database.lose, pair.database.between = lose, other_finishes
    assert not pair.first.commit(claim, OURS, lambda: published.append("ours"))
    assert published == ["ours", "theirs"]
    assert pair.first.totals().done == (0 if free else 1)
    again = pair.first.claim()
    assert again == (claim if free else None)


def test_a_shard_that_the_worker_itself_finished_with_another_file_is_made_again(pair: Pair) -> None:
    pair.second.worker = pair.first.worker
    claim = pair.first.claim()
    assert claim is not None

    def finish_otherwise() -> None:
        assert pair.second.commit(pair.let_second_take(1), THEIRS, lambda: None)

    pair.database.lose, pair.database.between = "work", finish_otherwise
    assert not pair.first.commit(claim, OURS, lambda: None)
    assert pair.first.totals().done == 0


def test_a_file_of_a_shard_that_another_holds_is_left_to_it(pair: Pair) -> None:
    """It will be replaced when that worker commits; the shard is not taken from it."""
    claim = pair.first.claim()
    assert claim is not None
    theirs: list[Claim] = []
    pair.database.lose = "work"
    pair.database.between = lambda: theirs.append(pair.let_second_take(1))
    assert not pair.first.commit(claim, OURS, lambda: None)
    assert pair.first.claim() is None
    assert pair.second.commit(theirs[0], THEIRS, lambda: None)
    assert pair.first.totals().done == 1


def test_what_another_finished_is_left_alone_by_one_that_published_nothing(pair: Pair) -> None:
    claim = pair.first.claim()
    assert claim is not None
    assert pair.second.commit(pair.let_second_take(1), THEIRS, lambda: None)
    assert not pair.first.commit(claim, OURS, lambda: pytest.fail("published"))
    assert pair.first.totals().done == 1


def test_a_shard_is_not_recorded_before_its_file_is_there(pair: Pair) -> None:
    claim = pair.first.claim()
    assert claim is not None
    seen: list[int] = []
    assert pair.first.commit(claim, OURS, lambda: seen.append(pair.second.totals().done))
    assert seen == [0]
    assert pair.second.totals().done == 1


def test_a_listing_is_made_once_although_its_transaction_was_lost(tmp_path: Path) -> None:
    made: list[int] = []

    def create() -> tuple[str, Inventory]:
        made.append(1)
        return "plan", Inventory("/base", SHARDS, "listing")

    for lose in ("reply", "work"):
        database = LosingDatabase(tmp_path / f"{lose}.sqlite", Clock())
        with closing(Ledger(database, lease_seconds=LEASE)) as ledger:
            database.lose = lose
            assert ledger.create_or_join(create) == ("plan", "/base")
            assert ledger.totals().shards == 3
            assert ledger.listing_digest() == "listing"
    assert made == [1, 1]


def test_pages_of_finished_shards_join_without_a_gap(tmp_path: Path) -> None:
    """A thousand rows are read at once; here are two more, and one between that is not finished."""
    shards = tuple(Shard("images", "", index, 1) for index in range(1003))
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=LEASE)) as ledger:
        ledger.create_or_join(lambda: ("plan", Inventory("", shards, "")))
        change = "UPDATE vitx_shard SET digest = 'd', classes = '{\"' || id || '\": 2}' WHERE id <> 500"
        ledger._database.write(lambda transaction: transaction.execute(change))
        assert list(ledger.class_counts()) == [{number: 2} for number in range(1, 1004) if number != 500]


def test_a_worker_keeps_its_name_and_leases_in_other_threads(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite", run="r", worker="w", lease_seconds=7)) as ledger:
        copied: Any = ledger.for_thread()
        with closing(copied):
            assert (copied.run, copied.worker, copied.lease_seconds) == ("r", "w", 7)
            assert copied._database is not ledger._database
        with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=7)) as other:
            assert other.worker != "w"
