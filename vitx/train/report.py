"""The report of a run: one HTML page with curves, recipe, environment, confusion matrix and layers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vitx.core.bundle import refuse_in_bundle
from vitx.core.console import log, progress
from vitx.core.errors import InputError
from vitx.core.files import check_file, write_bytes
from vitx.core.options import Checkpoint
from vitx.core.page import page, picture, section, table
from vitx.core.panels import own_style, png
from vitx.core.preprocess import Preprocessing
from vitx.core.probabilities import classification_metrics, require_finite, wilson_interval
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped, open_images
from vitx.models import image_tensor, load_run_model
from vitx.train.loop.checkpoint import Metrics, best_row, folder_name, is_finished, read_metrics
from vitx.train.loop.environment import RunEnvironment
from vitx.train.progress import OUT_OF_PATIENCE
from vitx.train.recipes.recipe import Recipe, flat_settings, read_recipe
from vitx.train.recipes.registry import RECIPES, get_recipe
from vitx.train.report_figures import draw_confusion, draw_curves, draw_layers

MOST_CONFUSED = 10
BATCH_SIZE = 64

Int64Array = npt.NDArray[np.int64]


def confusion_matrix(labels: Int64Array, predicted: Int64Array, classes: int) -> Int64Array:
    """Count labels and predictions, both int64 (N,): int64 (classes, classes), row the label, column the prediction."""
    # label · classes + prediction numbers the entries row by row.
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def most_confused(matrix: Int64Array) -> list[tuple[int, int, int]]:
    """The largest entries off the diagonal as (label, predicted, count), at most `MOST_CONFUSED`, none of them 0."""
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSED]
    places = [np.unravel_index(place, wrong.shape) for place in order]
    return [(int(row), int(column), int(wrong[row, column])) for row, column in places if wrong[row, column]]


@own_style()
def write_report(
    run: RunFolder,
    out: Path,
    *,
    data: str | None = None,
    which: Checkpoint = "best",
    device: torch.device,
    skip_bad: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write the page `out` and return its numbers of the checkpoint.

    If the run's images are gone, the page says so in place of the confusion matrix; if those of a given `data` are, it
    is an InputError. Raises InputError for a run whose first epoch is not done, for images of other classes, and for an
    `out` in a bundle.
    """
    refuse_in_bundle(out)
    check_file(out, "report.html")
    recipe = read_recipe(run.path)
    model, state = load_run_model(run, which)  # once: a training that goes on may switch the link at any time
    history = read_metrics(run.metrics_path, run.checkpoint("last")[1].epoch)
    try:
        images = _images(run, data, skip_bad=skip_bad)
    except InputError as error:
        if data is not None:
            raise
        logits, without_matrix = None, f"No confusion matrix: {error}"
        log(without_matrix, quiet=quiet)
    else:
        logits = _logits(model.to(device), run.info.preprocessing, images, device, quiet=quiet)
    summary: dict[str, Any] = {
        "page": str(out),
        "checkpoint": folder_name(state.epoch),
        "weights": "trained" if which.endswith("-raw") else "averaged",
        "epochs": f"{len(history)} of {recipe.epochs}{_stopped(history, recipe)}",
    }
    if logits is not None:
        summary |= {"images": len(images), **classification_metrics(logits, images.labels)}
    body = [*_facts(run, recipe, history, summary), *_curves(history, recipe, state.epoch)]
    if logits is None:
        body.append(section("confusion", "Confusion matrix", without_matrix))
    else:
        matrix = confusion_matrix(images.labels, logits.argmax(axis=1), len(images.class_names))
        body += _confusion(matrix, images.class_names, images.name)
    body += [*_recipe(recipe), *_environment(RunEnvironment.read(run.path))]
    write_bytes(out, page(run.info.name, body).encode())
    return summary


def _stopped(history: list[Metrics], recipe: Recipe) -> str:
    early = len(history) < recipe.epochs and is_finished(history, recipe.epochs, recipe.selection)
    return f", {OUT_OF_PATIENCE}" if early else ""


def _images(run: RunFolder, data: str | None, *, skip_bad: bool) -> ImageSet:
    info = run.info
    images = open_images(data or info.data, "val", skip_bad=skip_bad, check_size=info.preprocessing.check_size)
    log_skipped(images)
    if images.class_names != info.class_names:
        raise InputError(
            f"'{images.name}' has {len(images.class_names)} classes that are not the {len(info.class_names)} of "
            f"'{run.path}': give the run's --data"
        )
    return images


def _logits(
    model: nn.Module, preprocessing: Preprocessing, images: ImageSet, device: torch.device, *, quiet: bool
) -> npt.NDArray[np.float32]:
    """Logits (N, C) of a network on `device`, on `images`; raise InputError where some are not finite."""
    batches, done = [], 0
    with torch.inference_mode(), progress("report", len(images), quiet=quiet) as bar:
        for pixels in images.batches(preprocessing, BATCH_SIZE):
            inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(device)
            batches.append(model(inputs).float().cpu().numpy())
            bar.update(done := done + len(pixels))
    logits = np.concatenate(batches)
    require_finite(logits)
    return logits


def _facts(run: RunFolder, recipe: Recipe, history: list[Metrics], summary: dict[str, Any]) -> Iterator[str]:
    info, best = run.info, best_row(history, recipe.selection.metric)
    measured = {}
    if "top1" in summary:
        measured = {"top-1": _share(summary["top1"], summary["images"])}
        measured |= {title: f"{summary[title.lower()]:.4f}" for title in ("NLL", "ECE", "Brier")}
    yield table(
        [
            ("recipe", info.recipe),
            ("network", f"{info.model.name}, {info.model.num_classes} classes"),
            ("data", info.data),
            ("epochs", summary["epochs"]),
            ("best epoch", f"{best['epoch']} by {recipe.selection.metric}, top-1 {best['top1']:.2%}"),
            ("last epoch", f"top-1 {history[-1]['top1']:.2%}"),
            ("seconds", round(sum(row["seconds"] for row in history), 1)),
            ("checkpoint shown", f"{summary['checkpoint']}, {summary['weights']} weights"),
            *measured.items(),
        ]
    )


def _share(rate: float, images: int) -> str:
    low, high = wilson_interval(round(rate * images), images)
    return f"{rate:.2%} of {images} images, 95 % interval {low:.1%} to {high:.1%} (Wilson)"


def _curves(history: list[Metrics], recipe: Recipe, shown: int) -> Iterator[str]:
    yield section(
        "curves",
        "Curves",
        "Losses are unweighted means over an epoch's training batches; the other metrics are of the averaged weights "
        f"on the evaluation split. The dotted line marks the checkpoint shown, epoch {shown}. The best epoch is chosen "
        f"by {recipe.selection.metric} on that same split. Points of curves have no interval; "
        "`vitx analyze` has those of NLL, ECE and Brier.",
    )
    yield picture(png(draw_curves(history, shown)), "losses, accuracy, calibration and learning rate by epoch")
    if history[-1]["cos_sim"]:
        yield section(
            "layers",
            "Layers",
            "CosSim is the mean cosine between different patches after a block: at 1 all patches are alike. The spread "
            "of attention is the standard deviation over keys: at 0 every query attends to all keys equally.",
        )
        yield picture(png(draw_layers(history, shown)), "similarity of patches and spread of attention by block")


def _confusion(matrix: Int64Array, class_names: tuple[str, ...], name: str) -> Iterator[str]:
    counts = f"{matrix.sum()} images of {name}, {np.trace(matrix)} right."
    yield section("confusion", "Confusion matrix", f"{counts} Rows are labels, columns predictions.")
    yield picture(png(draw_confusion(matrix, class_names)), "confusion matrix")
    pairs = [
        (f"{class_names[label]} taken for {class_names[predicted]}", f"{count} of {matrix[label].sum()}")
        for label, predicted, count in most_confused(matrix)
    ]
    if pairs:
        yield table(pairs)


def _recipe(recipe: Recipe) -> Iterator[str]:
    settings = dict(flat_settings(recipe.model_dump(mode="json")))
    named = dict(flat_settings(get_recipe(recipe.name).model_dump(mode="json"))) if recipe.name in RECIPES else settings
    yield section("recipe", "Recipe", f"A star marks settings that differ from {recipe.name} in this version of vitx.")
    yield table(
        (key if named.get(key) == value else f"{key} *", value) for key, value in settings.items() if key != "name"
    )


def _environment(environment: RunEnvironment) -> Iterator[str]:
    yield section("environment", "Environment")
    yield table(flat_settings(environment.model_dump(mode="json")))
