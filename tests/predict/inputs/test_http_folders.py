"""Folders of an HTTP server: a page of links is one, and so is what a link with a slash at its end leads to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import NumpySession, colour_image, png
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.predict import PREDICTIONS, predict
from vitx.predict.inputs import remote
from vitx.predict.inputs.stores import expand, walk_images
from vitx.predict.options import PredictOptions
from vitx.predict.summary import PredictionSummary

pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = png(colour_image(0, np.random.default_rng(0)))


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))


class OnIpv6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def serving(files: dict[str, bytes | int], kind: type[ThreadingHTTPServer] = ThreadingHTTPServer) -> Iterator[str]:
    """files: the content or the status of each path; of any other that of "*", or 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = files.get(self.path, files.get("*", 404))
            content = b"" if isinstance(found, int) else found
            self.send_response(found if isinstance(found, int) else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *given: object) -> None:
            pass

    with kind(("::1" if kind is OnIpv6 else "127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{'[::1]' if kind is OnIpv6 else '127.0.0.1'}:{server.server_port}"
        server.shutdown()


def links(*names: str) -> bytes:
    return "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()


def run(bundle: Bundle, source: str, out: Path, **options: Any) -> PredictionSummary:
    return predict(bundle, NumpySession(), source, out, PredictOptions(**options), quiet=True)


def errors(out: Path) -> list[str]:
    return [error for error in pq.read_table(out / PREDICTIONS)["error"].to_pylist() if error is not None]


@pytest.mark.parametrize("pattern", ["", "/*/*.png"])
@pytest.mark.parametrize(("status", "reason"), [(500, "ClientResponseError: 500"), (403, "HTTP status 403")])
def test_a_folder_that_a_server_does_not_list_is_no_success(
    tiny_bundle: Bundle, tmp_path: Path, pattern: str, status: int, reason: str
) -> None:
    """Nobody knows how many images it has, so it is no single unreadable one."""
    files: dict[str, bytes | int] = {"/in": links("a.png", "more/", "shut/"), "*": IMAGE}
    files |= dict.fromkeys(("/in/more/", "/in/more"), links("b.png"))
    files |= {"/in/shut/": status, "/in/shut": status, "/in/*/*.png": 404}
    out = tmp_path / "out"
    with serving(files) as url:
        summary = run(tiny_bundle, f"{url}/in{pattern}", out)
        assert (summary.errors, summary.uncounted, summary.complete) == (1, 1, False)
        assert [error.split(", message")[0] for error in errors(out)] == [f"cannot list the folder: {reason}"]
        with pytest.raises(CheckFailed, match=r"^not complete: files and folders that could not be read to"):
            summary.check_errors(0.99)
        files["/in/shut/"] = files["/in/shut"] = links("c.png")  # by now; its page is no image
        mended = run(tiny_bundle, f"{url}/in{pattern}", out, retry_errors=True)
        assert errors(out)[0].startswith("a folder, which can be listed now, by another run; or an object whose name")
    assert (mended.uncounted, mended.complete) == (1, False)


def test_a_line_with_a_slash_at_its_end_may_be_an_image(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with serving({"/image/1/": IMAGE}) as url:
        (tmp_path / "list.txt").write_text(f"{url}/image/1/\n{url}/image/2/\n")
        summary = run(tiny_bundle, str(tmp_path / "list.txt"), tmp_path / "out")
    assert (summary.images, summary.errors, summary.uncounted) == (2, 1, 0)
    assert errors(tmp_path / "out") == ["cannot open the image: HTTP status 404"]


def test_a_folder_is_asked_for_as_it_is_named() -> None:
    """By who gives it, and by the page that links to it: a server need not have a page at the other address."""
    files: dict[str, bytes | int] = {"/in/": links("a.png", "more/"), "/in/more/": links("b.png", "/in/")}
    with serving(files | {"/index.html": links("c.png")}) as url:
        assert sorted(name for name, _ in walk_images(f"{url}/in/", print)) == ["a.png", "more/b.png"]
        assert [name for name, _ in walk_images(f"{url}/index.html", print)] == ["c.png"]
        files["/in"] = files["/in/"]
    with serving(files) as url:
        assert sorted(expand(f"{url}/in/**/*.png")) == [f"{url}/in/a.png", f"{url}/in/more/b.png"]


def test_the_brackets_of_an_ipv6_address_are_no_pattern(tiny_bundle: Bundle, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    files: dict[str, bytes | int] = {"/in/": links("a.png", "b.png", "c.png"), "/in": links("a.png", "b.png", "c.png")}
    with serving(files, OnIpv6) as url:
        assert sorted(expand(f"{url}/in/[ab].png")) == [f"{url}/in/a.png", f"{url}/in/b.png"]
        with pytest.raises(InputError, match=r"^there is nothing at 'http://\[::1\]:\d+/d\.png': expected a folder of"):
            run(tiny_bundle, f"{url}/d.png", tmp_path / "out")


@pytest.mark.parametrize("url", ["http://[::1", "http://[::1/in/*.png", "https://host:port/a.tar"])
def test_a_url_without_a_host_is_named(tiny_bundle: Bundle, tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError) as raised:
        run(tiny_bundle, url, tmp_path / "out")
    assert str(raised.value).startswith(f"'{url}' names no host, or no port that can be one: expected a URL as http://")
