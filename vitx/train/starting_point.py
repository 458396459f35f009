"""What a run begins from: the weights of `--from`, and settings that follow from the photographs and the machine."""

import io
from pathlib import Path
from statistics import median

import timm
from PIL import Image

from vitx.core.bundle import MANIFEST
from vitx.core.errors import UNUSABLE, InputError
from vitx.core.machine import usable_cores
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.models.device import choose_device
from vitx.models.source import PREFIX, SourceRequest, at_size, preprocessing_of
from vitx.train.recipes.photos import Photographs
from vitx.train.recipes.recipe import DERIVED_ARGUMENTS, ModelChoice, Recipe, from_root

MEASURED_IMAGES = 64


def begun_from(recipe: Recipe, source: str) -> Recipe:
    """The recipe for fine-tuning `source`: model:timm/NAME (published weights), a run folder, or a file of weights.

    A network of timm and a run bring their architecture and the pixels they were trained with; a file has weights
    alone, of `model.name`. Raises InputError for what is none of them.
    """
    if source.startswith(PREFIX):
        return _from_published(recipe, SourceRequest(source))
    path = Path(from_root(source))
    if path.is_dir():
        other = RunFolder(path).exists() or (path / MANIFEST).is_file()  # of a bundle `open` says what to give
        kinds = () if other else ("*.safetensors", "*.bin", "*.pth")
        if weights := sorted(each for kind in kinds for each in path.glob(kind)):  # as timm and transformers save one
            raise InputError(f"--from {source}: no run; for the weights in that folder give --from {weights[0]}")
        info = RunFolder.open(path).info
        kwargs = {name: value for name, value in info.model.kwargs.items() if name not in DERIVED_ARGUMENTS}
        choice = ModelChoice(name=info.model.name, kwargs=kwargs, initial_checkpoint=str(path))
        return recipe.changed({"model": choice, "preprocessing": info.preprocessing})
    if not path.is_file():
        raise InputError(
            f"--from {source}: expected model:timm/NAME, a run folder, or a file of weights; there is none"
        )
    return recipe.changed({"model.initial_checkpoint": str(path)})


def _from_published(recipe: Recipe, request: SourceRequest) -> Recipe:
    request.require_known()
    config = timm.get_pretrained_cfg(request.network)
    assert config is not None  # it is known
    if not config.has_weights:
        raise InputError(
            f"--from {request.target}: timm has no published weights of '{request.network}'; leave --from out, or give "
            "a file of weights"
        )
    arguments = request.arguments
    if "img_size" in arguments:
        config = at_size(config, arguments.pop("img_size"))
    choice = ModelChoice(name=request.network, kwargs=arguments, initial_checkpoint="timm")
    return recipe.changed({"model": choice, "preprocessing": preprocessing_of(config)})


def photographs_of(data: str, device: str) -> Photographs:
    """How many images there are to train on, and how large: of some, their first bytes alone are looked at."""
    images = open_images(data, "train", skip_bad=True)  # the run itself refuses, or counts, what cannot be read
    sample = images.evenly_spaced(MEASURED_IMAGES)
    sides = [side for index in range(len(sample)) if (side := _shorter_side(sample.read(index)))]
    return Photographs(
        images=len(images),
        shorter_side=int(median(sides or [0])),
        on_gpu=choose_device(device).type == "cuda",
        cores=usable_cores(),
    )


def _shorter_side(encoded: bytes) -> int:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return min(image.size)
    except (OSError, Image.DecompressionBombError, *UNUSABLE):
        return 0
