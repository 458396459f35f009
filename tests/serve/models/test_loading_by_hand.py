"""What a loader makes of a bundle, in this process: its sessions, their verdicts, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, LABELS, NumpySession, with_attention, with_embedding, write_bundle
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.instances import ElasticSession
from vitx.runtimes.session import Float32Array, SessionClosed
from vitx.serve.models import loading
from vitx.serve.models.loading import Loader, infer_rows, measure_curve
from vitx.serve.options import ServeOptions

IMAGES = np.random.default_rng(0).integers(0, 256, (2, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def loader(**changes: Any) -> Loader:
    given: dict[str, Any] = {"max_batch": 2, "device": "cpu", "instances": 1, "threads": 2} | changes
    return Loader(ServeOptions(**given))


def test_a_second_session_gives_what_is_asked_for_beside_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def chosen(bundle: Bundle, runtime: str, **setting: Any) -> tuple[str, ...]:
        asked.append(setting)
        return (runtime,)

    monkeypatch.setattr(loading, "runtimes_by_speed", chosen)
    bundle = with_attention(with_embedding(write_bundle(tmp_path / "tiny.vitx")))
    ours = loader(allow_uncertified=True, runtime="onnxruntime-cpu")
    warm = ours.warm(ours.verify(bundle.path))
    names, setting = ("embedding", "attention"), {"device": "cpu", "threads": 2}
    assert asked == [setting, {**setting, "outputs": names}]
    assert warm.outputs is not None
    assert (warm.session.outputs, warm.outputs.names, warm.outputs.session.outputs) == ((), names, names)
    assert [session.describe()["threads"] for session, _ in warm.loaded] == [2, 2]
    plain, rows = (infer_rows(session)(IMAGES) for session, _ in warm.loaded)
    assert (plain.shape, rows.shape) == ((2, len(LABELS)), (2, len(LABELS) + 3 + IMAGE_SIZE**2))
    np.testing.assert_allclose(rows[:, : len(LABELS)], plain, rtol=1e-5)
    warm.close()
    for session, _ in warm.loaded:
        with pytest.raises(SessionClosed):
            session.infer(IMAGES)


def test_a_model_is_judged_unless_it_is_shown_as_uncertified(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unlisted(NumpySession):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "version": "another"}

    with pytest.raises(CheckFailed, match="has no certificate"):
        loader().verify(write_bundle(tmp_path / "other.vitx").path)
    warm = loader().warm(loader().verify(tiny_bundle.path))
    assert warm.offer.certificate is not None
    assert warm.verdict is not None
    assert warm.verdict.verdict == "pass"
    warm.close()
    unlisted = Unlisted()
    monkeypatch.setattr(loading, "load_session", lambda *given, **options: unlisted)
    with pytest.raises(CheckFailed) as refused:
        loader().warm(loader().verify(tiny_bundle.path))
    with pytest.raises(SessionClosed):
        unlisted.infer(IMAGES)
    capsys.readouterr()
    monkeypatch.setattr(loading, "load_session", lambda *given, **options: Unlisted())
    ours = loader(allow_uncertified=True)
    warm = ours.warm(ours.verify(tiny_bundle.path))
    assert (warm.offer.certificate, warm.verdict) == (None, None)
    said = f"warning: {refused.value}; served nevertheless: --allow-uncertified was given\n"
    assert said in capsys.readouterr().err


def test_a_bundle_of_another_name_is_refused(tiny_bundle: Bundle) -> None:
    assert loader().verify(tiny_bundle.path, ("tiny", "3")).key == ("tiny", "3")
    with pytest.raises(InputError, match=r"is the model 'tiny': to be loaded as 'other' it must be named so$"):
        loader().verify(tiny_bundle.path, ("other", "3"))


@pytest.mark.parametrize(
    ("logits", "embedding", "found"), [(5, 3, r"\(1, 5\) for 1 .* \(1, 4\)"), (4, 2, r"\(1, 2\) as emb.* \(1, 3\)")]
)
def test_a_result_of_another_shape_than_the_manifest_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: int, embedding: int, found: str
) -> None:
    class Other(NumpySession):
        def __init__(self, outputs: tuple[str, ...]) -> None:
            super().__init__()
            self.outputs = outputs

        def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
            widths = {"logits": logits} | ({"embedding": embedding} if self.outputs else {})
            return {name: np.zeros((len(images), width), np.float32) for name, width in widths.items()}

    made: list[Other] = []

    def load(*given: object, outputs: tuple[str, ...] = (), **options: object) -> Other:
        made.append(Other(outputs))
        return made[-1]

    monkeypatch.setattr(loading, "load_session", load)
    ours = loader(allow_uncertified=True)
    offer = ours.verify(with_embedding(write_bundle(tmp_path / "tiny.vitx")).path)
    with pytest.raises(InputError, match=rf"tiny\.vitx returns {found}$"):
        ours.warm(offer)
    for session in made:
        with pytest.raises(SessionClosed):
            session.infer(IMAGES)


def test_one_image_is_planned_as_it_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call alone may compile; sizes are chosen by the least times beside others."""
    now, lock = 0.0, Lock()

    class Costly(NumpySession):
        def __init__(self, costs: Iterator[float]) -> None:
            super().__init__()
            self.costs = costs

        def _infer(self, images: UInt8Array) -> Float32Array:
            nonlocal now
            with lock:
                now += next(self.costs)
            return super()._infer(images)

    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: now))
    session = ElasticSession(Costly(chain([0.5], repeat(2**-10))), Costly(repeat(2**-7)))
    batching = replace(ServeOptions().batching, max_batch=1, instances=2)
    curve = measure_curve(session, (IMAGE_SIZE, IMAGE_SIZE, 3), batching)
    assert curve.seconds(1) == 2**-10
    assert curve.fastest(1) >= 2**-7
