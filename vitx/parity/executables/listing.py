"""The executables of a bundle, and a verdict on each that can run here."""

from collections.abc import Sequence

from vitx.core.bundle import INT8_MODEL, Bundle, timestamp
from vitx.core.certificate import Executable, Verdict
from vitx.core.console import log
from vitx.core.errors import VitxError
from vitx.core.machine import local_gpus
from vitx.core.tensorrt_plan import PlanInfo
from vitx.parity.executables.judgement import judge_executable
from vitx.parity.executables.witness import Witness, read_witness
from vitx.runtimes import load_session
from vitx.runtimes.openvino import IR
from vitx.runtimes.plan_choice import plans_of
from vitx.runtimes.requirements import find, why_unusable
from vitx.runtimes.session import Device

INT8, BFLOAT16 = "onnxruntime-int8", "openvino-bf16"
# Run only where a bundle was exported for it (--for cpu): their logits are not those of float32.
CANDIDATES = (INT8, BFLOAT16)
RUNTIMES_BY_DEFAULT = ("onnxruntime-cpu", "onnxruntime-cuda", "openvino", "tensorrt", "tensorrt-rtx")


def runtimes_for(bundle: Bundle, device: Device = "auto") -> tuple[str, ...]:
    """The runtimes that could run this bundle on this machine, by name: its files are there and so is the runtime."""
    gpu = device != "cpu" and bool(local_gpus())
    names = ["onnxruntime-cuda", "tensorrt", "tensorrt-rtx"] if gpu else []
    if not (gpu and device == "cuda"):
        names += ["onnxruntime-cpu", INT8, "openvino", BFLOAT16]
    present: set[str] = {"onnxruntime-cuda", "onnxruntime-cpu"}
    present |= {plan.flavor for plan in plans_of(bundle).values()}
    needed = {INT8: INT8_MODEL, "openvino": IR, BFLOAT16: IR}
    present |= {name for name, file in needed.items() if file in bundle.manifest.files}
    return tuple(name for name in names if name in present and not why_unusable(name))


def verdicts_of_bundle(
    bundle: Bundle,
    rate: float,
    device: Device = "auto",
    runtimes: Sequence[str] = RUNTIMES_BY_DEFAULT,
    *,
    quiet: bool = False,
) -> list[Verdict]:
    """A verdict by the witness set on each of `runtimes` that can run here, and "not run" on each plan that cannot.

    Of a bundle with further outputs each runtime that gives them has a second one, with all of them. Without a witness
    set there is no evidence, and only plans are listed. One that fails is listed as such.
    """
    witness = read_witness(bundle)
    found = []
    if witness is not None:
        for name in (name for name in runtimes_for(bundle, device) if name in runtimes):
            for outputs in output_sets(bundle, name):
                verdict = _judged(bundle, witness, name, rate, outputs, quiet=quiet)
                if verdict is None:
                    break  # nor with further outputs
                log(f"parity: {verdict.verdict}: {verdict.executable}", quiet=quiet)
                found.append(verdict)
    further = [spec.name for spec in bundle.manifest.outputs]
    if further and not any(verdict.outputs for verdict in found):
        log(f"warning: nothing here gives {', '.join(further)} of this bundle: no certificate of them is written")
    run = {file for verdict in found for file in verdict.executable.artefacts}
    return found + [_not_run(bundle, name, plan) for name, plan in plans_of(bundle).items() if name not in run]


def output_sets(bundle: Bundle, runtime: str) -> tuple[tuple[str, ...], ...]:
    """With which outputs a runtime is judged: logits alone and, where bundle and runtime have them, all others too."""
    outputs = tuple(spec.name for spec in bundle.manifest.outputs)
    return ((), outputs) if outputs and find(runtime).outputs else ((),)


def _judged(
    bundle: Bundle, witness: Witness, runtime: str, rate: float, outputs: Sequence[str], *, quiet: bool
) -> Verdict | None:
    """None for a runtime that does not take this graph here: without a session there is nothing to speak of."""
    try:
        with load_session(bundle, runtime, outputs=outputs) as session:
            return judge_executable(bundle, witness, session, rate, quiet=quiet)
    except VitxError as error:
        log(f"parity: {runtime} does not run '{bundle.manifest.name}' here: {error}", quiet=quiet)
        return None


def merged(before: Sequence[Verdict], after: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """One verdict on each executable: the last one of `before` and then `after`.

    A fail on the whole split stays until the split is run again.
    """
    found: list[Verdict] = []
    for verdict in (*before, *after):
        stays = any(other.executable == verdict.executable and other.failed_on_split for other in found)
        if not stays or verdict.evidence == "evaluation split":
            found = [other for other in found if other.executable != verdict.executable] + [verdict]
    return tuple(found)


def _not_run(bundle: Bundle, plan: str, info: PlanInfo) -> Verdict:
    executable = Executable(
        runtime=info.flavor,
        version=info.version,
        provider="NVIDIA GPU",
        architecture=", ".join(info.architectures),
        precision=bundle.manifest.precision,
        artefacts={plan: bundle.manifest.files[plan].sha256},
    )
    reason = "built, not run: no GPU and TensorRT that load it were here"
    return Verdict(executable=executable, verdict="not run", reasons=(reason,), evidence="none", created=timestamp())
