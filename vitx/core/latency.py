"""`latency.json`: what was measured of a bundle, machine by machine. Form and meaning: docs/benchmarks.md."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vitx.core.files import Record, SealedRecord

Limit = Literal["compute", "memory", "launch", "decode", "python"]


class LatencyPoint(Record):
    """One batch size. Percentiles are of a call's time; shares are of what the machine's probes reached meanwhile."""

    batch_size: int
    median_ms: float
    p90_ms: float | None = None
    p95_ms: float
    p99_ms: float | None = None
    images_per_second: float
    compute_share: float | None = Field(default=None, description="FLOP/s over the product probe's")
    memory_share: float | None = Field(default=None, description="bytes/s over the copy probe's")
    limit: Limit | None = None
    joules_per_image: float | None = None


class GraphCost(Record):
    """What one image costs, counted on the graph by vitx.bench.graph_cost."""

    flops: int = Field(description="of matrix products and convolutions; a multiply-add counts two")
    activation_bytes: int = Field(description="activations that the fused kernels read and write for one image")
    weight_bytes: int = Field(description="parameters that the fused kernels read once a call")


class Roof(Record):
    """What the machine can do, of a roofline: medians of the probes that ran between the measured calls."""

    dtype: str
    threads: int
    flops_per_second: float
    bytes_per_second: float
    call_ms: float | None = Field(description="an empty graph through the same runtime; null where it takes none")
    decode_ms: float | None = Field(default=None, description="one image from bytes to pixels, where calls start there")


class Setting(Record):
    """A setting that tuning tried, and its throughput: `instances` sessions at once, of `threads` threads each."""

    instances: int = Field(ge=1, le=1024)
    threads: int = Field(ge=1, le=1024)
    batch_size: int
    images_per_second: float
    median_ms: float


class Tuning(Record):
    """The setting to serve with, and all that were tried."""

    best: Setting
    tried: tuple[Setting, ...]
    runtime: dict[str, Any]
    created: str


class Latency(Record):
    """What was measured on one machine."""

    runtime: dict[str, Any]
    machine: dict[str, Any]
    cost: GraphCost | None = None
    roof: Roof | None = None
    points: tuple[LatencyPoint, ...]
    tuning: Tuning | None = None
    created: str


class LatencyFile(SealedRecord):
    """The file: one entry a machine, so that a bundle that travels keeps what was measured elsewhere."""

    format_version: Literal[1] = 1
    machines: dict[str, Latency] = Field(default_factory=dict)

    def with_machine(self, latency: Latency) -> "LatencyFile":
        return LatencyFile(machines={**self.machines, machine_key(latency.machine): latency}).sealed()


def machine_key(machine: Mapping[str, Any]) -> str:
    """The name of a machine in the file: machines of equal name are taken to be equally fast."""
    return f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('system')}"
