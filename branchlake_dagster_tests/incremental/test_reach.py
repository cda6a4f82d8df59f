"""Results that depend on rows beside their own window: partition mappings with offsets, and `widen`."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import dagster as dg
import hypothesis.strategies as st
import polars as pl
import pytest
from hypothesis import given
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.ranges import Range, Ranges
from branchlake_dagster.incremental.affected_partitions import Reach, affected_partition_keys
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, values
from branchlake_dagster_tests.incremental.test_redefinition import catch_up
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-09")
DEFINITIONS = [
    DAYS,
    dg.DailyPartitionsDefinition("2026-03-25", end_date="2026-04-02", timezone="Europe/Berlin"),
    dg.HourlyPartitionsDefinition("2026-03-28-00:00", end_date="2026-03-30-00:00", timezone="Europe/Berlin"),
    dg.MonthlyPartitionsDefinition("2026-01-01", end_date="2026-09-01"),
]


def day(number: int) -> date:
    return date(2026, 8, number)


@given(st.data())
def test_a_row_affects_the_partitions_that_read_it_and_no_others(data: st.DataObject) -> None:
    definition = data.draw(st.sampled_from(DEFINITIONS))
    start, end = sorted((data.draw(st.integers(-3, 3)), data.draw(st.integers(-3, 3))))
    before, after = (data.draw(st.integers(0, 90)) for _ in range(2))
    reach = Reach(timedelta(hours=before), timedelta(hours=after), start, end)
    keys = definition.get_partition_keys()
    windows = {key: definition.time_window_for_partition_key(key) for key in keys}
    first = min(window.start for window in windows.values())
    low = first + timedelta(minutes=data.draw(st.integers(-20_000, 300_000)))
    high = low + timedelta(minutes=data.draw(st.integers(0, 5_000)))
    changed = Ranges((Range(low.astimezone(UTC), high.astimezone(UTC)),))
    needed = {key: reach.required_window(definition, window) for key, window in windows.items()}
    expected = {key for key, window in needed.items() if window.start <= high and low < window.end}
    assert affected_partition_keys(definition, {"": changed}, reach=reach) == expected


def test_offsets_count_windows_across_a_change_of_the_clock() -> None:
    berlin = DEFINITIONS[1]
    own = berlin.time_window_for_partition_key("2026-03-29")  # 23 hours
    found = Reach(start_offset=-1, end_offset=1).required_window(berlin, own)
    assert [one.date() for one in (found.start, found.end)] == [date(2026, 3, 28), date(2026, 3, 31)]
    assert found.end.astimezone(UTC) - found.start.astimezone(UTC) == timedelta(hours=71)
    # What is before the first partition counts like any other row.
    first = berlin.time_window_for_partition_key("2026-03-25")
    assert Reach(start_offset=-1).required_window(berlin, first).start.date() == date(2026, 3, 24)


@pytest.mark.parametrize("moved", [timedelta(hours=30), timedelta(days=4_000_000)])
def test_ranges_are_widened_to_both_sides(moved: timedelta) -> None:
    reach = Reach(before=moved, after=moved)
    for value in (day(5), datetime(2026, 8, 5, tzinfo=UTC), datetime(2026, 8, 5)):
        (part,) = reach.widen_ranges(Ranges((Range(value, value),)), to_required_rows=False).parts
        assert part.low < value < part.high
        assert type(part.low) is type(part.high) is type(value)
    unknown = Ranges(anything=True)
    assert reach.widen_ranges(unknown, to_required_rows=True) == unknown


class Events:
    """A table that somebody else writes, with Dagster's partitions or without."""

    def __init__(self, lake: Lakehouse, namespace: str, partitions: Any = None) -> None:
        metadata = table_metadata(partition_by="day") if partitions is not None else {}
        self.spec = dg.AssetSpec([namespace, "events"], partitions_def=partitions, metadata=metadata)
        self._catalog, self._identifier = lake.catalog(), (namespace, "events")

    def append(self, *rows: tuple[date, int]) -> None:
        frame = pl.DataFrame(rows, schema={"day": pl.Date, "price": pl.Int64}, orient="row").to_arrow()
        self._catalog.create_namespace_if_not_exists(self._identifier[:1])
        self._catalog.create_table_if_not_exists(self._identifier, frame.schema).append(frame)

    def delete(self, which: str) -> None:
        self._catalog.load_table(self._identifier).delete(which)


def sums_of(
    events: Events, compute: Callable[[Any], Any], frame: type, *, mapping: Any = None, **how: Any
) -> dg.AssetsDefinition:
    """By day the sum of it and the day before."""

    def sums(events):  # annotated below: annotations here are text
        return compute(events)

    sums.__annotations__ = {"events": frame}
    partitions = how.pop("partitions", None)
    by = {"partition_by": "day"} if partitions is not None else {}
    return dg.asset(
        key=[events.spec.key.path[0], "sums"],
        ins={"events": dg.AssetIn(events.spec.key, partition_mapping=mapping)},
        partitions_def=partitions,
        metadata=table_metadata(**by, **FREE) | consumes({events.spec.key: "range"}, on="day", **how),
    )(sums)


def two_days(events: pl.DataFrame) -> pl.DataFrame:
    later = events.with_columns(pl.col("day") + timedelta(days=1))
    return pl.concat([events, later]).group_by("day").agg(pl.col("price").sum())


def two_days_in_spark(events: DataFrame) -> DataFrame:
    later = events.withColumn("day", F.date_add("day", 1))
    return events.union(later).groupBy("day").agg(F.sum("price").alias("price"))


@pytest.mark.parametrize(
    ("compute", "frame"),
    [(two_days, pl.DataFrame), pytest.param(two_days_in_spark, DataFrame, marks=pytest.mark.spark)],
)
@pytest.mark.parametrize(
    "how",
    # With partitions `widen` finds those of the mapping; the first test shows that for any partitions.
    ["mapping", pytest.param("widen", marks=pytest.mark.soak), "widen without partitions"],
)
def test_a_late_row_changes_all_results_that_depend_on_it(
    lakehouse: Lakehouse, namespace: str, compute: Any, frame: type, how: str
) -> None:
    chosen: dict[str, Any] = {"widen": timedelta(days=1)}
    if how == "mapping":
        chosen = {"mapping": dg.TimeWindowPartitionMapping(start_offset=-1)}
    if how != "widen without partitions":
        chosen["partitions"] = DAYS
    events = Events(lakehouse, namespace, DAYS if how == "mapping" else None)
    sums = sums_of(events, compute, frame, **chosen)
    with project(lakehouse, events.spec, sums) as p:
        events.append((day(3), 1), (day(4), 10), (day(6), 100))
        catch_up(p, sums)
        assert values(p, sums) == [(day(3), 1), (day(4), 11), (day(5), 10), (day(6), 100), (day(7), 100)]
        events.append((day(3), 5))
        catch_up(p, sums)
        assert values(p, sums) == [(day(3), 6), (day(4), 16), (day(5), 10), (day(6), 100), (day(7), 100)]
        events.delete("price = 10")
        catch_up(p, sums)
        assert values(p, sums) == [(day(3), 6), (day(4), 6), (day(6), 100), (day(7), 100)]


def test_a_frame_without_its_partition_column_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    events = Events(lakehouse, namespace)
    lacking = [False]

    def compute(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.drop("day") if lacking[0] else rows

    sums = sums_of(events, compute, pl.DataFrame, widen=timedelta(days=1), partitions=DAYS)
    with project(lakehouse, events.spec, sums) as p:
        events.append((day(3), 1))
        catch_up(p, sums)
        events.append((day(3), 2))
        lacking[0] = True
        p.run(sums.key, partition="2026-08-03", ok=False)
        p.failed_with(SchemaMismatch)


@pytest.mark.parametrize(
    ("pattern", "table", "how"),
    [
        ("rows", {"write_mode": "append"}, {"widen": timedelta(1)}),
        ("keys", {"write_mode": "upsert", "keys": ["k"]}, {"widen": timedelta(1), "keys": ["k"]}),
        ("range", {}, {"widen": timedelta(-1), "on": "day"}),
        ("range", {}, {"widen": timedelta(1), "on": "day", "from_start": True}),
    ],
)
def test_what_cannot_be_widened(pattern: Any, table: dict[str, Any], how: dict[str, Any]) -> None:
    def declare() -> None:
        metadata = table_metadata(**table, **FREE) | consumes({"events": pattern}, **how)
        declaration = parse_declaration(metadata, asset="sums")
        assert declaration is not None
        build_consumer(dg.AssetSpec("sums", metadata=metadata), declaration, None, "lake")

    with pytest.raises(ConfigurationError):
        declare()
