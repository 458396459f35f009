"""Analyses while a network is trained: `vitx train --analysis-every N`."""

import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from vitx.analyze.analysis import analyze, chosen_metrics
from vitx.analyze.images import open_analysis_images
from vitx.analyze.metric import AnalysisOptions
from vitx.core.console import log
from vitx.core.files import write_json
from vitx.core.run import RunFolder
from vitx.models.source import Source

IMAGES = 128  # that each analysis looks at


def analysis_between_epochs(run: Path, every: int, *, skip_bad: bool, quiet: bool) -> Callable[[int, nn.Module], None]:
    """Return a function to be called after each epoch with its number and the averaged network.

    After every `every`-th epoch it writes what `vitx analyze` measures by default to RUN/analysis/epoch-NNNN.json, and
    logs how long that took. An analysis that is there already is not made again.
    """

    def after_epoch(epoch: int, model: nn.Module) -> None:
        path = run / "analysis" / f"epoch-{epoch:04d}.json"
        if epoch % every or path.is_file():
            return
        start = time.perf_counter()
        info = RunFolder.open(run).info
        source = Source(
            name=str(run),
            model=model,
            spec=info.model,
            class_names=info.class_names,
            preprocessing=info.preprocessing,
            data=info.data,
            checkpoint=f"epoch {epoch}",
            checkpoint_sha256="",
            recipe=info.recipe,
        )
        images = open_analysis_images(info.data, IMAGES, skip_bad=skip_bad, check_size=info.preprocessing.check_size)
        found = analyze(source, images, chosen_metrics(None), AnalysisOptions(), quiet=True)
        write_json(path, found.as_json())
        log(f"analysis of epoch {epoch}: {time.perf_counter() - start:.1f} s", quiet=quiet)

    return after_epoch
