"""The list of images: sorted by the parts of the paths, any bytes in a name, and each range gives its own records."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitx.predict.inputs import listing
from vitx.predict.inputs.listing import read_range, sort_paths, write_list

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Bytes of a file's name: all but / and NUL. The first ones sort before and after /, and are not UTF-8.
PART = st.binary(min_size=1, max_size=4).map(lambda name: name.translate(bytes.maketrans(b"\0/", b"-!")))
CLOSE = st.text(alphabet="a-!./\n\udcff", min_size=1, max_size=5).map(os.fsencode)
PATHS = st.lists(st.lists(PART, min_size=1, max_size=3).map(b"/".join) | CLOSE, max_size=40)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few records and blocks of a few bytes, so that records lie across them."""
    monkeypatch.setattr(listing, "RUN_SIZE", 7)
    monkeypatch.setattr(listing, "BLOCK_BYTES", 5)


@quick
@given(PATHS)
@example([b"x"] * 7)
@example([b"%d" % index for index in range(21)])
@example([b"a/b", b"a-b", b"a", b"a!b", b"a/b/c", b"a.b"])
def test_paths_are_sorted_by_their_parts(tmp_path: Path, paths: list[bytes]) -> None:
    expected = sorted(paths, key=lambda path: path.split(b"/"))
    found = list(sort_paths(map(os.fsdecode, paths), tmp_path))
    assert [os.fsencode(path) for path in found] == expected
    assert not any(tmp_path.iterdir())


@quick
@given(PATHS, st.integers(1, 6))
@example([b"12345", b"1234", b"123", b"", b"123456789"], 2)
def test_every_range_gives_its_own_records(tmp_path: Path, paths: list[bytes], shard_size: int) -> None:
    records = [os.fsdecode(path) for path in paths]
    file = tmp_path / "list"
    ranges, digest = write_list(file, iter(records), shard_size)
    assert file.read_bytes() == b"".join(path + b"\0" for path in paths)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    slices = [records[start : start + shard_size] for start in range(0, len(records), shard_size)]
    assert [list(read_range(file, *part)) for part in ranges] == slices
    starts = [sum(len(path) + 1 for path in paths[:first]) for first in range(0, len(paths), shard_size)]
    assert ranges == [(start, len(part)) for start, part in zip(starts, slices, strict=True)]


def test_a_range_ends_with_the_list(tmp_path: Path) -> None:
    write_list(tmp_path / "list", ["a", "b", "c"], 2)
    assert list(read_range(tmp_path / "list", 2, 1)) == ["b"]
    assert list(read_range(tmp_path / "list", 2, 9)) == ["b", "c"]
    assert list(read_range(tmp_path / "list", 0, 0)) == []


def test_a_list_is_on_the_disk_when_it_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole: what is flushed has all its records."""
    flushed: list[bytes] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        flushed.append((tmp_path / "list").read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    write_list(tmp_path / "list", ["a", "b", "c"], 2)
    assert flushed == [b"a\0b\0c\0"] * 2  # the file, then its folder


def test_runs_are_kept_in_the_given_folder_and_are_not_all_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Any] = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: folders.append(dir) or real(dir=dir))  # type: ignore[func-returns-value]
    assert len(list(sort_paths((str(index) for index in range(22)), tmp_path))) == 22
    assert folders == [tmp_path] * 3


def test_paths_are_read_once() -> None:
    def once() -> Iterator[str]:
        yield from ("b", "a")

    assert list(sort_paths(once(), Path())) == ["a", "b"]
