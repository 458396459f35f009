"""`environment.json`: the machine on which a run was started, and its images."""

import hashlib
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Self

import torch
from pydantic import Field

from vitx.core.errors import InputError
from vitx.core.files import Record, read_record
from vitx.core.machine import describe_machine, installed_versions
from vitx.data.image_set import ImageSet

ENVIRONMENT_FILE = "environment.json"
SAMPLED_IMAGES = 32  # of each split: few enough to be read from any storage


class DataRecord(Record):
    """One split: how many images, which were left out and why, the sha256 of all names and labels in order.

    sample_sha256: of the bytes of some images, by which those that were made anew under their old names are noticed; ''
    in runs from before it.
    """

    images: int
    skipped: tuple[str, ...]
    names_sha256: str
    sample_sha256: str = ""

    @classmethod
    def of(cls, images: ImageSet) -> Self:
        hasher = hashlib.sha256()
        for key, label in zip(images.keys, images.labels, strict=True):
            hasher.update(f"{key}\0{label}\0".encode())
        sample = images.evenly_spaced(SAMPLED_IMAGES).digest()
        names = hasher.hexdigest()
        return cls(images=len(images), skipped=images.skipped, names_sha256=names, sample_sha256=sample)

    def same_images(self, other: "DataRecord") -> bool:
        """Whether both are of the same names and labels; `skipped` has whole paths, and the words of Pillow."""
        return (self.images, self.names_sha256) == (other.images, other.names_sha256)


class RunEnvironment(Record):
    """What a result depends on beside the recipe."""

    machine: dict[str, str | int]
    versions: dict[str, str]
    device: str
    threads: int = Field(description="threads of one torch operation; another number rounds differently")
    processes: int = Field(default=1, description="that train together; another number rounds differently")
    data: dict[str, DataRecord]
    teacher: str = Field(default="", description="sha256 of the weights that teach; '' without, as in older runs")
    command: str = Field(default="", description="the process's command line")
    commit: str = Field(default="", description="of vitx's clone, +changes where files differ; '' for a package")

    @classmethod
    def read(cls, run: Path) -> "RunEnvironment":
        """The `environment.json` of the run folder `run`; raise InputError when it is missing or not valid."""
        return read_record(run / ENVIRONMENT_FILE, cls)

    @classmethod
    def now(
        cls, device: torch.device, train: ImageSet, val: ImageSet, *, processes: int = 1, teacher: str = ""
    ) -> Self:
        return cls(
            machine=describe_machine(),
            versions=installed_versions(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            processes=processes,
            data={"train": DataRecord.of(train), "val": DataRecord.of(val)},
            teacher=teacher,
            command=_command(),
            commit=_commit(),
        )

    def differences(self, other: "RunEnvironment") -> list[str]:
        """Say what makes `other` round differently (device, threads, versions …), and if images or teacher changed."""
        begun, now = (
            {"device": each.device, "threads": each.threads, "processes": each.processes, **each.versions}
            for each in (self, other)
        )
        changed = (name for name in begun if now.get(name) != begun[name])
        rounds = "the result may differ in its last bits"
        said = [f"with {name} {now.get(name)}, begun with {begun[name]}: {rounds}" for name in changed]
        for split, record in self.data.items():
            if record.sample_sha256 not in ("", other.data[split].sample_sha256):
                said.append(f"on {split} images that are not those it was begun with, though their names are")
        if self.teacher not in ("", other.teacher):
            said.append("with a teacher whose weights are not those it was begun with")
        return said

    def check_same_data(self, other: "RunEnvironment") -> None:
        """Raise InputError when a split changed since the run began."""
        for split, record in self.data.items():
            found = other.data[split]
            if not record.same_images(found):
                raise InputError(
                    f"the {split} images changed since the run began ({record.images} then, {found.images} now): "
                    "restore them, or train into another --out"
                )


def _command() -> str:
    program = Path(sys.argv[0])
    # `python -m vitx` has the path vitx/__main__.py as its name.
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


@cache
def _commit() -> str:
    clone = Path(__file__).parents[3]
    if not (clone / ".git").exists():
        return ""
    command = ("git", "-C", str(clone), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
