"""Pictures of a page for docs, and what axe-core says of it: on a desktop, in the dark, on a phone, in print.

    python benchmarks/screenshots.py docs/training-report runs/digits/report.html --axe axe.min.js
    python benchmarks/screenshots.py docs/server-page http://127.0.0.1:8000/ --image digit.png --axe axe.min.js

Needs Chromium. axe.min.js is a file of the package axe-core, of npm; the exit code is 1 where it finds a fault that is
serious or critical in any of the four.
"""

import argparse
import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from browser import PROGRAM, Browser, running_browser


class Shot(NamedTuple):
    """width, height: of the window, in CSS pixels; scale: pixels of the picture for one of them."""

    width: int
    height: int
    scale: float
    dark: bool = False
    print: bool = False


SHOTS = {
    "desktop": Shot(1180, 1160, 0.75),
    "dark": Shot(1180, 1160, 0.75, dark=True),
    "phone": Shot(375, 1100, 0.8),
    "print": Shot(900, 1000, 0.85, print=True),
}
COLOURS = 160  # of a file
# Drops a file on the server's page, waits for its classes, and for the charts to have moved.
CLASSIFY = """(async () => {{
  const bytes = Uint8Array.from(atob('{data}'), (c) => c.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], 'image.png', {{type: 'image/png'}}));
  const event = new DragEvent('drop', {{dataTransfer, bubbles: true, cancelable: true}});
  document.getElementById('drop').dispatchEvent(event);
  await new Promise((done) => setTimeout(done, 5000));
}})()"""


def open_page(browser: Browser, url: str, shot: Shot, image: Path | None) -> None:
    browser.open(url, width=shot.width, height=shot.height, dark=shot.dark)
    if image is not None:
        browser.run(CLASSIFY.format(data=base64.b64encode(image.read_bytes()).decode()))
    if shot.print:
        browser.call("Emulation.setEmulatedMedia", media="print", features=[])


def picture(browser: Browser, shot: Shot) -> bytes:
    """The upper part of the page, as a PNG file of few colours."""
    clip = {"x": 0, "y": 0, "width": shot.width, "height": shot.height, "scale": shot.scale}
    answer = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def faults(browser: Browser, axe: str) -> list[dict[str, Any]]:
    """What axe-core finds: the rule, how grave, and where."""
    browser.run(axe)
    violations = json.loads(browser.run("axe.run().then((result) => JSON.stringify(result.violations))"))
    places = [[node["target"][0] for node in one["nodes"]] for one in violations]
    return [{"rule": one["id"], "impact": one["impact"], "at": at} for one, at in zip(violations, places, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the pictures are OUT-desktop.png and so on")
    parser.add_argument("page", help="a file, or an address")
    parser.add_argument("--image", type=Path, help="is classified on the server's page")
    parser.add_argument("--axe", type=Path)
    given = parser.parse_args()
    if PROGRAM is None:
        parser.error("Chromium is not installed")
    local = "://" not in given.page
    for file in [Path(given.page)] * local + [given.image, given.axe]:
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}")
    url = Path(given.page).resolve().as_uri() if local else given.page
    grave = 0
    with tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as browser:
        for name, shot in SHOTS.items():
            open_page(browser, url, shot, given.image)
            Path(f"{given.out}-{name}.png").write_bytes(picture(browser, shot))
            if given.axe is None:
                print(f"{name}: a picture alone, as --axe was not given")
                continue
            found = faults(browser, given.axe.read_text())
            grave += sum(each["impact"] in ("serious", "critical") for each in found)
            print(name, json.dumps(found))
    return int(grave > 0)


if __name__ == "__main__":
    sys.exit(main())
