"""Options that several verbs share, each defined once."""

from typing import Annotated, Optional

import typer

# typer reads these aliases at run time; `Optional` keeps them readable for it on every supported Python.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Data = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--data", help="'digits', or a folder with train/ and val/, one folder a class. Default: the run's."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")]
Which = Annotated[str, typer.Option("--checkpoint", help="best or last.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[Optional[int], typer.Option("--threads", min=1, help="Threads of one session. Default: all cores.")]  # noqa: UP045
