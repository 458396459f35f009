"""Image sets to the last value: digests, keys, names and messages, and what is preferred where there is a choice."""

import io
import os
import pickle
import tarfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, decode
from vitx.data import cifar
from vitx.data.flat_folder import open_flat
from vitx.data.folder import class_names_in, list_images, open_folder
from vitx.data.hugging_face import RowReader, is_hugging_face
from vitx.data.image_set import EXTENSIONS, ImageSet, encode_png, evenly_spaced
from vitx.data.open import open_images
from vitx.data.webdataset import find_shards

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 4, 4, 3), np.uint8)


def image_set(count: int = 6) -> ImageSet:
    encoded = [encode_png(image) for image in PIXELS[:count]]
    labels = np.arange(count) % 3
    keys = tuple(f"{index}.png" for index in range(count))
    return ImageSet("six", ("a", "b", "c"), keys, labels, encoded.__getitem__, ("bad.png: broken",))


def write(path: Path, pixels: Any = PIXELS[0]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(pixels))


def test_digests_that_certificates_hold() -> None:
    """A digest is of keys, labels, lengths and bytes: another one would make every certificate one of other images."""
    assert image_set().digest() == "5f10ff55b7ca79dfbae609750ba2e9de51e62055bd1aae0a100ea8ee1b59ca24"
    assert open_images("digits", "val").keys[:3] == ("0000.png", "0005.png", "0010.png")
    assert open_images("digits", "train").keys[:5] == ("0001.png", "0002.png", "0003.png", "0004.png", "0006.png")


def test_a_digest_sees_each_of_its_parts() -> None:
    six = image_set()
    others = [
        ImageSet(six.name, six.class_names, ("x.png", *six.keys[1:]), six.labels, six.read),
        ImageSet(six.name, six.class_names, six.keys, six.labels[::-1], six.read),
        ImageSet(six.name, six.class_names, six.keys, six.labels, lambda index: six.read(5 - index)),
        six.first(5),
    ]
    assert len({six.digest(), *(each.digest() for each in others)}) == 5


def test_another_split_is_refused() -> None:
    with pytest.raises(InputError, match=r"unknown split 'test': known: train, val"):
        open_images("digits", "test")  # type: ignore[arg-type]


def test_parts_of_a_set() -> None:
    six = image_set()
    part = six.subset(np.array([4, 1]))
    assert (part.name, part.class_names, part.keys, part.labels.tolist()) == (
        "six",
        six.class_names,
        ("4.png", "1.png"),
        [1, 1],
    )
    assert (part.skipped, [part.read(0), part.read(1)]) == (six.skipped, [six.read(4), six.read(1)])
    assert part.subset(np.array([1])).read(0) == six.read(1)
    digits = open_images("digits", "val").subset(np.array([7, 3]))
    assert pickle.loads(pickle.dumps(digits)).read(1) == digits.read(1)
    assert six.first(None) is six.first(6) is six.first(9) is six.evenly_spaced(None) is six
    assert (six.first(2).keys, six.evenly_spaced(3).keys) == (("0.png", "1.png"), ("0.png", "2.png", "5.png"))
    assert (evenly_spaced(5, 1).tolist(), evenly_spaced(7, 7).tolist()) == ([0], [*range(7)])


@pytest.mark.parametrize("batch", [1, 4, 6, 9])
def test_batches_are_the_images_in_order(batch: int) -> None:
    found = [*image_set().batches(Preprocessing(image_size=4), batch, threads=3)]
    assert [len(each) for each in found] == [min(batch, 6 - start) for start in range(0, 6, batch)]
    np.testing.assert_array_equal(np.concatenate(found), PIXELS)


def test_a_png_is_stored_and_not_compressed() -> None:
    for pixels in (PIXELS[0], PIXELS[0, :, :, 0]):
        content = encode_png(pixels)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)
        assert pixels.tobytes()[:4] in content


def test_every_format_is_listed(tmp_path: Path) -> None:
    assert {*EXTENSIONS} == {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
    for index, end in enumerate((*sorted(EXTENSIONS), ".PNG", ".Jpeg")):
        (tmp_path / f"{index:02d}{end}").touch()
    for name in ("a.txt", "png", ".png", "a.png.part"):
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / ".hidden" / "inner").mkdir(parents=True)
    (tmp_path / ".hidden" / "inner" / "a.png").touch()
    assert [path.stem for path in list_images(tmp_path)] == [f"{index:02d}" for index in range(10)]


def test_hidden_folders_and_files_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("dog", "cat", ".git", "lost+found", "__MACOSX"):
            write(tmp_path / split / name / "0.png")
        (tmp_path / split / "notes.txt").touch()
    assert class_names_in(tmp_path) == ("cat", "dog")
    (tmp_path / "val" / "owl").mkdir()
    with pytest.raises(InputError, match=r"train has no folder for 'owl', which .*val has: add it there"):
        class_names_in(tmp_path)


def test_a_class_in_two_unicode_forms(tmp_path: Path) -> None:
    """macOS wrote é as two characters, e and an accent: the names look the same."""
    for folder in ("train/caf\u00e9", "val/cafe\u0301"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(
        InputError,
        match=r"val has 'caf\u00e9', but spelled in another Unicode form \(NFC or NFD\) than in .*train: rename",
    ):
        class_names_in(tmp_path)


def test_the_name_of_a_class_is_utf_8(tmp_path: Path) -> None:
    """Linux takes any bytes; a graph, whose metadata has the names, does not."""
    for split in ("train", "val"):
        (tmp_path / split / os.fsdecode(b"caf\xe9")).mkdir(parents=True)
    with pytest.raises(InputError, match=r"train' has a folder whose name is not UTF-8, 'caf\\udce9': rename it$"):
        class_names_in(tmp_path)


def test_two_unicode_forms_of_a_class_in_one_folder(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("caf\u00e9", "cafe\u0301", "tea"):
            write(tmp_path / split / name / "0.png")
            write(tmp_path / split / name / "1.png")
    twice = r"has 'caf\u00e9' twice, in two Unicode forms \(NFC and NFD\): move the images of both"
    with pytest.raises(InputError, match=twice):
        class_names_in(tmp_path)
    with pytest.raises(InputError, match=twice):
        open_flat(tmp_path / "val", "train", skip_bad=False)


def test_many_names_are_cut(tmp_path: Path) -> None:
    names = tuple("abcdefgh")
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
    five = "'a', 'b', 'c', 'd', 'e'"
    with pytest.raises(InputError, match=rf"val has no readable image of {five} and 3 more$"):
        open_folder(tmp_path / "val", names, skip_bad=False)
    for name in names[5:]:
        write(tmp_path / "val" / name / "0.png")
    with pytest.raises(InputError, match=rf"val has no readable image of {five}$"):
        open_folder(tmp_path / "val", names, skip_bad=False)


def test_unreadable_images_are_counted_and_left_out(tmp_path: Path) -> None:
    for index, name in enumerate("aab"):
        write(tmp_path / "val" / name / f"{index}.png")
    for index in range(3, 6):
        (tmp_path / "val" / "a" / f"{index}.png").write_bytes(b"broken")
    with pytest.raises(
        InputError, match=r"unreadable image .*a/3\.png: .* \(and 2 more\); repair or remove it, or pass"
    ):
        open_folder(tmp_path / "val", ("a", "b"), skip_bad=False)
    images = open_folder(tmp_path / "val", ("a", "b"), skip_bad=True)
    assert (images.name, images.keys) == (str(tmp_path), ("a/0.png", "a/1.png", "b/2.png"))
    assert (images.labels.tolist(), str(images.labels.dtype)) == ([0, 0, 1], "int64")
    assert [Path(line.partition(":")[0]).name for line in images.skipped] == ["3.png", "4.png", "5.png"]
    for index in (4, 5):
        (tmp_path / "val" / "a" / f"{index}.png").unlink()
    with pytest.raises(InputError, match=r"unreadable image .*a/3\.png: not an image .*TIFF\); repair or remove"):
        open_folder(tmp_path / "val", ("a", "b"), skip_bad=False)


def test_a_folder_of_classes_comes_before_all_else(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write(tmp_path / split / "a" / "0.png")
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "dataset_dict.json").touch()
    (tmp_path / "train-0.tar").touch()
    assert open_images(str(tmp_path), "val").keys == ("a/0.png",)
    assert is_hugging_face(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    assert not is_hugging_face(tmp_path)
    for name, counts in {
        "x.parquet": True,
        "data/x.parquet": True,
        "data/._x.parquet": False,
        ".x/x.parquet": False,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        assert is_hugging_face(tmp_path) is counts
        (tmp_path / name).unlink()


def cifar_100(folder: Path, rows: dict[str, Any], names: str = "cat\ndog") -> Path:
    folder.mkdir()
    for name, content in rows.items():
        np.asarray(content, np.uint8).tofile(folder / name)
    (folder / "fine_label_names.txt").write_text(names)
    return folder


def test_a_cifar_image_is_three_planes_behind_its_labels(tmp_path: Path) -> None:
    planes = RNG.integers(0, 256, (2, 3, 32, 32), np.uint8)
    rows = np.concatenate([np.array([[7, 1], [9, 0]], np.uint8), planes.reshape(2, -1)], axis=1)
    folder = cifar_100(tmp_path / "cifar-100-binary", {"train.bin": rows, "test.bin": rows[:1]})
    assert cifar.find_folder(tmp_path) == cifar.find_folder(folder) == folder
    assert cifar.find_folder(tmp_path / "none") is None
    (tmp_path / "link").symlink_to(folder)
    assert cifar.find_folder(tmp_path / "link") == folder
    with chdir(folder):
        assert cifar.find_folder(Path()) == folder
    images = open_images(str(folder), "train")
    assert (images.name, images.keys, images.labels.tolist()) == (str(folder), ("train/00000", "train/00001"), [1, 0])
    np.testing.assert_array_equal(np.asarray(decode(images.read(1))), planes[1].transpose(1, 2, 0))
    assert open_images(str(folder), "val").keys == ("val/00000",)
    (folder / "fine_label_names.txt").write_text("cat")
    with pytest.raises(InputError, match="has the label 1 but names 1 classes: unpack it again"):
        open_images(str(folder), "train")
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"train\.bin has 0 bytes, not a multiple of 3074: unpack it again"):
        open_images(str(folder), "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0]}, "has 2 images and 1 labels: unpack it again"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "is not a batch of CIFAR: b'fine_labels'"),
        ({b"data": np.zeros((2, 5), np.uint8), b"fine_labels": [0, 0]}, "is not a batch of CIFAR: cannot reshape"),
        ({b"data": [None], b"fine_labels": [0]}, "is not a batch of CIFAR: "),
        ({b"data": [[300] * 3072], b"fine_labels": [0]}, "is not a batch of CIFAR: "),
        ({b"data": np.zeros((0, 3072), np.uint8), b"fine_labels": []}, "has 0 images and 0 labels: unpack it again"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [-1]}, "has the label -1 but names 1 classes"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [[0]]}, "is not a batch of CIFAR: labels of 2 axes"),
        ([1, 2], "is not a file of CIFAR: it holds a list"),
        (np.float64(1), r"is not a file of CIFAR: it asks for numpy\._core\.multiarray\.scalar"),
    ],
)
def test_a_pickled_batch_that_is_none(tmp_path: Path, content: Any, message: str) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"cat"]}))
    (folder / "train").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(InputError, match=message):
        open_images(str(tmp_path), "train")


@pytest.mark.parametrize("names", [{}, {b"fine_label_names": None}, {b"fine_label_names": ["cat"]}, b"\xff\xfe"])
def test_damaged_names_of_classes_are_said_to_be(tmp_path: Path, names: Any) -> None:
    if isinstance(names, bytes):
        folder = cifar_100(tmp_path / "cifar-100-binary", {"train.bin": np.zeros((1, 3074), np.uint8)})
        (folder / "fine_label_names.txt").write_bytes(names)
    else:
        (tmp_path / "cifar-100-python").mkdir()
        batch = {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [0]}
        (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(batch, protocol=4))
        (tmp_path / "cifar-100-python" / "meta").write_bytes(pickle.dumps(names))
    with pytest.raises(InputError, match="does not name the classes of CIFAR"):
        open_images(str(tmp_path), "train")


def test_a_batch_of_plain_numbers_is_one_of_bytes(tmp_path: Path) -> None:
    planes = RNG.integers(0, 256, (1, 3, 32, 32), np.uint8)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"cat"]}))
    content = {b"data": planes.reshape(1, -1).tolist(), b"fine_labels": [0]}
    (folder / "train").write_bytes(pickle.dumps(content, protocol=4))
    images = open_images(str(tmp_path), "train")
    np.testing.assert_array_equal(np.asarray(decode(images.read(0))), planes[0].transpose(1, 2, 0))


def shard(path: Path, *members: tuple[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_samples_of_shards(tmp_path: Path) -> None:
    """Names in folders, labels before and behind, other members of a sample, a label twice, capitals."""
    png = [encode_png(image) for image in PIXELS]
    first = (("a/0.png", png[0]), ("a/0.cls", b"1"), ("a/0.json", b'{"label": 2}'), ("b/0.json", b'{"label": 0}'))
    shard(tmp_path / "train-0.tar", *first, ("b/0.PNG", png[1]), ("b/0.txt", b"a caption"))
    shard(tmp_path / "train-1.tar", ("7.cls", b" 2\n"), ("7.jpg", png[2]))
    shard(tmp_path / "test-0.tar", ("8.png", png[3]), ("8.cls", b"4"))
    images = open_images(str(tmp_path), "train")
    assert (images.name, images.keys) == (str(tmp_path), ("train-0.tar/a/0", "train-0.tar/b/0", "train-1.tar/7"))
    assert (images.labels.tolist(), images.class_names) == ([1, 0, 2], ("0", "1", "2", "3", "4"))
    assert [images.read(index) for index in range(3)] == png[:3]
    assert open_images(str(tmp_path), "val").keys == ("test-0.tar/8",)
    names = "\n".join("abcde")
    (tmp_path.parent / "classnames.txt").write_text(names)
    assert open_images(str(tmp_path), "train").class_names == (*"abcde",)
    (tmp_path / "classnames.txt").write_text(names.upper())
    assert open_images(str(tmp_path), "train").class_names == (*"ABCDE",)
    shard(tmp_path / "train-2.tar", ("9.cls", b"-1"), ("9.jpg", png[2]))
    with pytest.raises(InputError, match=r"9\.cls says class -1: expected 0 to 1,048,575"):
        open_images(str(tmp_path), "train")
    (tmp_path.parent / "classnames.txt").unlink()


def test_shards_are_found_by_the_first_name_of_a_split(tmp_path: Path) -> None:
    for name in ("validation-0.tar", "test/1.tar", "test/0.tar", "train/x.tar"):
        shard(tmp_path / name)
    assert find_shards(str(tmp_path), "val") == (tmp_path / "validation-0.tar",)  # *val*.tar
    (tmp_path / "validation-0.tar").unlink()
    assert find_shards(str(tmp_path), "val") == (tmp_path / "test/0.tar", tmp_path / "test/1.tar")
    assert find_shards(str(tmp_path / "{split}" / "?.tar"), "val") == (tmp_path / "test/0.tar", tmp_path / "test/1.tar")
    assert find_shards(str(tmp_path / "{split}" / "0.tar"), "train") == ()
    with pytest.raises(
        InputError, match=r"no train shards at '.*': expected names such as train-000\.tar, or a pattern"
    ):
        open_images(str(tmp_path / "{split}" / "0.tar"), "train")


def test_a_row_is_read_from_its_bytes_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"of the file")
    rows = [{"img": {"bytes": b"given", "path": "none"}}, {"img": {"bytes": None, "path": str(tmp_path / "a.png")}}]
    read = RowReader(rows, "img")
    assert [read(0), read(np.int64(1))] == [b"given", b"of the file"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "taken"),
    [
        (("coarse_label", "fine_label"), "fine_label"),
        (("fine_label", "label"), "label"),
        (("labels", "fine_label"), "labels"),
        (("species",), "species"),
        (("other", "species"), "other"),
    ],
)
def test_the_column_of_labels(tmp_path: Path, columns: tuple[str, ...], taken: str) -> None:
    datasets = pytest.importorskip("datasets", reason="an optional source")
    features = {"img": datasets.Image(), **{name: datasets.ClassLabel(names=[name, "b"]) for name in columns}}
    rows = {"img": [{"bytes": encode_png(PIXELS[0]), "path": None}] * 2, **{name: [0, 1] for name in columns}}
    datasets.disable_progress_bars()
    datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows, datasets.Features(features))}).save_to_disk(
        str(tmp_path / "set")
    )
    images = open_images(str(tmp_path / "set"), "val")
    assert (images.class_names, images.labels.tolist()) == ((taken, "b"), [0, 1])
    assert (images.name, images.keys) == (str(tmp_path / "set"), ("test/0000000", "test/0000001"))
    assert images.read(1) == encode_png(PIXELS[0])
