"""A run or a bundle loaded for a comparison: the same record for any runtime, as the reference or as the candidate."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vitx.core.bundle import MANIFEST, Bundle, Precision
from vitx.core.errors import InputError
from vitx.core.files import refuse_url
from vitx.core.preprocess import Preprocessing, Triple
from vitx.core.run import RunFolder
from vitx.core.tolerance import coarser
from vitx.runtimes import load_session
from vitx.runtimes.remote import RemoteSession
from vitx.runtimes.requirements import require
from vitx.runtimes.session import Session

DEFAULT_RUNTIME = "onnxruntime"


@dataclass(frozen=True)
class LoadedModel:
    """A classifier in a runtime, and what is known of it; `with` closes its session.

    At most one of `run` and `bundle` is set.

    data: the image set it was trained on. sha256: of a run its weights, of a bundle its manifest. precision: of a
    bundle in its runtime, the coarser of the two. network: returns the torch module, on the CPU and not to be changed;
    None for a bundle. renormalized: returns a session of the same network with another (mean, std); None for a bundle.
    twin: the session runs the bundle's graph in another form, so what it shows is of no executable of the bundle.
    """

    name: str
    session: Session
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    data: str
    sha256: str
    precision: Precision = "fp32"
    run: RunFolder | None = None
    bundle: Bundle | None = None
    network: Callable[[], Any] | None = None
    renormalized: Callable[[Triple, Triple], Session] | None = None
    twin: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.close()


def open_model(
    path: Path | str,
    *,
    runtime: str | None = None,
    which: str = "best",
    device: str = "auto",
    threads: int | None = None,
    use_twin: bool = False,
) -> LoadedModel:
    """Open a run folder (its checkpoint `which`, in torch) or a bundle (in ONNX Runtime, or in `runtime`).

    use_twin: as for `model_from_bundle`. Raises InputError when `path` is neither, and for a run in a runtime that
    runs no checkpoints.
    """
    path = Path(path)
    refuse_url(path, "copy it here first")
    if (path / MANIFEST).is_file():
        return model_from_bundle(Bundle.open(path), runtime=runtime, device=device, threads=threads, use_twin=use_twin)
    if not path.is_dir():
        raise InputError(f"no run or bundle at '{path}': expected a folder made by `vitx train` or `vitx export`")
    if not RunFolder(path).exists():
        raise InputError(f"'{path}' is neither a run nor a bundle: it has no run.json and no {MANIFEST}")
    if runtime is not None and require(runtime).source != "run":
        raise InputError(f"runtime {runtime}: a run's checkpoint runs in torch; export it to a bundle for others")
    return _model_from_run(RunFolder.open(path), which, device, threads, compiled=runtime == "torch-compile")


def open_served(url: str, reference: LoadedModel, precision: Precision, token: bytes | None) -> LoadedModel:
    """The model at `url` of a server, which is asked over HTTP and gets its images as the reference does.

    precision: what it computes in. token: the bearer token that its server asks for. Raises what `RemoteSession` does.
    """
    return LoadedModel(
        name=url,
        session=RemoteSession(url, reference.preprocessing, len(reference.labels), token),
        preprocessing=reference.preprocessing,
        labels=reference.labels,
        data=reference.data,
        sha256="",
        precision=precision,
    )


def require_run(which: str, *models: LoadedModel) -> None:
    """Raise InputError for another checkpoint than "best" where no model is a run: nothing would be chosen by it."""
    if which != "best" and all(model.run is None for model in models):
        raise InputError(f"--checkpoint {which} is of a run, and '{models[0].name}' is none: leave it out")


def model_from_bundle(
    bundle: Bundle,
    *,
    runtime: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    use_twin: bool = False,
) -> LoadedModel:
    """Load a bundle in `runtime`, by default ONNX Runtime.

    use_twin: on a CPU, run a half-precision graph as its float32 twin, unless a runtime was chosen. Parity judges such
    a bundle by its twin; an evaluation runs the graph itself.
    """
    manifest = bundle.manifest
    twin = _twin_session(bundle, device) if use_twin and runtime is None else None
    session = twin or load_session(bundle, runtime or DEFAULT_RUNTIME, device=device, threads=threads)
    return LoadedModel(
        name=f"{bundle.path} in {runtime or DEFAULT_RUNTIME}",
        session=session,
        preprocessing=manifest.preprocessing,
        labels=manifest.labels,
        data=manifest.data,
        sha256=bundle.subject()[MANIFEST],
        precision=coarser(manifest.precision, session.describe().get("precision", "")),
        bundle=bundle,
        twin=twin is not None,
    )


def _twin_session(bundle: Bundle, device: str) -> Session | None:
    """The float32 twin of a bundle that computes in a half type, if only beside 8 bits: it rounds where the graph says.

    None for others, and on a GPU.

    ONNX Runtime's CPU computes float16 nodes in float32 and leaves the rounding out, and has no bfloat16 products.
    """
    from vitx.core.machine import local_gpus

    manifest = bundle.manifest
    halves = manifest.precision in ("fp16", "bf16") or manifest.base != "fp32"
    if not halves or device == "cuda" or (device == "auto" and local_gpus()):
        return None
    import onnx

    from vitx.export.graph.dataflow import read_onnx
    from vitx.export.precision.half import cpu_twin
    from vitx.runtimes.onnxruntime import OnnxRuntimeSession

    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "float32 twin.onnx"
        onnx.save(cpu_twin(read_onnx(bundle.model_path)), str(twin))
        return OnnxRuntimeSession(bundle, device="cpu", graph=twin)


def _model_from_run(run: RunFolder, which: str, device: str, threads: int | None, *, compiled: bool) -> LoadedModel:
    from vitx.runtimes.torch import load_run

    info = run.info
    session, weights_sha256 = load_run(run, which, device=device, threads=threads, compiled=compiled)
    return LoadedModel(
        name=f"{info.name}, checkpoint {which}",
        session=session,
        preprocessing=info.preprocessing,
        labels=info.class_names,
        data=info.data,
        sha256=weights_sha256,
        run=run,
        network=session.network,
        renormalized=session.with_normalization,
    )
