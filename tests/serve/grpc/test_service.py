"""The gRPC service of a running server: NVIDIA's own clients, unmodified, and bytes that no client would send."""

import asyncio
import queue
import sys
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakSet

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException, shared_memory

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, colour_image, write_bundle
from server_process import HANG, ServerProcess, grpc_address, running_server, wait_until
from vitx.core.bundle import Bundle
from vitx.core.preprocess import UInt8Array
from vitx.serve.grpc.messages import message_class
from vitx.serve.grpc.server import _child
from vitx.serve.grpc.service import _answered

SERVICE = "/inference.GRPCInferenceService/"
LINUX = sys.platform == "linux"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")


@pytest.fixture(scope="module")
def server(bundle: Bundle) -> Iterator[ServerProcess]:
    options = ["--allow-uncertified", "--max-delay-ms", "20", "--grpc-port", "0"]
    with running_server(bundle.path, *options, *(["--shared-memory"] if LINUX else [])) as started:
        yield started


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> str:
    return grpc_address(server)


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    opened = triton.InferenceServerClient(address)
    yield opened
    opened.close()


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as opened:
        yield opened


def random_images(count: int, seed: int = 0) -> UInt8Array:
    return np.random.default_rng(seed).integers(0, 256, (count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def tensor(images: UInt8Array) -> Any:
    made = triton.InferInput("images", list(images.shape), "UINT8")
    made.set_data_from_numpy(images)
    return made


def infer(client: Any, images: UInt8Array, **options: Any) -> Any:
    return client.infer("tiny", [tensor(images)], **options)


def expected(images: UInt8Array) -> Any:
    return pytest.approx(NumpySession().infer(images), rel=1e-4, abs=1e-4)


def test_health_and_metadata(client: Any, channel: grpc.Channel) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("mine")
    assert client.get_server_metadata().name == "vitx"
    about = client.get_model_metadata("tiny")
    assert list(about.inputs[0].shape) == [-1, IMAGE_SIZE, IMAGE_SIZE, 3]
    assert (about.outputs[0].name, about.outputs[0].datatype) == ("logits", "FP32")
    config = client.get_model_config("tiny", as_json=True)["config"]
    assert config["max_batch_size"] == 32
    assert config["input"][0]["data_type"] == "TYPE_UINT8"
    assert config["input"][0]["format"] == "FORMAT_NHWC"  # what Triton's image_client.py asks for
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    for service in ("", "inference.GRPCInferenceService", "tiny"):
        assert check(message_class("HealthCheckRequest")(service=service).SerializeToString()) == b"\x08\x01"  # SERVING
    with pytest.raises(grpc.RpcError) as error:
        check(message_class("HealthCheckRequest")(service="mine").SerializeToString())
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_limits_that_are_beyond_grpcs_numbers_are_no_error(bundle: Bundle) -> None:
    limits = ["--max-body-mib", "4096", "--header-timeout", "3000000"]
    with running_server(bundle.path, "--allow-uncertified", "--grpc-port", "0", *limits) as server:
        client, images = triton.InferenceServerClient(grpc_address(server)), random_images(2)
        assert infer(client, images).as_numpy("logits") == expected(images)
        client.close()


def test_logits_are_those_of_the_images(client: Any) -> None:
    images = random_images(3)
    result = infer(client, images, request_id="17", model_version="1")
    assert result.as_numpy("logits") == expected(images)  # not to the bit: where two are a full batch they are split
    assert result.get_response().id == "17"
    large = random_images(100, seed=1)  # more than a batch: split and joined
    assert infer(client, large, priority=1, timeout=10_000_000).as_numpy("logits") == expected(large)


def test_classes_are_asked_for_in_an_outputs_parameters(client: Any) -> None:
    images = np.stack([colour_image(label, np.random.default_rng(label)) for label in range(len(LABELS))])
    outputs = [triton.InferRequestedOutput("logits", class_count=2)]
    classes = infer(client, images, outputs=outputs).as_numpy("logits")
    assert classes.shape == (4, 2)
    for row, logits in zip(classes, NumpySession().infer(images), strict=True):
        for text, index in zip(row, np.argsort(-logits)[:2], strict=True):
            value, number, name = text.decode().split(":")
            assert (int(number), name) == (index, LABELS[index])
            assert float(value) == pytest.approx(logits[index], abs=1e-4)


def test_concurrent_calls_share_batches_and_every_reply_is_its_own(server: ServerProcess, client: Any) -> None:
    images = random_images(256, seed=1)
    logits = NumpySession().infer(images)

    def some_shared() -> bool:
        batches = server.metric('vitx_batch_size_count{model="tiny",version="1"}')
        counted = server.metric('vitx_requests_total{route="grpc.ModelInfer",status="200"}')
        calls = (partial(infer, client, images[at : at + 1]) for at in range(len(images)))
        results = [result.as_numpy("logits")[0] for result in pool.map(lambda call: call(), calls)]
        np.testing.assert_allclose(results, logits, rtol=1e-4, atol=1e-4)
        assert server.metric('vitx_requests_total{route="grpc.ModelInfer",status="200"}') - counted == len(images)
        return server.metric('vitx_batch_size_count{model="tiny",version="1"}') - batches < len(images)

    with ThreadPoolExecutor(32) as pool:
        wait_until(some_shared)  # a fast server may answer each call before the client makes the next


def test_the_asyncio_client(address: str) -> None:
    images = random_images(64, seed=2)

    async def run() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            calls = [client.infer("tiny", [tensor(images[at : at + 1])]) for at in range(len(images))]
            return [result.as_numpy("logits")[0] for result in await asyncio.gather(*calls)]

    np.testing.assert_allclose(asyncio.run(run()), NumpySession().infer(images), rtol=1e-4, atol=1e-4)


def test_two_thousand_calls_at_once_are_all_answered(address: str) -> None:
    async def run() -> list[Any]:
        async with grpc.aio.insecure_channel(address) as channel:
            live = channel.unary_unary(f"{SERVICE}ServerLive")
            return await asyncio.gather(*(live(b"") for _ in range(2000)))

    assert asyncio.run(run()) == [b"\x08\x01"] * 2000


def test_a_stream_answers_in_order_and_a_bad_request_fails_alone(client: Any) -> None:
    images = random_images(200, seed=3)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for at in range(len(images)):
        rows = images[at : at + 1]
        asked = tensor(rows[:, :8] if at == 100 else rows)
        client.async_stream_infer("tiny", [asked], request_id=str(at), enable_empty_final_response=at % 2 == 0)
    for at in range(len(images)):
        result, error = answers.get(timeout=HANG)
        if at == 100:
            assert "unexpected shape [1, 8, 16, 3] of input 'images'" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(at)
            assert result.get_response().parameters["triton_final_response"].bool_param
            assert result.as_numpy("logits") == expected(images[at : at + 1])
    client.stop_stream()


def test_a_cancelled_stream_leaks_nothing(server: ServerProcess, address: str) -> None:
    client = triton.InferenceServerClient(address)
    client.start_stream(lambda result, error: None)
    for _ in range(300):
        client.async_stream_infer("tiny", [tensor(random_images(1))])
    client.stop_stream(cancel_requests=True)
    client.close()
    assert server.metric('vitx_queue_depth{model="tiny",version="1"}') < 300
    again = triton.InferenceServerClient(address)
    assert infer(again, random_images(1)).as_numpy("logits").shape == (1, 4)
    again.close()


def test_statistics_count_images_and_batches(client: Any) -> None:
    def counts() -> tuple[int, int, int]:
        (model,) = client.get_inference_statistics("tiny").model_stats
        assert (model.name, model.version) == ("tiny", "1")
        assert model.inference_stats.compute_infer.ns > 0
        assert sum(batch.compute_infer.count for batch in model.batch_stats) == model.execution_count
        return model.inference_count, model.execution_count, model.inference_stats.success.count

    infer(client, random_images(1))
    before = counts()
    infer(client, random_images(5))
    assert tuple(np.subtract(counts(), before)) == (5, 1, 1)
    assert len(client.get_inference_statistics().model_stats) == 1


@pytest.mark.skipif(not LINUX, reason="shared memory is offered on Linux only")
def test_tensors_in_system_shared_memory(server: ServerProcess, client: Any) -> None:
    images = random_images(2, seed=4)
    key = f"/vitx-{uuid.uuid4().hex}"
    block = shared_memory.create_shared_memory_region("block", key, images.nbytes + 64)
    try:
        shared_memory.set_shared_memory_region(block, [images], offset=32)
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        client.register_system_shared_memory("input", key, images.nbytes, offset=32)
        client.register_system_shared_memory("output", key, 32)
        regions = client.get_system_shared_memory_status(as_json=True)["regions"]
        assert regions["input"] == {"name": "input", "key": key, "offset": "32", "byte_size": str(images.nbytes)}
        assert [region["name"] for region in server.json("/v2/systemsharedmemory/status")] == ["input", "output"]
        with pytest.raises(InferenceServerException, match="'input' already in manager") as error:
            client.register_system_shared_memory("input", key, images.nbytes)
        assert error.value.status() == "StatusCode.ALREADY_EXISTS"
        asked = triton.InferInput("images", list(images.shape), "UINT8")
        asked.set_shared_memory("input", images.nbytes)
        output = triton.InferRequestedOutput("logits")
        output.set_shared_memory("output", 32)
        result = client.infer("tiny", [asked], outputs=[output])
        assert list(result.get_response().raw_output_contents) == [b""]
        logits = shared_memory.get_contents_as_numpy(block, np.float32, [2, 4])
        assert logits == expected(images)
        client.unregister_system_shared_memory("input")
        with pytest.raises(InferenceServerException, match="unable to find system shared memory region 'input'"):
            client.infer("tiny", [asked])
        client.unregister_system_shared_memory()
        assert len(client.get_system_shared_memory_status().regions) == 0
    finally:
        shared_memory.destroy_shared_memory_region(block)


@pytest.mark.skipif(not LINUX, reason="shared memory is offered on Linux only")
def test_other_memory_is_refused(client: Any) -> None:
    for key, code in (("/../etc/passwd", "INVALID_ARGUMENT"), ("/vitx-missing", "NOT_FOUND")):
        with pytest.raises(InferenceServerException) as error:
            client.register_system_shared_memory("stolen", key, 16)
        assert error.value.status() == f"StatusCode.{code}"


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (lambda c: infer(c, random_images(1)[:, :8]), "INVALID_ARGUMENT", "unexpected shape"),
        (lambda c: infer(c, random_images(257)), "INVALID_ARGUMENT", "257 images in one request: at most 256"),
        (lambda c: infer(c, random_images(1), sequence_id=4), "INVALID_ARGUMENT", "does not offer"),
        (lambda c: infer(c, random_images(1), model_version="2"), "NOT_FOUND", "'tiny' version 2 is not found"),
        (lambda c: c.get_model_metadata("mine"), "NOT_FOUND", "unknown model: 'mine' is not found"),
        (lambda c: c.get_model_config("mine"), "NOT_FOUND", "unknown model: 'mine' is not found"),
        (lambda c: c.get_inference_statistics("mine"), "NOT_FOUND", "unknown model: 'mine' is not found"),
        (lambda c: c.get_trace_settings(), "UNIMPLEMENTED", "trace settings are not offered"),
        (lambda c: c.get_log_settings(), "UNIMPLEMENTED", "log settings are not offered"),
        (lambda c: c.register_cuda_shared_memory("a", b"", 0, 1), "UNIMPLEMENTED", "CUDA shared memory"),
    ],
)
def test_refusals_have_a_status_and_a_reason(client: Any, call: Any, code: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text) as error:
        call(client)
    assert error.value.status() == f"StatusCode.{code}"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages_are_read(client: Any, algorithm: str) -> None:
    images = random_images(3)
    assert infer(client, images, compression_algorithm=algorithm).as_numpy("logits") == expected(images)
    answers = queue.Queue[Any]()
    client.start_stream(lambda result, error: answers.put(result or error), compression_algorithm=algorithm)
    for rows in (1, 2):
        client.async_stream_infer("tiny", [tensor(images[:rows])])
    for rows in (1, 2):
        assert answers.get(timeout=HANG).as_numpy("logits") == expected(images[:rows])
    client.stop_stream()


@pytest.mark.parametrize("wbits", [15, 31])
def test_messages_that_are_compressed_badly_or_become_large_are_refused(channel: grpc.Channel, wbits: int) -> None:
    def packed(data: bytes, level: int = 6) -> bytes:
        stream = zlib.compressobj(level, wbits=wbits)
        return stream.compress(data) + stream.flush()

    request = message_class("ModelInferRequest")(model_name="tiny")
    request.inputs.add(name="images", datatype="UINT8", shape=[1]).contents.uint_contents.extend([7] * 2**22)
    numbers = packed(request.SerializeToString())
    assert len(numbers) < 2**14
    for data, text in (
        (packed(b"\xff\xff"), "not a message"),
        (packed(b"\x0a\x04tiny")[:-1], "not exactly one"),
        (packed(b"\x0a\x04tiny") + b"x", "not exactly one"),
        (packed(bytes(1000))[:4] + bytes(100), "not valid|not exactly one"),
        (packed(packed(b"\x0a\x04tiny")), "not a message"),
        (packed(bytes(16 * 2**20)), "more than 1024 fields"),
        (packed(bytes(16 * 2**20 + 1)), "more than 16777216 bytes when decompressed"),
        (numbers, "a compressed message with 4194[0-9]+ bytes of numbers and names: at most 1048576"),
    ):
        with pytest.raises(grpc.RpcError, match=text) as error:
            channel.unary_unary(SERVICE + "ModelInfer")(data)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert channel.unary_unary(SERVICE + "ServerLive")(packed(b"")) == b"\x08\x01"


def test_malformed_and_too_large_messages_are_refused(channel: grpc.Channel) -> None:
    infer = channel.unary_unary(SERVICE + "ModelInfer")
    rng = np.random.default_rng(0)
    bodies = [b"\xff\xff", b"\x0a\xff", *(rng.bytes(int(size)) for size in rng.integers(1, 200, 100))]
    for body in bodies:
        with pytest.raises(grpc.RpcError) as error:
            infer(body)
        assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    with pytest.raises(grpc.RpcError) as error:
        infer(bytes(64 * 2**20 + 1))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert channel.unary_unary(SERVICE + "ServerLive")(b"") == b"\x08\x01"


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00"])
@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad"])
def test_a_message_of_many_fields_is_refused_unparsed(channel: grpc.Channel, method: str, field: bytes) -> None:
    """490,000 empty inputs in a MB were read one by one on the event loop."""
    with pytest.raises(grpc.RpcError, match="a message of more than 1024 fields") as error:
        channel.unary_unary(SERVICE + method)(field * 490_000)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_a_message_is_refused(channel: grpc.Channel) -> None:
    empty = channel.stream_unary(SERVICE + "ModelInfer").future(iter([]))
    with pytest.raises(grpc.RpcError, match="the call has no message") as error:
        empty.result(HANG)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_long_shape_is_refused(channel: grpc.Channel) -> None:
    request = message_class("ModelInferRequest")(model_name="tiny")
    request.inputs.add(name="images", datatype="UINT8", shape=[1] * 490_000)
    request.raw_input_contents.append(b"")
    with pytest.raises(grpc.RpcError, match="unexpected shape") as error:
        channel.unary_unary(SERVICE + "ModelInfer")(request.SerializeToString())
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_load_goes_on_to_its_end_without_its_client() -> None:
    ended: list[str] = []

    async def load() -> None:
        await asyncio.sleep(0.05)
        ended.append("loaded")

    async def abandoned() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_answered("RepositoryModelLoad", lambda asked: load())(None, None), 0.01)
        await asyncio.sleep(0.1)

    asyncio.run(abandoned())
    assert ended == ["loaded"]


def test_tasks_that_make_one_another_are_not_kept() -> None:
    """Each of pipelined HTTP requests makes the next."""
    made = WeakSet[Any]()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_child)
        last: asyncio.Future[int] = loop.create_future()

        async def step(left: int) -> None:
            if left:
                made.add(loop.create_task(step(left - 1)))
            else:
                last.set_result(len(made))

        made.add(loop.create_task(step(100)))
        return await last

    assert asyncio.run(main()) < 5
