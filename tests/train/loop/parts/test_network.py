"""The network of a recipe: its arguments, its weights, and how it is executed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from training_jobs import TINY, recipe_of
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.run import ModelSpec, RunFolder
from vitx.train.loop import network as module
from vitx.train.loop.network import (
    apply_execution,
    build_network,
    drop_path_rates,
    load_initial_weights,
    model_spec,
)
from vitx.train.recipes.optimization_settings import Execution

CPU = torch.device("cpu")
NO_MIXING = ("losses.mixing=0", "losses.contrastive=0", "losses.cosine=0", "cutmix.probability=0")


def tiny(heads: int = 2, **kwargs: Any) -> nn.Module:
    return timm.create_model("deit_digits", depth=1, embed_dim=16, num_heads=heads, num_classes=3, **kwargs)


def test_arguments_that_follow_from_the_recipe() -> None:
    recipe = recipe_of(*TINY)
    assert model_spec(recipe, 7) == ModelSpec(
        name=recipe.model.name, num_classes=7, kwargs={**recipe.model.kwargs, "img_size": 32, "patch_head": True}
    )
    assert "img_size" not in recipe.model.kwargs, "the recipe's own are left as they are"
    assert "patch_head" not in model_spec(recipe_of(*TINY, *NO_MIXING), 7).kwargs
    convolutional = recipe_of(*NO_MIXING).model_copy(update={"model": SimpleNamespace(name="resnet10t", kwargs={})})
    assert model_spec(convolutional, 7) == ModelSpec(name="resnet10t", num_classes=7, kwargs={})


def test_the_network_is_built_to_be_trained_and_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, looked = recipe_of(*TINY), []
    monkeypatch.setattr(module, "check_model", lambda *given: looked.append(given))
    model = build_network(recipe, model_spec(recipe, 3))
    assert looked == [(recipe, model)]
    assert all(part.training for part in model.modules())
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_a_loss_that_the_network_cannot_have_is_named_before_its_argument() -> None:
    mixing = recipe_of(*TINY).model_copy(update={"model": SimpleNamespace(name="resnet10t", kwargs={})})
    with pytest.raises(InputError, match=r"losses\."):
        build_network(mixing, model_spec(mixing, 3))
    plain = recipe_of(*TINY, *NO_MIXING, "model.kwargs.nonsense=1")
    with pytest.raises(InputError, match="nonsense"):
        build_network(plain, model_spec(plain, 3))


def test_images_that_the_network_cannot_take_are_refused() -> None:
    class Fails(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert not self.training
            assert not torch.is_grad_enabled()
            raise RuntimeError(f"not {tuple(images.shape)}\nand more")

    with pytest.raises(InputError) as refused:
        module._check_forward(Fails(), "name", 40)
    assert str(refused.value) == "model 'name' fails on an image of 40 px: not (1, 3, 40, 40)"


def test_drop_path_by_branch() -> None:
    model = timm.create_model("deit_digits", depth=2, embed_dim=16, num_heads=2, drop_path_rate=0.2)
    rates = drop_path_rates(model)
    assert list(rates.values()) == [pytest.approx(0.2)] * 2
    assert all(isinstance(part, nn.Module) and part.drop_prob == rate for part, rate in rates.items())


def test_weights_that_timm_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, published, asked = tiny(), tiny(), []

    def publish(*given: Any) -> nn.Module:
        asked.append(given)
        return published

    monkeypatch.setattr(module, "published_model", publish)
    spec = ModelSpec(name="deit_digits", num_classes=3, kwargs={})
    load_initial_weights(model, spec, "timm", quiet=True)
    assert asked == [(spec, "give weights of 'deit_digits' with --from FILE, or begin without any")]
    assert all(torch.equal(value, published.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("quiet", [True, False])
def test_weights_of_a_run_or_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    model, asked = tiny(), []

    def load(*given: Any, **named: Any) -> Any:
        asked.append((*given, named))
        return SimpleNamespace(lines=lambda: ["one", "other"])

    spec = ModelSpec(name="deit_digits", num_classes=3, kwargs={"depth": 1, "embed_dim": 16, "num_heads": 2})
    folder = tmp_path / "checkpoints" / "epoch-0001"
    run = SimpleNamespace(
        info=SimpleNamespace(model=spec), path=tmp_path, checkpoint=lambda which: (folder / which, "state")
    )
    monkeypatch.setattr(module, "load_public_checkpoint", load)
    monkeypatch.setattr(module, "weights_file", lambda *given: "-".join(given))
    monkeypatch.setattr(RunFolder, "open", lambda path: run if path == tmp_path else None)
    load_initial_weights(model, spec, str(tmp_path / "a.pth"), quiet=quiet)
    load_initial_weights(model, spec, str(tmp_path), quiet=quiet)
    named = {"to_train": True}
    assert asked == [(model, tmp_path / "a.pth", named), (model, folder / "best" / "best-state", named)]
    said = [] if quiet else ["initial weights: one", "initial weights: other"] * 2
    assert capsys.readouterr().err.splitlines() == said
    with pytest.raises(InputError) as refused:
        load_initial_weights(tiny(heads=4), spec, str(tmp_path), quiet=quiet)
    assert str(refused.value) == (
        f"'{tmp_path}' was trained with attention of 2 heads, and this network has 4: give it the run's, as "
        "model.kwargs.num_heads=2"
    )
    deeper = timm.create_model("deit_digits", depth=2, embed_dim=16, num_heads=2, num_classes=3)
    load_initial_weights(deeper, spec, str(tmp_path), quiet=True)  # its other layers are for the checkpoint's check
    assert len(asked) == 3


def test_nothing_is_applied_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_enable_grad_checkpointing", "synchronize_batch_norm", "_require_compiler"):
        monkeypatch.delattr(module, name)
    model: Any = tiny()
    weight = model.patch_embed.proj.weight
    execution = Execution(sync_batch_norm=True, channels_last=False, grad_checkpointing=False, compile=False)
    assert apply_execution(model, "deit_digits", execution, CPU, processes=1) is model
    assert weight.is_contiguous()


def test_what_is_asked_for_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    convolution = nn.Conv2d(2, 2, 3)
    model, done = nn.Sequential(convolution), list[Any]()
    model.set_grad_checkpointing = lambda on: done.append(("checkpointing", on))  # type: ignore[assignment]

    def synchronize(*given: Any) -> nn.Module:
        done.append(("norm", *given))
        return model

    monkeypatch.setattr(module, "synchronize_batch_norm", synchronize)
    monkeypatch.setattr(module, "_require_compiler", lambda device: done.append(("compiler", device)))
    monkeypatch.setattr(nn.Module, "compile", lambda part: done.append(("compiled", part)))
    execution = Execution(sync_batch_norm=True, channels_last=True, grad_checkpointing=True, compile=True)
    assert apply_execution(model, "name", execution, CPU, processes=2) is model
    assert done == [("checkpointing", True), ("norm", model, CPU), ("compiler", CPU), ("compiled", model)]
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    done.clear()
    blocks: Any = timm.create_model("deit_digits", depth=2, embed_dim=16, num_heads=2)
    apply_execution(blocks, "name", Execution(compile=True), CPU, processes=1)
    assert done == [("compiler", CPU), *(("compiled", block) for block in blocks.blocks)]


def test_a_network_without_checkpointing_is_named() -> None:
    with pytest.raises(InputError, match=r"model 'name' has no gradient checkpointing .*: leave it off"):
        apply_execution(nn.Linear(1, 1), "name", Execution(grad_checkpointing=True), CPU, processes=1)


def test_where_nothing_can_be_compiled_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled(nn.Module):
        error: Exception | None = None
        compiled = False

        def compile(self) -> None:
            self.compiled = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (self.compiled, x.device) == (True, CPU)
            if self.error is not None:
                raise self.error
            return x

    monkeypatch.setattr(nn, "ReLU", Compiled)
    module._require_compiler(CPU)
    monkeypatch.setattr(Compiled, "error", RuntimeError("no g++\nand more"))
    with pytest.raises(EnvironmentMissing) as refused:
        module._require_compiler(CPU)
    assert str(refused.value) == (
        "execution.compile: torch cannot compile for cpu here (no g++): install what it lacks, or set "
        "execution.compile=false"
    )
