"""Re-Attention without maps: its kernels interpreted, compiled for GPUs that are not here, and the plain path."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitx.core.errors import InputError
from vitx.models.flash_reattention import Mixes, Tiles, choose_impl, options_of, plain_reattention, reattention, sizes

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
    assert re.search(r"\b37 passed", ran.stdout), ran.stdout


def test_without_a_gpu_the_maps_are_written_out() -> None:
    q, k, v = torch.randn(3, 2, 3, 8, 32, generator=torch.Generator().manual_seed(0))
    mixes = Mixes(torch.eye(3), torch.zeros(3))
    assert choose_impl(q) == "plain"
    with pytest.raises(InputError, match="the tensors are on 'cpu'"):
        reattention(q, k, v, mixes, 1.0, impl="flash")
    with pytest.raises(InputError, match="expected auto, flash or plain"):
        reattention(q, k, v, mixes, 1.0, impl="fast")  # type: ignore[arg-type]
    assert torch.equal(reattention(q, k, v, mixes, 1.0), plain_reattention(q, k, v, mixes, 1.0))


@pytest.mark.parametrize(
    ("kernel", "capability", "before", "spilled"),
    [
        ("forward_kernel", 80, False, 0),
        ("forward_kernel", 90, False, 0),
        ("forward_kernel", 120, True, 0),
        ("backward_queries_kernel", 90, False, 64),
        ("backward_keys_kernel", 90, False, 0),
    ],
)
def test_compiles_for_gpus(kernel: str, capability: int, before: bool, spilled: int, tmp_path: Path) -> None:
    """To machine code, with tensor cores, within a multiprocessor's registers and shared memory; nothing is run.

    spilled: bytes of registers that one thread may keep in memory.
    """
    import triton.backends.nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitx.models import flash_kernels

    function = getattr(flash_kernels, kernel)
    flags = {"BEFORE": before, **({} if kernel == "backward_queries_kernel" else {"BIAS": True})}
    constants = sizes(12, 32, Tiles(), **flags)
    halves = ("q", "k", "v", "out", "out_grad", "q_grad", "k_grad", "v_grad")

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_base"):
            return "*fp16" if name.removesuffix("_base") in halves else "*fp32"
        return "fp32" if name == "scale" else "i32"

    signature = {name: type_of(name) for name in function.arg_names}
    compiled = triton.compile(
        ASTSource(function, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options=options_of(Tiles()),
    )
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024  # the least of the three has 99 KiB a block
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    assert int(registers[1]) <= 255
    assert int(registers[2]) <= spilled
