"""`vitx demo`: the main job on handwritten digits."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Json
from vitx.core.console import print_result
from vitx.core.errors import missing_package


def command(
    out: Annotated[Path, typer.Option("--out", help="Working folder; emptied first.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train on handwritten digits, export with proof, serve, and send every test image over HTTP as PNG."""
    from vitx.cli.doctor import EXTRAS

    for extra in ("train", "export", "serve"):
        for package in EXTRAS[extra][0]:
            if find_spec(package) is None:  # said now, not after minutes of training
                raise missing_package(package, "all")
    from vitx.bench.demo import RECIPE, run_demo

    result = run_demo(out)
    print_result(f"{RECIPE}: from images to predictions", result.summary, as_json=as_json)
    result.check()
