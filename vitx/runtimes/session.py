"""A session: a model loaded by one runtime, from load to close. uint8 images (N, S, S, 3) in, float32 logits out."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

from vitx.core import options
from vitx.core.bundle import MODEL, OUTPUTS, Bundle, output_file
from vitx.core.certificate import Executable
from vitx.core.errors import InputError
from vitx.core.machine import cpu_architecture, cuda_driver, local_architectures, local_gpus
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import Profile

Float32Array = npt.NDArray[np.float32]
Device = options.Device
LOGITS = "logits"


class SessionClosed(RuntimeError):
    """A session was called after its `close`: a mistake of the program, not of the user."""


class Session(ABC):
    """A model that is loaded when the object is made and runs until `close`; `with` closes it at the end.

    `infer` and `infer_outputs` may be called from several threads at once. A runtime implements `_infer`, `describe`,
    where it gives more than logits `_infer_outputs` and, where it holds more than Python frees by itself, `_close`.

    profiles: the ranges of batch sizes that TensorRT compiled for; empty in other runtimes.
    max_batch: the largest batch that a served model takes; None for any.
    concurrent: with one thread, calls from several threads are computed at once, not one after the other.
    callers: how many threads may call it at once, each with a share of the cores.
    outputs: what it was loaded to give beside logits, of "embedding", "attention" and "rollout".
    artefacts: the files of the bundle that were loaded, by their names in it.
    """

    profiles: tuple[Profile, ...] = ()
    max_batch: int | None = None
    concurrent: bool = False
    callers: int = 1
    outputs: tuple[str, ...] = ()
    artefacts: tuple[str, ...] = (MODEL,)

    def __init__(self) -> None:
        self._calls = 0  # that run now
        self._closed = self._freed = False
        self._state_lock = threading.Lock()  # guards the three; a plain lock, as each call takes it twice
        self._call_ended = threading.Condition(self._state_lock)

    @final
    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3).

        Raises InputError for another shape or dtype, CheckFailed when the runtime refuses the batch, SessionClosed
        after `close`.
        """
        self._begin_call()
        try:
            return self._infer(images)
        finally:
            self._end_call()

    @final
    def infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        """Return "logits", as `infer`, and each of `outputs`: embedding (N, D), attention and rollout (N, P), float32.

        Raises what `infer` does.
        """
        self._begin_call()
        try:
            return self._infer_outputs(images)
        finally:
            self._end_call()

    @property
    def under_load(self) -> "Session":
        """What runs where several batches are computed at once; itself, but for an `ElasticSession`."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Runtime, version, the provider really used, precision, threads. Also after `close`."""

    @final
    def close(self) -> None:
        """Refuse further calls, wait for those that run, and free the model, unless an earlier `close` did."""
        with self._state_lock:
            self._closed = True
            self._call_ended.wait_for(lambda: self._calls == 0)
            if not self._freed:
                self._freed = True
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _infer(self, images: UInt8Array) -> Float32Array:
        """As `infer`, on a session that is open."""

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        """As `infer_outputs`, on a session that is open."""
        return {LOGITS: self._infer(images)}

    def _close(self) -> None:  # noqa: B027 - a fake, or a session around another, has nothing to free
        """Free what was loaded. Called once, when no call runs."""

    def _begin_call(self) -> None:
        with self._state_lock:
            if self._closed:
                raise SessionClosed("the session is closed: load the model again")
            self._calls += 1

    def _end_call(self) -> None:
        with self._state_lock:
            self._calls -= 1
            if self._closed:  # nobody waits before
                self._call_ended.notify_all()


def executable_of(subject: Mapping[str, str], session: Session) -> Executable:
    """What `session` is on this machine: what a verdict is about. `subject`: `Bundle.subject()` of what it loaded."""
    about = {key: str(value) for key, value in session.describe().items()}
    provider = about.get("provider", "")
    on_gpu = "cuda" in provider.lower() or "tensorrt" in provider.lower() or "(sm" in provider
    return Executable(
        runtime=about.get("runtime", ""),
        version=about.get("version", ""),
        provider=provider,
        architecture=", ".join(local_architectures()[:1]) if on_gpu else cpu_architecture(),
        driver=cuda_driver() if on_gpu else "",
        precision=about.get("precision", ""),
        artefacts={name: subject[name] for name in session.artefacts if name in subject},
    )


def outputs_of(executable: Executable) -> frozenset[str]:
    """What an executable gives beside logits: it loads a file of the bundle for each."""
    return frozenset(name for name in OUTPUTS if output_file(name) in executable.artefacts)


def is_cpu(device: Device) -> bool:
    """Whether a session of this device computes on the CPU here."""
    return device == "cpu" or (device == "auto" and not local_gpus())


def check_images(images: UInt8Array, image_shape: Sequence[int]) -> None:
    """Raise InputError unless `images` is uint8 (N, *image_shape), N ≥ 1: of none ONNX Runtime ends the process."""
    is_array = isinstance(images, np.ndarray)
    if not is_array or images.dtype != np.uint8 or images.shape[1:] != tuple(image_shape) or not len(images):
        given = f"{images.dtype} {images.shape}" if is_array else f"of type {type(images).__name__}"
        expected = ", ".join(map(str, ("N", *image_shape)))
        raise InputError(f"images are {given}: expected uint8 ({expected}), at least one image")


def image_shape(bundle: Bundle) -> tuple[int, int, int]:
    """(S, S, 3): the shape of one image, from the manifest."""
    height, width, channels = (int(size) for size in bundle.manifest.input.shape[1:])
    return height, width, channels
