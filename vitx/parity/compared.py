"""The two sides of a comparison: any run or bundle, in any runtime, opened the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitx.core.bundle import MANIFEST, Bundle, Precision
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.runtimes import load_session
from vitx.runtimes.requirements import require
from vitx.runtimes.session import Session

Triple = tuple[float, float, float]
DEFAULT_RUNTIME = "onnxruntime"


@dataclass(frozen=True)
class Side:
    """A classifier, loaded. At most one of `run` and `bundle` is set.

    network: the torch module itself, on the CPU and not to be changed, where there is one.
    renormalized: the same network with another (mean, std), where it can be had.
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


def open_side(
    path: Path,
    *,
    runtime: str | None = None,
    which: str = "best",
    device: str = "auto",
    threads: int | None = None,
    stand_in: Callable[[Bundle], Session | None] = lambda bundle: None,
) -> Side:
    """Open a run folder (its checkpoint `which`, in torch) or a bundle (in ONNX Runtime, or in `runtime`).

    stand_in: as for `bundle_side`. Raises InputError when `path` is neither, or for a run in a runtime that runs no
    checkpoints.
    """
    if (path / MANIFEST).is_file():
        return bundle_side(Bundle.open(path), runtime=runtime, device=device, threads=threads, stand_in=stand_in)
    if path.is_dir() and not (path / "run.json").is_file():
        raise InputError(f"'{path}' is neither a run nor a bundle: it has no run.json and no {MANIFEST}")
    if runtime is not None and require(runtime).source != "run":
        raise InputError(f"runtime {runtime}: a run's checkpoint runs in torch; export it to a bundle for others")
    return _run_side(RunFolder.open(path), which, device, threads, compiled=runtime == "torch-compile")


def bundle_side(
    bundle: Bundle,
    *,
    runtime: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    stand_in: Callable[[Bundle], Session | None] = lambda bundle: None,
) -> Side:
    """Load a bundle in `runtime`, by default ONNX Runtime.

    stand_in: gives the session that stands for a bundle this machine cannot run as written, or None; it is asked only
    where no runtime was chosen.
    """
    manifest = bundle.manifest
    session = stand_in(bundle) if runtime is None else None
    return Side(
        name=f"{bundle.path} in {runtime or DEFAULT_RUNTIME}",
        session=session or load_session(bundle, runtime or DEFAULT_RUNTIME, device=device, threads=threads),
        preprocessing=manifest.preprocessing,
        labels=manifest.labels,
        data=manifest.data,
        sha256=bundle.subject()[MANIFEST],
        precision=manifest.precision,
        bundle=bundle,
    )


def _run_side(run: RunFolder, which: str, device: str, threads: int | None, *, compiled: bool) -> Side:
    from vitx.runtimes.torch import load_run

    info = run.info
    session, weights = load_run(run, which, device=device, threads=threads, compiled=compiled)
    return Side(
        name=f"{info.name}, checkpoint {which}",
        session=session,
        preprocessing=info.preprocessing,
        labels=info.class_names,
        data=info.data,
        sha256=weights,
        run=run,
        network=session.network,
        renormalized=session.with_normalization,
    )
