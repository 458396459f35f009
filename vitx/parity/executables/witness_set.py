"""Draws the witness set of a bundle: which evaluation images, and the checkpoint's logits of them in float64."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import MANIFEST, MODEL, WITNESS, Bundle, FileEntry
from vitx.core.certificate import Certificate
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import Float64Array
from vitx.data.image_set import ImageSet
from vitx.parity.comparison import Comparison, prepared
from vitx.parity.executables.witness import Witness, WitnessInfo, digest_of, encode_images, write_witness

# By default a witness set adds at most this to a bundle: bytes, and share of model.onnx.
MOST_BYTES, MOST_SHARE = 20 * 10**6, 0.10
# And at most these FLOPs to a first load: two cores do 0.24e12 a second in float32. A larger network has some images
# all the same: 80 without a flip prove 5.7 % of a large split.
MOST_FLOPS, FEWEST = 0.8e12, 80
# Of the images a quarter are those of smallest margin, which the least error moves into another class.
CENSUS_SHARE = 4
_SAMPLED_SIZES = 16  # images encoded to guess how many fit


def draw_images(margins: Float64Array, count: int, seed: int) -> tuple[npt.NDArray[np.int64], int]:
    """Indices of `count` images, and how many of them, the first, are those of smallest margin.

    The others are drawn by chance, whatever their margin, from the rest of the split, without replacement. All images
    if `count` allows it.
    """
    population = len(margins)
    count = min(count, population)
    census = count if count == population else count // CENSUS_SHARE
    smallest = np.argsort(margins, kind="stable")[:census]
    others = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(population), smallest))[: count - census]
    return np.concatenate([smallest, others]).astype(np.int64), census


def add_witness(
    bundle: Bundle,
    images: ImageSet,
    comparison: Comparison,
    certificate: Certificate,
    reference: Callable[[UInt8Array], Mapping[str, Float64Array]],
    *,
    count: int | None,
    flops: int | None = None,
    quiet: bool = False,
) -> Bundle:
    """Write a witness set into a bundle that is being made, list it in its manifest, and return the new bundle.

    comparison, certificate: of the bundle's graph on all `images`; their flips are those that were certified already.
    reference: its `logits` in float64 (N, C), and each output that the bundle has. count: how many images; None for as
    many as keep the bundle from growing by more than 20 MB or a tenth of its graph, and its first load from taking
    seconds more. flops: of one image; None where they are not known. Without room for one image the bundle stays as it
    is, and the log says so; of a bundle with further outputs InputError is raised, for nothing else certifies them.
    """
    limit = min(MOST_BYTES, int(MOST_SHARE * bundle.manifest.files[MODEL].size))
    seed = int(certificate.data_sha256[:8], 16)  # of the images themselves: nobody chooses it
    in_time = FEWEST if flops is None else max(FEWEST, int(MOST_FLOPS / max(flops, 1)))
    wanted = min(_count_that_fits(bundle, images, limit), in_time) if count is None else count
    while wanted:
        chosen, census = draw_images(comparison.margins, wanted, seed)
        pixels = prepared(images.subset(chosen), bundle.manifest.preprocessing)
        encoded = encode_images(pixels)
        size = sum(map(len, encoded)) + len(chosen) * _reference_bytes(bundle)
        if count is not None or size <= limit:
            break
        wanted = min(wanted - 1, int(wanted * limit / size))
    if not wanted and bundle.manifest.outputs:
        raise InputError(
            f"not one image fits into {limit / 1e6:.1f} MB, a tenth of the graph, and --output "
            f"{bundle.manifest.outputs[0].name} is certified by the witness set: give --witness N"
        )
    if not wanted:
        log(f"export: not one image fits into {limit / 1e6:.1f} MB: no witness set (see --witness)", quiet=quiet)
        return bundle
    found = reference(pixels)
    logits, flipped = found["logits"], {flip.key for flip in comparison.flips}
    outputs = {str(spec.name): found[spec.name].astype(np.float32) for spec in bundle.manifest.outputs}
    info = WitnessInfo(
        split=images.name,
        split_sha256=certificate.data_sha256,
        population=len(images),
        census=census,
        seed=seed,
        labels=bundle.manifest.labels,
        preprocessing=bundle.manifest.preprocessing,
        reference=certificate.reference,
        reference_sha256=certificate.reference_sha256,
        logit_std=comparison.logit_std,
        split_flips=len(flipped),
        flipped=tuple(place for place, index in enumerate(chosen) if images.keys[index] in flipped),
        images_sha256=digest_of(pixels),
        logits_sha256=digest_of(logits),
        outputs_sha256={name: digest_of(values) for name, values in outputs.items()},
    )
    path = bundle.path / WITNESS
    write_witness(path, Witness(info, pixels, logits, outputs), encoded)
    log(
        f"export: witness set of {len(chosen)} of {len(images)} images, {path.stat().st_size / 1e6:.2f} MB", quiet=quiet
    )
    return _listed(bundle, path)


def _count_that_fits(bundle: Bundle, images: ImageSet, limit: int) -> int:
    some = images.evenly_spaced(_SAMPLED_SIZES)
    encoded = encode_images(prepared(some, bundle.manifest.preprocessing))
    mean = sum(map(len, encoded)) / len(encoded) + _reference_bytes(bundle)
    return min(len(images), int(limit / mean))


def _reference_bytes(bundle: Bundle) -> int:
    """What the checkpoint's logits (float64) and further outputs (float32) of one image take."""
    widths = [math.prod(int(size) for size in spec.shape[1:]) for spec in bundle.manifest.outputs]
    return 8 * len(bundle.manifest.labels) + 4 * sum(widths)


def _listed(bundle: Bundle, path: Path) -> Bundle:
    entry = FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
    manifest = bundle.manifest.model_copy(update={"files": {**bundle.manifest.files, WITNESS: entry}})
    write_json(bundle.path / MANIFEST, manifest)
    return Bundle(bundle.path, manifest)
