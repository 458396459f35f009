"""What is to be predicted, cut into shards: ranges of a list of images, tar files, row groups of Parquet files."""

import glob
import hashlib
import io
import itertools
import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs.listing import Range, read_range, sort_paths, write_list
from vitx.predict.inputs.stores import (
    MAX_BYTES,
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

Kind = Literal["images", "tar", "parquet"]
TAR_NAMES = (".tar", ".tar.gz", ".tgz")
LIST_NAMES = (".txt", ".lst", ".list")
# Where a Parquet file has several columns that may hold images, one of these is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp", "bytes")
# Images of a Parquet file that are in memory at once.
PARQUET_ROWS = 64


@dataclass(frozen=True)
class Shard:
    """The unit of work. `images`: `count` records of the list from byte `start`; `parquet`: row group `start`.

    count is None where it takes reading the whole shard to know it.
    """

    kind: Kind
    location: str
    start: int = 0
    count: int | None = None


class Item(NamedTuple):
    """One image: its key in the output, and where it lies, or its bytes, or why there are none."""

    key: str
    source: str | bytes | ImageError


@dataclass(frozen=True)
class Inventory:
    """All shards of an input. base: where the records of the list lie; digest: changes when the listing does."""

    base: str
    shards: tuple[Shard, ...]
    digest: str


def take_inventory(source: str, listing: Path, shard_size: int) -> Inventory:
    """List `source`, and write the paths of its images to `listing`, in sorted order.

    source: a folder of images (or, when it holds none, of tar or Parquet files), a glob pattern, one tar or Parquet
    file or image, a text file with one path or URL a line (relative to the file's folder), or any of these by URL.
    Memory does not grow with the number of images. Raises InputError when there is nothing to predict.
    """
    source = source if is_url(source) else source.rstrip("/") or "/"
    base, containers, images = _listed(source, listing.parent)
    ranges, digest = write_list(listing, images, shard_size)
    shards = [Shard("images", "", part.start, part.count) for part in ranges]
    for name in containers:
        shards += _container(base, name)
    if not shards:
        known = ", ".join(sorted(EXTENSIONS))
        kind = "holds" if is_folder(source) else "names"
        raise InputError(f"'{source}' {kind} no image: looked for {known}, in subfolders too")
    told = f"{digest} {base} {[shard for shard in shards if shard.kind != 'images']}"
    return Inventory(base, tuple(shards), hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest())


def _listed(source: str, scratch: Path) -> tuple[str, list[str], Iterable[str]]:
    """(base, tar and Parquet files, images) of an input; names are relative to the base."""
    if is_folder(source):
        images = sort_paths(walk_images(source), scratch)
        first = next(images, None)
        if first is not None:
            return source, [], itertools.chain([first], images)
        prefix = len(source.rstrip("/")) + 1
        escaped = source.rstrip("/") if is_url(source) else glob.escape(source.rstrip("/"))
        found = (path for path in expand(f"{escaped}/*") if _is_container(path))
        return source, sorted(path[prefix:] for path in found), ()
    if not exists(source):
        if glob.has_magic(source):
            # Two passes, so that neither kind is held in memory for the other.
            containers = sorted(path for path in expand(source) if _is_container(path))
            return "", containers, sort_paths((path for path in expand(source) if is_image_name(path)), scratch)
        raise InputError(f"no folder at '{source}': expected a folder of images, a file, a pattern or a URL")
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
        f"'{source}' is no known kind of input: expected a folder, an image, .tar, .tar.gz, .parquet, "
        f"or a list of paths in {', '.join(LIST_NAMES)}"
    )


def _is_container(name: str) -> bool:
    return name.lower().endswith((*TAR_NAMES, ".parquet"))


def _lines(source: str) -> Iterator[str]:
    with io.TextIOWrapper(open_stream(source), encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            if path := line.rstrip("\r\n"):
                yield path


def _container(base: str, name: str) -> list[Shard]:
    if not name.lower().endswith(".parquet"):
        return [Shard("tar", name)]
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_stream(join(base, name)) as file:
            metadata = pq.ParquetFile(file).metadata
            rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    except (OSError, pa.ArrowException):
        return [Shard("parquet", name)]  # a row with the reason, when it is read
    return [Shard("parquet", name, index, count) for index, count in enumerate(rows)]


def read_shard(shard: Shard, base: str, listing: Path, image_column: str | None) -> Generator[Item, None, None]:
    """Yield the images of a shard, always in the same order. What cannot be read of it is one Item with the error.

    Raises InputError when `image_column` is not there, or none was given and there is a choice.
    """
    match shard.kind:
        case "images":
            part = Range(shard.start, shard.count or 0)
            yield from (Item(name, join(base, name)) for name in read_range(listing, part))
        case "tar":
            yield from _tar_items(shard, base)
        case "parquet":
            yield from _parquet_items(shard, base, image_column)


def read_item(item: Item) -> Item:
    """The same image with its bytes, or with the reason why they cannot be read."""
    if not isinstance(item.source, str):
        return item
    try:
        return Item(item.key, read_bytes(item.source))
    except ImageError as error:
        return Item(item.key, error)


def _tar_items(shard: Shard, base: str) -> Iterator[Item]:
    try:
        with open_stream(join(base, shard.location)) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                # An archive remembers all its members, which a stream cannot go back to anyway.
                archive.members = []  # type: ignore[attr-defined]  # documented nowhere, there since Python 2.3
                if not member.isdir() and _is_shown_image(member.name):
                    yield Item(f"{shard.location}/{member.name}", _tar_member(archive, member))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        yield Item(shard.location, ImageError(f"cannot read the tar file to its end: {error}"))


def _is_shown_image(name: str) -> bool:
    """By its last suffix, as of a file: a tar need not be of WebDataset samples, whose names end at their first dot."""
    return is_image_name(name) and not name.rpartition("/")[2].startswith(".")


def _tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | ImageError:
    if member.size > MAX_BYTES:
        return ImageError(f"file of {member.size} bytes: more than the {MAX_BYTES:,} that an image may have")
    content = archive.extractfile(member) if member.isfile() else None
    return ImageError("not a regular file") if content is None else content.read()


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
            for batch in parquet.iter_batches(PARQUET_ROWS, row_groups=[shard.start], columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield Item(f"{shard.location}/{first + row:07d}", _parquet_value(value, folder))
                    row += 1
    except (OSError, pa.ArrowException) as error:
        reason = ImageError(f"cannot read row group {shard.start} of the Parquet file beyond row {row}: {error}")
        yield Item(f"{shard.location}/group-{shard.start}", reason)


def _parquet_value(value: Any, folder: str) -> str | bytes | ImageError:
    """bytes, or Hugging Face's struct of bytes and path, one of which may be missing; relative to the file."""
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
        wanted = f"'{given}'" if given is not None else f"one of bytes, or one of them named {', '.join(IMAGE_COLUMNS)}"
        raise InputError(
            f"{location} has the columns {', '.join(schema.names)}, of bytes: {', '.join(found) or 'none'}: "
            f"expected {wanted}; name it with --image-column"
        )
    return preferred[0]
