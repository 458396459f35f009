"""`execution.deterministic`: a GPU gives the same bits for the same steps too, or an error names what cannot.

Under torch's deterministic algorithms an operator with a fixed order of sums takes the place of a faster one, and one
that has none raises. Attention needs no back end of its own: its flash backward pass is then ordered, the
memory-efficient one does not split the keys, and cuDNN's is left out where its order is not fixed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitx.core.errors import InputError

# What cuBLAS reads when CUDA starts: with these its streams share no workspace, so its sums have one order.
WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# What follows the operator's name in torch's refusal.
NO_DETERMINISTIC_FORM = " does not have a deterministic implementation"


@contextmanager
def deterministic_algorithms(device: str, *, on: bool) -> Iterator[None]:
    """Let torch take only operators with a fixed order of sums while the block runs, where that is `on`.

    Entered before CUDA starts, so `device` is still auto, cpu or cuda. Afterwards the process is as it was, but for
    the workspace of cuBLAS: what has started with it keeps it. Raises InputError for an operator that has no such form,
    and for a CUDA that runs with another workspace.
    """
    if not on:
        yield
        return
    if device != "cpu" and torch.cuda.is_available():
        _fix_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark  # would choose the kernels by their time, which is never the same
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        refusal = _refusal(str(error))
        if refusal is None:
            raise
        raise refusal from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def _fix_workspace() -> None:
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


def _refusal(message: str) -> InputError | None:
    """What torch's error means for the recipe; None for an error that is not about determinism."""
    remedy = "leave out what uses it, or do without the same bits: --set execution.deterministic=false"
    operator, found, _ = message.partition(NO_DETERMINISTIC_FORM)
    if found:
        return InputError(f"execution.deterministic: torch's operator '{operator}' has no deterministic form: {remedy}")
    if WORKSPACE in message:  # torch asks for it where cuBLAS is first used
        return InputError(
            f"execution.deterministic: CUDA has started without {WORKSPACE}: start with {WORKSPACE}={FIXED[0]}"
        )
    return None
