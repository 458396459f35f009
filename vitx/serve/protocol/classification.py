"""Triton's classification extension: an output as its best classes, texts "value:index:label".

Source: Triton's docs/protocol/extension_classification.md.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from vitx.runtimes.session import Float32Array


def classification_texts(logits: Float32Array, labels: Sequence[str], top_k: int) -> list[str]:
    """The `top_k` best classes of each row of logits (N, C), best first, row after row; equal ones by their index."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    return [f"{row[index]:f}:{index}:{labels[index]}" for row, of in zip(logits, best, strict=True) for index in of]


def bytes_tensor(texts: Iterable[str]) -> bytes:
    """A BYTES tensor: each element behind its length, 4 bytes little endian."""
    encoded = (text.encode() for text in texts)
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)
