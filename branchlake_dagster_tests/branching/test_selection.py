from datetime import UTC, datetime

import dagster as dg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, NestedField, StringType, TimestampType, TimestamptzType

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.branching.selection import (
    Selection,
    TimeRange,
    Values,
    rows_outside,
    select,
    to_iceberg,
    to_sql,
)
from branchlake_dagster.lakehouse.errors import ConfigurationError

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
    found = select([hour(3), hour(1), hour(2), hour(7)], HOURLY, {"": "ts"}, table="t")
    assert found == Selection(((TimeRange("ts", at(1), at(4)),), (TimeRange("ts", at(7), at(8)),)))


def test_string_partitions_become_one_set() -> None:
    assert select(["optical", "radar"], KINDS, {"": "kind"}, table="t") == Selection(
        ((Values("kind", ("optical", "radar")),),)
    )


def test_dimensions_are_conjoined_and_gathered() -> None:
    keys = [dg.MultiPartitionKey({"window": hour(h), "kind": k}) for h in (1, 2) for k in ("isl", "radar")]
    found = select(keys, MULTI, COLUMNS, table="t")
    assert found == Selection(((TimeRange("ts", at(1), at(3)), Values("kind", ("isl", "radar"))),))


def test_an_incomplete_rectangle_is_not_rounded_up() -> None:
    keys = [
        dg.MultiPartitionKey({"window": hour(1), "kind": "isl"}),
        dg.MultiPartitionKey({"window": hour(2), "kind": "radar"}),
    ]
    assert len(select(keys, MULTI, COLUMNS, table="t").slices) == 2


def test_days_of_another_time_zone_are_stored_in_utc() -> None:
    daily = dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Europe/Berlin")
    found = select(["2026-08-08"], daily, {"": "ts"}, table="t")
    assert found.slices[0][0] == TimeRange(
        "ts", datetime(2026, 8, 7, 22, tzinfo=UTC), datetime(2026, 8, 8, 22, tzinfo=UTC)
    )


def test_a_dimension_without_column_is_named() -> None:
    with pytest.raises(ConfigurationError, match="kind"):
        select([dg.MultiPartitionKey({"window": hour(1), "kind": "isl"})], MULTI, {"window": "ts"}, table="t")


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
        ("day", "((`day` >= DATE '2026-08-08' AND `day` < DATE '2026-08-08'))"),
    ],
)
def test_sql_literals_follow_the_column(column: str, expected: str) -> None:
    assert to_sql(Selection(((TimeRange(column, at(1), at(2)),),)), SCHEMA) == expected


def test_quotes_in_partition_keys_stay_inside_the_literal() -> None:
    text = to_sql(Selection(((Values("kind", ("o'hare\\",)),),)), SCHEMA)
    assert text == "(`kind` IN ('o\\'hare\\\\'))"


def test_a_window_on_a_string_column_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="need a timestamp or date"):
        to_iceberg(Selection(((TimeRange("kind", at(1), at(2)),),)), SCHEMA)


def test_nothing_selected_means_no_rows() -> None:
    empty = Selection(())
    assert to_sql(empty, SCHEMA) == "false"
    assert rows_outside(empty, pa.table({"ts": [at(1)]})) == 1


def test_null_partition_values_are_outside() -> None:
    frame = pa.table({"kind": pa.array(["isl", None, "radar"])})
    assert rows_outside(Selection(((Values("kind", ("isl",)),),)), frame) == 2


@given(
    chosen=st.sets(st.tuples(st.integers(0, 23), st.sampled_from(["radar", "optical", "isl"])), min_size=1),
    rows=st.lists(st.tuples(st.integers(0, 23), st.sampled_from(["radar", "optical", "isl"])), max_size=30),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_the_selection_holds_exactly_the_rows_of_its_keys(
    chosen: set[tuple[int, str]], rows: list[tuple[int, str]]
) -> None:
    keys = [dg.MultiPartitionKey({"window": hour(h), "kind": k}) for h, k in chosen]
    selection = select(keys, MULTI, COLUMNS, table="t")
    frame = pa.table(
        {
            "ts": pa.array([at(h) for h, _ in rows], pa.timestamp("us", tz="UTC")),
            "kind": pa.array([k for _, k in rows], pa.string()),
        }
    )
    assert rows_outside(selection, frame) == sum(row not in chosen for row in rows)
