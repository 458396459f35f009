"""Errors injected into weights, graphs and bundles: each is detected, and the message names it."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper
from safetensors.torch import save_file

from cli_fixture import Vitx
from vitx.core.bundle import MANIFEST, Bundle, FileEntry
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.run import ModelSpec
from vitx.data.open import open_images
from vitx.export import SourceRequest, export_bundle
from vitx.export.graph.from_model import _require_dynamic_batch
from vitx.models import build_model
from vitx.parity import certify_models
from vitx.parity.exported import model_from_source
from vitx.parity.loaded_model import model_from_bundle

REQUEST = SourceRequest("model:deepvit_digits", weights="random", data="digits")


def verdict(bundle: Bundle) -> tuple[str, str]:
    sides = model_from_source(REQUEST.load(), "auto"), model_from_bundle(bundle)
    certificate = certify_models(*sides, open_images("digits", "val"), write=True, quiet=True)
    return certificate.verdict, "; ".join(certificate.reasons)


def altered(exported_bundle: Path, out: Path, change: Any) -> Bundle:
    """A copy of the bundle whose graph `change` edits, with a manifest that agrees with it."""
    out.mkdir()
    graph = onnx.load(str(exported_bundle / "model.onnx"))
    change(graph.graph)
    onnx.save(graph, out / "model.onnx")
    path = out / "model.onnx"
    manifest = Bundle.open(exported_bundle).manifest
    entry = FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
    write_json(out / MANIFEST, manifest.model_copy(update={"files": {"model.onnx": entry}}))
    return Bundle.open(out)


def scale_first_convolution(graph: Any) -> None:
    """The effect of a wrong standard deviation on the folded normalisation."""
    convolution = next(node for node in graph.node if node.op_type == "Conv")
    weight = next(tensor for tensor in graph.initializer if tensor.name == convolution.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.1), weight.name))


def shift_first_convolution(graph: Any) -> None:
    """The effect of a mean that is 0.1 too low."""
    convolution = next(node for node in graph.node if node.op_type == "Conv")
    weight, bias = (
        next(tensor for tensor in graph.initializer if tensor.name == name) for name in convolution.input[1:3]
    )
    shift = numpy_helper.to_array(weight).sum(axis=(1, 2, 3)) * np.float32(0.1 * 255)
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + shift, bias.name))


def test_an_unchanged_graph_passes(exported_bundle: Path, tmp_path: Path) -> None:
    assert verdict(altered(exported_bundle, tmp_path / "net.vitx", lambda graph: None))[0] == "pass"


@pytest.mark.parametrize("change", [scale_first_convolution, shift_first_convolution])
def test_a_wrong_mean_or_std_fails_parity(exported_bundle: Path, tmp_path: Path, change: Any) -> None:
    answer, reasons = verdict(altered(exported_bundle, tmp_path / "net.vitx", change))
    assert answer == "fail"
    assert "largest logit error" in reasons


def test_a_rejected_bundle_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    """The same export warns about BatchNorm statistics that saw no batch."""

    def refuse(bundle: Bundle) -> None:
        raise CheckFailed("no")

    with pytest.raises(CheckFailed):
        export_bundle(REQUEST, tmp_path / "net.vitx", accept=refuse)
    assert list(tmp_path.iterdir()) == []
    assert "3 BatchNorm layers never saw a batch, the first is 'blocks.3.attn.var_norm'" in capsys.readouterr().err


def test_nan_weights_are_named(tmp_path: Path, in_this_process: None) -> None:
    model = build_model(ModelSpec(name="deepvit_digits", num_classes=10))
    state = model.state_dict()
    state["blocks.3.attn.proj.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "weights.safetensors")
    request = SourceRequest("model:deepvit_digits", weights=str(tmp_path / "weights.safetensors"), data="digits")
    with pytest.raises(InputError, match=r"'blocks\.3\.attn\.proj\.weight' has 1 NaN or infinite of 4096 values"):
        export_bundle(request, tmp_path / "net.vitx")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_a_frozen_batch_is_named(exported_bundle: Path) -> None:
    graph = onnx.load(str(exported_bundle / "model.onnx"))
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(CheckFailed, match="fixed the batch of 'images' to 2"):
        _require_dynamic_batch(onnx_ir.from_proto(graph))


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE")
def test_a_full_disk_leaves_the_old_bundle(own_bundle: Path, vitx: Vitx, in_this_process: None) -> None:
    """A limit of 100 kB on the size of a file acts like a full disk."""
    before = {path.name: path.read_bytes() for path in own_bundle.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, _, errors = vitx(
            "export", REQUEST.target, "--weights", "random", "--data", "digits", "--out", own_bundle, "-q"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 3, errors
    assert "File too large; what was there before is unchanged" in errors
    assert {path.name: path.read_bytes() for path in own_bundle.iterdir()} == before
    assert [path.name for path in own_bundle.parent.iterdir()] == ["net.vitx"]


def test_a_certificate_of_other_files_is_refused(exported_bundle: Path, tmp_path: Path) -> None:
    bundle = altered(exported_bundle, tmp_path / "net.vitx", lambda graph: None)
    assert verdict(bundle)[0] == "pass"
    changed = json.loads((bundle.path / MANIFEST).read_text())
    changed["labels"] = changed["labels"][1:] + changed["labels"][:1]
    (bundle.path / MANIFEST).write_text(json.dumps(changed))
    with pytest.raises(CheckFailed, match=r"is of other files \(manifest\.json differ\)"):
        Bundle.open(bundle.path).require_certificate()
