"""The steps of `lease.py kernels` that run the kernels below tools of the CUDA toolkit: sanitizer and profiler."""

import csv
import io
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lease_steps.attention_forms import both_passes, shapes
from lease_steps.step_report import Report, run_step


def tool(name: str) -> str | None:
    """Its path, also where a CUDA image has it outside PATH."""
    places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    places += [str(path.parent) for path in Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


def kernel_names() -> list[str]:
    """The kernels that a GPU launches for the operator."""
    from vitx.models.flash import kernels

    return [name for name, value in vars(kernels).items() if hasattr(value, "run") and name.endswith("_kernel")]


def once(report: Report) -> None:
    """What a tool looks at: forward and backward once, at each shape of LEASE_SHAPES."""
    for text in os.environ.get("LEASE_SHAPES", "1,12,17,33").split(";"):
        B, H, N, K = map(int, text.split(","))
        results = both_passes((B, H, N, K), torch.float16, report.device)
        assert all(part.isfinite().all() for part in results), "not finite"
        print("ran", text, flush=True)


def run_below_tool(
    report: Report, command: list[str], shape: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `once` below a tool; in a rehearsal `once` alone, so that its own command line is tried."""
    inner = [sys.executable, "-m", "lease_steps.cuda_tools", "once", "--report", f"{report.path}.once"]
    inner += ["--rehearse"] * report.rehearsed
    environment = {**os.environ, "LEASE_SHAPES": shape, **variables}
    if not report.rehearsed:
        compiled_first = subprocess.run(inner, env=environment, capture_output=True, text=True, check=False)
        print(compiled_first.stdout, compiled_first.stderr[-2000:], flush=True)  # compiled now, outside the tool
    finished = subprocess.run(
        inner if report.rehearsed else command + inner, env=environment, capture_output=True, text=True, check=False
    )
    print(finished.stdout[-8000:], finished.stderr[-8000:], flush=True)
    return finished


def sanitized(report: Report, name: str, shape: str) -> tuple[dict[str, Any], str]:
    path = tool("compute-sanitizer")
    command = [path or "compute-sanitizer", "--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
    if path is None and not report.rehearsed:
        return {"command": command}, f"{name}: compute-sanitizer is not installed"
    # Each tensor in an allocation of its own, or an access beyond it lands in the allocator's own pool.
    finished = run_below_tool(report, command, shape, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    said = [line.strip("= ") for line in finished.stdout.splitlines() if "SUMMARY" in line]
    row = {"command": command, "exit": finished.returncode, "summary": said, "output": finished.stdout[-4000:]}
    if report.rehearsed:
        return row, f"needs a GPU: {' '.join(command)} (its program ran: {finished.returncode == 0})"
    return row, f"{name} at {shape}: {said[-1] if said else last_line(finished)} (exit {finished.returncode})"


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    return ((finished.stdout + finished.stderr).strip().splitlines() or ["it said nothing"])[-1][:100]


def sanitizers(report: Report) -> None:
    """Bad accesses and races, both at once: neither is timed."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [("memcheck", "2,12,65,33;1,12,197,32"), ("racecheck", "1,12,17,33")]
        jobs = [(name, "1,12,17,33") for name, _ in jobs] if report.rehearsed else jobs
        rows = list(pool.map(lambda job: (job[0], *sanitized(report, *job)), jobs))
    for name, row, line in rows:
        report.row(name, row, line)


SECTIONS = (
    *("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "MemoryWorkloadAnalysis", "InstructionStats"),
    *("ComputeWorkloadAnalysis", "SchedulerStats"),
)


def profile(report: Report) -> None:
    """Nsight Compute on the kernels at two shapes: every raw metric in the report, what binds in the table."""
    path = tool("ncu")
    command = [path or "ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", f"regex:^({'|'.join(kernel_names())})$"]
    for section in SECTIONS:
        command += ["--section", section]
    if path is None and not report.rehearsed:
        report.row("profile", None, "ncu is not installed")
        return
    for title in ("16b", "S"):
        shape = ",".join(map(str, shapes(report)[title]))
        finished = run_below_tool(report, command, shape, {})
        if report.rehearsed:
            report.row(title, {"command": command}, f"needs a GPU: {' '.join(command)[:110]} … (its program ran)")
            assert finished.returncode == 0, finished.stderr[-500:]
            continue
        launches = parse_raw_page(finished.stdout)
        report.row(title, {"command": command, "exit": finished.returncode, "launches": launches})
        if not launches:
            report.row(f"{title} refused", finished.stdout[-2000:], f"{title}: ncu gave nothing: {last_line(finished)}")
        for launch in launches:
            report.row(f"{title} {launch['Kernel Name']}", None, f"{title} {launch_summary(launch)}")


def parse_raw_page(text: str) -> list[dict[str, Any]]:
    """One dictionary a launch from ncu's CSV: a header, a row of units, a row a launch; numbers with commas in them."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3:
        return []
    header, units, *launches = rows
    named = [f"{name} [{unit}]" if unit else name for name, unit in zip(header, units, strict=True)]
    return [{name: number_of(value) for name, value in zip(named, launch, strict=True)} for launch in launches]


def number_of(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def launch_summary(launch: dict[str, Any]) -> str:
    """A line: time, shares of the peaks, registers, occupancy, the most frequent stalls."""

    def metric(name: str) -> float:
        found = next((value for key, value in launch.items() if key.split(" [")[0] == name), None)
        return found if isinstance(found, float) else float("nan")

    prefix, suffix = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
    stalls = {
        key.split(" [")[0].removeprefix(prefix).removesuffix(suffix): value
        for key, value in launch.items()
        if key.startswith(prefix) and key.split(" [")[0].endswith(suffix) and isinstance(value, float)
    }
    top = sorted(stalls, key=lambda name: -stalls[name])[:3]
    return (
        f"{launch['Kernel Name'][:26]}: {metric('gpu__time_duration.sum') / 1e3:.0f} µs, SM "
        f"{metric('sm__throughput.avg.pct_of_peak_sustained_elapsed'):.0f} %, memory "
        f"{metric('gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed'):.0f} %, "
        f"{metric('launch__registers_per_thread'):.0f} registers, occupancy "
        f"{metric('sm__warps_active.avg.pct_of_peak_sustained_active'):.0f} %, stalls "
        + " ".join(f"{name} {stalls[name]:.1f}" for name in top)
    )


if __name__ == "__main__":
    run_step({"once": once})
