"""The models that a running server can load: lists the bundles on disk, loads, switches and unloads models."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from vitx.core.bundle import MANIFEST, Bundle, url_of
from vitx.core.console import log, visible
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.serve.errors import RequestError, not_offered, unavailable
from vitx.serve.models.loading import FileStates, Loader, ModelKey, Offer, WarmModel, file_states, key_text
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.protocol.infer import FIRST_VERSION, Contract

SUFFIX = ".vitx"

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_log = logging.getLogger("vitx.serve")


def bundles_in(folder: Path, policies: Sequence[str] = ()) -> dict[ModelKey, Path]:
    """The bundles of a repository folder by name and version: NAME.vitx (version 1) and NAME/VERSION.

    As in Triton a version is a whole number without leading zeros; folders with other names are ignored. policies:
    those of `--versions`. Raises InputError if `folder` is not a folder, or two bundles are the same version.
    """
    if not folder.is_dir():
        if (url := url_of(folder)) is not None:
            raise InputError(f"--repository {url}: expected a folder of this machine; give each bundle by its own URL")
        raise InputError(f"no model repository at '{folder}': expected a folder with bundles NAME{SUFFIX}")
    found = [((path.name.removesuffix(SUFFIX), FIRST_VERSION), path) for path in folder.glob(f"[!.]*{SUFFIX}")]
    found += [
        ((path.parent.name, path.name), path) for path in folder.glob("[!.]*/[1-9]*") if _VERSION.fullmatch(path.name)
    ]
    bundles: dict[ModelKey, Path] = {}
    for (name, version), path in found:
        with suppress(PermissionError):  # who loads it is told; the others are none the worse
            if not (path / MANIFEST).is_file():
                continue
        if (key := (visible(name), version)) in bundles:
            raise InputError(f"{bundles[key]} and {path} are both version {version} of '{name}': remove one of them")
        bundles[key] = path
    policy_of = {name: policy for name, _, policy in (text.rpartition("=") for text in policies)}
    served: list[ModelKey] = []
    for name, of_name in groupby(sorted(bundles, key=_by_version), itemgetter(0)):
        policy, keys = policy_of.get(name, policy_of.get("", "all")), list(of_name)
        if policy.startswith("latest:"):
            keys = keys[-int(policy[7:]) :]
        elif policy != "all":
            keys = [key for key in keys if key[1] in policy.split(",")]
        served += keys
    return {key: bundles[key] for key in served}


def _by_version(key: ModelKey) -> tuple[str, int]:
    return key[0], int(key[1])


class Repository:
    """Loads and unloads the models of a server: bundles given by path, and those in a folder."""

    def __init__(self, models: ModelSet, loader: Loader, metrics: Metrics, offers: Sequence[Offer]) -> None:
        """`offers`: the bundles that the server began with."""
        self._models, self._loader, self._metrics = models, loader, metrics
        options = loader.options
        given, self._folder, self._policies = options.bundles, options.repository, options.versions
        self._given = {offer.key: offer.given for offer in offers if offer.given in given}
        self._unseen = ""  # why the folder could not be read
        self._known = self._states() | {offer.key: offer.states for offer in offers}  # the last that was looked at
        self._refusals: dict[ModelKey, str] = {}
        self._due: set[str] = set()  # names for which `load_all` waits
        self._looking = asyncio.Lock()  # a disk that hangs takes one thread, however many clients ask for the index
        self.busy = asyncio.Lock()  # held by what loads or unloads

    async def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Triton's repository index: name, version, state, reason; with `ready` only models that are."""
        async with nullcontext() if ready else self._looking:
            entries, seen = [], () if ready else await asyncio.to_thread(self._seen)
        for key in sorted({*seen, *(model.key for model in self._models)}, key=_by_version):
            model, refusal = self._models.loaded.get(key), self._refusals.get(key, "")
            absent = refusal or ("loading" if key in self._models.expected else "unloaded")
            fault = absent if model is None else model.fault
            state, reason = "UNAVAILABLE" if fault else "READY", fault or refusal
            entries.append({"name": key[0], "version": key[1], "state": state, "reason": reason})
        return [entry for entry in entries if entry["state"] == "READY" or not ready]

    async def load(self, name: str) -> None:
        """Load every version of a model and switch to it, then unload versions that are no longer on disk.

        The old model serves until the switch. Raises RequestError: 404 for a name without a bundle; 400 with the reason
        for a bundle that is refused, after the versions before it were switched to.
        """
        async with self.busy:
            await self._load(name)

    async def _load(self, name: str) -> None:
        try:
            paths = {key: path for key, path in (await asyncio.to_thread(self._bundles)).items() if key[0] == name}
        except (InputError, OSError) as error:
            known = name in {key[0] for key in self._known}  # else a client's: no label, and no line of the log
            raise (self._refused((name, FIRST_VERSION), error) if known else _unknown(name)) from error
        if not paths:
            raise _unknown(name)
        for key, path in paths.items():
            await self._load_one(key, path)
        for version in self._models.versions(name):
            if (name, version) not in paths:
                self._remove((name, version))

    async def unload(self, name: str) -> None:
        """Unload every version of a model once its requests are answered; raise RequestError 404 if none is loaded."""
        async with self.busy:
            if not (versions := self._models.versions(name)):
                raise RequestError(f"model '{name[:80]}' is not loaded", status=404, reason="unknown_model")
            for version in versions:
                self._remove((name, version))

    async def _load_one(self, key: ModelKey, path: Path) -> None:
        try:
            warm = await asyncio.to_thread(self._prepare, key, path)
        except Exception as error:  # the edge of one load: the server goes on with the old model
            raise self._refused(key, error) from error
        if self._models.draining:
            await asyncio.to_thread(warm.close)
            raise unavailable("the server is shutting down", "draining")
        self._models.switch(ServedModel(warm, self._metrics), self._loader.options.limits.drain_seconds)
        self._known[key] = warm.offer.states
        self._refusals.pop(key, None)
        self._metrics.loads.labels(*key, "loaded").inc()
        log(f"vitx: model {key_text(key)} loaded from {warm.offer.bundle.path}")

    def _surplus(self, name: str) -> set[ModelKey]:
        """The loaded versions that are on disk and, since a later one came, not to be served any more."""
        surplus = (bundles_in(self._folder) if self._folder else {}).keys() - self._seen().keys()
        return surplus & {(name, version) for version in self._models.versions(name)}

    def _remove(self, key: ModelKey) -> None:
        self._models.remove(key, self._loader.options.limits.drain_seconds)
        self._metrics.remove_model(key)
        self._refusals.pop(key, None)
        log(f"vitx: model {key_text(key)} unloaded")

    async def load_all(self) -> None:
        """Load every model again, in this process; one that is refused is logged, and its old model serves on."""
        self._due |= {*(names := [name for name in self._models.names if name not in self._due])}
        for name in names:
            async with self.busy:
                self._due.discard(name)  # from now on it is to be loaded once more
                with suppress(RequestError, OSError):  # logged and counted; or the workers' folder is gone
                    if name in self._models.names:  # not unloaded meanwhile
                        await self._load(name)

    async def watch(self, seconds: float) -> None:
        """Check the bundles on disk every `seconds`, for ever, and load those that changed or are new."""
        before = self._known
        while True:
            await asyncio.sleep(seconds)
            now = await asyncio.to_thread(self._states)
            changed = [key for key, states in now.items() if states == before.get(key) != self._known.get(key)]
            before = now
            self._known |= {key: now[key] for key in changed}
            for key in changed:
                async with self.busy:
                    if (path := (await asyncio.to_thread(self._seen)).get(key)) is not None:
                        with suppress(RequestError, InputError, OSError):  # refused, or the folder is gone
                            await self._load_one(key, path)
                            for surplus in await asyncio.to_thread(self._surplus, key[0]):
                                self._remove(surplus)

    def _prepare(self, key: ModelKey, path: Path) -> WarmModel:
        """Verify and warm up a bundle, on another thread; raises what makes the server refuse it."""
        offer, known = self._loader.verify(path, key), None
        if (served := self._models.loaded.get(key)) is not None:
            check_contract(served.bundle, offer.bundle)
            known = served.canary if served.bundle.manifest == offer.bundle.manifest else None
        return self._loader.warm(offer, known)

    def _refused(self, key: ModelKey, error: Exception) -> RequestError:
        if not isinstance(error, VitxError | OSError):
            _log.exception("loading %s failed", key_text(key))
        self._refusals[key] = text = visible(str(error)) or type(error).__name__
        self._metrics.loads.labels(*key, "refused").inc()
        stays = "; the model that runs stays" if self._models.loaded.get(key) else ""
        log(f"vitx: model {key_text(key)} was not loaded: {text}{stays}")
        return RequestError(f"failed to load {key_text(key)}: {text}{stays}", reason="load_refused")

    def _bundles(self) -> dict[ModelKey, Path]:
        return self._given if self._folder is None else {**bundles_in(self._folder, self._policies), **self._given}

    def _seen(self) -> dict[ModelKey, Path]:
        """As `_bundles`; while the folder is missing or inconsistent, which is logged once, only the given bundles."""
        try:
            found, self._unseen = self._bundles(), ""
            return found
        except (InputError, OSError) as error:
            if self._unseen != str(error):
                log(f"vitx: the models stay as they are: {error}")
            self._unseen = str(error)
            return self._given

    def _states(self) -> dict[ModelKey, FileStates]:
        return {key: states for key, path in self._seen().items() if (states := file_states(path))}


def check_contract(old: Bundle, new: Bundle) -> None:
    """Raise CheckFailed if clients of the old bundle would be refused or misled by the new one."""
    was, now = Contract.of(old.manifest), Contract.of(new.manifest)
    lost = {spec.name for spec in old.manifest.outputs} - {spec.name for spec in new.manifest.outputs}
    same = {"tensors": was == now, "labels": old.manifest.labels == new.manifest.labels, "outputs": not lost}
    for what, unchanged in same.items():
        if not unchanged:
            text = f"the {what} of {new.path} are not those of the model that runs"
            raise CheckFailed(f"{text}: unload that one first, or give this one another name")


def _unknown(name: str) -> RequestError:
    return RequestError(f"model '{name[:80]}' is not in the repository", status=404, reason="unknown_model")


def managed(repository: Repository | None, parameters: Mapping[str, Any] | None = None) -> Repository:
    """The repository that clients may manage; raise RequestError 501 where there is none.

    parameters: of a load or unload; any but the one that Triton's clients always send is refused with 400.
    """
    if unknown := sorted((parameters or {}).keys() - {"unload_dependents"}):
        raise RequestError(f"parameter '{unknown[0][:80]}' is not offered: a bundle is loaded as it is on disk")
    if repository is None:
        not_offered("the model repository is not offered: start the server with --management")
    return repository
