"""The network of a recipe: its arguments, its first weights, and what is switched on in it."""

from pathlib import Path

import timm
import torch
from torch import nn

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.run import ModelSpec, RunFolder
from vitx.models import build_model
from vitx.models.public_checkpoint import load_public_checkpoint
from vitx.train.loop.distributed.synchronized_norm import synchronize_batch_norm
from vitx.train.losses.objective import check_model
from vitx.train.recipes.optimizer_groups import Execution
from vitx.train.recipes.recipe import Recipe

# What `model.initial_checkpoint` is for the weights that timm publishes for `model.name`.
PRETRAINED = "timm"


def model_spec(recipe: Recipe, num_classes: int) -> ModelSpec:
    """The network of a recipe, with the arguments that follow from the data, the image size and the losses."""
    kwargs = dict(recipe.model.kwargs)
    config = timm.get_pretrained_cfg(recipe.model.name) if timm.is_model(recipe.model.name) else None
    if config is not None and config.fixed_input_size:
        kwargs["img_size"] = recipe.preprocessing.image_size
    if recipe.losses.mixing:
        kwargs["patch_head"] = True
    return ModelSpec(name=recipe.model.name, num_classes=num_classes, kwargs=kwargs)


def build_checked(recipe: Recipe, spec: ModelSpec) -> nn.Module:
    """Build the network with fresh weights; raise InputError when it cannot compute the recipe's losses."""
    try:
        model = build_model(spec)
    except InputError:
        # A network that has no patch head refuses the argument; name the loss that asked for it instead.
        kwargs = {name: value for name, value in spec.kwargs.items() if name != "patch_head"}
        check_model(recipe, build_model(spec.model_copy(update={"kwargs": kwargs})))
        raise
    check_model(recipe, model)
    return model


def load_initial_weights(model: nn.Module, spec: ModelSpec, source: str, *, quiet: bool) -> None:
    """Begin with the weights of a run (its best averaged ones), of a file, or with those timm publishes ("timm").

    Position embeddings of another image size are interpolated; a classifier of other classes stays as it is.
    Raises InputError when there is no such checkpoint or it is of another architecture.
    """
    if source == PRETRAINED:
        published = build_model(spec.model_copy(update={"kwargs": {**spec.kwargs, "pretrained": True}}))
        model.load_state_dict(published.state_dict())
        return
    path = Path(source)
    if path.is_dir():
        folder, _ = RunFolder.open(path).checkpoint("best")
        ema = folder / "ema.safetensors"
        path = ema if ema.is_file() else folder / "model.safetensors"
    for line in load_public_checkpoint(model, path).lines():
        log(f"initial weights: {line}", quiet=quiet)


def switch_on(model: nn.Module, name: str, execution: Execution, device: torch.device, *, processes: int) -> nn.Module:
    """Return the network as `execution` wants it trained; raise InputError for what this one does not offer."""
    if execution.grad_checkpointing:
        _checkpoint_gradients(model, name)
    if execution.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if execution.sync_batch_norm and processes > 1:
        model = synchronize_batch_norm(model, device)
    if execution.compile:
        for part in getattr(model, "blocks", None) or [model]:
            part.compile()
    return model


def _checkpoint_gradients(model: nn.Module, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError) as error:
        raise InputError(f"model '{name}' has no gradient checkpointing ({error}): leave it off") from None
