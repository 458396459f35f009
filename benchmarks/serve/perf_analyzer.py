"""Triton's perf_analyzer, unmodified, against `vitx serve`: does each of its ways to ask end well? Its rates are noted.

    python benchmarks/serve/perf_analyzer.py --perf-analyzer PROGRAM [--bundle B.vitx] [--json FILE]

PROGRAM is in the Linux wheel of tritonclient 2.41 (data/bin/perf_analyzer) and needs libb64 and CUDA's runtime library
on LD_LIBRARY_PATH, no GPU. It is built on Triton's C++ clients: HTTP by libcurl, gRPC, shared memory. The server has
its defaults, --shared-memory and an access log. Without --bundle it is a ViT of random weights at 32 px. A way holds if
perf_analyzer exits with 0, reports a rate and every request of its that reached the server was answered with 200.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.server_peers import SMALL, bundle_of, free_port, served
from support.targets import all_hold, command_line, exit_code, report_header, save_report, verdict
from vitx.core.bundle import Bundle

WAYS = {
    "http": ((), ("-b", "8"), ("--async",), ("--shared-memory", "system")),
    "grpc": (
        (),
        ("-b", "8"),
        ("--async",),
        ("--async", "--streaming"),
        ("--shared-memory", "system"),
        ("--grpc-compression-algorithm", "gzip"),
        ("--grpc-compression-algorithm", "deflate"),
    ),
}
LOADS = (("--concurrency-range", "4"), ("--request-rate-range", "50", "--request-distribution", "poisson"))
# Whether it is stable is not asked here: a window is taken whatever the machine does beside it.
WINDOW = ("--measurement-interval", "2000", "--stability-percentage", "999")
RATE = re.compile(r"Throughput: ([\d.]+) infer/sec")
P99 = re.compile(r"p99 latency: (\d+) usec")


def measured(program: str, model: str, url: str, protocol: str, way: tuple[str, ...], log: Path) -> dict[str, Any]:
    seen = len(log.read_text().splitlines())
    command = (program, "-m", model, "-u", url, "-i", protocol, *WINDOW, *way)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    rate, p99 = RATE.search(done.stdout), P99.search(done.stdout)
    requests = [json.loads(line) for line in log.read_text().splitlines()[seen:]]
    refused = [line for line in requests if line["status"] >= 400]
    found: dict[str, Any] = {"exit_code": done.returncode, "logged": len(requests), "refused": len(refused)}
    if rate and p99:
        found |= {"images_per_second": float(rate[1]), "p99_ms": int(p99[1]) / 1000}
    else:
        found["said"] = (done.stdout + done.stderr).strip()[-300:]
    found["holds"] = done.returncode == 0 and rate is not None and bool(requests) and not refused
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--perf-analyzer", required=True)
    parser.add_argument("--bundle", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = report_header()
    version = subprocess.run([arguments.perf_analyzer, "--version"], capture_output=True, text=True, check=True)
    report["versions"]["perf_analyzer"] = (version.stdout + version.stderr).split()[3]
    with tempfile.TemporaryDirectory() as name:
        folder, grpc, log = Path(name), free_port(), Path(name) / "access.log"
        bundle = Bundle.open(arguments.bundle) if arguments.bundle else bundle_of(SMALL, folder)
        options = ("--grpc-port", str(grpc), "--shared-memory", "--access-log", str(log))
        with served("vitx", bundle, *options) as server:
            for protocol, ways in WAYS.items():
                port = grpc if protocol == "grpc" else server.address[1]
                for way in (*(LOADS[0] + way for way in ways), LOADS[1]):
                    found = measured(
                        arguments.perf_analyzer, bundle.manifest.name, f"localhost:{port}", protocol, way, log
                    )
                    title = " ".join((protocol, *way))
                    report[title] = found
                    print(f"{title}: {found} {verdict(found)}", flush=True)
    save_report(report, arguments.json, "python benchmarks/serve/perf_analyzer.py --perf-analyzer PROGRAM")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
