"""`--draft` before it is used: a sample of the input, decoded both ways, and the model's answers compared."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed
from vitx.core.files import Record
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.parity.statistics import clopper_pearson_upper, images_needed
from vitx.parity.verdict import MAX_FLIP_RATE
from vitx.predict.inputs.inventory import Inventory, Item, read_item, read_shard
from vitx.runtimes.session import Session

# One of so many may change its class where the certificate allows a flip rate of 0.01.
SAMPLE = 512


class DraftCheck(Record):
    """Full against draft decoding on `images` readable images of the input, evenly spaced.

    drafted: those whose pixels differ. flip_rate_bound: one-sided 95 % Clopper–Pearson upper bound on the share of
    images whose best class changes; max_flip_rate: the certificate's.
    """

    images: int
    drafted: int
    flips: int
    flip_rate_bound: float
    max_flip_rate: float
    max_logit_difference: float
    max_grey_difference: int


def check_draft(
    bundle: Bundle, session: Session, inventory: Inventory, listing: Path, image_column: str | None, *, batch_size: int
) -> DraftCheck:
    """Compare; raise CheckFailed unless the bound on the flip rate is at most what the bundle's certificate allows."""
    certificate = bundle.certificate()
    allowed = MAX_FLIP_RATE if certificate is None else certificate.max_flip_rate
    items = _sample(inventory, listing, image_column)
    pairs = _pairs(items, bundle.manifest.preprocessing)
    images = drafted = flips = grey = 0
    logit = 0.0
    while batch := list(islice(pairs, batch_size)):
        full, draft = (np.stack(pixels) for pixels in zip(*batch, strict=True))
        expected, found = session.infer(full), session.infer(draft)
        steps = np.abs(full.astype(np.int16) - draft).max(axis=(1, 2, 3))
        images += len(batch)
        drafted += int((steps > 0).sum())
        flips += int((expected.argmax(axis=1) != found.argmax(axis=1)).sum())
        grey = max(grey, int(steps.max()))
        logit = max(logit, float(np.abs(expected - found).max()))
    bound = clopper_pearson_upper(flips, images) if images else 1.0
    if not bound <= allowed:
        raise CheckFailed(
            f"--draft changes the class of {flips} of {images} images of the input: flip rate at most {bound:.4f} "
            f"(95 %), allowed {allowed:g}, for which {images_needed(allowed)} without a flip are enough: leave it out"
        )
    return DraftCheck(
        images=images,
        drafted=drafted,
        flips=flips,
        flip_rate_bound=bound,
        max_flip_rate=allowed,
        max_logit_difference=logit,
        max_grey_difference=grey,
    )


def _sample(inventory: Inventory, listing: Path, image_column: str | None) -> Iterator[Item]:
    """Up to SAMPLE images, evenly spaced; of a shard that does not know its size, its first ones."""
    count = min(SAMPLE, len(inventory.shards))
    shards = [inventory.shards[index * len(inventory.shards) // count] for index in range(count)]
    each = -(-SAMPLE // count)
    for shard in shards:
        step = max(1, (shard.count or 0) // each)
        yield from islice(read_shard(shard, inventory.base, listing, image_column), 0, step * each, step)


def _pairs(items: Iterator[Item], preprocessing: Preprocessing) -> Iterator[tuple[UInt8Array, UInt8Array]]:
    """The pixels of each image, in full and as a draft; those that cannot be read are rows with an error either way."""
    for item in items:
        data = read_item(item).source
        if not isinstance(data, bytes):
            continue
        try:
            yield preprocessing.from_bytes(data), preprocessing.from_bytes(data, draft=True)
        except ImageError:
            continue
