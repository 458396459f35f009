"""The flash kernels as TensorRT's quickly deployable plugins, compiled ahead of time (TensorRT 10.9 and newer, 11 too).

A plugin is three decorated functions (`tensorrt.plugin`): `register` gives the outputs' shapes and types, `autotune`
the types and tactics to time, and `aot_impl` PTX, a grid in terms of the input's shape, and integers. All of it goes
into the plan, which then needs neither this module nor Triton. TensorRT for RTX has no `tensorrt_rtx.plugin`.
The decorators read signatures at run time, so annotations must be classes and not strings.
"""

import functools
from typing import TYPE_CHECKING

from vitx.core.errors import EnvironmentMissing
from vitx.export.engines.flash_kernel import FlashKernel, Half, Operator, compiled_kernels
from vitx.export.engines.flash_nodes import DOMAIN

if TYPE_CHECKING:
    import tensorrt.plugin as trtp

    Launch = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]

REATTENTION, TALKING_HEADS = f"{DOMAIN}::Reattention", f"{DOMAIN}::TalkingHeads"


@functools.cache
def register(architecture: str) -> None:
    """Register both operators with TensorRT, compiled for this machine's GPU ("sm89", …); once in a process.

    Raises EnvironmentMissing without TensorRT's Python plugins.
    """
    try:
        import tensorrt.plugin as trtp
    except ImportError as error:
        raise EnvironmentMissing(
            f"TensorRT's Python plugins cannot be imported ({error}): pip install 'vitx[trt]', 10.9 or newer"
        ) from None

    @trtp.register(REATTENTION)
    def describe(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc,
        weight: trtp.TensorDesc, bias: trtp.TensorDesc,
    ) -> trtp.TensorDesc:  # fmt: skip
        return query.like()

    @trtp.autotune(REATTENTION)
    def tune(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc,
        weight: trtp.TensorDesc, bias: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc],
    ) -> list[trtp.AutoTuneCombination]:  # fmt: skip
        return _tactics(query, "Reattention", architecture, mixes=2)

    @trtp.aot_impl(REATTENTION)
    def implement(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc,
        weight: trtp.TensorDesc, bias: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc], tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:  # fmt: skip
        return _launch(query, "Reattention", architecture, tactic)

    @trtp.register(TALKING_HEADS)
    def describe_talking(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc, scores_weight: trtp.TensorDesc,
        scores_bias: trtp.TensorDesc, weight: trtp.TensorDesc, bias: trtp.TensorDesc,
    ) -> trtp.TensorDesc:  # fmt: skip
        return query.like()

    @trtp.autotune(TALKING_HEADS)
    def tune_talking(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc, scores_weight: trtp.TensorDesc,
        scores_bias: trtp.TensorDesc, weight: trtp.TensorDesc, bias: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc],
    ) -> list[trtp.AutoTuneCombination]:  # fmt: skip
        return _tactics(query, "TalkingHeads", architecture, mixes=4)

    @trtp.aot_impl(TALKING_HEADS)
    def implement_talking(
        query: trtp.TensorDesc, key: trtp.TensorDesc, value: trtp.TensorDesc, scores_weight: trtp.TensorDesc,
        scores_bias: trtp.TensorDesc, weight: trtp.TensorDesc, bias: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:  # fmt: skip
        return _launch(query, "TalkingHeads", architecture, tactic)


def _half(query: "trtp.TensorDesc") -> Half:
    return "bf16" if query.dtype.name == "BF16" else "fp16"


def _kernels(query: "trtp.TensorDesc", operator: Operator, architecture: str) -> list[FlashKernel]:
    """One kernel for each tactic, of the query's (B, N, H, K)."""
    return compiled_kernels(operator, architecture, query.shape[2], query.shape[3], _half(query))


def _tactics(
    query: "trtp.TensorDesc", operator: Operator, architecture: str, *, mixes: int
) -> "list[trtp.AutoTuneCombination]":
    """The one combination of types, the query's for all but the float32 mixes, with every tactic to time."""
    import tensorrt.plugin as trtp

    half = _half(query).upper()
    types = [half] * 3 + ["FP32"] * mixes + [half]
    # Custom tactics are positive numbers: 0 is TensorRT's default tactic.
    tactics = range(1, 1 + len(_kernels(query, operator, architecture)))
    return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", list(tactics))]


def _launch(query: "trtp.TensorDesc", operator: Operator, architecture: str, tactic: int) -> "Launch":
    """Entry point, PTX, launch, and the one integer argument: the number of tokens.

    The batch is dynamic, so the grid is an expression in the input's sizes, which the engine evaluates for each batch.
    """
    import tensorrt.plugin as trtp

    kernel = _kernels(query, operator, architecture)[max(tactic, 1) - 1]
    batch, tokens = query.shape_expr[0], query.shape_expr[1]
    launch = trtp.KernelLaunchParams(
        grid_x=trtp.cdiv(tokens, kernel.tiles.queries) * kernel.groups,
        grid_y=batch,
        block_x=kernel.threads,
        shared_mem=kernel.shared,
    )
    return kernel.name, kernel.ptx, launch, trtp.SymExprs.from_tuple((trtp.SymInt32(tokens),))
