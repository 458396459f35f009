"""Embedding and attention over a real socket: asked for by name, and right in any company."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from bundle_fixture import PREPROCESSING, NumpySession, colour_image, png, with_attention, with_embedding, write_bundle
from server_process import ServerProcess, grpc_address, running_server
from vitx.core.bundle import Bundle
from vitx.runtimes.session import Session
from vitx.serve.errors import RequestError
from vitx.serve.models import loading
from vitx.serve.models.loading import Loader
from vitx.serve.models.repository import Repository
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.options import ServeOptions

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return with_attention(with_embedding(write_bundle(tmp_path_factory.mktemp("outputs") / "tiny.vitx")))


@pytest.fixture(scope="module")
def server(bundle: Bundle) -> Iterator[ServerProcess]:
    with running_server(bundle.path, "--allow-uncertified", "--grpc-port", "0", "--max-images", "8") as started:
        grpc_address(started)
        yield started


def pixels(count: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)


def expected(images: Pixels) -> dict[str, npt.NDArray[np.float64]]:
    unit = images.astype(np.float64) / 255
    normal = (unit - PREPROCESSING.mean) / PREPROCESSING.std
    return {
        "logits": NumpySession().infer(images).astype(np.float64),
        "embedding": normal.mean(axis=(1, 2)),
        "attention": unit.mean(axis=3).reshape(len(images), -1),
    }


def triton(server: ServerProcess, protocol: Any, images: Pixels, outputs: list[Any] | None) -> Any:
    with protocol.InferenceServerClient(server.url if protocol is http_client else server.grpc_url) as client:
        given = protocol.InferInput("images", list(images.shape), "UINT8")
        given.set_data_from_numpy(images)
        return client.infer("tiny", [given], outputs=outputs)


@pytest.mark.parametrize("binary", [True, False, None])
@pytest.mark.parametrize("names", [("attention", "logits", "embedding"), ("embedding",), ("logits", "attention")])
def test_triton_s_clients_ask_for_them_by_name(
    server: ServerProcess, names: tuple[str, ...], binary: bool | None
) -> None:
    images = pixels(3)
    protocol: Any = grpc_client if binary is None else http_client
    options = {} if binary is None else {"binary_data": binary}
    result = triton(server, protocol, images, [protocol.InferRequestedOutput(name, **options) for name in names])
    for name, values in expected(images).items():
        found = result.as_numpy(name)
        if name in names:
            np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5)
        else:
            assert found is None


def test_some_as_bytes_some_as_json_and_classes(server: ServerProcess) -> None:
    images = pixels(2)
    outputs = [
        http_client.InferRequestedOutput("embedding", binary_data=False),
        http_client.InferRequestedOutput("logits", class_count=1),
        http_client.InferRequestedOutput("attention"),
    ]
    result = triton(server, http_client, images, outputs)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["embedding", "logits", "attention"]
    np.testing.assert_allclose(result.as_numpy("embedding"), expected(images)["embedding"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.as_numpy("attention"), expected(images)["attention"], rtol=1e-5, atol=1e-5)
    assert result.as_numpy("logits").shape == (2, 1)


@pytest.mark.parametrize("protocol", [http_client, grpc_client])
def test_without_a_list_of_outputs_there_are_logits_alone(server: ServerProcess, protocol: Any) -> None:
    images = pixels(2)
    result = triton(server, protocol, images, None)
    np.testing.assert_allclose(result.as_numpy("logits"), expected(images)["logits"], rtol=1e-5, atol=1e-5)
    assert result.as_numpy("embedding") is None


@pytest.mark.parametrize("protocol", [http_client, grpc_client])
@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (
            ["rollout"],
            "unexpected inference output 'rollout' for model 'tiny': its outputs are 'logits', 'embedding', 'a",
        ),
        (["logits", "Embedding"], "unexpected inference output 'Embedding' for model 'tiny'"),
        (["embedding", "embedding"], "output 'embedding' already exists in request"),
        (["x" * 9000], f"unexpected inference output '{'x' * 79}"),
    ],
)
def test_other_names_are_refused(server: ServerProcess, protocol: Any, outputs: list[str], text: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        triton(server, protocol, pixels(1), [protocol.InferRequestedOutput(name) for name in outputs])
    assert caught.value.message().startswith(text)
    with pytest.raises(
        InferenceServerException, match="'attention' has no classes: 'classification' goes with 'logits'"
    ):
        triton(server, protocol, pixels(1), [protocol.InferRequestedOutput("attention", class_count=2)])


@pytest.mark.parametrize("protocol", [http_client, grpc_client])
def test_the_metadata_lists_them(server: ServerProcess, protocol: Any) -> None:
    with protocol.InferenceServerClient(server.url if protocol is http_client else server.grpc_url) as client:
        options = {} if protocol is http_client else {"as_json": True}
        listed = client.get_model_metadata("tiny", **options)["outputs"]
    shapes = {output["name"]: [int(side) for side in output["shape"]] for output in listed}
    assert shapes == {"logits": [-1, 4], "embedding": [-1, 3], "attention": [-1, 256]}
    about = server.json("/v2/models/tiny")["vitx"]
    assert [(one["name"], one["grid"]) for one in about["outputs"]] == [("embedding", None), ("attention", [16, 16])]
    config = server.json("/v2/models/tiny/config")["output"]
    assert [(one["name"], one["dims"]) for one in config] == [("logits", [4]), ("embedding", [3]), ("attention", [256])]


def test_an_image_file_gets_them_beside_its_classes(server: ServerProcess) -> None:
    image = colour_image(3, np.random.default_rng(0))
    values = expected(image[None])
    for _ in range(2):  # the second request has a head that is known
        path = "/v1/classify?outputs=attention,embedding"
        status, body, _ = server.request("POST", path, png(image), {"Content-Type": "image/png"})
        reply = json.loads(body)
        assert (status, reply["predictions"][0]["label"], [*reply["outputs"]]) == (
            200,
            "red",
            ["attention", "embedding"],
        )
        for name, found in reply["outputs"].items():
            np.testing.assert_allclose(found, values[name][0], rtol=1e-5, atol=1e-5)
    status, body, _ = server.request("POST", "/v1/classify", png(image), {"Content-Type": "image/png"})
    assert [*json.loads(body)] == ["model", "predictions"]
    for given in ("logits", "rollout", "", "attention,,embedding"):
        status, body, _ = server.request("POST", f"/v1/classify?outputs={given}", png(image))
        assert (status, "has no output" in json.loads(body)["error"]) == (400, True)


def test_clients_that_ask_for_other_things_get_their_own(server: ServerProcess) -> None:
    """Eight clients at once, each with its own pixels and wishes, and one that sends nonsense between them."""
    wrong: list[str] = []

    def client(seed: int) -> None:
        wishes = [None, ["embedding"], ["logits", "attention"], ["nothing"]][seed % 4]
        for turn in range(12):
            images = pixels(1 + turn % 3, seed=100 * seed + turn)
            outputs = wishes and [http_client.InferRequestedOutput(name) for name in wishes]
            try:
                result = triton(server, http_client, images, outputs)
            except InferenceServerException as refused:
                if wishes != ["nothing"]:
                    wrong.append(str(refused))
                continue
            for name, values in expected(images).items():
                found = result.as_numpy(name)
                if (found is not None) != (name in (wishes or ["logits"])):
                    wrong.append(f"{wishes}: {name}")
                elif found is not None and np.abs(found - values).max() > 1e-4:
                    wrong.append(f"{wishes}: another's {name}")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_logits_alone_run_another_session(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for logits runs what it ran before there were outputs; statistics and metrics are of both."""
    loader = Loader(ServeOptions(device="cpu", runtime="onnxruntime", threads=1, allow_uncertified=True))
    warm = loader.warm(loader.verify(bundle.path))
    assert warm.outputs is not None
    assert (warm.session.outputs, warm.outputs.names) == ((), ("embedding", "attention"))
    asked: list[str] = []
    parts = (warm.session, "_infer", "logits"), (warm.outputs.session, "_infer_outputs", "rows")
    for session, method, name in parts:
        infer = getattr(session, method)

        def noting(images: Pixels, infer: Any = infer, name: str = name) -> Any:
            asked.append(name)
            return infer(images)

        monkeypatch.setattr(session, method, noting)

    async def ask() -> None:
        model = ServedModel(warm, Metrics())
        about = model.metadata(["1"])
        assert [output["shape"] for output in about["outputs"]] == [[-1, 4], [-1, 3], [-1, 256]]
        assert [output["name"] for output in about["vitx"]["outputs"]] == ["embedding", "attention"]
        assert (await model.batcher_of(False).submit(pixels(2))).shape == (2, 4)
        assert asked == ["logits"]
        assert (await model.batcher_of(True).submit(pixels(2))).shape == (2, 4 + 3 + 256)
        assert asked == ["logits", "rows"]
        assert model.batcher.statistics.as_json(*model.key)["inference_stats"]["success"]["count"] == 2
        await model.close()

    asyncio.run(ask())
    for session in (warm.session, warm.outputs.session):
        with pytest.raises(RuntimeError, match="closed"):
            session.infer(pixels(1))


def test_a_runtime_of_logits_alone_serves_logits_alone(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = Loader(ServeOptions(device="cpu", runtime="onnxruntime-int8", allow_uncertified=True))
    offer = loader.verify(bundle.path)
    with ExitStack() as opened:
        assert loader._with_outputs(offer, loader.options.batching, None, opened) == (offer, None)
    assert (
        "'tiny' is served without embedding, attention: onnxruntime-int8 gives logits alone" in capsys.readouterr().err
    )


def test_a_bundle_that_is_replaced_while_it_is_loaded_leaves_no_session(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one of the logits nor the one that gives all outputs, each with a copy of the weights."""
    loader = Loader(ServeOptions(bundles=(bundle.path,), device="cpu", threads=1, allow_uncertified=True))
    sessions: list[Session] = []
    load_warm = loading.load_warm

    def replaced(*arguments: Any, **options: Any) -> Session:
        sessions.append(load_warm(*arguments, **options))
        (bundle.path / "model.onnx").touch()
        return sessions[-1]

    monkeypatch.setattr(loading, "load_warm", replaced)

    async def load() -> None:
        offer = loader.verify(bundle.path)
        models = Repository(ModelSet([]), loader, Metrics(), [offer])
        with pytest.raises(RequestError, match="was replaced while it was loaded: load it again"):
            await models.load("tiny")

    asyncio.run(load())
    assert len(sessions) == 2
    for session in sessions:
        with pytest.raises(RuntimeError, match="closed"):
            session.infer(pixels(1))
