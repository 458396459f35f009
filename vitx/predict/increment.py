"""`--incremental`: what an input has now, compared with what a run has read of it.

New names become further shards. Where an image changed, its shard is set free and keeps its other rows; a tar or
Parquet file that changed is done anew. Either way a part takes the place of the old one in one step: a key has one row.
"""

import itertools
import json
import os
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from vitx.predict.inputs.inventory import Contents, Shard, list_input, names_of
from vitx.predict.inputs.listing import write_list
from vitx.predict.inputs.stores import MARK, join, version_of
from vitx.predict.inputs.tables import TableColumns, key_record, key_records, refuse_equal_keys
from vitx.predict.ledger import Ledger
from vitx.predict.outputs.parts import VERSION, part_path
from vitx.predict.state import Run
from vitx.predict.summary import Increment

# known: an image for each row; place: in its shard's finished file, NULL if there is none. present: the input as it is.
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE known (name BLOB, version TEXT, shard INTEGER, place INTEGER);
CREATE TABLE present (name BLOB PRIMARY KEY, version TEXT);
"""
_BOTH = "known JOIN present USING (name)"
_CHANGED = "place IS NOT NULL AND known.version IS NOT present.version"


def extend_run(
    ledger: Ledger, run: Run, source: str, columns: TableColumns, shard_size: int, summary: Path
) -> Increment:
    """Add to the run what is new or changed in `source`. summary: its file, which is removed before the run is changed.

    Raises InputError if the input cannot be listed, or its columns and keys do not go with those of the run.
    """
    if run.created:
        shards = [shard for _, shard, _ in ledger.shards()]
        images = sum(shard.count or 0 for shard in shards if shard.kind == "images")
        return Increment(new=images + len({shard.location for shard in shards if shard.kind != "images"}))
    contents = list_input(source, ledger.path.parent, columns, again=True)
    with closing(_Comparison(ledger, summary.parent, run, contents)) as comparison:
        found = comparison.compare()
        if columns.key is not None:
            comparison.refuse_equal_keys(columns.key)
        # What the run has not done yet aside.
        if comparison.names or comparison.added or comparison.replaced or found.changed:
            summary.unlink(missing_ok=True)
            comparison.extend(shard_size)
        return found


class _Comparison:
    """Of names, in a database of its own that is removed at the end: memory does not grow with the input."""

    def __init__(self, ledger: Ledger, out: Path, run: Run, contents: Contents) -> None:
        self._ledger, self._out, self._run, self._contents = ledger, out, run, contents
        self._path = ledger.path.with_name(f".increment-{uuid.uuid4().hex}")
        self._database = sqlite3.connect(self._path, isolation_level=None)
        self.added: list[Shard] = []
        self.replaced: list[tuple[int, Shard]] = []
        # The shards whose finished file is there, and those of each tar or Parquet file.
        self._finished = set[int]()
        self._containers: dict[str, list[tuple[int, Shard]]] = {}

    def close(self) -> None:
        self._database.close()
        self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        self._database.executescript(_SCHEMA)
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO known VALUES (?, ?, ?, ?)", self._known())
        self._database.execute("CREATE INDEX names ON known (name)")
        present = (record.rpartition(MARK) for record in self._contents.images)
        self._database.executemany(
            "INSERT OR IGNORE INTO present VALUES (?, ?)",
            ((os.fsencode(name), version or None) for name, _, version in present),
        )

    def _known(self) -> Iterator[tuple[bytes, str | None, int, int | None]]:
        """Yield the images of the run; beside that, note its finished files and its containers."""
        for number, shard, digest in self._ledger.shards():
            done = digest is not None and part_path(self._out, number).is_file()
            if done:
                self._finished.add(number)
            if shard.kind != "images":
                self._containers.setdefault(shard.location, []).append((number, shard))
                continue
            names = names_of(shard, self._run.listing)
            versions = itertools.chain(self._versions(number) if done else (), itertools.repeat(None))
            for place, (name, version) in enumerate(zip(names, versions, strict=False)):
                yield os.fsencode(name), version, number, place if done else None

    def _versions(self, shard: int, column: str = VERSION) -> Iterator[str | None]:
        import pyarrow.parquet as pq

        with part_path(self._out, shard).open("rb") as file:
            for batch in pq.ParquetFile(file).iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()

    def _count(self, what: str) -> int:
        return int(self._database.execute(f"SELECT count(*) FROM {what}").fetchone()[0])

    def compare(self) -> Increment:
        """Called once, first. Beside what it returns it notes names, added and replaced: what the run lacks."""
        self._read()
        self.names = self._count("present WHERE name NOT IN (SELECT name FROM known)")
        pending = self._count(f"{_BOTH} WHERE place IS NULL")
        changed_images = self._count(f"{_BOTH} WHERE {_CHANGED}")
        gone = self._count("known WHERE name NOT IN (SELECT name FROM present)")
        unchanged = self._count("known") - pending - changed_images - gone
        found = {"new": self.names + pending, "changed": changed_images, "unchanged": unchanged}
        for location, group in itertools.groupby(self._contents.units, lambda unit: unit.location):
            units, shards = list(group), self._containers.pop(location, [])
            done = [number for number, _ in shards if number in self._finished]
            versions = {version for number in done for version in self._versions(number)}
            # Of a file whose parts have no row nothing is known. One may have changed before it was read.
            unread = not versions and len(done) == len(shards)
            same_rows = _rows(shard for _, shard in shards) == _rows(units)
            changed = versions - {version_of(join(self._run.base, location))} or unread or not same_rows
            if changed:
                # Parquet may have more row groups than before, or fewer: the others become parts without rows.
                self.added += units[len(shards) :]
                units += [Shard("parquet", location, 0, 0)] * (len(shards) - len(units))
                self.replaced += [(number, unit) for (number, _), unit in zip(shards, units, strict=False)]
            whole = bool(shards) and len(done) == len(shards)
            found["changed" if changed and done else "unchanged" if whole else "new"] += 1
        return Increment(**found, gone=gone + len(self._containers))  # what is left of the containers is gone

    def refuse_equal_keys(self, column: str) -> None:
        """Rows of files that are gone stay: their keys may not come again."""
        gone = (
            key_record(key, f"row {row} of {part_path(self._out, number).name} in the output, whose {location} is gone")
            for location, shards in self._containers.items()
            for number, _ in shards
            if number in self._finished
            for row, key in enumerate(self._versions(number, "path"))
            if key is not None
        )
        present = key_records(self._run.base, self._contents.tables.readable, column)
        refuse_equal_keys(column, itertools.chain(present, gone), self._path.parent)

    def extend(self, shard_size: int) -> None:
        changed = self._database.execute(f"SELECT shard, place FROM {_BOTH} WHERE {_CHANGED} ORDER BY shard, place")
        by_shard = itertools.groupby(changed, lambda row: int(row[0]))
        listing = self._path.with_name(f"images-{uuid.uuid4().hex}")
        rows = self._database.execute(
            "SELECT name FROM present WHERE name NOT IN (SELECT name FROM known) ORDER BY present.rowid"
        )
        try:
            ranges, _ = write_list(listing, (os.fsdecode(name) for (name,) in rows), shard_size)
            shards = [Shard("images", listing.name, start, count) for start, count in ranges]
            described = json.loads(self._ledger.description()) | {"skipped": asdict(self._contents.skipped)}
            again = ((shard, [place for _, place in group]) for shard, group in by_shard)
            self._ledger.extend(
                json.dumps(described), again=again, replaced=self.replaced, added=[*shards, *self.added]
            )
        except BaseException:
            listing.unlink(missing_ok=True)
            raise
        if not shards:
            listing.unlink()


def _rows(shards: Iterable[Shard]) -> list[tuple[int, int | None]]:
    return [(shard.start, shard.count) for shard in shards if shard.count != 0]
