"""Names of images in the ledger: sorted by the parts of paths, any bytes in a name, each range gives its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bundle_fixture import listed_names
from vitx.predict import ledger as ledger_module
from vitx.predict.ledger import Ledger, Shard, image_shards, names_of
from vitx.predict.options import WHOLE, Share

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
# Bytes of a file's name: all but / and NUL. The first ones sort before and after /, and are not UTF-8.
PART = st.binary(min_size=1, max_size=4).map(lambda name: name.translate(bytes.maketrans(b"\0/", b"-!")))
CLOSE = st.text(alphabet="a-!./\n\udcff", min_size=1, max_size=5).map(os.fsencode)
PATHS = st.lists(st.lists(PART, min_size=1, max_size=3).map(b"/".join) | CLOSE, max_size=40)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a few names, so that shards lie across them."""
    monkeypatch.setattr(ledger_module, "PAGE", 7)


def new() -> Path:
    return Path(tempfile.mkdtemp()) / "ledger"


def all_of(ledger: Ledger) -> list[bytes]:
    return [os.fsencode(name) for name in names_of(Shard("images", "", 0, 10_000), ledger.path)]


@quick
@given(PATHS, st.integers(1, 5))
@example([b"x"] * 7, 1)
@example([b"%d" % index for index in range(21)], 2)
@example([b"a/b", b"a-b", b"a", b"a!b", b"a/b/c", b"a.b"], 3)
def test_paths_are_sorted_by_their_parts_and_shared_out_in_turn(tmp_path: Path, paths: list[bytes], jobs: int) -> None:
    expected = sorted(paths, key=lambda path: path.split(b"/"))
    (tmp_path / "ledger").unlink(missing_ok=True)
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        assert ledger.find((os.fsdecode(path), None) for path in paths) == len(paths)
        for number in range(1, jobs + 1):
            assert ledger.number(Share(number, jobs))[0] == len(expected[number - 1 :: jobs])
            assert all_of(ledger) == expected[number - 1 :: jobs]


@quick
@given(PATHS, st.integers(1, 9))
@example([b"12345", b"1234", b"123", b"", b"123456789"], 2)
def test_every_range_gives_its_own_names_in_order(tmp_path: Path, paths: list[bytes], shard_size: int) -> None:
    names = [os.fsdecode(path) for path in paths]
    (tmp_path / "ledger").unlink(missing_ok=True)
    shards = listed_names(tmp_path / "ledger", iter(names), shard_size)
    slices = [names[start : start + shard_size] for start in range(0, len(names), shard_size)]
    assert [list(names_of(shard, tmp_path / "ledger")) for shard in shards] == slices
    assert [shard.count for shard in shards] == [len(part) for part in slices]


def test_a_range_ends_with_the_list(tmp_path: Path) -> None:
    listed_names(tmp_path / "ledger", ["a", "b", "c"])
    for start, count, expected in ((1, 1, ["b"]), (1, 9, ["b", "c"]), (0, 0, [])):
        assert list(names_of(Shard("images", "", start, count), tmp_path / "ledger")) == expected


def test_what_is_found_is_told_by_all_its_names_and_their_order(tmp_path: Path) -> None:
    """A digest for each; no two lists of names have one."""
    lists = [["a", "b"], ["b", "a"], ["ab"], ["a/b"], ["a", "b", ""], ["a"], [], ["\udcff"], ["\\xff"]]
    with closing(Ledger(tmp_path / "ledger")) as ledger:

        def digest(names: list[str], share: Share | None) -> str:
            ledger.find(((name, None) for name in names), in_order=True)
            return ledger.number(share)[1]

        whole = [digest(names, WHOLE) for names in lists]
        assert [digest(names, Share(2, 3)) for names in lists] == whole
        assert len(set(whole)) == len(lists)
        kept = digest(["x"], WHOLE) and all_of(ledger)
        assert [digest(names, None) for names in lists] == whole
        assert all_of(ledger) == kept == [b"x"]


def test_a_listing_that_fails_leaves_the_names_that_were_there(tmp_path: Path) -> None:
    def torn() -> Iterator[tuple[str, None]]:
        yield "c", None
        raise KeyboardInterrupt

    listed_names(tmp_path / "ledger", ["b", "a"])
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        with pytest.raises(KeyboardInterrupt):
            ledger.find(torn())
        assert all_of(ledger) == [b"b", b"a"]


def test_a_copy_is_read_without_the_ledger_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff?#%"
    folder.mkdir()
    listed_names(folder / "ledger", map(str, range(20)))
    with closing(Ledger(folder / "ledger")) as ledger:
        with ledger.copied() as copy:
            alone = copy.rename(tmp_path / copy.name)
            assert list(names_of(image_shards(4, 20, 9)[0], alone)) == list(map(str, range(4, 13)))
            alone.rename(copy)
            assert copy.parent == folder
        assert [path.name for path in folder.iterdir() if not path.name.startswith("ledger")] == []
