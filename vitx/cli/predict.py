"""`vitx predict`: any number of images into Parquet."""

from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import BundleArgument, Json, Quiet, from_records, not_empty
from vitx.core.console import counted, print_fields, print_json, shortened
from vitx.predict.options import PredictOptions

if TYPE_CHECKING:
    from vitx.predict.summary import PredictionSummary

INPUT_HELP = "A folder of images, a pattern, a list of paths (.txt), a .tar or .parquet file, or a URL of these."


@from_records("predict")
def command(
    bundle: BundleArgument,
    source: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP, callback=not_empty)],
    out: Annotated[str, typer.Option("--out", help="Folder, or URL of an object store, for predictions.parquet/.")],
    options: PredictOptions,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify every image of an input. An unreadable image becomes a row with the reason; many are exit code 1.

    Run it again to go on after a stop. One process at a time works on an output; with --shard several share an input.
    """
    from vitx.predict.job import launch

    summary = launch(bundle, source, out, options, quiet=quiet)
    if as_json:
        print_json(summary.model_dump(mode="json"))
    else:
        _print(summary, out)
    summary.check_errors(options.max_error_rate, options.share)


def _print(summary: "PredictionSummary", out: str) -> None:
    from vitx.predict import PREDICTIONS

    common = sorted(summary.classes.items(), key=lambda item: item[1], reverse=True)[:5]
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stages.items())
    skipped = summary.skipped_names
    some = ", ".join(map(shortened, skipped.first))
    names = f"{counted(skipped.count, 'name')} of no image, such as {some}" if skipped.count else 0
    print_fields(
        f"{counted(summary.images, 'image')} of {summary.input}",
        {
            "written to": f"{out.rstrip('/')}/{PREDICTIONS}",
            "unreadable": summary.errors,
            **({"not read to the end": summary.uncounted} if summary.uncounted else {}),
            "skipped": names,
            **({} if summary.increment is None else {"compared with the output": str(summary.increment)}),
            "done by the last process": summary.images_here,  # that did any, of a run that was finished
            "seconds": summary.seconds,
            "images/s": summary.images_per_second,
            "bound by": f"{summary.binding} ({busy})",
            "most common": ", ".join(f"{shortened(name)} ({count})" for name, count in common if count),
            "certified": "yes" if summary.certified else "no",
        },
    )
