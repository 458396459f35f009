"""The server's decoder on threads and in processes: images a second, and how long the event loop waits meanwhile.

    python benchmarks/serve/decoding.py [--rounds 5] [--seconds 2] [--json FILE]

The two take turns, round after round, with 16 images always asked for. The event loop's wait, the 99th percentile of a
turn, is how much later than asked a sleep of a millisecond ends: what a request that comes meanwhile waits too.
"""

import argparse
import asyncio
import io
import statistics
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.images import detailed_image
from support.targets import at_least, command_line, report_header, save_report
from support.turns import turn_order
from vitx.core.preprocess import Preprocessing
from vitx.serve.http.decode import Decoder
from vitx.serve.process.process_settings import configure_process

IN_FLIGHT = 16
SIZES = {"JPEGs of 48 px": (48, 48), "JPEGs of a megapixel": (1152, 864)}


async def turn(decoder: Decoder, image: bytes, seconds: float) -> tuple[float, float]:
    """Images a second, and the event loop's wait in ms."""
    start, done, waits = time.perf_counter(), 0, list[float]()

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < start + seconds:
            (pixels,) = await decoder.decode([image], Preprocessing(image_size=224))
            assert not isinstance(pixels, Exception)
            done += 1

    async def watch() -> None:
        while (asked := time.perf_counter()) < start + seconds:
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - asked - 0.001)

    await asyncio.gather(watch(), *(ask() for _ in range(IN_FLIGHT)))
    return done / (time.perf_counter() - start), 1e3 * float(np.percentile(waits, 99))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with ExitStack() as opened:
        decoders = {
            name: opened.enter_context(closing(Decoder(max_pixels=10**7, capacity=100, processes=name == "processes")))
            for name in ("threads", "processes")
        }
        for kind, size in SIZES.items():
            stream = io.BytesIO()
            detailed_image(np.random.default_rng(0), size, 12).save(stream, "JPEG", quality=90)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
            for number in range(arguments.rounds + 1):  # the first warms up
                for name in turn_order(decoders, number):
                    found[name].append(await turn(decoders[name], stream.getvalue(), arguments.seconds))
            report[kind] = {
                name: {
                    "images a second": [round(rate, 1) for rate, _ in turns[1:]],
                    "wait in ms": [round(wait, 2) for _, wait in turns[1:]],
                    "medians": [round(statistics.median(values), 2) for values in zip(*turns[1:], strict=True)],
                }
                for name, turns in found.items()
            }
            print(kind, {name: result["medians"] for name, result in report[kind].items()}, flush=True)
    return report


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=float, default=2)
    arguments = parser.parse_args()
    configure_process()
    save_report({**report_header(), **asyncio.run(measure(arguments))}, arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
