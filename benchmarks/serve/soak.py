"""A long mixed load on one `vitx serve`, which must keep running, answer right, and not grow in memory or open files.

    python benchmarks/serve/soak.py [--minutes 30] [--folder DIR] [--json FILE]

Over and over: 5,000 requests over 64 connections, of which every eighth is broken (wrong shape, cut or hostile bodies,
unknown models, an image that is none) and must get its own 4xx; then 200 clients that send a request, or half of one,
and hang up; then a look at readiness, a known answer, resident memory and open files. Memory may grow by 2 % after the
first tenth of the time, and at least ten rounds. Exit code 1 when anything was not as promised. Linux.
"""

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.http_load import Connection, closed_loop
from support.process_tree import family
from support.server_peers import TINY, Server, bundle_of, http_request, infer_request, vitx_server
from support.targets import command_line, report_header, write_report
from vitx.core.bundle import timestamp
from vitx.core.preprocess import UInt8Array

REQUESTS, CONNECTIONS, HANG_UPS = 5_000, 64, 200
BODY_MIB = 2  # the server's limit, so that the bomb that is sent again and again is a small one
GROWTH_TARGET = 0.02
QUIET_SECONDS = 2.0  # for the server to notice who has gone
SETTLING_ROUNDS = 10
SPARE_FILES = 8  # a response to the last look may still be closing

PNG_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xff\xff\0\0\xff\xff\x08\x02\0\0\0"


def broken_requests(image: UInt8Array) -> list[tuple[int, bytes]]:
    """Requests that must be refused, each with its status."""
    infer = f"/v2/models/{TINY.name}/infer"
    zipped = "Content-Encoding: gzip\r\n"
    return [
        (400, infer_request(TINY.name, image[:-1])),
        (400, infer_request(TINY.name, image, {"no_such_parameter": 1})),
        (400, http_request(infer, b"{", "Content-Type: application/json\r\n")),
        (400, http_request(infer, b"[" * 1000, "Content-Type: application/json\r\n")),
        (400, http_request(infer, b"", "Inference-Header-Content-Length: -1\r\n")),
        (404, infer_request("no-such-model", image)),
        (404, infer_request("..%2f..%2fetc", image)),
        (400, http_request("/v1/classify", b"no image", "Content-Type: image/png\r\n")),
        (400, http_request("/v1/classify", PNG_HEAD, "Content-Type: image/png\r\n")),
        (400, http_request(infer, b"\x1f\x8b no gzip", zipped)),
        (413, http_request(infer, gzip.compress(bytes(2 * BODY_MIB * 2**20)), zipped)),
        (415, http_request("/v1/classify", b"text", "Content-Type: text/plain\r\n")),
    ]


def hang_up(server: Server, requests: Sequence[bytes]) -> None:
    """Clients that leave before their answer: with a whole request sent, or its first half."""
    for number in range(HANG_UPS):
        connection = Connection(server.address)
        request = requests[number % len(requests)]
        connection.send(request if number % 2 else request[: len(request) // 2])
        connection.close()


def open_files(server: Server) -> int:
    """File descriptors of all its processes."""
    return sum(psutil.Process(pid).num_fds() for pid in family(server.process.pid))


class Soak:
    """One server under the load; `faults` are sentences about what was not as promised."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._image = np.random.default_rng(0).integers(0, 256, (TINY.image_size,) * 2 + (3,), dtype=np.uint8)
        self._good = infer_request(TINY.name, self._image)
        self._broken = broken_requests(self._image)
        self._expected = self._ask_alone()
        self.files: list[int] = []
        self.resident: list[int] = []
        self.faults: list[str] = []
        self.requests = 0

    def check_broken(self) -> None:
        """Ask each broken request once, alone."""
        for index, (expected, request) in enumerate(self._broken):
            connection = Connection(self._server.address)
            status, answer = connection.ask(request)
            connection.close()
            if status != expected:
                self.faults.append(f"broken request {index}: {status} instead of {expected}: {answer[-200:]!r}")

    def round(self) -> None:
        mixed = [self._good if number % 8 else self._broken[number // 8][1] for number in range(8 * len(self._broken))]
        load = closed_loop(self._server.address, mixed, connections=CONNECTIONS, count=REQUESTS)
        self.requests += len(load.answers) + HANG_UPS
        if unexpected := set(load.counts()) - {200, *(status for status, _ in self._broken)}:
            self.faults.append(f"round {len(self.resident)}: statuses {unexpected}")
        if load.unanswered:
            self.faults.append(f"round {len(self.resident)}: {load.unanswered} requests without an answer")
        wrong = load.counts().get(200, 0) - sum(bool(number % len(mixed) % 8) for number in range(REQUESTS))
        if wrong:
            self.faults.append(f"round {len(self.resident)}: {wrong:+} good answers")
        hang_up(self._server, [self._good, *(request for _, request in self._broken)])
        time.sleep(QUIET_SECONDS)
        if not np.array_equal(self._ask_alone(), self._expected):
            self.faults.append(f"round {len(self.resident)}: other logits than at the start")
        self.resident.append(self._server.resident_bytes())
        self.files.append(open_files(self._server))

    def verdict(self) -> dict[str, Any]:
        settled = max(SETTLING_ROUNDS, len(self.resident) // 10)
        growth = self.resident[-1] / self.resident[settled - 1] - 1
        if growth >= GROWTH_TARGET:
            self.faults.append(f"resident memory grew by {100 * growth:.1f} %")
        if self.files[-1] > self.files[0] + SPARE_FILES:
            self.faults.append(f"open files: {self.files[0]} at the start, {self.files[-1]} at the end")
        return {
            "requests": self.requests,
            "rounds": len(self.resident),
            "resident_mib": [round(value / 2**20, 1) for value in self.resident[:: max(1, len(self.resident) // 20)]],
            "growth": round(growth, 5),
            "open_files": [self.files[0], self.files[-1]],
            "faults": self.faults[:20],
            "holds": not self.faults,
        }

    def _ask_alone(self) -> Any:
        connection = Connection(self._server.address)
        status, answer = connection.ask(self._good)
        connection.close()
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer[-300:]!r}")
        return self._server.logits(answer)


def soak(minutes: float, folder: Path) -> dict[str, Any]:
    with vitx_server(bundle_of(TINY, folder), "--max-body-mib", str(BODY_MIB)) as server:
        run = Soak(server)
        run.check_broken()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end or len(run.resident) <= SETTLING_ROUNDS:
            run.round()
            print(f"{run.requests} requests, {run.resident[-1] / 2**20:.1f} MiB, {run.files[-1]} files", flush=True)
        return run.verdict()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--folder", type=Path, help="where the exported network is kept; default: exported for each run"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(arguments.minutes, arguments.folder or Path(folder))
    report = {
        **report_header(),
        "command": f"python benchmarks/serve/soak.py --minutes {arguments.minutes:g}",
        "created": timestamp(),
        **result,
    }
    print(json.dumps(report, indent=2))
    write_report(report, arguments.json)
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
