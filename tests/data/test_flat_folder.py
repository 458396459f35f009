"""One folder of images a class: how it is split, that a run keeps its split, and the errors of a newcomer's folder."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.run import SPLIT_FILE, RunFolder
from vitx.data.flat_folder import FolderSplit, ImagesOfSplit, check_outside
from vitx.data.open import open_images
from vitx.train.loop.environment import DataRecord

ODD = "[/b] a dog"  # a folder "[" and one in it: paths have brackets and spaces


def photos(root: Path, counts: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (40 * label, number, 0)).save(root / name / f"{number}.png")
    return root


def test_a_fifth_of_each_class_is_for_evaluation_wherever_the_folder_lies(tmp_path: Path) -> None:
    root = photos(tmp_path / "first", {ODD: 12, "cat": 10, "few": 2})
    train, val = open_images(str(root), "train"), open_images(str(root), "val")
    assert train.class_names == val.class_names == ("[", "cat", "few")
    assert Counter(train.labels.tolist()) == {0: 10, 1: 8, 2: 1}
    assert Counter(val.labels.tolist()) == {0: 2, 1: 2, 2: 1}
    assert not {*train.keys} & {*val.keys}
    assert all((root / key).read_bytes() == val.read(index) for index, key in enumerate(val.keys))
    moved = photos(tmp_path / "second", {ODD: 12, "cat": 10, "few": 2})
    assert open_images(str(moved), "val").keys == val.keys


def test_file_names_that_are_not_utf8_can_be_split_recorded_and_read_again(tmp_path: Path) -> None:
    """A tar or zip of an old system unpacks to such names; a digest, a split and a certificate are UTF-8."""
    root = photos(tmp_path / "photos", {"cat\\xff": 10, "dog": 10})
    try:
        for number in range(0, 10, 2):
            (root / "dog" / f"{number}.png").rename(root / "dog" / os.fsdecode(b"\xff%d.png" % number))
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    (root / "dog" / os.fsdecode(b"\xffbad.png")).write_bytes(b"no image")
    run = tmp_path / "run"
    run.mkdir()
    train, val = (open_images(str(root), split, skip_bad=True) for split in ("train", "val"))
    assert RunFolder(run).images_of(str(root)) == str(root)
    write_json(run / SPLIT_FILE, FolderSplit.of(train, val))
    assert sum(key.startswith("dog/\\xff") for key in (*train.keys, *val.keys)) == 5
    assert any("\\xffbad.png" in each for each in (*train.skipped, *val.skipped))
    for split, images in (("train", train), ("val", val)):
        again = open_images(str(run / SPLIT_FILE), split)  # type: ignore[arg-type]
        assert (again.keys, again.labels.tolist()) == (images.keys, images.labels.tolist())
        assert again.digest() == images.digest()
        assert DataRecord.of(again) == DataRecord.of(images)


@pytest.mark.parametrize("splits", [("train", "val"), ()])
def test_images_beside_the_class_folders_are_told(tmp_path: Path, splits: tuple[str, ...]) -> None:
    for split in splits or (".",):
        root = photos(tmp_path / split, {"cat": 3, "dog": 3})
        for name in ("lone.png", ".hidden.png", "notes.txt"):
            (root / name).write_bytes(b"")
        photos(root, {".cat/copies": 1, ".dog": 1})
    opened = [open_images(str(tmp_path), "train"), open_images(str(tmp_path), "val")]
    left_out = [name for images in opened for name in images.skipped]
    expected = (("lone.png", "in no class's folder"), (".dog/0.png", "in a hidden folder"))
    roots = [tmp_path / split for split in splits or (".",)]
    assert left_out == [f"{root / name}: {reason}" for root in roots for name, reason in expected]
    assert opened[0].class_names == ("cat", "dog")


@pytest.mark.parametrize("splits", [("train", "val"), ()])
def test_a_class_whose_folder_cannot_be_reached_is_not_left_out(tmp_path: Path, splits: tuple[str, ...]) -> None:
    """The volume that a link leads to may not be mounted."""
    for split in splits or (".",):
        root = photos(tmp_path / split, {"cat": 3, "dog": 3})
        (root / "emu").symlink_to("/gone/emu")
    with pytest.raises(InputError, match=r"/emu is a link that leads nowhere: restore '/gone/emu', or remove the link"):
        open_images(str(tmp_path), "train")


def test_a_run_keeps_its_split_when_images_are_added(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", {"cat": 10, "dog": 10})
    (root / "cat" / "3.png").write_bytes(b"no image")
    before = {split: open_images(str(root), split, skip_bad=True) for split in ("train", "val")}
    run = tmp_path / "run"
    run.mkdir()
    assert RunFolder(run).images_of("photos") == "photos"
    write_json(run / SPLIT_FILE, FolderSplit.of(before["train"], before["val"]))
    for number in range(10, 40):
        Image.new("RGB", (8, 8)).save(root / "cat" / f"{number}.png")
    kept = RunFolder(run).images_of("photos")
    for split, images in before.items():
        again = open_images(kept, split)  # type: ignore[arg-type]
        assert (again.keys, again.labels.tolist()) == (images.keys, images.labels.tolist())
        assert again.skipped == images.skipped
        assert again.read(0) == images.read(0)
        assert again.name == kept
    assert sum(len(images.skipped) for images in before.values()) == 1
    (root / before["val"].keys[0]).unlink()
    with pytest.raises(
        InputError, match=r"of .*split\.json cannot be found: put the images back, or .* in another --out, else"
    ):
        open_images(kept, "val")
    run.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"if the run was moved, give the split\.json in it with --data"):
        open_images(kept, "train")
    assert len(open_images(str(tmp_path / "moved" / SPLIT_FILE), "train")) == len(before["train"])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"cat": 3, "no dogs": 0}, r"has no image of 'no dogs' \(it is empty\): expected .*\.jpg"),
        ({"cat": 3, "[/b]x": 1, "dog": 1}, r"has one image alone of '\[', 'dog': expected two at least"),
        ({"Train/cat": 3, "Val/cat": 3}, "has 'Train', 'Val', which look like splits: rename them to train and val$"),
        ({"Testing": 3, "Training": 3}, "has 'Testing', 'Training', which look like splits: rename them"),
        ({"TEST": 0, "training": 3, "validation": 3}, "has 'TEST', 'training', 'validation', which look like splits"),
        ({"cat": 3}, "has one folder, 'cat': expected one folder of images for each class, two classes at least"),
        ({}, "has no folders: expected one folder of images for each class"),
        ({"train": 3, "val": 3}, r"train is empty: expected one folder of images a class"),
        ({"train/cat": 3, "train/dog": 3}, r"val does not exist: expected train/ and val/ .* a fifth of the images"),
        ({"train/cat": 3, "val/cat": 3, "val/dog": 3}, r"train has no folder for 'dog', which .*val has: add it there"),
    ],
)
def test_a_folder_that_cannot_be_split_says_what_it_holds(tmp_path: Path, counts: dict[str, int], message: str) -> None:
    root = photos(tmp_path / "photos", counts)
    root.mkdir(exist_ok=True)
    with pytest.raises(InputError, match=message):
        open_images(str(root), "train")


def test_images_of_a_kind_that_is_not_read_are_named(tmp_path: Path) -> None:
    root = photos(tmp_path, {"cat": 2, "dog": 0})
    (root / "dog" / "IMG_1.HEIC").touch()
    with pytest.raises(InputError, match=r"no image of 'dog' \(its files are \.heic\)"):
        open_images(str(root), "train")


def test_a_file_and_a_class_that_is_called_train(tmp_path: Path) -> None:
    root = photos(tmp_path / "vehicles", {"train": 5, "plane": 5})
    assert open_images(str(root), "val").class_names == ("plane", "train")
    with pytest.raises(InputError, match=r"'.*0\.png' is a file: expected a folder with train/ and val/"):
        open_images(str(root / "train" / "0.png"), "val")


@pytest.mark.parametrize("name", ["validation", "valid", "test"])
def test_the_evaluation_split_has_the_names_that_others_give_it(tmp_path: Path, name: str) -> None:
    root = photos(tmp_path, {"train/cat": 2, "train/dog": 2, f"{name}/cat": 1, f"{name}/dog": 1})
    assert open_images(str(root), "val").keys == ("cat/0.png", "dog/0.png")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"class_names": ("bird", "dog")}, r"split\.json has 'cat/.*\.png' and 3 more, below the folder of no class: "),
        ({"train": ImagesOfSplit(images=("/etc/hostname",))}, r"has '/etc/hostname', below the folder of no class: "),
        ({"train": ImagesOfSplit(images=())}, r"split\.json has no train images: restore the file, or train into"),
    ],
)
def test_a_damaged_split_is_said_to_be(tmp_path: Path, change: dict[str, object], said: str) -> None:
    root = photos(tmp_path / "photos", {"cat": 10, "dog": 10})
    split = FolderSplit.of(open_images(root, "train"), open_images(root, "val"))
    write_json(tmp_path / SPLIT_FILE, split.model_copy(update=change))
    with pytest.raises(InputError, match=said):
        open_images(tmp_path / SPLIT_FILE, "train")


def test_a_run_folder_is_not_made_among_the_class_folders(tmp_path: Path) -> None:
    images = open_images(photos(tmp_path / "photos", {"cat": 2, "dog": 2}), "train")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for inside in ("photos/runs/photos", "link/run"):
        with pytest.raises(InputError, match=rf"/{inside}' is in '.*/photos', where the next run would take it for a"):
            check_outside(images, tmp_path / inside)
    for outside in ("runs/photos", "photos-runs", "photos/.runs/photos"):
        check_outside(images, tmp_path / outside)
    check_outside(replace(images, by_hash=False), tmp_path / "photos" / "run")
    unlabelled = replace(images, by_hash=False, class_names=())
    check_outside(unlabelled, tmp_path / "photos" / "cat" / ".report")
    for inside in ("photos", "photos/cat/report"):
        with pytest.raises(InputError, match=rf"/{inside}' is in '.*/photos', where its pictures would be"):
            check_outside(unlabelled, tmp_path / inside)
    write_json(tmp_path / SPLIT_FILE, FolderSplit.of(images, images))
    of_a_run = open_images(tmp_path / SPLIT_FILE, "train")
    check_outside(of_a_run, tmp_path / "run")
    with pytest.raises(InputError, match=r"/photos/run' is in '.*/photos', where"):
        check_outside(of_a_run, tmp_path / "photos" / "run")


def test_the_only_image_for_evaluation_that_is_left_out_is_not_the_only_one_of_its_class(tmp_path: Path) -> None:
    root = photos(tmp_path, {"cat": 5, "dog": 5})
    for key in open_images(root, "val").keys:
        (root / key).write_bytes(b"no image")
    assert len(open_images(root, "train", skip_bad=True)) == 8
    with pytest.raises(InputError, match=r"no readable image of 'cat', 'dog' among those kept for evaluation$"):
        open_images(root, "val", skip_bad=True)
