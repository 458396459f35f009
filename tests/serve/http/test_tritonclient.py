"""NVIDIA's own HTTP client, unmodified, against a running server."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, write_bundle
from server_process import ServerProcess, running_server

with warnings.catch_warnings():  # gevent and its parts warn while they are imported
    warnings.simplefilter("ignore")
    import tritonclient.http as triton
    import tritonclient.utils.shared_memory as shared_memory
    from tritonclient.utils import InferenceServerException

from vitx.core.bundle import Bundle
from vitx.core.preprocess import UInt8Array
from vitx.runtimes import load_session


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx")


@pytest.fixture(scope="module")
def server(bundle: Bundle) -> Iterator[ServerProcess]:
    with running_server(bundle.path, "--allow-uncertified", "--max-delay-ms", "20") as started:
        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    opened = triton.InferenceServerClient(server.url)
    yield opened
    opened.close()


def random_images(count: int, seed: int = 0) -> UInt8Array:
    return np.random.default_rng(seed).integers(0, 256, (count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def infer(client: Any, images: UInt8Array, *, binary_in: bool = True, outputs: Any = None, **options: Any) -> Any:
    tensor = triton.InferInput("images", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images, binary_data=binary_in)
    return client.infer("tiny", [tensor], outputs=outputs, **options)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("mine")
    assert client.get_server_metadata()["name"] == "vitx"
    about = client.get_model_metadata("tiny")
    assert about["inputs"][0]["shape"] == [-1, IMAGE_SIZE, IMAGE_SIZE, 3]
    assert about["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, len(LABELS)]}]
    assert client.get_model_config("tiny")["max_batch_size"] == 32


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_logits_are_those_of_the_images(client: Any, binary_in: bool, binary_out: bool | None) -> None:
    images = random_images(3)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("logits", binary_data=binary_out)]
    result = infer(client, images, binary_in=binary_in, outputs=outputs, request_id="17")
    logits = result.as_numpy("logits")
    assert logits.dtype == np.float32
    # Not to the bit: on a busy machine two images may be found to be a full batch, and three are split.
    np.testing.assert_allclose(logits, NumpySession().infer(images), rtol=1e-4, atol=1e-4)
    assert result.get_response()["id"] == "17"


def test_a_version_is_accepted(client: Any) -> None:
    assert infer(client, random_images(1), model_version="1").as_numpy("logits").shape == (1, len(LABELS))


def test_concurrent_requests_share_batches_and_every_reply_is_its_own(server: ServerProcess) -> None:
    batches = server.metric('vitx_batch_size_count{model="tiny",version="1"}')
    single = server.metric('vitx_batch_size_bucket{le="1.0",model="tiny",version="1"}')
    images = random_images(32 * 8, seed=1)
    expected = NumpySession().infer(images)

    def one_client(index: int) -> None:
        client = triton.InferenceServerClient(server.url)
        for position in range(index, len(images), 32):
            logits = infer(client, images[position : position + 1]).as_numpy("logits")
            np.testing.assert_allclose(logits[0], expected[position], rtol=1e-4, atol=1e-4)
        client.close()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one_client, range(32)))
    batches = server.metric('vitx_batch_size_count{model="tiny",version="1"}') - batches
    single = server.metric('vitx_batch_size_bucket{le="1.0",model="tiny",version="1"}') - single
    assert batches < len(images)
    assert batches > single  # some batch held more than one image


def test_refusals_reach_the_client(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unexpected shape") as error:
        infer(client, random_images(1)[:, :8])
    assert error.value.status() == "400"
    tensor = triton.InferInput("images", [1, IMAGE_SIZE, IMAGE_SIZE, 3], "FP32")
    tensor.set_data_from_numpy(random_images(1).astype(np.float32))
    with pytest.raises(InferenceServerException, match="expected 'UINT8'"):
        client.infer("tiny", [tensor])
    with pytest.raises(InferenceServerException, match="unknown model: 'mine' is not found"):
        client.get_model_metadata("mine")
    with pytest.raises(InferenceServerException, match="does not offer the request parameter 'sequence_id'"):
        infer(client, random_images(1), sequence_id=7)
    with pytest.raises(InferenceServerException, match="priority is 9: expected 0"):
        infer(client, random_images(1), priority=9)


@pytest.mark.parametrize("binary", [True, False])
def test_classification_gives_the_best_classes_as_text(client: Any, bundle: Bundle, binary: bool) -> None:
    images = random_images(2)
    outputs = [triton.InferRequestedOutput("logits", class_count=3, binary_data=binary)]
    texts = infer(client, images, outputs=outputs).as_numpy("logits")
    logits = load_session(bundle).infer(images)
    found = [(text.decode() if binary else text).split(":") for row in texts for text in row]
    best = [(index, row[index]) for row in logits for index in np.argsort(-row, kind="stable")[:3]]
    assert [rest for _, *rest in found] == [[str(index), LABELS[index]] for index, _ in best]
    assert [float(value) for value, *_ in found] == pytest.approx([value for _, value in best], abs=1e-5)
    assert all(len(value.partition(".")[2]) == 6 for value, *_ in found)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(client: Any, bundle: Bundle, algorithm: str) -> None:
    images = random_images(100)  # 1,600 bytes of logits: worth compressing
    answered = infer(client, images, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm)
    np.testing.assert_allclose(answered.as_numpy("logits"), load_session(bundle).infer(images), rtol=1e-5, atol=1e-5)


def test_priority_and_timeout_are_taken(client: Any) -> None:
    result = infer(client, random_images(1), priority=1, timeout=20_000_000)
    assert result.as_numpy("logits").shape == (1, len(LABELS))
    with pytest.raises(InferenceServerException, match="the deadline passed while the request was read") as error:
        infer(client, random_images(1), timeout=1)
    assert error.value.status() == "503"


def test_statistics_count_requests_and_executions(client: Any) -> None:
    def statistics() -> Any:
        (entry,) = client.get_inference_statistics("tiny")["model_stats"]
        return entry

    before = statistics()
    infer(client, random_images(5))
    after = statistics()
    assert after["inference_count"] - before["inference_count"] == 5
    assert after["execution_count"] - before["execution_count"] == 1
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        was, now = before["inference_stats"][name], after["inference_stats"][name]
        assert now["count"] - was["count"] == 1
        assert now["ns"] >= was["ns"]
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert 5 in [entry["batch_size"] for entry in after["batch_stats"]]
    assert client.get_inference_statistics() == client.get_inference_statistics("tiny", "1")


def test_system_shared_memory_carries_tensors_both_ways(bundle: Bundle) -> None:
    images = random_images(3)
    with running_server(bundle.path, "--allow-uncertified", "--shared-memory") as server:
        client = triton.InferenceServerClient(server.url)
        region = shared_memory.create_shared_memory_region("r", f"/vitx-{os.getpid()}", images.nbytes + 48)
        try:
            shared_memory.set_shared_memory_region(region, [images])
            client.register_system_shared_memory("r", f"/vitx-{os.getpid()}", images.nbytes + 48)
            assert [entry["name"] for entry in client.get_system_shared_memory_status()] == ["r"]
            tensor = triton.InferInput("images", list(images.shape), "UINT8")
            tensor.set_shared_memory("r", images.nbytes)
            output = triton.InferRequestedOutput("logits")
            output.set_shared_memory("r", 48, offset=images.nbytes)
            (answered,) = client.infer("tiny", [tensor], outputs=[output]).get_response()["outputs"]
            assert answered["parameters"]["binary_data_size"] == 0  # without it the C++ client refuses the reply
            found = shared_memory.get_contents_as_numpy(region, np.float32, [3, 4], offset=images.nbytes)
            np.testing.assert_allclose(found, NumpySession().infer(images), rtol=1e-4, atol=1e-4)
            client.unregister_system_shared_memory("r")
            with pytest.raises(InferenceServerException, match="unable to find system shared memory region 'r'"):
                client.infer("tiny", [tensor])
            client.unregister_cuda_shared_memory()
            with pytest.raises(InferenceServerException, match="CUDA shared memory is not offered"):
                client.register_cuda_shared_memory("c", b"handle", 0, 16)
        finally:
            shared_memory.destroy_shared_memory_region(region)
            client.close()
