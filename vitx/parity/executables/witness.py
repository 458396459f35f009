"""`witness.safetensors`: evaluation images as they enter the graph, with the checkpoint's logits (docs/bundle.md).

With it any machine can judge an executable of the bundle without the checkpoint and without the data.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vitx.core.bundle import WITNESS, Bundle
from vitx.core.errors import CheckFailed, InputError, first_line
from vitx.core.files import Record, first_fault, sha256_bytes, write_bytes
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.probabilities import Float64Array
from vitx.data.image_set import encode_png

_TENSORS = {"png": "uint8", "ends": "int64", "logits": "float64"}
_METADATA = "witness"


class WitnessInfo(Record):
    """How a witness set was drawn, and of what. The split is the set of evaluation images it stands for."""

    format_version: Literal[1] = 1
    split: str
    split_sha256: str = Field(description="of keys, labels and bytes of all images of the split")
    # Counting the flips of more would take minutes, and of a number without an end all memory.
    population: int = Field(le=10**8, description="images of the split")
    census: int = Field(description="the first images here: those of smallest margin in the split, all of them")
    seed: int = Field(description="of the random choice of the other images among the other images of the split")
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    reference: str
    reference_sha256: str = Field(description="of the weights")
    logit_std: float = Field(description="standard deviation of the reference's logits over the whole split")
    split_flips: Annotated[int, Field(ge=0, exclude_if=lambda flips: not flips)] = Field(
        default=0, description="images of the split that flipped when the graph was certified"
    )
    flipped: Annotated[tuple[int, ...], Field(exclude_if=lambda places: not places)] = Field(
        default=(), description="those of them that are here, by their place, rising"
    )
    images_sha256: str = Field(description="of the pixels, uint8")
    logits_sha256: str = Field(description="float64, little endian")
    outputs_sha256: Annotated[dict[str, str], Field(exclude_if=lambda digests: not digests)] = Field(
        default_factory=dict, description="float32, little endian, by output"
    )


@dataclass(frozen=True)
class Witness:
    """pixels: uint8 (N, S, S, 3). logits: of the checkpoint, computed in float64, (N, C).

    outputs: its further outputs, computed in float64 too and rounded to float32, (N, D) or (N, P), by name.
    """

    info: WitnessInfo
    pixels: UInt8Array
    logits: Float64Array
    outputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pixels)


def encode_images(pixels: UInt8Array) -> list[bytes]:
    """Each image (S, S, 3) as a PNG, as small as it can be."""
    return [encode_png(image, compression=9) for image in pixels]


def digest_of(array: npt.NDArray[np.generic]) -> str:
    """sha256 of an array's elements in order, little endian."""
    return sha256_bytes(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())


def write_witness(path: Path, witness: Witness, encoded: list[bytes]) -> None:
    """Write a witness set, whole or not at all; `encoded` are its pixels by `encode_images`."""
    tensors: dict[str, npt.NDArray[Any]] = {
        "png": np.frombuffer(b"".join(encoded), np.uint8),
        "ends": np.cumsum([len(image) for image in encoded]).astype(np.int64),
        "logits": witness.logits,
        **witness.outputs,
    }
    write_bytes(path, save(tensors, metadata={_METADATA: witness.info.model_dump_json()}))


def read_witness(bundle: Bundle) -> Witness | None:
    """The witness set of an opened bundle, checked against its manifest; None when it has none.

    Raises InputError for a file that is none, or of another input or other classes than the bundle's; CheckFailed when
    images or logits were altered after it was made.
    """
    if WITNESS not in bundle.manifest.files:
        return None
    path = bundle.path / WITNESS
    shape = tuple(int(size) for size in bundle.manifest.input.shape[1:])
    try:
        with safe_open(path, framework="numpy") as file:
            info = WitnessInfo.model_validate_json((file.metadata() or {}).get(_METADATA, ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, ValidationError, AttributeError, TypeError) as error:  # the last two: no type of numpy's
        why = first_fault(error, "its metadata") if isinstance(error, ValidationError) else first_line(error)
        raise InputError(f"{path} is no witness set: {why}; export the bundle again") from None
    widths = {str(spec.name): spec.shape[1:] for spec in bundle.manifest.outputs}
    expected = {**_TENSORS, **dict.fromkeys(widths, "float32")}
    if {name: str(tensor.dtype) for name, tensor in tensors.items()} != expected or tensors["ends"].ndim != 1:
        raise InputError(f"{path} is no witness set: expected the tensors {', '.join(expected)}; export it again")
    logits, ends = tensors["logits"], tensors["ends"]
    if info.labels != bundle.manifest.labels or logits.shape != (len(ends), len(info.labels)):
        raise CheckFailed(
            f"{path} is of other classes than {bundle.path}: its labels were changed after it was made; export it again"
        )
    if info.preprocessing != bundle.manifest.preprocessing:
        raise CheckFailed(
            f"{path} was preprocessed otherwise than {bundle.path} says: that was changed after it was made; export it "
            "again"
        )
    outputs = {name: tensors[name] for name in widths}
    for name, values in outputs.items():
        if values.shape != (len(ends), *widths[name]):
            raise CheckFailed(f"the {name} of {path} is {values.shape}, the bundle's is {('N', *widths[name])}")
    pixels = _decode(path, tensors["png"].tobytes(), ends, shape)
    witness = Witness(info, pixels, logits, outputs)
    _check(path, witness)
    return witness


def _decode(path: Path, encoded: bytes, ends: npt.NDArray[np.int64], shape: tuple[int, ...]) -> UInt8Array:
    """The images (N, S, S, 3); one of another size is refused before its pixels are decoded."""
    starts = np.concatenate([[0], ends[:-1]])
    if not len(ends) or (starts >= ends).any() or ends[-1] != len(encoded):
        raise InputError(f"{path} is no witness set: its images overlap or lie outside; export the bundle again")
    pixels = np.empty((len(ends), *shape), dtype=np.uint8)
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        try:
            with Image.open(io.BytesIO(encoded[start:end]), formats=["PNG"]) as image:
                fits = (image.height, image.width, 3) == shape and image.mode == "RGB"
                if fits:
                    pixels[place] = np.asarray(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise CheckFailed(f"image {place} of {path} was altered ({error}): export the bundle again") from None
        if not fits:
            raise InputError(
                f"image {place} of {path} is {image.mode} {image.height} x {image.width}: expected {shape}"
            )
    return pixels


def _check(path: Path, witness: Witness) -> None:
    info, logits = witness.info, witness.logits
    found: list[tuple[str, str | None, npt.NDArray[Any]]] = [
        ("images", info.images_sha256, witness.pixels),
        ("reference logits", info.logits_sha256, logits),
        *((f"reference values of {name}", info.outputs_sha256.get(name), it) for name, it in witness.outputs.items()),
    ]
    for what, digest, values in found:
        if digest != digest_of(values):
            raise CheckFailed(f"the {what} of {path} were altered after it was made: export the bundle again")
    count = len(witness)
    finite = np.isfinite(logits).all() and all(np.isfinite(values).all() for values in witness.outputs.values())
    if not (0 <= info.census <= count <= info.population and finite and info.logit_std >= 0):
        raise InputError(f"{path} is no witness set: {count} images of {info.population}, {info.census} by margin")
    places = info.flipped
    if [*places] != sorted({*places} & {*range(count)}) or not len(places) <= info.split_flips <= info.population:
        raise InputError(f"{path} is no witness set: {info.split_flips} flips of the split, among them {places}")
