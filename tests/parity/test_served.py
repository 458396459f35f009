"""What a server answers against the reference, on a server of the test; how a server's process starts and ends."""

import json
import math
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from table_session import PIXEL, TableSession, numbered_images
from vitx.core.errors import CheckFailed, EnvironmentMissing
from vitx.core.probabilities import log_softmax
from vitx.core.sandbox import verb_command
from vitx.parity import served
from vitx.parity.served import ServedComparison, classify_all, compare_served, serving

CLASSES = ("a", "b", "c")


@contextmanager
def server(
    scores: list[dict[int, float]], refused: int = -1, refusal: object = None
) -> Iterator[tuple[str, list[str]]]:
    """Answers image i with scores[i], best first; refuses one. Yields its URL and the paths of all requests."""
    paths: list[str] = []
    images = numbered_images([0] * len(scores), CLASSES)
    numbers = {images.read(index): index for index in range(len(scores))}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            number = numbers[self.rfile.read(int(self.headers["Content-Length"]))]
            paths.append(f"{self.path} {self.headers['Content-Type']}")
            best = sorted(scores[number].items(), key=lambda pair: -pair[1])
            answer = {"predictions": [{"index": index, "score": score} for index, score in best]}
            body = json.dumps(refusal if number == refused else answer).encode()
            self.send_response(400 if number == refused else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", paths
        finally:
            http.shutdown()
            thread.join()


# The probabilities of ten images by the reference; their logarithms are its logits.
REFERENCE = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], *[[0.25, 0.25, 0.5]] * 8]


def compared(scores: list[dict[int, float]]) -> ServedComparison:
    images = numbered_images([0] * 10, CLASSES)
    session = TableSession(np.log(REFERENCE))
    with server(scores) as (url, paths):
        found = compare_served(url, session, images, PIXEL, max_logit_error=0.25, quiet=True)
    assert sorted(set(paths)) == ["/v1/classify?top_k=3 application/octet-stream"]
    assert len(paths) == 10
    assert session.batches == [[*range(10)]]
    return found


def answers(**changed: dict[int, float]) -> list[dict[int, float]]:
    same = [dict(enumerate(row)) for row in REFERENCE]
    return [changed.get(f"image{index}", row) for index, row in enumerate(same)]


def test_the_server_s_numbers_are_compared_in_log_probabilities() -> None:
    # Image 1 gets class 0 and image 9 the same class with other scores; ten images, more than connections.
    found = compared(answers(image1={0: 0.75, 1: 0.125, 2: 0.125}, image9={0: 0.125, 1: 0.25, 2: 0.625}))
    errors = [math.log(6), math.log(6), math.log(2), math.log(1.25)]
    assert found.model_dump() == {
        "images": 10,
        "flips": ("image 1",),
        "flip_rate_bound": pytest.approx(0.394163, abs=1e-6),  # (1 − p)¹⁰ + 10p(1 − p)⁹ is 0.05
        "max_error": pytest.approx(math.log(6), abs=1e-6),
        "mean_error": pytest.approx(sum(errors) / 30, abs=1e-6),
        "max_error_allowed": 0.5,
    }


def test_a_probability_of_nought_is_a_large_error_and_no_infinity() -> None:
    found = compared(answers(image4={0: 0.0, 1: 0.25, 2: 0.75}, image5={2: 1.0}))
    assert found.flips == ()
    assert found.max_error == pytest.approx(math.log(0.25) - math.log(sys.float_info.min))
    assert math.isfinite(found.mean_error)


@pytest.mark.parametrize("logit", [-720.0, -800.0])
def test_a_probability_that_no_float_holds_is_none_of_the_server_s_errors(logit: float) -> None:
    """e⁻⁸⁰⁰ is 0 in a float64, and e⁻⁷²⁰ has five digits: a server that computes as the reference does had failed."""
    images, session = numbered_images([0], CLASSES), TableSession(np.array([[0.0, logit, -1.0]]))
    exact = np.exp(log_softmax(np.array([[0.0, logit, -1.0]])))[0]
    with server([dict(enumerate(exact.tolist()))]) as (url, _):
        found = compare_served(url, session, images, PIXEL, max_logit_error=1e-6, quiet=True)
    assert found.failures(1.0) == ()


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_an_answer_that_is_no_number_is_a_large_error_of_which_json_can_tell(score: float) -> None:
    found = compared(answers(image4={0: score, 1: 0.25, 2: 0.5}))
    assert 0.25 < found.max_error < math.inf
    assert math.isfinite(found.mean_error)


def test_answers_are_in_the_order_of_the_images() -> None:
    scores = [{0: (i + 1) / 32, 1: 0.5, 2: 0.5 - (i + 1) / 32} for i in range(11)]
    with server(scores) as (url, _):
        found = classify_all(url, numbered_images([0] * 11, CLASSES), quiet=True)
    assert np.exp(found[:, 0]).tolist() == pytest.approx([(i + 1) / 32 for i in range(11)])
    assert np.exp(found).sum(axis=1).tolist() == pytest.approx([1] * 11)


@pytest.mark.parametrize(("refusal", "words"), [({"error": "no such image"}, "no such image"), ({}, "")])
def test_a_refused_image_is_named_with_the_server_s_words(refusal: object, words: str) -> None:
    refusing = server([{0: 1.0}] * 9, refused=8, refusal=refusal)
    with refusing as (url, _), pytest.raises(CheckFailed) as caught:
        classify_all(url, numbered_images([0] * 9, CLASSES), quiet=True)
    assert str(caught.value) == f"the server refused image 8: 400 {words}"


def test_a_server_that_ends_meanwhile_is_one_error() -> None:
    images, reached = numbered_images([0] * 10, CLASSES), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    listener.accept()[0].close()
                    reached.set()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EnvironmentMissing, match=f"^the server at {url} gave no answer to image 0: it has ended"):
            classify_all(url, images, quiet=True)
        assert reached.is_set()


def test_failures_at_the_limits_and_one_float_beyond() -> None:
    found = ServedComparison(
        images=300, flips=("x",), flip_rate_bound=0.0157, max_error=0.5, mean_error=0.1, max_error_allowed=0.5
    )
    assert found.failures(0.0157) == ()
    (flips,) = found.failures(math.nextafter(0.0157, 0))
    assert flips == "over HTTP 1 of 300 images get another class: flip rate at most 0.015700 (95 %), allowed 0.0157"
    for error, text in ((math.nextafter(0.5, 1), "0.5"), (2.34567, "2.35"), (math.nan, "nan")):
        beyond = found.model_copy(update={"max_error": error})
        assert beyond.failures(0.5) == (f"over HTTP a log probability differs by {text}, allowed 0.5",)
        assert len(beyond.failures(0.01)) == 2


def fake_python(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the Python that serves: a shell script that notes its arguments and how it ended."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{lines}\n')
    os.chmod(script, stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(script))
    return folder / "ended"


def test_a_server_is_told_what_to_serve_and_ended_by_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "trap 'echo term > {}/ended; exit 0' TERM\necho 'vitx serves tiny on http://127.0.0.1:9 '\n"
    lines = wait.format(tmp_path) + "while :; do sleep 0.01; done"
    ended = fake_python(tmp_path, lines, monkeypatch)
    with serving(Path("a.vitx"), device="cpu", allow_uncertified=True) as url:
        assert url == "http://127.0.0.1:9"
        assert not ended.exists()
    assert ended.read_text() == "term\n"
    told = " ".join(verb_command("serve", "a.vitx", "--port", "0", "--device", "cpu")[1:])
    assert (tmp_path / "arguments").read_text() == f"{told} --allow-uncertified\n"
    ended.unlink()
    with pytest.raises(KeyError), serving(Path("a.vitx"), device="cpu"):
        raise KeyError
    assert ended.read_text() == "term\n"
    assert (tmp_path / "arguments").read_text() == f"{told}\n"


@pytest.mark.parametrize(
    ("lines", "text"),
    [("echo first >&2; echo the reason >&2; exit 2", "the reason"), ("exit 0", "it said nothing")],
)
def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, text: str
) -> None:
    fake_python(tmp_path, lines, monkeypatch)
    with pytest.raises(EnvironmentMissing) as caught, serving(Path("a.vitx")):
        pass
    assert str(caught.value) == f"the server did not start: {text}"


def test_a_server_that_says_nothing_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "START_SECONDS", 0.05)
    fake_python(tmp_path, "exec sleep 600", monkeypatch)
    with pytest.raises(EnvironmentMissing) as caught, serving(Path("a.vitx")):
        pass
    assert str(caught.value) == "the server did not start: it said nothing"
