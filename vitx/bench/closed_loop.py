"""Closed-loop latency, and what limits it: one caller, who sends the next batch when the last one is back.

How it is measured and what the numbers mean: docs/benchmarks.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitx.bench.decoding_session import DecodingSession
from vitx.bench.energy import gpu_energy
from vitx.bench.graph_cost import count_cost
from vitx.bench.roofline import (
    copy_probe,
    empty_call,
    fixed_seconds,
    name_limit,
    probe_dtype,
    product_probe,
)
from vitx.bench.timing import Lane, Probe, percentiles_ms, take_turns, warm_up
from vitx.core.bundle import Bundle, Precision, timestamp
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.latency import Latency, LatencyPoint, Roof
from vitx.core.machine import describe_machine, usable_cores
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Session, image_shape

BATCH_SIZES = (1, 8, 32)
SECONDS = 2.0
Loader = Callable[[Bundle], Session]


def bench(
    session: Session,
    image_shape: Sequence[int],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    quiet: bool = True,
) -> tuple[LatencyPoint, ...]:
    """Measure a session on images uint8 `image_shape` (S, S, 3), for `seconds` at each batch size.

    The images are random: the time of a matrix product does not depend on its values. Times include the copy of uint8
    images into the runtime and of float32 logits out of it, and no decoding. Shares and limits need a bundle: see
    `bench_bundle`. Raises InputError for batch sizes below 1 and for `seconds` that are not positive and finite.
    """
    points = bench_together({"": session}, image_shape, batch_sizes=batch_sizes, seconds=seconds, quiet=quiet)
    return points[""]


def bench_together(
    sessions: Mapping[str, Session],
    image_shape: Sequence[int],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    quiet: bool = True,
) -> dict[str, tuple[LatencyPoint, ...]]:
    """Measure several sessions in one run, in turns; return the points by session name."""
    sizes = checked_sizes(batch_sizes, seconds)
    lanes = session_lanes(sessions, random_images(sizes[-1], image_shape), sizes)
    warm_up(list(lanes.values()), quiet=quiet)
    take_turns(list(lanes.values()), seconds, quiet=quiet)
    return {name: tuple(point(lanes[name, size], size) for size in sizes) for name in sessions}


def bench_bundle(
    bundle: Bundle,
    sessions: Mapping[str, Session],
    loaders: Mapping[str, Loader] | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    image: bytes | None = None,
    quiet: bool = False,
) -> dict[str, Latency]:
    """Measure sessions of one network in turns, between probes of the machine; the first goes into latency.json.

    loaders: by session name, a function that loads another bundle into the same runtime, for the empty call.
    image: an encoded image; every call then starts with decoding it, once for each row of the batch.
    Raises InputError for batch sizes below 1 and for `seconds` that are not positive and finite.
    """
    sizes = checked_sizes(batch_sizes, seconds)
    bundle.latency()  # raises for a damaged record, to which nothing could be added afterwards
    # `fixed_seconds` needs two batch sizes. Where one was asked for, a second is measured and not reported.
    measured = sizes if len(sizes) > 1 else tuple(sorted({sizes[0], sizes[0] // 2 or 2}))
    with ExitStack() as opened:
        meter = _Meter(bundle, sessions, loaders or {}, measured, image, opened)
        if meter.cost is None:
            log(
                f"bench: ONNX Runtime lacks kernels for the graph of '{bundle.manifest.name}' on a CPU, where FLOPs "
                "and bytes are counted: no shares and no limits",
                quiet=quiet,
            )
        warm_up(meter.lanes, quiet=quiet)
        take_turns(meter.lanes, seconds, meter.probes, quiet=quiet)
    # Only now: a tuning may have ended meanwhile.
    machine, now, known = describe_machine(), timestamp(), bundle.latency()
    latencies = {
        name: Latency(
            runtime=meter.sessions[name].describe(),
            machine=machine,
            cost=meter.cost,
            roof=meter.roof(name),
            points=tuple(meter.point(name, size) for size in sizes),
            tuning=known.tuning if known else None,
            created=now,
        )
        for name in sessions
    }
    bundle.record_latency(next(iter(latencies.values())))
    return latencies


def checked_sizes(batch_sizes: Sequence[int], seconds: float) -> tuple[int, ...]:
    """The sizes in ascending order, each once; raise InputError for none or one below 1, and for no finite time."""
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batch sizes {tuple(batch_sizes)}: expected one or more, each at least 1")
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds {seconds:g}: expected a finite number above 0")
    return sizes


def random_images(count: int, shape: Sequence[int]) -> UInt8Array:
    """Return uint8 (count, *shape), the same at every call."""
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def session_lanes(
    sessions: Mapping[str, Session], images: UInt8Array, sizes: Sequence[int]
) -> dict[tuple[str, int], Lane]:
    """A lane for every session and batch size, keyed by both; on a GPU it also reads the energy."""
    energy = {
        name: gpu_energy() if device_of(session.describe()) != "cpu" else None for name, session in sessions.items()
    }
    return {
        (name, size): Lane(f"{name} batch {size}".strip(), partial(session.infer, images[:size]), energy[name])
        for name, session in sessions.items()
        for size in sizes
    }


def device_of(description: Mapping[str, Any]) -> str:
    """'cuda' or 'cpu', from what a session's `describe` returned."""
    words = f"{description.get('provider')} {description.get('runtime')}".lower()
    return "cuda" if any(word in words for word in ("cuda", "tensorrt", "gpu")) else "cpu"


def point(lane: Lane, size: int) -> LatencyPoint:
    """Percentiles and throughput of a lane that had `MIN_CALLS`: everything that needs no probe."""
    found, median = percentiles_ms(len(lane.times), lane.percentile), lane.percentile(0.5)
    joules = lane.joules / len(lane.times) / size if lane.energy else math.nan
    return LatencyPoint(
        batch_size=size,
        median_ms=1e3 * median,
        p90_ms=found["p90_ms"],
        p95_ms=1e3 * lane.percentile(0.95),
        p99_ms=found["p99_ms"],
        images_per_second=size / median,
        joules_per_image=joules if math.isfinite(joules) else None,  # the counter may fail in the middle
    )


@dataclass(frozen=True)
class _DeviceProbes:
    """The two probes of one device: a matrix product for FLOP/s, a copy for bytes/s."""

    dtype: str
    threads: int
    product: Probe
    copy: Probe

    @classmethod
    def of(cls, device: str, precision: Precision, threads: int) -> "_DeviceProbes":
        dtype = probe_dtype(precision, device)
        return cls(dtype, threads, product_probe(device, dtype, threads), copy_probe(device, threads))


class _Meter:
    """The lanes of one measurement with the probes of their devices, and the latency points they give together."""

    def __init__(
        self,
        bundle: Bundle,
        sessions: Mapping[str, Session],
        loaders: Mapping[str, Loader],
        sizes: Sequence[int],
        image: bytes | None,
        opened: ExitStack,
    ) -> None:
        preprocessing = bundle.manifest.preprocessing
        if image is not None:
            sessions = {name: DecodingSession(session, preprocessing, image) for name, session in sessions.items()}
        self.sessions = sessions
        self._times = session_lanes(sessions, random_images(sizes[-1], image_shape(bundle)), sizes)
        self.cost = count_cost(bundle)
        self._device = {name: device_of(session.describe()) for name, session in sessions.items()}
        threads = max(_threads(session.describe()) for session in sessions.values())
        devices = sorted(set(self._device.values()))
        precision = bundle.manifest.precision
        self._device_probes = {device: _DeviceProbes.of(device, precision, threads) for device in devices}
        self._empty = {
            name: empty_call(bundle, loaders[name], opened) if name in loaders else None for name in sessions
        }
        self._decode = Lane("probe: decode", lambda: preprocessing.from_bytes(image)) if image is not None else None

    @property
    def lanes(self) -> list[Lane]:
        return list(self._times.values())

    @property
    def probes(self) -> list[Probe]:
        """In the order of their turns. The empty calls and the decoding are timed alone: they have no work to count."""
        machine = [probe for roofs in self._device_probes.values() for probe in (roofs.product, roofs.copy)]
        times = [*self._empty.values(), self._decode]
        return machine + [Probe(0.0, lane) for lane in times if lane]

    def roof(self, name: str) -> Roof:
        roofs, empty = self._device_probes[self._device[name]], self._empty[name]
        return Roof(
            dtype=roofs.dtype,
            threads=roofs.threads,
            flops_per_second=roofs.product.rate,
            bytes_per_second=roofs.copy.rate,
            call_ms=1e3 * empty.median if empty else None,
            decode_ms=1e3 * self._decode.median if self._decode else None,
        )

    def point(self, name: str, size: int) -> LatencyPoint:
        lane, roofs, empty = self._times[name, size], self._device_probes[self._device[name]], self._empty[name]
        if self.cost is None:
            return point(lane, size)
        moved = self.cost.weight_bytes + size * self.cost.activation_bytes
        limit = name_limit(
            lane.median,
            fixed=fixed_seconds({other: one.median for (owner, other), one in self._times.items() if owner == name}),
            call=empty.median if empty else 0.0,
            decode=size * self._decode.median if self._decode else 0.0,
            cost=self.cost,
            batch_size=size,
            flops_per_second=roofs.product.rate,
            bytes_per_second=roofs.copy.rate,
        )
        shares = {
            "compute_share": roofs.product.share(lane, size * self.cost.flops),
            "memory_share": roofs.copy.share(lane, moved),
            "limit": limit,
        }
        return point(lane, size).model_copy(update=shares)


def _threads(description: Mapping[str, Any]) -> int:
    threads = description.get("threads")
    return threads if isinstance(threads, int) else usable_cores()
