"""Random changes of one training image, each following from a generator of its own.

Crops, shifts and flips are here: they decide most of an image's randomness, and a crop that is resized as it is read
costs less than one that is copied first. RandAugment, three-augment, AugMix and colour jitter are timm's.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from timm.data import auto_augment
from timm.data.transforms_factory import transforms_imagenet_train

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.train.randomness import seeded
from vitx.train.recipes.image_groups import Augmentation

# torchvision's RandomResizedCrop: the range of aspect ratios, and the number of boxes tried before the whole image.
ASPECTS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10


class Augment:
    """An RGB image and a generator → uint8 (S, S, 3).

    A random resized crop or the evaluation's own geometry, then shift, affine map, flip, and timm's transforms.
    Raises InputError for an `auto_augment` that timm does not know.
    """

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        self.preprocessing, self.augmentation = preprocessing, augmentation
        self.colours = _colours(preprocessing, augmentation)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> UInt8Array:
        size, augmentation = self.preprocessing.image_size, self.augmentation
        if augmentation.smallest_crop < 1:
            box = random_crop(image.width, image.height, augmentation.smallest_crop, rng)
            image = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
        else:
            image = Image.fromarray(self.preprocessing.apply(image))
        if augmentation.padding:
            image = _shifted(image, augmentation.padding, rng)
        if augmentation.rotation or augmentation.translation or augmentation.scale or augmentation.shear:
            image = _affine(image, augmentation, rng)
        if rng.random() < augmentation.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.colours is not None:
            with seeded(int(rng.integers(2**63))):
                image = self.colours(image)
        return np.asarray(image)


def _colours(preprocessing: Preprocessing, augmentation: Augmentation) -> Callable[[Image.Image], Image.Image] | None:
    """timm's transforms between the flip and the tensor, as its own training pipeline composes them."""
    if not (augmentation.auto_augment or augmentation.color_jitter):
        return None
    try:
        _, colours, _ = transforms_imagenet_train(
            preprocessing.image_size,
            auto_augment=augmentation.auto_augment or None,
            color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]  # timm takes None
            force_color_jitter=bool(augmentation.color_jitter),
            interpolation="bicubic",
            mean=preprocessing.mean,
            std=preprocessing.std,
            separate=True,
        )
    # timm answers a name that it does not know with assertions and with errors of parsing numbers.
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"augmentation.auto_augment '{augmentation.auto_augment}' is not known to timm ({error}): expected a name "
            "such as rand-m9-mstd0.5-inc1, 3a, augmix-m5-w4-d2, original or v0"
        ) from None
    for policy in colours.transforms:
        mend_posterize(policy)
    transform: Callable[[Image.Image], Image.Image] = colours
    return transform


def mend_posterize(policy: Any) -> None:
    """Let timm's strongest posterize, of no bits, be a black image as it once was: Pillow 13 refuses it."""
    for found in [*getattr(policy, "ops", ()), *chain.from_iterable(getattr(policy, "policy", ()))]:
        if found.aug_fn is auto_augment.posterize:
            found.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **options: Any) -> Image.Image:
    if bits_to_keep <= 0:
        return image.point(lambda _: 0)
    posterized: Image.Image = auto_augment.posterize(image, bits_to_keep, **options)  # type: ignore[no-untyped-call]
    return posterized


def _shifted(image: Image.Image, padding: int, rng: np.random.Generator) -> Image.Image:
    """The image with black around it, cut to its old size at random."""
    left, top = (int(each) for each in rng.integers(2 * padding + 1, size=2))
    return ImageOps.expand(image, padding).crop((left, top, left + image.width, top + image.height))


def random_crop(width: int, height: int, smallest: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of `smallest` to all of the area; the whole image when no drawn box fits."""
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(smallest, 1.0)
        aspect = math.exp(rng.uniform(math.log(ASPECTS[0]), math.log(ASPECTS[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(rng.integers(width - wide + 1)), int(rng.integers(height - high + 1))
            return left, top, left + wide, top + high
    return 0, 0, width, height


def _affine(image: Image.Image, augmentation: Augmentation, rng: np.random.Generator) -> Image.Image:
    """Rotate, shear, scale and shift about the centre; what comes from outside the image is black."""
    angle, along, across, size, shear_x, shear_y = rng.uniform(-1, 1, 6)
    turn = math.radians(augmentation.rotation * angle)
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    skew = np.tan(np.radians(augmentation.shear) * np.array([shear_x, shear_y]))
    shape = (1 + augmentation.scale * size) * rotation @ np.array([[1, skew[0]], [skew[1], 1]])
    centre = np.array(image.size) / 2
    shift = augmentation.translation * np.array(image.size) * (along, across)
    # Pillow wants the inverse: where in the source each output pixel comes from.
    inverse = np.linalg.inv(shape)
    origin = centre - inverse @ (centre + shift)
    coefficients = (*inverse[0], origin[0], *inverse[1], origin[1])
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
