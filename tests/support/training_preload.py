"""Imported by the fork server of training_jobs.py: the trainer's modules, and the digits in memory."""

import vitx.train.loop.trainer  # noqa: F401
from vitx.data.open import open_images

for split in ("train", "val"):
    open_images("digits", split)
