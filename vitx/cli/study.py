"""`vitx study`: variants of one training, with several seeds each, compared in a table."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad, not_empty
from vitx.core.console import counted, log, print_fields, print_json, print_table
from vitx.core.errors import CheckFailed, InputError
from vitx.train.options import StudyKind

if TYPE_CHECKING:
    from vitx.train.study.result import Row, StudyResult


def command(
    kind: Annotated[
        StudyKind,
        typer.Argument(
            metavar="KIND",
            help="ablation: the patch losses on and off; losses: at two depths; depth: by kind of attention; methods: "
            "each one against over-smoothing alone; talking-heads: by losses; finetune: on larger images; kernel-size: "
            "attention in neighbourhoods; precision: float32 and halves; alternet: its build-up rule.",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="A name of `vitx recipes`. Default: digits-deit, digits-alternet.", callback=not_empty
        ),
    ] = None,
    data: Data = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="A,B", help="Each variant is trained with each.")] = "0,1,2",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder; a study in it is continued. Default: runs/study-KIND."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time; with more than one, each has one thread.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe in all runs; may be repeated."),
    ] = None,
    depths: Annotated[
        str | None, typer.Option("--depths", metavar="A,B", help="Numbers of blocks, for `depth`. Default: 6,12,24,32.")
    ] = None,
    device: DeviceOption = "auto",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train variants of a recipe and compare them: a table, study.json and study.png.

    Finished runs are kept and stopped ones resume, so the same command continues a study. Failed runs are reported at
    the end.
    """
    from vitx.train.loop.interruption import TrainingStopped
    from vitx.train.study.run_study import run_study
    from vitx.train.study.study import Study
    from vitx.train.study.variants import DEPTHS, STUDIES

    if depths is not None and kind != "depth":
        raise InputError(f"--depths is of `vitx study depth`, not of {kind}")
    folder = out or Path("runs") / f"study-{kind}"
    study = Study(
        kind,
        recipe or STUDIES[kind].recipe,
        folder,
        _numbers("--seeds", seeds, 0),
        data,
        tuple(settings or ()),
        jobs,
        device,
        skip_bad,
        quiet,
    )
    try:
        result = run_study(study, DEPTHS if depths is None else _numbers("--depths", depths, 1))
    except TrainingStopped as stopped:
        log(f"{stopped}, all is saved: go on with the same command")
        raise typer.Exit(130 if stopped.signal == signal.SIGINT else 0) from None
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        _print(result, folder)
    if result.failed:
        names = "; ".join(f"{name}: {reason}" for name, reason in result.failed.items())
        raise CheckFailed(f"{counted(len(result.failed), 'run')} failed, the output is in '{folder / 'logs'}': {names}")


def _numbers(option: str, text: str, smallest: int) -> tuple[int, ...]:
    """'0, 1,2' → (0, 1, 2); raise InputError unless all are whole numbers from `smallest` on, and for no number."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (smallest - 1,)
    if not numbers or min(numbers) < smallest:
        raise InputError(f"{option} '{text}': expected whole numbers from {smallest} on, such as {option} 6,12")
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{option} {text}: each only once")
    return numbers


def _print(result: "StudyResult", folder: Path) -> None:
    factors = list(result.rows[0].factors) if result.rows else []
    columns = [*factors, "n", "top-1 (%)", "gain", "CosSim, last", "last quarter", "attention std"]
    rows = [_cells(row) for row in result.rows]
    if any(row.published_top1 is not None for row in result.rows):
        columns.append("paper")
        for cells, row in zip(rows, result.rows, strict=True):
            cells.append("–" if row.published_top1 is None else f"{row.published_top1:g}")
    print_table(f"{result.study} of {result.recipe} on {result.data}: {folder / 'study.json'}", columns, rows)
    print_fields("what was trained", {"the paper": result.paper, "here": result.here})
    if result.steps:
        steps = [
            (_factor(step["attention_depths"]), f"{step['top1']:.2%}", "kept" if step["kept"] else "taken back")
            for step in result.steps
        ]
        print_table("build-up", ("attention units of each stage", "top-1", ""), steps)


def _cells(row: "Row") -> list[Any]:
    layers = (row.cos_sim_last_block, row.cos_sim_last_layers, row.attention_std_last_layers)
    return [
        *(_factor(value) for value in row.factors.values()),
        len(row.seeds),
        row.top1.text(100, 1),
        "–" if row.gain is None else row.gain.text(100, 1),
        *("–" if spread is None else spread.text() for spread in layers),
    ]


def _factor(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "–" if value == 0 else str(value)
