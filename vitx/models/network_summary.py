"""A network in numbers: parameters, multiply-accumulates, tokens; built on the meta device, so without weights.

`python -m vitx.models.network_summary > vitx/models/zoo.json` writes the table that `vitx models` shows without
importing PyTorch; a test compares every entry with what this module computes.
"""

import itertools
import json
from typing import Any

import timm
import torch
from timm.models.cait import Cait
from torch import nn

from vitx.core.errors import unknown_name
from vitx.core.files import Record
from vitx.models import registry
from vitx.models.build import require_network
from vitx.models.flops import count_flops
from vitx.models.vit import VisionTransformer


class NetworkSummary(Record):
    """What `vitx models` shows. GMACs are of one image: 10⁹ multiply-accumulates in products and convolutions."""

    name: str
    what: str
    parameters: int
    gmacs: float
    tokens: int | None
    image_size: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_fraction: float
    interpolation: str
    blocks: str


def vitx_networks() -> list[str]:
    """The names vitx registers with timm."""
    return list(timm.list_models(module=registry.__name__.rpartition(".")[2]))


def summarize(name: str) -> NetworkSummary:
    """Return the numbers of a network timm knows; raise InputError for a name it does not."""
    if not timm.is_model(name):
        raise unknown_name("model", name, vitx_networks())
    require_network(name)  # its tag
    with torch.device("meta"):
        model: Any = timm.create_model(name).eval()
    config = model.pretrained_cfg
    image = torch.empty(1, *config["input_size"], device="meta")
    return NetworkSummary(
        name=name,
        what=(timm.model_entrypoint(name).__doc__ or "").strip().partition("\n")[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=round(count_flops(model, image) / 2e9, 4),
        tokens=model.pos_embed.shape[1] if isinstance(getattr(model, "pos_embed", None), nn.Parameter) else None,
        image_size=config["input_size"][1],
        classes=model.num_classes,
        mean=config["mean"],
        std=config["std"],
        crop_fraction=config["crop_pct"],
        interpolation=config["interpolation"],
        blocks=_blocks(model),
    )


def _blocks(model: nn.Module) -> str:
    """The attention of each block of a ViT or CaiT, or each unit's class of an AlterNet: "11 × PlainAttention, …"."""
    if isinstance(model, VisionTransformer | Cait):
        kinds = [type(block.attn).__name__ for block in model.blocks]
    else:
        kinds = [type(unit).__name__ for stage in getattr(model, "stages", ()) for unit in stage.children()]
    return ", ".join(f"{len(list(run))} × {kind}" for kind, run in itertools.groupby(kinds))


if __name__ == "__main__":
    print(json.dumps([summarize(network).model_dump(mode="json") for network in vitx_networks()], indent=1))
