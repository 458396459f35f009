"""One pass over activations: every unit of every supported family is found, its output observed, its branch removed."""

import copy
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

from reference import randomize_like_trained, seq
from vitx.analyze.activations import EMBEDDING, Activations, Layout, stream_activations, stream_order
from vitx.analyze.metric import NotApplicable
from vitx.analyze.metrics.attention_collapse import AttentionCollapseMetric
from vitx.analyze.metrics.cka import MinibatchCKA
from vitx.analyze.metrics.feature_similarity import FeatureSimilarityMetric
from vitx.analyze.metrics.fourier import FourierMetric
from vitx.analyze.metrics.lesions import lesion_study
from vitx.analyze.metrics.over_smoothing import OverSmoothingMetric
from vitx.analyze.metrics.residual_update import ResidualUpdateMetric
from vitx.analyze.metrics.variance import VarianceMetric
from vitx.analyze.similarity_matrix import matrix_line
from vitx.analyze.spectrum import fourier_log_amplitude
from vitx.analyze.units import residual_units
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.models import ReAttention, token_similarity
from vitx.models.similarity import attention_stds, dc_shares, longest_tokens, map_similarity, token_similarities

KINDS = {
    "resnet18": {"convolution"},
    "resnet26": {"convolution"},
    "convnext_atto": {"convolution"},
    "alternet_18": {"convolution", "attention"},
    "xcit_nano_12_p8_224": {"convolution", "attention", "mlp"},
}
DIGITS = open_images("digits", "val").first(10)
VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deepvit_s": {**VIT, "attention": ["plain", "plain", "re-attention"]},
    "cait_xxs24_224": {**VIT, "depth": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "embed_dim": 24,
        "depths": (1, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "embed_dim": 24,
        "depths": (1, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "swinv2_cr_tiny_224": {"img_size": 32, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4), "window_size": 4},
    "vit_relpos_base_patch16_rpn_224": {**VIT, "num_heads": 2},
    "pit_ti_224": {
        "img_size": 64,
        "stem_type": "overlap",
        "base_dims": (8, 8),
        "depth": (1, 1),
        "heads": (2, 2),
        "mlp_ratio": 2,
    },
    "xcit_nano_12_p8_224": {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "cls_attn_layers": 1},
    "resnet18": {},
    "resnet26": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)},
    "alternet_18": {"stem": "cifar"},
}


def network(name: str) -> Any:
    model = timm.create_model(name, num_classes=10, **SMALL[name])
    return randomize_like_trained(model).eval()


def side_of(name: str) -> int:
    return int(SMALL[name].get("img_size", 32))


@pytest.mark.parametrize("name", SMALL)
def test_a_unit_without_its_branch_returns_its_input(name: str) -> None:
    """With every branch at zero only shortcuts are left; the network must run, and each unit alone must change it."""
    model = network(name)
    units = residual_units(model)
    assert {unit.kind for unit in units} == KINDS.get(name, {"attention", "mlp"})
    images = torch.randn(2, 3, side_of(name), side_of(name), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model(images)
        for unit in units:
            handle = unit.branch.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
            read: list[Tensor] = []
            watch = _block_of(model, unit.name, unit.kind).register_forward_hook(
                lambda _module, inputs, output, read=read: read.extend((inputs[0], output))
            )
            without = model(images)
            handle.remove()
            watch.remove()
            assert not torch.allclose(without, whole), unit.name
            if unit.kind == "convolution" and read[0].shape == read[1].shape and name.startswith(("convnext", "alter")):
                assert torch.equal(read[0], read[1])
        assert torch.equal(model(images), whole)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "rpn", "eva"]
)
def test_a_block_without_its_branches_is_its_shortcut(name: str) -> None:
    """Also where a norm stands after a branch: of zero it is its bias. The stream between the two is the input too."""
    post_norm: dict[str, Any] = {"block_fn": ResPostBlock} if name == "rpn" else {"use_post_norm": True}
    model: Any = (
        network(name)
        if name in SMALL
        else timm.create_model(
            "vit_tiny_patch16_224" if name == "rpn" else "eva02_tiny_patch14_224", **VIT, **post_norm
        )
    )
    randomize_like_trained(model).eval()
    units = residual_units(model)
    side = model.patch_embed.img_size[0]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    assert units
    for attention, mlp in zip(units[::2], units[1::2], strict=True):
        read: list[Tensor] = []
        block = model.get_submodule(str(mlp.layer))
        assert attention.stream_module is not None
        hooks = [
            attention.branch.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output)),
            mlp.branch.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output)),
            attention.stream_module.register_forward_pre_hook(
                lambda _module, inputs, read=read: read.append(inputs[0])
            ),
            block.register_forward_hook(lambda _module, inputs, output, read=read: read.extend((inputs[0], output))),
        ]
        with torch.inference_mode():
            model(images)
        for hook in hooks:
            hook.remove()
        middle, before, after = read
        with torch.inference_mode():  # the last blocks of SwinV2-CR also have a norm in the stream itself
            assert torch.equal(after, getattr(block, "norm3", nn.Identity())(before)), mlp.name
        assert torch.equal(middle.reshape(before.shape), before), attention.name


def test_a_network_whose_shortcuts_pool_has_no_units() -> None:
    """MViT v2; its blocks also give a tuple, the stream and its size."""
    model = timm.create_model("mvitv2_tiny", img_size=32, num_classes=10).eval()
    assert residual_units(model) == []
    (batch,) = stream_activations(model, DIGITS.first(2), Preprocessing(image_size=32), batch_size=2)
    assert batch.streams == {}


def _block_of(model: nn.Module, name: str, kind: str) -> nn.Module:
    return model.get_submodule(name if kind == "convolution" else name.rpartition(".")[0])


@pytest.mark.parametrize("name", SMALL)
def test_every_family_is_measured(name: str) -> None:
    model = network(name).train()
    preprocessing = Preprocessing(image_size=side_of(name))
    batches = list(stream_activations(model, DIGITS, preprocessing, batch_size=5))
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [batch.images for batch in batches] == [5, 5]
    assert EMBEDDING in batches[0].streams
    assert bool(batches[0].maps) == (name not in ("resnet18", "resnet26", "convnext_atto"))
    metrics: list[Any] = [FourierMetric(model), VarianceMetric(model)]
    cka = MinibatchCKA()
    for batch in batches:
        cka.add([batch.streams[unit] for unit in stream_order(model)])
        for metric in metrics:
            metric.add(batch)
    fourier, variance = (metric.result() for metric in metrics)
    assert len(fourier.units) >= 3  # CaiT's class blocks have no map
    assert len(fourier.units) == len(batches[0].streams) or not name.startswith("swin")
    assert set(fourier.units) == set(variance.variance)
    matrix = cka.result()
    assert torch.allclose(matrix, matrix.T)
    assert matrix.diagonal().tolist() == pytest.approx([1.0] * len(matrix))


def test_streams_are_read_between_the_units() -> None:
    """Attention's stream is the block's input with its branch added; the MLP's is the block's output."""
    model = network("deepvit_s")
    (batch,) = stream_activations(model, DIGITS.first(4), Preprocessing(image_size=32), batch_size=4)
    with torch.inference_mode():
        x = batch.streams[EMBEDDING]
        for index, block in enumerate(model.blocks):
            s = block.residual_scale
            middle = x + block.attn(block.norm1(x * s)) / s
            assert torch.allclose(batch.streams[f"blocks.{index}.attn"], middle, rtol=1e-4, atol=1e-5)
            x = block(x)
            assert torch.allclose(batch.streams[f"blocks.{index}.mlp"], x, rtol=1e-4, atol=1e-5)


def batch_of(maps: list[Tensor] | None = None, streams: dict[str, Tensor] | None = None) -> Activations:
    named = {f"layer{index}": value for index, value in enumerate(maps or [])}
    images = len(next(iter((*named.values(), *(streams or {}).values()))))
    return Activations(images, streams or {}, named, named, torch.zeros(images, 1))


def test_attention_similarity_reference_numbers() -> None:
    maps = [seq(k, 2, 3, 4, 4).softmax(dim=-1) for k in (0, 1)]
    metric = AttentionCollapseMetric()
    metric.add(batch_of(maps))
    found = metric.result()
    assert found.matrix[0][1] == pytest.approx(0.929152, abs=1e-6)
    assert found.similar_blocks == 1
    assert map_similarity(maps[0], maps[1]).item() == pytest.approx(0.929152, abs=1e-6)
    strict = AttentionCollapseMetric(threshold=0.95)
    strict.add(batch_of(maps))
    assert strict.result().similar_blocks == 0


def test_columns_without_a_direction_are_similar_to_none() -> None:
    maps = torch.randn(2, 4, 5, 5).softmax(dim=-1)
    maps[..., 0], maps[..., 1] = 0, 4e-13  # no longer than 1e-12
    metric = AttentionCollapseMetric()
    metric.add(Activations(2, {}, {"a": maps, "b": maps.clone()}, {}, torch.zeros(2, 3)))
    found = metric.result()
    assert found.matrix[0][1] == pytest.approx(0.6)
    assert map_similarity(maps, maps).item() == pytest.approx(0.6)
    columns = maps[..., 2:].transpose(-2, -1).double()
    pairs = [
        float(torch.cosine_similarity(columns[:, g], columns[:, h], dim=-1).sum()) / (2 * 5)
        for g, h in combinations(range(4), 2)
    ]
    assert found.head_diversity["a"] == pytest.approx(1 - sum(pairs) / 6, abs=1e-6)


def test_head_diversity_is_one_less_the_mean_over_pairs() -> None:
    maps = seq(0, 2, 3, 4, 4).softmax(dim=-1)
    metric = AttentionCollapseMetric()
    metric.add(batch_of([maps]))
    pairs = [map_similarity(maps[:, [g]], maps[:, [h]]).item() for g in range(3) for h in range(g)]
    assert metric.result().head_diversity["layer0"] == pytest.approx(1 - sum(pairs) / 3, abs=1e-9)


@pytest.mark.parametrize("stage", ["softmax", "mixed"])
def test_collapse_of_either_maps_is_that_of_loops_in_float64(stage: Any) -> None:
    """Maps from the layers' inputs and weights: softmax, the mix over heads with its bias, BatchNorm, the scale."""
    model = network("deepvit_s")
    inputs: dict[str, Tensor] = {}
    hooks = [
        block.attn.register_forward_pre_hook(lambda _, x, name=f"blocks.{i}.attn": inputs.setdefault(name, x[0]))
        for i, block in enumerate(model.blocks)
    ]
    metric = AttentionCollapseMetric(threshold=0.5, maps=stage)
    for batch in stream_activations(model, DIGITS.first(2), Preprocessing(image_size=32), mixed=True):
        metric.add(batch)
    found = metric.result()
    for hook in hooks:
        hook.remove()
    assert found.layers == tuple(inputs)
    maps = [maps_by_loops(model.get_submodule(name), x, stage) for name, x in inputs.items()]
    for p, first in enumerate(maps):
        for q, second in enumerate(maps):
            cosines = [cosine_of(first[b, h, :, t], second[b, h, :, t]) for b, h, t in np.ndindex(2, 3, 17)]
            assert found.matrix[p][q] == pytest.approx(np.mean(cosines), abs=1e-5)
        heads = [cosine_of(first[b, g, :, t], first[b, h, :, t]) for b, g, h, t in np.ndindex(2, 3, 3, 17) if g != h]
        assert found.head_diversity[found.layers[p]] == pytest.approx(1 - np.mean(heads), abs=1e-5)
    above = sum(found.matrix[p][p + 1] > 0.5 for p in (0, 1))  # type: ignore[operator]
    assert (found.maps, found.similar_blocks) == (stage, above)


def maps_by_loops(layer: Any, x_BND: Tensor, stage: str) -> Any:
    B, N, D = x_BND.shape
    H = layer.num_heads
    with torch.inference_mode():
        qkv = layer.qkv(x_BND).double().numpy().reshape(B, N, 3, H, D // H)
    maps = np.zeros((B, H, N, N))
    for b, h, n in np.ndindex(B, H, N):
        scores = qkv[b, :, 1, h] @ qkv[b, n, 0, h] / np.sqrt(D // H)
        maps[b, h, n] = np.exp(scores) / np.exp(scores).sum()
    if stage == "softmax" or not isinstance(layer, ReAttention):
        return maps
    weights = {name: value.detach().double().numpy() for name, value in layer.state_dict().items()}
    mixed = np.zeros_like(maps)
    for h in range(H):
        for g in range(H):
            mixed[:, h] += weights["reatten_matrix.weight"][h, g, 0, 0] * maps[:, g]
        mixed[:, h] += weights["reatten_matrix.bias"][h] - weights["var_norm.running_mean"][h]
        mixed[:, h] /= np.sqrt(weights["var_norm.running_var"][h] + layer.var_norm.eps)
        mixed[:, h] = mixed[:, h] * weights["var_norm.weight"][h] + weights["var_norm.bias"][h]
    return mixed * layer.reatten_scale


def cosine_of(first: Any, second: Any) -> float:
    return float(first @ second / np.sqrt(first @ first) / np.sqrt(second @ second))


def test_mixed_maps_are_recorded_for_networks_that_mix_alone() -> None:
    for name, stages in (("cait_xxs24_224", 2), ("vit_tiny_patch16_224", 1), ("resnet18", 0)):
        model = network(name)
        (batch,) = stream_activations(model, DIGITS.first(1), Preprocessing(image_size=32), mixed=True)
        assert (bool(batch.maps), bool(batch.mixed)) == (stages > 0, stages > 1)
        (batch,) = stream_activations(model, DIGITS.first(1), Preprocessing(image_size=32))
        assert not batch.mixed


def test_the_maps_of_windows_count_as_their_mean_for_an_image() -> None:
    """Swin's stages have fewer and fewer windows: each image has one number a layer all the same."""
    model = network("swin_tiny_patch4_window7_224")
    over_smoothing, collapse = OverSmoothingMetric(model), AttentionCollapseMetric(threshold=0.0)
    maps: list[Tensor] = []
    for batch in stream_activations(model, DIGITS, Preprocessing(image_size=32), batch_size=5):
        over_smoothing.add(batch)
        collapse.add(batch)
        maps.append(batch.maps["layers.0.blocks.0.attn"])
    spread, similar = over_smoothing.result(), collapse.result()
    assert [len(each) for each in maps] == [20, 20]
    first = maps[0][:4].double().std(dim=-1).mean()  # the four windows of the first image
    assert over_smoothing._spread.values()["layers.0.blocks.0.attn"][0] == pytest.approx(float(first), rel=1e-5)
    assert spread.images == similar.images == 10
    assert set(spread.intervals["attention_std"]) == set(spread.attention_std)
    assert similar.matrix[0][1] is None  # another number of windows and heads
    assert similar.repeated == {"layers.1.blocks.1.attn": 10}
    assert similar.widest is not None
    assert {len(values) for values in (*spread.per_image.values(), *similar.per_image.values())} == {10}


def test_images_that_are_all_alike_have_no_entry_that_varies() -> None:
    model = network("vit_tiny_patch16_224")
    similarity = FeatureSimilarityMetric(model)
    alike = DIGITS.subset(np.zeros(10, dtype=np.int64))
    for batch in stream_activations(model, alike, Preprocessing(image_size=32), batch_size=5):
        similarity.add(batch)
    assert matrix_line(similarity.result()).endswith("; no entry varies")


@pytest.mark.parametrize("name", ["mobilevit_xxs", "mobilevitv2_050", "nest_tiny_jx", "samvit_base_patch16_224"])
def test_blocks_that_fold_images_have_no_streams_or_maps_of_images(name: str) -> None:
    """MobileViT makes images or rows of one image, Nest keeps windows apart, SAM heads: none is read as another."""
    sizes: dict[str, dict[str, Any]] = {
        "mobilevit_xxs": {},
        "mobilevitv2_050": {},  # with as many patches as pixels of a patch its maps (B, D, 4, 4) look like the image's
        "nest_tiny_jx": {"img_size": 32, "patch_size": 2},
        "samvit_base_patch16_224": {**VIT, "window_size": 2},
    }
    model = timm.create_model(name, num_classes=10, **sizes[name]).eval()
    metrics: list[Any] = [OverSmoothingMetric(model), AttentionCollapseMetric(), FeatureSimilarityMetric(model)]
    metrics += [ResidualUpdateMetric(model), FourierMetric(model), VarianceMetric(model)]
    for batch in stream_activations(model, DIGITS.first(4), Preprocessing(image_size=32), batch_size=4):
        assert {len(stream) for stream in batch.streams.values()} <= {4}
        assert bool(batch.maps) == (name == "mobilevit_xxs")
        assert not (name.startswith("mobilevit") and batch.streams)
        for metric in metrics:
            metric.add(batch)
    for metric in metrics:
        try:
            found = metric.result()
        except NotApplicable:
            continue
        assert getattr(found, "images", 4) == 4
        assert {len(values) for values in getattr(found, "per_image", {}).values()} <= {4}


def test_tokens_in_the_order_of_windows_are_no_map() -> None:
    """Hiera's: read row by row they would have another spectrum than the image's."""
    model = timm.create_model("hiera_tiny_224", img_size=(64, 64), num_classes=10).eval()
    fourier, similarity = FourierMetric(model), OverSmoothingMetric(model)
    for batch in stream_activations(model, DIGITS.first(2), Preprocessing(image_size=64)):
        fourier.add(batch)
        similarity.add(batch)
    with pytest.raises(NotApplicable, match="no unit has a square feature map"):
        fourier.result()
    assert len(similarity.result().cos_sim) == 12


def test_a_class_token_that_comes_later_hides_no_patch_before() -> None:
    for name, arguments in (("convit_tiny", VIT), ("xcit_nano_12_p8_224", SMALL["xcit_nano_12_p8_224"])):
        model = timm.create_model(name, num_classes=10, **arguments).eval()
        layout = Layout.of(model)
        (batch,) = stream_activations(model, DIGITS.first(2), Preprocessing(image_size=32))
        assert layout.patches(batch.streams)[EMBEDDING].shape[:2] == (2, 16)
        assert layout.feature_map(EMBEDDING, batch.streams[EMBEDDING]) is not None


def test_the_stream_of_xcit_is_read_between_its_three_branches() -> None:
    model = network("xcit_nano_12_p8_224")
    (batch,) = stream_activations(model, DIGITS.first(2), Preprocessing(image_size=32))
    block, x = model.blocks[0], batch.streams[EMBEDDING]
    with torch.inference_mode():
        x = x + block.gamma1 * block.attn(block.norm1(x))
        assert torch.allclose(batch.streams["blocks.0.attn"], x, rtol=1e-4, atol=1e-5)
        x = x + block.gamma3 * block.local_mp(block.norm3(x), 4, 4)
        assert torch.allclose(batch.streams["blocks.0.local_mp"], x, rtol=1e-4, atol=1e-5)


def test_the_update_of_swin_is_of_its_median_token() -> None:
    """Swin's tokens are kept as a map (B, S, S, D), whose update as a whole the few longest tokens would decide."""
    model = network("swin_tiny_patch4_window7_224")
    metric = ResidualUpdateMetric(model)
    (batch,) = stream_activations(model, DIGITS, Preprocessing(image_size=32), batch_size=10)
    metric.add(batch)
    before, after = (batch.streams[name].double().numpy() for name in (EMBEDDING, "layers.0.blocks.0.mlp"))
    ratios = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    expected = np.median(ratios.reshape(10, -1), axis=1).mean()
    assert metric.result().update["layers.0.blocks.0"] == pytest.approx(expected, rel=1e-4)


def test_layers_of_other_shapes_are_not_compared() -> None:
    metric = AttentionCollapseMetric()
    metric.add(batch_of([torch.rand(2, 3, 4, 4), torch.rand(2, 3, 5, 5)]))
    found = metric.result()
    assert found.matrix[0][1] is None
    assert found.similar_blocks == 0


def test_metrics_of_batches_are_those_of_all_images() -> None:
    model = network("deepvit_s")
    preprocessing = Preprocessing(image_size=32)

    def measured(batch_size: int) -> list[Any]:
        metrics: list[Any] = [
            *(OverSmoothingMetric(model), AttentionCollapseMetric(), FeatureSimilarityMetric(model)),
            *(FourierMetric(model), VarianceMetric(model), ResidualUpdateMetric(model)),
        ]
        for batch in stream_activations(model, DIGITS, preprocessing, batch_size=batch_size):
            for metric in metrics:
                metric.add(batch)
        return [metric.result().model_dump() for metric in metrics]

    at_once, in_parts = (torch.tensor(list(_numbers(measured(size))), dtype=torch.float64) for size in (10, 4))
    assert torch.allclose(at_once, in_parts, rtol=1e-4, atol=1e-5)
    (batch,), found = stream_activations(model, DIGITS, preprocessing, batch_size=10), measured(10)
    patches = batch.streams["blocks.1.mlp"][:, 1:]
    assert all(each["intervals"] and all(each["intervals"].values()) for each in found)  # of ten images there are some
    assert found[0]["cos_sim"]["blocks.1"] == pytest.approx(token_similarity(patches).item(), rel=1e-5)
    assert found[0]["dc_share"]["blocks.1"] == pytest.approx(dc_shares(patches).mean().item(), rel=1e-5)
    assert found[0]["longest"]["blocks.1"] == pytest.approx(longest_tokens(patches).mean().item(), rel=1e-5)
    last = token_similarities(batch.streams["blocks.2.mlp"][:, 1:]), attention_stds(batch.maps["blocks.2.attn"])
    assert list(found[0]["per_image"]) == ["CosSim, last block", "attention std, last layer"]
    (similar,) = found[1]["per_image"].values()
    assert np.mean(similar) == pytest.approx((found[1]["matrix"][0][1] + found[1]["matrix"][1][2]) / 2, rel=1e-5)
    assert [*found[0]["per_image"].values()] == [pytest.approx(each.tolist(), rel=1e-4) for each in last]
    features = Layout.of(model).feature_map("blocks.1.mlp", batch.streams["blocks.1.mlp"])
    assert features is not None
    expected = fourier_log_amplitude(features.double()).tolist()
    assert found[3]["units"]["blocks.1.mlp"]["log_amplitude"] == pytest.approx(expected, abs=1e-4)
    other = batch.streams["blocks.2.mlp"][:, 1:]
    cosine = torch.cosine_similarity(patches, other, dim=-1).mean().item()
    layers = found[2]["layers"]
    assert found[2]["matrix"][layers.index("blocks.1")][layers.index("blocks.2")] == pytest.approx(cosine, rel=1e-4)


def test_a_network_of_float64_is_shown_float64() -> None:
    model, preprocessing = network("deepvit_s"), Preprocessing(image_size=32)
    wide = copy.deepcopy(model).double()
    (batch,), (expected,) = (stream_activations(each, DIGITS, preprocessing) for each in (wide, model))
    assert torch.allclose(batch.logits, expected.logits, rtol=1e-3, atol=1e-4)
    assert batch.streams["blocks.1.mlp"].dtype == batch.maps["blocks.1.attn"].dtype == torch.float32
    assert lesion_study(wide, DIGITS, preprocessing) == lesion_study(model, DIGITS, preprocessing)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [float(value)] if isinstance(value, float | int) else []
    return [number for part in value for number in _numbers(part)]


def test_what_does_not_apply_says_so() -> None:
    model = network("resnet18")
    collapses = AttentionCollapseMetric(), AttentionCollapseMetric(maps="mixed")
    metrics: list[Any] = [OverSmoothingMetric(model), *collapses, FeatureSimilarityMetric(model)]
    reasons = ["no tokens and no attention", "no attention whose maps", "no layer mixes its maps", "no patch tokens"]
    for batch in stream_activations(model, DIGITS.first(2), Preprocessing(image_size=32)):
        for metric in metrics:
            metric.add(batch)
    for metric, reason in zip(metrics, reasons, strict=True):
        with pytest.raises(NotApplicable, match=reason):
            metric.result()


def test_the_update_of_a_block_is_that_of_its_median_token() -> None:
    model = network("deepvit_s")
    metric = ResidualUpdateMetric(model)
    (batch,) = stream_activations(model, DIGITS, Preprocessing(image_size=32), batch_size=10)
    metric.add(batch)
    before, after = (batch.streams[f"blocks.{index}.mlp"].double().numpy() for index in (0, 1))
    ratios = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    assert metric.result().update["blocks.1"] == pytest.approx(np.median(ratios, axis=1).mean(), rel=1e-4)
    still = dict.fromkeys(batch.streams, batch.streams[EMBEDDING])
    metric = ResidualUpdateMetric(model)
    metric.add(batch._replace(streams=still))
    found = metric.result()
    assert (set(found.update.values()), set(found.unchanged.values())) == ({0}, {10})
