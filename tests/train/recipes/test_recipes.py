"""Every recipe trains: its own network, losses, mixing and schedule, at a size that a test can afford."""

import inspect
import json
import shlex
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import vitx.models  # noqa: F401  # registers our networks with timm
from cli_fixture import Vitx
from training_jobs import metrics_of
from vitx.core.run import RunFolder
from vitx.train.loop.network import build_network, model_spec
from vitx.train.recipes.recipe import read_recipe
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
    recipe = get_recipe(name)
    if recipe.losses.attention_pairs:
        settings.append("losses.attention_pairs=1")
    if recipe.schedule.cooldown_epochs:
        settings.append("schedule.cooldown_epochs=0.3")
    if recipe.stages:
        earlier = [{"until": 1, "drop_path_rate": stage.drop_path_rate} for stage in recipe.stages]
        settings.append(f"stages={json.dumps(earlier)}")
    settings += [f"epochs={1 + len(recipe.stages)}", "batch_size=6", "workers=0", "schedule.min_lr=0"]
    return [*settings, "model.initial_checkpoint="]


def printed_command(name: str, images: Path) -> list[str]:
    """The words after `vitx` of the docstring's command, on these images, without the weights that it begins with."""
    [line] = [
        line for line in (inspect.getdoc(RECIPES[name]) or "").splitlines() if line.startswith("Command: vitx train")
    ]
    words = shlex.split(line.partition(" --set")[0].partition(" (")[0])[2:]
    return [str(images) if word in ("IMAGENET", "FOLDER") else word for word in words]


@pytest.mark.parametrize("name", RECIPES)
def test_the_printed_command_takes_steps_on_a_small_network(
    name: str, image_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    """Three steps of each stage: after one, a warm-up that begins at zero would have moved nothing."""
    settings = [word for setting in small_settings(name) for word in ("--set", setting)]
    command = printed_command(name, image_folder)
    data = () if "--data" in command else ("--data", image_folder)
    code, _, said = vitx(*command, *data, *settings, "--out", tmp_path / "run", "--device", "cpu", "--quiet")
    assert code == 0, said
    recipe = read_recipe(tmp_path / "run")
    assert len(recipe.stages) == len(get_recipe(name).stages)
    assert bool(recipe.losses.attention_pairs) == bool(get_recipe(name).losses.attention_pairs)
    row = metrics_of(tmp_path / "run")[-1]
    wanted = {key for key in ("cosine", "contrastive", "mixing", "attention") if getattr(recipe.losses, key)}
    assert row["losses"].keys() == {"classification", "total", *wanted}
    assert all(torch.isfinite(torch.tensor(list(row["losses"].values()))))
    run = RunFolder.open(tmp_path / "run")
    assert run.info.model.name == recipe.model.name
    folder, state = run.checkpoint("last")
    assert state.step == 3 * recipe.epochs
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
