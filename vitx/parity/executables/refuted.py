"""Executables that a certificate passes and that this machine refutes: their files are others, or do not run here."""

from collections.abc import Sequence

import numpy as np

from vitx.core.bundle import Bundle, timestamp
from vitx.core.certificate import Executable, Verdict
from vitx.core.errors import EnvironmentMissing, VitxError
from vitx.core.machine import (
    cpu_architecture,
    cuda_driver,
    describe_machine,
    installed_version,
    local_architectures,
)
from vitx.core.tensorrt_plan import LEAN_MODULE, MODULES, installed_library
from vitx.parity.executables.judgement import BATCH
from vitx.runtimes import load_session
from vitx.runtimes.session import Device, image_shape, outputs_of


def refuted(
    bundle: Bundle, certified: Sequence[Verdict], judged: Sequence[Verdict], device: Device = "auto"
) -> list[Verdict]:
    """A verdict "fail" on each executable that `certified` passes and this machine finds broken.

    That is one of other files than the bundle has, and one of exactly this machine that does not run here. judged: the
    verdicts found here, on what ran. Executables of other machines, or of runtimes that are not installed here in the
    certified version, are not looked at.
    """
    ran = [verdict.executable for verdict in judged if verdict.evidence != "none"]
    found = []
    for verdict in certified:
        executable = verdict.executable
        if verdict.verdict == "pass" and executable not in ran and (fault := _fault(bundle, executable, device)):
            about = {"machine": describe_machine(), "created": timestamp()}
            failed = {"verdict": "fail", "reasons": (fault,), "evidence": "none"}
            found.append(verdict.model_copy(update={**failed, **about}))
    return found


def _fault(bundle: Bundle, executable: Executable, device: Device) -> str:
    subject = bundle.subject()
    if others := [name for name, digest in executable.artefacts.items() if subject.get(name) != digest]:
        return f"certified with files that the bundle does not have: {', '.join(sorted(others))} of another sha256"
    if not is_of_here(executable, device):
        return ""
    outputs = tuple(spec.name for spec in bundle.manifest.outputs if spec.name in outputs_of(executable))
    try:
        with load_session(bundle, _runtime_name(executable), outputs=outputs) as session:
            for size in (1, BATCH):
                session.infer_outputs(np.zeros((size, *image_shape(bundle)), np.uint8))
    except EnvironmentMissing:  # no fault of the bundle
        return ""
    except VitxError as error:
        return f"certified on such a machine, and does not run on this one: {' '.join(str(error).split())}"
    return ""


def is_of_here(executable: Executable, device: Device = "auto") -> bool:
    """Whether it is one of this machine: its processor or GPU, and the version of its runtime that is installed."""
    on_cpu = "cpu" in executable.provider.lower()
    if device not in ("auto", "cpu" if on_cpu else "cuda") or executable.version not in _installed_versions(executable):
        return False
    if on_cpu:
        return executable.architecture == cpu_architecture()
    return (executable.architecture, executable.driver) == (", ".join(local_architectures()[:1]), cuda_driver())


def _installed_versions(executable: Executable) -> list[str]:
    """As `Session.describe` gives it; none of a runtime that is not installed, or would compile for minutes."""
    match executable.runtime:
        case "onnxruntime" | "onnxruntime-int8" if "tensorrt" not in executable.provider.lower():
            import onnxruntime

            return [str(onnxruntime.__version__)]
        case "openvino" | "openvino-bf16":
            return [(installed_version("openvino") or "").split("-")[0]]
        case "tensorrt" | "tensorrt-rtx":
            modules = (MODULES[executable.runtime], *((LEAN_MODULE,) if executable.runtime == "tensorrt" else ()))
            return [library.version for library in map(installed_library, modules) if library]
    return []


def _runtime_name(executable: Executable) -> str:
    """The name in RUNTIMES: ONNX Runtime calls itself the same on a CPU and on a GPU."""
    if executable.runtime != "onnxruntime":
        return executable.runtime
    return "onnxruntime-cpu" if "cpu" in executable.provider.lower() else "onnxruntime-cuda"
