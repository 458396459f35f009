"""What a bundle gives beside logits: planned on the network, written for its graph, and compared with the network.

The part of model.onnx is what the network computes anyway. So the graph is the same, byte for byte, whether outputs are
asked for or not, and they cost nothing until a session asks for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from vitx.core.bundle import OUTPUTS, OutputName, OutputSpec, output_file, output_tensor
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_bytes
from vitx.export.graph import CHECKED_BATCHES
from vitx.export.graph.block_names import softmax_name
from vitx.export.graph.from_model import INPUT, OUTPUT, TOLERANCE
from vitx.export.graph.outputs import attention_part, classifier_inputs, embedding_part, rollout_part
from vitx.export.rewrite.folds import last_norm
from vitx.export.rewrite.rewrites import ImageClassifier, logits_of_network
from vitx.models.outputs import PooledTokens, classifiers_of, pooled_tokens, recorded_outputs


@dataclass(frozen=True)
class PlannedOutputs:
    """What is known of a network before rewrites change it.

    affine: scale and shift of the norm before the classifier. expected: the network's own outputs on the noise that
    `noise` makes, one dictionary a batch.
    """

    names: tuple[OutputName, ...]
    size: int
    features: int
    affine: dict[str, Tensor]
    pooled: PooledTokens | None
    expected: tuple[dict[str, Tensor], ...]


def plan_outputs(classifier: ImageClassifier, names: Sequence[str], size: int) -> PlannedOutputs:
    """Look at a network that no rewrite has changed; raise InputError for an output that it does not have."""
    chosen = tuple(name for name in OUTPUTS if name in names)
    model: nn.Module = classifier.model
    layers = classifiers_of(model) if "embedding" in chosen else []
    norm = last_norm(model)
    parameters = {} if norm is None else {"weight": norm.weight, "bias": norm.bias}
    expected = []
    if chosen:
        with recorded_outputs(model, chosen) as recorded:
            for batch in CHECKED_BATCHES:
                logits_of_network(classifier, torch.from_numpy(noise(batch, size)))
                expected.append({name: value.float().cpu() for name, value in recorded().items()})
    return PlannedOutputs(
        chosen,
        size,
        layers[0].in_features if layers else 0,
        {name: value.detach().float().cpu() for name, value in parameters.items() if value is not None},
        pooled_tokens(model) if {"attention", "rollout"} & {*chosen} else None,
        tuple(expected),
    )


def write_outputs(
    planned: PlannedOutputs, model: nn.Module, graph: onnx.ModelProto, folder: Path
) -> tuple[OutputSpec, ...]:
    """Write a file for each output beside `graph`, the traced graph of the rewritten `model`; return what they are.

    Raises InputError when the graph has no tensor that an output is made of, CheckFailed when an output differs from
    the network's by more than a graph may (`vitx.export.graph.from_model.TOLERANCE`).
    """
    content = graph.SerializeToString() if planned.names else b""
    specs = []
    for name in planned.names:
        part, spec = _embedding(planned, model, graph) if name == "embedding" else _of_maps(name, planned, graph)
        _require_equal(name, content + part, planned)
        path = folder / output_file(name)
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, part)
        specs.append(spec)
    return tuple(specs)


def noise(batch: int, size: int) -> np.ndarray:
    """Images uint8 (batch, size, size, 3), the same ones each time."""
    return np.random.default_rng(batch).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)


def _embedding(planned: PlannedOutputs, model: nn.Module, graph: onnx.ModelProto) -> tuple[bytes, OutputSpec]:
    features = classifier_inputs(graph, OUTPUT)
    norm = last_norm(model)
    folded = norm is not None and norm.weight is None
    affine = {name: value.numpy() for name, value in planned.affine.items()} if folded else None
    meaning = "what the classifier reads" if len(features) == 1 else f"mean of what {len(features)} classifiers read"
    spec = OutputSpec(name="embedding", dtype="float32", shape=("N", planned.features), meaning=meaning)
    return embedding_part(features, planned.features, affine), spec


def _of_maps(name: OutputName, planned: PlannedOutputs, graph: onnx.ModelProto) -> tuple[bytes, OutputSpec]:
    pooled = planned.pooled
    assert pooled is not None
    names = [softmax_name(index) for index in range(pooled.blocks)]
    wanted = names[-1:] if name == "attention" else names
    made = {tensor for node in graph.graph.node for tensor in node.output}
    missing = [tensor for tensor in wanted if tensor not in made]
    if missing:
        raise InputError(f"the graph has no tensor '{missing[0]}', of which --output {name} is made: leave it out")
    place = (pooled.start, pooled.stop, pooled.prefix, pooled.patches)
    if name == "attention":
        part, meaning = attention_part(names[-1], *place), "softmax maps of the last block, mean over heads"
    else:
        part, meaning = rollout_part(names, *place), "product of ½(A + I) over all blocks, A the softmax maps' mean"
    spec = OutputSpec(
        name=name,
        dtype="float32",
        shape=("N", pooled.patches),
        meaning=f"{meaning}; from {pooled} to each patch",
        grid=pooled.grid,
    )
    return part, spec


def _require_equal(name: str, content: bytes, planned: PlannedOutputs) -> None:
    from vitx.export.graph.execution import open_session

    session = open_session(content)
    for batch, expected in zip(CHECKED_BATCHES, planned.expected, strict=True):
        (found,) = session.run([output_tensor(name)], {INPUT: noise(batch, planned.size)})
        wanted = expected[name].numpy()
        if found.shape != wanted.shape:
            raise CheckFailed(f"the graph's {name} is {found.shape}, the network's {wanted.shape}")
        error = float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-6))
        if not error <= TOLERANCE:
            raise CheckFailed(
                f"the graph's {name} differs from the network's at a batch of {batch}: by {error:.2g} of its largest "
                f"value, {TOLERANCE:g} is allowed"
            )
