"""What a batch costs the thread that trains, from bytes in the host's memory to what the network takes.

    python benchmarks/train/training_input.py [--device cpu] [--threads 1] [--rounds 5] [--json FILE]

A batch is 256 × 224 × 224 × 3 uint8, as the processes that prepare images leave it, and its labels. The thread that
trains takes one from where the step begins with it: float32, normalised, on the device. Three ways take turns:

- `before`: the thread cuts out its rows, normalises them and copies them to the device, as it did until 2026-11-22;
- `inline`: `vitx.train.loop.inputs.prefetch` without its thread, which is how it runs with workers=0;
- `ahead`: the same with its thread, which is how it runs with workers; this is what has a target.

**Counted** is processor time of the main thread alone (`time.thread_time`) from asking for a batch to having its
normalised images, with torch on --threads threads. On a CPU the normalisation does not vanish: another thread computes
it, on a core that the step could have used, and `process_ms`, of all threads, stands beside it. On a GPU the kernels
are the GPU's, and what is counted is their launch. **Not counted** is waiting: while the main thread waits for the
other it uses no processor. Here it does nothing else, so it waits all the time; between two batches a step would run.
Decoding and augmentation are the worker processes', and are left out.

Medians over --rounds turns of six batches, the first of each left out: it pays for memory that the others use again.
Exit code 1 when the target is missed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, at_least, command_line, report_header, save_report, verdict
from support.turns import take_turns
from vitx.core.preprocess import Preprocessing
from vitx.models import image_tensor
from vitx.train.loop.inputs.prefetch import Prefetcher
from vitx.train.loop.inputs.training_data import Batch

TARGET_MS = 20.0
BATCH, SIDE, BATCHES = 256, 224, 6
PREPROCESSING = Preprocessing(image_size=SIDE, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def before(device: torch.device, batches: Sequence[Batch]) -> Iterator[Tensor]:
    rows = np.arange(BATCH)
    for batch in batches:
        yield image_tensor(batch.images[rows], PREPROCESSING.mean, PREPROCESSING.std).to(device)


def inline(device: torch.device, batches: Sequence[Batch], *, ahead: bool = False) -> Iterator[Tensor]:
    prefetcher = Prefetcher(PREPROCESSING, device)
    for batch in prefetcher.batches(iter(batches), ahead=ahead):
        yield prefetcher.normalized(batch.images)


def ahead(device: torch.device, batches: Sequence[Batch]) -> Iterator[Tensor]:
    return inline(device, batches, ahead=True)


WAYS: dict[str, Callable[[torch.device, Sequence[Batch]], Iterator[Tensor]]] = {
    "before": before,
    "inline": inline,
    "ahead": ahead,
}


def turn(way: str, device: torch.device, batches: Sequence[Batch]) -> tuple[list[float], float]:
    """Milliseconds of the main thread for each batch but the first, and of all threads for one, the first included."""
    images, costs, process = WAYS[way](device, batches), [], time.process_time()
    for _ in batches:
        start = time.thread_time()
        taken = next(images)
        costs.append(1000 * (time.thread_time() - start))
        assert taken.shape == (BATCH, 3, SIDE, SIDE)
    return costs[1:], 1000 * (time.process_time() - process) / len(batches)


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
    # Each in memory of its own, as a worker leaves it.
    batches = [Batch(number, pixels.copy(), np.arange(BATCH)) for number in range(BATCHES)]
    turns = take_turns({way: partial(turn, way, device, batches) for way in WAYS}, rounds, warm_up=0)
    main = {way: [cost for costs, _ in found for cost in costs] for way, found in turns.items()}
    return {
        way: {
            "main_thread_ms": statistics.median(main[way]),
            "main_thread_ms_quartiles": statistics.quantiles(main[way], n=4),
            "main_thread_ms_most": max(main[way]),
            "process_ms": statistics.median(whole for _, whole in turns[way]),
            "batches": len(main[way]),
        }
        for way in WAYS
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--rounds", type=at_least(1), default=5, help=f"turns of each way, of {BATCHES} batches")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = report_header()
    if arguments.device == "cuda":
        report["machine"]["gpu"] = torch.cuda.get_device_name()
    found = measure(torch.device(arguments.device), arguments.rounds)
    found["ahead"] |= {"target_ms": TARGET_MS, "holds": found["ahead"]["main_thread_ms"] < TARGET_MS}
    report["a batch of 256 images of 224 px"] = {"device": arguments.device, "threads": arguments.threads, **found}
    for way, costs in found.items():
        print(
            f"{way:8} main thread {costs['main_thread_ms']:7.2f} ms a batch, all threads {costs['process_ms']:7.2f} ms"
        )
    print(f"target under {TARGET_MS:g} ms of the main thread: {verdict(found['ahead'])}")
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
