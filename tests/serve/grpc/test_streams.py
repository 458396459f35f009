"""How the streams of the gRPC server end."""

import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from bundle_fixture import IMAGE_SIZE
from server_process import HANG, grpc_address, held_model, running_server, wait_until, waiting
from vitx.core.bundle import Bundle

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
DRAINED = ("StatusCode.UNAVAILABLE", "the server is shutting down")


def image() -> Any:
    made = triton.InferInput("images", [1, IMAGE_SIZE, IMAGE_SIZE, 3], "UINT8")
    made.set_data_from_numpy(np.full((1, IMAGE_SIZE, IMAGE_SIZE, 3), 7, np.uint8))
    return made


def test_a_drain_ends_streams_with_an_error_and_begins_none(tmp_path: Path, tiny_bundle: Bundle) -> None:
    """Without an error Triton's client would send on, and wait for replies that never come."""
    gate, sent, answers = tmp_path / "gate", queue.Queue[bytes | None](), queue.Queue[Any]()
    with (
        running_server(tiny_bundle.path, "--grpc-port", "0", program=held_model(gate)) as server,
        grpc.insecure_channel(grpc_address(server)) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        gate.touch()
        client = triton.InferenceServerClient(grpc_address(server))
        client.start_stream(lambda result, error: answers.put(error or result.get_response().model_name))
        client.async_stream_infer("tiny", [image()])
        wait_until(lambda: waiting(server) == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_server_ready())
        with pytest.raises(grpc.RpcError) as refused:
            pool.submit(next, channel.stream_stream(STREAM)(iter(sent.get, None))).result(HANG)
        assert (str(refused.value.code()), refused.value.details()) == DRAINED
        gate.unlink()
        assert answers.get(timeout=HANG) == "tiny"
        ended = answers.get(timeout=HANG)
        assert (ended.status(), ended.message()) == DRAINED
        with pytest.raises(InferenceServerException, match="A new stream should be started"):
            client.async_stream_infer("tiny", [image()])
        sent.put(None)
        client.close()
        assert server.process.wait(20) == 0
