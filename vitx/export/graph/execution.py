"""Running an ONNX graph on real images in ONNX Runtime on the CPU: its logits, or any tensors in it."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from vitx.core.errors import CheckFailed
from vitx.core.machine import require_onnxruntime, set_quantization, threads_here
from vitx.core.preprocess import UInt8Array

Float32Array = npt.NDArray[np.float32]

# Images per run while inner tensors are read: a DeiT-S at 224 px then hands out some 200 MB.
BATCH = 4


def run_with_outputs(
    graph: onnx.ModelProto, tensors: Sequence[str], images: UInt8Array, batch: int = BATCH, *, fused: bool = True
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the values of the named tensors, one dictionary a batch of images; memory is that of one batch."""
    watched = deepcopy(graph)
    # ONNX Runtime only hands out the graph's outputs, so the tensors become outputs; their types are inferred.
    present = {value.name for value in watched.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in present)
    session = open_session(watched, fused=fused)
    (source,) = session.get_inputs()
    for chunk in batches(images, batch):
        yield dict(zip(tensors, session.run(list(tensors), {source.name: chunk}), strict=True))


def logits_of(graph: onnx.ModelProto, images: UInt8Array, batch: int = 8, *, fused: bool = True) -> Float32Array:
    """Logits float32 (n, C) of uint8 images (n, S, S, 3)."""
    return next(logits_in_parts(graph, (images,), batch, fused=fused))


def logits_in_parts(
    graph: onnx.ModelProto, parts: Iterable[UInt8Array], batch: int = 8, *, fused: bool = True
) -> Iterator[Float32Array]:
    """Logits float32 (n, C) of each part, uint8 (n, S, S, 3), in one session; a part is run when it is asked for."""
    session = open_session(graph, fused=fused)
    (source,) = session.get_inputs()
    for images in parts:
        found = [session.run(None, {source.name: chunk})[0] for chunk in batches(images, batch)]
        yield np.concatenate(found).astype(np.float32)


def batches(images: UInt8Array, size: int) -> Iterable[UInt8Array]:
    return (images[start : start + size] for start in range(0, len(images), size))


def open_session(graph: onnx.ModelProto | str | bytes, *, fused: bool = True) -> Any:
    """A session on the CPU; raise CheckFailed with ONNX Runtime's reason when it cannot run the graph.

    graph: the message, the path of its file, or the file's bytes.

    Without `fused` Q and DQ run as they stand: ONNX Runtime fuses E4M3 into a kernel that then refuses the type.
    """
    require_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if (threads := threads_here(None)) is not None:
        options.intra_op_num_threads = threads
    disabled = set_quantization(options, fused=fused)
    content = graph.SerializeToString() if isinstance(graph, onnx.ModelProto) else graph
    try:
        return onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
    # ONNX Runtime's errors share no base class but Exception; each of them is a verdict on the graph.
    except Exception as error:  # noqa: BLE001
        raise CheckFailed(f"ONNX Runtime cannot run the graph on the CPU: {error}") from None
