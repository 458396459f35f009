"""The command that a verb prints last."""

from pathlib import Path

import pytest
from PIL import Image

from vitx.cli.next_command import export_of
from vitx.core.files import write_json
from vitx.core.preprocess import Preprocessing
from vitx.core.run import ModelSpec, RunInfo

EXPORT = ["vitx", "export", "runs/x", "--out", "runs/x.vitx"]


@pytest.mark.parametrize(
    ("images", "more"),
    [(299, []), (298, ["--max-flip-rate", "0.011"]), (100, ["--max-flip-rate", "0.03"]), (5000, [])],
)
def test_few_images_prove_a_higher_rate_and_the_command_asks_for_it(images: int, more: list[str]) -> None:
    assert export_of("runs/x", images) == [*EXPORT, *more]


def test_images_that_were_left_out_are_left_out_again() -> None:
    assert export_of("runs/x", 5000, skip_bad=True) == [*EXPORT, "--skip-bad"]


def test_a_bundle_is_beside_its_run_whose_name_may_end_with_a_slash() -> None:
    assert export_of("runs/x/", 5000)[-1] == "runs/x.vitx"


def test_without_its_images_the_run_is_exported_as_ever() -> None:
    assert export_of("nowhere/x") == ["vitx", "export", "nowhere/x", "--out", "nowhere/x.vitx"]


def test_the_images_are_those_that_the_run_evaluates(tmp_path: Path) -> None:
    """Two of them, beside three to train on: without a flip they prove 1 − √0.05."""
    for split, count in (("train", 3), ("val", 2)):
        for label in ("a", "b"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / split / "ab"[number % 2] / f"{number}.png")
    run = tmp_path / "x"
    run.mkdir()
    info = RunInfo(
        name="x",
        recipe="photos",
        model=ModelSpec(name="deit_digits", num_classes=2),
        class_names=("a", "b"),
        preprocessing=Preprocessing(image_size=8),
        data=str(tmp_path / "images"),
        seed=0,
    )
    write_json(run / "run.json", info)
    assert export_of(run) == ["vitx", "export", run, "--out", f"{run}.vitx", "--max-flip-rate", "0.777"]
    (tmp_path / "images" / "val" / "a" / "bad.png").touch()
    assert export_of(run)[5:] == []  # export says what is wrong
    assert export_of(run, skip_bad=True)[5:] == ["--skip-bad", "--max-flip-rate", "0.777"]
