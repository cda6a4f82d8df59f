"""The rows of a table that belong to a run's partitions, as predicates for both engines.

A selection is a disjunction of slices, a slice a conjunction of conditions. `None` instead of a selection
means the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from dagster import (
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.expressions import (
    AlwaysFalse,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThan,
    Or,
)
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, IcebergType, StringType, TimestampType, TimestamptzType

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.lakehouse.errors import ConfigurationError


@dataclass(frozen=True)
class TimeRange:
    """start <= column < end; both aware."""

    column: str
    start: datetime
    end: datetime


@dataclass(frozen=True)
class Values:
    """column is one of values."""

    column: str
    values: tuple[str, ...]


Condition = TimeRange | Values
Slice = tuple[Condition, ...]


@dataclass(frozen=True)
class Selection:
    """A union of slices; without slices it holds no row."""

    slices: tuple[Slice, ...]

    def columns(self) -> tuple[str, ...]:
        """The columns it looks at."""
        return tuple(dict.fromkeys(c.column for part in self.slices for c in part))


def select(
    keys: Iterable[str], definition: PartitionsDefinition[str], columns: Mapping[str, str], *, table: str
) -> Selection:
    """The selection of partition `keys`; neighbouring time windows become one range.

    Raises ConfigurationError when a dimension has no column.
    """
    slices: dict[Slice, list[str]] = {}
    last: str | None = None
    for key in keys:
        conditions, rest = _conditions(key, definition, columns, table)
        if rest is None:
            slices.setdefault(conditions, [])
        else:
            last = rest[0]
            slices.setdefault(conditions, []).append(rest[1])
    found = [
        (*part, Values(last, tuple(sorted(set(values))))) if last else part for part, values in slices.items()
    ]
    return Selection(tuple(_join_neighbours(found)))


def _conditions(
    key: str, definition: PartitionsDefinition[str], columns: Mapping[str, str], table: str
) -> tuple[Slice, tuple[str, str] | None]:
    """The conditions of one key, apart from its last string dimension, so that those can be gathered."""
    dimensions: Sequence[tuple[str, str, PartitionsDefinition[str]]]
    if isinstance(definition, MultiPartitionsDefinition):
        parts = key if isinstance(key, MultiPartitionKey) else definition.get_partition_key_from_str(key)
        dimensions = [
            (d.name, parts.keys_by_dimension[d.name], d.partitions_def) for d in definition.partitions_defs
        ]
    else:
        dimensions = [("", key, definition)]
    conditions: list[Condition] = []
    strings: list[tuple[str, str]] = []
    for name, value, dimension in dimensions:
        column = columns.get(name)
        if column is None:
            raise ConfigurationError(
                f"Partition dimension {name!r} has no column." if name else "The partitions have no column.",
                table=table,
                hint="Name it with table_metadata(partition_by=…).",
            )
        if isinstance(dimension, TimeWindowPartitionsDefinition):
            window = dimension.time_window_for_partition_key(value)
            conditions.append(TimeRange(column, _utc(window.start), _utc(window.end)))
        else:
            strings.append((column, value))
    conditions += [Values(column, (value,)) for column, value in strings[:-1]]
    return tuple(conditions), strings[-1] if strings else None


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


def _join_neighbours(slices: list[Slice]) -> list[Slice]:
    """Merge slices that differ only in time ranges that touch."""
    done: list[Slice] = []
    for part in sorted(slices, key=_order):
        if done and isinstance(part[0], TimeRange) and done[-1][1:] == part[1:]:
            before = done[-1][0]
            if isinstance(before, TimeRange) and before.end == part[0].start:
                done[-1] = (TimeRange(before.column, before.start, part[0].end), *part[1:])
                continue
        done.append(part)
    return done


def _order(part: Slice) -> tuple[str, datetime]:
    head = part[0]
    return repr(part[1:]), head.start if isinstance(head, TimeRange) else datetime.min.replace(tzinfo=UTC)


def _literal(moment: datetime, kind: IcebergType, column: str) -> str:
    if isinstance(kind, DateType):
        return moment.date().isoformat()
    if isinstance(kind, TimestamptzType):
        return moment.isoformat()
    if isinstance(kind, TimestampType):
        return moment.replace(tzinfo=None).isoformat()
    raise SchemaMismatch(
        f"Column {column} is {kind}, but time-window partitions need a timestamp or date.",
        hint="Name a timestamp column in partition_by.",
    )


def to_iceberg(selection: Selection, schema: Schema) -> BooleanExpression:
    """The selection as a PyIceberg row filter."""

    def one(condition: Condition) -> BooleanExpression:
        if isinstance(condition, Values):
            return In(condition.column, condition.values)
        kind = schema.find_type(condition.column)
        start, end = (_literal(moment, kind, condition.column) for moment in (condition.start, condition.end))
        return And(GreaterThanOrEqual(condition.column, start), LessThan(condition.column, end))

    slices = [reduce(And, map(one, part)) for part in selection.slices]
    return reduce(Or, slices) if slices else AlwaysFalse()


def to_sql(selection: Selection, schema: Schema) -> str:
    """The selection as a Spark SQL predicate."""
    words: dict[type[IcebergType], str] = {DateType: "DATE", TimestampType: "TIMESTAMP_NTZ"}

    def one(condition: Condition) -> str:
        name = f"`{condition.column}`"
        if isinstance(condition, Values):
            if not isinstance(schema.find_type(condition.column), StringType):
                raise SchemaMismatch(f"Partition column {condition.column} is not a string.")
            quoted = ", ".join(
                "'" + v.replace("\\", "\\\\").replace("'", "\\'") + "'" for v in condition.values
            )
            return f"{name} IN ({quoted})"
        kind = schema.find_type(condition.column)
        word = words.get(type(kind), "TIMESTAMP")
        start, end = (_literal(moment, kind, condition.column) for moment in (condition.start, condition.end))
        return f"({name} >= {word} '{start}' AND {name} < {word} '{end}')"

    slices = [" AND ".join(map(one, part)) for part in selection.slices]
    return " OR ".join(f"({text})" for text in slices) if slices else "false"


def rows_outside(selection: Selection, frame: pa.Table) -> int:
    """How many rows of an Arrow table the selection does not hold (null partition values included)."""

    def one(condition: Condition) -> pa.ChunkedArray:
        column = frame.column(condition.column)
        if isinstance(condition, Values):
            return pc.is_in(column, value_set=pa.array(condition.values, type=column.type))
        start, end = (_scalar(moment, column.type) for moment in (condition.start, condition.end))
        return pc.and_kleene(pc.greater_equal(column, start), pc.less(column, end))

    if not selection.slices:
        return int(frame.num_rows)
    inside = reduce(pc.or_kleene, (reduce(pc.and_kleene, map(one, part)) for part in selection.slices))
    return int(frame.num_rows - (pc.sum(pc.fill_null(inside, False)).as_py() or 0))


def _scalar(moment: datetime, kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_date(kind):
        return pa.scalar(moment.date(), type=kind)
    return pa.scalar(moment if getattr(kind, "tz", None) else moment.replace(tzinfo=None), type=kind)
