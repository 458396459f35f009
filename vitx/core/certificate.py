"""`certificate.json`: what parity measured, bound by sha256 to the files it measured. Semantics: docs/parity.md."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vitx.core.files import Record
from vitx.core.sealed import SealedRecord, read_sealed


class Flip(Record):
    """An image that reference and candidate put into different classes."""

    key: str
    label: int
    reference: int
    candidate: int
    reference_margin: float = Field(description="reference logit of its class less the next one")
    batch_size: int


class TokenSimilarity(Record):
    """CosSim of the patch tokens after each block (docs/maths.md §1.1), of both sides, mean over `images` images."""

    images: int
    layers: tuple[str, ...]
    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    allowed: float = Field(description="largest |candidate − reference| of a layer that passes")

    def worst(self) -> tuple[str, float, float]:
        """The layer where the two differ most: its name, CosSim of the reference, CosSim of the candidate."""
        rows = zip(self.layers, self.reference, self.candidate, strict=True)
        return max(rows, key=lambda row: abs(row[2] - row[1]))


class Certificate(SealedRecord):
    """Reference against candidate on the same images (docs/maths.md §6)."""

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
    batch_size: int = Field(0, description="at which every image was run; the other sizes saw the probe images")
    probe_images: int = Field(0, description="evenly spaced images that were run at every batch size and order")
    probe_flips: int = Field(0, description="probe images whose class depends on batch size, place or neighbours")
    probe_flip_rate_bound: float = Field(1.0, description="95 % upper bound on the rate of such images")
    max_position_error: float = Field(0.0, description="largest change with another place among the same neighbours")
    min_cosine: float = Field(1.0, description="smallest cosine of an image's two logit vectors")
    mean_cosine: float = 1.0
    ece_reference: float = Field(0.0, description="expected calibration error, 15 bins")
    ece_candidate: float = 0.0
    token_similarity: TokenSimilarity | None = None
    classes_sha256: str = Field("", description="of the candidate's class of every image: int32, little endian")


def read_certificate(path: Path) -> Certificate:
    """Read a certificate; raise InputError for a file that is none, CheckFailed for one that was changed."""
    return read_sealed(path, Certificate, remedy="run `vitx parity RUN BUNDLE` again")
