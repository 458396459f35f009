"""One thread: networks here are small, and pytest's workers and the servers they start share the cores."""

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How fast this machine is decides no test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by child processes too
# A shell that runs the tests in the background has the interrupt ignored, and the processes they start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(50_000, 20, 20)  # what is collected stays too: looking through it took a tenth of the time

# Files of tests that take long or wait: begun first, so that no worker is left with one when the others are done.
LONGEST = ("test_readme.py", "test_two_nodes.py", "test_ray.py", "test_study.py", "test_reattention.py")

pytest_plugins = ["ray_fixtures", "serving_fixtures"]


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where pytest's workers leave for each other what is expensive to make."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITX_CACHE", str(folder / "cache"))
        patch.setenv("VITX_TESTS_SHARED_FOLDER", str(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def sessions_of_one_thread() -> Iterator[None]:
    """Where a session does not say how many threads it takes; by default those of ONNX Runtime spin on every core."""
    runtime = sys.modules.get("onnxruntime")
    if runtime is None:  # no test that needs it was collected
        yield
        return
    made = runtime.SessionOptions

    def options() -> Any:
        one = made()
        one.intra_op_num_threads = 1
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "SessionOptions", options)
        yield


@pytest.fixture(scope="session", autouse=True)
def operators_read_once() -> Iterator[None]:
    """PyTorch's exporter parses the sources of its 500 operators in each export, which takes a second."""
    if "onnxscript" not in sys.modules:  # no test that exports was collected
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session", autouse=True)
def operators_found_once() -> Iterator[None]:
    """Each export asks for PyTorch's 800 composite operators to be made, once for every namespace of operators.

    It need not, as long as they are the same: a sixteenth of a small network's export.
    """
    if "onnxscript" not in sys.modules:
        yield
        return
    import torch
    from torch._export import utils

    make = utils._materialize_cpp_cia_ops
    made: list[str] = []

    def make_new() -> None:
        listed = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if listed != made:
            make()
            made[:] = listed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_materialize_cpp_cia_ops", make_new)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What the tests have imported stays: the garbage collector need not look through its 800,000 objects again.

    Tracing a network allocates so much that looking every 700 objects took a tenth of such a test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules report as leaks what is never collected
