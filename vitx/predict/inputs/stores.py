"""Reading from local files, and from object stores by URL through fsspec.

A location is a path or a URL. Paths are `str` as Python decodes file names (surrogateescape), for names that are not
UTF-8. stopped: when it is set, what a store is asked ends with CancelledError.
"""

import errno
import glob
import inspect
import io
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from vitx.core.errors import EnvironmentMissing, InputError, VitxError
from vitx.core.preprocess import ImageError
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs import remote

# What changes with an object, by the names that stores give it in a listing or a header; the first that there is.
_TAGS = ("ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")


def is_url(location: str) -> bool:
    return "://" in location


def join(base: str, name: str) -> str:
    """Return the location of `name`: unchanged if it is absolute or a URL, else below `base`."""
    # os.path.isabs would take longer than reading the list, so only Windows calls it.
    if not base or is_url(name) or name.startswith("/") or (os.name == "nt" and os.path.isabs(name)):
        return name
    return f"{base.rstrip('/')}/{name}"


def is_image_name(name: str) -> bool:
    stem, _, suffix = name.rstrip("/").rpartition(".")  # a PurePosixPath takes six times as long
    return f".{suffix}".lower() in EXTENSIONS and stem[-1:] not in ("", "/")


def is_hidden(name: str) -> bool:
    """Whether it or a folder in it begins with a dot."""
    return "/." in f"/{name}"


def read_bytes(location: str, stopped: threading.Event | None = None) -> bytes:
    """Return the content of an image file or object; raise ImageError with the reason if it cannot be read."""
    if location.endswith("/"):  # a folder that `walk_images` could not enter
        raise ImageError(_folder_problem(location))
    try:
        return remote.read_object(location, stopped) if is_url(location) else _read_file(location)
    except OSError as error:
        raise ImageError(f"cannot open the image: {error.strerror or error}") from None
    except VitxError as error:  # a URL that nothing here can open is one bad row of a list
        raise ImageError(str(error)) from None


def open_stream(location: str, stopped: threading.Event | None = None) -> BinaryIO:
    """Open a tar, Parquet or list file for reading. Raises OSError then, or when it is read; see `RemoteFile`."""
    if not is_url(location):
        return Path(location).open("rb")
    return cast(BinaryIO, io.BufferedReader(remote.RemoteFile(location, stopped), remote.BLOCK_BYTES))


def walk_images(root: str, skip: Callable[[str], None], *, versions: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield the paths of the images below a folder, relative to it and unsorted, with None or their `versions`.

    skip: called with each other name. A folder that cannot be listed, or that is a link to one of its own parents, is
    yielded too, with a slash at its end: `read_bytes` raises the reason, which becomes a row instead of a silent gap.
    """
    if is_url(root):
        return _walk_remote(root, skip, versions=versions)
    return ((name, version_of(join(root, name)) if versions else None) for name in _walk_local(root, skip))


def version_of(location: str, stopped: threading.Event | None = None) -> str | None:
    """What changes when a file or an object does: size with time or ETag. None: it cannot be told."""
    try:
        if not is_url(location):
            local = os.stat(location)
            return f"{local.st_size}-{local.st_mtime_ns}"
        system, path = remote.remote_filesystem(location)
        ask = partial(remote.ask, system, "info", path, stopped=stopped)
        return _entry_version(remote.attempts(ask, "it gives no answer", stopped))
    except (OSError, ImageError, VitxError):
        return None


def _entry_version(entry: dict[str, Any]) -> str | None:
    tag = next((entry[name] for name in _TAGS if entry.get(name)), None)
    if isinstance(tag, datetime):  # a listing may give a number where a header gives this
        tag = tag.timestamp()
    return None if tag is None else f"{entry.get('size')}-{tag}".replace('"', "")


def expand(pattern: str) -> Iterator[str]:
    """Yield the locations that a glob pattern matches, and remote folders that cannot be listed, as `walk_images`."""
    if not is_url(pattern):
        yield from (path for path in glob.iglob(pattern, recursive=True) if not os.path.isdir(path))
        return
    system, path = remote.remote_filesystem(pattern)
    if _finds_prefixes(system):
        yield from (str(system.unstrip_protocol(match)) for match in _look(pattern, "glob"))
        return
    from fsspec.utils import glob_translate

    fixed = re.split(r"[*?[]", path)[0].rpartition("/")[0]
    depth = math.inf if "**" in path else path.count("/") - fixed.count("/")
    matches = re.compile(glob_translate(path)).match
    for name, entry in _entries(system, fixed, depth):
        found = f"{fixed}/{name}"
        if isinstance(entry, Exception) or (matches(found) and not is_hidden(name)):
            yield str(system.unstrip_protocol(found))


def is_folder(location: str) -> bool:
    return bool(_look(location, "isdir")) if is_url(location) else os.path.isdir(location)


def exists(location: str) -> bool:
    # fsspec's own question takes an HTTP server that does not answer for one that does not have it.
    return _look(location, "info") is not None if is_url(location) else os.path.exists(location)


def _look(location: str, question: str) -> Any:
    """The answer of a store, None if there is nothing."""
    system, path = remote.remote_filesystem(location)
    try:
        return _listed(system, question, path, "it gives no answer")
    except FileNotFoundError:
        return None
    except (OSError, ImageError) as error:
        raise EnvironmentMissing(f"cannot look for '{location}': {error}") from None


def _listed(system: Any, question: str, path: str, problem: str = "cannot list the folder", **options: Any) -> Any:
    """The answer to a question about all of a folder: of an HTTP server it is one page."""
    seconds = 0 if remote.is_http(path) else remote.LIST_SECONDS
    return remote.attempts(lambda: remote.ask(system, question, path, seconds=seconds, **options), problem)


def _finds_prefixes(system: Any) -> bool:
    """Whether it is one of fsspec's object stores (s3fs, gcsfs, adlfs), which list keys without walking folders."""
    return "prefix" in inspect.signature(getattr(system, "_find", None) or system.find).parameters


def _read_file(path: str) -> bytes:
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer for ever.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("not a regular file")
        remote.check_size(found.st_size)
        return file.read()


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
                    # Of a link that leads to itself, only os.path tells that it is no folder.
                    if not hidden and (os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()):
                        todo.append((f"{prefix}{entry.name}/", above | {here}))
                    elif not hidden and is_image_name(entry.name):
                        yield prefix + entry.name
                    else:
                        skip(prefix + entry.name)
        except OSError as error:
            if not prefix:
                raise InputError(f"cannot list the folder '{root}': {error.strerror}") from None
            yield prefix


def _folder_problem(location: str) -> str:
    try:
        if is_url(location):
            _list_remote(*remote.remote_filesystem(location))
            return "the folder could not be listed, and now can: predict its images with another run"
        with os.scandir(location):
            return "a link to one of its own parent folders: not followed"
    except ImageError as error:
        return str(error)
    except OSError as error:
        return f"cannot list the folder: {error.strerror or error}"


def _walk_remote(root: str, skip: Callable[[str], None], *, versions: bool) -> Iterator[tuple[str, str | None]]:
    system, top = remote.remote_filesystem(root)
    system.invalidate_cache()  # of an earlier listing in this process
    top = top.rstrip("/")
    for name, entry in _entries(system, top):
        # What lies below an empty name has none that `join` could put below the root.
        given = str(system.unstrip_protocol(f"{top}/{name}")) if "//" in f"/{name}" else name
        if isinstance(entry, Exception):
            if not name:
                raise InputError(f"cannot list the folder '{root}': {entry}") from None
            entry = {}
        elif is_hidden(name) or not is_image_name(name):
            skip(given)
            continue
        yield given, (_entry_version(entry) or version_of(join(root, given))) if versions else None


def _entries(
    system: Any, top: str, depth: float = math.inf
) -> Iterator[tuple[str, dict[str, Any] | ImageError | OSError]]:
    """Yield the names below a folder, relative to it, with what the store says of each.

    Of a folder that cannot be listed, which fsspec's `walk` leaves out, with a slash at its end and the error.
    """
    todo = [""]
    while todo:
        prefix = todo.pop()
        folder = f"{top}/{prefix}".rstrip("/") or "/"
        try:
            entries = _list_remote(system, folder)
            # An object store's keys such as FOLDER//x.jpg: no listing of folders has them.
            keys = _listed(system, "find", folder, prefix="/") if _finds_prefixes(system) else ()
        except (ImageError, OSError) as error:
            yield prefix, error
            continue
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry["type"] != "directory" or is_hidden(name):
                yield prefix + name, entry
            elif name and prefix.count("/") + 1 < depth:
                todo.append(f"{prefix}{name}/")
        yield from ((prefix + key[len(folder) + 1 :], {}) for key in keys if key.startswith(f"{folder}//"))


def _list_remote(system: Any, path: str) -> list[dict[str, Any]]:
    """The entries of a folder, without the one that some stores give for the folder itself."""
    entries = _listed(system, "ls", path, detail=True)
    return [entry for entry in entries if str(entry["name"]).strip("/") != path.strip("/")]
