"""The named networks: sizes, timm's interface, tracing, compilation, DDP."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay
from torch.nn.parallel import DistributedDataParallel

import vitx.models
from reference import randomize

NAMES = timm.list_models(module="registry")


def on_meta(name: str, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("deepvit_16b", 24.427),
        ("deepvit_24b", 36.261),
        ("deepvit_32b", 48.096),
        ("deepvit_s", 27.313),
        ("deepvit_l", 58.884),
        ("deepvit_l_384", 59.043),
        ("deit_tiny_12_talking", 5.911),
        ("deit_small_12_talking", 22.437),
        ("deit_base_12_talking", 87.340),
        ("deit_small_24_talking", 43.731),
        ("deit_base_24_talking", 172.398),
        ("deit_large_24_talking", 305.364),
        ("alternet_50", 35.915),
    ],
)
def test_parameter_counts(name: str, millions: float) -> None:
    """The DeiT sizes of docs/maths.md §3.4 are those with talking heads and the extra patch head."""
    model = on_meta(name, **({"patch_head": True} if name.startswith("deit") else {}))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_plain_deit_is_timms_deit(size: str) -> None:
    ours, theirs = on_meta(f"deit_{size}_12"), on_meta(f"deit_{size}_patch16_224")
    shapes = [{key: tuple(value.shape) for key, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_plain_deit_computes_what_timms_does() -> None:
    size: dict[str, Any] = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
    ours = timm.create_model("deit_tiny_12", **size).eval()
    theirs = timm.create_model("deit_tiny_patch16_224", **size).eval()
    randomize(theirs)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))


def test_every_name_is_complete() -> None:
    assert len(NAMES) == 94
    for name in NAMES:
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None
        assert cfg.interpolation == "bicubic"
        assert len(cfg.mean) == len(cfg.std) == 3
        assert name in vitx.models.registry.__all__  # type: ignore[attr-defined]  # timm adds it
        assert timm.model_entrypoint(name).__doc__


def test_names_are_listed_by_timm() -> None:
    assert timm.list_models("deepvit*") == sorted(
        ["deepvit_16b", "deepvit_24b", "deepvit_32b", "deepvit_s", "deepvit_l", "deepvit_l_384", "deepvit_digits"]
    )


SMALL: dict[str, dict[str, Any]] = {
    "deit_tiny_12": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "deit_tiny_12_talking": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "attnscale_small_12": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "featscale_small_12": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "attnscale_cait_s24_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "featscale_cait_s24_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "deit_tiny_neutreno_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "deepvit_16b": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "deepvit_s": {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "attention": ["plain", "re-attention"],
    },
    "alternet_18_cifar": {"head_dim": 8},
}


# Between them every attention, embedding and unit: deepvit_s has blocks with plain attention and with Re-Attention.
TRACED = (
    *("deit_tiny_12_talking", "attnscale_small_12", "featscale_small_12", "deit_tiny_neutreno_patch16_224"),
    *("deepvit_s", "alternet_18_cifar", "attnscale_cait_s24_224", "featscale_cait_s24_224"),
)


def small(name: str, **kwargs: Any) -> Any:
    return timm.create_model(name, num_classes=5, **{**SMALL[name], **kwargs})


@pytest.mark.parametrize("name", TRACED)
def test_no_graph_breaks(name: str) -> None:
    model = randomize(small(name)).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), expected)
    compiled(images.requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", TRACED)
def test_torch_export_with_a_dynamic_batch(name: str) -> None:
    model = randomize(small(name)).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: torch.export.Dim("N")},))
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.parametrize("name", SMALL)
def test_training_reaches_every_parameter(name: str) -> None:
    model = small(name).train()
    model(torch.randn(4, 3, 32, 32)).logsumexp(-1).sum().backward()
    unreached = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not unreached


@pytest.mark.parametrize("name", SMALL)
def test_ddp_wraps(name: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(small(name))
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", SMALL)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    model = small(name).train()
    images = torch.randn(4, 3, 32, 32)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model(images).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("name", SMALL)
def test_features_only(name: str) -> None:
    model: Any = timm.create_model(name, features_only=True, out_indices=(0, 1), **SMALL[name]).eval()
    features = model(torch.randn(2, 3, 32, 32))
    assert [feature.shape[1] for feature in features] == model.feature_info.channels()
    for feature, reduction in zip(features, model.feature_info.reduction(), strict=True):
        assert feature.shape[2:] == (32 // reduction, 32 // reduction)


@pytest.mark.parametrize("name", SMALL)
def test_layer_decay_groups(name: str) -> None:
    model = small(name)
    groups = param_groups_layer_decay(
        model,
        weight_decay=0.05,
        layer_decay=0.75,
        no_weight_decay_list=model.no_weight_decay(),
    )
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len({group["lr_scale"] for group in groups}) >= 3
    undecayed = {id(parameter) for group in groups if group["weight_decay"] == 0 for parameter in group["params"]}
    for key, parameter in model.named_parameters():
        if key.endswith(("pos_embed", "cls_token", "relative_position")):
            assert id(parameter) in undecayed


@pytest.mark.parametrize("name", SMALL)
def test_reset_classifier(name: str) -> None:
    model = small(name)
    model.reset_classifier(3)
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, model.num_features)


@pytest.mark.parametrize("name", ["deepvit_16b", "alternet_18_cifar"])
def test_hugging_face_folder_round_trip(name: str, tmp_path: Path) -> None:
    model = randomize(small(name)).eval()
    save_for_hf(model, str(tmp_path), model_args={**SMALL[name], "num_classes": 5})
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again(images), model(images))
