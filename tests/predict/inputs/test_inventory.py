"""The input cut into shards: their order, what identifies a listing, and every item of a container."""

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import listed
from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import inventory as inventory_module
from vitx.predict.inputs import remote, stores
from vitx.predict.inputs.inventory import Inventory, Item, base_of, list_input, named_images, read_item, read_shard
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tables import TableColumns
from vitx.predict.ledger import Ledger, Shard
from vitx.predict.options import Share


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def inventory(source: object, folder: Path, shard_size: int = 100, column: str | None = None) -> Inventory:
    return listed(str(source), folder / "list", shard_size, TableColumns(column))


def items(given: Inventory, folder: Path, column: str | None = None) -> list[Item]:
    listing, columns = folder / "list", TableColumns(column)
    return [item for shard in given.shards for item in read_shard(shard, given.base, listing, columns)]


def sources(found: list[Item]) -> list[tuple[str, Any]]:
    """Keys with bytes or the text of the error."""
    return [(item.key, str(item.source) if isinstance(item.source, ImageError) else item.source) for item in found]


def test_a_folder_is_listed_relative_to_itself_in_shards(tmp_path: Path) -> None:
    touch(tmp_path / "in", "b.png", "a/2.png", "a-1.png", "c.txt", "d.tar")
    found = inventory(f"{tmp_path}/in/", tmp_path, 2)
    assert found.base == f"{tmp_path}/in"
    assert found.shards == (Shard("images", "", 0, 2), Shard("images", "", 2, 1))
    assert [item.key for item in items(found, tmp_path)] == ["a/2.png", "a-1.png", "b.png"]
    assert [item.source for item in items(found, tmp_path)] == [
        f"{tmp_path}/in/{name}" for name in ("a/2.png", "a-1.png", "b.png")
    ]
    assert found == inventory(tmp_path / "in", tmp_path, 2)
    names = hashlib.sha256(b"a\x002.png/a-1.png/b.png/").hexdigest()
    assert found.digest == hashlib.sha256(f"{names} {tmp_path}/in []".encode()).hexdigest()
    skipped = SkippedNames({".txt": 1, ".tar": 1}, ["c.txt", "d.tar"])
    assert (found.skipped.by_suffix, sorted(found.skipped.first)) == (skipped.by_suffix, skipped.first)
    first, second = (listed(f"{tmp_path}/in", tmp_path / "list", share=Share(number, 2)) for number in (1, 2))
    assert (first.skipped, second.skipped) == (found.skipped, SkippedNames())


def test_a_pattern_gives_images_first_and_containers_in_order(tmp_path: Path) -> None:
    touch(tmp_path, "2.tar", "b.png", "1.tgz", "a.png", "3.zip")
    found = inventory(f"{tmp_path}/[1-9ab]*", tmp_path)
    assert (found.base, found.skipped) == ("", SkippedNames({".zip": 1}, [f"{tmp_path}/3.zip"]))
    assert [(shard.kind, shard.location, shard.count) for shard in found.shards] == [
        ("images", "", 2),
        ("tar", f"{tmp_path}/1.tgz", None),
        ("tar", f"{tmp_path}/2.tar", None),
    ]
    assert [item.key for item in read_shard(found.shards[0], "", tmp_path / "list")] == [
        f"{tmp_path}/{name}" for name in ("a.png", "b.png")
    ]


def test_a_folder_without_images_gives_its_containers(tmp_path: Path) -> None:
    """Also where the folder's name looks like a pattern."""
    folder = tmp_path / "in [x]*"
    touch(folder, "b.tar", "A.TAR.GZ", "deep/c.tar", "notes.txt")
    found = inventory(f"{folder}/", tmp_path)
    assert found.base == str(folder)
    assert found.shards == (Shard("tar", "A.TAR.GZ"), Shard("tar", "b.tar"))


def test_what_identifies_a_listing(tmp_path: Path) -> None:
    """Names, containers and the folder; not how many are in a shard."""
    touch(tmp_path / "a", "1.png", "2.png")
    touch(tmp_path / "b", "1.png", "2.png")
    touch(tmp_path / "c", "1.tar")
    first = inventory(tmp_path / "a", tmp_path).digest
    assert inventory(tmp_path / "a", tmp_path, 1).digest == first
    digests = {first, inventory(tmp_path / "b", tmp_path).digest, inventory(tmp_path / "c", tmp_path).digest}
    touch(tmp_path / "c", "2.tar")
    digests.add(inventory(tmp_path / "c", tmp_path).digest)
    (tmp_path / "a" / "2.png").rename(tmp_path / "a" / "3.png")
    digests.add(inventory(tmp_path / "a", tmp_path).digest)
    assert len(digests) == 5


@pytest.mark.parametrize("name", ["list.txt", "list.LST", "list.list"])
def test_a_list_keeps_its_order_and_its_odd_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"b.png\r\n\n a\xff.png \n/abs.png\nlast")
    found = inventory(tmp_path / name, tmp_path, 3)
    assert found.base == str(tmp_path)
    assert [(item.key, item.source) for item in items(found, tmp_path)] == [
        ("b.png", f"{tmp_path}/b.png"),
        (" a\\xff.png ", f"{tmp_path}/ a\udcff.png "),
        ("/abs.png", "/abs.png"),
        ("last", f"{tmp_path}/last"),
    ]


def test_the_encoding_of_a_list(tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("a.png\nb.png\n", encoding="utf-8-sig")
    assert [item.key for item in items(inventory(listing, tmp_path), tmp_path)] == ["a.png", "b.png"]
    for data, line in ((b"a.png\nb\0c.png\nd.png\n", 2), ("a.png\nb.png\n".encode("utf-16"), 1)):
        listing.write_bytes(data)
        with pytest.raises(
            InputError, match=rf"line {line} of '.*list.txt' has a zero byte, .*in UTF-8 \(a list in UTF-16"
        ):
            inventory(listing, tmp_path)


def test_one_image_is_an_input(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    found = inventory(tmp_path / "a.png", tmp_path)
    assert (found.base, found.shards) == (str(tmp_path), (Shard("images", "", 0, 1),))
    assert sources([read_item(item) for item in items(found, tmp_path)]) == [("a.png", b"")]


@pytest.mark.parametrize(("name", "kind"), [("empty", "holds"), ("*.none", "names")])
def test_an_input_without_images_says_what_was_looked_for(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"' {kind} no image: looked for \.bmp, .*\.webp, in subfolders too$"):
        inventory(tmp_path / name, tmp_path)


def test_an_input_of_files_in_subfolders_says_how_to_name_them(tmp_path: Path) -> None:
    touch(tmp_path, "year=1/.a.tar", "year=1/b.tar", "year=1/c.tar")
    one = r"in subfolders too; year=1/[bc]\.tar is below it: name such files by a pattern, '[^;]*/\*\*/\*'$"
    with pytest.raises(InputError, match=one):
        inventory(tmp_path, tmp_path)
    shards = tuple(Shard("tar", f"{tmp_path}/year=1/{name}.tar") for name in "bc")
    assert inventory(tmp_path / "**" / "*", tmp_path).shards == shards


def test_members_of_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_IMAGE_BYTES", 6)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in {"x/b.png": b"12345", "a.PNG": b"", "x/.c.png": b"1", "large.jpg": b"1234567"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, kind in (("folder.png", tarfile.DIRTYPE), ("pipe.png", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("last.gif")
        info.size = 6
        archive.addfile(info, io.BytesIO(b"123456"))
    found = inventory(tmp_path / "a.tar", tmp_path)
    assert sources(items(found, tmp_path)) == [
        ("a.tar/x/b.png", b"12345"),
        ("a.tar/a.PNG", b""),
        ("a.tar/large.jpg", "7 bytes or more: more than the 6 that an image may have"),
        ("a.tar/pipe.png", "not a regular file"),
        ("a.tar/last.gif", b"123456"),
    ]


def test_a_file_that_is_gone_is_told_from_one_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar" * 200)
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "b.parquet")
    given = [Shard("tar", "a.tar"), Shard("tar", "gone.tar"), Shard("parquet", "gone.parquet", 0, 2)]
    found = [item for shard in given for item in read_shard(shard, str(tmp_path), tmp_path / "list")]
    assert [(item.key, type(item.source), item.uncounted) for item in found] == [
        ("a.tar", ImageError, True),
        ("gone.tar", stores.Gone, True),
        ("gone.parquet/0000000", stores.Gone, False),
        ("gone.parquet/0000001", stores.Gone, False),
    ]
    assert str(found[0].source).startswith("cannot read the tar file to its end, what follows was not predicted: ")


def test_versions_are_of_the_file_and_taken_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stop ends what a store is asked for."""
    asked: list[tuple[Any, ...]] = []

    def recorded(name: str, result: Callable[[], Any]) -> None:
        def record(*given: Any, found: bool = False) -> Any:
            asked.append((name, *given, *(["found"] if found else [])))
            return result()

        monkeypatch.setattr(stores, name, record)

    recorded("version_of", lambda: "5-1")
    recorded("read_bytes", lambda: b"x")
    recorded("open_stream", io.BytesIO)
    stopped = threading.Event()
    read = Item("a.png", b"x", version="5-1")
    assert read_item(Item("a.png", "/in/a.png"), versions=True, stopped=stopped) == read
    row = Item("a.png", "/in/a.png", version="its row's")
    assert read_item(row, versions=True, single=False, stopped=stopped) == row._replace(source=b"x")
    assert read_item(Item("a.png", "/in/a.png"), found=True, stopped=stopped) == read._replace(version=None)
    reads = [("read_bytes", "/in/a.png", stopped)]
    assert asked == [("version_of", "/in/a.png", stopped), *reads, *reads, (*reads[0], "found")]
    asked.clear()
    for versions in (True, False):
        (error,) = read_shard(Shard("tar", "a.tar"), "/in", tmp_path, versions=versions, stopped=stopped)
        assert error.version == ("5-1" if versions else None)
    opened = ("open_stream", "/in/a.tar", stopped)
    assert asked == [("version_of", "/in/a.tar", stopped), opened, opened]


@pytest.mark.parametrize("name", ["a.png", "list.txt", "*.png", ""])
def test_an_input_that_is_listed_again_is_listed_with_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    touch(tmp_path / "in", "a.png")
    (tmp_path / "in" / "list.txt").write_text("a.png\n")
    asked: list[str] = []
    monkeypatch.setattr(stores, "version_of", lambda location, stopped=None: asked.append(location))
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        list_input(f"{tmp_path}/in/{name}", ledger, TableColumns())
        assert asked == []
        list_input(f"{tmp_path}/in/{name}", ledger, TableColumns(), again=True)
    assert asked == [f"{tmp_path}/in/a.png"]


@pytest.mark.parametrize(
    ("source", "named", "base"),
    [
        ("/in/a", "folder", "/in/a"),
        ("/in/a.png", "image", "/in"),
        ("/a.png", "image", "/"),
        ("a.png", "image", ""),
        ("memory://a.tar", "image", ""),
        ("s3://bucket/in/list.txt", "list", "s3://bucket/in"),
        ("/in/*.png", "pattern", ""),
        ("https://token@h/in/*.png", "pattern", "https://token@h"),
    ],
)
def test_what_names_are_relative_to(source: str, named: Any, base: str) -> None:
    assert base_of(source, named) == base


def test_members_of_one_name_have_a_path_each(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, size in (("b.png", 1), ("c.png", 2), ("b.png", 3), ("b.png", 4)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    found = inventory(tmp_path / "a.tar", tmp_path)
    assert sources(items(found, tmp_path)) == [
        ("a.tar/b.png", bytes(1)),
        ("a.tar/c.png", bytes(2)),
        ("a.tar/b.png/2", bytes(3)),
        ("a.tar/b.png/3", bytes(4)),
    ]


def test_row_groups_of_a_parquet_file(tmp_path: Path) -> None:
    data = [b"%d" % index for index in range(150)]
    pq.write_table(pa.table({"x": data}), tmp_path / "a.parquet", row_group_size=70)
    found = inventory(tmp_path / "a.parquet", tmp_path)
    assert found.shards == tuple(
        Shard("parquet", "a.parquet", start, count) for start, count in ((0, 70), (70, 70), (140, 10))
    )
    assert sources(items(found, tmp_path)) == [(f"a.parquet/{row:07d}", data[row]) for row in range(150)]


def test_values_of_a_parquet_file(tmp_path: Path) -> None:
    values = [
        {"bytes": b"1", "path": "ignored.png"},
        {"bytes": None, "path": "beside.png"},
        {"bytes": None, "path": None},
        {"bytes": b"", "path": "ignored.png"},
        {"bytes": None, "path": "/abs.png"},
    ]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"image": values}), tmp_path / "in" / "a.parquet")
    found = items(inventory(tmp_path / "in" / "a.parquet", tmp_path), tmp_path)
    assert [source for _, source in sources(found)] == [
        b"1",
        f"{tmp_path}/in/beside.png",
        "not an image: empty",
        "not an image: empty",
        "/abs.png",
    ]


@pytest.mark.parametrize(
    ("columns", "given", "taken"),
    [
        (["photo", "label"], None, "photo"),
        (["other", "png", "img"], None, "img"),
        (["bytes", "image"], None, "image"),
        (["bytes", "image"], "bytes", "bytes"),
        (["a", "b"], "b", "b"),
        (["a", "b"], None, None),
        (["a"], "b", None),
        (["label"], None, None),
        (["label", "a"], "label", None),
        (["struct", "a"], None, "a"),
        (["struct"], None, None),
    ],
)
def test_the_column_of_the_images(tmp_path: Path, columns: list[str], given: str | None, taken: str | None) -> None:
    """Every column but `label` and `struct` holds bytes: its own name."""
    others: dict[str, list[Any]] = {"label": [1], "struct": [{"bytes": "a text", "path": 1}]}
    table = {name: others.get(name, [name.encode()]) for name in columns}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    if taken is not None:
        found = inventory(tmp_path / "a.parquet", tmp_path, column=given)
        assert sources(items(found, tmp_path, given)) == [("a.parquet/0000000", taken.encode())]
        return
    holding = ", ".join(name for name in columns if name not in others) or "none"
    asked = "expected a single one, or one named image, img, jpg, png, webp, bytes; name it with --image-column"
    asked = f"expected one of these, and --image-column is '{given}'" if given else asked
    expected = f"a.parquet has the columns {', '.join(columns)}, of which {holding} may hold images: {asked}"
    with pytest.raises(InputError) as raised:
        inventory(tmp_path / "a.parquet", tmp_path, column=given)
    assert str(raised.value) == expected


def test_one_table_without_images_among_others_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"label": [1]}), folder / "a.parquet")
    with pytest.raises(InputError, match=r"^a\.parquet has the columns label, of which none may hold images"):
        inventory(folder, tmp_path)
    pq.write_table(pa.table({"image": [b"x"]}), folder / "b.parquet")
    (key, reason), image = sources(items(inventory(folder, tmp_path), tmp_path))
    assert (key, image) == ("a.parquet", ("b.parquet/0000000", b"x"))
    assert reason.startswith("a.parquet has the columns label, of which none may hold images")


def test_a_parquet_file_without_rows_gives_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), tmp_path / "a.parquet")
    assert list(read_shard(Shard("parquet", "a.parquet"), str(tmp_path), tmp_path / "list")) == []


@pytest.mark.parametrize("source", ["a.parquet", "."])
def test_an_input_of_parquet_files_without_row_groups_says_so(tmp_path: Path, source: str) -> None:
    """As Polars and DuckDB write a table without rows."""
    pq.ParquetWriter(tmp_path / "a.parquet", pa.schema({"image": pa.binary()})).close()
    with pytest.raises(InputError, match=r"' has no images: none of its Parquet files, such as a\.parquet, has a row$"):
        inventory(tmp_path / source, tmp_path)


def test_a_row_group_that_is_damaged_ends_with_the_reason(tmp_path: Path) -> None:
    rows = [os.urandom(200) for _ in range(80)]
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet", row_group_size=40, use_dictionary=False)
    found = inventory(tmp_path / "a.parquet", tmp_path)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    start = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    (tmp_path / "a.parquet").write_bytes(data)
    listed = sources(items(found, tmp_path))
    assert listed[:40] == [(f"a.parquet/{row:07d}", rows[row]) for row in range(40)]
    assert [key for key, _ in listed[40:]] == [f"a.parquet/{row:07d}" for row in range(40, 80)]
    assert {str(error).startswith("cannot read the Parquet file beyond row 40: ") for _, error in listed[40:]} == {True}


def test_no_byte_of_a_table_loses_a_row_or_ends_the_run(tmp_path: Path) -> None:
    """Whichever is changed after the listing or before: names and keys that are not UTF-8, rows that end too early."""
    path, given = tmp_path / "a.parquet", TableColumns(key="id")
    table = pa.table({"image": [{"bytes": None, "path": f"{i}ä.png"} for i in range(6)], "id": list("abcdeü")})
    pq.write_table(table, path, row_group_size=4, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    shards = listed(str(path), tmp_path / "list", 100, given).shards
    for place in range(0, len(whole), 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        for shard in shards:
            assert len(list(read_shard(shard, str(tmp_path), tmp_path / "list", given))) == shard.count, place
        try:
            found = listed(str(path), tmp_path / "list", 100, given)
        except InputError:
            continue
        for shard in found.shards:
            list(read_shard(shard, str(tmp_path), tmp_path / "list", given))


def test_a_folder_whose_name_is_not_utf8_is_listed(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    touch(folder, "1.png", "2.tar")
    found = inventory(folder, tmp_path)
    names = f"{hashlib.sha256(b'1.png/').hexdigest()} {tmp_path}/\\udcff []"
    assert found.digest == hashlib.sha256(names.encode()).hexdigest()


@pytest.mark.parametrize("name", ["X", "X/", "X//"])
def test_a_remote_folder_without_images_gives_its_containers(tmp_path: Path, name: str) -> None:
    memory = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}/{name.rstrip('/')}"
    for file in ("b.tar", "A.TGZ", "deep/c.tar", "notes.txt"):
        memory.pipe(f"{folder}/{file}", b"")
    found = inventory(f"memory:/{folder}{name[len(name.rstrip('/')) :]}", tmp_path)
    assert found.shards == (Shard("tar", "A.TGZ"), Shard("tar", "b.tar"))


def test_versions_wait_for_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the listing is interrupted while servers do not answer."""
    given: list[threading.Event] = []

    def version(location: str, stopped: threading.Event) -> str:
        given.append(stopped)
        return "first" if location == "0" else str(stopped.wait(30))

    monkeypatch.setattr(stores, "version_of", version)
    names = inventory_module._with_versions("", map(str, range(40)))
    assert next(names) == ("0", "first")
    names.close()
    assert given[0].is_set()


def test_a_source_names_images_files_that_hold_some_or_nothing_that_is_known(tmp_path: Path) -> None:
    beside: list[str] = []
    touch(tmp_path, "a.png", "b.tar", "c.doc")
    named, names = named_images(f"{tmp_path}/a.png", beside.append)
    assert (named, list(names)) == ("image", ["a.png"])
    named, names = named_images(f"{tmp_path}/b.tar", beside.append)
    assert (named, list(names), beside) == ("image", [], ["b.tar"])
    memory = fsspec.filesystem("memory")
    memory.pipe("/lone.tar", b"")
    named, names = named_images("memory://lone.tar", beside.append)
    memory.rm("/lone.tar")
    assert (named, list(names), beside) == ("image", [], ["b.tar", "memory://lone.tar"])  # it has no folder
    with pytest.raises(InputError, match=r"c\.doc' is not a known kind of input: expected a folder, an image"):
        named_images(f"{tmp_path}/c.doc", beside.append)


def test_a_list_may_be_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "list.txt"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a.png\nb/c.png\n",))
    writer.start()
    named, names = named_images(str(pipe), lambda name: None)
    assert (named, list(names)) == ("list", ["a.png", "b/c.png"])
    writer.join(timeout=60)
    assert not writer.is_alive()
