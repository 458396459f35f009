"""Bench: how fast a bundle is on this machine, and what limits it. Semantics: docs/benchmarks.md."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.bench.closed_loop import bench, bench_bundle, bench_together, device_of, random_images
    from vitx.bench.options import BenchOptions

__all__ = ["BenchOptions", "bench", "bench_bundle", "bench_together", "device_of", "random_images"]

__getattr__ = lazy_names(
    __name__,
    {
        "vitx.bench.closed_loop": ("bench", "bench_bundle", "bench_together", "device_of", "random_images"),
        "vitx.bench.options": ("BenchOptions",),
    },
)
