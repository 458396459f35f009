"""The batch sizes of a plan, and how a plan is written: whole, with what stands beside it, or not at all."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_fixture import plan_info
from vitx.core.errors import InputError
from vitx.core.files import sha256_bytes
from vitx.core.tensorrt_plan import PlanInfo, Profile, read_plan
from vitx.export.engines.profiles import DEFAULT_PROFILES, check_profiles, profiles_for, write_plan


def fake_info(data: bytes) -> PlanInfo:
    return plan_info(sha256=sha256_bytes(data), size=len(data))


def test_profiles_cover_each_batch_once() -> None:
    assert [str(p) for p in DEFAULT_PROFILES][1:3] == ["2..8 (best at 8)", "9..32 (best at 32)"]
    covered = [size for p in DEFAULT_PROFILES for size in range(p.minimum, p.maximum + 1)]
    assert covered == list(range(1, 129))


@pytest.mark.parametrize(
    ("batches", "given"), [((), "none"), ((0, 8), "0, 8"), ((8, 8), "8, 8"), ((32, 8), "32, 8"), ((0,), "0")]
)
def test_invalid_batch_sizes(batches: tuple[int, ...], given: str) -> None:
    expected = "expected positive numbers, each larger than the one before"
    with pytest.raises(InputError, match=f"^batch sizes {given}: {expected}$"):
        profiles_for(batches)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((8, 4, 16), "profile 8:4:16 is no range of batch sizes"),
        ((1, 32, 8), "profile 1:32:8 is no range"),
        ((0, 1, 8), "profile 0:1:8 is no range"),
        ((-3, 1, 8), "expected 1 <= minimum <= optimum <= maximum"),
        ((1, 8, 20_000), "goes beyond 14266, the most images of 150,528 numbers"),
    ],
)
def test_invalid_profiles(given: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_profiles((Profile(minimum=given[0], optimum=given[1], maximum=given[2]),), 224 * 224 * 3)


def test_a_profile_of_one_size_and_of_the_most_images_is_valid() -> None:
    check_profiles(profiles_for((1, 14_266)), 224 * 224 * 3)
    with pytest.raises(InputError, match=r"^no optimisation profile was given: expected at least one range"):
        check_profiles((), 1)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Within it no file can grow beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_plan(tmp_path: Path) -> None:
    plan, old, new = tmp_path / "a.plan", b"old" * 1000, b"new" * 500_000
    with file_size_limit(100_000), pytest.raises(OSError, match=r"File too large: .*/a\.plan'$"):
        write_plan(plan, new, fake_info(new))
    assert list(tmp_path.iterdir()) == []
    write_plan(plan, old, fake_info(old))
    with file_size_limit(100_000), pytest.raises(OSError, match=r"File too large: .*/a\.plan'$"):
        write_plan(plan, new, fake_info(new))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.plan", "a.plan.json"]
    assert plan.read_bytes() == old
    assert read_plan(plan).sha256 == fake_info(old).sha256
    with file_size_limit(100), pytest.raises(OSError, match=r"/a\.plan\.json'$"):  # not even the sidecar fits
        write_plan(plan, new, fake_info(new))
    read_plan(plan)
    (tmp_path / "b.plan.json").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: '[^']*/b\.plan\.json'$"):
        write_plan(tmp_path / "b.plan", new, fake_info(new))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.plan", "a.plan.json", "b.plan", "b.plan.json"]


def test_the_table_of_layers_is_of_the_plan_beside_it(tmp_path: Path) -> None:
    plan, table, old = tmp_path / "a.plan", tmp_path / "a.plan.layers.tsv", b"old"
    write_plan(plan, old, fake_info(old), b"old layers")
    large = b"layers" * 100_000
    for new, layers, named in ((b"new" * 500_000, b"new layers", "a.plan"), (b"new", large, "a.plan.layers.tsv")):
        with file_size_limit(100_000), pytest.raises(OSError, match=f"/{re.escape(named)}'$"):
            write_plan(plan, new, fake_info(new), layers)
    assert (plan.read_bytes(), table.read_bytes()) == (old, b"old layers")
    write_plan(plan, b"another", fake_info(b"another"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.plan", "a.plan.json"], "other layers than its own"
