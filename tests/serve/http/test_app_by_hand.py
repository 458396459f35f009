"""The application on connections without sockets: each reply parsed and from the head cache, and what is counted."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.server import ServerState

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, png
from server_process import HANG, INFER_BODY, INFER_PATH
from socketless_server import Transport
from vitx.core.bundle import Bundle
from vitx.runtimes.onnxruntime import OnnxRuntimeSession
from vitx.serve.http import app as app_module
from vitx.serve.http import asgi
from vitx.serve.http.app import App
from vitx.serve.http.head_cache import HeadCacheProtocol
from vitx.serve.observe.request_record import RequestRecord
from vitx.serve.options import ServeOptions
from vitx.serve.process.server import _uvicorn_config
from vitx.serve.protocol.infer import decode_infer_request, encode_infer_response
from vitx.serve.server_core import ServerCore, verified

IMAGES = np.random.default_rng(0).integers(0, 256, (40, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
PNG = png(IMAGES[0])


@pytest.fixture(autouse=True)
def nothing_escapes(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Else uvicorn logs it, perhaps after the reply was sent."""
    yield
    assert [
        each.getMessage() for each in caplog.get_records("call") if each.name.startswith(("uvicorn", "asyncio"))
    ] == []


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class Lines:
    """An observer: what it was told of each request."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.told: list[tuple[str, str, int]] = []

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None:
        assert 0 <= seconds <= time.monotonic() - record.started
        self.records.append(record)
        self.told.append((method, path, status))

    def close(self) -> None:
        """It has nothing to close."""


class Served:
    """The application of a server that has loaded its models, and connections to it."""

    def __init__(self, core: ServerCore, lines: Lines) -> None:
        self.core, self.lines = core, lines
        self.handlers: dict[bytes, Any] = {}
        self.app = App(core, "127.0.0.1")
        self._config, self._state = _uvicorn_config(self.app), ServerState()
        self._config.load()

    def connect(self) -> tuple[Transport, HeadCacheProtocol]:
        transport, core = Transport(), self.core
        made = partial(HeadCacheProtocol, self.handlers, core.limits, core.budget, core.metrics.reject)
        loop = asyncio.get_running_loop()
        protocol = made(config=self._config, server_state=self._state, app_state={}, _loop=loop)
        protocol.connection_made(transport)
        return transport, protocol

    async def ask(self, request: bytes) -> Answer:
        """On a connection of its own."""
        transport, protocol = self.connect()
        protocol.data_received(request)
        answer = await answer_of(transport, bodiless=request.startswith(b"HEAD"))
        protocol.connection_lost(None)
        return answer

    def counts(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a counter that are not 0, by its labels in the order of their names."""
        text = self.core.metrics.exposition().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {
            tuple(of for _, of in sorted(each.labels.items())): each.value
            for each in samples
            if each.name == name and each.value
        }


async def answer_of(transport: Transport, *, bodiless: bool = False) -> Answer:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        head, end, body = transport.written.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): of for name, _, of in (line.partition(": ") for line in lines)}
        if end and (bodiless or len(body) >= int(headers["content-length"])):
            return Answer(int(first.split(" ")[1]), headers, body)
        await asyncio.sleep(0.001)
    raise AssertionError(f"no reply within {HANG} s, but {transport.written!r}")


async def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def served(bundle: Bundle, use: Callable[[Served], Awaitable[None]], *, observed: bool = True, **options: Any) -> None:
    async def run() -> None:
        given = ServeOptions(bundles=(bundle.path,), **options)
        lines = Lines()
        core = ServerCore(given, verified(given), [lines] if observed else [])
        await core.load()
        try:
            await use(Served(core, lines))
            assert core.models.active == 0
            assert core.budget.used == 0
        finally:
            await core.models.close()

    asyncio.run(run())


def request(body: bytes = INFER_BODY, *headers: bytes, path: str = INFER_PATH, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def infer_body(images: Any, *, binary: bool = False, **outputs: Any) -> tuple[bytes, bytes]:
    """The body and its header: numbers, or bytes behind JSON."""
    tensor = {"name": "images", "datatype": "UINT8", "shape": images.shape}
    tensor |= {"parameters": {"binary_data_size": images.nbytes}} if binary else {"data": images.ravel().tolist()}
    wanted = {"outputs": [{"name": "logits", "parameters": outputs}]} if outputs else {}
    text = json.dumps({"inputs": [tensor], **wanted}).encode()
    if not binary:
        return text, b"X-Form: text"
    return text + images.tobytes(), b"Inference-Header-Content-Length: %d" % len(text)


def logits_of(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    (output,) = json.loads(answer.body)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def test_a_request_is_answered_alike_by_the_parser_and_from_the_head_cache(tiny_bundle: Bundle) -> None:
    async def use(served: Served) -> None:
        expected = NumpySession().infer(IMAGES[:2])
        id, trace = b"X-Request-Id: mine", (b"Traceparent: 00-parent", b"Tracestate: a=b")
        for round in (1, 2):
            for path in (INFER_PATH, "/v2/models/tiny/versions/1/infer"):
                answer = await served.ask(request(*infer_body(IMAGES[:2]), id, *trace, path=path))
                np.testing.assert_allclose(logits_of(answer), expected, rtol=1e-4, atol=1e-4)
                assert answer.headers["content-type"] == "application/json"
                record = served.lines.records[-1]
                assert answer.headers["x-request-id"] == record.id == "mine"
                assert (record.traceparent, record.tracestate) == ("00-parent", "a=b")
                assert (record.client, record.sent) == ("127.0.0.1", len(answer.body))
                assert (record.model, record.images) == ("tiny", 2)
                assert {*record.phases} == {"queue", "compute"}
                assert served.lines.told[-1] == ("POST", path, 200)
            binary = await served.ask(request(*infer_body(IMAGES[:2], binary=True, binary_data=True)))
            text, tail = binary.body[: -4 * expected.size], binary.body[-4 * expected.size :]
            assert binary.headers["content-type"] == "application/octet-stream"
            assert int(binary.headers["inference-header-content-length"]) == len(text)
            np.testing.assert_allclose(np.frombuffer(tail, np.float32), expected.ravel(), rtol=1e-4, atol=1e-4)
            classified = await served.ask(request(PNG, b"Content-Type: image/png", path="/v1/classify"))
            assert (classified.status, "predictions" in classified.body.decode()) == (200, True)
            assert len(served.handlers) == 4, round
        assert served.counts("vitx_requests_total") == {("tiny", "classify", "200"): 2, ("tiny", "infer", "200"): 6}
        assert served.counts("vitx_request_seconds_count") == {("classify",): 2, ("infer",): 6}
        assert sum(served.counts("vitx_request_seconds_sum").values()) < HANG
        assert served.counts("vitx_rejections_total") == {}

    served(tiny_bundle, use)


def test_without_an_observer_no_reply_has_an_id(tiny_bundle: Bundle) -> None:
    async def use(served: Served) -> None:
        for each in (request(), request(), request(b"", path="/v2", method="GET")):
            answer = await served.ask(each)
            assert (answer.status, "x-request-id" in answer.headers) == (200, False)

    served(tiny_bundle, use, observed=False)


def test_what_is_refused_is_counted_by_route(tiny_bundle: Bundle) -> None:
    async def use(served: Served) -> None:
        for path, method, status, text, allowed in (
            (INFER_PATH, "GET", 405, "method GET is not allowed: use POST", {"POST"}),
            ("/v1/classify", "PUT", 405, "method PUT is not allowed: use POST", {"POST"}),
            ("/v2/models/mine/infer", "POST", 404, "'mine'", {""}),
            ("/v2/models/tiny/versions/2/infer", "POST", 404, "'tiny' version 2 is not found", {""}),
            ("/v2/models/tiny/infer/", "POST", 404, "Not Found", {""}),
            ("/v2/health/live", "PUT", 405, "Method Not Allowed", {"GET", "HEAD"}),
        ):
            answer = await served.ask(request(path=path, method=method))
            assert (answer.status, text in answer.error) == (status, True), answer
            assert answer.headers["content-type"] == "application/json"
            assert {*answer.headers.get("allow", "").split(", ")} == allowed
            assert served.lines.told[-1] == (method, path, status)
            assert served.lines.records[-1].sent == len(answer.body)
        timed = served.counts("vitx_request_seconds_count")
        assert timed == {("infer",): 3, ("classify",): 1}
        foreign = request().replace(b"Host: localhost", b"Host: attacker.example")
        assert (await served.ask(foreign)).status == 403
        assert served.counts("vitx_request_seconds_count") == timed, "refused before it may ask"
        head = await served.ask(request(b"", path="/v2", method="HEAD"))
        assert int(head.headers["content-length"]) > 0
        assert served.lines.records[-1].sent == 0
        assert (await served.ask(request(b"", path="/v2", method="GET"))).status == 200
        assert served.handlers == {}
        routes = {(route, status): count for (_, route, status), count in served.counts("vitx_requests_total").items()}
        assert routes["infer", "403"] == routes["infer", "405"] == routes["classify", "405"] == 1
        assert routes["infer", "404"] == 2
        assert routes["server_metadata", "200"] == 2

    served(tiny_bundle, use)


def test_large_numbers_are_read_and_many_texts_written_beside_the_event_loop(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    writers: list[int] = []
    here, beside = threading.get_ident(), asgi.beside

    def recorded(hold: Any, size: int, work: Callable[[], Any]) -> Any:
        read.append(size)
        return beside(hold, size, work)

    def write(*given: Any) -> Any:
        writers.append(threading.get_ident())
        return encode_infer_response(*given)

    monkeypatch.setattr(app_module, "SMALL_BYTES", len(infer_body(IMAGES[:1])[0]))
    monkeypatch.setattr(app_module, "MANY_TEXTS", 6 * len(LABELS))
    monkeypatch.setattr(asgi, "beside", recorded)
    monkeypatch.setattr(app_module, "encode_infer_response", write)

    async def use(served: Served) -> None:
        for _ in range(2):
            for count, binary, is_read, is_written in (
                (1, False, 0, 0),
                (2, False, 1, 0),
                (6, True, 0, 0),
                (7, True, 0, 1),
                (7, False, 1, 1),
            ):
                read.clear()
                body, kind = infer_body(IMAGES[:count], binary=binary)
                logits = logits_of(await served.ask(request(body, kind)))
                np.testing.assert_allclose(logits, NumpySession().infer(IMAGES[:count]), rtol=1e-4, atol=1e-4)
                assert read == [len(body)] * is_read
                assert (writers[-1] != here) == is_written
                assert served.lines.records[-1].images == count
                assert served.lines.records[-1].model == "tiny"
        header, large = infer_body(IMAGES[:5])[0].partition(b'"data"')[::2]
        wrong = header.replace(b"UINT8", b"INT32") + b'"data"' + large
        for _ in range(2):
            assert "INT32" in (await served.ask(request(wrong, b"X-Form: text"))).error
        assert served.counts("vitx_rejections_total") == {("tiny", "bad_request"): 2}

    served(tiny_bundle, use)


def test_a_large_reply_is_compressed_where_that_is_accepted(tiny_bundle: Bundle) -> None:
    async def use(served: Served) -> None:
        for count, encoding in ((40, "gzip"), (1, None)):
            answers = [
                await served.ask(request(*infer_body(IMAGES[:count]), b"Accept-Encoding: gzip")) for _ in range(2)
            ]
            assert [each.headers.get("content-encoding") for each in answers] == [encoding] * 2
            assert answers[0].body == answers[1].body
            assert [each.sent for each in served.lines.records[-2:]] == [len(answers[0].body)] * 2
            plain = await served.ask(request(*infer_body(IMAGES[:count])))
            assert "content-encoding" not in plain.headers
        wrong = [await served.ask(request(b"{}", b"X-Form: text", b"Accept-Encoding: gzip")) for _ in range(2)]
        assert [each.status for each in wrong] == [400] * 2

    served(tiny_bundle, use)


def test_a_server_that_leaves_closes_each_connection_after_its_reply(tiny_bundle: Bundle) -> None:
    async def use(served: Served) -> None:
        for leaving in (False, True):
            served.core.models.leaving = leaving
            for _ in range(2):
                transport, protocol = served.connect()
                protocol.data_received(request())
                answer = await answer_of(transport)
                assert (answer.headers.get("connection"), transport.closed) == ("close" if leaving else None, leaving)
                protocol.connection_lost(None)

    served(tiny_bundle, use)


def test_an_error_of_ours_is_500_and_others_are_not_affected(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    async def use(served: Served) -> None:
        for place in ("decode_infer_request", "encode_infer_response", "check_allowed", "_"):
            for cached in (False, True):
                await served.ask(request())
                if not cached:
                    served.handlers.clear()
                with monkeypatch.context() as patched:
                    patched.setattr(app_module, place, fail, raising=False)
                    answer = await served.ask(request())
                fails = place != "_" and not (cached and place == "check_allowed")
                assert answer.status == (500 if fails else 200)
                assert not fails or answer.error == "internal error: see the server's log"
                assert served.lines.told[-1][2] == answer.status

    served(tiny_bundle, use)


def test_what_the_model_raises_is_the_answer(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("for so many images")

    async def use(served: Served) -> None:
        await served.ask(request())
        monkeypatch.setattr(OnnxRuntimeSession, "_infer", fail)
        for body in (*[infer_body(IMAGES[:1])] * 3, *[infer_body(IMAGES)] * 2):  # on the event loop, and beside it
            answer = await served.ask(request(*body))
            assert (answer.status, answer.error) == (500, "inference failed: for so many images")

    served(tiny_bundle, use)


def test_a_request_has_its_time_from_when_it_came(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(served: Served) -> None:
        model = served.core.models.get("tiny", None)
        asked: list[tuple[float, float | None]] = []
        deadline = model.deadline

        def recorded(started: float, seconds: float | None) -> float | None:
            asked.append((started, seconds))
            return deadline(started, seconds)

        monkeypatch.setattr(model, "deadline", recorded)
        given = json.loads(INFER_BODY) | {"parameters": {"timeout": 7_000_000}}
        for _ in range(2):
            assert (await served.ask(request(json.dumps(given).encode()))).status == 200
            assert asked[-1] == (served.lines.records[-1].started, 7.0)
        served.core.models.draining = time.monotonic()
        for _ in range(2):
            refused = await served.ask(request())
            assert (refused.status, refused.error) == (503, "the server is shutting down")
        transport, protocol = served.connect()
        served.core.models.draining = 0.0
        protocol.data_received(request()[:-1])  # begun before the drain
        await asyncio.sleep(0.001)
        served.core.models.draining = time.monotonic()
        protocol.data_received(request()[-1:])
        assert (await answer_of(transport)).status == 200
        protocol.connection_lost(None)

    served(tiny_bundle, use)


class Waiting:
    """Reads of bodies, on their thread, that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

        def waiting(*given: Any) -> Any:
            self.begun.set()
            assert self.goes_on.wait(HANG)
            return decode_infer_request(*given)

        monkeypatch.setattr(app_module, "SMALL_BYTES", 0)
        monkeypatch.setattr(app_module, "decode_infer_request", waiting)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_a_client_that_is_gone_is_counted_once(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, cached: bool, slow: bool
) -> None:
    """And not here, where the connection has refused and counted it as slow."""

    async def use(served: Served) -> None:
        if cached:
            await served.ask(request())
        before, waiting = len(served.lines.told), Waiting(monkeypatch)
        for sent in (request(), request()[:-1]):  # in its work, and in its body
            waiting.begun.clear()
            waiting.goes_on.clear()
            transport, protocol = served.connect()
            protocol.data_received(sent)
            if sent == request():
                await eventually(waiting.begun.is_set)
            await eventually(lambda: served.core.models.active == 1)
            protocol.slow = slow
            protocol.connection_lost(None)
            await eventually(lambda: served.core.models.active == 0)
            waiting.goes_on.set()
            assert transport.written == b""
        assert served.lines.told[before:] == [("POST", INFER_PATH, 499)] * (0 if slow else 2)
        lost = served.counts("vitx_rejections_total")
        assert sum(lost.values()) == (0 if slow else 2)
        assert {reason for _, reason in lost} <= {"disconnected"}
        assert sum(served.counts("vitx_requests_total").values()) == cached

    served(tiny_bundle, use)


@pytest.mark.parametrize("cached", [False, True])
def test_a_server_that_ends_tells_those_who_wait(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    async def use(served: Served) -> None:
        if cached:
            await served.ask(request())
        waiting = Waiting(monkeypatch)
        transport, protocol = served.connect()
        protocol.data_received(request())
        await eventually(waiting.begun.is_set)
        if cached:
            protocol.shutdown()
        else:  # as uvicorn does it
            for task in [*served._state.tasks]:
                task.cancel(msg="Task cancelled, timeout graceful shutdown exceeded")
        answer = await answer_of(transport)
        assert (answer.status, answer.error) == (503, "the server is shutting down")
        waiting.goes_on.set()
        assert served.lines.told[-1] == ("POST", INFER_PATH, 503)
        assert served.counts("vitx_rejections_total") == {("tiny", "draining"): 1}
        protocol.connection_lost(None)

    served(tiny_bundle, use)


def test_a_request_that_is_cancelled_by_who_runs_the_application_ends_as_cancelled(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray does when its client hangs up."""

    async def use(served: Served) -> None:
        waiting = Waiting(monkeypatch)
        _, protocol = served.connect()
        headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(INFER_BODY))]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": INFER_PATH, "headers": headers}
        messages: list[Any] = [{"type": "http.request", "body": INFER_BODY}]

        async def receive() -> Any:
            return messages.pop()

        async def send(_: Any) -> None:
            raise AssertionError("nobody is there")

        task = asyncio.ensure_future(served.app({**scope, asgi.CONNECTION: protocol}, receive, send))
        await eventually(waiting.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting.goes_on.set()
        assert served.lines.told == [("POST", INFER_PATH, 499)]
        assert [each.client for each in served.lines.records] == [""], "a proxy does not say who it was"
        assert served.counts("vitx_rejections_total") == {("tiny", "disconnected"): 1}
        protocol.connection_lost(None)

    served(tiny_bundle, use)
