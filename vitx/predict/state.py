"""What a run keeps besides its output: the lock and the ledger."""

import json
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from vitx.core.errors import MORE_FILES, TOO_MANY_FILES, EnvironmentMissing, InputError
from vitx.core.files import cache_folder, make_folder, write_bytes_once
from vitx.predict.inputs.inventory import Inventory, base_of
from vitx.predict.inputs.stores import shown, without_user
from vitx.predict.inputs.tables import schema_from_text, schema_to_text
from vitx.predict.ledger import COPY, Ledger
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.outputs.parts import PREDICTIONS, part_path, remove_leftovers
from vitx.predict.pipeline.disk import is_full
from vitx.predict.pipeline.lock import LOCK, locked
from vitx.predict.summary import SUMMARY

# OUT/.vitx/ holds the lock and the ledger, or with --shard a folder for each job's, and what all jobs must agree on.
STATE, LEDGER, AGREEMENT = ".vitx", "ledger.sqlite", "shards.json"
# With --overwrite the ledger of the new run, until all is checked and the old one is removed.
NEW_LEDGER = f"{LEDGER}.new"
# What SQLite says of a file that is whole, but not this user's to write.
_NO_ACCESS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


@contextmanager
def open_ledger(out: Path, options: PredictOptions) -> Iterator[Ledger]:
    """Yield the ledger of the run that writes to `out`; nobody else has it within the block.

    With --overwrite what is there stays until `open_run` has created the new run. If the block raises before the input
    is listed, the folders that were made here are removed again. Raises InputError when `out` cannot be written,
    another process works on it, it holds predictions of another run, or is damaged; EnvironmentMissing when too many
    files are open for SQLite.
    """
    share = options.share
    if options.overwrite and share != WHOLE:
        raise InputError("--overwrite with --shard would remove what the other jobs did: remove the folder, then begin")
    state = out / STATE if share == WHOLE else out / STATE / f"shard{share.suffix}"
    listed = False
    made_here = [folder for folder in (out, out / STATE, state) if not folder.exists()]
    with ExitStack() as held:
        try:
            make_folder(out)
            held.enter_context(locked(state, out))
            if options.overwrite:  # refused now, not behind a listing that takes an hour
                with ExitStack() as jobs:
                    _hold_jobs(out, jobs)
        except OSError as error:
            raise _not_writable(out, error) from None
        try:
            if not options.overwrite:
                _refuse_others(out, share)
            _remove_copies(state)
            with closing(Ledger(state / (NEW_LEDGER if options.overwrite else LEDGER), share)) as ledger:
                listed = True
                if ledger.description():  # else parts are of others, who may be writing them
                    remove_leftovers(out, share)  # of a process that was killed
                try:
                    yield ledger
                finally:
                    with suppress(sqlite3.Error):
                        listed = bool(ledger.description())
                    if listed and ledger.path.name == LEDGER:
                        remove_leftovers(out, share)
        except BaseException as error:
            explained = _explained(error, state, share)  # before its files are removed
            if state in made_here and not listed:
                for path in (*state.glob(f"{LEDGER}*"), state / LOCK):  # the lock last: others may take a new one then
                    path.unlink(missing_ok=True)
                for folder in reversed(made_here):
                    with suppress(OSError):  # not empty
                        folder.rmdir()
            if explained is None:
                raise
            raise explained from None
        finally:
            _remove_copies(state)


def _explained(error: BaseException, state: Path, share: Share) -> Exception | None:
    """What an error of SQLite means for who began the run; None for a full disk, and for what is not SQLite's."""
    if not isinstance(error, sqlite3.DatabaseError) or is_full(error):
        return None
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    usable = os.access(state, os.W_OK) and all(
        path.is_file() and os.access(path, os.W_OK) for path in state.glob(f"{LEDGER}*")
    )
    if code == sqlite3.SQLITE_CANTOPEN and usable:  # SQLite does not tell what the system said
        too_many = EnvironmentMissing(f"cannot open '{state / LEDGER}' ({error}): {MORE_FILES}")
        return _no_room(state) or too_many
    if code in _NO_ACCESS:
        again = "make that file and its folder writable for you, or choose another folder"
        return InputError(f"cannot write to '{state / LEDGER}' ({error}): {again}")
    again = f"choose another folder, or {share.anew}"
    return InputError(f"the ledger {state / LEDGER} is damaged ({error}): {again}")


def _no_room(state: Path) -> OSError | None:
    """The error if the disk, or the user's share of it, has no room for another file, as SQLite makes beside it."""
    probe = state / f"{COPY}probe"
    try:
        probe.touch()
    except OSError as error:
        error.filename = str(state / LEDGER)
        return error if is_full(error) else None
    probe.unlink()
    return None


def _remove_copies(state: Path) -> None:
    for left in (*state.glob(f"{COPY}*"), *state.glob(f"{NEW_LEDGER}*")):
        left.unlink()


def _refuse_others(out: Path, share: Share) -> None:
    """Raise InputError for predictions of a run that is not this one, or not cut into shards as this one."""
    predictions = out / PREDICTIONS
    holds = any(predictions.iterdir()) if predictions.is_dir() else predictions.exists()
    whole, cut = (out / STATE / LEDGER).exists(), (out / STATE / AGREEMENT).exists()
    ours, other = (whole, cut) if share == WHOLE else (cut, whole)
    if other:
        raise InputError(
            f"'{out}' holds predictions of a run {'with' if cut else 'without'} --shard: choose another folder, or "
            + ("continue it with --shard" if cut else "continue it without")
        )
    if holds and not ours:
        raise InputError(f"'{out}' holds {PREDICTIONS} of another run: choose another folder, or {share.anew}")


def _hold_jobs(out: Path, held: ExitStack) -> None:
    for job in filter(Path.is_dir, (out / STATE).iterdir()):
        held.enter_context(locked(job, out))


def _replace_old(out: Path, ledger: Ledger) -> None:
    """Put `ledger` in the place of the old run, of which the lock stays: without it two processes might have one each.

    Raises InputError, before anything is removed, if a job of --shard has begun meanwhile.
    """
    with ExitStack() as held:
        _hold_jobs(out, held)
        state = [path for path in (out / STATE).iterdir() if not path.name.startswith((LOCK, NEW_LEDGER))]
        try:
            # The summaries first: a crash in between must not leave them beside predictions of another run.
            for path in (out / SUMMARY, *out.glob("summary-*-of-*.json"), *state, out / PREDICTIONS):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            ledger.move(out / STATE / LEDGER)
        except OSError as error:
            raise _not_writable(out, error) from None


def _not_writable(out: Path, error: OSError) -> InputError:
    """Raises the error itself where it is no fault of the folder."""
    if is_full(error) or error.errno in TOO_MANY_FILES:
        raise error
    remedy = ""
    with suppress(EnvironmentMissing):  # a user without a home has named the folder
        if out.is_relative_to(cache_folder().absolute()):
            remedy = "; name one that can be written with --state, or by VITX_CACHE"
    return InputError(f"cannot write to the folder '{out}': {error.strerror}{remedy}")


class Run(NamedTuple):
    """A run as it was created. id: random. base, digest and schema: see `Inventory`. created: by this call."""

    id: str
    base: str
    digest: str
    schema: Any
    created: bool


def open_run(
    ledger: Ledger,
    out: Path,
    settings: dict[str, Any],
    take: Callable[[Share | None], Inventory],
    measure: Callable[[Inventory], dict[str, Any]] = lambda inventory: {},
) -> Run:
    """Create the run, with --overwrite in the place of the old one, or go on with it.

    settings: all that the rows depend on; no password of its input is kept. take: lists the input. measure: called
    then; what it returns is kept. Raises InputError when the run or the other jobs of a --shard have other settings, or
    found another input.
    """
    source, settings, share = settings["input"], settings | {"input": without_user(settings["input"])}, ledger.share
    if created := not ledger.description():
        common = settings | {"shards": share.jobs}
        if share != WHOLE:  # before the listing, which may take an hour
            _agree(out, common)
        taken = take(share)
        measured = measure(taken)
        if share != WHOLE:
            _agree(out, common | {"listing": taken.digest})
        found = {name: getattr(taken, name) for name in ("digest", "source", "unread")}
        found |= {"id": uuid.uuid4().hex, "skipped": asdict(taken.skipped), "schema": schema_to_text(taken.schema)}
        described = settings | found | {"measured": measured}
        ledger.create(described, taken.shards)
        if ledger.path.name == NEW_LEDGER:
            _replace_old(out, ledger)
    make_folder(out / PREDICTIONS)  # also where someone removed it
    run = ledger.description()
    _refuse_changes(out, run, settings, share)
    if share == WHOLE:  # else other parts are of other jobs
        _refuse_strangers(out, ledger)
    return Run(run["id"], base_of(source, run["source"]), run["digest"], schema_from_text(run["schema"]), created)


def _refuse_strangers(out: Path, ledger: Ledger) -> None:
    """Raise InputError for a file among the parts of which readers would take rows, and which is none of the run's."""
    ours = {part_path(out, claim.id) for claim in ledger.shards()}
    # pyarrow reads every file whose name does not begin so, in folders too.
    there = (path for path in (out / PREDICTIONS).iterdir() if not path.name.startswith((".", "_")))
    if strangers := sorted(path.name for path in there if path not in ours):
        raise InputError(
            f"'{out / PREDICTIONS}' holds {strangers[0]}, which is not of this run, and readers would take its rows: "
            "remove it, or pass --overwrite"
        )


def _agree(out: Path, settings: dict[str, Any]) -> None:
    """Compare what all jobs of a --shard must have in common with what the first one that listed the input wrote."""
    path = out / STATE / AGREEMENT
    try:
        if "listing" in settings:
            write_bytes_once(path, json.dumps(settings).encode())  # ASCII: a path need not be valid Unicode
    except OSError as error:
        if is_full(error):
            raise
        raise InputError(
            f"--shard needs hard links, which the file system of '{out}' lacks: {error.strerror}"
        ) from None
    try:
        before = dict(json.loads(path.read_bytes())) if path.exists() else settings
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"'{path}', in which the jobs agree, is damaged: choose another folder") from None
    _refuse_changes(out, before, settings, Share(1, settings["shards"]))


def _shown(value: Any) -> Any:
    return shown(value) if isinstance(value, str) else value


def _refuse_changes(out: Path, before: dict[str, Any], now: dict[str, Any], share: Share) -> None:
    for name, value in now.items():
        was = before.get(name, False)  # an option that is newer than the run was off
        if was != value and name == "listing":
            raise InputError(
                f"images were added to '{shown(now['input'])}' or removed since the first job listed it: the jobs "
                "would leave some out; choose another folder for all of them"
            )
        if was != value:
            raise InputError(
                f"'{out}' holds predictions of another run: {name} was {_shown(was)}, is {_shown(value)} now; "
                f"choose another folder, or {share.anew}"
            )
