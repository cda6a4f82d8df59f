from datetime import UTC, date, datetime, timedelta

import dagster as dg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.expressions import BooleanExpression
from pyiceberg.expressions.visitors import bind
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, NestedField, StringType, TimestampType, TimestamptzType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster.tables.selection import (
    DateRange,
    Selection,
    TimeRange,
    Values,
    count_rows_outside,
    select_partitions,
    to_iceberg_filter,
    to_sql_predicate,
)
from branchlake_dagster_tests.suite.raised import raising

HOURLY = dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00", end_date="2026-08-10-00:00")
KINDS = dg.StaticPartitionsDefinition(["radar", "optical", "isl"])
MULTI = dg.MultiPartitionsDefinition({"window": HOURLY, "kind": KINDS})
COLUMNS = {"window": "ts", "kind": "kind"}
SCHEMA = Schema(
    NestedField(1, "ts", TimestamptzType()),
    NestedField(2, "kind", StringType()),
    NestedField(3, "day", DateType()),
    NestedField(4, "local", TimestampType()),
)


def at(hour: int) -> datetime:
    return datetime(2026, 8, 8, hour, tzinfo=UTC)


def hour(number: int) -> str:
    return f"2026-08-08-{number:02d}:00"


def test_neighbouring_windows_become_one_range() -> None:
    found = select_partitions(
        [hour(3), hour(1), hour(2), hour(7)], HOURLY, {"": "ts"}, schema=SCHEMA, table_name="t"
    )
    assert found == Selection(((TimeRange("ts", at(1), at(4)),), (TimeRange("ts", at(7), at(8)),)))


def test_string_partitions_become_one_set() -> None:
    assert select_partitions(
        ["optical", "radar"], KINDS, {"": "kind"}, schema=SCHEMA, table_name="t"
    ) == Selection(((Values("kind", ("optical", "radar")),),))


def test_dimensions_are_conjoined_and_gathered() -> None:
    keys = [dg.MultiPartitionKey({"window": hour(h), "kind": k}) for h in (1, 2) for k in ("isl", "radar")]
    found = select_partitions(keys, MULTI, COLUMNS, schema=SCHEMA, table_name="t")
    assert found == Selection(((TimeRange("ts", at(1), at(3)), Values("kind", ("isl", "radar"))),))


def test_an_incomplete_rectangle_is_not_rounded_up() -> None:
    keys = [
        dg.MultiPartitionKey({"window": hour(1), "kind": "isl"}),
        dg.MultiPartitionKey({"window": hour(2), "kind": "radar"}),
    ]
    assert len(select_partitions(keys, MULTI, COLUMNS, schema=SCHEMA, table_name="t").slices) == 2


def test_days_of_another_time_zone_are_stored_in_utc() -> None:
    daily = dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Europe/Berlin")
    found = select_partitions(["2026-08-08"], daily, {"": "ts"}, schema=SCHEMA, table_name="t")
    assert found.slices[0][0] == TimeRange(
        "ts", datetime(2026, 8, 7, 22, tzinfo=UTC), datetime(2026, 8, 8, 22, tzinfo=UTC)
    )


def test_a_dimension_without_column_is_named() -> None:
    with raising(ConfigurationError, reason="dimension_without_column", subject="kind"):
        select_partitions(
            [dg.MultiPartitionKey({"window": hour(1), "kind": "isl"})],
            MULTI,
            {"window": "ts"},
            schema=SCHEMA,
            table_name="t",
        )


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (
            "ts",
            "((`ts` >= TIMESTAMP '2026-08-08T01:00:00+00:00' AND `ts` < TIMESTAMP '2026-08-08T02:00:00+00:00'))",
        ),
        (
            "local",
            "((`local` >= TIMESTAMP_NTZ '2026-08-08T01:00:00' AND `local` < TIMESTAMP_NTZ '2026-08-08T02:00:00'))",
        ),
    ],
)
def test_sql_literals_follow_the_column(column: str, expected: str) -> None:
    assert to_sql_predicate(Selection(((TimeRange(column, at(1), at(2)),),)), SCHEMA) == expected


def test_dates_are_written_as_dates() -> None:
    found = Selection(((DateRange("day", date(2026, 8, 8), date(2026, 8, 9)),),))
    assert to_sql_predicate(found, SCHEMA) == "((`day` >= DATE '2026-08-08' AND `day` < DATE '2026-08-09'))"


def test_a_backtick_in_a_column_name_stays_inside_it() -> None:
    schema = Schema(NestedField(1, "k`in.d", StringType()))
    assert to_sql_predicate(Selection(((Values("k`in.d", ("a",)),),)), schema) == "(`k``in.d` IN ('a'))"


def test_quotes_in_partition_keys_stay_inside_the_literal() -> None:
    text = to_sql_predicate(Selection(((Values("kind", ("o'hare\\",)),),)), SCHEMA)
    assert text == "(`kind` IN ('o\\'hare\\\\'))"


def test_a_window_on_a_string_column_is_refused() -> None:
    with raising(SchemaMismatch, table="t", reason="column_type", subject="kind"):
        select_partitions([hour(1)], HOURLY, {"": "kind"}, schema=SCHEMA, table_name="t")
    with raising(SchemaMismatch, reason="column_type", subject="day"):
        to_iceberg_filter(Selection(((TimeRange("day", at(1), at(2)),),)), SCHEMA)


def test_string_keys_in_a_column_of_another_type_are_refused() -> None:
    with raising(SchemaMismatch, reason="column_type", subject="day"):
        select_partitions(["isl"], KINDS, {"": "day"}, schema=SCHEMA, table_name="t")


def test_a_partition_column_that_is_missing_is_named() -> None:
    with raising(SchemaMismatch, reason="column_missing", subject="sort"):
        select_partitions(["isl"], KINDS, {"": "sort"}, schema=SCHEMA, table_name="t")


@pytest.mark.parametrize("cron", ["0 * * * *", "*/15 * * * *", "0 6 * * *", "0 0,12 * * *"])
def test_windows_that_are_no_whole_days_do_not_go_into_a_date_column(cron: str) -> None:
    parts = dg.TimeWindowPartitionsDefinition(
        start=datetime(2026, 8, 8), fmt="%Y-%m-%d-%H:%M", cron_schedule=cron, timezone="Europe/Berlin"
    )
    key = parts.get_partition_key_for_timestamp(datetime(2026, 8, 8, 11, tzinfo=UTC).timestamp())
    with raising(ConfigurationError, "Europe", partitions=(key,), reason="dates_for_hours", subject="day"):
        select_partitions([key], parts, {"": "day"}, schema=SCHEMA, table_name="t")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati"])
def test_a_date_is_one_of_the_partitions_own_calendar(zone: str) -> None:
    """East of UTC the day used to be the one before."""
    daily = dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone=zone)
    found = select_partitions(["2026-08-08", "2026-08-09"], daily, {"": "day"}, schema=SCHEMA, table_name="t")
    assert found == Selection(((DateRange("day", date(2026, 8, 8), date(2026, 8, 10)),),))


def test_a_day_begins_where_the_clock_jumps_over_midnight() -> None:
    daily = dg.DailyPartitionsDefinition(start_date="2026-04-23", timezone="Africa/Cairo")
    keys = ["2026-04-23", "2026-04-24", "2026-04-25"]
    found = [
        select_partitions([key], daily, {"": "day"}, schema=SCHEMA, table_name="t").slices[0][0]
        for key in keys
    ]
    assert found == [DateRange("day", date(2026, 4, d), date(2026, 4, d + 1)) for d in (23, 24, 25)]


def test_a_selection_of_many_separate_windows_can_be_bound() -> None:
    days = dg.DailyPartitionsDefinition("2020-01-01")
    keys = [str(date(2020, 1, 1) + timedelta(days=2 * number)) for number in range(1000)]
    selection = select_partitions(keys, days, {"": "ts"}, schema=SCHEMA, table_name="t")
    assert len(selection.slices) == 1000
    bound = bind(SCHEMA, to_iceberg_filter(selection, SCHEMA), case_sensitive=True)
    assert isinstance(bound, BooleanExpression)


def test_nothing_selected_means_no_rows() -> None:
    empty = Selection(())
    assert to_sql_predicate(empty, SCHEMA) == "false"
    assert count_rows_outside(empty, pa.table({"ts": [at(1)]})) == 1


def test_null_partition_values_are_outside() -> None:
    frame = pa.table({"kind": pa.array(["isl", None, "radar"])})
    assert count_rows_outside(Selection(((Values("kind", ("isl",)),),)), frame) == 2


@given(
    chosen=st.sets(st.tuples(st.integers(0, 23), st.sampled_from(["radar", "optical", "isl"])), min_size=1),
    rows=st.lists(st.tuples(st.integers(0, 23), st.sampled_from(["radar", "optical", "isl"])), max_size=30),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_the_selection_holds_exactly_the_rows_of_its_keys(
    chosen: set[tuple[int, str]], rows: list[tuple[int, str]]
) -> None:
    keys = [dg.MultiPartitionKey({"window": hour(h), "kind": k}) for h, k in chosen]
    selection = select_partitions(keys, MULTI, COLUMNS, schema=SCHEMA, table_name="t")
    frame = pa.table(
        {
            "ts": pa.array([at(h) for h, _ in rows], pa.timestamp("us", tz="UTC")),
            "kind": pa.array([k for _, k in rows], pa.string()),
        }
    )
    assert count_rows_outside(selection, frame) == sum(row not in chosen for row in rows)
