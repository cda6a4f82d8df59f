"""Random histories on the real Nessie: writers, rebased runs, consumers that meet, and the same equality.

`BRANCHLAKE_TEST_REAL_HISTORIES` sets how many are played (4: one of each pattern), `BRANCHLAKE_TEST_REAL_SEED` with which seed they
begin. Spark's are in test_real_histories.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from dagster import AssetKey, AssetSpec, DailyPartitionsDefinition
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import DateType, LongType, NestedField, StringType

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.history.change import ChangeLost
from branchlake_dagster.incremental import inputs, outputs, spark_inputs
from branchlake_dagster.incremental import inputs as arrow_inputs
from branchlake_dagster.incremental.consumer_partitions import (
    find_partitions_to_rebuild,
    find_pending_partitions,
    plan_batches,
)
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.consumption_update import build_update
from branchlake_dagster.incremental.declaration import Consumer, parse_declaration
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.selection import select_partitions
from branchlake_dagster_tests.history.snapshot_tables import compact, counted
from branchlake_dagster_tests.publication.workbench import Run, Workbench

HISTORIES = int(os.environ.get("BRANCHLAKE_TEST_REAL_HISTORIES", "4"))
FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_REAL_SEED", "14"))
MOVES = 3

ORDERS = Schema(
    NestedField(1, "day", DateType()),
    NestedField(2, "key", StringType()),
    NestedField(3, "value", LongType()),
)
FRAME = pa.schema([("day", pa.date32()), ("key", pa.string()), ("value", pa.int64())])
LAYOUTS = (
    PartitionSpec(),
    PartitionSpec(PartitionField(1, 1000, DayTransform(), "day_day")),
    PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "key")),
)
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": ({"write_mode": "append"}, {"when_removed": "deliver"}),
    "keys": ({"write_mode": "upsert", "keys": ["key"]}, {"keys": ["key"]}),
    "range": ({}, {"on": "day"}),
    "totals": ({"partition_by": "day"}, {"from_start": True}),
}
DAYS = DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")
"""The partitions of `totals`, each of which has the totals of the one before it and its own rows."""
TOTALS = pa.schema([("day", pa.date32()), ("value", pa.int64()), ("rows", pa.int64())])


def computed(pattern: str, rows: pa.Table) -> pa.Table:
    """What the consumer makes of the rows that it is given."""
    frame = pl.DataFrame(pl.from_arrow(rows))
    if pattern == "rows":
        return frame.select("day", "key", "value", "_change_type").to_arrow()
    column = "key" if pattern == "keys" else "day"
    return frame.group_by(column).agg(pl.col("value").sum(), pl.len().cast(pl.Int64).alias("rows")).to_arrow()


def totals(rows: pa.Table, held: Mapping[date, tuple[int, int]], days: Sequence[str]) -> pa.Table:
    """The totals up to each of some days, from its rows and the totals up to the day before it."""
    found, made = dict(held), []
    frame = pl.DataFrame(pl.from_arrow(rows))
    for day in map(date.fromisoformat, days):
        value, count = found.get(day - timedelta(1), (0, 0))
        own = frame.filter(pl.col("day") == day)
        value, count = found[day] = value + own["value"].sum(), count + own.height
        if count:
            made.append({"day": day, "value": value, "rows": count})
    return pa.Table.from_pylist(made, schema=TOTALS)


def shown(pattern: str, held: pa.Table) -> Counter[tuple[Any, ...]]:
    """A consumer's table, to be compared with a computation over everything."""
    if pattern != "rows":
        return counted(held)
    found = Counter[tuple[Any, ...]]()
    for *row, kind in (tuple(one.values()) for one in held.to_pylist()):
        found[tuple(row)] += 1 if kind == "INSERT" else -1
    return Counter({row: count for row, count in found.items() if count})


@dataclass
class History:
    """One input and one consumer in a namespace of their own."""

    bench: Workbench
    random: Random
    told: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pattern = self.random.choice(list(HOW))
        self.layout = self.random.choice(LAYOUTS)
        table, how = HOW[self.pattern]
        key, orders = AssetKey([self.bench.namespace, "result"]), AssetKey([self.bench.namespace, "orders"])
        pattern: Any = "range" if self.pattern == "totals" else self.pattern
        told = table_metadata(**table) | consumes({orders: pattern}, when_lost="rebuild", **how)
        declaration = parse_declaration(told, asset="result")
        assert declaration is not None
        days = DAYS if self.pattern == "totals" else None
        self.consumer: Consumer = build_consumer(AssetSpec(key, metadata=told), declaration, days, "default")

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.seen[what.partition(":")[0]] += 1

    def play(self) -> None:
        first = self.bench.run()
        first.create("orders", self.layout, ORDERS).append(self.rows())
        self.bench.published(first)
        self.consume()
        for _ in range(MOVES):
            self.random.choice(
                (self.write, self.write, self.rebase, self.together, self.consume, self.meet)
            )()
        self.consume()

    def rows(self) -> pa.Table:
        random = self.random
        found = [
            {
                "day": date(2026, 8, random.randrange(1, 5)),
                "key": random.choice("abcd"),
                "value": random.randrange(9),
            }
            for _ in range(1 + random.randrange(4))
        ]
        self.tell(f"rows: {[tuple(row.values()) for row in found]}")
        return pa.Table.from_pylist(found, schema=FRAME)

    # -- moves -----------------------------------------------------------------------------------------

    def write(self) -> None:
        """Somebody changes the input on `main`."""
        self.change(self.bench.main("orders"), main=True)

    def change(self, table: Table, *, main: bool) -> None:
        how = self.random.choice(
            ("append", "append", "overwrite", "delete", "compact", *(["undo", "evolve"] * main))
        )
        self.tell(how)
        key, day = self.random.choice("abcd"), date(2026, 8, self.random.randrange(1, 5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "append":
                table.append(self.rows())
            elif how == "overwrite":
                table.overwrite(self.rows(), overwrite_filter=EqualTo("day", day.isoformat()))
            elif how == "delete":
                table.delete(EqualTo("key", key))
            elif how == "compact" and table.scan().to_arrow().num_rows:
                compact(table)
            elif how == "evolve" and "note" not in table.schema().column_names:
                with table.update_schema() as update:
                    update.add_column("note", StringType())
            elif how == "undo" and len(table.metadata.snapshots) > 1:
                to = self.random.choice(table.metadata.snapshots)
                if to.snapshot_id != table.metadata.current_snapshot_id:
                    table.manage_snapshots().set_current_snapshot(snapshot_id=to.snapshot_id).commit()

    def rebase(self) -> None:
        """A run writes the input while `main` moves on, so that its snapshots are replayed, or refused."""
        run = self.bench.run()
        run.table("orders").append(self.rows())
        self.write()
        self.publish(run)

    def together(self) -> None:
        """A run writes the input and consumes it, while `main` moves on."""
        run = self.bench.run()
        run.table("orders").append(self.rows())
        if self.random.random() < 0.5:
            self.change(run.table("orders"), main=False)
        self.step(run)
        self.write()
        self.publish(run)

    def consume(self) -> None:
        """A run that consumes, and nobody beside it: then all is as though computed anew."""
        run = self.bench.run()
        self.step(run)
        if self.random.random() < 0.2:  # an attempt of a run that came to nothing
            self.tell("discarded")
            run = self.bench.run()
            self.step(run)
        assert self.publish(run)
        while self.pattern == "totals" and self.step(run := self.bench.run()):
            assert self.publish(run)
        rows = self.bench.main("orders").scan().to_arrow()
        held = self.bench.main("result").scan().to_arrow()
        full = (
            counted(rows.select(FRAME.names))
            if self.pattern == "rows"
            else counted(totals(rows, {}, DAYS.get_partition_keys()))
            if self.pattern == "totals"
            else counted(computed(self.pattern, rows))
        )
        assert shown(self.pattern, held) == full, "not what a full computation gives"

    def meet(self) -> None:
        """Two runs of the consumer at once: of what there is to consume, one of them is published."""
        one, two = self.bench.run(), self.bench.run()
        found = self.step(one)
        assert self.step(two) == found
        assert self.publish(two)
        assert self.publish(one) is not found, "both took the same change"

    def step(self, run: Run) -> bool:
        """What the IO manager does for a step of the consumer; whether there was anything to consume."""
        place = SimpleNamespace(base_hash=run.base)
        resource: Any = SimpleNamespace(
            lakehouse=self.bench.lake,
            run_branch=SimpleNamespace(run_id=run.run_id, open=lambda: place),
            open_branch=lambda: run.name,
            own_catalog=lambda: run.catalog,
        )
        days, lost = self.days(resource) if self.pattern == "totals" else ((), False)
        if self.pattern == "totals" and not days:
            return False
        consumption = Consumption(resource, self.consumer, partitions=days, rebuild=lost)
        (one,) = consumption.inputs.values()
        rows = arrow_inputs.load_rows(consumption, one)
        result = totals(rows, self.held(run), days) if days else computed(self.pattern, rows)
        spec = outputs.effective_spec(consumption, self.consumer.spec)
        self.tell(f"{self.pattern} of {'everything' if consumption.whole else 'a change'}")
        try:
            table = run.table("result")
        except NoSuchTableError:
            table = run.catalog.create_table(spec.identifier, result.schema)
        result = result.cast(table.schema().as_arrow())
        properties = run.properties(spec.write_mode, ",".join(spec.keys))
        if consumption.replaced_keys:
            keys = inputs.read_changed_keys(consumption)
            if keys.num_rows:
                spark_inputs.replace_by_pyiceberg(result, table, spec, keys, properties)
        else:
            where = None
            if outputs.replaces_ranges(consumption):
                where = outputs.select_replaced_rows(consumption, table.schema())
            elif days:
                where = select_partitions(
                    days, DAYS, {"": "day"}, schema=table.schema(), table_name=spec.name
                )
            arrow_frames.write_frame(result, table, spec, where, properties)
        outputs.record_consumption(consumption, table)
        return bool(build_update(consumption).set)

    def days(self, resource: Any) -> tuple[tuple[str, ...], bool]:
        """The days that a run computes next, some or all of those left; whether their change is lost."""
        try:
            left, lost = find_pending_partitions(Consumption(resource, self.consumer)), False
        except ChangeLost:
            left = find_partitions_to_rebuild(Consumption(resource, self.consumer, rebuild=True))
            lost = True
        (batch,) = plan_batches(Consumption(resource, self.consumer), left, None) or [PartitionBatch(())]
        return batch.partitions[: self.random.randrange(1, 5)], lost

    @staticmethod
    def held(run: Run) -> dict[date, tuple[int, int]]:
        """The totals that the consumer's table has on the branch of a run, by day."""
        try:
            rows = run.table("result").scan().to_arrow().to_pylist()
        except NoSuchTableError:
            return {}
        return {row["day"]: (row["value"], row["rows"]) for row in rows}

    def publish(self, run: Run) -> bool:
        if self.bench.lake.nessie.reference(run.name).hash == run.base:
            self.tell("nothing to publish")
            return True
        (found,) = self.bench.publish(run)
        assert isinstance(found, Published | Refused), found
        self.tell("published" if isinstance(found, Published) else f"refused: {found.format_reason()}")
        return isinstance(found, Published)


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    found = Workbench(lakehouse, namespace)
    yield found
    found.clean()


def test_published_results_are_what_a_full_computation_gives(bench: Workbench) -> None:
    seen = Counter[str]()
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        history = History(Workbench(bench.lake, f"{bench.namespace}x{seed}"), Random(seed))
        try:
            history.play()
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}", *history.told]))
            raise
        seen += history.seen
    if HISTORIES >= 50:
        wanted = [f"{pattern} of {what}" for pattern in HOW for what in ("a change", "everything")]
        wanted += ["compact", "overwrite", "delete", "undo", "evolve", "discarded", "refused", "published"]
        assert [name for name in wanted if not seen[name]] == []
    assert bench.lake.nessie.reference(MAIN)
