"""The layers of built plans: no FLOAT layer beside 8 bits but islands, attention fused where it can be."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm

from reference import randomize_like_trained
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.tensorrt_plan import layers_path, read_sidecar
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.build_log import BuildLog
from vitx.export.engines.fused_layers import FusedLayer, Tensor, count_types, float_layers, fused_layers, layers_as_text
from vitx.export.engines.profiles import profiles_for
from vitx.export.engines.tensorrt_engine import EngineReport, engine_from_onnx
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.calibration import observe
from vitx.export.precision.half import HALVES, HalfGraph
from vitx.export.precision.qdq import QuantizedGraph

# Two blocks each: the first of all tokens, the last of the class token alone. Widths that the kinds have when large.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("deit_small_12", {"embed_dim": 128, "num_heads": 2, "img_size": 112}),
    "deepvit": ("deepvit_s", {"embed_dim": 132, "num_heads": 4, "img_size": 64, "attention": ["re-attention"] * 2}),
    "talking heads": (
        "deit_small_12",
        {"embed_dim": 128, "num_heads": 2, "img_size": 64, "attention": "talking-heads"},
    ),
    "digits": ("deepvit_digits", {"img_size": 32, "attention": ["plain", "re-attention"]}),
}
# With a bias of the positions before the Softmax, and with 16 tokens.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", {"embed_dim": 64, "num_heads": 2, "img_size": 64, "patch_size": 8}),
    "few tokens": ("deit_small_12", {"embed_dim": 64, "num_heads": 2, "img_size": 64, "global_pool": "avg"}),
}
PLANS = [
    (kind, base, architecture)
    for kind, base, architectures in (
        ("int8", "fp16", ("sm86", "sm89", "sm120")),
        ("int8", "bf16", ("sm89",)),
        ("fp8", "fp16", ("sm89", "sm120")),
    )
    for architecture in architectures
]
GRAPHS: dict[str, onnx.ModelProto] = {}


def exact(network: str, folder: Path) -> onnx.ModelProto:
    if network not in GRAPHS:
        name, options = (NETWORKS | OTHERS)[network]
        preprocessing = Preprocessing(image_size=options["img_size"])
        model = randomize_like_trained(timm.create_model(name, depth=2, num_classes=20, **options)).eval()
        rewritten = rewrite_for_export(model, preprocessing)
        # bfloat16 convolutions need opset 22.
        GRAPHS[network] = onnx_from_model(rewritten, preprocessing, (), folder / "exact.onnx", opset=22)
    return GRAPHS[network]


def built(graph: onnx.ModelProto, architecture: str, folder: Path) -> EngineReport:
    path, plan = folder / "model.onnx", folder / "model.plan"
    onnx.save(graph, path)
    profiles = profiles_for((8,))
    return engine_from_onnx(
        path, plan, flavor="tensorrt-rtx", architectures=(architecture,), profiles=profiles, quiet=True
    )


def eight_bit(graph: onnx.ModelProto, kind: Any, base: Any, islands: tuple[str, ...] = ()) -> onnx.ModelProto:
    quantized = QuantizedGraph(Dataflow(graph), kind, "tensorrt", base, islands)
    size = graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    images = np.random.default_rng(0).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
    tensors = sorted({name for layer in quantized.layers.values() for name in layer.tensors()})
    return quantized.build(list(quantized.layers), observe(graph, tensors, images), "max")


def fused_attention(report: EngineReport) -> list[str]:
    return [layer.outputs[0].type for layer in report.fused if "_gemm_mha" in layer.name]


# All plans of one network with fused attention and of one without; of the others the newest kinds.
@pytest.mark.parametrize(
    ("network", "kind", "base", "architecture"),
    [(name, *plan) for name in NETWORKS for plan in (PLANS if name in ("deit", "deepvit") else PLANS[2::3])],
)
def test_no_float_layer_is_beside_eight_bits(
    network: str, kind: str, base: str, architecture: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    graph = eight_bit(exact(network, tmp_path), kind, base)
    report = built(graph, architecture, tmp_path)
    assert float_layers(report.fused) == ()
    counts = report.info.fused_layers
    assert counts == count_types(report.fused)
    assert counts[kind] > 4
    assert counts[base] > 8
    # Heads of 64 and 16 channels without a mix; in the last block, which has one query, products stay in the base.
    fused = fused_attention(report)
    assert (fused[:1] == [kind]) == (network in ("deit", "digits")), fused
    written = layers_path(report.path).read_text().splitlines()
    assert len(written) == len(report.fused) + 1
    assert read_sidecar(report.path).fused_layers == counts


@pytest.mark.parametrize(
    ("network", "kind", "base"), [("beit", "int8", "fp16"), ("beit", "int8", "bf16"), ("few tokens", "fp8", "fp16")]
)
def test_attention_stays_in_the_base_where_it_would_not_be_fused(
    network: str, kind: str, base: str, tmp_path: Path
) -> None:
    """int8 with a bias beside bfloat16, and fp8 of less than 32 tokens: in the base both are fused."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    report = built(eight_bit(exact(network, tmp_path), kind, base), "sm89", tmp_path)
    assert len(fused_attention(report)) == 2, report.info.fused_layers
    assert float_layers(report.fused) == ()


def test_float32_beside_eight_bits_and_an_island_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    graph = exact("deit", tmp_path)
    everywhere = built(eight_bit(graph, "int8", "fp32"), "sm89", tmp_path)
    assert len(float_layers(everywhere.fused)) > len(everywhere.fused) // 3
    before_gelu = next(node.input[0] for node in graph.graph.node if node.op_type == "Gelu")
    island = next(node.name for node in graph.graph.node if before_gelu in node.output)
    one = built(eight_bit(graph, "int8", "fp16", (island,)), "sm89", tmp_path)
    maker, found = float_layers(one.fused)
    assert island in found.nodes
    assert any(name.endswith("/as float") for name in maker.nodes), "it casts what the island reads"
    assert float_layers(one.fused, (island,)) == ()


@pytest.mark.parametrize("architecture", ["sm86", "sm89", "sm120"])
def test_attention_of_half_plans_is_fused(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    found = {}
    for network in NETWORKS:
        graph = HalfGraph(Dataflow(exact(network, tmp_path)), HALVES["fp16"]).build(())
        report = built(graph, architecture, tmp_path)
        assert float_layers(report.fused) == ()
        found[network] = fused_attention(report)[:1]
    # A mix over heads stands between Softmax and values: no kernel of TensorRT has it.
    assert found == {"deit": ["fp16"], "deepvit": [], "talking heads": [], "digits": ["fp16"]}


def tensor(name: str, dims: str, kind: str) -> str:
    return (
        f"{{ Name: {name}, Dimensions: [{dims}], Strides: [{dims}], StrideOrder: [1,0], Datatype: {kind}, "
        "Format: (Linear) Row major linear format }"
    )


def row(name: str, kind: str, inputs: str = "", constants: str = "", outputs: str = "", nodes: str = "") -> str:
    operands = f"Inputs: [{inputs}], Constants: [{constants}], Outputs: [{outputs}]"
    return f"Name: {name}, LayerType: {kind}, {operands}, TacticName: t, StreamId: 0, Metadata: {nodes}\n"


FIRST_WRITES = f" {tensor('a', '2,12', 'Half')}, {tensor('b', '2,1', 'Float')}"
TABLE = (
    "Layers:\n"
    + row("__mye5_0_myl0_0", "shape_call")
    + row(
        *("__myl_CastMul_myl0_1", "kgen", f" {tensor('images', '2,3,4', 'UInt8')}", f" {tensor('c', '4', 'Half')}"),
        *(FIRST_WRITES, "[ONNX Layer: cast][ONNX Layer: scale][ONNX Layer: cast]"),
    )
    + row("__mye7_myl0_2", "wait")
    + row(
        *("head [profile 1]_myl1_3", "gemm", f" {tensor('a', '-1,12', 'FP8')}", ""),
        *(f" {tensor('logits [profile 1]', '-1,5', 'Float')}", "[ONNX Layer: head]"),
    )
    + "\nI/O Tensors:\n Name: images, IOMode: Input\n"
)


def test_the_table_of_a_build() -> None:
    first, head = fused_layers(TABLE)
    images, constant = Tensor("images", "uint8", (2, 3, 4)), Tensor("c", "fp16", (4,))
    outputs = (Tensor("a", "fp16", (2, 12)), Tensor("b", "fp32", (2, 1)))
    assert first == FusedLayer(0, "__myl_CastMul_myl0_1", "kgen", (images,), (constant,), outputs, ("cast", "scale"))
    assert first.bytes() == 24 + 8 + 48 + 8
    assert (head.profile, head.kind, head.nodes, head.bytes()) == (1, "gemm", ("head",), None)
    assert (head.inputs[0].type, head.outputs[0].name) == ("fp8", "logits [profile 1]")
    assert count_types((first, head)) == {"fp16": 1, "fp32": 1}
    assert float_layers((first, head)) == (), "half a LayerNorm, and the plan's output"
    assert float_layers((first, head), outputs=()) == (head,)
    assert float_layers((first, head), ("head",), ()) == ()
    assert layers_as_text((first, head)).splitlines() == [
        "profile\tkind\treads\tconstants\twrites\tbytes\tnodes\tlayer",
        "0\tkgen\tuint8[2x3x4]\tfp16[4]\tfp16[2x12] fp32[2x1]\t88\tcast + scale\t__myl_CastMul_myl0_1",
        "1\tgemm\tfp8[Nx12]\t\tfp32[Nx5]\t\thead\thead [profile 1]_myl1_3",
    ]
    assert fused_layers("Name: a, LayerType: kgen") == ()


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("Float", 4), ("Half", 2), ("BFloat16", 2), ("Int8", 1), ("FP8", 1), ("UInt8", 1)),
        *(("Int64", 8), ("Int32", 4), ("Bool", 1), ("FP4", None)),
    ],
)
def test_bytes_are_those_of_the_type(kind: str, size: int | None) -> None:
    """A type of another release has none: a sum without it would be a wrong number."""
    operands = f" {tensor('x', '3,5', kind)}, {tensor('none', '0,5', kind)}"
    (layer,) = fused_layers("Layers:\n" + row("a", "kgen", operands))
    assert layer.inputs[0].bytes() == layer.bytes() == (None if size is None else 15 * size)
    assert str(layer.inputs[1]).endswith("[0x5]")
    assert layer.profile == 0


@pytest.mark.parametrize("kind", ["wait", "signal", "shape_call", "reshape", "cast"])
def test_what_runs_no_kernel_is_no_layer(kind: str) -> None:
    assert fused_layers("Layers:\n" + row("a", kind)) == ()


def test_float32_beside_an_output_of_the_plan_is_counted() -> None:
    logits, other = Tensor("logits [profile 0]", "fp32", (-1, 5)), Tensor("x", "fp32", (-1, 5))
    layer = FusedLayer(0, "a", "gemm", (), (), (logits, other), ())
    assert float_layers((layer,)) == (layer,)
    assert float_layers((layer._replace(outputs=(logits,)),)) == ()


def test_the_log_keeps_the_table_and_no_other_chatter() -> None:
    log = BuildLog()
    log.add("VERBOSE", "Parsing node")
    log.add("VERBOSE", TABLE)
    log.add("INFO", "done")
    log.add("WARNING", "slow")
    assert [layer.nodes for layer in log.layers()] == [("cast", "scale"), ("head",)]
    assert log.warnings() == ("slow",)
    assert BuildLog().layers() == ()


def test_fp8_is_refused_for_gpus_without_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    graph = eight_bit(exact("digits", tmp_path), "fp8", "fp16")
    with pytest.raises(InputError, match=r"^fp8 needs compute capability 8\.9 or newer, and sm86 has none: "):
        built(graph, "sm86", tmp_path)
    assert not (tmp_path / "model.plan").exists()
    path = tmp_path / "model.onnx"
    report = engine_from_onnx(
        path, tmp_path / "all.plan", flavor="tensorrt-rtx", profiles=profiles_for((1,)), quiet=True
    )
    assert report.info.architectures[0] == "sm89", "by default those that have it"
