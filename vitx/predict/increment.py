"""`--incremental`: what an input has now, compared with what a run has read of it.

New names become further shards. Where an image changed, its shard is set free and keeps its other rows; a tar or
Parquet file that changed is done anew. Either way a part takes the place of the old one in one step: a key has one row.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path

from vitx.predict.inputs.inventory import Inventory, list_input
from vitx.predict.inputs.stores import join, version_of
from vitx.predict.inputs.tables import TableColumns, key_records, refuse_equal_keys
from vitx.predict.ledger import Ledger, Shard
from vitx.predict.outputs.parts import VERSION, part_path
from vitx.predict.state import Run
from vitx.predict.summary import Increment


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
    contents = list_input(source, ledger, columns, again=True)
    comparison = _Comparison(ledger, summary.parent, contents)
    new, pending, changed, unchanged, gone = ledger.compare(comparison.read())
    found = {"new": new + pending, "changed": changed, "unchanged": unchanged}
    for location, group in groupby(contents.shards, lambda unit: unit.location):
        found[comparison.add(location, list(group))] += 1
    if columns.key is not None:
        records = chain(key_records(contents.base, contents.readable, columns.key), comparison.keys_of_gone())
        refuse_equal_keys(columns.key, records)
    # What the run has not done yet aside.
    if new or comparison.added or comparison.replaced or found["changed"]:
        summary.unlink(missing_ok=True)
        described = json.dumps(json.loads(ledger.description()) | {"skipped": asdict(contents.skipped)})
        in_order, replaced = contents.source == "list", comparison.replaced
        ledger.extend(described, shard_size, in_order=in_order, replaced=replaced, added=comparison.added)
    return Increment(**found, gone=gone + len(comparison.containers))


class _Comparison:
    """Of tar and Parquet files. added, replaced: what the run lacks, see `Ledger.extend`. containers: those of the run
    that were not compared yet, at the end those that are gone, with their shards."""

    def __init__(self, ledger: Ledger, out: Path, contents: Inventory) -> None:
        self._ledger, self._out, self._base = ledger, out, contents.base
        self.added: list[Shard] = []
        self.replaced: list[tuple[int, Shard]] = []
        self.containers: dict[str, list[tuple[int, Shard]]] = {}
        # Shards whose finished file is there.
        self._finished = set[int]()

    def read(self) -> Iterator[tuple[int, str | None, int, int]]:
        """For `Ledger.compare`; beside that, note finished files and containers."""
        for number, shard, digest in self._ledger.shards():
            if digest is not None and part_path(self._out, number).is_file():
                self._finished.add(number)
            if shard.kind != "images":
                self.containers.setdefault(shard.location, []).append((number, shard))
            elif number in self._finished:
                for place, version in enumerate(self._column(number, VERSION)):
                    yield shard.start + place + 1, version, number, place

    def _column(self, shard: int, name: str) -> Iterator[str | None]:
        import pyarrow.parquet as pq

        with part_path(self._out, shard).open("rb") as file:
            for batch in pq.ParquetFile(file).iter_batches(columns=[name]):
                yield from batch.column(0).to_pylist()

    def add(self, location: str, units: list[Shard]) -> str:
        """Compare a file with the run: what it is now, as a field of `Increment`."""
        shards = self.containers.pop(location, [])
        done = [number for number, _ in shards if number in self._finished]
        versions = {version for number in done for version in self._column(number, VERSION)}
        whole = len(done) == len(shards)
        # Of a file whose parts have no row nothing is known. One may have changed before it was read.
        same_rows = _rows(shard for _, shard in shards) == _rows(units)
        changed = versions - {version_of(join(self._base, location))} or (whole and not versions) or not same_rows
        if changed:
            # Parquet may have more row groups than before, or fewer: the others become parts without rows.
            self.added += units[len(shards) :]
            units += [Shard("parquet", location, 0, 0)] * (len(shards) - len(units))
            self.replaced += [(number, unit) for (number, _), unit in zip(shards, units, strict=False)]
        return "changed" if changed and done else "unchanged" if shards and whole else "new"

    def keys_of_gone(self) -> Iterator[tuple[str, str]]:
        """Rows of files that are gone stay: their keys may not come again."""
        for location, shards in self.containers.items():
            for number in (number for number, _ in shards if number in self._finished):
                part = part_path(self._out, number).name
                for row, key in enumerate(self._column(number, "path")):
                    if key is not None:
                        yield key, f"row {row} of {part} in the output, whose {location} is gone"


def _rows(shards: Iterable[Shard]) -> list[tuple[int, int | None]]:
    return [(shard.start, shard.count) for shard in shards if shard.count != 0]
