"""The bundle: a plain folder NAME.vitx that travels to production. Specification: docs/bundle.md.

Its manifest names every file with its size and digest. So one on a web server or in an object store needs no listing:
what is read there is the manifest's, or is refused.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from vitx.core.certificate import Certificate as Certificate  # so that a reader of bundles needs one import
from vitx.core.console import log
from vitx.core.errors import NO_SPACE, CheckFailed, EnvironmentMissing, InputError, VitxError
from vitx.core.files import (
    Record,
    cache_folder,
    make_folder,
    read_record,
    read_sealed,
    require_seal,
    sha256_bytes,
    sha256_file,
    staged_folder,
    write_json,
)
from vitx.core.latency import Latency, LatencyFile, machine_key
from vitx.core.machine import describe_machine
from vitx.core.options import OUTPUTS as OUTPUTS  # these four too; help texts import no bundle
from vitx.core.options import Base as Base
from vitx.core.options import OutputName as OutputName
from vitx.core.options import Precision as Precision
from vitx.core.page import fields
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, RunFolder, verify_digests
from vitx.core.urls import Store

MANIFEST = "manifest.json"
CERTIFICATE = "certificate.json"
LATENCY = "latency.json"
SIGNATURE = "signature.json"
_WRITTEN_LATER = (MANIFEST, CERTIFICATE, LATENCY, SIGNATURE)
_READ_EACH_TIME = (MANIFEST, CERTIFICATE, SIGNATURE)  # of a store's bundle
MODEL = "model.onnx"
# The same network in int8, beside the graph: a candidate of `--runtime auto` (vitx export --for cpu).
INT8_MODEL = "int8/model.onnx"
WITNESS = "witness.safetensors"
_SCHEME = re.compile("(^|::)([a-z][a-z0-9+.-]+):/+(?=.)", re.DOTALL | re.IGNORECASE)  # a drive has one letter
# The text "location" with its length in front, as a tensor in a graph names the file that has its values.
_EXTERNAL = re.compile(rb"(?:\x08|\x88\x80*\x00)location")
_BLOCK = 2**20
_MOUNTED = "..data"  # through this link leads each file of a volume that Kubernetes makes of a ConfigMap or a Secret


class FileEntry(Record):
    """One file of a bundle; size in bytes."""

    sha256: str
    size: Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class TensorSpec(Record):
    """A graph input or output; `N` in the shape stands for the batch."""

    name: str
    dtype: Literal["uint8", "float32"]
    shape: tuple[int | Literal["N"], ...]


class OutputSpec(TensorSpec):
    """An output beside the logits. meaning: one line for people; grid: rows and columns of the patches, rows first."""

    name: OutputName
    shape: tuple[Literal["N"], PositiveInt]
    meaning: str
    grid: tuple[int, int] | None = None


def output_file(name: str) -> str:
    """The file of a bundle with the part of the graph that computes a further output."""
    return f"outputs/{name}.onnx"


def output_tensor(name: str) -> str:
    """What that part calls its result: model.onnx has tensors of its own, one of which is called `embedding`."""
    return f"outputs/{name}"


class Provenance(Record):
    """Where a bundle comes from."""

    source: str
    checkpoint: str
    checkpoint_sha256: str
    recipe: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    created: str


class Manifest(Record):
    """`manifest.json`: the bundle's model, its contract and the digest of every file it serves."""

    format_version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelSpec
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    input: TensorSpec
    output: TensorSpec
    outputs: Annotated[tuple[OutputSpec, ...], Field(exclude_if=lambda outputs: not outputs)] = Field(
        default=(), description="what the bundle gives beside logits, each by a file of its own"
    )
    precision: Precision
    base: Annotated[Base, Field(exclude_if=lambda base: base == "fp32")] = Field(
        default="fp32", description="what computes beside the 8-bit products of an int8 or fp8 graph"
    )
    islands: tuple[str, ...] = Field(default=(), description="nodes kept in float32 in a graph of lower precision")
    lowering: dict[str, Any] = Field(default_factory=dict, description="how the lower precision was found")
    rewrites: tuple[str, ...]
    opset: int
    data: str
    files: dict[str, FileEntry]
    provenance: Provenance
    training_metrics: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _is_no_route(cls, name: str) -> str:
        if name == "stats":
            raise ValueError("is the address of the statistics of all models, /v2/models/stats: expected another name")
        return name

    @model_validator(mode="after")
    def _tensors_agree(self) -> "Manifest":
        labels, classes, size = len(self.labels), self.model.num_classes, self.preprocessing.image_size
        if labels != classes or self.output.shape != ("N", classes):
            raise ValueError(f"{labels} labels and an output {self.output.shape} for {classes} classes")
        if self.input.shape != ("N", size, size, 3):
            raise ValueError(f"an input {self.input.shape} for images of {size} × {size} pixels in three colours")
        if (self.input.dtype, self.output.dtype) != ("uint8", "float32"):
            raise ValueError(f"{self.input.dtype} images and {self.output.dtype} logits: expected uint8 and float32")
        return self

    @model_validator(mode="after")
    def _outputs_have_files(self) -> "Manifest":
        for name, count in Counter(spec.name for spec in self.outputs).items():
            if count > 1 or output_file(name) not in self.files:
                listed = "twice" if count > 1 else f"and not {output_file(name)}, which computes it"
                raise ValueError(f"lists the output {name} {listed}")
        return self


class Bundle:
    """A bundle on disk whose manifest was read and whose files were verified."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Bundle('{self.path}')"

    @classmethod
    def open(cls, path: Path | str) -> "Bundle":
        """Open a bundle and verify every file; raise InputError naming what is missing, changed or not listed.

        path: may be a URL; see `local_bundle`.
        """
        folder = local_bundle(path)
        if not folder.is_dir():
            raise InputError(f"no bundle at '{path}': expected a folder made by `vitx export`, or its URL")
        if not (folder / MANIFEST).is_file():
            run = RunFolder(folder).exists()
            why = f"it is a run: `vitx export {path}` makes one of it" if run else f"it has no {MANIFEST}"
            raise InputError(f"'{path}' is not a bundle: {why}")
        manifest = read_manifest(folder)
        _verify_files(folder, {name: entry.sha256 for name, entry in manifest.files.items()})
        for name, entry in manifest.files.items():
            if (found := (folder / name).stat().st_size) != entry.size:
                raise InputError(f"{folder / name} has {found} bytes: {MANIFEST} says {entry.size}, export it again")
            if name.endswith(".onnx"):
                _require_no_external_data(folder / name)
        return cls(folder, manifest)

    @property
    def model_path(self) -> Path:
        return self.path / MODEL

    def summary(self) -> dict[str, object]:
        """What the bundle holds, and what its certificate says, or why it is refused; sizes in MB."""
        manifest = self.manifest
        summary: dict[str, object] = {
            "bundle": str(self.path),
            "model": manifest.model.name,
            "size_mb": round(sum(entry.size for entry in manifest.files.values()) / 1e6, 2),
            "precision": manifest.precision,
            "islands": len(manifest.islands),
            "opset": manifest.opset,
            "rewrites": ", ".join(manifest.rewrites),
            "files": ", ".join(manifest.files),
            **({"outputs": ", ".join(spec.name for spec in manifest.outputs)} if manifest.outputs else {}),
        }
        try:
            certificate = self.require_certificate()
        except CheckFailed as reason:
            present = (self.path / CERTIFICATE).is_file()
            return {**summary, "verdict": f"refused: {reason}" if present else "not certified"}
        return {
            **summary,
            "verdict": certificate.verdict,
            "images": certificate.images,
            "flips": len(certificate.flips),
            "flip_rate_bound": certificate.flip_rate_bound,
            "max_logit_error": certificate.max_logit_error,
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return fields(self.summary().items())

    def require_outputs(self, names: Sequence[str]) -> None:
        """Raise InputError for an output that this bundle does not have."""
        present = [spec.name for spec in self.manifest.outputs]
        for name in names:
            if name not in present:
                raise InputError(
                    f"'{self.path}' has no output '{name}' ({', '.join(present) or 'logits alone'}): export it again "
                    f"with --output {name}"
                )

    def graph_bytes(self, outputs: Sequence[str] = ()) -> bytes:
        """model.onnx with these further outputs; raise InputError for one that this bundle does not have.

        A file of an output is the rest of a protobuf message: written one after the other they are one ModelProto,
        because a reader of protobuf joins the fields of a message that comes in several parts.
        """
        self.require_outputs(outputs)
        return b"".join((self.path / name).read_bytes() for name in (MODEL, *map(output_file, outputs)))

    def subject(self) -> dict[str, str]:
        """What a certificate is bound to: sha256 of the manifest and of every file that the manifest names."""
        digests = {name: entry.sha256 for name, entry in self.manifest.files.items()}
        return {MANIFEST: sha256_file(self.path / MANIFEST), **digests}

    def certificate(self) -> Certificate | None:
        """What the file says, unchecked: `require_certificate` finds whether it is of these files and unchanged."""
        path = self.path / CERTIFICATE
        return read_record(path, Certificate) if path.is_file() else None

    def latency(self) -> Latency | None:
        """The latencies measured on this machine, or None."""
        return self.latency_file().machines.get(machine_key(describe_machine()))

    def latency_file(self) -> LatencyFile:
        """The latencies measured on every machine; raise CheckFailed when the file was changed after it was written."""
        path = self.path / LATENCY
        if not path.is_file():
            return LatencyFile()
        return read_sealed(path, LatencyFile, remedy="remove it, and run `vitx bench BUNDLE` again")

    def record_latency(self, latency: Latency) -> None:
        """Write one machine's latencies into `latency.json`, beside those of other machines.

        Where it cannot be written, say so: minutes were spent on what was measured, and the caller has it.
        """
        try:
            write_json(self.path / LATENCY, self.latency_file().with_machine(latency))
        except OSError as error:
            full = error.errno in NO_SPACE
            remedy = "free some space, and bench it again" if full else "bench a copy that can be written"
            log(f"vitx: what was measured is not kept in the bundle ({error}): {remedy}")

    def require_certificate(self) -> Certificate:
        """Return the certificate if it was made for exactly these files and says pass; raise CheckFailed otherwise."""
        remedy = "run `vitx parity RUN BUNDLE`, or give --allow-uncertified"
        certificate = self.certificate()
        if certificate is None:
            raise CheckFailed(f"bundle '{self.path}' has no certificate: {remedy}")
        if certificate.subject != self.subject():
            changed = sorted(dict(certificate.subject.items() ^ self.subject().items()))
            raise CheckFailed(
                f"the certificate of '{self.path}' is of other files ({', '.join(changed)} differ): {remedy}"
            )
        if certificate.verdict != "pass":
            raise CheckFailed(f"the certificate of '{self.path}' says fail: {'; '.join(certificate.reasons)}")
        return require_seal(self.path / CERTIFICATE, certificate, remedy="run `vitx parity RUN BUNDLE` again")


def _verify_files(folder: Path, digests: dict[str, str]) -> None:
    """Raise InputError naming what changed: a file, or the manifest, where the certificate has the digests of files."""
    try:
        verify_digests(folder, digests)
    except InputError:
        certified: dict[str, str] = {}
        with suppress(VitxError):  # there may be none, or one that cannot be read
            certified = read_record(folder / CERTIFICATE, Certificate).subject
        wrong = [name for name, digest in digests.items() if certified.get(name, digest) != digest]
        if wrong and all((folder / name).is_file() and sha256_file(folder / name) == certified[name] for name in wrong):
            which = f"its sha256 of {', '.join(wrong)} is neither the certificate's nor the file's"
            raise InputError(f"{folder / MANIFEST} is corrupt: {which}") from None
        raise


def _require_no_external_data(graph: Path) -> None:
    """Raise InputError for a graph with weights in another file: which one a runtime reads, no digest may cover."""
    content = b""
    with graph.open("rb") as file:  # not mapped: where it is cut meanwhile, SIGBUS would end the process
        while block := file.read(_BLOCK):
            content = content[-64:] + block  # the text may begin in the block before; a length has 10 bytes at most
            if b"location" in content and _EXTERNAL.search(content):  # the second alone takes six times as long
                raise InputError(f"{graph} has external data: expected a graph with its weights in it, export it again")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle; raise InputError unless it is one, and lists every file of the folder."""
    manifest = read_record(folder / MANIFEST, Manifest)
    _check_listing(folder, manifest.files)
    return manifest


def _check_listing(folder: Path, listed: Mapping[str, FileEntry]) -> None:
    """Raise InputError unless `listed` has the graph and every other file of the folder, and nothing outside it."""
    if MODEL not in listed:
        raise InputError(f"{folder / MANIFEST} does not list {MODEL}: nothing says that it is the graph of this bundle")
    spellings = Counter(map(str.casefold, listed))
    if twins := [name for name in listed if spellings[name.casefold()] > 1]:
        raise InputError(f"{folder / MANIFEST} lists {' and '.join(twins)}: one file, where case does not count")
    for name in (*listed, *_WRITTEN_LATER):
        path = folder / name
        try:
            inside = _names_a_file(name, listed) and path.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError):  # a link to itself, which Python 3.13 resolves
            inside = False
        if not inside or (path.is_symlink() and not path.exists()):
            raise InputError(f"{path} leads out of the bundle: expected a file in it")
    found = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    names = {path.relative_to(folder).as_posix() for path in found} - listed.keys()
    unknown = sorted(name for name in names if name not in _WRITTEN_LATER and not is_unfinished(name))
    if unknown:
        raise InputError(f"{folder / unknown[0]} is not listed in {MANIFEST}: remove it, or make the bundle again")


def is_unfinished(name: str) -> bool:
    """Whether a killed writer of what is written after the manifest left this (`vitx.core.files.write_bytes`)."""
    return name.startswith(tuple(f".{each}." for each in _WRITTEN_LATER))


def timestamp() -> str:
    """Now, in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def refuse_in_bundle(path: Path) -> None:
    """Raise InputError for a place in a bundle: with a file that its manifest does not list, nothing reads it."""
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if (folder / MANIFEST).is_file() and (folder / MODEL).is_file():
            raise InputError(
                f"'{path}' would add to the bundle '{folder}', which is refused with files that its manifest does not "
                "list: choose another place"
            )


def url_of(path: Path | str) -> str | None:
    """The URL that a path was made of, which has one of its slashes, without any at its end; None for a local path."""
    given = str(path).rstrip("/")
    whole = _SCHEME.sub(
        lambda found: f"{found[0].rstrip('/')}{'///' if found[2] in ('file', 'local') else '//'}", given
    )
    return whole if _SCHEME.match(given) else None


def files_folder(path: Path) -> Path:
    """Where the files of the folder `path` are: behind the link that is moved when a mounted volume changes."""
    return mounted if (mounted := path / _MOUNTED).is_dir() else path


def local_bundle(path: Path | str) -> Path:
    """The folder of a bundle: `path` itself, or the copy of a URL's in this machine's cache, made now if there is none.

    Its manifest, certificate and signature are read each time: a new one is another copy. One that is not whole any
    more is made again.

    s3://BUCKET/NAME.vitx, gs://…, az://…, hf://USER/REPOSITORY/NAME.vitx, https://…: what fsspec and its packages open,
    with their ways to give credentials. Raises InputError for what is no bundle, CheckFailed for a file that is not the
    manifest's, EnvironmentMissing for a store that does not answer or whose package is not installed.
    """
    url = url_of(path)
    if url is None:
        return files_folder(Path(path))
    store = Store(url)
    heads = {name: content for name in _READ_EACH_TIME if (content := store.small(name)) is not None}
    if MANIFEST not in heads:
        raise InputError(f"'{store.url}' is not a bundle: it has no {MANIFEST}, or none that may be read")
    try:
        manifest = Manifest.model_validate_json(heads[MANIFEST])
    except ValidationError as error:
        raise InputError(f"'{store.url}/{MANIFEST}' is not a valid manifest: {error.errors()[0]['msg']}") from None
    for name in manifest.files:
        if not _names_a_file(name, manifest.files):
            raise InputError(f"'{store.url}/{MANIFEST}' lists '{name[:80]}': expected the path of a file in it")
    version = sha256_bytes(repr((store.url, sorted(heads.items()))).encode())[:32]
    folder = cache_folder() / "bundles" / version / f"{manifest.name}.vitx"
    if not _is_copy(folder, heads, manifest.files):
        size = sum(entry.size for entry in manifest.files.values())
        log(f"vitx: copying {store.url} ({size / 1e6:.1f} MB) to {folder}")
        if (latency := store.small(LATENCY)) is not None:
            heads[LATENCY] = latency
        try:
            make_folder(folder.parent)
        except OSError as error:
            reason = f"cannot make the folder '{folder.parent}' ({error.strerror})"
            raise EnvironmentMissing(f"{reason}: set VITX_CACHE to a folder that can be written") from None
        with staged_folder(folder) as stage:
            for name, content in heads.items():
                (stage / name).write_bytes(content)
            for name, entry in manifest.files.items():
                store.copy(name, stage / name, entry.size, entry.sha256)
    return folder


def _is_copy(folder: Path, heads: Mapping[str, bytes], files: Mapping[str, FileEntry]) -> bool:
    """Whether a store's files are all in `folder`: those that were read as they are, the others by their size.

    What clears a cache may take some files alone. `Bundle.open` verifies the digests.
    """
    copies = {name: path.read_bytes() for name in _READ_EACH_TIME if (path := folder / name).is_file()}
    sizes = {name: path.stat().st_size for name in files if (path := folder / name).is_file()}
    return copies == heads and sizes == {name: entry.size for name, entry in files.items()}


def _names_a_file(name: str, files: Mapping[str, FileEntry]) -> bool:
    """Whether it is a path below the bundle, in plain words, and no other file is a folder of it."""
    path = PurePosixPath(name)
    plain = path.as_posix() == name and not {"/", ".", ".."} & {name, *path.parts} and "\0" not in name
    return plain and not any(str(folder) in files for folder in path.parents[:-1])
