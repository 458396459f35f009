"""A model repository for Triton Inference Server, from a bundle.

The fields of `config.pbtxt` are those of the message ModelConfig in Triton's `model_config.proto`
(github.com/triton-inference-server/common).
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.certificate import Certificate
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import check_folder, sha256_file, staged_folder
from vitx.core.tensorrt_plan import PlanInfo, read_plan

CONFIG = "config.pbtxt"
LABELS = "labels.txt"
LARGEST_BATCH, QUEUE_DELAY_US = 32, 2000
_TYPES = {"uint8": "TYPE_UINT8", "float32": "TYPE_FP32"}


def triton_repository(
    bundle_path: Path,
    out_dir: Path,
    *,
    plan: Path | None = None,
    allow_uncertified: bool = False,
) -> Path:
    """Write the model `out_dir`/NAME for Triton and return its folder; an older model of that name is replaced whole.

    Triton will serve the bundle's ONNX graph, on the CPU, or a classic TensorRT `plan` of that graph, on the GPU. A
    request waits up to QUEUE_DELAY_US for others to make a batch of up to LARGEST_BATCH, or the largest of the plan's
    profiles if that is less.

    Raises InputError for a plan that takes no single image, a label that a line cannot hold, or an existing folder that
    is no Triton model; CheckFailed for a bundle without a valid certificate, for a plan of another graph and, unless
    `allow_uncertified`, for one without a passing verdict.
    """
    bundle = Bundle.open(bundle_path)
    info = None if plan is None else _matching_plan(plan, bundle)
    if not allow_uncertified:
        _check_verdict(bundle.require_certificate(), plan, info)
    max_batch = LARGEST_BATCH if info is None else min(LARGEST_BATCH, _largest_batch(info))
    if not max_batch:
        raise InputError(f"'{plan}' takes no single image, and Triton may form any batch: build it with the profile 1")
    target = out_dir / bundle.manifest.name
    check_triton_model(target)
    check_triton_labels(bundle.manifest.labels)
    if plan is None:
        check_triton_precision(bundle.manifest.precision, bundle.manifest.base)
    with staged_folder(target) as stage:
        (stage / "1").mkdir()  # the version of the model
        shutil.copyfile(plan or bundle.model_path, stage / "1" / ("model.onnx" if plan is None else "model.plan"))
        (stage / LABELS).write_text("".join(f"{label}\n" for label in bundle.manifest.labels), encoding="utf-8")
        (stage / CONFIG).write_text(model_config(bundle, info, max_batch), encoding="utf-8")
    return target


def check_triton_precision(precision: str, base: str | None) -> None:
    """Raise InputError for a graph that Triton's ONNX Runtime backend, which takes no session options, cannot load."""
    if precision == "fp8":
        raise InputError("Triton's ONNX Runtime backend fuses E4M3 into kernels that refuse it: give it a plan (--trt)")
    if "bf16" in (precision, base):
        raise InputError("Triton's ONNX Runtime backend has no bfloat16 kernels on a CPU: give it a plan (--trt)")


def check_triton_model(target: Path) -> None:
    """Raise InputError when the folder of the model to write holds something else, or cannot be one."""
    check_folder(target)
    if target.exists() and not (target / CONFIG).is_file():
        raise InputError(f"'{target}' exists and is no Triton model: choose another folder")


def check_triton_labels(labels: Sequence[str]) -> None:
    """Raise InputError for a class name that no line of the labels' file can hold."""
    for label in labels:
        if label.splitlines() != [label]:
            raise InputError(f"the label {label!r} does not fit a line of Triton's {LABELS}: rename the class")


def model_config(bundle: Bundle, plan: PlanInfo | None, max_batch: int) -> str:
    """`config.pbtxt`: a ModelConfig message in protobuf's text form."""
    manifest = bundle.manifest
    images, logits = manifest.input, manifest.output
    # Shapes are without the batch: a max_batch_size above 0 tells Triton that there is one in front.
    dims = ", ".join(str(size) for size in images.shape[1:])
    # An instance has the profiles that batches of up to max_batch need, and prefers batches of a profile's best size.
    # Batch 1, the best sizes and max_batch are run once before the model is ready.
    profiles = [] if plan is None else [index for index, p in enumerate(plan.profiles) if p.minimum <= max_batch]
    preferred = sorted({plan.profiles[index].optimum for index in profiles} if plan else set())
    warm_up = sorted({1, *(size for size in preferred if size <= max_batch), max_batch})
    return "\n".join(
        [
            *_header(bundle, plan),
            f"name: {_quoted(manifest.name)}",
            f"backend: {_quoted('onnxruntime' if plan is None else 'tensorrt')}",
            f"default_model_filename: {_quoted('model.onnx' if plan is None else 'model.plan')}",
            f"max_batch_size: {max_batch}",
            f"input [ {{ name: {_quoted(images.name)} data_type: {_TYPES[images.dtype]} dims: [ {dims} ] }} ]",
            f"output [ {{ name: {_quoted(logits.name)} data_type: {_TYPES[logits.dtype]} "
            f"dims: [ {len(manifest.labels)} ] label_filename: {_quoted(LABELS)} }} ]",
            f"instance_group [ {{ count: 1 kind: {'KIND_GPU' if plan else 'KIND_CPU'}{_profiles(profiles)} }} ]",
            f"dynamic_batching {{ {_preferred(preferred, max_batch)}max_queue_delay_microseconds: {QUEUE_DELAY_US} }}",
            *(_warm_up(images.name, _TYPES[images.dtype], dims, size) for size in warm_up),
            f'parameters {{ key: "vitx.manifest_sha256" value {{ string_value: '
            f"{_quoted(sha256_file(bundle.path / MANIFEST))} }} }}",
            "",
        ]
    )


def _header(bundle: Bundle, plan: PlanInfo | None) -> list[str]:
    """Comments with what whoever runs the server has to know."""
    lines = [
        f"# Written by vitx from the bundle {bundle.manifest.name}: {bundle.manifest.model.name}, "
        f"{bundle.manifest.precision}.",
        "# Input: RGB pixels, uint8, rows first; resize and crop as the bundle's manifest says, no normalisation.",
    ]
    if plan is not None:
        lines.append(
            f"# The plan is of TensorRT {plan.version} for {', '.join(plan.architectures)}: Triton needs the same."
        )
    return lines


def _quoted(text: str) -> str:
    return json.dumps(text)  # its escapes are protobuf's too


def _profiles(indices: Sequence[int]) -> str:
    return f" profile: [ {', '.join(_quoted(str(index)) for index in indices)} ]" if indices else ""


def _preferred(sizes: Sequence[int], max_batch: int) -> str:
    fitting = [str(size) for size in sizes if 1 < size <= max_batch]
    return f"preferred_batch_size: [ {', '.join(fitting)} ] " if fitting else ""


def _warm_up(name: str, data_type: str, dims: str, batch: int) -> str:
    inputs = f"key: {_quoted(name)} value {{ data_type: {data_type} dims: [ {dims} ] random_data: true }}"
    return f'model_warmup [ {{ name: "batch {batch}" batch_size: {batch} inputs {{ {inputs} }} }} ]'


def _matching_plan(plan: Path, bundle: Bundle) -> PlanInfo:
    info = read_plan(plan)
    if info.flavor != "tensorrt":
        raise InputError(f"'{plan}' is a plan of {info.flavor}, for which Triton has no backend: build one with --trt")
    if info.onnx_sha256 != sha256_file(bundle.model_path):
        raise CheckFailed(f"'{plan}' was not built from the graph of '{bundle.path}': build it again")
    return info


def _largest_batch(info: PlanInfo) -> int:
    """Triton may form any batch from 1 to max_batch, so the profiles must cover them without a gap."""
    reach = 0
    for low, high in sorted((p.minimum, p.maximum) for p in info.profiles):
        reach = max(reach, high) if low <= reach + 1 else reach
    return reach


def _check_verdict(certificate: Certificate, plan: Path | None, info: PlanInfo | None) -> None:
    """Raise CheckFailed unless the plan that is handed over, if it is one, has a passing verdict."""
    if info is None:
        return
    of_plan = [verdict for verdict in certificate.executables if info.sha256 in verdict.executable.artefacts.values()]
    if not of_plan or of_plan[-1].verdict != "pass":
        said = f"{of_plan[-1].verdict}: {'; '.join(of_plan[-1].reasons)}" if of_plan else "nothing"
        raise CheckFailed(
            f"the certificate says of '{plan}': {said}; certify it on its GPU, `vitx parity RUN BUNDLE --runtime "
            "tensorrt`, or hand over the ONNX graph"
        )
