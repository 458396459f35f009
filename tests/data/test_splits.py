"""What is trained on and what is evaluated on: the same classes, no image in both, and no split that is not seen."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import encode_png
from vitx.data.open import open_splits

PNG = encode_png(np.zeros((8, 8, 3), np.uint8))


def shard(path: Path, labels: tuple[int, ...] = (0, 1)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for label in labels:
            for name, content in ((f"{label}.png", PNG), (f"{label}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def shards_of_names(root: Path, train: str, val: str) -> Path:
    for split, names in (("train", train), ("val", val)):
        shard(root / split / "0.tar", tuple(range(len(names))))
        (root / split / "classnames.txt").write_text("\n".join(names) + "\n")
    return root


def saved_of_names(root: Path, train: str, val: str) -> Path:
    datasets = pytest.importorskip("datasets", reason="an optional source")
    datasets.disable_progress_bars()
    splits = {}
    for split, names in (("train", train), ("validation", val)):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
        rows = {"image": [{"bytes": PNG, "path": None}] * len(names), "label": list(range(len(names)))}
        splits[split] = datasets.Dataset.from_dict(rows, features)
    datasets.DatasetDict(splits).save_to_disk(str(root))
    return root


@pytest.mark.parametrize("write", [shards_of_names, saved_of_names])
def test_both_splits_have_the_same_classes_in_the_same_order(
    write: Callable[[Path, str, str], Path], tmp_path: Path
) -> None:
    train, val = open_splits(str(write(tmp_path / "same", "abc", "abc")))
    assert train.class_names == val.class_names == ("a", "b", "c")
    for number, (names, message) in enumerate(
        {
            "acb": "class 1 is 'b' in train and 'c' in val: give both splits the same classes, in the same order",
            "ab": "class 2 is 'c' in train and missing in val: give",
            "abcd": "class 3 is missing in train and 'd' in val: give",
        }.items()
    ):
        with pytest.raises(InputError, match=message):
            open_splits(str(write(tmp_path / f"{number}", "abc", names)))


@pytest.mark.parametrize("name", ["trainval-0.tar", "festival-train-0.tar", "strain-val-0.tar"])
def test_a_shard_is_of_one_split(name: str, tmp_path: Path) -> None:
    for file in (name, "train-9.tar", "val-9.tar"):
        shard(tmp_path / file)
    with pytest.raises(
        InputError,
        match=rf"^'.*/{name}' is a shard of both splits by its name: give a pattern with \{{split\}} in it",
    ):
        open_splits(str(tmp_path))
    train, val = open_splits(str(tmp_path / "{split}-*.tar"))
    assert (train.keys, val.keys) == (("train-9.tar/0", "train-9.tar/1"), ("val-9.tar/0", "val-9.tar/1"))


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    for folder in (tmp_path / "beside", tmp_path / "inside" / "train", tmp_path / "inside" / "val"):
        for name in ("train-0.tar", "val-0.tar"):
            shard(folder / name)
            (folder / f"._{name}").write_bytes(b"of macOS")
        (folder / ".ipynb_checkpoints").mkdir()
    for data in ("beside", "beside/*{split}-*.tar", "inside"):
        train, val = open_splits(str(tmp_path / data))
        assert len(train) == len(val) == (4 if data == "inside" else 2)


def test_names_of_classes_are_lines(tmp_path: Path) -> None:
    for name in ("train-0.tar", "val-0.tar"):
        shard(tmp_path / name)
    names = tmp_path / "classnames.txt"
    for content in ("a cat\ndog", "a cat\ndog\n", "a cat\r\ndog\r\n \r\n\r\n", "\ufeffa cat\ndog\n\n"):
        names.write_bytes(content.encode())
        assert open_splits(str(tmp_path))[0].class_names == ("a cat", "dog")
    names.write_text("a\x0ccat\nd\u2028og\n", encoding="utf-8")  # which other programs take for one line each as well
    assert open_splits(str(tmp_path))[0].class_names == ("a\x0ccat", "d\u2028og")
    names.write_text("crane\ncrane\n")
    assert open_splits(str(tmp_path))[0].class_names == ("crane", "crane")
    for content, line in (("a\n \nb\n", 2), ("\na\nb", 1), ("\n", 1), ("", 1)):
        names.write_text(content)
        with pytest.raises(InputError, match=rf"classnames\.txt names no class in line {line}: expected one name"):
            open_splits(str(tmp_path))


@pytest.mark.parametrize("splits", [("train", "val"), ("",)])
def test_an_image_too_thin_to_be_resized_is_found_before_training(splits: tuple[str, ...], tmp_path: Path) -> None:
    for path in [
        tmp_path / split / name / f"{number}.png" for split in splits for name in "ab" for number in range(10)
    ]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    before = open_splits(str(tmp_path), check_size=Preprocessing(image_size=96).check_size)
    for images in before:
        path = tmp_path / (splits[0] and ("train", "val")[images is before[1]]) / images.keys[0]
        path.write_bytes(encode_png(np.zeros((6000, 6, 3), np.uint8)))
        with pytest.raises(InputError, match=rf"{path}: image of 6×6000 pixels: too thin to be .*, or pass --skip-bad"):
            open_splits(str(tmp_path), check_size=Preprocessing(image_size=96).check_size)
        opened = open_splits(str(tmp_path), check_size=Preprocessing(image_size=8).check_size)
        assert [each.keys for each in opened] == [each.keys for each in before]
        opened = open_splits(str(tmp_path), skip_bad=True, check_size=Preprocessing(image_size=96).check_size)
        assert [len(each.skipped) for each in opened] == [int(each is images) for each in before]
        path.write_bytes(PNG)
