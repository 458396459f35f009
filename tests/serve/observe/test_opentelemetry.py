"""OpenTelemetry traces of a real server, received as OTLP over HTTP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, colour_image, png
from server_process import INFER_BODY, INFER_PATH, grpc_address, run_serve, running_server, wait_until
from vitx import __version__
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.serve.observe.request_record import RequestRecord

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vitx.serve.observe import opentelemetry
from vitx.serve.observe.opentelemetry import Tracing

NO_PACKAGE = "import sys; sys.modules['opentelemetry'] = None; from vitx.cli import main; main()"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What arrived: `spans` as OTLP has them, and the attributes of their resource."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.paths: set[str] = set()
        self.url = ""

    def receive(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource |= {attribute.key: attribute.value.string_value for attribute in of.resource.attributes}
            self.spans += [span for scope in of.scope_spans for span in scope.spans]

    def children(self, parent: Any) -> list[Any]:
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: int(span.start_time_unix_nano))


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.receive(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:  # a thread that serves a closed socket would take a whole core and keep pytest from ending
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_each_request_is_a_span_with_its_phases(tiny_bundle: Bundle) -> None:
    image = png(colour_image(0, np.random.default_rng(0)))
    headers = {"Content-Type": "image/png", "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    with running_collector() as collector:
        with running_server(tiny_bundle.path, "--otlp-endpoint", collector.url, "--grpc-port", "0") as server:
            assert server.request("POST", "/v1/classify", image, headers)[0] == 200
            assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
            assert server.request("POST", "/v2/models/none/infer", INFER_BODY, {"traceparent": "nonsense"})[0] == 404
            call(grpc_address(server), ("traceparent", f"00-{TRACE}-{PARENT}-01"))
            unsampled = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}
            assert server.request("POST", INFER_PATH, INFER_BODY, unsampled)[0] == 200
            assert server.stop() == 0  # it sends what it has
        assert collector.paths == {"/v1/traces"}
        assert collector.resource["service.name"] == "vitx"
        named = {span.name: span for span in collector.spans}
        asked = named["POST /v1/classify"]
        assert (asked.trace_id.hex(), asked.parent_span_id.hex(), asked.kind) == (TRACE, PARENT, 2)  # SERVER
        given = {"http.request.method": "POST", "url.path": "/v1/classify", "http.response.status_code": 200}
        assert attributes(asked) == {**given, "vitx.request_id": "mine", "vitx.model": "tiny", "vitx.images": 1}
        phases = collector.children(asked)
        assert [phase.name for phase in phases] == ["decode", "queue", "compute"]
        ends = [asked.start_time_unix_nano]
        for phase in phases:
            assert phase.trace_id == asked.trace_id
            assert ends[-1] <= phase.start_time_unix_nano <= phase.end_time_unix_nano
            ends.append(phase.end_time_unix_nano)
        assert ends[-1] <= asked.end_time_unix_nano
        plain = named[f"POST {INFER_PATH}"]
        assert plain.parent_span_id == b""
        assert plain.trace_id.hex() != TRACE
        assert [phase.name for phase in collector.children(plain)] == ["queue", "compute"]
        refused = next(span for span in collector.spans if attributes(span).get("http.response.status_code") == 404)
        assert (refused.name, refused.parent_span_id, collector.children(refused)) == ("POST", b"", [])
        rpc = named["gRPC grpc.ModelInfer"]
        assert (rpc.trace_id.hex(), rpc.parent_span_id.hex()) == (TRACE, PARENT)
        assert attributes(rpc)["rpc.method"] == "ModelInfer"
        assert [phase.name for phase in collector.children(rpc)] == ["queue", "compute"]
        assert TRACE[::-1] not in {span.trace_id.hex() for span in collector.spans}


def call(address: str, *metadata: tuple[str, str]) -> None:
    """One inference over gRPC."""
    triton = pytest.importorskip("tritonclient.grpc")
    tensor = triton.InferInput("images", [1, IMAGE_SIZE, IMAGE_SIZE, 3], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8))
    with triton.InferenceServerClient(address) as client:
        client.infer("tiny", [tensor], headers=dict(metadata))


def test_requests_are_answered_without_a_collector(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        for _ in range(50):
            assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
        assert server.stop() == 0


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with 2,048 spans to send took half a minute, and with its drain longer than systemd waits for it."""
    seconds = 18
    assert seconds > 5 * opentelemetry._EXPORT_SECONDS  # of so many batches
    monkeypatch.setattr(opentelemetry, "_EXPORT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(3000):
            tracing.write(RequestRecord("one"), "GET", "/v2", 200, 0.001)
        started = time.monotonic()
        tracing.close()
        assert time.monotonic() - started < seconds


def test_a_collector_whose_answer_does_not_end_gets_the_next_spans_too() -> None:
    requests, ended = [], threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # its client has hung up
                while not ended.wait(0.05):
                    self.wfile.write(b"and so on")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            tracing = Tracing(f"http://127.0.0.1:{server.server_port}")
            for count in (1, 2):
                for _ in range(512):  # so many are sent at once
                    tracing.write(RequestRecord("one"), "GET", "/v2", 200, 0.001)
                wait_until(lambda count=count: len(requests) == count)
        finally:
            ended.set()
            server.shutdown()
            thread.join()
        tracing.close()


def test_a_tracestate_that_is_none_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing("http://127.0.0.1:9")
    record = RequestRecord("id", f"00-{TRACE}-{PARENT}-00", "a=b,!a", "")
    tracing.write(record, "GET", "/v2", 200, 0.1)
    tracing.close()
    assert not caplog.records


@pytest.mark.parametrize("variable", ["OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"])
def test_the_service_has_the_name_that_the_environment_gives_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "flowers" if variable == "OTEL_SERVICE_NAME" else "service.name=flowers")
    with running_collector() as collector:
        tracing = Tracing(collector.url)
        tracing.write(RequestRecord("id"), "GET", "/v2", 200, 0.1)
        tracing.close()
        assert collector.resource["service.name"] == "flowers"
        assert collector.resource["service.version"] == __version__


def test_a_variable_that_opentelemetry_refuses_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "256")  # less than a batch
    with pytest.raises(InputError, match=r"OTEL_… variables that are set: max_export_batch_size must be less"):
        Tracing("http://127.0.0.1:4318")


def test_opentelemetry_is_imported_only_with_its_option(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, program=NO_PACKAGE) as server:
        assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
    remedy = r"ended with 3: .*'opentelemetry.*', which is not installed: pip install 'vitx\[otel\]'"
    with (
        pytest.raises(AssertionError, match=remedy),
        running_server(tiny_bundle.path, "--otlp-endpoint", "http://127.0.0.1:4318", program=NO_PACKAGE),
    ):
        pass


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://collector:4317", "http://", "http://[::1"])
def test_a_bad_endpoint_is_refused(tiny_bundle: Bundle, url: str) -> None:
    refused = run_serve(tiny_bundle.path, "--port", "0", "--otlp-endpoint", url)
    assert refused.returncode == 2
    assert f"error: '{url}' is not an OTLP endpoint" in refused.stderr
