"""The input, cut into shards: ranges of a list of image files, tar files, or row groups of Parquet files.

A shard here is the unit of work. WebDataset calls its tar files shards; here each tar file is one shard too.
"""

import io
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import escape_invalid_utf8, sha256_bytes
from vitx.core.preprocess import ImageError, UInt8Array
from vitx.core.urls import is_http
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs import stores
from vitx.predict.inputs.remote import NotGiven, NotRead
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tables import READ_ERRORS, TableColumns, list_tables, read_rows, refuse_equal_keys
from vitx.predict.inputs.tars import ERRORS as TAR_ERRORS
from vitx.predict.inputs.tars import tar_images
from vitx.predict.ledger import Ledger, Shard, image_shards, names_of
from vitx.predict.options import WHOLE, Share

Source = Literal["folder", "pattern", "list", "image"]
CONTAINER_NAMES = (".tar", ".tar.gz", ".tgz", ".parquet")
LIST_NAMES = (".txt", ".lst", ".list")
# Characters of a line of a list, and of a list: what a server sends may have no end.
MAX_LINE, MAX_LIST = 1 << 16, 1 << 37
# Versions that are asked for at once.
VERSION_THREADS = 16


class Item(NamedTuple):
    """An image: its key (the `path` in the output), and its location, bytes, pixels, or why it cannot be read.

    copied: a `pyarrow.RecordBatch` of one row of columns that go on to the output. version: see `stores.version_of`.
    place: in its shard, where rows of it are kept. uncounted: the error is of a file or a folder that was not read to
    its end, so it hides any number of images.
    """

    key: str
    source: str | bytes | UInt8Array | ImageError
    copied: Any = None
    version: str | None = None
    place: int = 0
    uncounted: bool = False


@dataclass(frozen=True)
class Inventory:
    """The shards of an input, or of one share of it.

    base: the folder or URL that names are relative to. digest: of the listing of the whole input. source: what names
    the single images. skipped: names beside them; counted in the first share. schema: see `TableColumns`. unread: the
    Parquet files of the whole input that could not be read.
    """

    base: str
    shards: tuple[Shard, ...]
    digest: str = ""
    source: Source = "folder"
    skipped: SkippedNames = field(default_factory=SkippedNames)
    schema: Any = None
    unread: tuple[str, ...] = ()


def take_inventory(
    source: str,
    ledger: Ledger,
    shard_size: int,
    columns: TableColumns = TableColumns(),
    share: Share | None = WHOLE,
    *,
    is_output: Callable[[str], bool] = lambda name: False,
) -> Inventory:
    """List `source`, and make its single images, those of `share` only, the images of the ledger; None: for the digest.

    source: a folder of images (or, if it has none, of tar or Parquet files), a glob pattern, one tar or Parquet file or
    image, a text file with one path or URL a line (relative to the file's folder, and kept in its order), or any of
    these by URL. is_output: see `list_input`. Raises InputError if there is nothing to predict, for columns of Parquet
    files that are not clear or cannot go on to the output, or two rows of one key.
    """
    found = list_input(source, ledger, columns, is_output=is_output)
    if columns.key is not None:
        refuse_equal_keys(found.base, found.shards, columns.key)
    count, listed = ledger.number(share)
    # A Parquet file that could not be read when the run was created is one shard of it, also when it is whole later.
    before = frozenset(ledger.description().get("unread", ()))
    files = dict.fromkeys(replace(one, start=0, count=None) if one.location in before else one for one in found.shards)
    base = "" if found.source == "pattern" else stores.without_user(found.base)
    digest = sha256_bytes(f"{listed} {base} {list(files)}".encode("utf-8", "backslashreplace"))
    unread = tuple(one.location for one in found.shards if one.kind == "parquet" and one.count is None)
    share = share or WHOLE
    shards = (*image_shards(0, count, shard_size), *found.shards[share.number - 1 :: share.jobs])
    skipped = found.skipped if share.number == 1 else SkippedNames()
    return replace(found, shards=shards, digest=digest, skipped=skipped, unread=unread)


def list_input(
    source: str,
    ledger: Ledger,
    columns: TableColumns,
    *,
    again: bool = False,
    is_output: Callable[[str], bool] = lambda name: False,
) -> Inventory:
    """List an input, see `take_inventory`: its single images for `Ledger.find`; the shards are of all other files.

    again: it was listed before, and `columns` has the schema that was found then; the images have versions.
    is_output: of a name that a pattern finds, whether the run has written it; then it is left out.
    """
    source = source if stores.is_url(source) else source.rstrip("/") or "/"
    where = stores.shown(source)
    if source.startswith(("http://", "https://")) and not is_http(source):
        raise InputError(
            f"'{where}' names no host, or no port that can be one: expected a URL as http://HOST:PORT/NAME"
        )
    containers: list[str] = []
    # The first tar or Parquet file that is skipped for its place.
    below: list[str] = []
    skipped = SkippedNames()
    # Of an HTTP server any page may be one: what has the name of a file is not read to look for links in it.
    file = stores.is_image_name(source) or source.lower().endswith((*CONTAINER_NAMES, *LIST_NAMES))
    folder = not (file and is_http(source)) and stores.is_folder(source)

    def beside(name: str) -> None:
        if named == "pattern" and is_output(name):
            return
        taken = name.lower().endswith(CONTAINER_NAMES) and not (folder and (name.startswith(".") or "/" in name))
        containers.append(name) if taken else skipped.add(name)
        if not (taken or below or stores.is_hidden(name)) and name.lower().endswith(CONTAINER_NAMES):
            below.append(name)

    named: Source = "folder"
    if folder:
        base, images = base_of(source, named), stores.walk_images(source, beside, versions=again)
    else:
        named, names = named_images(source, beside)
        base = base_of(source, named)
        images = _with_versions(base, names) if again else ((name, None) for name in names)
    count = ledger.find(images, in_order=named == "list", once=again)  # then all names beside them have been seen
    if count and folder:
        if containers and again and any(ledger.shards("kind IN ('tar', 'parquet')")):
            raise InputError(
                f"'{where}' had tar or Parquet files alone, and now has images beside them: move those away, or name "
                "the files by a pattern from the first run on"
            )
        for name in containers:
            skipped.add(name)
        containers = []
    units, schema, refused = list_tables(base, sorted(containers), columns, again=again)
    if not count and all(unit.count == 0 for unit in units):
        if containers:
            raise InputError(f"'{where}' has no images: none of its Parquet files, such as {containers[0]}, has a row")
        known = ", ".join(sorted(EXTENSIONS))
        kind = "holds" if folder else "names"
        more = "".join(f"; {name} is below it: name such files by a pattern, '{where}/**/*'" for name in below)
        raise InputError(f"'{where}' {kind} no image: looked for {known}, in subfolders too{more}")
    if units and len(refused) == len(units) and not count:
        raise refused[0]
    if columns.key is not None and (count or any(unit.kind != "parquet" for unit in units)):
        others = f"'{where}' has others too, or a folder that cannot be listed"
        raise InputError(f"--key {columns.key} is of Parquet files, and {others}: predict those apart")
    return Inventory(base, tuple(units), source=named, skipped=skipped, schema=schema)


def base_of(source: str, named: Source) -> str:
    """What the names of an input are relative to; of a pattern by URL it is told who asks for them."""
    if named == "folder":
        return source
    above = source.rpartition("/")[0]
    base = above or ("/" if source.startswith("/") else "")
    # memory://images.tar has no folder.
    return stores.host_of(source) if named == "pattern" else "" if base.endswith(":/") else base


def named_images(source: str, beside: Callable[[str], None]) -> tuple[Source, Iterator[str]]:
    """What names the images of an input that is no folder, and themselves; `beside` is told other names."""
    if not stores.exists(source):
        if not stores.is_pattern(source):
            where = stores.shown(source)
            raise InputError(f"there is nothing at '{where}': expected a folder of images, a file, a pattern or a URL")
        return "pattern", _images_of(stores.expand(source), beside)
    name = source.rpartition("/")[2] if base_of(source, "image") else source
    if name.lower().endswith(LIST_NAMES):
        return "list", _lines(source)
    if not (stores.is_image_name(name) or name.lower().endswith(CONTAINER_NAMES)):
        raise InputError(
            f"'{stores.shown(source)}' is not a known kind of input: expected a folder, an image, .tar, .tar.gz, "
            f".parquet, or a list of paths in {', '.join(LIST_NAMES)}"
        )
    return "image", _images_of([name], beside)


def _images_of(names: Iterable[str], beside: Callable[[str], None]) -> Iterator[str]:
    for name in names:
        if stores.is_image_name(name) or name.endswith("/"):  # or a folder that cannot be listed
            yield name
        else:
            beside(name)


def _lines(source: str) -> Iterator[str]:
    number = length = 0
    shown = stores.shown(source)
    try:
        # utf-8-sig: some editors begin a file with a mark of its encoding.
        content = stores.open_stream(source) if stores.is_url(source) else open(source, "rb")  # noqa: SIM115 - or a pipe
        with io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), ""), 1):
                length += len(line)
                if "\0" in line:
                    raise InputError(
                        f"line {number} of '{shown}' has a zero byte, which no path has: expected one path a line, in "
                        "UTF-8 (a list in UTF-16 has to be converted)"
                    )
                if len(line) == MAX_LINE or length > MAX_LIST:
                    raise InputError(
                        f"line {number} of '{shown}' ends behind {MAX_LINE:,} characters, or the list behind "
                        f"{MAX_LIST:,}: expected one path a line; a longer list has to be cut"
                    )
                if path := line.rstrip("\r\n"):
                    yield path
    except OSError as error:
        where = f"the list '{shown}' beyond line {number}"
        raise EnvironmentMissing(
            f"cannot read {where}: {error}; nothing was begun: run the same command again"
        ) from None


def _with_versions(base: str, names: Iterator[str]) -> Generator[tuple[str, str | None], None, None]:
    stopped = threading.Event()
    pool = ThreadPoolExecutor(VERSION_THREADS)
    try:
        while block := list(itertools.islice(names, 1024)):
            yield from pool.map(lambda name: (name, stores.version_of(stores.join(base, name), stopped)), block)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def read_shard(
    shard: Shard,
    base: str,
    listing: Path,
    columns: TableColumns = TableColumns(),
    skipped: SkippedNames | None = None,
    *,
    versions: bool = False,
    stopped: threading.Event | None = None,
) -> Generator[Item, None, None]:
    """Yield the images of a shard, always in the same order; of a tar file, other names are added to `skipped`.

    listing: see `names_of`. versions: of tar and Parquet files; of single images `read_item` tells them. What cannot be
    read is an Item with the error for each listed row, or one for the rest of a file whose images were not counted.
    """
    named = escape_invalid_utf8  # not keys of the user's own: those are valid, and to be found again as they are
    if shard.kind == "images":
        yield from (Item(named(name), stores.join(base, name)) for name in names_of(shard, listing))
        return
    version = stores.version_of(stores.join(base, shard.location), stopped) if versions else None
    row, end = shard.start, shard.start + (shard.count or 0)
    try:
        if shard.kind == "parquet":
            for image, key, copied in read_rows(shard, base, columns, stopped):
                yield Item(named(f"{shard.location}/{row:07d}") if key is None else key, image, copied, version)
                row += 1
        else:
            seen: Counter[int] = Counter()  # of hashes: a million names would take more memory
            with stores.open_stream(stores.join(base, shard.location), stopped) as file:
                for name, content in tar_images(file, skipped, stopped):
                    seen[hash(name)] += 1
                    place = "" if seen[hash(name)] == 1 else f"/{seen[hash(name)]}"  # which is the name of no image
                    yield Item(named(f"{shard.location}/{name}{place}"), content, version=version)
        return
    except InputError as error:  # about the columns of a Parquet file
        reason = ImageError(str(error))
    except (*TAR_ERRORS, *READ_ERRORS) as error:
        where = f"Parquet file beyond row {row}"
        if shard.kind == "tar":
            where = "tar file to its end, what follows was not predicted"
        kind = stores.Gone if isinstance(error, FileNotFoundError) else ImageError
        reason = kind(f"cannot read the {where}: {error}")
        if isinstance(error, (NotGiven, PermissionError)) or getattr(error, "errno", None):
            version = None  # no content was read that would be the same the next time
    if shard.count is None:
        yield Item(named(shard.location), reason, version=version, uncounted=True)
    for lost in range(row, end):
        yield Item(named(f"{shard.location}/{lost:07d}"), reason, version=version)


def read_item(
    item: Item,
    *,
    versions: bool = False,
    single: bool = True,
    found: bool = False,
    unlisted: Collection[str] = (),
    stopped: threading.Event | None = None,
) -> Item:
    """Return the image with its bytes, or with the reason why they cannot be read.

    single: false if a Parquet file names it, whose version is that of the row, or tells none. found: see `read_bytes`.
    unlisted: keys of folders of which an increment has found nothing.
    """
    if not isinstance(item.source, str):
        return item
    source = item.source
    if versions and single:  # before it is read: what changes meanwhile has another version then
        item = item._replace(version=stores.version_of(source, stopped))
    try:
        return item._replace(source=stores.read_bytes(source, stopped, found=found))
    except ImageError as error:
        # An increment has found what is in a folder, unless that could not be listed a moment ago either.
        known = versions and item.key not in unlisted and isinstance(error, stores.ListedNow)
        if single and isinstance(error, NotRead):
            item = item._replace(version=None)  # it is no other when it can be read
        return item._replace(source=error, uncounted=isinstance(error, stores.NotListed) and not known)
