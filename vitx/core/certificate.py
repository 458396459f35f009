"""`certificate.json`: what parity measured, bound by sha256 to the files it measured. Semantics: docs/parity.md."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from vitx.core.files import Record, SealedRecord
from vitx.core.machine import describe_machine


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

    @model_validator(mode="after")
    def _numbers_of_each_layer(self) -> "TokenSimilarity":
        if not len(self.layers) == len(self.reference) == len(self.candidate):
            found = f"{len(self.layers)} layers, {len(self.reference)} and {len(self.candidate)} numbers"
            raise ValueError(f"{found}: expected one of each side for every layer")
        return self

    def worst(self) -> tuple[str, float, float]:
        """The layer where the two differ most: its name, CosSim of the reference, CosSim of the candidate."""
        rows = zip(self.layers, self.reference, self.candidate, strict=True)
        return max(rows, key=lambda row: abs(row[2] - row[1]))


class Executable(Record):
    """What runs a bundle: a runtime on one kind of hardware, and the files of the bundle that it loads.

    Two executables are the same if all of it is: another version or instruction set may round otherwise.
    """

    runtime: str
    version: str
    provider: str = Field(description="of ONNX Runtime its execution provider, of the others the device")
    architecture: str = Field(description="instruction sets of the processor, or compute capability of the GPU")
    driver: str = Field(default="", description="CUDA version of the GPU's driver")
    precision: str
    artefacts: dict[str, str] = Field(description="sha256 of each file that is loaded, by its name in the bundle")

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return (
            f"{self.runtime} {self.version} in {self.precision} on {self.provider} ({self.architecture}{driver}), "
            f"{', '.join(sorted(self.artefacts))}"
        )


class OutputVerdict(Record):
    """How far an executable's embedding, attention or rollout is from the checkpoint's (docs/maths.md §7).

    The distance of an image is 1 − the cosine of the two vectors; its length error |‖found‖/‖reference‖ − 1|.
    """

    verdict: Literal["pass", "fail"]
    images: int = Field(description="that were run")
    worst_distance: float
    mean_distance: float
    allowed_distance: float
    worst_length_error: float
    allowed_length_error: float
    exceeding: int = Field(description="images beyond one of the two limits")
    exceeding_bound: float = Field(description="one-sided 95 % upper bound on the share of such images")


class Verdict(Record):
    """Whether one executable classifies as the checkpoint does, how sure that is, and where it was measured.

    "not run": it was built or copied, and nothing that could run it was there, or it was only timed; `reasons` says so.
    """

    executable: Executable
    verdict: Literal["pass", "fail", "not run"]
    reasons: tuple[str, ...]
    evidence: Literal["evaluation split", "witness set", "none"]
    images: int = Field(default=0, description="that were run")
    population: int = Field(default=0, description="images of the split that they stand for")
    flips: int = 0
    flip_rate_bound: float = Field(default=1.0, description="one-sided 95 % upper bound on the flip rate")
    max_flip_rate: float = 0.0
    max_logit_error: float = 0.0
    max_logit_error_allowed: float = 0.0
    images_per_second: float | None = Field(
        default=None, description="of this measurement; null where it was not timed"
    )
    outputs: Annotated[dict[str, OutputVerdict], Field(exclude_if=lambda outputs: not outputs)] = Field(
        default_factory=dict, description="of what it gives beside logits, by name"
    )
    machine: dict[str, Any] = Field(default_factory=dict)
    created: str = ""

    @property
    def failed_on_split(self) -> bool:
        """Whether all images refute it, against which no witness set counts: it has fewer of them."""
        return self.verdict == "fail" and self.evidence == "evaluation split"


class Certificate(SealedRecord):
    """Reference against candidate on the same images (docs/maths.md §6), and the verdicts on all executables."""

    format_version: Literal[2] = 2
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
    batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1)
    accuracy_reference: float
    accuracy_candidate: float
    flips: tuple[Flip, ...]
    flip_rate_bound: float = Field(description="one-sided 95 % Clopper–Pearson upper bound on the flip rate")
    max_flip_rate: float
    mcnemar_p: float
    max_logit_error: float
    mean_logit_error: float
    max_logit_error_by_batch_size: dict[int, float] = Field(min_length=1)
    max_logit_error_allowed: float
    max_neighbour_error: float = Field(
        description="largest change of a row's logits with other neighbours in its batch"
    )
    created: str
    batch_size: NonNegativeInt = Field(
        0, description="at which every image was run; the other sizes saw the probe images"
    )
    probe_images: int = Field(0, description="evenly spaced images that were run at every batch size and order")
    probe_flips: int = Field(0, description="probe images whose class depends on batch size, place or neighbours")
    probe_flip_rate_bound: float = Field(1.0, description="95 % upper bound on the rate of such images")
    max_position_error: float = Field(0.0, description="largest change with another place among the same neighbours")
    min_cosine: float = Field(1.0, description="smallest cosine of an image's two logit vectors")
    mean_cosine: float = 1.0
    ece_reference: float = Field(0.0, description="expected calibration error, 15 bins")
    ece_candidate: float = 0.0
    token_similarity: TokenSimilarity | None = None
    classes_sha256: str = Field(default="", description="of the candidate's class of every image: int32, little endian")
    executables: tuple[Verdict, ...] = Field((), description="one verdict each")

    @field_validator("token_similarity")
    @classmethod
    def _is_of_layers(cls, measured: TokenSimilarity | None) -> TokenSimilarity | None:
        if measured is not None and not measured.layers:
            raise ValueError("is of no layer: expected null where none was measured")
        return measured

    def verdict_of(self, executable: Executable) -> Verdict | None:
        """The verdict on exactly this executable, the last one if there are several; None when there is none."""
        return next((each for each in reversed(self.executables) if each.executable == executable), None)

    def as_verdict(self, executable: Executable) -> Verdict:
        """What these measurements say of the executable they were made with."""
        same = {name: getattr(self, name) for name in Verdict.model_fields if name in type(self).model_fields}
        return Verdict(
            **{**same, "flips": len(self.flips)},
            executable=executable,
            evidence="evaluation split",
            population=self.images,
            machine=describe_machine(),
        )
