"""The response cache without a server: what is told apart, what goes first, and what is forgotten, by hand."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import Counter

from vitx.core.bundle import Bundle
from vitx.serve.http.classify import Classifier
from vitx.serve.models import response_cache
from vitx.serve.models.canary import replay_once
from vitx.serve.models.loading import Loader
from vitx.serve.models.response_cache import ModelCache, ResponseCache
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.model_statistics import ModelStatistics
from vitx.serve.observe.request_record import RequestRecord
from vitx.serve.options import ServeOptions

SIZE = 512 + 4  # of an answer of one number


def row(*numbers: float) -> npt.NDArray[np.float32]:
    return np.array([numbers], np.float32)


def new_model(cache: ResponseCache) -> ModelCache:
    return ModelCache(cache, ModelStatistics(), new_counter().labels)


def new_counter() -> Counter:
    return Counter("lookups", "By result.", ("result",), registry=None)


def keep(model: ModelCache, content: bytes, rows: npt.NDArray[np.float32]) -> None:
    found, keep = model.find(content, False)
    assert found is None
    keep(rows)


def test_the_least_recently_asked_answer_of_all_models_goes_first() -> None:
    cache = ResponseCache(2 * SIZE)
    one, other = new_model(cache), new_model(cache)
    keep(one, b"a", row(1))
    keep(other, b"a", row(2))
    assert one.find(b"a", False)[0] == row(1)
    keep(other, b"b", row(3))
    assert cache.used == 2 * SIZE
    assert [model.find(b"a", False)[0] for model in (one, other)] == [row(1), None]
    keep(one, b"b", row(4))
    assert [model.find(b"b", False)[0] for model in (one, other)] == [row(4), None]


def test_answers_are_copies_and_those_that_are_too_large_or_not_finite_are_not_kept() -> None:
    cache = ResponseCache(2 * SIZE)
    model, numbers = new_model(cache), row(1)
    keep(model, b"a", numbers)
    numbers[:] = 9
    assert model.find(b"a", False)[0] == row(1)
    keep(model, b"too large", row(*range(2 * SIZE)))
    keep(model, b"nan", row(np.nan))
    keep(model, b"infinite", row(1, np.inf))
    assert len(cache.answers) == 1
    assert cache.used == SIZE
    assert [model.find(content, False)[0] for content in (b"too large", b"nan", b"infinite")] == [None] * 3


def test_lookups_are_counted_by_their_result_with_their_time() -> None:
    counter, statistics = new_counter(), ModelStatistics()
    model = ModelCache(ResponseCache(SIZE), statistics, counter.labels)
    keep(model, b"a", row(1))
    model.find(b"a", False)
    model.find(b"a", False)
    assert [counter.labels(result)._value.get() for result in ("miss", "hit")] == [1, 2]
    told = statistics.as_json("m", "1")["inference_stats"]
    assert [told[name]["count"] for name in ("cache_miss", "cache_hit", "success", "fail")] == [1, 2, 2, 0]
    assert 0 <= told["cache_miss"]["ns"] < 60e9
    assert 0 <= told["cache_hit"]["ns"] < 60e9


def test_pixels_outputs_and_encoded_images_are_told_apart() -> None:
    model, shapes = new_model(ResponseCache(2**20)), ((2, 2), (1, 4))
    asked: list[tuple[bytes | memoryview, bool]] = [(np.zeros(shape, np.uint8).data, False) for shape in shapes]
    for number, (content, further) in enumerate([*asked, (bytes(4), False), (bytes(4), True)]):
        found, keep = model.find(content, further)
        assert found is None
        keep(row(number))


def test_content_whose_digest_would_take_long_is_not_looked_for() -> None:
    lookups = new_counter()
    model = ModelCache(ResponseCache(2**20), ModelStatistics(), lookups.labels)
    for _ in range(2):
        found, keep = model.find(bytes(2**23 + 1), False)
        assert found is None
        keep(row(1))
    assert not any(metric.samples for metric in lookups.collect())
    model.find(bytes(2**23), False)
    counted = [sample for metric in lookups.collect() for sample in metric.samples if sample.name == "lookups_total"]
    assert [(sample.labels["result"], sample.value) for sample in counted] == [("miss", 1)]


def test_what_is_forgotten_is_given_back_and_requests_in_flight_leave_nothing() -> None:
    async def test() -> None:
        cache = ResponseCache(10_000 * SIZE)
        one, other = new_model(cache), new_model(cache)
        for number in range(2500):
            keep(one, str(number).encode(), row(number))
        keep(other, b"a", row(1))
        in_flight = one.find(b"slow", False)[1]
        await one.forget()
        in_flight(row(1))
        assert cache.used == SIZE
        assert one.find(b"slow", False)[0] is None
        assert one.find(b"7", False)[0] is None
        assert other.find(b"a", False)[0] == row(1)

    asyncio.run(test())


def test_many_answers_are_forgotten_some_at_a_time_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        cache, turns = ResponseCache(5 * SIZE), 0
        model, other = new_model(cache), new_model(cache)

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                if turns < 4:
                    keep(other, bytes([turns]), row(turns))
                await asyncio.sleep(0)

        for content in (b"a", b"b", b"c", b"d", b"e"):
            keep(model, content, row(1))
        monkeypatch.setattr(response_cache, "_DROPPED_AT_ONCE", 2)
        at_the_same_time = asyncio.create_task(others())
        await model.forget()
        assert turns == 3
        at_the_same_time.cancel()
        assert (len(cache.answers), cache.used) == (3, 3 * SIZE)
        assert [other.find(bytes([turn]), False)[0] for turn in (1, 2, 3)] == [row(1), row(2), row(3)]

    asyncio.run(test())


def test_an_answer_that_went_while_others_were_forgotten_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        cache = ResponseCache(3 * SIZE)
        model, other = new_model(cache), new_model(cache)
        for content in (b"a", b"b", b"c"):
            keep(model, content, row(1))
        forgetting = asyncio.create_task(model.forget())
        await asyncio.sleep(0)  # the first is forgotten
        for content in (b"x", b"y", b"z"):
            keep(other, content, row(2))
        await forgetting
        assert (len(cache.answers), cache.used) == (3, 3 * SIZE)

    asyncio.run(test())


def test_a_model_that_is_replaced_or_unloaded_gives_its_bytes_back(tiny_bundle: Bundle) -> None:
    async def test() -> None:
        loader = Loader(ServeOptions(max_batch=1, device="cpu", instances=1))
        offer, cache = loader.verify(tiny_bundle.path), ResponseCache(2**20)
        models = ModelSet((offer.key,), cache=cache)
        models.switch(ServedModel(loader.warm(offer), Metrics()), 0)
        answers = models.get("tiny").cache
        assert answers is not None
        keep(answers, b"a", row(1))
        begun = models.enter()
        models.switch(ServedModel(loader.warm(offer), Metrics()), 20)
        fresh = models.get("tiny").cache
        assert fresh is not None
        assert fresh.find(b"a", False)[0] is None  # while the old one still answers
        assert answers.find(b"a", False)[0] == row(1)
        keep(fresh, b"b", row(1))
        begun.leave()
        models.remove(offer.key, 0)
        await models.close()
        assert cache.used == 0

    asyncio.run(test())


def test_answers_from_before_a_fault_was_noticed_or_mended_are_forgotten() -> None:
    async def test() -> None:
        faults = iter([None, "wrong", "wrong", None])
        canary = SimpleNamespace(fault=lambda: next(faults))
        model = SimpleNamespace(key=("m", "1"), fault=None, canary=canary, cache=new_model(ResponseCache(2**20)))
        known = []
        for _ in range(4):
            model.cache.find(b"a", False)[1](row(1))
            await replay_once([model], Metrics())
            known.append(model.cache.find(b"a", False)[0] is not None)
        assert known == [True, False, True, False]

    asyncio.run(test())


def test_the_digests_of_a_form_do_not_hold_up_others() -> None:
    """Between two images others have their turn: 64 MiB in one go took 50 ms."""
    turns = 0

    async def test() -> None:
        nonlocal turns

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def rows(*asked: Any) -> list[Any]:
            return [row(1)[0]] * len(asked[1])

        classifier = Classifier(SimpleNamespace())  # type: ignore[arg-type]  # of which nothing is asked
        classifier._rows = rows  # type: ignore[method-assign,assignment]
        model = SimpleNamespace(cache=new_model(ResponseCache(2**20)))
        options = SimpleNamespace(model=model, outputs=())
        busy = asyncio.create_task(others())
        images = [bytes([number]) for number in range(50)]
        found = await classifier._known_rows(options, images, RequestRecord(""))  # type: ignore[arg-type]
        busy.cancel()
        assert found == [row(1)[0]] * 50

    asyncio.run(test())
    assert turns >= 50
