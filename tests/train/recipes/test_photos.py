"""What the recipe for photographs chooses, what a run begins from, and settings: from files, and listed."""

import json
import re
import struct
import zlib
from pathlib import Path

import pytest
import timm

from cli_fixture import Vitx
from vitx.cli.settings import as_given
from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, RunFolder, RunInfo
from vitx.train.recipes.photos import Photographs, fitted, photos
from vitx.train.recipes.recipe import Recipe, apply_overrides, setting_names
from vitx.train.recipes.recipe_file import with_settings
from vitx.train.recipes.registry import get_recipe, resolve_recipe
from vitx.train.recipes.settings import all_settings
from vitx.train.starting_point import _shorter_side

DERIVED = {"img_size": 48, "patch_head": True}


def begun_run(path: Path) -> RunFolder:
    """As much of a run as another one begins from."""
    info = RunInfo(
        name="first",
        recipe="digits-deepvit",
        model=ModelSpec(name="deepvit_digits", num_classes=3, kwargs={"depth": 2, **DERIVED}),
        class_names=("a", "b", "c"),
        preprocessing=Preprocessing(image_size=48, crop_fraction=0.5),
        data="digits",
        seed=0,
    )
    path.mkdir()
    write_json(path / "run.json", info)
    return RunFolder(path)


SMALL, LARGE = Photographs(30, 70, False, 2), Photographs(20_000, 3000, True, 16)


def test_size_batch_and_epochs_follow_from_the_images_and_the_machine() -> None:
    small, large = fitted(photos(), SMALL), fitted(photos(), LARGE)
    assert [each.preprocessing.image_size for each in (small, large)] == [64, 224]
    assert [each.model.kwargs["patch_size"] for each in (small, large)] == [8, 16]
    assert [each.batch_size for each in (small, large)] == [8, 128]
    assert [each.epochs for each in (small, large)] == [100, 20]
    assert [each.workers for each in (small, large)] == [2, 8]
    assert small.optimizer.lr == 1.8e-4
    assert fitted(photos(), LARGE._replace(on_gpu=False)).preprocessing.image_size == 128
    assert fitted(photos(), SMALL._replace(shorter_side=5)).preprocessing.image_size == 32


def test_the_network_is_smaller_on_a_cpu_and_the_rest_follows() -> None:
    small, large = fitted(photos(), SMALL), fitted(photos(), LARGE)
    assert small.model.kwargs == {
        "drop_path_rate": 0.1,
        "embed_dim": 128,
        "depth": 6,
        "num_heads": 4,
        "patch_size": 8,
    }
    assert large.model.kwargs == {"drop_path_rate": 0.1, "patch_size": 16}
    assert [each.schedule.warmup_epochs for each in (small, large)] == [10, 2]
    assert (large.optimizer.lr, large.optimizer.layer_decay) == (7.1e-4, 1)  # 5e-4 · √(128/64)
    sizes = [fitted(photos(), LARGE._replace(images=images)) for images in (800, 1250, 1600)]
    assert [(each.epochs, each.batch_size) for each in sizes] == [(50, 64), (32, 128), (25, 128)]
    assert fitted(photos(), LARGE._replace(images=800)).optimizer.lr == 5e-4
    recipe = photos()
    assert (recipe.epochs, recipe.batch_size) == (30, 64)


def test_a_network_with_weights_sees_milder_images() -> None:
    begun = apply_overrides(photos(), ["model.initial_checkpoint=timm"])
    found = fitted(begun, LARGE._replace(images=1000))
    assert found.augmentation == begun.augmentation.model_copy(
        update={"smallest_crop": 0.5, "auto_augment": "rand-m4-n1-mstd0.5-inc1", "erasing": 0.0}
    )
    assert (found.epochs, found.schedule.warmup_epochs) == (8, 0.8)
    assert fitted(begun, LARGE).epochs == 5


def test_a_network_with_weights_keeps_its_size_and_learns_slowly() -> None:
    begun = apply_overrides(photos(), ["model.initial_checkpoint=timm"])
    found = fitted(begun, SMALL)
    assert found.model == begun.model
    assert found.preprocessing == begun.preprocessing
    assert (found.optimizer.lr, found.optimizer.layer_decay, found.epochs) == (3.5e-5, 0.75, 30)


def test_a_run_begins_from_published_weights_from_a_run_or_from_a_file(tmp_path: Path, image_folder: Path) -> None:
    run = begun_run(tmp_path / "run")
    weights, bundle = tmp_path / "w.safetensors", tmp_path / "b.vitx"
    bundle.mkdir()
    for file in (weights, bundle / "manifest.json", bundle / "witness.safetensors"):
        file.touch()

    def begun(source: str) -> Recipe:
        return resolve_recipe("photos", data=str(image_folder), start=source)

    config = timm.get_pretrained_cfg("deit3_small_patch16_224")
    assert config is not None
    of_timm = begun("model:timm/deit3_small_patch16_224?img_size=96")
    assert of_timm.model.name == "deit3_small_patch16_224"
    assert (of_timm.model.initial_checkpoint, of_timm.model.kwargs) == ("timm", {})
    assert (of_timm.preprocessing.image_size, of_timm.preprocessing.mean) == (96, config.mean)
    assert begun("model:timm/deit3_small_patch16_224?img_size=(96,96)") == of_timm
    of_run = begun(str(run.path))
    assert (of_run.model.name, of_run.model.initial_checkpoint) == ("deepvit_digits", str(run.path))
    assert of_run.model.kwargs == {"depth": 2}
    assert of_run.preprocessing == run.info.preprocessing
    assert begun(str(weights)).model.initial_checkpoint == str(weights)
    for source, message in (
        ("model:timm/vit_tiny_patch16_225", "unknown model 'vit_tiny_patch16_225': did you mean vit_tiny_patch16_224"),
        ("model:deit_digits", "timm has no published weights of 'deit_digits'"),
        ("nowhere.pth", "--from nowhere.pth: expected model:timm/NAME, a run folder, or a file of weights"),
        ("model:timm/deit3_small_patch16_224?img_size=(32,64)", r"img_size=\[32, 64\]: expected the side of a square"),
        (str(image_folder), "is not a run: it has no run.json"),
        (str(weights.parent), f"no run; for the weights in that folder give --from {weights}"),
        (str(bundle), "it is a bundle: give the run that it was exported from"),  # its witness set is no weights
    ):
        with pytest.raises(InputError, match=message):
            begun(source)


def test_a_resumed_run_keeps_what_it_began_from(tmp_path: Path, image_folder: Path) -> None:
    run = begun_run(tmp_path / "run")
    started = resolve_recipe("photos", data=str(image_folder), start=str(run.path), overrides=["epochs=3"])
    (tmp_path / "second").mkdir()
    write_json(tmp_path / "second" / "recipe.json", started)
    resumed = {"data": str(image_folder), "resumed": tmp_path / "second"}
    assert resolve_recipe("photos", start=str(run.path), **resumed) == started  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the run began from '.*run': leave it out"):
        resolve_recipe("photos", start="model:timm/deit3_small_patch16_224", **resumed)  # type: ignore[arg-type]
    write_json(tmp_path / "second" / "recipe.json", resolve_recipe("photos", data=str(image_folder)))
    with pytest.raises(InputError, match="the run began from random weights: leave it out, or pass another --out"):
        resolve_recipe("photos", start=str(run.path), **resumed)  # type: ignore[arg-type]


def test_other_initial_weights_than_those_of_from_are_refused(tmp_path: Path, image_folder: Path) -> None:
    run, file = begun_run(tmp_path / "a run"), tmp_path / "again.json"
    write_json(file, resolve_recipe("photos", data=str(image_folder)))  # whole, so it has a beginning too: none
    source = tmp_path / "some.toml"
    source.write_text('epochs = 3\nmodel.name = "deit_tiny_12"\n')
    of_run, of_timm = str(run.path), "model:timm/deit3_small_patch16_224"

    def begun(start: str, file: Path | None, *overrides: str) -> Recipe:
        return resolve_recipe("photos", data=str(image_folder), start=start, file=file, overrides=overrides)

    same = f"model.initial_checkpoint={of_run}"
    refused: list[tuple[str, Path | None, tuple[str, ...], str]] = [
        (of_run, file, (), f"or give --set '{same}'"),
        (of_run, None, ("model.initial_checkpoint=timm",), f"or give --set '{same}'"),
        (of_timm, file, (), "--set model.name=deit3_small_patch16_224 --set model.initial_checkpoint=timm"),
        (of_timm, source, (), "or give --set model.name=deit3_small_patch16_224"),
    ]
    for start, given, overrides, remedy in refused:
        with pytest.raises(InputError, match=f"^--from {re.escape(start)} has no effect: .*{re.escape(remedy)}$"):
            begun(start, given, *overrides)
    assert begun(of_run, file, same).model.initial_checkpoint == of_run
    assert begun(of_run, source).model.initial_checkpoint == of_run  # a file of weights fits several networks
    assert begun(of_timm, source, "model.name=deit3_small_patch16_224").epochs == 3


def test_a_teacher_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def taught(teacher: str, resumed: Path | None = None) -> Recipe:
        return resolve_recipe("digits-deit", overrides=[f"distillation.teacher={teacher}"], resumed=resumed)

    begun = taught("runs/t")
    assert begun.distillation.teacher == str(tmp_path / "runs" / "t")
    assert taught("timm:resnet18@w.pth").distillation.teacher == f"timm:resnet18@{tmp_path / 'w.pth'}"
    assert taught("timm:resnet18").distillation.teacher == "timm:resnet18"
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "recipe.json", begun)
    assert taught("runs/t", tmp_path / "run") == begun
    monkeypatch.chdir("/")
    assert resolve_recipe("digits-deit", resumed=tmp_path / "run") == begun
    # A run of before keeps the text that it was begun with.
    write_json(tmp_path / "run" / "recipe.json", begun.changed({"distillation.teacher": "runs/t"}))
    assert taught("runs/t", tmp_path / "run").distillation.teacher == "runs/t"


def test_a_file_changes_the_settings_it_has_and_the_command_line_goes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "digits-deit"\nepochs = 7\nseed = 5\n[optimizer]\nlr = 1e-4\n[model.kwargs]\ndepth = 2\n')
    found = resolve_recipe(None, file=file, overrides=["seed=6"])
    assert (found.name, found.epochs, found.seed, found.optimizer.lr) == ("digits-deit", 7, 6, 1e-4)
    assert found.model.kwargs == {**get_recipe("digits-deit").model.kwargs, "depth": 2}
    assert found.optimizer.weight_decay == get_recipe("digits-deit").optimizer.weight_decay
    assert resolve_recipe("digits-deepvit", file=file).name == "digits-deepvit"
    # A whole recipe has all arguments of its network.
    whole = found.model_copy(update={"model": found.model.model_copy(update={"kwargs": {"depth": 2}})})
    for each in (found, whole):
        write_json(tmp_path / "recipe.json", each)
        assert resolve_recipe(None, file=tmp_path / "recipe.json") == each
    file.write_text("[model.kwargs.pair]\nfirst = 1\n")  # a value that is a table has names of its own
    assert resolve_recipe("digits-deit", file=file).model.kwargs["pair"] == {"first": 1}
    file.write_text('[model]\nname = "resnet18"\n')
    assert resolve_recipe("digits-deit", file=file).model.kwargs == {}


def test_another_optimizer_or_schedule_in_a_file_drops_the_arguments_of_the_first(tmp_path: Path) -> None:
    """As `--set optimizer.name=` does."""
    recipe = apply_overrides(
        get_recipe("digits-deit"),
        ["optimizer.kwargs.eps=1e-6", "schedule.name=step", "schedule.kwargs.decay_epochs=2", "model.kwargs.depth=2"],
    )
    tables = {
        "optimizer": {"name": "sgd"},
        "schedule": {"name": "poly", "kwargs": {"k_decay": 0.5}},
        "model": {"kwargs": {"name": "x"}},
    }
    changed = with_settings(recipe, tables, tmp_path)
    assert (changed.optimizer.kwargs, changed.schedule.kwargs) == ({}, {"k_decay": 0.5})
    assert changed.model.kwargs == {**recipe.model.kwargs, "name": "x"}  # an argument like any other
    same = {"optimizer": {"name": "adamw", "lr": 0.1}, "schedule": {"name": "step"}}
    assert with_settings(recipe, same, tmp_path) == recipe.changed({"optimizer.lr": 0.1})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "epoch = 3", r"--recipe .*x\.toml: unknown setting 'epoch': did you mean epochs"),
        ("x.toml", "[optimizer]\nrate = 3", "unknown setting 'optimizer.rate'"),
        ("x.toml", "[optimizer]\nlr = nan", "optimizer.lr is .*: Input should be a finite number"),
        ("x.toml", "epochs = 'many'", "epochs is many: Input should be a valid integer"),
        ("x.toml", "optimizer = 3", r"x\.toml: optimizer is a group of settings"),
        ("x.toml", "epochs = ", "cannot be read"),
        ("x.toml", "data = 3", r"x\.toml: data is 3: expected a text, such as the path of a folder of images"),
        ("x.toml", "data = ''", r"x\.toml: data is '': expected a text, such as the path of a folder of images"),
        ("x.json", '{"optimizer.lr": 1}', r"x\.json: 'optimizer\.lr' is one name with dots in it: expected a table"),
        ("x.json", '{"model": {"kwargs.depth": 1}}', r"'model\.kwargs\.depth' is one name with dots in it"),
        ("x.toml", "seed = 1979-05-27", "seed is 1979-05-27: expected a text, a number"),
        ("x.toml", f"seed = 0x{'f' * 5000}", r"x\.toml cannot be read: Exceeds the limit"),
        ("x.toml", f"data = 0x{'f' * 5000}", r"x\.toml cannot be read: Exceeds the limit"),
        ("x.toml", "[model.kwargs]\nx = [07:32:00]", r"model\.kwargs\.x is .*: expected a text, a number"),
        ("x.toml", "[optimizer.kwargs]\neps = inf", r"optimizer\.kwargs has a number that is infinite or NaN"),
        ("x.toml", "[model.kwargs]\nx = [[nan]]", r"model\.kwargs has a number that is infinite or NaN"),
        ("x.toml", f"a{'.a' * 3000} = 1", r"x\.toml has settings nested too deeply: expected a few names with dots"),
        ("x.toml", f"model.kwargs{'.a' * 3000} = 1", r"x\.toml( has settings nested too|: Invalid JSON: recursion)"),
        ("x.json", "[" * 100_000, "cannot be read: maximum recursion depth"),
        ("x.json", '{"model": {"kwargs": {"dept": null}}}', r"x\.json: model\.kwargs\.dept=null has no effect"),
        ("x.json", "[1]", "expected settings by name"),
        ("x.json", '{"optimizer": {"lr": NaN}}', "optimizer.lr is .*: Input should be a finite number"),
        ("x.yaml", "epochs: 3", r"expected a \.toml or \.json file"),
    ],
)
def test_a_file_of_settings_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        resolve_recipe("digits-deit", file=tmp_path / name)


def test_a_recipe_without_a_name_or_images_is_asked_for() -> None:
    with pytest.raises(InputError, match="no recipe: expected a name, such as photos"):
        resolve_recipe(None)
    with pytest.raises(InputError, match="recipe 'photos' has no images of its own: give --data FOLDER"):
        resolve_recipe("photos")


def test_an_empty_text_is_no_place_of_images() -> None:
    """As the path of a folder it would be the current one, and of an unset variable it would be the digits."""
    with pytest.raises(InputError, match=r"^--data is '': expected a text, such as the path of a folder of images$"):
        resolve_recipe("digits-deit", data="")


def test_an_image_of_too_many_pixels_does_not_end_the_choice_of_a_size() -> None:
    """Pillow refuses it with an error that is no OSError; of large sets the run says so when it reads the image."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    assert _shorter_side(bomb) == 0


def test_every_setting_is_listed_with_type_and_reason(vitx: Vitx) -> None:
    listed = all_settings()
    assert {setting.key for setting in listed} == {*setting_names()}
    assert [setting.key for setting in listed if not (setting.type and setting.meaning)] == []
    code, out, _ = vitx("settings", "optimizer.layer_decay", "--json")
    assert code == 0
    assert json.loads(out) == [
        {
            "key": "optimizer.layer_decay",
            "type": "number",
            "bounds": "> 0, ≤ 1",
            "default": 1.0,
            "meaning": "factor of the learning rate from each layer to the one before it",
        }
    ]
    assert vitx("settings", "schedule")[1].count("schedule.") == len(
        [s for s in listed if s.key.startswith("schedule")]
    )
    shown = vitx("settings")[1]
    assert "vitx train --set KEY=VALUE" in shown
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in shown.splitlines()]
    assert ["key", "type", "bounds", "default", "what it is"] in rows
    cells = {row[0]: row[3] for row in rows if len(row) == 5}
    named = ("epochs", "optimizer.name", "ema_warmup", "preprocessing.image_size", "optimizer.betas")
    assert [cells[name] for name in named] == ["the recipe's", "adamw", "true", "the recipe's", "[0.9, 0.999]"]
    assert as_given("é") == "é"
    assert as_given(["é"]) == '["é"]'  # as `--set` takes it, not "\\u00e9"
    code, _, said = vitx("settings", "optimizer.rate")
    assert (code, "unknown setting 'optimizer.rate': did you mean" in said) == (2, True)


def test_a_recipe_is_shown_in_full(vitx: Vitx) -> None:
    code, out, _ = vitx("recipes", "digits-deit")
    assert code == 0
    for text in ("Command: vitx train digits-deit", "Hardware:", "Result:", "optimizer.lr", "0.002"):
        assert text in out
    assert json.loads(vitx("recipes", "photos", "--json")[1])["recipe"]["name"] == "photos"
    code, _, said = vitx("recipes", "photo")
    assert (code, "unknown recipe 'photo': did you mean photos" in said) == (2, True)
