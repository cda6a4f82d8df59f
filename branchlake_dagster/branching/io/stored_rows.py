"""An asset's rows where they lie: their table, and a Spark frame only when one is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import dagster as dg
from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.branching.table.selection import Selection

_STORED = "branchlake/stored_rows"


@dataclass(frozen=True)
class RowPartitions:
    """How rows belong to an asset's partitions: its definition, and the column of each dimension.

    A definition of one dimension has the empty string as its dimension.
    """

    definition: dg.PartitionsDefinition[str]
    columns_by_dimension: Mapping[str, str]


@dataclass(frozen=True)
class StoredRows:
    """The rows of `selection` (None: all) in `table`, as it is on the reference `ref`.

    `frame` opens them in Spark: lazily read, in the run's session, which is opened for nothing else.
    `partitions` is None if the rows belong to one partition, or to an asset without partition columns.
    """

    table: Table
    selection: Selection | None
    ref: str
    frame: Callable[[], DataFrame]
    partitions: RowPartitions | None = None


def wants_stored_rows(kind: dg.DagsterType) -> bool:
    """Whether an input of this type does."""
    return _STORED in kind.metadata


# Dagster allows no metadata on the input of a check. To other IO managers an input annotated `StoredRows`
# looks as if it were annotated with a Spark frame, and they may give it one.
dg.make_python_type_usable_as_dagster_type(
    StoredRows,
    dg.DagsterType(
        lambda _, value: isinstance(value, StoredRows | DataFrame),
        "StoredRows",
        description="Rows where they are stored, or a Spark frame of them.",
        typing_type=DataFrame,
        metadata={_STORED: True},
    ),
)
