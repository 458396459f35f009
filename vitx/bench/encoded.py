"""A session that starts from the bytes of an image file, for measurements with decoding in them."""

from typing import Any

import numpy as np

from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.runtimes.session import Float32Array, Session


class FromBytes:
    """Decodes `data` once for each row that is asked for, on the caller's thread, and infers that."""

    def __init__(self, session: Session, preprocessing: Preprocessing, data: bytes) -> None:
        self._session, self._preprocessing, self._data = session, preprocessing, data

    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of N times the encoded image; the pixels given are not looked at."""
        return self._session.infer(np.stack([self._preprocessing.from_bytes(self._data) for _ in images]))

    def describe(self) -> dict[str, Any]:
        return {**self._session.describe(), "input": "encoded images"}
