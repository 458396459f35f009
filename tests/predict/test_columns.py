"""Columns of Parquet files: keys of the user's own, and what goes on to the output."""

import datetime
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bundle_fixture import NumpySession, colour_image, listed, png
from cli_fixture import Vitx
from vitx.core.bundle import Bundle
from vitx.core.errors import InputError
from vitx.predict import PREDICTIONS, PredictionSummary, predict
from vitx.predict.inputs import tables
from vitx.predict.inputs.tables import TableColumns, read_rows
from vitx.predict.ledger import Shard
from vitx.predict.options import PredictOptions
from vitx.predict.outputs import parts

IMAGES = [png(colour_image(index % 4, np.random.default_rng(index))) for index in range(6)]
OURS = ["path", "class", "class_index", "score", "top_k_classes", "top_k_scores", "error"]


def run(bundle: Bundle, source: Path | str, out: Path, **options: Any) -> PredictionSummary:
    given = PredictOptions(**{"decode_threads": 1, "batch_size": 2} | options)
    return predict(bundle, NumpySession(), str(source), out, given, quiet=True)


def table(**columns: Any) -> Any:
    return pa.table({"image": pa.array(IMAGES, pa.binary())} | columns)


def output(out: Path) -> Any:
    return pq.read_table(out / PREDICTIONS)


def test_columns_go_on_with_their_types(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested ones too, over several row groups of the input and of the output."""
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    columns = {
        "label": pa.array([0, 1, None, 3, 4, 5], pa.int16()),
        "who": pa.array([{"name": "ö", "tags": ["a", None]}, None, *[{"name": None, "tags": []}] * 4]),
        "boxes": pa.array([[[1, 2]], [], None, [[3]], [[], [4, 5]], [None]], pa.list_(pa.list_(pa.int8()))),
        "kind": pa.array(["x", "y", "x", None, "z", "z"]).dictionary_encode(),
        "map": pa.array([[("k", 1)], [], None, [], [], [("l", 2), ("m", 3)]], pa.map_(pa.string(), pa.int64())),
        "when": pa.array([when] * 6, pa.timestamp("ns", "UTC")),
        "none": pa.nulls(6),
    }
    pq.write_table(table(**columns), tmp_path / "a.parquet", row_group_size=4)
    monkeypatch.setattr(parts, "ROW_GROUP", 3)
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")
    found = output(tmp_path / "out")
    assert found.schema.names == [*OURS, *columns]
    for name, values in columns.items():
        assert found[name].type == values.type, name
        assert found[name].to_pylist() == values.to_pylist(), name
    for part in (tmp_path / "out" / PREDICTIONS).iterdir():
        assert pq.read_schema(part).remove_metadata().equals(found.schema.remove_metadata())


def test_a_row_that_cannot_be_read_keeps_its_columns(tiny_bundle: Bundle, tmp_path: Path) -> None:
    broken = [b"no image" if index == 3 else data for index, data in enumerate(IMAGES)]
    pq.write_table(pa.table({"image": broken, "label": list(range(6))}), tmp_path / "a.parquet")
    assert run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out").errors == 1
    found = output(tmp_path / "out").to_pylist()
    assert [row["label"] for row in found] == list(range(6))
    assert [row["label"] for row in found if row["error"]] == [3]


def test_bytes_go_on_only_if_they_are_named(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(mask=IMAGES[::-1], label=list(range(6))), tmp_path / "a.parquet")
    for given, expected in {None: ["label"], "": [], "label": ["label"], "mask, image": ["image", "mask"]}.items():
        out = tmp_path / f"out-{given}"
        monkeypatch.setattr(parts, "COPIED_BYTES", 2 * len(IMAGES[0]))
        run(tiny_bundle, tmp_path / "a.parquet", out, columns=given)
        assert output(out).schema.names == [*OURS, *expected]
    assert output(out)["image"].to_pylist() == IMAGES
    assert output(out)["mask"].to_pylist() == IMAGES[::-1]
    (part,) = (out / PREDICTIONS).iterdir()
    assert pq.read_metadata(part).num_row_groups == 3


@pytest.mark.parametrize("values", [list("fedcba"), [6, 5, 4, 3, 2, -1]])
def test_a_column_of_keys(tiny_bundle: Bundle, tmp_path: Path, values: list[Any]) -> None:
    pq.write_table(table(id=values), tmp_path / "a.parquet", row_group_size=4)
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id")
    found = output(tmp_path / "out")
    assert found["path"].to_pylist() == list(map(str, values))
    assert found["id"].to_pylist() == values


VIEWS = pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())])


@pytest.mark.parametrize(
    ("images", "keys"),
    [
        (pa.array(IMAGES, pa.binary_view()), pa.array(list("fedcba"), pa.string_view())),
        (pa.array(IMAGES).dictionary_encode(), pa.array(list("fedcba")).dictionary_encode()),
        (pa.array([{"bytes": data} for data in IMAGES], VIEWS), pa.array(list("fedcba"), pa.large_string())),
        (pa.array(IMAGES, pa.large_binary()), pa.DictionaryArray.from_arrays(range(6), list("fedcba"))),
    ],
    ids=lambda values: str(values.type),
)
def test_images_and_keys_in_every_type_of_bytes_and_text(
    tiny_bundle: Bundle, tmp_path: Path, images: Any, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views, and dictionaries, as pandas' categories are."""
    pq.write_table(table(), tmp_path / "plain.parquet")
    run(tiny_bundle, tmp_path / "plain.parquet", tmp_path / "plain")
    expected = output(tmp_path / "plain")["class"].to_pylist()
    given = pa.table({"image": images, "id": keys})
    pq.write_table(given, tmp_path / "a.parquet")  # in one group: pyarrow cannot slice a struct of views
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "default", key="id")
    assert output(tmp_path / "default").schema.names == [*OURS, "id"]  # bytes go on only if they are named
    monkeypatch.setattr(parts, "ROW_GROUP", 3)
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id", columns="id,image")
    found = output(tmp_path / "out")
    assert found["path"].to_pylist() == found["id"].to_pylist() == list("fedcba")
    assert found["class"].to_pylist() == expected
    assert found["image"].to_pylist() == given["image"].to_pylist()
    # Views go on as what they view: pyarrow writes no part of a struct of views, as --retry-errors has to.
    assert found.select(["image", "id"]).schema.types == [tables._nullable(one.type) for one in (images, keys)]
    assert "view" not in str(found.schema)


VIEW, NEEDED = pa.string_view(), pa.struct([pa.field("x", pa.int32(), nullable=False)])


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.list_(VIEW), ["a", None], pa.list_(pa.string())),
        (pa.large_list(pa.list_(VIEW)), [["a"]], pa.large_list(pa.list_(pa.string()))),
        (pa.list_(VIEW, 2), ["a", "b"], pa.list_(pa.string(), 2)),
        (pa.map_(VIEW, VIEW), [("a", "b")], pa.map_(pa.string(), pa.string())),
        (pa.struct([("x", pa.list_(VIEW))]), {"x": ["a"]}, pa.struct([("x", pa.list_(pa.string()))])),
        (pa.list_(NEEDED), [{"x": 1}], pa.list_(NEEDED)),  # a row without a value has no list
    ],
    ids=str,
)
def test_views_in_lists_go_on_as_what_they_view(
    tiny_bundle: Bundle, tmp_path: Path, kind: Any, value: Any, expected: Any
) -> None:
    pq.write_table(table(of=pa.array([value, None] * 3, kind)), tmp_path / "a.parquet")
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")
    found = output(tmp_path / "out")["of"]
    assert (found.type, found.to_pylist()) == (expected, [value, None] * 3)


def test_a_column_of_keys_may_have_the_name_of_ours(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(table(path=list("abcdef"), label=list(range(6))), tmp_path / "a.parquet")
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="path")
    assert output(tmp_path / "out").schema.names == [*OURS, "label"]
    assert output(tmp_path / "out")["path"].to_pylist() == list("abcdef")


def test_keys_with_backslashes_are_as_they_were(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Names with a \\xNN are escaped, so that no two are one `path`: keys have no bytes that are not UTF-8."""
    keys = ["D:\\xae\\1.png", "\\xff", "\\\\xff", "a\nb", "ö\\x00", "\\"]
    images = [b"", *IMAGES[1:]]
    for data in (images, IMAGES):
        pq.write_table(pa.table({"image": pa.array(data, pa.binary()), "id": keys}), tmp_path / "a.parquet")
        found = run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id", retry_errors=data is IMAGES)
        assert (found.errors, found.images_here) == ((0, 6) if data is IMAGES else (1, 6))
        assert output(tmp_path / "out")["path"].to_pylist() == keys


def test_the_row_of_a_name_that_is_not_utf8_is_kept(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source, name = tmp_path / "in", os.fsdecode(b"\xff\\.png")
    source.mkdir()
    for first, second in ((IMAGES[0], b""), (b"damaged since", IMAGES[1])):
        (source / name).write_bytes(first)
        (source / "b.png").write_bytes(second)
        found = run(tiny_bundle, source, tmp_path / "out", retry_errors=second != b"")
        assert found.errors == (0 if second else 1)
    assert output(tmp_path / "out")["path"].to_pylist() == ["b.png", "\\xff\\\\.png"]


@pytest.mark.parametrize("name", ["path", "Class", "ERROR", "logits"])
def test_a_name_that_the_output_has_is_refused(tiny_bundle: Bundle, tmp_path: Path, name: str) -> None:
    pq.write_table(table(**{"label": [0] * 6, name: [0] * 6}), tmp_path / "a.parquet")
    expected = (
        f"a.parquet has a column '{name}', as the output has: rename it, or name the columns to copy without it, such "
        "as --columns 'label'"
    )
    with pytest.raises(InputError) as raised:
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", logits=True)
    assert str(raised.value) == expected
    assert not (tmp_path / "out").exists()
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", logits=True, columns="label")
    assert output(tmp_path / "out").schema.names == [*OURS, "logits", "label"]


def test_what_was_not_asked_for_is_no_name_of_ours(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(table(logits=list(range(6))), tmp_path / "a.parquet")
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")
    assert output(tmp_path / "out")["logits"].to_pylist() == list(range(6))


@pytest.mark.parametrize("named", [None, "image"])
def test_two_columns_of_images_of_one_name_are_refused(tiny_bundle: Bundle, tmp_path: Path, named: str | None) -> None:
    images, numbers = pa.array([b"a"]), pa.array([1])
    for second in (images, numbers):
        pq.write_table(pa.Table.from_arrays([images, second], ["image", "image"]), tmp_path / "a.parquet")
        with pytest.raises(InputError, match="the columns image, image: expected one named 'image'; rename"):
            run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", image_column=named)


def test_names_that_differ_in_case_alone_are_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """DuckDB and Spark take them for one, and gave null for all rows of the second file."""
    for file, name in (("a", "weight"), ("b", "Weight")):
        pq.write_table(table(**{name: [0] * 6}), tmp_path / f"{file}.parquet")
    with pytest.raises(
        InputError, match=r"^a column is 'Weight' in b\.parquet and 'weight' in a\.parquet, which readers"
    ):
        run(tiny_bundle, tmp_path, tmp_path / "out")
    pq.write_table(table(weight=[0] * 6, Weight=[0] * 6), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"^a\.parquet has a column 'weight', twice"):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")


def test_two_columns_of_one_name_are_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    twice = table(label=[0] * 6).append_column("label", [[1] * 6])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"^a\.parquet has a column 'label', twice: rename it"):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out")


def test_files_with_different_columns_are_one_table(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """What a file lacks is null, also in the rows of images that are of no table."""
    (tmp_path / "in").mkdir()
    pq.write_table(table(label=pa.nulls(6)), tmp_path / "in" / "a.parquet")
    pq.write_table(table(label=list(range(6)), split=["x"] * 6), tmp_path / "in" / "b.parquet")
    pq.write_table(table(label=pa.nulls(6)), tmp_path / "in" / "b2.parquet")
    (tmp_path / "in" / "c.png").write_bytes(IMAGES[0])
    run(tiny_bundle, tmp_path / "in" / "*", tmp_path / "out")
    for part in (tmp_path / "out" / PREDICTIONS).iterdir():
        assert {"label": pa.int64(), "split": pa.string()}.items() <= {
            field.name: field.type for field in pq.read_schema(part)
        }.items()
    found = output(tmp_path / "out")
    assert found["label"].to_pylist() == [None] * 7 + list(range(6)) + [None] * 6
    assert found["split"].to_pylist() == [None] * 7 + ["x"] * 6 + [None] * 6


REQUIRED = pa.struct([pa.field("lat", pa.float64(), nullable=False), pa.field("lon", pa.float64())])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (REQUIRED, {"lat": 1.0, "lon": None}),
        (pa.struct([pa.field("a", REQUIRED, nullable=False)]), {"a": {"lat": 1.0, "lon": 2.0}}),
        (pa.list_(pa.field("element", REQUIRED, nullable=False)), [{"lat": 1.0, "lon": 2.0}]),
        (pa.list_(pa.field("element", REQUIRED, nullable=False), 1), [{"lat": 1.0, "lon": 2.0}]),
        (pa.map_(pa.string(), pa.field("value", REQUIRED, nullable=False)), [("k", {"lat": 1.0, "lon": 2.0})]),
    ],
    ids=str,
)
def test_required_fields_are_null_in_rows_without_a_value(
    tiny_bundle: Bundle, tmp_path: Path, kind: Any, value: Any
) -> None:
    (tmp_path / "in").mkdir()
    options = {"incremental": True}
    for name, columns in {"a": {"gps": pa.array([value] * 6, kind)}, "b": {}}.items():
        pq.write_table(table(**columns), tmp_path / "in" / f"{name}.parquet", row_group_size=4)
        run(tiny_bundle, tmp_path / "in", tmp_path / "out", **options)
    pq.write_table(table(gps=pa.array([value] * 6, kind)), tmp_path / "in" / "c.parquet")
    broken = pa.table({"image": [b"", *IMAGES[1:]], "gps": pa.array([value] * 6, kind)})
    pq.write_table(broken, tmp_path / "in" / "d.parquet")
    run(tiny_bundle, tmp_path / "in", tmp_path / "out", **options)
    pq.write_table(table(gps=pa.array([value] * 6, kind)), tmp_path / "in" / "d.parquet")
    run(tiny_bundle, tmp_path / "in", tmp_path / "out", retry_errors=True, **options)
    found = sorted(output(tmp_path / "out").to_pylist(), key=lambda row: str(row["path"]))
    assert [row["gps"] for row in found] == [*[value] * 6, *[None] * 6, *[value] * 12]
    assert [row["error"] for row in found] == [None] * 24


def test_errors_beside_a_struct_of_views_are_tried_again(tiny_bundle: Bundle, tmp_path: Path) -> None:
    named = pa.array([{"path": name} for name in "abcdef"], pa.struct([("path", pa.string_view())]))
    for first in (b"", IMAGES[0]):
        pq.write_table(pa.table({"image": [first, *IMAGES[1:]], "of": named}), tmp_path / "a.parquet")
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", retry_errors=True, max_error_rate=1.0)
    found = output(tmp_path / "out")
    assert (found["error"].null_count, found["of"].to_pylist()) == (6, named.to_pylist())


def test_a_field_that_one_file_requires_is_of_one_type_with_the_others(tiny_bundle: Bundle, tmp_path: Path) -> None:
    free = pa.struct([one.with_nullable(True) for one in REQUIRED])
    for name, kind in {"a": REQUIRED, "b": free}.items():
        pq.write_table(table(gps=pa.array([{"lat": 1.0}] * 6, kind)), tmp_path / f"{name}.parquet")
    run(tiny_bundle, tmp_path / "*.parquet", tmp_path / "out")
    assert output(tmp_path / "out")["gps"].type == free


def test_rows_of_damaged_pages_are_null_where_fields_are_required(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(
        table(gps=pa.array([{"lat": 1.0}] * 6, REQUIRED)),
        tmp_path / "a.parquet",
        row_group_size=3,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = (tmp_path / "a.parquet").read_bytes()
    at = content.rindex(IMAGES[5])
    (tmp_path / "a.parquet").write_bytes(content[:at] + bytes(8) + content[at + 8 :])
    assert run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out").errors == 3
    assert output(tmp_path / "out")["gps"].to_pylist() == [{"lat": 1.0, "lon": None}] * 3 + [None] * 3


def test_a_column_of_two_types_is_refused_with_both_files(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(table(label=[0] * 6), tmp_path / "a.parquet")
    pq.write_table(table(label=["x"] * 6), tmp_path / "b.parquet")
    message = (
        rf"^the column 'label' is string in {tmp_path}/b\.parquet and int64 in {tmp_path}/a\.parquet: expected one "
        r"type; leave it out by naming the columns to copy with --columns$"
    )
    with pytest.raises(InputError, match=message):
        run(tiny_bundle, tmp_path / "*.parquet", tmp_path / "out")
    assert run(tiny_bundle, tmp_path / "*.parquet", tmp_path / "out", columns="").images == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "nosuch"}, r"^a\.parquet has the columns image, id, x: expected one named 'nosuch' of strings or in"),
        ({"key": "x"}, "expected one named 'x' of strings or integers, as --key asks$"),
        ({"columns": "id,nosuch"}, "^--columns names 'nosuch', which no Parquet file of the input has$"),
    ],
)
def test_a_column_that_is_not_there_or_no_key_is_refused(
    tiny_bundle: Bundle, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    pq.write_table(table(id=list("abcdef"), x=[0.5] * 6), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", **options)


def test_keys_are_of_tables_alone(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGES[0])
    with pytest.raises(InputError, match=r"^--key id is of Parquet files, and '.*a.png' has others too, or a"):
        run(tiny_bundle, tmp_path / "a.png", tmp_path / "out", key="id")


@pytest.mark.parametrize(
    ("first", "second", "key", "places"),
    [
        ("abcdef", "ghijka", '"a"', ("row 0 of {}/a.parquet", "row 5 of {}/b.parquet")),
        ("abc\x00ef", "ghij\x00k", r'"\u0000"', ("row 3 of {}/a.parquet", "row 4 of {}/b.parquet")),
        ([1, 2, 3, 4, 5, 1], [7, 8, 9, 10, 11, 12], '"1"', ("row 0 of {}/a.parquet", "row 5 of {}/a.parquet")),
    ],
)
def test_a_key_that_occurs_twice_is_refused_with_both_rows(
    tiny_bundle: Bundle,
    tmp_path: Path,
    vitx: Vitx,
    first: Any,
    second: Any,
    key: str,
    places: tuple[str, str],
) -> None:
    for name, values in (("a", first), ("b", second)):
        pq.write_table(table(id=list(values)), tmp_path / f"{name}.parquet", row_group_size=4)
    arguments = ("predict", tiny_bundle.path, tmp_path / "*.parquet", "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = vitx(*arguments, "--key", "id")
    one, other = (place.format(tmp_path) for place in places)
    assert (code, err.count("error: ")) == (2, 1)
    flat = " ".join(err.split())
    assert f"--key id: {key} is in {one} and in {other}: expected a column whose values are all different" in flat
    assert not (tmp_path / "out").exists()


def test_keys_of_a_file_whose_name_is_not_utf8(tiny_bundle: Bundle, tmp_path: Path) -> None:
    source, name = tmp_path / "in", os.fsdecode(b"\xff.parquet")
    source.mkdir()
    with (source / name).open("wb") as file:  # pyarrow takes no such name either
        pq.write_table(table(id=list("abcdef")), file)
    run(tiny_bundle, source, tmp_path / "out", key="id", incremental=True)
    assert output(tmp_path / "out")["path"].to_pylist() == list("abcdef")
    (source / name).rename(source / "b.parquet")
    twice = r'^--key id: "a" is in row 0 of b\.parquet and in row 0 of .* in the output, whose \\xff\.parquet is gone: '
    with pytest.raises(InputError, match=twice):
        run(tiny_bundle, source, tmp_path / "out", key="id", incremental=True)


def test_a_row_without_a_key_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(table(id=[*"abcd", None, "f"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"^--key id: row 4 of a\.parquet has none; expected one in every row$"):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id")


def test_keys_and_columns_are_the_same_for_all_processes_of_a_run(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pq.write_table(table(id=list("abcdef"), label=list(range(6))), tmp_path / "a.parquet")
    run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id", columns="label")
    assert run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id", columns="label").images == 6
    with pytest.raises(InputError, match="key was id, is None now"):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", columns="label")
    with pytest.raises(InputError, match=r"columns was \['label'\], is None now"):
        run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", key="id")


def test_a_part_that_is_made_again_has_the_same_columns(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """By a process that did not list the input, and in the rows that --retry-errors keeps."""
    columns = {"kind": pa.array(list("xyxyxy")).dictionary_encode(), "who": [{"a": [index]} for index in range(6)]}
    columns["tensor"] = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.float32).reshape(6, 2, 2))
    paths = [{"bytes": None, "path": f"{index}.png"} for index in range(6)]
    pq.write_table(pa.table({"image": paths} | columns), tmp_path / "a.parquet")
    for index, data in enumerate(IMAGES):
        (tmp_path / f"{index}.png").write_bytes(b"" if index in (1, 4) else data)
    assert run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out").errors == 2
    for index in (1, 4):
        (tmp_path / f"{index}.png").write_bytes(IMAGES[index])
    assert run(tiny_bundle, tmp_path / "a.parquet", tmp_path / "out", retry_errors=True).errors == 0
    found = output(tmp_path / "out")
    assert found["kind"].to_pylist() == list("xyxyxy")
    assert found["who"].to_pylist() == columns["who"]
    for name in ("kind", "tensor"):
        assert found[name].type == columns[name].type
    assert found["tensor"].to_pylist() == columns["tensor"].to_pylist()


def test_a_table_whose_columns_change_after_it_was_listed_gives_rows_with_the_reason(tmp_path: Path) -> None:
    from vitx.predict.inputs.inventory import read_shard

    pq.write_table(table(label=list(range(6))), tmp_path / "a.parquet")
    taken = listed(str(tmp_path / "a.parquet"), tmp_path / "list", 9)
    columns = TableColumns(schema=taken.schema)
    pq.write_table(table(label=list("abcdef")), tmp_path / "a.parquet")
    (shard,) = taken.shards
    items = list(read_shard(shard, taken.base, tmp_path / "list", columns))
    assert [item.key for item in items] == [f"a.parquet/{row:07d}" for row in range(6)]
    assert all("beyond row 0" in str(item.source) and item.copied is None for item in items)
    pq.write_table(table(), tmp_path / "a.parquet")
    items = list(read_shard(shard, taken.base, tmp_path / "list", columns))
    assert [item.source for item in items] == IMAGES
    assert [item.copied.to_pylist() for item in items] == [[{"label": None}]] * 6


def test_rows_that_are_missing_at_the_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow takes some damage for the end."""
    images = [b"%d" % index for index in range(150)]
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    shard = Shard("parquet", "a.parquet", 0, 150)
    assert [image for image, _, _ in read_rows(shard, str(tmp_path), TableColumns())] == images
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *given, **named: islice(whole(*given, **named), 2))
    rows = read_rows(shard, str(tmp_path), TableColumns())
    assert [image for image, _, _ in islice(rows, 128)] == images[:128]
    with pytest.raises(OSError, match=r"^22 rows too few at the end of the row group$"):
        next(rows)


def test_row_groups_that_are_not_all_rows_are_damage() -> None:
    def file(rows: int) -> Any:
        group = SimpleNamespace(num_rows=2)
        return SimpleNamespace(metadata=SimpleNamespace(num_rows=rows, num_row_groups=2, row_group=lambda _: group))

    assert tables._row_groups(file(4)) == [(0, 2), (2, 2)]
    with pytest.raises(OSError, match=r"^its row groups have 4 rows, and the file should have 5$"):
        tables._row_groups(file(5))
