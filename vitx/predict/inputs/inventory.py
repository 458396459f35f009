"""The input, cut into shards: ranges of a list of image files, tar files, or row groups of Parquet files.

A shard here is the unit of work. WebDataset calls its tar files shards; here each tar file is one shard too.
"""

import glob
import hashlib
import io
import itertools
import os
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs.listing import RecordRange, read_range, sort_paths, write_list
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
from vitx.predict.inputs.tars import ERRORS as TAR_ERRORS
from vitx.predict.inputs.tars import tar_images
from vitx.predict.options import WHOLE, Share

ShardKind = Literal["images", "tar", "parquet"]
TAR_NAMES = (".tar", ".tar.gz", ".tgz")
LIST_NAMES = (".txt", ".lst", ".list")
# If several columns of a Parquet file may hold images, the first of these names is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp", "bytes")
# Rows of a Parquet file that are in memory at once.
PARQUET_BATCH_ROWS = 64


@dataclass(frozen=True)
class Shard:
    """The unit of work, by kind.

    images: `count` records of the list, from byte `start` on; location is empty. tar: the file at `location`. parquet:
    row group `start` of the file at `location`. count: the number of images, None if only reading the shard can tell.
    """

    kind: ShardKind
    location: str
    start: int = 0
    count: int | None = None


class Item(NamedTuple):
    """An image: its key (the `path` in the output), and its location, its bytes, or why it cannot be read."""

    key: str
    source: str | bytes | ImageError


@dataclass(frozen=True)
class Inventory:
    """The shards of an input, or of one share of it.

    base: the folder or URL that names are relative to. digest: identifies the listing of the whole input.
    """

    base: str
    shards: tuple[Shard, ...]
    digest: str
    share: Share = WHOLE

    def numbered(self) -> Iterator[tuple[int, Shard]]:
        """The shards with their numbers, from 1; different ones in every share."""
        return zip(itertools.count(self.share.number, self.share.jobs), self.shards)


def take_inventory(
    source: str, listing: Path, shard_size: int, image_column: str | None = None, share: Share = WHOLE
) -> Inventory:
    """List `source`, and write the paths of its single images to the file `listing`, sorted; those of `share` only.

    source: a folder of images (or, if it has none, of tar or Parquet files), a glob pattern, one tar or Parquet file or
    image, a text file with one path or URL a line (relative to the file's folder, and kept in its order), or any of
    these by URL. Memory does not grow with the number of images. Raises InputError if there is nothing to predict, or
    no Parquet file whose images are in `image_column`, or in one that can be told without it.
    """
    source = source if is_url(source) else source.rstrip("/") or "/"
    base, containers, images = _list_input(source, listing.parent)
    written = write_list(listing, images, shard_size, share)
    refused: list[InputError] = []
    units = [unit for name in containers for unit in _container_shards(base, name, image_column, refused)]
    if refused and len(refused) == len(units) and not written.total:
        raise refused[0]
    if not units and not written.total:
        known = ", ".join(sorted(EXTENSIONS))
        kind = "holds" if is_folder(source) else "names"
        raise InputError(f"'{source}' {kind} no image: looked for {known}, in subfolders too")
    digest = hashlib.sha256(f"{written.digest} {base} {units}".encode("utf-8", "backslashreplace")).hexdigest()
    ranges = (Shard("images", "", part.start, part.count) for part in written.ranges)
    return Inventory(base, (*ranges, *units[share.number - 1 :: share.jobs]), digest, share)


def _list_input(source: str, scratch: Path) -> tuple[str, list[str], Iterable[str]]:
    """Return (base, tar and Parquet files, single images) of an input; names are relative to the base."""
    if is_folder(source):
        images = sort_paths(walk_images(source), scratch)
        first = next(images, None)
        if first is not None:
            return source, [], itertools.chain([first], images)
        escaped = source.rstrip("/") if is_url(source) else glob.escape(source.rstrip("/"))
        found = (path for path in expand(f"{escaped}/*") if _is_container(path))
        # The last part of each: a store may write the folder's URL otherwise than it was given.
        return source, sorted(os.path.basename(path) for path in found), ()
    if not exists(source):
        if glob.has_magic(source):
            # Two passes over the matches, so that the images need not be kept in memory.
            containers = sorted(path for path in expand(source) if _is_container(path))
            return "", containers, sort_paths((path for path in expand(source) if is_image_name(path)), scratch)
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


def _container_shards(base: str, name: str, image_column: str | None, refused: list[InputError]) -> list[Shard]:
    """The shards of a tar or Parquet file. One whose column of images is not clear is one shard, and is `refused`."""
    if not name.lower().endswith(".parquet"):
        return [Shard("tar", name)]
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_stream(join(base, name)) as file:
            parquet = pq.ParquetFile(file)
            metadata = parquet.metadata
            _image_column(parquet.schema_arrow, image_column, name)
            rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    except (OSError, pa.ArrowException):
        return [Shard("parquet", name)]  # reading it gives a row with the reason
    except InputError as error:
        refused.append(error)
        return [Shard("parquet", name)]
    return [Shard("parquet", name, index, count) for index, count in enumerate(rows)]


def read_shard(shard: Shard, base: str, listing: Path, image_column: str | None) -> Generator[Item, None, None]:
    """Yield the images of a shard, always in the same order. If the rest is unreadable, one Item has the error."""
    match shard.kind:
        case "images":
            part = RecordRange(shard.start, shard.count or 0)
            yield from (Item(name, join(base, name)) for name in read_range(listing, part))
        case "tar":
            yield from _tar_items(shard, base)
        case "parquet":
            yield from _parquet_items(shard, base, image_column)


def read_item(item: Item) -> Item:
    """Return the image with its bytes, or with the reason why they cannot be read."""
    if not isinstance(item.source, str):
        return item
    try:
        return Item(item.key, read_bytes(item.source))
    except ImageError as error:
        return Item(item.key, error)


def _tar_items(shard: Shard, base: str) -> Iterator[Item]:
    try:
        with open_stream(join(base, shard.location)) as file:
            for name, content in tar_images(file):
                yield Item(f"{shard.location}/{name}", content)
    except TAR_ERRORS as error:
        reason = f"cannot read the tar file to its end, what follows was not predicted: {error}"
        yield Item(shard.location, ImageError(reason))


def _parquet_items(shard: Shard, base: str, image_column: str | None) -> Iterator[Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    folder = join(base, shard.location).rpartition("/")[0]
    try:
        with open_stream(join(base, shard.location)) as file:
            parquet = pq.ParquetFile(file)
            first = sum(parquet.metadata.row_group(index).num_rows for index in range(shard.start))
            column = _image_column(parquet.schema_arrow, image_column, shard.location)
            if not parquet.metadata.num_row_groups:
                return
            for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, row_groups=[shard.start], columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield Item(f"{shard.location}/{first + row:07d}", _parquet_value(value, folder))
                    row += 1
    except InputError as error:  # about its columns
        yield Item(shard.location, ImageError(str(error)))
    except (OSError, pa.ArrowException) as error:
        reason = ImageError(f"cannot read row group {shard.start} of the Parquet file beyond row {row}: {error}")
        yield Item(f"{shard.location}/group-{shard.start}", reason)


def _parquet_value(value: Any, folder: str) -> str | bytes | ImageError:
    """value: bytes, or Hugging Face's struct of bytes and path; without bytes the path counts, relative to `folder`."""
    if isinstance(value, dict):
        path = value.get("path")
        value = value["bytes"] if value["bytes"] is not None else path and join(folder, path)
    return value or ImageError("not an image: empty")


def _image_column(schema: Any, given: str | None, location: str) -> str:
    import pyarrow.types as types

    def may_hold_images(kind: Any) -> bool:
        plain = types.is_binary(kind) or types.is_large_binary(kind)
        return bool(plain or (types.is_struct(kind) and kind.get_field_index("bytes") >= 0))

    found = [field.name for field in schema if may_hold_images(field.type)]
    if given is not None and given in found:
        return given
    preferred = found if len(found) == 1 else [name for name in IMAGE_COLUMNS if name in found][:1]
    if given is not None or not preferred:
        wanted = f"'{given}'" if given is not None else f"a single one, or one named {', '.join(IMAGE_COLUMNS)}"
        raise InputError(
            f"{location} has the columns {', '.join(schema.names)}, of which {', '.join(found) or 'none'} may hold "
            f"images: expected {wanted}; name it with --image-column"
        )
    return preferred[0]
