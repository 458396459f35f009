"""The output of `vitx predict` as pandas, Polars, DuckDB and Spark read it: every column of every row the same.

    pip install pandas polars duckdb pytz pyspark        # Spark needs Java 17
    python benchmarks/predict/readers.py [--json FILE]

Two Parquet files with columns of their own (times, lists, structs, nulls; one file lacks some), one image unreadable,
go through predict with --logits, --embeddings, --attention and --incremental. Each reader opens the folder of parts by
its defaults; names and all values are compared with those that pyarrow reads. Exit code 1 where one differs.
"""

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import colour_image, png, with_attention, with_embedding, write_bundle
from support.targets import all_hold, command_line, report_header, save_report
from vitx.predict import PREDICTIONS, predict
from vitx.predict.options import PredictOptions
from vitx.runtimes import load_session

ROWS = 300
Table = list[dict[str, Any]]


def main() -> None:
    parser = command_line(__doc__)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = predicted(Path(name)) / PREDICTIONS
        expected = pq.read_table(folder).to_pylist()
        report = report_header() | {"rows": len(expected), "columns": list(expected[0])}
        for reader, read in READERS.items():
            found = read(folder)
            difference = first_difference(found, expected)
            report[f"{reader} {version(reader)}"] = {"holds": not difference}
            print(f"{reader:8} {version(reader):10} {len(found)} rows, {difference or 'equal'}", flush=True)
    save_report(report, args.json)
    sys.exit(not all_hold(report))


def first_difference(found: Table, expected: Table) -> str:
    """Empty when every row has the same names and values, in any order of rows."""
    if len(found) != len(expected):
        return f"not {len(expected)} rows"
    for row, wanted in zip(*(sorted_rows([plain(row) for row in rows]) for rows in (found, expected)), strict=True):
        if names := row.keys() ^ wanted.keys():
            return f"columns of one alone: {', '.join(sorted(names))}"
        for name, want in wanted.items():
            if row[name] != want:
                return f"{name}: {row[name]!r} is not {want!r}"
    return ""


def predicted(folder: Path) -> Path:
    """The output folder of a prediction with every kind of column."""
    bundle = with_attention(with_embedding(write_bundle(folder / "tiny.vitx")))
    (folder / "in").mkdir()
    rng = np.random.default_rng(0)
    images = [png(colour_image(index % 4, rng)) for index in range(ROWS)]
    images[7] = b"no image"
    whole = {
        "image": images,
        "taken": [datetime(2026, 1, 1, 0, 0, index % 60, tzinfo=UTC) for index in range(ROWS)],
        "tags": [None if index % 5 == 0 else ["a", "ö"][: index % 3] for index in range(ROWS)],
        "camera": [{"maker": "x", "lens": float(index)} for index in range(ROWS)],
        "weight": [None if index % 3 == 0 else index / 4 for index in range(ROWS)],
    }
    pq.write_table(pa.table(whole).slice(0, 200), folder / "in" / "a.parquet", row_group_size=64)
    pq.write_table(pa.table(whole).slice(200).select(["image", "weight"]), folder / "in" / "b.parquet")
    options = PredictOptions(
        logits=True, embeddings=True, attention=True, incremental=True, allow_uncertified=True, decode_threads=1
    )
    session = load_session(bundle, device="cpu", threads=1, outputs=options.outputs)
    predict(bundle, session, folder / "in", folder / "out", options, quiet=True)
    return folder / "out"


def plain(value: Any) -> Any:
    """Of a reader's value the one that Python has: lists, dictionaries, numbers, None."""
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, datetime):
        return None if value != value else value.timestamp()  # pandas' NaT
    if isinstance(value, np.generic):
        value = value.item()
    return None if value != value else value  # and its NaN


def sorted_rows(rows: Table) -> Table:
    return sorted(rows, key=lambda row: str(row.get("path")))


def with_pandas(folder: Path) -> Table:
    import pandas

    return list(pandas.read_parquet(folder).to_dict("records"))


def with_polars(folder: Path) -> Table:
    import polars

    return list(polars.read_parquet(folder / "*.parquet").to_dicts())


def with_duckdb(folder: Path) -> Table:
    import duckdb

    found = duckdb.sql(f"SELECT * FROM '{folder}/*.parquet'")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def with_spark(folder: Path) -> Table:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        return [row.asDict() for row in session.read.parquet(str(folder)).collect()]
    finally:
        session.stop()


READERS: dict[str, Callable[[Path], Table]] = {
    "pandas": with_pandas,
    "polars": with_polars,
    "duckdb": with_duckdb,
    "pyspark": with_spark,
}

if __name__ == "__main__":
    main()
