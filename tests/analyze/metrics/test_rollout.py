"""Attention rollout of real images against the product of matrices, and its pictures on the page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from cli_fixture import Vitx
from run_fixture import DIGITS_PREPROCESSING, digits_source, trained_deepvit
from vitx.analyze import Analysis, AnalysisOptions, analyze
from vitx.analyze.analysis_report import ReportWriter
from vitx.analyze.images import open_analysis_images
from vitx.analyze.metrics.confidence import Confidence
from vitx.analyze.metrics.rollout import EXAMPLES, Rollout
from vitx.core.files import write_bytes
from vitx.models import attention_maps, image_tensor
from vitx.models.source import Source


@pytest.fixture(scope="module")
def source() -> Source:
    return digits_source("trained", trained_deepvit())


@pytest.fixture(scope="module")
def found(source: Source) -> Analysis:
    images = open_analysis_images("digits", 90)
    return analyze(source, images, ("rollout", "confidence"), AnalysisOptions(batch_size=40), quiet=True)


def slow_shares(source: Source, found: Analysis, image: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The class token's row of the product of ½(A + I) over all blocks, float64, without the class token."""
    p = DIGITS_PREPROCESSING
    pixels = p.from_bytes(found.images.read(image))[None].copy()
    with torch.inference_mode(), attention_maps(source.model) as maps:
        source.model(image_tensor(pixels, p.mean, p.std))
    product = np.eye(65)
    for layer in maps.values():
        product = (layer[0].double().mean(dim=0).numpy() + np.eye(65)) / 2 @ product
    return np.asarray(product[0, 1:])


def test_shares_are_those_of_the_product_of_matrices(source: Source, found: Analysis) -> None:
    rollout, confidence = found.results["rollout"], found.results["confidence"]
    assert isinstance(rollout, Rollout)
    assert isinstance(confidence, Confidence)
    assert (rollout.grid, rollout.images) == ((8, 8), 90)
    assert [seen.image for seen in rollout.examples] == [0, 18, 36, 53, 71, 89]
    for seen in (*rollout.examples, *rollout.mistakes[:2]):
        np.testing.assert_allclose(seen.shares, slow_shares(source, found, seen.image), rtol=6e-3)
        assert seen.label == found.images.labels[seen.image]
    assert [(seen.image, seen.predicted) for seen in rollout.mistakes] == [
        (mistake.image, mistake.predicted) for mistake in confidence.mistakes
    ]
    largest = [64 * slow_shares(source, found, image).max() for image in range(90)]
    assert rollout.largest == pytest.approx(np.mean(largest), rel=1e-4)
    low, high = rollout.interval("largest") or (0, 0)
    assert low < rollout.largest < high


def test_the_page_shows_images_beside_where_the_network_looks(found: Analysis, tmp_path: Path) -> None:
    page = ReportWriter(tmp_path).write([found]).read_text()
    rollout = found.results["rollout"]
    assert isinstance(rollout, Rollout)
    assert page.count(": where it looks") == EXAMPLES + len(rollout.mistakes)
    looks = page.partition("Where trained looks")[2]
    pictures = re.findall(r'src="(data:image/png[^"]*)"', looks.partition("</ul>")[0])
    assert len(pictures) == len(set(pictures)) == 2 * EXAMPLES


@pytest.mark.parametrize("first", [0, 1])
def test_images_of_classes_that_the_network_does_not_know(source: Source, tmp_path: Path, first: int) -> None:
    """An answer has the network's name of the class, a label the images' one, and no answer is called wrong."""
    animals = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "koala")
    knows = replace(source, class_names=animals[:10])
    images = replace(open_analysis_images("digits", 40), class_names=animals[1 : 11 if first else 10])
    images = replace(images, labels=np.minimum(images.labels, len(images.class_names) - 1))
    found = analyze(knows, images, ("rollout",), AnalysisOptions(), quiet=True)
    rollout = found.results["rollout"]
    assert isinstance(rollout, Rollout)
    assert rollout.examples
    assert not rollout.mistakes
    page = ReportWriter(tmp_path).write([found]).read_text()
    for seen in rollout.examples:
        label, predicted = images.class_names[seen.label], animals[seen.predicted]
        said = predicted if label == predicted else f"{label} taken for {predicted}"
        assert f"{said}, {100 * seen.confidence:.1f} %" in page


def test_a_network_without_names_of_its_classes_takes_those_of_the_images(source: Source, tmp_path: Path) -> None:
    images = replace(open_analysis_images("digits", 6), class_names=tuple(f"class {digit}" for digit in range(10)))
    found = analyze(source, images, ("rollout",), AnalysisOptions(), quiet=True)
    rollout = found.results["rollout"]
    assert isinstance(rollout, Rollout)
    assert rollout.examples
    page = ReportWriter(tmp_path).write([found]).read_text()
    assert all(f"class {seen.predicted}, {100 * seen.confidence:.1f} %" in page for seen in rollout.examples)


def test_networks_without_one_attention_a_block(source: Source) -> None:
    other = replace(source, model=timm.create_model("resnet10t", num_classes=10))
    images = open_analysis_images("digits", 4)
    found = analyze(other, images, ("rollout",), AnalysisOptions(), quiet=True)
    assert found.not_applicable["rollout"].startswith("ResNet has no attention and no rollout")


def test_networks_whose_class_token_comes_later(source: Source) -> None:
    """ConViT's first blocks have one attention each, but over the patches alone."""
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 2}
    convit = timm.create_model("convit_tiny", num_classes=10, local_up_to_layer=2, **size)
    images = open_analysis_images("digits", 4)
    found = analyze(replace(source, model=convit), images, ("rollout",), AnalysisOptions(), quiet=True)
    assert found.not_applicable["rollout"].startswith("not every block has one attention over all 17 tokens")


def test_a_network_that_brings_no_classes_on_a_plain_folder(vitx: Vitx, tmp_path: Path) -> None:
    digits = open_analysis_images("digits", 3)
    for index in range(3):
        write_bytes(tmp_path / "images" / f"{index}.png", digits.read(index))
    command = ("analyze", "model:deit_digits", "--weights", "random", "--data", tmp_path / "images", "--device", "cpu")
    code, printed, said = vitx(*command, "--only", "rollout,confidence", "--out", tmp_path / "report")
    assert code == 0, said
    assert "not applicable: the images have no labels" in printed
    assert (tmp_path / "report/index.html").read_text().count(": where it looks") == 3
