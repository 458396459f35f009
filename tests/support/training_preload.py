"""What the server of training_jobs.py holds before it forks: the trainer's imports and the digits."""

import vitx.train.loop.trainer  # noqa: F401
from vitx.data.open import open_images

for split in ("train", "val"):
    open_images("digits", split)
