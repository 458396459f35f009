"""Resources of the flash kernels, compiled for GPUs that are not here, and what limits them on paper.

    python benchmarks/models/flash_resources.py [--architectures 80,90,120] [--json FILE]

Every kernel is compiled ahead of time by the installed Triton at the published shapes (64 images, 12 heads, 197 tokens,
head widths 32, 33 and 35; the last two are padded to 40 in memory), with the tiles that run by default. A row has
registers, bytes of stack (spilled registers), shared memory, and the instructions of the longest loop by kind, counted
in the disassembly. Nothing is run.

The roofline of a pass forward is arithmetic on those counts and on the GPU's datasheet:

- issue: instructions of all warps over what the schedulers issue, four a clock and multiprocessor;
- exp: exponentials over 16 a clock and multiprocessor;
- tensor: operations of the products, over the dense float16 peak;
- L2: what all programs read, over the bytes a clock that L2 gives;
- memory: q, k, v and the output once, over the bandwidth.

The largest binds. It is a bound, not a time: a measurement of the same shape goes beside it (benchmarks/lease.py).
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import command_line, report_header, save_report
from vitx.models.flash import kernels as flash_kernels
from vitx.models.flash.reattention import (
    WEIGHT_GRAD_COLUMNS,
    Launch,
    Tiles,
    kernel_constants,
    launch_options,
    padded_width,
    tiles_of,
)

IMAGES, HEADS, TOKENS = 64, 12, 197
WIDTHS = (32, 33, 35)
HALVES = ("q", "k", "v", "out", "left", "right", "out_grad", "grad")
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


class Gpu(NamedTuple):
    """A datasheet: multiprocessors, boost clock in GHz, dense float16 with float32 sums in TFLOP/s, memory in TB/s."""

    name: str
    multiprocessors: int
    clock: float
    tensor: float
    memory: float
    l2_bytes_per_clock: int


# Datasheets do not give the bandwidth of L2: bytes a clock are those of the vendor's architecture papers (A100: 5,120),
# and half of it for the others, which microbenchmarks support.
GPUS = {
    80: Gpu("A100 SXM", 108, 1.41, 312, 2.04, 5120),
    90: Gpu("H200", 132, 1.755, 989.5, 4.8, 3072),
    120: Gpu("RTX 5090", 170, 2.41, 209.5, 1.79, 4096),
}


class Kernel(NamedTuple):
    """One launch: a kernel's name, its tiles, and fields of `Sizes` that the shape does not give."""

    title: str
    name: str
    tiles: Tiles
    flags: dict[str, Any]


def kernels(width: int) -> list[Kernel]:
    """All that one pass forward and one backward launch, in order."""
    found: list[tuple[str, Launch, str, dict[str, Any]]] = [
        ("forward: sums", "sums", "sums_kernel", {}),
        ("forward: out", "out", "mix_kernel", {"bias": True}),
        ("backward: mix", "weight_grad", "weight_grad_kernel", {"block": WEIGHT_GRAD_COLUMNS}),
        ("backward: v", "v_grad", "mix_kernel", {"bias": True, "by_column": True}),
        ("backward: q", "score_grad", "score_grad_kernel", {}),
        ("backward: k", "score_grad", "score_grad_kernel", {"by_column": True}),
    ]
    return [
        Kernel(title, name, tiles_of(launch, HEADS, padded_width(width)), flags) for title, launch, name, flags in found
    ]


def compiled(kernel: Kernel, width: int, architecture: int) -> Any:
    """Triton's result, with queries, keys and values side by side, as a Linear lays them out, and pointers aligned."""
    padded = padded_width(width)
    constants = kernel_constants(HEADS, padded, kernel.tiles, stride=3 * HEADS * padded, **kernel.flags)
    function: Any = getattr(flash_kernels, kernel.name)
    signature = {name: type_of(name, constants) for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith("_base")}
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch_options(kernel.tiles))


def type_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_base"):
        return "*fp16" if name.removesuffix("_base") in HALVES else "*fp32"
    return "fp32" if name == "scale" else "i32"


def resources(binary: Any) -> dict[str, int]:
    """Registers, stack (spilled registers) and shared memory of a compiled kernel."""
    usage = tool("cuobjdump", "-res-usage", binary=binary)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack_bytes": int(found[2]), "shared_bytes": binary.metadata.shared}


def tool(name: str, option: str, *, binary: Any) -> str:
    """What one of CUDA's tools says of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        command = [str(TOOLS / name), option, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def longest_loop(listing: str) -> dict[str, int]:
    """Instructions between a label and the last branch back to it, by opcode, most first; of the longest such loop."""
    labels: dict[str, int] = {}
    opcodes: list[str] = []
    best = range(0)
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(.*)", line):
            opcodes.append(instruction[1])
            target = re.search(r"`\((\.L_x_\d+)\)", instruction[2])
            if instruction[1] == "BRA" and target and target[1] in labels:
                best = max(best, range(labels[target[1]], len(opcodes)), key=len)
    return dict(Counter(opcodes[index] for index in best).most_common())


def roofline(rows: dict[str, dict[str, Any]], width: int, gpu: Gpu) -> dict[str, Any]:
    """Microseconds of the forward pass by what could bind it, and which does."""
    clocks = gpu.multiprocessors * gpu.clock * 1e3  # a microsecond
    sums, out = (tiles_of(launch, HEADS, padded_width(width)) for launch in ("sums", "out"))
    padded, groups = padded_width(width), HEADS // out.heads
    warps, issued, exponentials, moved = 0.0, 0.0, 0.0, 0.0
    for title, tiles, programs_a_tile, steps in (
        ("forward: sums", sums, HEADS, TOKENS / sums.keys),
        ("forward: out", out, groups, -(-TOKENS // out.keys)),
    ):
        programs = IMAGES * programs_a_tile * -(-TOKENS // tiles.queries)
        warps = programs * tiles.warps
        loop = rows[title]["loop"]
        issued += warps * steps * sum(loop.values())
        exponentials += warps * steps * 32 * loop.get("MUFU", 0)
        heads = 2 if title == "forward: sums" else 2 * HEADS + out.heads  # q, k; q, k of all heads, v of the group
        rows_read = (heads // 2 * tiles.queries + (heads - heads // 2) * TOKENS) * padded * 2
        moved += programs * rows_read
    products = 2 * IMAGES * HEADS * TOKENS**2 * padded * (1 + groups + 1)
    least = 2 * 4 * IMAGES * HEADS * TOKENS * padded
    times = {
        "issue": issued / (4 * clocks),
        "exp": exponentials / (16 * clocks),
        "tensor": products / (gpu.tensor * 1e6),
        "L2": moved / (gpu.l2_bytes_per_clock * gpu.clock * 1e3),
        "memory": least / (gpu.memory * 1e6),
    }
    binds = max(times, key=lambda name: times[name])
    return {"gpu": gpu._asdict(), "microseconds": {k: round(v, 1) for k, v in times.items()}, "binds": binds}


def measured(architecture: int, width: int) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for kernel in kernels(width):
        binary = compiled(kernel, width, architecture)
        rows[kernel.title] = {**resources(binary), "loop": longest_loop(tool("nvdisasm", "-c", binary=binary))}
    for title, row in rows.items():
        loop = sum(row["loop"].values())
        print(
            f"sm_{architecture} width {width} {title:14} {row['registers']:3} registers, stack {row['stack_bytes']:3}, "
            f"shared {row['shared_bytes'] // 1024:3} KiB, loop {loop}",
            flush=True,
        )
    whole: dict[str, Any] = {
        "kernels": rows,
        "spilled": {k: r["stack_bytes"] for k, r in rows.items() if r["stack_bytes"]},
    }
    whole["forward on paper"] = roofline(rows, width, GPUS[architecture])
    print(f"sm_{architecture} width {width} forward on paper: {json.dumps(whole['forward on paper'])}", flush=True)
    return whole


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--architectures", type=lambda text: [int(part) for part in text.split(",")], default=[*GPUS])
    arguments = parser.parse_args()
    report = report_header() | {
        f"triton {triton.__version__}, sm_{architecture}, width {width}": measured(architecture, width)
        for architecture in arguments.architectures
        for width in WIDTHS
    }
    save_report(report, arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
