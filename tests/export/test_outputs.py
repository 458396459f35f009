"""What a bundle gives beside logits, against loops in float64 over what the network's layers make."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from reference import randomize_like_trained
from vitx.core.bundle import OUTPUTS, OutputName, OutputSpec, output_file, output_tensor
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.export import ALL, onnx_from_model
from vitx.export.outputs import plan_outputs, write_outputs
from vitx.export.rewrite.rewrites import ImageClassifier, applied_rewrites
from vitx.models import VisionTransformer
from vitx.models.outputs import recorded_outputs

Array = npt.NDArray[np.float64]
PREPROCESSING = Preprocessing(image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SIZE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
HEADS, PATCHES, WIDTH = 3, 16, 24
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "deit": lambda: VisionTransformer(**SIZE),
    "deepvit": lambda: VisionTransformer(**SIZE, attention="re-attention", residual_scale=0.5),
    "talking heads": lambda: VisionTransformer(**SIZE, attention="talking-heads", talking_heads_bias=True),
    "average": lambda: VisionTransformer(**SIZE, global_pool="avg", fc_norm=True),
    "registers": lambda: TimmVisionTransformer(**SIZE, reg_tokens=2),
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **SIZE),
}


def network(name: str) -> Any:
    model: Any = randomize_like_trained(NETWORKS[name]()).eval()
    model.pretrained_cfg = {"first_conv": "patch_embed.proj"}
    return model


def images(count: int) -> UInt8Array:
    return np.random.default_rng(7).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def exported(model: nn.Module, folder: Path, names: tuple[OutputName, ...] = OUTPUTS) -> tuple[OutputSpec, ...]:
    classifier = ImageClassifier(copy.deepcopy(model), PREPROCESSING).eval()
    planned = plan_outputs(classifier, names, 32)
    applied_rewrites(classifier, ALL)
    graph = onnx_from_model(classifier, PREPROCESSING, tuple("abcde"), folder / "model.onnx", check=False)
    return write_outputs(planned, classifier.model, graph, folder)


def joined(folder: Path, *names: str) -> bytes:
    return b"".join((folder / name).read_bytes() for name in ("model.onnx", *map(output_file, names)))


def run(content: bytes, pixels: UInt8Array) -> dict[str, npt.NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_outputs()]
    return dict(zip(names, session.run(names, {"images": pixels}), strict=True))


def layers_of(model: Any, pixels: UInt8Array) -> dict[str, Array]:
    """Of one forward pass in float64: queries, keys and values of each block, and what the last block makes."""
    wide = copy.deepcopy(model).double()
    seen: dict[str, Array] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: seen.__setitem__(name, output.detach().numpy())

    for index, block in enumerate(wide.blocks):
        block.attn.qkv.register_forward_hook(keep(f"qkv {index}"))
    wide.blocks[-1].register_forward_hook(keep("last"))
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (PREPROCESSING.mean, PREPROCESSING.std))
    with torch.no_grad():
        wide((((torch.from_numpy(pixels).double() / 255) - mean) / std).permute(0, 3, 1, 2))
    return seen


def softmax_maps(model: Any, block: int, qkv: Array) -> Array:
    """(H, N, N) of one image, from (N, 3·D), number by number."""
    tokens, width = len(qkv), WIDTH // HEADS
    scores = np.zeros((HEADS, tokens, tokens))
    for head in range(HEADS):
        query, key = (qkv[:, part * WIDTH + head * width :][:, :width] for part in (0, 1))
        for i in range(tokens):
            for j in range(tokens):
                scores[head, i, j] = sum(query[i] * key[j]) / math.sqrt(width)
    mix = getattr(model.blocks[block].attn, "proj_pre", None)
    if mix is not None:
        weight, bias = (value.detach().double().numpy() for value in (mix.weight, mix.bias))
        scores = np.stack([sum(weight[h, g] * scores[g] for g in range(HEADS)) + bias[h] for h in range(HEADS)])
    maps = np.exp(scores)
    return np.asarray(maps / maps.sum(axis=2, keepdims=True))


def layer_norm(row: Array, norm: Any) -> Array:
    centred = row - row.mean()
    scaled = centred / math.sqrt((centred**2).mean() + norm.eps)
    return np.asarray(scaled * norm.weight.detach().double().numpy() + norm.bias.detach().double().numpy())


def expected_outputs(name: str, model: Any, pixels: UInt8Array) -> Iterator[dict[str, Array]]:
    """One dictionary an image: which tokens are pooled is written here once more."""
    seen = layers_of(model, pixels)
    prefix = {"average": 0, "registers": 3, "distilled": 2}.get(name, 1)
    tokens = prefix + PATCHES
    pooled = {"average": range(tokens), "distilled": range(2)}.get(name, range(1))
    for image in range(len(pixels)):
        maps = [softmax_maps(model, block, seen[f"qkv {block}"][image]) for block in range(2)]
        last = seen["last"][image]
        if name == "average":
            embedding = layer_norm(np.mean([last[token] for token in pooled], axis=0), model.fc_norm)
        else:
            embedding = np.mean([layer_norm(last[token], model.norm) for token in pooled], axis=0)
        attention = np.mean([maps[-1][head, token] for head in range(HEADS) for token in pooled], axis=0)
        product = np.eye(tokens)
        for of_block in maps:  # the whole product of matrices, as in the paper: the first block is the rightmost
            product = 0.5 * (np.mean(of_block, axis=0) + np.eye(tokens)) @ product
        rollout = np.mean([product[token] for token in pooled], axis=0)
        yield {"embedding": embedding, "attention": attention[prefix:], "rollout": rollout[prefix:]}


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_the_network_s(name: str, tmp_path: Path) -> None:
    model, pixels = network(name), images(3)
    specs = exported(model, tmp_path)
    assert [(spec.name, spec.shape, spec.grid) for spec in specs] == [
        ("embedding", ("N", WIDTH), None),
        ("attention", ("N", PATCHES), (4, 4)),
        ("rollout", ("N", PATCHES), (4, 4)),
    ]
    alone = run(joined(tmp_path), pixels)
    assert [*alone] == ["logits"]  # nothing else is computed until it is asked for
    found = run(joined(tmp_path, *OUTPUTS), pixels)
    assert [*found] == ["logits", *map(output_tensor, OUTPUTS)]
    np.testing.assert_array_equal(found["logits"], alone["logits"])
    for row, expected in enumerate(expected_outputs(name, model, pixels)):
        for output, values in expected.items():
            np.testing.assert_allclose(found[output_tensor(output)][row], values, rtol=2e-4, atol=2e-6, err_msg=output)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_reference_is_that_of_the_loops(name: str) -> None:
    model, pixels = network(name), images(2)
    wide = copy.deepcopy(model).double()
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (PREPROCESSING.mean, PREPROCESSING.std))
    normal = (((torch.from_numpy(pixels).double() / 255) - mean) / std).permute(0, 3, 1, 2)
    with recorded_outputs(wide, OUTPUTS) as recorded, torch.no_grad():
        wide(normal)
        found = {output: value.numpy() for output, value in recorded().items()}
        features = wide.forward_head(wide.forward_features(normal), pre_logits=True)
    np.testing.assert_allclose(found["embedding"], features, rtol=1e-12)  # as timm defines it
    for row, expected in enumerate(expected_outputs(name, model, pixels)):
        for output, values in expected.items():
            np.testing.assert_allclose(found[output][row], values, rtol=1e-10, atol=1e-12, err_msg=output)
    assert wide.blocks[0].attn.fused_attn  # as before
