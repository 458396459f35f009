"""The summary: every number by hand."""

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bundle_fixture import LABELS, write_bundle
from vitx.core.errors import CheckFailed
from vitx.core.machine import installed_versions
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.ledger import Ledger, Shard, ShardRecord
from vitx.predict.options import WHOLE, Share
from vitx.predict.pipeline.executor import Performance
from vitx.predict.summary import PredictionSummary, SourceCounts, summarize, summary_name, write_summary


def described(**changes: Any) -> dict[str, Any]:
    """Of a run."""
    return {"input": "/in", "bundle": "its sha256", "source": "folder", "skipped": {}, "measured": {}} | changes


def test_every_field_of_a_summary(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b.vitx", name="two-colours")
    shards = tuple(Shard("images", "", index, 4) for index in range(3))
    records = [{0: 2, 3: 1}, {}, {3: 4, 1: 1}]
    performance = Performance(6, 1.5, {"read": 0.2, "decode": 0.4, "infer": 0.7, "write": 0.1}, {"provider": "CPU"})
    draft = {
        "images": 512,
        "drafted": 400,
        "flips": 1,
        "flip_rate_bound": 0.009,
        "max_flip_rate": 0.01,
        "max_logit_difference": 0.5,
        "max_grey_difference": 9,
    }
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        beside = {"by_suffix": {".txt": 2, "(hidden)": 1}, "first": ["a.txt", "b\udcff.txt", ".c"]}
        ledger.create(described(input="/in/\udcff", source="list", skipped=beside, measured={"draft": draft}), shards)
        for claim, classes in zip(ledger.unfinished(), records, strict=True):
            images = sum(classes.values()) + 2
            ledger.commit(claim, ShardRecord(f"digest {claim.id}", images, 2, classes, images), lambda: None)
        summary = summarize(ledger, bundle, performance, certified=True)
    found = summary.model_dump(mode="json")
    assert found.pop("created").startswith("20")
    assert found == {
        "format_version": 4,
        "complete": True,
        "sources": {"list": {"listed": 17, "predicted": 8, "unreadable": 6, "skipped": 3}},
        "skipped_names": {"by_suffix": {".txt": 2, "(hidden)": 1}, "first": ["a.txt", "b\\xff.txt", ".c"]},
        "bundle": "two-colours",
        "bundle_sha256": "its sha256",
        "certified": True,
        "input": "/in/\\xff",
        "shard": None,
        "increment": None,
        "images": 14,
        "errors": 6,
        "uncounted": 0,
        "shards": 3,
        "classes": {"blue": 2, "green": 1, "grey": 0, "red": 5},
        "images_here": 6,
        "seconds": 1.5,
        "images_per_second": 4.0,
        "binding": "infer",
        "stages": performance.stages,
        "runtime": {"provider": "CPU"},
        "versions": installed_versions(),
        "draft": draft,
    }
    assert list(found["classes"]) == list(LABELS)


def test_classes_of_one_label_are_one_entry(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b.vitx")
    object.__setattr__(bundle.manifest, "labels", ("same", "same", "else", "same"))
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.create(described(), [Shard("tar", "a")])
        (claim,) = ledger.unfinished()
        ledger.commit(claim, ShardRecord("d", 9, 0, {0: 1, 1: 3, 3: 5}), lambda: None)
        performance = Performance(9, 2.0, {"read": 1.0}, {})
        assert summarize(ledger, bundle, performance, certified=True).classes == {"same": 9, "else": 0}


def test_more_unreadable_images_than_allowed(tmp_path: Path) -> None:
    performance = Performance(6, 1.5, {"read": 0.2, "decode": 0.4, "infer": 0.7, "write": 0.1}, {})
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.create(described(), [Shard("images", "", 0, 50)])
        (claim,) = ledger.unfinished()
        ledger.commit(claim, ShardRecord("digest", 50, 2, {0: 48}, 50), lambda: None)
        summary = summarize(ledger, write_bundle(tmp_path / "b.vitx"), performance, certified=True)
    summary.check_errors(0.04)
    with pytest.raises(CheckFailed, match=r"^2 of 50 images are unreadable, more than --max-error-rate 0\.039: the"):
        summary.check_errors(0.039)


def test_every_job_has_a_file_of_its_own() -> None:
    assert summary_name(WHOLE) == "summary.json"
    assert summary_name(Share(2, 5)) == "summary-00002-of-00005.json"


def summary_of(
    tmp_path: Path, shards: dict[Shard, ShardRecord], beside: SkippedNames, share: Share | None = None
) -> PredictionSummary:
    """Of a ledger with these shards, all done; what names single images is a pattern."""
    performance = Performance(6, 1.5, {"read": 0.2}, {})
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.create(described(source="pattern", skipped=asdict(beside)), shards)
        for claim, record in zip(ledger.unfinished(), shards.values(), strict=True):
            ledger.commit(claim, record, lambda: None)
        bundle = write_bundle(tmp_path / "b.vitx")
        return summarize(ledger, bundle, performance, certified=True, shard=share)


def counts_of(listed: int, predicted: int, unreadable: int, skipped: int) -> SourceCounts:
    return SourceCounts(listed=listed, predicted=predicted, unreadable=unreadable, skipped=skipped)


def test_each_source_has_its_counts_and_what_was_skipped_beside_them(tmp_path: Path) -> None:
    in_tar = SkippedNames({".json": 3, "(\udcff)": 1}, ["x.json", "\udcff"])
    shards = {
        Shard("images", "", 0, 4): ShardRecord("a", 4, 1, {0: 3}, 4),
        Shard("tar", "b.tar"): ShardRecord("b", 7, 2, {1: 5}, 11, in_tar),
        Shard("parquet", "c", 0, 5): ShardRecord("c", 5, 0, {2: 5}, 5),
    }
    found = summary_of(tmp_path, shards, SkippedNames({".txt": 2, ".json": 1}, ["y.txt"]), Share(2, 3))
    assert found.sources == {
        "pattern": counts_of(7, 3, 1, 3),
        "tar": counts_of(11, 5, 2, 4),
        "parquet": counts_of(5, 5, 0, 0),
    }
    assert found.skipped_names.by_suffix == {".txt": 2, ".json": 4, "(\\xff)": 1}
    assert found.skipped_names.first == ["y.txt", "x.json", "\\xff"]
    assert (found.complete, found.shard, found.errors, found.images) == (True, "2/3", 3, 16)


def test_names_beside_are_counted_where_no_single_image_is(tmp_path: Path) -> None:
    shards = {Shard("tar", "b.tar"): ShardRecord("b", 7, 2, {1: 5}, 7)}
    found = summary_of(tmp_path, shards, SkippedNames({".txt": 2}, ["y.txt"]))
    assert found.sources == {"tar": counts_of(7, 5, 2, 0), "pattern": counts_of(2, 0, 0, 2)}
    assert found.shard is None


def test_a_name_that_is_missing_is_said(tmp_path: Path) -> None:
    assert counts_of(9, 4, 3, 2).missing == 0
    assert counts_of(10, 4, 3, 2).missing == 1
    shards = {
        Shard("images", "", 0, 4): ShardRecord("a", 4, 0, {0: 4}, 4),
        Shard("tar", "b.tar"): ShardRecord("b", 7, 2, {1: 5}, 12, SkippedNames({".json": 3})),
    }
    found = summary_of(tmp_path, shards, SkippedNames())
    assert not found.complete
    with pytest.raises(
        CheckFailed,
        match=r"^not complete: of 12 names listed \(tar\) 5 were predicted, 2 are unreadable and 3 were skipped\. The",
    ):
        found.check_errors(1.0)
    for share, remedy in ((WHOLE, "pass --overwrite"), (Share(2, 3), "remove that one")):
        with pytest.raises(CheckFailed, match=f"or {remedy}$"):
            found.check_errors(1.0, share)


def test_as_many_unreadable_images_as_allowed_are_no_error(tmp_path: Path) -> None:
    shards = {Shard("images", "", 0, 4): ShardRecord("a", 4, 1, {0: 3}, 4)}
    found = summary_of(tmp_path, shards, SkippedNames())
    found.check_errors(0.25)
    with pytest.raises(CheckFailed, match=r"^1 of 4 images is unreadable, more than --max-error-rate 0\.2: "):
        found.check_errors(0.2)


def test_what_a_kill_left_of_the_summary_is_removed(tmp_path: Path) -> None:
    """Of this one's writers alone: other jobs may be writing theirs."""
    shards = {Shard("images", "", 0, 4): ShardRecord("a", 4, 0, {0: 4}, 4)}
    found, path = summary_of(tmp_path, shards, SkippedNames()), tmp_path / "jobs" / summary_name(Share(2, 3))
    write_summary(path, found)
    left, theirs = (path.with_name(f".{summary_name(Share(number, 3))}.h0f26o1k") for number in (2, 1))
    for one in (left, theirs):
        one.write_text("{")
    assert write_summary(path, found) == found  # also where there is nothing new to write
    assert sorted(path.parent.iterdir()) == [theirs, path]
