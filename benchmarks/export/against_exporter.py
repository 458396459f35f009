"""What an export gives and costs, in one run, on this machine. One thread each; medians.

    python benchmarks/export/against_exporter.py [--parts a,b,c,d,e] [--batch 1 8] [--repeats 15] [--run RUN]
        [--json FILE]

(a) Rewritten against as it comes. DeiT-S: the graph of `vitx export` of deit_small_12 against `torch.onnx.export` of
    timm's deit_small_patch16_224. DeepViT-S: ours against the exporter's graph of the same network. Random weights,
    ONNX Runtime. Ours takes uint8 images and normalises them inside; the other takes the same images normalised, which
    costs it nothing here.
(b) int8 against fp32 of one bundle, with top-1 agreement: quantization.py. --run adds a run on the digits.
(c) `vitx export` of deepvit_l at fp32 with its checks, uncertified, against `torch.onnx.export` of the network to a
    file: whole processes that take turns. Its memory is the largest sum of the resident memory of its processes at one
    moment. Importing torch and the exporter's packages takes most of it, so the same export of deit_digits (1 MB) is
    taken off: what is left is due to the model.
(d) One TensorRT for RTX plan of deepvit_s for four architectures: engines.py.
(e) Each rewrite left out of DeiT-S and DeepViT-S, and `pad-head-dim` put in, against the default. Without
    `remove-dead-outputs` the graph is the same: its row shows what this machine cannot tell apart.

The two of a pair take turns, and the order within a pair alternates; the ratio is the median of the pairs' ratios.
`cpu` is of processor seconds, which other work on the machine moves less than `wall`. Exit code 1 when a target is
missed. With --json the parts that were run replace those in FILE.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import engines
import quantization
import vitx.models
from support.as_exported import export_as_it_comes, paired
from support.onnx_session import cpu_session
from support.process_tree import peak_resident_bytes, seconds_of
from support.targets import (
    all_hold,
    at_least,
    command_line,
    exit_code,
    merged,
    network_name,
    report_header,
    require_package,
    some_of,
    verdict,
    write_report,
)
from support.turns import take_turns
from vitx.core.bundle import Bundle, timestamp
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, ImageClassifier, onnx_from_model, rewrite_for_export
from vitx.export.rewrite.rewrites import REWRITES, applied_rewrites
from vitx.models import image_tensor

PREPROCESSING = Preprocessing(image_size=224)
# What was promised. Throughput of ours over that of the other; seconds over the exporter's; bytes over the model's.
SPEED_TARGETS = {"deit_small": 1.08, "deepvit_s": 1.06}
SECONDS_TARGET, MEMORY_TARGET = 2.5, 4.0
PAIRS = {"deit_small": ("deit_small_12", "deit_small_patch16_224"), "deepvit_s": ("deepvit_s", "deepvit_s")}

BARE_EXPORT = """
import sys, timm, torch, vitx.models
model = timm.create_model(sys.argv[1]).eval()
torch.onnx.export(
    model, (torch.zeros(2, 3, 224, 224),), sys.argv[2], dynamo=True, verbose=False, external_data=False,
    dynamic_shapes=({0: torch.export.Dim("N")},), input_names=["images"], output_names=["logits"],
)
"""


def network_of_this_size(text: str) -> str:
    """What --networks takes: the name of a network for images of the size that is measured here."""
    config: Any = timm.get_pretrained_cfg(network_name(text))
    if config.input_size[-1] != PREPROCESSING.image_size:
        sizes = f"{config.input_size[-1]} px, and what is measured here of {PREPROCESSING.image_size}"
        raise argparse.ArgumentTypeError(f"the images of {text} are of {sizes}")
    return text


def network(name: str) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name).eval()


def rewritten(name: str, path: Path, rewrites: Sequence[str] = ALL) -> Any:
    """A session of the network's graph with these rewrites."""
    classifier = rewrite_for_export(network(name), PREPROCESSING, rewrites=rewrites)
    onnx_from_model(classifier, PREPROCESSING, (), path, check=False)
    return cpu_session(path)


def random_images(batch: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (batch, 224, 224, 3), dtype=np.uint8)


def pairs_of(batch: int, arguments: argparse.Namespace) -> int:
    """A call of one image is short: three times as many."""
    repeats: int = arguments.repeats
    return 3 * repeats if batch == 1 else repeats


def against_as_it_comes(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(a) fp32 graphs of DeiT-S and DeepViT-S."""
    report: dict[str, Any] = {}
    for title, (ours, theirs) in PAIRS.items():
        export_as_it_comes(network(theirs), torch.zeros(2, 3, 224, 224), folder / "as_it_comes.onnx")
        mine, other = rewritten(ours, folder / "ours.onnx"), cpu_session(folder / "as_it_comes.onnx")
        target, report[title] = SPEED_TARGETS[title], {}
        for batch in arguments.batch:
            images = random_images(batch)
            normalised = image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std).contiguous().numpy()
            times = paired((mine, images), (other, normalised), pairs_of(batch, arguments))
            times |= {"target": target, "holds": times["speed_ratio_wall"] >= target}
            report[title][f"batch {batch}"] = times
            print(
                f"(a) {title}, batch {batch}: {times['ours_wall_ms']:.1f} ms against {times['theirs_wall_ms']:.1f} ms, "
                f"speed × {times['speed_ratio_wall']:.3f} (processor × {times['speed_ratio_cpu']:.3f}); "
                f"target {target}: {verdict(times)}"
            )
    return report


def int8_against_fp32(arguments: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """(b) with the accuracy beside the speed."""
    report: dict[str, Any] = quantization.measure(arguments.run, arguments.repeats)
    return report


def export_against_exporter(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(c) time of `vitx export` over that of the exporter alone, and its memory."""

    def ours(name: str) -> list[str]:
        options = ("--weights", "random", "--uncertified", "--quiet", "--out", str(folder / f"{name}.vitx"))
        return [sys.executable, "-m", "vitx", "export", f"model:{name}", *options]

    bare = [sys.executable, "-W", "ignore", "-c", BARE_EXPORT, "deepvit_l", str(folder / "bare.onnx")]
    calls = {"ours": partial(seconds_of, ours("deepvit_l")), "bare": partial(seconds_of, bare)}
    seconds = take_turns(calls, arguments.exports, warm_up=0)
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["bare"], strict=True))
    model = (Bundle.open(folder / "deepvit_l.vitx").path / "model.onnx").stat().st_size
    peak, packages = peak_resident_bytes(ours("deepvit_l")), peak_resident_bytes(ours("deit_digits"))
    time_taken = {**seconds, "ratio": ratio, "target": SECONDS_TARGET, "holds": ratio < SECONDS_TARGET}
    memory = {
        "model_bytes": model,
        "peak_bytes": peak,
        "packages_bytes": packages,
        "exporter_alone_peak_bytes": peak_resident_bytes(bare),
        "peak_over_model": peak / model,
        "above_packages_over_model": (peak - packages) / model,
        "target": MEMORY_TARGET,
        "holds": peak - packages <= MEMORY_TARGET * model,
    }
    print(
        f"(c) vitx export of deepvit_l {statistics.median(seconds['ours']):.1f} s against "
        f"{statistics.median(seconds['bare']):.1f} s, × {ratio:.2f}; target below {SECONDS_TARGET}: "
        f"{verdict(time_taken)}\n"
        f"(c) peak memory {peak / 1e6:.0f} MB of all processes, × {memory['peak_over_model']:.2f} of the model's "
        f"{model / 1e6:.0f} MB; {packages / 1e6:.0f} MB for a network of 1 MB, so × "
        f"{memory['above_packages_over_model']:.2f} above the packages; target {MEMORY_TARGET:g} above them: "
        f"{verdict(memory)}; the exporter alone: {memory['exporter_alone_peak_bytes'] / 1e6:.0f} MB"
    )
    return {"seconds": time_taken, "memory": memory}


def plans(_arguments: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """(d) ahead of time, on this processor."""
    report: dict[str, Any] = engines.measure("deepvit_s", engines.ARCHITECTURES, repeats=3)
    return report


def rewrites_left_out(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """(e) what each rewrite is worth beside all the others."""
    report: dict[str, Any] = {}
    for name in arguments.networks:
        default = rewritten(name, folder / "default.onnx")
        found = applied_rewrites(ImageClassifier(network(name), PREPROCESSING).eval(), tuple(REWRITES))
        report[name] = {}
        for rewrite in (rewrite for rewrite in arguments.rewrites if found[rewrite]):
            others = [other for other in ALL if other != rewrite] if rewrite in ALL else [*ALL, rewrite]
            session = rewritten(name, folder / "other.onnx", others)
            report[name][rewrite] = {}
            for batch in arguments.batch:
                images = random_images(batch)
                with_it, without = (default, images), (session, images)
                if rewrite not in ALL:
                    with_it, without = without, with_it
                times = paired(with_it, without, pairs_of(batch, arguments))
                report[name][rewrite][f"batch {batch}"] = times
                low, _, high = times["speed_ratio_wall_quartiles"]
                print(
                    f"(e) {name}, {rewrite}, batch {batch}: {times['ours_wall_ms']:.1f} ms with it, "
                    f"{times['theirs_wall_ms']:.1f} ms without, speed × {times['speed_ratio_wall']:.3f} "
                    f"({low:.3f} to {high:.3f}; processor × {times['speed_ratio_cpu']:.3f})",
                    flush=True,
                )
    return report


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], dict[str, Any]]]] = {
    "a": ("a: rewritten against as it comes", against_as_it_comes),
    "b": ("b: int8 against fp32", int8_against_fp32),
    "c": ("c: vitx export against the exporter alone", export_against_exporter),
    "d": ("d: TensorRT for RTX plans", plans),
    "e": ("e: each rewrite left out", rewrites_left_out),
}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*"abcd"])
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8])
    parser.add_argument(
        "--repeats", type=at_least(2), default=15, help="pairs of calls (a, b, e); three times as many at batch 1"
    )
    parser.add_argument("--exports", type=at_least(1), default=3, help="pairs of exports (c)")
    parser.add_argument(
        "--networks", type=network_of_this_size, nargs="+", default=["deit_small_12", "deepvit_s"], help="of (e)"
    )
    parser.add_argument("--rewrites", nargs="+", choices=[*REWRITES], default=[*REWRITES], help="of (e)")
    parser.add_argument("--run", action="append", default=[], help="a run trained on the digits, for (b)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {**report_header(), "commands": {}}  # and when each ended
    if "d" in arguments.parts:
        report["versions"]["tensorrt-rtx"] = require_package("tensorrt-rtx", "pip install 'vitx[trt-rtx]'")
    print(json.dumps(report["machine"]))
    for part in arguments.parts:
        title, measure = PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            report[title] = measure(arguments, Path(folder))
    report["commands"][" ".join(["python", "benchmarks/export/against_exporter.py", *sys.argv[1:]])] = timestamp()
    if arguments.json:
        old = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
        write_report(merged(old, report), arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(exit_code(main))
