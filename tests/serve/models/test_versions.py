"""Several versions of a model: a repository folder NAME/VERSION, over HTTP and gRPC, loaded, replaced and unloaded."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from bundle_fixture import BIAS, IMAGE_SIZE, PREPROCESSING, WEIGHT, NumpySession, write_bundle
from cli_fixture import Vitx
from server_process import INFER_BODY, ServerProcess, grpc_address, run_serve, running_server, wait_until
from vitx.core.errors import InputError
from vitx.serve.models.loading import file_states
from vitx.serve.models.repository import bundles_in
from vitx.serve.options import ServeOptions
from vitx.serve.server_core import verified

TOKEN = "a-token-of-management"
GREY = np.full((1, IMAGE_SIZE, IMAGE_SIZE, 3), 7, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny in versions 1 and 10, the second with other logits, and lone as a bundle without a folder."""
    write_bundle(tmp_path / "models" / "tiny" / "1", name="tiny")
    write_bundle(tmp_path / "models" / "tiny" / "10", name="tiny", fault="bgr")
    write_bundle(tmp_path / "models" / "lone.vitx", name="lone")
    return tmp_path / "models"


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    (folder.parent / "token").write_text(TOKEN)
    managed = ("--management", "--management-token-file", folder.parent / "token")
    with running_server("--repository", folder, "--allow-uncertified", "--grpc-port", "0", *managed) as started:
        yield started


def manage(server: ServerProcess, path: str) -> tuple[int, Any]:
    status, text, _ = server.request("POST", f"/v2/repository/{path}", b"", {"Authorization": f"Bearer {TOKEN}"})
    return status, json.loads(text) if text else None


def states(server: ServerProcess) -> dict[tuple[str, str], str]:
    return {(entry["name"], entry["version"]): entry["state"] for entry in manage(server, "index")[1]}


def answer(server: ServerProcess, version: str | None = None, name: str = "tiny") -> tuple[int, Any]:
    """Status, and the version and logits of the answer."""
    root = f"/v2/models/{name}" + ("" if version is None else f"/versions/{version}")
    status, text, _ = server.request("POST", root + "/infer", INFER_BODY)
    found = json.loads(text)
    return status, found if status != 200 else (found["model_version"], found["outputs"][0]["data"])


def expected(*, mirrored: bool) -> Any:
    first = NumpySession().infer(GREY)[0]
    if not mirrored:
        return pytest.approx(first, rel=1e-4)
    normal = (7 / 255 - np.array(PREPROCESSING.mean)) / PREPROCESSING.std
    return pytest.approx(normal @ WEIGHT[::-1] + BIAS, rel=1e-4)


def test_each_version_answers_and_the_highest_is_the_default(server: ServerProcess) -> None:
    assert server.line.startswith("vitx: serving lone, tiny on ")
    assert answer(server, "1") == (200, ("1", expected(mirrored=False)))
    assert answer(server, "10") == (200, ("10", expected(mirrored=True)))
    assert answer(server) == answer(server, "10")
    assert answer(server, name="lone")[1][0] == "1"
    for version in ("2", "01", "", "x", "-1", "1.0", "%D9%A3"):
        status, text = answer(server, version)
        assert status == 404
        assert "'tiny' version " in text["error"]
    assert server.json("/v2/models/tiny")["versions"] == ["1", "10"]
    assert server.json("/v2/models/tiny/versions/1")["versions"] == ["1", "10"]
    assert server.json("/v2/models/lone")["versions"] == ["1"]
    assert server.request("GET", "/v2/models/tiny/versions/10/ready")[0] == 200
    assert server.request("GET", "/v2/models/tiny/versions/2/ready")[0] == 404
    served = [(entry["name"], entry["version"]) for entry in server.json("/v2/models/stats")["model_stats"]]
    assert served == [("lone", "1"), ("tiny", "1"), ("tiny", "10")]
    assert server.json("/v2/models/tiny/versions/1/stats")["model_stats"][0]["inference_count"] == 1
    assert server.metric('vitx_images_total{model="tiny",version="1"}') == 1
    assert server.metric('vitx_images_total{model="tiny",version="10"}') == 3


def test_tritons_clients_name_a_version(server: ServerProcess) -> None:
    with (
        triton.InferenceServerClient(server.url) as http,
        triton_grpc.InferenceServerClient(grpc_address(server)) as rpc,
    ):
        for client, kind in ((http, triton), (rpc, triton_grpc)):
            tensor = kind.InferInput("images", list(GREY.shape), "UINT8")
            tensor.set_data_from_numpy(GREY)
            for version, mirrored in (("1", False), ("10", True), ("", True)):
                result = client.infer("tiny", [tensor], model_version=version)
                assert list(result.as_numpy("logits")[0]) == expected(mirrored=mirrored)
            assert client.is_model_ready("tiny", "10")
            assert not client.is_model_ready("tiny", "3")
            with pytest.raises(InferenceServerException, match="'tiny' version 3 is not found"):
                client.infer("tiny", [tensor], model_version="3")
        assert rpc.infer("tiny", [tensor], model_version="1").get_response().model_version == "1"
        assert list(rpc.get_model_metadata("tiny").versions) == ["1", "10"]
        assert rpc.get_model_metadata("tiny", "1").name == "tiny"
        found = [rpc.get_inference_statistics("tiny", version).model_stats for version in ("1", "")]
        assert [[entry.version for entry in entries] for entries in found] == [["1"], ["1", "10"]]
        entries = http.get_inference_statistics("tiny")["model_stats"]
        assert [entry["version"] for entry in entries] == ["1", "10"]  # of all its versions, as in Triton


def test_versions_come_and_go(server: ServerProcess, folder: Path) -> None:
    tiny = folder / "tiny"
    served = {("lone", "1"): "READY", ("tiny", "1"): "READY", ("tiny", "10"): "READY"}
    assert states(server) == served
    write_bundle(tiny / "11", name="tiny")
    assert states(server) == {**served, ("tiny", "11"): "UNAVAILABLE"}
    assert manage(server, "models/tiny/load") == (200, None)
    assert answer(server) == (200, ("11", expected(mirrored=False)))
    shutil.rmtree(tiny / "10")  # a load unloads versions that are gone
    assert answer(server, "10")[0] == 200
    assert manage(server, "models/tiny/load") == (200, None)
    assert answer(server, "10")[0] == 404
    assert server.json("/v2/models/tiny")["versions"] == ["1", "11"]
    assert manage(server, "models/tiny/unload") == (200, None)
    assert answer(server)[0] == answer(server, "1")[0] == 404
    assert states(server) == {("lone", "1"): "READY", ("tiny", "1"): "UNAVAILABLE", ("tiny", "11"): "UNAVAILABLE"}
    assert server.request("GET", "/v2/health/ready")[0] == 200
    write_bundle(tiny / "12", name="other")
    status, text = manage(server, "models/tiny/load")
    assert status == 400
    assert text["error"].startswith("failed to load 'tiny' version 12: ")
    assert answer(server)[1][0] == "11"  # the versions before the refused one were loaded


def test_a_watched_folder_takes_a_new_version_and_replaces_one(folder: Path) -> None:
    with running_server("--repository", folder, "--allow-uncertified", "--watch") as server:
        shutil.rmtree(folder / "tiny" / "10")
        write_bundle(folder / "tiny" / "12", name="tiny")
        wait_until(lambda: answer(server)[1][0] == "12")
        fresh = write_bundle(folder / ".fresh" / "12", name="tiny", fault="bgr")
        shutil.rmtree(folder / "tiny" / "12")
        fresh.path.rename(folder / "tiny" / "12")
        wait_until(lambda: answer(server)[1] == ("12", expected(mirrored=True)))
        assert answer(server, "1") == (200, ("1", expected(mirrored=False)))
        assert answer(server, "10") == (200, ("10", expected(mirrored=True)))  # what vanished stays loaded
        assert server.metric('vitx_model_loads_total{model="tiny",result="loaded",version="12"}') == 2


def test_other_folders_are_ignored_and_duplicate_versions_refused(folder: Path) -> None:
    for name in ("0", "01", "latest", ".2", "1.5", "9" * 19):
        write_bundle(folder / "tiny" / name, name="tiny")
    (folder / "tiny" / "3").mkdir()  # no bundle, as while one is copied
    assert list(bundles_in(folder)) == [("lone", "1"), ("tiny", "1"), ("tiny", "10")]
    write_bundle(folder / "tiny.vitx", name="tiny")
    with pytest.raises(InputError, match="are both version 1 of 'tiny': remove one of them"):
        bundles_in(folder)
    shutil.rmtree(folder / "tiny.vitx")
    shutil.copytree(folder / "tiny" / "1", folder / "other" / "1")
    refused = run_serve("--repository", folder, "--allow-uncertified", "--port", "0")
    assert refused.returncode == 2
    assert "is the model 'tiny': to be loaded as 'other' it must be named so" in refused.stderr


def test_a_folder_that_may_not_be_read_hides_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that another user copies there has it: `--watch` loaded nothing more, and said nothing."""
    private, is_file = folder / "private.vitx", Path.is_file
    private.mkdir(0o700)

    def asked(path: Path) -> bool:
        if path.parent == private:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", asked)
    assert list(bundles_in(folder)) == [("lone", "1"), ("private", "1"), ("tiny", "1"), ("tiny", "10")]
    assert file_states(private) == ()


def test_a_folder_of_a_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError) as caught:
        bundles_in(Path("s3://models"))
    text = "--repository s3://models: expected a folder of this machine; give each bundle by its own URL"
    assert str(caught.value) == text


def test_a_file_that_may_be_read_now_is_another_state(folder: Path) -> None:
    """A bundle that was refused because its files are of another user: after a chmod `--watch` did not try again."""
    bundle = folder / "lone.vitx"
    before = file_states(bundle)
    (bundle / "model.onnx").chmod(0o600)
    changed = [name for (name, *_), now in zip(before, file_states(bundle), strict=True) if now not in before]
    assert changed == ["model.onnx"]


@pytest.mark.parametrize(
    ("policies", "versions"),
    [
        ((), "1 10"),
        (("all",), "1 10"),
        (("latest:1",), "10"),
        (("latest:9",), "1 10"),
        (("1",), "1"),
        (("10,1,3",), "1 10"),
        (("3",), ""),
        (("tiny=1",), "1"),
        (("lone=3",), "1 10"),
        (("tiny=all", "latest:1"), "1 10"),
        (("1", "tiny=latest:1"), "10"),
    ],
)
def test_a_policy_chooses_from_the_folder(folder: Path, policies: tuple[str, ...], versions: str) -> None:
    assert [version for name, version in bundles_in(folder, policies) if name == "tiny"] == versions.split()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("latest", "'latest': expected all, latest:2 or 1,3, with NAME= before it for one model"),
        ("latest:0", "'latest:0': expected all"),
        ("01", "'01': expected all"),
        ("=1", "'=1': expected all"),
        ("1,\u0663", "expected all"),
        ("tiny=2,3", "--versions tiny=2,3: there is no such version in a --repository"),
        ("mine=all", "--versions mine=all: there is no such version in a --repository"),
        ("latest:1 all", "'latest:1' and 'all' are of the same models: give one of them"),
        ("tiny=1 latest:1 tiny=2", "'tiny=1' and 'tiny=2' are of the same models"),
    ],
)
def test_a_policy_that_chooses_nothing_is_refused(folder: Path, vitx: Vitx, given: str, text: str) -> None:
    policies = [part for policy in given.split() for part in ("--versions", policy)]
    code, _, error = vitx("serve", "--repository", folder, "--allow-uncertified", "--port", "0", *policies)
    assert (code, text in " ".join(error.split())) == (2, True), error


def test_a_policy_needs_a_repository(folder: Path, vitx: Vitx) -> None:
    code, _, error = vitx("serve", folder / "lone.vitx", "--allow-uncertified", "--port", "0", "--versions", "latest:1")
    assert code == 2
    assert "--versions latest:1: there is no such version in a --repository" in error


def test_a_version_that_is_chosen_and_not_there_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ServeOptions(repository=folder, versions=("tiny=1,7", "3,1"), allow_uncertified=True)
    assert [offer.key for offer in verified(options)] == [("lone", "1"), ("tiny", "1")]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--versions" in line]
    assert warnings == ["warning: --versions tiny=1,7: there is no version 7 of 'tiny' yet"]


def test_a_later_version_takes_the_place_of_the_latest(folder: Path) -> None:
    (folder.parent / "token").write_text(TOKEN)
    managed = ("--management", "--management-token-file", folder.parent / "token", "--watch")
    with running_server(
        "--repository", folder, "--allow-uncertified", "--versions", "tiny=latest:1", *managed
    ) as server:
        assert server.json("/v2/models/tiny")["versions"] == ["10"]
        assert answer(server) == answer(server, "10") == (200, ("10", expected(mirrored=True)))
        assert answer(server, "1")[0] == 404
        assert answer(server, name="lone")[1][0] == "1"
        write_bundle(folder / "tiny" / "11", name="other")  # refused: the one before it stays
        wait_until(lambda: server.metric('vitx_model_loads_total{model="tiny",result="refused",version="11"}'))
        assert answer(server)[1][0] == "10"
        write_bundle(folder / "tiny" / "12", name="tiny")
        wait_until(lambda: server.json("/v2/models/tiny")["versions"] == ["12"])
        assert answer(server, "10")[0] == 404
        write_bundle(folder / "tiny" / "13", name="tiny")
        assert manage(server, "models/tiny/load") == (200, None)
        assert server.json("/v2/models/tiny")["versions"] == ["13"]
        assert states(server) == {("lone", "1"): "READY", ("tiny", "13"): "READY"}
