"""Tables of layers: those of the parsed network (no GPU needed), and the fused ones of a plan (on its GPU)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.machine import local_architectures
from vitx.core.tensorrt_plan import check_plan
from vitx.export.engines.tensorrt_library import LayerRow, load_flavor

# Layers for shapes and constants: there are many, and they cost nothing at run time.
_SHAPE_KINDS = {"SHAPE", "CONSTANT", "CAST", "CONCATENATION", "GATHER", "SLICE", "SHUFFLE", "UNSQUEEZE", "SQUEEZE"}


def working_layers(layers: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    """The parsed layers that compute on activations: no constants, casts or shape arithmetic."""
    return tuple(row for row in layers if row[1] not in _SHAPE_KINDS and "INT" not in row[2] and row[2] != "BOOL")


def inspect_plan(plan: Path) -> tuple[LayerRow, ...]:
    """The fused layers of a plan, as the GPU runs them.

    A plan can only be opened on a GPU of its architecture. Without a GPU EnvironmentMissing is raised before a library
    is called, because creating a TensorRT runtime without a driver may end the process; `EngineReport.layers` has what
    can be known there.
    """
    here = local_architectures()
    if not here:
        raise EnvironmentMissing(
            f"'{plan}' can be inspected only on a GPU, and the NVIDIA driver offers none; the build's own report lists "
            "the layers before fusion"
        )
    info = check_plan(plan, architecture=here[0])
    library = load_flavor(info.flavor)
    information = library.engine_information(plan.read_bytes(), host_code=info.options.version_compatible)
    if information is None:
        raise CheckFailed(f"{info.flavor} {info.version} could not open '{plan}'")
    return layer_table(information)


def layer_table(information: str) -> tuple[LayerRow, ...]:
    """The engine inspector's JSON as rows: layer, kind, type and shape of the first output.

    TensorRT 11 has "Format" and "Datatype" where 10 has "Format/Datatype" (NVIDIA's guide "Migrating from TensorRT 10.x
    to 11.x"). A plan that was not built with ProfilingVerbosity.DETAILED has layer names only.
    """
    layers: list[Any] = json.loads(information)["Layers"]
    return tuple(_row(layer) for layer in layers)


def _row(layer: dict[str, Any] | str) -> LayerRow:
    if isinstance(layer, str):
        return (layer, "", "", "")
    output: dict[str, Any] = next(iter(layer.get("Outputs", ())), {})
    kind = output.get("Datatype") or str(output.get("Format/Datatype", "")).rpartition(" ")[2]
    shape = "x".join("N" if size < 0 else str(size) for size in output.get("Dimensions", ()))
    return (layer["Name"], layer.get("LayerType", ""), kind, shape)
