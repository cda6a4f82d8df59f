"""Compute observations with plain Spark: the pipeline's functions without branches, checks and Dagster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster.sda.assets.registry import OBJECTS
from branchlake_dagster.sda.observations.envelope import build_observations, identify_measurements
from branchlake_dagster.sda.sensor_kinds.declaration import DecodeBytes, SensorKind

_NAMESPACE = "nessie.bench"
_RECORD_COLUMNS = (
    "value",
    "timestamp AS received_at",
    "partition AS topic_partition",
    "offset AS topic_offset",
    "sha2(value, 256) AS frame_digest",
)


def decode_by_plain_spark(
    session: SparkSession, landing: Path, offsets: Mapping[str, tuple[int, int]], kinds: Sequence[SensorKind]
) -> dict[str, DataFrame]:
    """Return the decoded records of landing files by source kind, with the columns of the raw tables.

    Records that cannot be decoded are left out.

    Args:
        session: The Spark session.
        landing: The landing folder.
        offsets: By source kind, the first offset and the offset after the last one. Other kinds are left out.
        kinds: The declarations of the kinds of sensor.
    """
    files = Landing(landing)
    frames = {}
    for kind in kinds:
        if kind.source_kind not in offsets:
            continue
        start, end = offsets[kind.source_kind]
        paths = [
            f"file://{file.path.absolute()}" for file in files.files_with_offsets(kind.topic, 0, start, end)
        ]
        records = session.read.parquet(*paths).where(F.col("offset").between(start, end - 1))
        selected = records.selectExpr(*_RECORD_COLUMNS)
        decoded = pa.schema(
            [
                *kind.decoded_columns(),
                ("received_at", pa.timestamp("us", "UTC")),
                ("topic_partition", pa.int32()),
                ("topic_offset", pa.int64()),
                ("frame_digest", pa.string()),
            ]
        )
        rows = selected.mapInArrow(_build_decoder(kind.decode), from_arrow_schema(decoded))
        frames[kind.source_kind] = rows.select(*kind.raw_columns)
    return frames


def time_plain_observations(
    session: SparkSession,
    landing: Path,
    offsets: Mapping[str, tuple[int, int]],
    kinds: Sequence[SensorKind],
    *,
    with_raw_tables: bool,
) -> tuple[float, int]:
    """Time the way from bytes to a table of observations. Return the seconds and the number of rows.

    Decoding, conversion to observations, rejection and the removal of duplicates use the pipeline's
    functions. Each table is written to `main` by one commit.

    Args:
        session: The Spark session, on `main`.
        landing: The landing folder.
        offsets: As for `decode_by_plain_spark`.
        kinds: The declarations of the kinds of sensor.
        with_raw_tables: Whether the decoded records are first written to tables and then read from them.
    """
    session.sql(f"CREATE NAMESPACE IF NOT EXISTS {_NAMESPACE}")
    began = time.perf_counter()
    raw = decode_by_plain_spark(session, landing, offsets, kinds)
    if with_raw_tables:
        raw = {name: _write(rows, f"raw_{name}") for name, rows in raw.items()}
    kinds = [kind for kind in kinds if kind.source_kind in raw]
    objects = session.table(".".join(("nessie", *OBJECTS.path)))
    observations = _write(
        build_observations(identify_measurements(raw, objects, kinds), data_mode="SIMULATED"), "observations"
    )
    elapsed_s = time.perf_counter() - began
    return elapsed_s, observations.count()


def _write(rows: DataFrame, name: str) -> DataFrame:
    table = f"{_NAMESPACE}.{name}"
    rows.writeTo(table).using("iceberg").createOrReplace()
    return rows.sparkSession.table(table)


def _build_decoder(decode: DecodeBytes) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def decode_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values, attributes = batch.column("value"), batch.drop_columns(["value"])
            rows, reasons = decode(values)
            columns = [*rows.columns, *attributes.columns]
            joined = pa.RecordBatch.from_arrays(columns, [*rows.schema.names, *attributes.schema.names])
            yield joined.filter(pc.is_null(reasons))

    return decode_batches
