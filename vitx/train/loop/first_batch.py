"""Pictures of training images as the network sees them: augmented, before they are mixed."""

import io
import math

import numpy as np
from PIL import Image

from vitx.core.preprocess import UInt8Array
from vitx.train.loop.inputs.training_data import TrainingData

FIRST_BATCH = "first-batch.png"
SHOWN_IMAGES = 16


def first_batch(data: TrainingData) -> bytes:
    """PNG of the first images of the first epoch: whether the augmentation leaves of them what one would recognise."""
    indices = data.order(1)[: min(SHOWN_IMAGES, data.batch_size)].tolist()
    repeats = data.augmentation.repeats
    buffer = io.BytesIO()
    sheet = contact_sheet(np.stack([data.sample(1, index, row % repeats) for row, index in enumerate(indices)]))
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def contact_sheet(images: UInt8Array) -> Image.Image:
    """The images (B, S, S, 3) as a square of ⌈√B⌉ columns; places without an image are black."""
    count, size = images.shape[:2]
    columns = math.ceil(math.sqrt(count))
    sheet = np.zeros((math.ceil(count / columns) * columns, size, size, 3), np.uint8)
    sheet[:count] = images
    rows = sheet.reshape(-1, columns, size, size, 3).swapaxes(1, 2)
    return Image.fromarray(rows.reshape(-1, columns * size, 3))
