"""The kernels stored in a plan: compiled for GPUs that this machine lacks, their PTX inspected and assembled."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.export.engines import flash_kernel
from vitx.export.engines.flash_kernel import (
    TILES,
    FlashKernel,
    Half,
    Operator,
    compiled_kernel,
    compiled_kernels,
    why_not_compiled,
    without_scratch,
)
from vitx.models.flash.reattention import Tiles

pytest.importorskip("triton")
DEFAULT_SHARED = 48 * 1024


def assembled(kernel: FlashKernel, architecture: str, folder: Path) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, from the assembler for that GPU."""
    import triton.backends.nvidia
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    capability = int(architecture.removeprefix("sm"))
    source, target = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(kernel.ptx)
    command = [get_ptxas(capability).path, f"--gpu-name={sm_arch_from_capability(capability)}", source, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", target], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("operator", "architecture", "heads", "half", "target", "version"),
    [  # The time to compile grows with the square of the heads: 12, as DeepViT has, for each operator once.
        ("Reattention", "sm80", 4, "fp16", "sm_80", "8.0"),
        ("TalkingHeads", "sm89", 12, "bf16", "sm_89", "8.0"),
        ("Reattention", "sm90", 12, "fp16", "sm_90a", "8.0"),
        ("Reattention", "sm100", 4, "bf16", "sm_100a", "8.6"),
        ("TalkingHeads", "sm120", 4, "fp16", "sm_120a", "8.7"),
    ],
)
def test_ptx_for_a_gpu_that_this_machine_lacks(
    operator: Operator, architecture: str, heads: int, half: Half, target: str, version: str, tmp_path: Path
) -> None:
    kernel = compiled_kernel(operator, architecture, heads, 32, half, TILES[operator][0])
    ptx, kind = kernel.ptx, {"fp16": "f16", "bf16": "bf16"}[half]
    assert re.findall(r"^\.target (.*)$", ptx, re.MULTILINE) == [target]
    assert re.findall(r"^\.version (.*)$", ptx, re.MULTILINE) == [version]
    assert re.findall(r"^\.visible \.entry (\w+)\($", ptx, re.MULTILINE) == [kernel.name]
    assert re.findall(r"^\.reqntid (\d+)", ptx, re.MULTILINE) == [str(kernel.threads)]
    products = rf"(mma\.sync\.[^;]*|wgmma\.mma_async\.[^;]*)\.f32\.{kind}\.{kind}|tcgen05\.mma\.[^;]*kind::f16"
    assert re.search(products, ptx)
    # The inputs, the number of tokens, the output, and no argument that an engine does not pass.
    entry = ptx[ptx.index(f".entry {kernel.name}(") : ptx.index(".reqntid")]
    kinds = re.findall(r"\.param \.(\w+)", entry)
    assert kinds == ["u64"] * (7 if operator == "TalkingHeads" else 5) + ["u32", "u64"]
    # No path of this machine, which would then be in the plan.
    assert not re.search(r"\.file|\.loc\b|flash_kernels\.py", ptx)
    registers, stack = assembled(kernel, architecture, tmp_path)
    assert registers <= 255
    assert stack <= (200 if operator == "Reattention" else 8)  # its six outputs are worth that (docs/benchmarks.md)


def test_launch_sizes_are_tritons() -> None:
    """Threads and shared memory as the compiler reports them for the same kernel, tile by tile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitx.models.flash import kernels
    from vitx.models.flash.reattention import kernel_constants, launch_options

    for tiles in TILES["Reattention"][::2]:  # two warps and one
        kernel = compiled_kernel("Reattention", "sm89", 4, 16, "fp16", tiles)
        constants = kernel_constants(4, 16, kernel.tiles, bias=True)
        kinds = dict.fromkeys(("q_base", "k_base", "v_base", "out_base"), "*fp16")
        kinds |= {"mix_base": "*fp32", "bias_base": "*fp32", "tokens": "i32", **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds[name] for name in kernels.reattention_kernel.arg_names}
        pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
        aligned = {(index,): [["tt.divisibility", 16]] for index in pointers}
        source = ASTSource(kernels.reattention_kernel, signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", 89, 32)
        compiled = triton.compile(source, target=target, options=launch_options(kernel.tiles))
        assert kernel.shared == compiled.metadata.shared
        assert kernel.threads == 32 * compiled.metadata.num_warps
        assert kernel.name == compiled.metadata.name
        groups = {6: 1, 2: 2}[tiles.heads]
        assert [kernel.grid_x(tokens) for tokens in (1, 65)] == [groups, groups * -(-65 // kernel.tiles.queries)]


def test_only_tactics_that_fit_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What talking heads take at 16 heads of 64, the largest size, is more than sm89 has and less than sm90 has."""
    tiles = TILES["TalkingHeads"]
    shared = dict(zip(tiles, (133_120, 68_608, 34_816), strict=True))

    def compiled(*given: Any) -> FlashKernel:
        return FlashKernel("kernel", "", given[-1], 128, shared[given[-1]], 1)

    monkeypatch.setattr(flash_kernel, "compiled_kernel", compiled)
    for architecture, fitting in (("sm90", tiles), ("sm80", tiles), ("sm89", tiles[1:]), ("sm120", tiles[1:])):
        kernels = compiled_kernels("TalkingHeads", architecture, 16, 64, "fp16")
        assert tuple(kernel.tiles for kernel in kernels) == fitting


@pytest.mark.parametrize(
    ("architecture", "kib"),
    [(f"sm{number}", 99) for number in (86, 88, 89, 120, 121)]
    + [("sm80", 163), ("sm87", 163), *((f"sm{number}", 227) for number in (90, 100, 103, 110))],
)
def test_a_block_has_the_shared_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch, architecture: str, kib: int) -> None:
    """CUDA C++ Programming Guide, compute capabilities."""
    sizes = dict(zip(TILES["Reattention"], (kib * 1024, kib * 1024 + 1, 0), strict=True))
    monkeypatch.setattr(
        flash_kernel, "compiled_kernel", lambda *given: FlashKernel("k", "", given[-1], 128, sizes[given[-1]], 1)
    )
    found = compiled_kernels("Reattention", architecture, 4, 32, "fp16")
    assert [kernel.shared for kernel in found] == [kib * 1024, 0]


def test_the_tiles_that_are_timed() -> None:
    small = Tiles(queries=16, keys=16, warps=1, stages=1, heads=2)
    assert {
        "Reattention": (Tiles(32, 16, 2, 2, 6), Tiles(32, 16, 2, 2, 4), small),
        "TalkingHeads": (Tiles(64, 16, 4, 1, 4), Tiles(32, 16, 2, 1, 3), small),
    } == TILES


def entry_of(parameters: int) -> str:
    names = ",\n".join(f"\t.param .u64 .ptr .global .align 16 kernel_param_{index}" for index in range(parameters))
    return f".visible .entry kernel(\n{names}\n)\n{{\n\tret;\n}}\n"


@pytest.mark.parametrize(
    ("operator", "architecture", "half", "version"),
    [
        ("Reattention", "sm89", "fp16", 80),
        ("TalkingHeads", "sm100", "bf16", 86),
        ("Reattention", "sm103", "bf16", 88),
        ("Reattention", "sm110", "bf16", 90),
        ("Reattention", "sm120", "fp16", 87),
        ("TalkingHeads", "sm121", "fp16", 88),
    ],
)
def test_what_triton_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, operator: Operator, architecture: str, half: Half, version: int
) -> None:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from vitx.models.flash import kernels
    from vitx.models.flash.reattention import kernel_constants, launch_options

    talking, tiles = operator == "TalkingHeads", TILES[operator][-1]
    function: Any = kernels.talking_heads_kernel if talking else kernels.reattention_kernel
    pointers = [name for name in function.arg_names if name.endswith("_base")]
    metadata = SimpleNamespace(
        name="kernel", global_scratch_size=0, profile_scratch_size=0, num_warps=1, warp_size=32, shared=1234
    )
    asked: list[Any] = []

    def compile_kernel(source: Any, target: Any, options: Any) -> Any:
        asked.append((source, target, options, knobs.compilation.disable_line_info))
        return SimpleNamespace(metadata=metadata, asm={"ptx": entry_of(len(pointers) + 3)})

    monkeypatch.setattr("triton.compiler.ASTSource", lambda *given, **named: (given, named))
    monkeypatch.setattr(triton, "compile", compile_kernel)
    before = knobs.compilation.disable_line_info
    make = compiled_kernel.__wrapped__  # what other tests compile stays in the cache
    kernel = make(operator, architecture, 12, 32, half, tiles)
    assert knobs.compilation.disable_line_info == before
    ((source, target, options, without_lines),) = asked
    ((given, signature), named) = source
    constants = kernel_constants(12, 32, tiles, before=talking, bias=True)
    kinds = dict.fromkeys(("q_base", "k_base", "v_base", "out_base"), f"*{half}")
    expected = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name in pointers else "i32")
        for name in function.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in pointers}
    assert (given, signature, named) == (function, expected, {"constexprs": constants, "attrs": aligned})
    assert target == GPUTarget("cuda", int(architecture[2:]), 32)
    assert (options, without_lines) == ({**launch_options(tiles), "ptx_version": version}, True)
    # The inputs, the output and the number of tokens stay: the two pointers behind them are those to scratch memory.
    assert kernel == FlashKernel("kernel", entry_of(len(pointers) + 1), tiles, 32, 1234, 6)
    for name in ("global_scratch_size", "profile_scratch_size"):
        changed = SimpleNamespace(**{**vars(metadata), name: 128})
        monkeypatch.setattr(
            triton, "compile", lambda *_, changed=changed, **__: SimpleNamespace(metadata=changed, asm={"ptx": ""})
        )
        with pytest.raises(CheckFailed, match=f"^kernel for {architecture} needs scratch memory, which an engine does"):
            make(operator, architecture, 12, 32, half, tiles)


def test_the_smallest_tile_fits_everywhere_at_the_largest_size() -> None:
    assert compiled_kernel("Reattention", "sm89", 16, 64, "fp16", TILES["Reattention"][-1]).shared <= DEFAULT_SHARED


@pytest.mark.parametrize(
    ("architecture", "heads", "width", "message"),
    [
        ("sm75", 4, 32, "the flash kernels need sm80 or newer, not 'sm75'"),
        ("ampere", 4, 32, "the flash kernels need sm80 or newer, not 'ampere'"),
        ("sm89", 17, 32, "do not take heads 17, above 16"),
        ("sm89", 4, 72, "do not take head width 72, above 64"),
    ],
)
def test_unsupported_architectures_and_sizes(architecture: str, heads: int, width: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled_kernels("Reattention", architecture, heads, width, "fp16")
    assert why_not_compiled(4, 1026, 32) == "tokens 1026, above 1025"
    assert why_not_compiled(16, 1025, 64) is None


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentMissing, match="compiled by Triton, which is not installed: on Linux it comes with"):
        compiled_kernels("Reattention", "sm89", 5, 32, "fp16")


def test_scratch_that_is_used_is_not_dropped() -> None:
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 .ptr .global .align 1 f_param_1\n)\n{\n{body}}\n"
    assert without_scratch(ptx, "f", 1) == ".visible .entry f(\n\t.param .u64 f_param_0\n)\n{\n{body}}\n"
    assert without_scratch(ptx, "f", 2) == ptx
    with pytest.raises(CheckFailed, match="f uses f_param_1, which an engine does not pass"):
        without_scratch(ptx.replace("{body}", "ld.param.b64 %rd1, [f_param_1];\n"), "f", 1)
