"""`latency.json`: what a point, a roof and a setting hold, and the name of a machine."""

from typing import Any

import pytest

from vitx.core.latency import GraphCost, Latency, LatencyFile, LatencyPoint, Roof, Setting, Tuning, machine_key

POINT: dict[str, Any] = {"batch_size": 1, "median_ms": 2.0, "p95_ms": 3.0, "images_per_second": 500.0}
SETTING = Setting(instances=2, threads=3, batch_size=4, images_per_second=5.0, median_ms=6.0)


@pytest.mark.parametrize("limit", ["compute", "memory", "launch", "decode", "python", None])
def test_what_limits_a_batch_size(limit: Any) -> None:
    assert LatencyPoint(**POINT, limit=limit).limit == limit


def test_what_was_not_measured_is_null() -> None:
    with pytest.raises(ValueError, match="limit"):
        LatencyPoint(**POINT, limit="disk")  # type: ignore[arg-type]
    unknown = ("p90_ms", "p99_ms", "compute_share", "memory_share", "limit", "joules_per_image")
    assert LatencyPoint(**POINT).model_dump() == POINT | dict.fromkeys(unknown)
    roof = Roof(dtype="float32", threads=1, flops_per_second=1.0, bytes_per_second=2.0, call_ms=None)
    assert roof.decode_ms is None
    with pytest.raises(ValueError, match="call_ms"):
        Roof(dtype="float32", threads=1, flops_per_second=1.0, bytes_per_second=2.0)  # type: ignore[call-arg]
    latency = Latency(runtime={}, machine={}, points=(), created="now")
    assert (latency.cost, latency.roof, latency.tuning) == (None, None, None)
    assert (LatencyFile().machines, LatencyFile().format_version, LatencyFile().sha256) == ({}, 1, "")


@pytest.mark.parametrize("wrong", [{"instances": 0}, {"threads": -3}, {"instances": 4000}])
def test_a_setting_is_one_that_a_server_takes(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"should be (greater|less) than or equal to"):
        Setting(**SETTING.model_dump() | wrong)


def test_a_machine_is_added_or_its_entry_replaced_and_the_file_sealed() -> None:
    machine = {"processor": "P", "cores": 4, "system": "S", "python": "3"}
    tuning = Tuning(best=SETTING, tried=(SETTING,), runtime={}, created="now")
    cost = GraphCost(flops=1, activation_bytes=2, weight_bytes=3)
    first = Latency(runtime={}, machine=machine, points=(LatencyPoint(**POINT),), tuning=tuning, created="then")
    second = first.model_copy(update={"cost": cost})
    other = first.model_copy(update={"machine": machine | {"cores": 8}})
    file = LatencyFile().with_machine(first).with_machine(other).with_machine(second)
    assert file.machines == {"P, 4 cores, S": second, "P, 8 cores, S": other}
    assert file.sha256 == file.digest() != ""
    assert machine_key({}) == "None, None cores, None"
