"""Joules of a GPU, from NVIDIA's own bindings over a fake NVML: a counter that grows by 1.5 J with every read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NVML = """
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)1; return index; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    static int reads;
    *millijoules = 1500 * ++reads;
    return COUNTS && reads < 4 ? 0 : 3; /* 3: not supported */
}
"""
READ = """
from vitx.bench.energy import gpu_energy
read = gpu_energy()
print(*([read(), read(), read()] if read else ["none"]))
"""


@pytest.mark.parametrize(("counts", "expected"), [(1, "3.0 4.5 nan"), (0, "none")])
def test_joules_are_read(tmp_path: Path, counts: int, expected: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the fake library is compiled, and found, on Linux")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", f"-DCOUNTS={counts}", "-o", str(library), str(tmp_path / "nvml.c")]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr


def test_without_the_library_or_the_bindings_there_is_no_counter() -> None:
    blocked = f"import sys; sys.modules['pynvml'] = None\n{READ}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "none", done.stderr
