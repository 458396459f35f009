"""Image sets: the digits, folders, and the errors of a folder that cannot be used."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError, Preprocessing
from vitx.data.folder import list_images
from vitx.data.image_set import evenly_spaced
from vitx.data.open import log_skipped, open_images


def folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), splits: tuple[str, ...] = ("train", "val")) -> Path:
    for split in splits:
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(3):
                Image.new("RGB", (8, 8), (40 * label, 10 * index, 0)).save(root / split / name / f"{index}.png")
    return root


def test_digits_split_is_fixed() -> None:
    train, val = open_images("digits", "train"), open_images("digits", "val")
    assert (len(train), len(val)) == (1437, 360)
    assert not set(train.keys) & set(val.keys)
    assert val.class_names == tuple("0123456789")
    assert val.digest() == "088b1f6f5256b5e100e382657aba7dfa004f9e70def7adf6195e3dd834a61a5f"
    assert open_images("digits", "val").read(0) is val.read(0)  # the images are encoded once


def test_digits_pixels_are_the_originals() -> None:
    from sklearn.datasets import load_digits

    val = open_images("digits", "val")
    original = load_digits()
    pixels = next(val.batches(Preprocessing(image_size=8), 360))
    np.testing.assert_array_equal(pixels[..., 0], np.rint(original.images[::5] * 255 / 16).astype(np.uint8))
    np.testing.assert_array_equal(val.labels, original.target[::5])


def test_folder(tmp_path: Path) -> None:
    images = open_images(str(folder(tmp_path)), "val")
    assert images.class_names == ("cat", "dog")
    assert images.keys == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png")
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    shapes = [batch.shape for batch in images.batches(Preprocessing(image_size=4), 4)]
    assert shapes == [(4, 4, 4, 3), (2, 4, 4, 3)]


def test_digest_sees_labels_names_and_bytes(tmp_path: Path) -> None:
    root = folder(tmp_path)
    before = open_images(str(root), "val").digest()
    assert open_images(str(root), "val").digest() == before
    (root / "val" / "cat" / "0.png").rename(root / "val" / "dog" / "9.png")
    assert open_images(str(root), "val").digest() != before


def test_missing_folder_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"no data at '.*none': expected a folder with train/ and val/, or with a folder .*, or one of: digits",
    ):
        open_images(str(tmp_path / "none"), "val")


def test_missing_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="val does not exist"):
        open_images(str(folder(tmp_path, splits=("train",))), "train")


def test_empty_split(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(InputError, match="train is empty: expected one folder of images a class"):
        open_images(str(tmp_path), "train")


def test_a_class_missing_in_val(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "train" / "owl").mkdir()
    with pytest.raises(InputError, match=r"val has no folder for 'owl', which .*train has"):
        open_images(str(root), "train")


def test_a_class_without_images(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for split in ("train", "val"):
        (root / split / "owl").mkdir()
    with pytest.raises(InputError, match="train has no readable image of 'owl'"):
        open_images(str(root), "train")


def test_a_link_that_leads_nowhere_is_an_unreadable_image(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "train" / "dog" / "lost.png").symlink_to("nowhere.png")
    with pytest.raises(InputError, match=r"unreadable image .*train/dog/lost\.png: .*--skip-bad"):
        open_images(str(root), "train")
    assert len(open_images(str(root), "train", skip_bad=True).skipped) == 1


def test_an_unreadable_image_is_named_or_skipped(tmp_path: Path) -> None:
    root = folder(tmp_path)
    bad = root / "val" / "dog" / "1.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(InputError, match=r"unreadable image .*val/dog/1.png: .*--skip-bad"):
        open_images(str(root), "val")
    images = open_images(str(root), "val", skip_bad=True)
    assert len(images) == 5
    assert len(images.skipped) == 1
    assert "dog/1.png" in images.skipped[0]


def test_an_image_that_breaks_later_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path)
    images = open_images(str(root), "val")
    (root / "val" / "cat" / "0.png").write_bytes(b"gone")
    with pytest.raises(ImageError, match=r"cat/0\.png: not an image"):
        next(images.batches(Preprocessing(image_size=4), 6))
    (root / "val" / "cat" / "0.png").unlink()
    with pytest.raises(ImageError, match=r"^cat/0\.png: .*No such file"):
        next(images.batches(Preprocessing(image_size=4), 6))


def test_images_are_evenly_spaced() -> None:
    assert evenly_spaced(10, 4).tolist() == [0, 3, 6, 9]
    assert evenly_spaced(3, 10).tolist() == [0, 1, 2]


def test_list_images_is_sorted_and_skips_hidden(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", ".hidden.png", "notes.txt", "ünïcode/ç.webp", ".cache/x.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)] == [
        "a.JPG",
        "b.png",
        "ünïcode/ç.webp",
    ]


def test_list_images_follows_links_and_says_what_it_cannot_list(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "below"
    elsewhere.mkdir(parents=True)
    for name in ("a.png", "pipe.png"):
        (elsewhere / name).touch()
    root = tmp_path / "cat"
    root.mkdir()
    (root / "more").symlink_to(tmp_path / "elsewhere")
    (root / "up").symlink_to(tmp_path)
    (elsewhere / "again").symlink_to(elsewhere)
    assert [path.relative_to(root).as_posix() for path in list_images(root)] == [
        "more/below/a.png",
        "more/below/pipe.png",
    ]
    assert list_images(root, below=False) == []
    with pytest.raises(InputError, match=r"the folder .*none cannot be listed: No such file"):
        list_images(root / "none")


def test_a_folder_of_two_names_is_listed_once(tmp_path: Path) -> None:
    """Else an image is in both splits under its two names, and folders that link to each other are walked for ever."""
    for name in ("2023", "2024"):
        (tmp_path / "cat" / name).mkdir(parents=True)
        (tmp_path / "cat" / name / "a.png").touch()
        (tmp_path / "cat" / name / "other").symlink_to(tmp_path / "cat" / ("2024" if name == "2023" else "2023"))
    (tmp_path / "cat" / "latest").symlink_to("2024")
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "b.png").touch()
    (tmp_path / "dog" / "cats").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "dogs").symlink_to(tmp_path / "dog")
    assert len(list_images(tmp_path)) == 3
    assert [path.name for path in list_images(tmp_path / "cat")] == ["a.png", "a.png", "b.png"]


def test_images_that_are_left_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [SimpleNamespace(skipped=skipped) for skipped in ((), ("a.png",), ("b.png", "c.png", "d.png"))]
    log_skipped(*sets)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "left out 1 image: a.png",
        "left out 3 images: b.png and 2 more",
    ]
