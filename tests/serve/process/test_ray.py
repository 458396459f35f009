"""`vitx serve --ray`, on a Ray cluster that runs and on one of its own: real processes, Triton's client, plain HTTP."""

import asyncio
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]  # its types are another package
from PIL import Image
from pydantic import ValidationError

from bundle_fixture import IMAGE_SIZE, LABELS, colour_image, write_bundle
from cli_fixture import Vitx
from ray_fixtures import command_line, processes
from server_process import (
    HANG,
    INFER_BODY,
    ServerProcess,
    end_under_load,
    free_port,
    http_client,
    run_serve,
    running_server,
    wait_until,
)
from support.process_tree import family

with warnings.catch_warnings():  # gevent and its parts warn while they are imported, and so does Ray
    warnings.simplefilter("ignore")
    import tritonclient.http as triton
    from ray import serve
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from vitx.serve import ray_app
    from vitx.serve.options import ServeOptions
    from vitx.serve.process import ray_cluster
    from vitx.serve.process.ray_cluster import _start_proxies

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import InputError
from vitx.core.files import sha256_file
from vitx.core.preprocess import UInt8Array, decode
from vitx.core.probabilities import top_predictions
from vitx.core.ray_connection import joined
from vitx.runtimes import load_session
from vitx.runtimes.session import Float32Array, Session
from vitx.serve.http.app import App
from vitx.serve.models.loading import Loader
from vitx.serve.models.served_model import ServedModel
from vitx.serve.process.port import claim_port
from vitx.serve.server_core import ServerCore, verified

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
NO_RAY = "import sys; sys.modules['ray'] = None; from vitx.cli import main; main()"  # importing it now raises


REPLICA = b"ServeReplica:vitx"


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[str]:
    """The address of a cluster on which Ray Serve runs, to which this process is connected as well."""
    with warnings.catch_warnings(), joined(ray_cluster, log_to_driver=False):
        warnings.simplefilter("ignore")
        # One proxy: the nodes share the machine's ports.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": free_port()})
        yield ray_cluster
        serve.shutdown()  # type: ignore[no-untyped-call]  # Ray annotates it not


@pytest.fixture(scope="module")
def server(cluster: str, certified_original: Bundle) -> Iterator[ServerProcess]:
    """Two replicas on that cluster, or three under load if it grows."""
    bundle = certified_original.path
    options = ("--replicas", "2:3", "--threads", "1", "--max-batch", "16", "--canary-seconds", "0.5")
    with running_server(bundle, "--ray", cluster, *options) as started:
        yield started


def test_answers_are_the_sessions(server: ServerProcess, certified_original: Bundle) -> None:
    session = load_session(certified_original, device="cpu", threads=1)
    client = triton.InferenceServerClient(server.url)
    images = np.random.default_rng(0).integers(0, 256, (3, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for binary in (True, False):
        tensor = triton.InferInput("images", list(images.shape), "UINT8")
        tensor.set_data_from_numpy(images, binary_data=binary)
        answered = client.infer("tiny", [tensor]).as_numpy("logits")
        np.testing.assert_allclose(answered, session.infer(images), rtol=1e-4, atol=1e-4)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.get_model_metadata("tiny")["outputs"][0]["shape"] == [-1, len(LABELS)]
    assert client.get_model_config("tiny")["max_batch_size"] == 16
    client.close()

    buffer = io.BytesIO()
    Image.fromarray(colour_image(3, np.random.default_rng(1), size=41)).save(buffer, format="JPEG", quality=95)
    pixels = certified_original.manifest.preprocessing.apply(decode(buffer.getvalue()))
    status, text, _ = server.request("POST", "/v1/classify", buffer.getvalue(), {"Content-Type": "image/jpeg"})
    predictions = json.loads(text)["predictions"]
    assert status == 200
    assert predictions == top_predictions(session.infer(pixels[None])[0], LABELS, len(LABELS))
    assert predictions[0]["label"] == "red"

    # Refusals are ours, and the metrics are of the replica that answers; its canary is replayed.
    status, text, _ = server.request("POST", "/v1/classify", b"no image", {"Content-Type": "image/jpeg"})
    assert (status, json.loads(text)["error"].partition(" in ")[0]) == (400, "not an image")
    series = [line for line in server.request("GET", "/metrics")[1].decode().splitlines() if "model_info{" in line]
    assert len(series) == 1
    assert "replica=" in series[0]
    wait_until(lambda: server.metric('vitx_canaries_total{result="pass"}') > 0)


def test_the_settings_reach_ray(server: ServerProcess) -> None:
    assert server.line == f"vitx: serving tiny on http://{server.url}"
    assert server.process.stderr is not None
    following = next(line for line in server.process.stderr if line.startswith("next: "))
    assert following == f"next: curl --data-binary @IMAGE http://{server.url}/v1/classify\n"
    found = serve_client().get_serve_details()["applications"]["vitx"]["deployments"]["Replica"]["deployment_config"]
    scaling = found["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 3)
    assert scaling["target_ongoing_requests"] == 8  # one instance, and no measured batch size
    assert found["ray_actor_options"]["num_cpus"] == 1
    assert found["max_ongoing_requests"] == 2 * 1024 + 2 * 16
    assert found["graceful_shutdown_timeout_s"] == 30


def test_a_killed_replica_is_replaced_and_requests_go_on(server: ServerProcess) -> None:
    ask = http_client(server)
    before = processes(REPLICA)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    outcomes, replaced = list[str](), False
    while not replaced:
        outcomes += [ask() for _ in range(20)]
        replaced = len(processes(REPLICA)) == 2
    assert sum(outcome != "200" for outcome in outcomes) <= 1, outcomes  # the one that shows the proxy who is dead
    states = serve.status().applications["vitx"].deployments["Replica"].replica_states
    wait_until(lambda: serve.status().applications["vitx"].deployments["Replica"].replica_states == {"RUNNING": 2})
    assert len(set(processes(REPLICA)) - set(before)) == 1, states


def test_one_application_a_cluster_and_its_end(server: ServerProcess) -> None:
    with pytest.raises(InputError, match="the cluster has an application 'vitx': end it, or use a config file"):
        _start_proxies(ServeOptions())
    assert server.stop() == 0
    assert serve.status().applications == {}
    wait_until(lambda: not processes(REPLICA))


def test_beside_an_application_that_cannot_start_another_serves_below_its_prefix(
    cluster: str, certified_original: Bundle, tmp_path: Path
) -> None:
    """The one that cannot start passes the checks of the machine that deploys it."""
    broken = write_bundle(tmp_path / "broken.vitx", fault="nan").path
    serves = ray_app.build(ServeOptions(bundles=(certified_original.path,), threads=1))
    with ThreadPoolExecutor() as pool:
        command = pool.submit(run_serve, broken, "--ray", cluster, "--allow-uncertified", "--threads", "1")
        serve.run(serves, name="digits", route_prefix="/digits")
        ended = command.result()
    reason = f"CheckFailed: the canary batch of {broken} has logits that are not finite"
    assert ended.stderr.splitlines()[-1] == f"error: a replica does not start: {reason}"
    assert ended.returncode == 1
    assert list(serve.status().applications) == ["digits"]
    port = serve_client().http_config.port
    assert status_of(port, "GET", "/digits/v2/health/ready") == 200
    assert status_of(port, "POST", "/digits/v2/models/tiny/infer", INFER_BODY) == 200
    assert status_of(port, "GET", "/digits/v2/models/mine") == 404
    serve.run(serves, name="digits", route_prefix="/")
    ended = run_serve(certified_original.path, "--ray", cluster, "--threads", "1")
    reason = "another application has the prefix '/': end it, or use a config file"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, f"error: {reason}")
    assert status_of(port, "POST", "/v2/models/tiny/infer", INFER_BODY) == 200
    serve.delete("digits")


def serve_client() -> Any:
    return _get_global_client()


def status_of(port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_signal_under_load_loses_no_accepted_request(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first proxy is slow to start, as on a node that is busy: Ray ends it, and starts another."""
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "0.4")  # more with each proxy
    with running_server(tiny_bundle.path, "--ray") as server:
        started = family(server.process.pid)
        assert len(processes(REPLICA, server.process.pid)) == 1
        end_under_load(server, signal.SIGTERM, lambda sent: http_client(server, sent), refused="404", clients=8)
    wait_until(lambda: not any(b"ray" in command_line(pid) for pid in started))


# Without a cluster.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grpc-port", 0), "--grpc-port is not offered with --ray: Ray's proxies pass on HTTP"),
        (("--workers", 1), "--workers is not offered with --ray: give --replicas"),
        (
            ("--allow-host", "*"),
            "--allow-host *: expected a name or address in ASCII, without scheme, port or *",
        ),
        (("--replicas", "4:2"), "--replicas 4:2: expected a number such as 4, or a least and a most such as 2:8"),
        (("--replicas", "0"), "--replicas 0: expected a number such as 4, or a least and a most such as 2:8"),
    ],
)
def test_an_option_that_ray_does_not_offer_is_refused(
    vitx: Vitx, tiny_bundle: Bundle, arguments: tuple[object, ...], message: str
) -> None:
    code, _, error = vitx("serve", tiny_bundle.path, "--ray", *arguments)
    assert (code, error.strip()) == (2, f"error: {message}")


def test_replicas_need_ray(vitx: Vitx, tiny_bundle: Bundle) -> None:
    code, _, error = vitx("serve", tiny_bundle.path, "--replicas", 2)
    assert (code, error) == (2, "error: --replicas is of --ray; on one machine use --instances, or --workers\n")


def test_an_unreachable_cluster_is_an_error_at_once(vitx: Vitx, tiny_bundle: Bundle) -> None:
    with claim_port("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code, _, error = vitx("serve", tiny_bundle.path, "--ray", address)
    assert (code, error) == (3, f"error: no Ray cluster at '{address}': [Errno 111] Connection refused\n")


def test_a_cluster_whose_nodes_have_all_died_ends_the_command(
    vitx: Vitx, certified_original: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever, and so would the deletion of the application there."""
    nodes: Iterator[list[dict[str, Any]]] = iter([[{}], [], []])
    given: dict[str, Any] = {
        "joined": lambda *args, **options: nullcontext(),
        "application": lambda *args, **options: None,
    }
    given |= {"cluster_nodes": lambda: next(nodes), "_start_proxies": lambda options: "http://127.0.0.1:8000"}
    handlers = {"signal": lambda *args: None, "SIGTERM": 15, "default_int_handler": None}
    for name, value in {**given, "signal": SimpleNamespace(**handlers)}.items():
        monkeypatch.setattr(ray_cluster, name, value)
    deleted: list[str] = []
    monkeypatch.setattr(serve, "run", lambda *args, **options: None)
    monkeypatch.setattr(serve, "delete", deleted.append)
    code, out, err = vitx("serve", certified_original.path, "--ray")
    assert (code, out) == (3, "vitx: serving tiny on http://127.0.0.1:8000\n")
    assert err.splitlines()[-1] == "error: the Ray cluster has no living node any more: start it and this again"
    assert (deleted, next(nodes, None)) == ([], None)


def test_without_ray_the_error_names_the_extra(tiny_bundle: Bundle) -> None:
    command = [sys.executable, "-c", NO_RAY, "serve", str(tiny_bundle.path), "--ray"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 3
    assert ended.stderr.endswith("which is not installed: pip install 'vitx[ray]'\n")


@pytest.mark.parametrize(
    ("options", "nodes", "share"),
    [
        ({}, [{"CPU": 16.0}], (16, 0, 16)),
        ({"replicas": (1, 4)}, [{"CPU": 16.0}], (4, 0, 4)),
        ({"replicas": (1, 4)}, [{"CPU": 16.0}, {"CPU": 16.0}, {"memory": 1.0}], (8, 0, 8)),
        ({"replicas": (2, 2)}, [{"CPU": 8.0}] * 8, (8, 0, 8)),
        ({"instances": 4}, [{"CPU": 16.0}], (16, 0, 4)),
        ({"instances": 2, "threads": 3}, [{"CPU": 16.0}], (6, 0, 3)),
        ({"replicas": (1, 64)}, [{"CPU": 2.0}], (1, 0, 1)),
        ({}, [{"CPU": 16.0, "GPU": 2.0}], (1, 1, None)),
        ({"device": "cpu"}, [{"CPU": 16.0, "GPU": 2.0}], (16, 0, 16)),
        ({"device": "cuda", "instances": 2}, [{"CPU": 16.0}], (2, 1, None)),
        ({"device": "cuda", "threads": 2}, [{"CPU": 16.0}], (2, 1, 2)),
    ],
)
def test_a_replica_takes_its_share_of_the_cores_or_a_gpu(
    options: dict[str, Any],
    nodes: list[dict[str, float]],
    share: tuple[int, int, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_app, "cluster_nodes", lambda: [{"Resources": node} for node in nodes])
    assert ray_app.share_of(ServeOptions(bundles=(Path("a"),), **options), may_grow=True) == share


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"threads": 5}, "1 replica of 5 CPUs each"),
        ({"replicas": (3, 3), "threads": 2}, "3 replicas of 2 CPUs each"),
        ({"device": "cuda"}, "1 replica of 1 CPU and a GPU each"),
    ],
)
def test_what_does_not_fit_on_this_machine_is_refused(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_app, "cluster_nodes", lambda: [{"Resources": {"CPU": 4.0}}])
    args = ServeOptions(bundles=(Path("a"),), **options)
    with pytest.raises(InputError) as caught:
        ray_app.share_of(args, may_grow=False)
    assert str(caught.value) == f"{what} do not fit: ask for fewer --replicas, --instances or --threads"
    ray_app.share_of(args, may_grow=True)


def test_the_application_of_the_config_file_in_the_docs(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray does with `import_path` and `args`, on a GPU cluster."""
    monkeypatch.setattr(ray_app, "cluster_nodes", lambda: [{"Resources": {"CPU": 8.0, "GPU": 1.0}}])
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    text = page.partition("test_ray.py reads this block -->\n```yaml\n")[2].partition("```")[0]
    (given,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert import_attr(given.import_path) is ray_app.build
    arguments = {**given.args, "bundles": [str(tiny_bundle.path)], "instances": 2, "queue": 100}
    deployment = call_user_app_builder_with_args_if_necessary(ray_app.build, arguments)._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 2 * 32)
    assert deployment.ray_actor_options == {"num_cpus": 8, "num_gpus": 1}
    assert deployment.max_ongoing_requests == 2 * 100 + 2 * 2 * 32
    assert [one.name for one in given.deployments] == [deployment.name]
    with pytest.raises(ValidationError, match="max_replica\n"):
        call_user_app_builder_with_args_if_necessary(ray_app.build, {**arguments, "max_replica": 4})
    with pytest.raises(InputError, match=r"^--port is not offered with --ray: it is a matter of the cluster"):
        call_user_app_builder_with_args_if_necessary(ray_app.build, {**arguments, "port": 9000})
    with pytest.raises(ValidationError, match=r"replicas\n.*tuple"):  # 1:4 without quotes is 64 in YAML
        call_user_app_builder_with_args_if_necessary(ray_app.build, {**arguments, "replicas": yaml.safe_load("1:4")})


@pytest.mark.parametrize("there", ["nothing", "another bundle"])
def test_every_node_needs_the_bundle_that_was_deployed(
    there: str, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_app, "configure_process", lambda: None)
    path = tmp_path / "b.vitx"
    if there == "another bundle":
        write_bundle(path, fault="bgr")
    digest = sha256_file(tiny_bundle.path / MANIFEST)
    replica: Any = SimpleNamespace()
    remedy = "every node needs the same one there; deploy a new one from another path"
    with pytest.raises(InputError, match=rf"^'{path}' on node .* is not the bundle that was deployed: {remedy}$"):
        asyncio.run(ray_app.Replica.__init__(replica, ServeOptions(bundles=(path,)), [digest]))


class Held(Session):
    """A session that computes only once it is let go."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.go = threading.Event()
        self._session = session

    def describe(self) -> dict[str, Any]:
        return self._session.describe()

    def _infer(self, images: UInt8Array) -> Float32Array:
        assert self.go.wait(HANG)
        return self._session.infer(images)


def test_a_request_that_ray_cancels_frees_its_place(tiny_bundle: Bundle) -> None:
    """Ray cancels the requests of clients that hang up."""
    args = ServeOptions(bundles=(tiny_bundle.path,), device="cpu", threads=1)
    (offer,) = verified(args)
    warm = Loader(args).warm(offer)
    held = Held(warm.session)

    async def run() -> list[int]:
        core = ServerCore(args, [offer])
        core.models.switch(ServedModel(replace(warm, session=held), core.metrics), 0)
        batcher = core.models.get("tiny").batcher
        replica: Any = SimpleNamespace(_routes=App(core, None), _core=core)
        statuses: list[int] = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        def request() -> asyncio.Task[None]:
            path = "/prefix/v2/models/tiny/infer"
            scope: Any = {"type": "http", "http_version": "1.0", "method": "POST", "headers": []}
            scope |= {"path": path, "root_path": "/prefix"}
            messages = iter([{"type": "http.request", "body": INFER_BODY}])

            async def receive() -> Any:
                return next(messages)

            return asyncio.create_task(ray_app.Replica._answer(replica, scope, receive, send))

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(HANG):
                while not condition():
                    await asyncio.sleep(0.001)

        first = request()
        await until(lambda: batcher.running == 1)
        second = request()
        await until(lambda: batcher.queued == 1)
        second.cancel()
        await asyncio.wait([second])
        assert batcher.queued == 0
        assert b'vitx_rejections_total{model="tiny",reason="disconnected"} 1.0' in core.metrics.exposition()

        held.go.set()
        await first
        await core.models.close()
        core.decoder.close()
        return [status for status in statuses if status]

    assert asyncio.run(run()) == [200]


def test_a_fault_that_the_canary_found_is_rays_health_check() -> None:
    model = SimpleNamespace(name="tiny", fault=None)
    replica: Any = SimpleNamespace(_core=SimpleNamespace(models=[model]))
    asyncio.run(ray_app.Replica.check_health(replica))
    model.fault = "moved"
    with pytest.raises(RuntimeError, match=r"^model 'tiny': moved$"):
        asyncio.run(ray_app.Replica.check_health(replica))
