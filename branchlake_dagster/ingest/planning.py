"""The ranges of the next batch: where a new topic is started, and what the topics have. Pure functions.

Where an ingestion starts a topic that it has never read: declarations and pure functions.

The start counts only until the tables have positions. It takes over the position of another sink exactly: the
first record that is read from a partition is the one at its offset.

The valid-through time of an ingestion: all records up to it are in the tables. Pure functions.

A partition's records are taken to be in the order of their times. The latest time that was read of each
partition is recorded with the offsets, so that a batch without records of a partition still knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.errors import StartOffsetsMissing, StartOffsetsOutOfRange, TopicChanged
from branchlake_dagster.ingest.offsets import (
    OffsetRange,
    Offsets,
    Ranges,
    Topic,
    TopicPartition,
    count_offsets,
)


@dataclass(frozen=True)
class TopicRules:
    """What is done when a topic is not what the tables were filled from."""

    on_recreated: Literal["stop", "start_over"] = "stop"
    on_reset: Literal["stop", "continue_at_end"] = "stop"
    on_lost: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class BatchPlan:
    """The ranges of a batch, `lag` (records left after it), and what was passed over, in words.

    `advanced_offsets` is where partitions stand that have no range in this batch, and that no table has
    recorded yet:
    moved on by a rule, or begun at what was their start. `must_record`: it is recorded even if nothing is
    read.
    `topics` are they as this batch has them: under another name where their offsets are set back with it.
    `first_offsets` has the first offset of each partition that starts with this batch, unless that is 0.
    """

    ranges: Ranges
    lag: int
    notes: tuple[str, ...] = ()
    advanced_offsets: Offsets = field(default_factory=dict)
    must_record: bool = False
    topics: Mapping[str, Topic] = field(default_factory=dict)
    first_offsets: Offsets = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read and nothing to tell."""
        return not self.ranges and not self.must_record


def narrow_plan(plan: BatchPlan, ranges: Ranges) -> BatchPlan:
    """The plan with the first of its offsets only; the others wait for the next batch."""
    behind = count_offsets(plan.ranges) - count_offsets(ranges)
    waiting = {
        partition: offset_range.start
        for partition, offset_range in plan.ranges.items()
        if partition not in ranges
    }
    return replace(
        plan, ranges=ranges, lag=plan.lag + behind, advanced_offsets={**plan.advanced_offsets, **waiting}
    )


def plan_batch(
    topics: Iterable[Topic],
    start: Offsets,
    start_of_topic: Callable[[Topic], Offsets],
    *,
    max_records: int,
    rules: TopicRules,
    first_offsets: Offsets | None = None,
) -> BatchPlan:
    """The next ranges, at most `max_records` in all, each partition in proportion to its lag.

    `start_of_topic` tells where a topic is begun that was never read. A partition that was added later begins
    at its
    start. `first_offsets` has the offsets at which partitions were started before, unless that is 0. Raises
    TopicChanged.
    """
    waiting: dict[TopicPartition, OffsetRange] = {}
    notes: list[str] = []
    advanced_offsets: dict[TopicPartition, int] = {}
    earlier_first_offsets, new_first_offsets = first_offsets or {}, dict[TopicPartition, int]()
    must_record, topics_by_name = False, {}
    for topic in topics:
        positions = {one.partition: offset for one, offset in start.items() if _is_of_topic(one, topic)}
        next_offsets, topic_notes = _next_offsets(topic, start, positions, start_of_topic, rules)
        notes += topic_notes
        new_partitions = next_offsets.keys() - positions.keys()
        if any(positions.get(number, 0) > topic.ends[number] for number in topic.ends):
            # Positions are merged by their maximum: what is less than before needs another name.
            starts = {
                one.partition: earlier_first_offsets[one]
                for one in topic.partitions()
                if one in earlier_first_offsets
            }
            topic, positions = topic.after_reset(), {}
            for number, offset in starts.items():
                partition = TopicPartition(topic.name, topic.incarnation, number)
                new_first_offsets[partition] = min(offset, next_offsets[number])
        topics_by_name[topic.name] = topic
        for number, next_offset in next_offsets.items():
            partition = TopicPartition(topic.name, topic.incarnation, number)
            if number in new_partitions and next_offset:
                new_first_offsets[partition] = next_offset
            if next_offset != positions.get(number):
                advanced_offsets[partition] = next_offset
                # Begun elsewhere than at its start, as with start="latest": that it was is known once only.
                must_record = must_record or bool(topic_notes) or next_offset != topic.begins[number]
            if topic.ends[number] > next_offset:
                waiting[partition] = OffsetRange(next_offset, topic.ends[number])
    ranges = _limit_ranges(waiting, max_records)
    lag = sum(map(len, waiting.values())) - sum(map(len, ranges.values()))
    advanced_offsets = {one: offset for one, offset in advanced_offsets.items() if one not in ranges}
    return BatchPlan(
        ranges, lag, tuple(notes), advanced_offsets, must_record, topics_by_name, new_first_offsets
    )


def _next_offsets(
    topic: Topic,
    start: Offsets,
    positions: Mapping[int, int],
    start_of_topic: Callable[[Topic], Offsets],
    rules: TopicRules,
) -> tuple[dict[int, int], list[str]]:
    """Where each partition of a topic is gone on with, and what was passed over, in words."""
    notes: list[str] = []
    start_offsets: Offsets = {}
    if not positions and (
        earlier_incarnations := {one.incarnation for one in start if one.topic == topic.name}
    ):
        notes.append(_check_recreated(topic, earlier_incarnations, rules))
    elif not positions:
        start_offsets = start_of_topic(topic)
    next_offsets = {}
    for number in sorted(topic.ends):
        partition = TopicPartition(topic.name, topic.incarnation, number)
        offset = positions.get(number, start_offsets.get(partition, topic.begins[number]))
        next_offsets[number], note = _clamp_offset(topic, number, offset, rules)
        if note:
            notes.append(note)
    return next_offsets, notes


def _is_of_topic(partition: TopicPartition, topic: Topic) -> bool:
    return (partition.topic, partition.incarnation) == (topic.name, topic.incarnation)


def _check_recreated(topic: Topic, earlier_incarnations: set[str], rules: TopicRules) -> str:
    what = (
        f"Topic {topic.name} was deleted and made again: the tables hold records of"
        f" {', '.join(sorted(earlier_incarnations))}, and it is now {topic.incarnation}."
    )
    if rules.on_recreated == "stop":
        raise TopicChanged(
            what,
            hint='Choose on_recreated="start_over" to add all records of the new topic to the tables.',
            reason="recreated",
            subject=topic.name,
        )
    return what


def _clamp_offset(topic: Topic, number: int, offset: int, rules: TopicRules) -> tuple[int, str | None]:
    """Where to go on in a partition that may not hold that offset any more, and what was passed over."""
    where = f"Topic {topic.name} partition {number}"
    if offset < topic.begins[number]:
        what = f"{where} begins at {topic.begins[number]} now: records {offset} to {topic.begins[number] - 1}"
        if rules.on_lost == "stop":
            raise TopicChanged(
                f"{what} were deleted before they were read.",
                hint='Put them back, or choose on_lost="skip" to go on without them.',
                reason="records_deleted",
                subject=f"{topic.name}[{number}]",
            )
        return topic.begins[number], f"{what} were deleted before they were read, and were left out."
    if offset > topic.ends[number]:
        what = f"{where} ends at {topic.ends[number]}, before offset {offset} up to which it was read"
        if rules.on_reset == "stop":
            raise TopicChanged(
                f"{what}: it lost records at its end, or its offsets were set back.",
                hint='Choose on_reset="continue_at_end" to go on with what comes after that end.',
                reason="end_set_back",
                subject=f"{topic.name}[{number}]",
            )
        return topic.ends[number], f"{what}; it is read on from that end."
    return offset, None


def _limit_ranges(
    waiting: Mapping[TopicPartition, OffsetRange], max_records: int
) -> dict[TopicPartition, OffsetRange]:
    total = sum(map(len, waiting.values()))
    if total <= max_records:
        return dict(waiting)
    ranges: dict[TopicPartition, OffsetRange] = {}
    remaining = max_records
    # The smallest first: what they leave of their share goes to the others.
    ordered = sorted(waiting.items(), key=lambda item: (len(item[1]), item[0]))
    for index, (partition, offset_range) in enumerate(ordered):
        share = min(len(offset_range), max(remaining * len(offset_range) // max(total, 1), 1))
        if index == len(ordered) - 1:
            share = min(len(offset_range), remaining)
        share = min(share, remaining)
        total -= len(offset_range)
        remaining -= share
        if share:
            ranges[partition] = OffsetRange(offset_range.start, offset_range.start + share)
    return ranges


Otherwise = Literal["stop", "earliest", "latest"]


@dataclass(frozen=True)
class CommittedOffsets:
    """Start at the offsets that a Kafka consumer group has committed, as the sink with that group would.

    The first record read from a partition is the one at the committed offset. The group must have no members
    and no open transaction, else batches fail with `ConsumerGroupActive`: stop the other sink first, so that
    it has committed all that it has written. The group itself is not changed.

    Args:
        group (str): The consumer group of the sink that is taken over: for Kafka Connect
            `connect-<connector>`, otherwise its `group.id`.
        otherwise (Literal["stop", "earliest", "latest"]): Where a partition starts that the group has never
            committed: at its first offset, at its end, or nowhere: the ingestion stops with
            `StartOffsetsMissing`. A group that has committed nothing at all always stops it.
            (default: `stop`; the other sink could have read such a partition, and its records would then be
            written twice or not at all)

    Raises:
        ConfigurationError: The group has no name, or `otherwise` is unknown.

    Examples:
        .. code-block:: python

            from branchlake_dagster import CommittedOffsets, Ingest, IngestTable

            orders = Ingest(
                name="orders",
                topics=["orders"],
                tables=[IngestTable(key="raw/orders")],
                start=CommittedOffsets("connect-orders-sink"),
            )
    """

    group: str
    otherwise: Otherwise = "stop"

    def __post_init__(self) -> None:
        if not self.group:
            raise ConfigurationError("CommittedOffsets needs a group.", hint='CommittedOffsets("old-sink")')
        _require_otherwise(self.otherwise)


@dataclass(frozen=True)
class StartingOffsets:
    """Start at given offsets, for example those that another sink has recorded in its own store.

    The first record read from a partition is the one at the given offset. Works for Kafka topics and for the
    topics of a landing folder.

    Args:
        offsets (Mapping[str, Mapping[int, int]]): By topic and partition number the offset of the first
            record that is read: `{"orders": {0: 120, 1: 98}}`. The end of a partition is allowed.
        otherwise (Literal["stop", "earliest", "latest"]): Where a partition starts that is not given: at its
            first offset, at its end, or nowhere: the ingestion stops with `StartOffsetsMissing`.
            (default: `stop`)

    Raises:
        ConfigurationError: An offset is negative or not an integer, or `otherwise` is unknown.

    Examples:
        .. code-block:: python

            from branchlake_dagster import Ingest, IngestTable, StartingOffsets

            orders = Ingest(
                name="orders",
                topics=["orders"],
                tables=[IngestTable(key="raw/orders")],
                start=StartingOffsets({"orders": {0: 120, 1: 98}}),
            )
    """

    offsets: Mapping[str, Mapping[int, int]]
    otherwise: Otherwise = "stop"

    def __post_init__(self) -> None:
        for topic, partition_offsets in self.offsets.items():
            for partition, offset in partition_offsets.items():
                if not (_is_count(partition) and _is_count(offset)):
                    raise ConfigurationError(
                        f"Topic {topic} cannot start partition {partition!r} at offset {offset!r}.",
                        hint='Both are integers from 0: {"orders": {0: 120}}. To start at an end of the'
                        " partition, leave it out and set otherwise.",
                    )
        _require_otherwise(self.otherwise)


Start = Literal["earliest", "latest"] | datetime | CommittedOffsets | StartingOffsets


def starting_offsets(
    topic: Topic, offsets: Mapping[int, int], otherwise: Otherwise, *, origin: str
) -> dict[TopicPartition, int]:
    """The offset of the first record that is read, for all partitions of a topic.

    `offsets` maps partition numbers to offsets; `origin` names their source in errors. Raises
    StartOffsetsOutOfRange for offsets outside the retained range and for partitions that the topic does not
    have, StartOffsetsMissing for partitions without an offset where `otherwise` is `stop`.
    """
    outside = [number for number in sorted(offsets) if not _is_available(topic, number, offsets[number])]
    if outside:
        ranges = "; ".join(_format_available_range(topic, number, offsets[number]) for number in outside)
        raise StartOffsetsOutOfRange(
            f"Topic {topic.name} cannot start at {origin}: {ranges}.",
            partitions=[f"{topic.name}[{number}]" for number in outside],
            hint=_out_of_range_hint(topic, outside, offsets),
        )
    missing = [number for number in sorted(topic.ends) if number not in offsets]
    if missing and otherwise == "stop":
        raise StartOffsetsMissing(
            f"Topic {topic.name} cannot start at {origin}: some partitions have none.",
            partitions=[f"{topic.name}[{number}]" for number in missing],
            hint='Choose otherwise="earliest" to read these partitions from their first offset, or'
            ' otherwise="latest" to read only what comes from now on.',
        )
    rest = topic.begins if otherwise == "earliest" else topic.ends
    return {
        partition: offsets.get(partition.partition, rest[partition.partition])
        for partition in topic.partitions()
    }


def format_offsets(offsets: Offsets, *, max_partitions: int = 20) -> str:
    """`orders[0] 120, orders[1] 98`, at most `max_partitions` partitions."""
    shown = [
        f"{partition.topic}[{partition.partition}] {offset}" for partition, offset in sorted(offsets.items())
    ]
    more = f" and {len(shown) - max_partitions} more" if len(shown) > max_partitions else ""
    return ", ".join(shown[:max_partitions]) + more


def _is_available(topic: Topic, number: int, offset: int) -> bool:
    return number in topic.ends and topic.begins[number] <= offset <= topic.ends[number]


def _format_available_range(topic: Topic, number: int, offset: int) -> str:
    where = f"{topic.name}[{number}]"
    if number not in topic.ends:
        return f"{where} does not exist, and offset {offset} is given for it"
    begin, end = topic.begins[number], topic.ends[number]
    if begin == end:
        return f"{where} has no records, its next offset is {end}, and offset {offset} is given for it"
    return f"{where} has offsets {begin} to {end - 1}, and offset {offset} is given for it"


def _out_of_range_hint(topic: Topic, outside: list[int], offsets: Mapping[int, int]) -> str:
    if any(number in topic.ends and offsets[number] < topic.begins[number] for number in outside):
        return (
            "Retention has deleted the records before that range. Load them from elsewhere, then start at the"
            " first retained offset with StartingOffsets."
        )
    return (
        "The offsets may belong to another cluster, or to a topic that was deleted and created again. Give"
        " offsets of this topic with StartingOffsets."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require_otherwise(otherwise: str) -> None:
    if otherwise not in ("stop", "earliest", "latest"):
        raise ConfigurationError(f"Unknown otherwise={otherwise!r}.", hint="stop, earliest, latest")


Times = Mapping[TopicPartition, int]
"""By partition the latest time of a record that was read, ms since 1970."""


def merge_latest_times(
    previous_times: Times, batch: Mapping[str, int], topics: Iterable[Topic], *, now_ms: int
) -> dict[TopicPartition, int]:
    """The latest time of each partition after a batch, for the topics as they are now.

    `batch` has the latest times of the batch's records by `<topic>/<partition>`, ms since 1970. A record's
    time counts as `now_ms` at most: one wrong time would otherwise stay the latest for ever.
    """
    latest: dict[TopicPartition, int] = {}
    for topic in topics:
        for partition in topic.partitions():
            batch_time = batch.get(f"{partition.topic}/{partition.partition}")
            times = [previous_times.get(partition), None if batch_time is None else min(batch_time, now_ms)]
            if times_read := [at for at in times if at is not None]:
                latest[partition] = max(times_read)
    return latest


def compute_valid_through_ms(
    topics: Sequence[Topic],
    latest: Times,
    reached: Offsets,
    previous_ms: int | None,
    *,
    now_ms: int,
    idle_after_ms: int | None = None,
) -> int | None:
    """The time up to which the tables have all records, ms since 1970; None if it is not known yet.

    It is the least of the partitions' latest times, and never less than `previous_ms`, the time of the batch
    before. A partition of which no record was read keeps it at `previous_ms`. With `idle_after_ms` a
    partition is
    left out that was read to its end (`reached` has the offsets) and whose latest record is at least so old.
    """
    times: list[int | None] = []
    for topic in topics:
        for partition in topic.partitions():
            latest_time = latest.get(partition)
            at_end = reached.get(partition, 0) >= topic.ends[partition.partition]
            if (
                idle_after_ms is None
                or not at_end
                or (latest_time is not None and latest_time > now_ms - idle_after_ms)
            ):
                times.append(latest_time)
    known_times = [at for at in times if at is not None]
    if not known_times or len(known_times) < len(times):
        return previous_ms
    return max(min(known_times), previous_ms if previous_ms is not None else min(known_times))
