"""The calls of the gRPC service without a server: each answer, deadlines, and what leaves the event loop."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from bundle_fixture import IMAGE_SIZE, NumpySession
from server_process import HANG
from vitx import __version__
from vitx.core.bundle import Bundle
from vitx.serve.callbacks import read_on_thread
from vitx.serve.errors import RequestError
from vitx.serve.grpc import service
from vitx.serve.grpc.messages import message_class
from vitx.serve.grpc.protocol import encode_infer_response
from vitx.serve.grpc.service import grpc_calls
from vitx.serve.models.repository import Repository
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.options import ServeOptions
from vitx.serve.server_core import ServerCore, verified

PIXELS = IMAGE_SIZE**2 * 3


class Context:
    """Of a call with so many seconds left."""

    def __init__(self, left: float | None = None) -> None:
        self.left = left

    def time_remaining(self) -> float | None:
        return self.left


def on_core(bundle: Bundle, use: Callable[[ServerCore], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        options = ServeOptions(bundles=(bundle.path,), shared_memory=True, server_id="here")
        core = ServerCore(options, offers := verified(options))
        core.repository = Repository(core.models, core.loader, core.metrics, offers)
        await core.load()
        CURRENT_RECORD.set(RequestRecord("", started=time.monotonic()))
        try:
            return await use(core)
        finally:
            await core.models.close()

    return asyncio.run(run())


async def answer(core: ServerCore, method: str, **fields: Any) -> dict[str, Any]:
    kind, call = grpc_calls(core)[method]
    response = await call(kind(**fields), Context())
    found: dict[str, Any] = MessageToDict(response, preserving_proto_field_name=True)
    return found


def test_what_each_call_answers(tiny_bundle: Bundle) -> None:
    async def use(core: ServerCore) -> None:
        assert await answer(core, "ServerLive") == {"live": True}
        assert await answer(core, "ServerReady") == {"ready": True}
        about = await answer(core, "ServerMetadata")
        assert (about["name"], about["version"]) == ("here", __version__)
        assert "binary_tensor_data" in core.about()["extensions"]
        assert about["extensions"] == [name for name in core.about()["extensions"] if name != "binary_tensor_data"]
        for named, ready in (({}, True), ({"version": "1"}, True), ({"version": "2"}, False)):
            assert await answer(core, "ModelReady", name="tiny", **named) == ({"ready": True} if ready else {})
        assert await answer(core, "ModelReady", name="mine") == {}
        metadata = await answer(core, "ModelMetadata", name="tiny")
        assert (metadata["name"], metadata["versions"]) == ("tiny", ["1"])
        assert (await answer(core, "ModelConfig", name="tiny", version="1"))["config"]["name"] == "tiny"
        for named in ({}, {"name": "tiny"}, {"name": "tiny", "version": "1"}):
            (model,) = (await answer(core, "ModelStatistics", **named))["model_stats"]
            assert (model["name"], model["version"]) == ("tiny", "1")
        for name in ("CudaSharedMemoryStatus", "CudaSharedMemoryUnregister", "SystemSharedMemoryStatus"):
            assert await answer(core, name) == {}
        await answer(core, "RepositoryModelUnload", model_name="tiny")
        assert [each["state"] for each in (await answer(core, "RepositoryIndex"))["models"]] == ["UNAVAILABLE"]
        assert await answer(core, "RepositoryIndex", ready=True) == {}
        await answer(core, "RepositoryModelLoad", model_name="tiny")
        assert [each["state"] for each in (await answer(core, "RepositoryIndex", ready=True))["models"]] == ["READY"]

    on_core(tiny_bundle, use)


def test_health_is_of_the_server_or_of_a_model(tiny_bundle: Bundle) -> None:
    async def use(core: ServerCore) -> None:
        async def ready(service: str) -> bool:
            status = (await answer(core, "HealthCheck", service=service))["status"]
            return {1: True, 2: False}[int(status)]  # SERVING, NOT_SERVING

        server, tiny = ("", "inference.GRPCInferenceService"), core.models.get("tiny", None)
        assert [await ready(name) for name in (*server, "tiny")] == [True] * 3
        core.models.expected["other", "1"] = None  # is still loading
        assert [await ready(name) for name in (*server, "tiny", "other")] == [False, False, True, False]
        del core.models.expected["other", "1"]
        tiny.fault = "its canary differs"
        assert [await ready(name) for name in (*server, "tiny")] == [False] * 3
        with pytest.raises(RequestError, match=f"^unknown service '{'x' * 80}'$") as refused:
            await ready("x" * 100)
        assert (refused.value.status, refused.value.reason) == (404, "unknown_model")

    on_core(tiny_bundle, use)


def test_what_is_refused(tiny_bundle: Bundle) -> None:
    async def use(core: ServerCore) -> None:
        second = {"name": "tiny", "version": "2"}
        for method, fields, status, text in (
            ("ModelMetadata", second, 404, "'tiny' version 2 is not found"),
            ("ModelConfig", second, 404, "'tiny' version 2 is not found"),
            ("ModelStatistics", second, 404, "'tiny' version 2 is not found"),
            ("SystemSharedMemoryStatus", {"name": "mine"}, 404, "'mine'"),
            ("CudaSharedMemoryRegister", {}, 501, "CUDA shared memory is not offered: use system shared memory"),
            ("TraceSetting", {}, 501, "trace settings are not offered"),
            ("LogSettings", {}, 501, "log settings are not offered"),
            ("RepositoryModelLoad", {"model_name": "mine"}, 404, "'mine'"),
            ("RepositoryModelUnload", {"model_name": "mine"}, 404, "'mine'"),
        ):
            with pytest.raises(RequestError, match=text) as refused:
                await answer(core, method, **fields)
            assert refused.value.status == status, method

    on_core(tiny_bundle, use)


def test_models_are_managed_where_that_is_offered_and_as_they_are_on_disk(tiny_bundle: Bundle) -> None:
    async def use(core: ServerCore) -> None:
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            request = message_class(f"{method}Request")(model_name="tiny")
            request.parameters["config"].string_param = "{}"
            with pytest.raises(RequestError, match=r"^parameter 'config' is not offered"):
                await grpc_calls(core)[method][1](request, Context())
        core.repository = None
        for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"):
            with pytest.raises(RequestError, match="--management") as refused:
                await answer(core, method)
            assert refused.value.status == 501

    on_core(tiny_bundle, use)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is offered on Linux only")
def test_regions_are_registered_as_they_are_described(tiny_bundle: Bundle) -> None:
    async def use(core: ServerCore) -> None:
        async def regions(name: str = "") -> Any:
            return (await answer(core, "SystemSharedMemoryStatus", name=name)).get("regions", {})

        async def unregister(name: str = "") -> None:
            assert await answer(core, "SystemSharedMemoryUnregister", name=name) == {}

        for name, offset, size in (("first", 8, 16), ("second", 0, 32), ("third", 0, 4)):
            given = {"name": name, "key": f"/{block.name}", "offset": offset, "byte_size": size}
            assert await answer(core, "SystemSharedMemoryRegister", **given) == {}
        first = {"name": "first", "key": f"/{block.name}", "offset": "8", "byte_size": "16"}
        assert (await regions()).keys() == {"first", "second", "third"}
        assert await regions("first") == {"first": first}
        await unregister("second")
        assert (await regions()).keys() == {"first", "third"}
        await unregister()
        assert await regions() == {}

    block = SharedMemory(create=True, size=64)
    try:
        on_core(tiny_bundle, use)
    finally:
        block.close()
        block.unlink()


def infer_request(images: Any, *, raw: bool = True, timeout: int = 0, classes: int = 0) -> Any:
    request = message_class("ModelInferRequest")(model_name="tiny", id="17")
    tensor = request.inputs.add(name="images", datatype="UINT8", shape=images.shape)
    if raw:
        request.raw_input_contents.append(images.tobytes())
    else:
        tensor.contents.uint_contents.extend(images.ravel().tolist())
    if timeout:
        request.parameters["timeout"].int64_param = timeout
    if classes:
        request.outputs.add(name="logits").parameters["classification"].int64_param = classes
    return request


def images(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def test_the_deadline_is_the_earlier_of_the_calls_and_the_requests(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in seconds since the request came, ten before it was read."""

    async def use(core: ServerCore) -> None:
        model, asked = core.models.get("tiny", None), list[tuple[float, float | None]]()
        monkeypatch.setattr(model, "deadline", lambda *given: asked.append(given))
        started = time.monotonic() - 10
        CURRENT_RECORD.set(RequestRecord("", started=started))
        for left, timeout, expected in (
            (None, 0, None),
            (5.0, 0, 15.0),
            (None, 3_000_000, 3.0),
            (5.0, 3_000_000, 3.0),
            (5.0, 60_000_000, 15.0),
        ):
            response = await grpc_calls(core)["ModelInfer"][1](infer_request(images(3), timeout=timeout), Context(left))
            came, seconds = asked.pop()
            assert came == started
            assert seconds == (None if expected is None else pytest.approx(expected, abs=1))
            logits = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(3, -1)
            np.testing.assert_allclose(logits, NumpySession().infer(images(3)), rtol=1e-4, atol=1e-4)
            assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "17")

    on_core(tiny_bundle, use)


def test_many_numbers_are_read_and_many_texts_written_beside_the_event_loop(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    writers: list[int] = []
    here = threading.get_ident()
    monkeypatch.setattr(service, "MANY_TEXTS", 4)

    def read(size: int, decode: Callable[[], Any]) -> Any:
        sizes.append(size)
        return read_on_thread(size, decode)

    def write(*given: Any) -> Any:
        writers.append(threading.get_ident())
        return encode_infer_response(*given)

    monkeypatch.setattr(service, "read_on_thread", read)
    monkeypatch.setattr(service, "encode_infer_response", write)

    async def use(core: ServerCore) -> None:
        async def infer(count: int, **options: Any) -> Any:
            return await grpc_calls(core)["ModelInfer"][1](infer_request(images(count), **options), Context())

        for count, raw in ((21, False), (22, True), (22, False)):  # 16,384 numbers are between them
            response = await infer(count, raw=raw)
            logits = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(count, -1)
            np.testing.assert_allclose(logits, NumpySession().infer(images(count)), rtol=1e-4, atol=1e-4)
        assert sizes == [22 * PIXELS]
        assert set(writers) == {here}
        await infer(2, classes=2)
        assert set(writers) == {here}
        await infer(3, classes=2)
        assert len(set(writers)) == 2
        assert writers[-1] != here
        request = infer_request(images(1))
        request.inputs.pop()
        with pytest.raises(RequestError, match="input"):
            await grpc_calls(core)["ModelInfer"][1](request, Context())

    on_core(tiny_bundle, use)


def test_a_call_that_is_cancelled_while_its_numbers_are_read_ends_with_them(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are in memory until then, and count."""
    begun, goes_on = threading.Event(), threading.Event()

    def decode(*_: Any) -> Any:
        begun.set()
        assert goes_on.wait(HANG)
        raise RequestError("nobody waits for it")

    monkeypatch.setattr(service, "_MANY_NUMBERS", 0)
    monkeypatch.setattr(service, "decode_infer_request", decode)

    async def use(core: ServerCore) -> None:
        call = asyncio.ensure_future(grpc_calls(core)["ModelInfer"][1](infer_request(images(1), raw=False), Context()))
        assert await asyncio.to_thread(begun.wait, HANG)
        call.cancel()
        await asyncio.sleep(0.05)
        assert not call.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    on_core(tiny_bundle, use)
