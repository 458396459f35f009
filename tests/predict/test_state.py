"""What a run keeps: who creates it, who may go on with it, and what is removed when that fails."""

import errno
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS, SUMMARY
from vitx.predict.inputs.inventory import Inventory, take_inventory
from vitx.predict.ledger import Ledger
from vitx.predict.options import WHOLE, PredictOptions, Share
from vitx.predict.pipeline.lock import LOCK
from vitx.predict.state import AGREEMENT, LEDGER, STATE, Run, open_ledger, open_run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("b.png", "a.png", "c.png"):
        (folder / name).touch()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out" / STATE).mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture
def ledger(out: Path) -> Iterator[Ledger]:
    with closing(Ledger(out / STATE / LEDGER)) as opened:
        yield opened


def settings_of(images: Path, **changes: Any) -> dict[str, Any]:
    return {"input": str(images), "shard_size": 2, "top_k": 5} | changes


def opened_run(ledger: Ledger, out: Path, settings: dict[str, Any], measure: Any = None, share: Share = WHOLE) -> Run:
    def take(listing: Path) -> Inventory:
        return take_inventory(settings["input"], listing, settings["shard_size"], share=share)

    given = {} if measure is None else {"measure": measure}
    return open_run(ledger, out, settings, take, share=share, **given)


def lists(out: Path) -> list[str]:
    return [path.name for path in (out / STATE).glob("images-*")]


def test_the_first_call_creates_the_run_and_the_others_go_on_with_it(ledger: Ledger, out: Path, images: Path) -> None:
    measured: list[tuple[Inventory, bytes]] = []

    def measure(inventory: Inventory, listing: Path) -> dict[str, Any]:
        measured.append((inventory, listing.read_bytes()))
        return {"draft": {"flips": 1}}

    first = opened_run(ledger, out, settings_of(images), measure)
    assert (first.base, first.measured) == (str(images), {"draft": {"flips": 1}})
    assert first.listing.read_bytes() == b"a.png\0b.png\0c.png\0"
    assert [(part.start, part.count) for part in measured[0][0].shards] == [(0, 2), (12, 1)]
    assert measured[0][1] == first.listing.read_bytes()
    assert (out / PREDICTIONS).is_dir()
    assert first.created
    assert opened_run(ledger, out, settings_of(images), measure) == first._replace(created=False)
    assert len(measured) == 1
    assert lists(out) == [first.listing.name]


@pytest.mark.parametrize(("name", "value"), [("input", "/elsewhere"), ("shard_size", 3), ("top_k", 1), ("new", True)])
def test_a_run_of_other_settings_is_refused(ledger: Ledger, out: Path, images: Path, name: str, value: object) -> None:
    settings = settings_of(images)
    opened_run(ledger, out, settings)
    expected = (
        f"another run: {name} was {settings.get(name, False)}, is {value} now; choose another folder, or pass --o"
    )
    with pytest.raises(InputError, match=expected):
        opened_run(ledger, out, settings | {name: value})


def test_an_option_that_is_newer_than_the_run_was_off(ledger: Ledger, out: Path, images: Path) -> None:
    first = opened_run(ledger, out, settings_of(images))
    assert opened_run(ledger, out, settings_of(images) | {"new": False}) == first._replace(created=False)


def test_a_measurement_that_fails_leaves_neither_run_nor_list(ledger: Ledger, out: Path, images: Path) -> None:
    def measure(inventory: Inventory, listing: Path) -> dict[str, Any]:
        raise ValueError("classes change")

    with pytest.raises(ValueError, match="classes change"):
        opened_run(ledger, out, settings_of(images), measure)
    assert lists(out) == []
    assert ledger.description() == ""
    assert not (out / PREDICTIONS).exists()


def test_a_run_whose_list_is_elsewhere_is_refused(ledger: Ledger, out: Path, images: Path) -> None:
    run = opened_run(ledger, out, settings_of(images))
    run.listing.unlink()
    with pytest.raises(InputError, match=rf"has lost its list of images \({run.listing.name} in .* --overwrite$"):
        opened_run(ledger, out, settings_of(images))


def test_the_description_of_a_run_is_its_settings_list_and_measurement(ledger: Ledger, out: Path, images: Path) -> None:
    run = opened_run(ledger, out, settings_of(images))
    beside: dict[str, Any] = {"source": "folder", "skipped": {"by_suffix": {}, "first": []}, "schema": None}
    beside |= {"base": str(images), "digest": run.digest, "listing": run.listing.name, "measured": {}}
    assert json.loads(ledger.description()) == settings_of(images) | beside


def opened(out: Path, **options: Any) -> Any:
    return open_ledger(out, PredictOptions(**options))


def test_a_ledger_is_closed_at_the_end(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as ledger:
        assert (tmp_path / "out" / STATE / LEDGER).is_file()
    with pytest.raises(Exception, match="closed database"):
        ledger.totals()
    assert (tmp_path / "out" / STATE / LEDGER).is_file()


@pytest.mark.parametrize("made", ["", "out", f"out/{STATE}", f"out/{PREDICTIONS}", "out/notes.txt"])
def test_a_failure_removes_only_what_was_made_for_it(tmp_path: Path, made: str) -> None:
    """made: what was there before."""
    out = tmp_path / "out"
    if made:
        (tmp_path / made).mkdir(parents=True)
    before = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="later"), opened(out):
        raise ValueError("later")
    after = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    if made == f"out/{STATE}":
        before |= {f"out/{STATE}/{LEDGER}", f"out/{STATE}/{LOCK}"}
    assert after == before


def test_predictions_without_their_ledger_are_refused_and_overwritten_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / PREDICTIONS).mkdir(parents=True)
    (out / PREDICTIONS / "part").touch()
    (out / SUMMARY).touch()
    with pytest.raises(InputError, match=rf"^'{out}' holds predictions\.parquet of another run: choose .*--overwrite$"):
        opened(out).__enter__()
    with opened(out, overwrite=True):
        assert sorted(path.name for path in out.iterdir()) == [STATE]
        assert lists(out) == []


def test_a_file_in_the_place_of_the_predictions_is_refused_and_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / PREDICTIONS).write_bytes(b"one file, as other tools write")
    with pytest.raises(InputError, match="of another run"):
        opened(out).__enter__()
    with opened(out, overwrite=True):
        assert not (out / PREDICTIONS).exists()


def test_an_empty_folder_of_predictions_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS).mkdir()
    with opened(tmp_path) as ledger:
        assert ledger.totals().shards == 0


def test_overwriting_removes_the_summary_before_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in between must not leave it beside the predictions of another run."""
    (tmp_path / SUMMARY).touch()
    (tmp_path / STATE / "shard-1").mkdir(parents=True)
    removed: list[str] = []
    monkeypatch.setattr("vitx.predict.state.shutil.rmtree", lambda path, **_: removed.append(path.name))
    with pytest.raises(InputError, match="cannot write to the folder"), opened(tmp_path, overwrite=True):
        pass
    assert removed == [SUMMARY, "shard-1"]
    assert not (tmp_path / SUMMARY).exists()


def test_overwriting_leaves_what_is_not_of_a_prediction(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (f"{STATE}/images-1", f"{PREDICTIONS}/part", SUMMARY, "notes.txt", "more/notes.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    with opened(out, overwrite=True):
        there = {path.relative_to(out).as_posix() for path in out.rglob("*") if STATE not in path.parts}
        assert there == {"notes.txt", "more", "more/notes.txt"}
        assert lists(out) == []


def job(out: Path, images: Path, share: Share, **changes: Any) -> tuple[list[int], Path]:
    """One job of several: the numbers of its shards, and its list."""
    with opened(out, shard=share) as ledger:
        run = opened_run(ledger, out, settings_of(images, **changes), share=share)
        return [claim.id for claim in ledger.unfinished()], run.listing


def test_each_job_has_a_folder_and_a_list_and_all_have_one_agreement(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    first, listing = job(out, images, Share(1, 2))
    assert (first, listing.read_bytes()) == ([1], b"a.png\0c.png\0")
    assert listing.parent == out / STATE / "shard-00001-of-00002"
    agreed = json.loads((out / STATE / AGREEMENT).read_text())
    digest = agreed.pop("listing")
    assert len(digest) == 64
    assert agreed == settings_of(images, shards=2)
    second, listing = job(out, images, Share(2, 2))
    assert (second, listing.read_bytes()) == ([2], b"b.png\0")
    assert json.loads((out / STATE / AGREEMENT).read_text()) == agreed | {"listing": digest}
    assert job(out, images, Share(2, 2)) == ([2], listing)


@pytest.mark.parametrize(
    ("share", "changes", "expected"),
    [
        (Share(2, 3), {}, "another run: shards was 2, is 3 now; choose another folder, or pass --overwrite"),
        (Share(2, 2), {"top_k": 1}, "another run: top_k was 5, is 1 now"),
        (Share(1, 2), {"top_k": 1}, "another run: top_k was 5, is 1 now"),
    ],
)
def test_a_job_with_other_settings_is_refused_before_it_lists_anything(
    tmp_path: Path, images: Path, share: Share, changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    monkeypatch.setattr(f"{__name__}.take_inventory", lambda *_, **__: pytest.fail("listed"))
    with pytest.raises(InputError, match=expected):
        job(out, images, share, **changes)
    assert [path.name for path in (out / STATE).iterdir() if path.is_dir()] == ["shard-00001-of-00002"]
    assert (out / PREDICTIONS).is_dir()


def test_a_job_that_finds_another_input_is_refused(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    (images / "d.png").touch()
    expected = rf"^images were added to '{images}' or removed since the first job listed it: the jobs would leave some"
    with pytest.raises(InputError, match=expected):
        job(out, images, Share(2, 2))
    assert not (out / STATE / "shard-00002-of-00002").exists()


def test_runs_with_and_without_shards_do_not_mix(tmp_path: Path, images: Path, ledger: Ledger, out: Path) -> None:
    job(tmp_path / "cut", images, Share(1, 2))
    with pytest.raises(InputError, match=rf"^'{tmp_path}/cut' holds predictions of a run with --shard: choose another"):
        opened(tmp_path / "cut").__enter__()
    with pytest.raises(InputError, match=r"or continue it with --shard$"):
        opened(tmp_path / "cut").__enter__()
    with pytest.raises(InputError, match=r"holds predictions of a run without --shard: .*, or continue it without$"):
        opened(out, shard=Share(1, 2)).__enter__()
    with pytest.raises(InputError, match=r"^--overwrite with --shard would remove what the other jobs did: remove the"):
        opened(tmp_path / "cut", shard=Share(1, 2), overwrite=True).__enter__()
    with opened(tmp_path / "cut", overwrite=True) as anew:
        assert anew.path == tmp_path / "cut" / STATE / LEDGER
        assert not (tmp_path / "cut" / STATE / AGREEMENT).exists()


def test_overwriting_removes_the_summaries_of_jobs(tmp_path: Path) -> None:
    for name in ("summary-00001-of-00002.json", SUMMARY, "summary-of-mine.txt"):
        (tmp_path / name).touch()
    with opened(tmp_path, overwrite=True):
        assert sorted(path.name for path in tmp_path.iterdir()) == [STATE, "summary-of-mine.txt"]


def test_a_job_that_fails_removes_its_own_folder_alone(tmp_path: Path, images: Path) -> None:
    """Predictions are there, those of the other job."""
    out = tmp_path / "out"
    job(out, images, Share(1, 2))
    with pytest.raises(ValueError, match="later"), opened(out, shard=Share(2, 2)):
        raise ValueError("later")
    assert sorted(path.name for path in (out / STATE).iterdir()) == ["shard-00001-of-00002", AGREEMENT]


def test_a_folder_with_a_list_is_left_to_who_made_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun = opened(out)
    begun.__enter__()
    (out / STATE / "images-1").touch()
    assert not begun.__exit__(ValueError, ValueError("later"), None)
    assert (out / STATE / LEDGER).exists()


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=rf"^cannot write to the folder '{tmp_path}/file/out': Not a directory$"):
        opened(tmp_path / "file" / "out").__enter__()


@pytest.mark.parametrize("damage", [b"", b"{", b"1", b"\xff", b"[1]"])
def test_an_agreement_that_cannot_be_read_is_refused(tmp_path: Path, images: Path, damage: bytes) -> None:
    job(tmp_path, images, Share(1, 2))
    (tmp_path / STATE / AGREEMENT).write_bytes(damage)
    with pytest.raises(
        InputError, match=rf"^'{tmp_path}/\.vitx/shards\.json', in which the jobs agree, is damaged: ch"
    ):
        job(tmp_path, images, Share(2, 2))


def test_a_job_needs_hard_links_and_room(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EPERM, "Operation not permitted")]

    def fail(path: Path, data: bytes) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("vitx.predict.state.write_bytes_once", fail)
    with pytest.raises(OSError, match="No space left"):
        job(tmp_path / "out", images, Share(1, 2))
    with pytest.raises(
        InputError, match=rf"^--shard needs hard links, which the file system of '{tmp_path}/out' lacks: Operation not"
    ):
        job(tmp_path / "out", images, Share(1, 2))
