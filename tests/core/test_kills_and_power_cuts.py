"""A kill or a power cut after any call leaves the old state or the new one, of everything that must last."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from bundle_fixture import (
    LABELS,
    PREPROCESSING,
    Fault,
    NumpySession,
    certificate,
    colour_images,
    tiny_graph,
    write_bundle,
)
from epoch_row import epoch_row
from faulty_disk import assert_old_or_new
from vitx.core import files
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.files import make_folder
from vitx.core.run import ModelSpec, RunFolder
from vitx.export import bundling
from vitx.models.source import SourceInfo, SourceRequest
from vitx.parity import certify_models
from vitx.parity.executables.verdict_cache import cached_verdict, keep_verdict
from vitx.parity.loaded_model import LoadedModel
from vitx.predict.outputs.parts import PartWriter, Rows, part_path
from vitx.runtimes.session import executable_of
from vitx.train.loop.checkpoint import (
    TENSOR_FILES,
    CheckpointTensors,
    load_newest,
    read_metrics,
    save_epoch,
    save_within_epoch,
    switch_links,
)


def nothing(folder: Path) -> None:
    folder.mkdir()


ROWS = [epoch_row(epoch, top1=top1) for epoch, top1 in enumerate((0.5, 0.4, 0.9), 1)]


def tensors(value: float) -> CheckpointTensors:
    return CheckpointTensors(*({"weight": torch.full((2, 3), value)} for _ in TENSOR_FILES))


def two_epochs(folder: Path) -> None:
    for epoch in (1, 2):
        save_epoch(RunFolder(folder), tensors(epoch), ROWS[:epoch], {})


def resumed(folder: Path) -> tuple[int, float, int, str]:
    """What training goes on from: step, weight, lines of metrics, and the best epoch, which resuming links anew."""
    run = RunFolder(folder)
    loaded = load_newest(run)
    assert loaded is not None
    found, state = loaded
    run.checkpoint("best")  # there and whole, even before the link is mended
    if not (folder / "checkpoints" / "resume").is_symlink():
        switch_links(run, state)
    best = (folder / "checkpoints" / "best").readlink().name
    return state.step, float(found.model["weight"][0, 0]), len(read_metrics(run.metrics_path, state.epoch)), best


def test_a_checkpoint_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    calls = assert_old_or_new(
        tmp_path, two_epochs, lambda folder: save_epoch(RunFolder(folder), tensors(3), ROWS, {}), resumed
    )
    assert resumed(tmp_path / "whole") == (30, 3.0, 3, "epoch-0003")
    order = [
        calls.index(call) for call in ("rename epoch-0003", "replace metrics.jsonl", "replace last", "replace best")
    ]
    assert order == sorted(order)
    assert order[-1] < calls.index("rename .epoch-0001.*") < calls.index("rmdir .epoch-0001.*")


def test_a_checkpoint_within_an_epoch_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        two_epochs(folder)
        save_within_epoch(RunFolder(folder), tensors(2.5), ROWS[:2], 23, {}, {})

    def change(folder: Path) -> None:
        save_within_epoch(RunFolder(folder), tensors(2.75), ROWS[:2], 26, {}, {})

    assert_old_or_new(tmp_path, prepare, change, resumed)
    assert resumed(tmp_path / "whole") == (26, 2.75, 2, "epoch-0001")


def write_part(folder: Path, first: int) -> None:
    """A part of two rows; keys begin with `first`."""
    writer = PartWriter(folder, 1, LABELS)
    ranks = np.array([[3, 1], [2, 0]], np.int32)
    writer.add(Rows([f"{first}.png", f"{first + 1}.png"], [None, None], ranks, np.full((2, 2), 0.5, np.float32)))
    writer.finish().publish()


def published(folder: Path) -> list[str] | None:
    path = part_path(folder, 1)
    return pq.read_table(path)["path"].to_pylist() if path.exists() else None


def test_a_prediction_part_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        make_folder(part_path(folder, 1).parent)
        write_part(folder, 0)

    calls = assert_old_or_new(tmp_path, prepare, lambda folder: write_part(folder, 7), published)
    name = part_path(tmp_path, 1).name
    assert calls == [f"fsync .{name}.*", f"replace {name}", f"fsync {part_path(tmp_path, 1).parent.name}"]
    assert published(tmp_path / "whole") == ["7.png", "8.png"]


def test_a_certificate_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    images = colour_images(40)
    reference = LoadedModel("reference", NumpySession(), PREPROCESSING, LABELS, "colours", "0" * 64)

    def change(folder: Path) -> None:
        bundle = Bundle.open(folder / "graph.vitx")
        session, digest = NumpySession(), bundle.subject()[MANIFEST]  # the graph is not what is tested
        candidate = LoadedModel("tiny", session, PREPROCESSING, LABELS, "colours", digest, bundle=bundle)
        certify_models(reference, candidate, images, device="cpu", max_flip_rate=0.2, write=True, quiet=True)

    def read(folder: Path) -> str | None:
        bundle = Bundle.open(folder / "graph.vitx")
        if bundle.certificate() is None:
            return None
        return bundle.require_certificate().candidate

    calls = assert_old_or_new(tmp_path, lambda folder: write_bundle(folder / "graph.vitx"), change, read)
    assert calls == [
        "fsync .certificate.json.*",
        "chmod .certificate.json.*",
        "replace certificate.json",
        "fsync graph.vitx",
    ]


def test_a_verdict_of_this_machine_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "graph.vitx")
    bundle = Bundle.open(tmp_path / "graph.vitx")
    verdict = certificate().as_verdict(executable_of(bundle.subject(), NumpySession()))

    def keep(images: int) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            monkeypatch.setenv("VITX_CACHE", str(folder))
            keep_verdict(bundle, verdict.model_copy(update={"images": images}))

        return change

    def read(folder: Path) -> int | None:
        monkeypatch.setenv("VITX_CACHE", str(folder))
        found = cached_verdict(bundle, verdict.executable)
        return None if found is None else found.images

    calls = assert_old_or_new(tmp_path / "cache", keep(1), keep(2), read)
    assert [call.split()[0] for call in calls] == ["fsync", "chmod", "replace", "fsync"]


def test_an_exported_bundle_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `export_bundle` but the tracing: here the request's weights name the fault of a small graph."""

    def trace(
        title: str, function: Any, request: SourceRequest, rewrites: Any, graph: Path, *_: Any, **limits: Any
    ) -> Any:
        assert title == "tracing"
        fault: Fault | None = "drift" if request.weights == "drift" else None
        graph.write_bytes(tiny_graph(fault).SerializeToString())
        spec = ModelSpec(name="tiny", num_classes=len(LABELS))
        source = SourceInfo(
            name="tests",
            spec=spec,
            class_names=LABELS,
            preprocessing=PREPROCESSING,
            data="digits",
            checkpoint="numpy",
            checkpoint_sha256="0" * 64,
        )
        return bundling.Traced(source, (), (), 18)

    monkeypatch.setattr(bundling, "run_limited", trace)

    def export(folder: Path, weights: str) -> None:
        request = SourceRequest("model:deepvit_digits", weights=weights)
        bundling.export_bundle(request, folder / "graph.vitx", quiet=True)

    def read(folder: Path) -> str | None:
        path = folder / "graph.vitx"
        return Bundle.open(path).manifest.files["model.onnx"].sha256 if path.exists() else None

    for prepare in (nothing, lambda folder: export(folder, "random")):
        here = tmp_path / ("new" if prepare is nothing else "replaced")
        here.mkdir()
        calls = assert_old_or_new(here, prepare, lambda folder: export(folder, "drift"), read)
        assert {"fsync model.onnx", "fsync manifest.json", "fsync .graph.vitx.*"} <= set(calls)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_part_has_the_mode_of_the_umask(tmp_path: Path, mask: int) -> None:
    make_folder(part_path(tmp_path, 1).parent)
    before = os.umask(mask)
    try:
        write_part(tmp_path, 0)
    finally:
        os.umask(before)
    assert part_path(tmp_path, 1).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_old_folder_that_cannot_be_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Where two folders cannot be exchanged, there is a moment without any."""
    rename = os.rename

    def refused(old: Path, new: Path) -> None:
        if old == tmp_path / "new":
            raise error
        rename(old, new)

    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(type(error)):
        files.replace_folder(tmp_path / "new", tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["new", "target"]
    assert os.listdir(tmp_path / "target") == ["target"]
