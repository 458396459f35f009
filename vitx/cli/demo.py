"""`vitx demo`: the main job on handwritten digits, through the same commands a user types."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vitx.cli.options import Json

RECIPE = "digits-deepvit"
START_SECONDS = 60


def command(
    out: Annotated[Path, typer.Option("--out", help="Working folder; emptied first.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train on handwritten digits, export with proof, serve, and send every test image over HTTP as PNG."""
    from vitx.core.console import print_fields, print_json
    from vitx.core.errors import CheckFailed
    from vitx.data.open import open_images

    _empty(out)
    run, bundle = out / "run", out / f"{RECIPE}.vitx"
    started = time.monotonic()
    _vitx("train", RECIPE, "--out", run)
    training_seconds = time.monotonic() - started
    images = open_images("digits", "val")
    checkpoint = _vitx_json("eval", run)
    exported = _vitx_json("export", run, "--out", bundle)
    bench = _vitx_json("bench", bundle)
    with _server(bundle) as url:
        served = [_classify(url, images.read(index)) for index in range(len(images))]
    labels = [images.class_names[label] for label in images.labels]
    served_top1 = sum(a == b for a, b in zip(served, labels, strict=True)) / len(labels)
    predicted = _predict_folder(bundle, out, [(key, images.read(i)) for i, key in enumerate(images.keys)])
    summary = {
        "training seconds": round(training_seconds, 1),
        "checkpoint top-1": checkpoint["top1"],
        "served top-1 (PNG over HTTP)": served_top1,
        "images": len(labels),
        "certificate": exported["verdict"],
        "changed classes": exported["flips"],
        "95 % bound on changed classes": exported["flip_rate_bound"],
        "largest logit error": exported["max_logit_error"],
        **{f"images/s at batch {point['batch_size']}": round(point["images_per_second"]) for point in bench["points"]},
        "images/s of vitx predict": round(predicted["images_per_second"]),
        "total seconds": round(time.monotonic() - started, 1),
    }
    if as_json:
        print_json(summary)
    else:
        print_fields(f"{RECIPE}: from images to predictions", summary)
    if served_top1 != checkpoint["top1"]:
        raise CheckFailed(f"served top-1 {served_top1} is not the checkpoint's {checkpoint['top1']}")
    if exported["verdict"] != "pass":
        raise CheckFailed("the certificate does not say pass")


def _empty(out: Path) -> None:
    """Remove an earlier demo; refuse a folder that holds anything else."""
    from vitx.core.errors import InputError

    if out.exists():
        strangers = sorted({path.name for path in out.iterdir()} - {"run", f"{RECIPE}.vitx", "images", "predictions"})
        if strangers:
            raise InputError(f"'{out}' holds '{strangers[0]}', which no demo made: choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)


def _vitx(*arguments: object, capture: bool = False) -> str:
    """Run one verb in a process of its own, as a user would; its exit code is ours."""
    words = [str(argument) for argument in arguments]
    print(f"$ vitx {' '.join(words)}", file=sys.stderr, flush=True)
    finished = subprocess.run(
        [sys.executable, "-m", "vitx", *words], stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
    if finished.returncode:
        raise typer.Exit(finished.returncode)
    return finished.stdout or ""


def _vitx_json(*arguments: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_vitx(*arguments, "--json", capture=True))
    return result


@contextmanager
def _server(bundle: Path) -> Iterator[str]:
    """Start `vitx serve` on a free port; yield its URL when it is ready; stop it with SIGTERM."""
    print(f"$ vitx serve {bundle} --port 0", file=sys.stderr, flush=True)
    arguments = [sys.executable, "-m", "vitx", "serve", str(bundle), "--port", "0"]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if " on http://" in line), None)
        if line is None:
            raise typer.Exit(process.wait() or 1)
        url = line.rpartition(" on ")[2].strip()
        _wait_until_ready(url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=START_SECONDS)


def _wait_until_ready(url: str) -> None:
    from urllib.error import URLError
    from urllib.request import urlopen

    from vitx.core.errors import CheckFailed

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/v2/health/ready", timeout=5):
                return
        except (URLError, ConnectionError):
            time.sleep(0.05)
    raise CheckFailed(f"the server at {url} was not ready after {START_SECONDS} s")


def _classify(url: str, png: bytes) -> str:
    """The label of the server's first prediction."""
    from urllib.request import Request, urlopen

    request = Request(f"{url}/v1/classify", data=png, headers={"Content-Type": "image/png"})
    with urlopen(request, timeout=30) as response:
        label: str = json.load(response)["predictions"][0]["label"]
    return label


def _predict_folder(bundle: Path, out: Path, images: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    folder = out / "images"
    folder.mkdir()
    for key, data in images:
        (folder / key).write_bytes(data)
    return _vitx_json("predict", bundle, folder, "--out", out / "predictions")
