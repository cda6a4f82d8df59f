"""Each stage of a backfill compared with what it replaces, on real Iceberg tables."""

import time
from dataclasses import replace
from datetime import date
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import replaced_check, table_metadata
from branchlake_dagster.automation.backfill_comparison import EarlierStateLost, compare_stage, find_base_hash
from branchlake_dagster.cli import backfill
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import load_backfill
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import DAYS as DAILY
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow, place, requested
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = ("2026-08-01", "2026-08-02")


def totals(p: Project, number: str) -> dict[str, tuple[int, int, float, Any]]:
    """By asset the rows before and now, the share of changed rows, and the sums of the prices."""
    return {
        one.asset.path[-1]: (
            one.total.before.rows,
            one.total.after.rows,
            one.total.share,
            one.total.sums["price"],
        )
        for one in backfill.compare_backfill(place(p), number)
    }


def test_each_stage_is_compared_with_what_it_was_before(p: Project, pipeline: Pipeline) -> None:
    number, tags = requested(p, pipeline, *DAYS)
    assert totals(p, number) == {
        "events": (4, 4, 0.0, (22, 22)),
        "daily": (2, 2, 0.0, (22, 22)),
        "total": (2, 2, 0.0, (44, 44)),
    }
    pipeline.factor = 7
    p.settle(p.run(pipeline.events.key, partition=DAYS[1], tags=dict(tags)))
    follow(p)
    assert totals(p, number) == {
        "events": (4, 4, 0.5, (22, 88)),
        "daily": (2, 2, 0.5, (22, 88)),
        "total": (2, 2, 0.5, (44, 176)),
    }
    (events,) = backfill.compare_backfill(place(p), number, pipeline.events.key.to_user_string())
    shares = {name: one.share for name, one in events.partitions.items()}
    assert shares == {DAYS[0]: 0.0, DAYS[1]: 1.0}
    (total,) = backfill.compare_backfill(place(p), number, pipeline.total.key.to_user_string())
    assert total.keys == ("day",)
    with pytest.raises(ConfigurationError):
        backfill.compare_backfill(place(p), number, pipeline.report.key.to_user_string())


@pytest.mark.nessie
def test_the_state_before_is_found_without_the_command_or_is_lost(p: Project, pipeline: Pipeline) -> None:
    number, _ = requested(p, pipeline, *DAYS)
    state = load_backfill(p.instance, number, p.graph)
    assert state is not None
    head = p.lake.nessie.reference(MAIN).hash
    assert find_base_hash(p.lake, state) == head
    in_dagster = replace(state, tags={}, requested_at=time.time())
    assert find_base_hash(p.lake, in_dagster) == head
    p.settle(p.run(pipeline.events.key, partition=DAYS[0]))
    assert find_base_hash(p.lake, in_dagster) == head
    assert find_base_hash(p.lake, replace(in_dagster, requested_at=0.0)) is None
    stage, *_ = backfill.plan_request(place(p), backfill.BackfillRequest(pipeline.events.key, DAYS, ""))
    new = compare_stage(p.graph, p.lake, stage, None).total
    assert (new.before.rows, new.after.rows, new.share) == (0, 4, 1.0)
    with pytest.raises(EarlierStateLost):
        compare_stage(p.graph, p.lake, stage, "0123456789abcdef" * 4)


@pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
@pytest.mark.parametrize("most_change", [None, 0.2])
def test_a_backfill_of_one_run_is_checked_once_and_published_as_a_whole(
    lakehouse: Lakehouse, namespace: str, most_change: float | None
) -> None:
    price = 1

    @dg.asset(
        key=[namespace, "events"],
        partitions_def=DAILY,
        backfill_policy=dg.BackfillPolicy.single_run(),
        metadata=table_metadata(partition_by="day"),
    )
    def events(context: dg.AssetExecutionContext) -> pl.DataFrame:
        days = [date.fromisoformat(one) for one in context.partition_keys]
        return pl.DataFrame({"day": days, "price": [price] * len(days)})

    checked = replaced_check(events, sums=["price"], most_change=most_change, severity="error")
    tags = {"dagster/asset_partition_range_start": DAYS[0], "dagster/asset_partition_range_end": DAYS[1]}
    with project(lakehouse, events, checked) as p:
        assert p.settle(p.run(tags=tags)).state is RunState.PUBLISHED
        price = 9
        outcome = p.settle(p.run(tags=tags))
        (evaluation,) = p.last.get_asset_check_evaluations()
        assert evaluation.metadata["rows_after"].value == 2
        published = outcome.state is RunState.PUBLISHED
        assert published is (most_change is None)
        assert [row["price"] for row in p.rows(namespace, "events")] == [9 if published else 1] * 2
