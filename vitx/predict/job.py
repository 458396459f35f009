"""`vitx predict`: plan or join, verify what is done, work until all is done, summarise."""

import importlib.util
import os
import uuid
from pathlib import Path
from typing import Any

from vitx.core.bundle import Bundle
from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed, InputError, missing_package
from vitx.core.files import read_record, write_json
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.inputs.stores import is_url
from vitx.predict.ledger.ledger import LEASE_SECONDS, Ledger
from vitx.predict.outputs.parts import part_path, remove_leftovers
from vitx.predict.pipeline.disk import PATIENCE_SECONDS, Patience
from vitx.predict.pipeline.draft import check_draft
from vitx.predict.pipeline.executor import Executor, Local
from vitx.predict.pipeline.interruption import sigterm_interrupts
from vitx.predict.pipeline.worker import Job, refuse_unreadable
from vitx.predict.state import join_plan, open_ledger
from vitx.predict.summary import SUMMARY, PredictionSummary, bundle_digest, summarize
from vitx.runtimes import load_session
from vitx.runtimes.session import Session

BATCH_SIZE = 32
TOP_K = 5
SHARD_SIZE = 4096
# Files read at once: a local disk answers at once, a store after its latency.
LOCAL_READERS, REMOTE_READERS = 2, 16


def predict(
    bundle: Bundle,
    session: Session | Executor,
    source: str | Path,
    out: Path,
    *,
    batch_size: int = BATCH_SIZE,
    top_k: int = TOP_K,
    logits: bool = False,
    embeddings: bool = False,
    draft: bool = False,
    shard_size: int = SHARD_SIZE,
    image_column: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    allow_uncertified: bool = False,
    read_threads: int | None = None,
    decode_threads: int | None = None,
    ledger_url: str | None = None,
    run_name: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
    quiet: bool = False,
) -> PredictionSummary:
    """Classify every image of `source` (see `take_inventory`); write `out`/predictions.parquet/ and `out`/summary.json.

    The first process lists the input and cuts it into shards; others with the same arguments join it, now or after all
    have been killed: on this machine, or with a ledger at a PostgreSQL URL (see `open_ledger`) on any that sees `out`.
    Finished shards are verified by digest and not done again. draft: decode faster, after a sample of the input has
    shown that the classes stay (see `check_draft`, which raises CheckFailed where they do not). An unreadable image is
    a row whose error says why; with `strict` it raises CheckFailed naming it, as does a bundle without a passing
    certificate unless `allow_uncertified`. Raises InputError when `source` holds no image, when `out` cannot be written
    or holds the predictions of something else (`overwrite` removes them), or when the input was changed after it was
    finished; EnvironmentMissing without pyarrow, when the ledger stays away, or the disk full for `patience_seconds`.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise missing_package("pyarrow", "serve")
    numbers = {"batch": batch_size, "top-k": top_k, "shard size": shard_size}
    threads = {"read threads": read_threads, "decode threads": decode_threads}
    for name, number in (numbers | threads).items():
        if number is not None and number < 1:
            raise InputError(f"{name} {number}: expected at least 1")
    certified = _is_certified(bundle, allow_uncertified)
    where = _absolute(str(source))
    plan: dict[str, Any] = {
        "input": where,
        "bundle": bundle_digest(bundle.path),
        "top_k": top_k,
        "logits": logits,
        "shard_size": shard_size,
        "image_column": image_column,
        "embeddings": embeddings,
        "draft": draft,
    }

    def measure(inventory: Inventory, listing: Path) -> dict[str, Any]:
        if not draft:
            return {}
        model = load_session(bundle) if isinstance(session, Executor) else session
        checked = check_draft(bundle, model, inventory, listing, image_column, batch_size=batch_size)
        log(f"predict: --draft changes the class of {checked.flips} of {checked.images} sampled images", quiet=quiet)
        return {"draft": checked.model_dump(mode="json")}

    patience = Patience(out, patience_seconds)
    place = {"url": ledger_url, "run_name": run_name}
    with (
        sigterm_interrupts(),
        open_ledger(out, patience, **place, lease_seconds=lease_seconds, overwrite=overwrite) as ledger,
    ):
        base, listing, measured = join_plan(ledger, out, plan, patience, measure)
        if not _has_work(ledger, out, quiet=quiet):
            _refuse_other_listing(ledger, where, listing, shard_size, patience)
        _refuse_errors(ledger, out, strict=strict)
        job = Job(
            out=out,
            listing=listing,
            base=base,
            labels=bundle.manifest.labels,
            preprocessing=bundle.manifest.preprocessing,
            batch_size=batch_size,
            top_k=top_k,
            logits=logits,
            embeddings=embeddings,
            draft=draft,
            image_column=image_column,
            strict=strict,
            read_threads=read_threads or (REMOTE_READERS if is_url(where) else LOCAL_READERS),
            decode_threads=decode_threads or _usable_cores(),
            has_lists=ledger.has_lists(),
        )
        totals = ledger.totals()
        # Where the images are not counted beforehand, the shards are.
        total = totals.shards if totals.expected is None else totals.expected
        executor = session if isinstance(session, Executor) else Local(session)
        with progress("predict", total, quiet=quiet) as bar:
            performance = executor.execute(job, ledger, patience, bar)
        _refuse_errors(ledger, out, strict=strict)
        remove_leftovers(out)
        if not performance.images and (out / SUMMARY).exists():  # of those who did the work
            return read_record(out / SUMMARY, PredictionSummary)
        summary = summarize(ledger, bundle, where, performance, certified=certified, draft=measured.get("draft"))
        Patience(out, patience_seconds).retry(lambda: write_json(out / SUMMARY, summary))
        return summary


def _is_certified(bundle: Bundle, allow_uncertified: bool) -> bool:
    try:
        bundle.require_certificate()
    except CheckFailed:
        if not allow_uncertified:
            raise
        return False
    return True


def _absolute(source: str) -> str:
    """The same for every process, wherever it was started."""
    return source if is_url(source) else os.path.abspath(source)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_work(ledger: Ledger, out: Path, *, quiet: bool) -> bool:
    """Whether there is work: shards that are not done, or whose output is not what was written."""
    wrong = ledger.verify(lambda shard: part_path(out, shard))
    if wrong:
        (out / SUMMARY).unlink(missing_ok=True)
        log(f"predict: {len(wrong)} finished files were changed or are gone, and are made again", quiet=quiet)
    totals = ledger.totals()
    if totals.done:
        log(f"predict: {totals.done} of {totals.shards} shards are done and verified", quiet=quiet)
    return totals.done < totals.shards


def _refuse_other_listing(ledger: Ledger, source: str, listing: Path, shard_size: int, patience: Patience) -> None:
    """Raise InputError if images came or went since the input was listed: what is finished is not all of it."""
    temporary = listing.with_name(f".again.{uuid.uuid4().hex}")  # of one process, on whatever machine
    try:
        digest = patience.retry(lambda: take_inventory(source, temporary, shard_size).digest)
    finally:
        temporary.unlink(missing_ok=True)
    if digest != ledger.digest():
        raise InputError(
            f"'{source}' is not what it was when it was predicted, images came or went: choose another folder, or "
            "pass --overwrite"
        )


def _refuse_errors(ledger: Ledger, out: Path, *, strict: bool) -> None:
    """Raise CheckFailed for the first unreadable image of the finished shards."""
    if not strict or (shard := ledger.first_with_errors()) is None:
        return
    import pyarrow.parquet as pq

    rows = pq.read_table(part_path(out, shard), columns=["path", "error"])
    refuse_unreadable(iter(rows["path"].to_pylist()), rows["error"].to_pylist())
