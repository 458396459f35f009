"""Bundles replaced under a running server: what is switched to, what is refused, and that no request is lost."""

import asyncio
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bundle_fixture import write_bundle
from server_process import HANG, ServerProcess, load_on, run_serve, running_server, wait_until
from server_process import INFER_BODY as BODY
from server_process import INFER_PATH as PATH
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.files import replace_folder
from vitx.serve.models.loading import file_states
from vitx.serve.models.repository import Repository, bundles_in
from vitx.serve.options import ServeOptions
from vitx.serve.server_core import ServerCore, verified

TOKEN = "a-token-of-management"
RELOADS = 8


@pytest.fixture
def managed(tmp_path: Path) -> list[str]:
    """The options that let a client with TOKEN load and unload."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    return ["--management", "--management-token-file", str(tmp_path / "token")]


def manage(server: ServerProcess, path: str, token: str = TOKEN, body: bytes = b"") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    status, text, _ = server.request("POST", f"/v2/repository/{path}", body, headers)
    return status, json.loads(text) if text else None


def replace_bundle(target: Path, **options: Any) -> None:
    """Put another bundle where `target` is, in one step."""
    fresh = write_bundle(target.with_name("fresh"), name="tiny", **options)
    replace_folder(fresh.path, target)


def logits(server: ServerProcess) -> list[float]:
    status, text, _ = server.request("POST", PATH, BODY)
    assert status == 200, text
    values: list[float] = json.loads(text)["outputs"][0]["data"]
    return values


def test_reloads_under_load_lose_no_request(tiny_bundle: Bundle, managed: list[str]) -> None:
    with running_server(tiny_bundle.path, *managed) as server, load_on(server, 4) as answered:
        wait_until(lambda: answered() > 50)
        for _ in range(RELOADS):
            before = answered()
            assert manage(server, "models/tiny/load") == (200, None)
            wait_until(lambda before=before: answered() > before)
        assert server.metric('vitx_model_loads_total{model="tiny",result="loaded",version="1"}') == RELOADS
        assert server.metric("vitx_rejections_total") == 0


def test_a_tampered_bundle_is_refused_and_the_old_one_serves(tiny_bundle: Bundle, managed: list[str]) -> None:
    with running_server(tiny_bundle.path, *managed) as server:
        before = logits(server)
        damaged = shutil.copytree(tiny_bundle.path, tiny_bundle.path.with_name("damaged"))
        with (damaged / "model.onnx").open("ab") as file:
            file.write(b"\0")
        replace_folder(damaged, tiny_bundle.path)
        status, answer = manage(server, "models/tiny/load")
        assert status == 400
        assert answer["error"].startswith(f"failed to load 'tiny': {tiny_bundle.model_path} is corrupt: sha256 ")
        assert answer["error"].endswith("; the model that runs stays")
        assert logits(server) == before
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert server.metric('vitx_model_loads_total{model="tiny",result="refused",version="1"}') == 1
        (entry,) = manage(server, "index")[1]
        assert (entry["name"], entry["version"], entry["state"]) == ("tiny", "1", "READY")
        assert "is corrupt" in entry["reason"]


def test_a_request_that_began_before_the_switch_is_answered_by_the_old_model(
    tiny_bundle: Bundle, managed: list[str]
) -> None:
    with running_server(tiny_bundle.path, *managed) as server:
        slow = server.connect()
        slow.putrequest("POST", PATH)
        slow.putheader("Content-Length", str(len(BODY)))
        slow.endheaders(BODY[:100])
        assert server.request("POST", PATH, BODY)[0] == 200  # so the slow one's headers have been read
        assert manage(server, "models/tiny/load") == (200, None)
        slow.send(BODY[100:])
        assert slow.getresponse().status == 200


def test_without_a_certificate_nothing_is_switched(tiny_bundle: Bundle, managed: list[str]) -> None:
    with running_server(tiny_bundle.path, *managed) as server:
        replace_bundle(tiny_bundle.path)
        status, answer = manage(server, "models/tiny/load")
        assert (status, "has no certificate" in answer["error"]) == (400, True)
        assert server.json("/v2/models/tiny")["certified"] is True


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("batch_mean", "with its neighbours in the batch"), ("nan", "not finite")],
)
def test_the_canary_batch_refuses_what_a_certificate_would_have(
    tmp_path: Path, managed: list[str], fault: Any, reason: str
) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    with running_server(bundle.path, "--allow-uncertified", *managed) as server:
        before = logits(server)
        replace_bundle(bundle.path, fault=fault)
        status, answer = manage(server, "models/tiny/load")
        assert (status, reason in answer["error"]) == (400, True), answer
        assert logits(server) == before


def test_a_watched_bundle_is_loaded_when_it_is_replaced(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    with running_server(bundle.path, "--allow-uncertified", "--watch") as server, load_on(server, 4):
        before = logits(server)
        replace_bundle(bundle.path, fault="drift")  # another model: its logits are 3e-4 higher
        wait_until(lambda: server.metric('vitx_model_loads_total{model="tiny",result="loaded",version="1"}') == 1)
        assert np.subtract(logits(server), before) == pytest.approx([3e-4] * 4, abs=5e-5)


def test_a_watched_folder_with_a_version_twice_is_said_once(tmp_path: Path) -> None:
    write_bundle(tmp_path / "tiny.vitx", name="tiny")
    with running_server("--repository", tmp_path, "--allow-uncertified", "--watch") as server:
        write_bundle(tmp_path / "tiny" / "1", name="tiny")
        assert server.process.stderr is not None
        stays = "vitx: the models stay as they are: "
        first = next(line for line in server.process.stderr if line.startswith(stays))
        assert " are both version 1 of 'tiny': remove one of them" in first
        time.sleep(2.5)  # it has looked twice again
        logits(server)
        shutil.rmtree(tmp_path / "tiny.vitx")
        loaded = next(line for line in server.process.stderr if not line.startswith("warning: "))
        assert loaded.startswith("vitx: model 'tiny' loaded from ")


def test_a_bundle_in_a_mounted_volume_is_served_and_watched(tmp_path: Path) -> None:
    """As Kubernetes lays out a ConfigMap: each file a link through `..data`, which is moved when the map changes."""
    volume = tmp_path / "digits.vitx"
    volume.mkdir()

    def publish(of: str, **options: Any) -> None:
        fresh = write_bundle(tmp_path / "fresh.vitx", name="tiny", **options).path
        fresh.rename(volume / of)
        link = volume / "..data_tmp"
        link.symlink_to(of)
        link.rename(volume / "..data")
        for file in (volume / of).iterdir():
            if not (volume / file.name).exists():
                (volume / file.name).symlink_to(f"..data/{file.name}")

    publish("..2026_11_29_08_00_00.1")
    with running_server(volume, "--allow-uncertified", "--watch") as server:
        before = logits(server)
        publish("..2026_11_29_09_00_00.2", fault="drift")
        shutil.rmtree(volume / "..2026_11_29_08_00_00.1")
        wait_until(lambda: logits(server) != before)
        assert server.metric('vitx_model_loads_total{model="tiny",result="refused",version="1"}') == 0
    assert file_states(volume) == file_states((volume / "..data").resolve())  # else it would be loaded again and again


def test_a_bundle_by_url_is_copied_again_when_it_is_loaded_again(tiny_bundle: Bundle, managed: list[str]) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tiny_bundle.path.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as store:
        Thread(target=store.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{store.server_port}/{tiny_bundle.path.name}"
        with running_server(url, "--allow-uncertified", *managed) as server:
            before = logits(server)
            replace_bundle(tiny_bundle.path, fault="drift")
            assert logits(server) == before
            assert manage(server, "models/tiny/load") == (200, None)
            after = logits(server)
            assert after != before
            (tiny_bundle.path / "model.onnx").write_bytes(b"")
            (tiny_bundle.path / "certificate.json").write_bytes(b"{}")  # so that it is another bundle
            status, answer = manage(server, "models/tiny/load")
            store.shutdown()
            store.server_close()
            assert status == 400
            assert "model.onnx' is not the file that its manifest lists" in answer["error"]
            status, answer = manage(server, "models/tiny/load")
            assert status == 400
            assert f"cannot read '{url}/manifest.json'" in answer["error"]
            assert logits(server) == after


def test_models_come_and_go_in_a_repository(tmp_path: Path, managed: list[str]) -> None:
    folder = tmp_path / "models"
    write_bundle(folder / "tiny.vitx", name="tiny")
    with running_server("--repository", folder, "--allow-uncertified", *managed) as server:
        write_bundle(folder / "other.vitx", name="other")
        states = [(entry["name"], entry["state"]) for entry in manage(server, "index")[1]]
        assert states == [("other", "UNAVAILABLE"), ("tiny", "READY")]
        assert manage(server, "models/other/load") == (200, None)
        assert server.request("GET", "/v2/models/other/ready")[0] == 200
        assert manage(server, "models/tiny/unload", body=b'{"parameters": {"unload_dependents": false}}') == (200, None)
        assert manage(server, "models/tiny/unload") == (404, {"error": "model 'tiny' is not loaded"})
        assert server.request("POST", PATH, BODY)[0] == 404
        assert server.request("GET", "/v2/health/ready")[0] == 200
        info = [
            line for line in server.request("GET", "/metrics")[1].decode().splitlines() if "vitx_model_info{" in line
        ]
        assert [line for line in info if 'model="tiny"' in line] == []
        assert [entry["name"] for entry in manage(server, "index", body=b'{"ready": true}')[1]] == ["other"]
        assert manage(server, "models/tiny/load") == (200, None)
        assert server.request("POST", PATH, BODY)[0] == 200


def test_the_index_says_which_models_are_still_loading(tiny_bundle: Bundle) -> None:
    options = ServeOptions(bundles=(tiny_bundle.path,))

    async def states() -> list[str]:
        core = ServerCore(options, offers := verified(options))
        repository = Repository(core.models, core.loader, core.metrics, offers)
        reasons = [entry["reason"] for entry in await repository.index()]
        await core.load()
        await repository.unload("tiny")
        await core.models.close()
        return reasons + [entry["reason"] for entry in await repository.index()]

    assert asyncio.run(states()) == ["loading", "unloaded"]


def test_no_request_waits_for_a_disk_that_gives_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop never lists the folder, which may be a mount that hangs."""
    bundle = write_bundle(tmp_path / "tiny.vitx").path
    options = ServeOptions(repository=tmp_path, allow_uncertified=True)
    listed_by: list[int] = []

    def listing(*given: Any) -> dict[tuple[str, str], Path]:
        listed_by.append(threading.get_ident())
        return bundles_in(*given)

    async def look() -> None:
        core = ServerCore(options, offers := verified(options))
        repository = Repository(core.models, core.loader, core.metrics, offers)
        await core.load()
        monkeypatch.setattr("vitx.serve.models.repository.bundles_in", listing)
        first = core.models.get("tiny", None)
        assert [entry["state"] for entry in await repository.index()] == ["READY"]
        assert len(listed_by) == 1
        await repository.load("tiny")
        await repository.load_all()
        assert len(listed_by) == 3
        watching = asyncio.create_task(repository.watch(0.01))
        second = core.models.get("tiny", None)
        (bundle / MANIFEST).touch()
        async with asyncio.timeout(HANG):
            while core.models.get("tiny", None) is second:
                await asyncio.sleep(0.01)
        watching.cancel()
        assert first is not second
        await core.models.close()

    asyncio.run(look())
    assert threading.get_ident() not in listed_by


def test_a_name_that_a_client_made_up_is_no_label_while_the_repository_is_broken(
    tmp_path: Path, managed: list[str]
) -> None:
    folder = tmp_path / "models"
    write_bundle(folder / "tiny.vitx", name="tiny")
    with running_server("--repository", folder, "--allow-uncertified", *managed) as server:
        folder.rename(tmp_path / "away")
        assert manage(server, "models/made-up%0Aforged/load")[0] == 404
        assert manage(server, "models/tiny/load")[0] == 400
        assert "made-up" not in server.request("GET", "/metrics")[1].decode()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere every name is UTF-8")
def test_a_folder_whose_name_is_no_utf_8_breaks_neither_the_metrics_nor_the_index(
    tmp_path: Path, managed: list[str]
) -> None:
    folder = tmp_path / "models"
    write_bundle(folder / "tiny.vitx", name="tiny")
    with running_server("--repository", folder, "--watch", "--allow-uncertified", *managed) as server:
        write_bundle(folder / "t\udcffny.vitx", name="tiny")
        wait_until(lambda: "UNAVAILABLE" in [entry["state"] for entry in manage(server, "index")[1]])
        wait_until(lambda: server.metric('vitx_model_loads_total{result="refused",version="1"}') == 1)
        entry = manage(server, "index")[1][0]
        assert (entry["name"], entry["state"]) == ("t\\udcffny", "UNAVAILABLE")
        assert entry["reason"].endswith(
            "t\\udcffny.vitx is the model 'tiny': to be loaded as 't\\udcffny' it must be named so"
        )


@pytest.mark.parametrize("name", ["missing", "..%2F..%2Fetc", "%2Fetc%2Fpasswd", ".hidden", "tiny%00"])
def test_names_without_a_bundle_are_404(tmp_path: Path, repository_server: ServerProcess, name: str) -> None:
    assert manage(repository_server, f"models/{name}/load")[0] == 404
    assert manage(repository_server, f"models/{name}/unload")[0] == 404


def test_management_needs_its_token(repository_server: ServerProcess) -> None:
    for authorization in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        status, text, headers = repository_server.request("POST", "/v2/repository/index", b"", authorization)
        assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="vitx"')
        assert "management token" in json.loads(text)["error"]
    assert repository_server.request("POST", PATH, BODY)[0] == 200  # inference needs none
    for body in (b'{"ready": 1}', b'{"what": true}', b"[]", b"{"):
        assert manage(repository_server, "index", body=body)[0] == 400
    assert manage(repository_server, "models/tiny/load", body=b'{"parameters": {"config": "{}"}}')[0] == 400


@pytest.fixture(scope="module")
def repository_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("repository")
    write_bundle(folder / "models" / "tiny.vitx", name="tiny")
    (folder / "token").write_text(TOKEN)
    arguments = ("--repository", folder / "models", "--allow-uncertified", "--management")
    with running_server(*arguments, "--management-token-file", folder / "token") as server:
        yield server


def test_management_is_off_by_default_and_never_without_a_token(tmp_path: Path, tiny_bundle: Bundle) -> None:
    refused = run_serve(tiny_bundle.path, "--management", "--port", "0")
    assert refused.returncode == 2
    assert "--management and --management-token-file go together" in refused.stderr
    (tmp_path / "token").write_text(TOKEN)
    for option in (("--management", "--token-file", tmp_path / "token"), ()):  # the token of all else; nothing to guard
        refused = run_serve(tiny_bundle.path, *option, "--management-token-file", tmp_path / "token", "--port", "0")
        assert (refused.returncode, "go together, with a token that nothing else has" in refused.stderr) == (2, True)
    (tmp_path / "short").write_text("secret")
    refused = run_serve(tiny_bundle.path, "--management", "--management-token-file", tmp_path / "short", "--port", "0")
    assert refused.returncode == 2
    assert "16 or more visible ASCII characters" in refused.stderr
    with running_server(tiny_bundle.path) as server:
        assert manage(server, "index") == (
            501,
            {"error": "the model repository is not offered: start the server with --management"},
        )
