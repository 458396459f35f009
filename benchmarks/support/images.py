"""JPEGs with detail, made from random numbers: plain images would decode too fast."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def write_photographs(folder: Path, count: int, *, different: int, evaluation: int) -> None:
    """JPEGs of 500×375 and some 60 kB in eight classes: `different` contents under `count` names in `train`.

    `evaluation` of them are in `val` too.
    """
    rng = np.random.default_rng(0)
    contents = []
    for _ in range(min(count, different)):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize((500, 375))
        noisy = np.asarray(coarse, np.float32) + rng.normal(0, 8, (375, 500, 3))
        encoded = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=85)
        contents.append(encoded.getvalue())
    for split, images in (("train", count), ("val", evaluation)):
        for number in range(images):
            path = folder / split / f"class-{number % 8}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[number % len(contents)])


def detailed_image(rng: np.random.Generator, size: tuple[int, int], coarse: int) -> Image.Image:
    """An image of (width, height): random colours of `coarse` pixels, smoothed, under noise of ±12 grey levels."""
    width, height = size
    colours = Image.fromarray(rng.integers(0, 256, (height // coarse, width // coarse, 3), dtype=np.uint8))
    noise = rng.integers(-12, 12, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(colours.resize(size)) + noise, 0, 255).astype(np.uint8))
