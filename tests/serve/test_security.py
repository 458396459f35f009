"""TLS and bearer tokens, over HTTP and gRPC; the certificate is made by the openssl command."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from bundle_fixture import write_bundle
from server_process import (
    HANG,
    INFER_BODY,
    INFER_PATH,
    ServerProcess,
    grpc_address,
    run_serve,
    running_server,
    wait_until,
)
from vitx.core.errors import InputError
from vitx.core.urls import read_token
from vitx.serve.errors import RequestError
from vitx.serve.observe.top import ServerClient
from vitx.serve.options import ServeOptions
from vitx.serve.security import Tokens, read_pem

TOKEN = "0123456789abcdef0123456789abcdef"
MANAGEMENT = "fedcba9876543210fedcba9876543210"

grpc = pytest.importorskip("grpc", reason="gRPC is an extra")
triton = pytest.importorskip("tritonclient.grpc", reason="Triton's client is of the dev extra")


EC = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(folder: Path, name: str = "localhost", kind: tuple[str, ...] = EC) -> tuple[Path, Path]:
    """(certificate, key) in PEM, self-signed, for 127.0.0.1 and localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        *kind,
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    (folder / "token").write_text(TOKEN)
    (folder / "management").write_text(MANAGEMENT + "\n")
    write_bundle(folder / "models" / "tiny.vitx", name="tiny")
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[ServerProcess]:
    arguments = ("--repository", folder / "models", "--allow-uncertified", "--grpc-port", "0", "--management")
    tokens = ("--token-file", folder / "token", "--management-token-file", folder / "management")
    with running_server(*arguments, *tokens, "--server-id", "triton") as server:
        yield server


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def unauthorized(server: ServerProcess) -> float:
    """How many requests it has refused for want of a token."""
    text = server.request("GET", "/metrics", headers=bearer(TOKEN))[1].decode()
    found = re.search(r'^vitx_rejections_total\{model="",reason="unauthorized"\} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_requests_need_the_token(guarded: ServerProcess) -> None:
    before = unauthorized(guarded)
    assert guarded.request("POST", INFER_PATH, INFER_BODY, bearer(TOKEN))[0] == 200
    assert guarded.request("POST", INFER_PATH, INFER_BODY, {"authorization": f"bearer  {TOKEN}"})[0] == 200
    for headers in ({}, bearer(MANAGEMENT), bearer(TOKEN[:-1]), bearer(TOKEN + "0"), {"authorization": TOKEN}):
        status, text, answered = guarded.request("POST", INFER_PATH, INFER_BODY, headers)
        assert (status, answered["www-authenticate"]) == (401, 'Bearer realm="vitx"')
        assert "send 'Authorization: Bearer TOKEN' with the inference token" in json.loads(text)["error"]
    for path in ("/metrics", "/v2", "/v1/stats", "/v2/models/tiny"):
        assert guarded.request("GET", path)[0] == 401
    described = guarded.json("/openapi.json")["paths"]
    for path in ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"):
        assert guarded.request("GET", path)[0] == 200
        assert "401" not in described[path]["get"]["responses"]
    assert "401" in described["/metrics"]["get"]["responses"]
    assert unauthorized(guarded) - before == 9
    assert guarded.request("POST", "/v2/repository/index", b"", bearer(TOKEN))[0] == 401
    assert guarded.request("POST", "/v2/repository/index", b"", bearer(MANAGEMENT))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), (bearer(TOKEN) | {"host": "x.example"}, 403), (bearer(TOKEN) | {"content-type": "text/plain"}, 415)],
)
@pytest.mark.parametrize("last", [{}, {"connection": "close"}])  # urllib.request has no other
def test_who_sends_a_large_body_before_reading_reads_why_it_was_refused(
    guarded: ServerProcess, headers: dict[str, str], status: int, last: dict[str, str]
) -> None:
    connection = guarded.connect()
    for path, body, expected in ((INFER_PATH, bytes(30_000_000), status), ("/v2/health/live", None, 200)):
        connection.request("GET" if body is None else "POST", path, body, headers | last if body else {})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == expected


def test_grpc_calls_need_the_token(guarded: ServerProcess) -> None:
    with triton.InferenceServerClient(grpc_address(guarded)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata(headers=bearer(TOKEN)).name == "triton"
        assert json.loads(guarded.request("GET", "/v2", headers=bearer(TOKEN))[1])["name"] == "triton"
        for headers in (None, bearer(MANAGEMENT)):
            with pytest.raises(triton.InferenceServerException, match="UNAUTHENTICATED"):
                client.get_server_metadata(headers=headers)
        with pytest.raises(triton.InferenceServerException, match="UNAUTHENTICATED"):
            client.load_model("tiny", headers=bearer(TOKEN))


@pytest.mark.parametrize("authorization", [None, "Bearer wrong"])
def test_a_stream_without_the_token_ends_before_its_first_message(
    guarded: ServerProcess, authorization: str | None
) -> None:
    metadata = () if authorization is None else (("authorization", authorization),)
    with grpc.insecure_channel(grpc_address(guarded)) as channel:
        never, call = Event(), channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        replies = call(iter(never.wait, False), metadata=metadata, timeout=HANG)
        with pytest.raises(grpc.RpcError) as ended:
            next(replies)
        never.set()
    assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED
    text = guarded.request("GET", "/metrics", headers=bearer(TOKEN))[1].decode()
    assert 'route="grpc.ModelStreamInfer",status="401"' in text


def test_tritons_client_manages_models(guarded: ServerProcess) -> None:
    with triton.InferenceServerClient(grpc_address(guarded)) as client:
        (entry,) = client.get_model_repository_index(headers=bearer(MANAGEMENT)).models
        assert (entry.name, entry.version, entry.state) == ("tiny", "1", "READY")
        client.unload_model("tiny", headers=bearer(MANAGEMENT))
        assert not client.is_model_ready("tiny", headers=bearer(TOKEN))
        client.load_model("tiny", headers=bearer(MANAGEMENT))
        assert client.is_model_ready("tiny", headers=bearer(TOKEN))
        with pytest.raises(triton.InferenceServerException, match="'no' is not in the repository"):
            client.load_model("no", headers=bearer(MANAGEMENT))


def test_tls_for_both_protocols_and_a_hangup_that_renews_it(folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    arguments = (folder / "models" / "tiny.vitx", "--allow-uncertified", "--grpc-port", "0", "--header-timeout", "3")
    with tls_server(*arguments, "--tls-cert", certificate, "--tls-key", key, certificate=certificate) as server:
        with closing(socket.create_connection((server.host, server.port), 30)) as silent:  # uvloop gives it 60 s
            assert silent.recv(1) == b""
        assert server.line.startswith("vitx: serving tiny on https://127.0.0.1:")
        assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
        with pytest.raises(
            InputError, match=r"^the certificate of https:\S+ is not trusted \(self.signed .*\): give --ca"
        ):
            ServerClient(f"https://{server.host}:{server.port}").read()
        certificate.read_bytes()
        plain = http.client.HTTPConnection(server.host, server.port, timeout=5)
        plain.request("GET", "/v2")
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.getresponse()
        plain.close()
        with triton.InferenceServerClient(grpc_address(server), ssl=True, root_certificates=str(certificate)) as client:
            assert client.is_server_ready()
        for kind in (EC, ("rsa:2048",)):  # another pair in the same files; a context keeps one of each kind of key
            before = certificate.read_bytes()
            make_certificate(tmp_path, kind=kind)
            assert certificate.read_bytes() != before
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: peer_certificate(server) == certificate.read_text())
            address, trusted = grpc_address(server), str(certificate)
            with triton.InferenceServerClient(address, ssl=True, root_certificates=trusted) as client:
                assert client.is_server_ready(client_timeout=HANG)
        wait_until(lambda: server.metric('vitx_model_loads_total{model="tiny",result="loaded",version="1"}') == 2)


def test_a_key_that_gives_nothing_at_a_hangup_holds_up_no_request(folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    arguments = (folder / "models" / "tiny.vitx", "--allow-uncertified", "--tls-cert", certificate, "--tls-key", key)
    with tls_server(*arguments, certificate=certificate) as server:
        key.unlink()
        os.mkfifo(key)
        server.process.send_signal(signal.SIGHUP)
        with key.open("wb"):  # once the server reads it
            assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
        assert server.stop() == 0
        assert server.process.stderr is not None
        assert "vitx: the TLS certificate stays: " in server.process.stderr.read()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_is_allowed_no_more_resumes_no_session(
    folder: Path, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    certificate, key = make_certificate(tmp_path)
    client, other = (make_certificate(tmp_path, name) for name in ("client", "other"))
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(client[0].read_bytes())
    context = ssl.create_default_context(cafile=str(certificate))
    context.load_cert_chain(*client)
    context.minimum_version = context.maximum_version = version

    def ask(session: ssl.SSLSession | None = None) -> tuple[bool, ssl.SSLSession | None]:
        """Whether a session was resumed, and the one to resume next."""
        with (
            socket.create_connection((server.host, server.port), HANG) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as wrapped,
        ):
            wrapped.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not wrapped.recv(65536).startswith(b"HTTP/1.1 200"):
                raise ConnectionError("it was ended without an answer")
            return bool(wrapped.session_reused), wrapped.session

    arguments = (folder / "models" / "tiny.vitx", "--allow-uncertified", "--tls-client-ca", authorities)
    with tls_server(
        *arguments, "--tls-cert", certificate, "--tls-key", key, certificate=certificate, client=client
    ) as server:
        _, first = ask()
        resumed, second = ask(first)
        assert resumed
        authorities.write_bytes(other[0].read_bytes())
        server.process.send_signal(signal.SIGHUP)
        kind = type("Other", (TlsServer,), {"certificate": certificate, "client": other})
        now = kind(server.process, server.line)

        def answers() -> bool:
            with suppress(OSError, http.client.HTTPException):
                return bool(now.request("GET", "/v2/health/live")[0] == 200)
            return False

        wait_until(answers)
        for session in (first, second):
            with pytest.raises(OSError, match=r"."):
                ask(session)
        assert answers()


def test_clients_need_a_certificate_of_the_given_authorities(folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    client, other = (make_certificate(tmp_path, name) for name in ("client", "other"))
    arguments = (
        folder / "models" / "tiny.vitx",
        "--allow-uncertified",
        "--grpc-port",
        "0",
        "--tls-client-ca",
        client[0],
    )
    with tls_server(
        *arguments, "--tls-cert", certificate, "--tls-key", key, certificate=certificate, client=client
    ) as server:
        for renewed in (False, True):
            if renewed:  # its own certificate only
                make_certificate(tmp_path)
                server.process.send_signal(signal.SIGHUP)
                wait_until(lambda: peer_certificate(server) == certificate.read_text())
            assert server.request("POST", INFER_PATH, INFER_BODY)[0] == 200
            for given in (None, other):
                kind = type("Other", (TlsServer,), {"certificate": certificate, "client": given})
                with pytest.raises((OSError, http.client.HTTPException)):
                    kind(server.process, server.line).request("GET", "/v2/health/live")
            none: tuple[Path | None, Path | None] = (None, None)
            for chain, own_key in (client, other, none):
                with triton.InferenceServerClient(
                    grpc_address(server),
                    ssl=True,
                    root_certificates=str(certificate),
                    certificate_chain=chain and str(chain),
                    private_key=own_key and str(own_key),
                ) as asked:
                    if chain == client[0]:
                        assert asked.is_server_ready()
                    else:
                        with pytest.raises(triton.InferenceServerException, match="UNAVAILABLE"):
                            asked.is_server_ready(client_timeout=HANG)
        assert server.metric('vitx_requests_total{model="",route="server_live",status="200"}') == 0
        assert server.process.stderr is not None
        shown = next(line for line in server.process.stderr if line.startswith("next:"))
        assert shown.startswith("next: curl --cert CERTIFICATE --key KEY --data-binary @IMAGE https://")


class TlsServer(ServerProcess):
    """A server whose certificate the client checks. client: certificate and key of the client's own."""

    certificate: Path
    client: tuple[Path, Path] | None = None

    def connect(self) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=str(self.certificate))
        if self.client is not None:
            context.load_cert_chain(*self.client)
        return http.client.HTTPSConnection(self.host, self.port, timeout=HANG, context=context)


def tls_server(*arguments: Any, **members: Any) -> Any:
    return running_server(*arguments, kind=type("Server", (TlsServer,), members))


def peer_certificate(server: ServerProcess) -> str:
    return ssl.get_server_certificate((server.host, server.port))


def test_an_idle_client_of_tls_does_not_hold_up_the_end(folder: Path, tmp_path: Path) -> None:
    """uvicorn waited 2 s for it to close its side, and said that it cancels 0 tasks."""
    certificate, key = make_certificate(tmp_path)
    arguments = (folder / "models" / "tiny.vitx", "--allow-uncertified", "--tls-cert", certificate, "--tls-key", key)
    with (
        tls_server(*arguments, certificate=certificate) as server,
        closing(server.connect()) as idle,
    ):
        idle.request("GET", "/v2/health/ready")
        assert idle.getresponse().read() == b'{"ready":true}'
        assert server.stop() == 0
        assert server.process.stderr is not None
        assert "Cancel" not in server.process.stderr.read()


@contextmanager
def once(file: Path) -> Iterator[Path]:
    """A pipe that gives what is in a file, as the shell's `<(cat FILE)`."""
    end, begin = os.pipe()
    os.write(begin, file.read_bytes())
    os.close(begin)
    try:
        yield Path(f"/dev/fd/{end}")
    finally:
        os.close(end)


def test_half_a_tls_setting_and_wrong_files_are_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other_key = make_certificate(tmp_path, "other")
    with pytest.raises(InputError, match="both --tls-cert and --tls-key"):
        read_pem(ServeOptions(tls_cert=certificate))
    for wrong in (other_key, tmp_path / "missing", certificate):
        with pytest.raises(InputError, match="are no certificate with its key"):
            read_pem(ServeOptions(tls_cert=certificate, tls_key=wrong))
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True)
    with pytest.raises(InputError, match="in PEM, unencrypted: "):  # said "[SSL] PEM lib" alone
        read_pem(ServeOptions(tls_cert=certificate, tls_key=locked))
    pair: dict[str, Any] = {"tls_cert": certificate, "tls_key": key}
    with once(key) as pipe, pytest.raises(InputError, match="is a pipe, which gRPC reads a second time"):
        read_pem(ServeOptions(tls_cert=certificate, tls_key=pipe, grpc_port=0))
    with once(key) as pipe:
        assert read_pem(ServeOptions(tls_cert=certificate, tls_key=pipe)) is not None
    alone, mutual = read_pem(ServeOptions(**pair)), read_pem(ServeOptions(**pair, tls_client_ca=certificate))
    assert alone is not None
    assert mutual is not None
    assert alone[:3] == (key.read_bytes(), certificate.read_bytes(), None)
    assert mutual[:3] == (key.read_bytes(), *[certificate.read_bytes()] * 2)
    with pytest.raises(InputError, match="both --tls-cert and --tls-key"):
        read_pem(ServeOptions(tls_client_ca=certificate))
    for wrong in (key, tmp_path / "missing"):
        with pytest.raises(InputError, match=f"--tls-client-ca '{wrong}' has no certificates in PEM"):
            read_pem(ServeOptions(**pair, tls_client_ca=wrong))
    refused = run_serve("missing.vitx", "--token-file", tmp_path / "missing", "--port", "0")
    assert refused.returncode == 2


def test_a_certificate_that_has_ended_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = make_certificate(tmp_path)
    told = subprocess.check_output(["openssl", "x509", "-in", certificate, "-noout", "-enddate"], text=True)
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter=")), UTC)
    read_pem(ServeOptions(tls_cert=certificate, tls_key=key))
    assert capsys.readouterr().err == ""
    der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    ended = ssl.DER_cert_to_PEM_cert(der.replace(end.strftime("%y%m%d%H%M%SZ").encode(), b"260102030405Z"))
    certificate.write_text(f"a text before it\n{ended}{ended}")
    assert read_pem(ServeOptions(tls_cert=certificate, tls_key=key)) is not None
    what = f"the certificate in '{certificate}' ended on 2026-01-02 03:04:05+00:00: clients will refuse it"
    assert capsys.readouterr().err == f"warning: {what}\n"


def test_a_token_that_is_not_ascii_is_refused_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    tokens = Tokens(ServeOptions(token_file=tmp_path / "token"))
    tokens.check("inference", f"Bearer {TOKEN}")
    tokens.check("management", None)
    for given in ("Bearer \xe9", "Bearer", "", None, f"Bearer {TOKEN}\u2028"):
        with pytest.raises(RequestError, match=r"send 'Authorization: Bearer TOKEN' with the inference token$"):
            tokens.check("inference", given)


@pytest.mark.parametrize("content", ["short", "a token with spaces", "\xe9" * 16])
def test_a_file_without_a_usable_token_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(InputError, match="is not 16 or more visible ASCII characters: write one"):
        read_token(tmp_path / "token")


def test_of_a_token_file_no_more_is_read_than_a_token_has(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    os.truncate(tmp_path / "token", 2**40)  # a terabyte that takes no room
    with pytest.raises(InputError, match="is not 16 or more visible ASCII characters"):
        read_token(tmp_path / "token")
