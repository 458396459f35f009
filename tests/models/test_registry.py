"""What every name is built with, written out again from the papers' tables: the 94 names without building one."""

import json
from importlib.resources import files
from typing import Any

import pytest
import timm
from timm.models.cait import Cait
from torch import nn

from vitx.models import registry
from vitx.models.alternet import AlterNet
from vitx.models.cait import AttnScaleTalkingHeadAttn, FeatScaleBlock
from vitx.models.network_summary import vitx_networks
from vitx.models.vit import VisionTransformer

HALF, IMAGENET = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ZOO = {entry["name"]: entry for entry in json.loads(files("vitx.models").joinpath("zoo.json").read_text())}
NEUTRENO = "deit_tiny_neutreno_patch16_224"  # Nguyen et al. train this size alone
Arguments = dict[str, Any]


def deit(name: str) -> tuple[Arguments, Arguments]:
    """Gong et al.: widths 192, 384, 768 and 1024 of heads of 64 channels."""
    _, size, depth, *options = name.split("_")
    width = {"tiny": 192, "small": 384, "base": 768, "large": 1024}[size]
    image = next((int(option) for option in options if option.isdigit()), 224)
    attention = "talking-heads" if "talking" in options else "plain"
    arguments = {"embed_dim": width, "num_heads": width // 64, "depth": int(depth), "attention": attention}
    cfg = {"mean_std": IMAGENET, "crop_pct": 0.875 if image == 224 else 1.0}
    return {**arguments, "img_size": image}, {**cfg, "image": image}


def anti_oversmoothing(name: str) -> tuple[Arguments, Arguments]:
    """Wang et al.: DeiT with one argument more, of 224 px."""
    method, rest = name.split("_", 1)
    arguments, cfg = deit(f"deit_{rest}")
    changed = {"attention": "attn-scale"} if method == "attnscale" else {"feat_scale": True}
    return {key: arguments[key] for key in ("embed_dim", "num_heads", "depth")} | changed, cfg


def anti_oversmoothing_cait(name: str) -> tuple[Arguments, Arguments]:
    """Wang et al.: timm's cait_s24_224 with one layer of another kind."""
    arguments: Arguments = {"embed_dim": 384, "depth": 24, "num_heads": 8, "init_values": 1e-5}
    of_attention = name.startswith("attnscale")
    changed: Arguments = {"attn_block": AttnScaleTalkingHeadAttn} if of_attention else {"block_layers": FeatScaleBlock}
    return arguments | changed, {"image": 224, "mean_std": IMAGENET, "crop_pct": 0.875}


def deepvit(name: str) -> tuple[Arguments, Arguments]:
    """Zhou et al., tables 5 and 8: 12 heads, an MLP of three times the width; -S and -L with the CNN embedding."""
    kind, size, *at_384 = name.split("_")
    image = 384 if at_384 else 224
    arguments: Arguments = {"num_heads": 12, "mlp_ratio": 3.0}
    if size in ("s", "l"):
        depth, width, mixed = (16, 396, 5) if size == "s" else (32, 420, 12)
        arguments |= {"depth": depth, "embed_dim": width, "patch_embedding": "cnn", "residual_scale": 0.5}
        arguments |= {"reatten_scale": (396 / 12) ** -0.5} if size == "s" else {}
        if kind == "deepvit":
            arguments["attention"] = ["plain"] * (depth - mixed) + ["re-attention"] * mixed
    else:
        arguments |= {"depth": int(size.removesuffix("b")), "embed_dim": 384}
        arguments |= {"attention": "re-attention"} if kind == "deepvit" else {}
    arguments |= {"img_size": 384} if at_384 else {}
    first = "patch_embed.conv1" if size in ("s", "l") else "patch_embed.proj"
    return arguments, {"image": image, "mean_std": HALF, "crop_pct": 1.0 if at_384 else 0.9, "first_conv": first}


def alternet(name: str) -> tuple[Arguments, Arguments]:
    """Park & Kim: ResNet's units, of which so many a stage are attention, from stage to stage."""
    _, depth, *cifar = name.split("_")
    units = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 4), "50": (3, 4, 6, 4), "101": (3, 4, 23, 4), "152": (3, 8, 36, 4)}
    arguments: Arguments = {"unit": "basic" if int(depth) < 50 else "bottleneck", "depths": units[depth]}
    arguments["attention_depths"] = (0, 1, 1, 1) if depth == "18" else (0, 1, 3, 2)
    cfg = {"mean_std": IMAGENET, "first_conv": "stem.0", "fixed_input_size": False}
    if cifar:
        arguments |= {"stem": "cifar", "window_size": 4, "num_classes": 100}
        return arguments, {**cfg, "image": 32, "classes": 100, "crop_pct": 1.0, "pool_size": (4, 4)}
    return arguments, {**cfg, "image": 224, "crop_pct": 0.875, "pool_size": (7, 7)}


def digits(name: str) -> tuple[Arguments, Arguments]:
    arguments: Arguments = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 6, "num_heads": 4}
    arguments |= {"mlp_ratio": 3.0, "num_classes": 10}
    if name.startswith("deepvit"):
        arguments["attention"] = ["plain"] * 3 + ["re-attention"] * 3
    return arguments, {"image": 32, "classes": 10, "mean_std": HALF, "crop_pct": 1.0}


def by_hand(name: str) -> tuple[Arguments, Arguments]:
    if name.endswith("_digits"):
        return digits(name)
    if name == NEUTRENO:
        arguments, cfg = deit("deit_tiny_12")
        del arguments["img_size"]
        return {**arguments, "attention": "neutreno"}, cfg
    if "_cait_" in name:
        return anti_oversmoothing_cait(name)
    family = {"deit": deit, "deepvit": deepvit, "plainvit": deepvit, "alternet": alternet}
    return family.get(name.split("_")[0], anti_oversmoothing)(name)


def names_by_hand() -> set[str]:
    deits = {f"deit_{size}_{depth}" for size in ("tiny", "small", "base") for depth in (12, 24, 48)} | {"deit_large_24"}
    names = {f"{name}{kind}{size}" for name in deits for kind in ("", "_talking") for size in ("", "_384", "_512")}
    names |= {f"{kind}_{size}" for kind in ("deepvit", "plainvit") for size in ("16b", "24b", "32b", "s", "l")}
    names |= {
        f"{kind}_{size}_{depth}"
        for kind in ("attnscale", "featscale")
        for size in ("small", "base")
        for depth in (12, 24)
    }
    names |= {"attnscale_cait_s24_224", "featscale_cait_s24_224"}
    names |= {f"alternet_{depth}{end}" for depth in (18, 34, 50, 101, 152) for end in ("", "_cifar")}
    return names | {"deepvit_l_384", "deit_digits", "deepvit_digits", NEUTRENO}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[nn.Module], str, bool, Arguments]]:
    """What would be built, in place of a network."""
    seen: list[tuple[type[nn.Module], str, bool, Arguments]] = []

    def build(network: type[nn.Module], name: str, pretrained: bool, **arguments: Any) -> nn.Module:
        seen.append((network, name, pretrained, arguments))
        return nn.Identity()

    monkeypatch.setattr(registry, "build_model_with_cfg", build)
    return seen


def test_the_names() -> None:
    assert set(vitx_networks()) == names_by_hand()


@pytest.mark.parametrize("name", sorted(names_by_hand()))
def test_the_arguments_and_the_configuration_of_a_name(name: str, built: list[Any]) -> None:
    create = timm.model_entrypoint(name)
    create()
    create(pretrained=True, depth=3, num_classes=7)
    (network, of, pretrained, arguments), (*_, asked, others) = built
    kind = AlterNet if name.startswith("alternet") else Cait if "_cait_" in name else VisionTransformer
    assert (network, of, pretrained, asked) == (kind, name, False, True)
    vit = network is VisionTransformer
    read = arguments.pop("pretrained_filter_fn")
    assert getattr(read, "__name__", None) == ("checkpoint_filter_fn" if vit else None)
    indices = {"out_indices": (0, 1, 2, 3) if network is AlterNet else 3, "feature_cls": "getter"}
    assert arguments.pop("feature_cfg") == indices
    expected, cfg = by_hand(name)
    assert arguments == expected
    assert (others["depth"], others["num_classes"]) == (3, 7)
    found = timm.get_pretrained_cfg(name)
    assert found is not None
    assert found.architecture == create.__name__ == name
    assert (found.mean, found.std) == cfg["mean_std"]
    assert (found.crop_pct, found.interpolation, found.license) == (cfg["crop_pct"], "bicubic", "apache-2.0")
    assert (found.input_size, found.pool_size) == ((3, cfg["image"], cfg["image"]), cfg.get("pool_size"))
    assert (found.num_classes, found.fixed_input_size) == (cfg.get("classes", 1000), cfg.get("fixed_input_size", True))
    assert (found.first_conv, found.classifier) == (cfg.get("first_conv", "patch_embed.proj"), "head")
    zoo = ZOO[name]
    assert (create.__doc__, found.crop_pct, found.num_classes) == (zoo["what"], zoo["crop_fraction"], zoo["classes"])
    assert ([*found.mean], [*found.std], found.input_size[1]) == (zoo["mean"], zoo["std"], zoo["image_size"])
