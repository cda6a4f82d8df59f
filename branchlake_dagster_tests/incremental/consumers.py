"""Consumers of each pattern: what a step of theirs gets and writes, and what a full computation would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from itertools import zip_longest
from typing import Any

import pyarrow as pa
from dagster import (
    AssetKey,
    AssetSpec,
    DagsterInstance,
    DailyPartitionsDefinition,
    DynamicPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.schema import Schema

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.history.rows import CHANGE_TYPE, INSERT
from branchlake_dagster.incremental import inputs, outputs
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.consumption_update import build_update
from branchlake_dagster.incremental.declaration import Consumer, UpstreamTable, parse_declaration
from branchlake_dagster.incremental.positions import PropertyUpdate
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.tables.selection import Selection, selection_mask
from branchlake_dagster_tests.incremental.iceberg import SCHEMA, Row, Table, arrow, rows_of
from branchlake_dagster_tests.incremental.lake import Change, Run

PARTS = DynamicPartitionsDefinition(name="parts")
DAYS = DailyPartitionsDefinition("2026-01-01", end_date="2026-01-07")
FEW_DAYS = DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
"""Of the same days, of which some lie behind its end."""
PAIRS = TimeWindowPartitionsDefinition(
    start="2026-01-01", end="2026-01-07", cron_schedule="0 0 */2 * *", fmt="%Y-%m-%d"
)
"""Two days each, whose keys are those of days."""
ALL_DAYS = DAYS.get_partition_keys()
Rows = Mapping[str, Counter[Row]]
"""By input."""


class Log(tuple[tuple[Row, int], ...]):
    """Rows that came and went, as somebody noted them who only appends."""

    def __add__(self, other: Any) -> Log:
        return Log((*self, *other))

    @property
    def total(self) -> Counter[Row]:
        found: Counter[Row] = Counter()
        for row, sign in self:
            found[row] += sign
        return Counter({row: count for row, count in found.items() if count})


@dataclass(frozen=True)
class Kind:
    """A consumer: how it is declared, and what it computes.

    Its results are kept by `place`: the part of the table, the key, or the day that they are of.
    """

    name: str
    pattern: Any
    inputs: tuple[str, ...]
    when_lost: str
    definition: PartitionsDefinition[str] | None = None
    by_day: bool = False
    """Whether its results are of days, however they are partitioned."""
    from_start: bool = False
    """Whether the result of a day is that of the day before it and the rows of the day."""
    rolling: bool = False
    """Whether the result of a day is of its rows and those of the day before it."""

    @cached_property
    def consumer(self) -> Consumer:
        mode: dict[str, Any] = {
            "rows": {"write_mode": "append"},
            "keys": {"write_mode": "upsert", "keys": ["key"]},
            "range": {},
        }[self.pattern]
        if self.definition is not None:
            mode["partition_by"] = "part" if self.definition is PARTS else "day"
        how: dict[str, Any] = {"when_lost": self.when_lost}
        if self.pattern == "rows":
            how["when_removed"] = "deliver"
        if self.pattern == "keys":
            how["keys"] = ["key"]
        if self.pattern == "range" and self.definition is None:
            how["on"] = "day"
        if self.from_start:
            how["from_start"] = True
        if self.rolling:
            how["widen"] = timedelta(1)
        told = table_metadata(**mode) | consumes(
            {AssetKey(["shop", name]): self.pattern for name in self.inputs}, **how
        )
        key = AssetKey(["shop", self.name])
        declaration = parse_declaration(told, asset=self.name)
        assert declaration is not None
        return build_consumer(AssetSpec(key, metadata=told), declaration, self.definition, "shop")

    @property
    def needs_days(self) -> bool:
        """Whether it finds what has changed by the days of its inputs."""
        if self.definition is None:
            return self.pattern == "range"
        return isinstance(self.definition, TimeWindowPartitionsDefinition)

    def place(self, row: Row) -> Any:
        if self.definition is PARTS:
            return row.part
        if self.by_day:
            return row.day
        return {"rows": "all", "keys": row.key, "range": row.day}[self.pattern]

    def places(self, keys: Iterable[str]) -> frozenset[Any]:
        """What partitions hold."""
        if not isinstance(self.definition, TimeWindowPartitionsDefinition):
            return frozenset(keys)
        windows = map(self.definition.time_window_for_partition_key, keys)
        return frozenset(
            one.start.date() + timedelta(number)
            for one in windows
            for number in range((one.end - one.start).days)
        )

    def result(self, rows: Rows) -> dict[Any, Any]:
        """The whole computation over these rows."""
        found = self.of_rows(rows)
        return (
            self.totals(found, frozenset(map(date.fromisoformat, ALL_DAYS)), {}) if self.from_start else found
        )

    @staticmethod
    def totals(
        sums: Mapping[Any, list[int]], days: Iterable[date], earlier: Mapping[Any, list[int]]
    ) -> dict[Any, Any]:
        """The totals up to each of some days, from its sums and the totals up to the day before it.

        A day before which there was nothing has none.
        """
        found: dict[Any, Any] = {}
        for day in sorted(days):
            before = found.get(day - timedelta(1)) or earlier.get(day - timedelta(1)) or []
            own = sums.get(day) or []
            total = [sum(pair) for pair in zip_longest(before, own, fillvalue=0)]
            if any(total):
                found[day] = total
        return found

    def of_rows(self, rows: Rows) -> dict[Any, Any]:
        """What these rows alone give."""
        found: dict[Any, Any] = {}
        for number, name in enumerate(self.inputs):
            for row, count in rows[name].items():
                for place in self._places_of(row):
                    if self.definition is not None and place is None:
                        continue  # null is in no partition
                    if self.pattern == "rows":
                        found.setdefault(place, Counter())[row] += count
                    else:
                        sums = found.setdefault(place, [0, 0] * len(self.inputs))
                        sums[2 * number] += count
                        sums[2 * number + 1] += count * row.value
        return found

    def _places_of(self, row: Row) -> tuple[Any, ...]:
        """The places whose results depend on a row."""
        place = self.place(row)
        return (place, place + timedelta(1)) if self.rolling and place is not None else (place,)

    def shown(self, kept: Mapping[Any, Any]) -> dict[Any, Any]:
        """What the table holds, to be compared with `result`."""
        if self.pattern != "rows":
            return dict(kept)
        return {place: total for place, log in kept.items() if (total := Log(log).total)}


@dataclass
class Step:
    """One attempt of a consumer's step on the branch of a run."""

    kind: Kind
    run: Run
    consumption: Consumption

    @classmethod
    def of(
        cls,
        kind: Kind,
        run: Run,
        *,
        partitions: Sequence[str] = (),
        rebuild: bool = False,
        instance: DagsterInstance | None = None,
    ) -> Step:
        found = Consumption(
            run,
            kind.consumer,
            partitions=partitions,
            rebuild=rebuild,
            instance=instance,
        )
        return cls(kind, run, found)

    @property
    def seen(self) -> Rows:
        return {name: self.run.view[name].rows for name in self.kind.inputs}

    def write(self, create: Table) -> None:
        """Compute, write and record, as the IO manager does; what an earlier attempt wrote is undone."""
        name, base = self.kind.name, self.run.lake.states[self.run.base]
        change = self._change()
        before = base.get(name, create)
        after = self.run.lake.writer.store(before, change.on(before.kept))
        update = build_update(self.consumption, after.metadata.current_snapshot_id)
        self.run.tables[name] = after.changed(properties=_updated(before.metadata.properties, update))
        self.run.changes[name] = change

    def _change(self) -> Change:
        consumption, kind = self.consumption, self.kind
        loaded = {one.key.path[-1]: self._loaded(one) for one in consumption.inputs.values()}
        if kind.pattern == "rows":
            return self._of_rows(loaded)
        new = kind.of_rows({name: Counter(rows_of(rows)) for name, rows in loaded.items()})
        if kind.from_start:
            places = kind.places(consumption.partitions)
            held = self.run.lake.states[self.run.base].get(kind.name)
            kept = held.kept if held is not None else {}
            return Change(places, kind.totals(new, places, {day: kept[day] for day in kept.keys() - places}))
        if kind.definition is not None:
            places = kind.places(consumption.partitions)
            own = {place: new[place] for place in new.keys() & places} if kind.rolling else new
            return Change(places, own)
        if consumption.whole:
            return Change(None, new)
        if kind.pattern == "keys":
            keys = inputs.read_changed_keys(consumption)["key"].to_pylist()
            assert new.keys() <= set(keys), "rows of keys that have not changed"
            return Change(frozenset(keys), new)
        replaced = outputs.select_replaced_rows(consumption, SCHEMA)
        days = self.run.lake.states[self.run.base].get(kind.name)
        held = [Row(None, day, "", 0) for day in {*(days.kept if days else ()), *new}]
        gone = frozenset(row.day for row in _inside(replaced, held))
        return Change(gone, {day: new[day] for day in new.keys() & gone} if kind.rolling else new)

    def _of_rows(self, loaded: Mapping[str, pa.Table]) -> Change:
        found: dict[Any, Log] = {}
        for rows in loaded.values():
            kinds = (
                rows[CHANGE_TYPE].to_pylist()
                if CHANGE_TYPE in rows.column_names
                else [INSERT] * rows.num_rows
            )
            # Nobody promises an order, and a story is to be the same each time.
            for row, kind in sorted(zip(rows_of(rows), kinds, strict=True), key=repr):
                place = self.kind.place(row)
                found[place] = Log((*found.get(place, Log()), (row, 1 if kind == INSERT else -1)))
        if self.consumption.whole:
            by_partition = self.kind.definition is not None
            return Change(self.kind.places(self.consumption.partitions) if by_partition else None, found)
        return Change(frozenset(), found, appended=True)

    def _loaded(self, one: UpstreamTable) -> pa.Table:
        """As `arrow_inputs.load`, whose scans are of the model's tables."""
        consumption, kind = self.consumption, self.kind
        rows = self.run.view[one.key.path[-1]].rows.elements()
        if kind.pattern == "range":
            return arrow(_inside(inputs.select_range_rows(consumption, one), rows, one.table.schema()))
        where = inputs.select_partition_rows(consumption, one, consumption.partitions)
        if consumption.whole:
            return arrow(_inside(where, rows, one.table.schema()))
        if kind.pattern == "rows":
            return inputs.deliver_rows(consumption, one, inputs.read_changed_rows(consumption, one))
        keys = set(inputs.read_changed_keys(consumption)["key"].to_pylist())
        return arrow(row for row in _inside(where, rows, one.table.schema()) if row.key in keys)


def _inside(selection: Selection | None, rows: Iterable[Row], schema: Schema = SCHEMA) -> list[Row]:
    found = list(rows)
    if selection is None or not found:
        return found
    mask = selection_mask(selection, arrow(found, schema)).to_pylist()
    return [row for row, wanted in zip(found, mask, strict=True) if wanted]


def _updated(properties: Mapping[str, str], update: PropertyUpdate) -> dict[str, str]:
    return {**{k: v for k, v in properties.items() if k not in update.remove}, **update.set}
