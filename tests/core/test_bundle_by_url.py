"""Bundles by URL: over real HTTP, and from a store in memory that is damaged."""

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bundle_fixture import write_bundle
from vitx.core import bundle
from vitx.core.bundle import CERTIFICATE, MANIFEST, MODEL, Bundle, local_bundle, url_of
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError


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


def test_a_path_is_itself_and_a_url_may_have_become_a_path() -> None:
    assert local_bundle("runs/tiny.vitx") == Path("runs/tiny.vitx")
    assert url_of(Path("C:/runs/tiny.vitx")) is None
    assert url_of(Path("s3://bucket/deep//tiny.vitx/")) == "s3://bucket/deep/tiny.vitx"
    assert url_of("https://host:8443/a/tiny.vitx/") == "https://host:8443/a/tiny.vitx"


def test_over_http_every_file_comes_once(made: Bundle, cache: Path) -> None:
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            asked.append(f"{self.command} {self.path}")

    handler = partial(Handler, directory=str(made.path.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/tiny.vitx"
        opened = Bundle.open(Path(url))
        graphs = [request for request in asked if request == f"GET /tiny.vitx/{MODEL}"]
        assert opened.subject() == made.subject()
        assert opened.path.is_relative_to(cache)
        assert len(graphs) == 1
        asked.clear()
        assert Bundle.open(url).path == opened.path
        assert not any(MODEL in request for request in asked)
        with pytest.raises(InputError, match=f"is not a bundle: it has no {MANIFEST}"):
            Bundle.open(url + "/no")
        server.shutdown()
    with pytest.raises(EnvironmentMissing, match="cannot read 'http"):
        Bundle.open(url)


def test_a_new_certificate_is_another_copy_and_the_old_one_stays(store: Any) -> None:
    first = Bundle.open("memory://b/tiny.vitx")
    store.pipe(f"/b/tiny.vitx/{CERTIFICATE}", b"{}")
    second = Bundle.open("memory://b/tiny.vitx")
    assert second.path != first.path
    assert (second.path / CERTIFICATE).read_bytes() == b"{}"
    assert first.path.is_dir()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"\1" + data[1:]])
def test_a_file_that_is_not_the_manifests_leaves_nothing(store: Any, cache: Path, damage: Any) -> None:
    store.pipe(f"/b/tiny.vitx/{MODEL}", damage(store.cat(f"/b/tiny.vitx/{MODEL}")))
    with pytest.raises(CheckFailed, match=f"{MODEL}' is not the file that its manifest lists"):
        local_bundle("memory://b/tiny.vitx")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_file_that_is_missing_is_named(store: Any) -> None:
    store.rm(f"/b/tiny.vitx/{MODEL}")
    with pytest.raises(InputError, match=f"{MODEL}' is listed in the manifest and cannot be read"):
        local_bundle("memory://b/tiny.vitx")


def test_a_name_that_leads_out_is_refused_before_it_is_read(store: Any, cache: Path) -> None:
    manifest = json.loads(store.cat(f"/b/tiny.vitx/{MANIFEST}"))
    manifest["files"]["../../../../owned"] = manifest["files"][MODEL]
    store.pipe(f"/b/tiny.vitx/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(InputError, match="leads out of the bundle"):
        local_bundle("memory://b/tiny.vitx")
    assert not list(cache.parent.rglob("owned"))


def test_what_is_no_manifest_is_refused(store: Any) -> None:
    store.pipe(f"/b/tiny.vitx/{MANIFEST}", b'{"name": 1}')
    with pytest.raises(InputError, match="is not a valid manifest"):
        local_bundle("memory://b/tiny.vitx")


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(InputError, match=r"cannot open 'foo://bucket/tiny\.vitx': .*foo"):
        Bundle.open("foo://bucket/tiny.vitx")


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_SILENT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/tiny.vitx"
        with pytest.raises(EnvironmentMissing, match=f"cannot read '{url}/{MANIFEST}'"):
            local_bundle(url)
