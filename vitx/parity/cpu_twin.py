"""The session that stands for a bundle which this machine cannot run as its graph says."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitx.core.bundle import Bundle
    from vitx.runtimes.session import Session


def cpu_stand_in(bundle: "Bundle", device: str) -> "Session | None":
    """On a CPU a half-precision graph is judged by its float32 twin, which rounds where the graph says; else None.

    ONNX Runtime's CPU computes float16 nodes in float32 and leaves the rounding out, and has no bfloat16 products.
    """
    from vitx.runtimes.cuda import cuda_device_count

    if bundle.manifest.precision not in ("fp16", "bf16") or device == "cuda":
        return None
    if device == "auto" and cuda_device_count():
        return None
    import tempfile
    from pathlib import Path

    import onnx

    from vitx.export.precision.half import cpu_twin
    from vitx.runtimes.onnxruntime import OnnxRuntimeSession

    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "float32 twin.onnx"
        onnx.save(cpu_twin(onnx.load(str(bundle.model_path))), str(twin))
        return OnnxRuntimeSession(bundle, device="cpu", graph=twin)
