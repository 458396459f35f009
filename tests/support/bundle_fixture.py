"""A small real bundle: an ONNX graph that ONNX Runtime executes, and the same function written independently in numpy.

logits = mean over space of (x/255 − mean)/std, times W, plus b. Its four classes are colours, so that a test can draw
images whose class is known.
"""

import io
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from vitx.core.bundle import (
    MANIFEST,
    Bundle,
    Certificate,
    FileEntry,
    Manifest,
    OutputSpec,
    Provenance,
    TensorSpec,
    output_file,
    output_tensor,
    timestamp,
)
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import ModelSpec
from vitx.data.image_set import ImageSet
from vitx.export.graph.outputs import embedding_part
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.ledger import Ledger, Shard, image_shards
from vitx.predict.options import WHOLE, Share
from vitx.runtimes.session import Session

# Sorted, as the classes of an image folder are.
LABELS = ("blue", "green", "grey", "red")
COLOURS = ((50, 70, 210), (60, 190, 70), (110, 110, 110), (200, 60, 50))
IMAGE_SIZE = 16
PREPROCESSING = Preprocessing(image_size=IMAGE_SIZE, mean=(0.40, 0.45, 0.50), std=(0.20, 0.25, 0.30))
WEIGHT = np.array([[-1, -1, -0.5, 3], [-1, 3, -0.5, -1], [3, -1, -0.5, -1]], dtype=np.float32)  # (3, C)
BIAS = np.array([0.05, -0.2, 1.5, 0.1], dtype=np.float32)

Float32Array = npt.NDArray[np.float32]
Fault = Literal["mean_std", "bgr", "class_off_by_one", "batch_mean", "position", "drift", "nan", "no_batch"]


class NumpySession(Session):
    """The reference: the same function as the graph, in float64."""

    def _infer(self, images: UInt8Array) -> Float32Array:
        pixels = images.astype(np.float64) / 255
        normal = (pixels - PREPROCESSING.mean) / PREPROCESSING.std
        return np.asarray(normal.mean(axis=(1, 2)) @ WEIGHT + BIAS, dtype=np.float32)

    def describe(self) -> dict[str, Any]:
        return {"runtime": "numpy", "version": np.__version__, "provider": "cpu", "precision": "fp64", "threads": 1}


def tiny_graph(fault: Fault | None = None) -> onnx.ModelProto:
    """The graph `images` uint8 [N,16,16,3] → `logits` float32 [N,4], correct or with one seeded fault."""
    mean, std = PREPROCESSING.mean, PREPROCESSING.std
    weight, bias = WEIGHT, BIAS
    if fault == "mean_std":
        mean, std = std, mean
    if fault == "bgr":
        weight = weight[::-1]
    if fault == "class_off_by_one":
        weight, bias = np.roll(weight, 1, axis=1), np.roll(bias, 1)
    if fault == "drift":
        bias = bias + np.float32(3e-4)
    if fault == "nan":
        bias = bias * np.float32("nan")
    constants = {
        "scale": np.float32(255),
        "mean": np.array(mean, dtype=np.float32),
        "std": np.array(std, dtype=np.float32),
        "space": np.array([1, 2], dtype=np.int64),
        "batch": np.array([0], dtype=np.int64),
        "weight": weight.astype(np.float32),
        "bias": bias.astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["pixels", "scale"], ["unit"]),
        helper.make_node("Sub", ["unit", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["normal"]),
        helper.make_node("ReduceMean", ["normal", "space"], ["features"], keepdims=0),
        helper.make_node("Gemm", ["features", "weight", "bias"], ["logits" if _plain(fault) else "scores"]),
    ]
    if fault == "batch_mean":
        nodes.append(helper.make_node("ReduceMean", ["scores", "batch"], ["shared"], keepdims=1))
        nodes.append(helper.make_node("Sub", ["scores", "shared"], ["logits"]))
    if fault == "position":  # a small part of each row is added to the rows after it
        nodes.append(helper.make_node("CumSum", ["scores", "zero"], ["running"]))
        nodes.append(helper.make_node("Mul", ["running", "small"], ["leak"]))
        nodes.append(helper.make_node("Add", ["scores", "leak"], ["logits"]))
        constants |= {"zero": np.array(0, dtype=np.int64), "small": np.float32(1e-5)}
    batch: int | str = 1 if fault == "no_batch" else "N"
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, [batch, IMAGE_SIZE, IMAGE_SIZE, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, len(LABELS)])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def int8_sum_graph() -> onnx.ModelProto:
    """uint8 [N,16,16,3] → [N,4], each logit the sum of all pixels, as a product of uint8 and int8 with weights 127/127.

    Two products of bright pixels are beyond 16 bits: a kernel that adds pairs there gives half of the sum.
    """
    size = IMAGE_SIZE * IMAGE_SIZE * 3
    constants = {
        "one": np.float32(1),
        "zero": np.uint8(0),
        "codes": np.full((size, len(LABELS)), 127, np.int8),
        "unit": np.full(len(LABELS), 1 / 127, np.float32),
        "zeros": np.zeros(len(LABELS), np.int8),
    }
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("QuantizeLinear", ["pixels", "one", "zero"], ["quantized"]),
        helper.make_node("DequantizeLinear", ["quantized", "one", "zero"], ["back"]),
        helper.make_node("DequantizeLinear", ["codes", "unit", "zeros"], ["weight"], axis=1),
        helper.make_node("MatMul", ["back", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "int8 sum",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", IMAGE_SIZE, IMAGE_SIZE, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", len(LABELS)])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _plain(fault: Fault | None) -> bool:
    return fault not in ("batch_mean", "position")


def write_bundle(path: Path, *, fault: Fault | None = None, data: str = "digits", name: str = "tiny") -> Bundle:
    """Write an uncertified bundle whose evaluation data is `data`."""
    with staged_folder(path) as stage:
        onnx.save(tiny_graph(fault), stage / "model.onnx")
        write_json(stage / MANIFEST, _manifest(stage / "model.onnx", data, name))
    return Bundle.open(path)


def _manifest(model: Path, data: str, name: str) -> Manifest:
    return Manifest(
        name=name,
        model=ModelSpec(name="tiny", num_classes=len(LABELS)),
        labels=LABELS,
        preprocessing=PREPROCESSING,
        input=TensorSpec(name="images", dtype="uint8", shape=("N", IMAGE_SIZE, IMAGE_SIZE, 3)),
        output=TensorSpec(name="logits", dtype="float32", shape=("N", len(LABELS))),
        precision="fp32",
        rewrites=(),
        opset=18,
        data=data,
        files={"model.onnx": FileEntry(sha256=sha256_file(model), size=model.stat().st_size)},
        provenance=Provenance(source="tests", checkpoint="numpy", checkpoint_sha256="0" * 64, created=timestamp()),
    )


def with_embedding(bundle: Bundle, part: bytes | None = None) -> Bundle:
    """The bundle with an output `embedding`, the mean colour; `part` for another one under its name."""
    part = embedding_part(["features"], 3) if part is None else part
    spec = OutputSpec(name="embedding", dtype="float32", shape=("N", 3), meaning="the mean colour")
    path = bundle.path / output_file("embedding")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(part)
    files = {**bundle.manifest.files, output_file("embedding"): FileEntry(sha256=sha256_file(path), size=len(part))}
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": files, "outputs": (spec,)}))
    return Bundle.open(bundle.path)


def with_attention(bundle: Bundle) -> Bundle:
    """The bundle with one more output, `attention`: the brightness of each of the 16 x 16 pixels."""
    name = output_tensor("attention")
    nodes = [
        helper.make_node("ReduceMean", ["unit", f"{name}/axis"], [f"{name}/mean"], keepdims=0),
        helper.make_node("Flatten", [f"{name}/mean"], [name], axis=1),
    ]
    graph = onnx.GraphProto(node=nodes, initializer=[numpy_helper.from_array(np.array([3]), f"{name}/axis")])
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", IMAGE_SIZE**2]))
    spec = OutputSpec(
        name="attention",
        dtype="float32",
        shape=("N", IMAGE_SIZE**2),
        meaning="the brightness of each pixel",
        grid=(IMAGE_SIZE, IMAGE_SIZE),
    )
    path = bundle.path / output_file("attention")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(onnx.ModelProto(graph=graph).SerializeToString())
    entry = FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
    changed = {
        "files": {**bundle.manifest.files, output_file("attention"): entry},
        "outputs": (*bundle.manifest.outputs, spec),
    }
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update=changed))
    return Bundle.open(bundle.path)


def add_files(bundle: Bundle, files: Mapping[str, bytes]) -> Bundle:
    """Add files to a bundle and list them in its manifest."""
    plain = bundle.manifest.model_dump(mode="json")
    for name, content in files.items():
        path = bundle.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        plain["files"][name] = {"sha256": sha256_file(path), "size": len(content)}
    write_json(bundle.path / MANIFEST, plain)
    return Bundle.open(bundle.path)


def colour_image(label: int, rng: np.random.Generator, size: int = IMAGE_SIZE) -> UInt8Array:
    """A noisy patch of the class's colour, uint8 (size, size, 3)."""
    noise = rng.normal(0, 25, (size, size, 3)) + rng.normal(0, 12, 3)
    return np.asarray(np.clip(np.asarray(COLOURS[label]) + noise, 0, 255), dtype=np.uint8)


def png(pixels: UInt8Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def damaged_fax(rows: int) -> bytes:
    """A TIFF of 64 pixels a row that can be decoded; libtiff has a line to say about nearly every row."""
    stream = io.BytesIO()
    Image.new("1", (64, rows)).save(stream, "TIFF", compression="group3")
    data = bytearray(stream.getvalue())
    data[8:-200] = np.random.default_rng(0).bytes(len(data) - 208)  # not the header, and not the tags behind the rows
    return bytes(data)


def tar_of(members: Mapping[str, bytes]) -> bytes:
    """A tar file, by name and content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def colour_images(count: int, seed: int = 0) -> ImageSet:
    """A labelled set of `count` PNG images in memory."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(LABELS), count)
    encoded = [png(colour_image(int(label), rng)) for label in labels]
    keys = tuple(f"{index:05d}.png" for index in range(count))
    read: Callable[[int], bytes] = encoded.__getitem__
    return ImageSet("colours", LABELS, keys, labels.astype(np.int64), read)


def write_image_folder(root: Path, val_count: int, train_count: int = len(LABELS)) -> Path:
    """Write ROOT/train and ROOT/val, one folder a class."""
    for split, count, seed in (("train", train_count, 1), ("val", val_count, 0)):
        rng = np.random.default_rng(seed)
        for index in range(count):
            label = index % len(LABELS)
            folder = root / split / LABELS[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index:05d}.png").write_bytes(png(colour_image(label, rng)))
    return root


def certificate(**changes: Any) -> Certificate:
    """A certificate for tests that read one: what is not of interest has any value."""
    fields: dict[str, Any] = {
        "verdict": "pass",
        "reasons": ("the bound is below the limit",),
        "subject": {"manifest.json": "a" * 64},
        "reference": "run",
        "reference_sha256": "b" * 64,
        "candidate": "tiny",
        "runtime": {"runtime": "numpy"},
        "data": "digits",
        "data_sha256": "c" * 64,
        "images": 300,
        "batch_sizes": (1, 8),
        "accuracy_reference": 0.75,
        "accuracy_candidate": 0.5,
        "flips": (),
        "flip_rate_bound": 0.01,
        "max_flip_rate": 0.02,
        "mcnemar_p": 1.0,
        "max_logit_error": 1e-5,
        "mean_logit_error": 1e-6,
        "max_logit_error_by_batch_size": {1: 1e-5, 8: 2e-6},
        "max_logit_error_allowed": 1e-4,
        "max_neighbour_error": 0.0,
        "created": "2026-01-02T03:04:05+00:00",
    }
    return Certificate(**fields | changes)


def listed(
    source: str, listing: Path, shard_size: int = 100, columns: TableColumns = TableColumns(), share: Share = WHOLE
) -> Inventory:
    """The inventory of an input for `vitx predict`, whose names are then in a ledger at `listing`."""
    with closing(Ledger(listing)) as ledger:
        return take_inventory(source, ledger, shard_size, columns, share)


def listed_names(listing: Path, names: Iterable[str], shard_size: int = 100) -> list[Shard]:
    """The shards of these names, in their order."""
    with closing(Ledger(listing)) as ledger:
        ledger.find(((name, None) for name in names), in_order=True)
        return image_shards(0, ledger.number(WHOLE)[0], shard_size)
