"""The benchmark's two-stage pipeline in a tiny size: what changes bring is what a look-back computes."""

from __future__ import annotations

import pytest

from branchlake_dagster.bench.incremental_feed import FeedSize
from branchlake_dagster.bench.incremental_simulation import STAGES, Simulation
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster_tests.suite.instances import new_instance


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`:dagster_shared.utils.warnings.BetaWarning")
def test_both_ways_give_the_same_rows(lakehouse: Lakehouse, namespace: str) -> None:
    simulation = Simulation(lakehouse, namespace, FeedSize("tiny", 300, late_share=0.1))
    with new_instance() as instance:
        runs = simulation.run_first_days(instance, days=2, ways=["changes"])
        runs += simulation.run_day(instance, 2)
    assert [(one.way, one.stage) for one in runs[2:]] == [
        (way, stage) for way in ("changes", "lookback") for stage in STAGES
    ]

    def rows(name: str) -> list[tuple[object, ...]]:
        table = lakehouse.catalog(MAIN).load_table((namespace, name)).scan().to_arrow()
        found = table.select(sorted(table.column_names)).to_pylist()
        return sorted(tuple(map(str, row.values())) for row in found)

    for stage in STAGES:
        assert rows(f"changes_{stage}") == rows(f"lookback_{stage}")
    assert len(rows("changes_daily")) == 900
    # Late events were among them: the days before have more rows than had come on them.
    late = lakehouse.catalog(MAIN).load_table((namespace, "playback"))
    assert len(late.scan(row_filter="day < '2026-01-03'").to_arrow()) > 600
