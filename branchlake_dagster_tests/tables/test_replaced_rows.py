"""The recorded predicate of what a snapshot replaced: exact while short, wider when long, never narrower."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StringType, TimestampType, TimestamptzType

from branchlake_dagster.tables.replaced_rows import (
    ALL_ROWS,
    MAX_CHARACTERS,
    ReplacedRows,
    StringSet,
    ValueRange,
    build_replaced_rows,
    from_json,
    to_json,
)
from branchlake_dagster.tables.selection import select_partitions

SCHEMA = Schema(
    NestedField(1, "at", TimestamptzType(), required=False),
    NestedField(2, "kind", StringType(), required=False),
    NestedField(3, "naive", TimestampType(), required=False),
)
WEEKLY = dg.WeeklyPartitionsDefinition(start_date="2026-01-04")
DAILY = dg.DailyPartitionsDefinition(start_date="2026-01-01")
BERLIN = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="Europe/Berlin")
HOURLY = dg.HourlyPartitionsDefinition(start_date="2026-01-01-00:00")


def of(
    definition: dg.PartitionsDefinition[str], *keys: str, columns: dict[str, str] | None = None
) -> ReplacedRows:
    return build_replaced_rows(
        select_partitions(keys, definition, columns or {"": "at"}, schema=SCHEMA, table_name="t"), SCHEMA
    )


def test_windows_meet_when_they_share_an_instant() -> None:
    week, day, next_day = of(WEEKLY, "2026-01-04"), of(DAILY, "2026-01-10"), of(DAILY, "2026-01-11")
    assert week.overlaps(day)
    assert day.overlaps(week)
    assert not week.overlaps(next_day)
    assert of(BERLIN, "2026-01-10").overlaps(of(DAILY, "2026-01-09"))  # from 23:00 UTC of the day before
    assert not of(BERLIN, "2026-01-10").overlaps(of(HOURLY, "2026-01-10-23:00"))
    assert of(DAILY, "2026-01-10", columns={"": "naive"}).overlaps(
        of(HOURLY, "2026-01-10-23:00", columns={"": "naive"})
    )


def test_values_and_several_dimensions() -> None:
    multi = dg.MultiPartitionsDefinition(
        {"day": DAILY, "kind": dg.StaticPartitionsDefinition(["radar", "optical", "laser"])}
    )
    columns = {"day": "at", "kind": "kind"}

    def keys(*pairs: tuple[str, str]) -> ReplacedRows:
        return of(multi, *(dg.MultiPartitionKey({"day": d, "kind": k}) for d, k in pairs), columns=columns)

    mine = keys(("2026-01-02", "radar"), ("2026-01-03", "optical"))
    assert mine.overlaps(keys(("2026-01-02", "radar")))
    assert not mine.overlaps(keys(("2026-01-02", "optical"), ("2026-01-03", "radar")))
    assert mine.overlaps(of(DAILY, "2026-01-02"))  # all kinds of that day
    assert mine.overlaps(ALL_ROWS)


@pytest.mark.parametrize("definition", [DAILY, WEEKLY, BERLIN])
def test_the_record_comes_back_as_it_was(definition: dg.PartitionsDefinition[str]) -> None:
    mine = of(definition, *definition.get_partition_keys()[3:6])
    assert from_json(to_json(mine)) == mine
    assert len(to_json(mine)) < 100


def test_thousands_of_keys_are_recorded_as_their_range() -> None:
    names = [f"customer-{number:05}" for number in range(5000)]
    static = dg.StaticPartitionsDefinition(names)
    columns = {"": "kind"}
    text = to_json(of(static, *names[1000:4000], columns=columns))
    assert len(text) < 100
    mine = from_json(text)
    assert mine == ReplacedRows(((ValueRange(2, "string", "customer-01000", "customer-03999"),),))
    assert mine.overlaps(of(static, names[2500], columns=columns))
    assert not mine.overlaps(of(static, names[4000], columns=columns))
    assert not mine.overlaps(of(static, names[999], columns=columns))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"v":2,"any":[]}',
        '{"v":1}',
        '{"v":1,"any":[[[1,"like","x"]]]}',
        '{"v":1,"any":7}',
        '{"v":1,"any":[[[]]]}',
        '{"v":1,"any":"7"}',
        '{"v":1,"any":[[[1e400,"in",["a"]]]]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_record_that_cannot_be_read_is_of_everything(text: str) -> None:
    assert from_json(text) == ALL_ROWS


_AMONG = st.builds(
    lambda values: StringSet(2, frozenset(values)), st.sets(st.text(), min_size=1, max_size=60)
)
_STRINGS = st.builds(
    lambda a, b: ValueRange(2, "string", min(a, b), max(a, b)), st.text(max_size=2000), st.text(max_size=2000)
)
_TIMES = st.builds(
    lambda a, b: ValueRange(1, "time", a, a + b), st.integers(-(10**15), 10**15), st.integers(1, 10**12)
)
_SLICES = st.lists(
    st.one_of(
        st.tuples(_TIMES), st.tuples(_AMONG), st.tuples(_STRINGS), st.tuples(_TIMES, _AMONG), st.just(())
    ),
    max_size=80,
)


@pytest.mark.long
@given(_SLICES, _SLICES)
def test_a_record_never_says_less_and_is_bounded(mine: list[object], theirs: list[object]) -> None:
    left, right = ReplacedRows(tuple(mine)), ReplacedRows(tuple(theirs))
    text = to_json(left)
    assert len(text) <= MAX_CHARACTERS
    assert left.overlaps(right) is right.overlaps(left)
    if left.overlaps(right):
        assert from_json(text).overlaps(right)


@given(st.integers(0, 60), st.integers(1, 14), st.integers(0, 60), st.integers(1, 14))
def test_ranges_meet_exactly_when_their_days_do(a: int, n: int, b: int, m: int) -> None:
    def days(start: int, count: int) -> list[str]:
        first = datetime(2026, 1, 1, tzinfo=UTC)
        return [(first + timedelta(days=start + step)).strftime("%Y-%m-%d") for step in range(count)]

    mine, theirs = days(a, n), days(b, m)
    assert of(DAILY, *mine).overlaps(of(DAILY, *theirs)) is bool(set(mine) & set(theirs))
