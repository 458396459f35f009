"""`vitx predict`: what runs the bundle, and the prediction with it."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.machine import usable_cores
from vitx.parity.executables.choice import load_fastest
from vitx.parity.signature import require_signature
from vitx.predict.job import is_certified, predict
from vitx.predict.options import PredictOptions
from vitx.predict.pipeline.executor import Executor
from vitx.predict.summary import PredictionSummary
from vitx.runtimes.instances import load_instances, sessions_on
from vitx.runtimes.session import Session


def launch(
    path: Path, source: str, out: str | Path, options: PredictOptions, *, quiet: bool = False
) -> PredictionSummary:
    """`predict` with the bundle at `path`, in this process or on the Ray cluster that the options name."""
    bundle = Bundle.open(path)
    if options.require_signature is not None:
        require_signature(bundle.path, options.require_signature)
    with _executor(bundle, options, quiet=quiet) as executor:
        return predict(bundle, executor, source, out, options, quiet=quiet)


def _executor(bundle: Bundle, options: PredictOptions, *, quiet: bool) -> AbstractContextManager[Session | Executor]:
    if options.ray is not None:
        if options.shard is not None:
            raise InputError("--ray shares the work among its nodes: pass --shard without it, or leave --shard out")
        from vitx.predict.ray.pool import RayPool

        return nullcontext(RayPool(bundle, options))
    if options.ray_actors is not None:
        given = ":".join(map(str, sorted(set(options.ray_actors))))
        raise InputError(f"--ray-actors {given} is for --ray: pass that too, or leave it out")
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
