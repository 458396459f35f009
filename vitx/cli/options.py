"""Options that several verbs share, each defined once."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vitx.core.errors import InputError

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, made by `vitx train`.")]
BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, made by `vitx export`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Data = Annotated[
    str | None,
    typer.Option("--data", help="'digits', or a folder with train/ and val/, one folder a class. Default: the run's."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")]
Which = Annotated[Literal["best", "last"], typer.Option("--checkpoint", help="Which checkpoint of the run.")]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to run; auto takes a GPU where there is one.")
]
RuntimeOption = Annotated[
    str, typer.Option("--runtime", help="What runs a bundle; `vitx doctor` lists the runtimes and what they need.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of one session. Default: all cores.")]
MaxFlipRate = Annotated[
    float,
    typer.Option(
        "--max-flip-rate", min=0, max=1, help="Highest allowed 95 % upper bound on the share of changed classes."
    ),
]
AllowUncertified = Annotated[
    bool,
    typer.Option("--allow-uncertified", help="Accept a bundle without a passing certificate; shown wherever it runs."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on Ray: a cluster of this machine, or the one at ADDRESS (auto or HOST:PORT).",
    ),
]
LOCAL_RAY = "local"
_RAY_ADDRESS = re.compile(r"auto|local|ray://.+|[^/]+:\d+")


class Command(TyperCommand):
    """A verb whose `--ray` needs no value: what follows it and is no address is an argument of its own."""

    # Any: newer versions of typer hold click inside, older ones depend on it.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_ray_address(args))


def _with_ray_address(arguments: Sequence[str]) -> list[str]:
    return [
        f"--ray={LOCAL_RAY}" if one == "--ray" and not _RAY_ADDRESS.fullmatch(after) else one
        for one, after in pairwise([*arguments, ""])
    ]


def batch_sizes(option: str, text: str) -> tuple[int, ...]:
    """'1, 8,32' → (1, 8, 32); raise InputError naming the option for anything but positive whole numbers."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"{option} {text}: expected batch sizes such as 1,8,32")
    return sizes


def number_range(option: str, text: str) -> tuple[int, int]:
    """'4' → (4, 4), '2:8' → (2, 8); raise InputError for anything but numbers from 1 on, the least first."""
    least, _, most = text.partition(":")
    numbers = least, most or least
    if not all(number.isascii() and number.isdigit() for number in numbers) or not 1 <= int(least) <= int(numbers[1]):
        raise InputError(f"{option} {text}: expected a number such as 4, or a least and a most such as 2:8")
    return int(least), int(numbers[1])
