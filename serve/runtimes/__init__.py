"""Runtimes: one file each, one protocol. A session maps uint8 images (N, S, S, 3) to float32 logits (N, C)."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError, missing_package, unknown_name
from vitx.core.preprocess import UInt8Array
from vitx.serve.runtimes.requirements import RUNTIMES, require

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


def load_session(
    bundle: Bundle,
    runtime: str = "onnxruntime",
    *,
    device: str = "auto",
    threads: int | None = None,
    engine_cache: Path | None = None,
    features: bool = False,
) -> Session:
    """Load a bundle into a runtime, by its name in `RUNTIMES`.

    threads: of one session, on a CPU. engine_cache: the folder in which onnxruntime-tensorrt keeps what it compiled,
    to load faster the next time; without it the compilation is thrown away with the session. features: return a
    FeatureSession, which gives the classifier's input too; this needs the package onnx.

    Raises InputError for an unknown runtime or device, for one that does not run bundles, and when the bundle lacks
    what the runtime loads; EnvironmentMissing when the device or a package is not there; CheckFailed for a plan of
    another GPU, version or graph.
    """
    chosen = device_name(device)
    found = RUNTIMES.get(runtime)
    if found is not None and found.source == "run":
        raise InputError(
            f"the runtime {runtime} runs a run's checkpoint and not a bundle: load the run, or choose "
            f"{', '.join(name for name, one in RUNTIMES.items() if one.source == 'bundle')}"
        )
    if found is not None and found.device != "auto" and chosen not in ("auto", found.device):
        raise InputError(f"the runtime {runtime} runs on {found.device}, and device {chosen} was asked for: drop one")
    require(runtime)
    if features:
        if find_spec("onnx") is None:
            raise missing_package("onnx", "export")
        from vitx.serve.runtimes.features import load_features

        return load_features(bundle, runtime, device=chosen, threads=threads)
    match runtime:
        case "openvino":
            from vitx.serve.runtimes.openvino import OpenVinoSession

            return OpenVinoSession(bundle, threads=threads)
        case "tensorrt" | "tensorrt-rtx":
            from vitx.serve.runtimes.tensorrt import TensorRTSession

            return TensorRTSession(bundle, runtime)
        case "onnxruntime-tensorrt":
            from vitx.serve.runtimes.onnxruntime import OnnxRuntimeSession

            return OnnxRuntimeSession(bundle, device="cuda", threads=threads, tensorrt=True, engine_cache=engine_cache)
        case _:
            from vitx.serve.runtimes.onnxruntime import OnnxRuntimeSession

            where = chosen if runtime == "onnxruntime" else cast(Device, runtime.removeprefix("onnxruntime-"))
            return OnnxRuntimeSession(bundle, device=where, threads=threads)


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
