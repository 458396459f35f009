"""JPEG decoders against Pillow, alone and with our resize, and the two shortcuts of `vitx predict --draft`.

    python -m pip install --target DIR --no-deps simplejpeg imagecodecs opencv-python-headless
    PYTHONPATH=DIR python benchmarks/predict/decode.py [--rounds 15] [--json FILE]
    python benchmarks/predict/decode.py --flips runs/digits.vitx [--json FILE]

Every candidate that can be imported takes its turn on every file, in each round; a ratio is the median over the rounds
of (seconds of Pillow / seconds of the candidate), so above 1 is faster. `grey` is the largest difference from
Pillow's upright RGB pixels in grey levels, null where the candidate refuses the file or gives another shape. `whole` is
decoding and `Preprocessing.apply` (224 px, crop 0.9, bicubic).

The photograph is one of scikit-learn's, 640 × 427 pixels; the smaller one is reduced, the larger enlarged and given
grain.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features
from sklearn.datasets import load_sample_images

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.targets import at_least, command_line, exit_code, report_header, save_report
from vitx.core.bundle import Bundle
from vitx.core.preprocess import Preprocessing, UInt8Array, decode
from vitx.data.open import open_images
from vitx.runtimes import load_session

PREPROCESSING = Preprocessing(image_size=224, crop_fraction=0.9)
ORIENTATION = 0x0112
MARGINS = (1, 1.5, 2, 3, 4)
Function = Callable[[bytes], Any]


def photograph(width: int, height: int) -> Image.Image:
    photo = Image.fromarray(load_sample_images().images[1])
    scaled = photo.resize((width, height), Image.Resampling.BICUBIC)
    if width <= photo.width:
        return scaled
    grain = np.random.default_rng(0).normal(0, 4, (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(np.asarray(scaled) + grain, 0, 255).astype(np.uint8))


def files() -> dict[str, bytes]:
    """JPEGs by name: three sizes in both samplings, and the kinds that not every decoder takes."""
    made = {}
    for width, height in ((336, 224), (640, 427), (4000, 3000)):
        for sampling in ("4:2:0", "4:4:4"):
            made[f"{width}x{height} {sampling}"] = jpeg(photograph(width, height), subsampling=sampling)
    photo = photograph(640, 427)
    made["640x427 progressive"] = jpeg(photo, progressive=True)
    made["640x427 grey"] = jpeg(photo.convert("L"))
    made["640x427 CMYK"] = jpeg(photo.convert("CMYK"))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    made["640x427 rotated by EXIF"] = jpeg(photo, exif=exif)
    return made


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, **options)
    return buffer.getvalue()


def decoders() -> dict[str, Function]:
    """Bytes to RGB pixels uint8 (H, W, 3), of each library that is installed."""
    found: dict[str, Function] = {"pillow": lambda data: np.asarray(decode(data))}
    if simplejpeg := installed("simplejpeg"):
        found["simplejpeg"] = simplejpeg.decode_jpeg
    if imagecodecs := installed("imagecodecs"):
        found["imagecodecs"] = lambda data: imagecodecs.jpeg8_decode(data, outcolorspace="RGB")
    if cv2 := installed("cv2"):
        cv2.setNumThreads(1)
        flags = cv2.IMREAD_COLOR_RGB
        found["opencv"] = lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if installed("torchvision"):
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        torch.set_num_threads(1)

        def torchvision(data: bytes) -> UInt8Array:
            coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            chw = decode_jpeg(coded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
            return np.asarray(chw.permute(1, 2, 0).contiguous())

        found["torchvision"] = torchvision
    return found


def installed(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def shortcuts(preprocessing: Preprocessing = PREPROCESSING) -> dict[str, Function]:
    """Bytes to the model's input, uint8 (S, S, 3): as it is by default, and by each shortcut."""
    found: dict[str, Function] = {"pillow": preprocessing.from_bytes}
    found |= {"crop alone": lambda data: preprocessing.apply(decode(data), draft=True)}
    found |= {f"scaled, margin {margin:g}": scaled(preprocessing, margin) for margin in MARGINS}
    return found | {"--draft": lambda data: preprocessing.from_bytes(data, draft=True)}


def scaled(preprocessing: Preprocessing, margin: float) -> Function:
    """Decoded at 1/2, 1/4 or 1/8 of its size, but no smaller than `margin` times what is needed."""
    needed = round(margin * preprocessing.scaled_side)
    return lambda data: preprocessing.apply(decode(data, shorter_side=needed))


def flips(bundle: Bundle) -> dict[str, dict[str, float]]:
    """Classes that change with each shortcut: the bundle's evaluation images, enlarged, with grain, as JPEGs."""
    preprocessing, session = bundle.manifest.preprocessing, load_session(bundle, device="cpu", threads=1)
    made = list(enlarged(bundle.manifest.data))
    functions = shortcuts(preprocessing)
    full = np.stack([functions.pop("pillow")(data) for data in made])
    expected = session.infer(full)
    found = {}
    for name, function in functions.items():
        pixels = np.stack([function(data) for data in made])
        logits = session.infer(pixels)
        found[name] = {
            "images": len(made),
            "flips": int((logits.argmax(axis=1) != expected.argmax(axis=1)).sum()),
            "largest_logit_difference_in_std": float(np.abs(logits - expected).max() / expected.std()),
            "largest_grey_difference": int(np.abs(pixels.astype(np.int16) - full).max()),
        }
        print(name, found[name], flush=True)
    return found


def enlarged(data: str) -> Iterator[bytes]:
    """Every evaluation image at four sizes, so that what a draft keeps varies between its margin and twice that."""
    rng = np.random.default_rng(0)
    images = open_images(data, "val")
    for index in range(len(images)):
        image = decode(images.read(index))
        for side in (256, 320, 400, 500):
            large = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
            grain = rng.normal(0, 8, (side, side, 1))
            yield jpeg(Image.fromarray(np.clip(large + grain, 0, 255).astype(np.uint8)))


def compared(functions: dict[str, Function], data: bytes, rounds: int) -> dict[str, dict[str, float | None]]:
    """Each function on `data` in turns, the first of them the baseline."""
    names = list(functions)
    reference = functions[names[0]](data)
    grey = {name: difference(functions[name], data, reference) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names if grey[name] is not None}
    repeats = max(1, round(0.02 / once(functions[names[0]], data)))
    for turn in range(rounds):
        for name in sorted(seconds, key=lambda name: (names.index(name) + turn) % len(names)):
            start = time.perf_counter()
            for _ in range(repeats):
                functions[name](data)
            seconds[name].append((time.perf_counter() - start) / repeats)
    base = seconds[names[0]]
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(seconds[name]) if name in seconds else None,
            "ratio": statistics.median(a / b for a, b in zip(base, seconds[name], strict=True))
            if name in seconds
            else None,
            "grey": grey[name],
        }
        for name in names
    }


def once(function: Function, data: bytes) -> float:
    start = time.perf_counter()
    function(data)
    return time.perf_counter() - start


def difference(function: Function, data: bytes, reference: UInt8Array) -> float | None:
    try:
        pixels = np.asarray(function(data))
    # Each library has its own errors for a file that it does not take; which they are is not the question.
    except Exception:  # noqa: BLE001
        return None
    if pixels.shape != reference.shape:
        return None
    return float(np.abs(pixels.astype(np.int16) - reference).max())


def whole(decoder: Function) -> Function:
    return lambda data: PREPROCESSING.apply(Image.fromarray(decoder(data)))


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument("--flips", type=Path, metavar="BUNDLE", help="Count classes that change, and measure no time.")
    options = parser.parse_args()
    if options.flips:
        write(options.json, {"flips": flips(Bundle.open(options.flips))})
        return
    alone = decoders()
    both = {"pillow": shortcuts()["pillow"]} | {name: whole(one) for name, one in alone.items() if name != "pillow"}
    groups = {"decode": alone, "whole": both, "shortcuts": shortcuts()}
    found: dict[str, Any] = {}
    for name, data in files().items():
        found[name] = {"bytes": len(data)}
        for group, functions in groups.items():
            found[name][group] = compared(functions, data, options.rounds)
            for candidate, line in found[name][group].items():
                print(f"{name:24} {group:10} {candidate:22}", *(f"{k} {v}" for k, v in line.items()), flush=True)
    write(options.json, {"files": found})


def write(path: Path | None, found: dict[str, Any]) -> None:
    peers = [
        name
        for name in ("simplejpeg", "imagecodecs", "opencv-python-headless", "torchvision")
        if any(importlib.metadata.distributions(name=name))
    ]
    head = report_header()
    head["versions"] |= {name: importlib.metadata.version(name) for name in peers}
    head["pillows_libjpeg_turbo"] = features.version("libjpeg_turbo")
    save_report(head | found, path)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
