"""`vitx demo`: from images to predictions on handwritten digits, through the same commands a user types."""

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.core.sandbox import verb_command
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity.served import classify_all, serving

RECIPE = "digits-deepvit"
_STANDARD_ERROR = 2
MARK = ".vitx-demo"  # in a folder that a demo has made, and may empty
RUN, BUNDLE, IMAGES, PREDICTIONS = "run", f"{RECIPE}.vitx", "images", "predictions"


class VerbFailed(VitxError):
    """A verb of the demo failed; it said why on standard error, and its exit code is the demo's.

    One that a signal ended has 128 and the signal's number, as in a shell.
    """

    def __init__(self, command: str, exit_code: int) -> None:
        exit_code = exit_code if exit_code > 0 else 128 - exit_code
        super().__init__(f"`{command}` ended with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class DemoResult:
    """Top-1 on the evaluation split, of the checkpoint and over HTTP; the certificate's verdict; all as a table."""

    checkpoint_top1: float
    served_top1: float
    verdict: str
    summary: dict[str, Any]

    def check(self) -> None:
        """Raise CheckFailed when the server classifies otherwise than the checkpoint, or the certificate says fail."""
        if self.served_top1 != self.checkpoint_top1:
            raise CheckFailed(f"served top-1 {self.served_top1} is not the checkpoint's {self.checkpoint_top1}")
        if self.verdict != "pass":
            raise CheckFailed("the certificate does not say pass")


def run_demo(out: Path) -> DemoResult:
    """Train, evaluate, export, bench, serve and predict, each verb in a process of its own, in the folder `out`.

    `out` is emptied first. Raises InputError when it holds anything that no demo made, VerbFailed when a verb fails.
    """
    _empty(out)
    started = time.monotonic()
    _vitx("train", RECIPE, "--out", out / RUN)
    training_seconds = time.monotonic() - started
    checkpoint = _vitx_json("eval", out / RUN)
    exported = _vitx_json("export", out / RUN, "--out", out / BUNDLE)
    bench = _vitx_json("bench", out / BUNDLE)
    images = open_images("digits", "val")
    served_top1 = _served_top1(out / BUNDLE, images)
    _write_images(images, out / IMAGES)
    predicted = _vitx_json("predict", out / BUNDLE, out / IMAGES, "--out", out / PREDICTIONS)
    summary = {
        "training seconds": round(training_seconds, 1),
        "checkpoint top-1": checkpoint["top1"],
        "served top-1 (PNG over HTTP)": served_top1,
        "images": len(images),
        "certificate": exported["verdict"],
        "changed classes": exported["flips"],
        "95 % bound on changed classes": exported["flip_rate_bound"],
        "largest logit error": exported["max_logit_error"],
        **{f"images/s at batch {point['batch_size']}": round(point["images_per_second"]) for point in bench["points"]},
        "images/s of vitx predict": round(predicted["images_per_second"]),
        "total seconds": round(time.monotonic() - started, 1),
    }
    return DemoResult(checkpoint["top1"], served_top1, exported["verdict"], summary)


def _empty(out: Path) -> None:
    """Remove an earlier demo; refuse a folder that holds anything else, or in which no demo left its mark."""
    out.mkdir(parents=True, exist_ok=True)
    folders = {path.name: path.is_dir() and not path.is_symlink() for path in out.iterdir()}
    names = folders.keys()
    if names and MARK not in names:
        raise InputError(f"'{out}' has no {MARK}, so it is no demo's, or an older version's: choose another --out")
    made = {RUN, BUNDLE, IMAGES, PREDICTIONS}
    if strangers := sorted(name for name in names - {MARK} if name not in made or not folders[name]):
        raise InputError(f"'{out}' holds '{strangers[0]}', which no demo made: choose another --out")
    (out / MARK).touch()
    for name in names - {MARK}:
        shutil.rmtree(out / name)


def _vitx(*arguments: object, capture: bool = False) -> str:
    """Run one verb as a user would; return what it printed, if captured."""
    words = [str(argument) for argument in arguments]
    _show(words)
    # What a verb says to people goes to standard error: `vitx demo --json` has standard output for itself.
    output = subprocess.PIPE if capture else _STANDARD_ERROR
    finished = subprocess.run(verb_command(*words), stdout=output, text=True, check=False)
    if finished.returncode:
        raise VerbFailed(f"vitx {words[0]}", finished.returncode)
    return finished.stdout or ""


def _vitx_json(*arguments: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_vitx(*arguments, "--json", capture=True))
    return result


def _show(words: list[str]) -> None:
    log(f"$ vitx {' '.join(words)}")


def _served_top1(bundle: Path, images: ImageSet) -> float:
    """The accuracy of `vitx serve`, which gets every image as the bytes of a PNG file."""
    _show(["serve", str(bundle), "--port", "0"])
    with serving(bundle) as url:
        log_probabilities = classify_all(url, images, quiet=True)
    return float((log_probabilities.argmax(axis=1) == images.labels).mean())


def _write_images(images: ImageSet, folder: Path) -> None:
    folder.mkdir()
    for index, key in enumerate(images.keys):
        (folder / key).write_bytes(images.read(index))
