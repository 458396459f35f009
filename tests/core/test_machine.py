"""The description of the machine, and its GPUs as the NVIDIA driver lists them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu_fixture import build_driver
from vitx.core.machine import (
    PACKAGES,
    Gpu,
    describe_machine,
    installed_versions,
    local_architectures,
    local_gpus,
    sums_int8_exactly,
)

ASK = """
from vitx.core.machine import describe_machine, local_architectures, local_gpus
print([str(gpu) for gpu in local_gpus()], local_architectures(), describe_machine()["gpu"], sep="\\n")
"""


def test_the_driver_is_asked(tmp_path: Path) -> None:
    environment = build_driver(tmp_path)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "['Fake GPU 0 (sm90)', 'Fake GPU 1 (sm90)']",
        "('sm90', 'sm90')",
        "Fake GPU 0 (sm90), Fake GPU 1 (sm90)",
    ], done.stderr


def test_gpus_are_named_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    if not local_gpus():
        assert "gpu" not in describe_machine()
        assert local_architectures() == ()
    monkeypatch.setattr("vitx.core.machine.local_gpus", lambda: (Gpu("A", "sm89"),))
    assert describe_machine()["gpu"] == "A (sm89)"
    assert local_architectures() == ("sm89",)


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("fma avx2", False),
        ("avx512f avx512bw avx512_vbmi", False),
        ("avx512f avx512_vnni", True),
        ("avx2 avx_vnni", True),
        ("amx_tile amx_int8", True),
    ],
)
def test_which_processors_add_int8_products_in_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, exact: bool
) -> None:
    monkeypatch.setattr("vitx.core.machine.platform.machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: A\nflags\t\t: fpu {flags}\nbugs\t\t:\n")
    assert sums_int8_exactly(path) is exact
    assert not sums_int8_exactly(tmp_path / "another system")
    monkeypatch.setattr("vitx.core.machine.platform.machine", lambda: "aarch64")
    assert sums_int8_exactly(tmp_path / "on ARM")


def test_the_description_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3 * 2**18}.__getitem__)
    found = describe_machine()
    assert found["cores"] == 3
    assert found["memory_gib"] == 3
    assert found["system"] == f"{platform.system()} {platform.machine()}"
    assert found["python"] == platform.python_version()
    assert found["processor"]


def test_versions_are_of_what_is_installed() -> None:
    found = installed_versions()
    assert found["numpy"] == np.__version__
    assert set(found) <= set(PACKAGES)
    assert all(found.values())
