"""Training in separate processes, forked from a server that has imported torch already."""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from server_process import HANG
from vitx.train.recipes.recipe import Recipe, apply_overrides
from vitx.train.recipes.registry import get_recipe

# Settings of a network that trains in a second.
TINY = (
    "model.kwargs.embed_dim=16",
    "model.kwargs.depth=2",
    "model.kwargs.num_heads=2",
    'model.kwargs.attention=["plain","re-attention"]',
    "batch_size=128",
)
TINY_SETTINGS = tuple(part for setting in TINY for part in ("--set", setting))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the seconds, which differ between runs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def context() -> ForkServerContext:
    """A context whose processes start quickly: their parent has no threads, and the trainer and digits in memory."""
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["training_preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the server ignores a module that it does not find
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return chosen


def start_all(function: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run `function(rank, *arguments)` in `count` processes and wait; fail when one of them does."""
    codes = exit_codes(function, count, *arguments)
    assert codes == [0] * count, f"the processes ended with {codes}"


def exit_codes(function: Callable[..., None], count: int, *arguments: Any) -> list[int | None]:
    """Run `function(rank, *arguments)` in `count` processes and wait; return their exit codes."""
    processes: list[ForkServerProcess] = [
        context().Process(target=function, args=(rank, *arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(HANG)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def torchrun_environment(rank: int, count: int, port: int) -> Mapping[str, str]:
    """The environment variables that torchrun sets for each of its processes."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def train_one(recipe: Recipe, out: Path, environment: Mapping[str, str], resume: bool = False) -> None:
    """Train in this process, on one thread, printing nothing."""
    import torch

    from vitx.train import train

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for the data workers, as outside of a fork server's child
    os.environ.update(environment)
    train(recipe, out, resume=resume, device="cpu", quiet=True)


def hold_step(place: tuple[int, int], gate: Path) -> None:
    """In this process the step `place`, (epoch, batch), waits as long as the file `gate` is there."""
    from vitx.train.loop.trainer import Trainer

    step = Trainer.step

    def held(self: Trainer, epoch: int, batch: Any) -> None:
        while (epoch, batch.number) == place and gate.exists():
            time.sleep(0.01)
        step(self, epoch, batch)

    Trainer.step = held  # type: ignore[method-assign]


def vitx_in(folder: Path, arguments: tuple[str, ...], errors: Path, held: tuple[int, int] | None) -> None:
    """Run the command line in this process, with one thread and no GPU; what it prints goes to `errors`.

    held: the (epoch, batch) of a step that waits as long as there is a file `gate` in the folder.
    """
    from vitx.cli import main

    _prepare(folder, errors)
    if held is not None:
        hold_step(held, folder / "gate")
    sys.argv = ["vitx", *arguments]
    main()


def script_in(folder: Path, program: Path, printed: Path) -> None:
    """Run a Python file as `vitx_in` does the command line, its conversions in this process too."""
    import vitx.export.bundling

    def run_here(title: str, function: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
        return function(*arguments)

    _prepare(folder, printed)
    vitx.export.bundling.run_limited = run_here  # type: ignore[attr-defined]  # in this process only
    runpy.run_path(str(program), run_name="__main__")


def _prepare(folder: Path, printed: Path) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class VitxProcess:
    """`vitx ARGUMENTS` in a process that was forked with torch in memory."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], errors: Path, held: tuple[int, int] | None = None
    ) -> None:
        self._errors = errors
        self._process = context().Process(target=vitx_in, args=(folder, arguments, errors, held))
        self._process.start()

    def require_running(self) -> None:
        assert self._process.is_alive(), self._errors.read_text()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float = HANG) -> tuple[int | None, str]:
        """The exit code and all that was printed."""
        self._process.join(seconds)
        return self._process.exitcode, self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def train_in_a_group(recipe: Recipe, out: Path, resume: bool, gate: Path | None = None) -> None:
    """Train in this process, as the head of a process group: a signal to the group reaches its workers too.

    With 18 images in batches of 4 the last step waits as long as the file `gate` is there.
    """
    os.setpgid(0, 0)
    if gate is not None:
        hold_step((recipe.epochs, 18 // 4 - 1), gate)
    train_one(recipe, out, {}, resume)


def stop_in_a_group(recipe: Recipe, out: Path) -> None:
    """`train_in_a_group`; the exit code is the number of the signal that stopped training in order."""
    from vitx.train.loop.interruption import TrainingStopped

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    try:
        train_in_a_group(recipe, out, False)
    except TrainingStopped as stopped:
        sys.exit(stopped.signal)


def train_one_of(rank: int, count: int, port: int, recipe: Recipe, out: Path, resume: bool = False) -> None:
    """Train as one of `count` processes that torchrun has started."""
    train_one(recipe, out, torchrun_environment(rank, count, port), resume)


def die_at(rank: int, count: int, port: int, recipe: Recipe, out: Path, place: tuple[int, int]) -> None:
    """Train; the last process is killed before its step `place`, (epoch, batch). Others exit with the error's code."""
    from vitx.core.errors import VitxError
    from vitx.train.loop.trainer import Trainer

    step = Trainer.step

    def fatal(self: Trainer, epoch: int, batch: Any) -> None:
        if rank == count - 1 and (epoch, batch.number) == place:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, epoch, batch)

    Trainer.step = fatal  # type: ignore[method-assign]  # in this process only
    try:
        train_one_of(rank, count, port, recipe, out)
    except VitxError as error:
        if "another process has died" not in str(error):
            raise
        sys.exit(error.exit_code)


def refused_among_others(
    rank: int, count: int, port: int, recipes: list[Recipe], outs: list[Path], places: list[Path], text: str
) -> None:
    """Train, each rank with its own recipe, folder and working directory; all must be refused with `text`."""
    from vitx.core.errors import InputError
    from vitx.train.loop import resuming

    resuming.VISIBILITY_TIMEOUT = 0.0  # one file system, so there is nothing to wait for
    os.chdir(places[rank])
    try:
        train_one_of(rank, count, port, recipes[rank], outs[rank], True)
    except InputError as error:
        if text not in str(error):
            raise
        return
    raise AssertionError("nothing was refused")


def holder_of(run: Path) -> ForkServerProcess:
    """A process that holds the lock of a run for a minute."""
    here, there = context().Pipe()
    holder = context().Process(target=_hold, args=(run, there))
    holder.start()
    assert here.poll(HANG), "the holder has not begun"
    return holder


def _hold(run: Path, ready: Any) -> None:
    from vitx.core.run import RunFolder
    from vitx.train.loop.run_lock import RunLock

    with RunLock(RunFolder(run)) as lock:
        lock.acquire()
        ready.send(True)
        time.sleep(60)


def restored_state(rank: int, count: int, port: int, recipe: Recipe, run: Path, out: Path) -> None:
    """Resume a run in `count` processes, gather its state again, and write it into the file `out`."""
    import torch
    from safetensors.torch import save_file

    from vitx.core.run import RunFolder
    from vitx.train.loop.checkpoint import TENSOR_FILES
    from vitx.train.loop.distributed.processes import join_processes
    from vitx.train.loop.trainer import Trainer

    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, count, port))
    device = torch.device("cpu")
    with join_processes(device) as processes:
        trainer = Trainer(recipe, RunFolder(run), device, processes, skip_bad=False, quiet=True)
        trainer.open_run()
        tensors, _ = trainer._state()
        if processes.writes:
            named = zip(TENSOR_FILES, tensors, strict=True)
            save_file({f"{file}: {name}": value.clone() for file, part in named for name, value in part.items()}, out)


def losses_of_ten_steps(rank: int, count: int, port: int, recipe: Recipe, out: Path) -> None:
    """Take ten steps as one of torchrun's processes; `out`/rank.pt has the total losses on this process's parts."""
    import torch

    from vitx.core.run import RunFolder
    from vitx.train.loop.distributed.processes import join_processes
    from vitx.train.loop.trainer import Trainer

    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, count, port))
    device = torch.device("cpu")
    with join_processes(device) as processes:
        trainer = Trainer(recipe, RunFolder(out / "run"), device, processes, skip_bad=False, quiet=True)
        for batch in trainer.prefetcher.batches(trainer.data.batches(1, part=processes.batch_part), ahead=False):
            if batch.number == 10:
                break
            trainer.step(1, batch)
        torch.save(trainer.log.checked_totals[:10], out / f"{rank}.pt")


def run_study(study: Any, variants: Any) -> None:
    """Train the variants of a `Study`, whose runs are processes of their own."""
    study.run(variants)


def recipe_of(*overrides: str) -> Recipe:
    return apply_overrides(get_recipe("digits-deepvit"), overrides)


def outcome_of_two(rank: int, make: Callable[[], Any], x: Any, weight: Any, folder: Path) -> None:
    """Run half of a batch through a module with synchronised BatchNorm; write its outcome to `folder`/RANK.pt."""
    import torch
    import torch.distributed as dist

    from vitx.train.loop.distributed.synchronized_norm import synchronize_batch_norm

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    half = len(x) // 2
    rows = slice(rank * half, rank * half + half)
    module = synchronize_batch_norm(make(), torch.device("cpu"))
    torch.save(forward_backward(module, x[rows], weight[rows]), folder / f"{rank}.pt")
    dist.destroy_process_group()


def forward_backward(module: Any, x: Any, weight: Any) -> dict[str, Any]:
    """The output y of `module` at x, the gradients of Σ weight·y, and the buffers afterwards."""
    x = x.clone().requires_grad_()
    y = module(x)
    (y * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients, **dict(module.named_buffers())}


def small_re_attention() -> Any:
    """Re-Attention in float64 whose BatchNorm is not the identity."""
    import torch

    from vitx.models import ReAttention

    torch.manual_seed(0)
    module = ReAttention(8, 2, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        module.var_norm.weight.copy_(torch.tensor([1.5, 0.8]))  # type: ignore[operator]  # a Parameter
        module.var_norm.bias.copy_(torch.tensor([0.05, -0.1]))  # type: ignore[operator]
    return module
