"""The figure of variances: on a logarithmic axis, where there is something to draw on one."""

import io

import pytest

from vitx.analyze.metrics.variance import Variance, draw_variance
from vitx.analyze.units import Kind


@pytest.mark.parametrize(
    ("values", "scale"), [((0.5, 2.0), "log"), ((0.0, 2.0), "log"), ((0.0, 0.5), "log"), ((0.0, 0.0), "linear")]
)
@pytest.mark.filterwarnings("error")
def test_a_dead_network_has_no_logarithm(values: tuple[float, float], scale: str) -> None:
    kinds: dict[str, Kind | None] = {"embedding": None, "block": "attention"}
    variance = dict(zip(kinds, values, strict=True))
    record = Variance(variance=variance, kinds=kinds, step={"block": 0.0}, intervals={"variance": {}, "step": {}})
    figure = draw_variance({"network": record})
    figure.savefig(io.BytesIO(), format="png")
    assert figure.axes[0].get_yscale() == scale
