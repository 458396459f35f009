"""The loss landscape: the reference direction, the loss at each place by hand, and the same bits afterwards."""

import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from reference import randomize_like_trained, seq
from run_fixture import ColourMean, digits_source, write_run
from vitx.analyze.metric import AnalysisOptions, MetricContext
from vitx.analyze.metrics.landscape import (
    LANDSCAPE_METRIC,
    LossLandscape,
    draw_landscape,
    filter_normalized_direction,
    loss_landscape,
    measure_landscape,
    moved_parameters,
    random_direction,
    training_path,
)
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.panels import png
from vitx.data.open import open_images


def network() -> Any:
    shape: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
    model = timm.create_model("deepvit_digits", num_classes=3, attention=["plain", "re-attention"], **shape)
    return randomize_like_trained(model)


def batches() -> list[tuple[Tensor, Tensor]]:
    images = seq(0.3, 6, 3, 8, 8).float()
    labels = torch.tensor([0, 1, 2, 0, 1, 0])
    return [(images[:4], labels[:4]), (images[4:], labels[4:])]


def test_reference_direction() -> None:
    found = filter_normalized_direction(seq(0, 2, 2, 1, 2), seq(1, 2, 2, 1, 2))
    expected = [0.837902, 0.987459, 0.672598, 0.041404, -0.571059, -0.912347, -0.824545, -0.348946]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_direction_has_the_weights_lengths() -> None:
    weight, direction = seq(0, 5, 3, 2), seq(1, 5, 3, 2)
    weight[2], direction[3] = 0, 0
    found = filter_normalized_direction(weight, direction)
    lengths = weight.flatten(1).norm(dim=1)
    lengths[3] = 0  # there is no direction to scale
    torch.testing.assert_close(found.flatten(1).norm(dim=1), lengths)
    assert torch.equal(filter_normalized_direction(seq(0, 4), seq(1, 4)), torch.zeros(4, dtype=torch.float64))
    long, none = torch.full((2, 9), 100.0), torch.zeros(2, 9)  # a length over the smallest number is infinite
    assert torch.equal(filter_normalized_direction(long, none), none)
    with pytest.raises(InputError, match=r"a direction \(4,\) for a weight \(5,\)"):
        filter_normalized_direction(seq(0, 5), seq(0, 4))


def test_what_is_moved() -> None:
    moved = moved_parameters(network())
    assert {name for name in moved if not name.startswith("blocks.0.")} == {
        "patch_embed.proj.weight",
        *(
            f"blocks.1.{layer}.weight"
            for layer in ("attn.qkv", "attn.proj", "attn.reatten_matrix", "mlp.fc1", "mlp.fc2")
        ),
        "head.weight",
    }
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 2, 3, 4))
    assert not [name for name in moved_parameters(swin) if "position" in name or "norm" in name]


def test_the_loss_at_each_place() -> None:
    """Each place again, with the weights set by hand."""
    model = network()
    found = loss_landscape(model, batches(), radius=0.5, points=3, weight_decay=0.1, seed=7)
    assert found.axis == [-0.5, 0.0, 0.5]
    assert found.images == 6
    images, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    model.eval()
    for i, j in np.ndindex(3, 3):
        weights = dict(model.named_parameters())
        for index, (name, weight) in enumerate(moved_parameters(model).items()):
            first, second = (random_direction(weight.detach(), 7, number, index) for number in (0, 1))
            weights[name] = nn.Parameter(weight + found.axis[i] * first + found.axis[j] * second)
        with torch.no_grad():
            logits = torch.func.functional_call(model, weights, (images,))
        value = found.nll[i][j]
        assert value is not None
        assert abs(value - float(F.cross_entropy(logits, labels))) < 1e-5
        squares = sum(float(weight.detach().double().square().sum()) for weight in weights.values())
        assert abs(found.l2[i][j] - 0.05 * squares) < 1e-6 * squares
    assert len({value for row in found.nll for value in row}) == 9, "each place is another network"
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_the_points_are_evenly_spaced_between_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    @contextmanager
    def recorded(title: str, total: int, *, quiet: bool) -> Any:
        shown.append((title, total, quiet))
        yield SimpleNamespace(update=shown.append)

    monkeypatch.setattr("vitx.analyze.metrics.landscape.progress", recorded)
    found = loss_landscape(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), batches(), radius=0.5, points=5)
    assert found.axis == [-0.5, -0.25, 0, 0.25, 0.5]
    assert loss_landscape(network(), batches(), points=3).axis == [-1, 0, 1]
    assert shown[:26] == [("landscape", 25, True), *range(25)]
    shown.clear()
    context = MetricContext(
        digits_source("n", ColourMean(10)), open_images("digits", "val").first(4), AnalysisOptions()
    )
    for quiet in (True, False):
        measure_landscape(context._replace(quiet=quiet))
    assert [each for each in shown if isinstance(each, tuple)] == [("landscape", 121, quiet) for quiet in (True, False)]


def test_seed_and_directions() -> None:
    weight = seq(0, 6, 5)
    first, again, second, other = (random_direction(weight, *place) for place in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert torch.equal(first, again)
    torch.set_default_dtype(torch.float64)  # a notebook's
    try:
        assert torch.equal(first, random_direction(weight, 0, 0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert loss_landscape(network(), batches(), points=3) == loss_landscape(network(), batches(), points=3)


class Failing(list[tuple[Tensor, Tensor]]):
    """A data set that breaks while the second place is evaluated."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        if self.passes == 2:
            raise OSError("the disk is gone")
        return super().__iter__()


def test_everything_is_as_before() -> None:
    model = network().train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    loss_landscape(model, batches(), points=3)
    with pytest.raises(OSError, match="the disk is gone"):
        loss_landscape(model, Failing(batches()), points=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.head.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_not_finite_is_none() -> None:
    found = loss_landscape(network(), batches(), radius=1e30, points=3)
    assert None in {value for row in found.nll for value in row}
    assert found.nll[1][1] is not None


def test_bad_input_is_refused() -> None:
    for points, radius in ((4, 1.0), (1, 1.0), (3, 0.0), (3, float("inf"))):
        with pytest.raises(InputError, match="expected an odd number from 3, and a radius above 0"):
            loss_landscape(network(), batches(), points=points, radius=radius)
    with pytest.raises(InputError, match="at least one batch"):
        loss_landscape(network(), [])
    with pytest.raises(InputError, match="Sequential has no weights of two or more axes"):
        loss_landscape(nn.Sequential(nn.Flatten(), nn.LayerNorm(192)), batches())


def test_the_training_path_is_where_its_checkpoints_are_in_the_plane() -> None:
    model = network().double()
    weights = {name: weight.detach() for name, weight in moved_parameters(model).items()}
    first, second = (
        {name: random_direction(weight, 0, number, index) for index, (name, weight) in enumerate(weights.items())}
        for number in (0, 1)
    )
    within = {name: weight + 0.5 * first[name] - 0.25 * second[name] for name, weight in weights.items()}
    path, share = training_path(model, [within, weights], 0)
    assert np.allclose(path, [(0.5, -0.25), (0, 0)])
    assert share == pytest.approx(1)
    elsewhere = {
        name: random_direction(weight, 1, 0, index) + weight for index, (name, weight) in enumerate(weights.items())
    }
    _, share = training_path(model, [elsewhere], 0)
    assert share is not None
    assert 0 <= share < 0.2
    assert training_path(model, [weights], 0)[1] is None


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Any:
        return self.second(self.first(images.mean(dim=(2, 3))).tanh())


def test_a_weight_that_layers_share_is_moved_once() -> None:
    """Drawn again for the second layer, it stood for two weights, and its way seemed to lead out of the plane."""
    model = Tied()
    assert list(moved_parameters(model)) == ["first.weight"]
    weight = model.first.weight.detach().clone()
    path, share = training_path(model, [{"first.weight": weight + 0.5 * random_direction(weight, 0, 0, 0)}], 0)
    assert np.allclose(path, [(0.5, 0)], atol=1e-5)
    assert share == pytest.approx(1)
    loss_landscape(model, batches(), points=3)
    assert torch.equal(model.first.weight, weight)


def context_of_run(folder: Path, *factors: float) -> MetricContext:
    """Of a run whose checkpoints of steps 0, 1, … hold the network's weights times these factors."""
    run, model = write_run(folder / "run", "digits"), ColourMean(10)
    written, record = run.checkpoint("last")
    shutil.rmtree(written)
    for step, factor in enumerate(factors):
        checkpoint = run.path / "checkpoints" / f"epoch-{step:04d}"
        checkpoint.mkdir()
        weights = {name: value * factor for name, value in model.state_dict().items()}
        save_file(weights, checkpoint / "model.safetensors")
        digests = {"model.safetensors": sha256_file(checkpoint / "model.safetensors")}
        record = record.model_copy(update={"epoch": step, "step": step, "sha256": digests})
        write_json(checkpoint / "state.json", record)
    source = replace(digits_source(str(run.path), model), recipe="tests")
    options = AnalysisOptions(loss_batches=1, landscape_points=3, batch_size=4, seed=5)
    return MetricContext(source, open_images("digits", "val").first(4), options)


def test_the_path_of_a_run_is_that_of_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = context_of_run(tmp_path, 0.5, 2.0, 1.0)
    found, weights = measure_landscape(context), context.source.model.state_dict()
    states = [{name: value * factor for name, value in weights.items()} for factor in (0.5, 2.0, 1.0)]
    assert (found.path, found.path_share) == training_path(context.source.model, states, 5)
    assert len(found.path) == 3
    assert found.path_share is not None
    assert LANDSCAPE_METRIC.line(found).endswith(
        f"; {100 * found.path_share:.2g} % of the training path lies in the plane"
    )
    assert capsys.readouterr().err == ""
    without = measure_landscape(context._replace(source=replace(context.source, recipe=None)))
    assert without == found.model_copy(update={"path": [], "path_share": None})
    alone = measure_landscape(context_of_run(tmp_path / "alone", 1.0))  # all are the network's own
    assert (alone.path, alone.path_share) == ([], None)


def test_the_landscape_of_a_run_with_a_checkpoint_that_is_not_finite_has_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure_landscape(context_of_run(tmp_path, 0.5, math.nan, 1.0))
    assert (found.path, found.path_share) == ([], None)
    assert found.nll[1][1] is not None
    assert capsys.readouterr().err == (
        "warning: the path of the training is left out of the landscape: the checkpoint of step 1 has no place: "
        "'head.weight' holds NaN or infinity\n"
    )


def test_a_face_of_the_surface_with_a_loss_that_is_not_finite_is_not_seen() -> None:
    nll: list[list[float | None]] = [[None, 2.0, 2.0], [2.0, 1.0, 3.0], [2.0, 2.0, 2.0]]
    record = LossLandscape(axis=[-1, 0, 1], nll=nll, l2=[[0.0] * 3] * 3, weight_decay=0, images=1, seed=0)
    figure = draw_landscape({"one": record})
    png(figure)
    surface: Any = next(axes for axes in figure.axes if axes.name == "3d")
    (faces,) = surface.collections
    assert sorted(colour[3] for colour in faces.get_facecolor()) == [0, 1, 1, 1]


@pytest.mark.parametrize("value", [0.0, 2.0, 1e9, 5e10, 1e38])
def test_a_loss_that_is_the_same_everywhere_or_is_known_at_one_place_is_drawn(value: float) -> None:
    for around in (value, None):
        nll: list[list[float | None]] = [[around] * 3, [around, value, around], [around] * 3]
        record = LossLandscape(axis=[-1, 0, 1], nll=nll, l2=[[0.0] * 3] * 3, weight_decay=0, images=1, seed=0)
        figure = draw_landscape({"one": record})
        assert png(figure).startswith(b"\x89PNG")
        contours: Any = figure.axes[0].collections[0]
        assert contours.levels[0] == value
        assert contours.levels[-1] <= value + 2e-6 * max(1, value)  # nothing looks like a hill


def test_each_network_has_a_row_of_its_loss_from_above_and_as_a_surface() -> None:
    """One whose loss is nowhere finite said "0 to 1 nats"."""
    nll: list[list[float | None]] = [[2.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 2.5]]
    record = LossLandscape(axis=[-1, 0, 1], nll=nll, l2=[[0.0] * 3] * 3, weight_decay=0, images=1, seed=0)
    figure = draw_landscape({"one": record, "two": record.model_copy(update={"nll": [[None] * 3] * 3})})
    drawn: list[Any] = [axes for axes in figure.axes if axes.get_xlabel()]
    places = [(axes.name, axes.get_subplotspec().get_geometry()) for axes in drawn]
    assert places == [(name, (2, 2, place, place)) for place, name in enumerate(["rectilinear", "3d"] * 2)]
    titles = ["one\n1 to 2.5 nats, + the weights", "", "two\nnot finite, + the weights", ""]
    assert [axes.get_title() for axes in drawn] == titles


def test_the_edge_has_four_sides() -> None:
    """The smallest and the largest of a 3 × 3 grid but its middle."""
    nll: list[list[float | None]] = [[2.0, 2.0, None], [50.0, 1.0, 0.5], [2.0, 2.0, 2.0]]
    record = LossLandscape(axis=[-1, 0, 1], nll=nll, l2=[[0.0] * 3] * 3, weight_decay=0, images=1, seed=0)
    assert LANDSCAPE_METRIC.line(record) == "NLL 1.000 at the weights, 0.5 to 50 at the edge"
    wide = np.full((7, 7), 4.0)
    wide[3, 3] = 3.0
    record = record.model_copy(update={"axis": [*range(-3, 4)], "nll": wide.tolist()})
    assert LANDSCAPE_METRIC.line(record) == "NLL 3.000 at the weights, 4 to 4 at the edge"


@pytest.mark.parametrize(("high", "label", "ends"), [(3.0, "NLL (nats)", (1.0, 3.0)), (100.0, "log₁₀ NLL", (0.0, 2.0))])
def test_the_surface_is_on_the_scale_of_the_colours(high: float, label: str, ends: tuple[float, float]) -> None:
    nll: list[list[float | None]] = [[1.0, high, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, None]]
    record = LossLandscape(axis=[-1, 0, 1], nll=nll, l2=[[0.0] * 3] * 3, weight_decay=0, images=1, seed=0)
    figure = draw_landscape({"one": record})
    surface: Any = next(axes for axes in figure.axes if axes.name == "3d")
    low, top = surface.get_zlim()
    width = ends[1] - ends[0]
    assert ends[0] - 0.2 * width < low <= ends[0]
    assert ends[1] <= top < ends[1] + 0.2 * width
    assert surface.get_zlabel() == label
    nothing = record.model_copy(update={"nll": [[None] * 3] * 3})
    assert png(draw_landscape({"one": nothing})).startswith(b"\x89PNG")
