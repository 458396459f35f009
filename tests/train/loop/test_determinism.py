"""`execution.deterministic`: its switches are restored afterwards, and what it cannot have is refused by name."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cli_fixture import Vitx
from training_jobs import TINY, TINY_SETTINGS, metrics_of, recipe_of
from vitx.core.errors import CheckFailed, InputError
from vitx.train import lr_find, train
from vitx.train.loop import determinism, dry_run
from vitx.train.loop.determinism import (
    FIXED,
    WORKSPACE,
    deterministic_algorithms,
    device_to_train_on,
    fix_cublas_workspace,
    own_generators,
)
from vitx.train.loop.trainer import Trainer
from vitx.train.losses import objective

ON = "execution.deterministic=true"
ALONE = ("--set", "workers=0")  # an error that leaves workers waits for their end


def switches() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def switch(mode: bool, warn_only: bool, benchmark: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(params=[(False, False, False), (True, True, True)], ids=["as torch starts", "as a caller set them"])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool, bool]]:
    found = switches()
    switch(*request.param)
    yield request.param
    switch(*found)


def test_the_switches_are_put_back(before: tuple[bool, bool, bool]) -> None:
    with deterministic_algorithms():
        assert switches() == (True, False, False)
    assert switches() == before
    with pytest.raises(RuntimeError, match="another error"), deterministic_algorithms():
        raise RuntimeError("another error")
    assert switches() == before


def test_training_puts_them_back_and_two_runs_have_the_same_bits(tmp_path: Path, image_folder: Path) -> None:
    recipe = recipe_of(*TINY, "workers=2", "epochs=1", "batch_size=6", ON).on_data(str(image_folder))
    before = switches()
    seen = []
    for name in ("one", "other"):
        train(recipe, tmp_path / name, device="cpu", after_epoch=lambda *_: seen.append(switches()), quiet=True)
    assert seen == [(True, False, False)] * 2
    assert switches() == before
    one, other = (tmp_path / name / "checkpoints" / "last" / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
    assert metrics_of(tmp_path / "one") == metrics_of(tmp_path / "other")


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_workspace_and_the_switches_come_before_the_device_is_chosen(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(determinism, "fix_cublas_workspace", lambda device: seen.append(device))

    def choose(device: str) -> torch.device:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return torch.device("cpu")

    monkeypatch.setattr(determinism, "choose_device", choose)
    with device_to_train_on("auto", deterministic=deterministic) as device:
        assert device == torch.device("cpu")
    assert seen == (["auto", True] if deterministic else [False])


@pytest.mark.parametrize("steps", [dry_run.dry_run, lr_find.lr_find])
def test_what_is_tried_before_a_run_takes_its_kernels_and_leaves_the_generators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: Any
) -> None:
    monkeypatch.setattr(lr_find, "STEPS", 2)
    seen = []

    class Watched(Trainer):
        def batches(self, epoch: int) -> Iterator[Any]:
            seen.append(switches())
            return super().batches(epoch)

    monkeypatch.setattr(dry_run, "Trainer", Watched)
    monkeypatch.setattr(lr_find, "Trainer", Watched)
    before, drawn = switches(), torch.get_rng_state()
    folder = {"out": tmp_path / "run"} if steps is dry_run.dry_run else {}
    with suppress(CheckFailed):  # the loss need not fall in two steps
        steps(recipe_of(*TINY, "workers=0", ON), **folder, device="cpu")
    assert seen == [(True, False, False)]
    assert switches() == before
    assert torch.equal(torch.get_rng_state(), drawn)


def test_an_operator_without_a_deterministic_form_is_named(
    vitx: Vitx, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = objective.image_targets

    def with_put(*arguments: Any) -> Tensor:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))  # of two writes to one place either may come last
        return targets(*arguments)

    monkeypatch.setattr(objective, "image_targets", with_put)
    settings = ("--data", image_folder, "--set", "epochs=1", *TINY_SETTINGS, *ALONE, "-q", "--device", "cpu", "--out")
    code, _, err = vitx("train", "digits-deepvit", "--set", ON, *settings, tmp_path / "run")
    assert code == 2
    assert "execution.deterministic: torch's operator 'put_' has no deterministic form: leave out what uses it" in err
    assert "--set execution.deterministic=false" in err
    again = (*settings, tmp_path / "run", "--resume", "--set", "execution.deterministic=false")
    assert vitx("train", "digits-deepvit", *again)[0] == 0, "the remedy that was named"


def started(monkeypatch: pytest.MonkeyPatch, workspace: str | None, *, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setenv(WORKSPACE, workspace or "")  # so that it is put back, whatever the block leaves
    if workspace is None:
        monkeypatch.delenv(WORKSPACE)


@pytest.mark.parametrize(("workspace", "cuda"), [(None, False), *((each, True) for each in FIXED)])
def test_the_workspace_of_cublas_is_fixed_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, workspace: str | None, cuda: bool
) -> None:
    started(monkeypatch, workspace, cuda=cuda)
    fix_cublas_workspace("auto")
    assert os.environ[WORKSPACE] == (workspace or FIXED[0])


@pytest.mark.parametrize(
    ("workspace", "cuda", "text"),
    [(None, True, "is not set, and CUDA has started"), (":0:0", False, "is ':0:0'")],
)
def test_another_workspace_is_refused(
    monkeypatch: pytest.MonkeyPatch, workspace: str | None, cuda: bool, text: str
) -> None:
    started(monkeypatch, workspace, cuda=cuda)
    with pytest.raises(InputError) as caught:
        fix_cublas_workspace("auto")
    assert str(caught.value) == (
        "execution.deterministic needs CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8 before CUDA starts, and it "
        f"{text}: start with CUBLAS_WORKSPACE_CONFIG=:4096:8"
    )


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        (
            "this operation is not deterministic because it uses CuBLAS … CUBLAS_WORKSPACE_CONFIG=:4096:8 or …",
            "execution.deterministic: CUDA has started without CUBLAS_WORKSPACE_CONFIG: start with "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        ),
        (
            "put_ does not have a deterministic implementation, but you set …",
            "execution.deterministic: torch's operator 'put_' has no deterministic form: leave out what uses it, or do "
            "without the same bits: --set execution.deterministic=false",
        ),
    ],
)
def test_torchs_own_complaints_are_told(complaint: str, said: str) -> None:
    with pytest.raises(InputError) as refused, deterministic_algorithms():
        raise RuntimeError(complaint)
    assert str(refused.value) == said


def test_one_training_at_a_time_with_generators_of_its_own() -> None:
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with own_generators(torch.device("cpu")):
            drawn.append(torch.rand(2))
            other = pytest.raises(InputError, match="another thread of this process trains: train one after the other")
            with other, own_generators(torch.device("cpu")):
                pass
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpu_needs_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, None, cuda=True)
    fix_cublas_workspace("cpu")
    assert WORKSPACE not in os.environ
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fix_cublas_workspace("auto")
    assert WORKSPACE not in os.environ


def switch_gradients_off() -> None:
    torch.set_grad_enabled(False)


def switch_to_float64() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("switch_one", [switch_gradients_off, switch_to_float64])
def test_what_a_notebook_has_set_changes_no_bit_of_a_run_and_stays_set(
    tmp_path: Path, switch_one: Callable[[], None]
) -> None:
    def trained(out: Path) -> bytes:
        train(recipe_of(*TINY, "epochs=1"), out, device="cpu", quiet=True)
        return (out / "checkpoints" / "last" / "ema.safetensors").read_bytes()

    alone = trained(tmp_path / "alone")
    found = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        switch_one()
        before = torch.is_grad_enabled(), torch.get_default_dtype()
        assert trained(tmp_path / "notebook") == alone
        assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before != found
    finally:
        torch.set_grad_enabled(found[0])
        torch.set_default_dtype(found[1])
    with torch.inference_mode():
        assert trained(tmp_path / "inference") == alone
    with torch.autocast("cpu", torch.bfloat16):
        assert trained(tmp_path / "autocast") == alone
        assert torch.is_autocast_enabled("cpu")
