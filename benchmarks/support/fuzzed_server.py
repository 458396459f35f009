"""A `vitx serve` that is fuzzed, and the report about it."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.process_tree import require_running
from support.targets import write_report


@dataclass(frozen=True)
class FuzzedServer:
    """process: its id. url, grpc_address: as it prints them."""

    process: int
    url: str
    grpc_address: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return host, int(port)


Measure = Callable[[FuzzedServer, argparse.Namespace], dict[str, Any]]


def fuzz_server(options: argparse.Namespace, arguments: Sequence[str], measure: Measure) -> dict[str, Any]:
    """Serve `options.bundle`, measure, stop the server; print the report with its exit code, write `options.out`.

    arguments: of the server, beside its ports: any free ones, whose URLs are the first two lines of its output.
    Raises RuntimeError when the server ends before it is stopped, SystemExit with its code when it does not start.
    """
    command = [sys.executable, "-m", "vitx", "serve", str(options.bundle), "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, "--allow-uncertified", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        if not all(lines):
            raise SystemExit(process.wait())  # it has said why
        try:
            report = measure(FuzzedServer(process.pid, *(line.split()[-1] for line in lines)), options)
        finally:
            require_running(process, "the server")
            process.send_signal(signal.SIGTERM)
    report["exit_code"] = process.returncode
    print(json.dumps(report, indent=2))
    write_report(report, options.out)
    return report
