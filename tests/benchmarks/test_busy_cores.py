"""The busy loops of benchmarks/train/busy_cores.py: they are gone when nothing is measured beside them."""

import os
import subprocess
import sys
from pathlib import Path

import busy_cores
import psutil
import pytest
from busy_cores import busy_loops

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a process keeps the id of its parent")


def test_loops_run_as_long_as_they_are_asked_for() -> None:
    before = set(psutil.Process().children())
    with busy_loops(2):
        loops = set(psutil.Process().children()) - before
        assert len(loops) == 2
    assert not any(loop.is_running() for loop in loops)


def test_a_loop_ends_with_a_benchmark_that_is_killed() -> None:
    begin = "from busy_cores import *; loops = busy_loops(1); loops.__enter__(); print('begun', flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(busy_cores.__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", begin], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "begun\n"
        [loop] = psutil.Process(benchmark.pid).children()
        benchmark.kill()
    loop.wait(60)
    assert not loop.is_running()
