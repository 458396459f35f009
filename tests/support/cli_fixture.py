"""The command line in this process: what it returned and printed."""

import sys
from collections.abc import Callable

import pytest

# (arguments) -> (exit code, standard output, standard error)
Vitx = Callable[..., tuple[int, str, str]]


def run_in_process(
    arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    from vitx.cli import main

    monkeypatch.setattr(sys, "argv", ["vitx", *map(str, arguments)])
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
