"""Recipes: overrides typed and refused by name, contradictions, what follows from what."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vitx import cli
from vitx.cli import train
from vitx.core.errors import InputError
from vitx.core.files import read_record, write_json
from vitx.train.recipes.recipe import (
    DERIVED_ARGUMENTS,
    Recipe,
    apply_overrides,
    first_difference,
    read_recipe,
    setting_names,
)
from vitx.train.recipes.registry import RECIPES, describe, get_recipe, resolve_recipe

RECIPE = get_recipe("digits-deepvit")


def test_overrides_are_typed() -> None:
    changed = apply_overrides(
        RECIPE,
        [
            "optimizer.lr=3e-4",
            "optimizer.betas=[0.8, 0.95]",
            "epochs=2",
            "model.name=deit_digits",
            "model.kwargs.depth=4",
            'model.kwargs.attention=["plain","plain","plain","re-attention"]',
        ],
    )
    assert changed.optimizer.lr == 3e-4
    assert changed.optimizer.betas == (0.8, 0.95)
    assert changed.epochs == 2
    assert changed.model.name == "deit_digits"
    assert changed.model.kwargs["depth"] == 4
    assert changed.model.kwargs["attention"][-1] == "re-attention"
    assert RECIPE.epochs != 2, "the recipe itself must not change"


def test_a_text_that_looks_like_a_number_stays_text_where_text_is_wanted() -> None:
    assert apply_overrides(RECIPE, ["model.name=123"]).model.name == "123"


def test_a_number_may_lack_its_zero() -> None:
    changed = apply_overrides(RECIPE, ["losses.cosine=.3", "model.kwargs.position_std=.5"])
    assert (changed.losses.cosine, changed.model.kwargs["position_std"]) == (0.3, 0.5)


def test_pythons_true_and_false_are_no_texts() -> None:
    """Which are both true to a network: it would keep the bias."""
    settings = ["model.kwargs.qkv_bias=False", "model.kwargs.feat_scale=True", "execution.compile=True"]
    changed = apply_overrides(RECIPE, settings)
    assert (changed.model.kwargs["qkv_bias"], changed.model.kwargs["feat_scale"]) == (False, True)
    assert changed.execution.compile is True
    assert apply_overrides(RECIPE, ["model.name=True"]).model.name == "True"


def test_another_network_drops_the_arguments_of_the_first() -> None:
    given = ["model.kwargs.depth=4", "model.kwargs.name=x", "model.name=vit_tiny_patch16_224"]
    assert apply_overrides(RECIPE, given).model.kwargs == {"depth": 4, "name": "x"}


def test_another_optimizer_or_schedule_drops_the_arguments_of_the_first() -> None:
    """As another network does: sgd takes no eps, and constant no decay_epochs."""
    arguments = ["optimizer.kwargs.eps=1e-6", "schedule.name=step", "schedule.kwargs.decay_epochs=2"]
    recipe = apply_overrides(RECIPE, arguments)
    same = apply_overrides(recipe, ["optimizer.name=adamw", "schedule.name=step"])
    assert same == recipe
    changed = apply_overrides(recipe, ["schedule.kwargs.t=1", "schedule.name=constant", "optimizer.name=sgd"])
    assert (changed.optimizer.kwargs, changed.schedule.kwargs) == ({}, {"t": 1})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lrr=1",
            "unknown setting 'optimizer.lrr': did you mean optimizer.lr .*known: .*batch_size.*workers",
        ),
        ("epoch=1", "unknown setting 'epoch': did you mean epochs"),
        ("name=other", "unknown setting 'name'"),
        ("optimizer.lr=fast", "--set optimizer.lr: given 'fast', expected: a valid number"),
        ("optimizer.lr=-1", "--set optimizer.lr: given '-1', expected: greater than 0"),
        ("optimizer.lr=NaN", "--set optimizer.lr: given 'NaN', expected: a finite number"),
        ("epochs=2.5", "--set epochs: given '2.5', expected: a valid integer"),
        ("epochs=true", "--set epochs: given 'true', expected: a valid integer"),
        ("epochs=0", "--set epochs: given '0', expected: greater than 0"),
        ('stages=[{"until": 5, "drop_path_rate": 1}]', r"expected: less than 1 \(at 0\.drop_path_rate\)"),
        ('stages=[{"until": 5}]', r"expected: Field required \(at 0\.drop_path_rate\)"),
        ("optimizer.betas=[0.9,true]", r"expected: a valid number \(at 1\)"),
        ("preprocessing.interpolation=area", "given 'area', expected: 'nearest', 'bilinear', 'bicubic' or 'lanczos'"),
        ("model.kwargs.dept=null", r"^model\.kwargs\.dept=null has no effect: timm leaves out what is null"),
        ("optimizer=1", "^optimizer is a group of settings: set one of optimizer.name, optimizer.lr, "),
        ("data=elsewhere", "^--set data: pass --data PATH instead$"),
        ("epochs", "--set epochs: expected KEY=VALUE"),
        (
            "cutmix.probability=0",
            "losses.mixing needs images of mixed patches: set cutmix.probability above 0, or losses",
        ),
        ("schedule.min_lr=1", "schedule.min_lr 1 is above the learning rate"),
        (
            "augmentation.color_jitter=1e308",
            "--set augmentation.color_jitter: given .1e308., expected: less",
        ),
        ("cutmix.alpha=1e308", "--set cutmix.alpha: given '1e308', expected: less than or equal to 1000"),
        (
            "distillation.temperature=1e30",
            "--set distillation.temperature: given '1e30', expected: less than or equal to 1000",
        ),
        ("cutmix.alpha=1e-320", "--set cutmix.alpha: given '1e-320', expected: greater than or equal to 0.001"),
        ("mixup.mixup=1e308", "--set mixup.mixup: given '1e308', expected: less than or equal to 1000"),
        ("mixup.cutmix=1e-300", "mixup.cutmix is 1e-300: expected 0, or 0.001 to 1000"),
        ("model.kwargs.patch_head=true", "model.kwargs.patch_head cannot be given: it follows from losses.mixing"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply_overrides(RECIPE, [override])


def test_contradictions_are_judged_after_all_overrides() -> None:
    changed = apply_overrides(RECIPE, ["cutmix.probability=0", "losses.mixing=0"])
    assert changed.cutmix.probability == changed.losses.mixing == 0


@pytest.mark.parametrize("name", [name for name in RECIPES if get_recipe(name).optimizer.lr_base_size])
def test_a_rate_that_follows_from_the_batch_may_be_that_of_a_smaller_one(name: str) -> None:
    """docs/training.md promises it of 256; a rate of fine-tuning is constant, whatever it is."""
    given, smaller = get_recipe(name), apply_overrides(get_recipe(name), ["batch_size=64"])
    rates = [recipe.optimizer.rate(recipe.batch_size) for recipe in (given, smaller)]
    assert rates[1] == pytest.approx(rates[0] * 64 / given.batch_size)


def test_the_docs_name_every_argument_that_follows_from_something_else() -> None:
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    told = text.partition("follow from other settings and cannot be given: ")[2].partition(".\n")[0]
    assert set(re.findall(r"`([a-z_]+)`\s\(", told)) == DERIVED_ARGUMENTS.keys()


def test_every_setting_name_that_is_listed_is_accepted() -> None:
    plain = RECIPE.model_dump(mode="json")
    for name in setting_names():
        if not name.endswith(".NAME"):
            value = plain
            for part in name.split("."):
                value = value.get(part, "center")  # crop_mode is not written where it is that
            assert apply_overrides(RECIPE, [f"{name}={json.dumps(value)}"]) == RECIPE


def test_recipes_survive_json(tmp_path: Path) -> None:
    for name in RECIPES:
        write_json(tmp_path / "recipe.json", get_recipe(name))
        assert read_record(tmp_path / "recipe.json", Recipe) == get_recipe(name)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_docstring_carries_command_hardware_time_and_result(name: str) -> None:
    text = inspect.getdoc(RECIPES[name]) or ""
    assert f"vitx train {name}" in text
    for word in ("Hardware:", "Time:", "Result:"):
        assert word in text
    assert describe(name) == text
    assert get_recipe(name).name == name


def test_python_without_docstrings_still_says_what_a_verb_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.command, "__doc__", None)
    monkeypatch.setattr(RECIPES["photos"], "__doc__", None)
    assert cli._command("train").help == "Train a recipe into a run folder."
    assert describe("photos") == "not described: python -OO leaves the docstrings out"


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown recipe 'digit-deepvit': did you mean digits-deepvit"):
        get_recipe("digit-deepvit")


def test_what_older_runs_hold_and_no_network_heeds_is_read(tmp_path: Path) -> None:
    """`model.kwargs.in_chans=3` is refused for a new run; one that was begun with it is reported and goes on."""
    plain = RECIPE.model_dump(mode="json")
    plain["model"]["kwargs"] |= {"in_chans": 3, "scriptable": True}
    write_json(tmp_path / "recipe.json", plain)
    assert read_recipe(tmp_path) == RECIPE
    assert resolve_recipe(RECIPE.name, resumed=tmp_path) == RECIPE
    plain["model"]["kwargs"] = {"checkpoint_path": "weights.pth"}  # it was heeded
    write_json(tmp_path / "recipe.json", plain)
    with pytest.raises(InputError, match=r"model\.kwargs\.checkpoint_path is no argument"):
        read_recipe(tmp_path)


def test_a_warm_up_that_was_a_share_of_the_epochs_is_read(tmp_path: Path) -> None:
    plain = RECIPE.model_dump(mode="json")
    del plain["schedule"]["warmup_epochs"], plain["losses"]["attention_maps"]
    for share in (0.15, 0.5):
        plain["schedule"]["warmup"] = share
        write_json(tmp_path / "recipe.json", plain)
        found = read_recipe(tmp_path)
        assert found.schedule.warmup_epochs == share * RECIPE.epochs
        assert found.losses.attention_maps == "softmax"
        assert found.changed({"schedule": RECIPE.schedule, "losses": RECIPE.losses}) == RECIPE
    plain["schedule"]["warmup"] = 0.6
    write_json(tmp_path / "recipe.json", plain)
    message = f"^{tmp_path}/recipe.json has a warm-up of 0.6 of the epochs, and half of them is the most: train anew$"
    with pytest.raises(InputError, match=message):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model": {"name": "deit_digits", "kwargs": None}}, "model.kwargs: Input should be"),
        ({"model": {"name": "deit_digits", "kwargs": "depth"}}, "model.kwargs: Input should be"),
        ({"schedule": {"warmup": "half"}}, "schedule.warmup: Extra inputs"),
        ({"schedule": {"warmup": [0.9]}}, "schedule.warmup: Extra inputs"),
        ({"schedule": {"warmup": 0.1}, "losses": []}, "losses: Input should be an object"),
        ({"schedule": {"warmup": 0.1}, "epochs": 10**400}, "schedule.warmup: Extra inputs"),
        ({"schedule": []}, "schedule: Input should be an object"),
        ({"epochs": 0}, "epochs: Input should be greater than 0"),
    ],
)
def test_a_damaged_recipe_is_named(tmp_path: Path, changes: dict[str, Any], where: str) -> None:
    write_json(tmp_path / "recipe.json", RECIPE.model_dump(mode="json") | changes)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'recipe.json'} is not a valid Recipe: {where}")):
        read_recipe(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, "\ud800"])
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'recipe.json'} is not a valid Recipe: the file: ")):
        read_recipe(tmp_path)
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(InputError, match=r"recipe\.json does not exist"):
        read_recipe(tmp_path)


def test_the_first_difference_is_named() -> None:
    changed = apply_overrides(RECIPE, ["optimizer.lr=1e-4", "epochs=7"])
    assert first_difference(RECIPE, RECIPE) is None
    difference = first_difference(changed, RECIPE)
    assert difference == f"optimizer.lr is {RECIPE.optimizer.lr} in the run but 0.0001 was asked for"
    added = apply_overrides(RECIPE, ["model.kwargs.mlp_ratio=2"])
    assert first_difference(added, RECIPE) == "model.kwargs.mlp_ratio is absent in the run but 2 was asked for"
    assert first_difference(RECIPE, added) == "model.kwargs.mlp_ratio is 2 in the run but was left out"


def test_a_folder_of_images_gets_its_own_augmentation() -> None:
    recipe = resolve_recipe("digits-deit", data="photos", overrides=["augmentation.flip=0"])
    assert Path(recipe.data).is_absolute()
    assert recipe.augmentation.smallest_crop < 1
    assert recipe.augmentation.rotation == recipe.augmentation.flip == 0
    assert get_recipe("digits-deit").on_data("cifar10") == get_recipe("digits-deit").changed(
        {"data": "cifar10", "augmentation": get_recipe("digits-deit").on_data("photos").augmentation}
    )
    assert get_recipe("digits-deit").on_data("digits") == get_recipe("digits-deit")


def test_a_run_is_resumed_by_any_way_to_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "photos" / "bark"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    of_teacher = [f"distillation.teacher={name}" for name in ("../teacher", "timm:resnet18@../../weights")]
    begun = resolve_recipe("digits-deit", data="../../photos", overrides=of_teacher[:1])
    assert begun.data == str(tmp_path / "photos")
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(begun.changed({"distillation.teacher": "/teacher"}).model_dump_json())
    again = resolve_recipe("digits-deit", data="..", resumed=run, overrides=of_teacher[:1])
    assert again.distillation.teacher == str(tmp_path / "photos" / "teacher")
    assert again.changed({"distillation.teacher": begun.distillation.teacher}) == begun
    other = resolve_recipe("digits-deit", data="..", resumed=run, overrides=of_teacher[1:])
    assert other.distillation.teacher == f"timm:resnet18@{tmp_path / 'weights'}"
    # What a run of before has, "..", is the run's own still.
    kept = begun.changed({"data": f"{inside}/.."})
    (run / "recipe.json").write_text(kept.model_dump_json())
    for same in (None, "..", "../../photos", str(tmp_path / "photos")):
        assert resolve_recipe("digits-deit", data=same, resumed=run) == kept
    assert resolve_recipe("digits-deit", data=".", resumed=run).data == str(inside)
    assert resolve_recipe(None, resumed=run) == kept
    (tmp_path / "photos" / "weights").touch()
    for from_weights in (
        resolve_recipe("digits-deit", start="../weights"),
        resolve_recipe("digits-deit", overrides=["model.initial_checkpoint=../weights"]),
    ):
        assert from_weights.model.initial_checkpoint == f"{inside.parent}/weights"
    for unchanged in ("timm", "weights"):  # published, and of the run itself, as one of before has it
        kept = begun.changed({"model.initial_checkpoint": unchanged})
        (run / "recipe.json").write_text(kept.model_dump_json())
        again = resolve_recipe("digits-deit", resumed=run, overrides=[f"model.initial_checkpoint={unchanged}"])
        assert again == kept
    assert resolve_recipe("digits-deit", overrides=["model.initial_checkpoint=timm"]).model.initial_checkpoint == "timm"


@pytest.mark.parametrize(
    "changed",
    [
        *({"schedule": {"warmup": share}} for share in ("half", [1], None)),
        {"schedule": "warmup"},
        {"model": {"kwargs": 3}},
        {"losses": 3, "schedule": {"warmup": 0.1}},
    ],
)
def test_a_damaged_recipe_of_a_run_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_json(tmp_path / "recipe.json", RECIPE.model_dump(mode="json") | changed)
    with pytest.raises(InputError, match=rf"recipe\.json is not a valid Recipe: {next(iter(changed))}"):
        read_recipe(tmp_path)


def test_a_recipe_of_a_run_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"recipe\.json is not a valid Recipe: the file: Invalid JSON: recursion"):
        read_recipe(tmp_path)


def test_resuming_starts_from_the_settings_of_the_run(tmp_path: Path) -> None:
    started = resolve_recipe("digits-deit", data="photos", overrides=["epochs=3", "augmentation.flip=0.1"])
    write_json(tmp_path / "recipe.json", started)
    assert resolve_recipe("digits-deit", resumed=tmp_path) == started
    assert resolve_recipe("digits-deit", data="photos", resumed=tmp_path) == started
    assert resolve_recipe("digits-deit", data="others", resumed=tmp_path).data.endswith("others")
    assert resolve_recipe("digits-deepvit", resumed=tmp_path).name == "digits-deepvit"
