"""Bench: how fast a bundle is on this machine, and what limits it. Semantics: docs/benchmarks.md."""

from vitx.bench.closed_loop import bench, bench_bundle, bench_together, device_of, random_images

__all__ = ["bench", "bench_bundle", "bench_together", "device_of", "random_images"]
