"""OpenTelemetry traces over OTLP/HTTP: a span for each request, with its phases as child spans.

The spans are made after a request has ended, from the times in its record. The parent is the client's `traceparent`
(W3C Trace Context), which decides about sampling too; without one every request is, but for OTEL_TRACES_SAMPLER.
"""

import logging
import time
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vitx import __version__
from vitx.core.errors import InputError
from vitx.core.urls import is_http
from vitx.serve.observe.request_record import RequestRecord

_EXPORT_SECONDS = 2.0  # for a batch of spans, of which five may be left: if the collector hangs, the server still ends


class Tracing:
    """Sends the spans of requests to a collector, on its own thread; at most 2,048 are queued."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's base URL, or the URL of its traces; raise InputError if it is not HTTP."""
        if not is_http(endpoint):
            raise InputError(f"'{endpoint}' is not an OTLP endpoint: expected a URL such as http://127.0.0.1:4318")
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        own = Resource.create({SERVICE_NAME: "vitx", SERVICE_VERSION: __version__})
        resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME comes before our name
        exporter = OTLPSpanExporter(url, timeout=_EXPORT_SECONDS, session=(session := requests.Session()))
        session.stream = True  # nothing of an answer's body is read: one without an end would be waited for, and kept
        try:
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:  # such as of OTEL_BSP_MAX_QUEUE_SIZE
            raise InputError(f"OpenTelemetry takes no traces with the OTEL_… variables that are set: {error}") from None
        self._tracer = self._provider.get_tracer("vitx.serve", __version__)
        self._context = TraceContextTextMapPropagator()
        logging.getLogger("opentelemetry.trace").setLevel(logging.CRITICAL)  # it warns of what clients send

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None:
        """Make the spans of a request that has ended after `seconds`."""
        epoch = time.time_ns() - round(1e9 * time.monotonic())  # Unix time in ns when the monotonic clock was 0

        def at(moment: float) -> int:
            return epoch + round(1e9 * moment)

        span = self._tracer.start_span(
            # Without a model the path is whatever the client sent; span names should be few.
            f"{method} {path}" if record.model is not None else method,
            self._context.extract({"traceparent": record.traceparent, "tracestate": record.tracestate}),
            SpanKind.SERVER,
            start_time=at(record.started),
        )
        if span.is_recording():
            of_http = {"http.request.method": method, "url.path": path[:200]}
            of_grpc = {"rpc.system": "grpc", "rpc.method": path.removeprefix("grpc.")}
            span.set_attributes(of_grpc if method == "gRPC" else of_http)
            span.set_attributes({"http.response.status_code": status, "vitx.request_id": record.id})
            if record.model is not None:
                span.set_attributes({"vitx.model": record.model, "vitx.images": record.images})
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            inside = set_span_in_context(span)
            for name, (started, ended) in record.phases.items():
                self._tracer.start_span(name, inside, start_time=at(started)).end(at(ended))
        span.end(at(record.started + seconds))

    def close(self) -> None:
        """Send the queued spans."""
        self._provider.shutdown()
