"""The folder of a report holds what the report is of, and nothing of the one that it replaced."""

import sys
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from cli_fixture import Vitx

TINY = "model:deit_digits?embed_dim=16&num_heads=2"


def test_figures_of_the_report_before_do_not_stay(vitx: Vitx, tmp_path: Path) -> None:
    def figures(depth: int, metric: str) -> list[str]:
        network = f"{TINY}&depth={depth}"
        options = ("--weights", "random", "--data", "digits", "--images", "12", "--only", metric, "-q")
        code, _, error = vitx("analyze", network, *options, "--out", str(tmp_path))
        assert code == 0, error
        return sorted(path.name for path in (tmp_path / "figures").iterdir())

    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.png").touch()
    assert figures(1, "variance") == ["mine.png", "variance.png"]
    assert figures(2, "confidence") == ["confidence.png", "mine.png"]  # another network: variance.png is not of it
    assert figures(1, "confidence") == ["confidence.png", "mine.png", "variance.png"]


def test_a_report_without_what_draws_it_is_refused_before_anything_is_measured(
    vitx: Vitx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where vitx[train] alone is installed: it was measured first, for minutes, and nothing shown of it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ("--weights", "random", "--data", "digits", "--images", "12", "--only", "variance")
    code, printed, error = vitx("analyze", f"{TINY}&depth=1", *options, "--out", str(tmp_path / "out"))
    assert (code, printed) == (3, "")
    assert error.endswith("this needs the package 'matplotlib', which is not installed: pip install 'vitx[analyze]'\n")
    assert not (tmp_path / "out").exists()


def test_a_report_in_a_bundle_is_refused_before_anything_is_loaded(vitx: Vitx, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b.vitx").path
    code, _, error = vitx("analyze", "model:none", "--data", "digits", "--out", bundle)
    assert (code, f"would add to the bundle '{bundle}'" in error) == (2, True)
