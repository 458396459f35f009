"""Open Inference Protocol v2, without a socket: golden bytes, exact error texts, and fuzzed requests."""

import json
import sys
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bundle_fixture import write_bundle
from server_process import open_files
from vitx.serve.errors import RequestError
from vitx.serve.options import ServeOptions
from vitx.serve.protocol.infer import Contract, InferRequest, decode_infer_request, encode_infer_response, header_length
from vitx.serve.protocol.parameters import REGION_PARAMETERS, RequestedOutput, parse_json, quoted
from vitx.serve.protocol.shared_memory import SharedMemory

CONTRACT = Contract("m", "images", (1, 2, 3), "logits", 2)
LIMITS = ServeOptions(max_images=4).limits
LABELS = ("cat", "dog")
NO_MEMORY = SharedMemory(enabled=False)
ROW = [1, 2, 3, 4, 5, 6]
NOT_PIXELS = (
    "the data of input 'images' (the JSON's first \"data\", in UTF-8) is not 6 integers from 0 to 255, flat or nested "
    "as [1, 1, 2, 3]"
)


def logits(*, binary: bool = False, top_k: int = 0) -> tuple[RequestedOutput, ...]:
    return (RequestedOutput("logits", binary, top_k),)


def tensor(**changes: Any) -> dict[str, Any]:
    whole = {"name": "images", "shape": [1, 1, 2, 3], "datatype": "UINT8", "data": ROW, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def decode(header: Any, binary: bytes | None = None) -> InferRequest:
    text = json.dumps(header).encode()
    body = text if binary is None else text + binary
    return decode_infer_request(body, None if binary is None else len(text), CONTRACT, LIMITS, NO_MEMORY)


def encode(logits: "np.ndarray[Any, np.dtype[np.float32]]", request: InferRequest) -> tuple[bytes, int | None]:
    return encode_infer_response(logits, request, CONTRACT, LABELS)


def refusal(header: Any, binary: bytes | None = None) -> tuple[int, str]:
    with pytest.raises(RequestError) as error:
        decode(header, binary)
    return error.value.status, str(error.value)


@pytest.mark.parametrize("data", [ROW, [[[[1, 2, 3], [4, 5, 6]]]]])
def test_json_tensors_are_nested_or_flat(data: Any) -> None:
    request = decode({"id": "7", "inputs": [tensor(data=data)]})
    assert request.images.dtype == np.uint8
    assert request.images.tolist() == [[[[1, 2, 3], [4, 5, 6]]]]
    assert (request.id, request.outputs) == ("7", logits())
    with_length = decode({"inputs": [tensor(data=data)]}, b"")  # its header is as long as the body
    assert with_length.images.tolist() == request.images.tolist()


def test_binary_tensors_follow_the_header_and_are_not_copied() -> None:
    header = {"inputs": [tensor(data=None, shape=[2, 1, 2, 3], parameters={"binary_data_size": 12})]}
    request = decode({**header, "parameters": {"binary_data_output": True}}, bytes(range(12)))
    assert request.images.ravel().tolist() == list(range(12))
    assert request.images.base is not None
    assert request.outputs == logits(binary=True)


def test_a_cached_header_is_used_with_new_pixels() -> None:
    header = {"id": "7", "inputs": [tensor(data=None, parameters={"binary_data_size": 6})]}
    for _ in range(2):
        assert decode(header, bytes(ROW)).images.ravel().tolist() == ROW
        assert decode(header, bytes(ROW[::-1])).images.ravel().tolist() == ROW[::-1]
        assert refusal(header, bytes(5)) == (400, "'binary_data_size' is 6, but 5 bytes follow the JSON header")
    assert decode({**header, "id": "8"}, bytes(ROW)).id == "8"


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is offered on Linux only")
@pytest.mark.parametrize("name", ["shared_memory_region", "shared\\u005fmemory_region"])
def test_shared_memory_is_read_each_time(name: str) -> None:
    places = {"REGION": "gone", "shared_memory_byte_size": 6}
    text = json.dumps({"inputs": [tensor(data=None, parameters=places)]}).replace("REGION", name).encode()
    for memory, status in ((NO_MEMORY, 501), (SharedMemory(enabled=True), 404)):
        with pytest.raises(RequestError) as error:
            decode_infer_request(text, len(text), CONTRACT, LIMITS, memory)
        assert error.value.status == status


def test_a_raw_binary_request_is_only_the_tensor() -> None:
    request = decode_infer_request(bytes(range(12)), 0, CONTRACT, LIMITS, NO_MEMORY)
    assert request.images.shape == (2, 1, 2, 3)
    assert request.outputs == logits(binary=True)


def test_an_outputs_own_flag_overrides_the_requests() -> None:
    outputs = [{"name": "logits", "parameters": {"binary_data": False}}]
    header = {"inputs": [tensor()], "outputs": outputs, "parameters": {"binary_data_output": True}}
    assert decode(header).outputs == logits()


def test_the_json_response_is_golden() -> None:
    rows = np.array([[0.5, -2.0]], dtype=np.float32)
    request = InferRequest(np.zeros((1, 1, 2, 3), dtype=np.uint8), logits(), id="7")
    text = (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"logits","datatype":"FP32","shape":[1,2],'
        b'"data":[0.5,-2.0]}]'
    )
    assert encode(rows, request) == (text + b',"id":"7"}', None)
    assert encode(rows, request._replace(id=None)) == (text + b"}", None)


def test_the_binary_response_is_golden() -> None:
    rows = np.array([[0.5, -2.0]], dtype=np.float32)
    request = InferRequest(np.zeros((1, 1, 2, 3), dtype=np.uint8), logits(binary=True))
    header = (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"logits","datatype":"FP32","shape":[1,2],'
        b'"parameters":{"binary_data_size":8}}]}'
    )
    assert encode(rows, request) == (
        header + bytes.fromhex("0000003f000000c0"),
        len(header),
    )


def test_a_logit_that_is_not_finite_is_an_error_in_json_and_a_value_in_binary() -> None:
    rows = np.array([[np.nan, 1]], dtype=np.float32)
    pixels = np.zeros((1, 1, 2, 3), dtype=np.uint8)
    for outputs in (logits(), logits(top_k=1), logits(binary=True, top_k=1)):  # nor have classes an order then
        with pytest.raises(RequestError, match=r"not all finite.* ask for binary output") as error:
            encode(rows, InferRequest(pixels, outputs))
        assert (error.value.status, error.value.reason) == (500, "not_finite")
    assert encode(rows, InferRequest(pixels, logits(binary=True)))[1] is not None


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ([], "the request's JSON is not an object"),
        ({}, "'inputs' is missing, or not a list of objects"),
        ({"inputs": [tensor(), tensor()]}, "expected 1 input but got 2 inputs for model 'm'"),
        (
            {"inputs": [tensor(name="image")]},
            "unexpected inference input 'image' for model 'm': its input is 'images'",
        ),
        ({"inputs": [tensor(datatype="FP32")]}, "inference input 'images' is 'FP32': expected 'UINT8'"),
        (
            {"inputs": [tensor(shape=[1, 3, 1, 2])]},
            "unexpected shape [1, 3, 1, 2] of input 'images': expected [N,1,2,3] with N ≥ 1",
        ),
        (
            {"inputs": [tensor(shape=[0, 1, 2, 3], data=[])]},
            "unexpected shape [0, 1, 2, 3] of input 'images': expected [N,1,2,3] with N ≥ 1",
        ),
        (
            {"inputs": [tensor(shape=[True, 1, 2, 3])]},
            "the shape of input 'images' is not a list of integers: expected [N,1,2,3] with N ≥ 1",
        ),
        ({"inputs": [tensor(data=None)]}, "input 'images' has neither 'data' nor 'binary_data_size'"),
        ({"inputs": [tensor(data=ROW[:5])]}, NOT_PIXELS),
        ({"inputs": [tensor(data=[*ROW[:5], 256])]}, NOT_PIXELS),
        ({"inputs": [tensor(data=[*ROW[:5], 1.5])]}, NOT_PIXELS),
        ({"inputs": [tensor(data=[*ROW[:5], True])]}, NOT_PIXELS),
        ({"inputs": [tensor(data=[*ROW[:5], "6"])]}, NOT_PIXELS),
        ({"inputs": [tensor()], "id": 7}, "'id' is not a string"),
        (
            {"inputs": [tensor()], "outputs": [{"name": "probabilities"}]},
            "unexpected inference output 'probabilities' for model 'm': its output is 'logits'",
        ),
        (
            {"inputs": [tensor()], "outputs": [{"name": "logits", "parameters": {"classification": -1}}]},
            "'classification' is -1: expected a whole number of 0 or more",
        ),
        (
            {"inputs": [tensor()], "parameters": {"sequence_id": 1}},
            "this server does not offer the request parameter 'sequence_id': "
            "known are binary_data_output, priority, timeout",
        ),
        (
            {"inputs": [tensor()], "parameters": {"priority": 4}},
            "priority is 4: expected 0 (the default) or 1 (the highest) to 3",
        ),
        (
            {"inputs": [tensor()], "parameters": {"timeout": 1.5}},
            "'timeout' is 1.5: expected a whole number of 0 or more",
        ),
        (
            {"inputs": [tensor(data=None, parameters={"shared_memory_region": "r"})]},
            "'shared_memory_region', a name, and 'shared_memory_byte_size' go together: one of them is missing",
        ),
        (
            {"inputs": [tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 6})]},
            "the input is in shared memory, and has 'data' or 'binary_data_size' as well",
        ),
        ({"inputs": [tensor(data=[[[[[[[[[[[[[[6]]]]]]]]]]]]]])]}, NOT_PIXELS),
        ({"inputs": [tensor(data=6)]}, NOT_PIXELS),
        ({"data": ROW, "inputs": [tensor(data={})]}, NOT_PIXELS),
        ({"data": ROW, "inputs": [tensor() | {"data": None}]}, NOT_PIXELS),
        ({"inputs": [tensor() | {"data": None}], "outputs": [{"name": "logits", "data": ROW}]}, NOT_PIXELS),
        (
            {"inputs": [tensor()], "outputs": [[[[[[[[[[[[[[[[6]]]]]]]]]]]]]]]]},
            "the request's JSON is nested more than 16 levels deep",
        ),
        (
            {"inputs": [tensor()], "parameters": {"binary_data_output": 1}},
            "'binary_data_output' is 1: expected true or false",
        ),
    ],
)
def test_refusals_say_what_was_given_and_what_was_expected(header: Any, text: str) -> None:
    assert refusal(header) == (400, text)


def test_binary_sizes_must_agree() -> None:
    def given_size(size: Any) -> dict[str, Any]:
        return {"inputs": [tensor(data=None, parameters={"binary_data_size": size})]}

    assert refusal(given_size(6), b"12345") == (400, "'binary_data_size' is 6, but 5 bytes follow the JSON header")
    assert refusal(given_size(5), b"12345") == (
        400,
        "input 'images' got unexpected byte size 5, expected 6 for shape [1, 1, 2, 3]",
    )
    assert refusal(given_size("6"), b"123456") == (400, "'binary_data_size' is '6': expected a number of bytes")
    assert refusal({"inputs": [tensor()]}, b"1") == (
        400,
        "1 bytes follow the JSON header, but no input has 'binary_data_size'",
    )
    both = {"inputs": [tensor(parameters={"binary_data_size": 6})]}
    assert refusal(both, b"123456") == (400, "the input has both 'data' and 'binary_data_size'")


def test_too_many_images_are_413() -> None:
    header = {"inputs": [tensor(data=None, shape=[5, 1, 2, 3], parameters={"binary_data_size": 30})]}
    assert refusal(header, bytes(30)) == (413, "5 images in one request: at most 4")


def test_the_requests_own_parameters_are_read_in_their_units() -> None:
    request = decode({"inputs": [tensor()], "parameters": {"timeout": 1_500_000, "priority": 3}})
    assert (request.timeout, request.priority, request.outputs) == (1.5, 3, logits())
    request = decode({"inputs": [tensor()], "parameters": {"timeout": 0}})
    assert (request.timeout, request.priority) == (None, 0)
    assert refusal({"inputs": [tensor()], "parameters": {"timeout": 2**63}})[0] == 400
    assert refusal({"inputs": [tensor()], "parameters": {"priority": True}})[0] == 400


def test_the_outputs_parameters_are_read_and_limited_to_the_classes() -> None:
    def asked(*outputs: dict[str, Any], binary: bool = False) -> InferRequest:
        return decode({"inputs": [tensor()], "outputs": [*outputs], "parameters": {"binary_data_output": binary}})

    for count, top_k in ((0, 0), (1, 1), (2, 2), (3, 2), (2**63 - 1, 2)):
        assert asked({"name": "logits", "parameters": {"classification": count}}).outputs == logits(top_k=top_k)
    assert asked({"name": "logits"}, binary=True).outputs == logits(binary=True)
    assert asked({"name": "logits", "parameters": {"binary_data": True}}).outputs == logits(binary=True)
    with pytest.raises(RequestError, match=r"^output 'logits' already exists in request$"):
        asked({"name": "logits"}, {"name": "logits"})


def test_limits_are_what_is_still_allowed() -> None:
    four = {"inputs": [tensor(data=None, shape=[4, 1, 2, 3], parameters={"binary_data_size": 24})]}
    assert len(decode(four, bytes(24)).images) == 4
    assert len(decode_infer_request(bytes(24), 0, CONTRACT, LIMITS, NO_MEMORY).images) == 4
    with pytest.raises(RequestError) as error:
        decode_infer_request(bytes(30), 0, CONTRACT, LIMITS, NO_MEMORY)
    assert (error.value.status, str(error.value)) == (413, "5 images in one request: at most 4")
    for body in (b"", bytes(5), bytes(7)):
        with pytest.raises(RequestError, match=f"unexpected byte size {len(body)}, expected 6") as error:
            decode_infer_request(body, 0, CONTRACT, LIMITS, NO_MEMORY)
        assert error.value.status == 400
    assert decode({"inputs": [tensor(data=[0, 255, 0, 255, 0, 255])]}).images.ravel().tolist() == [0, 255] * 3
    for row in ([*ROW[:5], -1], [*ROW[:5], 256]):
        assert refusal({"inputs": [tensor(data=row)]})[0] == 400
    assert refusal({"inputs": [tensor(data=[[1, 2], [3]])]})[0] == 400
    assert [header_length(value) for value in (None, "0", "10", "0000000010")] == [None, 0, 10, 10]


@pytest.mark.parametrize(("text", "depth"), [(b"[[]]", 2), (b'{"a":[{}]}', 3), (b'["[[[["]', 1), (b"[[],[],[]]", 2)])
def test_json_may_be_nested_as_deep_as_the_limit(text: bytes, depth: int) -> None:
    assert parse_json(text, depth) == json.loads(text)
    if depth > 1:
        with pytest.raises(RequestError) as error:
            parse_json(text, depth - 1)
        assert error.value.reason == "too_deep"


def test_json_has_a_limited_number_of_values_and_no_nesting_is_too_deep_to_be_refused() -> None:
    most = b"[" + b"0," * 16_383 + b"0]"
    assert len(parse_json(most, 1)) == 16_384
    with pytest.raises(RequestError, match=r"^JSON of more than 16384 values$") as error:
        parse_json(b"[" + most[:-1] + b",0]]", 2)
    assert error.value.status == 413
    with pytest.raises(RequestError, match=r"^the request's JSON is nested more than 16 levels deep$") as error:
        parse_json(b"[" * 8_000 + b"]" * 8_000, 16)
    assert (error.value.status, error.value.reason) == (400, "too_deep")


def test_what_a_client_sent_is_quoted_in_80_characters() -> None:
    given = ["a" * 80, "a" * 81, [1] * 11, list(range(100)), {"a": 1}, None, True, 1.5, 10**200]
    assert [quoted(each) for each in given] == [
        *[f"'{'a' * 80}'"] * 2,
        str([1] * 11),
        str(list(range(100)))[:80] + "…",
        "an object",
        "None",
        "True",
        "1.5",
        "1" + "0" * 79 + "…",
    ]


def test_the_contract_of_a_bundle(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "mine.vitx", name="mine").manifest
    assert Contract.of(manifest) == Contract("mine", "images", (16, 16, 3), "logits", 4)
    assert Contract.of(manifest, "7").version == "7"


def test_metadata_and_configuration_are_golden() -> None:
    assert CONTRACT.metadata(["1", "3"]) == {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 1, 2, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 2]}],
    }
    assert CONTRACT.config(16, (4, 8)) == {
        "name": "m",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": 16,
        "input": [{"name": "images", "data_type": "TYPE_UINT8", "format": "FORMAT_NHWC", "dims": [1, 2, 3]}],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [2]}],
        "dynamic_batching": {"preferred_batch_size": [4, 8]},
    }


TWO_ROWS = np.array([[0.5, -2.0], [1.0, 3.0]], dtype=np.float32)
TWO_IMAGES = np.zeros((2, 1, 2, 3), dtype=np.uint8)


def test_classes_are_texts_best_first_in_json_and_behind_their_length_in_binary() -> None:
    body, length = encode(TWO_ROWS, InferRequest(TWO_IMAGES, logits(top_k=1)))
    assert length is None
    (output,) = json.loads(body)["outputs"]
    texts = ["0.500000:0:cat", "3.000000:1:dog"]
    assert output == {"name": "logits", "datatype": "BYTES", "shape": [2, 1], "data": texts}
    body, length = encode(TWO_ROWS, InferRequest(TWO_IMAGES, logits(top_k=1, binary=True)))
    (output,) = json.loads(body[:length])["outputs"]
    assert output == {
        "name": "logits",
        "datatype": "BYTES",
        "shape": [2, 1],
        "parameters": {"binary_data_size": 36},
    }
    assert body[length:] == b"".join(b"\x0e\0\0\0" + text.encode() for text in texts)


@pytest.mark.parametrize("request_id", [None, "7"])
def test_binary_logits_have_the_size_of_all_rows_with_an_id_and_without(request_id: str | None) -> None:
    body, length = encode(TWO_ROWS, InferRequest(TWO_IMAGES, logits(binary=True), id=request_id))
    header = json.loads(body[:length])
    assert header.get("id") == request_id
    assert header["outputs"][0]["shape"] == [2, 2]
    assert header["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert body[length:] == TWO_ROWS.tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is offered on Linux only")
def test_tensors_in_shared_memory_are_read_and_written_where_the_request_says() -> None:
    block = shared_memory.SharedMemory(create=True, size=64)
    memory = SharedMemory(enabled=True)

    def decoded(given: dict[str, int], wanted: dict[str, Any]) -> InferRequest:
        outputs = [{"name": "logits", "parameters": {"shared_memory_region": "r", **wanted}}]
        header = {
            "inputs": [tensor(data=None, parameters={"shared_memory_region": "r", **given})],
            "outputs": outputs,
        }
        return decode_infer_request(json.dumps(header).encode(), None, CONTRACT, LIMITS, memory)

    def refused(given: dict[str, int], wanted: dict[str, Any]) -> str:
        with pytest.raises(RequestError) as error:
            decoded(given, wanted)
        assert error.value.status == 400
        return str(error.value)

    try:
        assert block.buf is not None
        memory.register("r", block.name, 0, 64)
        block.buf[8:14] = bytes(ROW)
        given, wanted = ({"shared_memory_offset": 8, "shared_memory_byte_size": 6}, {"shared_memory_byte_size": 8})
        request = decoded(given, {**wanted, "shared_memory_offset": 20})
        assert request.images.ravel().tolist() == ROW
        places = dict(zip((*REGION_PARAMETERS, "binary_data_size"), ("r", 20, 8, 0), strict=True))
        body, length = encode_infer_response(TWO_ROWS[:1], request, CONTRACT, LABELS)
        (output,) = json.loads(body)["outputs"]
        assert (length, output["parameters"], "data" in output) == (None, places, False)
        assert bytes(block.buf[19:29]) == b"\0" + TWO_ROWS[:1].tobytes() + b"\0"
        # More room than needed: the reply says what was written.
        request = decoded(given, {"shared_memory_byte_size": 40})
        body, _ = encode_infer_response(TWO_ROWS[:1], request, CONTRACT, LABELS)
        assert json.loads(body)["outputs"][0]["parameters"] == {**places, "shared_memory_offset": 0}
        # A request that was accepted is answered where it asked, also if any client unregisters all regions meanwhile.
        opened, request = open_files(block.name), decoded(given, {"shared_memory_byte_size": 8})
        memory.unregister()
        encode_infer_response(-TWO_ROWS[:1], request, CONTRACT, LABELS)
        assert bytes(block.buf[:8]) == (-TWO_ROWS[:1]).tobytes()
        del request
        assert open_files(block.name) == opened - 1
        memory.register("r", block.name, 0, 64)
        text = "output 'logits' has 8 bytes: 7 were set aside for it in shared memory region 'r'"
        assert refused(given, {"shared_memory_byte_size": 7}) == text
        text = "bytes 0 to 65 are not all within shared memory region 'r', which has 64"
        assert refused(given, {"shared_memory_byte_size": 65}) == text
        text = "input 'images' got unexpected byte size 5, expected 6 for shape [1, 1, 2, 3]"
        assert refused({"shared_memory_byte_size": 5}, wanted) == text
        # Texts of classes: their size is known only when they are written.
        request = decoded(given, {"shared_memory_byte_size": 7, "classification": 1})
        with pytest.raises(RequestError, match=r"^output 'logits' has 18 bytes: 7 were set aside"):
            encode_infer_response(TWO_ROWS[:1], request, CONTRACT, LABELS)
    finally:
        memory.unregister()
        block.close()
        block.unlink()


@pytest.mark.parametrize("value", ["-1", "11", "1e3", "٣", "", "9" * 5000])
def test_a_header_length_beyond_the_body_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match=r"expected (a number of bytes|0 to 10, the body's length)") as error:
        decode_infer_request(bytes(10), header_length(value), CONTRACT, LIMITS, NO_MEMORY)
    assert error.value.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "shape", "data", "parameters", "binary_data_size"]), inner)
    ),
    max_leaves=12,
)
near_tensors = st.fixed_dictionaries(
    {
        "name": st.just("images") | json_values,
        "datatype": st.just("UINT8") | json_values,
        "shape": st.just([1, 1, 2, 3]) | json_values,
    },
    optional={"data": st.just(ROW) | json_values, "parameters": st.just({"binary_data_size": 6}) | json_values},
)
near_requests = st.fixed_dictionaries(
    {"inputs": st.lists(near_tensors, max_size=2) | json_values},
    optional={"id": json_values, "outputs": json_values, "parameters": json_values},
)


def decodes_or_refuses(body: bytes, length: int | None) -> None:
    request, refused = None, None
    try:
        request = decode_infer_request(body, length, CONTRACT, LIMITS, NO_MEMORY)
    except RequestError as error:
        refused = error
    if request is not None:
        assert request.images.shape[1:] == CONTRACT.image_shape
        assert request.images.dtype == np.uint8
    if refused is not None:
        assert refused.status in (400, 413)
        assert len(json.dumps(str(refused))) < 1000


@settings(max_examples=300)
@given(near_requests, st.none() | st.binary(max_size=7))
def test_any_json_decodes_or_is_refused_cleanly(header: Any, binary: bytes | None) -> None:
    text = json.dumps(header).encode()
    decodes_or_refuses(text + (binary or b""), None if binary is None else len(text))


@settings(max_examples=200)
@given(st.binary(max_size=60), st.none() | st.integers(0, 60))
@example(b"[" * 100_000, None)
@example(b'{"inputs":' * 50_000, None)
@example(b"9" * 10_000, None)
@example(json.dumps({"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 1, 2, 3]}]}).encode()[:-3], None)
@example(
    b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,1,2,3],"data":' + b"[" * 90 + b"]" * 90 + b"}]}", None
)
def test_any_bytes_decode_or_are_refused_cleanly(body: bytes, length: int | None) -> None:
    decodes_or_refuses(body, length if length is None or length <= len(body) else None)
