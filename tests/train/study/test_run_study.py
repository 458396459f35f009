"""Which rows a kind of study has, what it writes of them, and settings that none of them would keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context, rcParams

from vitx.core.errors import InputError
from vitx.core.files import write_bytes
from vitx.train.options import StudyKind
from vitx.train.recipes.recipe import Recipe
from vitx.train.study import run_study as module
from vitx.train.study.result import StudyResult, Variant
from vitx.train.study.run_study import run_study
from vitx.train.study.study import Study
from vitx.train.study.variants import STUDIES, Published, depth_variants


def make_study(folder: Path, kind: StudyKind, *overrides: str) -> Study:
    return Study(kind, "digits-deit", folder / "study", (0,), overrides=overrides, device="cpu", quiet=True)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was trained: the study, and its rows unless the rule finds them; `rows` of the results are "rows"."""
    made: list[Any] = []

    def compare(study: Study, variants: Sequence[Variant]) -> StudyResult:
        made.append((study, variants))
        return StudyResult.model_construct(rows=("rows",))

    def study_alternet(study: Study) -> StudyResult:
        made.append(study)
        return StudyResult.model_construct(rows=("steps",))

    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(module, "study_alternet", study_alternet)
    monkeypatch.setattr(module, "draw_study", lambda result: f"figure of {result.rows[0]}")
    monkeypatch.setattr(module, "png", lambda figure: f"{figure} on {rcParams['figure.facecolor']}".encode())
    return made


def test_a_study_is_of_its_kinds_rows_and_is_drawn(tmp_path: Path, trained: list[Any]) -> None:
    study = make_study(tmp_path, "precision")
    study.out.mkdir()
    with rc_context({"figure.facecolor": "black"}):  # of a notebook
        assert run_study(study).rows == ("rows",)  # type: ignore[comparison-overlap]
    assert trained == [(study, STUDIES["precision"].variants(study.base))]
    assert (study.out / "study.png").read_bytes() == b"figure of rows on white"


def test_a_study_of_depth_has_the_depths_that_are_given(tmp_path: Path, trained: list[Any]) -> None:
    study = make_study(tmp_path, "depth")
    run_study(study, (1, 3))
    run_study(study)
    assert [variants for _, variants in trained] == [depth_variants((1, 3)), depth_variants((6, 12, 24, 32))]


def test_the_build_up_finds_its_rows_itself(tmp_path: Path, trained: list[Any]) -> None:
    study = make_study(tmp_path, "alternet")
    write_bytes(study.out / "study.png", b"of before")
    assert run_study(study).rows == ("steps",)  # type: ignore[comparison-overlap]
    assert trained == [study]
    assert (study.out / "study.png").read_bytes() == b"figure of steps on white"


def test_without_a_run_that_ended_there_is_no_figure(
    tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "compare", lambda *_: StudyResult.model_construct(rows=()))
    study = make_study(tmp_path, "precision")
    assert run_study(study).rows == ()
    assert not study.out.exists()


@pytest.mark.parametrize(
    ("kind", "setting", "key"),
    [
        ("precision", "model.kwargs.depth=4", "model.kwargs.depth"),
        ("losses", "losses.contrastive=2", "losses.contrastive"),
        ("depth", "model.kwargs.attention=talking-heads", "model.kwargs.attention"),
    ],
)
def test_a_setting_that_every_row_replaces_is_refused(
    tmp_path: Path, trained: list[Any], kind: StudyKind, setting: str, key: str
) -> None:
    study = make_study(tmp_path, kind, "epochs=3", setting)
    with pytest.raises(InputError, match=rf"^--set {setting} has no effect: every row of the study has a {key} of its"):
        run_study(study)
    assert trained == []


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("precision", "model.kwargs.num_heads=1"),  # of no row
        ("ablation", "cutmix.probability=0.5"),  # of one row
        ("ablation", "losses.cosine=0.25"),  # of every row, whose weight it is
        ("losses", "losses.cosine=0"),  # of every row, and the recipe's anyway
    ],
)
def test_a_setting_that_a_row_keeps_or_that_changes_nothing_is_taken(
    tmp_path: Path, trained: list[Any], kind: StudyKind, setting: str
) -> None:
    study = make_study(tmp_path, kind, setting)
    run_study(study)
    assert [each for each, _ in trained] == [study]


def test_the_recipe_without_a_setting_is_that_of_the_same_images_device_and_other_settings(
    tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path, "ablation")
    study.data, study.device = "d", "cuda"
    study.overrides = ("first=1", "k=a=b", "last=2")
    resolved: list[Any] = []

    def resolve(name: str, **given: Any) -> Recipe:
        resolved.append((name, given))
        return study.base.model_copy(update={"epochs": 99})

    def rows(*overrides: tuple[str, ...]) -> None:
        published = Published(lambda _: [Variant(each[0], each) for each in overrides], "")
        monkeypatch.setitem(STUDIES, "ablation", published)
        run_study(study)

    monkeypatch.setattr(module, "resolve_recipe", resolve)
    rows(("x=1", "k=c=d"), ("x=2", "first=3"))  # not every row has one
    assert resolved == []
    with pytest.raises(InputError, match=r"^--set k=a=b has no effect: every row of the study has a k of its own$"):
        rows(("x=1", "k=c=d"), ("k=e", "x=2"))
    assert resolved == [("digits-deit", {"data": "d", "overrides": ("first=1", "last=2"), "device": "cuda"})]
