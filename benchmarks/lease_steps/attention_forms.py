"""The steps of `lease.py kernels` that time the operation: flash Re-Attention against the other ways to compute it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lease_steps.step_report import Report
from support.gpu_timing import SETS, Call, timed
from vitx.models.flash.reattention import Mixes, flash_reattention, plain_reattention

Shape = tuple[int, int, int, int]  # B, H, N, K

SHAPES: dict[str, Shape] = {
    "16b": (64, 12, 197, 32),
    "S": (64, 12, 197, 33),
    "L": (64, 12, 197, 35),
    "384px": (16, 12, 577, 32),
}
TOYS: dict[str, Shape] = {"16b": (1, 12, 17, 32), "S": (1, 12, 9, 33), "L": (1, 12, 17, 35), "384px": (1, 12, 33, 32)}

MODES = {"default": None, "tuned": "max-autotune-no-cudagraphs"}


def shapes(report: Report) -> dict[str, Shape]:
    return TOYS if report.rehearsed else SHAPES


def operands(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Mixes]:
    """(3, B, H, N, K) as a Linear makes it, and the mixes in float32."""
    B, H, N, K = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, N, 3, H, K, generator=generator).to(device, dtype).permute(2, 0, 3, 1, 4)
    weight, bias = torch.randn(H, H, generator=generator), torch.randn(H, generator=generator) / N
    return qkv, Mixes(weight.to(device), bias.to(device))


def both_passes(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v and the mix of one run by the kernels."""
    qkv, drawn = operands(shape, dtype, device)
    inputs = [part.detach().requires_grad_() for part in (*qkv, drawn.weight)]
    q, k, v, weight = inputs
    out = flash_reattention(q, k, v, Mixes(weight, drawn.bias), shape[-1] ** -0.5)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()
    return out, *grads


def mixed_by_bmm(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    return plain_reattention(q, k, v, Mixes(weight, bias), scale)


def mixed_by_convolution(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    maps = ((q * scale) @ k.transpose(-2, -1)).softmax(dim=-1)
    return F.conv2d(maps, weight[:, :, None, None], bias) @ v


def mixed_by_einsum(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    maps = ((q * scale) @ k.transpose(-2, -1)).softmax(dim=-1)
    return (torch.einsum("gh,bhnm->bgnm", weight, maps) + bias[:, None, None]) @ v


FORMS = {"bmm": mixed_by_bmm, "conv": mixed_by_convolution, "einsum": mixed_by_einsum}


class Operation:
    """One shape: its input sets, and every way to compute it; float16."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device, self.scale = shape, device, shape[-1] ** -0.5
        drawn = [operands(shape, torch.float16, device, seed) for seed in range(SETS)]
        self.qkv = [tuple(qkv) for qkv, _ in drawn]
        self.mixes = drawn[0][1]
        assert self.mixes.bias is not None
        self.half = [self.mixes.weight.half(), self.mixes.bias.half()]

    def flash(self, number: int) -> Tensor:
        q, k, v = self.qkv[number]
        return flash_reattention(q, k, v, self.mixes, self.scale)

    @property
    def leaves(self) -> list[Tensor]:
        assert self.mixes.bias is not None
        return [part.detach().requires_grad_() for part in (self.mixes.weight, self.mixes.bias)]

    def flash_form(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
        return flash_reattention(q, k, v, Mixes(weight, bias), scale)

    def both(self, function: Callable[..., Tensor], mixes: list[Tensor]) -> Call:
        """Forward and backward, the gradients of the mixes included."""
        sets = [[part.detach().requires_grad_() for part in qkv] for qkv in self.qkv]
        ones = torch.ones(self.shape, device=self.device, dtype=torch.float16)

        def call(number: int) -> Any:
            out = function(*sets[number], *mixes, self.scale)
            return torch.autograd.grad(out, [*sets[number], *mixes], ones)

        return call

    def form(self, function: Callable[..., Tensor]) -> Call:
        return lambda number: function(*self.qkv[number], *self.half, self.scale)

    def compiled(self, form: str, mode: str) -> Call:
        torch.compiler.reset()
        return self.form(torch.compile(FORMS[form], mode=MODES[mode], dynamic=False))

    def sdpa(self, backend: SDPBackend) -> Call:
        """Attention without the mix: the floor."""

        def call(number: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*self.qkv[number])

        return call


def flash_row(report: Report, title: str, operation: Operation) -> None:
    row, limit = timed(operation.flash, report.device), limit_ms(report, operation.shape)
    told = f"{title} {operation.shape} ms: {format_times({'flash': row})}" + (f", limit {limit:.3f}" if limit else "")
    report.row(f"{title} flash", {**row, "limit_ms": limit}, told)


def floor_rows(report: Report, title: str, operation: Operation) -> None:
    """SDPA without the mix, by each backend."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    times = {name: timed(operation.sdpa(backend), report.device) for name, backend in backends.items()}
    report.row(f"{title} sdpa", times, f"{title} {operation.shape} SDPA without mix, ms: {format_times(times)}")


def compiled_rows(
    report: Report, title: str, operation: Operation, wanted: list[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    times: dict[str, Any] = {}
    for form, mode in wanted:
        times[f"{form} {mode}"] = timed(operation.compiled(form, mode), report.device)
        report.row(f"{title} compiled", times)
    report.row(f"{title} compiled", times, f"{title} torch.compile, ms: {format_times(times)}")
    return {key: times[" ".join(key)]["ms"] for key in wanted if "ms" in times[" ".join(key)]}


def format_times(times: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {row['ms']:.3f}" if "ms" in row else f"{name}: refused" for name, row in times.items())


def verdict(report: Report, title: str, shape: Shape, compiled: dict[tuple[str, str], float]) -> None:
    """Flash over the best of torch.compile."""
    flash = float(report.rows_of("operation").get(f"{title} flash", {}).get("ms", "nan"))
    best = min(compiled, key=lambda key: compiled[key]) if compiled else None
    over = compiled[best] / flash if best else float("nan")
    row = {"flash_ms": flash, "best_compiled": best, "over_best_compiled": over}
    told = f"{title} {shape}: flash {flash:.3f} ms, × {over:.2f} of the best torch.compile ({' '.join(best or ())})"
    report.row(f"{title} verdict", row, told)


def limit_ms(report: Report, shape: Shape) -> float | None:
    """The least time: operations of QKᵀ twice, A V and the mix, or q, k, v and the output once through memory."""
    found = report.rows_of("ceilings")
    if not {"float16", "copy"} <= set(found):
        return None
    B, H, N, K = shape
    operations = 3 * 2 * B * H * N * N * K + 2 * B * H * H * N * N
    moved = 2 * 4 * B * H * N * K
    product, copy = float(found["float16"]["flops_per_second"]), float(found["copy"]["bytes_per_second"])
    return 1e3 * max(operations / product, moved / copy)


def operation(report: Report) -> None:
    """The kernels at every published shape, forward and with backward, and PyTorch's attention without the mix."""
    for title, shape in shapes(report).items():
        subject = Operation(shape, report.device)
        with torch.no_grad():
            flash_row(report, title, subject)
            floor_rows(report, title, subject)
        row = timed(subject.both(subject.flash_form, subject.leaves), report.device)
        report.row(f"{title} both", row, f"{title} forward + backward, ms: {format_times({'flash': row})}")
        kernel_rows(report, title, subject)


def kernel_rows(report: Report, title: str, operation: Operation) -> None:
    """Microseconds of each kernel of a pass forward and backward, by PyTorch's profiler."""
    if report.rehearsed:
        return
    call = operation.both(operation.flash_form, operation.leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for number in range(8):
            call(number % SETS)
        torch.cuda.synchronize()
    found: Any = sorted(profiler.key_averages(), key=lambda entry: -entry.self_device_time_total)
    times = {entry.key: [entry.self_device_time_total / 8, entry.count / 8] for entry in found}
    told = ", ".join(f"{name[:24]} {micro:.0f}" for name, (micro, _) in list(times.items())[:8])
    report.row(f"{title} kernels", times, f"{title} kernels, µs: {told}")


@torch.no_grad()
def compiled(report: Report) -> None:
    """The published shape by torch.compile, in every form."""
    shape = shapes(report)["16b"]
    subject = Operation(shape, report.device)
    report.row("16b eager", {form: timed(subject.form(function), report.device) for form, function in FORMS.items()})
    wanted = [(form, mode) for mode in MODES for form in FORMS]
    times = compiled_rows(report, "16b", subject, wanted)
    report.row("order", [list(key) for key in sorted(times, key=lambda key: times[key])])
    verdict(report, "16b", shape, times)


@torch.no_grad()
def other_shapes(report: Report) -> None:
    """The other published shapes, by the two best forms of the first."""
    order = report.rows_of("compiled").get("order") or [["bmm", "tuned"], ["bmm", "default"]]
    best = [(form, mode) for form, mode in order[:2]]
    for title, shape in list(shapes(report).items())[1:]:
        times = compiled_rows(report, title, Operation(shape, report.device), best)
        verdict(report, title, shape, times)


def backward(report: Report) -> None:
    """Forward and backward together by torch.compile, as training runs them, the mixes' gradients included."""
    subject = Operation(shapes(report)["16b"], report.device)
    half = [part.detach().requires_grad_() for part in subject.half]
    order = report.rows_of("compiled").get("order") or [["bmm", "default"]]
    times: dict[str, Any] = {}
    for form, mode in order[:2]:
        torch.compiler.reset()
        function = torch.compile(FORMS[form], mode=MODES[mode], dynamic=False)
        times[f"{form} {mode}"] = timed(subject.both(function, half), report.device)
        report.row("compiled", times)
    report.row("compiled", times, f"{subject.shape} forward + backward, torch.compile, ms: {format_times(times)}")
