"""Triton's classification extension: the output is the best classes, as texts "value:index:label".

Source: Triton's docs/protocol/extension_classification.md.
"""

import struct
from collections.abc import Iterable, Sequence

from vitx.core.probabilities import top_k
from vitx.runtimes.session import Float32Array


def classification_texts(logits: Float32Array, labels: Sequence[str], count: int) -> list[str]:
    """The `count` best classes of each row of logits (N, C), best first, row after row; equal ones by their index."""
    best = top_k(logits, count)
    return [f"{row[index]:f}:{index}:{labels[index]}" for row, of in zip(logits, best, strict=True) for index in of]


def bytes_tensor(texts: Iterable[str]) -> bytes:
    """A BYTES tensor: before each element its length, 4 bytes little endian."""
    encoded = (text.encode() for text in texts)
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)
