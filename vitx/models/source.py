"""Where a network comes from: a run's checkpoint, or a name timm knows with weights of a file, published or random."""

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import timm
import torch
from timm.data.config import resolve_data_config
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import UNUSABLE, CheckFailed, InputError
from vitx.core.options import Checkpoint
from vitx.core.preprocess import Preprocessing
from vitx.core.run import NOT_OF_THE_NETWORK, ModelSpec, RunFolder, weights_file
from vitx.data.open import open_images
from vitx.models import build_model, load_public_checkpoint, load_run_model
from vitx.models.build import require_network
from vitx.models.public_checkpoint import published_model

PREFIX = "model:"


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Everything a bundle states about its network, without the network.

    random: the entries of its classifier that no weights were given for, unless random ones were asked for.
    """

    name: str
    spec: ModelSpec
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    data: str
    checkpoint: str
    checkpoint_sha256: str
    recipe: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    random: tuple[str, ...] = ()

    @property
    def lacks(self) -> str:
        """That its classifier is random, if it is."""
        names, count = ", ".join(self.random), len(self.class_names)
        return names and f"'{self.name}' has no weights for {count} classes: {names} would stay random"


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

    A network's arguments stand behind its name, so that one text says which network it is, in a bundle's provenance
    too: `model:NAME?img_size=384&depth=6`; see `with_arguments`.
    which: the run's checkpoint. weights: of a `model:`, a checkpoint file, "pretrained" (timm's) or "random" (seed 0).
    data: the image set whose classes a `model:` gets; without one they are numbered.
    """

    target: str | Path
    which: Checkpoint = "best"
    weights: str = "pretrained"
    data: str | None = None

    def require_known(self) -> None:
        """Raise InputError for an unknown name or a folder that is no run, without loading anything."""
        if not self.is_model:
            RunFolder.open(self.target)
        else:
            require_network(self.network)
            _ = self.arguments

    def require_used(self, *others: "SourceRequest") -> None:
        """Raise InputError for weights where this and the others are runs, or a checkpoint where none is one.

        The others have the same: nothing would read them.
        """
        models = [request.is_model for request in (self, *others)]
        if self.which != "best" and all(models):
            raise InputError(f"--checkpoint {self.which} is of a run, and '{self.target}' is none: give --weights FILE")
        if self.weights != "pretrained" and not any(models):
            self.require_known()  # a network's name without `model:` is no run
            raise InputError(
                f"--weights {self.weights} is of a model:NAME, and '{self.target}' is a run: choose with --checkpoint"
            )

    @property
    def is_model(self) -> bool:
        """A network of its own, not a run."""
        return str(self.target).startswith(PREFIX)

    @property
    def network(self) -> str:
        """timm's name of a `model:`, with the tag of its published weights if one was given."""
        return str(self.target).partition("?")[0].removeprefix(PREFIX).removeprefix("timm/")

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a `model:`, what its constructor is given, as JSON has it; raise InputError for what it cannot be."""
        _, _, text = str(self.target).partition("?")
        return _parsed_arguments(self.network, [f"{key}={value}" for key, value in parse_qsl(text, True)])

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

    def load_again(self, digest: str) -> Source:
        """Load the weights of `digest` once more; raise CheckFailed where there are others by now."""
        source = self.load()
        if source.checkpoint_sha256 != digest:
            raise CheckFailed(
                f"the weights of '{source.name}' ({source.checkpoint}) changed while they were exported, as those of a "
                "run in training do: export it again"
            )
        return source


def with_arguments(target: str, given: Sequence[str]) -> str:
    """`model:NAME` with the arguments KEY=VALUE behind its name: `model:NAME?KEY=VALUE&KEY=VALUE`.

    A value is a Python literal (384, 0.5, True, (2, 2)), or else a text. Raises InputError, naming the argument, for
    one without a value, given twice, or of timm's factory instead of the network; and for arguments of a run.
    """
    if not given:
        return target
    if not target.startswith(PREFIX):
        raise InputError(f"--model-arg {given[0]} goes with model:NAME: the network of the run '{target}' is trained")
    request = SourceRequest(target)
    before = [f"{key}={value}" for key, value in parse_qsl(target.partition("?")[2], True)]
    _parsed_arguments(request.network, [*before, *given])
    pairs = (argument.partition("=") for argument in given)
    text = "&".join(f"{quote(key)}={quote(value, safe='(),')}" for key, _, value in pairs)
    return f"{target}{'&' if before else '?'}{text}"


def _parsed_arguments(network: str, given: Sequence[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for argument in given:
        key, equals, text = argument.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--model-arg {argument}: expected KEY=VALUE, such as img_size=384")
        if key in arguments:
            raise InputError(f"--model-arg {key} is given twice, as {arguments[key]!r} and as {text}: choose one")
        if key in NOT_OF_THE_NETWORK:
            raise InputError(f"--model-arg {key} is no argument of '{network}': {NOT_OF_THE_NETWORK[key]}")
        arguments[key] = _literal(argument, text)
        if arguments[key] is None:
            raise InputError(f"--model-arg {argument}: timm leaves out what is None, whatever its name: leave it out")
    size = arguments.get("img_size", 1)
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    if type(height) is not int or height < 1 or height != width:  # before minutes are spent on the weights
        raise InputError(f"--model-arg img_size={size}: expected the side of a square in pixels, such as 384")
    return arguments


def _literal(argument: str, text: str) -> Any:
    """The value as the manifest will hold it: a JSON value, so a tuple is a list."""
    try:
        value = ast.literal_eval(text)
    except (*UNUSABLE, SyntaxError, MemoryError):  # the last of 20,000 minus signs
        return text
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise InputError(
            f"--model-arg {argument}: expected a number, text, True, False, or a list or dictionary of them"
        ) from None


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
    return Source(
        name=str(run.path),
        model=model,
        spec=info.model,
        class_names=info.class_names,
        preprocessing=info.preprocessing,
        data=info.data,
        checkpoint=which,
        checkpoint_sha256=state.sha256[weights_file(which, state)],
        recipe=info.recipe,
        metrics=_metrics_of(which, state.metrics),
    )


def _metrics_of(which: Checkpoint, metrics: dict[str, Any]) -> dict[str, Any]:
    """What the run measured of these weights; of raw ones it keeps fewer numbers, and older runs kept none."""
    if not which.endswith("-raw"):
        return metrics
    of_any = {name: metrics[name] for name in ("epoch", "step", "lr", "losses", "seconds") if name in metrics}
    return {**of_any, **metrics.get("raw", {})}


def _source_from_model(request: SourceRequest) -> Source:
    config = timm.get_pretrained_cfg(request.network)
    assert config is not None
    arguments = request.arguments
    class_names = _class_names(request, config.num_classes, arguments.pop("num_classes", None))
    spec = ModelSpec(name=request.network, num_classes=len(class_names), kwargs=arguments)
    model, random = _weighted(spec, request.weights)
    if request.weights == "pretrained" and config.num_classes != spec.num_classes:
        random = ("its classifier",)
    if "img_size" in arguments:
        config = at_size(config, arguments["img_size"])
    return Source(
        name=str(request.target),
        model=model.eval(),
        spec=spec,
        class_names=class_names,
        preprocessing=preprocessing_of(config),
        data=request.data or "",
        checkpoint=request.weights,
        checkpoint_sha256=weights_digest(model),
        random=random,
    )


def _class_names(request: SourceRequest, published: int, given: Any) -> tuple[str, ...]:
    """Those of the data, or numbers: as many as `given` (an argument) or the published network has."""
    if request.data:
        # Whoever reads the images says what is wrong with them, or was told to leave it out.
        names = tuple(open_images(request.data, "val", skip_bad=True).class_names)
        if given not in (None, len(names)):
            raise InputError(f"--model-arg num_classes={given}: '{request.data}' has {len(names)} classes")
        return names
    count = published if given is None else given
    if given is not None and (type(given) is not int or given < 1):
        raise InputError(f"--model-arg num_classes={given}: expected a positive number")
    if not count:
        raise InputError(
            f"'{request.network}' was published without a classifier: give --data, whose classes it gets, or "
            "--model-arg num_classes=N"
        )
    return tuple(map(str, range(count)))


def at_size(config: Any, size: int | list[int]) -> Any:
    """timm's configuration of a network that is built with `img_size`: the side of a square, in pixels, or both."""
    side = size[0] if isinstance(size, list) else size
    return replace(config, input_size=(3, side, side))


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


def _weighted(spec: ModelSpec, weights: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The network, and the entries that a file of weights lacks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is random is the same in every process
        model = _pretrained(spec) if weights == "pretrained" else _built(spec)
    missing = () if weights in ("pretrained", "random") else load_public_checkpoint(model, Path(weights)).missing
    return model, missing


def _built(spec: ModelSpec) -> nn.Module:
    """The network with fresh weights; raise InputError for arguments that its constructor refuses."""
    if not spec.kwargs:
        return build_model(spec)
    try:
        return build_model(spec)
    except InputError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs.items())
        raise InputError(f"'{spec.name}' cannot be built with --model-arg {given}: {error}") from None


def _pretrained(spec: ModelSpec) -> nn.Module:
    remedy = f"give the weights of '{spec.name}' with --weights FILE, or say --weights random"
    if spec.kwargs:
        _built(spec)  # or arguments that cannot be used would be taken for weights that cannot be had
    return published_model(spec, remedy)


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}\0".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
