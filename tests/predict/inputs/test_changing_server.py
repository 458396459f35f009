"""Parquet files of an HTTP server that answers differently from one moment to the next."""

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, png, tar_of
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.predict import predict
from vitx.predict.inputs import remote
from vitx.predict.inputs.tables import TableColumns, read_rows, refuse_equal_keys
from vitx.predict.ledger import Shard
from vitx.predict.options import PredictOptions
from vitx.predict.summary import Increment

pytest.importorskip("aiohttp", reason="fsspec's HTTP needs it")

ROWS = 40


class Files:
    """What the server has now. versions: of one file; replaced: the number of the GET from which it is the second."""

    def __init__(self, versions: list[bytes], replaced: int = 1_000_000, failing: range = range(0)) -> None:
        self.versions, self.replaced, self.failing, self.gets = versions, replaced, failing, 0

    def now(self) -> tuple[bytes, str]:
        number = int(self.gets >= self.replaced)
        return self.versions[number], f'"{number}"'


@contextmanager
def serving(files: Files) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files.gets += 1
            if files.gets in files.failing:
                self.send_error(503)
                return
            content, tag = files.now()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2] or len(content) - 1)) if asked else (0, len(content) - 1)
            part = content[first : last + 1]
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.describe(len(part), tag)
            self.wfile.write(part)

        def do_HEAD(self) -> None:
            content, tag = files.now()
            self.send_response(200)
            self.describe(len(content), tag)

        def describe(self, length: int, tag: str) -> None:
            for name, value in (("Content-Length", str(length)), ("ETag", tag), ("Accept-Ranges", "bytes")):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def table(numbers: list[int], size: int = 10) -> bytes:
    """A file whose images are their number, `size` times: of one layout, whatever the numbers."""
    columns = {"image": [bytes([number]) * size for number in numbers], "id": [str(number) for number in numbers]}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False, write_statistics=False)
    return file.getvalue()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REMOTE_WAITS", (0.0, 0.0))


@pytest.mark.parametrize("replaced", [2, 22, 26, 30, 34])  # of 40 requests the first half read the footer
def test_no_row_has_the_columns_of_two_versions(replaced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 2048)
    numbers = list(range(10, 10 + ROWS))
    first, second = table(numbers, 1000), table(numbers[::-1], 1000)
    assert len(first) == len(second)
    with (
        serving(Files([first, second], replaced)) as url,
        pytest.raises(OSError, match=r"it was replaced while it was read$"),
    ):
        list(read_rows(Shard("parquet", "a.parquet", 0, ROWS), url, TableColumns(key="id")))


def test_keys_that_cannot_be_read_now_are_not_taken_for_none() -> None:
    shards = [Shard("parquet", "a.parquet", 0, 4)]
    with serving(Files([table([1, 2, 2, 3])], failing=range(1, 4))) as url:
        with pytest.raises(
            EnvironmentMissing, match=r"cannot read the column 'id' of a\.parquet: .*run the same command"
        ):
            refuse_equal_keys(url, shards, "id")
        with pytest.raises(InputError, match=r'--key id: "2" is in row 1 of a\.parquet and in row 2'):
            refuse_equal_keys(url, shards, "id")


@pytest.mark.parametrize("name", ["0.png", "a.tar"])
def test_what_a_server_did_not_give_is_tried_again_by_the_next_increment(
    tiny_bundle: Bundle, tmp_path: Path, name: str
) -> None:
    """It tells the version when it gives no content: with that the row was unchanged ever after."""
    image = png(colour_image(1, np.random.default_rng(0)))
    options = PredictOptions(incremental=True, max_error_rate=1)
    with serving(Files([image if name == "0.png" else tar_of({"0.png": image})], failing=range(1, 4))) as url:
        found = [
            predict(tiny_bundle, NumpySession(), f"{url}/{name}", tmp_path / "out", options, quiet=True)
            for _ in range(3)
        ]
    assert [summary.errors for summary in found] == [1, 0, 0]
    assert [summary.increment for summary in found] == [Increment(new=1), Increment(changed=1), Increment(unchanged=1)]
