"""Images from and predictions to a real S3 server (moto's), which is damaged: nothing is lost without a word.

What counts as a word: an error of the command, or a row with a reason. The counts of the summary always add up.
"""

import io
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, NumpySession, colour_image, png, tar_of
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.predict import PREDICTIONS, SUMMARY, PredictionSummary, predict
from vitx.predict.inputs import remote
from vitx.predict.options import PredictOptions

PIXELS = [colour_image(index, np.random.default_rng(index)) for index in range(4)]
IMAGES = [png(pixels) for pixels in PIXELS]
NAMES = [f"{index}.png" for index in range(4)]
TAR = tar_of(dict(zip(NAMES, IMAGES, strict=True)))
CLASSES = dict(zip(NAMES, (LABELS[best] for best in NumpySession().infer(np.stack(PIXELS)).argmax(1)), strict=True))
# Of a request, "METHOD /bucket/key?query": a status to answer, how many bytes of the body to send, or None.
Fault = Callable[[str], int | None]


class Damaged:
    """moto's application, with faults before it: an HTTP status is answered in its place; less cuts its body there."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.fault: Fault = lambda request: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
        found = self.fault(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{query}")
        if found is None:
            return self._application(environ, start_response)  # type: ignore[no-any-return]
        if found >= 100:
            code = {403: "AccessDenied"}.get(found, "InternalError")
            said = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{found} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(said)))])
            return [said]
        return [b"".join(self._application(environ, start_response))[:found]]


class Store:
    """A bucket with four images below in/."""

    def __init__(self, client: Any, damaged: Damaged, bucket: str) -> None:
        self._client, self._damaged, self.bucket = client, damaged, bucket
        client.create_bucket(Bucket=bucket)
        for name, data in zip(NAMES, IMAGES, strict=True):
            self.put(f"in/{name}", data)

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=key)

    def objects(self) -> dict[str, bytes]:
        listed = self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1000).get("Contents", ())
        return {
            one["Key"]: self._client.get_object(Bucket=self.bucket, Key=one["Key"])["Body"].read() for one in listed
        }

    def answer(self, status: int, start: str, times: int = 1 << 30, *, but_first: int = 0) -> None:
        """Answer requests that begin with `start`, which has the bucket as B, so many times; not the first ones."""
        places = itertools.count()
        matched = start.replace("/B", f"/{self.bucket}")

        def fault(request: str) -> int | None:
            if not request.startswith(matched):
                return None
            return status if but_first <= next(places) < but_first + times else None

        self._damaged.fault = fault

    def before(self, start: str, action: Callable[[], object], *, but_first: int = 0) -> None:
        """Do `action` once, before a request that begins with `start` is answered; not the first ones."""
        places, matched = itertools.count(), start.replace("/B", f"/{self.bucket}")

        def fault(request: str) -> None:
            if request.startswith(matched) and next(places) == but_first:
                action()

        self._damaged.fault = fault

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Any, Damaged]]:
    import boto3
    import s3fs
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    damaged = Damaged(DomainDispatcherApplication(create_backend_app))
    running = make_server("127.0.0.1", 0, damaged, threaded=True, request_handler=quiet_handler())
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_MAX_ATTEMPTS": "1",  # the attempts are ours
            "MOTO_S3_DEFAULT_MAX_KEYS": "2",  # to a page of a listing
        }.items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        client = boto3.client("s3")
        yield client, damaged
        client.close()
        s3fs.S3FileSystem.clear_instance_cache()
    running.shutdown()
    thread.join()
    running.server_close()


def quiet_handler() -> Any:
    from moto.moto_server.werkzeug_app import MotoRequestHandler

    class Quiet(MotoRequestHandler):
        def log_request(self, *args: Any) -> None:
            pass

    return Quiet


BUCKETS = itertools.count()


@pytest.fixture
def store(server: tuple[Any, Damaged], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # power cuts are not of these tests, and a busy disk is slow
    client, damaged = server
    yield Store(client, damaged, f"bucket-{next(BUCKETS)}")
    damaged.fault = lambda request: None


def run(bundle: Bundle, source: str, out: Path | str, **options: Any) -> PredictionSummary:
    given = PredictOptions(**{"shard_size": 2, "decode_threads": 1, "read_threads": 2} | options)
    return predict(bundle, NumpySession(), source, out, given, quiet=True)


def errors(bundle: Bundle, source: str, out: Path, **options: Any) -> dict[str, str]:
    """Why rows have no class, by path; the counts agree, each name is a row, and each class is right."""
    summary = run(bundle, source, out, **options)
    assert summary.complete == (not summary.uncounted)
    assert all(counts.missing == 0 for counts in summary.sources.values())
    rows = pq.read_table(out / PREDICTIONS).to_pylist()
    assert len({row["path"] for row in rows}) == len(rows) == summary.images
    for row in rows:
        assert row["error"] or row["class"] == CLASSES[row["path"][-5:]]
    reasons = {row["path"]: row["error"] for row in rows if row["error"]}
    assert len(reasons) == summary.errors
    missing = CLASSES.keys() - {row["path"][-5:] for row in rows if row["class"]}
    assert reasons or not missing, "lost without a word"
    return reasons


def table(rows: int = 4) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.table({"image": IMAGES[:rows], "name": NAMES[:rows]}), file, use_dictionary=False, row_group_size=2
    )
    return file.getvalue()


def test_what_is_whole_gives_every_image(certified_original: Bundle, tmp_path: Path, store: Store) -> None:
    """Of keys that no file system would have, too, and in pages of two."""
    strange = ["in//0.png", "in/a//b/1.png", "in/%41 +&?#=;é2.png", "in/tab\t\\3.png", f"in/{'n' * 300}0.png"]
    for key in strange:
        store.put(key, IMAGES[int(key[-5])])
    store.put("in/notes.txt", b"text")
    store.put("in/folder/", b"")
    assert errors(certified_original, store.url("in"), tmp_path / "out") == {}
    found = set(pq.read_table(tmp_path / "out" / PREDICTIONS)["path"].to_pylist())
    assert found >= {*NAMES, *(key.removeprefix("in/") for key in strange[2:])}
    assert len(found) == 9
    store.put("in.tar", TAR)
    assert errors(certified_original, store.url("in.tar"), tmp_path / "tar") == {}
    store.put("in.parquet", table())
    assert errors(certified_original, store.url("in.parquet"), tmp_path / "table", key="name") == {}


def test_odd_keys_are_predicted_skipped_or_rows_and_patterns_match_objects_alone(
    certified_original: Bundle, tmp_path: Path, store: Store
) -> None:
    names = ["a::b", "x y", "é", "a%20b", "a?b", "a#b", "a+b", "[x]", "tab\t", "a&b<c>", "\\x", "http://h/x", "f.png/y"]
    odd = [f"{name}.png" for name in names]
    for name in (*odd, "trail.png/", "s/", ".h.png", "./d.png", "n.txt"):
        store.put(f"in/{name}", IMAGES[0])
    store.put("in/empty/", b"")  # the mark of a folder, as consoles make it

    def found(source: str, out: str) -> tuple[set[str], dict[str, str], int]:
        summary = run(certified_original, store.url(source), tmp_path / out)
        rows = pq.read_table(tmp_path / out / PREDICTIONS).to_pylist()
        good = {row["path"].removeprefix(store.url("in/")) for row in rows if row["class"]}
        return good, {row["path"]: row["error"] for row in rows if row["error"]}, summary.skipped_names.count

    good, bad, skipped = found("in", "folder")
    assert good == {*odd, *NAMES}
    assert bad == {
        "trail.png/": "a folder, which can be listed now, by another run; or an object whose name ends with a slash"
    }
    assert skipped == 4  # s/, .h.png, the folder . and n.txt
    inside = {"f.png/y.png", "http://h/x.png"}
    assert found("in/*.png", "pattern") == ({*odd, *NAMES} - inside, {}, 0)
    assert found("in/**.png", "stars") == ({*odd, *NAMES} - inside, {}, 0)
    assert found("in/**/[y-z].png", "deep") == ({"f.png/y.png"}, {}, 0)
    for name in ("/e.png", "a//b/e.png", "a//.b/e.png", "//e.png"):
        store.put(f"in/{name}", IMAGES[0])
    empty = {"/e.png", "a//b/e.png", "//e.png"}
    assert found("in/**/*.png", "empty") == ({*odd, *NAMES} | empty, {}, 0)
    assert found("in/**", "all")[0] == found("in", "below")[0] == {*odd, *NAMES} | empty
    assert found("*n/**/e.png", "bucket") == (empty, {}, 0)


# What is asked, answered in another way; and what the one row with an error says of it.
READS: dict[str, tuple[Callable[[Store], object], str]] = {
    "forbidden": (lambda store: store.answer(403, "GET /B/in/1.png"), "cannot open the image: AccessDenied"),
    "always 500": (lambda store: store.answer(500, "GET /B/in/1.png"), "cannot read the object: OSError: "),
    "cut": (lambda store: store.answer(40, "GET /B/in/1.png"), "cannot read the object: "),
    "empty": (lambda store: store.put("in/1.png", b""), "not an image: empty"),
    "half": (lambda store: store.put("in/1.png", IMAGES[1][:60]), "cannot decode the image: "),
    "removed": (
        lambda store: store.before("GET /B/in/1.png", lambda: store.remove("in/1.png")),
        "cannot open the image",
    ),
    "replaced by text": (
        lambda store: store.before("GET /B/in/1.png", lambda: store.put("in/1.png", b"text")),
        "not an image",
    ),
}


@pytest.mark.parametrize("fault", READS)
def test_an_image_that_cannot_be_read_is_a_row(
    certified_original: Bundle, tmp_path: Path, store: Store, fault: str
) -> None:
    damage, reason = READS[fault]
    damage(store)
    found = errors(certified_original, store.url("in"), tmp_path / "out")
    assert list(found) == ["1.png"]
    assert reason in found["1.png"]


@pytest.mark.parametrize(
    ("status", "start", "but_first"),
    [
        (500, "GET /B/in/1.png", 0),
        (40, "GET /B/in/1.png", 0),
        (500, "GET /B?list-type=2", 0),
        (500, "GET /B?list-type", 1),
    ],
    ids=["500", "cut", "listing", "second page"],
)
def test_what_fails_once_is_asked_again(
    certified_original: Bundle, tmp_path: Path, store: Store, status: int, start: str, but_first: int
) -> None:
    store.answer(status, start, 1, but_first=but_first)
    assert errors(certified_original, store.url("in"), tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("status", "but_first"), [(403, 0), (500, 0), (500, 4)], ids=["forbidden", "500", "second page"]
)
def test_what_cannot_be_listed_is_an_error(
    certified_original: Bundle, tmp_path: Path, store: Store, status: int, but_first: int
) -> None:
    """Not fewer images."""
    store.answer(status, "GET /B?list-type=2", but_first=but_first)
    with pytest.raises((InputError, EnvironmentMissing), match=rf"^cannot (list|look for) .*'{store.url('in')}'"):
        run(certified_original, store.url("in"), tmp_path / "out")
    assert not (tmp_path / "out" / PREDICTIONS).exists()


def test_a_bucket_that_is_not_there_ends_the_command(
    vitx: Vitx, certified_original: Bundle, tmp_path: Path, store: Store
) -> None:
    code, _, said = vitx("predict", certified_original.path, "s3://bucket-of-nobody/in", "--out", tmp_path / "out")
    assert (code, "there is nothing at 's3://bucket-of-nobody/in'" in said) == (2, True)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


PAGE = pq.ParquetFile(io.BytesIO(table())).metadata.row_group(1).column(0).data_page_offset
FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "header of a tar": ("a.tar", lambda: flipped(TAR, TAR.index(b"2.png"))),
    "tar cut short": ("a.tar", lambda: TAR[:1500]),
    "empty tar": ("a.tar", lambda: b""),
    "Parquet cut short": ("a.parquet", lambda: table()[:-50]),
    "empty Parquet": ("a.parquet", lambda: b""),
    "page of Parquet": ("a.parquet", lambda: table()[:PAGE] + b"\xff" * 40 + table()[PAGE + 40 :]),
    "list of what is not there": ("list.txt", lambda: b"in/0.png\nin/9.png\n"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_damaged_file_is_noticed(certified_original: Bundle, tmp_path: Path, store: Store, fault: str) -> None:
    name, made = FILES[fault]
    store.put(name, made())
    options = {"key": "name"} if name == "a.parquet" else {}
    assert errors(certified_original, store.url(name), tmp_path / "out", **options)


@pytest.mark.parametrize("removed", [False, True])
def test_a_tar_that_is_replaced_or_removed_while_it_is_read_is_noticed(
    certified_original: Bundle, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """In blocks of 1 KiB, before the third is read."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1024)
    store.put("a.tar", TAR)
    action = (lambda: store.remove("a.tar")) if removed else (lambda: store.put("a.tar", TAR + bytes(512)))
    store.before("GET /B/a.tar", action, but_first=2)
    found = errors(certified_original, store.url("a.tar"), tmp_path / "out")
    assert list(found) == ["a.tar"]
    assert ("key does not exist" if removed else "it was replaced while it was read") in found["a.tar"]


@pytest.mark.parametrize("removed", [False, True])
def test_parquet_that_is_replaced_or_removed_before_it_is_read_is_noticed(
    certified_original: Bundle, tmp_path: Path, store: Store, removed: bool
) -> None:
    """The fourth HEAD opens it: it was looked for twice, and listed. The new file's second row group has one row."""
    store.put("a.parquet", table())
    action = (lambda: store.remove("a.parquet")) if removed else (lambda: store.put("a.parquet", table(3)))
    store.before("HEAD /B/a.parquet", action, but_first=3)
    found = errors(certified_original, store.url("a.parquet"), tmp_path / "out", key="name")
    assert list(found) == [f"a.parquet/{row:07d}" for row in range(0 if removed else 2, 4)]


WRITES: dict[str, Callable[[Store], object]] = {
    "forbidden": lambda store: store.answer(403, "PUT /B/out/predictions"),
    "always 500": lambda store: store.answer(500, "PUT /B/out/predictions"),
    "summary forbidden": lambda store: store.answer(403, "PUT /B/out/summary"),
}


@pytest.mark.parametrize("fault", WRITES)
def test_what_cannot_be_put_is_an_error_and_is_put_later(
    certified_original: Bundle, tmp_path: Path, store: Store, fault: str
) -> None:
    """No summary until all parts are there."""
    WRITES[fault](store)
    given = {"state": tmp_path / "state"}
    with pytest.raises(EnvironmentMissing, match=f"^cannot write to '{store.url('out')}': "):
        run(certified_original, store.url("in"), store.url("out"), **given)
    assert f"out/{SUMMARY}" not in store.objects()
    store.answer(500, "PUT /B/out/", 1)  # and once more it fails, which the next attempt mends
    run(certified_original, store.url("in"), store.url("out"), **given)
    assert_whole(store)


def assert_whole(store: Store) -> None:
    found = store.objects()
    parts = [io.BytesIO(data) for key, data in found.items() if key.startswith(f"out/{PREDICTIONS}/")]
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert {row["path"]: row["class"] for row in rows} == CLASSES
    assert f"out/{SUMMARY}" in found


@pytest.mark.parametrize("damage", ["removed", "of another size", "of another run"])
def test_a_part_that_was_damaged_behind_our_back_is_put_again(
    certified_original: Bundle, tmp_path: Path, store: Store, damage: str
) -> None:
    given = (certified_original, store.url("in"), store.url("out"))
    run(*given, state=tmp_path / "state")
    if damage == "of another run":
        with pytest.raises(InputError, match="holds predictions of another run"):
            run(*given, state=tmp_path / "other")
        return
    name = f"out/{PREDICTIONS}/part-00000001.parquet"
    store.remove(name) if damage == "removed" else store.put(name, b"PAR1")
    run(*given, state=tmp_path / "state")
    assert_whole(store)


def test_a_bucket_to_write_that_is_not_there_is_an_error(
    certified_original: Bundle, tmp_path: Path, store: Store
) -> None:
    with pytest.raises(EnvironmentMissing, match=r"^cannot write to 's3://bucket-of-nobody/out': .*bucket"):
        run(certified_original, store.url("in"), "s3://bucket-of-nobody/out", state=tmp_path / "state")
