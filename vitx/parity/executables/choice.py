"""`--runtime auto`: the runtimes that may run a bundle here, the fastest first."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vitx.core.bundle import WITNESS, Bundle, timestamp
from vitx.core.certificate import Verdict
from vitx.core.console import log
from vitx.core.errors import VitxError
from vitx.core.options import device_name
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.executables.listing import runtimes_for
from vitx.parity.executables.refuted import is_of_here
from vitx.parity.executables.unlisted_embedding import load_unlisted_embedding
from vitx.parity.executables.verdict_cache import cached_verdicts, keep_verdict
from vitx.parity.loaded_model import DEFAULT_RUNTIME
from vitx.runtimes import load_session
from vitx.runtimes.requirements import reported_name
from vitx.runtimes.session import Device, Session, executable_of, image_shape, outputs_of

AUTO = "auto"
# What a candidate is timed with: a batch to warm up and two that count, together an eighth of what its judgement takes.
_TIMED_IMAGES, _TIMED_BATCHES = 4, 2


def runtimes_by_speed(
    bundle: Bundle,
    runtime: str,
    *,
    device: Device = "auto",
    threads: int | None = None,
    outputs: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[str, ...]:
    """`runtime`, unless it is "auto": then the fastest runtime certified for this bundle here, and the others by speed.

    Those that the certificate lists and this machine has are candidates. Each that is not known here is loaded and
    timed; then the fastest is judged by the witness set, and the next one if it fails. So the set, most of a first
    load's time, is run once and not for each candidate; the others are judged when they are asked for by name. Speeds
    and verdicts are kept in the user's cache. A bundle without a witness set, without a certificate or with one
    candidate runs in ONNX Runtime. outputs: what it has to give beside logits, which is another executable with a speed
    of its own.
    """
    if runtime != AUTO:
        return (runtime,)
    certificate = bundle.certificate()
    if certificate is None or WITNESS not in bundle.manifest.files:
        return (DEFAULT_RUNTIME,)
    certified = [each.executable for each in certificate.executables if each.verdict != "fail"]
    listed = {each.runtime for each in certified if outputs_of(each).issuperset(outputs)}
    names = [name for name in runtimes_for(bundle, device) if reported_name(name) in listed]
    if len(names) < 2:
        return tuple(names) or (DEFAULT_RUNTIME,)
    for name in names:
        if _known(bundle, name, outputs) is None:
            _loaded(bundle, name, threads, outputs, _keep_speed, quiet=quiet)
    found = _by_speed(bundle, names, outputs)
    while found and found[0][1].verdict != "pass":
        name, timed = found.pop(0)
        _loaded(bundle, name, threads, outputs, partial(_judge, timed, quiet=quiet), quiet=quiet)
        verdict = _known(bundle, name, outputs)
        if verdict is not None and verdict.verdict == "pass":
            found.insert(0, (name, verdict))
    said = ", ".join(
        f"{name} {verdict.images_per_second:.4g}{'' if verdict.verdict == 'pass' else ' (not judged here)'}"
        for name, verdict in found
    )
    ordered = tuple(name for name, _ in found) or (DEFAULT_RUNTIME,)
    log(f"vitx: '{bundle.manifest.name}' runs in {ordered[0]}; images/s: {said}", quiet=quiet)
    return ordered


def load_fastest(
    bundle: Bundle,
    runtime: str,
    *,
    device: str = "auto",
    threads: int | None = None,
    outputs: Sequence[str] = (),
    quiet: bool = False,
) -> Session:
    """`load_session`, where "auto" is the fastest runtime certified here.

    A bundle that lists no outputs gives an embedding all the same: see `load_unlisted_embedding`.
    """
    chosen = device_name(device)
    if [*outputs] == ["embedding"] and not bundle.manifest.outputs:
        name = DEFAULT_RUNTIME if runtime == AUTO else runtime
        return load_unlisted_embedding(bundle, name, device=chosen, threads=threads)
    bundle.require_outputs(outputs)
    name = runtimes_by_speed(bundle, runtime, device=chosen, threads=threads, outputs=outputs, quiet=quiet)[0]
    return load_session(bundle, name, device=chosen, threads=threads, outputs=outputs)


def _loaded(
    bundle: Bundle,
    name: str,
    threads: int | None,
    outputs: Sequence[str],
    use: Callable[[Bundle, Session], None],
    *,
    quiet: bool,
) -> None:
    """`use` the bundle loaded in a runtime; one that cannot be loaded or used is left out, and the log says why."""
    try:
        with load_session(bundle, name, threads=threads, outputs=outputs) as session:
            use(bundle, session)
    except VitxError as reason:
        log(f"vitx: {name} is left out: {reason}", quiet=quiet)


def _keep_speed(bundle: Bundle, session: Session) -> None:
    """Time batches of noise, and keep the speed as that of an executable whose witness set was not run."""
    pixels = np.random.default_rng(0).integers(0, 256, (_TIMED_IMAGES, *image_shape(bundle)), dtype=np.uint8)
    seconds = []
    for _ in range(1 + _TIMED_BATCHES):
        begun = time.perf_counter()
        session.infer_outputs(pixels)
        seconds.append(time.perf_counter() - begun)
    speed = _TIMED_IMAGES / min(seconds[1:])  # the first batch of a shape compiles and allocates
    executable = executable_of(bundle.subject(), session)
    timed = Verdict(
        executable=executable,
        verdict="not run",
        reasons=("timed, and not judged: a faster one passes",),
        evidence="none",
        images_per_second=speed,
        created=timestamp(),
    )
    keep_verdict(bundle, timed)


def _judge(timed: Verdict, bundle: Bundle, session: Session, *, quiet: bool) -> None:
    """Judge what was `timed`. Its speed stays the one that it was chosen by, so that the next start chooses alike."""
    verdict = require_verdict(bundle, session, quiet=quiet)
    keep_verdict(bundle, verdict.model_copy(update={"images_per_second": timed.images_per_second}))


def _known(bundle: Bundle, name: str, outputs: Sequence[str]) -> Verdict | None:
    on_gpu = name == "onnxruntime-cuda"
    alike = [
        verdict
        for verdict in cached_verdicts(bundle)
        if verdict.executable.runtime == reported_name(name)
        and ("CUDA" in verdict.executable.provider) == on_gpu
        and outputs_of(verdict.executable) == {*outputs}
        and verdict.images_per_second is not None
        and is_of_here(verdict.executable)  # machines may share a cache, and versions follow one another
    ]
    return alike[-1] if alike else None


def _by_speed(bundle: Bundle, names: Sequence[str], outputs: Sequence[str]) -> list[tuple[str, Verdict]]:
    """The runtimes that were timed here and did not fail, the fastest first, with what is known of them."""
    known = [(name, verdict) for name in names if (verdict := _known(bundle, name, outputs)) is not None]
    kept = [(name, verdict) for name, verdict in known if verdict.verdict != "fail"]
    return sorted(kept, key=lambda each: each[1].images_per_second or 0.0, reverse=True)
