"""Parts of the Ray job that need no cluster: attempts at a shard, and how large the pool is."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, PREPROCESSING, colour_image, listed_names, png, write_bundle
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, VitxError
from vitx.core.files import sha256_file
from vitx.core.ray_connection import joined
from vitx.predict import PREDICTIONS
from vitx.predict.ledger import COPY, Claim, Ledger, Shard, names_of
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import Part, remove_leftovers
from vitx.predict.pipeline.worker import STAGES, Job

pytest.importorskip("ray")
pool = pytest.importorskip("vitx.predict.ray")


def test_a_shard_that_was_begun_before_is_done_apart_from_others_of_the_kind(tmp_path: Path) -> None:
    """So that the next death of an actor is counted for one of them alone."""
    actor = object.__new__(pool.PredictionActor)
    actor._out, actor._worker, actor._started = tmp_path, MagicMock(), None
    actor._worker.run.side_effect = CheckFailed("torn")
    (tmp_path / PREDICTIONS).mkdir()
    actor._suspects = alone = MagicMock()
    for number, begun in ((1, 0), (1, 1), (2, 1), (1, 2)):
        with pytest.raises(CheckFailed):
            actor._do(Claim(number, Shard("tar", "1.tar")))
        assert alone.__enter__.call_count == begun
    assert (tmp_path / PREDICTIONS / ".part-00000001.parquet.attempts").read_bytes() == b"..."
    remove_leftovers(tmp_path)
    assert not any((tmp_path / PREDICTIONS).iterdir())


def test_an_actor_that_cannot_write_says_so(tmp_path: Path) -> None:
    """As when the storage of the output is gone from its node."""
    actor = object.__new__(pool.PredictionActor)
    actor._out, actor._failure, actor._started = tmp_path / "gone", None, 1.0
    result = actor({pool.CLAIM: Claim(1, Shard("tar", "1.tar"))})[pool.RESULT]
    assert isinstance(result, EnvironmentMissing)
    assert str(result).startswith(f"cannot write to '{tmp_path}/gone' any more ([Errno 2] No such file")


@pytest.fixture
def actor_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An actor in this process, of a shard of four images."""
    node = MagicMock()
    node.get_node_id.return_value = "the node"
    monkeypatch.setattr(pool.ray, "get_runtime_context", lambda: node)

    def made(bundle: Bundle, *, versions: dict[str, str] | None = None, **changes: Any) -> Any:
        footer = {"vitx.bundle_sha256": sha256_file(bundle.path / MANIFEST)}
        given: dict[str, Any] = {"certified": False, "footer": footer} | changes
        asked = replace(job(tmp_path, str(tmp_path)), **given)
        return pool.PredictionActor(asked, bundle.path, None, versions or {})

    rng = np.random.default_rng(1)
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(png(colour_image(0, rng)))
    (tmp_path / PREDICTIONS).mkdir()
    return made


def test_an_actor_does_a_shard_that_was_begun_before(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    (shard,) = listed_names(tmp_path / "list", [f"{name}.png" for name in "abcd"])
    attempts = tmp_path / PREDICTIONS / ".part-00000001.parquet.attempts"
    attempts.write_bytes(b"." * (pool.ATTEMPTS - 1))
    claim = Claim(1, shard)
    actor = actor_of(write_bundle(tmp_path / "tiny.vitx"))
    done = actor({pool.CLAIM: claim})[pool.RESULT]
    assert (done.claim, done.node, done.part.record.images, done.part.record.errors) == (claim, "the node", 4, 0)
    assert pq.read_table(done.part.temporary)["path"].to_pylist() == ["a.png", "b.png", "c.png", "d.png"]
    assert done.stages.keys() == set(STAGES)
    assert done.runtime["runtime"] == "onnxruntime"
    assert not attempts.exists()
    attempts.write_bytes(b"." * pool.ATTEMPTS)
    assert actor({pool.CLAIM: claim}) == {pool.RESULT: claim}  # given up


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"versions": {"numpy": "0.1"}},
            r"its numpy is .*, and this machine's is 0\.1: install the same",
        ),
        ({"footer": {"vitx.bundle_sha256": "0"}}, r"its bundle '.*' differs from this machine's: give every node the"),
        ({"certified": True}, r"bundle '.*tiny\.vitx' has no certificate"),
    ],
)
def test_an_actor_that_cannot_work_says_so_for_each_shard(
    actor_of: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "list").touch()
    actor = actor_of(write_bundle(tmp_path / "tiny.vitx"), **changes)
    for number in (1, 2):
        refused = actor({pool.CLAIM: Claim(number, Shard("tar", "1.tar"))})[pool.RESULT]
        assert isinstance(refused, VitxError)
        assert re.match(rf"the node {re.escape(socket.gethostname())}: {message}", str(refused))
    assert not any((tmp_path / PREDICTIONS).iterdir())


def test_a_shard_may_be_finished_by_two_actors(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    """Ray gives it to another where it takes the first for dead."""
    (shard,) = listed_names(tmp_path / "list", ["a.png"])
    actor = actor_of(write_bundle(tmp_path / "tiny.vitx"))
    run = actor._worker.run

    def beside_another(*given: Any) -> None:
        run(*given)
        (tmp_path / PREDICTIONS / ".part-00000001.parquet.attempts").unlink()

    actor._worker.run = beside_another
    assert actor({pool.CLAIM: Claim(1, shard)})[pool.RESULT].part.record.images == 1


Sizes = Callable[..., Any]


@pytest.fixture
def size(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    def of(nodes: list[dict[str, float]], **options: Any) -> Any:
        monkeypatch.setattr(pool, "cluster_nodes", lambda: [{"Resources": node} for node in nodes])
        return pool.RayPool(tiny_bundle, PredictOptions(ray="local", **options))._pool_size()

    return of


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        # On CPUs: all of the smallest node, and as many actors as fit.
        ([{"CPU": 8}, {"CPU": 4}], {}, (4, 0, 1, 3, 3)),
        ([{"CPU": 8}, {"CPU": 0}, {}], {}, (8, 0, 1, 1, 1)),
        ([{"CPU": 8}, {"CPU": 4}], {"threads": 3}, (3, 0, 1, 3, 3)),
        ([{"CPU": 8}, {"CPU": 4}], {"threads": 1, "decode_threads": 2}, (2, 0, 1, 6, 6)),
        ([{"CPU": 8}], {"threads": 2, "ray_actors": (2, 9)}, (2, 0, 2, 2, 9)),
        # One for each GPU, with its share of its node's CPUs.
        ([{"CPU": 9, "GPU": 2}, {"CPU": 64}], {}, (4, 1, 1, 2, 2)),
        ([{"CPU": 8, "GPU": 2}, {"CPU": 3, "GPU": 1}], {}, (3, 1, 1, 3, 3)),
        ([{"CPU": 8, "GPU": 4}], {"decode_threads": 3}, (3, 1, 1, 2, 2)),
        ([{"CPU": 1, "GPU": 2}], {}, (1, 1, 1, 1, 1)),
        ([{"CPU": 8, "GPU": 2}], {"device": "cpu"}, (8, 0, 1, 1, 1)),
        ([{"CPU": 8, "GPU": 2}], {"device": "cuda"}, (4, 1, 1, 2, 2)),
        # None yet: an autoscaler brings them.
        ([], {"ray_actors": (1, 4)}, (1, 0, 1, 1, 4)),
    ],
)
def test_the_pool_is_as_large_as_fits(
    size: Sizes, nodes: list[dict[str, float]], options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert size(nodes, **options) == expected


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ([], {}, "an actor needs 1 CPU, and the largest node of the cluster has 0 CPUs"),
        ([{"CPU": 4}], {"threads": 5}, "an actor needs 5 CPUs, and the largest node of the cluster has 4 CPUs"),
        ([{"CPU": 4}], {"threads": 5, "ray_actors": (1, 2)}, "an actor needs 5 CPUs"),
        ([{"CPU": 4}], {"device": "cuda"}, "needs 1 CPU and a GPU, and the largest node with a GPU of the cluster"),
        ([{"CPU": 2, "GPU": 1}], {"decode_threads": 3}, "needs 3 CPUs and a GPU, and the largest node with a GPU of"),
    ],
)
def test_a_pool_that_fits_nowhere_is_refused(
    size: Sizes, nodes: list[dict[str, float]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentMissing, match=message):
        size(nodes, **options)


def job(folder: Path, base: str) -> Job:
    return Job(
        out=folder,
        listing=folder / "list",
        base=base,
        labels=LABELS,
        preprocessing=PREPROCESSING,
        options=PredictOptions(),
        read_threads=1,
        decode_threads=1,
        certified=True,
    )


def test_the_sample_is_the_first_file_of_the_shard(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.tar"):
        (tmp_path / name).touch()
    shards = listed_names(tmp_path / "list", ["a.png", "b.png", "gone.png", "s3://bucket/d.png"], 1)
    claims = [Claim(number, shard) for number, shard in enumerate(shards, 1)]
    given = job(tmp_path, str(tmp_path))
    expected = [f"{tmp_path}/a.png", f"{tmp_path}/b.png", None, None]
    assert [pool._sample_path(given, claim) for claim in claims] == expected
    assert pool._sample_path(given, Claim(5, Shard("tar", "c.tar"))) == f"{tmp_path}/c.tar"
    assert pool._sample_path(job(tmp_path, "s3://bucket"), claims[0]) is None


@pytest.mark.parametrize(
    ("gpus", "options", "device", "threads"),
    [
        (0, {}, "cpu", (3, 3)),
        (1, {}, "cuda", (None, 3)),  # a GPU's session has none of its own
        (0, {"threads": 1, "decode_threads": 2}, "cpu", (1, 2)),
    ],
)
def test_the_actors_read_names_in_a_copy_of_the_ledger(
    tiny_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    options: dict[str, Any],
    device: str,
    threads: tuple[int | None, int],
) -> None:
    """SQLite's log uses memory that machines do not share."""
    seen: list[tuple[Path, list[str]]] = []

    def finished(claims: list[Claim], given: tuple[Job, Path, str | None]) -> Iterator[MagicMock]:
        listing = given[0].listing
        seen.append((listing, list(names_of(claims[0].shard, listing))))
        asked = given[0].options
        assert (asked.device, (asked.threads, given[0].decode_threads)) == (device, threads)
        for actor in "abb":
            yield MagicMock(runtime={"runtime": "a session's"}, actor=actor, node="node", stages={})

    monkeypatch.setattr(pool, "_finished", finished)
    monkeypatch.setattr(pool, "_dataset", lambda claims, given, size: given)
    monkeypatch.setattr(pool, "_connected", lambda address: nullcontext())
    monkeypatch.setattr(pool.RayPool, "_pool_size", lambda self: pool.PoolSize(3, gpus, 1, 1, 1))
    shards = listed_names(tmp_path / "list", ["a.png", "b.png"])
    with closing(Ledger(tmp_path / "list")) as ledger:
        ledger.create({}, shards)
        executor, output = pool.RayPool(tiny_bundle, PredictOptions(ray="local", **options)), MagicMock()
        executor(job(tmp_path, ""), ledger, output)
    (_, runtime), _ = output.performance.call_args
    assert runtime == {"runtime": "a session's", "ray": pool.version("ray"), "actors": 2, "nodes": 1}
    ((listing, names),) = seen
    assert (names, listing.parent, listing.name.startswith(COPY)) == (["a.png", "b.png"], tmp_path, True)
    assert not listing.exists()


@pytest.mark.parametrize(
    ("free", "gpus", "said"),
    [
        ([{"CPU": 1.0}, {"CPU": 2.0}], 0, ""),
        ([{"CPU": 1.0}, {"CPU": 1.0}], 0, "2 CPUs"),  # as many as an actor reserves, on no single node
        ([{}], 0, "2 CPUs"),
        ([{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}], 1, "2 CPUs and a GPU"),
    ],
)
def test_a_run_that_waits_for_other_work_of_the_cluster_says_so(
    tiny_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: list[dict[str, float]],
    gpus: int,
    said: str,
) -> None:
    """Ray gives no sign, and would wait for ever for a server of the same cluster."""
    finished = MagicMock(runtime={}, actor="a", node="node", stages={})
    monkeypatch.setattr(pool, "_finished", lambda claims, given: (one for one in [finished]))
    monkeypatch.setattr(pool, "_dataset", lambda claims, given, size: given)
    monkeypatch.setattr(pool, "_connected", lambda address: nullcontext())
    monkeypatch.setattr(pool, "available_resources_per_node", lambda: dict(enumerate(free)))
    monkeypatch.setattr(pool.RayPool, "_pool_size", lambda self: pool.PoolSize(2, gpus, 1, 1, 1))
    shards = listed_names(tmp_path / "list", ["a.png"])
    with closing(Ledger(tmp_path / "list")) as ledger:
        ledger.create({}, shards)
        pool.RayPool(tiny_bundle, PredictOptions(ray="head:6379"))(job(tmp_path, ""), ledger, MagicMock())
    expected = f"predict: no node of the cluster has {said} free, as an actor needs: waiting until one has\n"
    assert capsys.readouterr().err == (expected if said else "")


@pytest.mark.parametrize(
    ("runtime", "names"),
    [
        ("auto", ["vitx", "numpy", "pillow", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx"]),
        ("onnxruntime-cpu", ["vitx", "numpy", "pillow", "onnxruntime", "onnxruntime-gpu"]),
        ("openvino-bf16", ["vitx", "numpy", "pillow", "openvino"]),
    ],
)
def test_versions_are_of_what_decides_the_result(
    runtime: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "installed_version", lambda name: "1")
    assert pool._versions(runtime) == dict.fromkeys(names, "1")
    pool._check_versions(dict.fromkeys(names, "1"))
    monkeypatch.setattr(pool, "installed_version", lambda name: None)
    assert pool._versions(runtime) == {}


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", r"^a node has written '.*gone', which this machine does not see"),
        ("out", r"out' was removed meanwhile: ru"),
    ],
)
def test_a_file_that_is_not_there_says_why(folder: str, message: str, tmp_path: Path) -> None:
    claim = Claim(1, Shard("tar", "1.tar"))
    part = Part(tmp_path / folder / "part", tmp_path / folder / "gone", MagicMock())
    dataset = MagicMock()
    dataset.iter_batches.return_value = (
        batch for batch in [{pool.RESULT: [pool.Finished(claim, part, "actor", "node", {}, {})]}]
    )
    with pytest.raises(VitxError, match=message):
        list(pool._finished([claim], dataset))


def test_what_ray_cannot_do_on_a_node_is_one_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a node without vitx: Ray gives the traceback of its worker."""
    from ray.exceptions import RayError

    lost = "ModuleNotFoundError: No module named 'vitx'"
    text = f"The actor died: ray::Map() (pid=1570, ip=10.0.0.3, actor_id=e4)\n  File x\n{lost}\n"

    class Failing:
        def iter_batches(self, **_: Any) -> Iterator[Any]:
            raise RayError(text)
            yield

    with pytest.raises(EnvironmentMissing) as raised:
        list(pool._finished([], Failing()))
    assert str(raised.value) == (
        f"Ray cannot work on the node 10.0.0.3: {lost}. Every node needs the same Python, Ray and vitx; "
        "finished shards are kept"
    )


def test_a_cluster_that_does_not_start_in_time_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises the bare class of all exceptions for it."""

    def times_out(*given: object, **options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", times_out)
    with pytest.raises(EnvironmentMissing) as refused, joined("local"):
        pass
    assert str(refused.value) == "no Ray cluster at 'local': The current node timed out during startup."
