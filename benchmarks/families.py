"""Seventeen families of timm's networks: nodes before and after, what other simplifiers still find, error, and speed.

    python benchmarks/families.py [--families ViT,Swin] [--repeats 9] [--certify] [--json FILE]

Each network is a published variant at its published size (registers: at 224 px) with random weights like trained ones.
Ours is the graph that `vitx export` writes; the other is `torch.onnx.export`'s of the same network as it comes, from
normalised images, and of its form without fused attention where that fails. Nodes are those that compute: views
(Reshape, Squeeze, …) are not counted. `before` is our traced graph without rewrites and folds. The error is that of
the logits against the network in float64, over its largest logit; `agrees` says whether it is at most 1e-4.

Both graphs run in ONNX Runtime on the processor, one thread, one image; calls take turns, and the ratio is the median
of the pairs' ratios. `cpu` is of processor seconds, which other work on the machine moves less than `wall`. Exit code 1
when a graph does not agree or a simplifier removes a node that computes.

With `--certify` nothing is timed: each network, with ten classes, is exported as a user would, `vitx export …
--openvino`, and the verdicts of its certificate over the evaluation images of scikit-learn's digits are kept. Exit code
1 when one is not "pass".
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import timm
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from reference import randomize_like_trained
from support.as_exported import export_as_it_comes, paired
from support.onnx_session import cpu_session
from support.simplifiers import SIMPLIFIERS, compute_nodes, removed_by
from support.targets import (
    all_hold,
    at_least,
    command_line,
    exit_code,
    report_header,
    require_package,
    save_report,
    some_of,
    verdict,
    vitx,
)
from vitx.core.bundle import Bundle
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, ImageClassifier, onnx_from_model
from vitx.export.graph.from_model import graph_of
from vitx.export.graph.tracing import attention_form
from vitx.export.rewrite.rewrites import rewrite_checked
from vitx.models.source import preprocessing_of

# Of the largest logit.
ERROR_TARGET = 1e-4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", {}),
    "DeiT": ("deit_tiny_patch16_224", {}),
    "DeiT-3": ("deit3_small_patch16_224", {}),
    "distilled DeiT": ("deit_tiny_distilled_patch16_224", {}),
    "ViT with registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 224, "num_classes": 1000}),
    "BEiT": ("beit_base_patch16_224", {}),
    "EVA02": ("eva02_tiny_patch14_224", {"num_classes": 1000}),
    "Swin": ("swin_tiny_patch4_window7_224", {}),
    "ConvNeXt": ("convnext_tiny", {}),
    "CoAtNet": ("coatnet_nano_rw_224", {}),
    "ResNet": ("resnet50", {}),
    "EfficientNet": ("efficientnet_b0", {}),
    "CaiT": ("cait_xxs24_224", {}),
    "FastViT": ("fastvit_t8", {}),
    "LeViT": ("levit_128s", {}),
    "XCiT": ("xcit_tiny_12_p16_224", {}),
    "SwinV2": ("swinv2_tiny_window8_256", {}),
}


def network_of(name: str, options: dict[str, Any]) -> tuple[Any, Preprocessing]:
    preprocessing = preprocessing_of(timm.get_pretrained_cfg(name))
    size = options.get("img_size", preprocessing.image_size)
    model = randomize_like_trained(timm.create_model(name, **options)).eval()
    return model, preprocessing.model_copy(update={"image_size": size})


def export_other(model: Any, size: int, path: Path) -> str:
    """Write `torch.onnx.export`'s graph; return which form of attention it could trace."""
    example = torch.zeros(2, 3, size, size)
    try:
        export_as_it_comes(model, example, path)
    except torch.onnx.OnnxExporterError:
        with attention_form(model, fused=False):
            export_as_it_comes(model, example, path)
        return "without fused attention: it cannot trace the other"
    return "as it comes"


def measure(name: str, options: dict[str, Any], repeats: int, folder: Path) -> dict[str, Any]:
    model, preprocessing = network_of(name, options)
    size = preprocessing.image_size
    images = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    exact = ImageClassifier(copy.deepcopy(model).double(), preprocessing).eval()
    with torch.inference_mode():
        expected = exact(torch.from_numpy(images)).numpy()
    plain = ImageClassifier(model, preprocessing).eval()
    before = graph_of(plain, preprocessing, folded=False)
    nodes_before = sum(compute_nodes(onnx.ModelProto.FromString(serialized(before))).values())
    form = export_other(model, size, folder / "theirs.onnx")
    classifier = ImageClassifier(copy.deepcopy(model), preprocessing).eval()
    start = time.process_time()
    applied = rewrite_checked(
        classifier, ALL, size, rebuild=lambda: ImageClassifier(copy.deepcopy(model), preprocessing)
    )
    graph = onnx_from_model(classifier, preprocessing, (), folder / "ours.onnx", check=False)
    seconds = time.process_time() - start
    ours, theirs = cpu_session(folder / "ours.onnx"), cpu_session(folder / "theirs.onnx")
    (logits,) = ours.run(None, {"images": images})
    error = float(np.abs(logits - expected).max() / np.abs(expected).max())
    removed = {tool: removed_by(tool, graph) for tool in SIMPLIFIERS}
    mean, std = (np.array(values, np.float32) for values in (preprocessing.mean, preprocessing.std))
    normalised = np.ascontiguousarray(((images[:1] / 255 - mean) / std).transpose(0, 3, 1, 2).astype(np.float32))
    return {
        "network": name,
        "options": options,
        "pixels": size,
        "nodes_before": nodes_before,
        "nodes": sum(compute_nodes(graph).values()),
        "exporter": form,
        "exporter_nodes": sum(compute_nodes(onnx.load(str(folder / "theirs.onnx"))).values()),
        "removed": removed,
        "rewrites": {each: count for each, count in applied.items() if count},
        "export_cpu_seconds": round(seconds, 2),
        "logit_error": error,
        "agrees": error <= ERROR_TARGET,
        "holds": error <= ERROR_TARGET and not any(count > 0 for each in removed.values() for count in each.values()),
        **paired((ours, images[:1]), (theirs, normalised), repeats, warm_up=2),
    }


def certify(name: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The verdict on each executable of the bundle that `vitx export` makes."""
    options = {**options, "num_classes": 10}
    model = randomize_like_trained(timm.create_model(name, **options))
    torch.save(model.state_dict(), folder / "weights.pt")
    out = folder / "network.vitx"
    arguments = [part for key, value in options.items() for part in ("--model-arg", f"{key}={value}")]
    arguments += ["--weights", str(folder / "weights.pt"), "--data", "digits", "--openvino", "--max-flip-rate", ".02"]
    arguments += ["--witness", "40"]  # a float64 reference of each is most of the time
    vitx("export", f"model:timm/{name}", *arguments, "--out", str(out), "--quiet")
    certificate = Bundle.open(out).require_certificate()
    kept = ("verdict", "evidence", "images", "flips", "flip_rate_bound", "max_logit_error", "max_logit_error_allowed")
    verdicts = {each.executable.runtime: each.model_dump(include=set(kept)) for each in certificate.executables}
    return {
        "network": name,
        "options": options,
        "verdicts": verdicts,
        "holds": all(each["verdict"] == "pass" for each in verdicts.values()),
    }


def serialized(model: Any) -> bytes:
    import onnx_ir

    content: bytes = onnx_ir.serde.serialize_model(model).SerializeToString()
    return content


def described(row: dict[str, Any]) -> str:
    return (
        f"{row['pixels']} px, {row['nodes_before']} nodes before, {row['nodes']} after, the exporter's "
        f"{row['exporter_nodes']} ({row['exporter']}); onnxslim and onnxsim remove {row['removed']}; "
        f"error {row['logit_error']:.1e}; {1000 / row['ours_wall_ms']:.1f} images/s, × {row['speed_ratio_wall']:.3f} "
        f"(processor × {row['speed_ratio_cpu']:.3f})"
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--families", type=some_of(FAMILIES), default=[*FAMILIES])
    parser.add_argument("--repeats", type=at_least(2), default=9, help="pairs of calls")
    parser.add_argument("--certify", action="store_true", help="the verdicts of the networks' certificates instead")
    arguments: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = report_header()
    if not arguments.certify:
        report["versions"] |= {name: require_package(name, f"pip install {name}") for name in SIMPLIFIERS}
    print(json.dumps(report["machine"]))
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.certify:
                row = certify(*FAMILIES[family], Path(folder))
            else:
                row = measure(*FAMILIES[family], arguments.repeats, Path(folder))
        report[family] = row
        said = row["verdicts"] if arguments.certify else described(row)
        print(f"{family} ({row['network']}): {said}: {verdict(row)}", flush=True)
        save_report(report, arguments.json)
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
