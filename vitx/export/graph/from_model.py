"""From a rewritten network to an ONNX graph: traced by torch.export, cleaned, and compared with the network."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from onnx_ir.passes import PassManager, common
from onnxscript.optimizer import fold_constants_ir
from torch import Tensor, nn

from vitx.core.bundle import Precision
from vitx.core.errors import CheckFailed, InputError, first_line
from vitx.core.files import rename, sync
from vitx.core.preprocess import Preprocessing
from vitx.export.graph import CHECKED_BATCHES
from vitx.export.graph.block_names import name_block_outputs
from vitx.export.graph.dataflow import MOST_BYTES
from vitx.export.graph.onnx_file import write_onnx
from vitx.export.graph.operator_check import expected_operators, require_operators
from vitx.export.graph.simplify import simplify
from vitx.export.graph.tracing import any_tensor, attention_form, trace, without_logs

INPUT, OUTPUT = "images", "logits"

# Traced with two images: torch.export takes a dimension of 1 (or 0) for a constant, even if it is said to be dynamic.
EXAMPLE_BATCH = 2
# Relative to the largest logit. Float32 sums in another order differ by about 1e-6 of it; a wrong graph by far more.
TOLERANCE = 1e-3

# Opset 20 is the first with Gelu. From 23 on plain attention becomes one `Attention` node; on a CPU its kernel in ONNX
# Runtime 1.31 is slower than the fused products (docs/export.md).
DEFAULT_OPSET = 20
# Convolution and pooling take bfloat16 since opset 22; in 20 a ResNet would stay in float32 as a whole.
BFLOAT16_OPSET = 22
OPSETS = range(18, 25)

# In elements. Above the exporter's own limit, so that views and transposes of weights are not computed at run time.
FOLD_LIMIT = 2**28
# In elements. Equal constants up to this size are stored once. The pass keeps a copy of each constant it compares, so
# large ones are left out.
SHARED_LIMIT = 2**16


def onnx_from_model(
    classifier: nn.Module,
    preprocessing: Preprocessing,
    labels: tuple[str, ...],
    path: Path,
    *,
    opset: int | None = None,
    check: bool = True,
) -> onnx.ModelProto:
    """Write the graph of `classifier` to `path`: uint8 (N, S, S, 3) → float32 (N, C), N dynamic.

    Labels and preprocessing go into the metadata properties. The file passes ONNX's full check, and is put in place
    when all checks have passed. `opset` decides the form of plain attention: below 23 two products around a Softmax,
    from 23 on one `Attention` node.

    Raises InputError for an opset outside 18 to 24, for a network whose weights do not fit one ONNX file, and for one
    that PyTorch's exporter cannot trace, that is in training mode or on the meta device, or that returns anything but
    one float32 vector an image, with as many logits as there are labels (any number if there are none).
    Raises CheckFailed when the traced graph has a fixed batch, lacks a fused operator that the network implies, fails
    ONNX's check, or (with `check`, which runs it in ONNX Runtime) differs from the network at batches that were never
    traced.
    """
    _require_one_file(classifier)
    model = graph_of(classifier, preprocessing, opset=opset)
    model.metadata_props.update(
        {
            "vitx.labels": json.dumps(labels, ensure_ascii=False),
            "vitx.preprocessing": preprocessing.model_dump_json(),
        }
    )
    _require_logits(model, len(labels))
    _require_dynamic_batch(model)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        written = Path(folder) / path.name
        write_onnx(model, written)
        try:
            onnx.checker.check_model(str(written), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as reason:
            # As of layers in bfloat16, which convolutions take since opset 22.
            raise CheckFailed(
                f"ONNX's check refuses the graph: {first_line(reason)}; try another opset, or float32"
            ) from None
        if check:
            require_equal(classifier, written, preprocessing.image_size)
        sync(written)
        rename(written, path)
    return onnx.load(str(path))


def opset_for(precision: Precision) -> int:
    """The operator set that a graph to be lowered to `precision` is traced in."""
    return BFLOAT16_OPSET if precision == "bf16" else DEFAULT_OPSET


def graph_of(
    classifier: nn.Module, preprocessing: Preprocessing, *, opset: int | None = None, folded: bool = True
) -> Any:
    """Trace `classifier` to a cleaned onnx_ir.Model in memory; see `onnx_from_model` for opset and errors.

    Without `folded` the graph keeps what the folds of vitx/export/graph/simplify.py would remove.
    """
    wanted = DEFAULT_OPSET if opset is None else opset
    if wanted not in OPSETS:
        raise InputError(f"opset {wanted}: expected {OPSETS.start} to {OPSETS.stop - 1}")
    if classifier.training:  # each pass would also change the statistics of its BatchNorms
        raise InputError("the network is in training mode: call its eval() first")
    size = preprocessing.image_size
    device = any_tensor(classifier).device
    if device.type == "meta":
        raise InputError(
            "the network's weights have no values, for it is on the meta device: load weights into it first"
        )
    example = torch.zeros(EXAMPLE_BATCH, size, size, 3, dtype=torch.uint8, device=device)
    with torch.autocast(device.type, enabled=False):  # a notebook's: its casts would be traced
        model, fused = trace(classifier, example, wanted, (INPUT, OUTPUT))
        with attention_form(classifier, fused=fused):
            require_operators(expected_operators(classifier, example[:1], wanted), model.graph)
    name_block_outputs(model)
    clean(model, folded=folded)
    return model


def clean(model: Any, *, folded: bool = True) -> None:
    """Compute what depends on weights alone, share equal constants and expressions, drop paths of this machine.

    `model` is an onnx_ir.Model and is changed in place. With `folded` all folds of simplify.py are applied.
    """
    with without_logs():  # of constants that it leaves to the folds below
        fold_constants_ir(model, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT)
    PassManager(
        [
            common.IdentityEliminationPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.RemoveUnusedNodesPass(),
        ]
    )(model)
    if folded:
        # Of what it takes from a function, such as GroupNorm, the exporter knows no shapes.
        common.ShapeInferencePass()(model)
        simplify(model)
    PassManager(
        [
            common.DeduplicateInitializersPass(size_limit=SHARED_LIMIT),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),  # stack traces with paths of the exporting machine
            common.NameFixPass(),
            common.ShapeInferencePass(),
        ]
    )(model)


def require_equal(classifier: nn.Module, path: Path, size: int) -> None:
    """Raise CheckFailed unless the graph file equals `classifier` on noise at batches that were never traced.

    InputError where the network returns something else than a tensor.
    """
    from vitx.export.graph.execution import open_session

    session = open_session(str(path))
    device = any_tensor(classifier).device
    generator = np.random.default_rng(0)
    for batch in CHECKED_BATCHES:
        images = generator.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            found = classifier(torch.from_numpy(images).to(device))
        if not isinstance(found, Tensor):  # the exporter takes it apart, and leaves None out
            raise InputError(f"the network returns a {type(found).__name__}: expected one tensor, logits (N, C)")
        expected = found.float().cpu().numpy()
        if not np.isfinite(expected).all():
            raise CheckFailed("the network's logits are not finite on random images: its weights hold NaN or infinity")
        (logits,) = session.run([OUTPUT], {INPUT: images})
        if logits.shape != expected.shape:
            raise CheckFailed(f"the graph gives {logits.shape} for a batch of {batch}, expected {expected.shape}")
        error = float(np.abs(logits - expected).max() / max(np.abs(expected).max(), 1e-6))
        if not error <= TOLERANCE:
            raise CheckFailed(
                f"the graph differs from the network at a batch of {batch}: by {error:.2g} of the largest logit, "
                f"{TOLERANCE:g} is allowed"
            )


def _require_one_file(network: nn.Module) -> None:
    """Raise InputError, before minutes are spent, for a network whose weights do not fit one ONNX file."""
    size = sum(weight.nbytes for weight in network.parameters())
    if size > MOST_BYTES:
        raise InputError(
            f"the network has {size / 1e9:.1f} GB of weights: an ONNX file with its weights inside holds "
            f"{MOST_BYTES / 1e9:.1f} GB, and lower precisions are made of the float32 file; take a smaller network"
        )


def _require_dynamic_batch(model: Any) -> None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if isinstance(value.shape[0], int):
            raise CheckFailed(f"the traced graph fixed the batch of '{value.name}' to {value.shape[0]}")


def _require_logits(model: Any, classes: int) -> None:
    """Raise InputError unless the network returns a float32 vector an image, of so many `classes` if they are known."""
    outputs = model.graph.outputs
    if len(outputs) != 1:
        raise InputError(f"the network returns {len(outputs)} tensors: expected one, logits (N, C)")
    shape = outputs[0].shape
    if len(shape) != 2 or (classes and shape[1] != classes):
        found = ", ".join(map(str, shape))
        raise InputError(
            f"the network returns ({found}): expected one vector of logits an image, (N, {classes or 'C'}); "
            "give it a pooling (--model-arg global_pool=avg, where it takes one) and one output a class"
        )
    kind = outputs[0].dtype.numpy()
    if kind != np.float32:
        raise InputError(f"the network returns {kind}: expected float32 logits; give it as network.float()")
