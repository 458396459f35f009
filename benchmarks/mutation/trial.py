"""One mutant against its tests: in a copy of the checkout, in a process forked from one that has the heavy imports.

The checkout itself is never changed, so that a run may be killed at any time.
"""

import ctypes
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

# Imported before the fork if the tests import them; never a module of ours.
HEAVY = (
    *(
        "asyncio",
        "PIL.Image",
        "anyio",
        "hypothesis",
        "hypothesis.strategies",
        "numpy",
        "pydantic",
        "requests",
        "pygments",
    ),
    *(
        "google.protobuf.descriptor_pool",
        "grpc",
        "starlette.applications",
        "uvicorn",
        "prometheus_client",
        "typer",
        "rich",
    ),
    *("torch", "timm", "onnx", "onnxscript", "onnxruntime", "pyarrow.parquet", "sklearn.datasets", "scipy.stats"),
)
# Of the installed plugins only hypothesis: the others take longer to import than most tests run.
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0")
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis, a plugin, is imported before pytest starts
_PR_SET_CHILD_SUBREAPER = 36
_NO_TESTS = 5
OUTCOMES = ("survived", "failed", "crashed", "timed out")


def copy_checkout(root: Path, copy: Path) -> None:
    """What git lists or would list, to `copy`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_symlink() or (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)


def prepare(copy: Path) -> None:
    """This process, and all that it starts, imports from `copy`, keeps byte code there and has one thread."""
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(copy))
    if sys.platform == "linux":  # servers that a killed test leaves behind become children of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_source(file: Path, source: str) -> None:
    """Each time a second later than the last: byte code is taken for that of a file of equal time and size."""
    later = int(file.stat().st_mtime) + 1
    file.write_text(source, encoding="utf-8")
    os.utime(file, (later, later))


def import_heavy(names: Sequence[str]) -> None:
    for name in [*names, "_hypothesis_pytestplugin"]:
        importlib.import_module(name)
    gc.freeze()  # pytest collects garbage twice at its end: a child need not look at all that was imported


def run_tests(tests: Sequence[str], seconds: float, log: Path) -> str:
    """One of OUTCOMES; all but the first mean that the mutant was caught."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = int(pytest.main(["-x", *PYTEST, *QUIET, *tests]))
        except BaseException:  # noqa: BLE001 # a child must never return into the caller
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            _end(psutil.Process(child))
            os.waitpid(child, 0)
            _end_orphans()
            return "timed out"
        time.sleep(0.01)
    _end_orphans()
    if os.WIFSIGNALED(ended[1]):
        return "crashed"
    code = os.WEXITSTATUS(ended[1])
    if code == _NO_TESTS:
        raise RuntimeError(f"pytest found none of {list(tests)[:3]}: {log.read_text()}")
    return "failed" if code else "survived"


def _end(process: psutil.Process) -> None:
    for each in [*process.children(recursive=True), process]:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def _end_orphans() -> None:
    for orphan in psutil.Process().children():
        _end(orphan)
        try:
            orphan.wait(5)
        except psutil.Error:
            continue
