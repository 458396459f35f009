"""A graph in ONNX Runtime and in TensorRT, on torch's stream and in torch's memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.gpu_networks import Run, Unavailable


def onnxruntime_run(graph: Callable[[], Path], example: Tensor) -> Run:
    """ONNX Runtime on torch's stream and torch's memory; it keeps nodes that compute shapes on the processor."""
    import onnxruntime

    cuda = example.device.type == "cuda"
    provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise Unavailable(f"this onnxruntime {onnxruntime.__version__} has no {provider}: install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    settings: dict[str, str] = {}
    if cuda:
        settings = {"use_tf32": "0", "user_compute_stream": str(torch.cuda.current_stream().cuda_stream)}
    session = onnxruntime.InferenceSession(str(graph()), options, providers=[(provider, settings)])
    if session.get_providers()[0] != provider:
        raise Unavailable(f"ONNX Runtime took {session.get_providers()[0]} instead of {provider}")
    classes = session.get_outputs()[0].shape[1]
    logits = torch.empty(len(example), classes, device=example.device)
    device = example.device.type

    def run(images: Tensor) -> Tensor:
        binding = session.io_binding()
        binding.bind_input("images", device, 0, np.uint8, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", device, 0, np.float32, tuple(logits.shape), logits.data_ptr())
        session.run_with_iobinding(binding)
        return logits

    return run


def tensorrt_run(graph: Callable[[], Path], example: Tensor) -> Run:
    """A plan for exactly this batch, built here; not kept."""
    if example.device.type != "cuda":
        raise Unavailable("TensorRT needs a GPU")
    try:
        import tensorrt
    except ModuleNotFoundError:
        raise Unavailable("the package 'tensorrt' is not installed") from None
    from vitx.core.tensorrt_plan import Profile
    from vitx.export import engine_from_onnx

    size, path = len(example), graph()
    plan = path.with_suffix(".plan")
    engine_from_onnx(
        *(path, plan), flavor="tensorrt", profiles=[Profile(minimum=size, optimum=size, maximum=size)], quiet=True
    )
    engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR)).deserialize_cuda_engine(plan.read_bytes())
    context = engine.create_execution_context()
    context.set_input_shape("images", tuple(example.shape))
    shape: Any = context.get_tensor_shape("logits")
    logits = torch.empty(tuple(shape), device=example.device)

    def run(images: Tensor) -> Tensor:
        context.set_tensor_address("images", images.data_ptr())
        context.set_tensor_address("logits", logits.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise Unavailable("TensorRT could not run the plan")
        return logits

    return run
