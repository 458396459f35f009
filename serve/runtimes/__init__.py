"""Runtimes: one file each, one protocol. A session maps uint8 images (N, S, S, 3) to float32 logits (N, C)."""

from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import unknown_name
from vitx.core.preprocess import UInt8Array

Float32Array = npt.NDArray[np.float32]
Device = Literal["auto", "cpu", "cuda"]
DEVICES = ("auto", "cpu", "cuda")
RUNTIMES = ("onnxruntime", "torch")


class Session(Protocol):
    """A loaded model. `infer` may be called from several threads at once."""

    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3)."""
        ...

    def describe(self) -> dict[str, Any]:
        """Runtime, version, the provider really used, precision, threads."""
        ...


def load_session(
    bundle: Bundle, runtime: str = "onnxruntime", *, device: str = "auto", threads: int | None = None
) -> Session:
    """Load a bundle into a runtime.

    Raises InputError for an unknown runtime or device, EnvironmentMissing when the device or a package is not there.
    """
    if runtime == "onnxruntime":
        from vitx.serve.runtimes.onnxruntime import OnnxRuntimeSession

        return OnnxRuntimeSession(bundle, device=device_name(device), threads=threads)
    raise unknown_name("runtime of a bundle", runtime, ("onnxruntime",))


def device_name(name: str) -> Device:
    """Return `name` as a device; raise InputError for another name."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return cast(Device, name)
