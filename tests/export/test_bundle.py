"""`vitx export`: what it writes, what it refuses, and that an old bundle survives every failure."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.run import ModelSpec
from vitx.export import SourceRequest
from vitx.models import build_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def vitx(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vitx", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """deepvit_digits with random weights, certified on the digits."""
    folder = tmp_path_factory.mktemp("export")
    finished = vitx(
        *("export", "model:deepvit_digits", "--weights", "random", "--data", "digits", "--out", "net.vitx", "--json"),
        cwd=folder,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["verdict"] == "pass"
    return folder / "net.vitx"


def test_the_bundle_is_whole(exported: Path) -> None:
    bundle = Bundle.open(exported)
    certificate = bundle.require_certificate()
    assert certificate.images == 360
    assert certificate.flips == ()
    assert certificate.max_logit_error < 1e-4
    assert bundle.manifest.labels == tuple("0123456789")
    assert "fold-head-norm" in bundle.manifest.rewrites
    assert bundle.manifest.provenance.source == "model:deepvit_digits"
    assert sorted(path.name for path in exported.iterdir()) == ["certificate.json", "manifest.json", "model.onnx"]
    assert [path.name for path in exported.parent.iterdir()] == ["net.vitx"], "something was left behind"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--max-flip-rate", "0.001"), 2, "360 images cannot prove a flip rate of at most 0.001"),
        (("--memory-gib", "0.1"), 1, "tracing held .* GiB, more than its limit of 0.1, and was ended"),
        (("--without", "fold-heads"), 2, "unknown rewrite 'fold-heads': did you mean fold-head"),
        (("--weights", "nowhere.pth"), 2, "no checkpoint at 'nowhere.pth'"),
    ],
)
def test_a_failed_export_leaves_the_old_bundle(
    exported: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    arguments = ("export", "model:deepvit_digits", "--data", "digits", "--out", "net.vitx")
    weights = () if "--weights" in options else ("--weights", "random")
    finished = vitx(*arguments, *weights, *options, cwd=exported.parent)
    assert finished.returncode == code, finished.stderr
    assert re.search(message, finished.stderr), finished.stderr
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == ["net.vitx"], "something was left behind"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("model:deepvit_digits", (), "brings no images to certify on: give --data, or say --uncertified"),
        ("model:deepvitt", ("--uncertified",), "unknown model 'deepvitt': did you mean deepvit"),
        ("runs/none", (), "no run at 'runs/none'"),
        ("model:deepvit_digits", ("--uncertified", "--out", "precious"), "'precious' exists and is no bundle"),
        ("model:deepvit_digits", ("--uncertified", "--out", "a b.vitx"), "cannot be a bundle's name"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, source: str, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    finished = vitx("export", source, *options, "--weights", "random", cwd=tmp_path)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


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


def test_a_network_without_published_weights_says_so() -> None:
    with pytest.raises(InputError, match="give the weights of 'deit_digits' with --weights FILE"):
        SourceRequest("model:deit_digits").load()


def test_timms_names_and_preprocessing() -> None:
    source = SourceRequest("model:timm/resnet18", weights="random").load()
    config = timm.get_pretrained_cfg("resnet18")
    assert config is not None
    assert source.preprocessing.mean == tuple(config.mean)
    assert source.preprocessing.image_size == 224
    assert len(source.class_names) == 1000
