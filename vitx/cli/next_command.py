"""What a verb prints last: the command that usually follows."""

from pathlib import Path

from vitx.core.errors import VitxError
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.parity.verdict import MAX_FLIP_RATE, provable_rate


def export_of(run: Path | str, images: int | None = None, *, skip_bad: bool = False) -> list[object]:
    """`vitx export` of a run; with few evaluation images (of which there are `images`) at the rate that they prove."""
    command: list[object] = ["vitx", "export", run, "--out", f"{Path(run)}.vitx", *["--skip-bad"] * skip_bad]
    try:
        images = images or len(open_images(RunFolder.open(run).info.data, "val", skip_bad=skip_bad))
        rate = provable_rate(images)
    except VitxError:  # the images are gone: export will say so
        return command
    return command if rate <= MAX_FLIP_RATE else [*command, "--max-flip-rate", f"{rate:g}"]
