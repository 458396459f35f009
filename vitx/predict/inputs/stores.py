"""Reading from local files, and from object stores by URL through fsspec.

A location is a path or a URL. Paths are `str` as Python decodes file names (surrogateescape), for names that are not
UTF-8. stopped: when it is set, what a store is asked ends with CancelledError.
"""

import errno
import glob
import html
import inspect
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any, BinaryIO, cast

from vitx.core.errors import TOO_MANY_FILES, EnvironmentMissing, InputError, VitxError
from vitx.core.preprocess import ImageError
from vitx.core.urls import is_http, without_password
from vitx.data.image_set import EXTENSIONS
from vitx.predict.inputs import remote

# Names below a folder, each with what a store says of it, or why it cannot be listed.
Entries = Iterator[tuple[str, dict[str, Any] | ImageError | OSError]]
Above = frozenset[tuple[int, int]]
# What changes with an object, by the names that stores give it in a listing or a header; the first that there is.
_TAGS = ("ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")
# As `glob.escape` writes a character of a pattern that means itself.
_ESCAPED = re.compile(r"\[([*?[])\]")
# Over HTTP: the scheme, who asks, and the host. Of other URLs the user may be a part of the place.
_USER, _PASSWORD = re.compile(r"(https?://)([^/\s]*@)([^/]*)"), re.compile(r"(://[^/\s:@]*):[^/\s]*@")
# A folder of an archive, and the archive that it is in.
_CHAIN = re.compile(r"(.*?://.*?)(::[a-z0-9_]+://.*)", re.DOTALL)
_OF_THIS_MACHINE = ("file://", "local://")
_HOST_WITH_USER = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*@[^/]*", re.IGNORECASE)


class Gone(remote.NotRead):
    """There is nothing at the location."""


class NotListed(ImageError):
    """The location is a folder that could not be listed, with nobody knows how many images."""


class ListedNow(NotListed):
    """It can be listed by now."""


def is_url(location: str) -> bool:
    return "://" in location


def local(location: str) -> str:
    """The path of a `file://` URL, anything else as it is: there fsspec follows no link, and waits for pipes."""
    return str(remote.remote_filesystem(location)[1]) if location.startswith(_OF_THIS_MACHINE) else location


def join(base: str, name: str) -> str:
    """Return the location of `name`: below `base`, unless it is absolute or a URL.

    The user and the password of its host are in `base` alone: names are written down.
    """
    # os.path.isabs would take longer than reading the list, so only Windows calls it.
    if not base or is_url(name) or name.startswith("/") or (os.name == "nt" and os.path.isabs(name)):
        host = host_of(base) if "@" in base else ""
        told = without_user(host)
        return f"{host}{name.removeprefix(told)}" if host and f"{name}/".startswith(f"{told}/") else name
    chain = _CHAIN.match(base) if "::" in base else None
    folder, behind = chain.groups() if chain else (base, "")
    return f"{folder.rstrip('/')}/{name}{behind}"


def host_of(url: str) -> str:
    """With its user and password, for `join`; empty if the URL has none."""
    found = _HOST_WITH_USER.match(url)
    return found[0] if found else ""


def without_user(url: str) -> str:
    """A URL without the password in it; over HTTP without the user too, whose name may be a token."""
    return _PASSWORD.sub(r"\1@", _USER.sub(r"\1\3", url))


def absolute(location: str) -> str:
    """A URL as it is, and a path or pattern as `os.path.abspath`, but `..` behind a link is where the system goes."""
    if is_url(location):
        return location
    above, dots, below = f"{location}/".rpartition("/../")
    here = "" if os.path.isabs(location) else os.getcwd()  # which may be gone, and none needs it then
    folder, name = (os.path.realpath(f"{above}/.."), below.strip("/")) if dots else (here, location)
    # Of a pattern the folders above are none: they may have brackets or stars in their names.
    return os.path.abspath(os.path.join(folder if os.path.exists(location) else glob.escape(folder), name))


def is_pattern(location: str) -> bool:
    """Whether stars, question marks or brackets are in it; those of an IPv6 address are not."""
    return any(map(glob.has_magic, location.split("/")[_host_parts(location) :]))


def _host_parts(location: str) -> int:
    """How many parts between slashes, from the first on, are the scheme and the host of an HTTP server."""
    return 3 if is_http(location) else 0


def shown(location: str) -> str:
    """What a message or a summary says of it: without password and query, if it is a URL."""
    return without_password(location) if is_url(location) else location


def is_image_name(name: str) -> bool:
    stem, _, suffix = name.rstrip("/").rpartition(".")  # a PurePosixPath takes six times as long
    return f".{suffix}".lower() in EXTENSIONS and stem[-1:] not in ("", "/")


def is_hidden(name: str) -> bool:
    """Whether it or a folder in it begins with a dot."""
    return "/." in f"/{name}"


def read_bytes(location: str, stopped: threading.Event | None = None, *, found: bool = False) -> bytes:
    """Return the content of an image file or object; raise ImageError with the reason if it cannot be read.

    found: in a folder or by a pattern; else what ends with a slash may be an image of an HTTP server.
    EnvironmentMissing if that is this machine's fault, such as too many open files.
    """
    if location.endswith("/") and (found or not is_http(location)):  # perhaps one that `walk_images` did not enter
        raise _folder_problem(location)
    try:
        location = local(location)
        return remote.read_object(location, stopped) if is_url(location) else _read_file(location)
    except remote.NotRead:
        raise
    except InputError as error:
        raise ImageError(str(error)) from None  # a URL that nothing here can open is one bad row of a list
    except (OSError, ValueError) as error:  # a path of a Parquet file may have a zero byte
        kind: type[ImageError] = Gone if isinstance(error, FileNotFoundError) else remote.NotRead
        if isinstance(error, IsADirectoryError):  # it would be read again each time
            kind = ImageError
        raise kind(f"cannot open the image: {getattr(error, 'strerror', None) or error}") from None


def open_stream(location: str, stopped: threading.Event | None = None) -> BinaryIO:
    """Open a tar or Parquet file for reading. Raises OSError then, or when it is read; see `RemoteFile`."""
    location = local(location)
    if not is_url(location):
        try:
            return _opened_file(location)
        except ImageError as error:
            raise OSError(f"'{location}' is {error}") from None
    return cast(BinaryIO, remote.BlockReader(remote.RemoteFile(location, stopped)))


def walk_images(root: str, skip: Callable[[str], None], *, versions: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield the paths of the images below a folder, relative to it and unsorted, with None or their `versions`.

    skip: called with each other name. A folder that cannot be listed, or that is a link to one of its own parents, is
    yielded too, with a slash at its end: `read_bytes` raises the reason, which becomes a row instead of a silent gap.
    """
    system, top = _opened(root)
    for name, entry in _entries(system, top):
        # What lies below an empty name has none that `join` could put below the root.
        odd = "//" in f"/{name}"
        given = _location(system, f"{top.rstrip('/')}/{name}", _lost_host(system, top, root)) if odd else name
        if isinstance(entry, Exception):
            entry = {}
        elif is_hidden(name) or not is_image_name(name):
            skip(given)
            continue
        yield given, (_entry_version(entry) or version_of(join(root, given))) if versions else None


def version_of(location: str, stopped: threading.Event | None = None) -> str | None:
    """What changes when a file or an object does: size with time or ETag. None: it cannot be told."""
    try:
        location = local(location)
        if not is_url(location):
            found = os.stat(location)
            return f"{found.st_size}-{found.st_mtime_ns}"
        system, path = remote.remote_filesystem(location)
        ask = partial(remote.ask, system, "info", path, stopped=stopped)
        return _entry_version(remote.attempts(ask, "it gives no answer", stopped))
    except (OSError, ValueError, VitxError):
        return None


def _entry_version(entry: dict[str, Any]) -> str | None:
    tag = next((entry[name] for name in _TAGS if entry.get(name)), None)
    if isinstance(tag, datetime):  # a listing may give a number where a header gives this
        tag = tag.timestamp()
    return None if tag is None else f"{entry.get('size')}-{tag}".replace('"', "")


def expand(pattern: str) -> Iterator[str]:
    """Yield the locations that a glob pattern matches, and folders that cannot be listed, as `walk_images`."""
    # Two stars are special between slashes only.
    system, path = _opened(re.sub(r"(?<![/*])\*\*+|\*\*+(?![/*]|$)", "*", pattern))
    host = _lost_host(system, path, pattern)
    parts = path.rstrip("/").split("/")
    first = _host_parts(path)
    plain = parts[:first] + list(takewhile(lambda part: not glob.has_magic(_ESCAPED.sub("", part)), parts[first:-1]))
    fixed, parts = _ESCAPED.sub(r"\1", "/".join(plain)), parts[len(plain) :]

    def enters(folder: str) -> bool:
        return _match(folder.rstrip("/").split("/"), parts, beginning=True)

    found = _entries(system, fixed, enters)
    if system is not None and _finds_prefixes(system):
        # A glob leaves out keys below an empty name; but without ** it does not list what is below.
        question, where = ("find", fixed) if "**" in parts else ("glob", path)
        matched = (_look(join(host_of(pattern), _location(system, where, host)), question, detail=True) or {}).items()
        there = ((name, entry) for name, entry in matched if name.startswith(f"{fixed}/"))
        found = ((name[len(fixed) + 1 :], entry) for name, entry in there if entry["type"] != "directory")
    for name, entry in found:
        if isinstance(entry, Exception) or (_match(name.split("/"), parts) and not is_hidden(name)):
            yield _location(system, f"{fixed}/{name}", host)


def _match(names: list[str], parts: list[str], *, beginning: bool = False) -> bool:
    """Whether the parts of a path match those of a pattern, or may be the beginning of a path that does."""
    if beginning and (not names or parts[:1] == ["**"]):
        return bool(parts)
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_match(names[count:], parts[1:]) for count in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:], beginning=beginning)


def _opened(location: str) -> tuple[Any, str]:
    """The file system of a URL, or None for a folder of this machine; and the path in it.

    An HTTP server may have a page at one of "…/a" and "…/a/" alone: that path is as it was given.
    """
    path = local(location)
    if not is_url(path):
        return None, absolute(path).rstrip("/")
    system, path = remote.remote_filesystem(location)
    system.invalidate_cache()  # of an earlier listing in this process
    return system, path if is_http(path) else path.rstrip("/")


def canonical(location: str) -> str:
    """A folder or its URL, as the names that `expand` yields begin below it."""
    system, path = _opened(location)
    return _location(system, path, _lost_host(system, path, location))


def within(folders: Iterable[str], names: re.Pattern[str]) -> Callable[[str], bool]:
    """A function that tells whether a name of `expand` is one of `names` in one of the folders, also by way of a link.

    folders: `canonical` each.
    """
    real = lru_cache(maxsize=1024)(os.path.realpath)  # names come folder by folder
    tops = [f"{folder if is_url(folder) else real(folder)}/" for folder in folders]

    def tells(name: str) -> bool:
        path = local(name)
        if not is_url(path):
            path = os.path.join(real(os.path.dirname(path)), os.path.basename(path))
        return any(path.startswith(top) and names.fullmatch(path, len(top)) for top in tops)

    return tells


def _lost_host(system: Any, path: str, url: str) -> str:
    """Scheme and host of a URL if its store's own way to write a `path` leaves the host out, as FTP, HDFS, Azure do.

    Of a `file://` URL the scheme.
    """
    if system is None:
        return next((scheme for scheme in _OF_THIS_MACHINE if url.startswith(scheme)), "")
    told = system._get_kwargs_from_urls
    return "" if told(system.unstrip_protocol(path)) == told(url) else "/".join(url.split("/")[:3])


def _location(system: Any, path: str, host: str = "") -> str:
    """host: see `_lost_host`; of Azure it names the container too, `abfs://CONTAINER@ACCOUNT`, as the path does."""
    if system is None:
        return f"{host}{path}"
    container = host.partition("://")[2].partition("@")[0]
    below = path.removeprefix(f"{container}/").lstrip("/")
    return without_user(f"{host}/{below}" if host else str(system.unstrip_protocol(path)))


def is_folder(location: str) -> bool:
    if not is_url(location):
        return os.path.isdir(location)
    # To fsspec's own question, which Hugging Face's package answers too, any error is a no.
    return bool(_look(location, "isdir")) or (_look(location, "info") or {}).get("type") == "directory"


def exists(location: str) -> bool:
    # fsspec's own question takes an HTTP server that does not answer for one that does not have it.
    return _look(location, "info") is not None if is_url(location) else os.path.exists(location)


def _look(location: str, question: str, **options: Any) -> Any:
    """The answer of a store, None if there is nothing."""
    system, path = remote.remote_filesystem(location)
    try:
        return _listed(system, question, path, "it gives no answer", **options)
    except FileNotFoundError:
        return None
    except (OSError, ImageError) as error:
        raise EnvironmentMissing(f"cannot look for '{shown(location)}': {error}") from None


def _listed(system: Any, question: str, path: str, problem: str = "cannot list the folder", **options: Any) -> Any:
    """The answer to a question about all of a folder: of an HTTP server it is one page."""
    seconds = 0 if is_http(path) else remote.LIST_SECONDS
    return remote.attempts(lambda: remote.ask(system, question, path, seconds=seconds, **options), problem)


def _finds_prefixes(system: Any) -> bool:
    """Whether it is one of fsspec's object stores (s3fs, gcsfs, adlfs), which list keys without walking folders."""
    return "prefix" in inspect.signature(getattr(system, "_find", None) or system.find).parameters


def _opened_file(path: str) -> BinaryIO:
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno in TOO_MANY_FILES:  # no fault of the file: it must not become a row
            raise EnvironmentMissing(f"cannot open '{path}': {error.strerror}; raise the limit (ulimit -n)") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise ImageError("not a regular file")
    return open(descriptor, "rb")


def _read_file(path: str) -> bytes:
    with _opened_file(path) as file:
        remote.check_size(os.fstat(file.fileno()).st_size)
        return file.read()


def _entries(system: Any, top: str, enters: Callable[[str], bool] = lambda folder: True) -> Entries:
    """Yield the names below a folder, relative to it and unsorted, with what a store says of each.

    Of a folder that cannot be listed, or that is a link to one of its own parents, with a slash at its end and the
    error. enters: whether to list a folder, whose path ends with a slash. Raises InputError if `top` cannot be listed.
    """
    # Folders to list, each with those above it as `_children` knows them.
    todo: list[tuple[str, Above]] = [("", frozenset())]
    while todo:
        prefix, above = todo.pop()
        try:
            folder = top if is_http(top) and not prefix else f"{top.rstrip('/')}/{prefix}"
            for name, entry, within in _children(system, folder, above):
                if within is None:
                    yield prefix + name, entry
                elif enters(f"{prefix}{name}/"):
                    todo.append((f"{prefix}{name}/", within))
        except (ImageError, OSError) as error:
            if getattr(error, "errno", None) in TOO_MANY_FILES:  # no fault of the folder: it must not become a row
                raise
            if not prefix:
                reason = getattr(error, "strerror", None) or error
                raise InputError(f"cannot list the folder '{_location(system, top) or '/'}': {reason}") from None
            yield prefix, error


def _children(system: Any, folder: str, above: Above) -> Iterator[tuple[str, dict[str, Any], Above | None]]:
    """Yield each name in a folder, what a store says of it, and of a folder that is not hidden the folders above it.

    Raises OSError for a link to one of the folders `above`, each of which is (device, inode).
    """
    if system is not None:
        path = folder if is_http(folder) else folder.rstrip("/") or "/"
        # An object store's keys such as FOLDER//x.jpg: no listing of folders has them.
        keys = _listed(system, "find", path, prefix="/") if _finds_prefixes(system) else ()
        for entry in _listed(system, "ls", path, detail=True):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            name = html.unescape(name) if is_http(path) else name  # of a link, which fsspec takes as it stands
            if str(entry["name"]).strip("/") != path.strip("/"):
                if name:
                    yield name, entry, None if entry["type"] != "directory" or is_hidden(name) else above
            elif entry.get("size"):  # an object whose key ends with a slash, and no mark of a folder
                yield "", entry, None
        yield from ((key[len(path) + 1 :], {}, None) for key in keys if key.startswith(f"{path}//"))
        return
    found = os.stat(folder)
    here = (found.st_dev, found.st_ino)
    if here in above:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    with os.scandir(folder) as entries:
        for one in entries:
            # Of a link that leads to itself, only os.path tells that it is no folder.
            inside = not one.name.startswith(".") and (os.path.isdir(one) if one.is_symlink() else one.is_dir())
            yield one.name, {}, above | {here} if inside else None


def _folder_problem(location: str) -> ImageError:
    system, path = _opened(location)
    try:
        next(_children(system, f"{path.rstrip('/')}/", frozenset()), None)
    except ImageError as error:
        return NotListed(str(error))
    except OSError as error:
        return NotListed(f"cannot list the folder: {error.strerror or error}")
    if system is not None:
        return ListedNow("a folder, which can be listed now, by another run; or an object whose name ends with a slash")
    if os.path.islink(path):
        return ImageError("a link to one of its own parent folders: not followed")
    return ListedNow("a folder: expected an image")
