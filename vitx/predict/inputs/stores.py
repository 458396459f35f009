"""Reading from local files, and from object stores by URL through fsspec.

A location is a path or a URL. Paths are `str` as Python decodes file names (surrogateescape), so that names which are
not UTF-8 work too.
"""

import asyncio
import errno
import glob
import importlib.util
import inspect
import os
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

from vitx.core.errors import EnvironmentMissing, InputError, VitxError, missing_package
from vitx.core.preprocess import MAX_PIXELS, ImageError
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs.skipped import SkippedNames

T = TypeVar("T")

# The size of an uncompressed image of MAX_PIXELS with four bytes a pixel. Larger files are not read into memory.
MAX_IMAGE_BYTES = 4 * MAX_PIXELS
# Seconds to wait before the second and the third attempt at a remote object.
REMOTE_WAITS = (0.2, 1.0)
# Seconds of an attempt to read an image from a store, and between two looks whether to go on with it.
READ_SECONDS, LOOK_SECONDS = 120.0, 0.2
# What changes with an object, by the names that stores give it in a listing or a header; the first that there is.
_TAGS = ("ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")
# Between a name and its version; a version has none.
MARK = "\x01"


def is_url(location: str) -> bool:
    return "://" in location


def join(base: str, name: str) -> str:
    """Return the location of `name`: unchanged if it is absolute or a URL, else below `base`."""
    # os.path.isabs would take longer than reading the list, so only Windows calls it.
    if not base or is_url(name) or name.startswith("/") or (os.name == "nt" and os.path.isabs(name)):
        return name
    return f"{base.rstrip('/')}/{name}"


def is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in EXTENSIONS


def read_bytes(location: str, stopped: threading.Event | None = None) -> bytes:
    """Return the content of an image file or object; raise ImageError with the reason if it cannot be read.

    stopped: when it is set, a request to a store is cancelled; then raises CancelledError.
    """
    if location.endswith("/"):  # a folder that `walk_images` could not enter
        raise ImageError(_folder_problem(location))
    try:
        return _read_remote(location, stopped or threading.Event()) if is_url(location) else _read_file(location)
    except OSError as error:
        raise ImageError(f"cannot open the image: {error.strerror or error}") from None
    except VitxError as error:  # a URL that nothing here can open is one bad row of a list
        raise ImageError(str(error)) from None


def open_stream(location: str) -> BinaryIO:
    """Open a tar, Parquet or list file for reading; raise OSError if it cannot be opened."""
    if not is_url(location):
        return Path(location).open("rb")
    system, path = remote_filesystem(location)
    return cast(BinaryIO, system.open(path, "rb"))


def walk_images(root: str, skipped: SkippedNames | None = None, *, versions: bool = False) -> Iterator[str]:
    """Yield the paths of the images below a folder, relative to it and unsorted; other names are added to `skipped`.

    versions: each path is followed by MARK and its version, empty if that cannot be told.

    Links to folders are followed. A folder that cannot be listed, or that is a link to one of its own parents, is
    yielded too, with a slash at its end: `read_bytes` raises the reason, which becomes a row instead of a silent gap.
    """
    skip = SkippedNames().add if skipped is None else skipped.add
    if is_url(root):
        return _walk_remote(root, skip, versions=versions)
    names = _walk_local(root, skip)
    return (with_version(name, join(root, name)) for name in names) if versions else names


def with_version(name: str, location: str) -> str:
    return f"{name}{MARK}{version_of(location) or ''}"


def version_of(location: str) -> str | None:
    """What changes when a file or an object does: size with time or ETag. None: it cannot be told."""
    try:
        if not is_url(location):
            found = os.stat(location)
            return f"{found.st_size}-{found.st_mtime_ns}"
        system, path = remote_filesystem(location)
        return _entry_version(attempts(lambda: system.info(path), "it gives no answer"))
    except (OSError, ImageError, VitxError):
        return None


def _entry_version(entry: dict[str, Any]) -> str | None:
    tag = next((entry[name] for name in _TAGS if entry.get(name)), None)
    if isinstance(tag, datetime):  # a listing may give a number where a header gives this
        tag = tag.timestamp()
    return None if tag is None else f"{entry.get('size')}-{tag}".replace('"', "")


def expand(pattern: str) -> Iterator[str]:
    """Yield the locations that a glob pattern (*, ?, [], **) matches, unsorted."""
    if not is_url(pattern):
        yield from (path for path in glob.iglob(pattern, recursive=True) if not os.path.isdir(path))
        return
    system, path = remote_filesystem(pattern)
    yield from (str(system.unstrip_protocol(match)) for match in system.glob(path))


def is_folder(location: str) -> bool:
    if not is_url(location):
        return os.path.isdir(location)
    return _ask(location, "isdir")


def exists(location: str) -> bool:
    if not is_url(location):
        return os.path.exists(location)
    return _ask(location, "exists")


def _ask(location: str, question: str) -> bool:
    system, path = remote_filesystem(location)
    try:
        return bool(attempts(lambda: getattr(system, question)(path), "it gives no answer"))
    except (OSError, ImageError) as error:
        raise EnvironmentMissing(f"cannot look for '{location}': {error}") from None


def remote_filesystem(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it. fsspec caches the file system of each store."""
    if importlib.util.find_spec("fsspec") is None:
        raise missing_package("fsspec", "serve")
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(location)
    except (ImportError, ValueError) as error:  # a protocol that fsspec does not know, or whose package is missing
        raise InputError(f"cannot open '{location}': {error}") from None
    return system, str(path)


def _read_file(path: str) -> bytes:
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer for ever.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("not a regular file")
        check_size(found.st_size)
        return file.read()


def check_size(size: int) -> None:
    """Raise ImageError for more bytes than MAX_IMAGE_BYTES; of a store no more are read to count them."""
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size} bytes or more: more than the {MAX_IMAGE_BYTES:,} that an image may have")


def _read_remote(location: str, stopped: threading.Event) -> bytes:
    """By one request, which asks for one byte more than an image may have."""
    system, path = remote_filesystem(location)
    limit = MAX_IMAGE_BYTES + 1

    def read() -> bytes:
        if location.startswith(("http://", "https://")):
            return _completed(system, _get_http(system, path), stopped)
        try:
            if getattr(system, "async_impl", False):
                return _completed(system, system._cat_file(path, start=0, end=limit), stopped)
            return bytes(system.cat_file(path, start=0, end=limit))
        except (CancelledError, TimeoutError, FileNotFoundError, PermissionError):
            raise
        except Exception:
            with suppress(Exception):
                if system.info(path)["size"] == 0:  # S3 refuses any range of an empty object
                    return b""
            raise

    content = attempts(read, "cannot read the object")
    check_size(len(content))
    return content


async def _get_http(system: Any, url: str) -> bytes:
    """The object, if it is not too large: fsspec would read all that a server sends which ignores the range."""
    session = await system.set_session()
    async with session.get(system.encode_url(url), **system.kwargs) as answer:
        if answer.status in (404, 410):
            raise FileNotFoundError(f"HTTP status {answer.status}")
        if answer.status in (401, 403):
            raise PermissionError(f"HTTP status {answer.status}")
        answer.raise_for_status()
        content = bytearray()
        async for block in answer.content.iter_any():
            content += block
            check_size(len(content))
        return bytes(content)


def _completed(system: Any, request: Coroutine[Any, Any, bytes], stopped: threading.Event) -> bytes:
    """What the request gives; raises TimeoutError after READ_SECONDS, CancelledError when `stopped` is set."""
    future = asyncio.run_coroutine_threadsafe(request, system.loop)
    end = time.monotonic() + READ_SECONDS
    while not future.done():
        if stopped.is_set() or time.monotonic() > end:
            future.cancel()
            raise CancelledError if stopped.is_set() else TimeoutError(f"not read within {READ_SECONDS:g} s")
        futures.wait([future], LOOK_SECONDS)
    return future.result()


def attempts(function: Callable[[], T], problem: str) -> T:
    """The value of `function`, which is called again unless its error will not change; at last raise ImageError."""
    for wait in (*REMOTE_WAITS, None):
        try:
            return function()
        except (FileNotFoundError, PermissionError, IsADirectoryError, ImageError, CancelledError):
            raise
        # Each store raises its own library's errors. Whatever it is, it becomes the text of a row.
        except Exception as error:  # noqa: BLE001
            if wait is None:
                raise ImageError(f"{problem}: {type(error).__name__}: {error}") from None
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _walk_local(root: str, skip: Callable[[str], None]) -> Iterator[str]:
    # Folders to list, each with (device, inode) of the folders above it: a folder among them is a circle of links.
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        prefix, above = todo.pop()
        folder = os.path.join(root, prefix)
        try:
            found = os.stat(folder)
            here = (found.st_dev, found.st_ino)
            if here in above:
                yield prefix
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    hidden = entry.name.startswith(".")
                    if not hidden and _is_folder(entry):
                        todo.append((f"{prefix}{entry.name}/", above | {here}))
                    elif not hidden and is_image_name(entry.name):
                        yield prefix + entry.name
                    else:
                        skip(prefix + entry.name)
        except OSError as error:
            if not prefix:
                raise InputError(f"cannot list the folder '{root}': {error.strerror}") from None
            yield prefix


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _folder_problem(location: str) -> str:
    if is_url(location):
        try:
            _list_remote(*remote_filesystem(location))
        except (ImageError, OSError) as error:
            return str(error) if isinstance(error, ImageError) else f"cannot list the folder: {error}"
        return "the folder could not be listed, and now can: predict its images with another run"
    try:
        with os.scandir(location):
            return "a link to one of its own parent folders: not followed"
    except OSError as error:
        return f"cannot list the folder: {error.strerror}"


def _walk_remote(root: str, skip: Callable[[str], None], *, versions: bool) -> Iterator[str]:
    """Not by fsspec's `walk`, which leaves out what it cannot list."""
    system, top = remote_filesystem(root)
    system.invalidate_cache()  # of an earlier listing in this process
    top = top.rstrip("/")

    def named(name: str, entry: dict[str, Any]) -> str:
        if not versions:
            return name
        version = _entry_version(entry)
        return with_version(name, join(root, name)) if version is None else f"{name}{MARK}{version}"

    todo = [""]
    while todo:
        prefix = todo.pop()
        folder = f"{top}/{prefix}".rstrip("/") or "/"
        try:
            entries = _list_remote(system, folder)
            below_empty_names = _list_below_empty_names(system, folder, skip)
        except (ImageError, OSError) as error:
            if not prefix:
                raise InputError(f"cannot list the folder '{root}': {error}") from None
            yield named(prefix, {})
            continue
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if not name:
                continue
            hidden = name.startswith(".")
            if not hidden and entry["type"] == "directory":
                todo.append(f"{prefix}{name}/")
            elif not hidden and is_image_name(name):
                yield named(prefix + name, entry)
            else:
                skip(prefix + name)
        yield from (named(name, {}) for name in below_empty_names)


def _list_below_empty_names(system: Any, folder: str, skip: Callable[[str], None]) -> list[str]:
    """The URLs of an object store's images such as FOLDER//x.jpg, which no listing of folders has."""
    find = getattr(system, "_find", None) or system.find
    if "prefix" not in inspect.signature(find).parameters:  # of fsspec's object stores: s3fs, gcsfs, adlfs
        return []
    found = attempts(lambda: system.find(folder, prefix="/"), "cannot list the folder")
    images = []
    for path in found:
        name = path[len(folder) :]
        if name.startswith("//") and is_image_name(name) and "/." not in name:
            images.append(str(system.unstrip_protocol(path)))
        elif name.startswith("//"):
            skip(str(system.unstrip_protocol(path)))
    return images


def _list_remote(system: Any, path: str) -> list[dict[str, Any]]:
    """The entries of a folder, without the one that some stores give for the folder itself."""
    entries: list[dict[str, Any]] = attempts(lambda: system.ls(path, detail=True), "cannot list the folder")
    return [entry for entry in entries if str(entry["name"]).strip("/") != path.strip("/")]
