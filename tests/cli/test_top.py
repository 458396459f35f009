"""What `vitx top` reads, prints and draws, of a server that is known here."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli_fixture import Vitx
from vitx.cli import top
from vitx.core.errors import EnvironmentMissing

MODEL = {
    "name": "net",
    "version": "7",
    "images_per_second": 1234.56,
    "batches_per_second": 2345.67,
    "mean_batch": 3.21,
    "queued": 4321,
    "queue_ms": {"p50": 0.12345, "p99": None},
    "compute_ms": {"p50": 12.5, "p99": 99.99},
    "certificate": "pass",
    "provider": "P",
    "precision": "fp16",
}
IDLE = MODEL | {"name": "idle", "mean_batch": None, "certificate": "uncertified"}
FOUND = {
    "url": "http://h",
    "ready": True,
    "uptime_seconds": 3661.9,
    "requests_per_second": 5678.91,
    "latency_ms": {"p50": 1.5, "p99": None},
    "rejections": {"queue_full": 1234, "timeout": 0, "unknown_model": 2},
    "cpu_percent": 99.6,
    "rss_mib": 1234.6,
    "open_files": 17,
    "models": [MODEL, IDLE],
}
Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the server was asked, how long was waited, and which readings were set beside each other."""
    made: Calls = []

    def snapshot(*given: Any) -> dict[str, Any]:
        made.append(given)
        return FOUND

    class Client:
        def __init__(self, *given: Any) -> None:
            made.append(("server", *given))
            self.readings = 0

        def read(self) -> int:
            self.readings += 1
            return self.readings

    monkeypatch.setattr("vitx.serve.observe.top.ServerClient", Client)
    monkeypatch.setattr("vitx.serve.observe.top.snapshot", snapshot)
    monkeypatch.setattr("time.sleep", lambda seconds: made.append(("sleep", seconds)))
    return made


def test_an_interval_as_text_and_as_json(vitx: Vitx, calls: Calls, tmp_path: Path) -> None:
    code, out, err = vitx("top")
    assert (code, err) == (0, "")
    assert calls == [("server", "http://127.0.0.1:8000", None, None, None), ("sleep", 1.0), (2, 1)]
    assert max(map(len, out.splitlines())) <= 160
    assert out.splitlines()[0].rstrip() == "http://h  ready  up 1:01:01"
    calls.clear()
    for name in ("token", "metrics"):
        (tmp_path / name).write_text(f"{name}-0123456789abcdef\n")
    tokens = ("--token-file", tmp_path / "token", "--metrics-token-file", tmp_path / "metrics")
    code, out, _ = vitx("top", "http://h", "--interval", "0.5", "--once", "--json", *tokens)
    assert (code, json.loads(out)) == (0, FOUND)
    asked = ("server", "http://h", "token-0123456789abcdef", None, "metrics-0123456789abcdef")
    assert calls == [asked, ("sleep", 0.5), (2, 1)]


def test_a_terminal_is_drawn_again_unless_one_interval_is_asked_for(
    vitx: Vitx, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: Calls = []
    monkeypatch.setattr(top, "can_redraw", lambda stream: stream is sys.stdout)
    monkeypatch.setattr(top, "_watch", lambda server, *given: watched.append(given))
    assert vitx("top", "--interval", "2")[0] == 0
    assert watched == [(1, 2.0)]
    assert len(calls) == 1
    for option in ("--once", "--json"):
        assert vitx("top", option)[0] == 0
    assert len(watched) == 1


def test_a_server_that_stops_answering_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    readings: Iterator[Any] = iter([2, EnvironmentMissing("gone"), 3, KeyboardInterrupt()])

    class Live:
        def __init__(self, first: Any, **options: Any) -> None:
            shown.append((first, options))

        def __enter__(self) -> "Live":
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, what: Any, *, refresh: bool) -> None:
            shown.append((str(what), getattr(what, "style", None), refresh))

    class Server:
        def read(self) -> Any:
            found = next(readings)
            if isinstance(found, BaseException):
                raise found
            return found

    waited: list[float] = []
    monkeypatch.setattr("rich.live.Live", Live)
    monkeypatch.setattr("vitx.serve.observe.top.snapshot", lambda now, before: (now, before))
    monkeypatch.setattr(top, "view", lambda found: found)
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(KeyboardInterrupt):
        top._watch(Server(), 1, 0.5)  # type: ignore[arg-type]  # it reads numbers
    assert shown == [
        ((1, None), {"screen": True, "auto_refresh": False}),
        ("(2, 1)", None, True),
        ("gone", "red", True),
        ("(3, 2)", None, True),
    ]
    assert waited == [0.5] * 4


def drawn(found: dict[str, Any]) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top.view(found))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_snapshot_in_full() -> None:
    lines = drawn(FOUND)
    assert lines[:2] == [
        "http://h  ready  up 1:01:01",
        "5,678.9 requests/s; latency 1.5 / – ms (p50 / p99 of the latest requests); CPU 100 %; memory 1,235 MiB; "
        "17 open files",
    ]
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines[2:-1]]
    titles = [
        "model",
        "version",
        "images/s",
        "batches/s",
        "mean batch",
        "queue",
        "queue ms",
        "compute ms",
        "certificate",
    ]
    numbers = ["7", "1,234.6", "2,345.7", "3.2", "4,321", "0.123 / –", "12.5 / 100"]
    assert [row for row in cells if len(row) == 10] == [
        [*titles, "runs on"],
        ["net", *numbers, "pass", "P, fp16"],
        ["idle", *numbers[:3], "–", *numbers[4:], "uncertified", "P, fp16"],
    ]
    assert lines[-1] == "refused since the start: 1,234 queue_full, 2 unknown_model"
    lines = drawn(FOUND | {"ready": False, "rejections": {"timeout": 0}})
    assert lines[0] == "http://h  not ready  up 1:01:01"
    assert lines[-1] == "refused since the start: none"


def test_what_is_good_is_green_and_what_is_not_is_red() -> None:
    found: list[Any] = list(top.view(FOUND).renderables)
    head, _, table, _ = found
    assert [span.style for span in head.spans] == ["green"]
    sides = ["left", *["right"] * 7, "left", "left"]
    assert [column.justify for column in table.columns] == sides
    assert {column.overflow for column in table.columns} == {"fold"}
    assert [cell.style for cell in table.columns[8].cells] == ["green", "red"]
    found = list(top.view(FOUND | {"ready": False}).renderables)
    assert [span.style for span in found[0].spans] == ["red"]


def test_a_file_of_no_certificates_is_refused(vitx: Vitx, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("none")
    for name, said in (("gone.pem", "is not a file"), ("none.pem", "cannot be read: ")):
        code, _, err = vitx("top", "--ca-file", tmp_path / name)
        assert (code, err.startswith(f"error: --ca-file '{tmp_path / name}' {said}")) == (2, True)
        assert err.endswith("expected certificates in PEM\n")
    assert calls == []
