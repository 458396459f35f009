"""Bundles by URL: over real HTTP, and from a store in memory that is damaged."""

import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bundle_fixture import write_bundle
from cli_fixture import Vitx
from vitx.core import urls
from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, MODEL, SIGNATURE, Bundle, local_bundle, url_of
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.core.urls import Store, is_http, open_store, read_token, without_password


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("made") / "tiny.vitx")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(made: Bundle) -> Iterator[Any]:
    """fsspec's store in memory, with the bundle at memory://b/tiny.vitx."""
    memory = fsspec.filesystem("memory")
    memory.put(str(made.path), "/b/tiny.vitx", recursive=True)
    yield memory
    memory.rm("/b", recursive=True)


class Site(SimpleHTTPRequestHandler):
    """A plain web server, which gives no ranges of a file, and says what a test wants of those in `says`."""

    asked: ClassVar[list[str]] = []
    says: ClassVar[dict[str, int | bytes]] = {}

    def log_message(self, *arguments: Any) -> None:
        self.asked.append(f"{self.command} {self.path}")

    def do_GET(self) -> None:
        said = self.says.get(self.path.rpartition("/")[2])
        if said is None:
            super().do_GET()
        elif isinstance(said, int):
            self.send_error(said)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            with suppress(OSError):  # the client has had enough
                self.wfile.write(said)

    do_HEAD = do_GET


@pytest.fixture
def site(made: Bundle) -> Iterator[str]:
    """The URL of the bundle on a web server."""
    Site.asked.clear()
    Site.says.clear()
    handler = partial(Site, directory=str(made.path.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/tiny.vitx"
        server.shutdown()


def test_a_path_is_itself_and_a_url_may_have_become_a_path() -> None:
    assert local_bundle("runs/tiny.vitx") == Path("runs/tiny.vitx")
    assert url_of(Path("C:/runs/tiny.vitx")) is None
    assert url_of(Path("s3://bucket/deep//tiny.vitx/")) == "s3://bucket/deep/tiny.vitx"
    assert url_of("https://host:8443/a/tiny.vitx/") == "https://host:8443/a/tiny.vitx"
    assert url_of(Path("HTTPS://u:p@host/a")) == "HTTPS://u:p@host/a"
    assert url_of(Path("file:///runs/tiny.vitx")) == "file:///runs/tiny.vitx"
    assert url_of(Path("zip://tiny.vitx::https://u:p@host/a.zip")) == "zip://tiny.vitx::https://u:p@host/a.zip"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://name:pass@word@host/a@b", "https://host/a@b"),
        ("zip://a::https://name:word@host/a.zip?token=secret", "zip://a::https://host/a.zip?…"),
        ("s3://bucket/what?", "s3://bucket/what?"),
        ("az://store/x?sig=secret' is no store", "az://store/x?…' is no store"),
        ("'http://name:it's@host/x': 404", "'http://host/x': 404"),
        ("cannot read 'http://host/x?sig=it's': 404", "cannot read 'http://host/x?…': 404"),
    ],
)
def test_a_text_has_no_secret_of_the_url(url: str, told: str) -> None:
    assert without_password(url) == told


def test_a_long_text_of_a_server_takes_no_long_time() -> None:
    """Half a minute, where every place was tried as the last."""
    begun = time.process_time()
    assert (
        without_password(f"'https://here/x?sig={30_000 * ':'}1' {30_000 * ':'}") == f"'https://here/x?…' {30_000 * ':'}"
    )
    assert time.process_time() - begun < 1


def test_over_http_every_file_comes_once(site: str, made: Bundle, cache: Path) -> None:
    opened = Bundle.open(Path(site))
    assert opened.subject() == made.subject()
    assert opened.path.is_relative_to(cache)
    assert [request for request in Site.asked if MODEL in request] == [f"GET /tiny.vitx/{MODEL}"]
    Site.asked.clear()
    assert Bundle.open(site).path == opened.path
    assert not any(MODEL in request for request in Site.asked)
    with pytest.raises(InputError, match=f"is not a bundle: it has no {MANIFEST}"):
        Bundle.open(site + "/no")


def test_where_no_copy_can_be_made_the_remedy_is_named(store: Any, cache: Path) -> None:
    cache.touch()
    with pytest.raises(EnvironmentMissing, match=r"bundles/.*' \(.*irectory\): set VITX_CACHE to a folder that can be"):
        Bundle.open("memory://b/tiny.vitx")


def test_a_server_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EnvironmentMissing, match="cannot read 'http"):
        Bundle.open(f"http://127.0.0.1:{port}/tiny.vitx")


def listing(made: Bundle, *names: str) -> bytes:
    """The manifest with these files too, each with the size and digest of the graph."""
    manifest = json.loads((made.path / MANIFEST).read_text())
    manifest["files"] |= dict.fromkeys(names, manifest["files"][MODEL])
    return json.dumps(manifest).encode()


def test_a_large_file_comes_from_a_server_without_ranges(site: str, made: Bundle) -> None:
    Site.says["large.bin"] = large = bytes(2**24)  # more than fsspec asks for at once
    manifest = json.loads((made.path / MANIFEST).read_text())
    manifest["files"]["large.bin"] = {"sha256": sha256_bytes(large), "size": len(large)}
    Site.says[MANIFEST] = json.dumps(manifest).encode()
    assert (local_bundle(site) / "large.bin").read_bytes() == large


def test_what_a_server_does_not_let_be_read_is_missing_and_a_failing_server_is_said(site: str) -> None:
    Site.says |= dict.fromkeys((CERTIFICATE, SIGNATURE, LATENCY), 403)  # as of S3, of what is not there
    assert not (Bundle.open(site).path / CERTIFICATE).exists()
    for name in (MANIFEST, CERTIFICATE, SIGNATURE):
        Site.says[name] = 500
        with pytest.raises(EnvironmentMissing, match=f"cannot read '{site}/{name}': 500"):
            local_bundle(site)
        Site.says[name] = 403
    with pytest.raises(InputError, match=f"is not a bundle: it has no {MANIFEST}, or none that may be read"):
        local_bundle(site)


def test_what_a_store_says_is_one_line_without_the_token_of_a_signed_url(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hugging Face's package says it."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("500 for url 'https://cdn/m?X-Amz-Signature=5ec7e7&n=1'\n\nTry later")

    monkeypatch.setattr(MemoryFileSystem, "open", fails)
    with pytest.raises(EnvironmentMissing, match=r"manifest.json': 500 for url 'https://cdn/m\?…' Try later$"):
        local_bundle("memory://b/tiny.vitx")


def test_a_failing_server_is_not_a_file_that_is_missing(site: str, cache: Path) -> None:
    Site.says[MODEL] = 500
    with pytest.raises(EnvironmentMissing, match=f"cannot read '{site}/{MODEL}': 500"):
        local_bundle(site)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_manifest_without_an_end_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_SMALL_BYTES", 2**16)
    Site.says[MANIFEST] = b" " * 2**25
    with pytest.raises(InputError, match=f"'{site}/{MANIFEST}' has more than 65536 bytes"):
        local_bundle(site)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_password_in_a_url_is_not_said(site: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    Site.says[MODEL] = status
    with pytest.raises((InputError, EnvironmentMissing)) as refused:
        local_bundle(site.replace("//", "//name:secret@"))
    assert site in str(refused.value)
    assert "secret" not in str(refused.value) + capsys.readouterr().err


class Remembering(MemoryFileSystem):  # type: ignore[misc]  # not annotated
    """A store that remembers its listings, as that of hf:// does."""

    protocol = "remembering"
    remembered: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("remembering:", "memory:")))

    def info(self, path: str, **options: Any) -> Any:
        if path not in self.remembered:
            try:
                self.remembered[path] = super().info(path, **options)
            except FileNotFoundError as missing:
                self.remembered[path] = missing
        if isinstance(found := self.remembered[path], Exception):
            raise found
        return found

    def cat_file(self, path: str, **options: Any) -> Any:
        return self._open(self._strip_protocol(path)).read()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        size = self.info(path)["size"]
        return io.BytesIO(super()._open(path, mode, **options).read()[:size])

    def invalidate_cache(self, path: str | None = None) -> None:
        self.remembered.clear()


def test_a_bundle_that_was_replaced_in_a_store_that_remembers_listings_is_read_anew(store: Any) -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    first = local_bundle("remembering://b/tiny.vitx")
    store.pipe(f"/b/tiny.vitx/{MANIFEST}", store.cat(f"/b/tiny.vitx/{MANIFEST}") + b"\n")
    store.pipe(f"/b/tiny.vitx/{CERTIFICATE}", b"{}")
    second = local_bundle("remembering://b/tiny.vitx")
    assert (second / MANIFEST).read_bytes() == (first / MANIFEST).read_bytes() + b"\n"
    assert (second / CERTIFICATE).read_bytes() == b"{}"


def test_a_new_certificate_is_another_copy_and_the_old_one_stays(store: Any) -> None:
    first = Bundle.open("memory://b/tiny.vitx")
    store.pipe(f"/b/tiny.vitx/{CERTIFICATE}", b"{}")
    store.pipe(f"/b/tiny.vitx/{LATENCY}", b"measured")
    second = Bundle.open("memory://b/tiny.vitx")
    assert second.path != first.path
    assert (second.path / CERTIFICATE).read_bytes() == b"{}"
    assert (second.path / LATENCY).read_bytes() == b"measured"
    assert first.path.is_dir()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"\1" + data[1:]])
def test_a_file_that_is_not_the_manifests_leaves_nothing(store: Any, cache: Path, damage: Any) -> None:
    store.pipe(f"/b/tiny.vitx/{MODEL}", damage(store.cat(f"/b/tiny.vitx/{MODEL}")))
    with pytest.raises(CheckFailed, match=f"{MODEL}' is not the file that its manifest lists: if .* try again"):
        local_bundle("memory://b/tiny.vitx")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: (copy / MODEL).unlink(),
        lambda copy: (copy / MODEL).write_bytes(b"cut"),
        lambda copy: (copy / MANIFEST).write_bytes((copy / MANIFEST).read_bytes().replace(b'"tiny"', b'"toys"')),
        lambda copy: (copy / CERTIFICATE).write_bytes(b"{}"),
    ],
)
def test_a_copy_that_is_no_longer_what_was_copied_is_made_again(store: Any, made: Bundle, damage: Any) -> None:
    """A tool that clears caches takes single files, a full disk cuts them, and the store has them all."""
    copy = local_bundle("memory://b/tiny.vitx")
    damage(copy)
    assert local_bundle("memory://b/tiny.vitx") == copy
    assert Bundle.open(copy).manifest == made.manifest
    assert not (copy / CERTIFICATE).exists()


def test_a_file_that_is_missing_is_named(store: Any) -> None:
    store.rm(f"/b/tiny.vitx/{MODEL}")
    with pytest.raises(InputError, match=f"{MODEL}' is listed in the manifest and cannot be read"):
        local_bundle("memory://b/tiny.vitx")


@pytest.mark.parametrize("name", ["../../../../owned", "/owned", "a/../../owned", "", ".", "a/", f"{MODEL}/a", "a\0"])
def test_a_name_that_is_none_of_a_file_in_the_bundle_is_refused_before_it_is_read(
    store: Any, made: Bundle, cache: Path, name: str
) -> None:
    store.pipe(f"/b/tiny.vitx/{MANIFEST}", listing(made, name))
    with pytest.raises(InputError, match=f"lists '{name}': expected the path of a file in it"):
        local_bundle("memory://b/tiny.vitx")
    assert not list(cache.parent.rglob("owned"))


def test_what_is_no_manifest_is_refused(store: Any) -> None:
    store.pipe(f"/b/tiny.vitx/{MANIFEST}", b'{"name": 1}')
    with pytest.raises(InputError, match="is not a valid manifest"):
        local_bundle("memory://b/tiny.vitx")


def test_a_file_comes_in_blocks_and_no_more_of_it_than_a_byte_beyond_its_size(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "_BLOCK", 4)
    content = b"0123456789abcdef"
    store.pipe({"/b/tiny.vitx/long": content, "/b/tiny.vitx/empty": b""})
    folder = Store("memory://b/tiny.vitx")
    for name, expected in (("long", content), ("empty", b"")):
        folder.copy(name, tmp_path / name, len(expected), sha256_bytes(expected))
        assert (tmp_path / name).read_bytes() == expected
    assert [*folder._blocks("long", 9)] == [b"0123", b"4567", b"89"]
    assert folder._in_one_piece == {}, "what is asked of an HTTP server alone"


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", {"fsspec": None}.__getitem__)
    with pytest.raises(EnvironmentMissing, match=r"the package 'fsspec', which is not installed: .*vitx\[serve\]"):
        open_store("memory://b/tiny.vitx")


def test_a_token_is_that_of_a_file_of_any_editor(tmp_path: Path) -> None:
    token, path = b"0123456789abcdef", tmp_path / "token"
    for written in (token, b"\xef\xbb\xbf" + token + b"\r\n"):
        path.write_bytes(written)
        assert read_token(path) == token
    assert read_token(None) is None
    path.write_bytes(2048 * token + b" ")  # no header is so long
    assert read_token(path) == 2048 * token


@pytest.mark.parametrize("url", ["http://a:b", "http://[::1", "http://", "ftp://a", "http://a:0"])
def test_what_names_no_host_or_port_is_no_http(url: str) -> None:
    assert is_http("https://a:1/b")
    assert not is_http(url)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(InputError, match=r"cannot open 'foo://bucket/tiny\.vitx': .*foo"):
        Bundle.open("foo://bucket/tiny.vitx")


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_SILENT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/tiny.vitx"
        with pytest.raises(EnvironmentMissing, match=f"cannot read '{url}/{MANIFEST}': the server has sent nothing"):
            local_bundle(url)


def test_an_archive_on_a_server_that_is_not_reached_is_no_mistake_of_who_named_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    for scheme in ("http", "https"):
        with pytest.raises(EnvironmentMissing) as refused:
            open_store(f"zip://tiny.vitx::{scheme}://alice:secret@127.0.0.1:{port}/a.zip")
        assert f"cannot read 'zip://tiny.vitx::{scheme}://127.0.0.1:{port}/a.zip': Cannot connect" in str(refused.value)


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_what_the_server_of_an_archive_answers_decides_whose_mistake_it_is(status: int) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *text: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(EnvironmentMissing if status >= 500 else InputError):
                open_store(f"zip://tiny.vitx::http://127.0.0.1:{server.server_port}/a.zip")
        finally:
            server.shutdown()


@pytest.mark.parametrize("url", ["s3://user:secret@bucket/a.vitx", "gs://secret@bucket/a.vitx"])
def test_a_store_takes_no_credentials_from_a_url(url: str) -> None:
    with pytest.raises(InputError, match="credentials of a store come from its own settings") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("archive", ["::/folder/a.zip", "::a.zip", ""])
def test_an_archive_without_a_url_of_its_own_is_not_looked_for_in_the_working_folder(archive: str) -> None:
    with pytest.raises(InputError) as refused:
        open_store(f"zip://tiny.vitx{archive}")
    assert str(refused.value) == (
        f"cannot open 'zip://tiny.vitx{archive}': behind :: the archive is named by a URL of its own, such as "
        "::file:///FOLDER/a.zip"
    )


def test_a_missing_package_of_a_store_is_no_mistake_of_who_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import _registry

    from vitx.predict.inputs.stores import read_bytes

    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for read in (open_store, read_bytes):  # nor an image's: all of a store's would be rows with an error
        with pytest.raises(EnvironmentMissing) as refused:
            read("s3://bucket/a.png")
        assert str(refused.value) == "cannot open 's3://bucket/a.png': Install s3fs to access S3; pip installs it"


def test_no_error_of_the_command_line_shows_a_password(vitx: Vitx, made: Bundle) -> None:
    out = "http://alice:secret@example.org/out?sig=token"
    code, _, err = vitx("predict", made.path, "x", "--out", out, "--allow-uncertified")
    assert code == 2
    assert "http://example.org/out?…" in err
    assert "secret" not in err
    assert "token" not in err
