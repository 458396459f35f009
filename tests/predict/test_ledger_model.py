"""The ledger against a dictionary: any order of commits, failures, damage, retries and crashes.

The ledger runs on a SQLite file; the model below says what each call must return.
"""

import dataclasses
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vitx.core.files import sha256_bytes
from vitx.predict.ledger import Claim, Ledger, Shard, ShardRecord, Totals

NUMBERS = st.integers(0, 5)


@dataclasses.dataclass
class Entry:
    """What the model knows of a shard. record: None if it is not done. kept: of its last file; images: in that."""

    shard: Shard
    record: ShardRecord | None = None
    kept: str | None = None
    images: int | None = None


class LedgerMachine(RuleBasedStateMachine):
    """A run, and what was done of it so far by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.ledger = Ledger(self.path / "ledger.sqlite")
        self.model: dict[int, Entry] = {}
        self.files: dict[int, bytes] = {}

    @initialize(counts=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=5))
    def create(self, counts: list[int | None]) -> None:
        shards = [Shard("tar", f"{index}.tar", index, count) for index, count in enumerate(counts)]
        self.model = {number: Entry(shard) for number, shard in enumerate(shards, 1)}
        self.ledger.create({}, shards)

    def _unfinished(self) -> list[Claim]:
        entries = self.model.items()
        return [Claim(number, entry.shard, entry.kept) for number, entry in entries if entry.record is None]

    @rule(number=NUMBERS, images=st.integers(0, 9), errors=st.integers(0, 2), fails=st.booleans())
    def commit(self, number: int, images: int, errors: int, fails: bool) -> None:
        if not (todo := self._unfinished()):
            return
        claim, content = todo[number % len(todo)], b"%d %d" % (images, errors)
        record = ShardRecord(sha256_bytes(content), images, errors, {number: images, 7: errors})

        def publish() -> None:
            if fails:
                raise OSError(28, "No space left on device")
            self.files[claim.id] = content

        if fails:
            with pytest.raises(OSError, match="No space"):
                self.ledger.commit(claim, record, publish)
            self.model[claim.id].images = images  # they were counted, though the file is not there
        else:
            self.ledger.commit(claim, record, publish)
            self.model[claim.id] = Entry(claim.shard, record, None, images)

    @rule()
    def work(self) -> None:
        """What is left, the way a worker does it."""
        for claim in self.ledger.unfinished():
            content = b"%d" % claim.id
            record = ShardRecord(sha256_bytes(content), 3, 1, {0: 2})
            self.ledger.commit(claim, record, partial(self.files.update, {claim.id: content}))
            self.model[claim.id] = Entry(claim.shard, record, None, 3)

    @rule()
    def retry_errors(self) -> None:
        bad = [entry for entry in self.model.values() if entry.record is not None and entry.record.errors]
        assert self.ledger.retry_errors() == len(bad)
        for entry in bad:
            assert entry.record is not None
            entry.kept, entry.record = entry.record.digest, None

    @rule()
    def crash(self) -> None:
        """Nothing is left of who worked on what."""
        self.ledger.close()
        self.ledger = Ledger(self.path / "ledger.sqlite")

    @rule(number=NUMBERS, damage=st.sampled_from(["", "change", "remove", "folder"]))
    def verify(self, number: int, damage: str) -> None:
        """Also of files whose rows are to be kept."""
        done = sorted(one for one, entry in self.model.items() if entry.record is not None or entry.kept is not None)
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
        assert self.ledger.verify(lambda one: self.path / str(one)) == wrong
        for one in wrong:
            self.model[one].record = self.model[one].kept = None
            path = self.path / str(one)
            path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)

    @invariant()
    def what_it_tells_is_what_was_done(self) -> None:
        if not self.model:
            return
        entries = self.model.values()
        records = [entry.record for entry in entries if entry.record is not None]
        known = [entry.shard.count if entry.images is None else entry.images for entry in entries]
        assert self.ledger.totals() == Totals(
            len(self.model),
            len(records),
            sum(record.images for record in records),
            sum(record.errors for record in records),
            None if None in known else sum(count for count in known if count is not None),
        )
        assert list(self.ledger.unfinished()) == self._unfinished()
        assert [record for _, _, record in self.ledger.records()] == records
        # Whatever is recorded is the file that lies there.
        for number, entry in self.model.items():
            if entry.record is not None:
                assert sha256_bytes(self.files[number]) == entry.record.digest

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
# The steps that fail are told as they were found: to find fewer would take minutes.
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, database=None, phases=(Phase.generate,))


def test_pages_of_finished_shards_join_without_a_gap(tmp_path: Path) -> None:
    """A thousand rows are read at once; here are two more, and one between that is not finished."""
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.create({}, (Shard("images", "", index, 1) for index in range(1, 1004)))
        ledger._change("SET digest = 'd', record = '[\"d\", 1, 0, {}, 1, {}, 0]' WHERE id <> ?", 500)
        assert [number for number, _, _ in ledger.records()] == [n for n in range(1, 1004) if n != 500]
        assert [claim.id for claim in ledger.unfinished()] == [500]
