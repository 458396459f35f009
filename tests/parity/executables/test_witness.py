"""`witness.safetensors`: which images it holds, and that whatever was altered in it is refused by name."""

import contextlib
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from bundle_fixture import LABELS, PREPROCESSING
from vitx.core.bundle import MANIFEST, MODEL, WITNESS, Bundle, FileEntry, Manifest
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import read_record, write_json
from vitx.data.image_set import ImageSet
from vitx.parity import exported
from vitx.parity.executables import witness_set
from vitx.parity.executables.witness import Witness, WitnessInfo, digest_of, encode_images, read_witness
from vitx.parity.executables.witness_set import add_witness, draw_images
from vitx.parity.loaded_model import LoadedModel
from vitx.runtimes.torch import TorchSession
from witnessed_bundle import IMAGES, WITNESS_IMAGES, evidence, logits_float64, reference_float64, seal_manifest


def rewritten(bundle: Bundle, *, info: dict[str, Any] | None = None, **tensors: Any) -> Bundle:
    """The witness set with other tensors and metadata, and a manifest that lists it so."""
    path = bundle.path / WITNESS
    with safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()["witness"])
    save_file({**load_file(path), **tensors}, path, {"witness": json.dumps({**metadata, **(info or {})})})
    sealed: Bundle = seal_manifest(bundle.path)
    return sealed


def test_the_images_are_those_that_enter_the_graph(witnessed: Bundle) -> None:
    witness = read_witness(witnessed)
    assert witness is not None
    pixels = np.concatenate(list(IMAGES.batches(PREPROCESSING, 64)))
    logits = logits_float64(pixels)
    ordered = np.sort(logits, axis=1)
    by_margin = np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")
    assert len(witness) == WITNESS_IMAGES
    assert witness.info.census == 85
    np.testing.assert_array_equal(witness.pixels[:85], pixels[by_margin[:85]])
    np.testing.assert_array_equal(witness.logits, logits_float64(witness.pixels))
    assert witness.logits.dtype == np.float64
    # The others are of the rest of the split, each once.
    rest = {pixels[row].tobytes() for row in by_margin[85:]}
    drawn = {image.tobytes() for image in witness.pixels[85:]}
    assert len(drawn) == 255
    assert drawn < rest
    info = witness.info
    assert (info.split, info.population, info.labels, info.reference) == ("colours", 360, LABELS, "numpy")
    assert (info.split_sha256, info.reference_sha256) == (IMAGES.digest(), "5" * 64)
    assert info.logit_std == pytest.approx(float(logits.std()), rel=1e-5)


def test_a_quarter_is_chosen_by_margin_and_the_rest_by_chance() -> None:
    margins = np.array([5.0, 1.0, 4.0, 0.5, 3.0, 2.0, 6.0, 7.0, 8.0, 9.0])
    chosen, census = draw_images(margins, 8, 0)
    assert (census, [*chosen[:2]], len({*chosen})) == (2, [3, 1], 8)
    assert {*draw_images(margins, 99, 0)[0]} == {*range(10)}
    assert draw_images(margins, 99, 0)[1] == 10
    # Over many splits each of the others is drawn about equally often, whatever its margin.
    counts = np.zeros(40)
    for seed in range(400):
        chosen, census = draw_images(np.arange(40.0), 20, seed)
        counts[chosen[census:]] += 1
    assert counts[:5].sum() == 0
    assert counts[5:].min() > 120
    assert counts[5:].max() < 230


def test_it_adds_a_tenth_at_most(tmp_path: Path, witnessed: Bundle) -> None:
    """Of model.onnx, whatever else is in the bundle; an image of the tests and its logits have 300 to 700 bytes."""
    (witnessed.path / WITNESS).unlink()
    bundle = seal_manifest(witnessed.path)
    margins = np.linspace(0, 1, 360)
    added = add_witness(bundle, IMAGES, *evidence(margins), reference_float64, count=None, flops=1, quiet=True)
    witness = read_witness(added)
    assert witness is None  # not one fits into a tenth of a graph of some hundred bytes
    assert Bundle.open(bundle.path).manifest == added.manifest == bundle.manifest
    files = {**bundle.manifest.files, MODEL: FileEntry(sha256="0" * 64, size=200_000)}
    big = Bundle(bundle.path, bundle.manifest.model_copy(update={"files": files}))
    larger = add_witness(big, IMAGES, *evidence(margins), reference_float64, count=None, flops=1, quiet=True)
    witness = read_witness(larger)
    assert witness is not None
    assert 20 < len(witness) < 80
    assert larger.manifest.files[WITNESS].size < 24_000


def test_a_first_guess_that_is_too_large_is_corrected(
    witnessed: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is guessed of 16 evenly spaced images: here they are plain, and all others are noise."""
    (witnessed.path / WITNESS).unlink()
    bundle, generator = seal_manifest(witnessed.path), np.random.default_rng(0)
    pixels = generator.integers(0, 256, (160, 16, 16, 3), dtype=np.uint8)
    pixels[np.linspace(0, 159, 16).astype(int)] = 7
    encoded = encode_images(pixels)
    images = ImageSet("noise", LABELS, tuple(map(str, range(160))), np.zeros(160, np.int64), encoded.__getitem__)
    files = {**bundle.manifest.files, MODEL: FileEntry(sha256="0" * 64, size=200_000)}
    big = Bundle(bundle.path, bundle.manifest.model_copy(update={"files": files}))
    tried: list[int] = []

    def draw(margins: Any, count: int, seed: int) -> Any:
        tried.append(count)
        return (np.arange(count) + 1) % 160, count // 4

    monkeypatch.setattr(witness_set, "draw_images", draw)
    add_witness(big, images, *evidence(np.zeros(160)), reference_float64, count=None, flops=1)
    expected, limit = [], 20_000
    sizes = [len(image) + 8 * len(LABELS) for image in encode_images(images_as_they_enter(images))]
    count = min(160, int(limit / sizes[0]))
    while True:
        expected.append(count)
        size = sum(sizes[1 : count + 1]) + (sizes[0] if count == 160 else 0)
        if size <= limit:
            break
        count = min(count - 1, int(count * limit / size))
    assert (len(tried) > 1, tried) == (True, expected)
    assert f"export: witness set of {tried[-1]} of 160 images, 0.02 MB" in capsys.readouterr().err
    none = add_witness(bundle, images, *evidence(np.zeros(160)), reference_float64, count=None)
    assert WITNESS not in none.manifest.files
    assert capsys.readouterr().err == "export: not one image fits into 0.0 MB: no witness set (see --witness)\n"


def test_a_default_set_takes_a_first_load_no_longer_than_a_few_seconds(
    witnessed: Bundle,
) -> None:
    """By the FLOPs of an image: DeiT-Ti has 319 of 360, DeiT-S 86, and what costs more or is not known has 80."""
    (witnessed.path / WITNESS).unlink()
    bundle = seal_manifest(witnessed.path)
    files = {**bundle.manifest.files, MODEL: FileEntry(sha256="0" * 64, size=5_000_000)}
    big = Bundle(bundle.path, bundle.manifest.model_copy(update={"files": files}))

    def drawn(flops: int | None, count: int | None = None) -> int:
        margins = np.linspace(0, 1, 360)
        added = add_witness(big, IMAGES, *evidence(margins), reference_float64, count=count, flops=flops, quiet=True)
        witness = read_witness(added)
        assert witness is not None
        return len(witness)

    assert [drawn(flops) for flops in (0, 2_506_986_240, 9_197_004_288, 35_126_135_808, None)] == [360, 319, 86, 80, 80]
    assert drawn(35_126_135_808, count=200) == 200  # what is asked for is taken


class _Transformed(nn.Module):
    """An operator without a formula for its FLOPs."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = torch.fft.fft2(images).abs().mean(dim=(1, 2, 3))
        return logits


def test_the_cost_of_an_image_is_that_of_the_checkpoint() -> None:
    assert TorchSession(nn.Conv2d(3, 5, 4), PREPROCESSING, device="cpu").flops() == 2 * 5 * 13 * 13 * 3 * 4 * 4
    assert TorchSession(_Transformed(), PREPROCESSING, device="cpu").flops() is None


def test_an_export_gives_the_cost_of_its_checkpoint_and_what_was_measured(
    witnessed: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        exported, "add_witness", lambda *args, count, flops, quiet: given.append((count, flops, args[:4], quiet))
    )
    session = TorchSession(nn.Conv2d(3, 5, 4), PREPROCESSING, device="cpu")
    reference = LoadedModel("a", session, PREPROCESSING, LABELS, "", "")
    found: Any = ("comparison", "certificate")
    for count in (None, 0, 5):
        exported._add_witness(reference, IMAGES, count, True, witnessed, *found)
    rest = ((witnessed, IMAGES, *found), True)
    assert given == [(None, session.flops(), *rest), (0, None, *rest), (5, None, *rest)]


def test_the_flips_of_the_split_are_in_it(witnessed: Bundle) -> None:
    """How many there are, and which of them are among its images."""
    (witnessed.path / WITNESS).unlink()
    bundle, margins = seal_manifest(witnessed.path), np.linspace(0, 1, 360)
    chosen, census = draw_images(margins, 40, int("7" * 8, 16))
    left_out = next(index for index in range(360) if index not in chosen)
    flipped = {IMAGES.keys[chosen[2]], IMAGES.keys[chosen[census + 5]], IMAGES.keys[left_out]}
    added = add_witness(bundle, IMAGES, *evidence(margins, flipped), reference_float64, count=40, quiet=True)
    witness = read_witness(added)
    assert witness is not None
    assert (witness.info.split_flips, witness.info.flipped) == (3, (2, census + 5))


def images_as_they_enter(images: ImageSet) -> Any:
    return np.concatenate(list(images.batches(PREPROCESSING, 64)))


def test_an_image_in_another_format_is_no_witness(witnessed: Bundle) -> None:
    """What other decoders make of bytes is not asked."""
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(buffer, "BMP")
    content = np.frombuffer(buffer.getvalue(), np.uint8)
    info = {"labels": [*LABELS]}
    changed = rewritten(witnessed, info=info, png=content, ends=np.array([len(content)]), logits=np.zeros((1, 4)))
    with pytest.raises(CheckFailed, match=r"image 0 of .* was altered \(cannot identify image file"):
        read_witness(changed)


def test_a_bundle_without_one_has_none(bare: Bundle) -> None:
    assert read_witness(bare) is None


def test_one_flipped_byte_anywhere_is_refused(witnessed: Bundle) -> None:
    path = witnessed.path / WITNESS
    whole, good = path.read_bytes(), read_witness(witnessed)
    assert good is not None
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises((CheckFailed, InputError), match=r"witness\.safetensors"):
            Bundle.open(witnessed.path)
        found: Witness | None = good
        with contextlib.suppress(CheckFailed, InputError):
            found = read_witness(seal_manifest(witnessed.path))  # sealed again: the file's own digests
        if found is not good:  # a name, say, or an unused bit of a PNG: the evidence is the same
            assert found is not None
            assert (found.pixels == good.pixels).all()
            assert (found.logits == good.logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"png": _repainted(w)}, "the images of .*witness.safetensors were altered after it was made"),
        (lambda w: {"logits": w.logits + 1e-9}, "the reference logits of .* were altered after it was made"),
        (lambda w: {"logits": w.logits[:, ::-1].copy()}, "the reference logits of .* were altered"),
        (
            lambda w: {"logits": w.logits.astype(np.float32)},
            "is no witness set: expected the tensors png, ends, logits",
        ),
        (lambda w: {"logits": w.logits[:, :3].copy()}, "is of other classes than"),
        (lambda w: {"logits": w.logits[:5].copy()}, "is of other classes than"),
        (lambda w: {"ends": np.array([3, 2, 1])}, "is of other classes than"),
        (lambda w: {"ends": np.arange(len(w)) * 0}, "images overlap or lie outside"),
        (lambda w: {"ends": np.arange(1, len(w) + 1)}, "images overlap or lie outside"),
        (lambda w: {"png": np.zeros(10, np.uint8)}, "images overlap or lie outside"),
        (lambda w: {"png": np.zeros_like(_png(w))}, "image 0 of .* was altered"),
        (lambda w: {"more": np.zeros(1)}, "expected the tensors"),
        (lambda w: {"info": {"labels": ["a", "b", "c", "d"]}}, "is of other classes than .*: its labels were changed"),
        (lambda w: {"info": {"census": 341}}, "340 images of 360, 341 by margin"),
        (lambda w: {"info": {"population": 339}}, "340 images of 339"),
        (lambda w: {"info": {"logit_std": -1.0}}, "is no witness set: 340 images"),
        (lambda w: {"info": {"flipped": [3], "split_flips": 0}}, r"is no witness set: 0 flips of the split, .* \(3,\)"),
        (lambda w: {"info": {"flipped": [3, 3], "split_flips": 5}}, "is no witness set: 5 flips of the split"),
        (lambda w: {"info": {"flipped": [340], "split_flips": 5}}, "is no witness set: 5 flips of the split"),
        (lambda w: {"info": {"flipped": [-1], "split_flips": 5}}, "is no witness set: 5 flips of the split"),
        (lambda w: {"info": {"split_flips": 361}}, "is no witness set: 361 flips of the split"),
        (lambda w: {"info": {"census": "many"}}, "is no witness set"),
    ],
)
def test_what_was_altered_is_named(witnessed: Bundle, change: Any, message: str) -> None:
    witness = read_witness(witnessed)
    with pytest.raises((CheckFailed, InputError), match=message):
        read_witness(rewritten(witnessed, **change(witness)))


def _png(witness: Any) -> Any:
    return np.frombuffer(b"".join(encode_images(witness.pixels)), np.uint8)


def _repainted(witness: Any) -> Any:
    """The same images in another order of equal length: two of the same size exchanged."""
    encoded = encode_images(witness.pixels)
    sizes: dict[int, int] = {}
    for place, image in enumerate(encoded):
        first = sizes.setdefault(len(image), place)
        if encoded[first] != image:
            encoded[first], encoded[place] = image, encoded[first]
            break
    return np.frombuffer(b"".join(encoded), np.uint8)


def test_an_image_of_another_size_is_refused_before_it_is_decoded(witnessed: Bundle) -> None:
    bomb = encode_images(np.zeros((1, 4000, 4000, 3), np.uint8))[0]
    info = {"images_sha256": digest_of(np.zeros(1)), "labels": [*LABELS]}
    changed = rewritten(
        *(witnessed,), info=info, png=np.frombuffer(bomb, np.uint8), ends=np.array([len(bomb)]), logits=np.zeros((1, 4))
    )
    with pytest.raises(InputError, match=re.escape("is RGB 4000 x 4000: expected (16, 16, 3)")):
        read_witness(changed)


@pytest.mark.parametrize("population", [10**12, 10**400], ids=["10^12", "10^400"])
def test_a_population_that_would_take_hours_to_count_is_refused(witnessed: Bundle, population: int) -> None:
    with pytest.raises(InputError, match="is no witness set: population"):
        read_witness(rewritten(witnessed, info={"population": population}))


@pytest.mark.parametrize("shape", [(-1, 1), (2, -1)])
def test_ends_in_rows_are_refused(witnessed: Bundle, shape: tuple[int, ...]) -> None:
    ends = np.arange(1, WITNESS_IMAGES + 1).reshape(shape)
    changed = rewritten(witnessed, ends=ends, logits=np.zeros((len(ends), len(LABELS))))
    with pytest.raises(InputError, match="is no witness set: expected the tensors png, ends, logits"):
        read_witness(changed)


def test_one_end_that_is_no_list_is_refused(witnessed: Bundle) -> None:
    with pytest.raises(InputError, match="is no witness set: expected the tensors png, ends, logits"):
        read_witness(rewritten(witnessed, ends=np.array(1)))


def test_an_image_that_pillow_does_not_open_for_its_size_is_refused(witnessed: Bundle) -> None:
    """Its header says 60,000 x 60,000: Pillow's own error for it is of no kind that other files raise."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    bomb += b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    changed = rewritten(
        *(witnessed,), png=np.frombuffer(bomb, np.uint8), ends=np.array([len(bomb)]), logits=np.zeros((1, len(LABELS)))
    )
    with pytest.raises(CheckFailed, match=r"image 0 of .* was altered"):
        read_witness(changed)


def test_a_type_that_numpy_does_not_have_is_refused(witnessed: Bundle) -> None:
    path = witnessed.path / WITNESS
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    header = {"__metadata__": metadata, "png": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    with pytest.raises(InputError, match="is no witness set"):
        read_witness(seal_manifest(witnessed.path))


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"x" * 100, b"\xff" * 100])
def test_what_is_no_safetensors_file_is_refused(witnessed: Bundle, content: bytes) -> None:
    (witnessed.path / WITNESS).write_bytes(content)
    with pytest.raises(InputError, match="is no witness set"):
        read_witness(seal_manifest(witnessed.path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("labels", ("green", "blue", "grey", "red"), "its labels were changed after it was made"),
        (
            "preprocessing",
            PREPROCESSING.model_copy(update={"interpolation": "bilinear"}),
            "was preprocessed otherwise than .* says: that was changed after it was made",
        ),
        (
            "preprocessing",
            PREPROCESSING.model_copy(update={"crop_fraction": 0.5}),
            "was preprocessed otherwise than",
        ),
    ],
)
def test_a_manifest_that_says_otherwise_is_refused(witnessed: Bundle, field: str, value: Any, message: str) -> None:
    path = witnessed.path / MANIFEST
    write_json(path, read_record(path, Manifest).model_copy(update={field: value}))
    with pytest.raises(CheckFailed, match=message):
        read_witness(Bundle.open(witnessed.path))


def test_every_field_is_read_back() -> None:
    assert WitnessInfo.model_fields.keys() == {
        *("format_version", "split", "split_sha256", "population", "census", "seed", "labels", "preprocessing"),
        *("reference", "reference_sha256", "logit_std", "images_sha256", "logits_sha256", "outputs_sha256"),
        *("split_flips", "flipped"),
    }
