"""The network of a recipe: its arguments, its initial weights, and how it is executed."""

from pathlib import Path

import timm
import torch
from timm.layers import DropPath
from torch import nn

from vitx.core.console import log
from vitx.core.errors import UNUSABLE, EnvironmentMissing, InputError, first_line
from vitx.core.run import ModelSpec, RunFolder, weights_file
from vitx.models import build_model
from vitx.models.build import require_network
from vitx.models.public_checkpoint import load_public_checkpoint, published_model
from vitx.train.loop.distributed.synchronized_norm import synchronize_batch_norm
from vitx.train.losses.objective import check_model
from vitx.train.recipes.optimization_settings import Execution
from vitx.train.recipes.recipe import Recipe

# The value of `model.initial_checkpoint` that asks for the weights timm publishes for `model.name`.
PRETRAINED = "timm"


def model_spec(recipe: Recipe, num_classes: int) -> ModelSpec:
    """The recipe's network with the arguments that follow from the data, the image size and the losses."""
    kwargs = dict(recipe.model.kwargs)
    require_network(recipe.model.name)
    config = timm.get_pretrained_cfg(recipe.model.name)
    if config is not None and config.fixed_input_size:  # learned positions; a ResNet takes no img_size
        kwargs["img_size"] = recipe.preprocessing.image_size
    if recipe.losses.mixing:
        kwargs["patch_head"] = True  # the linear head g of docs/maths.md §2.3
    return ModelSpec(name=recipe.model.name, num_classes=num_classes, kwargs=kwargs)


def build_network(recipe: Recipe, spec: ModelSpec) -> nn.Module:
    """Build the network with random weights; raise InputError if the recipe's images or losses do not fit."""
    refused: InputError | None = None
    try:
        model = build_model(spec)
    except InputError as error:
        refused = error
    if refused:
        # A network without a patch head refuses the argument: then name the loss that needs it. Not while the error is
        # handled: of an argument that is given twice CPython 3.11 would then say nothing but its name.
        kwargs = {name: value for name, value in spec.kwargs.items() if name != "patch_head"}
        check_model(recipe, build_model(spec.model_copy(update={"kwargs": kwargs})))
        raise refused
    check_model(recipe, model)
    _check_forward(model, spec.name, recipe.preprocessing.image_size)
    return model


def _check_forward(model: nn.Module, name: str, size: int) -> None:
    """Raise InputError for a network that cannot take images of `size`, which not every constructor looks at."""
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size))
    except UNUSABLE as error:
        raise InputError(f"model '{name}' fails on an image of {size} px: {first_line(error)}") from None
    model.train()


def drop_path_rates(model: nn.Module) -> dict[DropPath, float]:
    """The probability with which each residual branch is dropped."""
    return {module: module.drop_prob for module in model.modules() if isinstance(module, DropPath)}


def load_initial_weights(model: nn.Module, spec: ModelSpec, source: str, *, quiet: bool) -> None:
    """Load initial weights: of a run (the averaged weights of its best epoch), of a file, or timm's ("timm").

    Position embeddings of another image size are interpolated; a classifier of other classes keeps its random weights,
    and AttnScale and FeatScale begin from a plain network without change.
    Raises InputError when there is no such checkpoint, or it is of another architecture.
    """
    if source == PRETRAINED:
        remedy = f"give weights of '{spec.name}' with --from FILE, or begin without any"
        published = published_model(spec, remedy)
        model.load_state_dict(published.state_dict())
        return
    path = Path(source)
    if path.is_dir():
        run = RunFolder.open(path)
        _require_same_heads(model, run)
        folder, state = run.checkpoint("best")
        path = folder / weights_file("best", state)
    for line in load_public_checkpoint(model, path, to_train=True).lines():
        log(f"initial weights: {line}", quiet=quiet)


def _require_same_heads(model: nn.Module, run: RunFolder) -> None:
    """Raise InputError for other numbers of heads than the run's: the weights have one shape for any number."""
    with torch.device("meta"):  # without memory for weights
        trained = build_model(run.info.model)
    own, of_run = (
        {name: each.num_heads for name, each in network.named_modules() if hasattr(each, "num_heads")}
        for network in (model, trained)
    )
    for name, heads in own.items():
        if (needed := of_run.get(name, heads)) != heads:
            raise InputError(
                f"'{run.path}' was trained with attention of {needed} heads, and this network has {heads}: give it the "
                f"run's, as model.kwargs.num_heads={needed}"
            )


def apply_execution(
    model: nn.Module, name: str, execution: Execution, device: torch.device, *, processes: int
) -> nn.Module:
    """Apply the `execution` settings to the network and return it; raise InputError for one it does not support."""
    if execution.grad_checkpointing:
        _enable_grad_checkpointing(model, name)
    if execution.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if execution.sync_batch_norm and processes > 1:
        model = synchronize_batch_norm(model, device)
    if execution.compile:
        _require_compiler(device)
        # Block by block: equal blocks share one compilation.
        for part in getattr(model, "blocks", None) or [model]:
            part.compile()
    return model


def _require_compiler(device: torch.device) -> None:
    """Raise EnvironmentMissing where torch cannot compile: without a C++ compiler, or on a GPU without Triton."""
    smallest = nn.ReLU()
    smallest.compile()
    try:
        smallest(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise EnvironmentMissing(
            f"execution.compile: torch cannot compile for {device} here ({first_line(error)}): install what it lacks, "
            "or set execution.compile=false"
        ) from None


def _enable_grad_checkpointing(model: nn.Module, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError) as error:
        raise InputError(f"model '{name}' has no gradient checkpointing ({error}): leave it off") from None
