"""Which axis of a map is that of its channels, block by block, and from which stream a block is measured."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.davit import DaVit
from timm.models.gcvit import GlobalContextVit
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg
from timm.models.nest import Nest
from timm.models.twins import Twins
from timm.models.volo import VOLO

from reference import randomize_like_trained
from vitx.analyze.activations import EMBEDDING, Activations, Layout, stream_activations
from vitx.analyze.metric import NotApplicable
from vitx.analyze.metrics.fourier import FourierMetric
from vitx.analyze.metrics.lesions import lesion_study
from vitx.analyze.metrics.over_smoothing import OverSmoothingMetric
from vitx.analyze.metrics.residual_update import ResidualUpdateMetric
from vitx.analyze.metrics.variance import VarianceMetric
from vitx.analyze.spectrum import feature_variances
from vitx.analyze.steps import MapSamples
from vitx.analyze.units import residual_units
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images

DIGITS = open_images("digits", "val").first(3)
SIDE = 32


def maxvit() -> Any:
    """Two stages of two blocks, each an MBConv (NCHW) before attention in windows and in a grid (NHWC).

    The first stage's maps have 8 rows, 8 columns and 8 channels: their shape does not say which axis is which.
    """
    attention = MaxxVitTransformerCfg(dim_head=4, window_size=(4, 4), grid_size=(4, 4))
    config = MaxxVitCfg(
        embed_dim=(8, 16), depths=(2, 2), block_type=("M", "M"), stem_width=8, transformer_cfg=attention
    )
    return MaxxVit(config, img_size=SIDE, num_classes=10)


def gcvit() -> Any:
    return GlobalContextVit(
        num_classes=10, img_size=SIDE, window_size=(4, 4), embed_dim=8, depths=(2, 2), num_heads=(2, 2)
    )


def volo() -> Any:
    return VOLO([2, 1, 1, 1], SIDE, num_classes=10, embed_dims=[4, 8, 8, 8], num_heads=[2] * 4)


def davit() -> Any:
    return DaVit(depths=(1, 1), embed_dims=(8, 16), num_heads=(2, 2), window_size=4, num_classes=10)


def twins() -> Any:
    """Two stages of two blocks, with a position encoding between these."""
    sizes: dict[str, Any] = {"embed_dims": (8, 16), "num_heads": (2, 2), "depths": (2, 2), "mlp_ratios": (2, 2)}
    return Twins(img_size=SIDE, num_classes=10, sr_ratios=(2, 1), **sizes)


NETWORKS = {"maxvit": maxvit, "gcvit": gcvit, "volo": volo, "davit": davit}


def network(name: str) -> Any:
    torch.manual_seed(0)
    return randomize_like_trained({**NETWORKS, "twins": twins}[name]()).eval()


def batch_of(model: Any, side: int = SIDE) -> Activations:
    (batch,) = stream_activations(model, DIGITS, Preprocessing(image_size=side))
    return batch


def last_map(name: str, stream: torch.Tensor) -> Any:
    """The stream as (B, S, S, D) in float64: of these networks, DaViT's blocks alone are NCHW."""
    values = stream.double().numpy()
    return np.moveaxis(values, 1, -1) if name == "davit" else values


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("maxvit", "stages.0.blocks.0.attn_block"),
        ("maxvit", "stages.0.blocks.1.attn_grid"),
        ("gcvit", "stages.0.blocks.1"),
        ("volo", "network.0.1"),
        ("davit", "stages.0.blocks.0.1"),
    ],
)
def test_spectrum_and_variance_are_over_rows_and_columns(name: str, block: str) -> None:
    """By sums in float64 over the two axes of space, which for maps of 8 × 8 × 8 only the block can tell."""
    model = network(name)
    batch, unit = batch_of(model), f"{block}.mlp"
    fourier, variance = FourierMetric(model), VarianceMetric(model)
    for metric in (fourier, variance):
        metric.add(batch)
    values = last_map(name, batch.streams[unit])
    side, channels = values.shape[1], values.shape[-1]
    assert values.shape == (3, side, side, channels)
    if name == "maxvit":
        assert side == channels == 8
    means = values.mean(axis=(1, 2), keepdims=True)
    expected = ((values - means) ** 2).sum(axis=(1, 2)).mean() / (side**2 - 1)
    assert variance.result().variance[unit] == pytest.approx(expected, rel=1e-4)
    alternating = (-1.0) ** np.add.outer(np.arange(side), np.arange(side))  # Nyquist in both directions
    highest = np.abs((values * alternating[None, :, :, None]).sum(axis=(1, 2)))
    constant = np.abs(values.sum(axis=(1, 2)))
    log_amplitude = (np.log(highest + 1e-6) - np.log(constant + 1e-6)).mean()
    assert fourier.result().units[unit].log_amplitude[-1] == pytest.approx(log_amplitude, abs=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_layout_of_each_stream_is_that_of_what_reads_it(name: str) -> None:
    """A norm over the last axis that reads maps reads (B, S, S, D); where it reads tokens, maps are (B, D, S, S)."""
    model = network(name)
    layout = Layout.of(model)
    read: dict[str, int] = {}
    hooks = [
        module.norm1.register_forward_pre_hook(lambda _, inputs, name=name: read.update({name: inputs[0].ndim}))
        for name, module in model.named_modules()
        if hasattr(module, "norm1")
    ]
    batch = batch_of(model)
    for hook in hooks:
        hook.remove()
    maps = {unit: stream for unit, stream in batch.streams.items() if unit.endswith(".mlp") and stream.ndim == 4}
    assert len(maps) >= 2
    for unit in maps:
        assert (unit in layout.channels_last) == (read[unit.removesuffix(".mlp")] == 4), unit


def test_the_tokens_of_maps_with_channels_last_are_compared() -> None:
    """CosSim of MaxViT's tokens, pair by pair."""
    model = network("maxvit")
    batch, metric = batch_of(model), OverSmoothingMetric(model)
    metric.add(batch)
    tokens = batch.streams["stages.0.blocks.0.attn_grid.mlp"].double().numpy().reshape(3, 64, 8)
    unit = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
    expected = np.mean([np.mean([a[i] @ a[j] for i in range(64) for j in range(64) if i != j]) for a in unit])
    assert metric.result().cos_sim["stages.0.blocks.0.attn_grid"] == pytest.approx(expected, abs=1e-5)


def test_tokens_that_stay_in_windows_are_no_map() -> None:
    """Nest's (B, windows, tokens, D), of as many windows as tokens."""
    sizes: dict[str, Any] = {"embed_dims": (8, 8), "num_heads": (2, 2), "depths": (1, 1), "num_levels": 2}
    model = randomize_like_trained(Nest(img_size=SIDE, patch_size=8, num_classes=10, **sizes)).eval()
    batch, metric = batch_of(model), VarianceMetric(model)
    assert batch.streams[EMBEDDING].shape == (3, 4, 4, 8)
    metric.add(batch)
    with pytest.raises(NotApplicable, match="no unit has a square feature map"):
        metric.result()


def blocks_by_hand(model: Any) -> dict[str, tuple[Any, Any]]:
    """Each block's own input and output in float64, kept by a hook of its own."""
    kept: dict[str, tuple[Any, Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, inputs, output, name=name: kept.update(
                {name: (inputs[0].double().numpy().copy(), output.double().numpy().copy())}
            )
        )
        for name, module in model.named_modules()
        if hasattr(module, "norm1") and hasattr(module, "mlp")
    ]
    batch_of(model)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("maxvit", [f"stages.{stage}.blocks.{block}.attn_block.attn" for stage in (0, 1) for block in (0, 1)][1:]),
        ("twins", ["blocks.0.1.attn", "blocks.1.0.attn", "blocks.1.1.attn"]),
        ("gcvit", ["stages.1.blocks.0.attn"]),
    ],
)
def test_a_block_is_not_charged_with_what_stands_before_it(name: str, between: list[str]) -> None:
    """MaxViT's MBConv, Twins' position encoding, a new stage: an update is from the block's own input to its output."""
    model = network(name)
    batch, metric = batch_of(model), ResidualUpdateMetric(model)
    metric.add(batch)
    assert list(batch.before) == between, "an input that is the stream before is kept once"
    expected = {}
    for block, (before, after) in blocks_by_hand(model).items():
        ratios = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
        expected[block] = np.median(ratios.reshape(3, -1), axis=1)
    found = metric.result().update
    assert found.keys() == expected.keys()
    for block, ratios in expected.items():
        assert found[block] == pytest.approx(ratios.mean(), rel=1e-4), block


@pytest.mark.parametrize(("name", "block"), [("maxvit", "stages.0.blocks.1.attn_block"), ("twins", "blocks.0.1")])
def test_a_unit_is_compared_with_the_map_that_it_adds_to(name: str, block: str) -> None:
    """Its variance, and its highest frequency, less those of its block's input."""
    model = network(name)
    batch = batch_of(model)
    metrics: list[Any] = [VarianceMetric(model), FourierMetric(model)]
    for metric in metrics:
        metric.add(batch)
    variance, fourier = (metric.result() for metric in metrics)
    before = blocks_by_hand(model)[block][0].reshape(3, 8, 8, 8)
    alternating = (-1.0) ** np.add.outer(np.arange(8), np.arange(8))
    highest = np.log(np.abs((before * alternating[None, :, :, None]).sum(axis=(1, 2))) + 1e-6)
    start = (highest - np.log(np.abs(before.sum(axis=(1, 2))) + 1e-6)).mean()
    unit = f"{block}.attn"
    assert variance.step[unit] == pytest.approx(
        variance.variance[unit] - before.var(axis=(1, 2), ddof=1).mean(), rel=1e-3, abs=1e-5
    )
    assert fourier.step[unit] == pytest.approx(fourier.units[unit].log_amplitude[-1] - start, abs=1e-3)


@pytest.mark.parametrize("name", ["maxvit", "twins", "gcvit", "davit"])
def test_a_unit_without_its_branch_leaves_the_stream_that_it_adds_to(name: str) -> None:
    """What a lesion removes is what the steps of variance and spectrum are counted from, also in DaViT's blocks.

    Those have a position encoding before attention and one before the MLP, units of their own.
    """
    model = network(name)
    previous, units = EMBEDDING, residual_units(model)
    assert units
    for unit in units:
        handle = unit.branch.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
        batch = batch_of(model)
        handle.remove()
        before, after = batch.stream_before(unit.name, previous), batch.streams[unit.name]
        assert before is not None
        assert torch.allclose(after, before.reshape(after.shape), atol=1e-5), unit.name
        previous = unit.name
    if name == "davit":
        kinds = [unit.kind for unit in residual_units(model)]
        assert kinds == ["convolution", "attention", "convolution", "mlp"] * 4


def test_a_norm_of_the_stream_is_charged_to_no_block() -> None:
    """SwinV2-CR ends with one, inside its last block: the stream after that block's branches is what enters it."""
    sizes: dict[str, Any] = {"embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4), "window_size": 4}
    torch.manual_seed(0)
    model: Any = randomize_like_trained(
        timm.create_model("swinv2_cr_tiny_224", img_size=SIDE, num_classes=10, **sizes)
    ).eval()
    last, read = model.stages[1].blocks[1], list[Any]()
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].double().numpy().reshape(3, 16, 48)))
        for module in (last, last.norm3)
    ]
    batch, update, variance = batch_of(model), ResidualUpdateMetric(model), VarianceMetric(model)
    for hook in hooks:
        hook.remove()
    update.add(batch)
    variance.add(batch)
    before, after = read
    ratios = np.median(np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1), axis=1)
    assert update.result().update["stages.1.blocks.1"] == pytest.approx(ratios.mean(), rel=1e-4)
    expected = after.var(axis=1, ddof=1).mean()
    assert variance.result().variance["stages.1.blocks.1.mlp"] == pytest.approx(expected, rel=1e-4)


def test_a_step_from_an_input_without_a_map_is_left_out() -> None:
    values = {name: np.array([float(index)]) for index, name in enumerate("abcd")}
    maps = MapSamples(torch.nn.Identity(), feature_variances)
    maps.sizes, maps.sizes_before = dict.fromkeys("abcd", 4), {"b": 0, "c": 4, "d": 8}
    steps = maps.steps(values, {"c": np.array([7.0])})
    assert {name: step.tolist() for name, step in steps.items()} == {"c": [-5.0]}
    maps.sizes, maps.sizes_before = {**maps.sizes, "d": 2}, {}
    assert maps.steps(values, {}).keys() == {"b", "c"}


def test_branches_that_add_to_one_shortcut_at_once_have_lesions_and_no_streams() -> None:
    small: dict[str, Any] = {"img_size": 32, "num_classes": 10, "depth": 2, "embed_dim": 64, "num_heads": 2}
    model: Any = timm.create_model("vit_pwee_patch16_reg1_gap_256", **small)
    randomize_like_trained(model).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    attention, mlp = residual_units(model)[:2]
    assert [unit.name for unit in residual_units(model)] == [
        f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn", "mlp")
    ]
    assert (attention.layer, mlp.layer) == (None, "blocks.0")
    found = lesion_study(model, DIGITS.first(4), Preprocessing(image_size=32), quiet=True)
    assert (len(found.units), [*found.depth]) == (4, ["blocks.0", "blocks.1"])
    for removed in ([attention], [mlp], [attention, mlp]):
        hooks = [unit.branch.register_forward_hook(lambda _module, _inputs, output: 0 * output) for unit in removed]
        with torch.inference_mode():
            tokens = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
            assert torch.equal(model.blocks[0](tokens), tokens) == (len(removed) == 2)
            assert model(images).isfinite().all()
        for hook in hooks:
            hook.remove()


def test_branches_that_one_product_joins_are_its_two_parts() -> None:
    """Those of timm's DiffParallelScalingBlock; the product's bias belongs to neither."""
    small: dict[str, Any] = {"img_size": 32, "num_classes": 10, "depth": 2, "embed_dim": 64, "num_heads": 2}
    model: Any = timm.create_model("vit_dpwee_patch16_reg1_gap_256", **small)
    randomize_like_trained(model).eval()
    units, block = residual_units(model), model.blocks[0]
    assert [(unit.name, unit.kind, unit.layer, unit.stream_module) for unit in units] == [
        (f"blocks.{n}.{part}", kind, layer and f"blocks.{n}", None)
        for n in (0, 1)
        for part, kind, layer in (("attn", "attention", None), ("mlp", "mlp", True))
    ]
    tokens, read = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)), list[torch.Tensor]()
    block.out_proj.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0]))
    for removed in (units[:1], units[1:2], units[:2]):
        hooks = [unit.branch.register_forward_hook(lambda _module, _inputs, output: 0 * output) for unit in removed]
        with torch.inference_mode():
            without = block(tokens)
        for hook in hooks:
            hook.remove()
        attention, mlp = read[-1][..., :64], read[-1][..., 64:]
        assert bool(attention.any()) == (units[0] not in removed)
        assert bool(mlp.any()) == (units[1] not in removed)
        assert torch.equal(without, tokens + block.ls(block.out_proj.bias)) == (len(removed) == 2)
    found = lesion_study(model, DIGITS.first(4), Preprocessing(image_size=32), quiet=True)
    assert (len(found.units), [*found.depth]) == (4, ["blocks.0", "blocks.1"])


def test_tokens_of_patches_that_are_no_squares_are_no_map() -> None:
    """Eight rows of two are as many as four of four, and would be folded into other places."""
    size: dict[str, Any] = {"img_size": SIDE, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 10}
    for patch, maps in ((8, 3), ((4, 16), 0)):
        model = timm.create_model("vit_tiny_patch16_224", patch_size=patch, **size)
        batch, layout = batch_of(model), Layout.of(model)
        assert {stream.shape[1] for stream in batch.streams.values()} == {17}
        found = [layout.feature_map(name, stream) for name, stream in batch.streams.items()]
        assert sum(each is not None for each in found) == maps


def test_the_update_of_a_token_of_zeros_has_no_ratio() -> None:
    """The median is that of tokens that were longer before; where none was, zeros stay and anything else is no end."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=SIDE, patch_size=16, embed_dim=24, depth=1, num_heads=2)
    before = torch.zeros(3, 5, 24)
    before[0, :2] = 1
    after = before + torch.tensor([0.5, 0.0, 0.25])[:, None, None]
    metric = ResidualUpdateMetric(model)
    metric.add(Activations(3, {EMBEDDING: before, "blocks.0.mlp": after}, {}, {}, torch.zeros(3, 10)))
    found = metric.result()
    assert found.per_image["smallest update of a block"][:2] == (0.5, 0)
    assert found.update["blocks.0"] > 1e11
