"""What runs the bundle: a session here, or Ray's pool; with which options."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bundle_fixture import NumpySession
from gpu_fixture import add_plan
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.predict import job as launching
from vitx.predict.job import launch
from vitx.predict.options import PredictOptions
from vitx.runtimes.instances import sessions_on


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was made for the prediction, and what it was called with."""
    seen: list[Any] = []

    def session(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments, options))
        return nullcontext("a session")

    def ray_pool(*arguments: Any, **options: Any) -> str:
        seen.append((arguments, options))
        return "a pool"

    def predict(*arguments: Any, **options: Any) -> str:
        seen.append((arguments, options))
        return "the summary"

    monkeypatch.setattr(launching, "load_fastest", session)
    monkeypatch.setattr("vitx.predict.ray.RayPool", ray_pool)
    monkeypatch.setattr(launching, "predict", predict)
    return seen


@pytest.mark.parametrize(
    ("columns", "outputs"),
    [
        ((), ()),
        (("embeddings",), ("embedding",)),
        (("attention",), ("attention",)),
        (("attention", "embeddings"), ("embedding", "attention")),
    ],
)
def test_a_session_here(
    tiny_bundle: Bundle, asked: list[Any], columns: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    wanted: Any = dict.fromkeys(columns, True)
    options = PredictOptions(runtime="openvino", device="cpu", threads=3, decode_threads=2, **wanted)
    assert launch(tiny_bundle.path, "images", Path("out"), options, quiet=True) == "the summary"  # type: ignore[comparison-overlap]
    (made, settings), ((bundle, *rest), called) = asked
    assert (made[0].path, made[1]) == (tiny_bundle.path, "openvino")
    assert settings == {"device": "cpu", "threads": 3, "outputs": outputs, "quiet": True}
    assert (bundle.path, rest, called) == (
        tiny_bundle.path,
        ["a session", "images", Path("out"), options],
        {"quiet": True},
    )


def test_a_pool_of_ray(tiny_bundle: Bundle, asked: list[Any]) -> None:
    options = PredictOptions(
        ray="auto", ray_actors=(2, 4), runtime="openvino", device="cpu", threads=3, decode_threads=2
    )
    launch(tiny_bundle.path, "images", Path("out"), options)
    (made, settings), ((_, *rest), called) = asked
    assert (made[0].path, made[1], settings) == (tiny_bundle.path, options, {})
    assert (rest, called) == (["a pool", "images", Path("out"), options], {"quiet": False})


@pytest.mark.parametrize(("actors", "said"), [((2, 4), "2:4"), ((3, 3), "3")])
def test_actors_without_ray_are_refused(
    tiny_bundle: Bundle, asked: list[Any], actors: tuple[int, int], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        launch(tiny_bundle.path, "images", Path("out"), PredictOptions(ray_actors=actors))
    assert str(caught.value) == f"--ray-actors {said} is for --ray: pass that too, or leave it out"
    assert asked == []


class Loaded(NumpySession):
    """A session that was asked for with a number of threads."""

    def __init__(self, threads: int | None, provider: str, *, concurrent: bool) -> None:
        super().__init__()
        self.threads, self.provider, self.concurrent, self.closed = threads, provider, concurrent, False

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "provider": self.provider}

    def _close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("cores", "provider", "concurrent", "threads", "callers"),
    [
        (1, "CPUExecutionProvider", True, [None], 1),
        (4, "CPUExecutionProvider", True, [None, 1], 4),
        (4, "CPU", False, [None, 1, 1, 1, 1], 4),
        (64, "CPU", False, [None, *[8] * 8], 8),
        (12, "CPU", False, [None, *[2] * 6], 6),
        (4, "CUDAExecutionProvider", True, [None], 1),
    ],
)
def test_without_threads_sessions_share_the_cores(
    tiny_bundle: Bundle,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    provider: str,
    concurrent: bool,
    threads: list[int | None],
    callers: int,
) -> None:
    made: list[Loaded] = []

    def load(*_: Any, **options: Any) -> Loaded:
        made.append(Loaded(options["threads"], provider, concurrent=concurrent))
        return made[-1]

    monkeypatch.setattr(launching, "load_fastest", load)
    monkeypatch.setattr(launching, "usable_cores", lambda: cores)
    judged: list[Any] = []
    monkeypatch.setattr(launching, "is_certified", lambda _, session, *__, **___: judged.append(session.threads))
    launch(tiny_bundle.path, "images", Path("out"), PredictOptions())
    ((_, session, *_), _), *_ = asked
    assert [each.threads for each in made] == threads
    assert session.callers == callers
    assert judged == [None] * (len(threads) > 1), "by the session that has all cores"
    assert all(each.closed for each in made), "when the prediction has ended"


@pytest.mark.parametrize("cores", [*range(1, 130)])
def test_sessions_leave_few_cores_idle(cores: int) -> None:
    sessions = sessions_on(cores)
    busy = {each: cores // each * each for each in range(1, min(cores, 8) + 1)}
    assert busy[sessions] >= 0.9 * cores
    assert all(busy[each] < 0.9 * cores for each in range(sessions + 1, len(busy) + 1)), "the most that do"


def test_nothing_is_loaded_of_a_bundle_whose_certificate_is_of_other_files(
    tiny_bundle: Bundle, asked: list[Any]
) -> None:
    add_plan(tiny_bundle, "tensorrt-rtx")
    with pytest.raises(CheckFailed, match=r"is of other files \(engines/tensorrt-rtx\.plan, "):
        launch(tiny_bundle.path, "images", Path("out"), PredictOptions(runtime="tensorrt-rtx"), quiet=True)
    assert not asked
    launch(tiny_bundle.path, "images", Path("out"), PredictOptions(allow_uncertified=True, threads=1), quiet=True)
    assert asked, "where that is allowed"
