"""Malformed requests against a real server, over HTTP and gRPC: what it answers, whether it hangs, what it keeps.

    python benchmarks/serve/fuzz.py BUNDLE --requests 100000 --calls 100000 --examples 300 --out DATE-fuzz-cpu.json

Every request is made from a seed and its number, so that one that went wrong can be made again. A server answers what
is malformed with 4xx or its gRPC status, or closes the connection; 5xx, INTERNAL, UNKNOWN and silence are failures.
`--examples` is for each operation of the OpenAPI description, from schemathesis. Exit code 1 on a failure. Linux only.
"""

import argparse
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
import support.fuzz_grpc as fuzz_grpc
import support.fuzz_http as fuzz_http
import support.fuzz_openapi as fuzz_openapi
from support.fuzzed_server import FuzzedServer, fuzz_server
from support.targets import exit_code, report_header

# Small limits, so that what goes beyond them is cheap to send.
OPTIONS = (
    *("--shared-memory", "--max-body-mib", "1", "--max-pixels", "1000000", "--max-images", "8"),
    *("--header-timeout", "1", "--body-timeout", "1", "--max-batch", "8"),
)
MANAGEMENT_TOKEN = "0123456789abcdef-fuzz"

AskOne = Callable[[int], tuple[str, str]]  # number → kind of the request, answer


@dataclass
class Outcome:
    """What became of the requests: counts by kind and answer, and the numbers of those that were not answered rightly.

    An answer is a status, "closed" for a connection closed without one, or "hang".
    """

    is_right: Callable[[str, str], bool]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, number: int, kind: str, answer: str) -> None:
        self.counts[kind, answer] += 1
        if not self.is_right(kind, answer):
            self.wrong.append((number, kind, answer))

    def by_answer(self) -> dict[str, int]:
        total = Counter[str]()
        for (_, answer), count in self.counts.items():
            total[answer] += count
        return dict(sorted(total.items()))

    def report(self) -> dict[str, Any]:
        kinds = sorted({kind for kind, _ in self.counts})
        return {
            "answers": self.by_answer(),
            "answers_by_kind": {
                kind: {answer: count for (of, answer), count in sorted(self.counts.items()) if of == kind}
                for kind in kinds
            },
            "wrong": self.wrong[:100],
        }


def fuzz(ask: AskOne, numbers: Sequence[int], is_right: Callable[[str, str], bool], *, clients: int = 4) -> Outcome:
    """Send the requests of these numbers."""
    outcome = Outcome(is_right)
    with ThreadPoolExecutor(clients) as pool:
        for number, (kind, answer) in zip(numbers, pool.map(ask, numbers), strict=True):
            outcome.add(number, kind, answer)
    return outcome


def fuzz_over_http(address: tuple[str, int], numbers: Sequence[int], *, seed: int, model: str) -> Outcome:
    return fuzz(fuzz_http.asker(address, seed, model), numbers, fuzz_http.is_refused)


def fuzz_over_grpc(address: str, numbers: Sequence[int], *, seed: int, model: str) -> Outcome:
    with fuzz_grpc.Client(address, seed, model) as client:
        return fuzz(client.ask, numbers, fuzz_grpc.is_refused)


def held_by(process: int) -> dict[str, float]:
    """What a process holds now: MiB of resident memory, and open files."""
    held = psutil.Process(process)
    return {"rss_mib": held.memory_info().rss / 2**20, "files": held.num_fds()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=100_000, help="over HTTP")
    parser.add_argument("--calls", type=int, default=100_000, help="over gRPC")
    parser.add_argument("--examples", type=int, default=300, help="of each operation in the OpenAPI description")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w") as token:
        token.write(MANAGEMENT_TOKEN)
        token.flush()
        managed = ("--management", "--management-token-file", token.name)
        report = fuzz_server(options, [*OPTIONS, *managed], _measure)
    return 0 if report["holds"] and not report["exit_code"] else 1


def _measure(server: FuzzedServer, options: argparse.Namespace) -> dict[str, Any]:
    from vitx.core.bundle import Bundle

    address, model, seed = server.address, Bundle.open(options.bundle).manifest.name, options.seed
    while fuzz_http.ask(address, fuzz_http.http("GET", "/v2/health/ready")) != "200":
        time.sleep(0.1)

    def parts(examples: int, share: float, seed: int) -> dict[str, dict[str, Any]]:
        """Each part's report, with what the server held after it and the seconds it took."""
        numbers, calls = range(int(share * options.requests)), range(int(share * options.calls))
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "http": lambda: fuzz_over_http(address, numbers, seed=seed, model=model).report(),
            "grpc": lambda: fuzz_over_grpc(server.grpc_address, calls, seed=seed, model=model).report(),
            "openapi": lambda: fuzz_openapi.run(server.url, model, MANAGEMENT_TOKEN, examples).report(),
        }
        done = {}
        for name, run in runs.items():
            started = time.monotonic()
            done[name] = {**run(), "seconds": round(time.monotonic() - started, 1)}
            time.sleep(2)  # connections that were closed are gone
            done[name]["held_after"] = held_by(server.process)
        return done

    first = parts(examples=5, share=0.1, seed=seed + 1)  # what is allocated once
    before = held_by(server.process)
    measured = parts(options.examples, 1, seed)
    image = fuzz_http.picture(random.Random(0), "PNG")
    good = fuzz_http.ask(address, fuzz_http.http("POST", "/v1/classify", image, "Content-Type: image/png"))
    wrong = [one for part in (*first.values(), *measured.values()) for one in part["wrong"]]
    return {
        "command": shlex.join(
            ["python", "benchmarks/serve/fuzz.py", "BUNDLE", *(f"--{n}={getattr(options, n)}" for n in _COUNTS)]
        ),
        "server_options": list(OPTIONS),
        **report_header(),
        "seed": seed,
        "held_before": before,
        **measured,
        "good_request_afterwards": good,
        "holds": not wrong and good == "200",
    }


_COUNTS = ("requests", "calls", "examples")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
