"""The settings a bundle is loaded with, and what a replacement may not change."""

import asyncio
import gc
import weakref
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest

from bundle_fixture import LABELS, NumpySession, write_bundle
from server_process import HANG
from virtual_time import run_virtually
from vitx.core.bundle import Bundle, OutputSpec, timestamp
from vitx.core.errors import CheckFailed, InputError
from vitx.core.latency import Latency, Setting, Tuning
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import Profile
from vitx.runtimes.instances import tuned_setting
from vitx.runtimes.session import Float32Array
from vitx.serve.models import loading
from vitx.serve.models.loading import Loader, measure_curve
from vitx.serve.models.repository import Repository, check_contract
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import freeze_heap


@pytest.fixture
def tuned_bundle(tiny_bundle: Bundle) -> Bundle:
    """A bundle for which two instances of one thread were found best on this machine."""
    best = Setting(instances=2, threads=1, batch_size=4, images_per_second=1.0, median_ms=1.0)
    tuning = Tuning(best=best, tried=(best,), runtime={"runtime": "onnxruntime"}, created=timestamp())
    tiny_bundle.record_latency(
        Latency(runtime={}, machine=describe_machine(), points=(), tuning=tuning, created=timestamp())
    )
    return tiny_bundle


def test_instances_and_threads_are_the_tuned_ones(tuned_bundle: Bundle) -> None:
    loader = Loader(ServeOptions(max_batch=4, device="cpu"))
    warm = loader.warm(loader.verify(tuned_bundle.path))
    assert (warm.batching.instances, warm.batching.max_batch) == (2, 4)
    assert warm.session.describe()["threads"] == 1


def test_what_was_tuned_for_another_runtime_is_not_taken(tuned_bundle: Bundle) -> None:
    assert tuned_setting(tuned_bundle, "onnxruntime-cpu") is not None
    assert tuned_setting(tuned_bundle, "openvino") is None


@pytest.mark.parametrize(("instances", "threads", "expected"), [(1, None, 1), (3, 1, 3), (None, 1, 1)])
def test_given_options_override_the_tuned_ones(
    tuned_bundle: Bundle, instances: int | None, threads: int | None, expected: int
) -> None:
    loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=instances, threads=threads))
    assert loader.warm(loader.verify(tuned_bundle.path)).batching.instances == expected


def test_an_unknown_runtime_is_refused(tiny_bundle: Bundle) -> None:
    loader = Loader(ServeOptions(runtime="onnxruntime-gpu"))
    with pytest.raises(InputError, match=r"^unknown runtime 'onnxruntime-gpu'"):
        loader.warm(loader.verify(tiny_bundle.path))


def test_batches_aim_at_the_optima_of_a_plan(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithProfiles(NumpySession):
        profiles = (Profile(minimum=1, optimum=6, maximum=8), Profile(minimum=1, optimum=3, maximum=4))

    monkeypatch.setattr("vitx.serve.models.loading.load_session", lambda *args, **options: WithProfiles())
    loader = Loader(ServeOptions(max_batch=8, device="cpu", instances=1, allow_uncertified=True))
    warm = loader.warm(loader.verify(tiny_bundle.path))
    assert warm.batching.preferred == (3, 6)
    assert warm.curve.best_size(8, warm.batching.preferred) in (3, 6)


@pytest.mark.parametrize(
    ("image_seconds", "calls_of"),
    [
        (1 / 2, {1: 1}),
        (1 / 32, {1: 4, 2: 2, 4: 2}),  # each has a call that counts
        (1 / 256, {1: 13, 2: 13, 4: 10, 8: 6}),
        (1 / 8192, {1: 13, 2: 13, 4: 13, 8: 13}),
    ],
)
def test_each_size_is_timed_for_as_long_as_the_others(
    image_seconds: float, calls_of: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Clock(NumpySession):
        def perf_counter(self) -> float:
            return image_seconds * sum(calls)

        def _infer(self, images: UInt8Array) -> Float32Array:
            calls.append(len(images))
            return super()._infer(images)

    monkeypatch.setattr(loading, "time", clock := Clock())
    curve = measure_curve(clock, (4, 4, 3), replace(ServeOptions().batching, max_batch=8))
    assert {rows: calls.count(rows) for rows in calls} == calls_of
    assert [curve.seconds(rows) for rows in calls_of] == pytest.approx([rows * image_seconds for rows in calls_of])


def test_the_first_call_of_a_size_counts_where_there_was_no_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    grains = {1: [5, 2, 2, 3, 2, 2], 2: [16]}  # of 1/64 s; 32 are all there are
    now = 0.0

    class Clock(NumpySession):
        def perf_counter(self) -> float:
            return now

        def _infer(self, images: UInt8Array) -> Float32Array:
            nonlocal now
            now += grains[len(images)].pop(0) / 64
            return super()._infer(images)

    monkeypatch.setattr(loading, "time", clock := Clock())
    curve = measure_curve(clock, (4, 4, 3), replace(ServeOptions().batching, max_batch=2))
    assert (curve.seconds(1), curve.seconds(2)) == (2 / 64, 16 / 64)


def test_what_compiles_at_first_is_not_taken_for_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO compiles in the first calls: of a start beside other work batches of two were the largest ever."""
    cold = {1: [0.2, 0.2], 2: [0.05, 0.05], 4: [0.02, 0.02], 8: [0.03, 0.03]}  # of two instances
    now, lock = 0.0, Lock()

    class Clock(NumpySession):
        def perf_counter(self) -> float:
            return now

        def _infer(self, images: UInt8Array) -> Float32Array:
            nonlocal now
            rows = len(images)
            with lock:
                now += cold[rows].pop() if cold[rows] else 0.0004 * rows
            return super()._infer(images)

    monkeypatch.setattr(loading, "time", clock := Clock())
    curve = measure_curve(clock, (4, 4, 3), replace(ServeOptions().batching, max_batch=8, instances=2))
    assert curve.sizes(8, ()) == [1, 2, 4, 8]
    assert all(curve.fastest(rows) < 0.001 * rows for rows in (1, 2, 4, 8))


def test_a_process_that_stood_still_times_one_size_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(NumpySession):
        perf_counter = staticmethod(partial(next, count()))

    monkeypatch.setattr(loading, "time", clock := Clock())
    curve = measure_curve(clock, (4, 4, 3), replace(ServeOptions().batching, max_batch=2))
    assert (curve.seconds(1), curve.best_size(2)) == (1, 1)


def test_what_is_loaded_is_what_was_verified(tmp_path: Path) -> None:
    """The link of a bundle that was moved before it was loaded led to weights that nobody had verified."""
    first, second = (write_bundle(tmp_path / name / "tiny.vitx") for name in ("one", "other"))
    link = tmp_path / "tiny.vitx"
    link.symlink_to(first.path)
    loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=1, threads=1, allow_uncertified=True))
    offer = loader.verify(link)
    link.unlink()
    link.symlink_to(second.path)
    with closing(loader.warm(offer)) as warm:
        assert warm.offer.bundle.path == first.path
    graph = first.path / "model.onnx"
    graph.write_bytes(graph.read_bytes())  # in its place, with the same size
    with pytest.raises(CheckFailed, match="was replaced while it was loaded"):
        loader.warm(offer)


def test_a_bundle_that_is_replaced_while_the_server_starts_is_loaded_by_its_watch(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny.vitx").path
    options = ServeOptions(bundles=(path,), max_batch=2, device="cpu", instances=1, threads=1, allow_uncertified=True)
    loader = Loader(options)

    async def start() -> None:
        offer = loader.verify(path)
        models, metrics = ModelSet((offer.key,)), Metrics()
        repository = Repository(models, loader, metrics, [offer])
        models.switch(ServedModel(loader.warm(offer), metrics), 0)
        (path / "manifest.json").touch()
        watching = asyncio.create_task(repository.watch(0.01))
        async with asyncio.timeout(HANG):
            while not metrics.loads.labels("tiny", "1", "loaded")._value.get():
                await asyncio.sleep(0.01)
        watching.cancel()
        await models.close()

    asyncio.run(start())


def test_a_model_that_is_replaced_is_freed(tiny_bundle: Bundle) -> None:
    loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=1, threads=1))
    offer = loader.verify(tiny_bundle.path)

    async def switch_twice() -> None:
        models, metrics = ModelSet((offer.key,), freeze_heap), Metrics()
        old = loader.warm(offer)
        session = weakref.ref(old.session)
        models.switch(ServedModel(old, metrics), 0)
        del old
        models.switch(ServedModel(loader.warm(offer), metrics), 1)
        await models.close()
        assert session() is None
        assert gc.get_freeze_count()  # the new model is not visited by later collections

    asyncio.run(switch_twice())


def test_a_replaced_model_stays_for_requests_that_began_before_and_found_it_later(tiny_bundle: Bundle) -> None:
    closed: list[ServedModel] = []

    class Recorded(ServedModel):
        async def close(self) -> None:
            closed.append(self)
            await super().close()

    async def switch_twice() -> None:
        loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=1, threads=1))
        offer = loader.verify(tiny_bundle.path)
        models, metrics = ModelSet((offer.key,)), Metrics()
        request = models.enter()
        models.switch(Recorded(loader.warm(offer), metrics), 60)
        models.switch(Recorded(loader.warm(offer), metrics), 60)
        found = models.get(None)
        models.switch(Recorded(loader.warm(offer), metrics), 60)
        await asyncio.sleep(0.1)
        assert not closed
        request.leave()
        async with asyncio.timeout(HANG):
            while found not in closed:
                await asyncio.sleep(0.01)
        await models.close()

    asyncio.run(switch_twice())


def test_another_contract_is_refused(tiny_bundle: Bundle) -> None:
    check_contract(tiny_bundle, tiny_bundle)
    manifest = tiny_bundle.manifest.model_copy(update={"labels": LABELS[::-1]})
    with pytest.raises(CheckFailed, match=r"the labels of .* are not those of the model that runs: unload that one"):
        check_contract(tiny_bundle, Bundle(tiny_bundle.path, manifest))
    manifest = tiny_bundle.manifest.model_copy(
        update={"input": tiny_bundle.manifest.input.model_copy(update={"shape": ("N", 32, 32, 3)})}
    )
    with pytest.raises(CheckFailed, match=r"the tensors of .* are not those of the model that runs"):
        check_contract(tiny_bundle, Bundle(tiny_bundle.path, manifest))


def test_a_drain_waits_for_requests_that_began_before_a_model_was_switched(tiny_bundle: Bundle) -> None:
    async def test() -> None:
        loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=1))
        offer = loader.verify(tiny_bundle.path)
        models, metrics = ModelSet((offer.key,)), Metrics()
        models.switch(ServedModel(loader.warm(offer), metrics), 0)
        begun = models.enter()
        for _ in range(2):
            models.switch(ServedModel(loader.warm(offer), metrics), 60)
        assert models.active == 1
        idle = asyncio.create_task(models.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        begun.leave()
        await asyncio.wait_for(idle, HANG)
        assert models.active == 0
        await models.close()

    asyncio.run(test())


def test_a_reload_of_all_leaves_out_what_was_unloaded_before_its_turn() -> None:
    """SIGHUP takes the names, and a client's unload may come before the last of them."""
    repository, loaded = Repository.__new__(Repository), list[str]()

    async def load(name: str) -> None:
        loaded.append(name)
        repository._models = SimpleNamespace(names=("a", "c"))  # type: ignore[assignment]

    async def test() -> None:
        repository.busy, repository._due = asyncio.Lock(), set()
        repository._models = SimpleNamespace(names=("a", "b", "c"))  # type: ignore[assignment]
        repository._load = load  # type: ignore[method-assign]
        await repository.load_all()

    asyncio.run(test())
    assert loaded == ["a", "c"]


def test_of_many_reloads_of_all_each_model_waits_for_one() -> None:
    """A hundred SIGHUPs kept a server loading for a minute; a load that has not begun is for later ones too."""
    repository, loaded = Repository.__new__(Repository), list[str]()
    repository.busy, repository._due = asyncio.Lock(), set()
    repository._models = SimpleNamespace(names=("a", "b"))  # type: ignore[assignment]

    async def load(name: str) -> None:
        await asyncio.sleep(0.01)
        loaded.append(name)

    async def test() -> None:
        repository._load = load  # type: ignore[method-assign]
        first = [asyncio.create_task(repository.load_all()) for _ in range(50)]
        await asyncio.sleep(0.005)  # a is being loaded, and b waits
        await asyncio.gather(*first, *(repository.load_all() for _ in range(50)))
        await repository.load_all()

    run_virtually(test)
    assert loaded == ["a", "a", "b", "a", "b"]


def test_a_bundle_without_a_further_output_is_another(tmp_path: Path) -> None:
    old, new = (write_bundle(tmp_path / name, name="tiny") for name in ("old", "new"))
    spec = OutputSpec.model_construct(name="embedding", shape=("N", 8))
    check_contract(old, Bundle(new.path, new.manifest.model_copy(update={"outputs": (spec,)})))
    with pytest.raises(CheckFailed, match=r"the outputs of .* are not those of the model that runs: unload that one"):
        check_contract(Bundle(old.path, old.manifest.model_copy(update={"outputs": (spec,)})), new)
