"""DeepViT beside its authors' code: logits, maps, regulariser and gradients of the same weights. No speed.

    python benchmarks/models/against_authors.py --dvit CHECKOUT [--pixels 64] [--json FILE]

CHECKOUT is a checkout of github.com/zhoudaquan/dvit_repo, whose `models` and `loss` are loaded as they are, beside the
installed timm. Of each network, in training mode and float64, on two images of noise with soft labels: the largest
difference of the logits and of the maps that meet V; of the loss with the regulariser (0.1 × the mean cosine, over
heads, of the first two pairs of maps); and, relative to its length, of the gradient of all parameters together, of the
regulariser's alone too.
"""

import importlib.util
import subprocess
import sys
import warnings
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional

import vitx.models  # noqa: F401  # registers the networks

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import all_hold, at_least, command_line, exit_code, report_header, save_report, verdict
from vitx.core.errors import InputError
from vitx.models.attention_maps import attention_maps
from vitx.models.similarity import map_similarity

TARGET = 1e-6
WEIGHT, PAIRS, CLASSES = 0.1, 2, 10
# Our names, theirs.
NETWORKS = {
    "deepvit_16b": "deepvit_patch16_224_re_attn_16b",
    "deepvit_24b": "deepvit_patch16_224_re_attn_24b",
    "deepvit_32b": "deepvit_patch16_224_re_attn_32b",
    "deepvit_s": "deepvit_S",
    "deepvit_l": "deepvit_L",
}


def package(folder: Path, name: str) -> ModuleType:
    """A package of the checkout under a name of its own: its neighbours, an old timm among them, are not imported."""
    found = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they import timm by the names it had
        found.loader.exec_module(module)
    return module


def gradient(model: Any, loss: Tensor) -> Tensor:
    """Of all parameters as one vector, by the parameters' names."""
    parameters = dict(sorted(model.named_parameters()))
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    return torch.cat([torch.zeros_like(one).flatten() if each is None else each.flatten()
                      for one, each in zip(parameters.values(), found, strict=True)])  # fmt: skip


def ours(model: Any, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    with ExitStack() as watched:
        maps = watched.enter_context(attention_maps(model, of=lambda found: found, stage="mixed"))
        return model(images), list(maps.values())


def differences(mine: str, theirs: Any, criterion: Any, pixels: int) -> dict[str, Any]:
    torch.manual_seed(0)
    other = theirs(img_size=pixels, num_classes=CLASSES, cos_reg=True).double().train()
    model: Any = timm.create_model(mine, img_size=pixels, num_classes=CLASSES).double().train()
    model.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, pixels, pixels, dtype=torch.float64)
    labels = torch.rand(2, CLASSES, dtype=torch.float64).softmax(dim=1)
    expected, expected_maps = other(images)
    found, maps = ours(model, images)
    compared = list(pairwise(maps))[:PAIRS]
    regulariser = torch.stack([map_similarity(first, second, "heads") for first, second in compared]).mean()
    loss = functional.cross_entropy(found, labels) + WEIGHT * regulariser
    expected_loss = criterion(expected, labels, expected_maps)
    alone = (expected_loss - functional.cross_entropy(expected, labels)) / WEIGHT
    pairs = {
        "gradient": (gradient(model, loss), gradient(other, expected_loss)),
        "gradient_of_the_regulariser": (gradient(model, regulariser), gradient(other, alone)),
    }
    with torch.no_grad():
        row: dict[str, Any] = {
            "logits": float((found - expected).abs().max()),
            "maps": max(float((one - two).abs().max()) for one, two in zip(maps, expected_maps, strict=True)),
            "loss": float((loss - expected_loss).abs()),
            "regulariser": float((regulariser - alone).abs()),
            **{name: float((one - two).norm() / two.norm()) for name, (one, two) in pairs.items()},
        }
    return {**row, "value": regulariser.item(), "holds": max(row.values()) <= TARGET}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--dvit", type=Path, required=True)
    parser.add_argument("--pixels", type=at_least(1), default=64)
    arguments = parser.parse_args()
    if not all((arguments.dvit / name / "__init__.py").is_file() for name in ("models", "loss")):
        raise InputError(
            f"{arguments.dvit} is no checkout of github.com/zhoudaquan/dvit_repo: no models and loss in it"
        )
    report: dict[str, Any] = report_header()
    commit = ["git", "-C", str(arguments.dvit), "rev-parse", "HEAD"]
    report["dvit_repo"] = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    models = package(arguments.dvit / "models", "dvit_models")
    criterion = package(arguments.dvit / "loss", "dvit_loss").SoftTargetCrossEntropyCosReg(n_comn=PAIRS)
    for mine, theirs in NETWORKS.items():
        report[mine] = found = differences(mine, getattr(models, theirs), criterion, arguments.pixels)
        print(f"{mine}: {found} {verdict(found)}", flush=True)
    save_report(report, arguments.json, "python benchmarks/models/against_authors.py --dvit CHECKOUT")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
