"""Where an ingestion stands and what it reads next: any history leaves each record in its tables once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table import Table

from branchlake_dagster.ingest.errors import AnotherIngestion, PositionLost, TopicChanged
from branchlake_dagster.ingest.offsets import (
    OffsetRange,
    Offsets,
    TableProgress,
    Topic,
    TopicPartition,
    count_offsets,
    format_ranges,
    has_reached,
    merge_offsets,
)
from branchlake_dagster.ingest.planning import BatchPlan, TopicRules, plan_batch
from branchlake_dagster.ingest.progress import (
    IngestionProgress,
    OnRollback,
    read_progress,
    require_replayable,
    require_single_ingestion,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.suite import soak
from branchlake_dagster_tests.suite.raised import raising

NAME = "orders"
LENIENT = TopicRules("start_over", "continue_at_end", "skip")


@dataclass
class FakeTable:
    """What of an Iceberg table tells its positions, and its rows by snapshot."""

    snapshots: list[Any] = field(default_factory=list)
    current: int | None = None
    properties: dict[str, str] = field(default_factory=dict)
    rows: dict[int | None, tuple[int, ...]] = field(default_factory=lambda: {None: ()})

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(
            snapshots=self.snapshots, current_snapshot_id=self.current, properties=self.properties
        )

    @property
    def now(self) -> tuple[int, ...]:
        return self.rows[self.current]

    def append(self, number: int, rows: list[int], recorded: TableProgress) -> None:
        at = self.current
        if rows:
            summary = SimpleNamespace(additional_properties=recorded.to_summary(NAME))
            self.snapshots.append(
                SimpleNamespace(
                    snapshot_id=number,
                    parent_snapshot_id=self.current,
                    sequence_number=len(self.snapshots) + 1,
                    summary=summary,
                )
            )
            self.rows[number] = (*self.now, *rows)
            self.current = at = number
        self.properties[LakeProperty.OFFSETS_PREFIX + NAME] = replace(recorded, snapshot_id=at).to_json()

    def roll_back(self, steps: int) -> None:
        parents = {one.snapshot_id: one.parent_snapshot_id for one in self.snapshots}
        for _ in range(steps):
            self.current = parents.get(self.current)


def found(tables: dict[str, FakeTable], on_rollback: OnRollback = "stop") -> IngestionProgress:
    return read_progress(NAME, cast("dict[str, Table | None]", tables), on_rollback=on_rollback)


def topic(*spans: tuple[int, int], incarnation: str = "i", name: str = "t") -> Topic:
    return Topic(
        name,
        incarnation,
        {number: begin for number, (begin, _) in enumerate(spans)},
        {number: end for number, (_, end) in enumerate(spans)},
    )


def at(*offsets: int, incarnation: str = "i", name: str = "t") -> dict[TopicPartition, int]:
    return {TopicPartition(name, incarnation, number): offset for number, offset in enumerate(offsets)}


def earliest(one: Topic) -> Offsets:
    return {part: one.begins[part.partition] for part in one.partitions()}


def plan(
    *topics: Topic,
    start: Offsets,
    first: Any = earliest,
    most: int = 1000,
    rules: TopicRules | None = None,
    started: Offsets | None = None,
) -> BatchPlan:
    return plan_batch(
        topics, start, first, max_records=most, rules=rules or TopicRules(), first_offsets=started
    )


# -- the model: any history ------------------------------------------------------------------------------


class World:
    """A topic, two tables that take a part of its records each and one that takes all, and what is right."""

    def __init__(self, skipped: int = 0) -> None:
        """`skipped` records are before the offset at which the ingestion starts: another sink has them."""
        self.tables = {"even": FakeTable(), "odd": FakeTable(), "all": FakeTable()}
        self.log: dict[int, dict[int, int]] = {0: {}}
        self.begins = {0: 0}
        self.ends = {0: 0}
        self.incarnation = 0
        self.numbers = 0
        self.batches = 0
        self.optional: set[int] = set()
        """Records that a rule has let go."""
        self.left: dict[str, set[int]] = {name: set() for name in self.tables}
        """Records that were left out of a table because it was rolled back."""
        self.skipped = skipped
        if skipped:
            self.produce(0, skipped)
            self.batch(1000)

    def first(self, one: Topic) -> Offsets:
        return at(self.skipped, incarnation="i0") if self.skipped else earliest(one)

    def topic(self) -> Topic:
        return Topic("t", f"i{self.incarnation}", dict(self.begins), dict(self.ends))

    def takes(self, name: str, number: int) -> bool:
        return name == "all" or (number % 2 == 0) == (name == "even")

    def produce(self, partition: int, count: int) -> None:
        partition %= len(self.log)
        for _ in range(count):
            self.numbers += 1
            self.log[partition][self.ends[partition]] = self.numbers
            self.ends[partition] += 1

    def add_partition(self) -> None:
        number = len(self.log)
        self.log[number], self.begins[number], self.ends[number] = {}, 0, 0

    def expire(self, partition: int, count: int) -> None:
        """Retention deletes the oldest records, read or not."""
        partition %= len(self.log)
        begin = min(self.begins[partition] + count, self.ends[partition])
        for offset in range(self.begins[partition], begin):
            self.optional.add(self.log[partition].pop(offset))
        self.begins[partition] = begin

    def make_again(self) -> None:
        self.optional |= {one for log in self.log.values() for one in log.values()}
        self.log, self.begins, self.ends = {0: {}}, {0: 0}, {0: 0}
        self.incarnation += 1

    def truncate(self, partition: int, count: int) -> None:
        """The log loses its end, which is noticed before anything new comes: nothing else tells it."""
        self.drain(1000)
        partition %= len(self.log)
        end = max(self.ends[partition] - count, self.begins[partition])
        for offset in range(end, self.ends[partition]):
            self.optional.add(self.log[partition].pop(offset))
        self.ends[partition] = end
        self.batch(1000)

    def batch(self, most: int) -> bool:
        """One batch; whether there was anything to do."""
        try:
            known, topics = self.look("replay")
        except PositionLost:
            known, topics = self.look("skip")
            for name, table in self.tables.items():
                # Its choice: what it does not hold of what all have come past is left out.
                self.left[name] |= set(range(1, self.numbers + 1)) - set(table.now)
        planned = plan(
            *topics,
            start=known.start,
            first=self.first,
            most=most,
            rules=LENIENT,
            started=known.first_offsets,
        )
        if planned.is_empty:
            return False
        assert 0 <= count_offsets(planned.ranges) <= most
        floors = known.min_offsets(self.tables, planned.ranges)
        self.batches += 1
        batch = TableProgress(
            known.position_after(planned),
            f"b{self.batches}",
            "run",
            first_offsets=merge_offsets(known.first_offsets, planned.first_offsets),
        )
        for name, table in self.tables.items():
            rows = [
                number
                for one, span in planned.ranges.items()
                for offset in range(span.start, span.end)
                if (number := self.log[one.partition].get(offset)) is not None
                and self.takes(name, number)
                # As the pass over the records has it, which knows topics by their names alone.
                and not any(
                    offset < floor
                    for part, floor in floors.get(name, {}).items()
                    if part.partition == one.partition
                )
            ]
            if rows or name in known.replay_offsets or name == "all":
                mine = known.table_progress(name, batch, planned)
                table.append(self.batches, rows, mine)
        return True

    def roll_back(self, name: str, steps: int) -> None:
        self.tables[name].roll_back(steps)

    def roll_all_back(self, *steps: int) -> None:
        for table, back in zip(self.tables.values(), steps, strict=True):
            table.roll_back(back)

    def look(self, on_rollback: OnRollback) -> tuple[IngestionProgress, list[Topic]]:
        known = found(self.tables, on_rollback)
        now = [self.topic().with_recorded_resets(known.position)]
        require_replayable(known, now)
        return known, now

    def drain(self, most: int) -> None:
        for _ in range(300):
            if not self.batch(most):
                return
        raise AssertionError("it never ends")

    def check(self) -> None:
        for name, table in self.tables.items():
            counts = Counter(table.now)
            assert not [number for number, count in counts.items() if count > 1], f"{name}: doubled"
            assert not {*counts} & {*range(1, self.skipped + 1)}, f"{name}: read before the start"
            wanted = {
                number for number in range(self.skipped + 1, self.numbers + 1) if self.takes(name, number)
            } - self.optional
            lost = wanted - set(counts) - self.left[name]
            assert not lost, f"{name} lost {sorted(lost)}"
            assert not [number for number in counts if not self.takes(name, number)]


_STEP = st.sampled_from(
    [
        *["produce"] * 4,
        *["batch"] * 5,
        *["roll_back"] * 2,
        *["roll_all_back", "add_partition", "expire", "make_again", "truncate"],
    ]
)
_few = st.integers(0, 4)
_ARGUMENTS: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "produce": st.tuples(_few, st.integers(1, 9)),
    "batch": st.tuples(st.integers(1, 6)),
    "roll_back": st.tuples(st.sampled_from(["even", "odd", "all"]), st.integers(1, 3)),
    "roll_all_back": st.tuples(_few, _few, _few),
    "add_partition": st.just(()),
    "expire": st.tuples(_few, _few),
    "make_again": st.just(()),
    "truncate": st.tuples(_few, _few),
}
_STEPS = _STEP.flatmap(lambda name: st.tuples(st.just(name), _ARGUMENTS[name]))


@pytest.mark.long
@settings(max_examples=300 if soak.soaking() else 100)
@given(st.lists(_STEPS, min_size=12, max_size=30), st.integers(1, 6), st.sampled_from([0, 3]))
def test_any_history_leaves_each_record_in_its_tables_once(
    steps: list[tuple[str, tuple[Any, ...]]], most: int, skipped: int
) -> None:
    world = World(skipped)
    for name, arguments in steps:
        getattr(world, name)(*arguments)
    world.drain(most)
    world.check()


# -- the next batch ----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), min_size=1, max_size=12), st.integers(1, 400)
)
def test_a_batch_has_at_most_so_many_records_and_leaves_out_nothing_else(
    spans: list[tuple[int, int]], most: int
) -> None:
    one = topic(*((begin, begin + count) for begin, count in spans))
    planned = plan(one, start={}, most=most)
    waiting = sum(count for _, count in spans)
    assert count_offsets(planned.ranges) == min(most, waiting)
    assert planned.lag == waiting - count_offsets(planned.ranges)
    for part, span in planned.ranges.items():
        assert span.start == one.begins[part.partition] < span.end <= one.ends[part.partition]
    # Where the others stand is told too: what is deleted before their turn is then missed.
    assert {*planned.ranges, *planned.advanced_offsets} == {*one.partitions()}


def test_partitions_take_part_by_what_waits_in_them() -> None:
    planned = plan(topic((0, 900), (0, 100), (5, 5)), start={}, most=100)
    assert {part.partition: len(span) for part, span in planned.ranges.items()} == {0: 90, 1: 10}


def test_reading_starts_at_the_end_where_that_is_wanted_and_only_once() -> None:
    def ends(one: Topic) -> Offsets:
        return {part: one.ends[part.partition] for part in one.partitions()}

    planned = plan(topic((0, 7), (0, 9)), start={}, first=ends)
    assert (planned.ranges, dict(planned.advanced_offsets), planned.is_empty) == ({}, at(7, 9), False)
    # What comes after it is read, and a partition that is added later from its start.
    later = plan(topic((0, 8), (0, 9), (0, 4)), start=at(7, 9), first=ends)
    assert later.ranges == {
        TopicPartition("t", "i", 0): OffsetRange(7, 8),
        TopicPartition("t", "i", 2): OffsetRange(0, 4),
    }


def test_nothing_is_reported_of_an_empty_topic() -> None:
    assert plan(topic((0, 0)), start={}).is_empty
    assert plan(topic((3, 3)), start=at(3)).is_empty


def test_a_topic_that_is_not_what_it_was_stops_everything_or_goes_by_the_rule() -> None:
    again = topic((0, 4), incarnation="j")
    with raising(TopicChanged, "i", "j", reason="recreated", subject="t") as caught:
        plan(again, start=at(9))
    planned = plan(again, start=at(9), rules=TopicRules(on_recreated="start_over"))
    assert planned.ranges == {TopicPartition("t", "j", 0): OffsetRange(0, 4)}
    assert planned.notes == (caught.value.message,)
    # At once, so that it is not told again when the first records come.
    assert not plan(topic((0, 0), incarnation="j"), start=at(9), rules=TopicRules("start_over")).is_empty

    with raising(TopicChanged, 4, 6, reason="records_deleted", subject="t[0]"):
        plan(topic((7, 9)), start=at(4))
    planned = plan(topic((7, 9)), start=at(4), rules=TopicRules(on_lost="skip"))
    assert planned.ranges == {TopicPartition("t", "i", 0): OffsetRange(7, 9)}
    gone = plan(topic((9, 9)), start=at(4), rules=TopicRules(on_lost="skip"))
    assert (dict(gone.advanced_offsets), gone.is_empty) == (at(9), False)

    with raising(TopicChanged, 0, 2, reason="records_deleted", subject="t[1]"):  # of an added partition
        plan(topic((0, 5), (3, 9)), start=at(5))
    planned = plan(topic((0, 5), (3, 9)), start=at(5), rules=TopicRules(on_lost="skip"))
    assert planned.ranges == {TopicPartition("t", "i", 1): OffsetRange(3, 9)}
    assert len(planned.notes) == 1

    with raising(TopicChanged, 5, 9, reason="end_set_back", subject="t[0]"):
        plan(topic((0, 5), (0, 3)), start=at(9, 2))
    planned = plan(topic((0, 5), (0, 3)), start=at(9, 2), rules=TopicRules(on_reset="continue_at_end"))
    assert planned.ranges == {TopicPartition("t", "i~1", 1): OffsetRange(2, 3)}
    assert dict(planned.advanced_offsets) == {TopicPartition("t", "i~1", 0): 5}
    assert planned.topics["t"].incarnation == "i~1"
    # From then on the smaller offsets count.
    position = merge_offsets(at(9, 2), planned.advanced_offsets, {TopicPartition("t", "i~1", 1): 3})
    later = topic((0, 6), (0, 3)).with_recorded_resets(position)
    assert plan(later, start=position).ranges == {TopicPartition("t", "i~1", 0): OffsetRange(5, 6)}


def test_a_partition_that_was_read_and_is_gone_is_missed() -> None:
    one, read = topic((0, 5)), at(3, 7)
    with raising(TopicChanged, 7, reason="partition_missing", subject="t[1]"):
        plan(one, start=read)
    planned = plan(one, start=read, rules=LENIENT)
    assert planned.ranges == {TopicPartition("t", "i", 0): OffsetRange(3, 5)}
    assert len(planned.notes) == 1
    assert plan(topic((0, 3)), start=read, rules=LENIENT).is_empty, "the note alone is no batch"
    # It continues where it was when it is back, also after a reset of the others.
    planned = plan(topic((0, 2)), start=read, rules=LENIENT)
    position = merge_offsets(read, planned.advanced_offsets)
    back = topic((0, 2), (0, 9)).with_recorded_resets(position)
    assert plan(back, start=position).ranges == {TopicPartition("t", "i~1", 1): OffsetRange(7, 9)}


def test_ranges_are_formatted() -> None:
    spans = {TopicPartition("t", "i", n): OffsetRange(n, 2 * n) for n in range(8)}
    assert format_ranges(spans, max_partitions=2) == "t[1] 1 to 1, t[2] 2 to 3 and 5 more"
    assert format_ranges({}) == "nothing"


# -- what tables say ---------------------------------------------------------------------------------------

_PARTS = st.builds(TopicPartition, st.sampled_from(["t", "a@b", "ü.x"]), st.text("aA-_~1", min_size=1), _few)
_OFFSETS = st.dictionaries(_PARTS, st.integers(0, 1 << 60), max_size=5)


@given(_OFFSETS, _OFFSETS, st.none() | st.integers(0, 1 << 50), st.none() | st.integers(0, 1 << 62))
def test_what_is_recorded_is_read_back(
    offsets: dict[TopicPartition, int],
    until: dict[TopicPartition, int],
    valid: int | None,
    snapshot: int | None,
) -> None:
    told = TableProgress(offsets, "commit", "run", valid, snapshot, until)
    assert TableProgress.from_json(told.to_json()) == told
    summary = told.to_summary(NAME)
    assert TableProgress.from_json(summary[LakeProperty.OFFSETS_PREFIX + NAME]).offsets == offsets
    assert (summary[LakeProperty.COMMIT_ID], summary.get(LakeProperty.VALID_THROUGH_MS)) == (
        "commit",
        None if valid is None else str(valid),
    )


@given(_OFFSETS, _OFFSETS)
def test_positions_are_merged_by_their_maximum(
    one: dict[TopicPartition, int], other: dict[TopicPartition, int]
) -> None:
    both = merge_offsets(one, other)
    assert both == merge_offsets(other, one)
    assert has_reached(both, one)
    assert has_reached(both, other)
    assert all(offset in (one.get(part), other.get(part)) for part, offset in both.items())


def table(*batches: Offsets) -> FakeTable:
    made = FakeTable()
    for number, offsets in enumerate(batches, 1):
        made.append(number, [number], TableProgress(offsets, f"c{number}", "run"))
    return made


def test_a_table_that_had_nothing_in_a_batch_is_as_far_as_the_others() -> None:
    known = found({"a": table(at(5)), "b": table(at(2), at(9, 4))})
    assert (known.position, known.replay_offsets, known.start) == (at(9, 4), {}, at(9, 4))
    assert found({}).start == {}


def test_a_table_that_was_rolled_back_stops_is_filled_again_or_is_left_as_it_is() -> None:
    back = table(at(5), at(9))
    back.roll_back(1)
    tables = {"a": table(at(9)), "b": back}
    with raising(PositionLost, NAME, 'on_rollback="replay"', reason="rolled_back"):
        found(tables)
    again = found(tables, "replay")
    assert (again.position, again.start, again.replay_offsets) == (at(9), at(5), {"b": at(5)})
    assert again.min_offsets(["a", "b"], {TopicPartition("t", "i", 0): OffsetRange(5, 9)}) == {
        "a": at(9),
        "b": at(5),
    }
    left = found(tables, "skip")
    assert (left.start, left.replay_offsets) == (at(9), {})
    # To before all that was ever put into it.
    back.roll_back(1)
    assert found(tables, "replay").replay_offsets == {"b": at(0)}


def test_a_table_rolled_back_below_the_start_offset_is_filled_again_from_that_offset() -> None:
    """Before it are the rows of the sink that was taken over: they would be in the table twice."""
    one, world = topic((0, 9), (0, 9)), FakeTable()
    planned = plan(one, start={}, first=lambda _: at(7, 0))
    assert dict(planned.first_offsets) == {one.partitions()[0]: 7}
    world.append(0, [-1], TableProgress({}, "old sink", "run"))
    del world.properties[LakeProperty.OFFSETS_PREFIX + NAME]
    world.snapshots[0].summary.additional_properties = {}
    world.append(1, [1], TableProgress(at(9, 9), "c", "run", first_offsets=planned.first_offsets))
    # The batch after it does not start anything, and the start is still known.
    known = found({"t": world})
    assert dict(known.first_offsets) == dict(planned.first_offsets)
    world.roll_back(1)
    assert found({"t": world}, "replay").start == at(7, 0)


def test_what_no_topic_has_any_more_cannot_fill_a_table_again() -> None:
    back = table(at(5), at(9))
    back.roll_back(1)
    known = found({"b": back}, "replay")
    require_replayable(known, [topic((0, 12))])
    with raising(PositionLost, reason="topic_gone", subject="t"):
        require_replayable(known, [topic((0, 12), incarnation="j")])


def test_where_snapshots_have_expired_the_property_is_enough() -> None:
    kept = table(at(5), at(9))
    del kept.snapshots[0]
    assert found({"a": kept}).position == at(9)
    # Rolled back by then as well, nobody knows how far it is.
    lost = table(at(5), at(9), at(11))
    lost.roll_back(1)
    del lost.snapshots[0]
    for one in lost.snapshots:
        one.summary = None
    with raising(PositionLost, reason="snapshots_expired"):
        found({"a": lost}, "replay")


def test_snapshots_that_expire_after_a_roll_back_do_not_make_it_unseen() -> None:
    """It stood still as rolled back, until the maintenance of a night took the evidence away."""
    back = table(at(5), at(9), at(11))
    back.roll_back(1)
    back.snapshots = [one for one in back.snapshots if one.snapshot_id == 2]
    with raising(PositionLost, reason="rolled_back"):
        found({"a": back})
    assert found({"a": back}, "replay").replay_offsets == {"a": at(9)}
    # That of somebody else, put on top of what has expired, says nothing against it.
    grown = table(at(5), at(9))
    theirs = {"snapshot_id": 3, "parent_snapshot_id": 2, "sequence_number": 3, "summary": None}
    grown.snapshots, grown.current = [SimpleNamespace(**theirs)], 3
    assert found({"a": grown}).start == at(9)


@pytest.mark.parametrize(
    "value", ['{"topics": 5}', "null", "[]", "[" * 100_000], ids=["fields", "null", "list", "nested"]
)
def test_a_property_that_cannot_be_read_is_replaced_by_the_snapshots_or_is_an_error(value: str) -> None:
    damaged = table(at(5))
    damaged.properties[LakeProperty.OFFSETS_PREFIX + NAME] = value
    assert found({"a": damaged}).position == at(5)
    removed = table(at(5))
    removed.properties.clear()
    assert found({"a": removed}).position == at(5)
    damaged.snapshots[0].summary = None
    with raising(PositionLost, reason="offsets_unreadable"):
        found({"a": damaged})


def test_two_ingestions_do_not_fill_one_table_from_one_topic() -> None:
    filled = cast("dict[str, Table | None]", {"shop.a": table(at(5)), "shop.b": None})
    require_single_ingestion(NAME, filled, {"t": "i"})
    require_single_ingestion("other", filled, {"t": "j", "u": "i"})
    with raising(AnotherIngestion, "topic t", subject=NAME, table="shop.a"):
        require_single_ingestion("other", filled, {"t": "i"})
