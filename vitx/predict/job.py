"""`vitx predict`: create the run or go on with it, verify what is done, work until all is done, summarise."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle, refuse_in_bundle
from vitx.core.console import counted, log, progress
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import cache_folder, is_made_of_url, is_utf8, refuse_url, sha256_bytes, sha256_file
from vitx.core.machine import usable_cores
from vitx.core.preprocess import ignore_image_warnings
from vitx.parity.executables.choice import load_fastest
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.signature import require_signature
from vitx.predict.increment import extend_run
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.inputs.stores import absolute, canonical, is_url, shown, within
from vitx.predict.inputs.tables import TableColumns, refuse_equal_keys
from vitx.predict.ledger import Ledger
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.mirror import Mirror
from vitx.predict.outputs.parts import PREDICTIONS, output_schema, part_path, read_column, warm_up
from vitx.predict.pipeline.disk import full_disk_explained
from vitx.predict.pipeline.draft import check_draft
from vitx.predict.pipeline.executor import Executor, Output, execute_here
from vitx.predict.pipeline.worker import Job, refuse_unreadable
from vitx.predict.state import STATE, Run, open_ledger, open_run
from vitx.predict.summary import OUTPUT_NAMES, Increment, PredictionSummary, summarize, summary_name, write_summary
from vitx.runtimes import load_session
from vitx.runtimes.instances import load_instances, sessions_on
from vitx.runtimes.session import Session

# Files read at once. An object store answers after tens of milliseconds, so many requests are kept in flight.
LOCAL_READERS, REMOTE_READERS = 2, 16


def launch(
    path: Path, source: str, out: str | Path, options: PredictOptions, *, quiet: bool = False
) -> PredictionSummary:
    """`predict` with the bundle at `path`, in this process or on the Ray cluster that the options name."""
    if not (path / MANIFEST).is_file() and (Path(source) / MANIFEST).is_file():
        raise InputError(f"'{source}' is the bundle, and '{path}' is none: give the bundle first, then the input")
    bundle = Bundle.open(path)
    if options.require_signature is not None:
        require_signature(bundle.path, options.require_signature)
    with _executor(bundle, options, quiet=quiet) as executor:
        return predict(bundle, executor, source, out, options, quiet=quiet)


def predict(
    bundle: Bundle,
    session: Session | Executor,
    source: str | Path,
    out: str | Path,
    options: PredictOptions | None = None,
    *,
    quiet: bool = False,
) -> PredictionSummary:
    """Classify every image of `source` (see `take_inventory`); write predictions.parquet/ and summary.json to `out`.

    out: a folder, or the URL of an object store; then the folder is `state`, see `Mirror`. Of `options` only what runs
    the bundle (ray, ray_actors, threads, device, runtime) is not read. Called again, it goes on with what is left.
    Pillow's warnings and logs are off in this process from then on (`ignore_image_warnings`).

    Raises CheckFailed for a bundle without a passing certificate unless `allow_uncertified`, with `strict` for an
    unreadable image, and if `check_draft` does; InputError if `source` has no image, if `out` cannot be written, if
    another process writes to it, if it has the predictions of another run (`overwrite` removes them), or if the input
    was changed after it was finished; EnvironmentMissing if another program locks the ledger, if the disk is full, or
    if the store does not answer.
    """
    options = options or PredictOptions()
    for what, given in (("input", source), ("output", out)):
        if given == "" or str(given).endswith("://"):  # as a path, or by file://, it would be the working folder
            raise InputError(f"the {what} is '{given}': expected a path or a URL; is a variable not set?")
    ignore_image_warnings()  # as an error (python -W error), the warning about one image would end the run
    certified = is_certified(bundle, session, options.allow_uncertified, quiet=quiet)
    url, out = _output(out, options)
    mirror = None if url is None else Mirror(url, out, options.share)
    is_output = within([canonical(place) for place in (str(out), url) if place is not None], OUTPUT_NAMES)
    where = absolute(str(source))  # the next call may be in another folder
    settings: dict[str, Any] = {
        "input": where,
        "bundle": sha256_file(bundle.path / MANIFEST),
        **options.model_dump(include={"top_k", "logits", "embeddings", "attention", "draft"}),
        **options.model_dump(mode="json", include={"shard_size", "image_column", "key", "columns", "incremental"}),
    }
    taken = tuple(output_schema(options.lists, versions=options.incremental).names)
    columns = TableColumns(options.image_column, options.key, options.columns, taken)
    summary_path = out / summary_name(options.share)
    with sigterm_interrupts(), full_disk_explained(out), open_ledger(out, options) as ledger:
        take = partial(take_inventory, where, ledger, options.shard_size, columns, is_output=is_output)
        measure = partial(_measure_draft, bundle, session, options, columns, ledger, quiet=quiet)
        run = open_run(ledger, out, settings, take, measure)
        has_work = _has_work(ledger, out, summary_path, options, quiet=quiet)
        copied = replace(columns, schema=run.schema)
        if options.retry_errors and options.key is not None:  # files that could not be read when they were listed
            refuse_equal_keys(run.base, (claim.shard for claim in ledger.shards()), options.key)
        increment: Increment | None = None
        if options.incremental:
            increment = extend_run(ledger, run, where, copied, options.shard_size, summary_path, is_output=is_output)
            log(f"predict: {increment}", quiet=quiet)
        elif not has_work and take(None).digest != run.digest:
            raise InputError(
                f"images were added to '{shown(where)}' or removed since it was predicted: choose another folder, or "
                f"{options.share.anew}"
            )
        for number, _, record in ledger.records() if options.strict else ():
            if record.errors:
                refuse_unreadable(read_column(out, number, "path"), read_column(out, number, "error"))
        totals = ledger.totals()
        # Where the images are not counted beforehand, the shards are.
        total = totals.shards if totals.expected is None else totals.expected
        if mirror is not None:
            mirror.begin(ledger, run.id, summary_path, overwrite=options.overwrite)
        job = _job(bundle, ledger, run, where, out, copied, options, certified=certified)
        warm_up()
        execute = partial(execute_here, session) if isinstance(session, Session) else session
        with progress("predict", total, quiet=quiet) as bar:
            performance = execute(job, ledger, Output(ledger, mirror, bar))
        found = summarize(ledger, bundle, performance, certified, options.shard, increment)
        summary = write_summary(summary_path, found)
        if mirror is not None:
            mirror.end(ledger, summary_path)
        return summary


def _measure_draft(
    bundle: Bundle,
    session: Session | Executor,
    options: PredictOptions,
    columns: TableColumns,
    ledger: Ledger,
    inventory: Inventory,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """With --draft what it does to a sample of the input, see `check_draft`; the ledger keeps it."""
    if not options.draft or not inventory.shards:
        return {}
    with nullcontext(session) if isinstance(session, Session) else load_session(bundle) as model:
        checked = check_draft(bundle, model, inventory, ledger.path, columns, batch_size=options.batch_size)
    log(f"predict: --draft changes the class of {checked.flips} of {checked.images} sampled images", quiet=quiet)
    return {"draft": checked.model_dump(mode="json")}


def _job(
    bundle: Bundle,
    ledger: Ledger,
    run: Run,
    where: str,
    out: Path,
    columns: TableColumns,
    options: PredictOptions,
    *,
    certified: bool,
) -> Job:
    described = ledger.description()
    footer = {"vitx.bundle": bundle.manifest.name, "vitx.bundle_sha256": described["bundle"]}
    if (certificate := bundle.path / CERTIFICATE).is_file():  # a bundle without one has been allowed
        footer["vitx.certificate_sha256"] = sha256_file(certificate)
    return Job(
        out=out,
        listing=ledger.path,
        base=run.base,
        labels=bundle.manifest.labels,
        preprocessing=bundle.manifest.preprocessing,
        options=options,
        columns=columns,
        read_threads=options.read_threads or (REMOTE_READERS if is_url(where) else LOCAL_READERS),
        decode_threads=options.decode_threads or usable_cores(),
        unlisted=ledger.unlisted(created=run.created) if options.incremental else frozenset(),
        has_single_files=any(ledger.shards("kind = 'images'")),
        source=described["source"],
        certified=certified,
        footer=footer,
    )


def _executor(bundle: Bundle, options: PredictOptions, *, quiet: bool) -> AbstractContextManager[Session | Executor]:
    if options.ray is not None:
        if options.shard is not None:
            raise InputError("--ray shares the work among its nodes: pass --shard without it, or leave --shard out")
        from vitx.predict.ray import RayPool

        return nullcontext(RayPool(bundle, options))
    if options.ray_actors is not None:
        given = ":".join(map(str, sorted(set(options.ray_actors))))
        raise InputError(f"--ray-actors {given} is for --ray: pass that too, or leave it out")
    if not options.allow_uncertified:
        bundle.require_certificate()  # before a runtime opens a file: a plan may hold code
    load = partial(load_fastest, bundle, options.runtime, device=options.device, outputs=options.outputs)
    cores = usable_cores()
    first = load(threads=options.threads, quiet=quiet)
    if options.threads is not None or cores == 1 or "cpu" not in str(first.describe()["provider"]).lower():
        return first
    # On a CPU sessions share the cores: the threads of a single one would spin while the decoders wait.
    with first:  # judged here if it has to be: one thread would take a core's time for it
        is_certified(bundle, first, options.allow_uncertified, quiet=quiet)
    threads = cores // sessions_on(cores)
    return load_instances(lambda: load(threads=threads, quiet=True), sessions_on(cores), threads)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM, which schedulers send, raise KeyboardInterrupt within the block: temporary files are removed.

    Nothing changes if the program handles SIGTERM itself, as the command line does, or outside the main thread, where
    Python sets no handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _output(out: str | Path, options: PredictOptions) -> tuple[str | None, Path]:
    """The URL of an object store, or None, and the local folder; InputError for options that exclude each other."""
    for name, given, why in (
        ("--shard", options.shard, "what is new would change which job has which image"),
        ("--draft", options.draft, "only the first input would be sampled"),
    ):
        if options.incremental and given:
            raise InputError(f"--incremental with {name}: {why}; leave out one of the two")
    if isinstance(out, str) and is_url(out):
        named = sha256_bytes(out.rstrip("/").encode("utf-8", "surrogateescape"))[:16]
        state = options.state or cache_folder() / "predict" / named
        refuse_url(state)
        return out, _utf8(state.absolute())  # a relative path with a colon is a URL to pyarrow
    if is_made_of_url(out):
        raise InputError(f"--out '{out}': expected a folder or a URL; in Python a URL is a text, not a Path")
    if options.state is not None:
        raise InputError(f"--state {options.state} is for a URL: '{out}' has its ledger within")
    if Path(out).name == PREDICTIONS and (Path(out).parent / STATE).is_dir():
        raise InputError(f"--out '{out}' is the table of a run: pass its folder, '{Path(out).parent}'")
    refuse_in_bundle(Path(out))
    return None, _utf8(Path(out).absolute())


def _utf8(out: Path) -> Path:
    """Before the listing, which may take an hour: pyarrow writes no file where a path is of another encoding."""
    if not is_utf8(str(out)):
        raise InputError(f"the output '{out}' is not UTF-8, and Parquet files cannot be written there: choose another")
    return out


def is_certified(bundle: Bundle, session: Session | Executor, allow_uncertified: bool, *, quiet: bool) -> bool:
    """Whether the bundle is certified, and what runs it; actors elsewhere check that when they load it."""
    try:
        bundle.require_certificate()
        if isinstance(session, Session):
            require_verdict(bundle, session, quiet=quiet)
    except CheckFailed:
        if not allow_uncertified:
            raise
        return False
    return True


def _has_work(ledger: Ledger, out: Path, summary: Path, options: PredictOptions, *, quiet: bool) -> bool:
    """Whether there are shards to do, after those whose file was changed, removed or is to be mended were set free."""
    wrong = ledger.verify(lambda shard: part_path(out, shard))
    if wrong:
        summary.unlink(missing_ok=True)
        again = counted(len(wrong), "finished file")
        log(f"predict: making {again} again, changed or removed since", quiet=quiet)
    if options.retry_errors and (errors := ledger.totals().errors):
        summary.unlink(missing_ok=True)
        tried = f"{counted(errors, 'unreadable image')} in {counted(ledger.retry_errors(), 'file')}"
        log(f"predict: trying {tried} again", quiet=quiet)
    totals = ledger.totals()
    if totals.done:
        log(f"predict: {totals.done} of {counted(totals.shards, 'shard')} done and verified", quiet=quiet)
    return totals.done < totals.shards
