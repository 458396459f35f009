"""Triton's C++ client examples, unmodified, against `vitx serve`: which end well, and which are made for another model.

    python benchmarks/serve/triton_examples.py --examples FOLDER [--json FILE]

FOLDER has the programs of src/c++/examples in github.com/triton-inference-server/client, built with both clients (its
CMakeLists.txt with TRITON_ENABLE_CC_HTTP, TRITON_ENABLE_CC_GRPC, TRITON_ENABLE_EXAMPLES, or a compiler call for each
file; libcurl, gRPC, protobuf, RapidJSON and OpenCV). The server has shared memory, management, and Triton's name in its
metadata, which two of the examples ask for. Models are ViTs of random weights at 32 px, one of them called "simple".

image_client holds if it exits with 0 and prints for each image the classes and logits that ONNX Runtime has for the
pixels which it says it sends (-p). An example for a model of two int32 tensors holds if it comes to its inference and
ends there with this server's words: what comes before, such as to register shared memory, has gone well.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.onnx_session import cpu_session
from support.server_peers import TINY, bundle_of, free_port, served
from support.targets import all_hold, command_line, report_header, save_report, verdict
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.files import write_json
from vitx.core.preprocess import UInt8Array

TOKEN = "0123456789abcdef0123456789abcdef"
TOP, IMAGES, TOLERANCE = 3, 4, 1e-4
CLASS = re.compile(r"^    (-?[\d.]+) \((\d+)\) = (\d+)$")
SCALES = ("NONE", "INCEPTION", "VGG")
WAYS = ((), ("-a",), ("-b", "3"), ("-a", "-b", "2"), ("-x", "1"), ("-s", "INCEPTION"), ("-s", "VGG"))
STREAMED = (("-a", "--streaming"), ("-a", "--streaming", "-b", "2"))
# How many models the two examples expect to find in the repository.
CONTROLLED = {"http": ("simple_http_model_control", 7), "grpc": ("simple_grpc_model_control", 8)}
HEALTH = {"http": "simple_http_health_metadata", "grpc": "simple_grpc_health_metadata"}
# Made for the model "simple", which adds and subtracts two tensors INPUT0 and INPUT1 of 16 int32.
ADDING = {
    "http": ("infer_client", "async_infer_client", "shm_client"),
    "grpc": ("infer_client", "async_infer_client", "shm_client", "keepalive_client", "custom_args_client"),
}
# Not run: example -> the model or library that it is made for.
OTHER_MODELS = {
    "ensemble_image_client": "an ensemble of preprocessing and inception; /v1/classify takes image files",
    "simple_http_string_infer_client": "simple_string, which adds numbers in texts",
    "simple_grpc_string_infer_client": "simple_string, which adds numbers in texts",
    "simple_http_sequence_sync_infer_client": "simple_sequence, a model with a state",
    "simple_grpc_sequence_sync_infer_client": "simple_sequence, a model with a state",
    "simple_grpc_sequence_stream_infer_client": "simple_sequence, a model with a state",
    "simple_grpc_custom_repeat": "repeat_int32, which gives many answers to a request",
    "simple_http_cudashm_client": "CUDA shared memory, which is not offered",
    "simple_grpc_cudashm_client": "CUDA shared memory, which is not offered",
}
REFUSED = "expected 1 input but got 2 inputs for model 'simple'"
LEFT_BEHIND = ("input_simple", "output_simple")  # in /dev/shm, by an example that ends early


@dataclass(frozen=True)
class Examples:
    """The programs, and where the server listens."""

    folder: Path
    urls: dict[str, str]

    def run(self, name: str, protocol: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(self.folder / name), "-u", self.urls[protocol], *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def outcome(done: "subprocess.CompletedProcess[str]", holds: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"exit_code": done.returncode, "holds": holds}
    return found if holds else {**found, "said": (done.stdout + done.stderr).strip()[-300:]}


def printed_classes(text: str) -> list[list[tuple[int, float]]]:
    """(class, logit) of each image, best first; a class's label is its number."""
    images: list[list[tuple[int, float]]] = []
    for line in text.splitlines():
        if line.startswith("Image "):
            images.append([])
        elif found := CLASS.match(line):
            if found[2] != found[3]:
                raise ValueError(f"the label of class {found[2]} is printed as {found[3]}")
            images[-1].append((int(found[2]), float(found[1])))
    return images


def best(logits: Any) -> list[tuple[int, float]]:
    order = np.argsort(-logits, kind="stable")[:TOP]
    return [(int(index), float(logits[index])) for index in order]


def agree(found: list[list[tuple[int, float]]], expected: list[list[tuple[int, float]]]) -> bool:
    """In any order of images: asynchronous answers are printed as they come, under the names as they were sent."""
    found, expected = sorted(found), sorted(expected)
    return len(found) == len(expected) and all(
        [index for index, _ in one] == [index for index, _ in other]
        and np.allclose([value for _, value in one], [value for _, value in other], atol=TOLERANCE)
        for one, other in zip(found, expected, strict=True)
    )


def image_client(examples: Examples, bundle: Bundle, folder: Path) -> dict[str, Any]:
    """Every way of it over a folder of PNG files, against the logits of the pixels that it sends."""
    chance, size = np.random.default_rng(0), bundle.manifest.preprocessing.image_size
    (folder / "images").mkdir()
    for number in range(IMAGES):
        pixels = chance.integers(0, 256, (size + 8 * number, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    session, model = cpu_session(bundle.model_path), bundle.manifest.name
    expected = {
        scale: [best(logits) for logits in sent_logits(examples, session, bundle, folder, scale)] for scale in SCALES
    }
    report = {}
    for protocol in examples.urls:
        for way in (*WAYS, *(STREAMED if protocol == "grpc" else ())):
            arguments = ("-m", model, "-i", protocol, "-c", str(TOP), *way, str(folder / "images"))
            done = examples.run("image_client", protocol, *arguments)
            scale, batch = way[1] if "-s" in way else "NONE", int(way[-1]) if "-b" in way else 1
            wanted = [expected[scale][place % IMAGES] for place in range(-(-IMAGES // batch) * batch)]
            holds = done.returncode == 0 and agree(printed_classes(done.stdout), wanted)
            report[" ".join(("image_client", "-i", protocol, *way))] = outcome(done, holds)
    return report


def sent_logits(examples: Examples, session: Any, bundle: Bundle, folder: Path, scale: str) -> Sequence[Any]:
    """What ONNX Runtime has for each image as image_client prepares it."""
    images: list[UInt8Array] = []
    for path in sorted((folder / "images").iterdir()):
        arguments = ("-m", bundle.manifest.name, "-s", scale, "-p", str(folder / "sent"), str(path))
        examples.run("image_client", "http", *arguments).check_returncode()
        size = bundle.manifest.preprocessing.image_size
        images.append(np.fromfile(folder / "sent", np.uint8).reshape(size, size, 3))
    logits: Sequence[Any] = session.run(None, {"images": np.stack(images)})[0]
    return logits


def adding(examples: Examples) -> dict[str, Any]:
    report = {}
    for protocol, names in ADDING.items():
        for name in (*(f"simple_{protocol}_{name}" for name in names), f"reuse_infer_objects_client -i {protocol}"):
            program, *arguments = name.split()
            done = examples.run(program, protocol, *arguments)
            report[name] = outcome(done, done.returncode == 1 and REFUSED in done.stderr) | {"made_for": "simple"}
            report[name]["said"] = done.stderr.strip().splitlines()[-1][-200:]
    return report


def models(folder: Path) -> list[Bundle]:
    """A bundle called "simple" and seven copies of it under other names."""
    simple = bundle_of(replace(TINY, name="simple"), folder)
    bundles = [simple]
    for number in range(1, 8):
        path = folder / f"simple-{number}.vitx"
        shutil.copytree(simple.path, path)
        write_json(path / MANIFEST, simple.manifest.model_copy(update={"name": path.stem}))
        bundles.append(Bundle.open(path))
    return bundles


@contextmanager
def server(bundles: Sequence[Bundle], folder: Path) -> Iterator[dict[str, str]]:
    """A server of these models; where it listens, by protocol."""
    grpc = free_port()
    options = [*(str(bundle.path) for bundle in bundles[1:]), "--grpc-port", str(grpc), "--server-id", "triton"]
    options += ["--shared-memory", "--management", "--management-token-file", str(folder / "token")]
    with served("vitx", bundles[0], *options) as running:
        yield {"http": f"localhost:{running.address[1]}", "grpc": f"localhost:{grpc}"}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--examples", required=True, type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = report_header()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        bundles = models(folder)
        for protocol, (control, count) in CONTROLLED.items():
            with server(bundles[:count], folder) as urls:
                examples = Examples(arguments.examples, urls)
                if protocol == "http":
                    report |= image_client(examples, bundles[0], folder) | adding(examples)
                    for memory in LEFT_BEHIND:
                        (Path("/dev/shm") / memory).unlink(missing_ok=True)
                done = examples.run(HEALTH[protocol], protocol)
                report[HEALTH[protocol]] = outcome(done, done.returncode == 0)
                done = examples.run(control, protocol, "-H", f"authorization:Bearer {TOKEN}")
                report[control] = outcome(done, done.returncode == 0 and not done.stderr)
    for title, found in report.items():
        if "exit_code" in found:
            print(f"{title}: {verdict(found)} {found.get('said', '')}")
    report["not_run"] = OTHER_MODELS
    save_report(report, arguments.json, "python benchmarks/serve/triton_examples.py --examples FOLDER")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
