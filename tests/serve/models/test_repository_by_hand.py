"""The repository without a server: what it loads, refuses, unloads and lists. Models are read, and never run."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle_fixture import write_bundle
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_json
from vitx.serve.errors import RequestError
from vitx.serve.models import repository
from vitx.serve.models.loading import Loader, ModelKey
from vitx.serve.models.repository import Repository, check_contract, managed
from vitx.serve.models.served_model import ModelSet
from vitx.serve.observe.metrics import Metrics
from vitx.serve.options import ServeOptions


@dataclass(frozen=True)
class Reader(Loader):
    """Verifies bundles, and runs none. warmed: which, against which canary. closed: those that came too late."""

    warmed: list[tuple[ModelKey, Any]] = field(default_factory=list)
    closed: list[ModelKey] = field(default_factory=list)

    def warm(self, offer: Any, known: Any = None) -> Any:
        self.warmed.append((offer.key, known))
        canary = f"canary {len(self.warmed)}"
        return SimpleNamespace(offer=offer, canary=canary, close=lambda: self.closed.append(offer.key))


class Model:
    """A model in service that answers nothing."""

    fault: str | None = None
    cache: Any = None

    def __init__(self, warm: Any, metrics: Metrics) -> None:
        self.bundle, self.canary, self.key = warm.offer.bundle, warm.canary, warm.offer.key
        self.name, self.version = self.key
        self.metrics = metrics.add_model(self.key, ("fail", "r", "p", "fp32"), *[lambda: 0] * 3)

    async def close(self) -> None:
        pass


class World:
    """A folder of bundles, and the repository of a server that began with `given` of them."""

    def __init__(self, folder: Path, *given: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.metrics = folder, Metrics()
        source: dict[str, Any] = {"bundles": given} if given else {"repository": folder}
        self.loader = Reader(ServeOptions(**source, allow_uncertified=True, **options))
        offers = [self.loader.verify(path) for path in given]
        self.models = ModelSet(offer.key for offer in offers)
        self.repository = Repository(self.models, self.loader, self.metrics, offers)

    async def index(self, *, ready: bool = False) -> list[tuple[str, ...]]:
        return [tuple(entry.values()) for entry in await self.repository.index(ready=ready)]

    def loads(self, result: str, name: str = "a", version: str = "1") -> float:
        return float(self.metrics.loads.labels(name, version, result)._value.get())

    async def refusal(self, work: Awaitable[None]) -> tuple[int, str, str]:
        with pytest.raises(RequestError) as refused:
            await work
        return refused.value.status, refused.value.reason, str(refused.value)


@pytest.fixture(autouse=True)
def _never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "ServedModel", Model)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_what_is_loaded_is_listed_by_number_and_what_left_the_disk_is_unloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        world = World(tmp_path / "all")
        for version in ("9", "10"):
            write_bundle(world.folder / "a" / version, name="a")
        write_bundle(world.folder / "b.vitx", name="b")
        unloaded = ("UNAVAILABLE", "unloaded")
        assert await world.index() == [("a", "9", *unloaded), ("a", "10", *unloaded), ("b", "1", *unloaded)]
        assert await world.index(ready=True) == []
        await world.repository.load("a")
        assert world.loader.warmed == [(("a", "9"), None), (("a", "10"), None)]
        ready = [("a", "9", "READY", ""), ("a", "10", "READY", "")]
        assert await world.index() == [*ready, ("b", "1", *unloaded)]
        assert await world.index(ready=True) == ready
        world.models.loaded["a", "9"].fault = "its canary"
        assert await world.index(ready=True) == ready[1:]
        assert (await world.index())[0] == ("a", "9", "UNAVAILABLE", "its canary")
        shutil.rmtree(world.folder / "a" / "9")
        await world.repository.load("a")
        assert world.loader.warmed[2:] == [(("a", "10"), "canary 2")], "of the same bundle"
        assert world.models.versions("a") == ["10"]
        assert (world.loads("loaded", "a", "10"), world.loads("loaded", "a", "9")) == (2, 1)
        said = capsys.readouterr().err
        assert f"vitx: model 'a' version 10 loaded from {world.folder / 'a' / '10'}\n" in said
        assert "vitx: model 'a' version 9 unloaded\n" in said
        await world.repository.unload("a")
        assert [*world.models] == []
        for work in (world.repository.unload("a"), world.repository.unload("b" * 90)):
            assert (await world.refusal(work))[:2] == (404, "unknown_model")
        text = f"model '{'c' * 80}' is not in the repository"
        assert await world.refusal(world.repository.load("c" * 90)) == (404, "unknown_model", text)

    run(test)


def test_a_bundle_that_is_refused_is_counted_said_and_listed_until_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        bundle = write_bundle(tmp_path / "a.vitx", name="a")
        world = World(tmp_path / "all", bundle.path)
        await world.repository.load("a")
        graph = bundle.model_path.read_bytes()
        bundle.model_path.write_bytes(graph + b"!")
        status, reason, text = await world.refusal(world.repository.load("a"))
        assert (status, reason) == (400, "load_refused")
        assert text.startswith("failed to load 'a': ")
        assert text.endswith("; the model that runs stays")
        assert "vitx: model 'a' was not loaded: " in capsys.readouterr().err
        (entry,) = await world.index()
        assert entry[2] == "READY"
        assert f"failed to load 'a': {entry[3]}; the model that runs stays" == text
        assert (world.loads("refused"), world.loads("loaded")) == (1, 1)
        await world.repository.load_all()
        assert (world.loads("refused"), caplog.records) == (2, []), "no mistake of ours"
        bundle.model_path.write_bytes(graph)
        await world.repository.load_all()
        assert await world.index() == [("a", "1", "READY", "")]
        world.loader.__dict__["warm"] = lambda *given: [][1]
        assert (await world.refusal(world.repository.load("a")))[2].startswith("failed to load 'a': list index out of")
        assert [record.getMessage() for record in caplog.records] == ["loading 'a' failed"]
        await world.repository.unload("a")
        assert (await world.index())[0][2:] == ("UNAVAILABLE", "unloaded")

    run(test)


def test_a_model_that_is_loaded_when_the_server_drains_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path / "all", write_bundle(tmp_path / "a.vitx", name="a").path)
        assert (await world.index())[0][2:] == ("UNAVAILABLE", "loading")
        world.models.draining = 1.0
        refused = await world.refusal(world.repository.load("a"))
        assert refused == (503, "draining", "the server is shutting down")
        assert ([*world.models], world.loader.closed) == ([], [("a", "1")])

    run(test)


def test_a_folder_that_is_gone_is_said_once_and_a_load_from_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        world = World(tmp_path / "all")
        write_bundle(world.folder / "a.vitx", name="a")
        await world.repository.load("a")
        world.folder.rename(tmp_path / "elsewhere")
        capsys.readouterr()
        for _ in range(2):
            assert await world.index() == [("a", "1", "READY", "")]
        said = f"no model repository at '{world.folder}': expected a folder with bundles NAME.vitx"
        assert capsys.readouterr().err == f"vitx: the models stay as they are: {said}\n"
        assert (await world.refusal(world.repository.load("a")))[:2] == (400, "load_refused")
        assert (await world.refusal(world.repository.load("z")))[:2] == (404, "unknown_model")
        assert world.loads("refused") == 1
        (tmp_path / "elsewhere").rename(world.folder)
        await world.index()
        world.folder.rename(tmp_path / "elsewhere")
        await world.index()
        assert capsys.readouterr().err.count("the models stay as they are") == 1, "again, as it was there meanwhile"

    run(test)


def test_what_changed_and_stays_as_it_is_for_two_looks_is_loaded_and_the_surplus_unloaded(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path / "all", versions=("latest:1",))
        write_bundle(world.folder / "a" / "1", name="a")
        await world.repository.load("a")
        watching = asyncio.create_task(world.repository.watch(0.01))
        await asyncio.sleep(0.1)
        assert [key for key, _ in world.loader.warmed] == [("a", "1")], "nothing has changed"
        write_bundle(world.folder / "a" / "2", name="a")
        while world.models.versions("a") != ["2"]:
            await asyncio.sleep(0.01)
        write_json(world.folder / "a" / "2" / MANIFEST, {})
        while not world.loads("refused", "a", "2"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (world.loads("refused", "a", "2"), world.models.versions("a")) == (1, ["2"])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert [key for key, _ in world.loader.warmed] == [("a", "1"), ("a", "2")]

    run(test)


@pytest.mark.parametrize(
    ("changed", "what"), [({"labels": ("x", "y", "z")}, "labels"), ({"name": "other"}, "tensors"), ({}, "")]
)
def test_a_bundle_that_would_mislead_the_clients_of_the_old_one_is_refused(
    tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    old = write_bundle(tmp_path / "a.vitx", name="a")
    new = Bundle(old.path, old.manifest.model_copy(update=changed))
    if not what:
        check_contract(old, new)
        return
    with pytest.raises(CheckFailed, match=f"^the {what} of {old.path} are not those of the model that runs: unload"):
        check_contract(old, new)


def test_who_may_manage_and_with_which_parameters() -> None:
    ours: Any = object()
    assert managed(ours, {"unload_dependents": True}) is managed(ours) is ours
    with pytest.raises(RequestError, match=r"^the model repository is not offered: start the server with --management"):
        managed(None)
    with pytest.raises(RequestError, match=r"^parameter 'config' is not offered: a bundle is loaded as it is on disk$"):
        managed(ours, {"unload_dependents": True, "config": 1})


def test_a_folder_of_a_store_and_one_that_is_none_are_told_apart(tmp_path: Path) -> None:
    for path, said in ((Path("s3://b/models"), "expected a folder of this machine"), (tmp_path / "x", "no model repo")):
        with pytest.raises(InputError, match=said):
            repository.bundles_in(path)
