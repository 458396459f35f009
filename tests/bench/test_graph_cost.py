"""How FLOPs and bytes of a graph are counted: what ONNX Runtime is asked for, and which of its records are summed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from vitx.bench.graph_cost import count_cost, node_flops
from vitx.core import machine
from vitx.core.bundle import Bundle

LEVELS = onnxruntime.GraphOptimizationLevel
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape")


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "flops"),
    [
        ("MatMulInteger", [[2, 3, 5], [5, 7], [], []], [[2, 3, 7]], 2 * 2 * 3 * 5 * 7),
        ("QLinearMatMul", [[3, 5], [], [], [5, 7], [], [], [], []], [[3, 7]], 2 * 3 * 5 * 7),
        ("ConvInteger", [[1, 3, 8, 8], [6, 3, 4, 4]], [[1, 6, 2, 2]], 2 * 6 * 2 * 2 * 3 * 4 * 4),
        ("QLinearConv", [[1, 3, 8, 8], [], [], [6, 3, 4, 4], [6], [6]], [[1, 6, 2, 2]], 2 * 6 * 2 * 2 * 3 * 4 * 4),
        # Five queries of 4 numbers, seven keys, values of 2 numbers, and a mask.
        ("Attention", [[1, 3, 5, 4], [1, 3, 7, 4], [1, 3, 7, 2], [5, 7]], [[1, 3, 5, 2]], 2 * 3 * 5 * 7 * (4 + 2)),
    ],
)
def test_flops_of_products_in_8_bits_and_of_attention_with_a_mask(
    kind: str, inputs: list[list[int]], outputs: list[list[int]], flops: int
) -> None:
    assert node_flops(kind, inputs, outputs) == flops


def event(name: str, operator: str, sizes: tuple[int, int, int], category: str = "Node") -> dict[str, Any]:
    """A record of a kernel: sizes are the bytes of activations read and written, and of weights."""
    reads, writes, weights = (str(size) for size in sizes)
    shapes = {"input_type_shape": [{"float": [1, 3]}, {"float": [3, 4]}], "output_type_shape": [{"float": [1, 4]}]}
    sizes_of = {"activation_size": reads, "output_size": writes, "parameter_size": weights}
    return {"cat": category, "name": name, "args": {"op_name": operator, **shapes, **sizes_of}}


class Profiler:
    """Stands in for onnxruntime.InferenceSession: `sessions` has how each was made, and each profile has its events."""

    def __init__(self, events: dict[Any, list[dict[str, Any]]], folder: Path) -> None:
        self.events, self.folder, self.sessions = events, folder, list[dict[str, Any]]()

    def __call__(self, path: str, options: Any, providers: list[str], disabled_optimizers: Any = None) -> Any:
        self.sessions.append(
            {"path": path, "options": options, "providers": providers, "disabled": disabled_optimizers}
        )
        profile = self.folder / f"{len(self.sessions)}.json"
        profile.write_text(json.dumps(self.events.get(options.graph_optimization_level, [])))
        return SimpleNamespace(run=lambda names, feeds: None, end_profiling=lambda: str(profile))

    def entries(self, key: str) -> list[str | None]:
        """What each session's options say for a key."""
        found: list[str | None] = []
        for session in self.sessions:
            try:
                found.append(session["options"].get_session_config_entry(key))
            except RuntimeError:  # it has no such entry
                found.append(None)
        return found


def test_flops_are_of_the_graph_as_exported_and_bytes_of_the_optimised_one(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = [
        event("a_kernel_time", "MatMul", (1000, 1000, 1000)),
        event("b_kernel_time", "Add", (1000, 1000, 1000)),
        event("a_fence_before", "MatMul", (1000, 1000, 1000)),
        event("run_kernel_time", "MatMul", (1000, 1000, 1000), "Session"),
    ]
    optimised = [
        event("c_kernel_time", "Gemm", (12, 16, 64)),
        event("d_kernel_time", "Softmax", (16, 17, 5)),
        *(event("e_kernel_time", view, (1000, 1000, 1000)) for view in VIEWS),
        event("c_fence_after", "Gemm", (1000, 1000, 1000)),
        event("run_kernel_time", "Gemm", (1000, 1000, 1000), "Session"),
    ]
    profiler = Profiler({LEVELS.ORT_DISABLE_ALL: exported, LEVELS.ORT_ENABLE_ALL: optimised}, tmp_path)
    # As ONNX Runtime makes them: those of the tests have one thread already.
    monkeypatch.setattr(onnxruntime, "SessionOptions", type(onnxruntime.SessionOptions()))
    monkeypatch.setattr(onnxruntime, "InferenceSession", profiler)
    cost = count_cost(tiny_bundle)
    assert cost is not None
    assert (cost.flops, cost.activation_bytes, cost.weight_bytes) == (2 * 3 * 4, 12 + 16 + 16 + 17, 64 + 5)
    for session in profiler.sessions:
        assert session["path"] == str(tiny_bundle.model_path)
        assert session["providers"] == ["CPUExecutionProvider"]
        assert session["options"].intra_op_num_threads == 1
        assert session["options"].enable_profiling
    assert profiler.entries("session.disable_prepacking") == ["1", "1"]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("base", ["fp32", "fp16"])
def test_the_graph_is_run_as_a_session_would_run_it(
    base: str, exact: bool, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewrites of Q/DQ pairs that do not fit the graph are off; sums of 8 bits are exact on every processor."""
    profiler = Profiler({}, tmp_path)
    monkeypatch.setattr(onnxruntime, "InferenceSession", profiler)
    monkeypatch.setattr(machine, "sums_int8_exactly", lambda: exact)
    manifest = tiny_bundle.manifest.model_copy(update={"base": base})
    bundle: Any = SimpleNamespace(manifest=manifest, model_path=tiny_bundle.model_path)
    assert count_cost(bundle) is not None
    unfit = base == "fp16"
    assert [session["disabled"] for session in profiler.sessions] == [
        ["ReluQuantRewrite", "ClipQuantRewrite"] if unfit else None
    ] * 2
    assert profiler.entries("session.disable_quant_qdq") == ["1" if unfit else None] * 2
    assert profiler.entries("session.x64quantprecision") == [None if exact else "1"] * 2
