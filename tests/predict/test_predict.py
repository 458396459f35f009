"""A folder of images into Parquet."""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bundle_fixture import LABELS, NumpySession, colour_image, png
from cli_fixture import Vitx
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array, decode
from vitx.data.folder import list_images
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import ROW_GROUP, PartWriter
from vitx.runtimes import load_session

# predict() ignores this warning, but pytest's own filters come first.
pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


def with_size(encoded: bytes, width: int, height: int) -> bytes:
    """A PNG whose header claims another size: a decompression bomb of a few hundred bytes."""
    header = b"IHDR" + struct.pack(">II", width, height) + encoded[24:29]
    return encoded[:12] + header + struct.pack(">I", zlib.crc32(header)) + encoded[33:]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 readable images in two folders, and six that cannot be read."""
    folder = tmp_path / "photos"
    rng = np.random.default_rng(3)
    for index in range(40):
        place = folder / ("a" if index % 2 else "b/ö")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index:02d}.png").write_bytes(png(colour_image(index % 4, rng, size=24)))
    whole = (folder / "a" / "01.png").read_bytes()
    (folder / "a" / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "a" / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("no image")
    (folder / "notes.txt").write_text("left out")
    (folder / ".hidden.png").write_bytes(whole)
    (folder / "bomb.png").write_bytes(with_size(whole, 30_000, 30_000))
    (folder / "large.png").write_bytes(with_size(whole, 11_000, 11_000))
    Image.new("L", (1, 500_000)).save(folder / "thin.png")
    return folder


def run_predict(bundle: Bundle, folder: Path, out: Path, **options: Any) -> PredictionSummary:
    session = load_session(bundle, device="cpu", threads=1)
    return predict(bundle, session, folder, out, PredictOptions(**options), quiet=True)


def written(out: Path) -> dict[str, bytes]:
    """The files of the output folder, without the ledger and the list."""
    files = [path for path in out.rglob("*") if path.is_file() and ".vitx" not in path.parts]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def test_rows_are_the_independent_functions(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    summary = run_predict(tiny_bundle, photos, tmp_path / "out", batch_size=7, top_k=3)
    rows = pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()
    paths = list_images(photos)
    assert [row["path"] for row in rows] == [path.relative_to(photos).as_posix() for path in paths]
    preprocessing = tiny_bundle.manifest.preprocessing
    good = [(row, path) for row, path in zip(rows, paths, strict=True) if row["error"] is None]
    assert len(good) == 40
    for row, path in good:
        logits = NumpySession().infer(preprocessing.apply(decode(path))[None])[0]
        scores = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-scores)[:3]
        assert row["class"] == LABELS[best[0]]
        assert row["class_index"] == best[0]
        assert row["score"] == pytest.approx(scores[best[0]], abs=1e-5)
        assert row["top_k_classes"] == [LABELS[index] for index in best]
        assert row["top_k_scores"] == pytest.approx(scores[best], abs=1e-5)
    assert summary.images == 46
    assert summary.errors == 6
    assert summary.classes == {label: sum(row["class"] == label for row in rows) for label in LABELS}
    assert summary.certified


def test_unreadable_images_are_rows_that_say_why(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    run_predict(tiny_bundle, photos, tmp_path / "out")
    rows = {row["path"]: row for row in pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()}
    reasons = {path: row["error"] for path, row in rows.items() if row["error"]}
    assert set(reasons) == {"a/empty.jpg", "a/truncated.png", "bomb.png", "large.png", "text.jpg", "thin.png"}
    assert "not an image" in reasons["text.jpg"]
    assert "more pixels than the 100,000,000 allowed" in reasons["bomb.png"]
    assert "11000×11000 pixels" in reasons["large.png"]
    assert "1×500000 pixels" in reasons["thin.png"]
    assert rows["text.jpg"]["class"] is None
    assert rows["text.jpg"]["top_k_scores"] is None


def test_strict_stops_and_leaves_no_predictions(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"unreadable image a/empty\.jpg: not an image: empty; without --strict"):
        run_predict(tiny_bundle, photos, tmp_path / "out", strict=True)
    assert not any((tmp_path / "out" / PREDICTIONS).iterdir())
    assert not (tmp_path / "out" / SUMMARY).exists()


def test_an_interrupt_while_a_file_is_made_leaves_nothing(
    tiny_bundle: Bundle, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PartWriter.__init__

    def interrupted(self: PartWriter, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(PartWriter, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_predict(tiny_bundle, photos, tmp_path / "out")
    assert not any((tmp_path / "out" / PREDICTIONS).iterdir())


def test_failed_run_keeps_the_earlier_result(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_predict(tiny_bundle, photos, out)
    before = written(out)
    with pytest.raises(CheckFailed, match="unreadable image a/empty"):
        run_predict(tiny_bundle, photos, out, strict=True)
    assert written(out) == before
    assert set(before) == {f"{PREDICTIONS}/part-00000001.parquet", SUMMARY}


def test_summary_file_is_the_summary(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    summary = run_predict(tiny_bundle, photos, tmp_path / "out")
    assert PredictionSummary.model_validate_json((tmp_path / "out" / SUMMARY).read_bytes()) == summary
    assert summary.images_per_second == pytest.approx(46 / summary.seconds)


def test_a_top_k_above_the_number_of_classes_lists_all(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    run_predict(tiny_bundle, photos, tmp_path / "out", top_k=100)
    row = pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()[0]
    assert sorted(row["top_k_classes"]) == sorted(LABELS)
    assert sum(row["top_k_scores"]) == pytest.approx(1)


def test_decoding_runs_ahead_by_a_bounded_number(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    data = png(colour_image(0, np.random.default_rng(0)))
    for index in range(200):
        (folder / f"{index:03d}.png").write_bytes(data)
    decoded = 0

    def counting(source: bytes, **options: Any) -> Image.Image:
        nonlocal decoded
        decoded += 1
        return decode(source, **options)

    monkeypatch.setattr("vitx.core.preprocess.decode", counting)
    ahead: list[int] = []

    class Watched(NumpySession):
        inferred = 0

        def _infer(self, images: UInt8Array) -> Any:
            ahead.append(decoded - self.inferred)
            self.inferred += len(images)
            return super()._infer(images)

    predict(tiny_bundle, Watched(), folder, tmp_path / "out", PredictOptions(batch_size=10), quiet=True)
    # Three batches ahead, one that is formed, one in the model, three that wait for it, and one that waits for them.
    assert max(ahead) <= 10 * 9
    assert pq.read_table(tmp_path / "out" / PREDICTIONS).num_rows == 200


def test_rows_are_written_in_groups(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.predict.outputs.parts.ROW_GROUP", 16)
    assert ROW_GROUP > 16
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(50):
        (folder / f"{index:03d}.png").write_bytes(b"")
    run_predict(tiny_bundle, folder, tmp_path / "out", batch_size=8)
    (part,) = (tmp_path / "out" / PREDICTIONS).glob("*.parquet")
    assert pq.ParquetFile(part).metadata.num_row_groups == 4


@pytest.mark.skipif(sys.platform != "linux", reason="file names of arbitrary bytes")
def test_file_name_that_is_not_unicode(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(png(colour_image(0, np.random.default_rng(0))))
    run_predict(tiny_bundle, folder, tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / PREDICTIONS)["path"].to_pylist() == ["caf\\xe9.png"]


def test_out_that_is_a_file_is_refused(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write to the folder .*out': File exists"):
        run_predict(tiny_bundle, photos, tmp_path / "out")


def test_bundle_without_certificate_needs_an_option(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    (tiny_bundle.path / CERTIFICATE).unlink()
    with pytest.raises(CheckFailed, match="has no certificate"):
        run_predict(tiny_bundle, photos, tmp_path / "out")
    assert not run_predict(tiny_bundle, photos, tmp_path / "out", allow_uncertified=True).certified


def test_the_input_before_the_bundle_is_said(tiny_bundle: Bundle, photos: Path, tmp_path: Path, vitx: Vitx) -> None:
    code, _, err = vitx("predict", photos, tiny_bundle.path, "--out", tmp_path / "out")
    expected = f"'{tiny_bundle.path}' is the bundle, and '{photos}' is none: give the bundle first, then the input"
    assert (code, err) == (2, f"error: {expected}\n")


def test_predict_command(tiny_bundle: Bundle, photos: Path, tmp_path: Path, vitx: Vitx) -> None:
    arguments = (tiny_bundle.path, photos, "--out", tmp_path / "out", "--device", "cpu", "--quiet")
    code, out, err = vitx("predict", *arguments, "--json")
    assert code == 1
    assert err.startswith("error: 6 of 46 images are unreadable, more than --max-error-rate 0.01: the column `error`")
    assert json.loads(out) == json.loads((tmp_path / "out" / SUMMARY).read_text())
    allowed = ("--max-error-rate", ".14")
    code, out, err = vitx("predict", *arguments, *allowed, "--json")
    assert code == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / SUMMARY).read_text())
    code, out, err = vitx("predict", *arguments, *allowed)
    assert code == 0, err
    assert "unreadable" in out
    code, _, err = vitx("predict", *arguments, "--strict")
    assert code == 1
    assert err.startswith("error: unreadable image ")


def test_prediction_and_bench_import_no_torch(tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from vitx.core.bundle import Bundle
from vitx.bench import bench
from vitx.runtimes import load_session
assert not {{"torch", "onnxruntime", "pyarrow"}} & set(sys.modules)
from vitx.parity.evaluate import evaluate_path
from vitx.predict import predict
bundle = Bundle.open({str(tiny_bundle.path)!r})
session = load_session(bundle, device="cpu", threads=1)
predict(bundle, session, Path({str(photos)!r}), Path({str(tmp_path / "out")!r}), quiet=True)
bench(session, bundle.manifest.input.shape[1:], seconds=0.01)
evaluate_path(bundle.path, quiet=True)
assert not {{"torch", "timm", "scipy"}} & set(sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
