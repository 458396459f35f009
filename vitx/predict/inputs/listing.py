"""A sorted list of any number of paths in flat memory: sorted runs on the disk, merged into one file.

The file holds NUL-terminated records, because a file name may hold a line break.
"""

import hashlib
import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO

# Records sorted in memory at once.
RUN_SIZE = 50_000
# Bytes read at once; small, because each run that is merged holds the records of one block.
BLOCK = 1 << 12


@dataclass(frozen=True)
class Range:
    """`count` records of a list, from byte `start` on."""

    start: int
    count: int


def write_list(path: Path, records: Iterable[str], shard_size: int) -> tuple[list[Range], str]:
    """Write records in the order given; return the ranges of `shard_size` records each, and the file's sha256."""
    ranges: list[Range] = []
    hasher = hashlib.sha256()
    remaining = iter(records)
    position = 0
    with path.open("wb") as file:
        while shard := list(islice(remaining, shard_size)):
            encoded = os.fsencode("\0".join(shard)) + b"\0"  # one call a record would take longer than all else here
            file.write(encoded)
            hasher.update(encoded)
            ranges.append(Range(position, len(shard)))
            position += len(encoded)
        file.flush()
        os.fsync(file.fileno())
    return ranges, hasher.hexdigest()


def read_range(path: Path, part: Range) -> Iterator[str]:
    """Yield the records of one range."""
    with path.open("rb") as file:
        file.seek(part.start)
        decoded = (os.fsdecode(b"\0".join(block)).split("\0") for block in _blocks(file))
        yield from islice(chain.from_iterable(decoded), part.count)


def sort_paths(paths: Iterable[str], folder: Path) -> Iterator[str]:
    """Yield paths in the order of their parts, as `sorted` of `Path`s would; temporary files lie in `folder`."""
    encoded = map(os.fsencode, paths)
    with ExitStack() as open_files:
        runs: list[Iterator[bytes]] = []
        while True:
            run = sorted(islice(encoded, RUN_SIZE), key=_by_parts)
            if len(run) < RUN_SIZE:  # the last one stays in memory
                runs.append(iter(run))
                break
            file = open_files.enter_context(tempfile.TemporaryFile(dir=folder))
            file.writelines(record + b"\0" for record in run)
            file.seek(0)
            runs.append(_records(file))
            del run  # before the next takes as much again
        yield from map(os.fsdecode, heapq.merge(*runs, key=_by_parts))


def _by_parts(path: bytes) -> bytes:
    return path.replace(b"/", b"\0")


def _records(file: IO[bytes]) -> Iterator[bytes]:
    return chain.from_iterable(_blocks(file))


def _blocks(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield the records that end in each block."""
    rest = b""
    while block := file.read(BLOCK):
        *whole, rest = (rest + block).split(b"\0")
        if whole:
            yield whole
