"""Random augmentation of one training image; every draw comes from the generator that is passed in.

Crops, shifts, affine maps and flips are written here: Pillow crops and resizes in one call, without a copy of the crop
as torchvision makes it. RandAugment, three-augment, AugMix and colour jitter are timm's.
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
from vitx.train.recipes.image_and_loss_settings import Augmentation

# As torchvision's RandomResizedCrop: the range of aspect ratios, and how many boxes are tried.
ASPECTS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10

Transform = Callable[[Image.Image], Image.Image]


class Augment:
    """Augments an RGB image of any size to uint8 (S, S, 3).

    A random resized crop, or the resizing and cropping of evaluation; then shift, affine map, flip, timm's transforms.
    Raises InputError for an `auto_augment` that timm does not know.
    """

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        self.preprocessing, self.augmentation = preprocessing, augmentation
        self.timm_transform = _timm_transform(preprocessing, augmentation)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> UInt8Array:
        size, augmentation = self.preprocessing.image_size, self.augmentation
        if augmentation.smallest_crop < 1:
            box = random_crop(image.width, image.height, augmentation.smallest_crop, rng)
            # reducing_gap: a large crop is first averaged over whole blocks of pixels, which is much faster.
            image = image.resize((size, size), _crop_filter(augmentation, rng), box=box, reducing_gap=3.0)
        else:
            image = Image.fromarray(self.preprocessing.apply(image))
        if augmentation.padding:
            image = _pad_and_crop(image, augmentation.padding, rng)
        if augmentation.rotation or augmentation.translation or augmentation.scale or augmentation.shear:
            image = _affine(image, augmentation, rng)
        if rng.random() < augmentation.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.timm_transform is not None:
            with seeded(int(rng.integers(2**63))):  # timm draws from the global generators
                image = self.timm_transform(image)
        return np.asarray(image)


def _crop_filter(augmentation: Augmentation, rng: np.random.Generator) -> Image.Resampling:
    bilinear = augmentation.interpolation == "random" and rng.random() < 0.5
    return Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC


def _timm_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> Transform | None:
    """The second of the three parts of timm's training pipeline: what it does between the flip and the tensor."""
    if not (augmentation.auto_augment or augmentation.color_jitter):
        return None
    try:
        for section in augmentation.auto_augment.split("-")[1:]:
            # timm skips it; what begins with t is the name of a set of operations.
            if not section.startswith("t") and not any(map(str.isdigit, section)):
                raise ValueError(f"'{section}' has no number")
        _, composed, _ = transforms_imagenet_train(
            preprocessing.image_size,
            auto_augment=augmentation.auto_augment or None,
            color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]  # timm takes None
            force_color_jitter=bool(augmentation.color_jitter),
            interpolation=augmentation.interpolation,
            mean=preprocessing.mean,
            std=preprocessing.std,
            separate=True,
        )
    # For an unknown name timm fails in an assertion, or while it parses a number.
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"augmentation.auto_augment '{augmentation.auto_augment}' is not known to timm ({error}): expected a name "
            "such as rand-m9-mstd0.5-inc1, 3a, augmix-m5-w4-d2, original or v0"
        ) from None
    for policy in composed.transforms:
        fix_posterize(policy)
    transform: Transform = composed
    return transform


def fix_posterize(policy: Any) -> None:
    """Let timm's posterize keep 0 bits (a black image), which it asks for at magnitude 10 and Pillow 13 refuses."""
    for operation in [*getattr(policy, "ops", ()), *chain.from_iterable(getattr(policy, "policy", ()))]:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **options: Any) -> Image.Image:
    if bits_to_keep <= 0:
        return image.point(lambda _: 0)
    posterized: Image.Image = auto_augment.posterize(image, bits_to_keep, **options)  # type: ignore[no-untyped-call]
    return posterized


def _pad_and_crop(image: Image.Image, padding: int, rng: np.random.Generator) -> Image.Image:
    """Add `padding` black pixels on each side, then crop to the old size at a random place."""
    left, top = (int(each) for each in rng.integers(2 * padding + 1, size=2))
    return ImageOps.expand(image, padding).crop((left, top, left + image.width, top + image.height))


def random_crop(width: int, height: int, smallest: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) of a random resized crop, in pixels.

    Its area is uniform between the share `smallest` and all of the image's, its aspect ratio log-uniform in `ASPECTS`.
    When no drawn box fits, it is the largest in the middle whose aspect ratio is in the range.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(smallest, 1.0)
        aspect = math.exp(rng.uniform(math.log(ASPECTS[0]), math.log(ASPECTS[1])))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(rng.integers(width - crop_width + 1)), int(rng.integers(height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    crop_width, crop_height = min(width, round(height * ASPECTS[1])), min(height, round(width / ASPECTS[0]))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def _affine(image: Image.Image, augmentation: Augmentation, rng: np.random.Generator) -> Image.Image:
    """Shear, rotate, scale and shift about the centre; pixels from outside the image are black."""
    # The six draws, each in [−1, 1), as shares of the largest change. Their order decides every result.
    angle, shift_x, shift_y, scale, shear_x, shear_y = rng.uniform(-1, 1, 6)
    radians = math.radians(augmentation.rotation * angle)
    rotation = np.array([[math.cos(radians), -math.sin(radians)], [math.sin(radians), math.cos(radians)]])
    skew = np.tan(np.radians(augmentation.shear) * np.array([shear_x, shear_y]))
    matrix = (1 + augmentation.scale * scale) * rotation @ np.array([[1, skew[0]], [skew[1], 1]])
    centre = np.array(image.size) / 2
    shift = augmentation.translation * np.array(image.size) * (shift_x, shift_y)
    # Pillow takes the inverse map, from an output pixel to its place in the source: out = M(source − c) + c + t gives
    # source = M⁻¹·out + c − M⁻¹(c + t).
    inverse = np.linalg.inv(matrix)
    origin = centre - inverse @ (centre + shift)
    coefficients = (*inverse[0], origin[0], *inverse[1], origin[1])
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
