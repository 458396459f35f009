"""What a bundle gives beside logits, against loops in float64 over what the network's layers make."""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from torch import nn

from bundle_fixture import png
from cli_fixture import Vitx
from reference import randomize_like_trained
from vitx.core.bundle import OUTPUTS, Bundle, OutputName, OutputSpec, output_file, output_tensor
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import open_images
from vitx.export import ALL, onnx_from_model
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.outputs import rollout_part
from vitx.export.outputs import plan_outputs, write_outputs
from vitx.export.precision.half import HALVES, HalfGraph
from vitx.export.rewrite.rewrites import ImageClassifier, applied_rewrites
from vitx.models import VisionTransformer
from vitx.models.outputs import recorded_outputs
from vitx.parity.executables.first_load import require_verdict
from vitx.predict import PREDICTIONS
from vitx.runtimes import load_session
from witnessed_bundle import seal_certificate, seal_manifest

Array = npt.NDArray[np.float64]
PREPROCESSING = Preprocessing(image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SIZE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
HEADS, PATCHES, WIDTH = 3, 16, 24
MIXES: dict[str, Any] = {"talking_heads_bias": True, "residual_scale": 0.5}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "deit": lambda: VisionTransformer(**{**SIZE, "depth": 3}),
    "deepvit": lambda: VisionTransformer(**SIZE, attention=["talking-heads", "re-attention"], **MIXES),
    "average": lambda: VisionTransformer(**SIZE, global_pool="avg", fc_norm=True),
    "contranorm": lambda: VisionTransformer(**SIZE, contranorm_scale=0.5),
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **SIZE),
}


def network(name: str) -> Any:
    model: Any = randomize_like_trained(NETWORKS[name]()).eval()
    model.pretrained_cfg = {"first_conv": "patch_embed.proj"}
    return model


def images(count: int) -> UInt8Array:
    return np.random.default_rng(7).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def exported(
    model: nn.Module, folder: Path, names: tuple[OutputName, ...] = OUTPUTS, rewrites: Sequence[str] = ALL
) -> tuple[OutputSpec, ...]:
    classifier = ImageClassifier(copy.deepcopy(model), PREPROCESSING).eval()
    planned = plan_outputs(classifier, names, 32)
    applied_rewrites(classifier, rewrites)
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
    prefix = {"average": 0, "distilled": 2}.get(name, 1)
    tokens = prefix + PATCHES
    pooled = {"average": range(tokens), "distilled": range(2)}.get(name, range(1))
    for image in range(len(pixels)):
        maps = [softmax_maps(model, block, seen[f"qkv {block}"][image]) for block in range(len(model.blocks))]
        last = seen["last"][image]
        if name == "average":
            embedding = layer_norm(np.mean([last[token] for token in pooled], axis=0), model.fc_norm)
        else:
            if name == "contranorm":
                unit = last / np.linalg.norm(last, axis=1, keepdims=True)
                alike = np.exp(unit @ unit.T)
                last = last - 0.5 * (alike / alike.sum(axis=1, keepdims=True)) @ last
            norm = getattr(model.norm, "layernorm", model.norm)
            embedding = np.mean([layer_norm(last[token], norm) for token in pooled], axis=0)
        attention = np.mean([maps[-1][head, token] for head in range(HEADS) for token in pooled], axis=0)
        product = np.eye(tokens)
        for of_block in maps:  # the whole product of matrices, as in the paper: the first block is the rightmost
            product = 0.5 * (np.mean(of_block, axis=0) + np.eye(tokens)) @ product
        rollout = np.mean([product[token] for token in pooled], axis=0)
        yield {"embedding": embedding, "attention": attention[prefix:], "rollout": rollout[prefix:]}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, tuple[OutputSpec, ...]]]:
    """Where model.onnx and all outputs of a network are, and what they are; each is traced once."""

    @functools.cache
    def export(name: str) -> tuple[Path, tuple[OutputSpec, ...]]:
        folder = tmp_path_factory.mktemp("outputs")
        return folder, exported(network(name), folder)

    return export


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_the_network_s(name: str, folder_of: Any) -> None:
    model, pixels = network(name), images(3)
    folder, specs = folder_of(name)
    assert [(spec.name, spec.shape, spec.grid) for spec in specs] == [
        ("embedding", ("N", WIDTH), None),
        ("attention", ("N", PATCHES), (4, 4)),
        ("rollout", ("N", PATCHES), (4, 4)),
    ]
    alone = run(joined(folder), pixels)
    assert [*alone] == ["logits"]  # nothing else is computed until it is asked for
    found = run(joined(folder, *OUTPUTS), pixels)
    assert [*found] == ["logits", *map(output_tensor, OUTPUTS)]
    np.testing.assert_array_equal(found["logits"], alone["logits"])
    for row, expected in enumerate(expected_outputs(name, model, pixels)):
        for output, values in expected.items():
            np.testing.assert_allclose(found[output_tensor(output)][row], values, rtol=2e-4, atol=2e-6, err_msg=output)


def test_an_embedding_without_the_rewrites_has_its_norm_once(tmp_path: Path) -> None:
    model, pixels = network("deit"), images(2)
    exported(model, tmp_path, ("embedding",), rewrites=())
    found = run(joined(tmp_path, "embedding"), pixels)[output_tensor("embedding")]
    for row, expected in enumerate(expected_outputs("deit", model, pixels)):
        np.testing.assert_allclose(found[row], expected["embedding"], rtol=2e-4, atol=2e-6)


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


def test_the_graph_is_the_same_without_them(folder_of: Any, tmp_path: Path) -> None:
    folder, _ = folder_of("deepvit")
    assert exported(network("deepvit"), tmp_path, ()) == ()
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert joined(tmp_path) == joined(folder)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_session_of_one_output_computes_no_other(folder_of: Any, output: str) -> None:
    folder, _ = folder_of("distilled")
    found = run(joined(folder, output), images(2))
    every = run(joined(folder, *OUTPUTS), images(2))
    assert [*found] == ["logits", output_tensor(output)]
    np.testing.assert_allclose(found[output_tensor(output)], every[output_tensor(output)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["deepvit", "distilled"])
def test_tensors_of_a_half_graph_are_read_as_float32(name: str, folder_of: Any) -> None:
    folder, _ = folder_of(name)
    half = HalfGraph(Dataflow(onnx.load(folder / "model.onnx")), HALVES["fp16"]).build(())
    parts = b"".join((folder / output_file(output)).read_bytes() for output in OUTPUTS)
    found, exact = run(half.SerializeToString() + parts, images(2)), run(joined(folder, *OUTPUTS), images(2))
    for output in map(output_tensor, OUTPUTS):
        assert found[output].dtype == np.float32
        np.testing.assert_allclose(found[output], exact[output], rtol=0.02, atol=0.02)
        assert not np.array_equal(found[output], exact[output])


def test_a_part_of_other_maps_is_found(monkeypatch: pytest.MonkeyPatch, folder_of: Any, tmp_path: Path) -> None:
    """Before anything is written, and without an image of the evaluation split."""
    model = network("deit")
    planned = plan_outputs(ImageClassifier(model, PREPROCESSING).eval(), ("attention",), 32)
    graph = onnx.load(folder_of("deit")[0] / "model.onnx")
    write_outputs(planned, model, graph, tmp_path)
    other = tmp_path / "none"
    monkeypatch.setattr("vitx.export.outputs.softmax_name", lambda index: "blocks.0.softmax")
    with pytest.raises(CheckFailed, match=r"the graph's attention differs from the network's at a batch of 1: by 0\."):
        write_outputs(planned, model, graph, other)
    monkeypatch.setattr("vitx.export.outputs.softmax_name", lambda index: f"maps {index}")
    with pytest.raises(InputError, match=r"has no tensor 'maps 2', of which --output attention is made: leave it out"):
        write_outputs(planned, model, graph, other)
    assert not other.exists()


def test_one_wrong_value_of_a_part_is_found(folder_of: Any, tmp_path: Path) -> None:
    model = network("deit")
    planned = plan_outputs(ImageClassifier(model, PREPROCESSING).eval(), ("attention",), 32)
    graph = onnx.load(folder_of("deit")[0] / "model.onnx")
    planned.expected[0]["attention"][0, 3] += 0.5
    with pytest.raises(CheckFailed, match="the graph's attention differs from the network's at a batch of 1"):
        write_outputs(planned, model, graph, tmp_path)


def test_a_rollout_needs_the_maps_of_every_block(folder_of: Any, tmp_path: Path) -> None:
    model = network("deit")
    planned = plan_outputs(ImageClassifier(model, PREPROCESSING).eval(), ("attention", "rollout"), 32)
    graph = onnx.load(folder_of("deit")[0] / "model.onnx")
    for node in graph.graph.node:
        for names in (node.input, node.output):
            names[:] = ["fused" if each == "blocks.0.softmax" else each for each in names]
    with pytest.raises(InputError, match=r"no tensor 'blocks\.0\.softmax', of which --output rollout is made"):
        write_outputs(planned, model, graph, tmp_path)
    assert (tmp_path / output_file("attention")).is_file(), "the last block's maps are there"


@pytest.mark.parametrize(
    ("name", "arguments", "output", "message"),
    [
        ("resnet10t", {}, "attention", "ResNet has no attention and no rollout"),
        ("cait_xxs24_224", {"depth": 1, "img_size": 32}, "rollout", "Cait has no attention and no rollout"),
        ("test_vit4", {"global_pool": "max"}, "attention", "pools its tokens by 'max'"),
        ("test_vit4", {"global_pool": "map"}, "rollout", "pools its tokens by 'attention'"),
        ("test_vit4", {"num_classes": 0}, "embedding", "its classifier is Identity, expected a linear layer"),
        ("levit_128s", {}, "embedding", "its classifier is NormLinear and NormLinear, expected"),
    ],
)
def test_what_a_network_does_not_have_is_refused(
    name: str, arguments: dict[str, Any], output: str, message: str
) -> None:
    model = timm.create_model(name, **arguments).eval()
    with pytest.raises(InputError, match=message), recorded_outputs(model, (output,)):
        pass


@pytest.mark.parametrize("output", ["attention", "rollout"])
def test_attention_of_heads_beside_images_is_refused(
    vitx: Vitx, tmp_path: Path, in_this_process: None, output: str
) -> None:
    """SAM's maps are (B·H, N, N): none of their axes is that of the heads."""
    sizes = [f"{name}={value}" for name, value in {**SIZE, "num_classes": 10, "window_size": 2}.items()]
    arguments = [part for each in sizes for part in ("--model-arg", each)]
    source = ("export", "model:timm/samvit_base_patch16_224", "--weights", "random", *arguments, "--device", "cpu")
    code, _, errors = vitx(*source, "--uncertified", "--output", output, "--out", tmp_path / "sam.vitx")
    assert (code, list(tmp_path.iterdir())) == (2, []), errors
    expected = (
        f"not every block has one attention over all 16 tokens, which {output} is made of; leave --output {output} "
    )
    assert expected in " ".join(errors.split())


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet", "test_resnet", "test_vit3"])
def test_an_embedding_is_what_timm_has_before_the_logits(name: str) -> None:
    model: Any = timm.create_model(name).eval()
    pixels = torch.rand(2, 3, 160, 160)
    with recorded_outputs(model, ("embedding",)) as recorded, torch.no_grad():
        model(pixels)
        expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
        torch.testing.assert_close(recorded()["embedding"], expected, rtol=1e-5, atol=1e-6)


def test_from_a_checkpoint_to_a_column(in_this_process: None, tmp_path: Path, vitx: Vitx) -> None:
    source = "model:deepvit_digits?depth=2&attention=re-attention"
    asked = [argument for name in OUTPUTS for argument in ("--output", name)]
    out, data = tmp_path / "net.vitx", ("--weights", "random", "--data", "digits", "--witness", "40")
    code, said, err = vitx("export", source, *data, *asked, "--out", out, "--device", "cpu", "--json", "--quiet")
    assert code == 0, err
    assert json.loads(said)["outputs"] == "embedding, attention, rollout"
    bundle = Bundle.open(out)
    assert [spec.meaning for spec in bundle.manifest.outputs] == [
        "what the classifier reads",
        "softmax maps of the last block, mean over heads; from the class token to each patch",
        "product of ½(A + I) over all blocks, A the softmax maps' mean; from the class token to each patch",
    ]
    verdict = next(each for each in bundle.require_certificate().executables if each.outputs)
    assert {name: one.verdict for name, one in verdict.outputs.items()} == dict.fromkeys(OUTPUTS, "pass")
    pixels = next(open_images("digits", "val").batches(bundle.manifest.preprocessing, 4))
    folder = tmp_path / "images"
    folder.mkdir()
    for index, image in enumerate(pixels):
        (folder / f"{index}.png").write_bytes(png(image))
    columns = ("--embeddings", "--attention", "--device", "cpu", "--quiet")
    code, _, err = vitx("predict", out, folder, "--out", tmp_path / "out", *columns)
    assert code == 0, err
    table = pq.read_table(tmp_path / "out" / PREDICTIONS)
    with load_session(bundle, device="cpu", threads=1, outputs=("embedding", "attention")) as session:
        expected = session.infer_outputs(pixels)
    assert table.schema.field("attention").type == pa.list_(pa.float32())
    np.testing.assert_allclose(table["attention"].to_pylist(), expected["attention"], rtol=1e-5)
    np.testing.assert_allclose(table["embeddings"].to_pylist(), expected["embedding"], rtol=2e-3, atol=1e-3)
    # The first block's maps alone are a rollout too: only the checkpoint's says which is right.
    (out / output_file("rollout")).write_bytes(rollout_part(["blocks.0.softmax", "blocks.0.softmax"], 0, 1, 1, 64))
    seal_certificate(seal_manifest(out))
    with (
        load_session(Bundle.open(out), device="cpu", threads=1, outputs=("rollout",)) as session,
        pytest.raises(CheckFailed, match=r"rollout: 40 of 40 witness images too far from the checkpoint's"),
    ):
        require_verdict(Bundle.open(out), session, quiet=True)
