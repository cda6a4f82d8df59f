"""Incremental assets on real Iceberg tables, without Spark: the three patterns, positions, and what may be lost."""

import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import (
    BranchSparkResource,
    LakehouseResource,
    consumes,
    read_changes,
    rows,
    table_metadata,
)
from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.automation.progress import iter_input_backlogs
from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import ChangeLost
from branchlake_dagster.incremental.commits import commits_of_change
from branchlake_dagster.internals.dagster import report_engine_event
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import EventMetadata, LakeProperty
from branchlake_dagster.tables.errors import (
    PartitionMismatch,
    PositionUnreadable,
    RowsRemoved,
    TableMissing,
    UpsertKeyInvalid,
)
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def orders(namespace: str) -> Source:
    return Source(namespace)


def copy_of(
    source: Source, namespace: str, *, name: str = "copy", deps: Sequence[Any] = (), **how: Any
) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, name],
        ins={"orders": dg.AssetIn(source.key)},
        deps=deps,
        metadata=table_metadata(write_mode="append", **FREE) | consumes({source.key: "rows"}, **how),
    )
    def copy(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.with_columns(pl.lit(orders.height, pl.Int64).alias("batch"))

    return copy


def spent_of(source: Source, namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "spent"],
        ins={"orders": dg.AssetIn(source.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({source.key: "keys"}, keys=["account"]),
    )
    def spent(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.group_by("account").agg(pl.col("price").sum())

    return spent


def test_changed_rows_are_appended_once(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1), ("b", 2))
        published(p, copy)
        assert values(p, copy) == [("a", 1, 2), ("b", 2, 2)]
        orders.publish(p, ("c", 3))
        published(p, copy)
        published(p, copy)  # there is nothing more to take
        assert values(p, copy) == [("a", 1, 2), ("b", 2, 2), ("c", 3, 1)]


@pytest.mark.parametrize("copies", [["a", "a"], ["a", None]], ids=["twice", "null"])
def test_an_upsert_computed_from_everything_has_each_key_once(
    lakehouse: Lakehouse, namespace: str, orders: Source, copies: list[Any]
) -> None:
    @dg.asset(
        key=[namespace, "last"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "rows"}),
    )
    def last(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    with project(lakehouse, orders.asset, last) as p:
        orders.append(p, *((account, 1) for account in copies))
        p.run(last.key, ok=False)  # the first run creates the table
        p.failed_with(UpsertKeyInvalid)
        lakehouse.catalog().load_table(tuple(orders.key.path)).delete("true")
        orders.append(p, ("a", 2))
        published(p, last)
        orders.append(p, *((account, 3) for account in copies))
        p.run(last.key, ok=False, tags={"branchlake/rebuild": "true"})  # replaces the table's rows
        p.failed_with(UpsertKeyInvalid)
        assert values(p, last) == [("a", 2)]


def test_a_run_that_is_not_published_has_consumed_nothing(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1))
        published(p, copy)
        orders.append(p, ("b", 2))
        p.run(copy.key)  # nobody publishes it
        published(p, copy)
        assert values(p, copy) == [("a", 1, 1), ("b", 2, 1)]


@memory.ON_BOTH
def test_two_runs_of_one_consumer_cannot_both_be_published(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1))
        first, second = p.run(copy.key), p.run(copy.key)  # both make the table
        assert p.settle(first).state == RunState.PUBLISHED
        refused = p.settle(second)
        assert refused.state == RunState.REFUSED
        assert first in refused.detail
        orders.append(p, ("b", 2))
        first, second = p.run(copy.key), p.run(copy.key)
        assert p.settle(second).state == RunState.PUBLISHED
        refused = p.settle(first)
        assert refused.codes == ("run_published_first",)
        assert values(p, copy) == [("a", 1, 1), ("b", 2, 1)]


def test_an_input_written_in_the_same_run_is_consumed_once(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        orders.rows = [("own", 2)]
        both = p.run(orders.key, copy.key)
        orders.publish(p, ("main", 3))  # meanwhile, so that the run's own rows are replayed after it
        assert p.settle(both).state == RunState.PUBLISHED
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == ["a", "main", "own"]


def test_results_of_changed_keys_replace_those_that_were(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1), ("b", 2), ("gone", 9))
        published(p, spent)
        orders.append(p, ("a", 10), (("c"), 3))
        published(p, spent)
        assert values(p, spent) == [("a", 11), ("b", 2), ("c", 3), ("gone", 9)]
        lakehouse.catalog().load_table(tuple(orders.key.path)).delete("account = 'gone' or price = 10")
        published(p, spent)
        assert values(p, spent) == [("a", 1), ("b", 2), ("c", 3)]


def test_a_result_of_other_keys_is_refused(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    @dg.asset(
        key=[namespace, "spent"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "keys"}, keys=["account"]),
    )
    def spent(orders: pl.DataFrame) -> pl.DataFrame:
        return pl.DataFrame({"account": ["a", "other"], "price": [1, 2]})

    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        published(p, spent)
        orders.append(p, ("a", 2))
        p.run(spent.key, ok=False)
        p.failed_with(PartitionMismatch, "1 row of the frame has a key that has not changed")


def test_removed_rows_stop_a_consumer_that_only_appends(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1), ("b", 2))
        published(p, copy)
        lakehouse.catalog().load_table(tuple(orders.key.path)).delete("account = 'b'")
        p.run(copy.key, ok=False)
        p.failed_with(RowsRemoved, "branchlake/rebuild=true")
        published(p, copy, tags={"branchlake/rebuild": "true"})
        assert values(p, copy) == [("a", 1, 1)]
        orders.append(p, ("c", 3))
        published(p, copy)
        assert values(p, copy) == [("a", 1, 1), ("c", 3, 1)]


@pytest.mark.nessie
def test_each_row_has_its_change_and_its_commit(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    seen: list[pl.DataFrame] = []
    other = Source(namespace, "other")

    @dg.asset(
        key=[namespace, "history"],
        ins={"orders": dg.AssetIn(orders.key, metadata={"columns": ["account"]})},
        metadata=table_metadata(write_mode="append", **FREE)
        | consumes({orders.key: "rows"}, when_removed="deliver", commits=True),
    )
    def history(orders: pl.DataFrame) -> pl.DataFrame:
        seen.append(orders)
        return orders.select(pl.all().exclude("^_.*$"))

    with project(lakehouse, orders.asset, other.asset, history) as p:
        orders.publish(p, ("a", 1), ("b", 2))
        published(p, history)
        assert "price" not in seen[0].columns
        assert seen[0]["_commit_snapshot_id"].to_list() == seen[0]["_commit_hash"].to_list() == [None, None]
        orders.publish(p, ("c", 3))
        by_run = p.last.run_id
        other.publish(p, ("x", 0))
        lakehouse.catalog().load_table(tuple(orders.key.path)).delete("account = 'a'")
        published(p, history)
        table = lakehouse.catalog().load_table(tuple(orders.key.path))
        added, deleted = [one.snapshot_id for one in table.metadata.snapshots[-2:]]
        rows = seen[1].select("account", "_change_ordinal", "_commit_snapshot_id", "_change_type").rows()
        assert sorted(rows) == [("a", 1, deleted, "DELETE"), ("c", 0, added, "INSERT")]
        log = {entry.commit.hash: entry.commit for entry in lakehouse.nessie.log("main", limit=20)}
        by = {row[0]: log[row[1]] for row in seen[1].select("account", "_commit_hash").rows()}
        assert by["c"].properties["branchlake.run_id"] == by_run
        assert "branchlake.run_id" not in by["a"].properties
        assert all(row["_commit_snapshot_id"] in {added, deleted} for row in seen[1].iter_rows(named=True))
        (page,) = p.instance.fetch_materializations(history.key, limit=1).records
        assert page.asset_materialization is not None
        told = str(page.asset_materialization.metadata["branchlake/consumed_commits"].value)
        assert [line.split(" | ")[3].rstrip(" |") for line in told.splitlines()[2:]] == [
            by_run,
            "somebody outside branchlake",
        ]


@pytest.mark.nessie
def test_the_commits_of_a_rebased_publication(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    """A run publishes two snapshots after another run's; both are of one commit, its own are of none."""
    client, identifier = lakehouse.nessie, tuple(orders.key.path)
    with project(lakehouse, orders.asset) as p:
        orders.publish(p, ("a", 1))
        since = current_position(lakehouse.catalog().load_table(identifier))
        base = client.reference("main").hash
        first, second = p.run(orders.key), p.run(orders.key)
        # As the run's own code does: the commit names the run, which records the branch's head.
        own = lakehouse.catalog(
            f"run-{second}", properties={f"{COMMIT_PROPERTY}{LakeProperty.RUN_ID}": second}
        )
        own.load_table(identifier).append(pa.table({"account": ["z"], "price": [1]}))
        head = dg.MetadataValue.text(client.reference(f"run-{second}").hash)
        run = p.instance.get_run_by_id(second)
        assert run is not None
        report_engine_event(p.instance, "A step has ended.", run, {EventMetadata.BRANCH_HEAD: head})
        p.settle(first)
        p.settle(second)
        at = client.reference("main").hash
        lakehouse.catalog().load_table(identifier).append(pa.table({"account": ["later"], "price": [1]}))
        table = lakehouse.catalog().load_table(identifier)
        change = capture_change(table, since, name="orders")
        ids = [step.snapshot_id for step in change.steps]
        for known in (base, "", "00" * 32):
            told = commits_of_change(client, identifier, table, change, main_hash=at, after_hash=known)
            assert [(one.run_id, one.snapshots) for one in told] == [
                (first, (ids[0],)),
                (second, (ids[1], ids[2])),
            ]
            assert told[-1].hash == at
        assert [len(one.snapshots) for one in commits_of_change(client, identifier, table, change)] == [
            1,
            2,
            1,
        ]
        assert commits_of_change(client, identifier, table, capture_change(table, None, name="orders")) == []


@pytest.mark.parametrize(
    ("how", "expected"), [("rebuild", ["a", "b", "c"]), ("skip", ["a", "c"]), ("fail", None)]
)
def test_a_consumer_whose_own_table_was_rolled_back(
    lakehouse: Lakehouse, namespace: str, orders: Source, how: str, expected: list[str] | None
) -> None:
    copy = copy_of(orders, namespace, when_lost=how)
    with project(lakehouse, orders.asset, copy) as p:
        for name in "ab":
            orders.append(p, (name, 1))
            published(p, copy)
        table = lakehouse.catalog().load_table((namespace, "copy"))
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()
        assert [row[0] for row in values(p, copy)] == ["a"]
        orders.append(p, ("c", 1))
        (told,) = [one for one in iter_input_backlogs(lakehouse) if one.table == f"{namespace}.copy"]
        assert "own table was rolled back" in (told.trouble or "")
        if expected is None:
            p.run(copy.key, ok=False)
            p.failed_with(ChangeLost, "own table was rolled back", "when_lost")
            published(p, copy, tags={"branchlake/rebuild": "true"})
            expected = ["a", "b", "c"]
        else:
            published(p, copy)
        published_again = p.run(copy.key)
        p.settle(published_again)
        assert sorted(row[0] for row in values(p, copy)) == expected
        (told,) = [one for one in iter_input_backlogs(lakehouse) if one.table == f"{namespace}.copy"]
        assert told.trouble is None


def test_a_rolled_back_partition_is_computed_anew_and_the_others_are_not(
    lakehouse: Lakehouse, namespace: str
) -> None:
    days = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-04")
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}
    seen: list[str] = []

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=days,
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(partition_by="day", **FREE)
        | consumes({events.key: "range"}, when_lost="rebuild"),
    )
    def daily(context: dg.AssetExecutionContext, events: pl.DataFrame) -> pl.DataFrame:
        seen.append(context.partition_key)
        return events.group_by("day").agg(pl.col("price").sum())

    def left() -> tuple[str, ...]:
        (asset,) = iter_consumers(p.graph, "lake", [daily.key])
        return ConsumerBacklog(
            LakehouseResource.from_settings(lakehouse.settings), asset.consumer, instance=p.instance
        ).pending_partitions

    with project(lakehouse, events.asset, daily) as p:
        events.append(p, (date(2026, 8, 1), 1), (date(2026, 8, 2), 2), (date(2026, 8, 3), 3))
        for day in ("2026-08-01", "2026-08-02"):
            published(p, daily, partition=day)
        assert left() == ("2026-08-03",)
        table = lakehouse.catalog().load_table((namespace, "daily"))
        table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
        assert left() == ("2026-08-02", "2026-08-03")
        for day in left():
            published(p, daily, partition=day)
        assert left() == ()
        assert [row[1] for row in values(p, daily)] == [1, 2, 3]
        names = lakehouse.catalog().load_table((namespace, "daily")).properties
        assert [name for name in names if name.startswith(LakeProperty.CONSUMED)] == [LakeProperty.CONSUMED]


@pytest.mark.parametrize(
    ("how", "expected"), [("rebuild", ["new"]), ("skip", ["a", "later"]), ("fail", None)]
)
def test_an_input_that_was_created_again(
    lakehouse: Lakehouse, namespace: str, orders: Source, how: str, expected: list[str] | None
) -> None:
    copy = copy_of(orders, namespace, when_lost=how)
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1))
        published(p, copy)
        lakehouse.catalog().drop_table(tuple(orders.key.path))
        orders.append(p, ("new", 2))
        if expected is None:
            p.run(copy.key, ok=False)
            p.failed_with(ChangeLost, "dropped and created again", "when_lost")
            return
        published(p, copy)
        if how == "skip":
            orders.append(p, ("later", 3))
            published(p, copy)
        assert [row[0] for row in values(p, copy)] == expected


@pytest.mark.parametrize(
    "value",
    [
        "spoilt",
        "[" * 100_000,
        '{"inputs": {}, "run": "", "base": "", "valid_through": {"inputs_ms": 1e30, "sources": []}}',
    ],
    ids=["no JSON", "nested", "a time that no calendar has"],
)
def test_a_position_that_cannot_be_read_is_replaced_by_a_rebuild(
    lakehouse: Lakehouse, namespace: str, orders: Source, value: str
) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1))
        published(p, copy)
        with lakehouse.catalog().load_table((namespace, "copy")).transaction() as change:
            change.set_properties({LakeProperty.CONSUMED: value})
        p.run(copy.key, ok=False)
        p.failed_with(PositionUnreadable, LakeProperty.CONSUMED, "branchlake/rebuild=true")
        published(p, copy, tags={"branchlake/rebuild": "true"})
        orders.append(p, ("b", 2))
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == ["a", "b"]


def test_a_consumer_that_begins_now(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    copy = copy_of(orders, namespace, start="now")
    with project(lakehouse, orders.asset, copy) as p:
        orders.append(p, ("a", 1))
        published(p, copy)
        assert values(p, copy) == []
        orders.append(p, ("b", 2))
        published(p, copy)
        assert values(p, copy) == [("b", 2, 1)]


def test_a_consumer_that_begins_at_a_time(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    with project(lakehouse, orders.asset) as p:
        before = datetime.now(UTC)
        time.sleep(0.01)
        orders.append(p, ("a", 1))
        time.sleep(0.01)
        middle = datetime.now(UTC)
        orders.append(p, ("b", 2))
    for start, expected in ((before, ["a", "b"]), (middle, ["b"]), (datetime.now(UTC), [])):
        copy = copy_of(orders, namespace, start=start.isoformat())
        with project(lakehouse, orders.asset, copy) as p:
            published(p, copy)
            assert [row[0] for row in values(p, copy)] == expected
            lakehouse.catalog().drop_table((namespace, "copy"))


def test_a_partition_that_comes_later_is_new_whenever_its_consumer_began(
    lakehouse: Lakehouse, namespace: str
) -> None:
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    def lines_until(end: str) -> dg.AssetsDefinition:
        @dg.asset(
            key=[namespace, "lines"],
            partitions_def=dg.DailyPartitionsDefinition("2026-08-01", end_date=end),
            ins={"events": dg.AssetIn(events.key)},
            metadata=table_metadata(write_mode="append", partition_by="day", **FREE)
            | consumes({events.key: "rows"}, start="now"),
        )
        def lines(events: pl.DataFrame) -> pl.DataFrame:
            return events

        return lines

    two, three = lines_until("2026-08-03"), lines_until("2026-08-04")
    with project(lakehouse, events.asset, two) as p:
        events.append(p, (date(2026, 8, 1), 1))
        events.append(p, (date(2026, 8, 3), 3))
        published(p, two, partition="2026-08-01")
        assert values(p, two) == []
    with project(lakehouse, events.asset, three) as p:
        published(p, three, partition="2026-08-03")
        assert values(p, three) == [(date(2026, 8, 3), 3)]


def test_a_consumer_that_begins_now_begins_once_for_all_partitions(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """The first run of another partition comes after a row was published for it."""
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    @dg.asset(
        key=[namespace, "lines"],
        partitions_def=dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-04"),
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(write_mode="append", partition_by="day", **FREE)
        | consumes({events.key: "rows"}, start="now"),
    )
    def lines(events: pl.DataFrame) -> pl.DataFrame:
        return events

    with project(lakehouse, events.asset, lines) as p:
        events.append(p, *((date(2026, 8, number), 0) for number in (1, 2, 3)))
        published(p, lines, partition="2026-08-01")
        events.append(p, (date(2026, 8, 2), 2))
        published(p, lines, partition="2026-08-02")
        assert values(p, lines) == [(date(2026, 8, 2), 2)]


DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")


def test_partitions_have_positions_of_their_own(lakehouse: Lakehouse, namespace: str) -> None:
    events = Source(namespace, "events")
    events.columns = {"day": pl.Date, "price": pl.Int64}

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=DAYS,
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(partition_by="day", **FREE) | consumes({events.key: "range"}),
    )
    def daily(events: pl.DataFrame) -> pl.DataFrame:
        return events.group_by("day").agg(pl.col("price").sum())

    def day(number: int) -> Any:
        return date(2026, 8, number)

    def held(p: Project) -> set[str]:
        table = lakehouse.catalog().load_table((namespace, "daily"))
        return {name for name in table.metadata.properties if name.startswith(LakeProperty.CONSUMED)}

    with project(lakehouse, events.asset, daily) as p:
        events.append(p, (day(1), 1), (day(2), 2))
        published(p, daily, partition="2026-08-01")
        assert held(p) == {f"{LakeProperty.CONSUMED}.2026-08-01"}
        published(p, daily, partition="2026-08-02")
        assert held(p) == {LakeProperty.CONSUMED}
        events.append(p, (day(1), 10))
        published(p, daily, partition="2026-08-01")
        assert held(p) == {LakeProperty.CONSUMED}
        assert values(p, daily) == [(day(1), 11), (day(2), 2)]
        events.append(p, (day(3), 5), (day(4), 6))
        one, other = p.run(daily.key, partition="2026-08-03"), p.run(daily.key, partition="2026-08-04")
        assert p.settle(one).state == p.settle(other).state == RunState.PUBLISHED
        assert values(p, daily)[2:] == [(day(3), 5), (day(4), 6)]


def test_changed_ranges_of_a_table_without_partitions(lakehouse: Lakehouse, namespace: str) -> None:
    events = Source(namespace, "events")
    events.columns = {"at": pl.Datetime("us"), "price": pl.Int64}
    seen = []

    @dg.asset(
        key=[namespace, "by_day"],
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(**FREE) | consumes({events.key: "range"}, on="at", into="day"),
    )
    def by_day(events: pl.DataFrame) -> pl.DataFrame:
        seen.append(events.height)
        return events.group_by(pl.col("at").dt.date().alias("day")).agg(pl.col("price").sum())

    with project(lakehouse, events.asset, by_day) as p:
        events.append(p, (datetime(2026, 8, 1, 3), 1), (datetime(2026, 8, 2, 4), 2))
        published(p, by_day)
        events.append(p, (datetime(2026, 8, 1, 9), 10))
        published(p, by_day)
        assert [row[1] for row in values(p, by_day)] == [11, 2]
        assert seen == [2, 2]  # of the second day nothing was read again
        published(p, by_day)
        assert [row[1] for row in values(p, by_day)] == [11, 2]


@pytest.mark.parametrize(
    "column",
    # Ranges over time stamps: test_redefinition.py::test_ranges_over_dates_and_time_stamps.
    [pl.Date, pl.Datetime("us"), pytest.param(pl.Datetime("us", "UTC"), marks=pytest.mark.soak)],
)
def test_running_totals_are_computed_from_the_smallest_change_on(
    lakehouse: Lakehouse, namespace: str, column: Any
) -> None:
    """A row that comes late changes all sums that follow, and none before it."""
    events = Source(namespace, "events")
    events.columns = {"at": column, "price": pl.Int64}
    seen = []

    @dg.asset(
        key=[namespace, "totals"],
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(**FREE) | consumes({events.key: "range"}, on="at", from_start=True),
    )
    def totals(lakehouse: LakehouseResource, events: pl.DataFrame) -> pl.DataFrame:
        seen.append(events.height)
        before = 0
        catalog = lakehouse.catalog()
        if events.height and catalog.table_exists((namespace, "totals")):
            own = pl.from_arrow(catalog.load_table((namespace, "totals")).scan().to_arrow())
            assert isinstance(own, pl.DataFrame)
            earlier = own.filter(pl.col("at") < events["at"].min()).sort("at")
            before = earlier["total"][-1] if earlier.height else 0
        return events.sort("at").select("at", total=pl.col("price").cum_sum() + before)

    def at(number: int) -> Any:
        return date(2026, 8, number) if column == pl.Date else datetime(2026, 8, number, 6)

    with project(lakehouse, events.asset, totals) as p:
        events.append(p, *[(at(number), 1) for number in (1, 2, 5, 6)])
        published(p, totals)
        events.append(p, (at(3), 10))
        published(p, totals)
        assert [row[1] for row in values(p, totals)] == [1, 2, 12, 13, 14]
        assert seen == [4, 3]
        published(p, totals)
        assert [row[1] for row in values(p, totals)] == [1, 2, 12, 13, 14]
        events.append(p, (at(9), 1))
        published(p, totals)
        assert [row[1] for row in values(p, totals)] == [1, 2, 12, 13, 14, 15]
        assert seen[-1] == 1


@pytest.mark.spark
def test_an_asset_that_writes_by_sql(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    target = f"nessie.{namespace}.lines"
    source = orders.key
    seen: list[tuple[str, int]] = []

    @dg.asset(
        key=[namespace, "lines"],
        deps=[source],
        metadata=table_metadata(write_mode="append", **FREE) | consumes({source: "rows"}),
    )
    def lines(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
    ) -> dg.MaterializeResult:
        sql = spark.spark_session.sql
        with read_changes(context, lakehouse) as changes:
            if changes.whole:
                sql(f"CREATE TABLE {target} (account STRING, price BIGINT)")
            added = changes.added(source)
            if not changes.whole:
                name = tuple(added.replace("`", "").split(".")[1:])
                seen.append((name[-1], lakehouse.catalog().load_table(name).scan().count()))
                assert spark.spark_session.table(changes.removed(source)).count() == 0
            sql(f"INSERT INTO {target} SELECT account, price FROM {added}")
        return dg.MaterializeResult()

    with project(lakehouse, orders.asset, lines) as p:
        orders.append(p, ("a", 1))
        published(p, lines)
        orders.append(p, ("b", 2), ("c", 3))
        published(p, lines)
        published(p, lines)
        assert values(p, lines) == [("a", 1), ("b", 2), ("c", 3)]
        assert [count for _, count in seen] == [2, 0]
        names = {entry.key.name for entry in lakehouse.nessie.entries("main")}
        assert not any("__change__" in name for name in names)
        assert len(lakehouse.catalog().load_table(tuple(source.path)).scan().to_arrow()) == 3


def test_an_optional_input_counts_once_its_table_exists(lakehouse: Lakehouse, namespace: str) -> None:
    sources = [Source(namespace, name) for name in ("first", "second")]

    @dg.asset(
        key=[namespace, "both"],
        ins={name: dg.AssetIn(one.key) for name, one in zip(("first", "second"), sources, strict=True)},
        metadata=table_metadata(write_mode="append", **FREE)
        | consumes({one.key: rows(optional=True) for one in sources}),
    )
    def both(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
        return pl.concat([one for one in (first, second) if one.width])

    with project(lakehouse, *(one.asset for one in sources), both) as p:
        p.run(both.key, ok=False)
        p.failed_with(TableMissing)
        sources[1].append(p, ("a", 1))
        published(p, both)
        sources[1].append(p, ("b", 2))
        published(p, both)
        assert values(p, both) == [("a", 1), ("b", 2)]
        sources[0].append(p, ("c", 3))
        published(p, both)
        sources[0].append(p, ("d", 4))
        sources[1].append(p, ("e", 5))
        published(p, both)
        assert values(p, both) == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)]
        lakehouse.catalog().drop_table(tuple(sources[0].key.path))
        p.run(both.key, ok=False)
        p.failed_with(TableMissing)


def test_an_optional_input_that_appears_later_counts_from_then_on(
    lakehouse: Lakehouse, namespace: str
) -> None:
    first, second = (Source(namespace, name) for name in ("first", "second"))

    @dg.asset(
        key=[namespace, "both"],
        ins={"first": dg.AssetIn(first.key), "second": dg.AssetIn(second.key)},
        metadata=table_metadata(write_mode="append", **FREE)
        | consumes({one.key: rows(optional=True) for one in (first, second)}, start="now"),
    )
    def both(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
        return pl.concat([one for one in (first, second) if one.width])

    with project(lakehouse, first.asset, second.asset, both) as p:
        first.append(p, ("a", 1))
        published(p, both)
        first.append(p, ("b", 2))
        published(p, both)
        second.append(p, ("c", 3))
        published(p, both)
        second.append(p, ("d", 4))
        published(p, both)
        assert values(p, both) == [("b", 2), ("d", 4)]
