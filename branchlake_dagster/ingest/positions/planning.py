"""The ranges of the next batch, from where the tables are and what the topics have. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from branchlake_dagster.ingest.errors import TopicChanged
from branchlake_dagster.ingest.positions.offsets import (
    OffsetRange,
    Offsets,
    Ranges,
    TopicPartition,
    records,
)
from branchlake_dagster.ingest.positions.topic import Topic


@dataclass(frozen=True)
class Rules:
    """What is done when a topic is not what the tables were filled from."""

    on_recreated: Literal["stop", "start_over"] = "stop"
    on_reset: Literal["stop", "continue_at_end"] = "stop"
    on_lost: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class BatchPlan:
    """The ranges of a batch, `lag` (records left after it), and what was passed over, in words.

    `passed` is where partitions stand that have no range in this batch, and that no table has recorded yet:
    moved on by a rule, or begun at what was their start. `due`: it is recorded even if nothing is read.
    `topics` are they as this batch has them: under another name where their offsets are set back with it.
    `started` has the first offset of each partition that starts with this batch, unless that is 0.
    """

    ranges: Ranges
    lag: int
    notes: tuple[str, ...] = ()
    passed: Offsets = field(default_factory=dict)
    due: bool = False
    topics: Mapping[str, Topic] = field(default_factory=dict)
    started: Offsets = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read and nothing to tell."""
        return not self.ranges and not self.due


def narrowed(plan: BatchPlan, ranges: Ranges) -> BatchPlan:
    """The plan with the first of its offsets only; the others wait for the next batch."""
    behind = records(plan.ranges) - records(ranges)
    waiting = {one: span.start for one, span in plan.ranges.items() if one not in ranges}
    return replace(plan, ranges=ranges, lag=plan.lag + behind, passed={**plan.passed, **waiting})


def plan_batch(
    topics: Iterable[Topic],
    start: Offsets,
    first: Callable[[Topic], Offsets],
    *,
    most_records: int,
    rules: Rules,
    started: Offsets | None = None,
) -> BatchPlan:
    """The next ranges, at most `most_records` in all, each partition in proportion to its lag.

    `first` tells where a topic is begun that was never read. A partition that was added later begins at its
    start. `started` has the offsets at which partitions were started before, unless that is 0. Raises
    TopicChanged.
    """
    waiting: dict[TopicPartition, OffsetRange] = {}
    notes: list[str] = []
    passed: dict[TopicPartition, int] = {}
    before, now_started = started or {}, dict[TopicPartition, int]()
    due, by_name = False, {}
    for topic in topics:
        known = {one.partition: offset for one, offset in start.items() if _same(one, topic)}
        moves, told = _moves(topic, start, known, first, rules)
        notes += told
        new = moves.keys() - known.keys()
        if any(known.get(number, 0) > topic.ends[number] for number in topic.ends):
            # Positions are merged by their maximum: what is less than before needs another name.
            starts = {one.partition: before[one] for one in topic.partitions() if one in before}
            topic, known = topic.set_back(), {}
            for number, offset in starts.items():
                one = TopicPartition(topic.name, topic.incarnation, number)
                now_started[one] = min(offset, moves[number])
        by_name[topic.name] = topic
        for number, moved in moves.items():
            one = TopicPartition(topic.name, topic.incarnation, number)
            if number in new and moved:
                now_started[one] = moved
            if moved != known.get(number):
                passed[one] = moved
                # Begun elsewhere than at its start, as with start="latest": that it was is known once only.
                due = due or bool(told) or moved != topic.begins[number]
            if topic.ends[number] > moved:
                waiting[one] = OffsetRange(moved, topic.ends[number])
    ranges = _limited(waiting, most_records)
    lag = sum(map(len, waiting.values())) - sum(map(len, ranges.values()))
    passed = {one: offset for one, offset in passed.items() if one not in ranges}
    return BatchPlan(ranges, lag, tuple(notes), passed, due, by_name, now_started)


def _moves(
    topic: Topic,
    start: Offsets,
    known: Mapping[int, int],
    first: Callable[[Topic], Offsets],
    rules: Rules,
) -> tuple[dict[int, int], list[str]]:
    """Where each partition of a topic is gone on with, and what was passed over, in words."""
    notes: list[str] = []
    begun: Offsets = {}
    if not known and (before := {one.incarnation for one in start if one.topic == topic.name}):
        notes.append(_recreated(topic, before, rules))
    elif not known:
        begun = first(topic)
    moves = {}
    for number in sorted(topic.ends):
        one = TopicPartition(topic.name, topic.incarnation, number)
        at = known.get(number, begun.get(one, topic.begins[number]))
        moves[number], why = _inside(topic, number, at, rules)
        if why:
            notes.append(why)
    return moves, notes


def _same(one: TopicPartition, topic: Topic) -> bool:
    return (one.topic, one.incarnation) == (topic.name, topic.incarnation)


def _recreated(topic: Topic, before: set[str], rules: Rules) -> str:
    what = (
        f"Topic {topic.name} was deleted and made again: the tables hold records of"
        f" {', '.join(sorted(before))}, and it is now {topic.incarnation}."
    )
    if rules.on_recreated == "stop":
        raise TopicChanged(
            what,
            hint='Choose on_recreated="start_over" to add all records of the new topic to the tables.',
            reason="recreated",
            subject=topic.name,
        )
    return what


def _inside(topic: Topic, number: int, at: int, rules: Rules) -> tuple[int, str | None]:
    """Where to go on in a partition that may not hold that offset any more, and what was passed over."""
    where = f"Topic {topic.name} partition {number}"
    if at < topic.begins[number]:
        what = f"{where} begins at {topic.begins[number]} now: records {at} to {topic.begins[number] - 1}"
        if rules.on_lost == "stop":
            raise TopicChanged(
                f"{what} were deleted before they were read.",
                hint='Put them back, or choose on_lost="skip" to go on without them.',
                reason="records_deleted",
                subject=f"{topic.name}[{number}]",
            )
        return topic.begins[number], f"{what} were deleted before they were read, and were left out."
    if at > topic.ends[number]:
        what = f"{where} ends at {topic.ends[number]}, before offset {at} up to which it was read"
        if rules.on_reset == "stop":
            raise TopicChanged(
                f"{what}: it lost records at its end, or its offsets were set back.",
                hint='Choose on_reset="continue_at_end" to go on with what comes after that end.',
                reason="end_set_back",
                subject=f"{topic.name}[{number}]",
            )
        return topic.ends[number], f"{what}; it is read on from that end."
    return at, None


def _limited(waiting: Mapping[TopicPartition, OffsetRange], most: int) -> dict[TopicPartition, OffsetRange]:
    total = sum(map(len, waiting.values()))
    if total <= most:
        return dict(waiting)
    found: dict[TopicPartition, OffsetRange] = {}
    left = most
    # The smallest first: what they leave of their share goes to the others.
    ordered = sorted(waiting.items(), key=lambda item: (len(item[1]), item[0]))
    for place, (one, whole) in enumerate(ordered):
        share = min(len(whole), max(left * len(whole) // max(total, 1), 1))
        if place == len(ordered) - 1:
            share = min(len(whole), left)
        share = min(share, left)
        total -= len(whole)
        left -= share
        if share:
            found[one] = OffsetRange(whole.start, whole.start + share)
    return found
