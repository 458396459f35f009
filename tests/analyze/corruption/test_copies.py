"""CIFAR-C's arrays and ImageNet-C's folders, small ones of the same layout."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitx.analyze.corruption.copies import files_digest, open_corrupted_copies
from vitx.analyze.metrics.corruptions import CORRUPTIONS_METRIC, copies_robustness
from vitx.analyze.network_analyses import analyze_networks
from vitx.analyze.options import AnalysisRequest
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array

PIXELS = Preprocessing(image_size=32, crop_fraction=0.9)


def mean_is_high(images: UInt8Array) -> np.ndarray:
    """Class 1 for bright images, 0 for dark ones."""
    brightness = images.mean(axis=(1, 2, 3)) / 255
    return np.stack([1 - brightness, brightness], axis=1)


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    """Six images a severity, each its own grey; at severity s the label of s of them is wrong."""
    greys = np.array([0, 250, 30, 220, 60, 200])
    truth = greys > 128
    images = np.broadcast_to(greys[:, None, None, None], (6, 32, 32, 3)).astype(np.uint8)
    labels = np.concatenate([np.where(np.arange(6) < severity, ~truth, truth) for severity in range(1, 6)])
    np.save(tmp_path / "fog.npy", np.concatenate([images] * 5))
    np.save(tmp_path / "snow.npy", np.concatenate([255 - images] * 5))
    np.save(tmp_path / "labels.npy", labels.astype(np.uint8))
    return tmp_path


@pytest.fixture
def imagenet_c(tmp_path: Path) -> Path:
    for group, corruption in (("noise", "shot_noise"), ("blur", "zoom_blur")):
        for severity in range(1, 6):
            for name, grey in (("n01", 20), ("n02", 230)):
                folder = tmp_path / group / corruption / str(severity) / name
                folder.mkdir(parents=True)
                for number in range(3):
                    shade = 255 - grey if corruption == "zoom_blur" and number < severity - 2 else grey
                    Image.fromarray(np.full((32, 32, 3), shade, np.uint8)).save(folder / f"{number}.JPEG")
    return tmp_path


def test_cifar_c(cifar_c: Path) -> None:
    copies = open_corrupted_copies(cifar_c)
    assert copies.corruptions == ("snow", "fog")
    images = copies.open("fog", 5)
    assert images.labels.tolist() == [1, 0, 1, 0, 1, 1]
    pixels = next(images.batches(PIXELS.model_copy(update={"crop_fraction": 1.0}), 6))
    assert pixels[:, 31, 31, 0].tolist() == [0, 250, 30, 220, 60, 200]
    measured = copies_robustness(mean_is_high, copies, PIXELS, batch_size=4)
    np.testing.assert_allclose(measured.accuracy["fog"], 1 - np.arange(1, 6) / 6)
    np.testing.assert_allclose(measured.accuracy["snow"], np.arange(1, 6) / 6)
    assert (measured.images, measured.clean) == (6, None)
    assert measured.mean_accuracy == pytest.approx(0.5)
    assert "on average of 2 of 15 corruptions" in CORRUPTIONS_METRIC.line(measured)


def test_imagenet_c_in_folders_of_groups(imagenet_c: Path) -> None:
    for hidden in (".ipynb_checkpoints/zoom_blur", "blur/zoom_blur/1/.ipynb_checkpoints"):
        (imagenet_c / hidden).mkdir(parents=True)
    copies = open_corrupted_copies(imagenet_c, class_names=("n00", "n02", "n01"))
    assert copies.corruptions == ("shot_noise", "zoom_blur")
    assert copies.open("zoom_blur", 1).labels.tolist() == [2, 2, 2, 1, 1, 1]
    numbered = open_corrupted_copies(imagenet_c)
    measured = copies_robustness(mean_is_high, numbered, PIXELS, ["zoom_blur"], [1, 3, 5], limit=6)
    assert measured.accuracy == {"zoom_blur": pytest.approx((1, 2 / 3, 0))}


def test_copies_are_not_cropped(imagenet_c: Path) -> None:
    """With the crop fraction of the network an image of its own size would be enlarged and lose its border."""
    seen = []

    def border(images: UInt8Array) -> np.ndarray:
        seen.append(images)
        return mean_is_high(images)

    framed = np.full((32, 32, 3), 20, np.uint8)
    framed[0] = framed[-1] = 255
    place = imagenet_c / "noise" / "shot_noise" / "1" / "n01"
    for path in place.iterdir():
        Image.fromarray(framed).save(path, "PNG")
    copies_robustness(border, open_corrupted_copies(imagenet_c), PIXELS, ["shot_noise"], [1])
    np.testing.assert_array_equal(seen[0][0], framed)


def test_bad_input_is_refused(cifar_c: Path, imagenet_c: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        InputError,
        match=r"no corrupted copies in .*gaussian_noise\.npy \(CIFAR-C\), or folders such as gaussian_noise/1/CLASS",
    ):
        open_corrupted_copies(empty)
    copies = open_corrupted_copies(cifar_c, class_names=("only",))
    with pytest.raises(InputError, match=r"no copies of 'frost': the folder has shot_noise, zoom_blur, snow, fog$"):
        copies.open("frost", 1)
    with pytest.raises(InputError, match="unknown corruption 'fogg'"):
        copies.open("fogg", 1)
    with pytest.raises(InputError, match="severity 0"):
        copies.open("fog", 0)
    with pytest.raises(InputError, match="has the label 1, but the network knows 1 classes"):
        copies.open("fog", 1)
    with pytest.raises(InputError, match="class 'n01', which the network does not know"):
        open_corrupted_copies(imagenet_c, ("n02",)).open("shot_noise", 1)


def test_damaged_copies_are_refused(cifar_c: Path) -> None:
    np.save(cifar_c / "snow.npy", np.zeros((7, 32, 32, 3), np.uint8))
    copies = open_corrupted_copies(cifar_c)
    with pytest.raises(InputError, match=r"snow\.npy has shape \(7, 32, 32, 3\)"):
        copies.open("snow", 1)
    np.save(cifar_c / "labels.npy", np.array([1, -1] * 15))
    with pytest.raises(InputError, match=r"labels\.npy has the label -1, but the network knows 2 classes"):
        copies.open("fog", 1)
    np.save(cifar_c / "labels.npy", np.zeros(29, np.uint8))
    with pytest.raises(InputError, match=r"30 images, but labels\.npy 29 labels"):
        copies.open("fog", 1)
    (cifar_c / "fog.npy").write_bytes(b"not numpy")
    with pytest.raises(InputError, match=r"fog\.npy is not a numpy array"):
        copies.open("fog", 1)
    (cifar_c / "labels.npy").unlink()
    np.save(cifar_c / "fog.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"fog\.npy is not a numpy array"):
        copies.open("fog", 1)


@pytest.mark.parametrize("damaged", [np.zeros((5, 32, 32, 3), np.float32), np.zeros((5, 32, 32, 4), np.uint8)])
def test_an_array_of_other_images_is_refused(cifar_c: Path, damaged: np.ndarray) -> None:
    np.save(cifar_c / "snow.npy", damaged)
    with pytest.raises(InputError, match=rf"snow\.npy has shape \(5, 32, 32, .\) and type {damaged.dtype}: expected"):
        open_corrupted_copies(cifar_c).open("snow", 1)


def test_labels_are_those_of_a_network_whatever_type_they_were_written_in(cifar_c: Path) -> None:
    assert open_corrupted_copies(cifar_c).open("fog", 1).labels.dtype == np.int64


def test_a_severity_without_images_is_refused(imagenet_c: Path) -> None:
    copies = open_corrupted_copies(imagenet_c, ("n01", "n02"))
    severity = imagenet_c / "blur" / "zoom_blur" / "1"
    refused = r"zoom_blur/1 has no folders of images, one a class: unpack the copies again$"
    for path in severity.glob("*/*"):
        path.unlink()
    with pytest.raises(InputError, match=refused):
        copies.open("zoom_blur", 1)
    shutil.rmtree(severity)
    with pytest.raises(InputError, match=refused):
        copies.open("zoom_blur", 1)


def test_copies_that_were_unpacked_in_part_are_refused(imagenet_c: Path) -> None:
    """Accuracies of other images at each severity have no mean, and no interval of one number of images."""
    (imagenet_c / "blur" / "zoom_blur" / "4" / "n02" / "2.JPEG").unlink()
    copies = open_corrupted_copies(imagenet_c)
    for limit in (None, 4):  # four of five would be other images than four of six
        with pytest.raises(InputError, match=r"zoom_blur/4 has 5 images, but .*shot_noise/1 6: unpack the copies"):
            copies_robustness(mean_is_high, copies, PIXELS, limit=limit)


def test_a_damaged_copy_is_named_with_its_corruption_and_severity(imagenet_c: Path) -> None:
    (imagenet_c / "blur" / "zoom_blur" / "4" / "n02" / "2.JPEG").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"^zoom_blur/4/n02/2\.JPEG: not an image"):
        copies_robustness(mean_is_high, open_corrupted_copies(imagenet_c), PIXELS)


def test_an_image_with_an_unreadable_copy_is_left_out_under_every_corruption(
    imagenet_c: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoom, shot = imagenet_c / "blur" / "zoom_blur", imagenet_c / "noise" / "shot_noise"
    (zoom / "4" / "n02" / "2.JPEG").write_bytes(b"no image")
    (shot / "1" / "n01" / "0.JPEG").unlink()
    (shot / "1" / "n01" / "0.JPEG").symlink_to("nowhere")
    Image.new("RGB", (70_000, 1)).save(zoom / "5" / "n01" / "0.JPEG", "PNG")
    copies = open_corrupted_copies(imagenet_c)
    measured = copies_robustness(mean_is_high, copies, PIXELS, batch_size=4, skip_bad=True)
    assert measured.images == len(measured.per_image["mean accuracy under corruptions"]) == 4
    assert measured.accuracy["shot_noise"] == (1, 1, 1, 1, 1)
    # Of each class's three the first s − 2 are wrong; the last of n02 and the first of n01 are left out.
    assert measured.accuracy["zoom_blur"] == (1, 1, 0.75, 0.25, 0)
    said = capsys.readouterr().err
    assert said.startswith("left out 2 images: shot_noise/1/n01/0.JPEG: ")
    assert said.endswith(" and 1 more\n")
    with pytest.raises(InputError, match=r"^shot_noise/1/n01/0\.JPEG"):
        copies_robustness(mean_is_high, copies, PIXELS)
    for number in range(3):
        for name in ("n01", "n02"):
            (zoom / "2" / name / f"{number}.JPEG").write_bytes(b"")
    with pytest.raises(InputError, match=r"^of every image a copy is unreadable, such as shot_noise/1/n01/0\.JPEG: "):
        copies_robustness(mean_is_high, copies, PIXELS, skip_bad=True)


def test_a_copy_that_is_a_broken_link_is_named(imagenet_c: Path) -> None:
    copy = imagenet_c / "blur" / "zoom_blur" / "4" / "n02" / "2.JPEG"
    copy.unlink()
    copy.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"^zoom_blur/4/n02/2\.JPEG: .*No such file"):
        copies_robustness(mean_is_high, open_corrupted_copies(imagenet_c), PIXELS)


def test_copies_without_their_metric_are_refused() -> None:
    with pytest.raises(InputError, match="--corrupted nowhere is for the metric corruptions: name it with --only"):
        analyze_networks(["run"], ("fourier",), AnalysisRequest(corrupted=Path("nowhere")))


def test_a_file_in_place_of_the_report_s_folder_is_refused_before_a_network_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "report").touch()
    with pytest.raises(InputError, match=r"report' cannot be a folder: '.*report' is none"):
        analyze_networks(["no-run"], ("fourier",), AnalysisRequest(out=tmp_path / "report"))


@pytest.mark.parametrize("changed", ["fog.npy", "labels.npy"])
def test_arrays_that_changed_have_another_digest(cifar_c: Path, changed: str) -> None:
    before = files_digest(cifar_c)
    assert files_digest(cifar_c) == before
    os.utime(cifar_c / changed, ns=(0, 0))
    assert files_digest(cifar_c) != before


@pytest.mark.parametrize("linked", ["noise", "noise/shot_noise", "noise/shot_noise/3", "noise/shot_noise/3/n01"])
def test_copies_behind_a_link_have_another_digest_when_they_changed(imagenet_c: Path, linked: str) -> None:
    """Or a second `vitx analyze --out DIR` would show the numbers of the copies before."""
    moved, link = imagenet_c.with_name(f"{imagenet_c.name}-moved"), imagenet_c / linked
    link.rename(moved)
    link.symlink_to(moved)
    (imagenet_c / "noise" / "all").symlink_to(imagenet_c)  # a circle
    (imagenet_c / "blur" / "zoom_blur" / "1" / "n01" / "gone.JPEG").symlink_to("nowhere")
    before = files_digest(imagenet_c)
    assert files_digest(imagenet_c) == before
    os.utime(imagenet_c / "noise" / "shot_noise" / "3" / "n01" / "0.JPEG", ns=(0, 0))
    assert files_digest(imagenet_c) != before
