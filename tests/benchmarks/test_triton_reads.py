"""What benchmarks/export/triton_reads.py takes for a repository that Triton reads."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import triton_reads
from triton_reads import Server, holds

SERVED = {"loaded": True, "labels_hold": True, "largest_error": 0.0, "refused": []}
REFUSED = {"loaded": False, "refused": ["unable to find backend library for backend 'tensorrt'"]}


@pytest.mark.parametrize(
    ("found", "may_be_refused", "expected"),
    [
        (SERVED, False, True),
        (REFUSED, True, True),
        (REFUSED, False, False),
        ({**SERVED, "labels_hold": False}, True, False),
        ({"loaded": False, "refused": []}, True, False),
        ({"loaded": False, "refused": ["the configuration is invalid"]}, True, False),
    ],
    ids=[
        "served",
        "no backend",
        "no backend for the stand-in",
        "other labels",
        "ended without a word",
        "another error",
    ],
)
def test_only_what_is_served_or_lacks_a_backend_holds(
    found: dict[str, Any], may_be_refused: bool, expected: bool
) -> None:
    assert holds(found, may_be_refused=may_be_refused) is expected


@pytest.mark.skipif(sys.platform == "win32", reason="a script as a program")
@pytest.mark.parametrize(("server", "patience"), [("exec sleep 600", 0.2), ("exit 1", 600.0)], ids=["waits", "ends"])
def test_a_server_that_does_not_become_ready_is_not_waited_for(
    server: str, patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_reads, "START_SECONDS", patience)
    program = tmp_path / "tritonserver"
    program.write_text(f"#!/bin/sh\n{server}\n")
    program.chmod(0o755)
    run, begun = Server(program, tmp_path, tmp_path), time.monotonic()
    assert not run.wait()
    run.end()
    assert time.monotonic() - begun < 60
