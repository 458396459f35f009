"""CIFAR, WebDataset shards and Hugging Face data sets, each written here and compared with the pixels that went in."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError, Preprocessing, decode
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.data.webdataset import _index, open_shards

NAMES = ("cat", "dog", "ship")
RNG = np.random.default_rng(0)
PIXELS = {split: RNG.integers(0, 256, (count, 32, 32, 3), np.uint8) for split, count in (("train", 15), ("val", 6))}
LABELS = {split: np.arange(len(pixels)) % 3 for split, pixels in PIXELS.items()}


def png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def flat(pixels: Any) -> Any:
    """CIFAR's order: all red, all green, all blue."""
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


class Python2Pickler(pickle._Pickler):  # the one that is written in Python
    """Writes texts and bytes as Python 2 did, in which the authors of CIFAR pickled."""

    def save_string(self, value: str | bytes) -> None:
        content = value.encode("latin1") if isinstance(value, str) else value
        short = len(content) < 256
        self.write((b"U" + bytes([len(content)]) if short else b"T" + len(content).to_bytes(4, "little")) + content)  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, str: save_string, bytes: save_string}


def python_2_pickle(content: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def cifar_10(root: Path, *, binary: bool) -> Path:
    folder = root / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir()
    parts = [(f"data_batch_{i + 1}", "train", slice(3 * i, 3 * i + 3)) for i in range(5)]
    for name, split, part in [*parts, ("test_batch", "val", slice(None))]:
        pixels, labels = flat(PIXELS[split][part]), LABELS[split][part]
        if binary:
            np.hstack([labels[:, None].astype(np.uint8), pixels]).tofile(folder / f"{name}.bin")
        else:
            (folder / name).write_bytes(python_2_pickle({"data": pixels, "labels": labels.tolist()}))
    if binary:
        (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    else:
        (folder / "batches.meta").write_bytes(python_2_pickle({"label_names": list(NAMES)}))
    return root


def cifar_100(root: Path, *, binary: bool) -> Path:
    folder = root / ("cifar-100-binary" if binary else "cifar-100-python")
    folder.mkdir()
    for name, split in (("train", "train"), ("test", "val")):
        pixels, labels = flat(PIXELS[split]), LABELS[split]
        if binary:
            rows = [np.full((len(labels), 1), 99, np.uint8), labels[:, None].astype(np.uint8), pixels]
            np.hstack(rows).tofile(folder / f"{name}.bin")
        else:
            content = {"data": pixels, "fine_labels": labels.tolist(), "coarse_labels": [99] * len(labels)}
            (folder / name).write_bytes(python_2_pickle(content))
    if binary:
        (folder / "fine_label_names.txt").write_text("\n".join(NAMES))
    else:
        (folder / "meta").write_bytes(python_2_pickle({"fine_label_names": list(NAMES)}))
    return root


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def shards(root: Path, *, label: str = "cls", names: bool = True, validation: str = "val") -> Path:
    """Five samples a shard; the label comes before the image in every second one."""
    for split, pixels in PIXELS.items():
        for shard in range(0, len(pixels), 5):
            with tarfile.open(root / f"set-{validation if split == 'val' else split}-{shard:04d}.tar", "w") as archive:
                for i in range(shard, min(shard + 5, len(pixels))):
                    number = int(LABELS[split][i])
                    content = f"{number}\n" if label == "cls" else json.dumps({"label": number, "width": 32})
                    members = [(f"part/{i:06d}.png", png(pixels[i])), (f"part/{i:06d}.{label}", content.encode())]
                    for name, data in members[:: 1 if i % 2 else -1]:
                        add(archive, name, data)
    if names:
        (root / "classnames.txt").write_text("\n".join(NAMES) + "\n")
    return root


def hugging_face(root: Path, *, saved: bool) -> Path:
    import datasets

    columns = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    splits = {
        name: datasets.Dataset.from_dict(
            {"img": [{"bytes": png(each), "path": None} for each in PIXELS[split]], "label": LABELS[split]}, columns
        )
        for name, split in (("train", "train"), ("validation", "val"))
    }
    if saved:
        datasets.DatasetDict(splits).save_to_disk(str(root))
    else:
        (root / "data").mkdir(parents=True)
        for name, dataset in splits.items():
            dataset.to_parquet(str(root / "data" / f"{name}-00000-of-00001.parquet"))
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


WRITERS: dict[str, Callable[[Path], Path]] = {
    "cifar10, binary": lambda root: cifar_10(root, binary=True),
    "cifar10, python": lambda root: cifar_10(root, binary=False),
    "cifar100, binary": lambda root: cifar_100(root, binary=True),
    "cifar100, python": lambda root: cifar_100(root, binary=False),
    "shards, cls": shards,
    "shards, json": lambda root: shards(root, label="json", validation="validation"),
    "hugging face, saved": lambda root: hugging_face(root / "saved", saved=True),
    "hugging face, parquet": lambda root: hugging_face(root / "parquet", saved=False),
}


def check(images: ImageSet, split: str) -> None:
    assert images.class_names == NAMES
    assert len(set(images.keys)) == len(images.keys) == len(PIXELS[split])
    assert images.labels.dtype == np.int64
    assert images.labels.tolist() == LABELS[split].tolist()
    for index in reversed(range(len(images))):
        np.testing.assert_array_equal(np.asarray(decode(images.read(index))), PIXELS[split][index])


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    data = WRITERS[name](tmp_path)
    check(open_images(str(data), "train"), "train")
    check(open_images(str(data), "val"), "val")


@pytest.mark.parametrize("name", WRITERS)
def test_images_can_be_read_in_another_process(name: str, tmp_path: Path) -> None:
    images = pickle.loads(pickle.dumps(open_images(str(WRITERS[name](tmp_path)), "train")))
    check(images, "train")


def test_a_named_set_is_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar100").mkdir()
    cifar_100(tmp_path / "cifar100", binary=True)
    monkeypatch.setenv("VITX_DATA", str(tmp_path))
    check(open_images("cifar100", "val"), "val")
    with pytest.raises(InputError, match=r"no data at '.*/imagenet': .* which are looked for in \$VITX_DATA"):
        open_images("imagenet", "train")


def test_shards_by_a_pattern_and_in_a_folder_a_split(tmp_path: Path) -> None:
    check(open_images(str(shards(tmp_path) / "set-{split}-*.tar"), "val"), "val")
    for split in PIXELS:
        (tmp_path / "folders" / split).mkdir(parents=True)
        for number, path in enumerate(sorted(tmp_path.glob(f"set-{split}-*.tar"))):
            path.rename(tmp_path / "folders" / split / f"{number}.tar")
    (tmp_path / "classnames.txt").rename(tmp_path / "folders" / "classnames.txt")
    images = open_images(str(tmp_path / "folders"), "train")
    check(images, "train")
    (tmp_path / "folders" / "train" / "0.tar").unlink()
    with pytest.raises(ImageError, match="No such file"):
        images.read(0)


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    assert open_images(str(shards(tmp_path, names=False)), "val").class_names == ("0", "1", "2")


def test_an_archive_beside_the_images_is_not_taken_for_a_shard(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(b"")
    for split in ("train", "val"):
        (tmp_path / split / "n01440764").mkdir(parents=True)
        (tmp_path / split / "n01440764" / "a.png").write_bytes(png(PIXELS["train"][0]))
    assert open_images(str(tmp_path), "train").keys == ("n01440764/a.png",)


def test_a_large_folder_is_not_read_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "0.png").write_bytes(png(PIXELS["train"][0]))
        (tmp_path / split / "a" / "1.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"unreadable image .*1\.png"):
        open_images(str(tmp_path), "train")
    monkeypatch.setattr("vitx.data.folder.CHECKED_IMAGES", 1)
    assert len(open_images(str(tmp_path), "train")) == 2


def broken_cifar(root: Path) -> None:
    folder = cifar_10(root, binary=True) / "cifar-10-batches-bin"
    (folder / "data_batch_2.bin").write_bytes(b"abc")


def hostile_cifar(root: Path) -> None:
    folder = cifar_100(root, binary=False) / "cifar-100-python"
    (folder / "train").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")


def missing_cifar(root: Path) -> None:
    (cifar_100(root, binary=True) / "cifar-100-binary" / "fine_label_names.txt").unlink()


def shard_of(root: Path, *members: tuple[str, bytes], mode: str = "w") -> None:
    shards(root)
    with tarfile.open(root / "set-train-0000.tar", mode) as archive:  # type: ignore[call-overload]  # w or w:gz
        for name, content in members:
            add(archive, name, content)


def few_names(root: Path) -> None:
    (shards(root) / "classnames.txt").write_text("cat\ndog\n")


def other_splits(root: Path) -> None:
    import datasets

    datasets.DatasetDict({"all": datasets.Dataset.from_dict({"label": [1]})}).save_to_disk(str(root))


def no_images(root: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"label": [1], "text": ["a"]})}).save_to_disk(str(root))


def rows(root: Path, labels: list[int | None], images: list[Any]) -> None:
    import datasets

    columns = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    split = datasets.Dataset.from_dict({"img": images, "label": labels}, columns)
    datasets.DatasetDict({"train": split}).save_to_disk(str(root))


def cut_arrow(root: Path) -> None:
    file = next(hugging_face(root, saved=True).glob("train/*.arrow"))
    file.write_bytes(file.read_bytes()[:-300])


def linked_member(root: Path) -> None:
    shard_of(root, ("a.png", b"1"), ("a.cls", b"1"), ("b.cls", b"1"))
    with tarfile.open(root / "set-train-0000.tar", "a") as archive:
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = tarfile.LNKTYPE, "a.png"
        archive.addfile(link)


def sparse_label(root: Path) -> None:
    shards(root)
    with tarfile.open(root / "set-train-0000.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        label = tarfile.TarInfo("a.cls")
        label.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": f"{1 << 40}"}  # a TiB of zeros
        archive.addfile(label)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (sparse_label, r"train-0000\.tar: 'a\.cls' is a link or sparse: write a shard of plain files"),
        (
            lambda root: shard_of(root, ("a.json", b" " * (1 << 20) + b"1")),
            r"'a\.json' has 1,048,577 bytes: expected at most 1,048,576 in a label",
        ),
        (linked_member, r"train-0000\.tar: 'b\.png' is a link or sparse: write a shard of plain files"),
        (broken_cifar, r"data_batch_2\.bin has 3 bytes, not a multiple of 3073: unpack it again"),
        (hostile_cifar, r"cifar-100-python/train is not a file of CIFAR: it asks for os\.system"),
        (missing_cifar, r"fine_label_names\.txt does not exist: unpack the whole archive of CIFAR"),
        (lambda root: shard_of(root, ("a.cls", b"1")), "expected an image and a .cls or .json label .* got 'a'"),
        (lambda root: shard_of(root, ("a.png", b"1")), "expected an image and a .cls or .json label .* got 'a'"),
        (lambda root: shard_of(root), "expected an image and a .cls or .json label for each sample, got 'nothing'"),
        (lambda root: shard_of(root, ("a.png", b""), ("a.cls", b"cat")), r"a\.cls holds no class number: expected"),
        (lambda root: shard_of(root, ("a.png", b""), ("a.json", b"[1]")), r"a\.json holds no class number: expected"),
        (lambda root: shard_of(root, ("a.png", b""), mode="w:gz"), r"train-0000\.tar is not a plain tar file"),
        (lambda root: shard_of(root, *[("a.png", b"1")] * 2), "sample 'a' has two images: expected one"),
        (
            lambda root: shard_of(root, ("a.png", b""), ("a.cls", b"-1")),
            r"a\.cls says class -1: expected 0 to 1,048,575",
        ),
        (
            lambda root: shard_of(root, ("a.png", b""), ("a.cls", b"9" * 30)),
            "says class 9{30}: expected 0 to 1,048,575",
        ),
        (lambda root: shard_of(root, ("a.json", b'{"label": 1.5}')), r"a\.json holds no class number: expected digits"),
        (lambda root: shard_of(root, ("a.json", b'{"label": Infinity}')), r"a\.json holds no class number: expected"),
        (lambda root: shard_of(root, ("a.json", b"[" * 200_000)), r"a\.json holds no class number: expected"),
        (
            lambda root: (shards(root) / "classnames.txt").write_bytes(b"\xff"),
            r"classnames\.txt is not a text in UTF-8",
        ),
        (few_names, "has labels from 0 to 2 but 2 class names"),
        (other_splits, "has the splits all: expected one of train"),
        (lambda root: rows(root, [1, None, -1], [None] * 3), "says no class for 2 images .* 'train', first in row 1"),
        (
            lambda root: rows(root, [1, 1, -1], [None] * 3),
            "says no class for 1 image of .*, first in row 2",
        ),
        (cut_arrow, "cannot be read as a Hugging Face data set: "),
        (no_images, "has the columns label, text: expected one of images and one of class labels"),
    ],
)
def test_what_cannot_be_read_is_named(write: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=message):
        open_images(str(tmp_path), "train")
    assert not Path("hacked").exists()


def test_a_damaged_or_cut_shard_is_never_taken_for_a_smaller_one(tmp_path: Path) -> None:
    """A byte of each header, each header zeroed, and each cut between two members: all samples, or an error."""
    path = shards(tmp_path) / "set-train-0000.tar"
    whole = path.read_bytes()
    count = len(open_shards(str(tmp_path), "train"))
    with tarfile.open(path) as archive:
        headers = [member.offset for member in archive]
    flipped = [at for start in headers for at in (start, start + 150)]
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flipped]
    damaged += [whole[:start] + bytes(512) + whole[start + 512 :] for start in headers]
    damaged += [whole[:start] for start in headers]
    for content in [*damaged, whole + whole]:
        path.write_bytes(content)
        _index.cache_clear()
        with pytest.raises(InputError, match=r"set-train-0000\.tar(: expected an| is not a plain tar file, or not)"):
            open_shards(str(tmp_path), "train")
    path.write_bytes(whole)
    _index.cache_clear()
    assert len(open_shards(str(tmp_path), "train")) == count


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    rows(tmp_path, [1, 2], [None, {"bytes": png(PIXELS["val"][0]), "path": None}])
    images = open_images(str(tmp_path), "train")
    assert decode(images.read(1)).size == (32, 32)
    with pytest.raises(ImageError, match=r"^train/0000000: no image in this row$"):
        next(images.batches(Preprocessing(image_size=32), 2))


def timm_folder(root: Path, split: str, _: pytest.MonkeyPatch) -> Any:
    import timm.data

    for label, name in enumerate(NAMES):
        for part, pixels in PIXELS.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in np.flatnonzero(LABELS[part] == label):
                (folder / f"{index:03d}.png").write_bytes(png(pixels[index]))
    return timm.data.create_dataset("", str(root), split=split)


def timm_cifar(root: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import timm.data
    from torchvision.datasets import CIFAR10

    cifar_10(root, binary=False)
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # it knows the real files' sums
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    return timm.data.create_dataset("torch/cifar10", str(root), split=split)


def timm_hugging_face(root: Path, split: str, _: pytest.MonkeyPatch) -> Any:
    import timm.data

    name = hugging_face(root, saved=False)
    timm_split = {"train": "train", "val": "validation"}[split]
    return timm.data.create_dataset(f"hfds/{name}", split=timm_split, input_key="img", target_key="label")


def timm_webdataset(root: Path, split: str, _: pytest.MonkeyPatch) -> Any:
    import timm.data

    pattern = {"train": "set-train-{0000..0010..5}.tar", "val": "set-val-{0000..0005..5}.tar"}[split]
    return timm.data.create_dataset(
        "wds/set", str(shards(root)), split=pattern, num_samples=len(PIXELS[split]), is_training=False
    )


# webdataset leaves its files to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("make", [timm_folder, timm_cifar, timm_hugging_face, timm_webdataset])
def test_timms_own_readers_give_the_same_images_and_labels(
    make: Callable[[Path, str, pytest.MonkeyPatch], Any], split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [(np.asarray(image), int(label)) for image, label in make(tmp_path, split, monkeypatch)]
    ours = open_images(str(tmp_path), split)
    assert [label for _, label in theirs] == ours.labels.tolist()
    assert len(theirs) == len(ours) == len(PIXELS[split])
    for index, (image, _) in enumerate(theirs):
        np.testing.assert_array_equal(np.asarray(decode(ours.read(index))), image)
