"""The ledger against a dictionary: any order of claims, renewals, commits, give-backs and crashes.

The ledger runs on a SQLite file with a clock of its own; the model below says what each call must return.
"""

import dataclasses
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vitx.core.files import sha256_bytes
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.ledger import Claim, Ledger, ShardRecord, Totals

WORKERS, LEASE = 3, 10
NUMBERS = st.integers(0, 5)


class Clock:
    """Whole seconds, so that a lease may end exactly now."""

    def __init__(self) -> None:
        self.now = 1_000


class TimedLedger(Ledger):
    """A ledger with a given clock."""

    _now = "clock()"

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, lease_seconds=LEASE)
        self._connection.create_function("clock", 0, lambda: float(clock.now))


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
        ledger = TimedLedger(self.path / "ledger.sqlite", self.clock)
        self.workers[index:], self.known[index:] = (
            [ledger, *self.workers[index + 1 :]],
            [[], *self.known[index + 1 :]],
        )

    def _held(self, entry: Entry, index: int) -> bool:
        return entry.record is None and entry.owner == self.workers[index].worker

    @rule(seconds=st.sampled_from([1, LEASE - 1, LEASE, LEASE + 1]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(index=st.integers(0, WORKERS - 1))
    def claim(self, index: int) -> None:
        free = [
            (entry.lease, number)
            for number, entry in self.model.items()
            if entry.record is None and entry.lease < self.clock.now
        ]
        found = self.workers[index].claim()
        if not free:
            assert found is None
            return
        number = min(free)[1]
        entry = self.model[number]
        assert found == Claim(number, entry.shard)
        assert found.attempt == entry.attempts + 1
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
    )
    def commit(self, index: int, number: int, images: int, errors: int, fails: bool) -> None:
        if not self.known[index]:
            return
        claim = self.known[index][number % len(self.known[index])]
        content = b"%d %d %d %d" % (index, images, errors, self.clock.now)
        record = ShardRecord(sha256_bytes(content), images, errors, {index: images, 7: errors})
        held = self._held(self.model[claim.id], index) and claim.attempt == self.model[claim.id].attempts
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
        assert self.workers[index].commit(claim, record, publish) is held
        assert calls == held
        if held:
            self.model[claim.id].record, self.model[claim.id].images = record, record.images

    @rule(index=st.integers(0, WORKERS - 1), images=st.integers(1, 9))
    def work(self, index: int, images: int) -> None:
        """A claim and its commit."""
        before = len(self.known[index])
        self.claim(index)
        if len(self.known[index]) > before:
            self.commit(index, before, images, 1, False)

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
        assert [record for _, _, record in ledger.records()] == records
        bad = [number for number, entry in self.model.items() if entry.record is not None and entry.record.errors]
        assert ledger.first_shard_with_errors() == min(bad, default=None)
        rows = ledger._rows("SELECT id, attempts, digest FROM shard ORDER BY id")
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


def test_pages_of_finished_shards_join_without_a_gap(tmp_path: Path) -> None:
    """A thousand rows are read at once; here are two more, and one between that is not finished."""
    shards = tuple(Shard("images", "", index, 1) for index in range(1003))
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=LEASE)) as ledger:
        ledger.create_or_join(lambda: ("plan", Inventory("", shards, "")))
        ledger._change("SET digest = 'd', classes = '{}', skipped = '{}' WHERE id <> ?", (500,))
        assert [number for number, _, _ in ledger.records()] == [n for n in range(1, 1004) if n != 500]


def test_a_worker_keeps_its_name_and_leases_in_other_threads(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite", worker="w", lease_seconds=7)) as ledger:
        copied: Any = ledger.for_thread()
        with closing(copied):
            assert (copied.worker, copied.lease_seconds) == ("w", 7)
            assert copied._connection is not ledger._connection
        with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=7)) as other:
            assert other.worker != "w"
