"""The fleet that benchmarks/predict/scale.py plans, against arithmetic by hand."""

import sys
from typing import Any

import pytest

from scale import arguments, plan

FOUND: dict[str, Any] = {
    "decode_binds": {
        "bytes": 250_000,
        "decode": [0.01] * 64,
        "begin_seconds": 2.0,
        "costs": {"1 busy cores": {}, "2 busy cores": {"read_seconds": 0.0, "batch_seconds": 0.32}},
    },
    "output": {"bytes_per_image": 40, "write_seconds": 0.0},
    "ledger": {"sqlite": {"shards_per_second": 1000}},
    "listing": {"paths_per_second": 500_000},
    "verification": {"bytes_per_second": 1e9},
}


def planned(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["scale.py", "--plan", "--results", "none", "--node-cores", "16", *options])
    return plan(FOUND, arguments())


@pytest.mark.parametrize(
    ("options", "binding", "nodes"),
    [
        (["--node-gbit", "25"], "cores (decoding and model)", 22),  # 10 + 20 ms an image on 16 cores: 533 a second
        (["--node-gbit", "1"], "network", 24),  # 500 a second of 2 Mbit
        (["--node-gbit", "25", "--node-devices", "1", "--device-images-per-second", "2000"], "cores (decoding)", 8),
        (["--node-gbit", "25", "--node-devices", "1", "--device-images-per-second", "900"], "devices", 13),
    ],
)
def test_what_binds_decides_the_nodes(
    monkeypatch: pytest.MonkeyPatch, options: list[str], binding: str, nodes: int
) -> None:
    found = planned(monkeypatch, *options)
    assert found["images_per_second"] == pytest.approx(1e9 / 86_400)
    assert (found["binding"], found["nodes"]) == (binding, nodes)
    assert found["price_of_a_million_images"] == "no --node-price was given"


def test_the_rest_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(
        monkeypatch, "--node-gbit", "1", "--node-price", "2", "--preemptions-per-hour", "0.1", "--shard-size", "5000"
    )
    # A shard takes a node ten seconds; half of it and the start are done again, every ten hours.
    again = 5000 / (1e9 / 8 / 250_000) / 2 + 2
    assert found["preemption"]["seconds_done_again"] == pytest.approx(again)
    assert found["preemption"]["share_of_capacity_lost"] == pytest.approx(again / 36_000)
    assert found["preemption"]["last_shard_late_by_seconds"] == pytest.approx(10)
    assert found["preemption"]["verification_seconds_to_join"] == pytest.approx(40)
    assert found["ledger"]["shards_per_second"] == pytest.approx(11_574.074 / 5000 / 24)
    assert found["ledger"]["share_of_measured_rate"] == pytest.approx(11_574.074 / 5000 / 24 / 1000)
    assert found["listing_hours_of_single_files"] == pytest.approx(1e9 / 500_000 / 3600)
    price = 24 * 2 / 3600 / 11_574.074 * 1e6 / (1 - again / 36_000)
    assert found["price_of_a_million_images"] == pytest.approx(price)


def test_a_plan_needs_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for options, text in (
        (["--plan"], "--plan needs --results FILE"),
        (["--plan", "--results", "f", "--node-devices", "1"], "go together"),
    ):
        monkeypatch.setattr(sys, "argv", ["scale.py", *options])
        with pytest.raises(SystemExit):
            arguments()
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("--images-per-day", "0", "above 0"),
        ("--shard-size", "-1", "above 0"),
        ("--node-cores", "0", "above 0"),
        ("--node-gbit", "nan", "above 0"),
        ("--images-per-day", "inf", "above 0"),
        ("--node-devices", "-2", "from 0 on"),
        ("--preemptions-per-hour", "-0.5", "from 0 on"),
    ],
)
def test_a_number_that_none_can_be_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, given: str, wanted: str
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        planned(monkeypatch, option, given)
    assert f"{option} {given}: expected a number {wanted}" in capsys.readouterr().err
