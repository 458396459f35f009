"""The check before `--draft` is used: a sample of the input is decoded both ways and the logits are compared."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed
from vitx.core.files import Record
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.parity.statistics import clopper_pearson_upper, images_needed
from vitx.parity.verdict import MAX_FLIP_RATE
from vitx.predict.inputs.inventory import Inventory, read_item, read_shard
from vitx.predict.inputs.tables import TableColumns
from vitx.runtimes.session import Session

# Images that are compared. At 512, one flip still keeps the 95 % bound below a flip rate of 0.01.
SAMPLE_IMAGES = 512


class DraftCheck(Record):
    """Full decoding compared with draft decoding, on `images` readable images spread evenly over the input.

    drafted: images whose pixels differ. flips: images whose best class differs. flip_rate_bound: one-sided 95 %
    Clopper–Pearson upper bound on their share; max_flip_rate: allowed by the certificate. max_grey_difference: of 255.
    """

    images: int
    drafted: int
    flips: int
    flip_rate_bound: float
    max_flip_rate: float
    max_logit_difference: float
    max_grey_difference: int


def check_draft(
    bundle: Bundle, session: Session, inventory: Inventory, listing: Path, columns: TableColumns, *, batch_size: int
) -> DraftCheck:
    """Compare both ways of decoding; raise CheckFailed if the bound on the flip rate is above the certificate's."""
    certificate = bundle.certificate()
    allowed = MAX_FLIP_RATE if certificate is None else certificate.max_flip_rate
    pairs = _pairs(inventory, listing, columns, bundle.manifest.preprocessing)
    # Of each image the largest difference of a grey level and of a logit, and whether its best class changes.
    grey, logit, flipped = list[int](), list[float](), list[bool]()
    while batch := list(islice(pairs, batch_size)):
        # Both uint8 (N, S, S, 3); int16 because a difference of uint8 would wrap around.
        full, draft = (np.stack(pixels) for pixels in zip(*batch, strict=True))
        expected, found = session.infer(full), session.infer(draft)
        # What is not finite becomes a row with an error: either way as unreadable as what `_pairs` leaves out.
        whole, drafted = (np.isfinite(logits).all(axis=1) for logits in (expected, found))
        either, both = whole | drafted, whole & drafted
        grey += np.abs(full.astype(np.int16) - draft).max(axis=(1, 2, 3))[either].tolist()
        logit += np.abs(np.subtract(expected[both], found[both], dtype=np.float64)).max(axis=1).tolist()
        flipped += (~both | (expected.argmax(axis=1) != found.argmax(axis=1)))[either].tolist()
    images, flips = len(grey), sum(flipped)
    bound = clopper_pearson_upper(flips, images) if images else 1.0
    if bound > allowed:
        raise CheckFailed(
            f"--draft changes the class of {flips} of {images} images of the input: flip rate at most {bound:.4f} "
            f"(95 %), allowed {allowed:g}, which takes {images_needed(allowed)} images without a flip: leave it out"
        )
    return DraftCheck(
        images=images,
        drafted=len(grey) - grey.count(0),
        flips=flips,
        flip_rate_bound=bound,
        max_flip_rate=allowed,
        max_logit_difference=max(logit, default=0.0),
        max_grey_difference=max(grey, default=0),
    )


def _pairs(
    inventory: Inventory, listing: Path, columns: TableColumns, preprocessing: Preprocessing
) -> Iterator[tuple[UInt8Array, UInt8Array]]:
    """Yield the pixels uint8 (S, S, 3), decoded in full and as a draft, of SAMPLE_IMAGES images, evenly spaced.

    A shard whose size is not known counts as an equal share of them, and gives its first ones. Unreadable images are
    left out: they become rows with an error either way.
    """
    share = -(-SAMPLE_IMAGES // len(inventory.shards))
    sizes = [share if shard.count is None else shard.count for shard in inventory.shards]
    sampled = min(SAMPLE_IMAGES, sum(sizes))
    chosen, first = {index * sum(sizes) // sampled for index in range(sampled)}, 0
    for shard, size in zip(inventory.shards, sizes, strict=True):
        inside = {index for index in range(size) if first + index in chosen}
        first += size
        items = read_shard(shard, inventory.base, listing, columns) if inside else ()
        for index, item in enumerate(islice(items, max(inside, default=-1) + 1)):
            if index in inside and isinstance(data := read_item(item).source, bytes):
                with suppress(ImageError):
                    yield preprocessing.from_bytes(data), preprocessing.from_bytes(data, draft=True)
