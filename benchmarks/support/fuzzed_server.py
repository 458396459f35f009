"""A `vitx serve` that is fuzzed, and the report about it."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from support.targets import write_report

Measure = Callable[["subprocess.Popen[str]", argparse.Namespace], dict[str, Any]]


def fuzz_server(options: argparse.Namespace, arguments: Sequence[str], measure: Measure) -> dict[str, Any]:
    """Serve `options.bundle`, measure, stop the server; print the report with its exit code, write `options.out`.

    arguments: of the server, beside its ports: any free ones, whose URLs are the first two lines of its output.
    """
    command = [sys.executable, "-m", "vitx", "serve", str(options.bundle), "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, "--allow-uncertified", *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            report = measure(process, options)
        finally:
            process.send_signal(signal.SIGTERM)
    report["exit_code"] = process.returncode
    print(json.dumps(report, indent=2))
    write_report(report, options.out)
    return report
