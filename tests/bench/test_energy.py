"""Joules of a GPU, from NVIDIA's own bindings over a fake NVML: a counter that grows by 1.5 J with every read.

CUDA's first GPU is NVML's second, as with CUDA_VISIBLE_DEVICES=1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUDA = r"""
#include <stdio.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 9; return 0; }
int cuDeviceGetPCIBusId(char *address, int size, int device) {
    snprintf(address, size, device == 0 ? "0000:65:00.0" : "0000:17:00.0");
    return 0;
}
"""
NVML = """
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    *device = (void *)1;
    return strcmp(address, "0000:65:00.0") == 0 ? 0 : 6; /* 6: not found */
}
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


@pytest.mark.parametrize(("gpus", "counts", "expected"), [(2, 1, "3.0 4.5 nan"), (2, 0, "none"), (0, 1, "none")])
def test_joules_are_those_of_the_gpu_that_cuda_computes_on(
    tmp_path: Path, gpus: int, counts: int, expected: str
) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the fake library is compiled, and found, on Linux")
    for name, text in (("libnvidia-ml", NVML), ("libcuda", CUDA)):
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        given = [f"-DCOUNTS={counts}", f"-DGPUS={gpus}", "-o", str(tmp_path / f"{name}.so.1")]
        subprocess.run([compiler, "-shared", "-fPIC", *given, str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr


def test_without_the_library_or_the_bindings_there_is_no_counter() -> None:
    blocked = f"import sys; sys.modules['pynvml'] = None\n{READ}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "none", done.stderr
