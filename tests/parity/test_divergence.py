"""Which layer diverges first, that tokens do not collapse, and what repairs a lower precision."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from reference import randomize_like_trained
from run_fixture import DIGITS_PREPROCESSING as PREPROCESSING
from run_fixture import trained_deepvit
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import open_images
from vitx.export import ALL, lower_precision, onnx_from_model, rewrite_for_export
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Bounds
from vitx.export.precision.calibration import sample_images
from vitx.export.precision.half import HALVES, HalfGraph
from vitx.models import image_tensor
from vitx.models.layer_metrics import layer_metrics
from vitx.parity.divergence import _Network, compare_token_similarity, node_errors, overflow_text, repair, trace_layers

LABELS = tuple("0123456789")


@pytest.fixture(scope="module")
def network() -> Any:
    return trained_deepvit()


@pytest.fixture(scope="module")
def graph(network: Any, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    return exported(network, tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def plain_graph(network: Any, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Without rewrites: the graph's biases are the network's."""
    return exported(network, tmp_path_factory.mktemp("plain"), ())


@pytest.fixture(scope="module")
def images() -> UInt8Array:
    """48 evenly spaced digits of the evaluation split."""
    return next(open_images("digits", "val").evenly_spaced(48).batches(PREPROCESSING, 48))


def exported(model: Any, folder: Path, rewrites: tuple[str, ...] = ALL) -> onnx.ModelProto:
    rewritten = rewrite_for_export(model, PREPROCESSING, rewrites=rewrites)
    return onnx_from_model(rewritten, PREPROCESSING, LABELS, folder / "model.onnx", check=False)


def errors(trace: Any) -> dict[str, float]:
    return {layer.name: layer.error for layer in trace.layers}


def test_an_honest_graph_differs_nowhere(network: Any, graph: onnx.ModelProto, images: UInt8Array) -> None:
    trace = trace_layers(network, PREPROCESSING, graph, images)
    assert [layer.name for layer in trace.layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "logits"]
    assert max(errors(trace).values()) < 1e-4
    assert trace.cause is None
    # The embedding has no layer before it, and the output of a block for the class token alone has no patches.
    assert [layer.own is None for layer in trace.layers] == [True, False, False, False, False]
    assert [layer.similarity_candidate is None for layer in trace.layers] == [False, False, False, True, True]


def test_other_rewrites_line_up(network: Any, plain_graph: onnx.ModelProto, images: UInt8Array) -> None:
    plain = trace_layers(network, PREPROCESSING, plain_graph, images)
    assert max(errors(plain).values()) < 1e-4
    assert sum(layer.similarity_candidate is None for layer in plain.layers) == 1  # the logits alone


@pytest.mark.parametrize("rewrites", [ALL, ()])
def test_values_that_neutrenos_blocks_share_are_no_blocks_output(
    images: UInt8Array, tmp_path: Path, rewrites: tuple[str, ...]
) -> None:
    size: dict[str, Any] = {"img_size": PREPROCESSING.image_size, "depth": 3, "embed_dim": 32, "num_heads": 4}
    model: Any = timm.create_model("deit_digits", **size, patch_size=8, attention="neutreno").eval()
    randomize_like_trained(model)
    trace = trace_layers(model, PREPROCESSING, exported(model, tmp_path, rewrites), images[:8])
    assert max(errors(trace).values()) < 1e-4
    assert max(layer.own or 0 for layer in trace.layers) < 1e-4


def test_cos_sim_is_that_of_layer_metrics(network: Any, graph: onnx.ModelProto, images: UInt8Array) -> None:
    found = compare_token_similarity(network, PREPROCESSING, graph, images)
    with layer_metrics(network) as metrics, torch.inference_mode():
        network(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std))
    expected = metrics.cos_sim.means()
    by_layer = dict(zip(found.layers, found.reference, strict=True))
    assert {name: by_layer[name] for name in ("blocks.0", "blocks.1")} == pytest.approx(
        {name: expected[name] for name in ("blocks.0", "blocks.1")}, abs=1e-6
    )
    assert found.candidate == pytest.approx(found.reference, abs=1e-5)


def test_cos_sim_of_cait_counts_every_patch(images: UInt8Array, tmp_path: Path) -> None:
    """Its class token comes behind the blocks, so that what goes through them are patches alone."""
    size: dict[str, Any] = {"img_size": PREPROCESSING.image_size, "patch_size": 8, "num_classes": 10}
    torch.manual_seed(0)
    cait: Any = timm.create_model("cait_xxs24_224", **size, embed_dim=24, depth=2, num_heads=2).eval()
    with layer_metrics(cait) as metrics, torch.inference_mode():
        cait(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std))
    found = compare_token_similarity(cait, PREPROCESSING, exported(cait, tmp_path), images)
    by_layer = dict(zip(found.layers, found.reference, strict=True))
    expected = metrics.cos_sim.means()
    assert {name: by_layer[name] for name in expected} == pytest.approx(expected, abs=1e-6)


OF_DIGITS: dict[str, Any] = {"img_size": PREPROCESSING.image_size, "num_classes": 10}
SMALL = OF_DIGITS | {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cait_xxs24_224", SMALL),
        ("xcit_nano_12_p16_224", SMALL),
        ("eva02_tiny_patch14_224", SMALL),
        ("vit_srelpos_small_patch16_224", SMALL),
        ("test_efficientnet", {"num_classes": 10}),
    ],
)
def test_a_layer_alone_is_what_it_is_within_its_network(
    name: str, arguments: dict[str, Any], images: UInt8Array, tmp_path: Path
) -> None:
    """With the positions or the size that a block reads beside its tokens, and class attention behind the blocks."""
    torch.manual_seed(0)
    model: Any = randomize_like_trained(timm.create_model(name, **arguments)).eval()
    trace = trace_layers(model, PREPROCESSING, exported(model, tmp_path), images)
    assert max(errors(trace).values()) < 1e-4
    assert max(layer.own or 0 for layer in trace.layers) < 1e-4, trace.layers
    assert all(layer.own is not None for layer in trace.layers[1:])


def test_blocks_of_several_tensors_are_no_layers(images: UInt8Array) -> None:
    model: Any = timm.create_model("tnt_s_legacy_patch16_224", **OF_DIGITS)
    with pytest.raises(InputError, match="do not each give one tensor: layers cannot be compared"):
        _Network(model, PREPROCESSING).tensors(images[:2])


def test_a_transposed_weight_is_named(network: Any, images: UInt8Array, tmp_path: Path) -> None:
    """In a graph with every rewrite, which folds the weight into another."""
    faulty = copy.deepcopy(network)
    weight = faulty.blocks[1].attn.reatten_matrix.weight
    weight.data = weight.data.transpose(0, 1).contiguous()
    trace = trace_layers(network, PREPROCESSING, exported(faulty, tmp_path), images)
    assert (trace.culprit, trace.cause) == ("blocks.1", "transposed: attn.reatten_matrix.weight"), str(trace)
    assert str(trace.cause) in str(trace)


def with_another_bias(graph: onnx.ModelProto, bias: Tensor, other: Tensor) -> onnx.ModelProto:
    """A copy of the graph with `other` in place of `bias`."""
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    values = bias.detach().numpy()
    (found,) = (part for part in model.graph.initializer if np.array_equal(numpy_helper.to_array(part), values))
    found.CopyFrom(numpy_helper.from_array(other.detach().numpy(), found.name))
    return model


@pytest.mark.parametrize(
    ("name", "culprit", "cause"),
    [
        ("blocks.0.mlp.fc1.bias", "blocks.0", "bias dropped: mlp.fc1.bias"),
        ("blocks.2.attn.proj.bias", "blocks.2", "bias dropped: attn.proj.bias"),
    ],
)
def test_a_dropped_bias_is_named(
    network: Any, plain_graph: onnx.ModelProto, images: UInt8Array, name: str, culprit: str, cause: str
) -> None:
    bias = network.get_parameter(name)
    faulty = with_another_bias(plain_graph, bias, torch.zeros_like(bias))
    trace = trace_layers(network, PREPROCESSING, faulty, images)
    assert (trace.culprit, trace.cause) == (culprit, cause), str(trace)
    assert cause in str(trace)


def test_a_faulty_head_is_named(network: Any, plain_graph: onnx.ModelProto, images: UInt8Array) -> None:
    bias = network.head.bias
    faulty = with_another_bias(plain_graph, bias, bias + 1)
    assert trace_layers(network, PREPROCESSING, faulty, images).culprit == "logits"


def collapsed(graph: onnx.ModelProto, after: str, share: float) -> onnx.ModelProto:
    """The graph whose tokens after a block are drawn towards their mean; what other nodes read is the collapsed."""
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if after in node.output)
    nodes[place].output[list(nodes[place].output).index(after)] = "apart"
    extra = [
        helper.make_node("ReduceMean", ["apart", "token axis"], ["mean"], keepdims=1),
        helper.make_node("Sub", ["mean", "apart"], ["towards"]),
        helper.make_node("Mul", ["towards", "share"], ["step"]),
        helper.make_node("Add", ["apart", "step"], [after]),
    ]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[: place + 1], *extra, *nodes[place + 1 :]])
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([1], np.int64), "token axis"),
            # Patches are drawn, the class token is not.
            numpy_helper.from_array(np.array([0.0] + [share] * 64, np.float32)[None, :, None], "share"),
        ]
    )
    return model


def test_collapsed_tokens_are_caught_though_top1_stays(
    network: Any, graph: onnx.ModelProto, images: UInt8Array
) -> None:
    tampered = collapsed(graph, "blocks.1", 0.2)
    assert (logits_of(graph, images).argmax(axis=1) == logits_of(tampered, images).argmax(axis=1)).all()
    found = compare_token_similarity(network, PREPROCESSING, tampered, images, precision="int8")
    layer, before, after = found.worst()
    assert layer == "blocks.1"
    assert after - before > found.allowed == 0.05


def test_an_old_graph_says_what_to_do(network: Any, graph: onnx.ModelProto, images: UInt8Array) -> None:
    old = onnx.ModelProto()
    old.CopyFrom(graph)
    for node in old.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = name.replace("blocks.", "b")
    with pytest.raises(InputError, match=r"the graph has no tensor 'blocks\.0'.* export the run again"):
        trace_layers(network, PREPROCESSING, old, images)


def test_a_network_without_blocks_is_refused(graph: onnx.ModelProto, images: UInt8Array) -> None:
    with pytest.raises(InputError, match="ResNet has no list of blocks"):
        trace_layers(timm.create_model("resnet10t"), Preprocessing(image_size=32), graph, images)


def overflowing(network: Any) -> Any:
    """A network whose fc1 of block 1 passes 65,504, with weights that float16 holds."""
    model = copy.deepcopy(network)
    fc1, fc2 = model.blocks[1].mlp.fc1, model.blocks[1].mlp.fc2
    fc1.bias.data[0] = 6e4  # GELU is the identity there
    fc1.weight.data[0] *= 1e4 / fc1.weight.data[0].abs().max()
    fc2.weight.data[:, 0] = 1e-6
    return model


def test_fp16_overflow_is_named_and_repaired(network: Any, images: UInt8Array, tmp_path: Path) -> None:
    model = overflowing(network)
    exact = exported(model, tmp_path)
    half = HalfGraph(Dataflow(exact), HALVES["fp16"]).build(())
    trace = trace_layers(model, PREPROCESSING, half, images, precision="fp16")
    assert trace.culprit == "blocks.1"
    worst = node_errors(exact, half, images[:8], "fp16")[0]
    text = overflow_text(exact, worst.tensor, images[:8], "fp16")
    assert text is not None
    assert "fp16 overflow" in text
    assert "fp16 ends at 65504" in text
    training = sample_images(open_images("digits", "train"), PREPROCESSING, 320)
    found = repair(exact, half, "fp16", training, images, quiet=True)
    assert 1 <= len(found.islands) <= 4
    assert found.before.not_finite == len(images)
    assert found.after.within(Bounds(0.02))


def test_half_and_int8_keep_the_names(network: Any, graph: onnx.ModelProto, images: UInt8Array) -> None:
    training = sample_images(open_images("digits", "train"), PREPROCESSING, 400)
    for precision, largest in (("fp16", 0.01), ("int8", 0.5)):
        lowered: Any = lower_precision(graph, precision, training, quiet=True)  # type: ignore[arg-type]
        trace = trace_layers(network, PREPROCESSING, lowered.graph, images, precision=precision)  # type: ignore[arg-type]
        assert 1e-6 < errors(trace)["blocks.0"] < largest
        assert node_errors(graph, lowered.graph, images[:8], precision)[0].growth > 0  # type: ignore[arg-type]
        similarity = compare_token_similarity(
            network,
            PREPROCESSING,
            lowered.graph,
            images,
            precision=precision,  # type: ignore[arg-type]
        )
        _, before, after = similarity.worst()
        assert abs(after - before) < similarity.allowed
