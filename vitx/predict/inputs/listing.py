"""A sorted list of any number of paths in flat memory, by external merge sort: sorted runs on the disk, then one merge.

The list is a file of NUL-terminated records, because a file name may have a line break in it but no NUL.
"""

import hashlib
import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import IO

from vitx.core.files import sync, sync_open
from vitx.predict.options import WHOLE, Share

# Records of a run, which is sorted in memory.
RUN_SIZE = 50_000
# Records that are hashed by one call.
HASHED_RECORDS = 4096
# Bytes read at once. Small, because the merge has one block of every run in memory.
BLOCK_BYTES = 1 << 12


def write_list(
    path: Path, records: Iterable[str], shard_size: int, share: Share = WHOLE
) -> tuple[list[tuple[int, int]], str]:
    """Write the records of a share, every Nth of N jobs, in ranges of `shard_size` (the last is shorter).

    Return the first byte and the number of records of each range, and the sha256 of the records of all shares.
    """
    ranges: list[tuple[int, int]] = []
    hasher = hashlib.sha256()
    position = 0

    def hashed() -> Iterator[list[str]]:
        remaining = iter(records)
        while block := list(islice(remaining, HASHED_RECORDS)):
            hasher.update(_encoded(block))
            yield block

    own = islice(chain.from_iterable(hashed()), share.number - 1, None, share.jobs)
    with path.open("wb") as file:
        while shard := list(islice(own, shard_size)):
            encoded = _encoded(shard)
            file.write(encoded)
            ranges.append((position, len(shard)))
            position += len(encoded)
        sync_open(file)
    sync(path.parent)  # name and content are on the disk before the ledger refers to them
    return ranges, hasher.hexdigest()


def _encoded(records: list[str]) -> bytes:
    # Joined first: one call for each record would take longer than all else here.
    return os.fsencode("\0".join(records)) + b"\0"


def read_range(path: Path, start: int, count: int) -> Iterator[str]:
    """Yield `count` records from byte `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        decoded = (os.fsdecode(b"\0".join(block)).split("\0") for block in _blocks(file))
        yield from islice(chain.from_iterable(decoded), count)


def sort_paths(paths: Iterable[str], folder: Path) -> Iterator[str]:
    """Yield paths sorted by their parts, as `sorted` sorts `Path`s. Temporary files are made in `folder`."""
    encoded = map(os.fsencode, paths)
    with ExitStack() as open_files:
        runs: list[Iterator[bytes]] = []
        while True:
            run = sorted(islice(encoded, RUN_SIZE), key=_by_parts)
            if len(run) < RUN_SIZE:  # the last run stays in memory
                runs.append(iter(run))
                break
            file = open_files.enter_context(tempfile.TemporaryFile(dir=folder))
            file.writelines(record + b"\0" for record in run)
            file.seek(0)
            runs.append(chain.from_iterable(_blocks(file)))
            del run  # free it before the next run is built
        yield from map(os.fsdecode, heapq.merge(*runs, key=_by_parts))


def _by_parts(path: bytes) -> bytes:
    """A sort key with / before every other byte: "a/b" before "a-b", as the part "a" is before "a-b"."""
    return path.replace(b"/", b"\0")


def _blocks(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield, for each block that is read, the records that end in it."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        *whole, rest = (rest + block).split(b"\0")
        if whole:
            yield whole
