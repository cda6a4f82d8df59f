"""Valid-through times of consumers, in random histories: a time is reached only if its rows are on `main`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import count
from random import Random
from typing import Any, cast

import pytest
from dagster import (
    AssetKey,
    AssetSpec,
    DailyPartitionsDefinition,
    PartitionsDefinition,
    WeeklyPartitionsDefinition,
)

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.affected_partitions import Reach
from branchlake_dagster.incremental.consumer_partitions import find_partitions_to_rebuild
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.consumption_update import build_update
from branchlake_dagster.incremental.declaration import Consumer, Pattern, parse_declaration
from branchlake_dagster.incremental.pending import windows_end_ms
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.incremental.valid_through import (
    InputTime,
    UnconsumedPart,
    ValidThrough,
    table_time_ms,
    to_epoch_ms,
)
from branchlake_dagster.ingest.offsets import TableProgress, TopicPartition
from branchlake_dagster.ingest.published_through import PublishedTime, TimeReader
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.incremental.iceberg import Row, Table
from branchlake_dagster_tests.incremental.lake import Lake, Refused, Run
from branchlake_dagster_tests.incremental.model_files import model_files
from branchlake_dagster_tests.incremental.writing import Writer

FIRST = date(2026, 8, 2)
HOUR = 3_600_000
START = to_epoch_ms(datetime(2026, 8, 2, tzinfo=UTC))
INPUTS = {"raw": (), "more": (), "silver": ("raw",), "gold": ("silver",), "total": ("gold", "more")}
PARTITIONED = ("silver", "gold")


def day_of(ms: int) -> date:
    return (datetime(1970, 1, 1) + timedelta(milliseconds=ms)).date()


@dataclass
class World:
    """Two ingested tables, two daily consumers in a chain, and a whole table that consumes the second one.

    A row's value is the time of its record, ms since 1970; a partition is its day.
    """

    random: Random
    current_day: bool
    now_ms: int = START
    numbers: count[int] = field(default_factory=lambda: count(1))
    reached: Counter[str] = field(default_factory=Counter)
    rolled_back: int = 0

    def __post_init__(self) -> None:
        self.lake = Lake(Writer(self.random))
        self.waiting: list[Run] = []
        for name in ("raw", "more"):
            self.ingest(name)

    # -- the code location -------------------------------------------------------------------------------

    def definition(self) -> DailyPartitionsDefinition:
        """The days that are over, and with `current_day` also the one that is not."""
        end = day_of(self.now_ms) + timedelta(int(self.current_day))
        return DailyPartitionsDefinition(FIRST.isoformat(), end_date=max(end, FIRST).isoformat())

    def consumer(self, name: str) -> Consumer:
        by_day = name in PARTITIONED
        metadata = table_metadata(partition_by="day" if by_day else None) | consumes(
            {AssetKey(["shop", one]): cast("Pattern", "range") for one in INPUTS[name]},
            when_lost="rebuild",
            **({} if by_day else {"on": "day"}),
        )
        declaration = parse_declaration(metadata, asset=name)
        assert declaration is not None
        definition: PartitionsDefinition[str] | None = self.definition() if by_day else None
        spec = AssetSpec(AssetKey(["shop", name]), metadata=metadata)
        return build_consumer(spec, declaration, definition, "shop")

    def time_of(self, name: str, *, is_declared: bool = True) -> PublishedTime:
        def load(wanted: Mapping[str, tuple[str, ...]]) -> Mapping[str, Any]:
            return {one: self.lake.main.get(identifier[-1]) for one, identifier in wanted.items()}

        def of(identifier: tuple[str, ...]) -> Consumer | None:
            return self.consumer(identifier[-1]) if is_declared and INPUTS[identifier[-1]] else None

        return TimeReader(load, "shop", of).published_time(("shop", name))

    # -- what happens ------------------------------------------------------------------------------------

    def ingest(self, name: str, *, days_late: Sequence[int] = ()) -> None:
        """A batch, published at once: its rows are of today, or of so many days ago."""
        table = self.lake.main.get(name) or self.lake.writer.create(by_part=True)
        for late in days_late:
            self.now_ms += self.random.randrange(1, 4 * HOUR)
            day = max(FIRST, day_of(self.now_ms) - timedelta(late))
            row = Row(day.isoformat(), day, str(next(self.numbers)), self.now_ms)
            table = self.lake.writer.append(table, [row])
        recorded = TableProgress(
            {TopicPartition(name, "id", 0): next(self.numbers)},
            "commit",
            "run",
            self.now_ms,
            table.metadata.current_snapshot_id,
        )
        self.put(name, table.changed(properties={f"{LakeProperty.OFFSETS_PREFIX}i": recorded.to_json()}))

    def put(self, name: str, table: Table) -> None:
        self.lake.put({name: table})

    def pending(self, name: str) -> list[str | None]:
        """What a sensor would launch; everything where the change is lost."""
        if not all(one in self.lake.main for one in INPUTS[name]):
            return []
        consumer = self.consumer(name)
        if consumer.definition is None:
            return [None]
        consumption = Consumption(self.run(), consumer)
        return [*sorted(find_partitions_to_rebuild(consumption))]

    def run(self) -> Run:
        return Run(self.lake, f"run-{next(self.numbers)}", len(self.lake.states) - 1)

    def consume(self, name: str, partition: str | None) -> Run:
        """Compute the partition, or all of the table, from what the inputs hold. It is not published yet."""
        run, consumer = self.run(), self.consumer(name)
        partitions = (partition,) if partition is not None else ()
        consumption = Consumption(run, consumer, partitions=partitions)
        rows = [row for one in INPUTS[name] for row in run.view[one].rows.elements()]
        if partition is not None:
            rows = [row for row in rows if row.part == partition]
        table = run.view.get(name) or self.lake.writer.create(by_part=True)
        table = self.lake.writer.rewrite(
            table, lambda row: partition is None or row.part == partition, lambda _: None, rows
        )
        update = build_update(consumption, table.metadata.current_snapshot_id)
        kept = {key: text for key, text in table.metadata.properties.items() if key not in update.remove}
        run.tables[name] = table.changed(properties={**kept, **update.set})
        return run

    def launch(self, name: str) -> None:
        """Some of what is pending, published now or later."""
        wanted = self.pending(name)
        for partition in self.random.sample(wanted, k=min(len(wanted), self.random.randrange(1, 3))):
            self.waiting.append(self.consume(name, partition))
        while self.waiting and self.random.random() < 0.8:
            with suppress(Refused):
                self.waiting.pop(0).publish()

    def roll_back(self, name: str) -> None:
        """Runs at work on it are refused by the publisher, which the model does not have."""
        self.waiting = [run for run in self.waiting if name not in run.tables]
        table = self.lake.main.get(name)
        if table is not None and (earlier := table.metadata.snapshots[:-1]):
            self.put(name, self.lake.writer.roll_back(table, self.random.choice(earlier)))
            self.rolled_back += 1

    def catch_up(self) -> None:
        self.waiting.clear()
        for name in ("silver", "gold", "total"):
            for partition in self.pending(name):
                self.consume(name, partition).publish()

    # -- what must hold ------------------------------------------------------------------------------------

    def require_rows(self, name: str, found: PublishedTime) -> None:
        """All rows that are older than the time, and of a day before it, are in the table on `main`."""
        if found.at is None:
            return
        self.reached[name] += 1
        through, roots = to_epoch_ms(found.at), ["raw", "more"] if name == "total" else ["raw"]
        held = self.lake.main[name].rows
        for row in (row for root in roots for row in self.lake.main[root].rows):
            assert row.day is not None
            begins = to_epoch_ms(datetime(row.day.year, row.day.month, row.day.day, tzinfo=UTC))
            if row.value < through and begins < through:
                assert row in held, f"{name} lacks {row}, and it is valid through {found.at}"

    def require(self) -> None:
        for name in ("silver", "gold", "total"):
            for is_declared in (True, False):
                self.require_rows(name, self.time_of(name, is_declared=is_declared))

    def require_all(self) -> None:
        """After everything was consumed: the time of the inputs, or the end of the last day that there is."""
        last = self.definition().get_last_partition_window()
        raw, more = (self.time_of(one).at for one in ("raw", "more"))
        assert raw is not None
        assert more is not None
        assert last is not None
        expected = min(raw, last.end)
        for name, at in {"silver": expected, "gold": expected, "total": min(expected, more)}.items():
            found = self.time_of(name)
            assert found.at == at, f"{name}: {found.reason}"


def play(seed: int, *, rolls_back: bool = False) -> World:
    world = World(Random(seed), current_day=seed % 2 == 0)
    for _ in range(50):
        chance = world.random.random()
        if chance < 0.35:
            world.ingest("raw", days_late=world.random.choices([0, 0, 0, 1, 2, -1], k=2))
        elif chance < 0.4:
            world.ingest("more", days_late=[0])
        elif chance < 0.45:
            world.now_ms += world.random.randrange(20 * HOUR)
            world.ingest("raw")
        elif chance < 0.5 and rolls_back:
            world.roll_back(world.random.choice(["silver", "gold"]))
        else:
            world.launch(world.random.choice(["silver", "gold", "total"]))
        world.require()
    return world


@pytest.fixture
def world() -> Iterator[World]:
    """Two days whose rows all consumers have, and the day that begins."""
    found = World(Random(3), current_day=True)
    with model_files():
        found.ingest("raw", days_late=[0])
        found.now_ms = START + 49 * HOUR
        found.ingest("raw", days_late=[0, 1])
        found.ingest("more")
        found.catch_up()
        yield found


def day_start(number: int) -> datetime:
    return datetime(2026, 8, number, tzinfo=UTC)


def test_the_time_of_the_inputs_is_carried_through_all_stages(world: World) -> None:
    raw, more = world.time_of("raw").at, world.time_of("more").at
    assert raw is not None
    assert raw > day_start(4)
    assert world.time_of("silver").at == world.time_of("gold").at == raw
    assert world.time_of("total").at == more
    assert world.time_of("total").sources == world.time_of("gold").sources | {"shop.more"}
    world.ingest("more")
    assert world.time_of("total").at == raw, "the earliest of the inputs' times counts"


def test_late_rows_take_back_no_time_that_was_reached(world: World) -> None:
    before = world.time_of("raw").at
    world.ingest("raw", days_late=[2])
    assert world.time_of("silver").at == before, "what was recorded when the day was last consumed"
    assert world.time_of("gold").at == before, "it is not behind its own input"
    world.consume("silver", "2026-08-02").publish()
    assert world.time_of("silver").at == world.time_of("raw").at
    assert world.time_of("gold").at == before


def test_a_day_that_was_never_consumed_does_not_hold_back_the_days_before_it(world: World) -> None:
    world.now_ms = START + 73 * HOUR
    world.ingest("raw", days_late=[0])
    assert world.time_of("silver").at == day_start(5)
    assert world.time_of("gold").at is not None
    world.consume("silver", "2026-08-05").publish()
    assert world.time_of("silver").at == world.time_of("raw").at
    assert world.time_of("gold").at == day_start(5)


def test_a_day_that_is_not_a_partition_yet_ends_the_time(world: World) -> None:
    world.current_day = False
    assert world.time_of("silver").at == world.time_of("gold").at == day_start(4)


def test_a_table_without_partitions_is_as_far_as_its_last_run(world: World) -> None:
    before = world.time_of("total").at
    world.ingest("more", days_late=[0])
    assert world.time_of("total").at == before
    world.ingest("raw")
    world.consume("total", None).publish()
    assert world.time_of("total").at == min(world.time_of("raw").at, world.time_of("more").at)


def test_an_input_without_a_time_gives_none(world: World) -> None:
    table = world.lake.main["more"]
    world.put("more", table.changed(properties={}))
    found = world.time_of("total")
    assert (found.at, found.ingested) == (None, False)
    assert "shop/more" in found.reason
    assert world.time_of("gold").at is not None


@pytest.mark.parametrize("name", ["silver", "gold"])
def test_a_table_that_was_rolled_back_has_no_time(world: World, name: str) -> None:
    table = world.lake.main[name]
    world.put(name, world.lake.writer.roll_back(table, table.metadata.snapshots[0]))
    for is_declared in (True, False):
        assert world.time_of(name, is_declared=is_declared).at is None
    assert world.time_of("gold").at is None, "its own input, or itself"
    world.catch_up()
    assert world.time_of("gold").at == world.time_of("raw").at


def test_partitions_that_were_defined_anew_have_no_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ingest("raw", days_late=[0, 1])
    world.consume("silver", "2026-08-04").publish()  # it is ahead of the others
    weeks = WeeklyPartitionsDefinition("2026-08-02", end_date="2026-08-09")
    monkeypatch.setattr(world, "definition", lambda: weeks)
    assert world.time_of("silver").at is None


def test_earlier_partitions_of_an_input_bring_older_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ingest("more", days_late=[0])
    assert world.time_of("total").at is not None
    days = DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")
    monkeypatch.setattr(world, "definition", lambda: days)
    assert world.time_of("gold").at is not None
    assert world.time_of("total").at is None, "what it has consumed says nothing of the first of August"
    world.consume("gold", "2026-08-01").publish()
    world.consume("silver", "2026-08-01").publish()
    world.catch_up()
    assert world.time_of("total").at is not None


def test_before_the_first_day_is_over_no_row_exists(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    days = DailyPartitionsDefinition("2026-08-02", end_date="2026-08-02")
    monkeypatch.setattr(world, "definition", lambda: days)
    assert windows_end_ms(world.consumer("silver")) == START
    assert windows_end_ms(world.consumer("total")) is None


def test_keys_that_are_added_are_another_source() -> None:
    time, window = InputTime(5, frozenset({"shop.raw"})), "2026-08-01T00:00:00+00:00/"
    before = time.with_partitions("shop.silver", {"day": f"{window}2026-08-04", "region": ["eu"]})
    assert before == time.with_partitions("shop.silver", {"day": f"{window}2026-08-09", "region": ["eu"]})
    assert before != time.with_partitions(
        "shop.silver", {"day": f"{window}2026-08-04", "region": ["eu", "us"]}
    )
    assert before.sources > time.sources
    assert time.with_partitions("shop.silver", {}) == time


def test_a_table_of_another_code_location_is_as_far_as_its_runs(world: World) -> None:
    before = world.time_of("silver").at
    world.ingest("raw")
    assert world.time_of("silver").at == world.time_of("raw").at
    assert world.time_of("silver", is_declared=False).at == before
    assert world.time_of("gold", is_declared=False).at == before


@pytest.mark.parametrize(
    "content",
    [
        '{"inputs": [], "run": "r", "base": "b"}',
        '{"inputs": {"t": 7}, "run": "r", "base": "b"}',
        '{"inputs": {"t": {"table": "u", "snapshot": "7"}}, "run": "r", "base": "b"}',
        '{"inputs": {"t": {"table": "u", "snapshot": 7, "columns": {"a": "1"}}}, "run": "r", "base": "b"}',
        '{"inputs": {"t": {"table": "u", "snapshot": 7, "columns": "ab"}}, "run": "r", "base": "b"}',
        '{"inputs": {"t": {"table": "u", "snapshot": 7, "columns": null}}, "run": "r", "base": "b"}',
        '{"inputs": {}, "run": 7, "base": "b"}',
        '{"inputs": {}, "run": "r", "base": null}',
        '{"inputs": {}, "run": "r", "base": "b", "covers": 1}',
        '{"inputs": {}, "run": "r", "base": "b", "at": "7"}',
        "[]",
        "7",
    ],
)
def test_a_record_with_a_field_of_another_type_cannot_be_read(content: str) -> None:
    with pytest.raises(TypeError):
        ConsumptionRecord.from_json(content)


def test_what_was_consumed_of_other_inputs_does_not_count() -> None:
    position = Position("uuid", 1)
    recorded = ValidThrough(7, 5, frozenset({"shop.raw"}))
    consumed = ConsumptionRecord({"shop.silver": position}, valid_through=recorded)
    assert ConsumptionRecord.from_json(consumed.to_json()) == consumed
    assert consumed.inputs_time_ms(["shop.silver"], frozenset({"shop.raw"})) == 7
    assert consumed.inputs_time_ms(["shop.silver", "shop.new"], frozenset({"shop.raw"})) is None
    assert consumed.inputs_time_ms(["shop.silver"], frozenset({"shop.raw", "shop.more"})) is None


@pytest.mark.parametrize(
    ("parts", "end_ms", "expected"),
    [
        ([], None, 100),
        ([], 90, 90),
        ([UnconsumedPart(50, None)], 90, 50),
        ([UnconsumedPart(50, 70), UnconsumedPart(80, 60)], 90, 70),
        ([UnconsumedPart(120, None)], 150, 100),
        ([UnconsumedPart(None, 40)], None, 40),
        ([UnconsumedPart(None, None), UnconsumedPart(80, 80)], 90, None),
    ],
)
def test_the_earliest_unconsumed_part_decides(
    parts: list[UnconsumedPart], end_ms: int | None, expected: int | None
) -> None:
    assert table_time_ms(100, parts, end_ms) == expected


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (Reach(), "2026-08-04T06:00"),
        (Reach(before=timedelta(days=3), start_offset=-2), "2026-08-04T06:00"),
        (Reach(after=timedelta(hours=2)), "2026-08-04T04:00"),
        (Reach(end_offset=1), "2026-08-03T00:00"),
        (Reach(after=timedelta(hours=7), end_offset=1), "2026-08-02T00:00"),
        (Reach(end_offset=-1), "2026-08-04T06:00"),
    ],
)
def test_results_that_depend_on_later_rows_are_behind(reach: Reach, expected: str) -> None:
    through = datetime(2026, 8, 4, 6, tzinfo=UTC)
    days = DailyPartitionsDefinition("2026-08-01", end_date="2026-08-09")
    assert reach.complete_before(days, through) == datetime.fromisoformat(f"{expected}+00:00")


@pytest.mark.long
@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_time_is_reached_only_if_its_rows_exist(rolls_back: bool) -> None:
    reached: Counter[str] = Counter()
    rolled_back = 0
    for seed in range(1000, 1004):
        with model_files():
            world = play(seed, rolls_back=rolls_back)
            world.ingest("raw", days_late=[0] * 12)
            world.ingest("more")
            world.catch_up()
            world.require()
            reached += world.reached
            rolled_back += world.rolled_back
            world.require_all()
    assert min(reached[name] for name in ("silver", "gold", "total")) > 30, reached
    assert (rolled_back > 2) is rolls_back
