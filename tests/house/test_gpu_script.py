"""benchmarks/gpu.py on a CPU: its rows, resuming, and refusals."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
SMALL = ("--device", "cpu", "--small", "--models", "deit_tiny_12", "--precisions", "fp32", "--seconds", "0.02")
ROWS = ("--batches", "1,3", "--runtimes", "torch,cuda-graph,onnxruntime", "--parity", "4")

# --small makes two blocks of 192 × 17 tokens at 64 px: embedding, N·24·D² + 4·N²·D a block, head.
FLOPS_OF_AN_IMAGE = 2 * 16 * 768 * 192 + 2 * (17 * 24 * 192**2 + 4 * 17**2 * 192) + 2 * 192 * 1000


@pytest.fixture(scope="module", autouse=True)
def settings_of_this_process() -> Iterator[None]:
    """What the script sets for its process is set back for the other tests of this one."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


def run(*arguments: object) -> int:
    """The script in this process, which has imported PyTorch already; the last test here starts it as users do."""
    return gpu.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "results.json"
    assert run(*SMALL, *ROWS, "--out", path) == 0
    return path


def test_every_row_is_measured_and_compared_or_says_why_not(results: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        if row["runtime"] == "cuda-graph":
            assert row["refused"] == "CUDA graphs need a GPU"
            continue
        assert row["parity"]["verdict"] == "pass"
        assert row["parity"]["flips"] == 0
        assert row["device_p99_ms"] >= row["device_ms"] > 0
        assert row["images_per_second"] == pytest.approx(1000 * row["batch_size"] / row["device_ms"])
        per_second = row["images_per_second"] * FLOPS_OF_AN_IMAGE
        assert row["compute_share"] == pytest.approx(per_second / row["product_flops_per_second"])
    exact = next(row for row in rows if row["runtime"] == "torch" and row["batch_size"] == 1)
    assert exact["parity"]["allowed_over_std"] == 1e-3


def test_what_is_measured_is_not_measured_again(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(*SMALL, *ROWS, "--out", results, "--dry-run") == 0
    # Rows that were refused are tried again.
    assert capsys.readouterr().out.splitlines() == ["deit_tiny_12 fp32 1 cuda-graph", "deit_tiny_12 fp32 3 cuda-graph"]


def test_what_a_runtime_cannot_do_is_a_row(tmp_path: Path) -> None:
    """ONNX has no convolution in bfloat16. deepvit_s names the attention of each block; --small keeps two."""
    path = tmp_path / "results.json"
    chosen = ("--models", "deepvit_s", "--precisions", "bf16", "--batches", "1", "--runtimes", "torch,onnxruntime")
    assert run(*SMALL, *chosen, "--parity", "2", "--out", path) == 0
    rows = {row["runtime"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["torch"]["parity"]["verdict"] == "pass"
    assert "tensor(bfloat16)" in rows["onnxruntime"]["refused"]


def test_the_energy_of_a_call_is_that_of_all_calls_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of a turn warm up and are not timed: they are most of the calls of a slow network."""
    used = [0.0]

    def run(images: Any) -> None:
        used[0] += 6.0

    def times(run: Callable[[], object], seconds: float, device: str) -> list[float]:
        return [1.0 for _ in range(5) if run() is None][2:]

    on_device = SimpleNamespace(from_numpy=lambda images: SimpleNamespace(to=lambda device: images))
    for name, fake in {"torch": on_device, "device_times": times, "product_rate": lambda *_: 1.0}.items():
        monkeypatch.setattr(gpu, name, fake)
    monkeypatch.setattr(gpu, "host_times", lambda *_: [1.0])
    monkeypatch.setattr(gpu, "gpu_energy", lambda: lambda: used[0])
    ((_, found),) = gpu.measure({"torch": run}, np.zeros((3, 2, 2, 3), np.uint8), "fp32", "cuda", 1.0)  # type: ignore[dict-item]
    assert found["joules_per_image"] == 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "none.json")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 3
    assert "torch sees no GPU" in finished.stderr
