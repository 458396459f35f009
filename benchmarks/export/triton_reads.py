"""Triton's own server reads the repository that vitx writes. No GPU; nothing is timed.

    python benchmarks/export/triton_reads.py BUNDLE --server tritonserver [--json FILE]

BUNDLE is of an uncertified network of 32 px or so (`vitx export model:deit_digits --weights random --uncertified --out
BUNDLE`). The server is the one of the package nvidia-pytriton, `pytriton/tritonserver/bin/tritonserver`, with
LD_LIBRARY_PATH at its `nvidia_pytriton.libs` (the package itself requires numpy 1, so it is no dependency of vitx). It
has the Python backend alone, so each repository, for the graph and for a plan, is read twice:

- as written: until the backend is looked for;
- with the backend `python` and a model.py that runs the bundle's graph in ONNX Runtime in place of it, everything else
  as written: shapes, types, labels, warm-up, batching, instances. Where that loads, the configuration that the server
  reports is compared with the file, and one request with ONNX Runtime, class labels included.

The plan is a file of a few bytes: none was built. Exit code 1 if the graph's repository is not served with the
stand-in, or if anything else than a missing backend or GPU refuses one.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import command_line, exit_code, report_header, save_report, verdict
from vitx.core.bundle import Bundle, timestamp
from vitx.core.files import sha256_bytes, sha256_file
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import PlanInfo, PlanOptions
from vitx.export.engines.profiles import profiles_for, write_plan
from vitx.export.graph.execution import logits_of
from vitx.export.triton import triton_repository

# Its process does not read PYTHONPATH, and needs numpy 1.
STAND_IN = """
import os
import sys
sys.path.insert(0, "SITE")
import numpy as np
import onnxruntime
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        answers = []
        for request in requests:
            images = utils.get_input_tensor_by_name(request, "images").as_numpy()
            (logits,) = self.session.run(None, {"images": images})
            answers.append(utils.InferenceResponse([utils.Tensor("logits", logits)]))
        return answers
"""
MISSING = re.compile("unable to find backend library|no GPUs are available")
PORT = 18431
START_SECONDS = 60.0  # without its libraries it waits for a stub of the Python backend that does not start


def plan_of(bundle: Bundle, path: Path) -> Path:
    """A plan by its sidecar only."""
    data = b"no plan"
    info = PlanInfo(
        flavor="tensorrt",
        version="10.16.1.11",
        architectures=("sm89",),
        profiles=profiles_for((1, 8, 32)),
        precision="fp16",
        options=PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False),
        onnx_sha256=sha256_file(bundle.model_path),
        sha256=sha256_bytes(data),
        size=len(data),
        build_seconds=0.0,
        layers=0,
        created=timestamp(),
    )
    write_plan(path, data, info)
    return path


def put_stand_in(model: Path, graph: Path, site: Path) -> None:
    config = model / "config.pbtxt"
    text = re.sub(r'(?m)^backend: ".*"$', 'backend: "python"', config.read_text())
    config.write_text(re.sub(r"(?m)^default_model_filename: .*$", 'default_model_filename: "model.py"', text))
    (model / "1" / "model.py").write_text(STAND_IN.replace("SITE", str(site)))
    (model / "1" / "model.onnx").write_bytes(graph.read_bytes())


class Server:
    """One run of tritonserver."""

    def __init__(self, server: Path, repository: Path, backends: Path) -> None:
        command = [str(server), f"--model-repository={repository}", f"--backend-directory={backends}"]
        command += [f"--http-port={PORT}", f"--grpc-port={PORT + 1}", "--allow-metrics=false", "--exit-timeout-secs=2"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait(self) -> bool:
        """Whether it becomes ready; False when it has ended, or is not within START_SECONDS."""
        end = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            try:
                request("/v2/health/ready")
            except (OSError, SystemExit):  # not yet listening, or not ready
                time.sleep(0.05)
            else:
                return True
        return False

    def end(self) -> None:
        with self.process:  # whose output is closed then
            self.process.terminate()
            self.process.wait(30)
            self.reader.join(10)


def backends_of(server: Path, folder: Path) -> Path:
    """A folder of backends with the Python backend's process for this Python, which the package keeps elsewhere."""
    backends = folder / "backends"
    shutil.copytree(server.parents[1] / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server.parents[1] / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy2(stub, backends / "python")
    return backends


def reading(server: Path, repository: Path, backends: Path, bundle: Bundle) -> dict[str, Any]:
    run = Server(server, repository, backends)
    try:
        served = run.wait()
        answers = asked(bundle) if served else {}
    finally:
        run.end()
    refused = [line.split('"')[1] for line in run.lines if re.match(r"E\d", line) and "failed to load" in line]
    return {"loaded": served, "refused": refused[:1], **answers}


def asked(bundle: Bundle) -> dict[str, Any]:
    """What the server says of the model and of one batch of images."""
    name, size = bundle.manifest.name, [int(side) for side in bundle.manifest.input.shape[1:]]
    config = request(f"/v2/models/{name}/config")
    images: UInt8Array = np.random.default_rng(0).integers(0, 256, (3, *size)).astype(np.uint8)
    sent = {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": images.ravel().tolist()}
    body = {"inputs": [sent]}
    (logits,) = request(f"/v2/models/{name}/infer", body)["outputs"]
    expected = logits_of(onnx.load(str(bundle.model_path)), images)
    error = float(np.abs(np.reshape(logits["data"], expected.shape) - expected).max())
    wanted = {"outputs": [{"name": "logits", "parameters": {"classification": 1}}]}
    (classes,) = request(f"/v2/models/{name}/infer", {**body, **wanted})["outputs"]
    labels = [text.split(":")[2] for text in classes["data"]]
    return {
        "config": config,
        "largest_error": error,
        "labels": labels,
        "labels_hold": labels == [bundle.manifest.labels[index] for index in expected.argmax(axis=1)],
    }


def holds(found: dict[str, Any], *, may_be_refused: bool) -> bool:
    served = found["loaded"] and found["labels_hold"] and found["largest_error"] < 1e-4
    return served or (may_be_refused and any(MISSING.search(text) for text in found["refused"]))


def request(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=60) as reply:
            return json.loads(reply.read() or "null")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error}: {error.read().decode()}") from None


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    arguments: argparse.Namespace = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        backends = backends_of(arguments.server, Path(name))
        for kind in ("graph", "plan"):
            for stand_in in (False, True):
                repository = Path(name) / f"{kind}-{stand_in}"
                plan = plan_of(bundle, Path(name) / "model.plan") if kind == "plan" else None
                model = triton_repository(bundle.path, repository, plan=plan, allow_uncertified=True)
                if stand_in:
                    put_stand_in(model, bundle.model_path, arguments.server.parents[3])
                start = time.perf_counter()
                found = reading(arguments.server, repository, backends, bundle)
                found["seconds"] = round(time.perf_counter() - start, 1)
                found["holds"] = holds(found, may_be_refused=(kind, stand_in) != ("graph", True))
                report[f"{kind}{', stand-in' if stand_in else ''}"] = found
                print(f"{kind}, stand-in {stand_in}: {verdict(found)}, {json.dumps(found)[:300]}", flush=True)
    command = "python benchmarks/export/triton_reads.py BUNDLE --server tritonserver"  # whose paths say nothing
    save_report({**report_header(), "repositories": report}, arguments.json, command)
    return 0 if all(found["holds"] for found in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
