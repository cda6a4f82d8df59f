"""A random history of inputs, runs and consumers, and the equality that must hold all along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from random import Random
from typing import Any

from branchlake_dagster.history.capture import capture_change
from branchlake_dagster.history.change import ChangeLost
from branchlake_dagster.incremental.consumer_partitions import (
    find_partitions_to_rebuild,
    find_pending_partitions,
)
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.consumption_update import build_update
from branchlake_dagster.tables.errors import InputColumnGone
from branchlake_dagster_tests.incremental.consumers import DAYS, FEW_DAYS, PAIRS, PARTS, Kind, Step
from branchlake_dagster_tests.incremental.iceberg import Row, Table, left
from branchlake_dagster_tests.incremental.lake import Lake, Refused, Run
from branchlake_dagster_tests.incremental.model_files import Partitions, model_files
from branchlake_dagster_tests.incremental.writing import Writer

MOVES = 14
_ALL_SEEDS, _TOTAL_SEEDS, _REDEFINED_SEEDS = 11, (4, 7), (2, 9)
"""Of how many seeds which ones have a running total among their consumers; the other histories have none.
Those of `_REDEFINED_SEEDS` have one consumer, whose partitions come and go while it catches up again and again."""
_KEYS = "abc"
_PARTS = ("p0", "p1", "p2")


class Violated(AssertionError):  # noqa: N818 - reads as a verdict
    """A consumer's table is not what a full computation gives."""


@dataclass
class Waiting:
    """A run at work: published, failed or discarded later."""

    run: Run
    step: Step | None = None


class World:
    """One history, by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.writer = Writer(random)
        self.lake = Lake(self.writer)
        self.told: list[str] = []
        self.seen: Counter[str] = Counter()
        self.waiting: list[Waiting] = []
        self.parts = list(_PARTS[: 1 + random.randrange(3)])
        self.instance: Any = Partitions(self.parts)
        self.inputs = ("one", "two") if random.random() < 0.3 else ("one",)
        self.nulls = random.random() < 0.3
        self.kinds = [self._kind(number) for number in range(1 if random.random() < 0.7 else 2)]
        if seed % _ALL_SEEDS in _TOTAL_SEEDS:
            self.kinds = [
                *self.kinds[1:],
                Kind("totals", "range", self.inputs, self._lost(), DAYS, True, True),
            ]
        self.redefined = seed % _ALL_SEEDS in _REDEFINED_SEEDS
        if self.redefined:
            pattern = random.choice(("rows", "range"))
            definition: Any = random.choice((DAYS, PARTS))
            inputs, by_day = self.inputs[:1], definition is DAYS
            self.kinds = [Kind(pattern, pattern, inputs, self._lost(), definition, by_day)]
        self.runs = 0

    def _kind(self, number: int) -> Kind:
        pattern = self.random.choice(("rows", "keys", "range", "range", "range"))
        definition: Any = None
        if self.random.random() < {"rows": 0.4, "keys": 0, "range": 0.6}[pattern]:
            definition = PARTS if self.random.random() < 0.8 else DAYS
        inputs = self.inputs if pattern != "rows" else self.inputs[:1]
        by_day = definition is DAYS or (definition is None and pattern != "keys")
        kind = Kind(f"{pattern}{number}", pattern, inputs, self._lost(), definition, by_day)
        rolling = pattern == "range" and by_day and self.random.random() < 0.3
        return replace(kind, name=f"rolling{number}", rolling=True) if rolling else kind

    def _lost(self) -> str:
        return "rebuild" if self.random.random() < 0.6 else "fail"

    def story(self) -> str:
        return "\n".join(self.told)

    def tell(self, what: str, more: object = "") -> None:
        self.seen[what] += 1
        self.told.append(f"{what} {more}".rstrip())

    # -- the play --------------------------------------------------------------------------------------

    def play(self) -> None:
        with model_files():
            for name in self.inputs:
                table = self._empty()
                self.lake.put({name: self.writer.append(table, self._rows(3))})
                self.tell("input", f"{name} {_shown(self.lake.main[name])}")
            for _ in range(2 * MOVES if self.redefined else MOVES):
                self._move()
            self._settle()

    def _move(self) -> None:
        chance = self.random.random()
        if self.redefined and chance < 0.5:
            if chance < 0.2:
                self._change_definition(self.kinds[0])
            elif self._consume(self.kinds[0]):
                self.seen["caught up in between"] += 1
        elif chance < 0.4:
            self._write_on_main()
        elif chance < 0.75:
            self._launch()
        elif chance < 0.82:
            self._redefine(self.random.randrange(len(self.kinds)))
        elif self.waiting:
            self._end(self.waiting.pop(self.random.randrange(len(self.waiting))))

    def _settle(self) -> None:
        """All runs end, and every consumer catches up; then nothing is left for it."""
        while self.waiting:
            self._end(self.waiting.pop())
        for kind in self.kinds:
            for name in kind.inputs:
                if name not in self.lake.main:
                    self._create(name)
                elif self.lake.main[name].metadata.renamed:
                    self._rename_days(name)
            for _ in range(12):
                if not self._consume(kind):
                    break
            else:
                raise Violated(f"{kind.name} never catches up")
            if kind.definition is not None and not self._is_known(kind):
                raise Violated(f"{kind.name} never catches up: what it has left stays unknown")
            self._require_all(kind)
            self.seen["caught up"] += 1

    # -- inputs ----------------------------------------------------------------------------------------

    def _rows(self, most: int) -> list[Row]:
        random = self.random
        none = 0.1 if self.nulls else 0
        return [
            Row(
                None if random.random() < none else random.choice(_PARTS),
                None if random.random() < none else date(2026, 1, 1 + random.randrange(5)),
                random.choice(_KEYS),
                random.randrange(3),
            )
            for _ in range(1 + random.randrange(most))
        ]

    def _change_of(self, table: Table) -> tuple[str, Callable[[Table], Table]]:
        """What a writer does to a table."""
        random, writer = self.random, self.writer
        key, part = random.choice(_KEYS), random.choice(_PARTS)
        day = date(2026, 1, 1 + random.randrange(5))
        by_key: Callable[[Row], bool] = lambda row: row.key == key  # noqa: E731
        of_day: Callable[[Row], bool] = lambda row: row.day == day  # noqa: E731
        more = self._rows(3)
        choices: list[tuple[float, str, Callable[[Table], Table]]] = [
            (4, "append", lambda one: writer.append(one, more)),
            (
                2,
                "replace part",
                lambda one: writer.replace_part(one, part, [r._replace(part=part) for r in more]),
            ),
            (1, "update", lambda one: writer.rewrite(one, by_key, lambda r: r._replace(value=r.value + 1))),
            (
                1,
                "move",
                lambda one: writer.rewrite(one, by_key, lambda r: r._replace(part=part, day=more[0].day)),
            ),
            (1, "delete", lambda one: writer.rewrite(one, by_key, lambda _: None)),
            (1, "delete day", lambda one: writer.rewrite(one, of_day, lambda _: None)),
            (1, "delete part", lambda one: writer.replace_part(one, part, ())),
            (2, "delete rows", lambda one: writer.delete_rows(one, by_key)),
            (1, "update rows", lambda one: writer.delete_rows(one, by_key, more)),
            (2, "compact", self._compacted),
        ]
        _, name, how = random.choices(choices, [one[0] for one in choices])[0]
        return name, how

    def _compacted(self, table: Table) -> Table:
        chosen = [one for one in table.data if self.random.random() < 0.7]
        return self.writer.compact(table, chosen) if chosen else table

    def _write_on_main(self) -> None:
        name = self.random.choice(self.inputs)
        table = self.lake.main.get(name)
        if table is None:
            self._create(name)
            return
        chance = self.random.random()
        if chance < 0.75:
            what, change = self._change_of(table)
            now = change(table)
        elif chance < 0.81 and len(table.metadata.snapshots) > 1:
            what, now = "roll back", self._rolled_back(table)
        elif chance < 0.815 or table.metadata.renamed:
            self._rename_days(name)
            return
        elif chance < 0.825 and len(self.inputs) > 1:
            first, second = self.inputs
            self.lake.put({first: self.lake.main.get(second), second: self.lake.main.get(first)})
            self.tell("swap", f"{first} and {second}")
            return
        elif chance < 0.83:
            self.tell("drop", name)
            self.lake.put({name: None})
            return
        elif chance < 0.88:
            what, now = "expire", self.writer.expire(table, 1 + self.random.randrange(3))
        elif chance < 0.92:
            self._roll_back_result()
            return
        elif chance < 0.95:
            self._assign_main()
            return
        else:
            self._change_parts()
            return
        idle = [kind for kind in self.kinds if self._idle(kind)]
        self.lake.put({name: now})
        self.tell(what, f"{name} {_shown(now)}")
        if what == "compact" and not all(map(self._idle, idle)):
            raise Violated("a compaction counts as a change")

    def _roll_back_result(self) -> None:
        """A consumer's own table to a snapshot that it had before, with all of its properties."""
        name = self.random.choice(self.kinds).name
        table = self.lake.main.get(name)
        if table is None or len(table.metadata.snapshots) < 2:
            return
        to = self.random.choice([one for one in table.metadata.snapshots if one is not table.head])
        self.lake.put({name: self.writer.roll_back(table, to)})
        self.tell("roll back a result", f"{name} to snapshot {to.snapshot_id}")

    def _assign_main(self) -> None:
        """`main` as a whole to an earlier state, or forward again."""
        state = max(0, len(self.lake.states) - 1 - self.random.randrange(6))
        if all(name in self.lake.states[state] for name in self.inputs):
            self.lake.assign(state)
            self.tell("main is set", f"to state {state}")

    def _change_parts(self) -> None:
        new = [part for part in _PARTS if part not in self.parts]
        if new and (len(self.parts) == 1 or self.random.random() < 0.7):
            self.parts.append(new[0])
            self.tell("partition", new[0])
        elif len(self.parts) > 1:
            gone = self.random.choice(self.parts)
            self.parts.remove(gone)
            self.tell("partition removed", gone)

    def _empty(self) -> Table:
        random = self.random
        return self.writer.create(by_part=random.random() < 0.6, moments=random.random() < 0.3)

    def _rename_days(self, name: str) -> None:
        """The column of the days gets another name, or its own again."""
        table = self.lake.main[name]
        back = table.metadata.renamed
        if back or all(kind.needs_days for kind in self.kinds if name in kind.inputs):
            self.lake.put({name: table.changed(renamed=not back)})
            self.tell("rename back" if back else "rename", name)

    def _create(self, name: str) -> None:
        made = self._empty()
        if self.random.random() < 0.8:
            made = self.writer.append(made, self._rows(3))
        self.lake.put({name: made})
        self.tell("create", f"{name} {_shown(made)}")

    def _rolled_back(self, table: Table) -> Table:
        """To a snapshot that the table knows, or to an older state of the whole table."""
        older = [one for one in table.metadata.snapshots if one is not table.head]
        if self.random.random() < 0.5 or not older:
            return self.writer.roll_back(table, self.random.choice(older)) if older else table
        uuid = table.metadata.table_uuid
        states = [
            one
            for tables in self.lake.states
            for one in tables.values()
            if one.metadata.table_uuid == uuid and one.head is not None
        ]
        return self.random.choice(states)

    def _change_definition(self, kind: Kind) -> None:
        if kind.definition is PARTS:
            self._change_parts()
        else:
            self._redefine(self.kinds.index(kind))

    def _redefine(self, number: int) -> None:
        """Other partitions for a consumer, whose runs at work have ended."""
        kind = self.kinds[number]
        if not kind.by_day:
            return
        self.waiting = [one for one in self.waiting if one.step is None or one.step.kind.name != kind.name]
        others: list[Any] = [DAYS, FEW_DAYS, PAIRS] + ([] if kind.from_start else [None])
        back = {id(DAYS): FEW_DAYS, id(FEW_DAYS): DAYS}.get(id(kind.definition))
        if back is not None and self.random.random() < 0.5:
            definition = back
        else:
            definition = self.random.choice([one for one in others if one is not kind.definition])
        self.kinds[number] = replace(kind, definition=definition)
        self.tell("redefine", f"{kind.name} as {definition}")

    # -- runs ------------------------------------------------------------------------------------------

    def _run(self) -> Run:
        self.runs += 1
        return Run(self.lake, f"r{self.runs}", len(self.lake.states) - 1)

    def _launch(self) -> None:
        """A run of an input, of a consumer, or of both, which stays at work for a while."""
        random = self.random
        run, kind = self._run(), random.choice(self.kinds)
        waiting = Waiting(run)
        chance = random.random()
        if chance < 0.35:
            self._write_in(run)
        if chance > 0.2 and all(name in run.view for name in kind.inputs):
            waiting.step = self._consume_in(run, kind)
        if not run.tables:
            return
        if random.random() < 0.5:
            self._end(waiting)
        else:
            self.waiting.append(waiting)

    def _write_in(self, run: Run) -> None:
        for name in self.inputs:
            if self.random.random() < 0.7:
                table = run.view.get(name) or self.writer.create(by_part=True)
                for _ in range(1 + self.random.randrange(2)):
                    what, change = self._change_of(table)
                    table = change(table)
                    self.tell(f"{what} on a branch", f"{run.run_id} {name} {_shown(table)}")
                run.tables[name] = table

    def _consume_in(self, run: Run, kind: Kind, *, rebuild: bool = False) -> Step | None:
        """The step of a consumer on a run's branch, for some of what is pending."""
        if self._is_renamed(kind, run.view):
            if kind.needs_days:
                self._require_gone(kind, run)
            return None
        partitions: tuple[str, ...] = ()
        if kind.definition is not None:
            known = self._keys(kind)
            try:
                wanted = self._pending(kind)
            except ChangeLost as lost:
                self.tell(f"lost: {lost.loss}", kind.name)
                wanted, rebuild = self._lost_partitions(kind), True
            # Somebody may launch any partition; most take what is pending.
            some = [p for p in known if (p in wanted) == (self.random.random() < 0.9)]
            partitions = tuple(some or sorted(wanted))
            if not partitions:
                return None
        rebuild = rebuild or self.random.random() < 0.04
        for attempt in range(2 if self.random.random() < 0.15 else 1):
            step = Step.of(kind, run, partitions=partitions, rebuild=rebuild, instance=self.instance)
            try:
                step.write(self.writer.create(by_part=False))
            except ChangeLost as lost:
                self.tell(f"lost: {lost.loss}", f"{kind.name} in {run.run_id}")
                if kind.when_lost != "fail":
                    raise
                rebuild = True
                step = Step.of(kind, run, partitions=partitions, rebuild=rebuild, instance=self.instance)
                step.write(self.writer.create(by_part=False))
            told = build_update(step.consumption).set.values()
            self.seen["rows beyond main"] += any('"beyond"' in one for one in told)
            self.seen["both tables"] += all(name in run.tables for name in kind.inputs)
            how = "everything" if step.consumption.whole else "a change"
            self.tell(
                f"{kind.pattern} of {how}"
                + (" again" if attempt else "")
                + (" in order" if kind.from_start else "")
                + (" and the day before" if kind.rolling else ""),
                f"{kind.name} in {run.run_id} at {run.base} {' '.join(partitions)}: {step.run.changes[kind.name]}",
            )
        return step

    @staticmethod
    def _is_renamed(kind: Kind, tables: Mapping[str, Table]) -> bool:
        return any(tables[name].metadata.renamed for name in kind.inputs if name in tables)

    def _require_gone(self, kind: Kind, run: Run) -> None:
        """The step of a consumer fails before it reads anything."""
        step = Step.of(kind, run, instance=self.instance)
        try:
            _ = step.consumption.inputs
        except InputColumnGone as gone:
            self.tell("column gone", f"{kind.name} in {run.run_id}: {gone.column}")
        else:
            raise Violated(f"{kind.name} does not notice that its column was renamed")

    def _end(self, one: Waiting) -> None:
        run = one.run
        if self.random.random() < 0.15:
            self.tell("discarded", run.run_id)
            return
        try:
            run.publish()
        except Refused as refused:
            self.tell("refused", f"{run.run_id}: {refused}")
            self.seen[f"refused: {str(refused).partition(': ')[2]}"] += 1
            return
        self.tell("published", f"{run.run_id} {' '.join(run.tables)}")
        if one.step is not None:
            self._require_seen(one.step)

    def _consume(self, kind: Kind) -> bool:
        """A run of all that is pending, published at once; whether there was anything."""
        if self._is_renamed(kind, self.lake.main):
            return False
        if kind.definition is not None:
            if not self._pending_or_all(kind):
                return False
        elif self._idle(kind):
            return False
        run = self._run()
        step = self._consume_in(run, kind)
        assert step is not None
        run.publish()
        self.tell("published", run.run_id)
        self._require_seen(step)
        return True

    def _idle(self, kind: Kind) -> bool:
        """Whether nothing has changed since the whole table stood at one place."""
        main = self.lake.main
        if any(name not in main for name in kind.inputs) or self._is_renamed(kind, main):
            return False
        try:
            floor = self._consumption(kind).positions.common_position
            if floor is None:
                return False
            return all(
                capture_change(main[name], floor.inputs[f"shop.{name}"], name=name).empty
                for name in kind.inputs
            )
        except ChangeLost:
            return False

    # -- what is pending -------------------------------------------------------------------------------

    def _consumption(self, kind: Kind, *, rebuild: bool = False) -> Consumption:
        """What a consumer has consumed of `main`, as the sensor asks for it, outside a run."""
        lake: Any = self.lake
        return Consumption(lake, kind.consumer, rebuild=rebuild, instance=self.instance)

    def _keys(self, kind: Kind) -> list[str]:
        if kind.definition is PARTS:
            return list(self.parts)
        return [*kind.definition.get_partition_keys()] if kind.definition is not None else []

    def _pending(self, kind: Kind) -> set[str]:
        main = self.lake.main
        if any(name not in main for name in kind.inputs) or self._is_renamed(kind, main):
            return set(self._keys(kind))
        wanted = find_pending_partitions(self._consumption(kind))
        self._require_rest(kind, wanted)
        return wanted

    def _lost_partitions(self, kind: Kind) -> set[str]:
        return find_partitions_to_rebuild(self._consumption(kind, rebuild=True))

    def _is_known(self, kind: Kind) -> bool:
        """Whether it can be told what a partitioned consumer has left."""
        try:
            self._pending(kind)
        except ChangeLost:
            return False
        return True

    def _pending_or_all(self, kind: Kind) -> set[str]:
        try:
            return self._pending(kind)
        except ChangeLost:
            return self._lost_partitions(kind)

    # -- what must hold --------------------------------------------------------------------------------

    def _require_seen(self, step: Step) -> None:
        """A published result is what a full computation over what the run saw gives."""
        kind, partitions = step.kind, step.consumption.partitions
        update = build_update(step.consumption)
        if kind.from_start:
            return  # computed too early, it is computed again, and `_require_rest` looks at all others
        if not (update.set or update.remove):
            return  # it found nothing to consume, and others may have consumed more before it was published
        self._compare(kind, kind.result(step.seen), partitions if kind.definition else None)

    def _require_rest(self, kind: Kind, wanted: set[str]) -> None:
        """Partitions for which nothing is pending are as though computed now."""
        full = kind.result({name: self.lake.main[name].rows for name in kind.inputs})
        self._compare(kind, full, [key for key in self._keys(kind) if key not in wanted])

    def _require_all(self, kind: Kind) -> None:
        full = kind.result({name: self.lake.main[name].rows for name in kind.inputs})
        self._compare(kind, full, self._keys(kind) if kind.definition else None)

    def _compare(self, kind: Kind, full: dict[Any, Any], places: Any) -> None:
        table = self.lake.main.get(kind.name)
        held = kind.shown(table.kept) if table else {}
        if places is not None:
            places = kind.places(places)
            full = {place: value for place, value in full.items() if place in places}
            held = {place: value for place, value in held.items() if place in places}
        if held != full:
            raise Violated(f"{kind.name} holds {held}, and a full computation gives {full}")


def _shown(table: Table) -> str:
    head = table.head
    if head is None:
        return "(empty)"
    deletes = head.deletes
    files = [f"{one.file_path}: {left(one, deletes)}" for one in table.data]
    return f"snapshot {head.snapshot_id}, {'; '.join(files)}".replace("Row", "").replace("datetime.date", "")
