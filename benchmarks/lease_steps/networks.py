"""The steps of `lease.py networks`: images/s of whole networks in float16, with their share of the card's peak."""

import copy
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lease_steps.step_report import Report, of_peak, run_step
from support.gpu_networks import (
    Float32Logits,
    build,
    cuda_graph_run,
    parity,
    parity_images,
    reference_logits,
)
from support.gpu_timing import device_times, first_line, product_rate
from support.triton_interpreter import patch_interpreter
from vitx.export.rewrite.rewrites import ImageClassifier
from vitx.models.attention import ReAttention
from vitx.models.flops import count_flops

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from reference import randomize_like_trained

MIXED, PLAIN = ("flash", "maps"), ("sdpa",)
# Each network's ways of attention, and its batch sizes.
NETWORKS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "deit_base_12": (PLAIN, (64, 256, 512)),
    "deepvit_16b": (MIXED, (64, 256)),
    "plainvit_16b": (PLAIN, (64, 256)),
    "deepvit_s": (MIXED, (64, 256)),
    "plainvit_s": (PLAIN, (64, 256)),
}
PARITY_IMAGES, SECONDS = 256, 1.0


class Subject:
    """A network with weights and statistics as if trained, in float32, and the images it is judged by."""

    def __init__(self, name: str, *, small: bool) -> None:
        model, self.preprocessing = build(name, None, small=small)
        self.model: nn.Module = randomize_like_trained(model)
        side = self.preprocessing.image_size
        self.flops = count_flops(self.model, torch.zeros(1, 3, side, side))

    def classifier(self, attention: str, device: str) -> nn.Module:
        """uint8 (N, S, S, 3) → float32 logits, in float16, normalisation inside."""
        model = copy.deepcopy(self.model)
        for layer in model.modules():
            if isinstance(layer, ReAttention):
                layer.fused_attn = attention == "flash"
        classifier = ImageClassifier(model, self.preprocessing)
        return Float32Logits(classifier).eval().to(device, torch.float16)

    def images(self, count: int, device: str) -> Tensor:
        return torch.from_numpy(parity_images("digits", count, self.preprocessing)).to(device)


def compiled(classifier: nn.Module) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(classifier, dynamic=False)  # type: ignore[return-value]


def batches(name: str, report: Report) -> tuple[int, ...]:
    return (2,) if report.rehearsed else NETWORKS[name][1]


def compile_networks(report: Report) -> None:
    """Compile every network for every batch size, in parallel: later steps find it in the compiler's cache."""
    jobs = [
        (name, way, batch) for name, (ways, _) in NETWORKS.items() for way in ways for batch in batches(name, report)
    ]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    workers = max(1, min(len(jobs), (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=patch_interpreter) as pool:
        call = partial(compile_one, report.device, report.rehearsed)
        problems = list(pool.map(call, jobs[:2] if report.rehearsed else jobs))
    refused = {str(job): problem for job, problem in zip(jobs, problems, strict=False) if problem}
    report.row("jobs", {"count": len(problems), "refused": refused}, f"{len(problems)} compiled, refused: {refused}")


@torch.no_grad()
def compile_one(device: str, small: bool, job: tuple[str, str, int]) -> str:
    name, way, batch = job
    try:
        subject = Subject(name, small=small)
        size = subject.preprocessing.image_size
        compiled(subject.classifier(way, device))(torch.zeros(batch, size, size, 3, dtype=torch.uint8, device=device))
    except Exception as error:  # noqa: BLE001  # the compiler's errors share no base class
        return first_line(error)
    return ""


@torch.no_grad()
def network(name: str, report: Report) -> None:
    """Every way of attention, eager and compiled, in a CUDA graph, at each batch size; parity in every row."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    subject = Subject(name, small=report.rehearsed)
    device = report.device
    images = subject.images(4 if report.rehearsed else PARITY_IMAGES, device)
    reference = reference_logits(subject.model, subject.preprocessing, images, device)
    for way in NETWORKS[name][0]:
        for runtime in ("eager", "compiled"):
            for batch in batches(name, report):
                title = f"{name} {way} {runtime} {batch}"
                try:
                    row = measured(subject, way, runtime, images[torch.arange(batch) % len(images)], images, reference)
                except Exception as error:  # noqa: BLE001  # one row; the compiler's errors share no base class
                    told = first_line(error)
                    report.row(title, {"refused": told}, f"{title}: refused: {told}")
                    continue
                report.row(title, row, described(title, row))
    if name.startswith("plainvit"):
        against_plain(name, report)


def measured(
    subject: Subject, way: str, runtime: str, example: Tensor, images: Tensor, reference: Tensor
) -> dict[str, Any]:
    device, batch = example.device.type, len(example)
    classifier = subject.classifier(way, device)
    module = compiled(classifier) if runtime == "compiled" else classifier
    run = module if device == "cpu" else cuda_graph_run(module, example)
    judged = parity(run, images, batch, reference, "fp16")
    seconds = 0.02 if device == "cpu" else SECONDS
    rates = [product_rate("fp16", device, seconds / 3)]
    times = device_times(lambda: run(example), seconds, device)
    rates.append(product_rate("fp16", device, seconds / 3))
    median = statistics.median(times)
    return {
        "ms": 1e3 * median,
        "quartiles_ms": [1e3 * float(np.quantile(times, share)) for share in (0.25, 0.75)],
        "calls": len(times),
        "images_per_second": batch / median,
        "flops_per_image": subject.flops,
        "product_flops_per_second": rates,
        **of_peak(batch * subject.flops / median, statistics.mean(rates)),
        "parity": judged,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
    }


def described(title: str, row: dict[str, Any]) -> str:
    found = row["parity"]
    return (
        f"{title:<34} {row['ms']:8.3f} ms {row['images_per_second']:8.0f} images/s "
        f"{row['flops_per_second'] / 1e12:6.1f} TFLOP/s, {100 * row['of_datasheet']:4.1f} % of datasheet, "
        f"{100 * row['of_product']:4.1f} % of product, {found['flips']} flips, {found['max_error_over_std']:.1e} std"
    )


def against_plain(name: str, report: Report) -> None:
    """Flash Re-Attention over the maps written out, and over the plain network of its size, at each batch size."""
    mixed = name.replace("plainvit", "deepvit")
    rates: dict[tuple[str, int], float] = {}
    for title, row in {**report.rows_of(mixed), **report.rows_of(name)}.items():
        if row and "images_per_second" in row:
            _, way, _, batch = title.split()
            rates[way, int(batch)] = max(rates.get((way, int(batch)), 0.0), row["images_per_second"])
    for size in batches(name, report):
        if all((way, size) in rates for way in (*MIXED, *PLAIN)):
            flash, maps, sdpa = (rates[way, size] for way in (*MIXED, *PLAIN))
            row = {"over_maps": flash / maps, "over_plain": flash / sdpa}
            told = f"{mixed} {size}: flash × {flash / maps:.2f} of maps written out, × {flash / sdpa:.2f} of {name}"
            report.row(f"verdict {size}", row, f"{told} (best runtime of each)")


STEPS: dict[str, Callable[[Report], None]] = {
    "compile": compile_networks,
    **{name: partial(network, name) for name in NETWORKS},
}

if __name__ == "__main__":
    run_step(STEPS)
