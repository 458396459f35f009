"""Training images: shuffled, augmented, and the same for any number of threads.

All randomness of a sample follows from (seed, epoch, index) and the order of an epoch from (seed, epoch), so nothing
has to be stored to resume. torchvision's and timm's random transforms draw from global generators, which threads share,
and cannot promise that.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitx.core.errors import InputError
from vitx.core.images import ImageSet
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array, decode
from vitx.train.recipe import Augmentation
from vitx.train.shard import WHOLE, Shard

# Separate streams of one seed. Numbers must stay as they are: they decide every result.
ORDER, SAMPLE, CUTMIX, WEIGHTS, NETWORK = range(5)

# torchvision's RandomResizedCrop: the range of aspect ratios, and the number of boxes tried before the whole image.
ASPECTS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10
BATCHES_AHEAD = 2


def generator(seed: int, stream: int, *place: int) -> np.random.Generator:
    """The random generator of one purpose at one place of a run."""
    return np.random.default_rng((seed, stream, *place))


def seed_of(seed: int, stream: int, *place: int) -> int:
    """A 63-bit seed for the generators of torch and Python."""
    return int(generator(seed, stream, *place).integers(2**63))


@dataclass(frozen=True)
class Batch:
    """uint8 (B, S, S, 3) images, int64 (B,) labels, and the batch's number in its epoch."""

    number: int
    images: UInt8Array
    labels: npt.NDArray[np.int64]


class TrainingData:
    """An image set in random order. The last, smaller batch of an epoch is dropped unless it is the only one."""

    def __init__(
        self, images: ImageSet, preprocessing: Preprocessing, augmentation: Augmentation, *, batch_size: int, seed: int
    ) -> None:
        if not len(images):
            raise InputError(f"'{images.name}' has no images to train on")
        self.images, self.preprocessing, self.augmentation = images, preprocessing, augmentation
        self.batch_size, self.seed = min(batch_size, len(images)), seed

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The permutation of the images in `epoch`."""
        return generator(self.seed, ORDER, epoch).permutation(len(self.images))

    def sample(self, epoch: int, index: int) -> UInt8Array:
        """Image `index` as it is seen in `epoch`: uint8 (S, S, 3)."""
        try:
            image = decode(self.images.read(index))
        except ImageError as error:
            raise ImageError(f"{self.images.keys[index]}: {error}") from None
        return augment(image, self.preprocessing, self.augmentation, generator(self.seed, SAMPLE, epoch, index))

    def batches(self, epoch: int, workers: int = 0, *, first: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Yield the batches of `epoch` from number `first`, or a part of each; `workers` threads prepare them ahead."""
        parts = np.split(self.order(epoch)[: self.steps * self.batch_size], self.steps)
        parts = [shard.of(part) for part in parts]
        if not workers:
            for number, part in enumerate(parts[first:], first):
                yield self._batch(number, part, [self.sample(epoch, index) for index in part])
            return
        with ThreadPoolExecutor(workers, thread_name_prefix="images") as pool:
            try:
                yield from self._ahead(epoch, parts, pool, first)
            finally:
                pool.shutdown(cancel_futures=True)

    def _ahead(
        self, epoch: int, parts: list[npt.NDArray[np.int64]], pool: ThreadPoolExecutor, first: int
    ) -> Iterator[Batch]:
        waiting: deque[list[Future[UInt8Array]]] = deque()
        for number in range(first, len(parts) + BATCHES_AHEAD):
            if number < len(parts):
                waiting.append([pool.submit(self.sample, epoch, int(index)) for index in parts[number]])
            if number >= first + BATCHES_AHEAD:
                done = number - BATCHES_AHEAD
                yield self._batch(done, parts[done], [future.result() for future in waiting.popleft()])

    def _batch(self, number: int, part: npt.NDArray[np.int64], samples: list[UInt8Array]) -> Batch:
        return Batch(number, np.stack(samples), self.images.labels[part])


def augment(
    image: Image.Image, preprocessing: Preprocessing, augmentation: Augmentation, rng: np.random.Generator
) -> UInt8Array:
    """Return uint8 (S, S, 3): a random resized crop or the evaluation's own geometry, then affine map, then flip."""
    size = preprocessing.image_size
    if augmentation.smallest_crop < 1:
        box = random_crop(image.width, image.height, augmentation.smallest_crop, rng)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    else:
        image = Image.fromarray(preprocessing.apply(image))
    if augmentation.rotation or augmentation.translation or augmentation.scale or augmentation.shear:
        image = _affine(image, augmentation, rng)
    if rng.random() < augmentation.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


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
