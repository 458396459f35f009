"""Bundles in object stores and on web servers: copied by URL into the cache of this machine, file by file.

A bundle is a folder whose manifest names every file with its size and digest, so nothing has to be listed, and what is
read is the manifest's or is refused. A bundle that is there already is not read again; its manifest, certificate and
signature are, so that a new one is found.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, SIGNATURE, Manifest
from vitx.core.console import log
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, missing_package
from vitx.core.files import cache_folder, sha256_bytes, staged_folder

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)", re.DOTALL)  # a path has one slash of the two; a drive has one letter
_BLOCK = 2**20


def url_of(path: Path | str) -> str | None:
    """The URL that a path was made of, without a slash at its end; None for a path of this machine."""
    found = _URL.fullmatch(str(path).rstrip("/"))
    return None if found is None else f"{found[1]}://{found[2]}"


def local_bundle(path: Path | str) -> Path:
    """The folder of a bundle: `path` itself, or where a URL's was copied to, now if it was not there.

    s3://BUCKET/NAME.vitx, gs://…, az://…, hf://USER/REPOSITORY/NAME.vitx, https://…: what fsspec and its packages open,
    with their ways to give credentials. Raises InputError for what is no bundle, CheckFailed for a file that is not the
    manifest's, EnvironmentMissing for a store that does not answer or whose package is not installed.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    store = _Store(url)
    heads = {name: content for name in (MANIFEST, CERTIFICATE, SIGNATURE) if (content := store.small(name)) is not None}
    if MANIFEST not in heads:
        raise InputError(f"'{url}' is not a bundle: it has no {MANIFEST}")
    try:
        manifest = Manifest.model_validate_json(heads[MANIFEST])
    except ValidationError as error:
        raise InputError(f"'{url}/{MANIFEST}' is not a valid manifest: {error.errors()[0]['msg']}") from None
    version = sha256_bytes(repr((url, sorted(heads.items()))).encode())[:32]
    folder = cache_folder() / "bundles" / version / f"{manifest.name}.vitx"
    if not folder.is_dir():
        size = sum(entry.size for entry in manifest.files.values())
        log(f"vitx: copying {url} ({size / 1e6:.1f} MB) to {folder}")
        if (latency := store.small(LATENCY)) is not None:
            heads[LATENCY] = latency
        with staged_folder(folder) as stage:
            for name, content in heads.items():
                (stage / name).write_bytes(content)
            for name, entry in manifest.files.items():
                store.copy(name, _below(stage, name, url), entry.size, entry.sha256)
    return folder


class _Store:
    """The folder at a URL."""

    def __init__(self, url: str) -> None:
        if importlib.util.find_spec("fsspec") is None:
            raise missing_package("fsspec", "serve")
        from fsspec.core import url_to_fs

        self._url = url
        try:
            self._system, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:  # an unknown scheme, or one whose package is missing
            raise InputError(f"cannot open '{url}': {error}") from None

    def small(self, name: str) -> bytes | None:
        """A file that may be missing; stores that do not let folders be listed refuse it then."""
        with suppress(FileNotFoundError, PermissionError), self._named_errors(name):
            return bytes(self._system.cat_file(f"{self._path}/{name}"))
        return None

    def copy(self, name: str, path: Path, size: int, sha256: str) -> None:
        digest, left = hashlib.sha256(), size + 1  # one more than it may have, to see that it has not
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (
                self._named_errors(name),
                self._system.open(f"{self._path}/{name}", "rb") as file,
                path.open("wb") as copy,
            ):
                while left and (block := file.read(min(left, _BLOCK))):
                    left -= len(block)
                    digest.update(block)
                    copy.write(block)
        except (FileNotFoundError, PermissionError) as error:
            raise InputError(f"'{self._url}/{name}' is listed in the manifest and cannot be read: {error}") from None
        if left != 1 or digest.hexdigest() != sha256:
            raise CheckFailed(f"'{self._url}/{name}' is not the file that its manifest lists: export the bundle again")

    @contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # noqa: BLE001 - each store's client raises its own
            raise EnvironmentMissing(f"cannot read '{self._url}/{name}': {error or type(error).__name__}") from None


def _below(folder: Path, name: str, url: str) -> Path:
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise InputError(f"'{url}/{MANIFEST}' lists '{name[:80]}', which leads out of the bundle")
    return folder / name
