"""A network in timm's layout: plain timm loads it in a process without vitx, and gives the network's logits."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from bundle_fixture import write_bundle
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.run import ModelSpec
from vitx.export import SourceRequest, hub
from vitx.export.hub import check_hub_folder, write_hub_folder
from vitx.export.hub_card import TimmForm
from vitx.models import build, image_tensor

PLAIN = (
    "model:deit_digits?depth=2&patch_head=True&drop_path_rate=0.1&weight_init=jax",
    "model:deit_tiny_12?depth=1&img_size=48&patch_size=12&embed_dim=24&global_pool=avg&init_values=0.5",
    "model:timm/deit3_small_patch16_224?depth=1&embed_dim=24&num_heads=2&img_size=32",
)
# What the model card says, without vitx on its path.
READER = """
import json, re, sys, timm, torch
from PIL import Image
answers = []
images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
for folder in sys.argv[2:]:
    card = {}
    code = re.search("```python\\n(.*?)```", open(folder + "/README.md").read(), re.DOTALL)[1]
    exec(code.replace("FOLDER", folder), card)
    model, size = card["model"], timm.data.resolve_model_data_config(card["model"])["input_size"][1]
    with torch.inference_mode():
        logits = model(images[..., :size, :size]).tolist()
    picture = torch.arange(60 * 70 * 3, dtype=torch.uint8).reshape(60, 70, 3).numpy()
    pixels = card["transform"](Image.fromarray(picture))
    answers.append([logits, pixels.tolist()])
assert not any(name.startswith("vitx") for name in sys.modules)
json.dump(answers, open(sys.argv[1], "w"))
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx")


def write_folder(request: SourceRequest, bundle: Bundle, out: Path) -> Path:
    """The folder of `bundle` as if it had been exported from `request`."""
    weights = {"checkpoint_sha256": request.load().checkpoint_sha256}
    provenance = bundle.manifest.provenance.model_copy(update=weights)
    return write_hub_folder(
        request, Bundle(bundle.path, bundle.manifest.model_copy(update={"provenance": provenance})), out
    )


def test_plain_timm_gives_the_logits_of_a_plain_vit(tmp_path: Path, bundle: Bundle) -> None:
    sources, folders = [], []
    for number, target in enumerate(PLAIN):
        request = SourceRequest(target, weights="random")
        sources.append(request.load())
        folders.append(write_folder(request, bundle, tmp_path / str(number)))
    command = [sys.executable, "-c", READER, str(tmp_path / "logits.json"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    picture = Image.fromarray(torch.arange(60 * 70 * 3, dtype=torch.uint8).reshape(60, 70, 3).numpy())
    for source, (logits, pixels) in zip(sources, json.loads((tmp_path / "logits.json").read_text()), strict=True):
        size, prepared = source.preprocessing.image_size, source.preprocessing
        with torch.inference_mode():
            own = source.model(images[..., :size, :size]).numpy()
        np.testing.assert_allclose(logits, own, rtol=1e-5, atol=1e-6)
        # The card's transform, which timm makes of the folder, is ours and no published network's.
        expected = image_tensor(np.stack([prepared.apply(picture)]), prepared.mean, prepared.std)[0]
        np.testing.assert_allclose(pixels, expected.numpy(), atol=1e-5)
    card = (folders[0] / "README.md").read_text()
    assert "import vitx" not in card
    assert "Nothing: the bundle was exported without a certificate." in card


def test_what_timms_plain_vit_does_not_have_keeps_its_network(tmp_path: Path, bundle: Bundle) -> None:
    for method in ("attention=attn-scale", "feat_scale=true", "contranorm_scale=0.2", "patch_embedding=cnn"):
        request = SourceRequest(f"model:deit_digits?depth=1&{method}", weights="random")
        config = json.loads((write_folder(request, bundle, tmp_path / method) / "config.json").read_text())
        assert config["architecture"] == "deit_digits"


def test_a_network_of_ours_names_what_has_to_be_imported(tmp_path: Path, tiny_bundle: Bundle) -> None:
    request = SourceRequest("model:deepvit_digits?depth=2&attention=re-attention", weights="random")
    folder = write_folder(request, tiny_bundle, tmp_path / "hub")
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    assert "import vitx.models  # of vitx: registers the network with timm" in card
    assert config["architecture"] == "deepvit_digits"
    assert config["model_args"] == {"depth": 2, "attention": "re-attention"}
    assert "95 % interval" in card
    assert "| ONNX graph against these weights | pass: " in card
    write_folder(request, tiny_bundle, folder)  # in the place of the older one


def test_a_network_whose_layers_share_weights_is_written_whole(tmp_path: Path, bundle: Bundle) -> None:
    arguments = "img_size=32&embed_dims=[8,8,8,8]&serial_depths=[2,1,1,1]"
    request = SourceRequest(f"model:timm/coat_lite_tiny?{arguments}", weights="random")
    state = request.load().model.state_dict()
    assert len({value.data_ptr() for value in state.values()}) < len(state)
    written = load_file(write_folder(request, bundle, tmp_path / "hub") / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[key], value) for key, value in state.items())


def test_a_full_disk_is_told_as_such(tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(build, "save_file", fails)
    with pytest.raises(OSError, match="No space left on device"):
        write_folder(SourceRequest("model:deit_digits", weights="random"), bundle, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_what_timm_would_compute_otherwise_is_not_written(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SourceRequest("model:deit_digits?depth=1", weights="random")
    monkeypatch.setattr(hub, "PLAIN_VIT", "deit3_small_patch16_224")  # no class token's position: other tensors
    with pytest.raises(CheckFailed, match="timm's 'deit3_small_patch16_224' cannot be 'model:deit_digits"):
        write_folder(request, bundle, tmp_path / "hub")
    source = request.load()
    other = TimmForm("deit_digits", {"depth": 1, "residual_scale": 2.0}, ())
    assert source.spec == ModelSpec(name="deit_digits", num_classes=10, kwargs={"depth": 1})
    with pytest.raises(CheckFailed, match=r"gives other logits than 'model:deit_digits.*\(relative error "):
        hub._require_equal(source, other, dict(source.model.state_dict()))
    assert not (tmp_path / "hub").exists()


def test_weights_that_are_no_longer_the_bundle_s_are_not_written(tmp_path: Path, bundle: Bundle) -> None:
    """A run in training may have a better checkpoint by now, and the card would praise it with the bundle's numbers."""
    with pytest.raises(
        CheckFailed, match=r"the weights of 'model:deit_digits.* \(random\) changed while they were exp"
    ):
        write_hub_folder(SourceRequest("model:deit_digits?depth=1", weights="random"), bundle, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_folder_that_holds_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    check_hub_folder(tmp_path / "letters")
    (tmp_path / "letters" / "a.txt").touch()
    for path in (tmp_path / "letters", tmp_path / "letters" / "a.txt"):
        with pytest.raises(InputError, match=r"exists and holds no config\.json: choose another folder"):
            check_hub_folder(path)
    with pytest.raises(InputError, match=r"a\.txt/network' cannot be a folder: '.*a\.txt' is none"):
        check_hub_folder(tmp_path / "letters" / "a.txt" / "network")
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "network" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "network" / name).touch()
    check_hub_folder(tmp_path / "network")
    (tmp_path / "network" / ".git").mkdir()
    with pytest.raises(InputError, match=r"network is replaced whole, and holds \.git too: choose another folder"):
        check_hub_folder(tmp_path / "network")
