"""`vitx serve` as it is run, metrics and access log on, with wrk as the client, which misses no answer. Linux.

    python benchmarks/serve/with_wrk.py [--triton VENV] [--rounds 5] [--seconds 6] [--json FILE]

64 connections, two one-thread instances; what is compared takes turns in each round, the others idle; a ratio is the
median of the rounds'.

32 px: the network, requests and servers of part (a) of server.py, beside Triton and bare sessions. `vitx` has its
    access log in a file, `no log` is the same server without it.
JPEG: DeiT-Ti at 224 px with random weights, two photographs to /v1/classify. Decoding and the model share the cores, so
    the bound is 1 / (1 / I + 1 / D): I images a second of the sessions, D images a second decoded and resized by one
    thread a core. The client is not taken off.
224 px: tensors of one image (150,528 bytes) to a model that does next to nothing: what the server alone takes.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from server import CONNECTIONS, Sessions, check_logits, random_images, side_by_side

from support.server_peers import (
    DEIT_TI,
    SMALL,
    Network,
    Server,
    bundle_of,
    http_request,
    package_versions,
    sample_photographs,
    triton_server,
    vitx_server,
)
from support.server_turns import spread
from support.targets import (
    all_hold,
    at_least,
    command_line,
    exit_code,
    report_header,
    require_program,
    save_report,
    verdict,
)
from support.turns import turn_order
from vitx.core.preprocess import decode

# What was promised of the median ratio: more than, or no more than.
TARGETS = {"rate over triton": 1.10, "rate over sessions": 0.90, "p99 over triton": 0.7, "rate over no log": 0.97}
JPEG_TARGET = 0.97
TRIVIAL = Network("trivial", 224, 32, 8, 1, 1, 10)
MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def write_script(path: Path, *requests: bytes) -> str:
    """wrk's Lua for HTTP requests that differ in their bodies alone, in turns; returns the requests' path."""
    head = requests[0].partition(b"\r\n\r\n")[0]
    first, *headers = head.decode().split("\r\n")
    bodies = (request.partition(b"\r\n\r\n")[2] for request in requests)
    # In the decimal escapes that Lua has for any byte.
    escaped = ", ".join('"' + "".join(f"\\{byte:03d}" for byte in body) + '"' for body in bodies)
    lines = ['wrk.method = "POST"', f"local bodies, turn = {{{escaped}}}, 0"]
    for header in headers:
        name, _, value = header.partition(": ")
        if name not in ("Host", "Content-Length"):
            lines.append(f'wrk.headers["{name}"] = "{value}"')
    lines += ["function init()", "made = {}", "for i, body in ipairs(bodies) do"]
    lines += ["made[i] = wrk.format(nil, nil, nil, body)", "end", "end"]
    lines += ["function request()", "turn = turn % #made + 1", "return made[turn]", "end"]
    path.write_text("\n".join(lines) + "\n")
    return first.split()[1]


def load(server: Server, script: Path, path: str, seconds: float, connections: int = CONNECTIONS) -> str:
    """What wrk says of one run, as a warm-up of which nothing is read; RuntimeError if a request was not answered."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "--latency"]
    command += ["-s", str(script), f"http://127.0.0.1:{server.address[1]}{path}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(f"{server.name}: {said}")
    return said


def turn(server: Server, script: Path, path: str, seconds: float, connections: int = CONNECTIONS) -> dict[str, float]:
    """One run of wrk: requests a second, the 99th percentile of their time in ms, processor time of each in µs.

    And the images a batch, which a server may choose by timings of its own.
    """
    images, batches = counts(server)
    cpu, client = server.cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    said = load(server, script, path, seconds, connections)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = now.ru_utime - client.ru_utime + now.ru_stime - client.ru_stime
    rate, p99 = re.search(r"Requests/sec: +([\d.]+)", said), re.search(r"99% +([\d.]+)(us|ms|s)", said)
    if not rate or not p99 or not float(rate[1]):
        raise RuntimeError(f"{server.name}: no answer in {seconds:g} s, more --seconds are needed: {said}")
    each = 1e6 / (float(rate[1]) * seconds)
    now_images, now_batches = counts(server)
    return {
        "rate": float(rate[1]),
        "p99_ms": float(p99[1]) * MILLISECONDS[p99[2]],
        "server_us": round((server.cpu_seconds() - cpu) * each, 1),
        "client_us": round(used * each, 1),
        "images a batch": round((now_images - images) / (now_batches - batches), 2),
    }


def counts(server: Server) -> tuple[int, int]:
    """Images and batches so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.address[1]}/v2/models/stats") as answer:
        model = json.load(answer)["model_stats"][0]
    return model["inference_count"], model["execution_count"]


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
            script = folder / f"{name}.lua"
            scripts[name] = (script, write_script(script, server.request(images[0])))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*servers, "sessions")}
        for number in range(arguments.rounds):
            for name in turn_order(servers, number):
                load(servers[name], *scripts[name], 1)
                rows[name].append(turn(servers[name], *scripts[name], arguments.seconds))
            rows["sessions"].append({"rate": sessions.measure(arguments.seconds)})
            print({name: found[-1] for name, found in rows.items()}, flush=True)
    return {"rounds": rows, "ratios": ratios(rows)}


def from_jpeg(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Photographs as JPEG, over the bound by decoding and the model."""
    bundle, photographs = bundle_of(DEIT_TI, folder), sample_photographs()
    apply = bundle.manifest.preprocessing.apply
    sessions, turns, rows = Sessions(bundle), cycle(photographs), []
    script, bodies = folder / "jpeg.lua", [http_request("/v1/classify", data) for data in photographs]
    with vitx_server(bundle, "--access-log", str(folder / "access.log")) as server:
        given = (script, write_script(script, *bodies))
        for _ in range(arguments.rounds):
            infer = sessions.measure(arguments.seconds)
            decoded = side_by_side(lambda _: apply(decode(next(turns))), 1, arguments.seconds / 2)
            load(server, *given, 1)
            row = turn(server, *given, arguments.seconds)
            rows.append({**row, "sessions": infer, "decoded": decoded, "bound": 1 / (1 / infer + 1 / decoded)})
            print({name: round(value, 1) for name, value in rows[-1].items()}, flush=True)
    each: dict[str, Any] = spread([row["rate"] for row in rows], [row["bound"] for row in rows])
    found = {"rounds": rows, **each, "target": JPEG_TARGET, "holds": each["ratio"] >= JPEG_TARGET}
    print(f"JPEG: {each} of the bound {verdict(found)}")
    return found


def large_tensors(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Requests a second of a core of the server's."""
    bundle, rows, script = bundle_of(TRIVIAL, folder), [], folder / "large.lua"
    with vitx_server(bundle, "--access-log", str(folder / "access.log")) as server:
        path = write_script(script, server.request(random_images(1, TRIVIAL.image_size)[0]))
        for _ in range(arguments.rounds):
            load(server, script, path, 1)
            row = turn(server, script, path, arguments.seconds)
            rows.append(row | {"rate of a core": 1e6 / row["server_us"]})
            print({name: round(value, 1) for name, value in rows[-1].items()}, flush=True)
    return {"rounds": rows} | {name: statistics.median(row[name] for row in rows) for name in rows[0]}


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
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=at_least(1), default=6)
    arguments = parser.parse_args()
    require_program("wrk")
    report: dict[str, Any] = report_header()
    command = f"with_wrk.py --rounds {arguments.rounds} --seconds {arguments.seconds:g}"
    if arguments.triton is not None:
        command += " --triton VENV"
        report["versions"] |= package_versions(arguments.triton, "nvidia-pytriton", "onnxruntime")
    with tempfile.TemporaryDirectory() as name:
        report["32 px, 64 connections"] = measure(arguments, Path(name))
        report["JPEG"] = from_jpeg(arguments, Path(name))
        report["224 px, a model of no cost"] = large_tensors(arguments, Path(name))
    save_report(report, arguments.json, f"python benchmarks/serve/{command}")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
