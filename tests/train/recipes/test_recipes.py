"""Every recipe trains: its own network, losses, mixing and schedule, at a size that a test can afford."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import vitx.models  # noqa: F401  # registers our networks with timm
from training_jobs import metrics_of
from vitx.core.run import RunFolder
from vitx.train import apply_overrides, train
from vitx.train.loop.network import build_network, model_spec
from vitx.train.recipes.registry import RECIPES, get_recipe

# Two patches a side are too few for a neighbourhood, four are enough for everything.
SMALL = {
    "vit": (
        "preprocessing.image_size=64",
        "model.kwargs.depth=2",
        "model.kwargs.embed_dim=48",
        "model.kwargs.num_heads=4",
    ),
    "digits": ("model.kwargs.depth=2",),
    "alternet": (
        "preprocessing.image_size=16",
        "model.kwargs.depths=[1,1,1,2]",
        "model.kwargs.attention_depths=[0,0,0,1]",
    ),
}


def small_settings(name: str) -> list[str]:
    kind = "alternet" if "alternet" in name else name.partition("-")[0]
    settings = list(SMALL.get(kind, SMALL["vit"]))
    if name.startswith(("deepvit", "digits-deepvit")):
        settings.append('model.kwargs.attention=["plain","re-attention"]')
    short = ("epochs=1", "stages=[]", "losses.attention_pairs=0", "schedule.cooldown_epochs=0", "schedule.min_lr=0")
    return [*settings, *short, "batch_size=6", "workers=0", "model.initial_checkpoint="]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_steps_on_a_small_network(name: str, image_folder: Path, tmp_path: Path) -> None:
    """Three steps: after one, a warm-up that begins at zero would have moved nothing."""
    recipe = apply_overrides(get_recipe(name).on_data(str(image_folder)), small_settings(name))
    train(recipe, tmp_path / "run", device="cpu", quiet=True)
    [row] = metrics_of(tmp_path / "run")
    wanted = {key for key in ("cosine", "contrastive", "mixing", "attention") if getattr(recipe.losses, key)}
    assert row["losses"].keys() == {"classification", "total", *wanted}
    assert all(torch.isfinite(torch.tensor(list(row["losses"].values()))))
    run = RunFolder.open(tmp_path / "run")
    assert run.info.model.name == recipe.model.name
    folder, state = run.checkpoint("last")
    assert state.step == 3
    weights, average = (load_file(folder / f"{name}.safetensors") for name in ("model", "ema"))
    assert any(not torch.equal(weights[key], average[key]) for key in weights), "no weight has moved"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_a_network_that_exists_with_the_arguments_it_takes(name: str) -> None:
    """At full size on the meta device: the arguments and the losses fit the network."""
    recipe = get_recipe(name)
    with torch.device("meta"):
        model = build_network(recipe, model_spec(recipe, 1000))
    config = timm.get_pretrained_cfg(recipe.model.name)
    assert config is not None
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e5
    if not name.startswith("digits") and not recipe.model.initial_checkpoint:
        assert recipe.preprocessing.image_size == config.input_size[-1]
