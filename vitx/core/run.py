"""The run folder: what `vitx train` writes and every other stage reads. Specification: docs/run-folder.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, NonNegativeInt, field_validator, model_validator

from vitx.core.errors import InputError
from vitx.core.files import Record, read_record, sha256_file
from vitx.core.options import Checkpoint
from vitx.core.preprocess import Preprocessing

SPLIT_FILE = "split.json"  # of a run on a folder that it split itself: which images are for which split
# Arguments of timm's factory that are not of the network, with what to do instead.
NOT_OF_THE_NETWORK = {
    **dict.fromkeys(("pretrained", "checkpoint_path", "pretrained_strict", "cache_dir"), "say --weights"),
    **dict.fromkeys(("pretrained_cfg", "pretrained_cfg_overlay", "model_name"), "choose another model:NAME"),
    **dict.fromkeys(("scriptable", "exportable", "no_jit", "device", "dtype"), "leave it out, export sets it"),
    **dict.fromkeys(("in_chans", "features_only", "out_indices"), "leave it out, bundles classify RGB images"),
}


def is_split_file(data: str) -> bool:
    return Path(data).name == SPLIT_FILE


class ModelSpec(Record):
    """How to build the network: `timm.create_model(name, num_classes=…, **kwargs)` after `import vitx.models`."""

    name: str
    num_classes: int = Field(gt=0)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class RunInfo(Record):
    """`run.json`: what the other stages need to know of a run, without reading its recipe."""

    format_version: Literal[1] = 1
    name: str
    recipe: str
    model: ModelSpec
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    data: str
    seed: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.class_names) != self.model.num_classes:
            raise ValueError(f"{len(self.class_names)} class names of {self.model.num_classes} classes")
        return self


class CheckpointState(Record):
    """`state.json` of one checkpoint folder: how far training had come, and the sha256 of the files beside it."""

    format_version: Literal[1] = 1
    epoch: NonNegativeInt = Field(description="epochs completed")
    step: NonNegativeInt
    best_metric: FiniteFloat
    best_epoch: int
    metrics: dict[str, Any] = Field(default_factory=dict)
    rng: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict, description="what training resumes from besides the tensors")
    sha256: dict[str, str]

    @field_validator("metrics")
    @classmethod
    def _refuse_infinite(cls, metrics: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(metrics, allow_nan=False)
        except ValueError:  # of a damaged file: pydantic would write null into a bundle's manifest
            raise ValueError("a number is infinite or NaN: expected finite ones") from None
        return metrics


class RunFolder:
    """A run on disk. `checkpoints/best` and `checkpoints/last` are links to `checkpoints/epoch-NNNN`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder('{self.path}')"

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """Open an existing run; raise InputError when `path` is not one."""
        run = cls(path)
        if not run.path.is_dir():
            raise InputError(f"no run at '{path}': expected a folder made by `vitx train`")
        if not run.exists():
            bundle = (run.path / "manifest.json").is_file()
            why = "it is a bundle: give the run that it was exported from" if bundle else "it has no run.json"
            raise InputError(f"'{path}' is not a run: {why}")
        return run

    def exists(self) -> bool:
        """Whether a run has been begun here: its folder appears with `run.json` inside."""
        return self.info_path.is_file()

    @property
    def info_path(self) -> Path:
        return self.path / "run.json"

    @property
    def info(self) -> RunInfo:
        """What run.json says; for the run's own split.json the one beside it, wherever the run was moved."""
        info = read_record(self.info_path, RunInfo)
        return info.model_copy(update={"data": self.images_of(info.data)}) if is_split_file(info.data) else info

    @property
    def split_path(self) -> Path:
        return self.path.absolute() / SPLIT_FILE

    def images_of(self, data: str) -> str:
        """What the run's images are read from: its own split.json, where it has one, or else `data`."""
        return str(self.split_path) if self.split_path.is_file() else data

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint_path(self, which: Checkpoint) -> Path:
        return self.path / "checkpoints" / which.removesuffix("-raw")

    def checkpoint(self, which: Checkpoint = "best") -> tuple[Path, CheckpointState]:
        """Return a checkpoint's folder and state, every file's digest verified.

        Raises InputError when there is none, or naming the file whose sha256 differs.
        """
        while True:
            folder = self._linked(which)
            try:
                return folder, self._verified(folder, which)
            except (InputError, FileNotFoundError):
                # A running training has switched the link and removed what it led to; or else it is an error.
                if self._linked(which) == folder:
                    raise

    def _linked(self, which: Checkpoint) -> Path:
        """The folder of a checkpoint now, its link followed once: a running training may switch it at any time."""
        path = self.checkpoint_path(which)
        return path.parent / path.readlink() if path.is_symlink() else path

    def _verified(self, folder: Path, which: Checkpoint) -> CheckpointState:
        if not (folder / "state.json").is_file():
            raise InputError(f"run '{self.path}' has no '{which}' checkpoint yet")
        state = read_record(folder / "state.json", CheckpointState)
        if (weights := weights_file(which, state)) not in state.sha256:
            raise InputError(f"{folder / 'state.json'} lists no sha256 of '{weights}': copy the run again")
        verify_digests(folder, state.sha256)
        return state


def weights_file(which: Checkpoint, state: CheckpointState) -> str:
    """The file of a checkpoint that holds the network: the averaged weights, where the run kept some, unless raw."""
    averaged = "ema.safetensors" in state.sha256 and not which.endswith("-raw")
    return "ema.safetensors" if averaged else "model.safetensors"


def verify_digests(folder: Path, expected: Mapping[str, str]) -> None:
    """Compare the files of `folder` with their recorded sha256; raise InputError naming the first that differs."""
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing: the folder is incomplete, make or copy it again")
        found = sha256_file(path)
        if found != digest:
            raise InputError(
                f"{path} is corrupt: sha256 {found[:16]}… but {digest[:16]}… was recorded when it was written"
            )
