"""What the machine says of itself, and what the NVIDIA driver says of its GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_fixture import build_driver
from vitx.core.machine import Gpu, describe_machine, local_architectures, local_gpus

ASK = """
from vitx.core.machine import describe_machine, local_architectures, local_gpus
print([str(gpu) for gpu in local_gpus()], local_architectures(), describe_machine()["gpu"], sep="\\n")
"""


def test_the_driver_is_asked(tmp_path: Path) -> None:
    environment = build_driver(tmp_path)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "['Stand-in 0 (sm90)', 'Stand-in 1 (sm90)']",
        "('sm90', 'sm90')",
        "Stand-in 0 (sm90), Stand-in 1 (sm90)",
    ], done.stderr


def test_gpus_are_named_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    if not local_gpus():
        assert "gpu" not in describe_machine()
        assert local_architectures() == ()
    monkeypatch.setattr("vitx.core.machine.local_gpus", lambda: (Gpu("A", "sm89"),))
    assert describe_machine()["gpu"] == "A (sm89)"
    assert local_architectures() == ("sm89",)
