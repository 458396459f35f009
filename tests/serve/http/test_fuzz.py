"""Malformed requests from a fixed seed: each is refused or disconnected, and none leaks. The benchmark runs more."""

import gzip
import random
import sys
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

import support.cost_grammar as cost_grammar
import support.fuzz_grpc as fuzz_grpc
import support.fuzz_openapi as fuzz_openapi
from fuzz import MANAGEMENT_TOKEN, OPTIONS, Outcome, fuzz_over_grpc, fuzz_over_http, held_by
from server_process import HANG, INFER_BODY, INFER_PATH, ServerProcess, grpc_address, running_server, wait_until
from support.fuzz_http import MAKERS, MAY_PASS, ask, is_refused, make_request
from vitx.core.bundle import Bundle

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

REQUESTS = 1200
CALLS = 1200
EXAMPLES = 3  # of each operation
TINY = cost_grammar.Model("tiny", 16)


@pytest.fixture
def server(tiny_bundle: Bundle) -> Iterator[ServerProcess]:
    token = tiny_bundle.path.with_name("token")
    token.write_text(MANAGEMENT_TOKEN)
    managed = ("--management", "--management-token-file", token)
    with running_server(tiny_bundle.path, *OPTIONS, *managed, "--grpc-port", "0") as started:
        yield started


def assert_nothing_stays(server: ServerProcess, before: dict[str, float]) -> None:
    """After malformed requests no file is open, little memory held, nothing queued, and a good request is answered."""
    wait_until(lambda: held_by(server.process.pid)["files"] <= before["files"] + 1)  # + 1: the next question's
    assert held_by(server.process.pid)["rss_mib"] - before["rss_mib"] < 24
    assert server.metric("vitx_queue_depth") == server.metric("vitx_running_images") == 0
    assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
    assert server.stop() == 0


def test_no_malformed_request_crashes_hangs_or_leaks(server: ServerProcess) -> None:
    address = (server.host, server.port)
    fuzz_over_http(address, range(300), seed=1, model="tiny")  # allocations that happen once
    before = held_by(server.process.pid)
    outcome = fuzz_over_http(address, range(REQUESTS), seed=0, model="tiny")
    assert outcome.wrong == []
    assert {kind for kind, _ in outcome.counts} == set(MAKERS)
    assert_nothing_stays(server, before)


def test_no_malformed_call_crashes_hangs_or_leaks(server: ServerProcess) -> None:
    fuzz_over_grpc(grpc_address(server), range(300), seed=1, model="tiny")
    before = held_by(server.process.pid)
    outcome = fuzz_over_grpc(grpc_address(server), range(CALLS), seed=0, model="tiny")
    assert outcome.wrong == []
    assert {kind for kind, _ in outcome.counts} == set(fuzz_grpc.MAKERS)
    assert outcome.counts["flipped", "OK"] > 0  # so the others are refused for what is wrong with them
    assert_nothing_stays(server, before)


def test_replies_match_the_openapi_description(server: ServerProcess) -> None:
    answers = fuzz_openapi.run(f"http://{server.url}", "tiny", MANAGEMENT_TOKEN, EXAMPLES)
    assert answers.wrong == []
    described = server.json("/openapi.json")["paths"]
    operations = {
        f"{method.upper()} {path}" for path, of in described.items() for method in of.keys() & {"get", "post"}
    }
    assert {operation for operation, _ in answers.counts} == operations - {"GET /openapi.json"}
    assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200


def test_a_request_is_made_from_its_seed_and_number() -> None:
    made = [make_request(0, number, "tiny") for number in range(300)]
    assert made == [make_request(0, number, "tiny") for number in range(300)]
    assert made != [make_request(1, number, "tiny") for number in range(300)]
    assert {kind for kind, _ in made} == set(MAKERS)


@pytest.mark.parametrize("kind", cost_grammar.KINDS)
def test_the_grammar_of_costs_writes_requests_of_less_than_a_mb(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_grammar, "_MOST_UNPACKED", 2**17)
    chance, sizes = random.Random(0), set[int]()
    for _ in range(40):
        values = cost_grammar.chosen(kind, chance)
        for _ in range(3):
            if "pixels" in values:
                values = {**values, "pixels": 10_000, "width": min(values["width"], 1000)}
            if (request := cost_grammar.made(kind, values, TINY)) is not None:
                assert request.data == getattr(cost_grammar.made(kind, values, TINY), "data", b"")
                sizes.add(len(request.data))
            values = cost_grammar.mutated(kind, values, chance)
    assert max(sizes) <= cost_grammar.MOST_BYTES
    assert len(sizes) > 10


def test_the_first_choices_of_the_grammar_are_answered(server_of_its_own: ServerProcess) -> None:
    """Else a search might look at refusals alone: no form had ever got as far as its images."""
    address = (server_of_its_own.host, server_of_its_own.port)
    answered = set()
    with grpc.insecure_channel(grpc_address(server_of_its_own)) as channel:
        for kind, (target, _, choices) in cost_grammar._KINDS.items():
            request = cost_grammar.made(kind, {name: values[0] for name, values in choices.items()}, TINY)
            if request is not None and target != "http":
                channel.unary_unary(target)(request.data, timeout=HANG)  # raises RpcError
                answered.add(kind)
            elif request is not None and ask(address, request.data) == "200":
                answered.add(kind)
    assert answered == {"json", "base64", "form", "head", "image", "tiff", "chunks", "pieces", "call"}


def test_the_grammar_fills_a_model_of_any_side_with_images() -> None:
    """With images of 16 px alone, no JSON had more than 200,000 numbers that a server would read."""
    large = cost_grammar.Model("large", 224)
    for kind, name, given in (("json", "numbers", -50), ("call", "images", 50)):
        values = {key: choices[0] for key, choices in cost_grammar._KINDS[kind][2].items()}
        request = cost_grammar.made(kind, {**values, name: given, "gzip": True}, large)
        assert request is not None
        body = request.data.partition(b"\r\n\r\n")[2] or request.data
        assert len(gzip.decompress(body)) > 50 * large.numbers


@pytest.mark.parametrize("status", ["INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED", "hang"])
def test_statuses_that_count_as_wrong(status: str) -> None:
    assert not any(fuzz_grpc.is_refused(kind, status) for kind in fuzz_grpc.MAKERS if kind != "frames")
    assert fuzz_grpc.is_refused("tensors", "INVALID_ARGUMENT")
    assert not fuzz_grpc.is_refused("tensors", "OK")
    assert not fuzz_grpc.is_refused("frames", "hang")


@pytest.mark.parametrize("answer", ["500", "503", "hang", "200", "404", "closed"])
def test_answers_that_count_as_wrong(answer: str) -> None:
    outcome = Outcome(is_refused)
    for number, kind in enumerate(("json", MAY_PASS[0])):
        outcome.add(number, kind, answer)
    wrong = [kind for _, kind, _ in outcome.wrong]
    expected = {"200": ["json"], "404": [], "closed": []}.get(answer, ["json", MAY_PASS[0]])
    assert wrong == expected
    assert outcome.by_answer() == {answer: 2}


def test_random_bytes(server_of_its_own: ServerProcess) -> None:
    """Noise without any structure, many connections at once."""
    chance = random.Random(0)
    address = (server_of_its_own.host, server_of_its_own.port)
    answers = Counter(ask(address, chance.randbytes(chance.randrange(1, 3000)), end=True) for _ in range(200))
    assert set(answers) <= {"400", "431", "closed"}
    assert server_of_its_own.request("POST", INFER_PATH, INFER_BODY)[0] == 200


@pytest.fixture
def server_of_its_own(tiny_bundle: Bundle) -> Iterator[ServerProcess]:
    with running_server(tiny_bundle.path, *OPTIONS, "--grpc-port", "0") as started:
        yield started


def test_a_filled_up_body_is_gzip() -> None:
    pieces = [b"[1, ", *[cost_grammar._SPACES] * 2, b"2", b"", cost_grammar._SPACES, b"]"]
    assert gzip.decompress(cost_grammar._gzipped(pieces)) == b"".join(pieces)
