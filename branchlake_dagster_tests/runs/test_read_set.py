"""Who is watched, and what is told, without a stack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import ReadSet, RunningStep, mark_merge_target
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.spark.plan_reads import PlanReads
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.errors import ReadsUnknown
from branchlake_dagster_tests.suite.raised import raising


class Log(list[tuple[Mapping[str, Any], str | None]]):
    """What was reported."""

    def __call__(self, _: str, metadata: Mapping[str, dg.MetadataValue[Any]], step: str | None) -> None:
        self.append(({key: json.loads(str(v.value)) for key, v in metadata.items() if key in KEYS}, step))


KEYS = (EventMetadata.READ_TABLES, EventMetadata.UNNAMED_READS)
T = ("lake", "t")


def read_set(log: Log, step: RunningStep) -> ReadSet:
    nothing = cast("NessieClient", SimpleNamespace(contents=lambda ref, keys: {}))
    return ReadSet(log, lambda: nothing, lambda: "run-1", step=lambda: step)


@pytest.mark.parametrize(("strict", "told"), [(True, 1), (False, 0), (None, 1)])
def test_only_steps_that_are_surely_not_serializable_are_not_watched(strict: bool | None, told: int) -> None:
    log = Log()
    read_set(log, RunningStep("s", strict)).report_load(T)
    assert log == [({EventMetadata.READ_TABLES: ["lake.t"]}, "s")] * told


def test_a_table_is_reported_once() -> None:
    log = Log()
    reads = read_set(log, RunningStep("s", True))
    for _ in range(2):
        reads.report_load(T)
        reads.report_scan(PlanReads(frozenset({T, ("lake", "u")}), frozenset({"a stream"})))
    assert log == [
        ({EventMetadata.READ_TABLES: ["lake.t"]}, "s"),
        ({EventMetadata.READ_TABLES: ["lake.u"], EventMetadata.UNNAMED_READS: ["a stream"]}, "s"),
    ]


def test_a_merge_of_ones_own_reads_its_target_and_the_io_managers_does_not() -> None:
    log = Log()
    reads = read_set(log, RunningStep("s", True))
    with mark_merge_target(T):
        reads.report_scan(PlanReads(merge_targets=frozenset({T})))
    assert log == []
    reads.report_scan(PlanReads(merge_targets=frozenset({T})))
    assert log == [({EventMetadata.READ_TABLES: ["lake.t"]}, "s")]


@pytest.mark.parametrize(("strict", "told"), [(False, 0), (None, 1)])
def test_a_classic_session_is_refused_to_a_serializable_asset(strict: bool | None, told: int) -> None:
    log = Log()
    lakehouse = LakehouseResource()
    spark = BranchSparkResource(lakehouse=lakehouse)
    classic = cast("SparkSession", object())
    spark._spark_session = classic
    spark.lakehouse._reads = read_set(log, RunningStep("s", strict))
    assert spark.spark_session is classic
    assert log == [({EventMetadata.UNNAMED_READS: ["a classic Spark session"]}, "s")] * told
    spark.lakehouse._reads = read_set(log, RunningStep("s", True))
    with raising(ReadsUnknown, "session_kind=connect"):
        assert spark.spark_session
    assert spark.own_session() is classic
