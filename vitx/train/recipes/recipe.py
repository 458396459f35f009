"""A recipe: all settings of a training run, as one immutable record that is written as JSON."""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_origin

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from pydantic.fields import FieldInfo

from vitx.core.errors import UNUSABLE, InputError, unknown_name
from vitx.core.files import Record, read_record
from vitx.core.preprocess import Preprocessing
from vitx.core.run import NOT_OF_THE_NETWORK
from vitx.data.image_set import NAMED_SETS
from vitx.train.recipes.image_and_loss_settings import Augmentation, CutMix, Decay, Losses, Mixup, check_mixing
from vitx.train.recipes.optimization_settings import (
    Distillation,
    Execution,
    Optimizer,
    Schedule,
    Selection,
    Stage,
    refuse_impossible_schedule,
    refuse_impossible_stages,
    refuse_unsupported,
)

RECIPE_FILE = "recipe.json"
# Settings that --set cannot change: `name` says which recipe it is, and --data adapts the augmentation as well.
NOT_OVERRIDABLE = ("name", "data")
# Model arguments that follow from other settings or from the data.
DERIVED_ARGUMENTS = {
    "num_classes": "the data",
    "img_size": "preprocessing.image_size",
    "patch_head": "losses.mixing",
    "pretrained": "model.initial_checkpoint=timm",
}
# Arguments of timm's factory that recipes could hold until 2026-11-25: what could be trained with them, 3 channels and
# switches for TorchScript, is the network without them.
UNHEEDED_ARGUMENTS = ("in_chans", "scriptable", "exportable", "no_jit")


class ModelChoice(Record):
    """A name that `timm.create_model` knows, and the arguments for it."""

    name: str = Field(description="a network of timm or of `vitx models`")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the network, such as depth or drop_path_rate"
    )
    initial_checkpoint: str = Field(
        default="", description="weights to begin with: a run folder, a file, or timm (published for the name)"
    )


class Recipe(Record):
    """A training run. The network has as many outputs as the data has classes."""

    name: str
    data: str
    model: ModelChoice
    preprocessing: Preprocessing
    augmentation: Augmentation = Augmentation()
    mixup: Mixup = Mixup()
    cutmix: CutMix = CutMix()
    losses: Losses = Losses()
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    execution: Execution = Execution()
    distillation: Distillation = Distillation()
    selection: Selection = Selection()
    ema_decay: Decay = Field(default=0.99, description="of the averaged weights, which are evaluated and exported")
    ema_warmup: bool = Field(default=True, description="the decay rises to ema_decay, 1 − (1+step)^−⅔ at a step")
    epochs: PositiveInt = Field(description="passes over the training images")
    stages: tuple[Stage, ...] = Field(default=(), description="earlier stages, each with a schedule of its own")
    batch_size: PositiveInt = Field(description="images of one optimizer step, over all processes")
    checkpoint_steps: NonNegativeInt = Field(
        default=0, description="steps between checkpoints within an epoch; 0 is at its end and at SIGTERM only"
    )
    keep_every: NonNegativeInt = Field(
        default=0, description="epochs between checkpoints that are kept, from the initial weights on; 0: best and last"
    )
    workers: NonNegativeInt = Field(
        default=2, le=1024, description="processes that prepare images; the result does not depend on it"
    )
    seed: NonNegativeInt = Field(default=0, description="of every random draw of the run")

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        check_mixing(self.mixup, self.cutmix, self.losses)
        for place, kwargs in (("model", self.model.kwargs), ("optimizer", self.optimizer.kwargs)):
            try:
                json.dumps(kwargs, allow_nan=False)
            except ValueError:
                raise ValueError(f"{place}.kwargs has a number that is infinite or NaN: expected finite ones") from None
        for name, value in self.model.kwargs.items():
            if name in DERIVED_ARGUMENTS:
                raise ValueError(f"model.kwargs.{name} cannot be given: it follows from {DERIVED_ARGUMENTS[name]}")
            if name in NOT_OF_THE_NETWORK:
                raise ValueError(f"model.kwargs.{name} is no argument of a network for training: leave it out")
            if name == "drop_path_rate" and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"model.kwargs.drop_path_rate is {value}: expected a number from 0 to below 1")
        refuse_unsupported(self.optimizer, self.execution, self.losses)
        for epochs in (*(stage.until for stage in self.stages), self.epochs):
            refuse_impossible_schedule(self.optimizer.rate(self.batch_size), self.schedule, epochs)
        refuse_impossible_stages(self.stages, self.epochs, self.model.kwargs.get("drop_path_rate", 0.0))
        return self

    def stage(self, epoch: int) -> Stage:
        """The stage of `epoch`, counted from 1; the last one is what the other settings say."""
        last = Stage(until=self.epochs, drop_path_rate=self.model.kwargs.get("drop_path_rate", 0.0))
        return next(stage for stage in (*self.stages, last) if epoch <= stage.until)

    def changed(self, settings: Mapping[str, Any]) -> "Recipe":
        """A copy with these values, by names such as "epochs" and "optimizer.lr"; they are not checked."""
        update: dict[str, Any] = {}
        for key, value in settings.items():
            group, _, name = key.partition(".")
            update[group] = update.get(group, getattr(self, group)).model_copy(update={name: value}) if name else value
        return self.model_copy(update=update)

    def on_data(self, data: str) -> "Recipe":
        """The recipe on other images.

        Other images get random crops and flips instead of the rotations and shifts of the digits' recipes: photographs
        may be mirrored, digits may not.
        """
        place = data if data in NAMED_SETS else from_root(data)
        crops = Augmentation(smallest_crop=0.35, flip=0.5) if self.data == "digits" != data else self.augmentation
        return self.model_copy(update={"data": place, "augmentation": crops})


def from_root(path: str) -> str:
    """An absolute path, for a run is resumed from any folder; one by ".." is resolved: all ways to a folder are it."""
    absolute = Path(path).absolute()
    return str(absolute.resolve() if ".." in absolute.parts else absolute)


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with `key=value` texts applied, such as "optimizer.lr=3e-4".

    A value is JSON, or plain text where the field is a text. Another network, optimizer or schedule drops the recipe's
    `kwargs` of the one before. Raises InputError for an unknown key (naming the nearest and all valid ones), for a
    value of another type or out of range, and for settings that contradict each other.
    """
    plain = recipe.model_dump(mode="json")
    # The names first, wherever they were given: they must not drop the arguments that were given for them.
    for key, text in sorted(map(_split, overrides), key=lambda pair: pair[0].partition(".")[2] != "name"):
        check_key(key)
        plain = _with_value(plain, key, text)
        group, _, name = key.partition(".")
        if name == "name" and plain[group]["name"] != getattr(recipe, group).name:
            plain[group]["kwargs"] = {}
    return validated(plain)


def _split(override: str) -> tuple[str, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"--set {override}: expected KEY=VALUE, such as --set optimizer.lr=3e-4")
    return key, text


def setting_names() -> list[str]:
    """Every key that `apply_overrides` accepts, dotted; arguments of the model appear as `model.kwargs.NAME`."""
    return [name for name, _ in setting_fields(Recipe) if name not in NOT_OVERRIDABLE]


def read_recipe(run: Path) -> Recipe:
    """The `recipe.json` of the run folder `run`; raise InputError when it is missing or not valid."""
    path, share = run / RECIPE_FILE, 0.0
    with contextlib.suppress(OSError, *UNUSABLE):  # read_record says below what is wrong with the file
        plain = json.loads(path.read_bytes())
        for name in UNHEEDED_ARGUMENTS:
            plain["model"]["kwargs"].pop(name, None)
        if "warmup" in plain["schedule"]:
            # Until 2026-11-23 the warm-up was a share of the epochs, and losses.attention compared softmax maps.
            share = float(plain["schedule"].pop("warmup"))
            plain["schedule"]["warmup_epochs"] = share * plain["epochs"]
            plain["losses"].setdefault("attention_maps", "softmax")
        if share <= 0.5:
            return Recipe.model_validate(plain)
    if share > 0.5:
        raise InputError(f"{path} has a warm-up of {share:g} of the epochs, and half of them is the most: train anew")
    return read_record(path, Recipe)


def first_difference(given: Recipe, stored: Recipe, *, ignoring: Collection[str] = ()) -> str | None:
    """Say in words in which setting `given` differs first from the `stored` recipe of a run; None if they are equal."""
    now, before = (dict(flat_settings(recipe.model_dump(mode="json"))) for recipe in (given, stored))
    for key in [*before, *(key for key in now if key not in before)]:
        if key not in ignoring and now.get(key) != before.get(key):
            asked = f"{now[key]} was asked for" if key in now else "was left out"
            return f"{key} is {before.get(key, 'absent')} in the run but {asked}"
    return None


def setting_fields(record: type[Record], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a record and of those in it, each with its dotted name; that of an argument ends with NAME."""
    for name, field in record.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Record):
            yield from setting_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}" + (".NAME" if get_origin(field.annotation) is dict else ""), field


def flat_settings(plain: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings, each with its dotted name, such as ("optimizer.lr", 0.001)."""
    for name, value in plain.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_key(key: str) -> None:
    """Raise InputError for a dotted key that `apply_overrides` does not accept, naming the nearest and all."""
    names = setting_names()
    group, _, argument = key.rpartition(".")
    if key in names or (f"{group}.NAME" in names and argument.isidentifier()):
        return
    if key == "data":
        raise InputError("--set data: pass --data PATH instead")
    members = [name for name in names if name.startswith(f"{key}.")]
    if members:
        raise InputError(f"{key} is a group of settings: set one of {', '.join(members)}")
    raise unknown_name("setting", key, names)


def check_effect(key: str, value: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for an argument of the network that is null and not among those that it takes away, `kwargs`."""
    group, _, name = key.rpartition(".")
    if value is None and group == "model.kwargs" and name not in kwargs:
        raise InputError(f"{key}=null has no effect: timm leaves out what is null, whatever its name")


def _with_value(plain: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """Return a copy of `plain` in which `key` has the first reading of `text` that the field's type accepts."""
    problems: list[str] = []
    for value in _readings(text):
        check_effect(key, value, plain["model"]["kwargs"])
        changed = json.loads(json.dumps(plain))
        *groups, name = key.split(".")
        place = changed
        for group in groups:
            place = place[group]
        place[name] = value
        problem = _validation_error(changed, tuple(key.split(".")))
        if problem is None:
            return dict(changed)
        problems.append(problem)
    raise InputError(f"--set {key}: given '{text}', expected: {problems[0]}")


def _readings(text: str) -> Iterator[Any]:
    """The JSON value of `text`, if it is one, then the text itself: 123 is a number, or the name "123".

    Python's True and False are values too: as texts both would be true to a network.
    """
    if text in ("True", "False"):
        yield text == "True"
    with contextlib.suppress(ValueError, RecursionError):  # of 5,000 digits, or lists in 20,000 lists
        yield json.loads(re.sub(r"^(-?)\.(\d)", r"\g<1>0.\2", text))  # .5 as well, which JSON writes 0.5
    yield text


def _validation_error(plain: dict[str, Any], place: tuple[str, ...]) -> str | None:
    """What pydantic says about the field at `place`; contradictions with other fields are not looked at here."""
    try:
        Recipe.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"][: len(place)] == place:
                within = ".".join(map(str, detail["loc"][len(place) :]))
                return detail["msg"].removeprefix("Input should be ") + (f" (at {within})" if within else "")
    return None


def validated(plain: dict[str, Any]) -> Recipe:
    """The recipe of plain values; raise InputError with the first place and value that are refused."""
    try:
        return Recipe.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{place} is {first['input']}: {message}" if place else message) from None
