"""A session whose calls decode an image file first, for measurements that include decoding."""

from typing import Any

import numpy as np

from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.runtimes.session import Float32Array, Session


class DecodingSession(Session):
    """Decodes `data`, the bytes of an image file, once for each row of a batch, on the caller's thread, then infers.

    Whoever loaded `session` closes it.
    """

    def __init__(self, session: Session, preprocessing: Preprocessing, data: bytes) -> None:
        super().__init__()
        self._session, self._preprocessing, self._data = session, preprocessing, data

    def _infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of N times the encoded image; the pixels of `images` are ignored."""
        return self._session.infer(np.stack([self._preprocessing.from_bytes(self._data) for _ in images]))

    def describe(self) -> dict[str, Any]:
        return {**self._session.describe(), "input": "encoded images"}
