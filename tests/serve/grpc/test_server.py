"""The gRPC server: its port, overload, deadlines, cancelled calls, and signals."""

import gzip
import json
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from bundle_fixture import IMAGE_SIZE, NumpySession
from server_process import (
    HANG,
    INFER_BODY,
    INFER_PATH,
    SLOW_MODEL,
    ServerProcess,
    end_under_load,
    grpc_address,
    held_model,
    run_serve,
    running_server,
    wait_until,
    waiting,
)
from vitx.core.bundle import Bundle
from vitx.core.sandbox import resident_gib
from vitx.serve.grpc.messages import message_class

NO_GRPC = "import sys; sys.modules['grpc'] = None; from vitx.cli import main; main()"  # importing it now raises
UNFORESEEN = """
from vitx.serve.protocol.infer import ParsedHeader
def fail(*given):
    raise ArithmeticError("unforeseen")
ParsedHeader.request = fail
from vitx.cli import main
main()
"""
MISSED = 'vitx_rejections_total{reason="deadline"}'
DISCONNECTED = 'vitx_rejections_total{reason="disconnected"}'
LATE = {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}  # its deadline has passed, or passes before an answer could be there


@contextmanager
def slow_server(bundle: Bundle, *options: str, program: str = SLOW_MODEL) -> Iterator[tuple[ServerProcess, Any]]:
    """A server of one slow image after the other, and a client of it."""
    arguments: tuple[str | Path, ...] = (bundle.path, "--max-batch", "1", "--grpc-port", "0", *options)
    with running_server(*arguments, program=program) as server:
        client = triton.InferenceServerClient(grpc_address(server))
        yield server, client
        client.close()


def image(number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.full((1, IMAGE_SIZE, IMAGE_SIZE, 3), number, dtype=np.uint8)


def tensor(number: int) -> Any:
    made = triton.InferInput("images", [1, IMAGE_SIZE, IMAGE_SIZE, 3], "UINT8")
    made.set_data_from_numpy(image(number))
    return made


def outcome(client: Any, number: int = 7, **options: Any) -> str:
    """The status of one call: "OK", and the logits are right, or the error's; "refused" when the server drains."""
    try:
        logits = client.infer("tiny", [tensor(number)], **{"client_timeout": HANG, **options}).as_numpy("logits")
    except InferenceServerException as error:
        refused = error.message() == "the server is shutting down"
        return "refused" if refused else str(error.status()).removeprefix("StatusCode.")
    assert logits == pytest.approx(NumpySession().infer(image(number)), rel=1e-4)
    return "OK"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # gRPC would do with ::1 alone
def test_a_port_in_use_is_refused_before_a_model_is_loaded(tiny_bundle: Bundle, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run_serve(tiny_bundle.path, "--host", host, "--port", "0", "--grpc-port", str(port))
    assert (refused.returncode, refused.stdout) == (3, "")
    assert f"error: cannot listen on 127.0.0.1 port {port} for gRPC: choose another --grpc-port" in refused.stderr


def test_without_the_package_the_error_names_the_extra(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, program=NO_GRPC) as server:
        assert server.stop() == 0
    remedy = r"ended with 3: .*'grpc', which is not installed: pip install 'vitx\[grpc\]'"
    with (
        pytest.raises(AssertionError, match=remedy),
        running_server(tiny_bundle.path, "--grpc-port", "0", program=NO_GRPC),
    ):
        pass


def test_a_full_queue_is_resource_exhausted(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    started = slow_server(tiny_bundle, "--queue", "2", program=held_model(gate))
    with started as (server, client), ThreadPoolExecutor(12) as pool:
        gate.touch()
        calls = pool.map(lambda _: outcome(client), range(12))
        wait_until(lambda: waiting(server) + server.metric("vitx_rejections_total") == 12)
        gate.unlink()
        outcomes = list(calls)
        assert set(outcomes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert server.metric('vitx_rejections_total{reason="queue_full"}') == outcomes.count("RESOURCE_EXHAUSTED")
        assert outcome(client) == "OK"


def test_an_internal_error_is_no_rejection_in_either_protocol(tiny_bundle: Bundle) -> None:
    with slow_server(tiny_bundle, program=UNFORESEEN) as (server, client):
        assert outcome(client) == "INTERNAL"
        status, body, _ = server.request("POST", INFER_PATH, INFER_BODY)
        assert (status, json.loads(body)) == (500, {"error": "internal error: see the server's log"})
        for route in ("grpc.ModelInfer", "infer"):
            assert server.metric(f'vitx_requests_total{{route="{route}",status="500"}}') == 1
        assert server.metric("vitx_rejections_total") == 0


def test_a_call_that_is_cancelled_frees_its_place(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with slow_server(tiny_bundle, program=held_model(gate)) as (server, client):
        gate.touch()
        calls = [client.async_infer("tiny", [tensor(7)], lambda result, error: None) for _ in range(6)]
        wait_until(lambda: waiting(server) == 6)
        for call in calls:
            call.cancel()
        wait_until(lambda: server.metric(DISCONNECTED) == 6)
        assert server.metric("vitx_queue_depth") == 0
        gate.unlink()
        assert outcome(client) == "OK"
        assert server.metric("vitx_images_total") < 6  # those that waited never ran


def test_a_deadline_is_kept_and_costs_nothing_after_it(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with slow_server(tiny_bundle, program=held_model(gate)) as (server, client), ThreadPoolExecutor(8) as pool:
        gate.touch()
        calls = [pool.submit(outcome, client, client_timeout=HANG) for _ in range(3)]
        wait_until(lambda: waiting(server) == 3)
        late = [pool.submit(outcome, client, client_timeout=0.1) for _ in range(4)]
        assert {call.result(HANG) for call in late} <= LATE
        gate.unlink()
        assert {call.result(HANG) for call in calls} == {"OK"}
        wait_until(lambda: waiting(server) == 0)
        assert server.metric("vitx_images_total") == 3
        assert outcome(client, timeout=1) == "DEADLINE_EXCEEDED"  # a microsecond: it passes while the request is read
        assert outcome(client, client_timeout=HANG) == "OK"


def test_a_deadline_that_passes(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with slow_server(tiny_bundle, program=held_model(gate)) as (server, client):
        gate.touch()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(outcome, client)
            wait_until(lambda: server.metric("vitx_running_images") == 1)
            assert outcome(client, timeout=100_000) in LATE  # it seemed possible: 0.1 s
            assert outcome(client, timeout=1) == "DEADLINE_EXCEEDED"
            wait_until(lambda: server.metric(MISSED) == 2)
            assert server.metric(DISCONNECTED) == 0

            def missed() -> bool:
                """One call more: of one that ends before it is there the server knows nothing, or that it was ended."""
                assert outcome(client, client_timeout=0.1) in LATE
                return server.metric(MISSED) > 2

            wait_until(missed)
            told = 'vitx_requests_total{route="grpc.ModelInfer",status="503"}'
            wait_until(lambda: server.metric(told) == server.metric(MISSED))
            gate.unlink()
            assert held.result(HANG) == "OK"
        assert server.metric("vitx_images_total") == 1


def test_a_deadline_that_cannot_be_met(tiny_bundle: Bundle) -> None:
    """As the warm-up has measured it, an image takes longer."""
    with slow_server(tiny_bundle, program=SLOW_MODEL.replace("if images.any()", "if len(images)")) as (server, client):

        def refused() -> bool:
            """On a busy machine the time may have passed before it is looked at."""
            found = outcome(client, timeout=150_000)
            assert found in LATE
            return found == "RESOURCE_EXHAUSTED"

        wait_until(refused)
        assert server.metric("vitx_images_total") == 0


def http2(payload: bytes, *, method: str = "ModelInfer", window: int = 65_535) -> bytes:
    """What opens an HTTP/2 connection (RFC 9113) and a call with this; window: the bytes of a reply that are taken."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/" + method.encode(),
        b":authority": b"here",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    head = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items())
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, window))
    return start + frame(1, 4, 1, head) + frame(0, 0, 1, payload)


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG)


def test_a_call_ends_when_its_message_does_not_arrive(tiny_bundle: Bundle) -> None:
    slow, gate = 'vitx_rejections_total{reason="slow_client"}', threading.Event()

    def never() -> Iterator[bytes]:
        gate.wait(HANG)
        yield from ()

    with slow_server(tiny_bundle, "--message-timeout", "0.5") as (server, client):
        channel = grpc.insecure_channel(grpc_address(server))
        for name in ("inference.GRPCInferenceService/ModelInfer", "grpc.health.v1.Health/Check"):
            silent = channel.stream_unary(f"/{name}").future(never())
            with pytest.raises(grpc.RpcError, match="the call's message took too long") as error:
                silent.result(HANG)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.metric(slow) == 2
        with connected(grpc_address(server)) as half:
            half.sendall(http2(struct.pack(">BI", 0, 1000) + b"x" * 10))  # of the 1,000 bytes that it announces
            wait_until(lambda: server.metric(slow) == 3)
        assert client.infer("tiny", [tensor(1)]).as_numpy("logits") is not None
        gate.set()
        channel.close()


def test_calls_that_end_before_their_message_count_as_what_ended_them(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate, log = threading.Event(), tmp_path / "access.log"

    def never() -> Iterator[bytes]:
        gate.wait(HANG)
        yield from ()

    with slow_server(tiny_bundle, "--access-log", str(log)) as (server, _), ExitStack() as ending:
        channel = ending.enter_context(grpc.insecure_channel(grpc_address(server)))
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")

        def missed() -> bool:
            """One call more: of one that ends before it is there the server knows nothing."""
            with pytest.raises(grpc.RpcError, match="Deadline Exceeded"):
                call(never(), timeout=0.5)
            return server.metric(MISSED) > 0

        def left() -> bool:
            begun = call.future(never())
            with pytest.raises(grpc.FutureTimeoutError):
                begun.result(0.5)
            begun.cancel()
            return server.metric(DISCONNECTED) > 0

        wait_until(missed)
        wait_until(left)
        assert server.metric('vitx_rejections_total{reason="bad_request"}') == 0
        gate.set()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["status"] for line in lines if line["method"] == "gRPC"} == {503, 499}


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelStreamInfer of more", "ServerMetadata"])
def test_a_call_whose_reply_is_not_taken_is_reset_and_holds_up_no_drain(method: str, tiny_bundle: Bundle) -> None:
    """When the next call comes: else gRPC keeps replies for as long as connections are open, 4,096 of any size."""
    request = message_class("ModelInferRequest")(model_name="tiny", raw_input_contents=[image(7).tobytes()])
    request.inputs.add(name="images", datatype="UINT8", shape=[1, IMAGE_SIZE, IMAGE_SIZE, 3])
    method, more, _ = method.partition(" ")
    message = b"" if more or method == "ServerMetadata" else request.SerializeToString()
    messages = (struct.pack(">BI", 0, len(message)) + message) * (100 if more else 1)  # than run at once
    acknowledged = bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))  # its settings; else the connection ends in a minute
    started = slow_server(tiny_bundle, "--write-timeout", "0.5")
    with started as (server, others), connected(grpc_address(server)) as deaf:
        assert outcome(others) == "OK"  # grpcio keeps the first call of a process
        deaf.sendall(http2(messages, method=method, window=0) + acknowledged)
        wait_until(lambda: server.metric('vitx_rejections_total{reason="slow_client"}') == 1)
        assert outcome(others) == "OK"
        frames = deaf.makefile("rb")
        kinds = set[int]()
        while 3 not in kinds:  # RST_STREAM
            size, kind = struct.unpack(">IB", b"\0" + frames.read(4))
            frames.read(5 + size)
            kinds.add(kind)
        assert not kinds & {0, 7}  # DATA, GOAWAY
        assert server.stop() == 0


def test_connections_that_ask_for_nothing_are_closed(tiny_bundle: Bundle) -> None:
    """Each takes an open file, which HTTP has none of then."""
    options = ("--grpc-port", "0", "--header-timeout", "1.5", "--idle-timeout", "0.5")
    with running_server(tiny_bundle.path, *options) as server:
        for sent in (b"", b"PRI", http2(b"")[:39]):  # the last is all that a connection begins with
            with connected(grpc_address(server)) as idle:
                idle.sendall(sent)
                assert b"".join(iter(lambda: idle.recv(2**16), b""))[3] in (4, 7)  # SETTINGS or GOAWAY, and the end
        client = triton.InferenceServerClient(grpc_address(server))
        for _ in range(3):
            assert outcome(client) == "OK"
            time.sleep(0.6)  # its connection is closed then
        client.close()


def test_sigterm_answers_what_was_accepted_and_ends_streams(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with slow_server(tiny_bundle, program=held_model(gate)) as (server, client), ThreadPoolExecutor(4) as pool:
        gate.touch()
        idle = triton.InferenceServerClient(grpc_address(server))
        idle.start_stream(lambda result, error: None)  # would hold the drain, were it not ended
        busy, answers = triton.InferenceServerClient(grpc_address(server)), queue.Queue[Any]()
        busy.start_stream(lambda result, error: answers.put(result))
        busy.async_stream_infer("tiny", [tensor(9)])
        calls = [pool.submit(outcome, client, number) for number in range(20, 23)]
        wait_until(lambda: waiting(server) == 4)
        server.process.send_signal(signal.SIGTERM)
        gate.unlink()
        assert {call.result(HANG) for call in calls} == {"OK"}
        assert answers.get(timeout=HANG).as_numpy("logits") == pytest.approx(NumpySession().infer(image(9)), rel=1e-4)
        assert server.process.wait(20) == 0
        assert outcome(client) == "UNAVAILABLE"
        idle.close()
        busy.close()


def test_a_signal_under_load_loses_no_accepted_call(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--grpc-port", "0") as server:
        address = grpc_address(server)

        def new_client(_: Callable[[], None]) -> Callable[[], str]:
            options = [("grpc.use_local_subchannel_pool", 1)]
            client = opened.enter_context(triton.InferenceServerClient(address, channel_args=options))
            return lambda: outcome(client)

        with ExitStack() as opened:
            end_under_load(server, signal.SIGTERM, new_client, good="OK", refused="refused", gone="UNAVAILABLE")


def test_readiness_follows_the_drain(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    with slow_server(tiny_bundle, program=held_model(gate)) as (server, client), ThreadPoolExecutor(4) as pool:
        gate.touch()
        assert client.is_server_ready()
        calls = [pool.submit(outcome, client) for _ in range(4)]
        wait_until(lambda: waiting(server) == 4)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_server_ready())
        assert client.is_server_live()
        assert not client.is_model_ready("tiny")
        with grpc.insecure_channel(grpc_address(server)) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x02"  # NOT_SERVING
        gate.unlink()
        assert {call.result(HANG) for call in calls} == {"OK"}
        assert server.process.wait(20) == 0


# Of 768 bytes an image. A compressed message counts as what it becomes, and as what came until that is known.
@pytest.mark.parametrize(("encoding", "had", "rows"), [(None, "0", 1300), ("gzip", r"\d+", 600)])
def test_messages_in_flight_are_bounded_in_sum(tiny_bundle: Bundle, encoding: str | None, had: str, rows: int) -> None:
    limits = ("--max-memory-mib", "1", "--max-images", "2000", "--queue", "3000")
    with running_server(tiny_bundle.path, "--grpc-port", "0", *limits) as server, ExitStack() as opened:
        client = opened.enter_context(triton.InferenceServerClient(grpc_address(server)))

        def infer(rows: int) -> Any:
            tensor = triton.InferInput("images", [rows, 16, 16, 3], "UINT8")
            tensor.set_data_from_numpy(np.zeros((rows, 16, 16, 3), np.uint8))
            return client.infer("tiny", [tensor], compression_algorithm=encoding).as_numpy("logits").shape

        for _ in range(2):
            with pytest.raises(InferenceServerException, match=f"requests in flight have {had} of 1048576 bytes"):
                infer(1600)
            assert infer(rows) == (rows, 4)


def test_a_message_counts_before_it_is_parsed_and_until_it_is_answered(tmp_path: Path, tiny_bundle: Bundle) -> None:
    gate = tmp_path / "gate"
    limits = ("--max-memory-mib", "1", "--max-images", "2000", "--queue", "3000", "--max-batch", "1000")
    rows = np.full((800, IMAGE_SIZE, IMAGE_SIZE, 3), 7, np.uint8)  # 600 KiB
    many = triton.InferInput("images", list(rows.shape), "UINT8")
    many.set_data_from_numpy(rows)
    with slow_server(tiny_bundle, *limits, program=held_model(gate)) as (server, client):
        with grpc.insecure_channel(grpc_address(server)) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for junk, code in ((2**19, grpc.StatusCode.INVALID_ARGUMENT), (2**20 + 1, grpc.StatusCode.UNAVAILABLE)):
                with pytest.raises(grpc.RpcError) as error:
                    infer(b"\xff" * junk)
                assert error.value.code() == code
        gate.touch()
        answers = queue.Queue[str]()
        streaming = triton.InferenceServerClient(grpc_address(server))
        streaming.start_stream(lambda result, error: answers.put(str(error)))
        streaming.async_stream_infer("tiny", [many])
        wait_until(lambda: waiting(server) == 800)
        with pytest.raises(InferenceServerException, match=r"requests in flight have 6[0-9]{5} of 1048576 bytes"):
            client.infer("tiny", [many])
        streaming.stop_stream(cancel_requests=True)
        wait_until(lambda: server.metric(DISCONNECTED) == 1)
        gate.unlink()
        assert client.infer("tiny", [many]).as_numpy("logits").shape == (800, 4)
        streaming.start_stream(lambda result, error: answers.put(str(error)))
        gate.touch()
        for _ in range(2):
            streaming.async_stream_infer("tiny", [many])
        wait_until(lambda: server.metric('vitx_rejections_total{reason="memory"}') == 3)
        gate.unlink()
        streaming.stop_stream()
        found = [answers.get(timeout=HANG) for _ in range(answers.qsize())]
        assert found[-2] == "None"
        assert "requests in flight have" in found[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_refused_messages_are_freed_at_once(tiny_bundle: Bundle, encoding: str) -> None:
    message = message_class("ModelInferRequest")(model_name="tiny", raw_input_contents=[bytes(15 * 2**20)])
    message.inputs.add(name="images", datatype="UINT8", shape=[1, IMAGE_SIZE, IMAGE_SIZE, 3])
    data = message.SerializeToString()
    data = gzip.compress(data) if encoding else data
    with (
        running_server(tiny_bundle.path, "--grpc-port", "0") as server,
        grpc.insecure_channel(grpc_address(server), options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert failure_of(infer, data) == grpc.StatusCode.INVALID_ARGUMENT
        before = resident_gib(server.process.pid)
        for _ in range(10):  # a garbage collection comes later
            assert failure_of(infer, data) == grpc.StatusCode.INVALID_ARGUMENT
        assert resident_gib(server.process.pid) - before < 4 * 15 / 2**10  # of ten messages of 15 MiB


# Numbers that come one by one are read in a thread, which waits for the gate.
HELD_NUMBERS = """
import os, time
from vitx.serve.grpc import service
read = service.decode_infer_request
def held(request, *given):
    while len(request.inputs[0].contents.uint_contents) and os.path.exists(gate):
        time.sleep(0.005)
        open(gate + ".seen", "w").close()
    return read(request, *given)
service.decode_infer_request = held
from vitx.cli import main
main()
"""


def test_a_message_counts_while_a_thread_reads_it_after_its_call_was_cancelled(
    tmp_path: Path, tiny_bundle: Bundle
) -> None:
    gate, seen = tmp_path / "gate", tmp_path / "gate.seen"
    request = message_class("ModelInferRequest")(model_name="tiny")
    image = request.inputs.add(name="images", datatype="UINT8", shape=[800, IMAGE_SIZE, IMAGE_SIZE, 3])
    image.contents.uint_contents.extend([7] * (800 * IMAGE_SIZE * IMAGE_SIZE * 3))
    message = request.SerializeToString()
    options = ("--grpc-port", "0", "--max-memory-mib", "1", "--max-images", "800")
    program = f"gate = {str(gate)!r}" + HELD_NUMBERS
    with (
        running_server(tiny_bundle.path, *options, program=program) as server,
        grpc.insecure_channel(grpc_address(server)) as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        gate.touch()
        call = infer.future(message)
        wait_until(seen.exists)
        call.cancel()
        assert failure_of(infer, message) == grpc.StatusCode.UNAVAILABLE
        gate.unlink()
        wait_until(lambda: server.metric(DISCONNECTED) == 1)
        assert failure_of(infer, message) is None


def failure_of(infer: Any, message: bytes) -> grpc.StatusCode | None:
    try:
        infer(message, timeout=HANG)
    except grpc.RpcError as error:
        return error.code()
    return None
