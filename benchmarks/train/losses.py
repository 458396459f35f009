"""What the losses, the loop and the images cost, against the same without them, in one run on this machine.

    python benchmarks/train/losses.py [--parts a,b,c,d] [--device cpu] [--threads 1] [--pairs 12] [--json FILE]

(a) A step (forward, backward, AdamW) of deit_small_12 at 224 px, batch 16, 1,000 classes, CutMix applied: with the
    cosine, contrastive and mixing losses, against cross-entropy alone.
(b) patch_cosine_loss of (64, 196, 768) tokens, forward and backward, against the mean of the pairwise matrix: seconds,
    and the largest memory held beyond the tokens and their gradient, which any form needs.
(c) An epoch of `vitx train`'s loop (schedule, averaged weights, log, progress, signals) against a bare loop with the
    same network, losses, optimizer and images: digits-deit, whose steps are short, so that overheads show.
(d) Training images a second of one core, from JPEGs of 500×375 in folders to normalised tensors at 224 px, batch 64,
    two workers, against timm's `create_loader` with its prefetcher: DeiT's augmentation, and crops and flips alone.

The two of a pair take turns, and the order within a pair alternates; the ratio is the median of the pairs' ratios.
Times are seconds of the processor, workers included, which other work on the machine moves less than those of the
wall; the wall's stand beside them in FILE. Exit code 1 when a target is missed. With --json the parts that were run
replace those in FILE.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import timm
import timm.data
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitx.models

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.images import write_photographs
from support.process_tree import TRIMMED, own_peak_bytes, processor_seconds
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, some_of, verdict
from support.turns import take_turns
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.models import image_tensor
from vitx.models.device import choose_device
from vitx.train import apply_overrides, get_recipe
from vitx.train.loop.distributed.processes import Processes
from vitx.train.loop.inputs.augment import fix_posterize
from vitx.train.loop.inputs.training_data import CUTMIX, TrainingData, seed_of
from vitx.train.loop.interruption import StopRequest
from vitx.train.loop.step import EpochLog
from vitx.train.loop.trainer import Trainer
from vitx.train.losses.cutmix import Box, cutmix
from vitx.train.losses.objective import compute_losses, mix_batch
from vitx.train.losses.patch_losses import patch_cosine_loss
from vitx.train.recipes.recipe import Recipe

LOSSES_TARGET, LOOP_TARGET, IMAGES_TARGET = 1.04, 1.03, 1.0
COSINE_TARGET, MEMORY_TARGET = 3.0, 5.0
TOKENS = (64, 196, 768)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Timer:
    """Wall and processor seconds of a call, workers included; on a GPU wall seconds until it is idle, twice."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Callable[[], object]) -> tuple[float, float]:
        start, processor = self.now()
        call()
        stop, processor_at_stop = self.now()
        return stop - start, processor_at_stop - processor

    def now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter(), time.perf_counter()
        workers = sum(processor_seconds(child.pid) for child in multiprocessing.active_children() if child.pid)
        return time.perf_counter(), time.process_time() + workers


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int, timer: Timer, *, warm_up: int = 1
) -> dict[str, Any]:
    """Times of both, and the median and quartiles of theirs over ours; `ratio` is of processor seconds."""
    calls = {"ours": lambda: timer(ours), "theirs": lambda: timer(theirs)}
    times = take_turns(calls, pairs, warm_up=warm_up)
    result: dict[str, Any] = {"pairs": pairs}
    for index, clock in enumerate(("wall", "processor")):
        ratios = [theirs[index] / ours[index] for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
        suffix = "" if clock == "processor" else "_wall"
        for name, values in times.items():
            result[f"{name}_ms{suffix}"] = 1000 * statistics.median(value[index] for value in values)
        result[f"ratio{suffix}"] = statistics.median(ratios)
        result[f"ratio{suffix}_quartiles"] = statistics.quantiles(ratios, n=4)
    return result


def three_losses(arguments: argparse.Namespace) -> dict[str, Any]:
    """(a) A step with the three losses against one without."""
    device, timer = torch.device(arguments.device), Timer(torch.device(arguments.device))
    torch.manual_seed(0)
    model: Any = timm.create_model("deit_small_12", patch_head=True).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(16, 3, 224, 224, device=device)
    batch = cutmix(images, torch.randint(1000, (16,), device=device), Box(3, 10, 2, 9), 16)
    with_losses = apply_overrides(get_recipe("patchvit-s-12"), ["losses.cosine=0.3"])
    alone = apply_overrides(
        with_losses, ["losses.cosine=0", "losses.contrastive=0", "losses.mixing=0", "cutmix.probability=0"]
    )

    def step(recipe: Recipe) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total = compute_losses(model, batch, recipe, 1000)["total"]
        torch.autograd.backward(total)
        optimizer.step()

    found = paired(lambda: step(with_losses), lambda: step(alone), arguments.pairs, timer)
    added = 1 / found["ratio"]
    result = {**found, "added": added - 1, "target": LOSSES_TARGET - 1, "holds": added <= LOSSES_TARGET}
    print(
        f"(a) a step with all three losses {found['ours_ms']:.0f} ms, without {found['theirs_ms']:.0f} ms: "
        f"{100 * (added - 1):+.1f} %; target at most 4 %: {verdict(result)}",
        flush=True,
    )
    return result


def pairwise_cosine(tokens_BnD: Tensor) -> Tensor:
    """The mean cosine as its formula reads, from the matrix of all pairs."""
    unit_BnD = F.normalize(tokens_BnD, dim=-1)
    n = tokens_BnD.shape[1]
    matrix_Bnn = unit_BnD @ unit_BnD.transpose(1, 2)
    return ((matrix_Bnn.sum(dim=(1, 2)) - n) / (n * (n - 1))).mean()


def cosine(arguments: argparse.Namespace) -> dict[str, Any]:
    """(b) The cosine loss in closed form against the matrix of all pairs: time and memory."""
    device = torch.device(arguments.device)
    tokens = torch.randn(TOKENS, device=device, requires_grad=True)

    def run(loss: Callable[[Tensor], Tensor]) -> None:
        tokens.grad = None
        torch.autograd.backward(loss(tokens))

    times = paired(
        lambda: run(patch_cosine_loss), lambda: run(pairwise_cosine), arguments.pairs, Timer(device), warm_up=2
    )
    memory = {"ours_mib": extra_mib(arguments, "ours"), "theirs_mib": extra_mib(arguments, "theirs")}
    memory_ratio = memory["theirs_mib"] / max(memory["ours_mib"], 0.1)
    seconds = {**times, "target": COSINE_TARGET, "holds": times["ratio"] >= COSINE_TARGET}
    extra = {**memory, "ratio": memory_ratio, "target": MEMORY_TARGET, "holds": memory_ratio >= MEMORY_TARGET}
    print(
        f"(b) cosine in closed form {times['ours_ms']:.1f} ms, by pairs {times['theirs_ms']:.1f} ms, × "
        f"{times['ratio']:.1f}; target 3: {verdict(seconds)}\n"
        f"(b) memory beyond tokens and gradient {memory['ours_mib']:.1f} MiB against {memory['theirs_mib']:.1f} MiB; "
        f"target 5 times less: {verdict(extra)}",
        flush=True,
    )
    return {"seconds": seconds, "memory": extra}


def extra_mib(arguments: argparse.Namespace, whose: str) -> float:
    """Peak of a fresh process during one forward and backward pass, less tokens, gradient and what was there before."""
    command = [sys.executable, __file__, "--memory-of", whose, "--device", arguments.device]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **TRIMMED})
    return float(finished.stdout)


def print_extra_memory(arguments: argparse.Namespace) -> None:
    loss = patch_cosine_loss if arguments.memory_of == "ours" else pairwise_cosine
    device = torch.device(arguments.device)
    small = torch.randn(2, *TOKENS[1:], device=device, requires_grad=True)
    torch.autograd.backward(loss(small))  # libraries are loaded, threads have started
    tokens = torch.randn(TOKENS, device=device, requires_grad=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = float(torch.cuda.memory_allocated(device))
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = float(psutil.Process().memory_info().rss)
    torch.autograd.backward(loss(tokens))
    peak = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else own_peak_bytes()
    print((peak - before - tokens.numel() * tokens.element_size()) / 2**20)


def take_epoch(trainer: Trainer, epoch: int) -> None:
    """The steps of an epoch as `vitx train` takes them, all of them: what an evaluation would end is begun anew."""
    trainer._optimize(epoch, StopRequest())
    trainer.batches_done, trainer.log = 0, EpochLog(trainer.data.steps, trainer.device)


def loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """(c) An epoch of `vitx train` against a bare loop."""
    device = torch.device(arguments.device)
    recipe = apply_overrides(get_recipe("digits-deit"), ["epochs=1000", "workers=0"])
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            Trainer(recipe, RunFolder(Path(folder) / name), device, Processes(), skip_bad=False, quiet=False)
            for name in ("ours", "bare")
        ]
    ours, bare = trainers
    epochs = {"ours": 0, "bare": 0}
    for trainer in trainers:
        trainer.model.train()

    def our_epoch() -> None:
        epochs["ours"] += 1
        take_epoch(ours, epochs["ours"])

    def bare_epoch() -> None:
        epochs["bare"] += 1
        for batch in bare.data.batches(epochs["bare"]):
            images = image_tensor(batch.images, recipe.preprocessing.mean, recipe.preprocessing.std).to(device)
            rng = random.Random(seed_of(recipe.seed, CUTMIX, epochs["bare"], batch.number))
            labels = torch.from_numpy(batch.labels).to(device)
            mixed = mix_batch(images, labels, recipe, bare.stepper.grid, rng, classes=10)
            bare.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                losses = compute_losses(bare.model, mixed, recipe, 10)
            torch.autograd.backward(losses["total"])
            nn.utils.clip_grad_norm_(bare.model.parameters(), recipe.optimizer.clip)
            bare.optimizer.step()

    found = paired(our_epoch, bare_epoch, arguments.pairs, Timer(device))
    overhead = 1 / found["ratio"]
    result = {**found, "overhead": overhead - 1, "target": LOOP_TARGET - 1, "holds": overhead <= LOOP_TARGET}
    print(
        f"(c) an epoch of {ours.data.steps} steps {found['ours_ms']:.0f} ms, a bare loop {found['theirs_ms']:.0f} ms: "
        f"{100 * (overhead - 1):+.1f} %; target at most 3 %: {verdict(result)}",
        flush=True,
    )
    return result


def images_per_second(arguments: argparse.Namespace) -> dict[str, Any]:
    """(d) Training images a second against timm's loader."""
    deit = get_recipe("deit-s").augmentation.model_copy(update={"repeats": 1})
    crops = deit.model_copy(update={"auto_augment": "", "erasing": 0.0})
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), 64 * arguments.batches, different=64 * arguments.batches, evaluation=8)
        size = statistics.mean(path.stat().st_size for path in Path(folder).glob("train/*/*.jpg"))
        for title, augmentation in (("DeiT's augmentation", deit), ("crops and flips", crops)):
            ours, theirs = our_images(Path(folder), augmentation), timms_images(Path(folder), augmentation)
            found = paired(ours, theirs, max(3, arguments.pairs // 2), Timer(torch.device("cpu")))
            count = 64 * arguments.batches
            report[title] = {
                **found,
                "ours_images_per_second": 1000 * count / found["ours_ms"],
                "theirs_images_per_second": 1000 * count / found["theirs_ms"],
                "mean_file_bytes": size,
                "target": IMAGES_TARGET,
                "holds": found["ratio"] >= IMAGES_TARGET,
            }
            print(
                f"(d) {title}: {report[title]['ours_images_per_second']:.0f} images/s a core, timm's loader "
                f"{report[title]['theirs_images_per_second']:.0f}, × {found['ratio']:.3f}; target 1.0: "
                f"{verdict(report[title])}",
                flush=True,
            )
    return report


def our_images(folder: Path, augmentation: Any) -> Callable[[], None]:
    recipe = get_recipe("deit-s").model_copy(update={"augmentation": augmentation})
    recipe = apply_overrides(recipe, ["mixup.mixup=0", "mixup.cutmix=0"])
    pixels = Preprocessing(image_size=224, mean=MEAN, std=STD)
    data = TrainingData(open_images(str(folder), "train"), pixels, augmentation, batch_size=64, seed=0)
    epochs = iter(range(1, 1_000_000))

    def epoch() -> None:
        number = next(epochs)
        for batch in data.batches(number, workers=2):
            images = image_tensor(batch.images, MEAN, STD)
            rng = random.Random(seed_of(0, CUTMIX, number, batch.number))
            mix_batch(images, torch.from_numpy(batch.labels), recipe, None, rng, classes=8)

    return epoch


def timms_images(folder: Path, augmentation: Any) -> Callable[[], None]:
    loader: Any = timm.data.create_loader(
        timm.data.create_dataset("", str(folder), split="train"),
        (3, 224, 224),
        batch_size=64,
        is_training=True,
        re_prob=augmentation.erasing,
        re_mode="pixel",
        color_jitter=None,  # type: ignore[arg-type]  # timm takes None
        auto_augment=augmentation.auto_augment or None,
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        num_workers=2,
        device=torch.device("cpu"),
        pin_memory=False,
    )

    for transform in loader.dataset.transform.transforms:
        fix_posterize(transform)  # or it raises at one image in some hundreds

    def epoch() -> None:
        for _images, _labels in loader:
            pass

    return epoch


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "a": ("a: a step with the three losses", three_losses),
    "b": ("b: cosine in closed form", cosine),
    "c": ("c: the loop against a bare one", loop),
    "d": ("d: training images against timm's loader", images_per_second),
}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=at_least(1), default=1, help="of torch")
    parser.add_argument("--pairs", type=at_least(2), default=12, help="half as many in (d)")
    parser.add_argument("--batches", type=at_least(1), default=6, help="of 64 images, in one epoch of (d)")
    parser.add_argument("--memory-of", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    choose_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print_extra_memory(arguments)
        return 0
    report = report_header()
    if arguments.device == "cuda":
        report["machine"]["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(report["machine"]))
    for part in arguments.parts:
        title, measure = PARTS[part]
        report[title] = measure(arguments)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(exit_code(main))
