"""Observations of an object that is cataloged later are associated by the backfills that the guide names.

Only `make test-soak` runs this test.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.sda.consuming_runs import ConsumingRuns
from branchlake_dagster_tests.sda.shuffled_bytes import Pipeline, crossing_objects, settle, simulate_bytes
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake

__all__ = ["empty_lake"]

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(3_600)]

START = datetime(2026, 8, 8, 3, tzinfo=UTC)
SEED = 5
REBUILD = {RunTag.REBUILD: "true"}


def test_backfills_give_the_tables_of_a_catalog_that_was_there_before(
    empty_lake: Lakehouse, tmp_path: Path
) -> None:
    elements = crossing_objects(START, pairs=8, seed=SEED)
    late = elements["sat_no"].gather_every(4)
    rates = {"radar": 0.1, "optical": 0.05, "isl": 0.05}
    simulated = simulate_bytes(elements, START, hours=1, per_s=rates, seed=SEED)
    (hour,) = simulated.partitions
    pipeline = Pipeline(empty_lake, tmp_path)
    pipeline.publish_catalog(elements.filter(~pl.col("sat_no").is_in(late.implode())), START)
    pipeline.remove_measurements()
    with pipeline.project() as p:
        sensors = ConsumingRuns(p)
        pipeline.land(simulated.records)
        pipeline.ingest(p)
        sensors.follow()
        before = pipeline.read()
        assert before.frames["rejected_observations"]["reason"].unique().to_list() == ["unknown_object"]
        assert not before.frames["associations"]["sat_no"].is_in(late.implode()).any()
        pipeline.publish_catalog(elements, START + timedelta(minutes=30))
        assert sensors.follow() == [], "the catalog alone leads to no run"
        settle(p, OBSERVATIONS, partition_key=hour, tags=REBUILD)
        settle(p, REJECTED_OBSERVATIONS, tags=REBUILD)
        assert ("associations", hour) in sensors.follow()
        settle(p, ASSOCIATIONS, partition_key=hour, tags=REBUILD)
        sensors.follow()
        after = pipeline.read()
    assert after.frames["rejected_observations"].is_empty()
    assert after.frames["associations"]["sat_no"].is_in(late.implode()).any()
    assert after.frames["net_alerts"].height
    expected = pipeline.compute(simulated, None, 1)
    differences = expected.differences(after)
    assert not differences, "\n".join([f"seed {SEED}", *differences])
