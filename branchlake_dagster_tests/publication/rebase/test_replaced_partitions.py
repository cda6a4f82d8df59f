"""What a run replaced is its Dagster partitions' predicate, whichever Iceberg partitions its files touch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.tables.replaced_rows import from_json
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

WEEKLY = dg.WeeklyPartitionsDefinition(start_date="2026-08-02")
BERLIN = dg.DailyPartitionsDefinition(start_date="2026-08-01", timezone="Europe/Berlin")
WEEK, NEXT_WEEK = "2026-08-02", "2026-08-09"
Rows = list[dict[str, Any]]


def at(day: int, hour: int = 12) -> datetime:
    return datetime(2026, 8, day, hour, tzinfo=UTC)


def row(day: int, number: int, hour: int = 12) -> dict[str, Any]:
    return {"ts": at(day, hour), "n": number}


@dataclass
class World:
    """A project with the assets `t` (an Arrow frame or a Spark frame of `rows`) and `u` on the same table."""

    p: Project
    namespace: str
    rows: Rows = field(default_factory=list)

    def written(self, partition: str, *rows: dict[str, Any]) -> str:
        """A run that replaces `partition` by `rows`, on its branch."""
        self.rows[:] = rows
        return self.p.run(partition=partition)

    def published(self, run_id: str) -> None:
        outcome = self.p.settle(run_id)
        assert outcome.state is RunState.PUBLISHED, outcome

    def refused(self, run_id: str) -> Outcome:
        outcome = self.p.settle(run_id)
        assert outcome.state is RunState.REFUSED, outcome
        return outcome

    def main(self) -> list[int]:
        return sorted(found["n"] for found in self.p.rows(self.namespace, "t"))


@contextmanager
def world(
    lakehouse: Lakehouse, namespace: str, engine: str, definition: dg.PartitionsDefinition[str] = WEEKLY
) -> Iterator[World]:
    rows: Rows = []
    options: dict[str, Any] = {
        "key": [namespace, "t"],
        "partitions_def": definition,
        "metadata": table_metadata(partition_by="ts", require_checks=False),
    }

    @dg.asset(io_manager_key="io_manager", **options)
    def arrow() -> pl.DataFrame:
        return pl.DataFrame(rows, schema={"ts": pl.Datetime("us", "UTC"), "n": pl.Int64})

    @dg.asset(io_manager_key="io_manager", **options)
    def spark(spark: BranchSparkResource) -> DataFrame:
        values = [tuple(one.values()) for one in rows]
        return spark.spark_session.createDataFrame(values, "ts timestamp, n long")

    with project(lakehouse, arrow if engine == "arrow" else spark) as p:
        yield World(p, namespace, rows)


ENGINES = pytest.mark.parametrize("engine", ["arrow", pytest.param("spark", marks=pytest.mark.spark)])


@ENGINES
@pytest.mark.parametrize("base", [[], [row(3, 1)]])
def test_one_week_written_twice_is_published_once(
    lakehouse: Lakehouse, namespace: str, engine: str, base: Rows
) -> None:
    """Their rows are of different days, so their files never met, and `main` had the union."""
    with world(lakehouse, namespace, engine) as w:
        w.published(w.written(NEXT_WEEK, row(10, 0)))
        if base:
            w.published(w.written(WEEK, *base))
        one, two = w.written(WEEK, row(4, 10)), w.written(WEEK, row(6, 20))
        w.published(one)
        detail = w.refused(two).detail
        assert one in detail
        assert f"partition {WEEK}" in detail or "same files" in detail
        assert w.main() == [0, 10]


@ENGINES
@pytest.mark.parametrize("empty_first", [True, False])
def test_a_week_replaced_with_no_rows_is_replaced(
    lakehouse: Lakehouse, namespace: str, engine: str, empty_first: bool
) -> None:
    """On an empty week it touches no file; the snapshot says so all the same."""
    with world(lakehouse, namespace, engine) as w:
        w.published(w.written(NEXT_WEEK, row(10, 0)))
        full, empty = w.written(WEEK, row(4, 10)), w.written(WEEK)
        first, second = (empty, full) if empty_first else (full, empty)
        w.published(first)
        refused = w.refused(second)
        assert refused.codes == ("same_partitions_replaced",)
        assert str(WEEK) in refused.detail
        assert w.main() == ([0] if empty_first else [0, 10])


@ENGINES
def test_other_weeks_are_replayed_and_keep_their_record(
    lakehouse: Lakehouse, namespace: str, engine: str
) -> None:
    with world(lakehouse, namespace, engine) as w:
        w.published(w.written(WEEK, row(3, 1), row(5, 2)))
        one, two, three = (
            w.written(WEEK, row(4, 10)),
            w.written(NEXT_WEEK, row(9, 20)),
            w.written(NEXT_WEEK),
        )
        w.published(one)
        w.published(two)
        table = lakehouse.catalog().load_table((namespace, "t"))
        summaries = [one.summary.additional_properties for one in table.snapshots() if one.summary]
        (replayed,) = [
            s for s in summaries if "branchlake.replayed_from" in s and int(s.get("added-records", 0))
        ]
        record = from_json(replayed["branchlake.replaced"])
        assert replayed["branchlake.run_id"] == two
        assert record.slices[0][0].low == int(at(9, 0).timestamp() * 1_000_000)
        # The replayed snapshot is compared as the original would have been.
        assert two in w.refused(three).detail
        assert w.main() == [10, 20]


@pytest.mark.parametrize(("day", "replayed"), [(4, False), (8, False), (9, True), (1, True)])
def test_rows_that_main_gets_meanwhile(
    lakehouse: Lakehouse, namespace: str, day: int, replayed: bool
) -> None:
    with world(lakehouse, namespace, "arrow") as w:
        w.published(w.written(WEEK, row(3, 1)))
        run = w.written(WEEK, row(5, 10))
        added = pl.DataFrame(
            {"ts": [at(day, 23)], "n": [7]}, schema={"ts": pl.Datetime("us", "UTC"), "n": pl.Int64}
        )
        lakehouse.catalog().load_table((namespace, "t")).append(added.to_arrow())
        if replayed:
            w.published(run)
            assert w.main() == [7, 10]
        else:
            assert w.refused(run).codes == ("main_changed_replaced",)
            assert w.main() == [1, 7]


def test_days_of_another_time_zone(lakehouse: Lakehouse, namespace: str) -> None:
    """A day in Berlin is 24 Iceberg partitions, none of which two runs of it need to share."""
    with world(lakehouse, namespace, "arrow", BERLIN) as w:
        w.published(w.written("2026-08-01", row(1, 1)))
        one, two, three = (
            w.written("2026-08-05", row(4, 10, 22), row(5, 11, 3)),
            w.written("2026-08-05", row(5, 20, 5)),
            w.written("2026-08-06", row(5, 30, 22)),
        )
        w.published(one)
        assert "partition 2026-08-05" in w.refused(two).detail
        w.published(three)
        assert w.main() == [1, 10, 11, 30]


def test_both_create_the_table(lakehouse: Lakehouse, namespace: str) -> None:
    with world(lakehouse, namespace, "arrow") as w:
        one, two, three = w.written(WEEK, row(4, 10)), w.written(WEEK), w.written(NEXT_WEEK, row(9, 20))
        w.published(one)
        assert f"partition {WEEK}" in w.refused(two).detail
        w.published(three)
        assert w.main() == [10, 20]


def test_several_dimensions(lakehouse: Lakehouse, namespace: str) -> None:
    rows: Rows = []
    kinds = dg.StaticPartitionsDefinition(["radar", "optical"])
    definition = dg.MultiPartitionsDefinition({"week": WEEKLY, "kind": kinds})

    @dg.asset(
        key=[namespace, "t"],
        io_manager_key="io_manager",
        partitions_def=definition,
        metadata=table_metadata(partition_by={"week": "ts", "kind": "kind"}, require_checks=False),
    )
    def t() -> pl.DataFrame:
        kind = {"ts": pl.Datetime("us", "UTC"), "n": pl.Int64, "kind": pl.String}
        return pl.DataFrame(rows, schema=kind)

    with project(lakehouse, t) as p:
        w = World(p, namespace, rows)

        def key(kind: str) -> str:
            return dg.MultiPartitionKey({"week": WEEK, "kind": kind})

        one = w.written(key("radar"), {**row(4, 10), "kind": "radar"})
        two = w.written(key("radar"), {**row(5, 20), "kind": "radar"})
        three = w.written(key("optical"), {**row(5, 30), "kind": "optical"})
        w.published(one)
        assert "radar" in w.refused(two).detail
        w.published(three)
        assert w.main() == [10, 30]
