"""Build the validity periods of satellite catalogs, on Spark's workers by ``mapInArrow``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.sda.registry.satcat import EFFECTIVE_COLUMNS, ENTRY_COLUMNS, build_validity_periods

_UTC = pl.Datetime("us", "UTC")
DATED_ENTRY_COLUMNS: dict[str, pl.DataType] = {
    "snapshot_id": pl.String(),
    **ENTRY_COLUMNS,
    "collected_at": _UTC,
}
"""Columns of an entry with its snapshot and the time of its collection."""

PERIOD_COLUMNS: dict[str, pl.DataType] = {
    "sat_no": pl.Int64(),
    **{name: ENTRY_COLUMNS[name] for name in EFFECTIVE_COLUMNS},
    "valid_from": _UTC,
    "valid_to": _UTC,
    "snapshot_id": pl.String(),
}
"""Columns of a validity period."""


def select_dated_entries(entries: DataFrame) -> DataFrame:
    """Return `DATED_ENTRY_COLUMNS`. Columns that a table of an earlier version lacks are null."""
    existing = {*entries.columns}
    return entries.select(
        *(
            (F.col(field.name) if field.name in existing else F.lit(None))
            .cast(field.dataType)
            .alias(field.name)
            for field in from_arrow_schema(arrow_schema(DATED_ENTRY_COLUMNS))
        )
    )


def build_periods(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Build the periods of all entries of a partition, for Spark's ``mapInArrow``.

    Input: `DATED_ENTRY_COLUMNS`, with all entries of an object in one partition. Output: `PERIOD_COLUMNS` of
    `build_validity_periods`.
    """
    filled_batches = [batch for batch in batches if batch.num_rows]
    if filled_batches:
        entries = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(filled_batches)))
        periods = build_validity_periods(
            entries.select(pl.col(name).cast(kind) for name, kind in DATED_ENTRY_COLUMNS.items())
        )
        table = periods.select(*PERIOD_COLUMNS).to_arrow(compat_level=pl.CompatLevel.oldest())
        yield from table.cast(period_schema()).to_batches()


def period_schema() -> pa.Schema:
    """Return the Arrow schema of `PERIOD_COLUMNS`.

    Not a constant: Polars would start its threads while the code location is imported, and runs could not be
    forked from that process.
    """
    return arrow_schema(PERIOD_COLUMNS)


def arrow_schema(columns: Mapping[str, pl.DataType]) -> pa.Schema:
    """Return the Arrow types of columns. Spark expects strings, where Polars has large strings."""
    schema = pl.DataFrame(schema=columns).to_arrow(compat_level=pl.CompatLevel.oldest()).schema
    return pa.schema(
        [
            pa.field(field.name, pa.string() if pa.types.is_large_string(field.type) else field.type)
            for field in schema
        ]
    )
