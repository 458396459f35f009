"""Layer tables: of the network that TensorRT parsed (no GPU needed), and of a plan's fused layers (on its GPU)."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.machine import local_architectures
from vitx.core.tensorrt_plan import check_plan

COLUMNS = ("layer", "kind", "type", "output")
Row = tuple[str, str, str, str]
# Bookkeeping of shapes and constants: many, and free at run time.
_SHAPE_KINDS = {"SHAPE", "CONSTANT", "CAST", "CONCATENATION", "GATHER", "SLICE", "SHUFFLE", "UNSQUEEZE", "SQUEEZE"}


def working_layers(layers: Sequence[Row]) -> tuple[Row, ...]:
    """The parsed layers that compute: without constants, casts and the arithmetic of shapes."""
    return tuple(row for row in layers if row[1] not in _SHAPE_KINDS and "INT" not in row[2] and row[2] != "BOOL")


def count_kinds(layers: Sequence[Row]) -> dict[str, int]:
    """How many layers of each kind, the most frequent first: {"MATRIX_MULTIPLY": 73, …}."""
    return dict(Counter(kind for _, kind, _, _ in layers).most_common())


def inspect_plan(plan: Path) -> tuple[Row, ...]:
    """The fused layers of a plan, as the GPU runs them.

    A plan can only be opened on a GPU of its architecture: elsewhere EnvironmentMissing is raised (and before any
    library is touched: creating a TensorRT runtime without a driver may end the process). `EngineReport.layers` is
    what can be known without one.
    """
    here = local_architectures()
    if not here:
        raise EnvironmentMissing(
            f"'{plan}' can be inspected only on a GPU, and the NVIDIA driver offers none; the build's own report lists "
            "the layers before fusion"
        )
    from vitx.export.engines.tensorrt_library import load_flavor

    info = check_plan(plan, architecture=here[0])
    information = load_flavor(info.flavor).engine_information(plan.read_bytes())
    if information is None:
        raise CheckFailed(f"{info.flavor} {info.version} could not open '{plan}'")
    return layer_table(information)


def layer_table(information: str) -> tuple[Row, ...]:
    """The engine inspector's JSON as rows: layer, kind, type and shape of the first output.

    TensorRT 11 gives "Format" and "Datatype" where 10 gives "Format/Datatype". A plan that was built to tell names
    only gives names only.
    """
    layers: list[Any] = json.loads(information)["Layers"]
    return tuple(_row(layer) for layer in layers)


def _row(layer: dict[str, Any] | str) -> Row:
    if isinstance(layer, str):
        return (layer, "", "", "")
    output: dict[str, Any] = next(iter(layer.get("Outputs", ())), {})
    kind = output.get("Datatype") or str(output.get("Format/Datatype", "")).rpartition(" ")[2]
    shape = "x".join("N" if size < 0 else str(size) for size in output.get("Dimensions", ()))
    return (layer["Name"], layer.get("LayerType", ""), kind, shape)
