"""Deadlines that pass while a request is read: by --timeout-ms, or by what it gives itself, over HTTP and gRPC."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bundle_fixture import IMAGE_SIZE, write_bundle
from server_process import ServerProcess, grpc_address, running_server

IMAGES = 4000  # three million numbers: to read them takes a fifth of a second and more
SHORT, LONG = 50_000, 60_000_000  # microseconds
Ask = Callable[[ServerProcess, dict[str, int]], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("deadlines") / "tiny.vitx").path


@pytest.fixture(scope="module", params=[None, SHORT], ids=["no default", "a default"])
def server(folder: Path, request: Any) -> Iterator[ServerProcess]:
    many = ("--max-images", str(IMAGES), "--queue", str(IMAGES), "--max-batch", "512", "--allow-uncertified")
    default = () if request.param is None else ("--timeout-ms", str(SHORT // 1000))
    with running_server(folder, "--grpc-port", "0", *many, *default) as started:
        grpc_address(started)
        yield started


def over_http(server: ServerProcess, parameters: dict[str, int]) -> bool:
    tensor = {"name": "images", "datatype": "UINT8", "shape": [IMAGES, IMAGE_SIZE, IMAGE_SIZE, 3], "data": None}
    head = json.dumps({"parameters": parameters, "inputs": [tensor]}).encode()
    numbers = b"[" + b",".join([b"200"] * (IMAGES * IMAGE_SIZE**2 * 3)) + b"]"
    status, text, _ = server.request("POST", "/v2/models/tiny/infer", head.replace(b"null", numbers))
    assert status == 200 or (status, "deadline" in json.loads(text)["error"]) == (503, True)
    return status == 200


def over_grpc(server: ServerProcess, parameters: dict[str, int]) -> bool:
    message = service_pb2.ModelInferRequest(model_name="tiny")
    tensor = message.inputs.add(name="images", datatype="UINT8", shape=[IMAGES, IMAGE_SIZE, IMAGE_SIZE, 3])
    tensor.contents.uint_contents.extend(np.full(IMAGES * IMAGE_SIZE**2 * 3, 200, np.uint32))
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(message)
        code = call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
    return bool(code is grpc.StatusCode.OK)


@pytest.mark.parametrize("ask", [over_http, over_grpc])
def test_the_time_to_read_a_request_counts(server: ServerProcess, ask: Ask, request: pytest.FixtureRequest) -> None:
    has_default = "a default" in request.node.name
    assert ask(server, {"timeout": LONG})
    assert not ask(server, {"timeout": SHORT})
    assert ask(server, {}) is not has_default
