"""Re-Attention without maps: the kernels in the interpreter, and compiled for GPUs; and the plain path."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitx.models.flash.reattention import (
    Launch,
    Tiles,
    kernel_constants,
    tiles_of,
    warn_plain,
    why_not_flash,
)
from vitx.models.flash.sizes import Sizes

triton = pytest.importorskip("triton")


def test_the_kernels_in_the_interpreter() -> None:
    """flash_in_interpreter.py: outputs and gradients against float64, layouts, layers, refusals."""
    file = Path(__file__).with_name("flash_in_interpreter.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b44 passed", ran.stdout), ran.stdout


def test_without_a_gpu_the_maps_are_written_out() -> None:
    assert why_not_flash("cpu", torch.float16, 3, 8, 32) == "the tensors are on 'cpu'"


def test_only_half_precision_expects_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("vitx.models.flash.reattention._warn_once", said.append)
    for device, dtype in (("cpu", torch.float16), ("cuda", torch.float32), ("cuda", torch.float16)):
        warn_plain(device, dtype, f"{device} {dtype}")
    assert said == ["cuda torch.float16"]


@pytest.mark.parametrize(
    ("launch", "heads", "width", "tiles"),
    [
        ("sums", 12, 32, Tiles(128, 32, 4, 3, 1)),
        ("weight_grad", 16, 64, Tiles(128, 32, 4, 3, 1)),
        ("talking", 16, 32, Tiles(64, 16, 4, 1, 4)),
        ("talking", 12, 40, Tiles(64, 16, 4, 1, 3)),
        ("talking", 12, 64, Tiles(32, 16, 2, 1, 3)),
        ("out", 12, 32, Tiles(32, 16, 2, 3, 6)),
        ("out", 12, 33, Tiles(32, 16, 2, 2, 6)),
        ("out", 16, 33, Tiles(16, 16, 1, 2, 4)),
        ("v_grad", 12, 32, Tiles(32, 16, 2, 2, 6)),
        ("score_grad", 12, 32, Tiles(32, 16, 2, 2, 4)),
        ("score_grad", 12, 40, Tiles(32, 16, 2, 2, 3)),
    ],
)
def test_the_tiles_are_those_of_the_sweep(launch: Launch, heads: int, width: int, tiles: Tiles) -> None:
    """docs/benchmarks.md; wide heads, of more than 512 channels together, take fewer rows."""
    assert tiles_of(launch, heads, width) == tiles


@pytest.mark.parametrize(("architecture", "width"), [(80, 32), (90, 35), (120, 33)])
def test_compiled_for_gpus(architecture: int, width: int) -> None:
    """To machine code, with tensor cores, within a multiprocessor's shared memory.

    Some registers are spilled, which costs less than tiles without (docs/benchmarks.md), but not many. All launches of
    both passes for one architecture, one of each kernel for the others: benchmarks/models/flash_resources.py measures
    the rest.
    """
    from flash_resources import compiled, kernels, resources

    launches = kernels(width)
    for kernel in launches if architecture == 90 else {kernel.name: kernel for kernel in launches}.values():
        binary = compiled(kernel, width, architecture)
        found = resources(binary)
        assert re.search(r"\bw?g?mma\.", binary.asm["ptx"]), kernel
        assert found["shared_bytes"] <= 99 * 1024  # what a block of the smallest of them has
        assert found["registers"] <= 255
        assert found["stack_bytes"] <= 400, kernel


def test_the_scale_may_be_a_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what torch.compile passes: the same code, but for the conversion of one number."""
    import flash_resources

    monkeypatch.setattr(flash_resources, "HEADS", 2)
    type_of = flash_resources.type_of
    products: dict[str, dict[str, tuple[int, int]]] = {}
    for scale in ("fp32", "fp64"):
        monkeypatch.setattr(
            flash_resources,
            "type_of",
            lambda name, known, scale=scale: scale if name == "scale" else type_of(name, known),
        )
        products[scale] = {}
        for kernel in {kernel.name: kernel for kernel in flash_resources.kernels(33)}.values():
            code = flash_resources.compiled(kernel, 33, 80).asm["ptx"]
            products[scale][kernel.name] = len(re.findall(r"\bmma\.", code)), len(re.findall(r"\.f64\b", code))
    assert all(doubles == 0 for _, doubles in products["fp32"].values())
    for name, (count, doubles) in products["fp64"].items():
        assert count == products["fp32"][name][0] > 0
        assert doubles <= 3, name  # declared, loaded, converted


def test_each_constant_is_read_from_its_place() -> None:
    from vitx.models.flash import tile_functions

    places = [getattr(tile_functions, name.upper()).value for name in Sizes._fields]
    assert places == list(range(len(Sizes._fields)))


def test_the_source_that_torch_compile_generates_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile writes out a kernel, what it uses, and its constants; nothing else of ours is known there."""
    import flash_resources
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as source_of

    from vitx.models.flash import kernels

    monkeypatch.setattr(flash_resources, "HEADS", 2)
    monkeypatch.setattr(
        flash_resources,
        "kernel_constants",
        lambda *given, **more: ast.literal_eval(repr(kernel_constants(*given, **more))),
    )
    for kernel in {kernel.name: kernel for kernel in flash_resources.kernels(33)}.values():
        expected = flash_resources.resources(flash_resources.compiled(kernel, 33, 80))
        file = tmp_path / f"{kernel.name}.py"
        source = source_of(getattr(kernels, kernel.name))
        file.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}", encoding="utf-8")
        monkeypatch.setattr(flash_resources, "flash_kernels", SimpleNamespace(**runpy.run_path(str(file))))
        assert flash_resources.resources(flash_resources.compiled(kernel, 33, 80)) == expected
        monkeypatch.setattr(flash_resources, "flash_kernels", kernels)


def test_the_largest_heads_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 heads of width 64 in the 99 KiB that a block has on most GPUs; by row and by column a kernel takes as much."""
    import flash_resources

    monkeypatch.setattr(flash_resources, "HEADS", 16)
    for kernel in {kernel.name: kernel for kernel in flash_resources.kernels(64)}.values():
        if kernel.name != "weight_grad_kernel":  # which holds one head
            assert flash_resources.compiled(kernel, 64, 89).metadata.shared <= 99 * 1024, kernel


TRACED = """
import torch, triton
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

class Driver:  # torch.compile asks only which GPU the kernels are read for
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from vitx.models.flash.reattention import Mixes, flash_reattention

class Layer(torch.nn.Module):
    def forward(self, qkv, weight, bias):
        q, k, v = qkv.view(2, 37, 3, 12, 40).permute(2, 0, 3, 1, 4)
        return (flash_reattention(q, k, v, Mixes(weight, bias), 0.2).float().sum(),)

with FakeTensorMode():
    shapes = ((2, 37, 3 * 12 * 40), torch.half), ((12, 12), torch.float32), ((12,), torch.float32)
    inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape, dtype in shapes]
    graph, _ = aot_export_module(Layer(), inputs, trace_joint=True, output_loss_index=0)
for node in graph.graph.nodes:
    if "triton" in str(node.target):
        print(node.kwargs["tensors_to_clone"])
"""


def test_torch_compile_sees_the_kernels_and_what_they_write() -> None:
    """Two forward and four backward; torch sees that each writes its outputs only, so it copies no tensor."""
    env = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_INTERPRET": "0"}
    ran = subprocess.run([sys.executable, "-c", TRACED], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    backward = ["['row_sums_base', 'shares_base']", "['out_base']", "['grad_base']", "['grad_base']"]
    assert ran.stdout.splitlines() == ["['sums_base']", "['out_base']", *backward]
