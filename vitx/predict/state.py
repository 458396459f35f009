"""What the processes of a run share besides its output: the ledger and the list of images."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vitx.core.errors import InputError
from vitx.core.files import make_folder
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.ledger.databases import PostgresDatabase
from vitx.predict.ledger.ledger import Ledger
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import PREDICTIONS, escape_invalid_utf8
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.summary import SUMMARY

# OUT/.vitx/ holds the list of images, and the ledger unless that is a PostgreSQL database.
STATE, LEDGER = ".vitx", "ledger.sqlite"


@contextmanager
def open_ledger(out: Path, backoff: DiskFullBackoff, options: PredictOptions) -> Iterator[Ledger]:
    """Yield the ledger of the run that writes to `out`: a file there, or a database at a PostgreSQL URL.

    run_name: the run's name in that database; None: the absolute path of `out`. If the block raises before any output
    was begun, the folders that were made here are removed again. Raises InputError when `out` cannot be written or
    holds the predictions of another run (`overwrite` removes them), and whatever `PostgresDatabase` raises.
    """
    url, run_name, lease_seconds = options.ledger_url, options.run_name, options.lease_seconds
    if run_name is not None and url is None:
        raise InputError(f"--run-name {run_name} names a run in a shared ledger: pass --ledger too, or leave it out")
    with ExitStack() as opened:
        shared = None
        if url is not None:  # before any folder is made: a server that cannot be reached leaves no trace
            database = opened.enter_context(closing(PostgresDatabase(url)))
            run = run_name or escape_invalid_utf8(os.path.abspath(out))
            shared = Ledger(database, run=run, lease_seconds=lease_seconds)
        state = opened.enter_context(_state_folder(out, shared, overwrite=options.overwrite))
        if shared is not None:
            yield shared
            return
        path = state / LEDGER
        yield opened.enter_context(closing(backoff.retry(lambda: Ledger(path, lease_seconds=lease_seconds))))


@contextmanager
def _state_folder(out: Path, shared: Ledger | None, *, overwrite: bool) -> Iterator[Path]:
    """Yield OUT/.vitx, made if it is not there. shared: the ledger, if it is not a file in that folder."""
    state = out / STATE
    made_here = [folder for folder in (out, state) if not folder.exists()]
    try:
        make_folder(out)
        if overwrite:
            _remove(out, shared)
        # Predictions are looked for before the ledger. A process that starts at the same moment creates the run before
        # its first prediction, so in this order predictions without a run are always those of another run.
        if _holds_predictions(out) and not ((state / LEDGER).exists() if shared is None else shared.has_run()):
            run = "another run" if shared is None else f"a run that is not '{shared.run}' of the ledger"
            raise InputError(
                f"'{out}' holds {PREDICTIONS} of {run}: choose another folder, or pass --overwrite"
                + (", or its --ledger" if shared is None and any(state.glob("images-*")) else "")
            )
        make_folder(state)
    except OSError as error:
        raise InputError(f"cannot write to the folder '{out}': {error.strerror}") from None
    try:
        yield state
    except BaseException:
        if state in made_here and not (out / PREDICTIONS).exists():
            if shared is None:
                shutil.rmtree(state, ignore_errors=True)
            with suppress(OSError):  # not empty if another process is listing the input
                state.rmdir()
            if out in made_here:
                with suppress(OSError):
                    out.rmdir()
        raise


def _remove(out: Path, shared: Ledger | None) -> None:
    # The summary first: a crash in between must not leave it beside predictions of another run.
    (out / SUMMARY).unlink(missing_ok=True)
    if shared is not None:
        shared.remove_run()
    shutil.rmtree(out / STATE, ignore_errors=True)
    shutil.rmtree(out / PREDICTIONS, ignore_errors=True)
    (out / PREDICTIONS).unlink(missing_ok=True)


def _holds_predictions(out: Path) -> bool:
    predictions = out / PREDICTIONS
    return any(predictions.iterdir()) if predictions.is_dir() else predictions.exists()


class SharedRun(NamedTuple):
    """A run as its first process created it.

    base: the folder or URL that the paths of the list are relative to. listing: the file with the list. measured: what
    the first process measured: see `open_run`.
    """

    base: str
    listing: Path
    measured: dict[str, Any]


def open_run(
    ledger: Ledger,
    out: Path,
    settings: dict[str, Any],
    backoff: DiskFullBackoff,
    measure: Callable[[Inventory, Path], dict[str, Any]] = lambda inventory, listing: {},
) -> SharedRun:
    """Create the run, or join it if it was created with the same settings.

    settings: everything that the rows depend on; `input` and `shard_size` decide what is listed. measure: called with
    the new listing by the process that creates the run; what it returns is kept in the run, and if it raises, no run is
    created. Raises InputError when the run has other settings, or when its list is not in this `out`, which on another
    machine may be a different folder of the same name.
    """
    state = out / STATE
    # A random name: a process that loses its connection while it lists the input may be overtaken by another process,
    # whose list it must not replace.
    listing = state / f"images-{uuid.uuid4().hex}"

    def create() -> tuple[str, Inventory]:
        try:
            inventory = take_inventory(settings["input"], listing, settings["shard_size"], settings["image_column"])
            measured = measure(inventory, listing)
        except BaseException:
            listing.unlink(missing_ok=True)
            raise
        make_folder(out / PREDICTIONS)
        return json.dumps(settings | {"listing": listing.name, "measured": measured}), inventory

    text, base = backoff.retry(lambda: ledger.create_or_join(create))
    created = json.loads(text)
    for name, value in settings.items():
        before = created.get(name, False)  # an option that is newer than the run was off
        if before != value:
            raise InputError(
                f"'{out}' holds predictions of another run: {name} was {before}, is {value} now; "
                "choose another folder, or pass --overwrite"
            )
    if created["listing"] != listing.name:  # another process was first
        listing.unlink(missing_ok=True)
    joined = state / created["listing"]
    if not joined.is_file():
        raise InputError(
            f"'{out}' is not the folder in which the run '{ledger.run}' was created ({STATE}/{joined.name} is not "
            "there): --out must be on a file system that all machines share; for another run pass another --run-name"
        )
    return SharedRun(base, joined, created["measured"])
