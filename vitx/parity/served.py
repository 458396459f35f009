"""`vitx parity --served`: every image sent to a server over HTTP, and the answers compared with the reference."""

import http.client
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from vitx.core.console import progress
from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.files import Record
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import Float64Array, log_softmax
from vitx.core.sandbox import verb_command
from vitx.data.image_set import ImageSet
from vitx.parity.comparison import REFERENCE_BATCH, infer
from vitx.parity.statistics import clopper_pearson_upper
from vitx.runtimes.session import Session

# Requests at a time: enough that the server forms batches.
CONNECTIONS = 8
LEAST = math.log(sys.float_info.min)
START_SECONDS = 120.0
REQUEST_SECONDS = 60.0


class ServedComparison(Record):
    """The server's answers against the reference. Errors are absolute differences of log probabilities (nats).

    flips: the keys of the images that get another class.
    """

    images: int
    flips: tuple[str, ...]
    flip_rate_bound: float
    max_error: float
    mean_error: float
    max_error_allowed: float

    def failures(self, max_flip_rate: float) -> tuple[str, ...]:
        """What fails, as sentences with the numbers."""
        found = []
        if self.flip_rate_bound > max_flip_rate:
            found.append(
                f"over HTTP {len(self.flips)} of {self.images} images get another class: flip rate at most "
                f"{self.flip_rate_bound:.6f} (95 %), allowed {max_flip_rate:g}"
            )
        if not self.max_error <= self.max_error_allowed:
            found.append(
                f"over HTTP a log probability differs by {self.max_error:.3g}, allowed {self.max_error_allowed:.3g}"
            )
        return tuple(found)


def compare_served(
    url: str,
    reference: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    max_logit_error: float,
    quiet: bool = False,
) -> ServedComparison:
    """Send the encoded bytes of every image to `POST URL/v1/classify` and compare with the reference's logits.

    A log probability may differ by twice what a logit may: its own error and that of the normaliser. Raises
    CheckFailed, with the server's error, when it refuses an image.
    """
    answers = classify_all(url, images, quiet=quiet)
    blocks = images.batches(preprocessing, REFERENCE_BATCH)
    expected = log_softmax(np.concatenate([infer(reference, block, REFERENCE_BATCH) for block in blocks]))
    moved = np.flatnonzero(expected.argmax(axis=1) != answers.argmax(axis=1))
    # A probability below the least normal number is rounded to few digits or to 0: no server can say it better.
    error = np.abs(np.where(np.isfinite(answers), answers, LEAST).clip(LEAST) - expected.clip(LEAST))
    return ServedComparison(
        images=len(images),
        flips=tuple(images.keys[row] for row in moved),
        flip_rate_bound=clopper_pearson_upper(len(moved), len(images)),
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        max_error_allowed=2 * max_logit_error,
    )


def classify_all(url: str, images: ImageSet, *, quiet: bool = False) -> Float64Array:
    """Log probabilities float64 (n, C) of the server's answers, in the order of the images.

    Raises CheckFailed, with the server's words, when it refuses an image, EnvironmentMissing when it gives no answer.
    """
    shares = [range(start, len(images), CONNECTIONS) for start in range(min(CONNECTIONS, len(images)))]
    result = np.empty((len(images), len(images.class_names)))
    with progress("served", len(images), quiet=quiet) as bar, ThreadPoolExecutor(len(shares)) as pool:
        done = 0
        for share, rows in zip(shares, pool.map(lambda share: _classify(url, images, share), shares), strict=True):
            result[list(share)] = rows
            bar.update(done := done + len(share))
    return result


def _classify(url: str, images: ImageSet, rows: Sequence[int]) -> list[Float64Array]:
    """Log probabilities float64 (C,) of the images `rows`, sent one after the other over one connection."""
    parts = urlsplit(url)
    classes = len(images.class_names)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS)) as connection:
        answers = []
        for row in rows:
            image, headers = images.read(row), {"Content-Type": "application/octet-stream"}
            try:
                connection.request("POST", f"/v1/classify?top_k={classes}", image, headers)
                reply = connection.getresponse()
                body = json.loads(reply.read())
            except (OSError, http.client.HTTPException) as error:
                raise EnvironmentMissing(
                    f"the server at {url} gave no answer to {images.keys[row]}: it has ended, or hangs ({error!r:.80})"
                ) from None
            if reply.status != 200:
                raise CheckFailed(f"the server refused {images.keys[row]}: {reply.status} {body.get('error', '')}")
            scores = np.zeros(classes)
            for prediction in body["predictions"]:
                scores[prediction["index"]] = prediction["score"]
            with np.errstate(divide="ignore"):
                answers.append(np.log(scores))
        return answers


@contextmanager
def serving(
    bundle: Path, *, device: str = "auto", runtime: str = "auto", allow_uncertified: bool = False
) -> Iterator[str]:
    """Run `vitx serve` in a process of its own on a free port; yield its URL; end it with SIGTERM.

    allow_uncertified: serve a bundle without a passing certificate too. Raises EnvironmentMissing, with the last line
    that the server wrote to stderr, when it does not start.
    """
    arguments = verb_command("serve", str(bundle), "--port", "0", "--device", device)
    arguments += ["--runtime", runtime] if runtime != "auto" else []
    process = subprocess.Popen(
        [*arguments, *(["--allow-uncertified"] if allow_uncertified else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            assert process.stdout is not None
            try:
                line = pool.submit(process.stdout.readline).result(START_SECONDS)
            except TimeoutError:
                process.kill()
                line = ""
        if " on http://" not in line:
            process.kill()
            words = process.communicate()[1].strip().splitlines()
            raise EnvironmentMissing(f"the server did not start: {words[-1] if words else 'it said nothing'}")
        yield line.rpartition(" on ")[2].strip()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
