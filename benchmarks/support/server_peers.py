"""The servers that serve/server.py compares: each is a process, with a function for its requests and its answers."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.http_load import Address, Connection
from support.process_tree import family, processor_seconds, require_running, resident_bytes
from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Manifest, Provenance, TensorSpec, timestamp
from vitx.core.errors import EnvironmentMissing
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.machine import installed_versions
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import ModelSpec

INSTANCES, MAX_BATCH, MAX_DELAY_MS = 2, 32, 2
PEERS = Path(__file__).parent / "peers"
_START_SECONDS = 60.0

TRITON_CONFIG = """
name: "vit"
backend: "python"
max_batch_size: {batch}
input [{{ name: "images" data_type: TYPE_UINT8 dims: [{size}, {size}, 3] }}]
output [{{ name: "logits" data_type: TYPE_FP32 dims: [{classes}] }}]
instance_group [{{ count: {instances} kind: KIND_CPU }}]
dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
"""


@dataclass(frozen=True)
class Network:
    """A vision transformer of timm with random weights (seed 0)."""

    name: str
    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    classes: int


# SLOW takes about ten times as long as SMALL for a request of the same size.
SMALL = Network("vit", 32, 4, 96, 6, 3, 10)
SLOW = Network("slow", 32, 4, 384, 12, 6, 10)
TINY = Network("tiny", 32, 8, 32, 1, 1, 10)
DEIT_TI = Network("deit_ti", 224, 16, 192, 12, 3, 1000)
DEIT_S = Network("deit_s", 224, 16, 384, 12, 6, 1000)


@dataclass
class Server:
    """A running server. `request` makes one of an image uint8 (S, S, 3); `logits` reads the answer to it."""

    name: str
    process: "subprocess.Popen[str]"
    address: Address
    request: Callable[[UInt8Array], bytes]
    logits: Callable[[bytes], Any]

    def pause(self) -> None:
        """Stop every process of it, so that it costs nothing while another one is measured."""
        for pid in family(self.process.pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in family(self.process.pid):
            os.kill(pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Of all its processes so far."""
        return sum(map(processor_seconds, family(self.process.pid)))

    def resident_bytes(self) -> int:
        return sum(map(resident_bytes, family(self.process.pid)))


def bundle_of(network: Network, folder: Path) -> Bundle:
    """The uncertified bundle FOLDER/NAME.vitx; exported when it is not there yet."""
    path = folder / f"{network.name}.vitx"
    if path.is_dir():
        return Bundle.open(path)
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from vitx.export import onnx_from_model, rewrite_for_export

    torch.manual_seed(0)
    model = VisionTransformer(
        network.image_size,
        network.patch_size,
        num_classes=network.classes,
        embed_dim=network.width,
        depth=network.depth,
        num_heads=network.heads,
    )
    preprocessing = Preprocessing(image_size=network.image_size)
    labels = tuple(map(str, range(network.classes)))
    with staged_folder(path) as stage:
        graph = stage / "model.onnx"
        onnx_from_model(rewrite_for_export(model.eval(), preprocessing), preprocessing, labels, graph, check=False)
        write_json(stage / MANIFEST, _manifest(network, preprocessing, graph))
    return Bundle.open(path)


def export_deit_tiny(path: Path) -> Bundle:
    """`vitx export` of timm's DeiT-Ti with random weights."""
    from vitx.export import SourceRequest, export_bundle

    request = SourceRequest("model:timm/deit_tiny_patch16_224", weights="random")
    return export_bundle(request, path, quiet=True)


def _manifest(network: Network, preprocessing: Preprocessing, graph: Path) -> Manifest:
    size = network.image_size
    return Manifest(
        name=network.name,
        model=ModelSpec(name=network.name, num_classes=network.classes),
        labels=tuple(map(str, range(network.classes))),
        preprocessing=preprocessing,
        input=TensorSpec(name="images", dtype="uint8", shape=("N", size, size, 3)),
        output=TensorSpec(name="logits", dtype="float32", shape=("N", network.classes)),
        precision="fp32",
        rewrites=(),
        opset=18,
        data="",
        files={"model.onnx": FileEntry(sha256=sha256_file(graph), size=graph.stat().st_size)},
        provenance=Provenance(
            source="benchmarks/support/server_peers.py",
            checkpoint="random",
            checkpoint_sha256="0" * 64,
            versions=installed_versions(),
            created=timestamp(),
        ),
    )


@contextmanager
def vitx_server(bundle: Bundle, *options: str, instances: int = INSTANCES) -> Iterator[Server]:
    """`vitx serve` of this bundle, of `instances` one-thread instances."""
    given = ["--instances", str(instances), "--threads", "1"]
    given += ["--max-batch", str(MAX_BATCH), "--max-delay-ms", str(MAX_DELAY_MS)]
    with served("vitx", bundle, *given, *options) as server:
        yield server


@contextmanager
def served(name: str, bundle: Bundle, *options: str, allow_uncertified: bool = True) -> Iterator[Server]:
    """`vitx serve` of this bundle with these options, here called `name`."""
    model, port = bundle.manifest.name, free_port()
    command = [sys.executable, "-c", "from vitx.cli import main; main()", "serve", str(bundle.path)]
    command += ["--port", str(port), *(["--allow-uncertified"] if allow_uncertified else []), *options]
    with _running(name, command, port, "/v2/health/ready") as process:
        yield Server(name, process, ("127.0.0.1", port), lambda image: infer_request(model, image), infer_logits)


@contextmanager
def triton_server(bundle: Bundle, venv: Path, folder: Path) -> Iterator[Server]:
    """Triton as nvidia-pytriton packs it, its Python backend with the venv's ONNX Runtime.

    The backend's stub finds the venv by the first python3 on the path, and loads the system's libpython of the venv's
    version. Raises EnvironmentMissing when the venv has no nvidia-pytriton.
    """
    remedy = f"python3 -m venv {venv} && {venv}/bin/pip install nvidia-pytriton onnxruntime"
    packages = _site_packages(venv, "pytriton", remedy)
    distribution = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    stub = distribution / "python_backend_stubs" / version / "triton_python_backend_stub"
    backends = folder / "backends"
    shutil.copytree(distribution / "backends", backends)
    (backends / "python" / stub.name).write_bytes(stub.read_bytes())
    (backends / "python" / stub.name).chmod(0o755)
    _write_triton_model(bundle, folder / "repository" / "vit")
    port = free_port()
    options = {"model-repository": folder / "repository", "backend-directory": backends, "http-port": port}
    options |= {"http-address": "127.0.0.1", "allow-grpc": "false", "allow-metrics": "false"}
    command = [str(distribution / "bin" / "tritonserver"), *(f"--{key}={value}" for key, value in options.items())]
    environment = {
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "PATH": f"{venv.absolute() / 'bin'}:{os.environ['PATH']}",
    }
    with _running("triton", command, port, "/v2/health/ready", environment) as process:
        yield Server("triton", process, ("127.0.0.1", port), lambda image: infer_request("vit", image), infer_logits)


def _write_triton_model(bundle: Bundle, model: Path) -> None:
    size, classes = bundle.manifest.preprocessing.image_size, bundle.manifest.model.num_classes
    (model / "1").mkdir(parents=True)
    shutil.copy(PEERS / "triton_model.py", model / "1" / "model.py")
    shutil.copy(bundle.model_path, model / "1" / "model.onnx")
    values = {"batch": MAX_BATCH, "instances": INSTANCES, "delay": 1000 * MAX_DELAY_MS}
    (model / "config.pbtxt").write_text(TRITON_CONFIG.format(size=size, classes=classes, **values))


@contextmanager
def litserve_server(bundle: Bundle, venv: Path) -> Iterator[Server]:
    """LitServe with JSON; raises EnvironmentMissing when the venv has none."""
    _site_packages(venv, "litserve", f"python3 -m venv {venv} && {venv}/bin/pip install litserve onnxruntime")
    port = free_port()
    command = [str(venv / "bin" / "python"), str(PEERS / "litserve_server.py"), str(bundle.model_path), str(port)]
    with _running("litserve", command, port, "/health") as process:
        yield Server("litserve", process, ("127.0.0.1", port), _litserve_request, _litserve_logits)


@contextmanager
def collector_server(bundle: Bundle) -> Iterator[Server]:
    """The least collector that batches, under uvicorn, with the same event loop and parser as `vitx serve`."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "asgi_collector:app", "--app-dir", str(PEERS), "--port", str(port)]
    command += ["--lifespan", "off", "--no-access-log", "--log-level", "warning", "--http", "httptools"]
    with _running("collector", command, port, "/", {"MODEL": str(bundle.model_path)}) as process:
        yield Server(
            *("collector", process, ("127.0.0.1", port)), lambda image: infer_request("vit", image), infer_logits
        )


def http_request(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def infer_request(model: str, image: UInt8Array, parameters: dict[str, Any] | None = None) -> bytes:
    """Open Inference Protocol v2 with binary tensors, as tritonclient sends it."""
    size = {"binary_data_size": image.nbytes}
    tensor = {"name": "images", "shape": [1, *image.shape], "datatype": "UINT8", "parameters": size}
    output = {"name": "logits", "parameters": {"binary_data": True}}
    header = json.dumps({"inputs": [tensor], "outputs": [output], "parameters": parameters or {}}).encode()
    lengths = f"Inference-Header-Content-Length: {len(header)}\r\nContent-Type: application/octet-stream\r\n"
    return http_request(f"/v2/models/{model}/infer", header + image.tobytes(), lengths)


def infer_logits(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)inference-header-content-length: *(\d+)", head)
    if found is None:
        raise RuntimeError(f"no binary tensor in the answer: {answer[:400]!r}")
    return np.frombuffer(body, np.float32, offset=int(found[1]))


def sample_photographs() -> list[bytes]:
    """Two JPEG files of 640 × 427 pixels that come with scikit-learn."""
    import sklearn.datasets

    folder = Path(sklearn.datasets.__file__).parent / "images"
    return [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]


def _litserve_request(image: UInt8Array) -> bytes:
    body = json.dumps({"image": image.ravel().tolist()}, separators=(",", ":")).encode()
    return http_request("/predict", body, "Content-Type: application/json\r\n")


def _litserve_logits(answer: bytes) -> Any:
    return np.asarray(json.loads(answer.partition(b"\r\n\r\n")[2])["logits"], dtype=np.float32)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _running(
    name: str, command: Sequence[str], port: int, ready: str, environment: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Start a server, wait until GET `ready` says 200, and end all its processes at last.

    Raises RuntimeError when it ends before.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until_ready(name, process, port, ready)
        try:
            yield process
        finally:
            require_running(process, name)  # what its clients saw is in the traceback
    finally:
        processes = family(process.pid)
        for pid in processes:
            _send(pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in processes[1:]:  # workers that outlived it
            _send(pid, signal.SIGKILL)


def wait_until_ready(name: str, process: "subprocess.Popen[str]", port: int, path: str) -> None:
    """Ask every 50 ms; raise RuntimeError when the process ends, or a minute has passed."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with {process.returncode} before it was ready: {process.args!r}")
        try:
            connection = Connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
            continue
        try:
            if connection.ask(request)[0] == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"{name} was not ready within {_START_SECONDS:g} s: {process.args!r}")


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _site_packages(venv: Path, package: str, remedy: str) -> Path:
    for packages in sorted(venv.absolute().glob("lib/python3.*/site-packages")):
        if (packages / package).is_dir():
            return packages
    raise EnvironmentMissing(f"'{venv}' is no virtual environment with {package}: {remedy}")


def package_versions(venv: Path, *names: str) -> dict[str, str]:
    """What a peer's environment has installed."""
    found = {}
    for name in names:
        for metadata in venv.glob(f"lib/python3.*/site-packages/{name.replace('-', '_')}-*.dist-info"):
            found[name] = metadata.name.removesuffix(".dist-info").rpartition("-")[2]
    return found
