"""Loading published checkpoints: DeepViT's, DeiT's, timm's own, and the ViTs of transformers."""

import errno
import pickle
import re
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import timm
import torch
from huggingface_hub import get_session
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from vitx.core.errors import UNUSABLE, EnvironmentMissing, InputError, first_line
from vitx.core.files import refuse_url, write_bytes
from vitx.core.run import ModelSpec
from vitx.core.urls import without_password
from vitx.models.build import entries_differ, ordinary_tensors, separate
from vitx.models.recalibration import set_closed_form_means

# Classifiers beside the one that timm names: a checkpoint may lack them, or have them for another number of classes.
CLASSIFIERS = ("head", "patch_head", "head_dist")
# Zero at first, when a network computes what it does without them: the factors of AttnScale and FeatScale.
NEUTRAL = (".lamb", ".lamb1", ".lamb2")
# Under which key training scripts keep the weights, the averaged ones first.
CONTAINERS = ("state_dict_ema", "model_ema", "model", "state_dict")

# Within which the hub must answer: its own library tries for more than a minute.
SECONDS_TO_ANSWER = 3.0

# The tensors of Hugging Face's transformers' ViT, DeiT and DINOv2, and timm's names of them.
_FAMILY = r"(?:(?:vit|deit|dinov2|dinov2_with_registers)\.)?"
# What is written to a file, in all releases; where release 5 calls it otherwise in memory, that too. In this order.
_NAMES = (
    ("^" + _FAMILY, ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.", ""),  # cls_token; mask_token and register_tokens are what timm converts itself
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
_FIRST = re.compile(_FAMILY + r"embeddings\.patch_embeddings\.projection\.weight")
_PROJECTION = re.compile(r"(blocks\.\d+\.)attention\.(?:attention\.)?(query|key|value|q_proj|k_proj|v_proj)\.(\w+)")


@dataclass(frozen=True)
class LoadReport:
    """What `load_public_checkpoint` did not copy as it was.

    missing: keys of the model that the file lacks (they keep their initial values); unexpected: keys of the file that
    the model lacks; resized: key → (shape in the file, shape in the model), position embeddings interpolated.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resized: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def lines(self) -> list[str]:
        """One line a key."""
        return [
            *(f"missing     {key}: keeps its initial values" for key in self.missing),
            *(f"unexpected  {key}: left out" for key in self.unexpected),
            *(f"resized     {key}: {old} to {new}" for key, (old, new) in self.resized.items()),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"missing": self.missing, "unexpected": self.unexpected, "resized": dict(self.resized)}


def load_public_checkpoint(model: nn.Module, path: Path | str, *, to_train: bool = False) -> LoadReport:
    """Load a published checkpoint (.pth, .pt, .bin or .safetensors) into `model`.

    Only tensors are read from a pickled file. Position embeddings of another grid size are interpolated; then the means
    of Re-Attention's BatchNorm are set to their closed form, and its variances need `recalibrate`. A classifier may be
    missing or have other classes: it keeps its initial values and is reported; and so may, with `to_train`, the factors
    of AttnScale and FeatScale, so that both begin from the plain network. Raises InputError, naming the first key and
    both shapes, when the checkpoint is of another architecture; the model is then unchanged.
    """
    weights = read_weights(Path(path))
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    original = {key: tuple(value.shape) for key, value in weights.items()}
    if "pos_embed" in expected.keys() & original.keys() and expected["pos_embed"][2:] == original["pos_embed"][2:]:
        try:
            weights = checkpoint_filter_fn(weights, model)  # type: ignore[arg-type]  # any of timm's ViT-like networks
        except UNUSABLE as error:
            raise InputError(
                f"the positions of '{path}' cannot be interpolated ({first_line(error)}): choose the model it was "
                "trained as"
            ) from None
    named: Any = getattr(model, "pretrained_cfg", None) or {}
    heads = tuple(f"{name}." for name in (*CLASSIFIERS, *_classifiers(named.get("classifier"))))
    usable = {
        key: value
        for key, value in weights.items()
        if not key.startswith(heads) or expected.get(key) in (None, tuple(value.shape))
    }
    found = {key: tuple(value.shape) for key, value in usable.items()}
    lacked = {key for key in expected.keys() - found.keys() if to_train and key.endswith(NEUTRAL)}
    required = {key: shape for key, shape in expected.items() if key not in lacked}
    _require_same_architecture(Path(path), required, found, heads)
    model.load_state_dict(usable, strict=False)
    resized = {
        key: (original[key], shape) for key, shape in found.items() if key in original and original[key] != shape
    }
    if "pos_embed" in resized:
        set_closed_form_means(model, expected["pos_embed"][1])
    return LoadReport(
        missing=tuple(sorted(key for key in expected.keys() - found.keys() if not key.endswith("num_batches_tracked"))),
        unexpected=tuple(sorted(weights.keys() - usable.keys() | (found.keys() - expected.keys()))),
        resized=resized,
    )


def load_whole_checkpoint(model: nn.Module, path: Path) -> None:
    """As `load_public_checkpoint`; raise InputError for a file without a classifier of the network's classes too."""
    if missing := load_public_checkpoint(model, path).missing:
        raise InputError(f"'{path}' has no classifier for these classes: {', '.join(missing)} would stay random")


@ordinary_tensors()
def published_model(spec: ModelSpec, remedy: str) -> nn.Module:
    """timm's network with the weights that it publishes, from the cache where the hub cannot be reached.

    Raises InputError when there are none, EnvironmentMissing within seconds when they cannot be had; both end in
    `remedy`.
    """
    try:
        with _offline_unless_the_hub_answers(spec.name):
            model: nn.Module = timm.create_model(
                spec.name, pretrained=True, num_classes=spec.num_classes, **spec.kwargs
            )
    except RuntimeError as error:
        fault = (
            "timm's published weights do not fit" if "state_dict" in str(error) else "timm knows no published weights"
        )
        raise InputError(f"{fault}: {remedy} ({first_line(error)})") from None
    except UNUSABLE:  # of the network, not of its weights
        raise
    except Exception as error:  # noqa: BLE001  # of the hub's library, its HTTP client, or a reader of files
        reason = without_password(first_line(error))  # which quotes the signed URL of a file
        if isinstance(error, SafetensorError):
            reason += f": remove the damaged file from {huggingface_hub.constants.HF_HUB_CACHE}"
        raise EnvironmentMissing(f"published weights cannot be had here: {remedy} ({reason})") from None
    return model


@contextmanager
def _offline_unless_the_hub_answers(name: str) -> Iterator[None]:
    config, before = timm.get_pretrained_cfg(name), huggingface_hub.constants.HF_HUB_OFFLINE
    asked = not before and config is not None and config.has_weights
    huggingface_hub.constants.HF_HUB_OFFLINE = before or (asked and not _hub_answers())
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    """In a thread: no timeout of a request is one of the look-up of its host."""
    answers = []

    def ask() -> None:
        with suppress(Exception):  # each version of the library has errors of its own: there is no answer
            answers.append(get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS_TO_ANSWER))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return bool(answers)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by timm's names, without wrappers (`model`, `state_dict`, `module.`, …).

    Raises InputError when the file is missing, a URL or no checkpoint, or holds code instead of tensors.
    """
    refuse_url(path, "download the file first")
    if not path.is_file():
        raise InputError(f"no checkpoint at '{path}'")
    if path.suffix == ".safetensors":
        try:
            return _named(path, load_file(path))
        except SafetensorError as error:
            raise InputError(f"'{path}' is not a safetensors file: {error}") from None
    try:
        with warnings.catch_warnings():
            # torch warns of pickle protocols it does not write itself; what it cannot read is an error all the same.
            warnings.simplefilter("ignore", UserWarning)
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Around this torch advises to run the file's code.
        lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
        reason = next((line for line in lines if "GLOBAL" in line), lines[0]).partition(". Please")[0].rstrip(".")
        raise InputError(
            f"'{path}' cannot be read as tensors alone, and vitx runs no code of a file: {reason}; save its tensors "
            "alone where it was made: torch.save(model.state_dict(), FILE)"
        ) from None
    except (EOFError, KeyError, OSError) as error:
        # KeyError is of an unknown instruction of a pickle; EINVAL of a short zip file without its end, before whose
        # beginning torch seeks. Other errors of the system are of the storage.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise InputError(f"'{path}' is not a checkpoint: it is cut off, or not written by torch.save") from error
    except (struct.error, *UNUSABLE) as error:
        raise InputError(f"'{path}' is not a checkpoint: {first_line(error)}") from None
    if isinstance(content, dict):
        content = next((content[name] for name in CONTAINERS if isinstance(content.get(name), dict)), content)
    if not isinstance(content, dict) or not content or not all(map(_is_plain, content.values())):
        raise InputError(f"'{path}' holds no dictionary of plain tensors, nor one under {', '.join(CONTAINERS)}")
    return _named(path, content)


def _named(path: Path, tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """Without what PyTorch's data parallelism, torch.compile and Lightning's modules put before every name."""
    keys = {key: str(key).removeprefix("_orig_mod.").removeprefix("module.") for key in tensors}
    lightning = "model." if all(name.startswith("model.") for name in keys.values()) else ""
    names = {key: name.removeprefix(lightning).removeprefix("_orig_mod.") for key, name in keys.items()}
    _require_one_of_each(path, names.items())
    try:
        return _with_timms_names(path, {names[key]: value for key, value in tensors.items()})
    except RuntimeError as error:
        raise InputError(f"queries, keys and values of '{path}' do not fit together: {first_line(error)}") from None


def _require_one_of_each(path: Path, names: Iterable[tuple[object, object]]) -> None:
    """Raise InputError for two tensors of a file, first in each pair, that get the same name, second in it."""
    keys: dict[object, object] = {}
    for key, name in names:
        if keys.setdefault(name, key) is not key:
            raise InputError(f"'{path}' has '{keys[name]}' and '{key}', which are one tensor: leave out one of them")


def _is_plain(value: object) -> bool:
    """A tensor with real numbers of its own: not sparse, quantised, complex, or without its values ("meta")."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_complex() or value.is_meta)


def classes_in(path: Path, network: str) -> int:
    """The number of classes of the checkpoint's classifier; raise InputError when it has none.

    network: the name in timm of what was trained, which tells how its classifier is called.
    """
    weights, config = read_weights(path), timm.get_pretrained_cfg(network)
    keys = [f"{name}.weight" for name in _classifiers(config and config.classifier) or ("head",)]
    if not (found := [weights[key] for key in keys if key in weights]):
        raise InputError(f"'{path}' has no classifier: it has no tensor '{keys[0]}'")
    shape = tuple(found[0].shape)
    if not shape or not shape[0]:
        raise InputError(f"'{path}' has no classifier: its tensor is {_shape(shape)}, expected a row for each class")
    return shape[0]


def _classifiers(named: Any) -> tuple[str, ...]:
    """The modules that timm's configuration of a network calls its classifier: one name, several, or none."""
    return (named,) if isinstance(named, str) else tuple(named or ())


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the network's tensors as safetensors, whole or not at all."""
    write_bytes(path, save(separate(model.state_dict())))


def _require_same_architecture(
    path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], heads: tuple[str, ...]
) -> None:
    different = dict(expected.items() ^ found.items())
    ignored = {key for key in different if key.startswith(heads) or key.endswith("num_batches_tracked")}
    if differing := sorted(different.keys() - ignored):
        first = differing[0]
        raise InputError(
            f"'{path}' is of another architecture: {entries_differ(len(differing))}, the first is '{first}' "
            f"({_shape(found.get(first))} in the file, {_shape(expected.get(first))} in the model); "
            "choose the model it was trained as"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(map(str, shape)) or "a scalar"


def _with_timms_names(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a ViT, DeiT or DINOv2 of transformers; return those of anything else as they are.

    Queries, keys and values, (C, C) each, become `attn.qkv`, (3C, C). The pooler, which no classifier reads, is left
    out. Raises RuntimeError for queries, keys and values whose shapes do not fit together, InputError for two tensors
    of one name.
    """
    if not any(map(_FIRST.fullmatch, tensors)):
        return tensors
    names = {key: _timms_name(key) for key in tensors}
    _require_one_of_each(path, ((key, (name, one)) for key, (name, which) in names.items() for one in which or "qkv"))
    parts: dict[str, dict[str, Tensor]] = {}
    for key, (name, which) in names.items():
        if not name.startswith("pooler."):
            parts.setdefault(name, {})[which] = tensors[key]
    return {
        name: of[""] if "" in of else torch.cat([of[one] for one in "qkv" if one in of]) for name, of in parts.items()
    }


def _timms_name(key: str) -> tuple[str, str]:
    """timm's name of a tensor of transformers, and which third of it that is: q, k, v, or all of it ("")."""
    for old, new in _NAMES:
        key = re.sub(old, new, key)
    if found := _PROJECTION.fullmatch(key):
        block, which, part = found.groups()
        return f"{block}attn.qkv.{part}", which[0]
    return key, ""
