"""Who may ask over HTTP, with real sockets: hosts, pages of other origins, content types, /metrics, and no paths."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from server_process import HANG, INFER_BODY, INFER_PATH, ServerProcess, running_server
from vitx.core.errors import InputError
from vitx.serve.errors import RequestError
from vitx.serve.models.served_model import _without_folders
from vitx.serve.options import ServeOptions
from vitx.serve.security import AllowedHosts, Tokens

TOKEN = "0123456789abcdef0123456789abcdef"
CURL = "application/x-www-form-urlencoded"  # how libcurl calls what it posts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It has shared memory and no token."""
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "tiny.vitx", data="../home/alice/secret/photos")
    allowed = ("--allow-host", "vitx.example")
    with running_server(bundle.path, "--allow-uncertified", "--shared-memory", *allowed) as started:
        yield started


def answer(server: ServerProcess, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    status, text, _ = server.request(method, path, body, {name.replace("_", "-"): of for name, of in headers.items()})
    return status, json.loads(text)["error"] if status >= 400 else ""


def test_a_name_that_was_made_to_point_here_is_refused(server: ServerProcess) -> None:
    for path in ("/", "/v2", "/metrics", "/v2/models/tiny", "/v2/health/live"):
        status, text = answer(server, "GET", path, Host=f"rebound.attacker.example:{server.port}")
        assert status == 403
        assert text.startswith("Host 'rebound.attacker.example:")
        assert "--allow-host NAME" in text
    for host in ("127.0.0.1", "localhost", "LOCALHOST:1", "a.localhost", "[::1]:80", "127.9.9.9", "vitx.example:443"):
        assert answer(server, "GET", "/v2", Host=host)[0] == 200
    for host in ("", "10.0.0.1", "[::1", "localhost.example", "vitx.example.attacker.example"):
        assert answer(server, "GET", "/v2", Host=host)[0] == 403
    assert server.metric('vitx_rejections_total{reason="host"}') == 10


def test_one_host_header_is_expected(server: ServerProcess) -> None:
    for hosts in (0, 2):
        connection = server.connect()
        connection.putrequest("GET", "/v2", skip_host=True)
        for _ in range(hosts):
            connection.putheader("Host", "localhost")
        connection.endheaders()
        reply = connection.getresponse()
        expected = f"the request has {hosts} Host headers: expected one"
        assert (reply.status, json.loads(reply.read())["error"]) == (400, expected)


def test_a_health_check_of_http_1_0_needs_no_host(server: ServerProcess) -> None:
    """HAProxy's `option httpchk GET /v2/health/ready` sends none, and took the server for down."""
    with socket.create_connection((server.host, server.port), timeout=HANG) as probe:
        probe.sendall(b"GET /v2/health/ready HTTP/1.0\r\n\r\n")
        assert probe.recv(100).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection((server.host, server.port), timeout=HANG) as page:
        page.sendall(b"GET /v2 HTTP/1.0\r\nOrigin: https://attacker.example\r\n\r\n")
        assert page.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_page_of_another_origin_is_refused_and_the_servers_own_is_not(server: ServerProcess) -> None:
    for origin in (f"http://localhost:{server.port + 1}", "https://attacker.example", "null", "", "x:y"):
        for path in (INFER_PATH, "/v1/classify"):
            status, text = answer(server, "POST", path, INFER_BODY, Origin=origin)
            assert status == 403
            assert text.startswith(f"the page's origin '{origin}' is not this server: --allow-host NAME")
    for origin in (f"http://{server.url}", "https://vitx.example", "http://vitx.example:3000"):
        assert answer(server, "POST", INFER_PATH, INFER_BODY, Origin=origin)[0] == 200
    assert answer(server, "POST", INFER_PATH, INFER_BODY, Host="localhost:80", Origin="http://localhost:80")[0] == 200
    assert answer(server, "POST", INFER_PATH, INFER_BODY, Host="localhost", Origin="http://localhost:80")[0] == 200


def test_no_page_reaches_shared_memory_or_the_repository(server: ServerProcess) -> None:
    """A page of another origin wrote 16 bytes into another process's memory by three posts of plain text."""
    region = json.dumps({"key": "/nothing", "byte_size": 16}).encode()
    register = "/v2/systemsharedmemory/region/r/register"
    own = f"http://{server.url}"
    for path in (register, "/v2/systemsharedmemory/unregister", "/v2/repository/index", "/v2/cudasharedmemory/status"):
        for mark in ({"Origin": own}, {"Sec_Fetch_Site": "none"}):
            assert answer(server, "POST", path, region, **mark) == (403, f"{path} is not for browsers")
    for kind in ("text/plain", "Text/Plain; charset=utf-8", CURL, "multipart/form-data"):
        # Triton's C++ client leaves its type to libcurl, which says that it is a form; a browser would send an Origin.
        for path in (INFER_PATH,) if kind == CURL else (register, INFER_PATH):
            status, text = answer(server, "POST", path, region, Content_Type=kind)
            assert status == 415
            assert text.startswith(f"Content-Type '{kind}' is not offered here")
    for own_type in ("application/json", CURL):
        assert answer(server, "POST", register, region, Content_Type=own_type)[0] == 404  # no such memory
    assert answer(server, "POST", INFER_PATH, INFER_BODY, Content_Type="application/json")[0] == 200


def test_metadata_shows_no_folder_of_the_machine(server: ServerProcess) -> None:
    status, text, _ = server.request("GET", "/v2/models/tiny")
    assert (status, json.loads(text)["vitx"]["data"]) == (200, "photos")
    assert b"alice" not in text


def test_metrics_have_a_switch_and_a_token_of_their_own(tmp_path: Path) -> None:
    for name, token in (("inference", TOKEN), ("metrics", TOKEN[::-1])):
        (tmp_path / name).write_text(f"{token}\n", "utf-8-sig")  # as Notepad writes it
    inference, own = tmp_path / "inference", tmp_path / "metrics"
    tokens = Tokens(ServeOptions(token_file=inference, metrics_token_file=own))
    tokens.check("metrics", f"Bearer {TOKEN[::-1]}")
    with pytest.raises(RequestError, match="with the metrics token"):
        tokens.check("metrics", f"Bearer {TOKEN}")
    with pytest.raises(InputError, match="--metrics-token-file is of --metrics token, not of --metrics open"):
        Tokens(ServeOptions(metrics="open", metrics_token_file=own))
    bundle = write_bundle(tmp_path / "tiny.vitx").path
    for setting, expected in (("open", 200), ("off", 404)):
        with running_server(bundle, "--allow-uncertified", "--token-file", inference, "--metrics", setting) as server:
            assert server.request("GET", "/metrics")[0] == expected
            assert server.request("GET", "/v2")[0] == 401


@pytest.mark.parametrize(("bound", "allowed"), [("0.0.0.0", ()), ("::", ()), (None, ())])
def test_a_public_address_has_names_that_only_the_operator_knows(bound: str | None, allowed: tuple[str, ...]) -> None:
    hosts = AllowedHosts(bound, allowed)
    hosts.check("vitx.default.svc:8000", None)
    hosts.check("vitx.example", "https://vitx.example")
    with pytest.raises(RequestError, match="the page's origin"):
        hosts.check("vitx.example", "https://other.example")


def test_with_names_given_a_public_address_has_those_and_addresses() -> None:
    hosts = AllowedHosts("10.1.2.3", ("vitx.example", "[fe80::1]"))
    for host in ("vitx.example:8000", "VITX.example", "localhost", "10.1.2.3:8000", "192.168.0.1", "[fe80::1]:8000"):
        hosts.check(host, None)
    for other in ("other.example", "vitx.example.other", ""):
        with pytest.raises(RequestError, match="is not a name of this server"):
            hosts.check(other, None)


@pytest.mark.parametrize(
    "name",
    ["vitx.example:8000", "https://vitx.example", "vitx.example/", "", "*", "*.example", "a b", "bücher.example"],
)
def test_a_name_with_a_scheme_a_port_or_a_wildcard_would_never_match(name: str) -> None:
    with pytest.raises(InputError, match=r"expected a name or address in ASCII, without scheme, port or \*$"):
        AllowedHosts("127.0.0.1", (name,))


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/alice/runs/a", "a"),
        ("../alice/runs/a", "a"),
        ("runs\\alice\\a", "a"),
        ("C:\\alice\\a", "a"),
        ("s3://bucket/alice/a", "a"),
        ("file:///home/alice/a", "a"),
        ("digits", "digits"),
        ("model:deit-tiny", "model:deit-tiny"),
        ("/", "/"),
    ],
)
def test_metadata_shows_the_last_part_of_paths_of_any_kind(path: str, shown: str) -> None:
    made = {"data": path, "provenance": {"source": path, "recipe": None}, "flips": [1.5, "a/b"]}
    assert _without_folders(made) == {
        "data": shown,
        "provenance": {"source": shown, "recipe": None},
        "flips": [1.5, "a/b"],
    }
