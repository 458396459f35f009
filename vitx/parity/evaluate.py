"""What `vitx eval` does: accuracy, likelihood and calibration on labelled images (docs/maths.md §5.2)."""

from pathlib import Path

import numpy as np

from vitx.core.console import progress
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import classification_metrics, require_finite
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped, open_images
from vitx.parity.loaded_model import open_model, require_run
from vitx.parity.verdict import check_labels
from vitx.runtimes.session import Session

BATCH_SIZE = 32


class Evaluation(Record):
    """Metrics over one image set: shares in [0, 1], `nll` in nats, `brier` from 0 to 2."""

    images: int
    top1: float
    top5: float
    nll: float
    ece: float
    brier: float


def evaluate(session: Session, images: ImageSet, preprocessing: Preprocessing, *, quiet: bool = False) -> Evaluation:
    """Evaluate a session on every image; raise InputError when there is none, and for logits that are not finite."""
    if len(images) == 0:
        raise InputError("no images to evaluate on")
    batches = []
    with progress("eval", len(images), quiet=quiet) as bar:
        done = 0
        for pixels in images.batches(preprocessing, BATCH_SIZE):
            batches.append(session.infer(pixels))
            bar.update(done := done + len(pixels))
    logits = np.concatenate(batches)
    require_finite(logits)
    return Evaluation(images=len(images), **classification_metrics(logits, images.labels))


def evaluate_path(
    path: Path | str,
    *,
    data: str | Path | None = None,
    which: str = "best",
    device: str = "auto",
    threads: int | None = None,
    runtime: str | None = None,
    skip_bad: bool = False,
    quiet: bool = False,
) -> Evaluation:
    """Evaluate a run (its checkpoint `which`) or a bundle on `data`'s evaluation split.

    `runtime` defaults to torch for a run and ONNX Runtime for a bundle, `data` to what the model was trained on. Raises
    InputError when `path` is neither, for a checkpoint of a bundle, or when the data's classes are not the model's.
    """
    with open_model(path, runtime=runtime, which=which, device=device, threads=threads) as model:
        require_run(which, model)
        images = open_images(data or model.data, "val", skip_bad=skip_bad, check_size=model.preprocessing.check_size)
        check_labels(images, model.labels)
        log_skipped(images)
        return evaluate(model.session, images, model.preprocessing, quiet=quiet)
