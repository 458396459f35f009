"""Bundles on disk by the names of their models: listed, loaded beside the running server, switched to, unloaded."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.serve.errors import RequestError, unavailable
from vitx.serve.loading import Loader, WarmModel
from vitx.serve.metrics import Metrics
from vitx.serve.protocol import VERSION, Contract
from vitx.serve.served_model import ModelSet, ServedModel

SUFFIX = ".vitx"
Signature = tuple[tuple[int, int, int], ...]

_log = logging.getLogger("vitx.serve")


def bundles_in(folder: Path) -> list[Path]:
    """The bundles of a repository folder: NAME.vitx; raise InputError if it is no folder."""
    if not folder.is_dir():
        raise InputError(f"no model repository at '{folder}': expected a folder with bundles NAME{SUFFIX}")
    return sorted(path for path in folder.glob(f"[!.]*{SUFFIX}") if (path / MANIFEST).is_file())


class Repository:
    """The models that a server may load: bundles given by path, and those of a folder, which may come later."""

    def __init__(
        self,
        models: ModelSet,
        loader: Loader,
        metrics: Metrics,
        *,
        given: Mapping[str, Path],
        folder: Path | None = None,
        retire_seconds: float = 30.0,
    ) -> None:
        """`given`: model → bundle. `retire_seconds`: how long a replaced model waits for slow clients."""
        self._models = models
        self._loader = loader
        self._metrics = metrics
        self._given = dict(given)
        self._folder = folder
        self._retire_seconds = retire_seconds
        self._refusals: dict[str, str] = {}
        self._busy = asyncio.Lock()

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Triton's repository index: name, version, state, reason; with `ready` only of models that are served."""
        entries = []
        for name in sorted({*self._bundles(), *self._models.loaded}):
            served = name in self._models.loaded
            reason = self._refusals.get(name, "" if served else "unloaded")
            entries.append(
                {"name": name, "version": VERSION, "state": "READY" if served else "UNAVAILABLE", "reason": reason}
            )
        return [entry for entry in entries if entry["state"] == "READY" or not ready]

    async def load(self, name: str) -> None:
        """Load a bundle and switch to it; the model of this name that runs stays until then.

        Raises RequestError: 404 for a name without a bundle, 400 with the reason for a bundle that is refused.
        """
        async with self._busy:
            path = self._bundles().get(name)
            if path is None:
                raise _unknown(name)
            try:
                warm = await asyncio.to_thread(self._prepare, name, path)
            except Exception as error:  # the edge of one load: the server and its model go on
                raise self._refused(name, error) from error
            if self._models.draining:
                raise unavailable("the server is shutting down", "draining")
            self._switch(name, warm)

    async def unload(self, name: str) -> None:
        """Serve a model no longer, once its requests are answered; raise RequestError 404 if it is not served."""
        async with self._busy:
            if name not in self._models.loaded:
                raise _unknown(name)
            self._models.remove(name, self._retire_seconds)
            self._metrics.remove_model(name)
            self._refusals.pop(name, None)
            log(f"vitx: model '{name}' unloaded")

    async def load_all(self) -> None:
        """Load every served model again; what is refused is logged and keeps its old model."""
        await self._load_each(list(self._models.loaded))

    async def watch(self, seconds: float) -> None:
        """Load what changes on disk, for ever: the bundles that are served, and every one in the folder.

        A bundle counts as changed when its manifest or its certificate is another file, and as complete when it
        looked the same twice, `seconds` apart. One that vanishes stays in service.
        """
        loaded = await asyncio.to_thread(self._signatures)
        before = loaded
        while True:
            await asyncio.sleep(seconds)
            now = await asyncio.to_thread(self._signatures)
            changed = [name for name, state in now.items() if state == before.get(name) and state != loaded.get(name)]
            before = now
            loaded |= {name: now[name] for name in changed}
            await self._load_each(changed)

    async def _load_each(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self.load(name)
            except RequestError as error:
                _log.debug("%s", error)  # `load` has logged and counted it

    def _prepare(self, name: str, path: Path) -> WarmModel:
        """On a thread: everything that can be refused."""
        path = path.resolve()  # a link that is moved meanwhile does not lead us elsewhere
        before = _signature(path)
        offer = self._loader.verify(path)
        if offer.bundle.manifest.name != name:
            raise InputError(
                f"{path} is the model '{offer.bundle.manifest.name}': to be loaded as '{name}' it must be named so"
            )
        served = self._models.loaded.get(name)
        if served is not None:
            check_contract(served.bundle, offer.bundle)
        warm = self._loader.warm(offer)
        if _signature(path) != before:
            raise CheckFailed(f"{path} was replaced while it was loaded: load it again")
        return warm

    def _switch(self, name: str, warm: WarmModel) -> None:
        self._models.switch(ServedModel(warm, self._metrics), self._retire_seconds)
        self._refusals.pop(name, None)
        self._metrics.loads.labels(name, "loaded").inc()
        log(f"vitx: model '{name}' loaded from {warm.offer.bundle.path}")

    def _refused(self, name: str, error: Exception) -> RequestError:
        if not isinstance(error, VitxError):
            _log.exception("loading '%s' failed", name)
        self._refusals[name] = text = str(error) or type(error).__name__
        self._metrics.loads.labels(name, "refused").inc()
        stays = "; the model that runs stays" if name in self._models.loaded else ""
        log(f"vitx: model '{name}' was not loaded: {text}{stays}")
        return RequestError(f"failed to load '{name}': {text}{stays}", reason="load_refused")

    def _bundles(self) -> dict[str, Path]:
        try:
            found = [] if self._folder is None else bundles_in(self._folder)
        except (InputError, OSError):  # the folder is gone, perhaps for a moment
            found = []
        return {**{path.name.removesuffix(SUFFIX): path for path in found}, **self._given}

    def _signatures(self) -> dict[str, Signature]:
        """Of every bundle that is there, whole enough to be one."""
        return {name: state for name, path in self._bundles().items() if (state := _signature(path)) is not None}


def _signature(path: Path) -> Signature | None:
    """What changes when a bundle is replaced: two calls of the file system, whatever its size. None: no bundle."""
    found = []
    for name in (MANIFEST, CERTIFICATE):
        try:
            file = (path / name).stat()
        except OSError:
            continue
        found.append((file.st_ino, file.st_mtime_ns, file.st_size))
    return tuple(found) or None


def check_contract(old: Bundle, new: Bundle) -> None:
    """Raise CheckFailed if clients of the old bundle would be refused or misled by the new one."""
    was, now = Contract.of(old.manifest), Contract.of(new.manifest)
    for what, before, after in (
        ("tensors", was, now),
        ("labels", old.manifest.labels, new.manifest.labels),
    ):
        if before != after:
            raise CheckFailed(
                f"the {what} of {new.path} are not those of the model that runs: unload that one first, or give this "
                "one another name"
            )


def _unknown(name: str) -> RequestError:
    return RequestError(f"model '{name[:80]}' is not in the repository", status=404, reason="unknown_model")


def repository_parameters(given: Mapping[str, Any]) -> None:
    """Raise RequestError 400 for parameters of a load or unload; Triton's clients send one that says nothing here."""
    if unknown := sorted(given.keys() - {"unload_dependents"}):
        raise RequestError(f"parameter '{unknown[0][:80]}' is not offered: a bundle is loaded as it is on disk")
