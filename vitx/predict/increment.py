"""`--incremental`: what an input has now, compared with what a run has read of it. Nothing that is gone is removed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from vitx.predict.inputs.inventory import list_input
from vitx.predict.inputs.stores import join, version_of
from vitx.predict.inputs.tables import TableColumns, refuse_equal_keys
from vitx.predict.ledger import Claim, Ledger, Shard
from vitx.predict.outputs.parts import VERSION, part_path, read_column
from vitx.predict.state import Run
from vitx.predict.summary import Increment


def extend_run(
    ledger: Ledger,
    run: Run,
    source: str,
    columns: TableColumns,
    shard_size: int,
    summary: Path,
    *,
    is_output: Callable[[str], bool] = lambda name: False,
) -> Increment:
    """Add to the run what is new or changed in `source`; the file `summary` is removed before the run is changed.

    is_output: see `list_input`.
    """
    if run.created:
        shards = [known.shard for known in ledger.shards()]
        images = sum(shard.count or 0 for shard in shards if shard.kind == "images")
        return Increment(new=images + len({shard.location for shard in shards if shard.kind != "images"}))
    out, containers = summary.parent, dict[str, list[Claim]]()
    contents = list_input(source, ledger, columns, again=True, is_output=is_output)
    new, pending, changed, unchanged, gone = ledger.compare(_read(ledger, out, containers))
    found = {"new": new + pending, "changed": changed, "unchanged": unchanged}
    replaced, added = list[tuple[int, Shard, bool]](), list[Shard]()
    for location, group in groupby(contents.shards, lambda unit: unit.location):
        units, known = list(group), containers.pop(location, [])
        done = [one.id for one in known if one.kept]
        versions = {version for number in done for version in read_column(out, number, VERSION)}
        # Of a file whose parts have no row nothing is known. One may have changed before it was read.
        rows, rows_now = _rows(one.shard for one in known), _rows(units)
        unread = len(done) == len(known) and not versions and (rows_now or not known)
        differs = versions - {version_of(join(run.base, location))} or unread or rows != rows_now
        if differs:
            # Parquet may have more row groups than before, or fewer: the others become parts without rows.
            added += units[len(known) :]
            units += [Shard("parquet", location, 0, 0)] * (len(known) - len(units))
            # Not rows that another part may have now: a key would be there twice.
            alone = len(known) == len(units) == 1
            pairs = zip(known, units, strict=False)
            replaced += [(k.id, unit, alone or (columns.key is None and k.shard == unit)) for k, unit in pairs]
        found["changed" if differs and done else "unchanged" if known and len(done) == len(known) else "new"] += 1
    if columns.key is not None:
        refuse_equal_keys(run.base, contents.shards, columns.key, _keys_of_gone(out, containers))
    # What the run has not done yet aside.
    if new or added or replaced or found["changed"]:
        summary.unlink(missing_ok=True)
        described = ledger.description() | {"skipped": asdict(contents.skipped)}
        ledger.extend(described, shard_size, replaced=replaced, added=added)
    return Increment(**found, gone=gone + len(containers))  # what is left of the containers is gone


def _read(ledger: Ledger, out: Path, containers: dict[str, list[Claim]]) -> Iterator[tuple[int, str | None, int, int]]:
    """What was read of single images, see `Ledger.compare`; beside that, note the tar and Parquet files of the run."""
    for claim in ledger.shards():
        if claim.shard.kind != "images":
            containers.setdefault(claim.shard.location, []).append(claim)
        elif claim.kept:
            for place, version in enumerate(read_column(out, claim.id, VERSION)):
                yield claim.shard.start + place + 1, version, claim.id, place


def _keys_of_gone(out: Path, containers: dict[str, list[Claim]]) -> Iterator[tuple[str, str]]:
    """Rows of files that are gone stay: their keys may not come again."""
    for location, known in containers.items():
        for number in (one.id for one in known if one.kept):
            for row, key in enumerate(read_column(out, number, "path")):
                if key is not None:
                    yield key, f"row {row} of {part_path(out, number).name} in the output, whose {location} is gone"


def _rows(shards: Iterable[Shard]) -> list[tuple[int, int | None]]:
    return [(shard.start, shard.count) for shard in shards if shard.count != 0]
