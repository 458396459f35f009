"""What the processes of a run share beside its output: the ledger, the plan in it, and the list of images."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vitx.core.errors import InputError
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.ledger.databases import PostgresDatabase
from vitx.predict.ledger.ledger import Ledger
from vitx.predict.outputs.parts import PREDICTIONS, readable
from vitx.predict.pipeline.disk import Patience
from vitx.predict.summary import SUMMARY

# In the output folder; the ledger lies there unless it is a database elsewhere.
STATE, LEDGER = ".vitx", "ledger.sqlite"


@contextmanager
def open_ledger(
    out: Path, patience: Patience, *, url: str | None, run_name: str | None, lease_seconds: float, overwrite: bool
) -> Iterator[Ledger]:
    """The ledger of the run that writes to `out`: in a file there, or at a PostgreSQL URL.

    run_name: of the run, among those of one database; the absolute path of `out` where it is None. If nothing was
    planned when the block raises, the folders that were made here are removed. Raises InputError when `out` cannot be
    written or holds the predictions of another run (`overwrite` removes them), and what `PostgresDatabase` raises.
    """
    if run_name is not None and url is None:
        raise InputError(f"--run-name {run_name} names a run in a shared ledger: pass --ledger too, or leave it out")
    with ExitStack() as opened:
        shared = None
        if url is not None:  # first: what cannot be reached leaves no trace
            database = opened.enter_context(closing(PostgresDatabase(url)))
            run = run_name or readable(os.path.abspath(out))
            shared = Ledger(database, run=run, lease_seconds=lease_seconds)
        state = opened.enter_context(_state_of(out, shared, overwrite=overwrite))
        if shared is not None:
            yield shared
            return
        path = state / LEDGER
        yield opened.enter_context(closing(patience.retry(lambda: Ledger(path, lease_seconds=lease_seconds))))


@contextmanager
def _state_of(out: Path, shared: Ledger | None, *, overwrite: bool) -> Iterator[Path]:
    state = out / STATE
    made_here = [folder for folder in (out, state) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if overwrite:
            _remove(out, shared)
        # In this order: whoever begins at the same moment plans before there are predictions.
        if _holds_predictions(out) and not ((state / LEDGER).exists() if shared is None else shared.is_planned()):
            run = "another run" if shared is None else f"a run that is not '{shared.run}' of the ledger"
            raise InputError(
                f"'{out}' holds {PREDICTIONS} of {run}: choose another folder, or pass --overwrite"
                + (", or its --ledger" if shared is None and any(state.glob("images-*")) else "")
            )
        state.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to the folder '{out}': {error.strerror}") from None
    try:
        yield state
    except BaseException:
        if state in made_here and not (out / PREDICTIONS).exists():
            if shared is None:
                shutil.rmtree(state, ignore_errors=True)
            with suppress(OSError):  # another process may be making the plan
                state.rmdir()
            if out in made_here:
                with suppress(OSError):
                    out.rmdir()
        raise


def _remove(out: Path, shared: Ledger | None) -> None:
    (out / SUMMARY).unlink(missing_ok=True)  # first: it is never beside other predictions
    if shared is not None:
        shared.forget()
    shutil.rmtree(out / STATE, ignore_errors=True)
    shutil.rmtree(out / PREDICTIONS, ignore_errors=True)
    (out / PREDICTIONS).unlink(missing_ok=True)


def _holds_predictions(out: Path) -> bool:
    predictions = out / PREDICTIONS
    return any(predictions.iterdir()) if predictions.is_dir() else predictions.exists()


class Plan(NamedTuple):
    """base: where the images lie; listing: their list; measured: see `join_plan`."""

    base: str
    listing: Path
    measured: dict[str, Any]


def join_plan(
    ledger: Ledger,
    out: Path,
    question: dict[str, Any],
    patience: Patience,
    measure: Callable[[Inventory, Path], dict[str, Any]] = lambda inventory, listing: {},
) -> Plan:
    """Make the plan, or join it if it is of the same question.

    question: what decides about the rows; `input` and `shard_size` say what is listed. measure: called by who makes
    the plan; what it returns is kept in it, and if it raises nothing was planned. Raises InputError when the
    question of the plan was another, or when its list is not in this `out`: on another machine that may be a folder
    of the same name.
    """
    state = out / STATE
    # A name of its own: a process that lost the database while it listed cannot replace the list of who was next.
    listing = state / f"images-{uuid.uuid4().hex}"

    def make() -> tuple[str, Inventory]:
        try:
            inventory = take_inventory(question["input"], listing, question["shard_size"])
            measured = measure(inventory, listing)
        except BaseException:
            listing.unlink(missing_ok=True)
            raise
        (out / PREDICTIONS).mkdir(exist_ok=True)
        return json.dumps(question | {"listing": listing.name, "measured": measured}), inventory

    text, base = patience.retry(lambda: ledger.plan(make))
    made = json.loads(text)
    for name, value in question.items():
        if made.get(name) != value:
            raise InputError(
                f"'{out}' holds predictions of another run: {name} {made.get(name)} there, {value} here; "
                "choose another folder, or pass --overwrite"
            )
    if made["listing"] != listing.name:
        listing.unlink(missing_ok=True)
    joined = state / made["listing"]
    if not joined.is_file():
        raise InputError(
            f"'{out}' is not the folder in which the run '{ledger.run}' was planned ({STATE}/{joined.name} is not "
            "there): --out must be on a file system that all machines share; another run takes another --run-name"
        )
    return Plan(base, joined, made["measured"])
