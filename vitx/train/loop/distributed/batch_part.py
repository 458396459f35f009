"""Which images of a batch belong to one of several processes, or to one of several passes of gradient accumulation.

A batch is split from both ends at once: part k takes the k-th slice from the front and its mirror image from the back.
With 8 images and 2 parts: part 0 has images 0 1 6 7, part 1 has 2 3 4 5. CutMix pairs image i with image B − 1 − i, so
every part holds whole pairs, and the parts together are mixed exactly as the whole batch is.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitx.core.errors import InputError


@dataclass(frozen=True)
class BatchPart:
    """Part `index` of `count` equal parts of a batch."""

    index: int = 0
    count: int = 1

    def of(self, batch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements of this part, in the batch's order; raise InputError when the parts would not be equal."""
        return np.concatenate([batch[rows] for rows in self.slices(len(batch))])

    def slices(self, length: int) -> list[slice]:
        """The slices of this part in a batch of `length`; raise InputError when the parts would not be equal."""
        if self.count == 1:
            return [slice(0, length)]
        if length % (2 * self.count):
            raise InputError(
                f"a batch of {length} images cannot be cut into {self.count} parts of whole CutMix pairs: make "
                f"batch_size (images of one optimizer step, over all processes) a multiple of {2 * self.count}, "
                "and of no more images than there are"
            )
        size = length // (2 * self.count)
        start = self.index * size
        stop = length - start
        return [slice(start, start + size), slice(stop - size, stop)]


WHOLE_BATCH = BatchPart()
