"""What every runtime is: uint8 images (N, S, S, 3) in, float32 logits (N, C) out."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError, unknown_name
from vitx.core.preprocess import UInt8Array

Float32Array = npt.NDArray[np.float32]
FeatureArray = npt.NDArray[np.floating]
Device = Literal["auto", "cpu", "cuda"]
DEVICES = ("auto", "cpu", "cuda")


class Session(Protocol):
    """A loaded model. `infer` may be called from several threads at once."""

    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3)."""
        ...

    def describe(self) -> dict[str, Any]:
        """Runtime, version, the provider really used, precision, threads."""
        ...


class FeatureSession(Session, Protocol):
    """A model that also gives what its classifier is given."""

    def infer_features(self, images: UInt8Array) -> tuple[Float32Array, FeatureArray]:
        """Return logits float32 (N, C) and features (N, D), float32 or float16, of images uint8 (N, S, S, 3)."""
        ...


def check_images(images: UInt8Array, image_shape: Sequence[int]) -> None:
    """Raise InputError unless `images` is uint8 (N, *image_shape)."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != tuple(image_shape):
        expected = ", ".join(map(str, ("N", *image_shape)))
        raise InputError(f"images are {images.dtype} {images.shape}: expected uint8 ({expected})")


def image_shape(bundle: Bundle) -> tuple[int, int, int]:
    """(S, S, 3): the shape of one image, from the manifest."""
    height, width, channels = (int(size) for size in bundle.manifest.input.shape[1:])
    return height, width, channels


def device_name(name: str) -> Device:
    """Return `name` as a device; raise InputError for another name."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return cast(Device, name)
