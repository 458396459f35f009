"""A session that decodes an image file for every row."""

import numpy as np

from bundle_fixture import IMAGE_SIZE, PREPROCESSING, Float32Array, colour_image, png
from vitx.bench.decoding_session import DecodingSession
from vitx.core.preprocess import UInt8Array
from vitx.runtimes import Session


class Sums(Session):
    def _infer(self, images: UInt8Array) -> Float32Array:
        sums: Float32Array = images.reshape(len(images), -1).sum(axis=1, keepdims=True).astype(np.float32)
        return sums

    def describe(self) -> dict[str, object]:
        return {"runtime": "sums", "input": "arrays"}


def test_each_row_is_the_encoded_image_whatever_the_pixels_given() -> None:
    image = colour_image(1, np.random.default_rng(0))
    with Sums() as sums:
        session = DecodingSession(sums, PREPROCESSING, png(image))
        given = np.zeros((3, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        assert session.infer(given).tolist() == [[float(image.sum())]] * 3
        assert session.describe() == {"runtime": "sums", "input": "encoded images"}
        session.close()
        assert sums.infer(given).tolist() == [[0.0]] * 3  # whoever loaded it closes it
