"""Load a bundle into a runtime, by the runtime's name."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.core.files import is_utf8
from vitx.core.options import MAX_THREADS, device_name
from vitx.runtimes.requirements import RUNTIMES, find, require
from vitx.runtimes.session import Session


def load_session(
    bundle: Bundle,
    runtime: str = "onnxruntime",
    *,
    device: str = "auto",
    threads: int | None = None,
    engine_cache: Path | None = None,
    outputs: Sequence[str] = (),
) -> Session:
    """Load a bundle into a runtime, by its name in `RUNTIMES`.

    threads: of one session, on a CPU. engine_cache: the folder in which onnxruntime-tensorrt keeps its engines, to
    load faster the next time; without it they are deleted when the session is closed. outputs: what the session's
    `infer_outputs` gives beside logits, of those that the bundle has; the graph computes no other.

    Raises InputError for an unknown runtime or device, for another number of threads than 1 to 1024, for a runtime that
    does not run bundles, for a path that is not UTF-8, for outputs that the bundle or a plan lacks, and when the bundle
    lacks the file that the runtime loads; EnvironmentMissing when the device or a package is missing; CheckFailed for a
    plan of another GPU, version or graph.
    """
    if not is_utf8(str(bundle.path)):
        raise InputError(f"the runtimes take no path that is not UTF-8, as '{bundle.path}': rename that folder")
    chosen = device_name(device)
    if threads is not None:
        # 1.0 and True are equal to 1, and the runtimes' bindings take no float.
        if isinstance(threads, bool) or not isinstance(threads, Integral) or not 1 <= threads <= MAX_THREADS:
            raise InputError(f"threads={threads}: expected a whole number from 1 to {MAX_THREADS}, or None")
        threads = int(threads)
    known = find(runtime)
    if known.source == "run":
        raise InputError(
            f"the runtime {runtime} runs a run's checkpoint and not a bundle: load the run, or choose "
            f"{', '.join(name for name, other in RUNTIMES.items() if other.source == 'bundle')}"
        )
    if known.device != "auto" and chosen not in ("auto", known.device):
        raise InputError(f"the runtime {runtime} runs on {known.device}, and device {chosen} was asked for: drop one")
    bundle.require_outputs(outputs)
    if outputs and not known.outputs:
        raise InputError(
            f"the runtime {runtime} gives logits alone, what it runs is built for them: {', '.join(outputs)} "
            f"{'needs' if len(outputs) == 1 else 'need'} onnxruntime or openvino"
        )
    require(runtime)
    match runtime:
        case "openvino" | "openvino-bf16":
            from vitx.runtimes.openvino import OpenVinoSession

            return OpenVinoSession(bundle, threads=threads, bf16=runtime == "openvino-bf16", outputs=outputs)
        case "tensorrt" | "tensorrt-rtx":
            from vitx.runtimes.tensorrt import TensorRTSession

            return TensorRTSession(bundle, runtime)
    from vitx.runtimes.onnxruntime import OnnxRuntimeSession

    if runtime == "onnxruntime-int8":
        return OnnxRuntimeSession(bundle, device="cpu", threads=threads, int8=True)
    if runtime == "onnxruntime-tensorrt":
        return OnnxRuntimeSession(bundle, device="cuda", threads=threads, tensorrt=True, engine_cache=engine_cache)
    where = chosen if known.device == "auto" else known.device
    return OnnxRuntimeSession(bundle, device=where, threads=threads, outputs=outputs)
