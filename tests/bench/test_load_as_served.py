"""What a load test has in common with the server: how many batches run at once, in which session, of which size."""

import time

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, Float32Array
from vitx.bench.request import BenchRequest
from vitx.bench.scenarios import Scenario, ScenarioSettings, run_at_rate, run_scenario
from vitx.core.bundle import Bundle
from vitx.core.machine import Gpu
from vitx.core.preprocess import UInt8Array
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.models.loading import Loader
from vitx.serve.options import ServeOptions

IMAGES = np.zeros((64, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def test_without_options_as_many_batches_are_measured_as_are_served(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One instance was measured where the server takes one a core; the server took one beside a GPU it does not use."""
    monkeypatch.setattr("vitx.runtimes.session.local_gpus", lambda: (Gpu("A", "sm89"),))
    monkeypatch.setattr("vitx.runtimes.instances.usable_cores", lambda: 3)
    report = BenchRequest(tiny_bundle, None, "onnxruntime-cpu", "auto", None).load_test(
        rates=(200.0,), scenarios=(), max_batch=4, instances=None, seconds=0.1, p99=1
    )
    loader = Loader(ServeOptions(max_batch=4, runtime="onnxruntime-cpu"))
    served = loader.warm(loader.verify(tiny_bundle.path))
    with served.session as session:
        assert (report.instances, report.runtime) == (served.batching.instances, session.describe())
    assert report.runtime["side_by_side"] == {"batches": 3, "threads": 1}


@pytest.mark.parametrize("scenario", ["offline", None])
def test_batches_beside_others_run_in_the_session_for_that(scenario: Scenario | None) -> None:
    """All ran in the session of every core, whose threads took the cores from each other."""
    sizes = list[int]()

    def alone(images: UInt8Array) -> Float32Array:
        time.sleep(0.001)
        return np.zeros((len(images), 4), dtype=np.float32)

    def beside(images: UInt8Array) -> Float32Array:
        sizes.append(len(images))
        return alone(images)

    curve = LatencyCurve({1: 0.001, 2: 0.0015})  # a size that was not measured is not taken
    settings = ScenarioSettings(ServeOptions(max_batch=4, instances=2).batching, 0.1, 1.0, curve, beside)
    if scenario is None:
        run_at_rate(alone, IMAGES, 10_000, settings)
    else:
        run_scenario(scenario, alone, IMAGES, settings)
    assert 2 in sizes
    assert max(sizes) <= 2
