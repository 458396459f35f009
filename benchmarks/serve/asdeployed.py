"""A checkpoint as deployed: `vitx export --for cpu` and `vitx serve`, over Triton with the exporter's graph. Linux.

    python benchmarks/serve/asdeployed.py --triton VENV
        [--networks vit_32px,deit_ti] [--rounds 5] [--seconds 4] [--connections 32] [--folder DIR] [--json FILE]

Each network is trained first: a 32-px ViT of 6 blocks × 96 and DeiT-Ti at 224 px, on scikit-learn's digits, for a few
epochs; the classes need not be good, but the weights are not random, so that a certificate means something. Then
- ours: `vitx export RUN --for cpu`, which certifies each executable, and `vitx serve` with `--runtime auto`;
- Triton 2.51: what `torch.onnx.export` makes of the same checkpoint, behind the same uint8 input, in ONNX Runtime, in
  its Python backend.
Both have two one-thread instances, batches of up to 32 within 2 ms, and the same client: by default 32 connections,
one image a request, binary tensors. They take turns; while one is measured the other is stopped. A ratio is the median
of the rounds'. Both answers are compared with the checkpoint's on the evaluation images.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.as_exported import export_as_it_comes
from support.http_load import Connection
from support.server_peers import Server, package_versions, served, triton_server
from support.server_turns import spread, turn
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, some_of, vitx
from support.turns import turn_order
from vitx.core.bundle import Bundle
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.models import load_run_model

# Settings of the recipe digits-deit, the epochs that suffice, and the ratio that was promised.
NETWORKS: dict[str, tuple[dict[str, str], float]] = {
    "vit_32px": ({"epochs": "10"}, 2.0),
    "deit_ti": (
        {
            "model.name": "deit_tiny_12",
            "preprocessing.image_size": "224",
            "epochs": "3",
            "losses.contrastive": "0",
            "losses.mixing": "0",
            "optimizer.lr": "5e-4",
        },
        2.5,
    ),
}


class AsTraced(nn.Module):
    """The network behind the server's input: uint8 (N, S, S, 3), scaled and normalised as it was trained."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images.float() / 255 - self.mean) / self.std
        logits: Tensor = self.network(pixels.permute(0, 3, 1, 2))
        return logits


def train(name: str, run: Path) -> RunFolder:
    """`vitx train digits-deit` with the network's settings; a run that is there is taken."""
    if not RunFolder(run).exists():
        settings = [part for key, value in NETWORKS[name][0].items() for part in ("--set", f"{key}={value}")]
        vitx("train", "digits-deit", "--out", str(run), "--quiet", *settings)
    return RunFolder.open(run)


def export_other(run: RunFolder, path: Path) -> None:
    """`torch.onnx.export` of the checkpoint, uint8 (N, S, S, 3) → logits."""
    model, _ = load_run_model(run, "best")
    preprocessing = run.info.preprocessing
    module = AsTraced(model.eval(), preprocessing.mean, preprocessing.std).eval()
    size = preprocessing.image_size
    export_as_it_comes(module, torch.zeros(2, size, size, 3, dtype=torch.uint8), path)


@contextmanager
def both_servers(run: RunFolder, folder: Path, venv: Path) -> Iterator[list[Server]]:
    """Ours and Triton, each with what its user would have made of the run."""
    ours = folder / "ours.vitx"
    vitx("export", str(run.path), "--for", "cpu", "--out", str(ours), "--quiet")
    bundle = Bundle.open(ours)
    theirs = Bundle(folder / "theirs", bundle.manifest)
    theirs.path.mkdir()
    export_other(run, theirs.model_path)
    options = ("--instances", "2", "--threads", "1", "--max-batch", "32", "--max-delay-ms", "2")
    with (
        served("vitx", bundle, *options, allow_uncertified=False) as first,
        triton_server(theirs, venv, folder / "triton") as second,
    ):
        yield [first, second]


def largest_error(server: Server, images: UInt8Array, expected: Any) -> tuple[float, int]:
    """The largest difference of a logit from the checkpoint's, and how many classes differ."""
    connection = Connection(server.address)
    found = []
    for image in images:
        status, answer = connection.ask(server.request(image))
        if status != 200:
            raise RuntimeError(f"{server.name} answered {status}: {answer[-300:]!r}")
        found.append(np.ravel(server.logits(answer)))
    connection.close()
    logits = np.stack(found)
    return float(np.abs(logits - expected).max()), int((logits.argmax(1) != expected.argmax(1)).sum())


def described(server: Server, model: str) -> dict[str, Any]:
    """What our server says of the executable that it chose."""
    host, port = server.address
    with urllib.request.urlopen(f"http://{host}:{port}/v2/models/{model}") as answer:
        own = json.load(answer)["vitx"]
    verdict = own["executable"]
    kept = ("verdict", "images", "flips", "flip_rate_bound", "max_logit_error", "max_logit_error_allowed")
    return {"runtime": own["runtime"], "runtimes": own["runtimes"], **{key: verdict[key] for key in kept}}


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = train(name, (arguments.folder or folder) / name)
    preprocessing = run.info.preprocessing
    images = np.concatenate(list(open_images(run.info.data, "val").batches(preprocessing, 64)))
    model, _ = load_run_model(run, "best")
    module = AsTraced(model.eval(), preprocessing.mean, preprocessing.std)
    with torch.inference_mode():
        expected = np.concatenate([module(torch.from_numpy(image[None])).numpy() for image in images])
    report: dict[str, Any] = {"connections": arguments.connections, "seconds_a_turn": arguments.seconds}
    rows: dict[str, list[dict[str, Any]]] = {"vitx": [], "triton": []}
    with both_servers(run, folder, arguments.triton) as servers:
        report["ours"] = described(servers[0], "ours")
        for server in servers:
            error, flips = largest_error(server, images, expected)
            report[f"{server.name}: largest logit error"] = error
            report[f"{server.name}: other classes of {len(images)}"] = flips
            server.pause()
        requests = {
            server.name: [server.request(image) for image in images[: arguments.connections]] for server in servers
        }
        for number in range(arguments.rounds):
            for server in turn_order(servers, number):
                rows[server.name].append(turn(server, requests[server.name], arguments.seconds, arguments.connections))
            print(
                f"{name}, round {number + 1}: { ({key: row[-1]['requests_per_second'] for key, row in rows.items()}) }"
            )
    rates = [[row["requests_per_second"] for row in rows[server]] for server in ("vitx", "triton")]
    ratio = spread(rates[0], rates[1])
    report |= {"rounds": rows, "ours_over_triton": ratio, "target": NETWORKS[name][1]}
    report["holds"] = ratio["ratio"] >= NETWORKS[name][1]
    print(f"{name}: ours over Triton with the exporter's graph: {ratio}")
    return report


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--triton", type=Path, default=Path(".venv-triton"), help="a venv with nvidia-pytriton")
    parser.add_argument("--networks", type=some_of(NETWORKS), default=[*NETWORKS])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of one turn")
    parser.add_argument("--connections", type=int, default=32, help="each with one image a request")
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: trained for each run")
    arguments = parser.parse_args()
    report = report_header()
    report["triton"] = package_versions(arguments.triton, "nvidia-pytriton", "onnxruntime", "numpy")
    print(json.dumps(report["machine"]))
    for name in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            report[name] = measure(name, arguments, Path(folder))
    options = f"--networks {','.join(arguments.networks)} --rounds {arguments.rounds} --seconds {arguments.seconds:g}"
    options += f" --connections {arguments.connections}"
    save_report(report, arguments.json, f"python benchmarks/serve/asdeployed.py --triton VENV {options}")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
