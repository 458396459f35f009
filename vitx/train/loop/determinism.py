"""`execution.deterministic`: equal steps give equal bits on a GPU too, or an error names the operator that cannot.

With torch's deterministic algorithms an operator that sums in a fixed order replaces a faster one, and an operator
without such a form raises. Attention needs no setting of its own: torch then orders the sums of flash attention's
backward pass, does not split the keys in the memory-efficient one, and leaves out cuDNN's where its order is not fixed.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from vitx.core.errors import InputError
from vitx.models.build import ordinary_tensors
from vitx.models.device import choose_device
from vitx.train.randomness import seeded

# cuBLAS reads this variable when CUDA starts. With one of these two values its streams share no workspace, so that its
# sums have one order (NVIDIA's cuBLAS documentation, "Results Reproducibility").
WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# The text after the operator's name in torch's error.
NO_DETERMINISTIC_FORM = " does not have a deterministic implementation"


def fix_cublas_workspace(device: str) -> None:
    """Set cuBLAS's workspace for this process, if it may use a GPU: call it before CUDA starts.

    `device` is auto, cpu or cuda. The variable stays set, because cuBLAS keeps what it has started with; it is the only
    lasting change that training makes to its process. Raises InputError for a CUDA that has started without it, and for
    another value.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return
    found = os.environ.get(WORKSPACE)
    if found in FIXED:
        return
    if found is not None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        given = "is not set, and CUDA has started" if found is None else f"is '{found}'"
        raise InputError(
            f"execution.deterministic needs {WORKSPACE} to be {' or '.join(FIXED)} before CUDA starts, and it {given}: "
            f"start with {WORKSPACE}={FIXED[0]}"
        )
    os.environ[WORKSPACE] = FIXED[0]


@contextmanager
def device_to_train_on(device: str, *, deterministic: bool) -> Iterator[torch.device]:
    """The device that `device` (auto, cpu or cuda) means, in a process prepared to take steps while the block runs.

    deterministic: of `Execution`. Raises InputError as the three functions below.
    """
    if deterministic:
        fix_cublas_workspace(device)  # before `choose_device` may start CUDA
    with (
        deterministic_algorithms() if deterministic else nullcontext(),
        own_generators(chosen := choose_device(device)),
        # A notebook may have switched gradients off, to float64, or to autocast.
        torch.enable_grad(),
        torch.autocast(chosen.type, enabled=False),
        ordinary_tensors(),
    ):
        yield chosen


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let torch use only operators with a fixed order of sums while the block runs, then restore torch's switches.

    Raises InputError for an operator that has no such form.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it times the kernels and takes the fastest, which may differ between runs
    try:
        yield
    except RuntimeError as error:
        explained = _explain(str(error))
        if explained is None:
            raise
        raise explained from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def _explain(message: str) -> InputError | None:
    """The error for the user that torch's error `message` stands for; None if it is not about determinism."""
    remedy = "leave out what uses it, or do without the same bits: --set execution.deterministic=false"
    operator, found, _ = message.partition(NO_DETERMINISTIC_FORM)
    if found:
        return InputError(f"execution.deterministic: torch's operator '{operator}' has no deterministic form: {remedy}")
    if WORKSPACE in message:  # torch checks the variable when cuBLAS is first used
        return InputError(
            f"execution.deterministic: CUDA has started without {WORKSPACE}: start with {WORKSPACE}={FIXED[0]}"
        )
    return None


_TRAINING = threading.Lock()


@contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """For one training at a time: it seeds the global generators of this process, whose states come back at the end.

    Raises InputError where another thread trains: they would draw from each other's generators, and its lock on a run
    folder does not exclude its own process.
    """
    if not _TRAINING.acquire(blocking=False):
        raise InputError("another thread of this process trains: train one after the other, or in a process of its own")
    try:
        with seeded(0, device):  # a run seeds them anew before it draws
            yield
    finally:
        _TRAINING.release()
