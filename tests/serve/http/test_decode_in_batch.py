"""The only image of a request, if it is cheap, is decoded by the thread that computes its batch."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bundle_fixture import PREPROCESSING, colour_image, png, write_bundle
from server_process import HANG, ServerProcess, running_server
from vitx.core.preprocess import ImageError, TooManyPixels, UInt8Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.errors import DeadlineMissed, RequestError
from vitx.serve.http.decode import Decoder
from vitx.serve.observe.request_record import RequestRecord
from vitx.serve.options import ServeOptions

INSTANCES = 8  # as many as decode at most, on any machine
SCAN = b"\xff\xda"


def photograph(label: int = 1, size: int = 41) -> bytes:
    return png(colour_image(label, np.random.default_rng(1), size=size))


def grey(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG")
    return stream.getvalue()


def here(data: bytes, *, instances: int = INSTANCES, queued: int = 0, **options: Any) -> Any:
    decoder = Decoder(max_pixels=50_000_000, capacity=10, **options)
    batcher: Any = SimpleNamespace(batching=SimpleNamespace(instances=instances), queued=queued)
    try:
        return decoder.here(data, PREPROCESSING, batcher, RequestRecord(""))
    finally:
        decoder.close()


def test_which_images_are_decoded_with_their_batch() -> None:
    small = photograph()
    assert here(small) is not None
    assert here(small, queued=63) is not None
    assert here(small, queued=64) is None  # clients take turns only in the pool
    assert here(small, threads=4, instances=3) is None  # one instance of a GPU would decode for all
    assert here(small, threads=1, processes=True) is None
    assert here(small + bytes(2**18)) is None
    assert here(small + 12 * SCAN) is not None
    assert here(small + 13 * SCAN) is None  # a TIFF may have JPEGs in it


def test_the_pixels_are_those_of_the_pool_and_errors_are_returned() -> None:
    async def pooled(*images: bytes) -> list[UInt8Array | Exception]:
        decoder = Decoder(max_pixels=50_000_000, capacity=10)
        try:
            return await decoder.decode(list(images), PREPROCESSING)
        finally:
            decoder.close()

    found = here(photograph(2))()
    np.testing.assert_array_equal(found, asyncio.run(pooled(photograph(2))))
    assert isinstance(wrong := here(b"no image")(), ImageError)
    assert str(wrong) == str(asyncio.run(pooled(b"no image"))[0])
    assert isinstance(here(grey(1000))(), np.ndarray)
    assert isinstance(here(grey(1001))(), TooManyPixels)


def test_what_cannot_be_decoded_has_no_row_in_its_batch() -> None:
    """And is no failed inference: neither was it one when it was decoded before."""

    async def test() -> None:
        threads: set[str] = set()

        def decoding(number: int) -> Any:
            def decode() -> UInt8Array | Exception:
                threads.add(threading.current_thread().name)
                if number == 13:
                    return ImageError("unlucky")
                return np.full((1, 1, 1, 3), number, np.uint8)

            return [decode]

        def infer(images: UInt8Array) -> Any:
            batches.append(images[:, 0, 0, 0].tolist())
            return images[:, 0, 0].astype(np.float32)

        batches: list[list[int]] = []
        batcher = Batcher(infer, ServeOptions(instances=1, max_batch=8, max_delay_ms=50).batching)
        asked = [1, 13, 2, 13, 3]
        answers = await asyncio.gather(*(batcher.submit(decoding(n)) for n in asked), return_exceptions=True)
        for number, answer in zip(asked, answers, strict=True):
            if number == 13:
                assert isinstance(answer, ImageError)
            else:
                assert isinstance(answer, np.ndarray)
                assert answer[0, 0] == number
        assert sorted(number for batch in batches for number in batch) == [1, 2, 3]
        with pytest.raises(ImageError):
            await batcher.submit(decoding(13))  # a batch of nothing else
        assert (await batcher.submit(decoding(7)))[0, 0] == 7
        assert threads == {"infer-1"}
        statistics = batcher.statistics.as_json("", "")["inference_stats"]
        assert [statistics[name]["count"] for name in ("success", "fail", "queue")] == [4, 0, 4]
        await batcher.close()

    asyncio.run(test())


def test_images_of_an_instance_that_dies_are_decoded_once_and_computed_by_another() -> None:
    async def test() -> None:
        decoded: list[int] = []
        died: list[bool] = []

        def decode() -> UInt8Array:
            decoded.append(1)
            return np.ones((1, 1, 1, 3), np.uint8)

        def infer(images: UInt8Array) -> Any:
            if not died:
                died.append(True)
                raise SystemExit
            return images[:, 0, 0].astype(np.float32)

        batcher = Batcher(infer, ServeOptions(instances=1).batching)
        assert (await batcher.submit([decode]))[0, 0] == 1
        assert (decoded, batcher.replaced_instances) == ([1], 1)
        await batcher.close()

    asyncio.run(test())


@pytest.mark.parametrize("standing_by", [True, False], ids=["in the next batch", "in the queue"])
@pytest.mark.parametrize("timeout", [None, 0.05], ids=["hang-up", "deadline"])
def test_what_nobody_waits_for_is_not_decoded(standing_by: bool, timeout: float | None) -> None:
    async def test() -> None:
        busy, release, decoded = threading.Event(), threading.Event(), list[str]()

        def image(name: str) -> Any:
            def decode() -> UInt8Array:
                decoded.append(name)
                return np.ones((1, 1, 1, 3), np.uint8)

            return [decode]

        def infer(images: UInt8Array) -> Any:
            busy.set()
            release.wait(HANG)
            return images[:, 0, 0].astype(np.float32)

        batcher = Batcher(infer, ServeOptions(instances=1, max_batch=1).batching)
        names = ["runs"] if standing_by else ["runs", "next"]
        before = [asyncio.create_task(batcher.submit(image(name))) for name in names]
        await asyncio.to_thread(busy.wait, HANG)
        deadline = timeout and asyncio.get_running_loop().time() + timeout
        unwanted = asyncio.create_task(batcher.submit(image("unwanted"), deadline=deadline))
        await asyncio.sleep(0.1)
        if timeout is None:
            unwanted.cancel()
        last = asyncio.create_task(batcher.submit(image("last")))
        found = (await asyncio.gather(unwanted, return_exceptions=True))[0]
        assert isinstance(found, asyncio.CancelledError if timeout is None else DeadlineMissed)
        release.set()
        assert len(await asyncio.gather(*before, last)) == len(names) + 1
        assert decoded == [*names, "last"]
        await batcher.close()

    asyncio.run(test())


def test_an_error_that_is_no_images_own_fails_its_request_alone() -> None:
    async def test() -> None:
        batcher = Batcher(lambda images: images[:, 0, 0].astype(np.float32), ServeOptions(instances=1).batching)
        good = batcher.submit(np.ones((1, 1, 1, 3), np.uint8))
        found = await asyncio.gather(batcher.submit([lambda: MemoryError()]), good, return_exceptions=True)
        assert isinstance(found[0], MemoryError)
        assert isinstance(found[1], np.ndarray)
        await batcher.close()
        with pytest.raises(RequestError):
            await batcher.submit([lambda: MemoryError()])

    asyncio.run(test())


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logged") / "access.log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[ServerProcess]:
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")
    options = "--allow-uncertified", "--instances", str(INSTANCES), "--threads", "1", "--access-log", log
    with running_server(bundle.path, *options) as started:
        yield started


def classify(server: ServerProcess, body: bytes, query: str = "") -> tuple[int, Any]:
    status, text, _ = server.request("POST", f"/v1/classify?{query}", body, {"Content-Type": "image/*"})
    return status, json.loads(text)


def counts(server: ServerProcess) -> tuple[int, int]:
    found = server.json("/v2/models/tiny/stats")["model_stats"][0]["inference_stats"]
    return found["success"]["count"], found["fail"]["count"]


def test_good_and_bad_images_together_over_http(server: ServerProcess) -> None:
    texts = json.dumps([base64.b64encode(photograph(label)).decode() for label in range(4)]).encode()
    in_pool = json.loads(server.request("POST", "/v1/classify", texts, {"Content-Type": "application/json"})[1])[
        "results"
    ]
    bodies = [photograph(number % 4) if number % 3 else photograph()[: 40 + number] for number in range(60)]
    before = counts(server)
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda body: classify(server, body), bodies))
    for number, (status, answer) in enumerate(answers):
        if number % 3:
            assert status == 200
            found, expected = (each["predictions"] for each in (answer, in_pool[number % 4]))
            assert [each["label"] for each in found] == [each["label"] for each in expected]
            assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected])
        else:
            assert status == 400
            assert "image" in answer["error"]
    success, fail = counts(server)
    assert (success - before[0], fail - before[1]) == (40, 0)
    assert server.metric('vitx_rejections_total{model="tiny",reason="bad_image"}') == 20


def test_an_image_of_few_bytes_and_many_pixels_is_left_to_the_pool(server: ServerProcess) -> None:
    assert len(large := grey(3000)) < 2**16
    before = counts(server)
    assert classify(server, large)[0] == 200
    assert counts(server) == (before[0] + 1, before[1])


def test_the_access_log_has_every_phase(server: ServerProcess, log: Path) -> None:
    assert classify(server, photograph(size=900), "top_k=1")[0] == 200
    server.process.terminate()
    assert server.process.wait(20) == 0
    line = json.loads(log.read_text().splitlines()[-1])
    assert line["images"] == 1
    assert 0 < line["decode_ms"] <= line["total_ms"]
    assert line["queue_ms"] + line["decode_ms"] + line["compute_ms"] <= line["total_ms"]
