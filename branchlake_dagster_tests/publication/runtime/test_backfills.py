"""A backfill that Dagster has closed as a success, and whose runs were not published."""

from datetime import UTC, datetime, timedelta

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.internals.dagster import BACKFILL_ID_TAG
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication import publication_sensor as backfills
from branchlake_dagster.publication.publication_sensor import BackfillWatch
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.dagster_internals import (
    AssetBackfillData,
    AssetGraphSubset,
    BulkActionStatus,
    PartitionBackfill,
)
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.StaticPartitionsDefinition(["mon", "tue"])
NOW = datetime.now(UTC)


def closed(p: Project, key: dg.AssetKey, backfill_id: str) -> None:
    """A backfill of both days as the daemon leaves it when their runs have materialised them."""
    keys = {(key, day) for day in DAYS.get_partition_keys()}
    both = AssetGraphSubset.from_asset_partition_set(keys, p.graph)
    data = AssetBackfillData.empty(both, NOW.timestamp(), p.instance)
    p.instance.add_backfill(
        PartitionBackfill(
            backfill_id=backfill_id,
            status=BulkActionStatus.COMPLETED_SUCCESS,
            from_failure=False,
            tags={},
            backfill_timestamp=NOW.timestamp(),
            asset_selection=[key],
            asset_backfill_data=data._replace(requested_subset=both, materialized_subset=both),
        )
    )


def test_what_was_blocked_is_among_what_failed(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key], "n": [1]})

    @dg.asset_check(asset=t.key, metadata={AssetMetadata.CHECK_SCOPE: "rows"})
    def monday_only(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=context.partition_key == "mon")

    with project(lakehouse, t, monday_only) as p:
        for number, days in (("blocked", DAYS.get_partition_keys()), ("published", ["mon"])):
            for day in days:
                p.settle(p.run(partition=day, tags={BACKFILL_ID_TAG: number}))
            closed(p, t.key, number)
        clock = [NOW]
        watch = BackfillWatch(lambda: clock[0])
        (told,) = watch.fail_unpublished(p.instance, p.graph)
        assert told.startswith("Backfill blocked: 1 partition of it is not on main")
        found = p.instance.get_backfill("blocked")
        assert found.status is BulkActionStatus.COMPLETED_FAILED
        data = found.get_asset_backfill_data(p.graph)
        assert data.failed_and_downstream_subset.get_partitions_subset(t.key).get_partition_keys() == {"tue"}
        assert data.materialized_subset.get_partitions_subset(t.key).get_partition_keys() == {"mon"}
        assert p.instance.get_backfill("published").status is BulkActionStatus.COMPLETED_SUCCESS
        assert list(watch.fail_unpublished(p.instance, p.graph)) == []
        clock[0] += timedelta(minutes=1)
        assert list(watch.fail_unpublished(p.instance, p.graph)) == []


def test_a_backfill_that_cannot_be_read_holds_nothing_up(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset(key=[namespace, "t"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key], "n": [1]})

    def broken(*_: object) -> None:
        raise ValueError("its partitions are gone")

    with project(lakehouse, t) as p:
        closed(p, t.key, "broken")
        monkeypatch.setattr(backfills, "_fail_if_unpublished", broken)
        (told,) = BackfillWatch(lambda: NOW).fail_unpublished(p.instance, p.graph)
        assert told == "Backfill broken could not be inspected: ValueError: its partitions are gone"


def test_backfills_of_other_assets_hide_none(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset(key=[namespace, "t"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key], "n": [1]})

    @dg.asset(key=[namespace, "other"], partitions_def=DAYS)
    def other() -> None: ...

    inspected: list[str] = []

    def inspect(_instance: object, _graph: object, backfill: PartitionBackfill) -> None:
        inspected.append(backfill.backfill_id)

    monkeypatch.setattr(backfills, "_MAX_BACKFILLS", 2)
    monkeypatch.setattr(backfills, "_fail_if_unpublished", inspect)
    with project(lakehouse, t) as p, project(lakehouse, other) as elsewhere:
        closed(p, t.key, "oldest")
        closed(p, t.key, "ours")
        elsewhere.instance = p.instance
        for number in range(5):
            closed(elsewhere, other.key, f"other {number}")
        closed(p, t.key, "newest")
        assert list(BackfillWatch(lambda: NOW).fail_unpublished(p.instance, p.graph)) == []
    assert inspected == ["newest", "ours"]
