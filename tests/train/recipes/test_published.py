"""Each recipe of a paper beside what its authors printed: every value is equal, or named with the reason."""

import inspect
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm

import vitx.models
import vitx.train.recipes
from vitx.train.recipes.recipe import Recipe
from vitx.train.recipes.registry import RECIPES, get_recipe

PUBLISHED = tomllib.loads((Path(vitx.train.recipes.__file__).parent / "published.toml").read_text())
NOT_PRINTED = PUBLISHED.pop("not_printed")
PRINTED = {name: family for family in PUBLISHED for name in PUBLISHED[family]["recipes"]}
FLAGS = {"no-repeated-aug": ("repeated-aug", False), "no-use-talk": ("use-talk", False), "use_env": ("use_env", True)}
FLAGS["auto_reload"] = ("auto_reload", True)


def kwargs(recipe: Recipe, name: str) -> Any:
    return recipe.model.kwargs.get(name, 0.0)


def dropout(recipe: Recipe) -> Any:
    """--drop of timm 0.4: behind attention and MLP, and behind the positions too where a recipe asks for any."""
    rate = kwargs(recipe, "proj_drop_rate")
    return rate if kwargs(recipe, "pos_drop_rate") == rate else "not behind positions"


# Our value for each printed name; a name that is missing here fails the test.
OURS: dict[str, Callable[[Recipe], Any]] = {
    "input-size": lambda r: r.preprocessing.image_size,
    "img_size": lambda r: r.preprocessing.image_size,
    "eval-crop-ratio": lambda r: r.preprocessing.crop_fraction,
    "crop_pct": lambda r: r.preprocessing.crop_fraction,
    "mean": lambda r: list(r.preprocessing.mean),
    "std": lambda r: list(r.preprocessing.std),
    "drop": dropout,
    "head-drop": lambda r: kwargs(r, "drop_rate"),
    "model-ema-decay": lambda r: r.ema_decay if not r.ema_warmup or not r.ema_decay else "warmed up",
    "opt": lambda r: r.optimizer.name,
    "opt-eps": lambda r: r.optimizer.kwargs.get("eps", 1e-8),
    "clip-grad": lambda r: r.optimizer.clip,
    "weight-decay": lambda r: r.optimizer.weight_decay,
    "weight_decay_of_norms": lambda r: False,
    "lr": lambda r: r.optimizer.lr,
    "lr-base-size": lambda r: r.optimizer.lr_base_size,
    "sched": lambda r: r.schedule.name,
    "warmup-lr": lambda r: r.schedule.warmup_lr,
    "min-lr": lambda r: r.schedule.min_lr,
    "warmup-epochs": lambda r: r.schedule.warmup_epochs,
    "cooldown-epochs": lambda r: r.schedule.cooldown_epochs,
    "aa": lambda r: r.augmentation.auto_augment,
    "train-interpolation": lambda r: r.augmentation.interpolation,
    "repeated-aug": lambda r: r.augmentation.repeats == 3,
    "use-repeated-aug": lambda r: r.augmentation.repeats == 3,
    "reprob": lambda r: r.augmentation.erasing,
    "remode": lambda r: r.augmentation.erasing_mode,
    "hflip": lambda r: r.augmentation.flip,
    "scale": lambda r: r.augmentation.smallest_crop,
    "padding": lambda r: r.augmentation.padding,
    "mixup": lambda r: r.mixup.mixup,
    "cutmix": lambda r: r.mixup.cutmix,
    "mixup-prob": lambda r: r.mixup.probability,
    "mixup-switch-prob": lambda r: r.mixup.switch_probability,
    "mixup-mode": lambda r: r.mixup.mode,
    "smoothing": lambda r: r.losses.label_smoothing,
    "contrastive": lambda r: r.losses.contrastive,
    "mixing": lambda r: r.losses.mixing,
    "two-mix": lambda r: r.cutmix.probability == 1.0,
    "cos-reg-component": lambda r: r.losses.attention_pairs,
    "cos-reg-weight": lambda r: r.losses.attention if r.losses.attention_pairs else 0.1,
    "distillation-type": lambda r: r.distillation.kind if r.distillation.teacher else "none",
    "use-talk": lambda r: "talking" in r.model.name,
    "alpha": lambda r: timm.create_model(r.model.name, depth=2).get_submodule("blocks.1.attn").alpha,
    "seed": lambda r: r.seed,
    "resume": lambda r: "</ckpt_path>" if r.model.initial_checkpoint else "",
}
MODELS = {
    "deit_tiny_patch16_224": "deit_tiny_12",
    "deit_small_patch16_224": "deit_small_12",
    "deit_base_patch16_224": "deit_base_12",
    "deit_large_patch16_224": "deit_large_24",
    "deit_tiny_neutreno_patch16_224": "deit_tiny_neutreno_patch16_224",
    "deepvit_patch16_224_re_attn_24b": "deepvit_24b",
    "deepvit_patch16_224_re_attn_32b": "deepvit_32b",
    "deepvit_S": "deepvit_s",
    "deepvit_L": "deepvit_l",
    "alternet_18": "alternet_18_cifar",
    **{name: name for name in ("attnscale_small_12", "attnscale_small_24", "featscale_small_12", "featscale_small_24")},
    **{f"{kind}_cait_S24_224": f"{kind}_cait_s24_224" for kind in ("attnscale", "featscale")},
}


def flags_of(command: str) -> Iterator[tuple[str, Any]]:
    """The flags of a printed command; -no-repeated-aug has one dash in print."""
    words = iter(shlex.split(command)[1:])
    for word in words:
        name = word.lstrip("-")
        yield FLAGS[name] if name in FLAGS else (name, next(words))


def printed(name: str) -> list[dict[str, Any]]:
    """What is printed for the recipe, one entry a stage."""
    family = PUBLISHED[PRINTED[name]]
    entry = family["recipes"][name]
    changes = [dict(flags_of(command)) for command in entry.get("commands", ())] or [entry["values"]]
    stages = []
    for change in changes:
        merged = {**family["defaults"], **change}
        unused = {*family["unused"], *(word.replace("-", "_") for word in family["unused"])}
        stages.append({key: value for key, value in merged.items() if key not in unused})
    return stages


def differences(name: str, recipe: Recipe) -> Iterator[str]:
    """The printed names whose values are not the recipe's."""
    stages = printed(name)
    ends = [stage.until for stage in recipe.stages] + [recipe.epochs]
    assert len(stages) == len(ends)
    processes = PUBLISHED[PRINTED[name]]["recipes"][name]["processes"]
    for stage, end in zip(stages, ends, strict=True):
        assert recipe.model.name.removesuffix("_talking") == MODELS[stage.pop("model")]
        after = recipe.schedule.cooldown_epochs + (
            recipe.schedule.warmup_epochs if recipe.schedule.warmup_prefix else 0
        )
        compared = {
            "epochs": (stage.pop("epochs"), end - after),
            "drop-path": (stage.pop("drop-path", stage.pop("drop_path", None)), recipe.stage(end).drop_path_rate),
            "batch-size": (
                int(stage.pop("batch-size", stage.pop("batch_size", 0))) * processes,
                recipe.batch_size,
            ),
            **{
                key: (value, OURS[key if key in OURS else key.replace("_", "-")](recipe))
                for key, value in stage.items()
            },
        }
        for key, (theirs, ours) in compared.items():
            if (type(ours)(theirs) if isinstance(theirs, str) else theirs) != ours:
                yield key


@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_value_is_the_recipes(name: str) -> None:
    recipe = get_recipe(name)
    named = PUBLISHED[PRINTED[name]]["recipes"][name].get("differs", [])
    assert sorted(set(differences(name, recipe))) == sorted(named)
    docstring = inspect.getdoc(RECIPES[name]) or ""
    reasons = docstring.partition("Differs: ")[2]
    assert bool(reasons) == bool(named)
    for key in named:
        assert key in reasons


def test_a_silent_difference_is_found() -> None:
    """Each of a recipe's settings that is printed, changed one at a time."""
    recipe = get_recipe("deepvit-32")
    for group, change, found in [
        ("optimizer", {"lr": 1e-3}, "lr"),
        ("optimizer", {"lr_base_size": 512}, "lr_base_size"),
        ("schedule", {"cooldown_epochs": 0}, "cooldown_epochs"),
        ("augmentation", {"interpolation": "bicubic"}, "train_interpolation"),
        ("losses", {"attention": 0.2}, "cos_reg_weight"),
        ("mixup", {"mixup": 0.8}, "mixup"),
    ]:
        changed = recipe.model_copy(update={group: getattr(recipe, group).model_copy(update=change)})
        assert found in set(differences("deepvit-32", changed))
    assert set(differences("deepvit-32", recipe.model_copy(update={"epochs": 300}))) == {"epochs"}
    assert set(differences("deepvit-32", recipe.model_copy(update={"ema_warmup": True}))) == {"model_ema_decay"}


def test_every_recipe_of_a_paper_is_printed_or_says_that_it_is_not() -> None:
    papers = {name for name in RECIPES if not name.startswith(("digits", "photos"))}
    assert papers == {*PRINTED, *NOT_PRINTED}
    for name in NOT_PRINTED:
        docstring = " ".join((inspect.getdoc(RECIPES[name]) or "").split())
        assert "print no command" in docstring or "is printed" in docstring, name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_of_the_name_that_it_is_called_by(name: str) -> None:
    assert get_recipe(name).name == name


@pytest.mark.parametrize(
    ("name", "model"), [("patchvit-s-24", "deit_small_24_talking"), ("patchvit-b-24", "deit_base_24_talking")]
)
def test_networks_of_24_blocks_drop_three_quarters_of_the_paths(name: str, model: str) -> None:
    recipe = get_recipe(name)
    assert (recipe.model.name, recipe.model.kwargs["drop_path_rate"]) == (model, 0.75)


@pytest.mark.parametrize(
    ("name", "before", "pixels"),
    [
        ("patchvit-b-12-384", "runs/patchvit-b-12", 384),
        ("patchvit-b-24-512", "runs/patchvit-b-24", 512),
        ("deepvit-l-384", "runs/deepvit-l", 384),
    ],
)
def test_fine_tuning_is_deits_on_whole_images(name: str, before: str, pixels: int) -> None:
    recipe = get_recipe(name)
    assert recipe.model.initial_checkpoint == before
    assert (recipe.preprocessing.image_size, recipe.preprocessing.crop_fraction) == (pixels, 1.0)
    assert (recipe.epochs, recipe.batch_size, recipe.stages) == (30, 512, ())
    schedule = recipe.schedule
    assert (schedule.name, schedule.warmup_epochs, schedule.warmup_lr) == ("constant", 5, 1e-6)
