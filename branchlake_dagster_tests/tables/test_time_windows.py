"""Rows written under a partition key are exactly those loaded under it, by Dagster's own windows."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import dagster as dg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.expressions.visitors import expression_evaluator
from pyiceberg.typedef import Record

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.tables.partitioning import build_partition_spec, selects_whole_files
from branchlake_dagster.tables.selection import (
    Selection,
    count_rows_outside,
    select_partitions,
    to_iceberg_filter,
)
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.tables.time_windows import (
    CLOCK_CHANGES,
    OF_DAYS,
    OF_HOURS,
    SCHEMA,
    noon,
    windows_of,
)

KINDS = ("radar", "optical")
MICROSECOND = timedelta(microseconds=1)
PLACES = [(zone, day) for zone, days in CLOCK_CHANGES.items() for day in days]
PLACE = st.sampled_from(PLACES)
SOME_DAYS = st.lists(st.integers(-40, 40), min_size=1, max_size=12)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def row(moment: datetime, day: date, kind: str) -> tuple[datetime, datetime, date, str, int]:
    return (moment, moment.replace(tzinfo=None), day, kind, 0)


def held(selection: Selection, rows: list[tuple[datetime, datetime, date, str, int]]) -> list[bool]:
    """By the filter for PyIceberg; the count for Arrow must agree with it."""
    evaluate = expression_evaluator(SCHEMA, to_iceberg_filter(selection, SCHEMA), True)
    microseconds = [
        (
            (instant - EPOCH) // MICROSECOND,
            (instant - EPOCH) // MICROSECOND,
            day.toordinal() - 719163,
            kind,
            n,
        )
        for instant, _, day, kind, n in rows
    ]
    found = [evaluate(Record(*values)) for values in microseconds]
    names = [field.name for field in SCHEMA.fields]
    frame = pa.table(
        [
            pa.array([r[0] for r in rows], pa.timestamp("us", tz="UTC")),
            pa.array([r[1] for r in rows], pa.timestamp("us")),
            pa.array([r[2] for r in rows], pa.date32()),
            pa.array([r[3] for r in rows]),
            pa.array([r[4] for r in rows]),
        ],
        names=names,
    )
    assert count_rows_outside(selection, frame) == found.count(False)
    return found


AWAY = st.one_of(st.sampled_from([-1, 0, 1]), st.integers(-(10**11), 10**11))


@st.composite
def moments(draw: st.DrawFn, edges: st.SearchStrategy[float]) -> datetime:
    """At, right before or somewhere after the beginning of a window."""
    return EPOCH + timedelta(seconds=draw(edges)) + draw(AWAY) * MICROSECOND


@dataclass(frozen=True)
class Case:
    """Partitions in a zone around a day, and what is drawn of them.

    There are few of them, and each is drawn often: Dagster reckons its windows, and Hypothesis checks what is
    drawn from, once.
    """

    definition: dg.TimeWindowPartitionsDefinition
    windows: dict[str, tuple[float, float]]
    keys: st.SearchStrategy[str]
    moment: st.SearchStrategy[datetime]
    some_keys: st.SearchStrategy[set[str]]
    some_moments: st.SearchStrategy[list[datetime]]


@cache
def case(kind: str, zone: str, around: date) -> Case:
    definition = {**OF_DAYS, **OF_HOURS}[kind](around, zone)
    windows = windows_of(definition)
    keys = st.sampled_from(sorted(windows))
    moment = moments(st.sampled_from(sorted({end for window in windows.values() for end in window})))
    return Case(
        definition,
        windows,
        keys,
        moment,
        st.sets(keys, min_size=1, max_size=6),
        st.lists(moment, min_size=1, max_size=12),
    )


@pytest.mark.parametrize("column", ["instant", "wall"])
@pytest.mark.parametrize("kind", [*OF_DAYS, *OF_HOURS])
@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=40, database=None)
def test_times_belong_to_dagsters_windows(kind: str, column: str, data: st.DataObject) -> None:
    zone, around = data.draw(PLACE)
    of = case(kind, zone, around)
    definition, windows = of.definition, of.windows
    chosen = data.draw(of.some_keys)
    selection = select_partitions(chosen, definition, {"": column}, schema=SCHEMA, table_name="t")
    at = data.draw(of.some_moments)
    rows = [row(moment, around, "") for moment in at]
    seconds = [(moment - EPOCH) / timedelta(seconds=1) for moment in at]
    expected = [any(windows[key][0] <= s < windows[key][1] for key in chosen) for s in seconds]
    assert held(selection, rows) == expected
    layout = build_partition_spec(definition, {"": column}, SCHEMA, table_name="t")
    if all(end % 3600 == 0 for key in chosen for end in windows[key]):
        assert selects_whole_files(selection, SCHEMA, {0: layout})


@pytest.mark.parametrize("kind", OF_DAYS)
@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=60, database=None)
def test_dates_belong_to_the_windows_of_their_own_calendar(kind: str, data: st.DataObject) -> None:
    zone, around = data.draw(PLACE)
    of = case(kind, zone, around)
    definition, windows = of.definition, of.windows
    chosen = data.draw(of.some_keys)
    selection = select_partitions(chosen, definition, {"": "day"}, schema=SCHEMA, table_name="t")
    days = data.draw(SOME_DAYS)
    at = [around + timedelta(days=days) for days in days]
    rows = [row(EPOCH, day, "") for day in at]
    expected = [any(windows[key][0] <= noon(day, zone) < windows[key][1] for key in chosen) for day in at]
    assert held(selection, rows) == expected
    assert selects_whole_files(
        selection, SCHEMA, {0: build_partition_spec(definition, {"": "day"}, SCHEMA, table_name="t")}
    )


@pytest.mark.parametrize("zone", CLOCK_CHANGES)
@pytest.mark.parametrize("kind", OF_HOURS)
def test_windows_of_hours_do_not_go_into_dates(kind: str, zone: str) -> None:
    definition = OF_HOURS[kind](CLOCK_CHANGES[zone][0], zone)
    for key in windows_of(definition):
        with raising(
            ConfigurationError, table="a.t", partitions=(key,), reason="dates_for_hours", subject="day"
        ):
            select_partitions([key], definition, {"": "day"}, schema=SCHEMA, table_name="a.t")


@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=60, database=None)
def test_windows_and_kinds_together(data: st.DataObject) -> None:
    zone, around = data.draw(PLACE)
    of = case(data.draw(st.sampled_from([*OF_DAYS, *OF_HOURS])), zone, around)
    of_time, windows = of.definition, of.windows
    kinds = dg.StaticPartitionsDefinition(list(KINDS))
    multi = dg.MultiPartitionsDefinition({"window": of_time, "kind": kinds})
    chosen = data.draw(st.sets(st.tuples(of.keys, st.sampled_from(KINDS)), min_size=1, max_size=8))
    keys = [dg.MultiPartitionKey({"window": window, "kind": kind}) for window, kind in chosen]
    selection = select_partitions(
        keys, multi, {"window": "instant", "kind": "kind"}, schema=SCHEMA, table_name="t"
    )
    rows = [row(data.draw(of.moment), around, data.draw(st.sampled_from(KINDS))) for _ in range(8)]
    expected = [
        any(
            windows[window][0] <= (r[0] - EPOCH) / timedelta(seconds=1) < windows[window][1] and r[3] == kind
            for window, kind in chosen
        )
        for r in rows
    ]
    assert held(selection, rows) == expected


def test_a_day_of_23_and_one_of_25_hours() -> None:
    daily = OF_DAYS["daily"](date(2026, 3, 29), "Europe/Berlin")
    hours = [(end - start) / 3600 for start, end in windows_of(daily).values()]
    assert 23.0 in hours
    zone = ZoneInfo("Europe/Berlin")
    late = datetime(2026, 3, 29, 23, 59, tzinfo=zone).astimezone(UTC)
    next_day = datetime(2026, 3, 30, 0, 0, tzinfo=zone).astimezone(UTC)
    selection = select_partitions(["2026-03-29"], daily, {"": "instant"}, schema=SCHEMA, table_name="t")
    assert held(selection, [row(late, EPOCH.date(), ""), row(next_day, EPOCH.date(), "")]) == [True, False]
