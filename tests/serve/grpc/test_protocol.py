"""Infer requests over gRPC that keep the contract, and every way to break it."""

import struct
import sys
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vitx.serve.errors import RequestError
from vitx.serve.grpc import protocol
from vitx.serve.grpc.messages import message_class
from vitx.serve.grpc.protocol import decode_infer_request, encode_infer_response
from vitx.serve.options import ServeOptions
from vitx.serve.protocol.infer import Contract, InferRequest
from vitx.serve.protocol.parameters import Region, RequestedOutput
from vitx.serve.protocol.shared_memory import SharedMemory

CONTRACT = Contract("tiny", "images", (2, 2, 3), "logits", 4)
LABELS = ("blue", "green", "grey", "red")
IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
NO_MEMORY = SharedMemory(enabled=False)

LOGITS = RequestedOutput("logits", binary=True)


def request(**changes: Any) -> Any:
    """A request for IMAGES by raw_input_contents, with some fields replaced."""
    tensor = {"name": "images", "datatype": "UINT8", "shape": [2, 2, 2, 3]}
    return message_class("ModelInferRequest")(
        **{"model_name": "tiny", "inputs": [tensor], "raw_input_contents": [IMAGES.tobytes()], **changes}
    )


def decode(request: Any, memory: SharedMemory = NO_MEMORY) -> InferRequest:
    return decode_infer_request(request, CONTRACT, ServeOptions(max_images=8).limits, memory)


def test_raw_and_typed_contents_are_the_same_images() -> None:
    np.testing.assert_array_equal(decode(request()).images, IMAGES)
    typed = request(raw_input_contents=[])
    typed.inputs[0].contents.uint_contents.extend(IMAGES.ravel().tolist())
    np.testing.assert_array_equal(decode(typed).images, IMAGES)
    assert decode(typed).images.dtype == np.uint8


def test_numbers_are_joined_where_they_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_PIECE", 5)
    typed = request(raw_input_contents=[])
    typed.inputs[0].contents.uint_contents.extend(IMAGES.ravel().tolist())
    np.testing.assert_array_equal(decode(typed).images, IMAGES)


def test_raw_contents_are_looked_at_once() -> None:
    """Protobuf copies them at each look: 50 MiB hold up the event loop for some hundredths of a second."""

    class Contents(list[bytes]):
        looks = 0

        def __getitem__(self, place: Any) -> Any:
            self.looks += 1
            return super().__getitem__(place)

        def __iter__(self) -> Iterator[bytes]:
            return map(self.__getitem__, range(len(self)))

    message, contents = request(), Contents([IMAGES.tobytes()])
    fields = {name: getattr(message, name) for name in ("id", "inputs", "outputs", "parameters")}
    read = decode(SimpleNamespace(**fields, raw_input_contents=contents))
    np.testing.assert_array_equal(read.images, IMAGES)
    assert contents.looks == 1


def test_the_id_is_kept_and_the_one_response_is_the_final_one() -> None:
    message = request(id="7")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    assert decode(message).id == "7"


def test_the_schedule_and_the_output_are_read() -> None:
    message = request(outputs=[{"name": "logits"}])
    plain = decode(message)
    assert (plain.priority, plain.timeout, plain.outputs) == (0, None, (LOGITS,))
    message.parameters["priority"].uint64_param = 3
    message.parameters["timeout"].int64_param = 250_000
    message.outputs[0].parameters["classification"].int64_param = 9
    read = decode(message)
    assert (read.priority, read.timeout, read.outputs) == (3, 0.25, (LOGITS._replace(top_k=4),))


def set_input(name: str, value: Any) -> Callable[[Any], None]:
    return lambda message: setattr(message.inputs[0], name, value)


def set_parameter(owner: Callable[[Any], Any], name: str, **value: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        ((kind, given),) = value.items()
        setattr(owner(message).parameters[name], kind, given)

    return change


def without_data(request: Any) -> Any:
    request.ClearField("raw_input_contents")
    return request


REGION = "'shared_memory_region', a name, and 'shared_memory_byte_size' go together: one of them is missing"
KNOWN = "known are binary_data_output, priority, timeout"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.ClearField("inputs"), "expected 1 input but got 0 inputs for model 'tiny'"),
        (lambda m: m.inputs.add(), "expected 1 input but got 2 inputs for model 'tiny'"),
        (set_input("name", "x"), "unexpected inference input 'x' for model 'tiny': its input is 'images'"),
        (set_input("datatype", "FP32"), "inference input 'images' is 'FP32': expected 'UINT8'"),
        (
            lambda m: m.inputs[0].shape.append(1),
            "unexpected shape [2, 2, 2, 3, 1] of input 'images': expected [N,2,2,3] with N ≥ 1",
        ),
        (
            lambda m: m.inputs[0].shape.__setitem__(0, -1),
            "unexpected shape [-1, 2, 2, 3] of input 'images': expected [N,2,2,3] with N ≥ 1",
        ),
        (
            lambda m: m.inputs[0].shape.__setitem__(0, 3),
            "input 'images' got unexpected byte size 24, expected 36 for shape [3, 2, 2, 3]",
        ),
        (
            lambda m: m.ClearField("raw_input_contents"),
            "input 'images' needs its data in one place: raw_input_contents, contents or shared memory",
        ),
        (
            lambda m: m.raw_input_contents.append(b""),
            "input 'images' needs its data in one place: raw_input_contents, contents or shared memory",
        ),
        (
            lambda m: m.inputs[0].contents.uint_contents.append(1),
            "input 'images' needs its data in one place: raw_input_contents, contents or shared memory",
        ),
        (
            set_parameter(lambda m: m, "sequence_id", int64_param=1),
            f"this server does not offer the request parameter 'sequence_id': {KNOWN}",
        ),
        (
            lambda m: m.parameters["priority"].SetInParent(),  # without a value
            "'priority' is None: expected a whole number of 0 or more",
        ),
        (
            set_parameter(lambda m: m, "timeout", int64_param=-1),
            "'timeout' is -1: expected a whole number of 0 or more",
        ),
        (
            set_parameter(lambda m: m, "priority", string_param="1"),
            "'priority' is '1': expected a whole number of 0 or more",
        ),
        (
            set_parameter(lambda m: m, "priority", bool_param=True),
            "'priority' is True: expected a whole number of 0 or more",
        ),
        (
            set_parameter(lambda m: m.inputs[0], "binary_data_size", int64_param=5),
            "'binary_data_size' is 5, but 24 bytes follow the JSON header",
        ),
        (
            lambda m: m.outputs.add(name="scores"),
            "unexpected inference output 'scores' for model 'tiny': its output is 'logits'",
        ),
        (set_parameter(lambda m: without_data(m).inputs[0], "shared_memory_region", string_param="a"), REGION),
        (set_parameter(lambda m: m.outputs.add(name="logits"), "shared_memory_byte_size", int64_param=1), REGION),
    ],
)
def test_refusals(change: Callable[[Any], object], text: str) -> None:
    message = request()
    change(message)
    with pytest.raises(RequestError) as error:
        decode(message)
    assert (error.value.status, error.value.reason, str(error.value)) == (400, "bad_request", text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0] * 23, "input 'images' got unexpected byte size 23, expected 24 for shape .2, 2, 2, 3."),
        ([256] + [0] * 23, "the data of input 'images' is not all integers from 0 to 255"),
    ],
)
def test_typed_contents_that_are_no_images(values: list[int], text: str) -> None:
    message = request(raw_input_contents=[])
    message.inputs[0].contents.uint_contents.extend(values)
    with pytest.raises(RequestError, match=text):
        decode(message)


def test_numbers_of_a_shape_that_is_refused_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 million of them took twelve seconds."""
    for shape in ([1_000_000], [1_000_000, 1, 1, 1], [9, 2, 2, 3], [8, 2, 2, 3]):
        message = request(raw_input_contents=[])
        message.inputs[0].contents.uint_contents.extend([0] * 107)
        del message.inputs[0].shape[:]
        message.inputs[0].shape.extend(shape)
        monkeypatch.delattr(protocol, "_pixels", raising=False)  # which reads them
        with pytest.raises(RequestError, match=r"unexpected shape|at most 8|unexpected byte size"):
            decode(message)


def test_too_many_images_are_413_whatever_the_data() -> None:
    message = request()
    message.inputs[0].shape[0] = 9
    with pytest.raises(RequestError, match="9 images in one request: at most 8") as error:
        decode(message)
    assert error.value.status == 413


def test_reading_adds_nothing_to_the_message() -> None:
    """Indexing a map of messages makes an entry."""
    message = request(outputs=[{"name": "logits"}])
    before = message.SerializeToString()
    decode(message)
    assert message.SerializeToString() == before


def test_logits_and_classes_are_encoded() -> None:
    logits = np.array([[0.25, 2, -1, 0.5], [3, 2, 1, 3]], dtype=np.float32)
    response = encode_infer_response(logits, InferRequest(IMAGES, (LOGITS,), id="7"), CONTRACT, LABELS)
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "7")
    output = response.outputs[0]
    assert (output.name, output.datatype, list(output.shape)) == ("logits", "FP32", [2, 4])
    assert response.raw_output_contents[0] == logits.tobytes()
    response = encode_infer_response(logits, InferRequest(IMAGES, (LOGITS._replace(top_k=2),)), CONTRACT, LABELS)
    assert response.id == ""
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [2, 2])
    texts = (b"2.000000:1:green", b"0.500000:3:red", b"3.000000:0:blue", b"3.000000:3:red")
    assert response.raw_output_contents[0] == b"".join(struct.pack("<I", len(text)) + text for text in texts)


def test_logits_that_are_not_finite_are_answered_and_have_no_classes() -> None:
    rows = np.array([[0.25, np.nan, np.inf, 0.5]], dtype=np.float32)
    response = encode_infer_response(rows, InferRequest(IMAGES[:1], (LOGITS,)), CONTRACT, LABELS)
    assert response.raw_output_contents[0] == rows.tobytes()
    with pytest.raises(RequestError, match="not all finite") as error:
        encode_infer_response(rows, InferRequest(IMAGES[:1], (LOGITS._replace(top_k=2),)), CONTRACT, LABELS)
    assert error.value.status == 500


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    if sys.platform != "linux":
        pytest.skip("shared memory is offered on Linux only")
    block = shared_memory.SharedMemory(create=True, size=200)
    assert block.buf is not None
    block.buf[100:124] = IMAGES.tobytes()
    made = SharedMemory(enabled=True)
    made.register("all", block.name, 0, 200)
    yield made
    made.unregister()
    block.close()
    block.unlink()


def in_memory(owner: Any, offset: int, byte_size: int, name: str = "all") -> None:
    owner.parameters["shared_memory_region"].string_param = name
    owner.parameters["shared_memory_offset"].int64_param = offset
    owner.parameters["shared_memory_byte_size"].int64_param = byte_size


def test_tensors_travel_in_shared_memory(memory: SharedMemory) -> None:
    message = request(raw_input_contents=[], outputs=[{"name": "logits"}])
    in_memory(message.inputs[0], 100, 24)
    in_memory(message.outputs[0], 130, 40)
    read = decode(message, memory)
    np.testing.assert_array_equal(read.images, IMAGES)
    assert read.outputs == (LOGITS._replace(region=Region("all", 130, 40)),)
    logits = np.arange(8, dtype=np.float32).reshape(2, 4)
    response = encode_infer_response(logits, read, CONTRACT, LABELS)
    assert list(response.raw_output_contents) == [b""]
    assert response.outputs[0].parameters["shared_memory_byte_size"].int64_param == 32
    assert response.outputs[0].parameters["shared_memory_offset"].int64_param == 130
    assert bytes(memory.read("all", 130, 32)) == logits.tobytes()


@pytest.mark.parametrize(
    ("offset", "byte_size", "name", "text"),
    [
        (0, 31, "all", "output 'logits' has 32 bytes: 31 were set aside for it in shared memory region 'all'"),
        (170, 32, "all", "bytes 170 to 202 are not all within shared memory region 'all', which has 200"),
        (0, 32, "other", "unable to find system shared memory region 'other'"),
    ],
)
def test_an_output_region_is_checked_before_the_model_runs(
    memory: SharedMemory, offset: int, byte_size: int, name: str, text: str
) -> None:
    message = request(outputs=[{"name": "logits"}])
    in_memory(message.outputs[0], offset, byte_size, name)
    with pytest.raises(RequestError) as error:
        decode(message, memory)
    assert str(error.value) == text


def test_an_input_region_must_be_the_tensors_size(memory: SharedMemory) -> None:
    message = request(raw_input_contents=[])
    in_memory(message.inputs[0], 100, 25)
    with pytest.raises(RequestError, match="got unexpected byte size 25, expected 24"):
        decode(message, memory)


def test_shared_memory_that_is_off_is_501() -> None:
    message = request(raw_input_contents=[])
    in_memory(message.inputs[0], 100, 24)
    with pytest.raises(RequestError, match="shared memory is disabled") as error:
        decode(message)
    assert error.value.status == 501
