"""Flash Re-Attention compiled ahead of time by Triton, for a GPU that this machine need not have: PTX and its launch.

An engine passes a kernel its arguments by position: inputs, integers, outputs. The two kernels written for that order
(vitx.models.flash.kernels) read and write (B, N, H, K), the layout of the Linears' outputs, so nothing is transposed.
"""

import functools
import importlib.util
import re
from typing import Any, Literal, NamedTuple

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.models.flash.reattention import Tiles, beyond_limits, heads_per_program, kernel_constants, launch_options

Operator = Literal["Reattention", "TalkingHeads"]
Half = Literal["fp16", "bf16"]
KERNELS: dict[Operator, str] = {"Reattention": "reattention_kernel", "TalkingHeads": "talking_heads_kernel"}

# The builder times these tiles on its GPU and keeps the fastest. The last fits the 48 KiB of shared memory that every
# kernel may use; whether TensorRT requests more for the others is not documented.
_SMALL = Tiles(16, 16, 1, 1, 2)
TILES: dict[Operator, tuple[Tiles, ...]] = {
    "Reattention": (Tiles(heads=6), Tiles(heads=4), _SMALL),
    "TalkingHeads": (Tiles(64, 16, 4, 1, 4), Tiles(32, 16, 2, 1, 3), _SMALL),
}

OLDEST = 80  # the first tensor cores that multiply bfloat16
# The oldest PTX version that knows each GPU; for others 8.0, which every driver since CUDA 12.0 reads. A driver refuses
# PTX that is newer than itself, and by default Triton writes the newest.
_PTX_VERSIONS = {100: 86, 103: 88, 110: 90, 120: 87, 121: 88}
_PTX_VERSION = 80
# KiB of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities); 99 elsewhere.
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_SHARED_KIB_ELSEWHERE = 99


class FlashKernel(NamedTuple):
    """A compiled kernel: the name of its entry point in `ptx`, threads and bytes of dynamic shared memory of a block.

    The grid is (`grid_x(tokens)`, images): a block for each tile of queries and each group of heads.
    """

    name: str
    ptx: str
    tiles: Tiles
    threads: int
    shared: int
    groups: int

    def grid_x(self, tokens: int) -> int:
        return -(-tokens // self.tiles.queries) * self.groups


def why_not_compiled(heads: int, tokens: int, width: int) -> str | None:
    """Why the kernels do not take attention of this size; None when they do."""
    beyond = beyond_limits(heads, tokens, width)
    return None if beyond is None else "{} {}, above {}".format(*beyond)


def compiled_kernels(operator: Operator, architecture: str, heads: int, width: int, half: Half) -> list[FlashKernel]:
    """One kernel for each of an operator's TILES that fits the shared memory of `architecture` ("sm89", …), in order.

    Raises InputError for an architecture before sm80 or a size that the kernels do not take, EnvironmentMissing without
    Triton.
    """
    capability = _capability(architecture)
    limit = _SHARED_KIB.get(capability, _SHARED_KIB_ELSEWHERE) * 1024
    compiled = [compiled_kernel(operator, architecture, heads, width, half, tiles) for tiles in TILES[operator]]
    return [kernel for kernel in compiled if kernel.shared <= limit]


@functools.cache
def compiled_kernel(
    operator: Operator, architecture: str, heads: int, width: int, half: Half, tiles: Tiles
) -> FlashKernel:
    """Compile the kernel of an operator with given tiles; see `compiled_kernels` for errors."""
    capability = _capability(architecture)
    unsupported = why_not_compiled(heads, 1, width)  # the tokens are an argument at run time
    if unsupported is not None:
        raise InputError(f"the flash kernels do not take {unsupported}: leave the plugin out")
    if importlib.util.find_spec("triton") is None:
        raise EnvironmentMissing(
            "the flash plugin is compiled by Triton, which is not installed: on Linux it comes with PyTorch; elsewhere "
            "leave the plugin out"
        )
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitx.models.flash import kernels

    function: Any = getattr(kernels, KERNELS[operator])
    constants = kernel_constants(heads, width, tiles, before=operator == "TalkingHeads", bias=True)
    signature = {name: _type_of(name, half, constants) for name in function.arg_names}
    # TensorRT's buffers are aligned to 256 bytes; the widest loads need 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith("_base")}
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # it holds paths of this machine
        compiled = triton.compile(
            ASTSource(function, signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", capability, 32),
            options={**launch_options(tiles), "ptx_version": _PTX_VERSIONS.get(capability, _PTX_VERSION)},
        )
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise CheckFailed(f"{metadata.name} for {architecture} needs scratch memory, which an engine does not give it")
    parameters = sum(kind != "constexpr" for kind in signature.values())
    ptx = without_scratch(compiled.asm["ptx"], metadata.name, parameters)
    return FlashKernel(
        metadata.name,
        ptx,
        tiles,
        metadata.num_warps * metadata.warp_size,
        metadata.shared,
        heads // heads_per_program(heads, tiles),
    )


def without_scratch(ptx: str, kernel: str, parameters: int) -> str:
    """PTX whose `kernel` declares its first `parameters` parameters and no others.

    Triton appends pointers to scratch memory. An engine passes only the arguments that the plugin names, but a driver
    reads as many as are declared, so the unused pointers must go. Raises CheckFailed if the kernel uses one.
    """
    declared = re.findall(rf"^\s*\.param\s.*\b({kernel}_param_\d+)\b", ptx, re.MULTILINE)
    for extra in declared[parameters:]:
        ptx, dropped = re.subn(rf",\s*\.param\s[^,\n]*\b{extra}\b", "", ptx)
        if dropped != 1 or re.search(rf"\b{extra}\b", ptx):
            raise CheckFailed(f"{kernel} uses {extra}, which an engine does not pass: this Triton is not known")
    return ptx


def _capability(architecture: str) -> int:
    number = architecture.removeprefix("sm")
    if not number.isdecimal() or int(number) < OLDEST:
        raise InputError(f"the flash kernels need sm{OLDEST} or newer, not '{architecture}': leave the plugin out")
    return int(number)


def _type_of(name: str, half: Half, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("q_base", "k_base", "v_base", "out_base"):
        return f"*{half}"
    return "*fp32" if name.endswith("_base") else "i32"
