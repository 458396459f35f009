"""What a bundle states of its network: names, classes, preprocessing, digests; and weights that are refused."""

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from timm.models import PretrainedCfg
from torch import nn

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, RunFolder
from vitx.models import build_model, source
from vitx.models.public_checkpoint import save_weights
from vitx.models.source import (
    Source,
    SourceInfo,
    SourceRequest,
    preprocessing_of,
    untrained_norms,
    with_arguments,
)

RANDOM = SourceRequest("model:deit_digits", weights="random")


@pytest.mark.parametrize(
    ("target", "is_model", "network"),
    [
        ("model:deit_digits", True, "deit_digits"),
        ("model:timm/resnet18", True, "resnet18"),
        ("runs/mine", False, "runs/mine"),
        ("mymodel:deit", False, "mymodel:deit"),
    ],
)
def test_a_target_is_a_network_or_a_run(target: str, is_model: bool, network: str) -> None:
    request = SourceRequest(target)
    assert (request.is_model, request.network) == (is_model, network)
    assert (request.which, request.weights, request.data) == ("best", "pretrained", None)
    assert {request: "as a key"}[SourceRequest(target)] == "as a key"
    by_path = SourceRequest(Path(target))
    assert (by_path.is_model, by_path.network) == (is_model, network)
    assert SourceRequest(Path("model:deit_digits?depth=2")).arguments == {"depth": 2}


@pytest.mark.parametrize(
    ("which", "metrics", "expected"),
    [
        ("best", {"epoch": 3, "top1": 0.9, "raw": {"top1": 0.8}}, {"epoch": 3, "top1": 0.9, "raw": {"top1": 0.8}}),
        ("best-raw", {"epoch": 3, "top1": 0.9, "cos_sim": [0.1], "raw": {"top1": 0.8}}, {"epoch": 3, "top1": 0.8}),
        ("last-raw", {"epoch": 3, "top1": 0.9}, {"epoch": 3}),  # a run before both were measured
    ],
)
def test_metrics_are_those_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, which: Any, metrics: dict[str, Any], expected: dict[str, Any]
) -> None:
    state = SimpleNamespace(metrics=metrics, sha256={"model.safetensors": "raw", "ema.safetensors": "averaged"})
    monkeypatch.setattr(source, "load_run_model", lambda *_: (nn.Identity(), state))
    about = SimpleNamespace(model=None, class_names=(), preprocessing=None, data="digits", recipe=None)
    run: Any = SimpleNamespace(path="run", info=about)
    found = source._source_from_run(run, which)
    assert (found.metrics, found.checkpoint_sha256) == (expected, "averaged" if which == "best" else "raw")


def test_an_unknown_name_and_a_folder_that_is_no_run_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    SourceRequest("model:timm/resnet18").require_known()
    with pytest.raises(InputError, match="unknown model 'resnet19'"):
        SourceRequest("model:timm/resnet19").require_known()
    with pytest.raises(InputError, match="unknown model 'resnet19'"):
        SourceRequest("model:timm/resnet19", weights="random").load()
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"no run at|is not a run: it has no run\.json"):
            SourceRequest(str(folder)).require_known()
        with pytest.raises(InputError, match=r"no run at|is not a run: it has no run\.json"):
            SourceRequest(str(folder)).load()


def test_a_random_network_is_the_same_in_every_process() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = RANDOM.load()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = build_model(ModelSpec(name="deit_digits", num_classes=10)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in first.model.state_dict().items())
    digest = hashlib.sha256()
    for key in sorted(expected):
        digest.update(key.encode() + b"\0" + expected[key].numpy().tobytes())
    assert first.checkpoint_sha256 == digest.hexdigest()
    assert not first.model.training
    assert (first.name, first.checkpoint, first.data, first.recipe) == ("model:deit_digits", "random", "", None)
    assert (first.spec.name, first.spec.num_classes, first.metrics) == ("deit_digits", 10, {})
    assert first.class_names == tuple("0123456789")
    assert first.preprocessing == Preprocessing(image_size=32, crop_fraction=1.0)


def test_the_classes_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def open_images(name: str, split: str, *, skip_bad: bool) -> Any:
        assert skip_bad  # whoever reads the images says what is wrong with them
        opened.append((name, split))
        return SimpleNamespace(class_names=["cat", "dog", "eel"])

    monkeypatch.setattr(source, "open_images", open_images)
    found = SourceRequest("model:deit_digits", weights="random", data="pets").load()
    assert opened == [("pets", "val")]
    model: Any = found.model
    assert (found.class_names, found.data, found.spec.num_classes) == (("cat", "dog", "eel"), "pets", 3)
    assert model.head.out_features == 3


def test_weights_of_a_file_are_loaded(tmp_path: Path) -> None:
    model = build_model(ModelSpec(name="deit_digits", num_classes=10))
    save_weights(model, tmp_path / "w.safetensors")
    found = SourceRequest("model:deit_digits", weights=str(tmp_path / "w.safetensors")).load()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.model.state_dict().items())
    assert found.checkpoint == str(tmp_path / "w.safetensors")


SMALL_BEIT = ["img_size=32", "patch_size=8", "depth=1", "embed_dim=24", "num_heads=2"]


def test_weights_that_changed_are_not_taken_for_those_before() -> None:
    digest = RANDOM.load().checkpoint_sha256
    assert RANDOM.load_again(digest).checkpoint_sha256 == digest
    with pytest.raises(CheckFailed) as caught:
        RANDOM.load_again("0" * 64)
    assert str(caught.value) == (
        "the weights of 'model:deit_digits' (random) changed while they were exported, as those of a run in training "
        "do: export it again"
    )


def test_arguments_of_a_network_stand_behind_its_name() -> None:
    target = with_arguments("model:timm/beit_base_patch16_224", [*SMALL_BEIT, "num_classes=5"])
    assert target == (
        "model:timm/beit_base_patch16_224?img_size=32&patch_size=8&depth=1&embed_dim=24&num_heads=2&num_classes=5"
    )
    request = SourceRequest(target, weights="random")
    assert request.network == "beit_base_patch16_224"
    found = request.load()
    assert found.name == target
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2}
    assert found.spec == ModelSpec(name="beit_base_patch16_224", num_classes=5, kwargs=kwargs)
    assert (found.class_names, found.preprocessing.image_size) == (tuple("01234"), 32)
    # What a bundle records, its name and its specification, builds the same network again.
    assert SourceRequest(found.name, weights="random").load().checkpoint_sha256 == found.checkpoint_sha256
    rebuilt = build_model(ModelSpec.model_validate_json(found.spec.model_dump_json())).state_dict()
    shapes = {key: value.shape for key, value in found.model.state_dict().items()}
    assert {key: value.shape for key, value in rebuilt.items()} == shapes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("384", 384),
        ("0.5", 0.5),
        ("True", True),
        ("avg", "avg"),
        ("'avg'", "avg"),
        ("", ""),
        ("(2, 1)", [2, 1]),
        ("{'a': [1]}", {"a": [1]}),
        ("a=b&c d+e%", "a=b&c d+e%"),
        ("é", "é"),
        ("{[]: 1}", "{[]: 1}"),  # the parser says TypeError, and of what is nested deeply MemoryError or RecursionError
        ("-" * 20_000 + "1", "-" * 20_000 + "1"),
    ],
)
def test_a_value_is_a_literal_or_a_text(text: str, value: Any) -> None:
    target = with_arguments("model:deit_digits", [f"key={text}", "other=1"])
    assert SourceRequest(target).arguments == {"key": value, "other": 1}
    assert SourceRequest(with_arguments(with_arguments("model:a", [f"key={text}"]), ["b=2"])).arguments == {
        "key": value,
        "b": 2,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["depth"], "--model-arg depth: expected KEY=VALUE, such as img_size=384"),
        (["a-b=1"], "--model-arg a-b=1: expected KEY=VALUE, such as img_size=384"),
        (["depth=1", "depth=2"], "--model-arg depth is given twice, as 1 and as 2: choose one"),
        (["pretrained=True"], "--model-arg pretrained is no argument of 'deit_digits': say --weights"),
        (
            ["in_chans=1"],
            "--model-arg in_chans is no argument of 'deit_digits': leave it out, bundles classify RGB images",
        ),
        (
            ["img_size=(32, 48)"],
            "--model-arg img_size=[32, 48]: expected the side of a square in pixels, such as 384",
        ),
        (["img_size=0"], "--model-arg img_size=0: expected the side of a square in pixels, such as 384"),
        (["img_size=[32]"], "--model-arg img_size=[32]: expected the side of a square in pixels, such as 384"),
        (["img_size=32px"], "--model-arg img_size=32px: expected the side of a square in pixels, such as 384"),
        (
            ["img_size=None"],
            "--model-arg img_size=None: timm leaves out what is None, whatever its name: leave it out",
        ),
        (
            ["depth={1, 2}"],
            "--model-arg depth={1, 2}: expected a number, text, True, False, or a list or dictionary of them",
        ),
        (
            ["depth=1e999"],
            "--model-arg depth=1e999: expected a number, text, True, False, or a list or dictionary of them",
        ),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(given: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        with_arguments("model:deit_digits", given)
    assert str(error.value) == message


def test_an_argument_in_the_name_is_checked_before_anything_is_built() -> None:
    with pytest.raises(InputError, match="--model-arg checkpoint_path is no argument of 'deit_digits': say --weights"):
        SourceRequest("model:deit_digits?checkpoint_path=x").require_known()


def test_a_run_takes_no_arguments() -> None:
    assert with_arguments("runs/mine", []) == "runs/mine"
    with pytest.raises(InputError) as error:
        with_arguments("runs/mine", ["depth=1"])
    assert str(error.value) == "--model-arg depth=1 goes with model:NAME: the network of the run 'runs/mine' is trained"


@pytest.mark.parametrize(
    ("name", "argument", "reason"),
    [
        ("deit_digits", "no_such=1", r"no_such=1: model 'deit_digits' does not take these arguments: .*'no_such'"),
        ("deit_digits", "embed_dim=33", "embed_dim=33: embed_dim 33 is not divisible by num_heads 4"),
        ("timm/swin_tiny_patch4_window7_224", "num_heads=(2, 4)", r"num_heads=\[2, 4\]: "),
    ],
)
def test_an_argument_that_the_network_refuses_is_named(name: str, argument: str, reason: str) -> None:
    for weights in ("random", "pretrained"):
        request = SourceRequest(with_arguments(f"model:{name}", [argument]), weights=weights)
        with pytest.raises(InputError, match=rf"'.*' cannot be built with --model-arg {reason}") as error:
            request.load()
        assert "\n" not in str(error.value)


def test_the_classes_of_a_network_that_was_published_without_a_classifier() -> None:
    target = with_arguments("model:timm/eva02_tiny_patch14_224", ["depth=1", "embed_dim=24", "num_heads=2"])
    with pytest.raises(InputError) as error:
        SourceRequest(target, weights="random").load()
    assert str(error.value) == (
        "'eva02_tiny_patch14_224' was published without a classifier: give --data, whose classes it gets, or "
        "--model-arg num_classes=N"
    )
    found = SourceRequest(with_arguments(target, ["num_classes=3"]), weights="random").load()
    assert found.class_names == ("0", "1", "2")


@pytest.mark.parametrize("count", ["0", "-1", "2.0", "few", "True"])
def test_a_number_of_classes_is_positive(count: str) -> None:
    with pytest.raises(InputError, match=f"--model-arg num_classes={count}: expected a positive number"):
        SourceRequest(f"model:deit_digits?num_classes={count}", weights="random").load()


def test_the_classes_of_the_data_are_those_of_the_network() -> None:
    with pytest.raises(InputError, match="--model-arg num_classes=5: 'digits' has 10 classes"):
        SourceRequest("model:deit_digits?num_classes=5", weights="random", data="digits").load()
    found = SourceRequest("model:deit_digits?num_classes=10", weights="random", data="digits").load()
    assert found.spec == ModelSpec(name="deit_digits", num_classes=10)


def test_published_weights_are_asked_for_with_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def create(name: str, **options: Any) -> nn.Module:
        made.append({"name": name, **options})
        return nn.Linear(2, 2)

    monkeypatch.setattr(timm, "create_model", create)
    assert SourceRequest("model:deit_digits?depth=1").load().random == ()
    assert made[-1] == {"name": "deit_digits", "pretrained": True, "num_classes": 10, "depth": 1}


def test_a_classifier_that_was_not_published_is_random_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", lambda name, **options: nn.Linear(2, options["num_classes"]))
    request = SourceRequest("model:deit_digits?num_classes=3")
    first, second = request.load(), request.load()
    assert first.random == second.random == ("its classifier",)
    assert first.checkpoint_sha256 == second.checkpoint_sha256


def test_a_published_size_that_is_not_square_is_refused() -> None:
    config = timm.get_pretrained_cfg("vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    assert config is not None
    with pytest.raises(InputError, match=r"^vit_tiny_patch16_224\.\w+ takes 3 × 32 × 64 values: expected RGB and a sq"):
        preprocessing_of(dataclasses.replace(config, input_size=(3, 32, 64)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_counted(tmp_path: Path, value: float) -> None:
    model: Any = build_model(ModelSpec(name="deit_digits", num_classes=10))
    with torch.no_grad():
        model.head.bias[:3] = value
    save_weights(model, tmp_path / "w.safetensors")
    with pytest.raises(InputError) as error:
        SourceRequest("model:deit_digits", weights=str(tmp_path / "w.safetensors")).load()
    assert str(error.value) == (
        "the weights of 'model:deit_digits' are not finite: 'head.bias' has 3 NaN or infinite of 10 values; take "
        "another checkpoint"
    )


class BrokenOff(Exception):
    """Of the hub's HTTP client."""


NOT_HERE = "published weights cannot be had here"


@pytest.mark.parametrize(
    ("raised", "kind", "text", "reason"),
    [
        (RuntimeError("No pretrained weights\nexist"), InputError, "timm knows no published weights", None),
        (
            RuntimeError("Error(s) in loading state_dict for X:\n\tMissing key"),
            InputError,
            "timm's published weights do not fit",
            None,
        ),
        (OSError("no network\nat all"), EnvironmentMissing, NOT_HERE, None),
        (OSError(), EnvironmentMissing, NOT_HERE, "OSError"),
        (
            OSError("500 for url 'https://cdn/w?Sign=5ec7'\nSee"),
            EnvironmentMissing,
            NOT_HERE,
            "500 for url 'https://cdn/w?…'",
        ),
        (BrokenOff("peer closed connection"), EnvironmentMissing, NOT_HERE, None),
        (
            SafetensorError("invalid header"),
            EnvironmentMissing,
            NOT_HERE,
            f"invalid header: remove the damaged file from {constants.HF_HUB_CACHE}",
        ),
    ],
)
def test_published_weights_that_cannot_be_had_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], text: str, reason: str | None
) -> None:
    made: dict[str, Any] = {}

    def create(name: str, **options: Any) -> nn.Module:
        made.update(name=name, **options)
        raise raised

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(kind) as error:
        SourceRequest("model:deit_digits").load()
    assert made == {"name": "deit_digits", "pretrained": True, "num_classes": 10}
    reason = reason or str(raised).splitlines()[0]
    assert str(error.value) == (
        f"{text}: give the weights of 'deit_digits' with --weights FILE, or say --weights random ({reason})"
    )


@pytest.mark.parametrize("averaged", [True, False])
def test_a_run_is_stated_with_the_digest_of_the_weights_that_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, averaged: bool
) -> None:
    digests = {"model.safetensors": "raw", **({"ema.safetensors": "averaged"} if averaged else {})}
    info = SimpleNamespace(
        model=ModelSpec(name="deit_digits", num_classes=2),
        class_names=("a", "b"),
        preprocessing=Preprocessing(image_size=32),
        data="pets",
        recipe="mine",
    )
    run = SimpleNamespace(path=tmp_path, info=info)
    loaded: list[Any] = []

    def load(of: Any, which: str) -> Any:
        loaded.append((of, which))
        return nn.Linear(2, 2), SimpleNamespace(sha256=digests, metrics={"top1": 0.5})

    monkeypatch.setattr(RunFolder, "open", lambda path: run)
    monkeypatch.setattr(source, "load_run_model", load)
    found = SourceRequest(str(tmp_path), which="last").load()
    assert loaded == [(run, "last")]
    stated = found.info()
    assert type(stated) is SourceInfo
    assert dataclasses.asdict(stated) == {
        "name": str(tmp_path),
        "spec": info.model,
        "class_names": ("a", "b"),
        "preprocessing": info.preprocessing,
        "data": "pets",
        "checkpoint": "last",
        "checkpoint_sha256": "averaged" if averaged else "raw",
        "recipe": "mine",
        "metrics": {"top1": 0.5},
        "random": (),
    }
    assert isinstance(found, Source)


def test_timms_configuration_is_a_preprocessing() -> None:
    config = PretrainedCfg(
        input_size=(3, 48, 48), crop_pct=0.8, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    expected = Preprocessing(
        image_size=48, crop_fraction=0.8, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    assert preprocessing_of(config) == expected
    unnamed = dataclasses.replace(config, crop_pct=0, crop_mode="squash")
    assert preprocessing_of(unnamed) == expected.model_copy(update={"crop_fraction": 0.875, "crop_mode": "squash"})


def test_norms_that_never_saw_a_batch_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.ReLU())
    model[1](torch.rand(4, 2))
    assert untrained_norms(model) == ["0"]
