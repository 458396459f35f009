"""Malformed requests from a fixed seed: refused or hung up on, and nothing of them stays. The benchmark runs more."""

import random
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from fuzz import MAKERS, MAY_PASS, OPTIONS, Outcome, ask, fuzz, held_by, make_request
from server_process import INFER_BODY, INFER_PATH, ServerProcess, running_server, wait_until
from vitx.core.bundle import Bundle

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

REQUESTS = 2000


@pytest.fixture(scope="module")
def server(certified_original: Bundle) -> Iterator[ServerProcess]:
    with running_server(certified_original.path, *OPTIONS) as started:
        yield started


def test_nothing_malformed_breaks_hangs_or_stays(server: ServerProcess) -> None:
    address = (server.host, server.port)
    fuzz(address, range(400), seed=1, model="tiny")  # what is allocated once
    before = held_by(server.process.pid)
    outcome = fuzz(address, range(REQUESTS), seed=0, model="tiny")
    assert outcome.wrong == []
    assert {kind for kind, _ in outcome.counts} == set(MAKERS)
    wait_until(lambda: held_by(server.process.pid)["files"] <= before["files"] + 1)  # + 1: the next question's
    after = held_by(server.process.pid)
    assert after["rss_mib"] - before["rss_mib"] < 24
    assert server.metric("vitx_queue_depth") == server.metric("vitx_running_images") == 0
    assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
    assert server.stop() == 0


def test_a_request_is_made_from_its_seed_and_number() -> None:
    made = [make_request(0, number, "tiny") for number in range(300)]
    assert made == [make_request(0, number, "tiny") for number in range(300)]
    assert made != [make_request(1, number, "tiny") for number in range(300)]
    assert {kind for kind, _ in made} == set(MAKERS)


@pytest.mark.parametrize("answer", ["500", "503", "hang", "200", "404", "closed"])
def test_what_counts_as_wrong(answer: str) -> None:
    outcome = Outcome()
    for number, kind in enumerate(("json", MAY_PASS[0])):
        outcome.add(number, kind, answer)
    wrong = [kind for _, kind, _ in outcome.wrong]
    expected = {"200": ["json"], "404": [], "closed": []}.get(answer, ["json", MAY_PASS[0]])
    assert wrong == expected
    assert outcome.by_answer() == {answer: 2}


def test_bytes_of_no_protocol(server_of_its_own: ServerProcess) -> None:
    """Noise without any structure, many connections at once."""
    chance = random.Random(0)
    address = (server_of_its_own.host, server_of_its_own.port)
    answers = Counter(ask(address, chance.randbytes(chance.randrange(1, 3000)), end=True) for _ in range(200))
    assert set(answers) <= {"400", "431", "closed"}
    assert server_of_its_own.request("POST", INFER_PATH, INFER_BODY)[0] == 200


@pytest.fixture
def server_of_its_own(tiny_bundle: Bundle) -> Iterator[ServerProcess]:
    with running_server(tiny_bundle.path, *OPTIONS) as started:
        yield started
