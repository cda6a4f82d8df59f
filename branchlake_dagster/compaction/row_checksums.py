"""Checksums of the rows of data files, computed on Spark. They do not depend on the order of rows.

Each row is hashed with `xxhash64` over all columns. The hash also includes for each nullable column whether
it is null, because the function skips nulls. For each file, the hashes are combined by exclusive or, and by
sums of their lower and upper 32 bits. Checksums of several files can be added, so a partition's old and new
files can be compared although their number differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyiceberg.schema import Schema
from pyiceberg.types import ListType, MapType, NestedField, PrimitiveType, StructType

from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class RowChecksum:
    """The number of live rows, and the combined 64-bit hashes of the rows.

    `xor` is the exclusive or of the hashes, `low` and `high` are the sums of their lower and upper 32 bits.
    """

    rows: int = 0
    xor: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: Self) -> RowChecksum:
        return RowChecksum(
            self.rows + other.rows, self.xor ^ other.xor, self.low + other.low, self.high + other.high
        )


def checksum_files(
    session: SparkSession, key: ContentKey, schema: Schema, *, snapshot_id: int, predicate: str
) -> dict[str, RowChecksum]:
    """Return the checksum of each data file with live rows, by the file's path as in the manifests.

    Only the rows of the snapshot `snapshot_id` that match `predicate` (Spark's SQL) are read, with all
    columns. Delete files are applied.
    """
    statement = build_query(key, schema, snapshot_id=snapshot_id, predicate=predicate)
    return {
        row["file"]: RowChecksum(row["row_count"], row["hash_xor"], row["hash_low"], row["hash_high"])
        for row in session.sql(statement).collect()
    }


def build_query(key: ContentKey, schema: Schema, *, snapshot_id: int, predicate: str) -> str:
    """Build the SQL statement of `checksum_files`. Its columns are file, row_count and the three hashes."""
    terms = ", ".join(term for field in schema.fields for term in _hash_terms(field))
    return (
        "SELECT file, count(*) AS row_count, bit_xor(row_hash) AS hash_xor,"  # noqa: S608 - names are quoted
        " sum(row_hash & 4294967295) AS hash_low, sum(shiftrightunsigned(row_hash, 32)) AS hash_high"
        f" FROM (SELECT _file AS file, xxhash64({terms}) AS row_hash"
        f" FROM nessie.{quote_spark_path(key)} VERSION AS OF {snapshot_id}"
        f" WHERE {predicate}) GROUP BY file"
    )


def _hash_terms(field: NestedField) -> Iterable[str]:
    column = quote_spark_name(field.name)
    # The function does not take maps. As JSON, the entries keep their order, which a rewrite preserves.
    yield f"to_json(struct({column}))" if _contains_map(field) else column
    if not field.required:
        yield f"isnull({column})"


def _contains_map(field: NestedField) -> bool:
    kinds = [field.field_type]
    while kinds:
        kind = kinds.pop()
        match kind:
            case MapType():
                return True
            case ListType():
                kinds.append(kind.element_type)
            case StructType():
                kinds += [inner.field_type for inner in kind.fields]
            case PrimitiveType():
                continue
    return False


def sum_checksums(checksums: Mapping[str, RowChecksum], paths: Iterable[str]) -> RowChecksum:
    """Return the sum of the checksums of several files. A file without a checksum has no live rows."""
    total = RowChecksum()
    for path in paths:
        total += checksums.get(path, RowChecksum())
    return total
