"""Checks in runs on the lake: which of them open Spark, and what each says of how it was judged."""

# No `from __future__ import annotations`: Dagster reads the annotations of the assets.
from collections.abc import Callable
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import polars as pl
import pyspark.sql.types as pst
import pytest
from pandera.pyspark import DataFrameModel, Field

from branchlake_dagster.checks import join_checks, pandera_checks, row_predicate, sql_check
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

KINDS = dg.StaticPartitionsDefinition(["radar", "optical"])


class Sightings(DataFrameModel):
    kind: pst.StringType = Field(isin=["radar", "optical"])
    number: pst.LongType = Field(ge=1, le=9)
    range_km: pst.DoubleType = Field(gt=0.0, nullable=True)

    class Config:
        strict = True


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that a run asks for its Spark session."""
    asked: list[str] = []
    original = BranchSparkResource.own_session

    def counted(self: BranchSparkResource) -> Any:
        asked.append("one")
        return original(self)

    monkeypatch.setattr(BranchSparkResource, "own_session", counted)
    return asked


def _sightings(namespace: str, rows: Callable[[str], dict[str, Any]]) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "sightings"], partitions_def=KINDS, metadata=table_metadata(partition_by="kind")
    )
    def sightings(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"kind": context.partition_key, **rows(context.partition_key)})

    return sightings


def _evaluated(made: Project) -> dict[str, dg.AssetCheckEvaluation]:
    return {one.check_name: one for one in made.last.get_asset_check_evaluations()}


def _proved(one: Any) -> bool:
    return "branchlake/proved_by" in one.metadata


def test_a_contract_that_metadata_proves_opens_no_spark(
    lakehouse: Lakehouse, namespace: str, sessions: list[str]
) -> None:
    asset = _sightings(namespace, lambda _: {"number": [1, 9, 4], "range_km": [0.5, None, 3.0]})
    with project(lakehouse, asset, pandera_checks(asset, Sightings)) as made:
        for partition in ("radar", "optical"):
            run = made.run(asset.key, partition=partition)
            evaluated = _evaluated(made)
            assert all(one.passed for one in evaluated.values())
            assert {one.partition for one in evaluated.values()} == {partition}
            assert [name for name, one in evaluated.items() if not _proved(one)] == ["schema"]
            told = evaluated["le__number"].metadata
            assert told["branchlake/proved_by_files"].value == 1  # of two, once both partitions are there
            assert told["branchlake/proved_by_rows"].value == told["total_rows"].value == 3
            assert told["failing_rows"].value == 0
            assert told["branch"].value == f"run-{run}"
            assert made.settle(run).state is RunState.PUBLISHED
    assert not sessions


@pytest.mark.spark
def test_what_metadata_does_not_prove_is_counted(
    lakehouse: Lakehouse, namespace: str, sessions: list[str]
) -> None:
    class Closer(Sightings):
        @pa.check("range_km")
        @classmethod
        @row_predicate
        def near(cls, rows: Any) -> Any:
            return rows["range_km"] < 100

    asset = _sightings(namespace, lambda _: {"number": [1, 10, 4], "range_km": [0.5, None, float("nan")]})
    rare = sql_check(asset, "rare", "SELECT * FROM {this} WHERE number > 100")
    with project(lakehouse, asset, *join_checks([pandera_checks(asset, Closer), rare])) as made:
        run = made.run(asset.key, partition="radar")
        evaluated = _evaluated(made)
        assert {name for name, one in evaluated.items() if not one.passed} == {"le__number", "near__range_km"}
        assert {name for name, one in evaluated.items() if _proved(one)} == {
            "not_null__kind",
            "isin__kind",
            "not_null__number",
            "ge__number",
            "gt__range_km",
        }
        assert evaluated["le__number"].metadata["failing_rows"].value == 1
        assert evaluated["le__number"].metadata["total_rows"].value == 3
        assert evaluated["near__range_km"].metadata["examples"].records[0].data["range_km"] == "NaN"
        outcome = made.settle(run)
        assert outcome.state is not RunState.PUBLISHED
        assert "le__number" in str(outcome)
    assert sessions
