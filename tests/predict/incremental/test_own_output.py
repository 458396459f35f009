"""A pattern that finds what the run itself has written."""

from pathlib import Path

import fsspec
import pytest

from bundle_fixture import tar_of
from increments import IMAGES, counts, run, table
from vitx.core.bundle import Bundle


@pytest.mark.parametrize("incremental", [True, False])
def test_an_output_within_the_pattern_is_no_input(tiny_bundle: Bundle, tmp_path: Path, incremental: bool) -> None:
    for folder in ("2026", "gone", "out-of-2027"):
        (tmp_path / "in" / folder).mkdir(parents=True)
    table(tmp_path / "in" / "2026" / "a.parquet", IMAGES[:3], 2)
    pattern, out = tmp_path / "in" / "**" / "*.parquet", tmp_path / "in" / "gone" / ".." / "out"
    first, _ = run(tiny_bundle, pattern, out, incremental=incremental)
    summary, predicted = run(tiny_bundle, pattern, out, incremental=incremental)
    assert (summary.sources, summary.images, predicted) == (first.sources, 3, 0)
    if incremental:
        table(tmp_path / "in" / "out-of-2027" / "b.parquet", IMAGES[3:4], 1)
        summary, _ = run(tiny_bundle, pattern, out)
        assert (counts(summary), summary.images, summary.errors) == ((1, 0, 1, 0), 4, 0)


def test_an_output_within_the_pattern_is_no_input_in_a_store(tiny_bundle: Bundle, tmp_path: Path) -> None:
    memory, folder = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    memory.pipe(f"{folder}/a.tar", tar_of({"0.png": IMAGES[0]}))
    for _ in range(2):
        given = {"state": tmp_path / "state"}
        summary, _ = run(tiny_bundle, f"{folder}/**/*", f"{folder}/out/", **given)  # type: ignore[arg-type]  # a URL
        assert (summary.images, summary.sources["tar"].listed, summary.skipped_names.count) == (1, 1, 0)


@pytest.mark.parametrize("incremental", [True, False])
def test_an_output_among_the_files_of_the_input_hides_none_of_them(
    tiny_bundle: Bundle, tmp_path: Path, incremental: bool
) -> None:
    for folder, name, images in (("1", "a.parquet", 3), ("1", "summary-1.parquet", 2), ("2", "a.parquet", 2)):
        (tmp_path / folder).mkdir(exist_ok=True)
        table(tmp_path / folder / name, IMAGES[:images], 2)
    for images in (7, 0):
        summary, predicted = run(tiny_bundle, tmp_path / "[12]" / "**" / "*", tmp_path / "1", incremental=incremental)
        assert (summary.images, predicted, summary.skipped_names.count) == (7, images, 0)


def test_parts_and_summaries_of_the_other_jobs_are_no_input(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    table(folder / "a.parquet", IMAGES[:4], 2)
    for job in ("2/2", "1/2", "2/2"):
        summary, _ = run(tiny_bundle, folder / "**" / "*", folder, shard=job, incremental=False)
        assert (summary.images, summary.skipped_names.count) == (2, 0)


@pytest.mark.parametrize("out", ["out", "in/out"])
def test_an_output_that_a_link_leads_to_is_no_input(tiny_bundle: Bundle, tmp_path: Path, out: str) -> None:
    (tmp_path / "in" / "day").mkdir(parents=True)
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "in" / "day" / "results").symlink_to(tmp_path / out)
    table(tmp_path / "in" / "a.parquet", IMAGES[:1], 2)
    for predicted in (1, 0):
        found = run(tiny_bundle, tmp_path / "link" / "**" / "*.parquet", tmp_path / out, incremental=False)
        assert (found[0].images, found[0].errors, found[1]) == (1, 0, predicted)


def test_copies_of_the_output_for_a_store_are_no_input(tiny_bundle: Bundle, tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", IMAGES[:3], 2)
    place, state = f"memory://{tmp_path.name}/out", tmp_path / "state"
    for new in ((1, 0, 0, 0), (0, 0, 1, 0)):
        summary, _ = run(tiny_bundle, tmp_path / "**" / "*.parquet", place, state=state)  # type: ignore[arg-type]  # a URL
        assert counts(summary) == new


def test_an_output_within_the_pattern_by_url_is_no_input(tiny_bundle: Bundle, tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", IMAGES[:3], 2)
    for new in ((1, 0, 0, 0), (0, 0, 1, 0)):
        summary, _ = run(tiny_bundle, f"file://{tmp_path}/**/*.parquet", tmp_path / "out")
        assert counts(summary) == new
