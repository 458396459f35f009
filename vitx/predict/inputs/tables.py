"""Parquet files: which columns hold the images and the keys, which go on to the output, and the rows themselves."""

import base64
import itertools
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from vitx.core.console import counted
from vitx.core.errors import EnvironmentMissing, InputError, naming_extra
from vitx.core.files import escape_invalid_utf8
from vitx.core.preprocess import ImageError
from vitx.predict.inputs.remote import BlockReader, NotGiven
from vitx.predict.inputs.stores import join, open_stream
from vitx.predict.ledger import Shard

with naming_extra("serve"):
    import pyarrow as pa
    import pyarrow.parquet as pq
    import pyarrow.types as types

# If several columns may hold images, the first of these names is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp", "bytes")
# Rows that are in memory at once.
BATCH_ROWS = 64
# What a damaged Parquet file raises: names and strings that are not UTF-8 are found when they become Python's.
READ_ERRORS = (OSError, UnicodeDecodeError, pa.ArrowException)


@dataclass(frozen=True)
class TableColumns:
    """Which columns of Parquet files are used.

    image: None: told by type and name. key: of the rows' keys. copied: those that go on to the output; None: all but
    those that may hold images. taken: names that the output has itself. schema: a `pyarrow.Schema` of what goes on.
    """

    image: str | None = None
    key: str | None = None
    copied: tuple[str, ...] | None = None
    taken: tuple[str, ...] = ()
    schema: Any = None


def list_tables(
    base: str, names: Iterable[str], columns: TableColumns, *, again: bool = False
) -> tuple[list[Shard], Any, list[InputError]]:
    """The shards of tar and Parquet files, a `pyarrow.Schema` of the columns that go on to the output or None, and the
    errors of files whose columns are not clear. again: only the columns found before can go on.

    Raises InputError for a column that cannot go on to the output.
    """
    shards, refused = list[Shard](), list[InputError]()
    # By name: the type, and the file where it was found first.
    copied = {field.name: (field.type, "the output") for field in columns.schema or ()}
    for name in names:
        if not name.lower().endswith(".parquet"):
            shards.append(Shard("tar", name))
            continue
        try:
            with open_stream(join(base, name)) as file:
                parquet = pq.ParquetFile(file)
                schema, groups = parquet.schema_arrow, _row_groups(parquet)
                _image_column(schema, columns, name)
        except InputError as error:
            refused.append(error)
        except READ_ERRORS:
            pass  # reading it gives a row with the reason
        else:
            _copy(schema, name, columns, copied, again=again)
            # A file that has lost all its rows is there all the same.
            groups = groups or ([(0, 0)] if again else [])
            shards += (Shard("parquet", name, start, count) for start, count in groups)
            continue
        shards.append(Shard("parquet", name))
    if missing := [name for name in columns.copied or () if name not in copied]:
        raise InputError(f"--columns names '{missing[0]}', which no Parquet file of the input has")
    fields = [pa.field(name, kind) for name, (kind, _) in copied.items()]
    return shards, pa.schema(fields) if fields else None, refused


def _copy(schema: Any, name: str, columns: TableColumns, copied: dict[str, tuple[Any, str]], *, again: bool) -> None:
    """Add the columns of a file to those that go on."""
    asked, taken = columns.copied, columns.taken
    wanted = (one for one in schema if (not _may_hold_images(one.type) if asked is None else one.name in asked))
    fields = [one.with_type(_nullable(one.type)) for one in wanted]
    # DuckDB and Spark do not tell upper case from lower.
    lower = [one.lower() for one in schema.names]
    clear = [one.name for one in fields if one.name.lower() not in taken and lower.count(one.name.lower()) == 1]
    for field in fields:
        if field.name not in clear:
            if field.name == columns.key:
                continue  # it is in `path`
            why = "as the output has" if field.name.lower() in taken else "twice"
            raise InputError(
                f"{name} has a column '{field.name}', {why}: rename it, or name the columns to copy without it, "
                f"such as --columns '{','.join(clear)}'"
            )
        if again and field.name not in copied:
            raise InputError(
                f"{name} has a column '{field.name}', which the output does not have: choose another folder, or "
                "name the columns to copy with --columns from the first run on"
            )
        for other, (_, where) in copied.items():
            if other != field.name and other.lower() == field.name.lower():
                raise InputError(
                    f"a column is '{field.name}' in {name} and '{other}' in {where}, which readers take for one: "
                    "rename it, or name the columns to copy without it with --columns"
                )
        kind, where = copied.setdefault(field.name, (field.type, name))
        if types.is_null(kind):
            copied[field.name] = (field.type, name)
        elif kind != field.type and not types.is_null(field.type):
            raise InputError(
                f"the column '{field.name}' is {field.type} in {name} and {kind} in {where}: expected one type; "
                "leave it out by naming the columns to copy with --columns"
            )


def _nullable(kind: Any, *, optional: bool = True) -> Any:
    """The type; of a struct without required fields, which could not be null in rows without a value.

    And without Arrow's views, of which pyarrow writes no part of a struct. In Parquet they are the same. A list_view
    stays one: pyarrow makes no list of it. optional: false within a list, which is null where a row has no value.
    """
    within = optional and types.is_struct(kind)

    def inner(one: Any) -> Any:
        return one.with_type(_nullable(one.type, optional=within)).with_nullable(one.nullable or within)

    if types.is_struct(kind):
        return pa.struct(map(inner, kind))
    if types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    if types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def schema_to_text(schema: Any) -> str | None:
    return None if schema is None else base64.b64encode(schema.serialize().to_pybytes()).decode()


def schema_from_text(text: str | None) -> Any:
    return None if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def read_rows(
    shard: Shard, base: str, columns: TableColumns, stopped: threading.Event | None = None
) -> Iterator[tuple[str | bytes | ImageError, str | None, Any]]:
    """Yield image, key and `pyarrow.RecordBatch` of what goes on (each None without such a column) of each row.

    Raises one of `READ_ERRORS` at what cannot be read, InputError if its columns are not clear.
    """
    name, count = join(base, shard.location), shard.count
    with open_stream(name, stopped) as file:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)  # of the pages that have one
        schema = parquet.schema_arrow
        image = _image_column(schema, columns, shard.location)
        if count is None:  # it could not be read when it was listed
            known = {field.name: (field.type, "the output") for field in columns.schema or ()}
            _copy(schema, shard.location, columns, known, again=True)
        groups = [i for i, group in enumerate(_row_groups(parquet)) if count is None or group == (shard.start, count)]
        if not groups and count is not None:
            raise OSError(f"no row group of {count} rows begins there, as when the file was listed")
        copied = [] if columns.schema is None else [one for one in columns.schema.names if one in schema.names]
        left = sum(parquet.metadata.row_group(index).num_rows for index in groups)
        wanted = dict.fromkeys([image, *([] if columns.key is None else [columns.key]), *copied])
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(wanted)):
            if isinstance(file, BlockReader):
                file.require_unchanged()  # else rows may have the columns of two versions
            keys = [None] * len(batch) if columns.key is None else batch.column(columns.key).to_pylist()
            table = None if columns.schema is None else _as_listed(batch, columns.schema)
            for index, (value, key) in enumerate(zip(batch.column(image).to_pylist(), keys, strict=True)):
                row = None if table is None else table.slice(index, 1)
                yield _image(value, name.rpartition("/")[0]), None if key is None else str(key), row
            left -= len(batch)
        if left:  # pyarrow takes some damage for the end
            raise OSError(f"{counted(left, 'row')} too few at the end of the row group")


def _row_groups(parquet: Any) -> list[tuple[int, int | None]]:
    """The first row and the number of rows of each row group of a `pyarrow.parquet.ParquetFile`."""
    counts = [parquet.metadata.row_group(index).num_rows for index in range(parquet.metadata.num_row_groups)]
    if sum(counts) != parquet.metadata.num_rows:
        raise OSError(f"its row groups have {sum(counts)} rows, and the file should have {parquet.metadata.num_rows}")
    return list(zip(itertools.accumulate(counts, initial=0), counts, strict=False))


def refuse_equal_keys(base: str, shards: Iterable[Shard], column: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """Raise InputError for a key that two rows have, or a row without one. more: of further rows the key, and where."""
    with closing(sqlite3.connect("")) as database:  # a file without a name
        database.execute("CREATE TABLE row (key TEXT, place TEXT)")
        records = itertools.chain(_key_records(base, shards, column), more)
        # SQLite takes no name of a file that is not UTF-8.
        told = ((key, escape_invalid_utf8(place)) for key, place in records)
        database.executemany("INSERT INTO row VALUES (?, ?)", told)
        equal = "SELECT key, min(place), max(place) FROM row GROUP BY key HAVING count(*) > 1 LIMIT 1"
        for key, place, other in database.execute(equal):
            raise InputError(
                f"--key {column}: {json.dumps(key, ensure_ascii=False)} is in {place} and in {other}: expected a "
                "column whose values are all different"
            )


def _key_records(base: str, shards: Iterable[Shard], column: str) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(shard.location for shard in shards if shard.kind == "parquet"):
        try:
            with open_stream(join(base, name)) as file:
                parquet = pq.ParquetFile(file)
                batches = parquet.iter_batches(columns=[column]) if column in parquet.schema_arrow.names else ()
                keys = itertools.chain.from_iterable(batch.column(column).to_pylist() for batch in batches)
                for row, key in enumerate(keys):
                    if key is None:
                        raise InputError(f"--key {column}: row {row} of {name} has none; expected one in every row")
                    yield str(key), f"row {row} of {name}"
        except NotGiven as error:
            raise EnvironmentMissing(
                f"cannot read the column '{column}' of {name}: {error}; nothing was begun: run the same command again"
            ) from None
        except READ_ERRORS:
            continue  # it is damaged: the rows that cannot be read have no key


def _as_listed(batch: Any, schema: Any) -> Any:
    """The columns of `schema`; null are those that the file lacks."""
    there = batch.schema.names
    columns = [batch.column(one.name) if one.name in there else pa.nulls(len(batch), one.type) for one in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)  # which casts a column of nulls, or to `_nullable`


def _image(value: Any, folder: str) -> str | bytes | ImageError:
    """value: bytes, or Hugging Face's struct of bytes and path; without bytes the path counts, relative to `folder`."""
    if isinstance(value, dict):
        path = value.get("path")
        value = value["bytes"] if value["bytes"] is not None else isinstance(path, str) and path and join(folder, path)
    return value or ImageError("not an image: empty")


def _may_hold_images(kind: Any) -> bool:
    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and (types.is_null(kind[index].type) or _may_hold_images(kind[index].type))
    kind = _value_type(kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _value_type(kind: Any) -> Any:
    return kind.value_type if types.is_dictionary(kind) else kind


def _image_column(schema: Any, columns: TableColumns, location: str) -> str:
    """The name of the column of images. Raises InputError if there is no clear one, or none as `columns.key` asks."""
    has, given, key = f"{location} has the columns {', '.join(schema.names)}", columns.image, columns.key
    found = [field.name for field in schema if _may_hold_images(field.type)]
    preferred = found if len(found) == 1 else [name for name in IMAGE_COLUMNS if name in found]
    if given not in found and (given is not None or not preferred):
        some = ", ".join(found) or "none"
        asked = f"expected a single one, or one named {', '.join(IMAGE_COLUMNS)}; name it with --image-column"
        asked = asked if given is None else f"expected one of these, and --image-column is '{given}'"
        raise InputError(f"{has}, of which {some} may hold images: {asked}")
    kinds = [_value_type(field.type) for field in schema if field.name == key]
    of_keys = (types.is_string, types.is_large_string, types.is_string_view, types.is_integer)
    texts = [kind for kind in kinds if any(is_one(kind) for is_one in of_keys)]
    if key is not None and (len(kinds), len(texts)) != (1, 1):
        raise InputError(f"{has}: expected one named '{key}' of strings or integers, as --key asks")
    chosen = preferred[0] if given is None else given
    if schema.names.count(chosen) > 1:
        raise InputError(f"{has}: expected one named '{chosen}'; rename the others")
    return chosen
