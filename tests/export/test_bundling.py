"""`vitx export`: what it writes and refuses; an old bundle survives every failure."""

import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from bundle_fixture import write_bundle
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.run import ModelSpec
from vitx.export import ALL, SourceRequest
from vitx.export.rewrite.rewrites import select_rewrites
from vitx.models import build_model
from vitx.parity.executables.witness import read_witness
from vitx.runtimes import load_session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_the_bundle_is_whole(exported_bundle: Path) -> None:
    bundle = Bundle.open(exported_bundle)
    certificate = bundle.require_certificate()
    assert certificate.images == 360
    assert certificate.flips == ()
    assert certificate.max_logit_error < 1e-4
    assert bundle.manifest.labels == tuple("0123456789")
    assert "fold-head-norm" in bundle.manifest.rewrites
    assert bundle.manifest.provenance.source == "model:deepvit_digits"
    assert sorted(path.name for path in exported_bundle.iterdir()) == [
        "certificate.json",
        "manifest.json",
        "model.onnx",
        "witness.safetensors",
    ]
    assert [path.name for path in exported_bundle.parent.iterdir()] == ["net.vitx"], "something was left behind"


def test_the_witness_set_has_the_checkpoint_s_logits(exported_bundle: Path) -> None:
    """As many of the 360 images as add a tenth, and logits in float64 that float32 comes near to, but not nearer."""
    bundle = Bundle.open(exported_bundle)
    witness = read_witness(bundle)
    assert witness is not None
    graph = bundle.manifest.files["model.onnx"].size
    assert 0.08 * graph < bundle.manifest.files["witness.safetensors"].size < 0.1 * graph + 4000
    assert (witness.info.population, witness.info.census) == (360, len(witness) // 4)
    assert witness.info.reference_sha256 == bundle.manifest.provenance.checkpoint_sha256
    with load_session(bundle, device="cpu", threads=1) as session:
        error = np.abs(session.infer(witness.pixels) - witness.logits).max()
    assert 1e-9 < error < 1e-5
    verdicts = {each.evidence for each in bundle.require_certificate().executables}
    assert verdicts == {"evaluation split"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--max-flip-rate", "0.001"), 2, "360 images cannot prove a flip rate of at most 0.001"),
        (("--memory-gib", "0.1"), 1, "tracing held .* GiB, more than its limit of 0.1, and was ended"),
        (("--without", "fold-heads"), 2, "unknown rewrite 'fold-heads': did you mean fold-head"),
        (("--with", "pad-heads"), 2, "unknown rewrite 'pad-heads': did you mean pad-head-dim"),
        (("--with", "pad-head-dim", "--without", "pad-head-dim"), 2, "--with pad-head-dim --without pad-head-dim"),
        (("--calibration-data", "digits"), 2, "--calibration-data digits goes with a --precision below fp32"),
        (("--precision", "fp8", "--quantize-for", "cpu"), 2, "--quantize-for cpu is of int8, and fp8 has one form"),
        (("--precision", "fp16", "--base", "bf16"), 2, "--base bf16 is of int8 and fp8, and fp16 is its own"),
        (("--precision", "int8", "--base", "fp16"), 2, "--base fp16 of int8 is for TensorRT, .* leave it out, or add"),
        (
            ("--profiles", "1,8"),
            2,
            "--profiles is of a plan, and none is built: leave it out, or add --trt",
        ),
        (("--builder-level", "5"), 2, "--builder-level is of a plan, and none is built"),
        (("--uncertified", "--witness", "9"), 2, "--witness 9 is made with the certificate: leave --uncertified out"),
        (("--uncertified", "--for", "cpu"), 2, "--for cpu keeps what the certificate passes: leave --uncertified out"),
        (("--weights", "nowhere.pth"), 2, "no checkpoint at 'nowhere.pth'"),
        (("--weights", "https://a.b/c.pth"), 2, "'https://a.b/c.pth' is a URL"),
        (("--model-arg", "heads=3"), 2, "'deepvit_digits' cannot be built with --model-arg heads=3: .*'heads'"),
        (("--model-arg", "depth"), 2, "--model-arg depth: expected KEY=VALUE"),
    ],
)
def test_a_failed_export_leaves_the_old_bundle(
    own_bundle: Path, vitx: Vitx, request: pytest.FixtureRequest, options: tuple[str, ...], code: int, message: str
) -> None:
    if "--memory-gib" not in options:
        request.getfixturevalue("in_this_process")
    before = {path.name: path.read_bytes() for path in own_bundle.iterdir()}
    weights = () if "--weights" in options else ("--weights", "random")
    found, _, errors = vitx(
        "export", "model:deepvit_digits", "--data", "digits", "--out", own_bundle, *weights, *options
    )
    assert found == code, errors
    assert re.search(message, errors), errors
    assert {path.name: path.read_bytes() for path in own_bundle.iterdir()} == before
    assert [path.name for path in own_bundle.parent.iterdir()] == ["net.vitx"], "something was left behind"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("model:deepvit_digits", (), "brings no images to certify on: give --data, or say --uncertified"),
        ("model:deepvitt", ("--uncertified",), "unknown model 'deepvitt': did you mean deepvit"),
        ("runs/none", (), "no run at 'runs/none'"),
        ("model:deepvit_digits", ("--uncertified", "--out", "precious"), "'precious' exists and is no bundle"),
        ("model:deepvit_digits", ("--uncertified", "--out", "a b.vitx"), "cannot be a bundle's name"),
        ("model:deepvit_digits", ("--explain", "--out", "a"), "only prints what rewrites remove: leave --out a out"),
        (
            "model:deepvit_digits",
            ("--explain", "--precision", "fp16"),
            "--precision has no effect with --explain, which",
        ),
        (
            "model:deepvit_digits",
            ("--explain", "--witness", "none"),
            "--witness has no effect with --explain, which on",
        ),
        (
            "model:deepvit_digits",
            ("--explain", "--openvino"),
            "--openvino has no effect with --explain, which only pri",
        ),
        (
            "model:deepvit_digits",
            ("--explain", "--uncertified"),
            "which only prints what rewrites remove: leave it out",
        ),
        (
            "model:deepvit_digits",
            ("--explain", "--max-flip-rate", "0.5"),
            "--max-flip-rate has no effect with --explai",
        ),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vitx: Vitx, source: str, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    code, _, errors = vitx("export", source, *options, "--weights", "random")
    assert code == 2
    assert message in errors
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


BEIT = ("img_size=32", "patch_size=8", "depth=1", "embed_dim=24", "num_heads=2")


@pytest.mark.usefixtures("in_this_process")
def test_a_network_of_timm_with_arguments_is_certified(tmp_path: Path, vitx: Vitx) -> None:
    """BEiT's masks cannot be traced in the fused form; the certificate is made against the network of the manifest."""
    given = [part for argument in BEIT for part in ("--model-arg", argument)]
    source = ("model:timm/beit_base_patch16_224", "--weights", "random", "--data", "digits")
    code, _, errors = vitx("export", *source, *given, "--out", tmp_path / "beit.vitx", "--max-flip-rate", "0.02")
    assert code == 0, errors
    bundle = Bundle.open(tmp_path / "beit.vitx")
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2}
    assert bundle.manifest.model == ModelSpec(name="beit_base_patch16_224", num_classes=10, kwargs=kwargs)
    assert bundle.manifest.input.shape == ("N", 32, 32, 3)
    assert bundle.require_certificate().flips == ()
    provenance = bundle.manifest.provenance
    assert provenance.source == f"model:timm/beit_base_patch16_224?{'&'.join(BEIT)}"
    again = SourceRequest(provenance.source, weights=provenance.checkpoint, data=bundle.manifest.data).load()
    assert again.checkpoint_sha256 == provenance.checkpoint_sha256


@pytest.mark.usefixtures("in_this_process")
def test_a_network_that_cannot_be_exported_is_one_message(tmp_path: Path, vitx: Vitx) -> None:
    source = ("model:timm/beit_base_patch16_224", "--weights", "random", "--uncertified", "--out", tmp_path / "b.vitx")
    code, _, errors = vitx("export", *source, "--quiet", "--model-arg", "embed_dim=33", "--model-arg", "depth=1")
    assert code == 2
    assert errors.startswith("error: this network cannot classify images of 224 × 224 pixels, in 'model.blocks.0.attn'")
    assert len(errors.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_random_weights_are_the_same_in_every_process() -> None:
    request = SourceRequest("model:deit_digits", weights="random")
    first, second = request.load(), request.load()
    assert first.checkpoint_sha256 == second.checkpoint_sha256
    state = torch.random.get_rng_state()
    request.load()
    assert torch.equal(state, torch.random.get_rng_state())


def test_weights_of_a_file(tmp_path: Path) -> None:
    model = build_model(ModelSpec(name="deit_digits", num_classes=10))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    source = SourceRequest("model:deit_digits", weights=str(tmp_path / "weights.safetensors"), data="digits").load()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.model.state_dict().items())


@pytest.mark.usefixtures("in_this_process")
def test_a_classifier_that_no_weights_were_given_for_gets_no_certificate(tmp_path: Path, vitx: Vitx) -> None:
    model = build_model(ModelSpec(name="deit_digits", num_classes=7))
    save_file(model.state_dict(), tmp_path / "seven.safetensors")
    given = ("model:deit_digits", "--weights", tmp_path / "seven.safetensors", "--data", "digits", "--quiet")
    lacks = "has no weights for 10 classes: head.bias, head.weight would stay random"
    code, _, errors = vitx("export", *given, "--out", tmp_path / "a.vitx")
    assert (code, [path.name for path in tmp_path.iterdir()]) == (2, ["seven.safetensors"])
    assert lacks in errors
    code, _, errors = vitx("export", *given, "--uncertified", "--out", tmp_path / "a.vitx")
    assert code == 0
    assert f"warning: 'model:deit_digits' {lacks}" in errors


@pytest.mark.parametrize(
    ("out", "options", "named"),
    [
        ("t.vitx", ("--triton", "t.vitx"), "--out 't.vitx' and --triton 't.vitx/t'"),
        ("t", ("--triton", "."), "--out 't' and --triton 't'"),
        ("t.vitx", ("--hub", "t.vitx/hub"), "--out 't.vitx' and --hub 't.vitx/hub'"),
        ("d/t.vitx", ("--hub", "d"), "--out 'd/t.vitx' and --hub 'd'"),
        ("o.vitx", ("--hub", "D", "--triton", "D"), "--hub 'D' and --triton 'D/o'"),
        ("o.vitx", ("--trt", "--timing-cache", "o.vitx/t"), "--out 'o.vitx' and --timing-cache 'o.vitx/t'"),
    ],
)
def test_what_an_export_writes_lies_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vitx: Vitx, out: str, options: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = ("model:deit_digits", "--weights", "random", "--uncertified", "--quiet")
    code, _, errors = vitx("export", *source, "--out", out, *options)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert f"{named} would be in one another" in errors


@pytest.mark.parametrize(
    ("out", "options", "named"),
    [
        ("a.vitx", ("--triton", "b.vitx"), "b.vitx/a"),
        ("a.vitx", ("--hub", "b.vitx/hub"), "b.vitx/hub"),
        ("b.vitx/a.vitx", (), "b.vitx"),
    ],
)
def test_an_export_adds_nothing_to_another_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vitx: Vitx, out: str, options: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = write_bundle(tmp_path / "b.vitx")
    source = ("model:deit_digits", "--weights", "random", "--uncertified", "--quiet")
    code, _, errors = vitx("export", *source, "--out", out, *options)
    assert (code, list(tmp_path.iterdir())) == (2, [bundle.path])
    assert f"'{named}' would add to the bundle '{bundle.path}'" in errors
    Bundle.open(bundle.path)


def test_a_network_without_published_weights_says_so() -> None:
    with pytest.raises(InputError, match="give the weights of 'deit_digits' with --weights FILE"):
        SourceRequest("model:deit_digits").load()


def test_a_timm_model_has_timms_preprocessing() -> None:
    source = SourceRequest("model:timm/resnet18", weights="random").load()
    config = timm.get_pretrained_cfg("resnet18")
    assert config is not None
    assert source.preprocessing.mean == tuple(config.mean)
    assert source.preprocessing.image_size == 224
    assert len(source.class_names) == 1000


def test_rewrites_that_are_off_by_default() -> None:
    assert select_rewrites((), ()) == ALL
    assert set(select_rewrites(("pad-head-dim",), ("join-tokens",))) == {*ALL, "pad-head-dim"} - {"join-tokens"}
