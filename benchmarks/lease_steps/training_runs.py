"""The steps of `lease.py training` that are whole runs of digits-deepvit: precisions, a resumed run, torchrun."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from torch import Tensor

from lease_steps.step_report import Report
from vitx.train import apply_overrides, get_recipe, train
from vitx.train.loop.step import EpochLog


def precisions(report: Report) -> None:
    """Two hundred steps of digits-deepvit in each precision: loss curves and the final top-1."""
    epochs = 1 if report.rehearsed else 9
    for precision in ("float32", "bfloat16", "float16"):
        recipe = apply_overrides(get_recipe("digits-deepvit"), [f"execution.precision={precision}", f"epochs={epochs}"])
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, recorded_losses() as losses:
            result = train(recipe, Path(folder) / "run", device=report.device, quiet=True)
        seconds, values = time.perf_counter() - started, [float(loss) for loss in losses]
        top1 = float(result.history[-1]["top1"])
        row = {"steps": len(values), "loss_every_5th": values[::5], "top1": top1, "seconds": seconds}
        told = " ".join(f"{value:.3f}" for value in values[:: max(1, len(values) // 6)])
        line = f"{precision:<8} {len(values)} steps, loss {told}, top-1 {100 * top1:.1f} %, {seconds:.0f} s"
        report.row(precision, row, line)


@contextmanager
def recorded_losses() -> Iterator[list[Tensor]]:
    """The total of every step, kept on the device."""
    found: list[Tensor] = []
    add = EpochLog.add

    def recording(log: EpochLog, number: int, losses: dict[str, Tensor], checked_total: Tensor) -> None:
        found.append(losses["total"])
        add(log, number, losses, checked_total)

    with mock.patch.object(EpochLog, "add", recording):
        yield found


def vitx_train(out: Path, report: Report, *sets: str, resume: bool = False) -> list[str]:
    command = [sys.executable, "-m", "vitx", "train", "digits-deepvit", "--out", str(out), "--quiet"]
    command += ["--device", report.device] + ["--resume"] * resume
    return command + [word for text in ("workers=2", *sets) for word in ("--set", text)]


def hashes(run: Path) -> dict[str, str]:
    names = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
    found = {name: run / "checkpoints" / "last" / name for name in names}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items() if path.is_file()}


def resume(report: Report) -> None:
    """A run that was killed and resumed has the bits of one that was not; and two runs have each other's."""
    sets = ["execution.deterministic=true", f"epochs={2 if report.rehearsed else 6}", "checkpoint_steps=5"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in ("whole", "again"):
            checked(vitx_train(folder / run, report, *sets))
        killed = folder / "killed"
        process = subprocess.Popen(vitx_train(killed, report, *sets))
        after = killed_within_epoch(process, killed, epoch=1 if report.rehearsed else 3)
        checked(vitx_train(killed, report, *sets, resume=True))
        found = {run: hashes(folder / run) for run in ("whole", "again", "killed")}
    same = {run: bool(found[run]) and found[run] == found["whole"] for run in ("again", "killed")}
    row = {"hashes": found, "same": same, "killed_after": after}
    report.row("resume", row, f"killed after {after}, resumed: same bits {same['killed']}; run twice: {same['again']}")


def checked(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command[2:])}: {(finished.stderr.strip().splitlines() or ['no word'])[-1]}")


def killed_within_epoch(process: subprocess.Popen[bytes], run: Path, epoch: int) -> str:
    """SIGKILL once a checkpoint within `epoch` is there; returns its name."""
    while process.poll() is None:
        for path in (run / "checkpoints").glob("*/state.json"):
            state = json.loads(path.read_text()) if path.is_file() else {}
            if state.get("epoch", 0) >= epoch - 1 and state.get("trainer", {}).get("batches"):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return f"epoch {state['epoch']}, {state['trainer']['batches']} batches"
        time.sleep(0.005)
    raise SystemExit(f"the run ended by itself with {process.returncode}")


def torchrun(report: Report) -> None:
    """One process under torchrun, so that NCCL's group, DDP and the gathering of metrics run once."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += vitx_train(run, report, "epochs=1")[1:]
        started = time.perf_counter()
        finished = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "NCCL_DEBUG": "VERSION"}
        )
        seconds = time.perf_counter() - started
        print(finished.stdout[-4000:], finished.stderr[-4000:], flush=True)
        metrics = run / "metrics.jsonl"
        last = json.loads(metrics.read_text().splitlines()[-1]) if metrics.is_file() else None
    nccl = next((line for line in finished.stdout.splitlines() if "NCCL version" in line), "")
    row = {"command": command, "exit": finished.returncode, "metrics": last, "seconds": seconds, "nccl": nccl}
    top1 = f"top-1 {100 * last['top1']:.1f} %" if last else finished.stderr.strip().splitlines()[-1][:90]
    report.row("torchrun", row, f"exit {finished.returncode}, {top1}, {seconds:.0f} s {nccl}")
