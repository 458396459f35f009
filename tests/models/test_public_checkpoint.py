"""Published checkpoints: their keys, what does not fit, and files that are no checkpoints."""

import dataclasses
import os
import pickle
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import nn

from reference import randomize
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.run import ModelSpec
from vitx.models import LoadReport, load_public_checkpoint, public_checkpoint
from vitx.models.public_checkpoint import classes_in, published_model, read_weights, save_weights
from vitx.models.recalibration import normalized_re_attentions

SIZE: dict[str, Any] = {"embed_dim": 24, "num_heads": 3, "num_classes": 5}
DEEPVIT_S: dict[str, Any] = {**SIZE, "img_size": 32, "depth": 2, "attention": ["plain", "re-attention"]}


def network(name: str = "deepvit_s", **kwargs: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **{**(DEEPVIT_S if name == "deepvit_s" else SIZE), **kwargs})
    return model.eval()


def published_keys() -> set[str]:
    """The layout of the public DeepViT-S checkpoint for two blocks, the last with Re-Attention."""
    linear = ["weight", "bias"]
    norm = [*linear, "running_mean", "running_var", "num_batches_tracked"]
    keys = {"cls_token", "pos_embed", "patch_embed.conv1.weight", "patch_embed.conv2.weight"}
    keys |= {f"{layer}.{part}" for layer in ("patch_embed.proj", "norm", "head") for part in linear}
    keys |= {f"patch_embed.bn{i}.{part}" for i in (1, 2) for part in norm}
    for block in (0, 1):
        layers = ["norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
        keys |= {f"blocks.{block}.{layer}.{part}" for layer in layers for part in linear}
    keys |= {f"blocks.1.attn.reatten_matrix.{part}" for part in linear}
    return keys | {f"blocks.1.attn.var_norm.{part}" for part in norm}


def test_our_keys_are_the_published_ones() -> None:
    assert set(network().state_dict()) == published_keys()


def test_talking_heads_keys_are_the_published_ones() -> None:
    model = network("deit_tiny_12_talking", img_size=32, depth=1, patch_head=True)
    assert {"blocks.0.attn.proj_pre.weight", "blocks.0.attn.proj_post.weight", "patch_head.weight"} <= set(
        model.state_dict()
    )


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "state_dict_ema"])
@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "model._orig_mod."],
)
def test_wrapped_files_load(tmp_path: Path, wrapper: str | None, prefix: str) -> None:
    source, target = randomize(network()), network()
    state: dict[str, Any] = {prefix + key: value for key, value in source.state_dict().items()}
    path = tmp_path / "checkpoint.pth"
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, path)
    report = load_public_checkpoint(target, path)
    assert report.lines() == []
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(images), source(images))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors_load(tmp_path: Path, prefix: str) -> None:
    source, target = randomize(network()), network()
    state = {prefix + key: value for key, value in source.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert load_public_checkpoint(target, tmp_path / "model.safetensors").lines() == []


def test_timms_deit_loads_into_ours(tmp_path: Path) -> None:
    source = randomize(network("deit_tiny_patch16_224", img_size=32, depth=2))
    torch.save(source.state_dict(), tmp_path / "deit.pth")
    target = network("deit_tiny_12", img_size=32, depth=2, patch_head=True)
    report = load_public_checkpoint(target, tmp_path / "deit.pth")
    assert report.missing == ("patch_head.bias", "patch_head.weight")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(images), source(images))


def as_transformers(model: nn.Module, family: str, *, release_5: bool) -> dict[str, torch.Tensor]:
    """The same tensors as transformers 5.24 saves them for ViT, DeiT and DINOv2, or has them in memory."""
    dinov2 = family == "dinov2"
    names = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "cls_token": "embeddings.cls_token",
        "dist_token": "embeddings.distillation_token",
        "pos_embed": "embeddings.position_embeddings",
        "norm": "layernorm",
    }
    state, renamed = dict(model.state_dict()), {}
    for index in range(2):
        block = f"layers.{index}" if release_5 and not dinov2 else f"encoder.layer.{index}"
        for part in ("weight", "bias"):
            qkv = state.pop(f"blocks.{index}.attn.qkv.{part}").chunk(3)
            spelt = ("q_proj", "k_proj", "v_proj") if release_5 else ("query", "key", "value")
            for name, tensor in zip(spelt, qkv, strict=True):
                renamed[f"{family}.{block}.attention.{name if release_5 else f'attention.{name}'}.{part}"] = tensor
        mlp = ("mlp.fc1", "mlp.fc2") if release_5 or dinov2 else ("intermediate.dense", "output.dense")
        norms = ("norm1", "norm2") if dinov2 else ("layernorm_before", "layernorm_after")
        theirs = (*mlp, *norms, "attention.o_proj" if release_5 else "attention.output.dense")
        for ours, name in zip(("mlp.fc1", "mlp.fc2", "norm1", "norm2", "attn.proj"), theirs, strict=True):
            names[f"blocks.{index}.{ours}"] = f"{block}.{name}"
        names |= {f"blocks.{index}.ls{i}.gamma": f"{block}.layer_scale{i}.lambda1" for i in (1, 2)}
    heads = {"head": "cls_classifier" if family == "deit" else "classifier", "head_dist": "distillation_classifier"}
    for key, tensor in state.items():
        module, dot, part = key.rpartition(".") if key.endswith((".weight", ".bias")) else (key, "", "")
        renamed[(heads.get(module) or f"{family}.{names[module]}") + dot + part] = tensor
    extra = {"dinov2": "embeddings.mask_token", "vit": "pooler.dense.weight"}
    return renamed | ({f"{family}.{extra[family]}": torch.zeros(1, 24)} if family in extra else {})


@pytest.mark.parametrize("release_5", [False, True])
@pytest.mark.parametrize(
    ("family", "name", "kwargs"),
    [
        ("vit", "vit_tiny_patch16_224", {}),
        ("deit", "deit_tiny_distilled_patch16_224", {}),
        ("dinov2", "vit_small_patch14_dinov2", {"patch_size": 16}),
    ],
)
def test_the_tensors_of_transformers_load(
    tmp_path: Path, family: str, name: str, kwargs: dict[str, Any], release_5: bool
) -> None:
    source, target = (network(name, img_size=32, depth=2, **kwargs) for _ in range(2))
    randomize(source)
    file = tmp_path / "pytorch_model.bin"
    torch.save(as_transformers(source, family, release_5=release_5), file)
    assert load_public_checkpoint(target, file).lines() == []
    assert classes_in(file, name) == 5
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(images), source(images))


@pytest.mark.parametrize(
    ("key", "changed", "message"),
    [
        ("key.weight", None, r"another architecture: 1 entry differs, .*attn.qkv.weight' \(48×24 in the file, 72×24"),
        ("key.weight", torch.zeros(24, 7), "queries, keys and values of .* do not fit together"),
        ("key.bias", torch.tensor(1.0), "queries, keys and values of .* do not fit together"),
    ],
)
def test_damaged_tensors_of_transformers_are_one_error(
    tmp_path: Path, key: str, changed: torch.Tensor | None, message: str
) -> None:
    model = network("vit_tiny_patch16_224", img_size=32, depth=2)
    tensors = as_transformers(model, "vit", release_5=False)
    name = f"vit.encoder.layer.0.attention.attention.{key}"
    tensors.pop(name)
    torch.save(tensors if changed is None else {**tensors, name: changed}, tmp_path / "damaged.bin")
    with pytest.raises(InputError, match=message):
        load_public_checkpoint(model, tmp_path / "damaged.bin")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("head.bias", "module.head.bias"),
        ("blocks.0.mlp.w3.bias", "dinov2.encoder.layer.0.mlp.weights_out.bias"),
        ("blocks.0.mlp.w12.bias", "dinov2.encoder.layer.0.mlp.weights_in.bias"),
        ("encoder.layer.0.attention.attention.query.bias", "layers.0.attention.q_proj.bias"),
        ("blocks.0.attn.qkv.bias", "layers.0.attention.v_proj.bias"),
    ],
)
def test_two_tensors_of_one_name_are_refused(tmp_path: Path, first: str, second: str) -> None:
    tensors = {name: torch.zeros(4) for name in (first, second)}
    tensors |= {} if "head" in first else {"vit.embeddings.patch_embeddings.projection.weight": torch.zeros(4)}
    torch.save(tensors, tmp_path / "two.pth")
    with pytest.raises(InputError, match=rf"two\.pth' has '{first}' and '{second}', which are one tensor: leave out"):
        read_weights(tmp_path / "two.pth")


def test_another_image_size_is_resized(tmp_path: Path) -> None:
    source, target = randomize(network()), network(img_size=64)
    torch.save(source.state_dict(), tmp_path / "checkpoint.pth")
    report = load_public_checkpoint(target, tmp_path / "checkpoint.pth")
    assert report.resized == {"pos_embed": ((1, 5, 24), (1, 17, 24))}
    assert report.missing == report.unexpected == ()
    attention, norm = normalized_re_attentions(target)[0]
    assert norm.running_mean is not None
    assert attention.reatten_matrix.bias is not None
    closed_form = attention.reatten_matrix.weight.flatten(1).sum(1) / 17 + attention.reatten_matrix.bias
    torch.testing.assert_close(norm.running_mean, closed_form.detach())


def test_other_classes_are_reported(tmp_path: Path) -> None:
    torch.save(network(num_classes=9).state_dict(), tmp_path / "checkpoint.pth")
    report = load_public_checkpoint(network(), tmp_path / "checkpoint.pth")
    assert report.missing == report.unexpected == ("head.bias", "head.weight")
    assert report.lines()[0] == "missing     head.bias: keeps its initial values"


def test_attn_scale_and_feat_scale_begin_from_a_plain_file_where_they_are_trained(tmp_path: Path) -> None:
    source = randomize(network("deit_tiny_12", img_size=32, depth=2))
    torch.save(source.state_dict(), tmp_path / "plain.pth")
    target = network("deit_tiny_12", img_size=32, depth=2, attention="attn-scale", feat_scale=True)
    with pytest.raises(InputError, match=r"6 entries differ, .* 'blocks\.0\.attn\.lamb' \(absent in the file, 3"):
        load_public_checkpoint(target, tmp_path / "plain.pth")
    report = load_public_checkpoint(target, tmp_path / "plain.pth", to_train=True)
    assert report.missing == tuple(f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.lamb", "lamb1", "lamb2"))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(images), source(images))
    torch.save(randomize(target).state_dict(), tmp_path / "scaled.pth")
    with pytest.raises(InputError, match=r"6 entries differ, .*attn\.lamb' \(3 in the file, absent in the model"):
        load_public_checkpoint(source, tmp_path / "scaled.pth", to_train=True)


@pytest.mark.parametrize("kind", ["attnscale", "featscale"])
def test_cait_with_either_begins_from_the_published_one(kind: str, tmp_path: Path) -> None:
    """Of timm, or with the authors' `module.` before each key."""
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    source: Any = randomize(timm.create_model("cait_s24_224", **size)).eval()
    weights = {f"module.{key}": value for key, value in source.state_dict().items()}
    torch.save({"model": weights}, tmp_path / "S24_224.pth")
    target: Any = timm.create_model(f"{kind}_cait_s24_224", **size).eval()
    report = load_public_checkpoint(target, tmp_path / "S24_224.pth", to_train=True)
    assert {key.rpartition(".")[2] for key in report.missing} == (
        {"lamb"} if kind == "attnscale" else {"lamb1", "lamb2"}
    )
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(images), source(images))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"embed_dim": 36}, r"blocks.0.attn.proj.bias' \(36 in the file, 24 in the model\)"),
        (
            {"depth": 3, "attention": ["plain", "re-attention", "plain"]},
            r"blocks.2.attn.proj.bias' \(24 in the file, absent",
        ),
        ({"attention": "plain"}, r"blocks.1.attn.reatten_matrix.bias' \(absent in the file, 3 in the model\)"),
    ],
)
def test_another_architecture_is_refused(tmp_path: Path, changes: dict[str, Any], first: str) -> None:
    torch.save(network(**changes).state_dict(), tmp_path / "checkpoint.pth")
    target = network()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(InputError, match=f"is of another architecture: .*'{first}"):
        load_public_checkpoint(target, tmp_path / "checkpoint.pth")
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of the file was run",))


def test_a_pickle_with_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.zeros(1)}, "args": Payload()}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="vitx runs no code of a file"):
        load_public_checkpoint(network(), tmp_path / "evil.pth")
    assert "code of the file" not in capsys.readouterr().out


def test_a_blocked_function_is_named_without_the_advice_to_run_it(tmp_path: Path) -> None:
    class Blocked:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, ("true",))

    torch.save({"model": Blocked()}, tmp_path / "evil.pth")
    with pytest.raises(InputError) as caught:
        read_weights(tmp_path / "evil.pth")
    assert "system" in str(caught.value)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pos_embed", torch.tensor(1.0), "is of another"),
        ("pos_embed", torch.zeros(17, 64), "is of another"),
        ("pos_embed", torch.zeros(1, 0, 24), r"cannot be interpolated \(.*\): choose the model it was trained as"),
        ("pos_embed", torch.zeros(1, 17, 64, dtype=torch.complex64), "holds no dictionary of plain"),
        ("patch_embed.proj.weight", torch.tensor(0.0), "cannot be interpolated"),
        ("pos_embed", torch.zeros(1, 65, 64, device="meta"), "holds no dictionary of plain"),
        ("head.weight", torch.zeros(10, 64).to_sparse(), "holds no dictionary of plain"),
    ],
)
def test_tensors_that_cannot_be_used_are_one_error(tmp_path: Path, key: str, value: torch.Tensor, message: str) -> None:
    torch.save({**network().state_dict(), key: value}, tmp_path / "odd.pth")
    with pytest.raises(InputError, match=rf"odd\.pth' {message}"):
        load_public_checkpoint(network(), tmp_path / "odd.pth")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", pickle.dumps([1, 2, 3])])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_no_checkpoint_at_all(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="file"):
        load_public_checkpoint(network(), path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        load_public_checkpoint(network(), tmp_path / "none.pth")


def test_averaged_weights_come_before_the_others(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    order = ("state_dict_ema", "model_ema", "model", "state_dict")
    for first in range(len(order)):
        torch.save(
            {**{name: {"w": torch.tensor([float(order.index(name))])} for name in order[first:]}, "epoch": 3}, path
        )
        assert read_weights(path)["w"].item() == first
    torch.save({"model": "deit", "w": torch.ones(2), "module.module.b": torch.zeros(1)}, path)
    with pytest.raises(
        InputError, match=r"holds no dictionary of plain tensors, nor one under state_dict_ema, model_ema, model"
    ):
        read_weights(path)
    torch.save({"w": torch.ones(2), "module.module.b": torch.zeros(1), "a.module.c": torch.zeros(1)}, path)
    assert set(read_weights(path)) == {"w", "module.b", "a.module.c"}


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"w": torch.ones(1), "epoch": 3}, [torch.ones(1)]])
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "checkpoint.pth")
    with pytest.raises(InputError, match=r"checkpoint\.pth' holds no dictionary of plain tensors, nor one under"):
        read_weights(tmp_path / "checkpoint.pth")


def test_each_kind_of_broken_file_has_its_text(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(9999)}, "args": SimpleNamespace(lr=1.0)}, tmp_path / "d.pth")
    with pytest.raises(InputError, match=r": Unsupported global: GLOBAL types\.SimpleNamespace [^.]*; save its"):
        read_weights(tmp_path / "d.pth")
    no_code = "cannot be read as tensors alone, and vitx runs no code of a file"
    texts = {
        "a.safetensors": (b"no", r"a\.safetensors' is not a safetensors file: "),
        "b.pth": (b"", r"b\.pth' is not a checkpoint: it is cut off, or not written by torch\.save"),
        "h.pth": (b"hello", r"h\.pth' is not a checkpoint: it is cut off, or not written by torch\.save"),
        "z.pth": ((tmp_path / "d.pth").read_bytes()[:9000], r"z\.pth' is not a checkpoint: it is cut off"),
        "s.pth": (b"seed = 9", r"s\.pth' is not a checkpoint: pop from empty list"),
        "c.pth": (b"no checkpoint", rf"c\.pth' {no_code}: Unsupported operand 110; save"),
    }
    for name, (content, text) in texts.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=text):
            read_weights(tmp_path / name)


def test_a_report_is_a_line_a_key_and_plain_for_json() -> None:
    report = LoadReport(("a", "b"), ("c",), {"pos_embed": ((1, 5, 24), (1, 17, 24))})
    assert report.lines() == [
        "missing     a: keeps its initial values",
        "missing     b: keeps its initial values",
        "unexpected  c: left out",
        "resized     pos_embed: (1, 5, 24) to (1, 17, 24)",
    ]
    assert report.as_dict() == {
        "missing": ("a", "b"),
        "unexpected": ("c",),
        "resized": {"pos_embed": ((1, 5, 24), (1, 17, 24))},
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.missing = ()  # type: ignore[misc]


def test_tensors_alone_are_read_and_onto_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    path = tmp_path / "checkpoint.pth"
    path.touch()

    def load(file: Path, **options: Any) -> dict[str, torch.Tensor]:
        given.update(file=file, **options)
        return {"w": torch.ones(1)}

    monkeypatch.setattr(torch, "load", load)
    read_weights(path)
    assert given == {"file": path, "map_location": "cpu", "weights_only": True}


def test_the_classes_of_a_checkpoint_are_those_of_its_head(tmp_path: Path) -> None:
    save_weights(network(num_classes=7), tmp_path / "w.safetensors")
    assert classes_in(tmp_path / "w.safetensors", "deepvit_s") == 7
    save_file({"w": torch.ones(2)}, tmp_path / "none.safetensors")
    with pytest.raises(InputError, match=r"none\.safetensors' has no classifier: it has no tensor 'head\.weight'$"):
        classes_in(tmp_path / "none.safetensors", "deepvit_s")
    with pytest.raises(InputError, match=r"w\.safetensors' has no classifier: it has no tensor 'fc\.weight'$"):
        classes_in(tmp_path / "w.safetensors", "test_resnet")
    for weight, shape in ((torch.tensor(1.0), "a scalar"), (torch.ones(0, 4), "0×4")):
        save_file({"head.weight": weight}, tmp_path / "none.safetensors")
        with pytest.raises(InputError, match=rf"no classifier: its tensor is {shape}, expected a row for each class$"):
            classes_in(tmp_path / "none.safetensors", "deepvit_s")


@pytest.mark.parametrize(
    ("name", "classifiers"),
    [
        ("test_resnet", ["fc"]),
        ("test_efficientnet", ["classifier"]),
        ("levit_128s", ["head.linear", "head_dist.linear"]),
    ],
)
def test_a_classifier_of_other_classes_may_have_any_name(tmp_path: Path, name: str, classifiers: list[str]) -> None:
    save_weights(timm.create_model(name, num_classes=7), tmp_path / "w.safetensors")
    assert classes_in(tmp_path / "w.safetensors", name) == 7
    report = load_public_checkpoint(timm.create_model(name, num_classes=5), tmp_path / "w.safetensors")
    expected = tuple(f"{each}.{tensor}" for each in classifiers for tensor in ("bias", "weight"))
    assert (report.missing, report.unexpected, report.resized) == (expected, expected, {})


def test_weights_are_saved_as_they_are_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    save_weights(model, tmp_path / "w.safetensors")
    assert read_weights(tmp_path / "w.safetensors")["weight"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_weights_that_layers_share_are_saved_for_each(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    save_weights(model, tmp_path / "w.safetensors")
    saved, state = read_weights(tmp_path / "w.safetensors"), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], value) for key, value in state.items())


def test_the_statistics_of_a_network_at_its_own_size_stay(tmp_path: Path) -> None:
    source, target = randomize(network()), network()
    save_weights(source, tmp_path / "w.safetensors")
    load_public_checkpoint(target, tmp_path / "w.safetensors")
    (_, ours), (_, theirs) = (normalized_re_attentions(each)[0] for each in (target, source))
    assert ours.running_mean is not None
    assert theirs.running_mean is not None
    assert torch.equal(ours.running_mean, theirs.running_mean)


def test_a_checkpoint_may_have_a_head_that_the_model_lacks(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    state["head_dist.weight"] = torch.zeros(5, 24)
    del state["patch_embed.bn1.num_batches_tracked"]
    save_file(state, tmp_path / "w.safetensors")
    report = load_public_checkpoint(network(), tmp_path / "w.safetensors")
    assert (report.missing, report.unexpected, report.resized) == ((), ("head_dist.weight",), {})


def test_several_entries_that_differ_are_counted(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    state["cls_token"] = torch.zeros(1, 1, 20)
    state["norm.bias"] = torch.tensor(0.5)
    state["extra"] = torch.zeros(2, 3)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(InputError) as error:
        load_public_checkpoint(network(), tmp_path / "w.safetensors")
    assert str(error.value) == (
        f"'{tmp_path / 'w.safetensors'}' is of another architecture: 3 entries differ, the first is 'cls_token' "
        "(1×1×20 in the file, 1×1×24 in the model); choose the model it was trained as"
    )
    del state["cls_token"], state["extra"]
    state["cls_token"] = network().state_dict()["cls_token"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"1 entry differs, the first is 'norm.bias' \(a scalar in the file, 24 in"):
        load_public_checkpoint(network(), tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("answers", "before", "offline"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_what_is_published_comes_from_the_cache_alone_where_the_hub_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, answers: bool, before: bool, offline: bool
) -> None:
    seen: list[bool] = []

    def create(name: str, **options: Any) -> nn.Module:
        seen.append(options["pretrained"] and constants.HF_HUB_OFFLINE)
        raise OSError("nothing is in the cache")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", before)
    monkeypatch.setattr(public_checkpoint, "_hub_answers", lambda: answers)
    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(EnvironmentMissing, match=r"cannot be had here: do this \(nothing is in the cache\)"):
        published_model(ModelSpec(name="vit_tiny_patch16_224", num_classes=3), "do this")
    assert (seen, constants.HF_HUB_OFFLINE) == ([offline], before)


def test_a_hub_that_refuses_and_one_that_hangs_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    assert not public_checkpoint._hub_answers()
    ended = Event()
    monkeypatch.setattr(public_checkpoint, "get_session", lambda: SimpleNamespace(head=lambda *_, **__: ended.wait()))
    monkeypatch.setattr(public_checkpoint, "SECONDS_TO_ANSWER", 0.01)
    assert not public_checkpoint._hub_answers()
    ended.set()
    monkeypatch.setattr(public_checkpoint, "SECONDS_TO_ANSWER", 60)
    assert public_checkpoint._hub_answers()
