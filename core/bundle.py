"""The bundle: a plain folder NAME.vitx that travels to production. Specification: docs/bundle.md."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import Record, read_record, sha256_file
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, verify_digests

Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
# The largest logit error allowed below float32, in standard deviations of the reference's logits (docs/parity.md).
SHARE_OF_STD: dict[Precision, float] = {"fp16": 0.02, "bf16": 0.15, "int8": 0.5, "fp8": 0.5}
MANIFEST = "manifest.json"
CERTIFICATE = "certificate.json"
LATENCY = "latency.json"


class FileEntry(Record):
    sha256: str
    size: int


class TensorSpec(Record):
    """A graph input or output; `N` in the shape stands for the batch."""

    name: str
    dtype: Literal["uint8", "float32"]
    shape: tuple[int | Literal["N"], ...]


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
    precision: Precision
    islands: tuple[str, ...] = Field(default=(), description="nodes kept in float32 in a graph of lower precision")
    lowering: dict[str, Any] = Field(default_factory=dict, description="how the lower precision was found")
    rewrites: tuple[str, ...]
    opset: int
    data: str
    files: dict[str, FileEntry]
    provenance: Provenance
    training_metrics: dict[str, Any] = Field(default_factory=dict)


class Flip(Record):
    """An image that reference and candidate put into different classes."""

    key: str
    label: int
    reference: int
    candidate: int
    reference_margin: float = Field(description="reference logit of its class less the next one")
    batch_size: int


class Certificate(Record):
    """`certificate.json`: reference against candidate on the same images (MATHS §6)."""

    format_version: Literal[1] = 1
    verdict: Literal["pass", "fail"]
    reasons: tuple[str, ...]
    subject: dict[str, str] = Field(description="sha256 of manifest.json and of every file it names")
    reference: str
    reference_sha256: str
    candidate: str
    runtime: dict[str, Any]
    data: str
    data_sha256: str
    images: int
    batch_sizes: tuple[int, ...]
    accuracy_reference: float
    accuracy_candidate: float
    flips: tuple[Flip, ...]
    flip_rate_bound: float = Field(description="one-sided 95 % Clopper–Pearson upper bound on the flip rate")
    max_flip_rate: float
    mcnemar_p: float
    max_logit_error: float
    mean_logit_error: float
    max_logit_error_by_batch_size: dict[int, float]
    max_logit_error_allowed: float
    max_neighbour_error: float = Field(
        description="largest change of a row's logits with other neighbours in its batch"
    )
    created: str


class LatencyPoint(Record):
    batch_size: int
    median_ms: float
    p95_ms: float
    images_per_second: float


class Latency(Record):
    """`latency.json`: measured latency by batch size, with the hardware; the server plans with it."""

    format_version: Literal[1] = 1
    runtime: dict[str, Any]
    machine: dict[str, Any]
    points: tuple[LatencyPoint, ...]
    created: str


class Bundle:
    """A bundle on disk whose manifest was read and whose files were verified."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str) -> "Bundle":
        """Open a bundle and verify every file; raise InputError naming what is missing or was changed."""
        folder = Path(path)
        if not folder.is_dir():
            raise InputError(f"no bundle at '{path}': expected a folder made by `vitx export`")
        if not (folder / MANIFEST).is_file():
            raise InputError(f"'{path}' is not a bundle: it has no {MANIFEST}")
        manifest = read_record(folder / MANIFEST, Manifest)
        verify_digests(folder, {name: entry.sha256 for name, entry in manifest.files.items()})
        return cls(folder, manifest)

    @property
    def model_path(self) -> Path:
        return self.path / "model.onnx"

    def subject(self) -> dict[str, str]:
        """What a certificate of this bundle is bound to: sha256 of the manifest and of every file it names."""
        digests = {name: entry.sha256 for name, entry in self.manifest.files.items()}
        return {MANIFEST: sha256_file(self.path / MANIFEST), **digests}

    def certificate(self) -> Certificate | None:
        path = self.path / CERTIFICATE
        return read_record(path, Certificate) if path.is_file() else None

    def latency(self) -> Latency | None:
        path = self.path / LATENCY
        return read_record(path, Latency) if path.is_file() else None

    def require_certificate(self) -> Certificate:
        """Return the certificate if it speaks of exactly these files and says pass; raise CheckFailed otherwise."""
        remedy = "run `vitx parity RUN BUNDLE`, or serve it with --allow-uncertified"
        certificate = self.certificate()
        if certificate is None:
            raise CheckFailed(f"bundle '{self.path}' has no certificate: {remedy}")
        if certificate.subject != self.subject():
            changed = sorted(name for name, digest in self.subject().items() if certificate.subject.get(name) != digest)
            raise CheckFailed(
                f"the certificate of '{self.path}' is of other files ({', '.join(changed)} differ): {remedy}"
            )
        if certificate.verdict != "pass":
            raise CheckFailed(f"the certificate of '{self.path}' says fail: {'; '.join(certificate.reasons)}")
        return certificate


def timestamp() -> str:
    """Now, in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
