"""A network from its specification, its weights from a file, its input from bytes, and the device it runs on."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.run import ModelSpec
from vitx.models import Normalization, build_model, image_tensor, load_run_model, load_weights
from vitx.models.device import choose_device
from vitx.models.source import SourceRequest

SPEC = ModelSpec(name="deit_digits", num_classes=7, kwargs={"depth": 1})


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))


def test_weights_that_cannot_be_opened_are_not_said_to_be_missing(tmp_path: Path) -> None:
    save_file(small().state_dict(), path := tmp_path / "w.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as error:
            load_weights(small(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.value.errno == errno.EMFILE


def test_a_network_has_the_classes_and_arguments_of_its_specification() -> None:
    model: Any = build_model(SPEC)
    assert (model.num_classes, len(model.blocks)) == (7, 1)
    with pytest.raises(InputError, match="unknown model 'deit_digit': did you mean deit_digits"):
        build_model(SPEC.model_copy(update={"name": "deit_digit"}))
    with pytest.raises(InputError, match=r"^unknown model 'test_vi': did you mean test_vit or .*\? \d{4} are known$"):
        build_model(SPEC.model_copy(update={"name": "test_vi"}))
    with pytest.raises(InputError, match=r"^model 'deit_digits' does not take these arguments: .*depht"):
        build_model(SPEC.model_copy(update={"kwargs": {"depht": 1}}))


def test_a_network_and_its_pixels_are_float32_whatever_the_default_type() -> None:
    """So that weights, and what is exported of them, are those of a process that has set none."""
    images, mean, std = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    before = image_tensor(images, mean, std)
    torch.set_default_dtype(torch.float64)
    try:
        assert {value.dtype for value in build_model(SPEC).parameters()} == {torch.float32}
        assert torch.equal(image_tensor(images, mean, std), before)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_network_that_was_loaded_in_inference_mode_can_be_differentiated() -> None:
    with torch.inference_mode():
        model = SourceRequest("model:deit_digits", weights="random").load().model
    model(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert all(value.grad is not None for value in model.parameters())


def test_a_network_may_be_named_with_the_tag_of_its_weights() -> None:
    model: Any = build_model(SPEC.model_copy(update={"name": "test_vit.r160_in1k"}))
    assert (model.num_classes, len(model.blocks), model.pretrained_cfg["tag"]) == (7, 1, "r160_in1k")
    for tag in ("r160", ""):
        with pytest.raises(InputError, match=rf"^unknown tag of 'test_vit' '{tag}': .*known: r160_in1k$"):
            build_model(SPEC.model_copy(update={"name": f"test_vit.{tag}"}))


def test_weights_are_loaded_whole(tmp_path: Path) -> None:
    source, target = small(), small()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"0.bias": torch.zeros(4)},
            r"1 entry differs, the first is '0\.bias' \(\(4,\) in the file, \(3,\) in the model\)",
        ),
        ({"0.bias": None}, r"1 entry differs, the first is '0\.bias' \(absent in the file, \(3,\) in the model\)"),
        ({"2.x": torch.zeros(1)}, r"1 entry differs, the first is '2\.x' \(\(1,\) in the file, absent in the model\)"),
        ({"1.weight": None, "0.weight": None}, r"2 entries differ, the first is '0\.weight'"),
    ],
)
def test_the_first_entry_that_differs_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    state = {**small().state_dict(), **changes}
    path = tmp_path / "w.safetensors"
    save_file({key: value for key, value in state.items() if value is not None}, path)
    target = small()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(InputError, match=rf"w\.safetensors belongs to another architecture: {message}"):
        load_weights(target, path)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"something else")
    with pytest.raises(InputError, match=r"w\.safetensors is not a safetensors file: "):
        load_weights(small(), tmp_path / "w.safetensors")


@pytest.mark.parametrize("averaged", [True, False])
def test_a_runs_network_has_averaged_weights_where_there_are_any(tmp_path: Path, averaged: bool) -> None:
    raw, ema = build_model(SPEC), build_model(SPEC)
    save_file(raw.state_dict(), tmp_path / "model.safetensors")
    if averaged:
        save_file(ema.state_dict(), tmp_path / "ema.safetensors")
    asked: list[str] = []
    names = ("model.safetensors", "ema.safetensors")[: 1 + averaged]
    its_state = SimpleNamespace(sha256=dict.fromkeys(names, "digest"))

    def checkpoint(which: str) -> tuple[Path, Any]:
        asked.append(which)
        return tmp_path, its_state

    run: Any = SimpleNamespace(checkpoint=checkpoint, info=SimpleNamespace(model=SPEC))
    model, state = load_run_model(run, "last")
    given: Any = state
    load_run_model(run)
    assert (asked, given, model.training) == (["last", "best"], its_state, False)
    trained, _ = load_run_model(run, "best-raw")
    for found, expected in ((model, ema if averaged else raw), (trained, raw)):
        assert all(torch.equal(value, expected.state_dict()[key]) for key, value in found.state_dict().items())


def test_weights_that_a_training_has_replaced_meanwhile_are_looked_for_again(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    save_file(build_model(SPEC).state_dict(), tmp_path / "new" / "model.safetensors")
    folders, its_state = iter([tmp_path / "removed", tmp_path / "new"]), SimpleNamespace(sha256={})
    run: Any = SimpleNamespace(checkpoint=lambda which: (next(folders), its_state), info=SimpleNamespace(model=SPEC))
    load_run_model(run)
    assert list(folders) == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bytes_become_the_normalised_image(memory_format: torch.memory_format) -> None:
    images = torch.tensor([[[[0, 51, 255], [102, 153, 204]]]], dtype=torch.uint8)  # one row of two pixels
    mean, std = (0.2, 0.4, 0.5), (0.1, 0.5, 0.25)
    found = Normalization(mean, std)(images, memory_format)
    expected = [[[[-2.0, 2.0]], [[-0.4, 0.4]], [[2.0, 1.2]]]]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)
    assert found.is_contiguous(memory_format=memory_format)
    assert torch.equal(image_tensor(images.numpy(), mean, std), found)
    assert images.flatten().tolist() == [0, 51, 255, 102, 153, 204]


@pytest.mark.parametrize(
    ("name", "gpu", "local_rank", "device"),
    [
        ("auto", False, None, "cpu"),
        ("auto", True, None, "cuda"),
        ("auto", True, "3", "cuda:3"),
        ("auto", False, "3", "cpu"),
        ("cpu", True, "3", "cpu"),
        ("cuda", True, None, "cuda"),
        ("cuda", True, "1", "cuda:1"),
    ],
)
def test_a_process_of_torchrun_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: bool, local_rank: str | None, device: str
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert choose_device(name) == torch.device(device)
    assert chosen == ([torch.device(device)] if ":" in device else [])


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (64, 2)])
def test_torch_takes_no_more_threads_than_the_cores_of_its_container(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("vitx.models.device.usable_cores", lambda: cores)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        choose_device("cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == torch.device("cpu")
    with pytest.raises(EnvironmentMissing, match=r"^device cuda was asked for, but torch sees no GPU; choose --dev"):
        choose_device("cuda")
    with pytest.raises(InputError, match=r"^unknown device 'tpu': did you mean cpu\? known: auto, cpu, cuda$"):
        choose_device("tpu")
