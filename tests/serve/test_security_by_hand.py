"""Which hosts, pages and tokens are taken and how others are refused, without a socket."""

from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import InputError
from vitx.serve.errors import RequestError
from vitx.serve.options import ServeOptions
from vitx.serve.security import AllowedHosts, Kind, Tokens, read_pem

TOKEN = "0123456789abcdef0123456789abcdef"
LOCAL = AllowedHosts("127.0.0.1", ("VITX.example", "[fe80::1]"))


def is_taken(hosts: AllowedHosts, host: str | None, origin: str | None = None) -> bool:
    hosts.check(host, origin)
    return True


def refusal(hosts: AllowedHosts, host: str | None, origin: str | None = None) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as error:
        hosts.check(host, origin)
    return error.value.status, error.value.reason, str(error.value)


@pytest.mark.parametrize(
    "host",
    [
        *[None, "127.0.0.1", "127.9.9.9:8000", "[::1]:80", "localhost", "LOCALHOST:1", "a.localhost"],
        *["vitx.example:443", "Vitx.Example", "[fe80::1]:8000"],
    ],
)
def test_a_server_of_this_machine_has_its_names_and_those_that_are_given(host: str | None) -> None:
    assert is_taken(LOCAL, host)


@pytest.mark.parametrize("host", ["", "10.0.0.1", "[::1", "localhost.example", "xlocalhost", "a.vitx.example", "[::2]"])
@pytest.mark.parametrize("hosts", [LOCAL, AllowedHosts("::1%lo", ("vitx.example",))])
def test_other_names_of_a_server_of_this_machine_are_refused(hosts: AllowedHosts, host: str) -> None:
    text = f"Host '{host}' is not a name of this server: --allow-host NAME makes it one"
    assert refusal(hosts, host) == (403, "host", text)


def test_without_names_that_are_given_only_a_server_for_others_has_any() -> None:
    for bound in ("10.1.2.3", "::", None):
        assert is_taken(AllowedHosts(bound, ()), "vitx.default.svc:8000")
    for bound in ("127.0.0.1", "::1"):
        assert refusal(AllowedHosts(bound, ()), "rebound.example")[1] == "host"


def test_a_long_name_is_refused_in_a_short_line() -> None:
    assert refusal(LOCAL, "x" * 100)[2].startswith(f"Host '{'x' * 80}' is")
    assert refusal(LOCAL, None, "y" * 100)[2].startswith(f"the page's origin '{'y' * 80}' is")


def test_addresses_are_names_of_a_server_for_others_and_of_one_whose_address_is_not_known() -> None:
    for bound in ("10.1.2.3", None):
        hosts = AllowedHosts(bound, ("vitx.example",))
        for host in ("192.168.0.1", "[::2]:1", "127.0.0.1", "vitx.example"):
            assert is_taken(hosts, host)
        assert refusal(hosts, "other.example")[1] == "host"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost:80"),
        ("localhost:80", "http://localhost"),
        ("localhost:443", "https://localhost"),
        ("LOCALHOST", "HTTPS://Localhost:443"),
        ("localhost", "https://vitx.example"),
        ("localhost", "http://vitx.example:3000"),
        (None, "http://vitx.example"),
    ],
)
def test_the_servers_own_pages_and_its_proxys_may_ask(host: str | None, origin: str) -> None:
    assert is_taken(LOCAL, host, origin)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8001"),
        ("localhost:80", "https://localhost"),
        ("localhost:443", "http://localhost"),
        ("localhost", "https://attacker.example"),
        ("localhost", "http://127.0.0.1"),
        ("localhost", "localhost"),
        ("localhost", "null"),
        ("localhost", ""),
        (None, "http://"),
        (None, "http://localhost"),
    ],
)
def test_pages_of_another_origin_may_not(host: str | None, origin: str) -> None:
    text = f"the page's origin '{origin}' is not this server: --allow-host NAME, if NAME is its proxy"
    assert refusal(LOCAL, host, origin) == (403, "origin", text)


@pytest.mark.parametrize("name", ["", "[]", "vitx.example:80", "https://vitx.example", "[fe80::1]:80", "a/b"])
def test_a_name_that_no_request_has_is_refused(name: str) -> None:
    shown = name.strip("[]")
    with pytest.raises(InputError) as error:
        AllowedHosts("127.0.0.1", ("vitx.example", name))
    text = f"--allow-host {shown}: expected a name or address in ASCII, without scheme, port or *"
    assert str(error.value) == text


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files with a token each: "a", "b", and "same", which has a's."""
    tokens = {"a": TOKEN, "b": TOKEN[::-1], "same": TOKEN}
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
    return {name: tmp_path / name for name in tokens}


def answered(tokens: Tokens, kind: Kind, given: str | None) -> tuple[int, str, str] | None:
    """The refusal; None: it is taken."""
    try:
        tokens.check(kind, given)
    except RequestError as error:
        return error.status, error.reason, str(error)
    return None


def test_each_kind_of_request_has_its_token(files: dict[str, Path]) -> None:
    tokens = Tokens(ServeOptions(token_file=files["a"], management=True, management_token_file=files["b"]))
    kinds: tuple[tuple[Kind, str], ...] = (("inference", TOKEN), ("management", TOKEN[::-1]), ("metrics", TOKEN))
    for kind, token in kinds:
        ask = f"send 'Authorization: Bearer TOKEN' with the {kind} token"
        for given in (f"Bearer {token}", f"bearer  {token}", f"BEARER {token} "):
            assert answered(tokens, kind, given) is None
        for given in (f"Bearer {token[::-1]}", f"Basic {token}", token, "", "Bearer", f"Bearer\t{token}"):
            assert answered(tokens, kind, given) == (401, "unauthorized", f"the token is not valid: {ask}")
        assert answered(tokens, kind, None) == (401, "unauthorized", f"no bearer token was given: {ask}")


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, {}),
        ({"token_file": "a"}, {"inference": TOKEN, "metrics": TOKEN}),
        ({"metrics_token_file": "b"}, {"metrics": TOKEN[::-1]}),
        ({"token_file": "a", "metrics_token_file": "b"}, {"inference": TOKEN, "metrics": TOKEN[::-1]}),
        ({"token_file": "a", "metrics": "open"}, {"inference": TOKEN}),
        ({"token_file": "a", "metrics": "off"}, {"inference": TOKEN}),
        ({"management": True, "management_token_file": "b"}, {"management": TOKEN[::-1]}),
    ],
)
def test_metrics_have_a_token_of_their_own_or_that_of_inference(
    files: dict[str, Path], options: dict[str, Any], needed: dict[str, str]
) -> None:
    tokens = Tokens(ServeOptions(**{key: files.get(value, value) for key, value in options.items()}))
    assert {kind: token.decode() for kind, token in tokens.of.items() if token is not None} == needed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"metrics": "open", "metrics_token_file": "a"},
            "--metrics-token-file is of --metrics token, not of --metrics open",
        ),
        (
            {"metrics": "off", "metrics_token_file": "a"},
            "--metrics-token-file is of --metrics token, not of --metrics off",
        ),
        *[
            (options, "--management and --management-token-file go together, with a token that nothing else has")
            for options in (
                {"management": True},
                {"management_token_file": "a"},
                {"management": True, "management_token_file": "a", "token_file": "same"},
                {"management": True, "management_token_file": "a", "token_file": "b", "metrics_token_file": "same"},
            )
        ],
    ],
)
def test_tokens_that_do_not_go_together_are_refused(files: dict[str, Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as error:
        Tokens(ServeOptions(**{key: files.get(value, value) for key, value in options.items()}))
    assert str(error.value) == text


def test_without_tls_there_is_no_certificate() -> None:
    assert read_pem(ServeOptions()) is None
