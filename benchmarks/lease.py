"""Every question for a rented GPU in three commands of nine minutes each; see lease.md.

    python benchmarks/lease.py PART --out DIR [--rehearse] [--only STEP,…] [--minutes 9]

PART is kernels, networks or training. Its steps run in the order of their value, each in a process of its own with a
limit of its own: one that fails, or is beyond its limit, is a line of the table, and the next one runs. DIR holds
PART.json, whole after every row, and PART.log, what the steps said. `--rehearse` runs every step at toy sizes on a CPU,
the kernels in Triton's interpreter. Exit code 3 without a GPU or a package, 1 when a step did not end well.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

from lease_steps.step_report import now, read, write  # noqa: E402  # beside this file, wherever it is called from

# Seconds that each step may take, in the order of their value.
PARTS: dict[str, dict[str, int]] = {
    "kernels": {
        "machine": 30,
        "ceilings": 45,
        "compile": 150,
        "correctness": 90,
        "operation": 60,
        "compiled": 170,
        "profile": 120,
        "sanitizers": 120,
        "backward": 120,
        "shapes": 200,
        "compile_sweep": 150,
        "sweep": 150,
        "other_sweep": 150,
    },
    "networks": {
        "compile": 200,
        "deit_base_12": 150,
        "deepvit_16b": 150,
        "plainvit_16b": 120,
        "deepvit_s": 120,
        "plainvit_s": 120,
    },
    "training": {
        "speed": 240,
        "where": 120,
        "losses": 180,
        "precisions": 120,
        "resume": 120,
        "torchrun": 90,
    },
}
# Needed by name here, so that a missing one is known before the first step.
PACKAGES = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
    *("torch", "torchvision", "triton", "timm", "numpy", "safetensors", "PIL", "sklearn", "tensorboard", "rich"),
    *("onnx", "onnxscript", "onnx_ir", "ml_dtypes", "onnxruntime", "typer", "huggingface_hub"),
)
# No GPU even where there is one; one thread, since threads that wait for a busy core take minutes for seconds.
REHEARSAL = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
# A CPU at toy sizes may take this many times as long as a GPU.
PATIENCE = 4
# A step is not begun with less than this many seconds left.
LEAST_SECONDS = 10
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Outcome(NamedTuple):
    text: str
    seconds: float


def run_step(part: str, step: str, report: Path, log: Path, seconds: float, *, rehearse: bool) -> Outcome:
    """Run one step in a process group of its own, which ends with it."""
    command = [sys.executable, "-m", f"lease_steps.{part}", step, "--report", str(report)]
    started = time.perf_counter()
    errors = log.with_suffix(".stderr")
    with log.open("a") as out, errors.open("w+") as stderr:
        out.write(f"\n== {step} {now()}\n")
        out.flush()
        process = subprocess.Popen(
            command + ["--rehearse"] * rehearse,
            stdout=out,
            stderr=stderr,
            env=environment(rehearse=rehearse),
            process_group=0,
        )
        try:
            code = process.wait(timeout=seconds)
            text = "done"
        except subprocess.TimeoutExpired:
            code, text = 1, f"over its limit of {seconds:.3g} s"
        end_group(process)
        stderr.seek(0)
        said = stderr.read()
        out.write(said[-200_000:])
    errors.unlink()
    if code and text == "done":
        text = f"failed ({code}): {last_line(said)}"
    return Outcome(text, time.perf_counter() - started)


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of a step: it would slow down the next one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def environment(*, rehearse: bool) -> dict[str, str]:
    """The environment of a step: the checkout importable, compiled code kept from step to step, nothing downloaded."""
    paths = [str(FOLDER.parent), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = Path(os.environ.get("LEASE_CACHE", f"/tmp/lease-cache-{'rehearsal' if rehearse else 'gpu'}"))
    return {
        **{name: str(caches / folder) for name, folder in CACHES.items()},
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(16, os.cpu_count() or 1)),
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(REHEARSAL if rehearse else {}),
    }


def table(part: str, whole: dict[str, Any]) -> list[str]:
    """What a console shows at the end: each step's outcome and its lines."""
    lines = [f"{part}: {whole['machine'].get('gpu', 'no GPU')}, {whole['command']}"[:150]]
    lines += [
        "a rehearsal at toy sizes on a CPU: that each step ends is what it shows, its numbers mean nothing"
    ] * whole["rehearsed"]
    for step, entry in whole["steps"].items():
        lines.append(
            f"{step:<14} {entry.get('seconds', 0):6.1f} s  {entry.get('outcome', 'ended with the machine')}"[:150]
        )
        for line in entry.get("lines", []):
            lines += textwrap.wrap(line, 150, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return lines


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def why_not(*, rehearse: bool) -> str | None:
    """What this machine lacks; None when the steps can begin."""
    if missing := missing_packages():
        return (
            f"missing {'package' if len(missing) == 1 else 'packages'}: {', '.join(missing)}: carry the wheels and put "
            "them on PYTHONPATH with `pip install --no-index --target` (benchmarks/lease.md, 'What to carry')"
        )
    from vitx.core.machine import local_gpus

    if not rehearse and not local_gpus():
        return "no GPU: the NVIDIA driver offers none; try every step at toy sizes on a CPU with --rehearse"
    return None


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--only", default="", help="steps of the part, with commas between")
    parser.add_argument("--minutes", type=float, default=9, help="for the whole part")
    parser.add_argument("--limit", type=float, default=0, help="seconds of each step, instead of its own limit")
    arguments = parser.parse_args(words)
    arguments.patience = PATIENCE if arguments.rehearse else 1
    steps = PARTS[arguments.part]
    arguments.steps = [step for step in steps if step in arguments.only.split(",")] if arguments.only else list(steps)
    if unknown := set(filter(None, arguments.only.split(","))) - set(steps):
        parser.error(f"no step {', '.join(sorted(unknown))}: the steps of {arguments.part} are {', '.join(steps)}")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    part, end = arguments.part, time.monotonic() + 60 * arguments.minutes * arguments.patience
    if reason := why_not(rehearse=arguments.rehearse):
        print(f"error: {reason}", file=sys.stderr)
        return 3
    from vitx.core.machine import describe_machine, installed_versions

    arguments.out.mkdir(parents=True, exist_ok=True)
    report, log = arguments.out / f"{part}.json", arguments.out / f"{part}.log"
    command = " ".join(["python", "benchmarks/lease.py", *(sys.argv[1:] if words is None else words)])
    machine, versions = describe_machine(), installed_versions()
    begun = {"command": command, "started": now(), "rehearsed": arguments.rehearse}
    write(report, {**begun, "machine": machine, "versions": versions, "steps": {}})
    log.write_text("")
    for step in arguments.steps:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            outcome = Outcome("skipped: time", 0.0)
        else:
            limit = min(arguments.limit or PARTS[part][step] * arguments.patience, left)
            outcome = run_step(part, step, report, log, limit, rehearse=arguments.rehearse)
        whole = read(report)
        whole["steps"].setdefault(step, {}).update(outcome=outcome.text, seconds=round(outcome.seconds, 1))
        write(report, {**whole, "ended": now()})
        print(f"{step}: {outcome.text}, {outcome.seconds:.1f} s", flush=True)
    whole = read(report)
    print("", *table(part, whole), sep="\n")
    return 0 if all(entry["outcome"] == "done" for entry in whole["steps"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
