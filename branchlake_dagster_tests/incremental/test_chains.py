"""Partitions that are each computed from the one before: which are left, and which run computes them next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from random import Random
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.consumer_partitions import (
    find_blocking_partition,
    find_pending_partitions,
)
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Consumer, parse_declaration
from branchlake_dagster.incremental.pending import PartitionBatch, plan_batches, with_successors
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster_tests.incremental.consumers import DAYS, Kind, Step
from branchlake_dagster_tests.incremental.iceberg import Row
from branchlake_dagster_tests.incremental.lake import Lake, Refused, Run
from branchlake_dagster_tests.incremental.model_files import Partitions, model_files
from branchlake_dagster_tests.incremental.writing import Writer

KINDS = dg.StaticPartitionsDefinition(["a", "b"])
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "kind": KINDS})
TIMES = dg.MultiPartitionsDefinition({"day": DAYS, "other": dg.DailyPartitionsDefinition("2026-01-01")})
TOTALS = Kind("totals", "range", ("one",), "fail", DAYS, True, True)


def key(day: int) -> str:
    return f"2026-01-{day:02}"


def keys(first: int, last: int = 6) -> set[str]:
    return {key(day) for day in range(first, last + 1)}


# -- the order ---------------------------------------------------------------------------------------------


def declare(definition: dg.PartitionsDefinition[str], partition_by: Any) -> Consumer:
    metadata = table_metadata(partition_by=partition_by) | consumes({"events": "range"}, from_start=True)
    declaration = parse_declaration(metadata, asset="totals")
    assert declaration is not None
    return build_consumer(dg.AssetSpec("totals", metadata=metadata), declaration, definition, "lake")


@pytest.mark.parametrize(
    ("definition", "partition_by"),
    [
        (KINDS, "kind"),
        (dg.DynamicPartitionsDefinition(name="kinds"), "kind"),
        (TIMES, {"day": "day", "other": "at"}),
    ],
)
def test_partitions_without_one_order_in_time_are_refused(
    definition: dg.PartitionsDefinition[str], partition_by: Any
) -> None:
    with pytest.raises(ConfigurationError):
        declare(definition, partition_by)


def test_partitions_in_time_are_in_order() -> None:
    assert declare(DAYS, "day").computes_in_order
    assert declare(BOTH, {"day": "day", "kind": "kind"}).computes_in_order


def test_what_follows_a_partition_has_its_keys_of_the_other_dimensions() -> None:
    every = BOTH.get_partition_keys()
    found = with_successors(BOTH, {f"{key(5)}|a"}, every)
    assert found == {f"{key(5)}|a", f"{key(6)}|a"}
    left = with_successors(BOTH, {f"{key(5)}|a", f"{key(6)}|b"}, every)
    assert plan_batches(BOTH, left, every, 1) == [
        PartitionBatch((f"{key(5)}|a",), (f"{key(6)}|a",)),
        PartitionBatch((f"{key(6)}|b",)),
    ]
    assert plan_batches(DAYS, keys(2), DAYS.get_partition_keys(), 3) == [
        PartitionBatch((key(2), key(3), key(4)), (key(5), key(6)))
    ]
    assert plan_batches(DAYS, keys(2), DAYS.get_partition_keys(), None) == [
        PartitionBatch(tuple(sorted(keys(2))))
    ]


# -- what is left ------------------------------------------------------------------------------------------


class Totals:
    """A running total whose days have all been computed from one row each, and its input."""

    def __init__(self) -> None:
        self.writer = Writer(Random(0))
        self.lake = Lake(self.writer)
        self.instance: Any = Partitions([])
        self.runs = 0
        self.lake.put({"one": self.writer.append(self.writer.create(by_part=True), self.rows(*range(1, 7)))})
        self.run(*range(1, 7)).publish()

    @staticmethod
    def rows(*days: int) -> list[Row]:
        return [Row("p0", date(2026, 1, day), "a", 1) for day in days]

    def change(self, day: int) -> None:
        self.lake.put({"one": self.writer.append(self.lake.main["one"], self.rows(day))})

    def run(self, *days: int, rebuild: bool = False) -> Run:
        """A run of these days that has done its work and is not published."""
        self.runs += 1
        found = Run(self.lake, f"r{self.runs}", len(self.lake.states) - 1)
        partitions = tuple(map(key, days))
        step = Step.of(TOTALS, found, partitions=partitions, rebuild=rebuild, instance=self.instance)
        step.write(self.writer.create(by_part=False))
        return found

    def consumption(self, *days: int) -> Consumption:
        run: Any = Run(self.lake, "sensor", len(self.lake.states) - 1)
        partitions = tuple(map(key, days))
        return Consumption(run, TOTALS.consumer, partitions=partitions, instance=self.instance)

    @property
    def left(self) -> set[str]:
        return find_pending_partitions(self.consumption())


@pytest.fixture
def totals() -> Iterator[Totals]:
    with model_files():
        yield Totals()


def test_a_late_row_leaves_its_day_and_all_after_it(totals: Totals) -> None:
    assert totals.left == set()
    totals.change(3)
    assert totals.left == keys(3)
    totals.run(3).publish()
    assert totals.left == keys(4)
    totals.change(2)
    assert totals.left == keys(2)
    for day in range(2, 7):
        assert totals.left == keys(day)
        totals.run(day).publish()
    assert totals.left == set()
    assert not totals.consumption().positions.partitions


def test_a_result_that_is_computed_anew_leaves_all_after_it(totals: Totals) -> None:
    totals.run(4, rebuild=True).publish()
    assert totals.left == keys(5)
    totals.run(5, 6).publish()
    assert totals.left == set()
    totals.run(6, rebuild=True).publish()
    assert totals.left == set()


def test_a_day_that_was_computed_too_early_is_left(totals: Totals) -> None:
    totals.change(2)
    assert find_blocking_partition(totals.consumption(5)) == key(2)
    totals.run(5).publish()
    assert totals.left == keys(2)
    totals.run(2, 3, 4).publish()
    assert totals.left == keys(5)
    assert find_blocking_partition(totals.consumption(5)) is None


def test_runs_of_neighboring_days_beside_each_other(totals: Totals) -> None:
    totals.change(3)
    third, fourth, again = totals.run(3), totals.run(4), totals.run(4)
    third.publish()
    fourth.publish()
    with pytest.raises(Refused):
        again.publish()
    assert totals.left == keys(4)


def test_a_run_that_ends_the_chain_meets_an_older_one_of_its_days(totals: Totals) -> None:
    old = totals.run(4, rebuild=True)
    totals.run(3, rebuild=True).publish()
    totals.run(4, 5, 6).publish()  # it removes the entry of the third day
    with pytest.raises(Refused):
        old.publish()
    assert totals.left == set()


def test_an_entry_that_outlives_the_position_that_it_followed_is_left(totals: Totals) -> None:
    totals.change(6)
    fourth, last = totals.run(4, rebuild=True), totals.run(6)
    fourth.publish()
    last.publish()  # the table's position moves beside the entry of the fourth day
    assert totals.left == keys(4)
