"""What the processes of a run share besides its output: the ledger and the list of images."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from vitx.core.errors import InputError
from vitx.core.files import make_folder, write_bytes_once
from vitx.predict.inputs.inventory import Inventory
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tables import schema_from_text, schema_to_text
from vitx.predict.ledger import Ledger
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.outputs.parts import PREDICTIONS
from vitx.predict.pipeline.disk import DiskFullBackoff, is_full
from vitx.predict.summary import SUMMARY

# OUT/.vitx/ holds the list of images and the ledger; with --shard I/N each job has a folder for them in there, beside a
# file of what all jobs must agree on.
STATE, LEDGER, AGREEMENT = ".vitx", "ledger.sqlite", "shards.json"


@contextmanager
def open_ledger(out: Path, backoff: DiskFullBackoff, options: PredictOptions) -> Iterator[Ledger]:
    """Yield the ledger of the run that writes to `out`, a file there.

    If the block raises before any output was begun, the folders that were made here are removed again. Raises
    InputError when `out` cannot be written or holds the predictions of another run (`overwrite` removes them).
    """
    share = options.share
    if options.overwrite and share != WHOLE:
        raise InputError("--overwrite with --shard would remove what the other jobs did: remove the folder, then begin")
    with _state_folder(out, share, overwrite=options.overwrite) as state:
        path = state / LEDGER
        with closing(backoff.retry(lambda: Ledger(path, lease_seconds=options.lease_seconds))) as ledger:
            yield ledger


@contextmanager
def _state_folder(out: Path, share: Share, *, overwrite: bool) -> Iterator[Path]:
    """Yield the folder of the ledger, made if it is not there."""
    state = out / STATE if share == WHOLE else out / STATE / f"shard{share.suffix}"
    made_here = [folder for folder in (out, out / STATE, state) if not folder.exists()]
    try:
        make_folder(out)
        if overwrite:
            _remove(out)
        _refuse_others(out, share)
        make_folder(state)
    except OSError as error:
        raise InputError(f"cannot write to the folder '{out}': {error.strerror}") from None
    try:
        yield state
    except BaseException:
        # A list there is that of a process which has begun, or is listing.
        begun = any(state.glob("images-*")) or (share == WHOLE and (out / PREDICTIONS).exists())
        if state in made_here and not begun:
            shutil.rmtree(state, ignore_errors=True)
            for folder in reversed(made_here[:-1]):
                with suppress(OSError):  # not empty if another process is listing the input
                    folder.rmdir()
        raise


def _refuse_others(out: Path, share: Share) -> None:
    """Raise InputError for predictions of a run that is not this one, or not cut into shards as this one."""
    # Predictions are looked for before the ledger. A process that starts at the same moment creates the run before
    # its first prediction, so in this order predictions without a run are always those of another run.
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
        raise InputError(f"'{out}' holds {PREDICTIONS} of another run: choose another folder, or pass --overwrite")


def _remove(out: Path) -> None:
    # The summary first: a crash in between must not leave it beside predictions of another run.
    for path in (out / SUMMARY, *out.glob("summary-*-of-*.json")):
        path.unlink(missing_ok=True)
    shutil.rmtree(out / STATE, ignore_errors=True)
    shutil.rmtree(out / PREDICTIONS, ignore_errors=True)
    (out / PREDICTIONS).unlink(missing_ok=True)


class SharedRun(NamedTuple):
    """A run as its first process created it.

    base: the folder or URL that the paths of the list are relative to. listing: the file with the list. measured: what
    the first process measured: see `open_run`. source, skipped and schema: see `Inventory`.
    created: by this process, now.
    """

    base: str
    listing: Path
    measured: dict[str, Any]
    source: str
    skipped: SkippedNames
    schema: Any
    created: bool


def open_run(
    ledger: Ledger,
    out: Path,
    settings: dict[str, Any],
    backoff: DiskFullBackoff,
    take: Callable[[Path], Inventory],
    measure: Callable[[Inventory, Path], dict[str, Any]] = lambda inventory, listing: {},
    share: Share = WHOLE,
) -> SharedRun:
    """Create the run, or join it if it was created with the same settings.

    settings: everything that the rows depend on. take: lists the input to a new file. measure: called with the new
    listing by the process that creates the run; what it returns is kept in the run; if it raises, no run is created.
    Raises InputError when the run has other settings or has lost its list, and when the jobs of a --shard have other
    settings, or found another input.
    """
    state = ledger.path.parent
    # A random name: a process whose commit fails may be overtaken by another, whose list it must not replace.
    listing = state / f"images-{uuid.uuid4().hex}"
    agreement = out / STATE / AGREEMENT

    def create() -> tuple[str, Inventory]:
        if agreement.exists():  # before the listing, which may take an hour
            _refuse_changes(out, _read_agreement(agreement), settings | {"shards": share.jobs})
        try:
            taken = take(listing)
            if share != WHOLE:
                _agree(out, settings | {"shards": share.jobs, "listing": taken.digest})
            measured = measure(taken, listing)
        except BaseException:
            listing.unlink(missing_ok=True)
            raise
        make_folder(out / PREDICTIONS)
        beside = {"source": taken.source, "skipped": asdict(taken.skipped), "schema": schema_to_text(taken.schema)}
        return json.dumps(settings | {"listing": listing.name, "measured": measured} | beside), taken

    text, base = backoff.retry(lambda: ledger.create_or_join(create))
    created = json.loads(text)
    _refuse_changes(out, created, settings)
    if created["listing"] != listing.name:  # another process was first
        listing.unlink(missing_ok=True)
    joined = state / created["listing"]
    lost = [name for name in (joined.name, *ledger.lists()) if name and not (state / name).is_file()]
    if lost:
        raise InputError(
            f"the run in '{out}' has lost its list of images ({lost[0]} in {state}): choose another folder, or pass "
            "--overwrite"
        )
    skipped = SkippedNames(**created["skipped"])
    schema = schema_from_text(created["schema"])
    return SharedRun(base, joined, created["measured"], created["source"], skipped, schema, joined == listing)


def _agree(out: Path, settings: dict[str, Any]) -> None:
    """Write down what all jobs of a --shard must have in common, or compare it with what the first one wrote."""
    path = out / STATE / AGREEMENT
    try:
        write_bytes_once(path, json.dumps(settings).encode())  # ASCII: a path need not be valid Unicode
    except OSError as error:
        if is_full(error):
            raise
        raise InputError(
            f"--shard needs hard links, which the file system of '{out}' lacks: {error.strerror}"
        ) from None
    _refuse_changes(out, _read_agreement(path), settings)


def _read_agreement(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise InputError(f"'{path}', in which the jobs agree, is damaged: choose another folder") from None


def _refuse_changes(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        was = before.get(name, False)  # an option that is newer than the run was off
        if was != value and name == "listing":
            raise InputError(
                f"images were added to '{now['input']}' or removed since the first job listed it: the jobs would leave "
                "some out; choose another folder for all of them"
            )
        if was != value:
            raise InputError(
                f"'{out}' holds predictions of another run: {name} was {was}, is {value} now; "
                "choose another folder, or pass --overwrite"
            )
