"""Where a network comes from: a run's checkpoint, or a name timm knows with weights of a file, published or random."""

import hashlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import EnvironmentMissing, InputError, unknown_name
from vitx.core.preprocess import Preprocessing
from vitx.core.run import Checkpoint, ModelSpec, RunFolder
from vitx.data.open import open_images
from vitx.models import build_model, load_public_checkpoint, load_run_model

PREFIX = "model:"


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Everything a bundle states about its network, without the network."""

    name: str
    spec: ModelSpec
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    data: str
    checkpoint: str
    checkpoint_sha256: str
    recipe: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source(SourceInfo):
    """A network in evaluation mode and everything a bundle states about it."""

    model: nn.Module

    def info(self) -> SourceInfo:
        """The same without the network: what another process needs to know of it."""
        return SourceInfo(**{field.name: getattr(self, field.name) for field in fields(SourceInfo)})


@dataclass(frozen=True)
class SourceRequest:
    """How to load a source: `RUN`, `model:NAME` or `model:timm/NAME`. It is picklable, to load in another process.

    which: the run's checkpoint. weights: of a `model:`, a checkpoint file, "pretrained" (timm's) or "random" (seed 0).
    data: the image set whose classes a `model:` gets; without one they are numbered.
    """

    target: str
    which: Checkpoint = "best"
    weights: str = "pretrained"
    data: str | None = None

    def require_known(self) -> None:
        """Raise InputError for an unknown name or a folder that is no run, without loading anything."""
        if not self.is_model:
            RunFolder.open(self.target)
        elif not timm.is_model(self.network):
            raise unknown_name("model", self.network, timm.list_models())

    @property
    def is_model(self) -> bool:
        """A network of its own, not a run."""
        return self.target.startswith(PREFIX)

    @property
    def network(self) -> str:
        """timm's name of a `model:`."""
        return self.target.removeprefix(PREFIX).removeprefix("timm/")

    def load(self) -> Source:
        """Build the network with its weights.

        Raises InputError for an unknown name, an unreadable run, and weights that are unreadable or not finite;
        EnvironmentMissing when published weights cannot be downloaded.
        """
        self.require_known()
        if self.is_model:
            source = _source_from_model(self)
        else:
            source = _source_from_run(RunFolder.open(self.target), self.which)
        _require_finite(source)
        return source


def untrained_norms(model: nn.Module) -> list[str]:
    """The names of BatchNorm layers that never saw a batch: their statistics are the initial zeros and ones."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None and not module.num_batches_tracked
    ]


def _require_finite(source: Source) -> None:
    for name, tensor in source.model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise InputError(
                f"the weights of '{source.name}' are not finite: '{name}' has {count} NaN or infinite of "
                f"{tensor.numel()} values; take another checkpoint"
            )


def _source_from_run(run: RunFolder, which: Checkpoint) -> Source:
    model, state = load_run_model(run, which)
    info = run.info
    weights = "ema.safetensors" if "ema.safetensors" in state.sha256 else "model.safetensors"
    return Source(
        name=str(run.path),
        model=model,
        spec=info.model,
        class_names=info.class_names,
        preprocessing=info.preprocessing,
        data=info.data,
        checkpoint=which,
        checkpoint_sha256=state.sha256[weights],
        recipe=info.recipe,
        metrics=state.metrics,
    )


def _source_from_model(request: SourceRequest) -> Source:
    config = timm.get_pretrained_cfg(request.network)
    assert config is not None
    images = open_images(request.data, "val") if request.data else None
    class_names = tuple(images.class_names) if images else tuple(map(str, range(config.num_classes)))
    spec = ModelSpec(name=request.network, num_classes=len(class_names))
    model = _weighted(spec, request.weights).eval()
    return Source(
        name=request.target,
        model=model,
        spec=spec,
        class_names=class_names,
        preprocessing=preprocessing_of(config),
        data=request.data or "",
        checkpoint=request.weights,
        checkpoint_sha256=_weights_digest(model),
    )


def preprocessing_of(config: Any) -> Preprocessing:
    """timm's evaluation transform of a pretrained configuration; raise InputError for one that Preprocessing is not."""
    resolved = resolve_data_config(pretrained_cfg=config.to_dict())  # type: ignore[no-untyped-call]  # timm's
    channels, height, width = resolved["input_size"]
    if channels != 3 or height != width:
        name = f"{config.architecture}.{config.tag}".rstrip(".")
        raise InputError(f"{name} takes {channels} × {height} × {width} values: expected RGB and a square")
    return Preprocessing(
        image_size=height,
        crop_fraction=resolved["crop_pct"],
        crop_mode=resolved["crop_mode"],
        interpolation=resolved["interpolation"],
        mean=resolved["mean"],
        std=resolved["std"],
    )


def _weighted(spec: ModelSpec, weights: str) -> nn.Module:
    if weights == "pretrained":
        return _pretrained(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # "random" is the same network in every process
        model = build_model(spec)
    if weights != "random":
        load_public_checkpoint(model, Path(weights))
    return model


def _pretrained(spec: ModelSpec) -> nn.Module:
    remedy = f"give the weights of '{spec.name}' with --weights FILE, or say --weights random"
    try:
        model: nn.Module = timm.create_model(spec.name, pretrained=True, num_classes=spec.num_classes)
    except RuntimeError as error:
        raise InputError(f"timm knows no published weights: {remedy} ({_first_line(error)})") from None
    except OSError as error:
        raise EnvironmentMissing(f"published weights cannot be had here: {remedy} ({_first_line(error)})") from None
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _weights_digest(model: nn.Module) -> str:
    """sha256 over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}\0".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
