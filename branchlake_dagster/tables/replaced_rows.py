"""Record in a snapshot which rows it replaced, as a predicate, and compare the predicates of two snapshots.

The files of a replacement do not show which rows it replaced. A week spans seven Iceberg partitions, and the
replacement may have touched two of them. A partition that is replaced with no rows touches none. Because of
this, two runs of one Dagster partition were once both published, as a union of their rows.

Times are microseconds since 1970 (UTC, or wall clock for a column without zone). Dates are days since 1970.
Columns are identified by their field ids, so a rename does not matter. Every range includes its start and
excludes its end; ranges of strings include both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyiceberg.expressions import (
    AlwaysFalse,
    And,
    BooleanExpression,
    BoundEqualTo,
    BoundGreaterThanOrEqual,
    BoundIn,
    BoundLessThan,
    BoundPredicate,
)
from pyiceberg.expressions.visitors import bind
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, StringType

from branchlake_dagster.tables.selection import Selection, to_iceberg_filter

MAX_CHARACTERS = 2000
"""The maximum length of a record in characters.

A longer record is widened to more rows, because every reader of a table loads the snapshot summaries.
"""

_VERSION = 1

RangeKind = Literal["time", "date", "string"]


@dataclass(frozen=True)
class StringSet:
    """The condition that the column with this field id has one of the strings in `values`."""

    field_id: int
    values: frozenset[str]


@dataclass(frozen=True)
class ValueRange:
    """The condition that the column with this field id lies between two values of one kind.

    Times are microseconds and dates are days since 1970; `high` is excluded. Both bounds of strings are
    included.
    """

    field_id: int
    kind: RangeKind
    low: int | str
    high: int | str


ReplacedCondition = StringSet | ValueRange
ReplacedSlice = tuple[ReplacedCondition, ...]


@dataclass(frozen=True)
class ReplacedRows:
    """The rows that a snapshot replaced: a union of slices; each slice is a conjunction of conditions.

    A slice without conditions means the whole table.
    """

    slices: tuple[ReplacedSlice, ...]

    def overlaps(self, other: ReplacedRows) -> bool:
        """Return whether a row could belong to both predicates. True if they cannot be compared."""
        return any(
            _slices_overlap(own_slice, other_slice)
            for own_slice in self.slices
            for other_slice in other.slices
        )


ALL_ROWS = ReplacedRows(((),))
"""The predicate of the whole table. A record that cannot be parsed counts as this."""


def _slices_overlap(first: ReplacedSlice, second: ReplacedSlice) -> bool:
    return all(
        _can_both_hold(left, right) for left in first for right in second if left.field_id == right.field_id
    )


def _can_both_hold(left: ReplacedCondition, right: ReplacedCondition) -> bool:
    """Return whether one value could satisfy both conditions, which are on the same column.

    True if they cannot be compared, because their kinds differ.
    """
    if isinstance(left, StringSet) and isinstance(right, StringSet):
        return not left.values.isdisjoint(right.values)
    if isinstance(left, StringSet) and isinstance(right, ValueRange):
        return right.kind != "string" or any(
            str(right.low) <= value <= str(right.high) for value in left.values
        )
    if isinstance(left, ValueRange) and isinstance(right, StringSet):
        return _can_both_hold(right, left)
    assert isinstance(left, ValueRange)  # noqa: S101 - the cases above are all others
    assert isinstance(right, ValueRange)  # noqa: S101
    if left.kind != right.kind:
        return True
    if left.kind == "string":
        return str(left.low) <= str(right.high) and str(right.low) <= str(left.high)
    return int(left.low) < int(right.high) and int(right.low) < int(left.high)


# -- from a selection ----------------------------------------------------------------------------------


def build_replaced_rows(selection: Selection, schema: Schema) -> ReplacedRows:
    """Build the predicate of a selection on a table of this schema, as PyIceberg and Spark apply it."""
    # Each slice is bound separately: one expression of a thousand slices would be a thousand levels deep.
    predicates = [
        bind(schema, to_iceberg_filter(Selection((part,)), schema), True) for part in selection.slices
    ]
    return ReplacedRows(
        tuple(_parse_slice(predicate) for predicate in predicates if not isinstance(predicate, AlwaysFalse))
    )


def _parse_slice(expression: BooleanExpression) -> ReplacedSlice:
    values: list[ReplacedCondition] = []
    starts: dict[int, tuple[RangeKind, int]] = {}
    ends: dict[int, int] = {}
    for predicate in _iter_conjuncts(expression):
        field = predicate.term.ref().field if isinstance(predicate, BoundPredicate) else None
        if field is None:
            continue  # this expression cannot be compared; the slice without it is wider
        if isinstance(predicate, BoundIn | BoundEqualTo) and isinstance(field.field_type, StringType):
            literals = predicate.literals if isinstance(predicate, BoundIn) else {predicate.literal}
            values.append(StringSet(field.field_id, frozenset(str(literal.value) for literal in literals)))
        elif isinstance(predicate, BoundGreaterThanOrEqual):
            kind: RangeKind = "date" if isinstance(field.field_type, DateType) else "time"
            starts[field.field_id] = kind, predicate.literal.value
        elif isinstance(predicate, BoundLessThan):
            ends[field.field_id] = predicate.literal.value
    ranges = [
        ValueRange(field_id, starts[field_id][0], starts[field_id][1], ends[field_id]) for field_id in starts
    ]
    return (*ranges, *values)


def _iter_conjuncts(expression: BooleanExpression) -> Iterator[BooleanExpression]:
    if isinstance(expression, And):
        yield from _iter_conjuncts(expression.left)
        yield from _iter_conjuncts(expression.right)
    else:
        yield expression


# -- in a summary --------------------------------------------------------------------------------------


def to_json(predicate: ReplacedRows) -> str:
    """Return the record of a predicate as JSON. A long record is widened to more rows, never to fewer."""
    record = _dump_record(predicate)
    if len(record) > MAX_CHARACTERS:
        record = _dump_record(ReplacedRows((_bounding_slice(predicate.slices),)))
    return record if len(record) <= MAX_CHARACTERS else _dump_record(ALL_ROWS)


def from_json(record: str) -> ReplacedRows:
    """Parse a record of `to_json`. A damaged record, or one of another version, becomes ALL_ROWS."""
    try:
        content = json.loads(record)
        if content["v"] != _VERSION:
            return ALL_ROWS
        return ReplacedRows(
            tuple(tuple(_decode_condition(fields) for fields in part) for part in content["any"])
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return ALL_ROWS  # written outside branchlake or by a later version: assume the most rows


def _dump_record(predicate: ReplacedRows) -> str:
    content = {
        "v": _VERSION,
        "any": [[_encode_condition(condition) for condition in part] for part in predicate.slices],
    }
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _encode_condition(condition: ReplacedCondition) -> list[Any]:
    if isinstance(condition, StringSet):
        return [condition.field_id, "in", sorted(condition.values)]
    return [condition.field_id, condition.kind, condition.low, condition.high]


def _decode_condition(fields: Sequence[Any]) -> ReplacedCondition:
    field_id = int(fields[0])
    if fields[1] == "in":
        return StringSet(field_id, frozenset(map(str, fields[2])))
    if fields[1] == "string":
        return ValueRange(field_id, "string", str(fields[2]), str(fields[3]))
    if fields[1] in ("time", "date"):
        return ValueRange(field_id, fields[1], int(fields[2]), int(fields[3]))
    raise ValueError(f"unknown condition {fields[1]!r}")


def _bounding_slice(slices: Iterable[ReplacedSlice]) -> ReplacedSlice:
    """Return one slice that contains the rows of all slices: a range for each column that all restrict."""
    per_slice = [{condition.field_id: condition for condition in part} for part in slices]
    common = set.intersection(*(set(part) for part in per_slice))
    bounds: list[ReplacedCondition] = []
    for field_id in sorted(common):
        ranges = [_to_range(part[field_id]) for part in per_slice]
        kinds = {condition.kind for condition in ranges}
        if len(kinds) == 1:
            lows, highs = [condition.low for condition in ranges], [condition.high for condition in ranges]
            bounds.append(ValueRange(field_id, kinds.pop(), min(lows), max(highs)))
    return tuple(bounds)


def _to_range(condition: ReplacedCondition) -> ValueRange:
    if isinstance(condition, ValueRange):
        return condition
    return ValueRange(condition.field_id, "string", min(condition.values), max(condition.values))
