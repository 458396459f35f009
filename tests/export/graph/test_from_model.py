"""The ONNX graph: equal to the network at batches that were never traced, and without what was to be folded."""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import timm
import torch
from onnx import helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing
from vitx.data.open import open_images
from vitx.export import ALL, ImageClassifier, onnx_from_model, rewrite_for_export
from vitx.export.graph.dataflow import opset_of
from vitx.export.graph.from_model import clean, graph_of, require_equal
from vitx.export.rewrite.rewrites import rewrite_checked
from vitx.models import image_tensor
from vitx.models.window_attention import MASKED

PREPROCESSING = Preprocessing(image_size=32)
LABELS = tuple(f"klasse {i} é" for i in range(10))
TOKENS = 65


@pytest.fixture(scope="module", params=["plain", ("plain", "re-attention", "re-attention")], ids=["deit", "deepvit"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = randomize(timm.create_model("deepvit_digits", depth=3, attention=request.param)).eval()
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx_from_model(rewrite_for_export(model, PREPROCESSING), PREPROCESSING, LABELS, path)
    return model, path


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 32])
def test_equal_at_every_batch_size(exported: tuple[torch.nn.Module, Path], batch: int) -> None:
    model, path = exported
    images = np.random.default_rng(batch).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images})
    with torch.inference_mode():
        expected = model(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std)).numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-5, rtol=0)


def test_graph_contents(exported: tuple[torch.nn.Module, Path]) -> None:
    _, path = exported
    graph = onnx.load(str(path))
    operators = Counter(node.op_type for node in graph.graph.node)
    assert "BatchNormalization" not in operators
    assert operators["LayerNormalization"] == 7
    assert operators["Softmax"] == 3
    assert operators["Gelu"] == 3
    assert operators["Cast"] == 1
    assert operators["Transpose"] == 2 + 4 * 2 + 5  # input, patches; four a block, and the class-token tail's
    assert not operators["Slice"] + operators["Identity"] + operators["Constant"]
    assert opset_of(graph) >= 20
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert tuple(json.loads(metadata["vitx.labels"])) == LABELS
    assert Preprocessing.model_validate_json(metadata["vitx.preprocessing"]) == PREPROCESSING
    assert not any(node.doc_string or node.metadata_props for node in graph.graph.node), "paths of this machine"
    contents = [(tuple(t.dims), t.data_type, t.raw_data) for t in graph.graph.initializer if math.prod(t.dims) < 2**16]
    assert len(contents) == len(set(contents)), "an equal constant is stored twice"


def test_onnxruntime_keeps_the_fused_operators(exported: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    _, path = exported
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # or it warns that the optimised file fits this machine only
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    operators = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    assert operators["LayerNormalization"] + operators["SkipLayerNormalization"] == 7
    assert operators["Gelu"] + operators["BiasGelu"] == 3
    assert operators["BatchNormalization"] == operators["Identity"] == 0


def traced(model: torch.nn.Module, rewrites: tuple[str, ...] = ALL, **options: Any) -> Any:
    return graph_of(rewrite_for_export(model, PREPROCESSING, rewrites=rewrites), PREPROCESSING, **options).graph


def shape_of(value: Any) -> tuple[Any, ...]:
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())


def maps_with_a_bias(graph: Any) -> list[str]:
    """Additions that read or write an attention map of all tokens to all tokens."""
    maps = {(TOKENS, TOKENS), (4, TOKENS**2)}
    return [
        node.name
        for node in graph
        if node.op_type == "Add" and any(shape_of(value)[-2:] in maps for value in (*node.inputs, *node.outputs))
    ]


@pytest.fixture(scope="module")
def re_attention() -> torch.nn.Module:
    return randomize(timm.create_model("deepvit_digits", attention="re-attention", depth=3)).eval()


def test_the_fold_is_visible(re_attention: torch.nn.Module) -> None:
    """No BatchNorm, no bias on a map, one token through the last block's MLP."""
    graph = traced(re_attention)
    assert not any(node.op_type == "BatchNormalization" for node in graph)
    assert maps_with_a_bias(graph) == []
    activations = [shape_of(node.outputs[0]) for node in graph if node.op_type == "Gelu"]
    assert activations == [(f"{TOKENS}*N", 192), (f"{TOKENS}*N", 192), ("N", 192)]


def test_the_assertions_can_fail(re_attention: torch.nn.Module) -> None:
    left_out = ("split-rank-one-bias", "compute-class-token-only")
    graph = traced(re_attention, tuple(name for name in ALL if name not in left_out))
    assert len(maps_with_a_bias(graph)) == 3
    assert [shape_of(node.outputs[0])[0] for node in graph if node.op_type == "Gelu"] == [f"{TOKENS}*N"] * 3


def test_attention_form_follows_the_opset() -> None:
    """From opset 23 on each plain block before the class-token tail is one Attention node that needs no transpose."""
    kinds = ["plain", "re-attention", "plain"]
    model = randomize(timm.create_model("deepvit_digits", depth=3, attention=kinds)).eval()
    operators = Counter(node.op_type for node in traced(model, opset=23))
    assert (operators["Attention"], operators["Softmax"]) == (1, 2)
    operators = Counter(node.op_type for node in traced(model))
    assert (operators["Attention"], operators["Softmax"]) == (0, 3)


def test_pairs_of_convolution_and_batch_norm_are_folded() -> None:
    """PyTorch's exporter folds them; AlterNet keeps the norms before an activation, DeepViT's stem none."""
    preprocessing = Preprocessing(image_size=32)
    alternet = timm.create_model("alternet_18_cifar", depths=(1, 2, 1, 1), attention_depths=(0, 1, 0, 0)).eval()
    norms = sum(isinstance(module, torch.nn.BatchNorm2d) for module in alternet.modules())
    graph = graph_of(rewrite_for_export(alternet, preprocessing), preprocessing).graph
    assert norms == 11
    assert sum(node.op_type == "BatchNormalization" for node in graph) == 6
    stem = timm.create_model("deit_digits", depth=1, patch_embedding="cnn").eval()
    assert not any(node.op_type == "BatchNormalization" for node in traced(stem))


def test_windows_that_do_not_divide_the_map() -> None:
    """Their mask must be a finite constant and must not fix the batch, or AlterNet could not be lowered."""
    preprocessing = Preprocessing(image_size=32)
    model = timm.create_model("alternet_18_cifar", depths=(1, 2, 1, 1), attention_depths=(0, 1, 0, 0), window_size=5)
    graph = graph_of(rewrite_for_export(model.eval(), preprocessing), preprocessing)
    assert isinstance(graph.graph.outputs[0].shape[0], onnx_ir.SymbolicDim)
    constants = [value.const_value.numpy() for value in graph.graph.initializers.values()]
    assert all(np.isfinite(value).all() for value in constants if value.dtype == np.float32)
    assert any((value == MASKED).any() for value in constants if value.dtype == np.float32)


def write_jpegs(root: Path) -> None:
    """ROOT/train and ROOT/val, a class for each photograph: crops in colour and grey, some rotated by EXIF."""
    generator = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for split in ("train", "val"):
        for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(6):
                top, left = (int(generator.integers(0, side - 120)) for side in photo.shape[:2])
                image = Image.fromarray(photo[top : top + 120, left : left + 100 + 4 * index])
                options: dict[str, Any] = {"exif": exif} if index % 3 == 2 else {}
                (image.convert("L") if index == 1 else image).save(folder / f"{index}.jpg", quality=85, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit_digits", {}),
        ("deepvit_s", {"attention": "plain", "img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3}),
    ],
    ids=["unpadded", "padded"],
)
def test_the_uint8_graph_equals_the_float_graph_on_jpegs(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Files decoded by the shared preprocessing; one graph normalises inside, the other gets normalised images."""
    write_jpegs(tmp_path)
    preprocessing = Preprocessing(
        image_size=32, crop_fraction=0.9, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    model = randomize(timm.create_model(name, depth=1, **options)).eval()
    graph = onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, (), tmp_path / "uint8.onnx")
    operators = {node.op_type for node in graph.graph.node}
    assert operators & {"Sub", "Div"} == ({"Sub"} if name == "deepvit_s" else set()), "normalisation is not folded"
    normalised = torch.zeros(2, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its own internals
        torch.onnx.export(
            rewrite_for_export(model, images="float"),
            (normalised,),
            str(tmp_path / "float.onnx"),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N")},),
            opset_version=20,
            verbose=False,
        )
    sessions = [
        onnxruntime.InferenceSession(str(tmp_path / f"{kind}.onnx"), providers=["CPUExecutionProvider"])
        for kind in ("uint8", "float")
    ]
    images = np.concatenate(list(open_images(str(tmp_path), "val").batches(preprocessing, 5)))
    assert images.shape == (12, 32, 32, 3)
    planes = ((images / 255 - preprocessing.mean) / preprocessing.std).astype(np.float32).transpose(0, 3, 1, 2)
    (found,), (expected,) = (
        session.run(None, {session.get_inputs()[0].name: value})
        for session, value in zip(sessions, (images, planes), strict=True)
    )
    assert np.ptp(expected, axis=0).max() > 0.1, "the images make no difference"
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


class Frozen(ImageClassifier):
    """Takes the batch as a Python number, by `len(x)`, which fixes it in the graph."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).reshape(len(images), -1)


class WithoutNorm(torch.nn.LayerNorm):
    """A LayerNorm that does not normalise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_frozen_batch_is_named(tmp_path: Path) -> None:
    model = timm.create_model("deit_digits", depth=1).eval()
    with pytest.raises(CheckFailed, match="fixed the batch of 'images' to 2"):
        onnx_from_model(Frozen(model, PREPROCESSING).eval(), PREPROCESSING, (), tmp_path / "model.onnx")


def test_a_missing_operator_is_named(tmp_path: Path) -> None:
    model: Any = timm.create_model("deit_digits", depth=1).eval()
    model.blocks[0].norm2 = WithoutNorm(64)
    with pytest.raises(CheckFailed, match=r"lacks 1 of 5 .*: model\.blocks\.0\.norm2 \(LayerNormalization\)"):
        onnx_from_model(ImageClassifier(model, PREPROCESSING).eval(), PREPROCESSING, (), tmp_path / "model.onnx")


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    model: Any = timm.create_model("deit_digits", depth=1).eval()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the graph of before")
    with pytest.raises(CheckFailed, match="its weights hold NaN or infinity"):
        onnx_from_model(ImageClassifier(model, PREPROCESSING).eval(), PREPROCESSING, (), path)
    assert [path.read_bytes(), *tmp_path.iterdir()] == [b"the graph of before", path]


def test_a_graph_of_another_network_is_refused(exported: tuple[torch.nn.Module, Path]) -> None:
    model, path = exported
    other = Preprocessing(image_size=32, mean=(0.4, 0.5, 0.5))
    with pytest.raises(CheckFailed, match="differs from the network at a batch of 1"):
        require_equal(ImageClassifier(model, other).eval(), path, 32)


def test_a_graph_of_another_shape_is_refused(tmp_path: Path) -> None:
    """One logit an image could be compared with five: each would be compared with the same one."""
    pixels = Preprocessing(image_size=8)
    one = ImageClassifier(Buffers(lambda logits: logits[:, :1]), pixels).eval()
    onnx_from_model(one, pixels, (), tmp_path / "one.onnx")
    five = ImageClassifier(Buffers(lambda logits: logits[:, :1].expand(-1, 5)), pixels).eval()
    with pytest.raises(CheckFailed, match=r"^the graph gives \(1, 1\) for a batch of 1, expected \(1, 5\)$"):
        require_equal(five, tmp_path / "one.onnx", 8)


def test_a_graph_that_differs_in_one_logit_is_refused(tmp_path: Path) -> None:
    pixels = Preprocessing(image_size=8)
    onnx_from_model(ImageClassifier(Buffers(lambda logits: logits), pixels).eval(), pixels, (), tmp_path / "model.onnx")
    other = Buffers(lambda logits: torch.cat((logits[:, :4], 1.01 * logits[:, 4:]), dim=1))
    with pytest.raises(CheckFailed, match=r"differs from the network at a batch of 1: by 0\.\d+ of the largest logit"):
        require_equal(ImageClassifier(other, pixels).eval(), tmp_path / "model.onnx", 8)


def test_a_graph_is_folded_unless_that_is_declined(re_attention: torch.nn.Module) -> None:
    assert len(traced(re_attention)) < len(traced(re_attention, folded=False))


def test_what_depends_on_weights_alone_is_computed_once(tmp_path: Path) -> None:
    """However large: above the exporter's own limit of 512 x 512 it was computed again for each batch."""
    pixels = Preprocessing(image_size=8)
    classifier = ImageClassifier(OuterProduct(), pixels).eval()
    graph = onnx_from_model(classifier, pixels, (), tmp_path / "outer.onnx").graph
    weights = {weight.name for weight in graph.initializer}
    assert [node.op_type for node in graph.node if weights.issuperset(node.input)] == []
    assert [600, 600] in [list(weight.dims) for weight in graph.initializer]


@pytest.mark.parametrize(("elements", "stored"), [(2**16, 1), (2**16 + 1, 2)])
def test_equal_constants_are_stored_once_unless_they_are_large(elements: int, stored: int) -> None:
    """A copy of each constant that is compared is kept in memory."""
    nodes = [helper.make_node("Add", ["x", "first"], ["sum"]), helper.make_node("Mul", ["sum", "second"], ["y"])]
    weights = [numpy_helper.from_array(np.arange(elements, dtype=np.float32), name) for name in ("first", "second")]
    assert len(cleaned(nodes, [elements], weights).initializers) == stored


def test_a_constant_of_no_elements_is_a_constant_too() -> None:
    """The shape of a scalar."""
    shape = numpy_helper.from_array(np.array([], dtype=np.int64))
    nodes = [helper.make_node("Constant", [], ["shape"], value=shape), helper.make_node("Reshape", ["x", "shape"], "y")]
    graph = cleaned(nodes, [1], [])
    assert [node.op_type for node in graph] == ["Reshape"]
    assert [value.const_value.shape for value in graph.initializers.values()] == [(0,)]


def cleaned(nodes: list[Any], shape: list[int], weights: list[Any]) -> Any:
    """The graph of these nodes, from x of this shape to y of any, after `clean` without folds."""
    ends = [helper.make_tensor_value_info(*of) for of in (("x", 1, shape), ("y", 1, None))]
    graph = helper.make_graph(nodes, "cleaned", ends[:1], ends[1:], weights)
    model = onnx_ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    clean(model, folded=False)
    return model.graph


def test_unknown_opset(tmp_path: Path) -> None:
    model = timm.create_model("deit_digits", depth=1).eval()
    with pytest.raises(InputError, match="opset 7: expected 18 to 24"):
        onnx_from_model(ImageClassifier(model, PREPROCESSING), PREPROCESSING, (), tmp_path / "m.onnx", opset=7)


class TwoConvolutions(nn.Module):
    """Two convolutions over one weight; with `twice`, one convolution used in two places."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.pretrained_cfg = {"first_conv": "first"}
        self.first, self.second = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
        self.second.weight = self.first.weight
        self.twice = twice
        self.head = nn.Linear(3, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        after = self.first if self.twice else self.second
        logits: Tensor = self.head(after(self.first(pixels)).mean(dim=(2, 3)))
        return logits


def classifier_of(*, twice: bool) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(TwoConvolutions(twice=twice), Preprocessing(image_size=8)).eval()


def test_a_weight_of_two_convolutions_is_folded_in_one_of_them(tmp_path: Path) -> None:
    classifier = classifier_of(twice=False)
    found = rewrite_checked(classifier, ALL, 8, rebuild=lambda: classifier_of(twice=False))
    assert found["fold-normalization"] == 1
    graph = onnx_from_model(classifier, Preprocessing(image_size=8), tuple("abcde"), tmp_path / "model.onnx")
    assert len({node.input[1] for node in graph.graph.node if node.op_type == "Conv"}) == 2


def test_a_convolution_used_twice_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"the rewrite 'fold-normalization' changes this network, by .* --without"):
        rewrite_checked(classifier_of(twice=True), ALL, 8, rebuild=lambda: classifier_of(twice=True))
    others = [name for name in ALL if name != "fold-normalization"]
    rewrite_checked(classifier_of(twice=True), others, 8, rebuild=lambda: classifier_of(twice=True))


class Buffers(nn.Module):
    """A network without parameters, which returns what `form` makes of its logits."""

    weight: Tensor

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(-1, 1, 15).view(3, 5))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(x.mean(dim=(2, 3)) @ self.weight)


class OuterProduct(nn.Module):
    """Its matrix is made of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (nn.Parameter(torch.linspace(low, 1, 600)) for low in (0.5, 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(1, 2, 3))[:, None].expand(-1, 600) @ (self.rows[:, None] + self.columns)


def test_a_network_may_have_no_parameters(tmp_path: Path) -> None:
    pixels = Preprocessing(image_size=8)
    classifier = ImageClassifier(Buffers(lambda logits: logits), pixels).eval()
    graph = onnx_from_model(classifier, pixels, tuple("abcde"), tmp_path / "one.onnx")
    assert [len(graph.graph.input), len(graph.graph.output)] == [1, 1]


def test_autocast_around_it_changes_nothing(tmp_path: Path) -> None:
    pixels = Preprocessing(image_size=8)
    classifier = ImageClassifier(Buffers(lambda logits: logits), pixels).eval()
    plain = onnx_from_model(classifier, pixels, tuple("abcde"), tmp_path / "plain.onnx")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = onnx_from_model(classifier, pixels, tuple("abcde"), tmp_path / "found.onnx")
    assert found == plain


@pytest.mark.parametrize(
    ("form", "returned", "expected"),
    [
        (lambda logits: (logits, logits + 1), "2 tensors", "one, logits (N, C)"),
        # As a mixture of experts returns its loss beside them.
        (lambda logits: (logits, logits.square().mean()), "2 tensors", "one, logits (N, C)"),
        (lambda logits: logits.mean(), "()", "one vector of logits an image, (N, 5)"),
        (lambda logits: logits[:, 0], "(N)", "one vector of logits an image, (N, 5)"),
        (lambda logits: logits[:, None], "(N, 1, 5)", "one vector of logits an image, (N, 5)"),
        (lambda logits: {"logits": logits}, "a dict", "one tensor, logits (N, C)"),
        (lambda logits: (logits, None), "a tuple", "one tensor, logits (N, C)"),
    ],
)
def test_a_network_returns_one_tensor_of_logits(
    tmp_path: Path, form: Callable[[Tensor], Any], returned: str, expected: str
) -> None:
    pixels = Preprocessing(image_size=8)
    classifier = ImageClassifier(Buffers(form), pixels).eval()
    with pytest.raises(InputError, match=f"^{re.escape(f'the network returns {returned}: expected {expected}')}"):
        onnx_from_model(classifier, pixels, tuple("abcde"), tmp_path / "model.onnx")


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_logits_are_float32(tmp_path: Path, kind: torch.dtype) -> None:
    """What runs a bundle reads no other; of a network in float64 ONNX Runtime said that it lacks a convolution."""
    pixels = Preprocessing(image_size=8)
    classifier = ImageClassifier(Buffers(lambda logits: logits.to(kind)), pixels).eval()
    returned = str(kind).removeprefix("torch.")
    with pytest.raises(InputError, match=rf"^the network returns {returned}: expected float32 logits; give it as"):
        onnx_from_model(classifier, pixels, tuple("abcde"), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_fails_onnx_s_check_is_refused(tmp_path: Path) -> None:
    """As a convolution in bfloat16 does below opset 22."""
    pixels = Preprocessing(image_size=8)
    network = nn.Sequential(nn.Conv2d(3, 5, 8, dtype=torch.bfloat16), nn.Flatten())
    classifier = ImageClassifier(network, pixels).eval()
    returning = nn.Sequential(classifier, AsFloat32()).eval()
    with pytest.raises(
        CheckFailed, match=r"^ONNX's check refuses the graph: .*bfloat16.*; try another opset, or float32$"
    ):
        onnx_from_model(returning, pixels, tuple("abcde"), tmp_path / "model.onnx", opset=20)
    assert not list(tmp_path.iterdir())
    graph = onnx_from_model(returning, pixels, tuple("abcde"), tmp_path / "model.onnx", opset=22, check=False)
    assert opset_of(graph) == 22


class AsFloat32(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.float()


def test_a_network_without_values_or_in_training_mode_is_refused(tmp_path: Path) -> None:
    classifier = ImageClassifier(nn.Sequential(nn.Conv2d(3, 5, 8), nn.Flatten()).to("meta"), PREPROCESSING).eval()
    with pytest.raises(InputError, match=r"^the network's weights have no values, for it is on the meta device: load"):
        onnx_from_model(classifier, PREPROCESSING, tuple("abcde"), tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"^the network is in training mode: call its eval\(\) first$"):
        onnx_from_model(classifier.train(), PREPROCESSING, tuple("abcde"), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_network_that_no_file_holds_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    """As timm's ViT-g. On the meta device it takes no memory here."""
    network = nn.Linear(2**15, 2**15, device="meta")
    with pytest.raises(InputError, match=r"^the network has 4\.3 GB of weights: an ONNX file .* inside holds 2\.1 GB"):
        onnx_from_model(network, Preprocessing(image_size=8), (), tmp_path / "large.onnx")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("pool", "labels", "message"),
    [
        (
            "",
            LABELS,
            r"the network returns \(N, 64, 10\): expected one vector of logits an image, \(N, 10\); give it a",
        ),
        ("", (), r"the network returns \(N, 64, 10\): expected one vector of logits an image, \(N, C\);"),
        ("avg", LABELS[1:], r"the network returns \(N, 10\): expected one vector of logits an image, \(N, 9\);"),
    ],
)
def test_a_network_gives_each_image_one_logit_a_class(
    tmp_path: Path, pool: str, labels: tuple[str, ...], message: str
) -> None:
    model = timm.create_model("deit_digits", depth=1, global_pool=pool).eval()
    with pytest.raises(InputError, match=message):
        onnx_from_model(ImageClassifier(model, PREPROCESSING).eval(), PREPROCESSING, labels, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
