"""Faults that are put into real bundles: `vitx serve` refuses each by name, whoever sealed the bundle again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bundle_fixture import PREPROCESSING, Fault, tiny_graph
from vitx.core.bundle import CERTIFICATE, MANIFEST, MODEL, WITNESS, Bundle, Manifest
from vitx.core.errors import VitxError
from vitx.core.files import read_record, sha256_bytes, write_json
from vitx.core.tensorrt_plan import PlanInfo, PlanOptions, Profile
from vitx.parity.executables.listing import verdicts_of_bundle
from vitx.serve.models.loading import Loader
from vitx.serve.options import ServeOptions
from witnessed_bundle import certify_bundle, seal_certificate, seal_manifest, write_ir

Change = Callable[[Bundle], Any]


def load(bundle: Bundle, runtime: str) -> None:
    """As the server loads it: verified, then loaded."""
    loader = Loader(ServeOptions(max_batch=4, device="cpu", runtime=runtime, instances=1, threads=1))
    loader.warm(loader.verify(bundle.path)).session.close()


def resealed(bundle: Bundle) -> None:
    seal_certificate(seal_manifest(bundle.path))


def other_ir(fault: Fault) -> Change:
    def change(bundle: Bundle) -> None:
        write_ir(bundle.path, fault)
        resealed(bundle)

    return change


def other_graph(fault: Fault) -> Change:
    def change(bundle: Bundle) -> None:
        bundle.model_path.write_bytes(tiny_graph(fault).SerializeToString())
        resealed(bundle)

    return change


def forged_verdict(bundle: Bundle) -> None:
    """Another IR, and a certificate that says pass of exactly it."""
    write_ir(bundle.path, "class_off_by_one")
    sealed = seal_manifest(bundle.path)
    subject = sealed.subject()
    forged = []
    for each in read_certificate(bundle).executables:
        artefacts = {name: subject[name] for name in each.executable.artefacts}
        executable = each.executable.model_copy(update={"artefacts": artefacts})
        forged.append(each.model_copy(update={"executable": executable, "verdict": "pass"}))
    seal_certificate(sealed, executables=tuple(forged))


def read_certificate(bundle: Bundle) -> Any:
    found = bundle.certificate()
    assert found is not None
    return found


def honest_certificate(bundle: Bundle) -> None:
    """Another IR, listed, and certified by `vitx parity`, which runs model.onnx: the case that once passed."""
    write_ir(bundle.path, "class_off_by_one")
    (bundle.path / WITNESS).unlink()
    assert certify_bundle(seal_manifest(bundle.path), witness_images=0).verdict == "pass"


def manifest_field(**changes: Any) -> Change:
    def change(bundle: Bundle) -> None:
        path = bundle.path / MANIFEST
        write_json(path, read_record(path, Manifest).model_copy(update=changes))
        seal_certificate(Bundle.open(bundle.path))

    return change


def other_witness(**tensors: Callable[[Any], Any]) -> Change:
    def change(bundle: Bundle) -> None:
        path = bundle.path / WITNESS
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
        kept = load_file(path)
        save_file({**kept, **{name: np.asarray(f(kept[name])) for name, f in tensors.items()}}, path, metadata)
        resealed(bundle)

    return change


def flipped_byte(name: str) -> Change:
    def change(bundle: Bundle) -> None:
        path = bundle.path / name
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)

    return change


def without_witness(*, version: str) -> Change:
    """No witness set, and verdicts of another version of each runtime."""

    def change(bundle: Bundle) -> None:
        (bundle.path / WITNESS).unlink()
        executables = [
            each.model_copy(update={"executable": each.executable.model_copy(update={"version": version})})
            for each in read_certificate(bundle).executables
        ]
        seal_certificate(seal_manifest(bundle.path), executables=tuple(executables))

    return change


def unlisted(bundle: Bundle) -> None:
    (bundle.path / "engines").mkdir()
    (bundle.path / "engines" / "extra.plan").write_bytes(b"x")


def no_files(bundle: Bundle) -> None:
    path = bundle.path / MANIFEST
    write_json(path, read_record(path, Manifest).model_copy(update={"files": {}}))


def plan_of_another_gpu(bundle: Bundle) -> None:
    plan = bundle.path / "engines" / "tensorrt.plan"
    plan.parent.mkdir()
    plan.write_bytes(b"plan")
    subject = bundle.subject()
    write_json(
        plan.with_name("tensorrt.plan.json"),
        PlanInfo(
            flavor="tensorrt",
            version="10.9.0.34",
            architectures=("sm70",),
            profiles=(Profile(minimum=1, optimum=1, maximum=1),),
            precision="fp32",
            options=PlanOptions(builder_level=3, version_compatible=False, hardware_compatible=False),
            onnx_sha256=subject[MODEL],
            sha256=sha256_bytes(b"plan"),
            size=4,
            build_seconds=1,
            layers=1,
            created="",
        ),
    )
    resealed(bundle)


FAULTS: dict[str, tuple[str, Change, str]] = {
    # What runs is another function; manifest and certificate were sealed again.
    "IR: classes off by one": ("openvino", other_ir("class_off_by_one"), "not the checkpoint's equal in openvino"),
    "IR: mean and std swapped": ("openvino", other_ir("mean_std"), "not the checkpoint's equal in openvino"),
    "IR: BGR": ("openvino", other_ir("bgr"), "not the checkpoint's equal in openvino"),
    "IR: a drift of 3e-4": ("openvino", other_ir("drift"), r"largest logit error 0\.0003\d*, allowed 0\.0001"),
    "IR: NaN": ("openvino", other_ir("nan"), "logits that are not finite"),
    "IR: the batch's mean subtracted": ("openvino", other_ir("batch_mean"), "not the checkpoint's equal in openvino"),
    "IR: the pass was forged": ("openvino", forged_verdict, "not the checkpoint's equal in openvino"),
    "graph: classes off by one": ("onnxruntime", other_graph("class_off_by_one"), "checkpoint's equal in onnxruntime"),
    "graph: BGR": ("onnxruntime", other_graph("bgr"), "not the checkpoint's equal in onnxruntime"),
    "graph: rows leak into others": ("onnxruntime", other_graph("position"), "largest logit error"),
    "graph: of one image": ("onnxruntime", other_graph("no_batch"), "fails on a batch of 2"),
    # What describes it is another.
    "labels swapped": (
        "onnxruntime",
        manifest_field(labels=("green", "blue", "grey", "red")),
        "its labels were changed after it was made",
    ),
    "another interpolation": (
        "onnxruntime",
        manifest_field(preprocessing=PREPROCESSING.model_copy(update={"interpolation": "bilinear"})),
        "was preprocessed otherwise than",
    ),
    # The evidence is another.
    "witness images altered": (
        "onnxruntime",
        other_witness(png=lambda png: np.concatenate([png[:40], png[40:] ^ 1])),
        r"image 0 of .* was altered|the images of .* were altered",
    ),
    "reference logits altered": ("openvino", other_witness(logits=lambda x: x + 1e-6), "the reference logits of"),
    "one byte of the witness set": ("onnxruntime", flipped_byte(WITNESS), "witness.safetensors"),
    "one byte of the graph": ("onnxruntime", flipped_byte(MODEL), "model.onnx"),
    "one byte of the IR": ("openvino", flipped_byte("openvino/model.bin"), "model.bin"),
    "one byte of the certificate": ("onnxruntime", flipped_byte(CERTIFICATE), "certificate.json"),
    # The list is another.
    "empty list of files": ("onnxruntime", no_files, "does not list model.onnx"),
    "a file that is not listed": ("onnxruntime", unlisted, "engines/extra.plan is not listed"),
    # There is no evidence, and the certificate is of something else.
    "verdict of another version": ("openvino", without_witness(version="1.0"), "version 1.0, here"),
    "IR certified by its graph": ("openvino", honest_certificate, "no verdict on openvino"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_refused_by_name(witnessed: Bundle, name: str) -> None:
    runtime, change, message = FAULTS[name]
    load(witnessed, runtime)  # the bundle as it was
    change(witnessed)
    with pytest.raises(VitxError, match=message):
        load(witnessed, runtime)


def test_a_plan_of_another_gpu(witnessed: Bundle) -> None:
    """It is listed as built and not run, and refused before TensorRT sees it; without a GPU because there is none."""
    plan_of_another_gpu(witnessed)
    bundle = Bundle.open(witnessed.path)
    verdicts = {each.executable.runtime: each for each in verdicts_of_bundle(bundle, 0.02, "cpu", quiet=True)}
    assert (verdicts["tensorrt"].verdict, verdicts["tensorrt"].executable.architecture) == ("not run", "sm70")
    assert verdicts["tensorrt"].reasons[0].startswith("built, not run")
    loader = Loader(ServeOptions(runtime="tensorrt"))
    with pytest.raises(VitxError, match="needs an NVIDIA GPU"):
        loader.warm(loader.verify(bundle.path))


def test_the_swapped_ir_is_refused_by_the_command(witnessed: Bundle, vitx: Any) -> None:
    """Not sealed, sealed in its manifest, and with its certificate: exit code 2 or 1, before the port is announced."""
    write_ir(witnessed.path, "class_off_by_one")
    serve = ("serve", witnessed.path, "--runtime", "openvino", "--port", "0", "--device", "cpu")
    code, out, err = vitx(*serve)
    assert (code, out, "openvino/model" in err) == (2, "", True)
    bundle = seal_manifest(witnessed.path)
    code, out, err = vitx(*serve)
    assert (code, out, "is of other files" in err) == (1, "", True)
    seal_certificate(bundle)
    code, out, err = vitx(*serve)
    assert (code, out) == (1, "")
    assert "is not the checkpoint's equal in openvino" in err
    assert " of 340 witness images flipped" in err


def test_predict_refuses_it_too(witnessed: Bundle, vitx: Any, colours_folder: Path, tmp_path: Path) -> None:
    other_ir("class_off_by_one")(witnessed)
    code, _, err = vitx(
        *("predict", witnessed.path, colours_folder / "val", "--out", tmp_path / "out", "--runtime", "openvino")
    )
    assert (code, "is not the checkpoint's equal in openvino" in err) == (1, True)
    assert not (tmp_path / "out" / "predictions.parquet").exists()
    code, out, _ = vitx(
        *("predict", witnessed.path, colours_folder / "val", "--out", tmp_path / "out", "--runtime", "openvino"),
        *("--allow-uncertified", "--json"),
    )
    assert (code, json.loads(out)["certified"]) == (0, False)


def test_a_graph_that_is_wrong_in_the_witness_set_s_batches_alone_is_not_certified(bare: Bundle) -> None:
    """The comparison runs batches of 1, 2, 7 and 32; that of 16 is the witness set's."""
    model = tiny_graph("batch_mean")
    del model.graph.node[-2:]
    constants = {"sixteen": np.array([16]), "drift": np.float32(0.01), "no_drift": np.float32(0)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items())
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["scores"], ["size"], start=0, end=1),
            helper.make_node("Equal", ["size", "sixteen"], ["alike"]),
            helper.make_node("Where", ["alike", "drift", "no_drift"], ["added"]),
            helper.make_node("Add", ["scores", "added"], ["logits"]),
        ]
    )
    bare.model_path.write_bytes(model.SerializeToString())
    certificate = certify_bundle(seal_manifest(bare.path))
    assert certificate.verdict == "fail"
    assert certificate.reasons[0].startswith("the witness set, in batches of 16: largest logit error 0.01, allowed")
    assert read_certificate(bare) == certificate
    assert [each.verdict for each in certificate.executables if each.executable.runtime == "onnxruntime"] == ["fail"]
