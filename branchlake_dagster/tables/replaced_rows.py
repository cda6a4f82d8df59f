"""What a snapshot replaced: its partitions' predicate, recorded in the snapshot and compared with others'.

The files that a replacement touched do not say what it replaced: a week is seven Iceberg partitions, of
which it may have touched two, and a partition replaced with no rows touches none. Two runs of one Dagster
partition were once both published, as a union, because their files did not meet.

Times are microseconds since 1970 (UTC, or the wall clock of a column without zone), dates are days since
1970, columns are known by their field ids, so a renamed column stays what it was. Every range includes its
start and excludes its end, but for ranges of strings, which include both.
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

from branchlake_dagster.tables.selection import Selection, to_iceberg

MAX_CHARACTERS = 2000
"""A longer record is widened: each snapshot's summary is read whenever its table is opened."""

_VERSION = 1

Kind = Literal["time", "date", "string"]


@dataclass(frozen=True)
class Among:
    """The column (a field id) is one of the strings."""

    column: int
    values: frozenset[str]


@dataclass(frozen=True)
class Between:
    """The column lies between two values of its kind."""

    column: int
    kind: Kind
    low: int | str
    high: int | str


Condition = Among | Between
Slice = tuple[Condition, ...]


@dataclass(frozen=True)
class Replaced:
    """A union of slices, each a conjunction. A slice without conditions is the whole table."""

    slices: tuple[Slice, ...]

    def meets(self, other: Replaced) -> bool:
        """Whether a row could belong to both."""
        return any(_meet(mine, theirs) for mine in self.slices for theirs in other.slices)


EVERYTHING = Replaced(((),))
"""The whole table; also what is assumed of a record that cannot be read."""


def _meet(mine: Slice, theirs: Slice) -> bool:
    return all(_together(left, right) for left in mine for right in theirs if left.column == right.column)


def _together(left: Condition, right: Condition) -> bool:
    """Whether one value could satisfy both. What cannot be compared could."""
    if isinstance(left, Among) and isinstance(right, Among):
        return not left.values.isdisjoint(right.values)
    if isinstance(left, Among) and isinstance(right, Between):
        return right.kind != "string" or any(
            str(right.low) <= value <= str(right.high) for value in left.values
        )
    if isinstance(left, Between) and isinstance(right, Among):
        return _together(right, left)
    assert isinstance(left, Between)  # noqa: S101 - the cases above are all others
    assert isinstance(right, Between)  # noqa: S101
    if left.kind != right.kind:
        return True
    if left.kind == "string":
        return str(left.low) <= str(right.high) and str(right.low) <= str(left.high)
    return int(left.low) < int(right.high) and int(right.low) < int(left.high)


# -- from a selection ----------------------------------------------------------------------------------


def replaced(selection: Selection, schema: Schema) -> Replaced:
    """The predicate of a selection on a table of that schema, as both engines apply it."""
    # Slice by slice: the expression of a thousand slices would be a thousand levels deep.
    parts = [bind(schema, to_iceberg(Selection((one,)), schema), True) for one in selection.slices]
    return Replaced(tuple(_slice(part) for part in parts if not isinstance(part, AlwaysFalse)))


def _slice(part: BooleanExpression) -> Slice:
    values: list[Condition] = []
    starts: dict[int, tuple[Kind, int]] = {}
    ends: dict[int, int] = {}
    for one in _conjuncts(part):
        field = one.term.ref().field if isinstance(one, BoundPredicate) else None
        if field is None:
            continue  # says nothing that we know how to compare: the slice is wider without it
        if isinstance(one, BoundIn | BoundEqualTo) and isinstance(field.field_type, StringType):
            literals = one.literals if isinstance(one, BoundIn) else {one.literal}
            values.append(Among(field.field_id, frozenset(str(literal.value) for literal in literals)))
        elif isinstance(one, BoundGreaterThanOrEqual):
            kind: Kind = "date" if isinstance(field.field_type, DateType) else "time"
            starts[field.field_id] = kind, one.literal.value
        elif isinstance(one, BoundLessThan):
            ends[field.field_id] = one.literal.value
    ranges = [Between(column, starts[column][0], starts[column][1], ends[column]) for column in starts]
    return (*ranges, *values)


def _conjuncts(part: BooleanExpression) -> Iterator[BooleanExpression]:
    if isinstance(part, And):
        yield from _conjuncts(part.left)
        yield from _conjuncts(part.right)
    else:
        yield part


# -- in a summary --------------------------------------------------------------------------------------


def to_text(predicate: Replaced) -> str:
    """The record; of bounded length, for which it may say more than was replaced, never less."""
    text = _dumped(predicate)
    if len(text) > MAX_CHARACTERS:
        text = _dumped(Replaced((_hull(predicate.slices),)))
    return text if len(text) <= MAX_CHARACTERS else _dumped(EVERYTHING)


def from_text(text: str) -> Replaced:
    """What `to_text` wrote. A record of another version, or a broken one, is of everything."""
    try:
        record = json.loads(text)
        if record["v"] != _VERSION:
            return EVERYTHING
        return Replaced(tuple(tuple(_loaded(one) for one in part) for part in record["any"]))
    except (ValueError, KeyError, TypeError):
        return EVERYTHING  # written by hand or by a later version: never less than was replaced


def _dumped(predicate: Replaced) -> str:
    told = {"v": _VERSION, "any": [[_told(one) for one in part] for part in predicate.slices]}
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False)


def _told(condition: Condition) -> list[Any]:
    if isinstance(condition, Among):
        return [condition.column, "in", sorted(condition.values)]
    return [condition.column, condition.kind, condition.low, condition.high]


def _loaded(told: Sequence[Any]) -> Condition:
    column = int(told[0])
    if told[1] == "in":
        return Among(column, frozenset(map(str, told[2])))
    if told[1] == "string":
        return Between(column, "string", str(told[2]), str(told[3]))
    if told[1] in ("time", "date"):
        return Between(column, told[1], int(told[2]), int(told[3]))
    raise ValueError(f"unknown condition {told[1]!r}")


def _hull(slices: Iterable[Slice]) -> Slice:
    """One slice that holds all of them: per column that each of them restricts, the range of its values."""
    per_slice = [{one.column: one for one in part} for part in slices]
    common = set.intersection(*(set(part) for part in per_slice))
    found: list[Condition] = []
    for column in sorted(common):
        ranges = [_as_range(part[column]) for part in per_slice]
        kinds = {one.kind for one in ranges}
        if len(kinds) == 1:
            lows, highs = [one.low for one in ranges], [one.high for one in ranges]
            found.append(Between(column, kinds.pop(), min(lows), max(highs)))
    return tuple(found)


def _as_range(condition: Condition) -> Between:
    if isinstance(condition, Between):
        return condition
    return Between(condition.column, "string", min(condition.values), max(condition.values))
