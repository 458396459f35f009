"""`vitx serve` as it is run, metrics and access log on, beside Triton and bare sessions, with wrk as the client. Linux.

    python benchmarks/serve/with_wrk.py [--triton VENV] [--rounds 5] [--seconds 6] [--json FILE]

The network, requests, servers and limit of part (a) of server.py; 64 connections. wrk counts a request when its answer
has come, whenever it was sent. `vitx` has its access log in a file and its metrics on, `no log` is the same server
without the log. They take turns, the others idle; a ratio is the median of the rounds'.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from server import CONNECTIONS, Sessions, check_logits, random_images

from support.server_peers import SMALL, Server, bundle_of, package_versions, triton_server, vitx_server
from support.server_turns import spread
from support.targets import all_hold, command_line, report_header, save_report, verdict

# What was promised of the median ratio: more than, or no more than.
TARGETS = {"rate over triton": 1.10, "rate over sessions": 0.90, "p99 over triton": 0.7, "rate over no log": 0.97}
MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def write_script(request: bytes, path: Path) -> str:
    """wrk's Lua for one HTTP request, in the decimal escapes that Lua has for any byte; returns the request's path."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    escaped = "".join(f"\\{byte:03d}" for byte in body)
    lines = ['wrk.method = "POST"', f'wrk.body = "{escaped}"']
    for header in headers:
        name, _, value = header.partition(": ")
        if name not in ("Host", "Content-Length"):
            lines.append(f'wrk.headers["{name}"] = "{value}"')
    path.write_text("\n".join(lines) + "\n")
    return first.split()[1]


def turn(server: Server, script: Path, path: str, seconds: float, connections: int = CONNECTIONS) -> dict[str, float]:
    """One run of wrk: requests a second and the 99th percentile of their time in milliseconds."""
    url = f"http://127.0.0.1:{server.address[1]}{path}"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "--latency"]
    command += ["-s", str(script), url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate, p99 = re.search(r"Requests/sec: +([\d.]+)", said), re.search(r"99% +([\d.]+)(us|ms|s)", said)
    if "Non-2xx" in said or "Socket errors" in said or not rate or not p99:
        raise RuntimeError(f"{server.name}: {said}")
    return {"rate": float(rate[1]), "p99_ms": float(p99[1]) * MILLISECONDS[p99[2]]}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    bundle, images = bundle_of(SMALL, folder), random_images(8, SMALL.image_size)
    sessions = Sessions(bundle)
    with ExitStack() as stack:
        servers = {
            "vitx": stack.enter_context(vitx_server(bundle, "--access-log", str(folder / "access.log"))),
            "no log": stack.enter_context(vitx_server(bundle)),
        }
        if arguments.triton is not None:
            servers["triton"] = stack.enter_context(triton_server(bundle, arguments.triton, folder / "triton"))
        scripts = {}
        for name, server in servers.items():
            check_logits(server, sessions, images)
            scripts[name] = (folder / f"{name}.lua", write_script(server.request(images[0]), folder / f"{name}.lua"))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*servers, "sessions")}
        for _ in range(arguments.rounds):
            for name, server in servers.items():
                turn(server, *scripts[name], 1)
                rows[name].append(turn(server, *scripts[name], arguments.seconds))
            rows["sessions"].append({"rate": sessions.measure(arguments.seconds)})
            print({name: found[-1] for name, found in rows.items()}, flush=True)
    return {"rounds": rows, "ratios": ratios(rows)}


def ratios(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, target in TARGETS.items():
        what, other = title.split(" over ")
        if other not in rows:
            continue
        key = "p99_ms" if what == "p99" else "rate"
        each: dict[str, Any] = spread([row[key] for row in rows["vitx"]], [row[key] for row in rows[other]])
        holds = each["ratio"] <= target if what == "p99" else each["ratio"] >= target
        found[title] = each | {"target": target, "holds": holds}
        print(f"{title}: {found[title]} {verdict(found[title])}")
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--triton", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    arguments = parser.parse_args()
    report: dict[str, Any] = report_header()
    if arguments.triton is not None:
        report["versions"] |= package_versions(arguments.triton, "nvidia-pytriton", "onnxruntime")
    with tempfile.TemporaryDirectory() as name:
        report["32 px, 64 connections"] = measure(arguments, Path(name))
    save_report(report, arguments.json, "python benchmarks/serve/with_wrk.py --triton VENV")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
