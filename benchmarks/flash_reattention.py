"""Flash Re-Attention: is it right, and what does it gain? Kernels on a GPU; on a CPU the ways to write the mix.

    python benchmarks/flash_reattention.py [--parts a,b,c,d] [--repeats 20] [--json FILE]

(a) Correctness: the largest error of the output and of the gradients against float64, in float16 and bfloat16. Without
    a GPU in Triton's interpreter, at smaller shapes (set TRITON_INTERPRET=1).
(b) The operation at (64, 12, 197, 32) and more shapes, float16, on a GPU: against eager, torch.compile, and SDPA
    without the mix as the floor. Time by CUDA events, median; the roofline below; a sweep of tiles.
(c) Whole networks on a GPU, float16, batch 64: DeepViT-16b, -S, -L and timm's CaiT-S24, whose talking heads are its own
    code, against torch.compile and a plain ViT of DeepViT-16b's size with SDPA; images/s and peak memory.
(d) On a CPU: queries in blocks, so that their maps stay in cache, against whole maps, in ONNX Runtime, one thread;
    processor time, which other work on the machine moves less.

The roofline of (b). Operations, for B images, H heads, N tokens and head width K: Q Kᵀ twice (once for the sums of the
rows) and A V, 2·B·H·N²·K each, and the mix, 2·B·H²·N² (with heads padded to 16 for the tensor cores: 2·B·16²·N²).
Bytes: Q, K, V and the output once each, 2·4·B·H·N·K in float16; keys and values again for every tile of queries come
from L2. The limit is the larger of operations over the speed of a float16 matrix product and bytes over that of a copy,
both measured in the same run.

Without a GPU (b) and (c) print that they were not run, and the exit code stays 0.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch
from torch import Tensor, nn

import vitx.models
from targets import all_hold, begun, saved, verdict
from vitx.models import flash_reattention
from vitx.models.flash_reattention import INTERPRETED, Mixes, Tiles, plain_reattention, reattention

SHAPES = ((64, 12, 197, 32), (64, 12, 197, 33), (64, 12, 197, 35), (16, 12, 577, 32), (64, 16, 197, 64))
INTERPRETED_SHAPES = ((1, 12, 65, 32), (1, 12, 65, 33), (1, 16, 33, 64))
TILES = tuple(Tiles(queries, keys, warps) for queries in (16, 32) for keys in (16, 32, 64) for warps in (4, 8))
OVER_COMPILED, OF_LIMIT = 3.0, 0.5
MODEL_OVER_COMPILED, MODEL_OVER_PLAIN = 1.5, 0.85
ERROR = 2e-3
ON_CPU_TARGET = 1.05
BATCH = 64
WHOLE = ("deepvit_16b", "deepvit_s", "deepvit_l", "cait_s24_224")


def operands(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Mixes]:
    """(3, B, H, N, K) as a Linear makes it, and the mixes."""
    B, H, N, K = shape
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, N, 3, H, K, generator=generator).to(device, dtype).permute(2, 0, 3, 1, 4)
    weight, bias = torch.randn(H, H, generator=generator), torch.randn(H, generator=generator) / N
    return qkv, Mixes(weight.to(device), bias.to(device))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def correctness(_: argparse.Namespace) -> dict[str, Any]:
    """(a)"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not INTERPRETED:
        return not_run("no GPU, and TRITON_INTERPRET is not 1")
    shapes = INTERPRETED_SHAPES if device == "cpu" else SHAPES
    dtypes = (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16)  # the interpreter has no bfloat16
    report: dict[str, Any] = {}
    for shape in shapes:
        for dtype in dtypes:
            drawn, mixes = operands(shape, dtype, device)
            qkv = drawn.detach().requires_grad_()
            exact = drawn.detach().double().requires_grad_()
            scale = shape[-1] ** -0.5
            out = reattention(qkv[0], qkv[1], qkv[2], mixes, scale, impl="flash")
            expected = plain_reattention(exact[0], exact[1], exact[2], mixes, scale)
            weight = torch.randn_like(expected)
            torch.autograd.backward(out, weight.to(dtype))
            torch.autograd.backward(expected, weight.to(dtype).double())
            assert qkv.grad is not None
            assert exact.grad is not None
            allowed = ERROR if dtype == torch.float16 else 8 * ERROR  # three bits less
            errors = {"output": relative(out, expected), "gradients": relative(qkv.grad, exact.grad)}
            row = {**errors, "allowed": allowed, "holds": max(errors.values()) <= allowed}
            report[f"{shape} {str(dtype).removeprefix('torch.')}"] = row
            print(f"(a) {shape} {dtype}: {errors} {verdict(row)}", flush=True)
    return report


def operation(arguments: argparse.Namespace) -> dict[str, Any]:
    """(b)"""
    if not torch.cuda.is_available():
        return not_run("no GPU")
    report: dict[str, Any] = {"limits": (limits := measured_limits())}
    compiled = torch.compile(plain_reattention)
    for shape in SHAPES:
        (q, k, v), mixes = operands(shape, torch.float16, "cuda")
        scale = shape[-1] ** -0.5
        best, by_tiles = sweep(q, k, v, mixes, scale)
        calls: dict[str, Callable[[], Any]] = {
            "flash": partial(reattention, q, k, v, mixes, scale, impl="flash"),
            "eager": partial(plain_reattention, q, k, v, mixes, scale),
            "compiled": partial(compiled, q, k, v, mixes, scale),
            "sdpa without mix": partial(nn.functional.scaled_dot_product_attention, q, k, v),
        }
        with tiles(best):
            times = interleaved(calls, arguments.repeats)
        limit_ms = roofline_ms(shape, limits)
        row: dict[str, Any] = {
            **{f"{name} ms": value for name, value in times.items()},
            "tiles": best._asdict(),
            "by tiles ms": by_tiles,
            "limit ms": limit_ms,
            "of the limit": limit_ms / times["flash"],
            "over compiled": times["compiled"] / times["flash"],
        }
        if shape == SHAPES[0]:
            row["holds"] = row["over compiled"] >= OVER_COMPILED and row["of the limit"] >= OF_LIMIT
        report[str(shape)] = row
        print(f"(b) {shape}: {row}", flush=True)
    return report


def sweep(q: Tensor, k: Tensor, v: Tensor, mixes: Mixes, scale: float) -> tuple[Tiles, dict[str, float | str]]:
    """The fastest tiles, and the time of all; tiles that a GPU refuses (too much shared memory) say so."""
    found: dict[Tiles, float] = {}
    report: dict[str, float | str] = {}
    for choice in TILES:
        with tiles(choice):
            try:
                found[choice] = interleaved({"": lambda: reattention(q, k, v, mixes, scale, impl="flash")}, 5)[""]
            # Triton's and the driver's refusals share no base class; each is one row of the sweep.
            except Exception as error:  # noqa: BLE001
                report[str(tuple(choice))] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
        report[str(tuple(choice))] = found[choice]
    return min(found, key=lambda choice: found[choice]), report


@contextmanager
def tiles(choice: Tiles) -> Iterator[None]:
    before, flash_reattention.TILES = flash_reattention.TILES, choice
    try:
        yield
    finally:
        flash_reattention.TILES = before


def roofline_ms(shape: tuple[int, int, int, int], limits: dict[str, float]) -> float:
    """The least time of the operation on this GPU (see above)."""
    B, H, N, K = shape
    operations = 3 * 2 * B * H * N * N * K + 2 * B * 16 * 16 * N * N
    moved = 2 * 4 * B * H * N * K
    return 1e3 * max(operations / limits["flop/s"], moved / limits["bytes/s"])


def measured_limits() -> dict[str, float]:
    """FLOP/s of a float16 matrix product and bytes/s of a copy, read and written, on this GPU."""
    side = 8192
    a = torch.randn(side, side, device="cuda", dtype=torch.float16)
    big = torch.empty(2**28, device="cuda", dtype=torch.float16)
    target = torch.empty_like(big)
    times = interleaved({"product": lambda: a @ a, "copy": lambda: target.copy_(big)}, 10)
    return {"flop/s": 2 * side**3 / (times["product"] / 1e3), "bytes/s": 2 * 2 * 2**28 / (times["copy"] / 1e3)}


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call by CUDA events; the calls take turns, ten at a time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            for _ in range(3):
                call()
        for _ in range(repeats):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
                start.record()
                for _ in range(10):
                    call()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / 10)
    return {name: statistics.median(values) for name, values in times.items()}


def whole_networks(arguments: argparse.Namespace) -> dict[str, Any]:
    """(c)"""
    if not torch.cuda.is_available():
        return not_run("no GPU")
    report: dict[str, Any] = {}
    rates = {}
    for name in ("plain ViT of deepvit_16b's size", *WHOLE):
        kwargs: dict[str, Any] = {"attention": "plain"} if name.startswith("plain") else {}
        torch.manual_seed(0)
        model = timm.create_model("deepvit_16b" if kwargs else name, **kwargs).half().cuda().eval()
        images = torch.randn(BATCH, 3, 224, 224, device="cuda", dtype=torch.float16)
        calls = network_calls(model, images)
        torch.cuda.reset_peak_memory_stats()
        times = interleaved(calls, max(3, arguments.repeats // 4))
        rates[name] = {call: 1e3 * BATCH / ms for call, ms in times.items()}
        report[name] = {"images/s": rates[name], "peak_mib": torch.cuda.max_memory_allocated() / 2**20}
        print(f"(c) {name}: {report[name]}", flush=True)
    ours = max(rates["deepvit_16b"][call] for call in ("flash", "flash compiled"))
    over_compiled = ours / rates["deepvit_16b"]["compiled"]
    over_plain = ours / max(rates["plain ViT of deepvit_16b's size"].values())
    report["deepvit_16b over"] = {
        "torch.compile": over_compiled,
        "plain ViT": over_plain,
        "holds": over_compiled >= MODEL_OVER_COMPILED and over_plain >= MODEL_OVER_PLAIN,
    }
    return report


def network_calls(model: nn.Module, images: Tensor) -> dict[str, Callable[[], Any]]:
    """Eager and compiled, with the kernels and without; a network without our layers has no kernels to leave out."""

    def without_kernels(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            for layer in mixing:
                layer.fused_attn = False
            try:
                return call()
            finally:
                for layer in mixing:
                    layer.fused_attn = True

        return run

    mixing: list[Any] = [
        layer
        for layer in model.modules()
        if isinstance(layer, vitx.models.ReAttention | vitx.models.TalkingHeadsAttention)
    ]
    first, second = torch.compile(model), torch.compile(model)
    if not mixing:
        return {"eager": lambda: model(images), "compiled": lambda: first(images)}
    return {
        "eager": without_kernels(lambda: model(images)),
        "compiled": without_kernels(lambda: first(images)),
        "flash": lambda: model(images),
        "flash compiled": lambda: second(images),
    }


class Blocked(nn.Module):
    """Attention with a mix, as the exported graph has it, `blocks` blocks of queries one after the other."""

    def __init__(self, mix: Tensor, blocks: int) -> None:
        super().__init__()
        self.register_buffer("mix", mix)
        self.blocks = blocks

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for part in q.chunk(self.blocks, dim=2):
            maps = (part @ k.transpose(-2, -1)).softmax(dim=-1)
            mixed = torch.matmul(self.get_buffer("mix"), maps.flatten(2)).view_as(maps)
            parts.append(mixed @ v)
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def blocks_of_queries(arguments: argparse.Namespace) -> dict[str, Any]:
    """(d)"""
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    best = 0.0
    for batch in (1, 8):
        inputs = [np.random.default_rng(i).standard_normal((batch, 12, 197, 32)).astype(np.float32) for i in range(3)]
        sessions = {blocks: blocked_session(blocks, inputs) for blocks in (1, 2, 4, 8)}
        names = [value.name for value in sessions[1].get_inputs()]
        feed = dict(zip(names, inputs, strict=True))
        times: dict[int, list[float]] = {blocks: [] for blocks in sessions}
        for _ in range(arguments.repeats):
            for blocks, session in sessions.items():
                start = time.process_time()
                for _ in range(max(1, 16 // batch)):
                    session.run(None, feed)
                times[blocks].append(time.process_time() - start)
        whole = times.pop(1)
        ratios = {
            f"{blocks} blocks": statistics.median(one / other for one, other in zip(whole, values, strict=True))
            for blocks, values in times.items()
        }
        best = max(best, *ratios.values())
        report[f"batch {batch}"] = ratios
        print(f"(d) batch {batch}, speed over whole maps: {ratios}", flush=True)
    report["best"] = {"speed": best, "target": ON_CPU_TARGET, "holds": best >= ON_CPU_TARGET}
    return report


def blocked_session(blocks: int, inputs: list[Any]) -> Any:
    tensors = tuple(map(torch.from_numpy, inputs))
    module = Blocked(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)), blocks).eval()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocked.onnx"
        torch.onnx.export(module, tensors, path, dynamo=True, verbose=False, external_data=False)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def not_run(reason: str) -> dict[str, Any]:
    print(f"not run: {reason}", flush=True)
    return {"not run": reason}


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "a": ("a: correctness", correctness),
    "b": ("b: the operation on a GPU", operation),
    "c": ("c: whole networks on a GPU", whole_networks),
    "d": ("d: blocks of queries on a CPU", blocks_of_queries),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="a,b,c,d")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = begun()
    if torch.cuda.is_available():
        report["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(report["machine"]))
    for part in arguments.parts.split(","):
        title, measure = PARTS[part]
        report[title] = measure(arguments)
    saved(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    assert vitx.models.registry, "registers our networks with timm"
    raise SystemExit(main())
