"""A model of many classes, of which a small request may ask for all: the reply is made beside the event loop."""

import json
import struct
from collections.abc import Iterator

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bundle_fixture import IMAGE_SIZE, png, write_bundle
from server_process import ServerProcess, grpc_address, running_server
from vitx.core.bundle import MANIFEST, FileEntry
from vitx.core.files import compact_json, sha256_file, write_json
from vitx.core.probabilities import top_k, top_predictions
from vitx.serve.grpc.messages import message_class
from vitx.serve.limits import MANY_TEXTS, MOST_TEXTS

CLASSES, IMAGES = 1100, 200
LABELS = tuple(f"class {index}" for index in range(CLASSES))
WEIGHTS = np.random.default_rng(0).normal(0, 0.01, (3, CLASSES)).astype(np.float32)
PIXELS = np.random.default_rng(1).integers(0, 256, (IMAGES, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
# A server that ends when its event loop, which is on the main thread, writes much text.
WATCHED = """
import os, threading
import vitx.core.files as writer
import vitx.serve.grpc.protocol as protocol
def beside(write):
    def watched(values):
        if threading.current_thread() is threading.main_thread() and isinstance(values, list) and len(values) > 1000:
            os._exit(7)
        return write(values)
    return watched
writer._dumps = beside(writer._dumps)
protocol.tensor_bytes = beside(protocol.tensor_bytes)
from vitx.cli import main
main()
"""
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["colour"], keepdims=0),
        helper.make_node("MatMul", ["colour", "weights"], ["logits"]),
    ]
    constants = [numpy_helper.from_array(np.array([1, 2]), "axes"), numpy_helper.from_array(WEIGHTS, "weights")]
    inputs = [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", IMAGE_SIZE, IMAGE_SIZE, 3])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])]
    graph = helper.make_graph(nodes, "many", inputs, outputs, constants)
    path = bundle.path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    many = {
        "model": bundle.manifest.model.model_copy(update={"num_classes": CLASSES}),
        "labels": LABELS,
        "output": bundle.manifest.output.model_copy(update={"shape": ("N", CLASSES)}),
        "files": {"model.onnx": FileEntry(sha256=sha256_file(path), size=path.stat().st_size)},
    }
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update=many))
    with running_server(bundle.path, "--allow-uncertified", "--grpc-port", "0", program=WATCHED) as started:
        yield started


def logits() -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    found: np.ndarray[tuple[int, int], np.dtype[np.float32]] = PIXELS.astype(np.float32).mean((1, 2)) @ WEIGHTS
    return found


def form(images: int) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="i"; filename="%d"\r\n\r\n'
    return b"".join(head % number + png(PIXELS[number % IMAGES]) + b"\r\n" for number in range(images)) + b"--b--\r\n"


def classify(server: ServerProcess, images: int, classes: int) -> tuple[int, bytes]:
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    return server.request("POST", f"/v1/classify?top_k={classes}", form(images), kind)[:2]


def infer(server: ServerProcess, images: int, **output: object) -> tuple[int, bytes]:
    parameters = {"binary_data_size": PIXELS[:1].nbytes * images}
    shape = [images, *PIXELS.shape[1:]]
    tensor = {"name": "images", "datatype": "UINT8", "shape": shape, "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "logits", "parameters": output}]}).encode()
    pixels = np.resize(PIXELS, (images, *PIXELS.shape[1:])).tobytes()
    return server.request("POST", INFER, head + pixels, {"Inference-Header-Content-Length": str(len(head))})[:2]


def test_all_classes_of_many_images_are_read(server: ServerProcess) -> None:
    """Of 256 images, 38 kB of PNG: the event loop stood still for a second, with 21,841 classes for 25 s."""
    status, text = classify(server, IMAGES, CLASSES)
    assert status == 200
    results = json.loads(text)["results"]
    for result, row in zip(results, logits(), strict=True):
        wanted = top_predictions(row, LABELS, CLASSES)
        assert np.allclose([one["score"] for one in result["predictions"]], [one["score"] for one in wanted], 1e-4)
        assert {one["label"] for one in result["predictions"]} == set(LABELS)
    assert [result["filename"] for result in results] == [str(number) for number in range(IMAGES)]


def test_logits_and_classes_as_text_are_those_of_the_binary_form(server: ServerProcess) -> None:
    raw = infer(server, IMAGES, binary_data=True)[1]
    rows = np.frombuffer(raw[-4 * IMAGES * CLASSES :], "<f4").reshape(IMAGES, CLASSES)
    assert np.allclose(rows, logits(), atol=1e-4)
    status, text = infer(server, IMAGES, binary_data=False)
    assert (status, json.loads(text)["outputs"][0]["data"]) == (200, rows.ravel().tolist())
    status, text = infer(server, IMAGES, binary_data=False, classification=CLASSES)
    classes = [
        f"{row[index]:f}:{index}:{LABELS[index]}"
        for row, best in zip(rows, top_k(rows, CLASSES), strict=True)
        for index in best
    ]
    assert (status, json.loads(text)["outputs"][0]["data"]) == (200, classes)
    assert grpc_classes(server) == classes


def grpc_classes(server: ServerProcess) -> list[str]:
    request = message_class("ModelInferRequest")(model_name="tiny", raw_input_contents=[PIXELS.tobytes()])
    request.inputs.add(name="images", datatype="UINT8", shape=PIXELS.shape)
    request.outputs.add(name="logits").parameters["classification"].int64_param = CLASSES
    with grpc.insecure_channel(grpc_address(server), [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_class("ModelInferResponse").FromString,
        )
        data = call(request).raw_output_contents[0]
    found, place = list[str](), 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        found.append(data[place + 4 : place + 4 + size].decode())
        place += 4 + size
    return found


def test_more_text_than_one_reply_may_have_is_refused_unread(server: ServerProcess) -> None:
    images = MOST_TEXTS // CLASSES + 1
    wanted = f"{images * CLASSES} numbers and classes as text in one reply, where binary ones have no limit"
    for status, text in (
        classify(server, images, CLASSES),
        infer(server, images, binary_data=False),
        infer(server, images, classification=CLASSES, binary_data=True),
    ):
        assert (status, json.loads(text)["error"]) == (413, f"{wanted}: at most {MOST_TEXTS}")
    assert infer(server, images, binary_data=True)[0] == 200


@pytest.mark.parametrize("size", [0, 1, MANY_TEXTS - 1, MANY_TEXTS, MANY_TEXTS + 1, 3 * MANY_TEXTS])
def test_json_in_pieces_is_that_of_the_standard_library(size: int) -> None:
    numbers = np.random.default_rng(0).normal(size=size).astype(np.float32).tolist()
    texts = [f"ö{number}" for number in range(size)]
    for value in (
        numbers,
        {"a": numbers, "ä": {"b": texts}, "c": None},
        {"outputs": [{"name": "x", "shape": (1, size), "data": numbers}, {"name": "y", "data": texts}], "id": ""},
        [{"a": 1}] * size,
    ):
        assert compact_json(value) == json.dumps(value, separators=(",", ":")).encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        compact_json({"data": [*numbers, float("nan")]})
