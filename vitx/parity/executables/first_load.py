"""Whether a loaded executable may run: a verdict on exactly it, found on this machine or written in the certificate."""

from pathlib import Path

from vitx.core.bundle import CERTIFICATE, MANIFEST, WITNESS, Bundle
from vitx.core.certificate import Certificate, Executable, Verdict
from vitx.core.console import counted, log
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import require_seal
from vitx.parity.certification import check_graph
from vitx.parity.executables.judgement import judge_executable
from vitx.parity.executables.layers import first_divergence
from vitx.parity.executables.listing import output_sets
from vitx.parity.executables.verdict_cache import cached_verdict, keep_verdict
from vitx.parity.executables.witness import Witness, read_witness
from vitx.parity.loaded_model import DEFAULT_RUNTIME
from vitx.parity.options import ParityOptions
from vitx.runtimes import load_session
from vitx.runtimes.session import Session, executable_of, outputs_of


def require_verdict(bundle: Bundle, session: Session, *, quiet: bool = False) -> Verdict:
    """Return the passing verdict on what `session`, loaded from `bundle`, is; raise CheckFailed without one.

    With a witness set the certificate's "pass" is not taken: the set is run, once on this machine, and the verdict kept
    in the user's cache. Its "fail" is, where the whole evaluation split was run. Without a set the certificate must
    have a passing verdict on exactly this executable: the same files, runtime, version, provider and instruction sets;
    no further output is certified then.
    """
    certificate = bundle.require_certificate()
    executable = executable_of(bundle.subject(), session)
    if WITNESS not in bundle.manifest.files:
        return _certified(bundle, certificate, executable)
    found = certificate.verdict_of(executable)
    if found is not None and found.failed_on_split:
        _require_pass(bundle, found)
    known = cached_verdict(bundle, executable)
    if known is not None and known.max_flip_rate <= certificate.max_flip_rate:  # `vitx parity` may have asked for less
        return known
    witness = read_witness(bundle)
    assert witness is not None
    log(f"vitx: first load here: {counted(len(witness), 'witness image')} through {executable}", quiet=quiet)
    verdict = _judged(bundle, witness, session, certificate.max_flip_rate, quiet=quiet)
    require_passing(bundle.path, verdict)
    return verdict


def certify_here(path: Path, options: ParityOptions, *, quiet: bool = False) -> list[Verdict]:
    """`vitx parity BUNDLE`: run the witness set through `options.runtime`, and keep a passing verdict on this machine.

    One verdict, and of a bundle with further outputs a second one on the executable that gives them too.

    Raises InputError for a path that is no bundle, a bundle without a witness set, and a set that is too small for a
    `--max-flip-rate` that was given; CheckFailed for a certificate that was edited, unless a rate was given.
    """
    if path.exists() and not (path / MANIFEST).is_file():
        raise InputError(f"'{path}' is no bundle, it has no {MANIFEST}: expected one, or a reference and a candidate")
    bundle = Bundle.open(path)
    witness = read_witness(bundle)
    if witness is None:
        raise InputError(
            f"'{path}' has no witness set: compare it with its run, `vitx parity RUN {path}`, or export it with one"
        )
    asked = "max_flip_rate" in options.model_fields_set
    rate, certificate = options.max_flip_rate, None if asked else bundle.certificate()
    if certificate is not None:
        remedy = "run `vitx parity RUN BUNDLE` again, or give --max-flip-rate"
        rate = require_seal(bundle.path / CERTIFICATE, certificate, remedy=remedy).max_flip_rate
    runtime = options.runtime or DEFAULT_RUNTIME
    found = []
    for outputs in output_sets(bundle, runtime):
        with load_session(bundle, runtime, device=options.device, outputs=outputs) as session:
            known = certificate.verdict_of(executable_of(bundle.subject(), session)) if certificate else None
            if known is not None and known.failed_on_split:  # every load refuses it, whatever the witness set says
                found.append(known)
            else:
                found.append(_judged(bundle, witness, session, rate, must_prove=asked, quiet=quiet))
    return found


def require_passing(path: Path | str, verdict: Verdict) -> None:
    """Raise CheckFailed with the reasons unless the verdict is pass."""
    if verdict.verdict != "pass":
        reasons = "; ".join(verdict.reasons)
        raise CheckFailed(f"'{path}' is not the checkpoint's equal in {verdict.executable}: {reasons}")


def _judged(
    bundle: Bundle, witness: Witness, session: Session, rate: float, *, must_prove: bool = False, quiet: bool
) -> Verdict:
    if bundle.manifest.precision != "fp32":  # the narrowest limit, whatever the graph computes in
        check_graph(bundle, quiet=quiet)
    verdict = judge_executable(bundle, witness, session, rate, must_prove=must_prove, quiet=quiet)
    keep_verdict(bundle, verdict)
    if verdict.verdict == "pass":
        return verdict
    where = first_divergence(bundle, session, witness.pixels)
    return verdict.model_copy(update={"reasons": (*verdict.reasons, *([where] if where else []))})


def _certified(bundle: Bundle, certificate: Certificate, executable: Executable) -> Verdict:
    if outputs := outputs_of(executable):
        raise CheckFailed(
            f"'{bundle.path}' has no witness set, which alone certifies {', '.join(sorted(outputs))}: export it again, "
            "with one (--witness)"
        )
    remedy = (
        f"compare it with the run here: `vitx parity RUN BUNDLE --runtime {executable.runtime}`, or export the bundle "
        "again, with a witness set (--witness)"
    )
    found = certificate.verdict_of(executable)
    if found is None:
        raise CheckFailed(f"no verdict on {executable} of '{bundle.path}'{_nearest(certificate, executable)}: {remedy}")
    _require_pass(bundle, found)
    return found


def _require_pass(bundle: Bundle, found: Verdict) -> None:
    if found.verdict != "pass":
        reasons = "; ".join(found.reasons)
        raise CheckFailed(
            f"the certificate of '{bundle.path}' says {found.verdict} of {found.executable}: {reasons}; "
            f"take another --runtime, or run `vitx parity RUN BUNDLE --runtime {found.executable.runtime}` again"
        )


def _nearest(certificate: Certificate, executable: Executable) -> str:
    """How the certified executable of this runtime differs, if there is one: a new version is named, not trusted."""
    alike = [each.executable for each in certificate.executables if each.executable.runtime == executable.runtime]
    if not alike:
        return ""
    before, now = alike[-1].model_dump(), executable.model_dump()
    changed = [
        f"{name} {before[name] or 'none'}, here {now[name] or 'none'}" if name != "artefacts" else "other files"
        for name in now
        if before[name] != now[name]
    ]
    return f" (certified was: {'; '.join(changed)})"
