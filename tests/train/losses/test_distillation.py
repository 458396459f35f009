"""Distillation from a teacher, and initial weights: formulas, other normalisations, other image sizes."""

from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from safetensors.torch import save_file

from reference import seq
from training_jobs import TINY, metrics_of, recipe_of, train_one
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.models import load_run_model
from vitx.train.loop.distributed.processes import ALONE
from vitx.train.loop.trainer import Trainer
from vitx.train.losses.distillation import Teacher, distillation_loss, load_teacher
from vitx.train.recipes.optimization_settings import Distillation
from vitx.train.recipes.recipe import Recipe

SOFT = Distillation(teacher="x", kind="soft", temperature=3.0)


@pytest.fixture
def teacher_run(tmp_path: Path, image_folder: Path) -> Path:
    run = tmp_path / "teacher"
    train_one(recipe_of(*TINY, "epochs=1", "workers=0").on_data(str(image_folder)), run, {})
    return run


def trainer_of(recipe: Recipe, folder: Path) -> Trainer:
    return Trainer(recipe, RunFolder(folder), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)


def test_the_losses_are_those_of_the_paper() -> None:
    student, teacher = seq(0, 4, 5), seq(1, 4, 5)
    hard = distillation_loss(student, teacher, Distillation(teacher="x"))
    by_hand = [-(row - row.exp().sum().log())[other.argmax()] for row, other in zip(student, teacher, strict=True)]
    assert hard.item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-6)
    soft = distillation_loss(student, teacher, SOFT)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    assert soft.item() == pytest.approx(9 * (p * (p / q).log()).sum(-1).mean().item(), rel=1e-5)
    assert distillation_loss(teacher, teacher, SOFT).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_teacher_without_an_answer_teaches_no_class(kind: Literal["hard", "soft"], value: float) -> None:
    teacher = seq(1, 4, 5)
    teacher[2, 3] = value
    assert distillation_loss(seq(0, 4, 5), teacher, Distillation(teacher="x", kind=kind)).isnan()


def test_a_teacher_sees_the_images_in_its_own_normalisation() -> None:
    ours = Preprocessing(image_size=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    pixels = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (ours.mean, ours.std))
    teacher = Teacher(torch.nn.Identity(), SOFT, student=ours, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    seen = (pixels - mean) / std * teacher.scale + teacher.shift
    theirs = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(1, 3, 1, 1)
    torch.testing.assert_close(seen, (pixels - theirs[0]) / theirs[1])


def test_a_run_teaches(teacher_run: Path, image_folder: Path, tmp_path: Path) -> None:
    settings = (f"distillation.teacher={teacher_run}", "distillation.weight=0.25", "epochs=1", "workers=0")
    recipe = recipe_of(*TINY, *settings, "losses.contrastive=0", "losses.mixing=0", "losses.cosine=0")
    train_one(recipe.on_data(str(image_folder)), tmp_path / "student", {})
    losses = metrics_of(tmp_path / "student")[0]["losses"]
    assert losses["total"] == pytest.approx(0.75 * losses["classification"] + 0.25 * losses["distillation"], rel=1e-5)


def test_deits_distillation_token_learns_from_the_teacher(
    teacher_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(
        "model.name=deit_tiny_distilled_patch16_224",
        "model.kwargs.depth=1",
        f"distillation.teacher={teacher_run}",
        "distillation.weight=1",
        *("losses.contrastive=0", "losses.mixing=0", "losses.cosine=0", "workers=0", "epochs=1"),
    ).on_data(str(image_folder))
    trainer = trainer_of(recipe, tmp_path / "run")
    model: Any = trainer.model
    before = model.head.weight.clone(), model.head_dist.weight.clone()
    trainer.stepper(1, next(trainer.batches(1)))
    assert model.head.weight.grad.abs().max() == 0, "with all weight on the teacher the labels' head stays"
    assert model.head_dist.weight.grad.abs().max() > 0
    assert before[1].shape == model.head_dist.weight.shape


def test_a_teacher_of_timm_from_a_file(tmp_path: Path) -> None:
    network: Any = timm.create_model("resnet10t", num_classes=3)
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    settings = Distillation(teacher=f"timm:resnet10t@{tmp_path / 'teacher.safetensors'}")
    teacher = load_teacher(settings, Preprocessing(image_size=32), ("a", "b", "c"))
    assert teacher is not None
    assert torch.equal(teacher.network.state_dict()["fc.weight"], network.state_dict()["fc.weight"])
    assert not any(parameter.requires_grad for parameter in teacher.network.parameters())


def test_a_student_that_goes_on_with_another_teacher_is_told_so(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"distillation.teacher=timm:resnet10t@{tmp_path / 'teacher.safetensors'}", "workers=0")
    recipe = recipe_of(*TINY, *settings).on_data(str(image_folder))
    said = "resumed with a teacher whose weights are not those it was begun with"
    for network, changed in ((0, False), (0, False), (1, True)):
        torch.manual_seed(network)
        weights: Any = timm.create_model("resnet10t", num_classes=3).state_dict()
        save_file(weights, tmp_path / "teacher.safetensors")
        trainer = trainer_of(recipe, tmp_path / "student")
        trainer.quiet = False
        trainer.open_run()
        assert (said in capsys.readouterr().err.splitlines()) is changed


def test_a_teacher_without_a_classifier_of_these_classes_is_refused(tmp_path: Path) -> None:
    network: Any = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    file = f"timm:vit_tiny_patch16_224@{tmp_path / 'teacher.safetensors'}"
    for name, message in (
        (file, r"has no classifier for these classes: head\.bias, head\.weight would stay random"),
        ("timm:resnet10t", "was published for 1000 classes, the data has 3"),
    ):
        with pytest.raises(InputError, match=message):
            load_teacher(Distillation(teacher=name), Preprocessing(image_size=32), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [("timm:resnet10", "unknown teacher of timm 'resnet10'"), ("nowhere", "no run at 'nowhere'")],
)
def test_a_missing_teacher_is_named(teacher: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_teacher(Distillation(teacher=teacher), Preprocessing(image_size=32), ("a", "b"))


def test_a_teacher_of_other_classes_or_another_size_is_refused(teacher_run: Path) -> None:
    settings = Distillation(teacher=str(teacher_run))
    with pytest.raises(InputError, match="predicts the classes class-0, class-1, class-2, the data has others"):
        load_teacher(settings, Preprocessing(image_size=32), ("a", "b", "c"))
    names = ("class-0", "class-1", "class-2")
    message = r"teacher' was trained on images of 32 px, and preprocessing\.image_size is 64: set it to 32, or train a "
    with pytest.raises(InputError, match=message):
        load_teacher(settings, Preprocessing(image_size=64), names)


def test_fine_tuning_starts_from_a_runs_weights_at_another_size(
    teacher_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    settings = (f"model.initial_checkpoint={teacher_run}", "preprocessing.image_size=48")
    model: Any = trainer_of(recipe_of(*TINY, *settings).on_data(str(image_folder)), tmp_path / "run").model
    source: Any = load_run_model(RunFolder(teacher_run))[0]
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert torch.equal(model.head.weight, source.head.weight)
    assert model.pos_embed.shape == (1, 1 + 12 * 12, 16)
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    # The mean of a mixed map follows from the number of tokens (docs/maths.md §3.1).
    mix, norm = model.blocks[1].attn.reatten_matrix, model.blocks[1].attn.var_norm
    torch.testing.assert_close(norm.running_mean, mix.weight.flatten(1).sum(1) / 145 + mix.bias)


def test_weights_of_another_network_are_refused(teacher_run: Path, image_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        *TINY, "model.kwargs.depth=3", f"model.initial_checkpoint={teacher_run}", "model.kwargs.attention=plain"
    )
    with pytest.raises(InputError, match="another architecture"):
        trainer_of(recipe.on_data(str(image_folder)), tmp_path / "run")


def test_weights_of_other_heads_are_refused_as_no_shape_tells_them(image_folder: Path, tmp_path: Path) -> None:
    plain = (*TINY, "model.kwargs.attention=plain", "workers=0", "epochs=1")
    train_one(recipe_of(*plain).on_data(str(image_folder)), tmp_path / "start", {})
    begun = (*plain, f"model.initial_checkpoint={tmp_path / 'start'}", "model.kwargs.num_heads=4")
    message = r"start' was trained with attention of 2 heads, and this network has 4: .* model\.kwargs\.num_heads=2$"
    with pytest.raises(InputError, match=message):
        trainer_of(recipe_of(*begun).on_data(str(image_folder)), tmp_path / "run")
    scaled = (*begun[:-1], "model.kwargs.attention=attn-scale", "model.kwargs.feat_scale=true")
    model = trainer_of(recipe_of(*scaled).on_data(str(image_folder)), tmp_path / "run").model  # begins without change
    scales = [value for name, value in model.named_parameters() if "lamb" in name]
    assert scales
    assert not any(scale.any() for scale in scales)
