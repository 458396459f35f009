"""TensorRT plans in a bundle, and a stub of the NVIDIA driver: enough for all checks before a GPU is used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitx.core.bundle import MANIFEST, Bundle, FileEntry
from vitx.core.files import sha256_bytes, sha256_file, write_bytes, write_json
from vitx.core.tensorrt_plan import ENGINES_FOLDER, Flavor, PlanInfo, PlanOptions, Profile, sidecar_path

PLAN = b"plan"
OPTIONS = PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False)
PROFILES = tuple(Profile(minimum=low, optimum=high, maximum=high) for low, high in ((1, 1), (2, 8), (9, 32)))
# Reports two GPUs of architecture sm90, by the functions of the driver that vitx calls. Attributes 75 and 76 are the
# major and minor compute capability.
DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


def plan_info(**changes: object) -> PlanInfo:
    fields: dict[str, object] = {
        "flavor": "tensorrt",
        "version": "10.16.1.11",
        "architectures": ("sm89",),
        "profiles": PROFILES,
        "precision": "fp32",
        "options": OPTIONS,
        "onnx_sha256": "0" * 64,
        "sha256": sha256_bytes(PLAN),
        "size": len(PLAN),
        "build_seconds": 1.0,
        "layers": 1,
        "created": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    return PlanInfo.model_validate(fields)


def write_plan_files(path: Path, info: PlanInfo) -> Path:
    write_bytes(path, PLAN)
    write_json(sidecar_path(path), info)
    return path


def add_plan(bundle: Bundle, flavor: Flavor, *, name: str = "", **changes: object) -> Bundle:
    """Add a plan of the bundle's graph and list it in the manifest; the certificate then no longer covers all files."""
    graph = bundle.manifest.files["model.onnx"].sha256
    info = plan_info(**{"flavor": flavor, "onnx_sha256": graph, **changes})
    plan = write_plan_files(bundle.path / ENGINES_FOLDER / f"{name or flavor}.plan", info)
    added = {
        path.relative_to(bundle.path).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
        for path in (plan, sidecar_path(plan))
    }
    manifest = bundle.manifest.model_copy(update={"files": {**bundle.manifest.files, **added}})
    write_json(bundle.path / MANIFEST, manifest)
    return Bundle.open(bundle.path)


def build_driver(folder: Path) -> dict[str, str]:
    """Compile the fake driver; return the environment of a process that finds it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the fake driver is compiled, and found, on Linux")
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}
