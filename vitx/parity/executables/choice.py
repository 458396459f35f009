"""`--runtime auto`: the runtimes that may run a bundle here, the fastest first."""

from collections.abc import Sequence

from vitx.core.bundle import WITNESS, Bundle
from vitx.core.certificate import Verdict
from vitx.core.console import log
from vitx.core.errors import VitxError
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.executables.listing import runtimes_for
from vitx.parity.executables.unlisted_embedding import load_unlisted_embedding
from vitx.parity.executables.verdict_cache import cached_verdicts
from vitx.runtimes import load_session
from vitx.runtimes.session import Device, Session, device_name, outputs_of

AUTO = "auto"
_DEFAULT = "onnxruntime"


def runtimes_by_speed(
    bundle: Bundle,
    runtime: str,
    *,
    device: Device = "auto",
    threads: int | None = None,
    outputs: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[str, ...]:
    """`runtime`, unless it is "auto": then the runtimes certified for this bundle and this machine, fastest first.

    Those that the certificate lists and this machine has are candidates. Each that was not yet judged here is loaded,
    judged by the witness set and timed at it, once; the verdicts and speeds are kept in the user's cache. A bundle
    without a witness set, without a certificate or with one candidate runs in ONNX Runtime. outputs: what it has to
    give beside logits, which is another executable with a speed of its own.
    """
    if runtime != AUTO:
        return (runtime,)
    certificate = bundle.certificate()
    if certificate is None or WITNESS not in bundle.manifest.files:
        return (_DEFAULT,)
    certified = [each.executable for each in certificate.executables if each.verdict != "fail"]
    listed = {each.runtime for each in certified if outputs_of(each).issuperset(outputs)}
    names = [name for name in runtimes_for(bundle, device) if _reported(name) in listed]
    if len(names) < 2:
        return tuple(names) or (_DEFAULT,)
    for name in names:
        if _known(bundle, name, outputs) is None:
            _judge(bundle, name, threads, outputs, quiet=quiet)
    passing = {name: _passing(bundle, name, outputs) for name in names}
    speeds = {name: verdict.images_per_second or 0.0 for name, verdict in passing.items() if verdict is not None}
    found = sorted(speeds, key=speeds.__getitem__, reverse=True)
    said = ", ".join(f"{name} {speeds[name]:.4g}" for name in found)
    log(f"vitx: '{bundle.manifest.name}' runs in {found[0] if found else _DEFAULT}; images/s: {said}", quiet=quiet)
    return tuple(found) or (_DEFAULT,)


def load_fastest(
    bundle: Bundle, runtime: str, *, device: str = "auto", threads: int | None = None, outputs: Sequence[str] = ()
) -> Session:
    """`load_session`, where "auto" is the fastest runtime certified here.

    A bundle that lists no outputs gives an embedding all the same: see `load_unlisted_embedding`.
    """
    chosen = device_name(device)
    if [*outputs] == ["embedding"] and not bundle.manifest.outputs:
        name = _DEFAULT if runtime == AUTO else runtime
        return load_unlisted_embedding(bundle, name, device=chosen, threads=threads)
    bundle.require_outputs(outputs)
    name = runtimes_by_speed(bundle, runtime, device=chosen, threads=threads, outputs=outputs)[0]
    return load_session(bundle, name, device=chosen, threads=threads, outputs=outputs)


def _judge(bundle: Bundle, name: str, threads: int | None, outputs: Sequence[str], *, quiet: bool) -> None:
    try:
        with load_session(bundle, name, threads=threads, outputs=outputs) as session:
            require_verdict(bundle, session, quiet=quiet)
    except VitxError as reason:
        log(f"vitx: {name} is left out: {reason}", quiet=quiet)


def _reported(name: str) -> str:
    """What `Session.describe` calls a runtime: ONNX Runtime is one, on a CPU and on a GPU."""
    return "onnxruntime" if name.startswith("onnxruntime") else name


def _known(bundle: Bundle, name: str, outputs: Sequence[str]) -> Verdict | None:
    on_gpu = name == "onnxruntime-cuda"
    alike = [
        verdict
        for verdict in cached_verdicts(bundle)
        if verdict.executable.runtime == _reported(name)
        and ("CUDA" in verdict.executable.provider) == on_gpu
        and outputs_of(verdict.executable) == {*outputs}
        and verdict.images_per_second is not None
    ]
    return alike[-1] if alike else None


def _passing(bundle: Bundle, name: str, outputs: Sequence[str]) -> Verdict | None:
    verdict = _known(bundle, name, outputs)
    return verdict if verdict is not None and verdict.verdict == "pass" else None
