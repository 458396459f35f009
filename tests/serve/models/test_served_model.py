"""The set of models of one server, by hand: which of them answers, and when one that was replaced is closed."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, write_bundle
from virtual_time import run_virtually
from vitx.core.bundle import Bundle
from vitx.serve.errors import QueueFull, RequestError
from vitx.serve.models.loading import Loader
from vitx.serve.models.response_cache import ResponseCache
from vitx.serve.models.served_model import InFlight, ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.model_statistics import ModelStatistics
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.options import ServeOptions
from vitx.serve.protocol.infer import InferRequest

PIXELS = np.random.default_rng(0).integers(0, 256, (3, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


class Model:
    """A model in service that answers nothing: when it was closed."""

    fault: str | None = None
    cache: Any = None
    closed: float | None = None

    def __init__(self, name: str, version: str) -> None:
        self.key = self.name, self.version = name, version
        self.batcher, self.metrics = self, self
        self.statistics = ModelStatistics()

    def lookups(self, result: str) -> None:
        """Of its cache, none."""

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = asyncio.get_running_loop().time()


def model_set(*models: Any, expected: tuple[tuple[str, str], ...] = (), **options: Any) -> Any:
    served = ModelSet(expected, **options)
    for model in models:
        served.switch(model, 0)
    return served


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def refusal(models: Any, *asked: Any) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as refused:
        models.get(*asked)
    return refused.value.status, refused.value.reason, str(refused.value)


def test_a_request_without_a_version_gets_the_highest_number_that_is_loaded() -> None:
    async def test() -> None:
        old, new, other = Model("a", "9"), Model("a", "10"), Model("b", "1")
        models = model_set(new, old, other)
        assert models.versions("a") == ["9", "10"]
        assert models.versions("c") == []
        assert models.names == ("a", "b")
        assert [*models] == [new, old, other]
        assert models.get("a") is new
        assert models.get("a", "9") is old
        assert models.get("b", "1") is other
        models.remove(("a", "10"), 0)
        assert models.get("a") is old
        models.remove(("a", "9"), 0)
        assert models.names == ("b",)
        assert models.get(None) is other
        assert refusal(models, "a") == (404, "unknown_model", "Request for unknown model: 'a' is not found")
        assert refusal(models, "b", "2") == (
            404,
            "unknown_model",
            "Request for unknown model: 'b' version 2 is not found",
        )
        await models.close()

    run(test)


def test_what_is_asked_for_by_no_name_or_one_that_is_not_served() -> None:
    async def test() -> None:
        models = model_set(expected=(("a", "1"), ("b", "1"), ("b", "2")))
        assert models.names == ("a", "b")
        loading = (503, "not_ready", "model 'b' is loading")
        assert refusal(models, "b") == refusal(models, "b", "2") == loading
        text = "several models are served, choose one with ?model=: a, b"
        assert refusal(models, None) == (400, "bad_request", text)
        assert refusal(models, "b", "3")[:2] == (404, "unknown_model")
        long = refusal(models, "n" * 81, "7" * 41)[2]
        assert long == f"Request for unknown model: '{'n' * 80}' version {'7' * 40} is not found"
        assert refusal(models, "n" * 81)[2] == f"Request for unknown model: '{'n' * 80}' is not found"
        for key in list(models.expected):
            models.expected.pop(key)
        assert refusal(models, None) == (404, "unknown_model", "no model is loaded")

    run(test)


def test_a_server_that_drains_answers_what_started_before() -> None:
    async def test() -> None:
        one = Model("a", "1")
        models = model_set(one, expected=(("a", "1"),))
        assert models.ready
        assert models.is_ready("a")
        assert not models.leaving
        models.draining = 10.0
        assert models.get("a", None, 9.9) is one
        for started in (10.0, 10.1, math.inf):
            assert refusal(models, "a", None, started) == (503, "draining", "the server is shutting down")
        assert refusal(models, "a")[1] == "draining"
        assert not models.ready
        assert not models.is_ready("a")
        assert not models.is_ready("a", "1")

    run(test)


def test_the_server_is_ready_when_every_expected_model_is() -> None:
    async def test() -> None:
        one, two = Model("a", "1"), Model("a", "2")
        models = model_set(one, expected=(("a", "1"), ("a", "2")))
        assert (models.ready, models.is_ready("a"), models.is_ready("a", "1"), models.is_ready("a", "2")) == (
            *(False, True, True),
            False,
        )
        models.switch(two, 0)
        assert models.ready
        one.fault = "answers otherwise"
        assert (models.ready, models.is_ready("a"), models.is_ready("a", "1")) == (False, True, False)
        assert not models.is_ready("b")

    run(test)


def test_statistics_are_of_one_version_of_all_of_a_model_or_of_every_model() -> None:
    async def test() -> None:
        first, second, other = Model("a", "1"), Model("a", "2"), Model("b", "1")
        models = model_set(first, second, other)

        def keys(*of: Any) -> list[tuple[str, str]]:
            return [(each["name"], each["version"]) for each in models.statistics(*of)["model_stats"]]

        assert keys() == [("a", "1"), ("a", "2"), ("b", "1")]
        assert keys(first) == keys(second) == keys(first, "") == [("a", "1"), ("a", "2")]
        assert keys(first, "1") == [("a", "1")]
        assert keys(other) == [("b", "1")]

    run(test)


def test_the_record_of_a_request_names_the_model() -> None:
    async def test() -> None:
        models = model_set(Model("a", "1"))
        record = RequestRecord("id")
        token = CURRENT_RECORD.set(record)
        models.get(None)
        CURRENT_RECORD.reset(token)
        assert record.model == "a"

    run(test)


def test_requests_in_flight_are_counted() -> None:
    async def test() -> None:
        requests = InFlight()
        assert requests.ended.is_set()
        requests.enter()
        requests.enter()
        requests.leave()
        assert (requests.count, requests.ended.is_set()) == (1, False)
        requests.leave()
        assert (requests.count, requests.ended.is_set()) == (0, True)
        models = model_set(Model("a", "1"))
        begun = [models.enter() for _ in range(2)]
        models.switch(Model("a", "1"), 60)
        begun.append(models.enter())
        assert models.active == 3
        assert begun[0] is begun[1]
        assert begun[2] is not begun[0]
        for requests in begun:
            requests.leave()
        await models.idle()
        await models.close()

    run(test)


def test_a_model_that_was_replaced_is_closed_after_the_last_request_or_the_time_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[float] = []

    async def at_once(function: Callable[[], object]) -> None:
        function()

    async def test() -> None:
        now = asyncio.get_running_loop().time
        first, second, third, apart = Model("a", "1"), Model("a", "1"), Model("a", "1"), Model("b", "1")
        models: Any = ModelSet((), lambda: changes.append(now()))
        models.switch(first, 60)
        models.switch(apart, 60)
        assert len(changes) == 2  # of each that was added
        early = models.enter()
        models.switch(second, 60)
        late = models.enter()
        models.switch(third, 5)
        await asyncio.sleep(4)
        assert (first.closed, second.closed) == (None, None)
        late.leave()
        await asyncio.sleep(0.5)
        assert (first.closed, second.closed) == (None, None)  # a request from before both runs on
        await asyncio.sleep(1)
        assert (first.closed, second.closed) == (None, 5.0)
        early.leave()
        await asyncio.sleep(0.25)
        assert first.closed == 5.5
        assert len(changes) == 4
        models.remove(("b", "1"), 60)
        await asyncio.sleep(0.25)
        assert apart.closed == 5.75
        assert third.closed is None
        await models.close()
        assert third.closed == 6.0
        assert [*models.names] == ["a"]

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    run_virtually(test)


def test_the_end_waits_for_models_that_are_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(function: Callable[[], object]) -> None:
        function()

    async def test() -> None:
        first, second = Model("a", "1"), Model("a", "1")
        models = model_set(first)
        models.enter()
        models.switch(second, 7)
        await models.close()
        assert (second.closed, first.closed) == (0.0, 7.0)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    run_virtually(test)


def with_model(bundle: Bundle, use: Callable[[ServedModel, Metrics], Awaitable[None]], **options: Any) -> None:
    async def test() -> None:
        given = {"device": "cpu", "instances": 1, "threads": 1, **options}
        loader, metrics = Loader(ServeOptions(**given)), Metrics()
        model = ServedModel(loader.warm(loader.verify(bundle.path)), metrics)
        await use(model, metrics)
        await model.close()

    asyncio.run(test())


def series(metrics: Metrics, name: str) -> list[tuple[dict[str, str], float]]:
    """Its labels and values."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return [(each.labels, each.value) for family in families for each in family.samples if each.name == name]


def test_a_model_answers_what_its_graph_computes_and_writes_the_record(tiny_bundle: Bundle) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        record = RequestRecord("id")
        token = CURRENT_RECORD.set(record)
        logits = await model.infer(InferRequest(PIXELS, ()), None)
        CURRENT_RECORD.reset(token)
        np.testing.assert_allclose(logits, NumpySession().infer(PIXELS), atol=1e-4)
        assert record.images == 3
        assert {"queue", "compute"} <= record.phases.keys()
        assert (await model.infer(InferRequest(PIXELS[:1], ()), None)).shape == (1, len(LABELS))
        assert model.stats() == {
            "name": "tiny",
            "version": "1",
            "images": model.metrics.images,
            "batches": model.metrics.batches,
            "queued": 0,
            "running": 0,
        }
        assert model.metrics.images == 4

    with_model(tiny_bundle, use)


def test_what_comes_again_is_answered_from_the_cache(tiny_bundle: Bundle) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        models = ModelSet((), cache=ResponseCache(2**20))
        models.switch(model, 0)
        request, answers = InferRequest(PIXELS, ()), []
        for _ in range(2):
            record = RequestRecord("id")
            token = CURRENT_RECORD.set(record)
            answers.append(await model.infer(request, None))
            CURRENT_RECORD.reset(token)
            assert record.images == 3
        assert np.array_equal(answers[0], answers[1])
        assert model.metrics.images == 3
        found: list[Any] = []
        cancel = model.start(request, None, RequestRecord("id"), found.append)
        cancel()
        await asyncio.sleep(0.01)
        assert found == []
        # What an error was, is not kept.
        closed = InferRequest(PIXELS[1:], ())
        await model.batcher.close()
        for _ in range(2):
            with pytest.raises(RequestError, match="the model is being unloaded"):
                await model.infer(closed, None)

    with_model(tiny_bundle, use)


def test_a_deadline_is_the_one_that_was_given_or_the_servers(tiny_bundle: Bundle) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        assert model.deadline(10.0, 2.5) == 12.5
        assert model.deadline(10.0, 0.0) == 10.0
        assert model.deadline(10.0, None) == 10.5

    async def without(model: ServedModel, metrics: Metrics) -> None:
        assert model.deadline(10.0, None) is None
        assert model.deadline(10.0, 2.5) == 12.5

    with_model(tiny_bundle, use, timeout_ms=500)
    with_model(tiny_bundle, without)


def test_requests_beyond_the_queue_are_refused_and_a_cancelled_one_leaves_it(tiny_bundle: Bundle) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        request, found = InferRequest(PIXELS[:1], ()), list[Any]()
        cancels = [model.start(request, None, RequestRecord("id"), found.append) for _ in range(3)]
        assert (model.stats()["queued"], model.stats()["running"]) == (1, 2)
        assert [of for _, of in series(metrics, "vitx_queue_depth")] == [1]
        assert [of for _, of in series(metrics, "vitx_running_images")] == [2]
        with pytest.raises(QueueFull):
            model.start(request, None, RequestRecord("id"), found.append)
        cancels[-1]()
        assert model.stats()["queued"] == 0
        while len(found) < 2:
            await asyncio.sleep(0.001)
        assert all(rows.shape == (1, len(LABELS)) for rows in found)

    with_model(tiny_bundle, use, queue=1, max_batch=1)


def test_metadata_and_configuration_say_what_runs(tiny_bundle: Bundle) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        about = model.metadata(["1", "2"])
        own = about.pop("vitx")
        assert (about["name"], about["versions"], about["certified"]) == ("tiny", ["1", "2"], True)
        assert (own["certified"], own["fault"], own["outputs"], own["labels"]) == (True, None, [], LABELS)
        certificate = model.certificate
        assert certificate is not None
        assert own["certificate"]["flips"] == len(certificate.flips)
        assert own["certificate"]["verdict"] == "pass"
        assert not own["certificate"].keys() & {"subject", "executables"}
        assert own["executable"]["verdict"] == "pass"
        assert own["outputs_executable"] is None
        assert own["runtime"] == model.runtime
        assert own["precision"] == "fp32"
        assert own["preprocessing"]["image_size"] == IMAGE_SIZE
        assert own["provenance"]["checkpoint"] == model.bundle.manifest.provenance.checkpoint
        model.fault = "answers otherwise"
        assert model.metadata([])["vitx"]["fault"] == "answers otherwise"
        config = model.config()
        assert config["max_batch_size"] == 4
        assert config["dynamic_batching"]["preferred_batch_size"] == [model.batcher.full_batch]
        told = {
            "model": "tiny",
            "version": "1",
            "certificate": "pass",
            "precision": "fp32",
            **{name: model.runtime[name] for name in ("runtime", "provider")},
        }
        assert series(metrics, "vitx_model_info") == [(told, 1.0)]
        assert series(metrics, "vitx_replaced_instances") == [({"model": "tiny", "version": "1"}, 0.0)]

    with_model(tiny_bundle, use, max_batch=4)


def test_a_model_without_a_certificate_says_so(tmp_path: Path) -> None:
    async def use(model: ServedModel, metrics: Metrics) -> None:
        about = model.metadata(["1"])
        assert (about["certified"], about["vitx"]["certified"], about["vitx"]["certificate"]) == (False, False, None)
        assert series(metrics, "vitx_model_info")[0][0]["certificate"] == "uncertified"

    with_model(write_bundle(tmp_path / "tiny.vitx"), use, allow_uncertified=True)
