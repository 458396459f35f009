"""`vitx models`: the committed table is what the networks are, and published checkpoints convert."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from cli_fixture import Vitx, run_in_process
from vitx.core.errors import InputError
from vitx.models.network_summary import summarize, vitx_networks

ZOO = json.loads((Path(__file__).parents[2] / "vitx" / "models" / "zoo.json").read_text(encoding="utf-8"))


@pytest.fixture
def vitx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vitx:
    return lambda *arguments: run_in_process(arguments, monkeypatch, capsys)


def test_the_table_names_every_network() -> None:
    assert [entry["name"] for entry in ZOO] == vitx_networks()


@pytest.mark.parametrize(
    "name",
    [
        *("deit_tiny_48_talking_384", "deit_small_24_512", "deit_base_12", "deit_large_24"),
        *("deepvit_32b", "deepvit_s", "plainvit_l", "alternet_101_cifar", "alternet_152", "deepvit_digits"),
    ],
)
def test_the_table_is_what_the_networks_are(name: str) -> None:
    """Each value of each loop of the registry; remade with `python -m vitx.models.network_summary > …/zoo.json`."""
    assert summarize(name).model_dump(mode="json") == next(entry for entry in ZOO if entry["name"] == name)


def test_macs_of_a_plain_vit_follow_from_its_sizes() -> None:
    """Patches 196·768·D; a block 12·N·D² for its matrices and 2·N²·D for attention; the head D·1000."""
    N, D = 197, 384
    by_hand = 196 * 768 * D + 12 * (12 * N * D**2 + 2 * N**2 * D) + D * 1000
    assert summarize("deit_small_12").gmacs == pytest.approx(by_hand / 1e9, abs=1e-4)


def test_blocks_in_a_row_are_counted() -> None:
    assert summarize("deepvit_digits").blocks == "3 × PlainAttention, 3 × ReAttention"
    assert summarize("test_resnet").blocks == ""  # neither a ViT nor a list of stages


def test_an_unknown_network_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown model 'deepvit_ss': did you mean deepvit_s"):
        summarize("deepvit_ss")


def test_the_list_and_one_in_full(vitx: Vitx) -> None:
    _, listed, _ = vitx("models", "--json")
    assert json.loads(listed) == ZOO
    _, shown, _ = vitx("models", "deepvit_s")
    assert "11 × PlainAttention, 5 × ReAttention" in shown
    assert "27312632" in shown


def test_convert_a_published_checkpoint(vitx: Vitx, tmp_path: Path) -> None:
    model = timm.create_model("deepvit_digits", num_classes=7)
    torch.save({"state_dict": model.state_dict(), "epoch": 299}, tmp_path / "public.pth")
    code, _, err = vitx("models", "convert", tmp_path / "public.pth", "--as", "deepvit_digits")
    assert code == 0, err
    converted = load_file(tmp_path / "public.safetensors")
    assert all(torch.equal(converted[key], value) for key, value in model.state_dict().items())
    _, as_json, _ = vitx("models", "convert", tmp_path / "public.pth", "--as", "deepvit_digits", "--json")
    assert json.loads(as_json)["missing"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "public.pth"), "convert needs a file and the network"),
        (("convert", "none.pth", "--as", "deepvit_s"), "no checkpoint at 'none.pth'"),
        (
            ("convert", "none.pth", "--as", "deepvit_s", "--out", "."),
            "expected a file name, such as deepvit_s.safetens",
        ),
        (("deepvit_s", "public.pth"), "FILE, --as and --out go with 'convert', not with 'deepvit_s'"),
    ],
)
def test_what_cannot_be_converted(vitx: Vitx, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = vitx("models", *arguments)
    assert code == 2
    assert message in err


def test_another_architecture_leaves_no_file(vitx: Vitx, tmp_path: Path) -> None:
    torch.save(timm.create_model("deit_digits").state_dict(), tmp_path / "public.pth")
    code, _, err = vitx("models", "convert", tmp_path / "public.pth", "--as", "deepvit_digits")
    assert code == 2
    assert "is of another architecture" in err
    assert not (tmp_path / "public.safetensors").exists()
