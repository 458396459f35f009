"""The input, cut into shards: ranges of a list of image files, tar files, or row groups of Parquet files.

A shard here is the unit of work. WebDataset calls its tar files shards; here each tar file is one shard too.
"""

import glob
import hashlib
import io
import itertools
import os
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs.listing import RecordRange, read_range, sort_paths, write_list
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.stores import (
    exists,
    expand,
    is_folder,
    is_image_name,
    is_url,
    join,
    open_stream,
    read_bytes,
    walk_images,
)
from vitx.predict.inputs.tables import TableColumns, Tables, read_rows
from vitx.predict.inputs.tars import ERRORS as TAR_ERRORS
from vitx.predict.inputs.tars import tar_images
from vitx.predict.options import WHOLE, Share

ShardKind = Literal["images", "tar", "parquet"]
Source = Literal["folder", "pattern", "list", "image"]
TAR_NAMES = (".tar", ".tar.gz", ".tgz")
LIST_NAMES = (".txt", ".lst", ".list")


@dataclass(frozen=True)
class Shard:
    """The unit of work, by kind.

    images: `count` records of the list, from byte `start` on; location is empty. tar: the file at `location`. parquet:
    the row group of the file at `location` that begins with row `start`, or all of a file without a `count`. count:
    the number of images, None if only reading the shard can tell.
    """

    kind: ShardKind
    location: str
    start: int = 0
    count: int | None = None


class Item(NamedTuple):
    """An image: its key (the `path` in the output), and its location, its bytes, or why it cannot be read.

    copied: a `pyarrow.RecordBatch` of one row: columns of a Parquet file that go on to the output.
    """

    key: str
    source: str | bytes | ImageError
    copied: Any = None


@dataclass(frozen=True)
class Inventory:
    """The shards of an input, or of one share of it.

    base: the folder or URL that names are relative to. digest: identifies the listing of the whole input. source: what
    names the single images. skipped: names beside them; counted in the first share. schema: a `pyarrow.Schema` of the
    columns of Parquet files that go on to the output, None if there are none.
    """

    base: str
    shards: tuple[Shard, ...]
    digest: str
    share: Share = WHOLE
    source: Source = "folder"
    skipped: SkippedNames = field(default_factory=SkippedNames)
    schema: Any = None

    def numbered(self) -> Iterator[tuple[int, Shard]]:
        """The shards with their numbers, from 1; different ones in every share."""
        return zip(itertools.count(self.share.number, self.share.jobs), self.shards)


def take_inventory(
    source: str, listing: Path, shard_size: int, columns: TableColumns = TableColumns(), share: Share = WHOLE
) -> Inventory:
    """List `source`, and write the paths of its single images to the file `listing`, sorted; those of `share` only.

    source: a folder of images (or, if it has none, of tar or Parquet files), a glob pattern, one tar or Parquet file or
    image, a text file with one path or URL a line (relative to the file's folder, and kept in its order), or any of
    these by URL. Memory does not grow with the number of images. Raises InputError if there is nothing to predict, no
    Parquet file whose `columns` of images and keys are clear, one whose columns cannot go on to the output, or two
    rows of one key.
    """
    source = source if is_url(source) else source.rstrip("/") or "/"
    skipped = SkippedNames()
    base, containers, images = _list_input(source, listing.parent, skipped)
    written = write_list(listing, images, shard_size, share)
    tables = Tables(columns)
    units = [unit for name in containers for unit in _container_shards(base, name, tables)]
    if tables.refused and len(tables.refused) == len(units) and not written.total:
        raise tables.refused[0]
    if not units and not written.total:
        known = ", ".join(sorted(EXTENSIONS))
        kind = "holds" if is_folder(source) else "names"
        raise InputError(f"'{source}' {kind} no image: looked for {known}, in subfolders too")
    if columns.key is not None and (written.total or any(unit.kind != "parquet" for unit in units)):
        raise InputError(f"--key {columns.key} is of Parquet files, and '{source}' has others too: predict those apart")
    tables.refuse_equal_keys(base, listing.parent)
    digest = hashlib.sha256(f"{written.digest} {base} {units}".encode("utf-8", "backslashreplace")).hexdigest()
    ranges = (Shard("images", "", part.start, part.count) for part in written.ranges)
    units = units[share.number - 1 :: share.jobs]
    beside = skipped if share.number == 1 else SkippedNames()
    return Inventory(base, (*ranges, *units), digest, share, _source(source), beside, tables.schema())


def _source(source: str) -> Source:
    if is_folder(source):
        return "folder"
    if not exists(source):
        return "pattern"
    return "list" if source.lower().endswith(LIST_NAMES) else "image"


def _list_input(source: str, scratch: Path, skipped: SkippedNames) -> tuple[str, list[str], Iterable[str]]:
    """Return (base, tar and Parquet files, single images) of an input; names are relative to the base."""
    if is_folder(source):
        images = sort_paths(walk_images(source, skipped), scratch)
        first = next(images, None)
        if first is not None:
            return source, [], itertools.chain([first], images)
        escaped = source.rstrip("/") if is_url(source) else glob.escape(source.rstrip("/"))
        found = (path for path in expand(f"{escaped}/*") if _is_container(path))
        # The last part of each: a store may write the folder's URL otherwise than it was given.
        containers = sorted(os.path.basename(path) for path in found)
        for name in containers:
            skipped.remove(name)
        return source, containers, ()
    if not exists(source):
        if glob.has_magic(source):
            # Two passes over the matches, so that the images need not be kept in memory.
            containers = sorted(path for path in expand(source) if _is_container(path))
            return "", containers, sort_paths(_matched_images(source, skipped), scratch)
        raise InputError(f"there is nothing at '{source}': expected a folder of images, a file, a pattern or a URL")
    folder, _, name = source.rpartition("/")
    base = folder or ("/" if source.startswith("/") else "")
    if base.endswith(":/"):  # memory://images.tar has no folder
        base, name = "", source
    if name.lower().endswith(LIST_NAMES):
        return base, [], _lines(source)
    if _is_container(name):
        return base, [name], ()
    if is_image_name(name):
        return base, [], [name]
    raise InputError(
        f"'{source}' is not a known kind of input: expected a folder, an image, .tar, .tar.gz, .parquet, "
        f"or a list of paths in {', '.join(LIST_NAMES)}"
    )


def _matched_images(pattern: str, skipped: SkippedNames) -> Iterator[str]:
    for path in expand(pattern):
        if is_image_name(path):
            yield path
        elif not _is_container(path):
            skipped.add(path)


def _is_container(name: str) -> bool:
    return name.lower().endswith((*TAR_NAMES, ".parquet"))


def _lines(source: str) -> Iterator[str]:
    # utf-8-sig: some editors begin a file with a mark of its encoding.
    with io.TextIOWrapper(open_stream(source), encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise InputError(
                    f"line {number} of '{source}' has a zero byte, which no path has: expected one path a line, in "
                    "UTF-8 (a list in UTF-16 has to be converted)"
                )
            if path := line.rstrip("\r\n"):
                yield path


def _container_shards(base: str, name: str, tables: Tables) -> list[Shard]:
    if not name.lower().endswith(".parquet"):
        return [Shard("tar", name)]
    return [Shard("parquet", name, start, count) for start, count in tables.row_groups(base, name)]


def read_shard(
    shard: Shard,
    base: str,
    listing: Path,
    columns: TableColumns = TableColumns(),
    skipped: SkippedNames | None = None,
) -> Generator[Item, None, None]:
    """Yield the images of a shard, always in the same order; of a tar file, other names are added to `skipped`.

    What cannot be read is an Item with the error for each row of a row group that was listed, or one for the rest of a
    file whose images were not counted.
    """
    match shard.kind:
        case "images":
            part = RecordRange(shard.start, shard.count or 0)
            yield from (Item(name, join(base, name)) for name in read_range(listing, part))
        case "tar":
            yield from _tar_items(shard, base, skipped)
        case "parquet":
            yield from _parquet_items(shard, base, columns)


def read_item(item: Item) -> Item:
    """Return the image with its bytes, or with the reason why they cannot be read."""
    if not isinstance(item.source, str):
        return item
    try:
        return item._replace(source=read_bytes(item.source))
    except ImageError as error:
        return item._replace(source=error)


def _tar_items(shard: Shard, base: str, skipped: SkippedNames | None) -> Iterator[Item]:
    try:
        with open_stream(join(base, shard.location)) as file:
            for name, content in tar_images(file, skipped):
                yield Item(f"{shard.location}/{name}", content)
    except TAR_ERRORS as error:
        reason = f"cannot read the tar file to its end, what follows was not predicted: {error}"
        yield Item(shard.location, ImageError(reason))


def _parquet_items(shard: Shard, base: str, columns: TableColumns) -> Iterator[Item]:
    import pyarrow as pa

    row, end = shard.start, shard.start + (shard.count or 0)
    try:
        for image, key, copied in read_rows(base, shard.location, shard.start, shard.count, columns):
            yield Item(f"{shard.location}/{row:07d}" if key is None else key, image, copied)
            row += 1
        return
    except InputError as error:  # about its columns
        reason = ImageError(str(error))
    except (OSError, pa.ArrowException) as error:
        reason = ImageError(f"cannot read the Parquet file beyond row {row}: {error}")
    if shard.count is None:
        yield Item(shard.location, reason)
    for lost in range(row, end):
        yield Item(f"{shard.location}/{lost:07d}", reason)
