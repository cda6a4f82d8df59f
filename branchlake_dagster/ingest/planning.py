"""Pure functions that plan an ingestion: the ranges of the next batch, start offsets, valid-through time.

The configured start counts only until the tables have a position. If it gives offsets, such as the committed
offsets of another sink, the first record that is read from a partition is the record at its start offset.

All records up to the valid-through time are in the tables, if the records of each partition are in the order
of their times. The latest time of each partition is recorded with the offsets, so that it is known in batches
without records of that partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.errors import StartOffsetsMissing, StartOffsetsOutOfRange, TopicChanged
from branchlake_dagster.ingest.offsets import (
    NO_PARTITION,
    OffsetRange,
    Offsets,
    Ranges,
    Topic,
    TopicPartition,
    count_offsets,
)


@dataclass(frozen=True)
class TopicRules:
    """What planning does if a topic was recreated, ends before its position, or has lost unread records.

    A topic that lacks a partition that was read counts as one that ends before its position.

    The fields are the options of `Ingest` with the same names. With "stop", TopicChanged is raised.
    """

    on_recreated: Literal["stop", "start_over"] = "stop"
    on_reset: Literal["stop", "continue_at_end"] = "stop"
    on_lost: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class BatchPlan:
    """The offsets that a batch reads (`ranges`), how many remain after it (`lag`), and notes for the user.

    `advanced_offsets` has the positions of partitions without a range in this batch, if no table has recorded
    them yet. Either a rule has moved the partition, or it starts with this batch. If `must_record` is True,
    the batch records its offsets even if it reads nothing.

    `topics` are the topics by name as this batch records them, with one more reset if their offsets were
    reset. `first_offsets` has the first offset of each partition that starts with this batch, unless it is 0.
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
        """Return whether there is nothing to read and nothing to record."""
        return not self.ranges and not self.must_record


def narrow_plan(plan: BatchPlan, ranges: Ranges) -> BatchPlan:
    """Return the plan with `ranges`, which must be the first part of the plan's own ranges.

    The other offsets wait for the next batch, so they are added to `lag`.
    """
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
    """Plan the next ranges: at most `max_records` offsets, in proportion to the lag of each partition.

    `start` has the offset at which each partition continues. `start_of_topic` returns the start offsets of a
    topic that was never read; its errors pass through. A partition that was added later starts at offset 0:
    if its first records were deleted, they are lost. `first_offsets` has the first offset that was ever read
    of each partition, unless it is 0.

    Raises TopicChanged if a topic was recreated or reset, lacks a partition that was read, or has lost unread
    records, and its rule is "stop".
    """
    waiting: dict[TopicPartition, OffsetRange] = {}
    notes: list[str] = []
    advanced_offsets: dict[TopicPartition, int] = {}
    earlier_first_offsets, new_first_offsets = first_offsets or {}, dict[TopicPartition, int]()
    must_record, topics_by_name = False, {}
    for topic in topics:
        positions = {
            partition.partition: offset
            for partition, offset in start.items()
            if _is_of_topic(partition, topic) and partition.partition != NO_PARTITION
        }
        missing_positions = {number: at for number, at in positions.items() if number not in topic.ends}
        if missing_positions:
            notes.append(_check_missing_partitions(topic, missing_positions, rules))
        next_offsets, topic_notes = _next_offsets(topic, start, positions, start_of_topic, rules)
        notes += topic_notes
        if next_offsets.pop(NO_PARTITION, None) is not None:
            advanced_offsets[topic.start_without_partitions()] = 0
        new_partitions = next_offsets.keys() - positions.keys()
        if any(positions.get(number, 0) > topic.ends[number] for number in topic.ends):
            # Positions are merged by their maximum, so a lower offset needs another incarnation.
            starts = {
                number: earlier_first_offsets[partition]
                for number in topic.ends.keys() | missing_positions.keys()
                if (partition := TopicPartition(topic.name, topic.incarnation, number))
                in earlier_first_offsets
            }
            topic, positions = topic.after_reset(), {}
            # A missing partition that comes back continues at its offset.
            for number, offset in missing_positions.items():
                advanced_offsets[TopicPartition(topic.name, topic.incarnation, number)] = offset
            for number, offset in starts.items():
                partition = TopicPartition(topic.name, topic.incarnation, number)
                new_first_offsets[partition] = min(offset, next_offsets.get(number, offset))
        topics_by_name[topic.name] = topic
        for number, next_offset in next_offsets.items():
            partition = TopicPartition(topic.name, topic.incarnation, number)
            if number in new_partitions and next_offset:
                new_first_offsets[partition] = next_offset
            if next_offset != positions.get(number):
                advanced_offsets[partition] = next_offset
                # The partition starts elsewhere than at its beginning, as with start="latest". Only this
                # batch knows that, so it must record the offset.
                must_record = must_record or bool(topic_notes) or next_offset != topic.begins[number]
            if topic.ends[number] > next_offset:
                waiting[partition] = OffsetRange(next_offset, topic.ends[number])
    ranges = _limit_ranges(waiting, max_records)
    lag = sum(map(len, waiting.values())) - sum(map(len, ranges.values()))
    advanced_offsets = {
        partition: offset for partition, offset in advanced_offsets.items() if partition not in ranges
    }
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
    """Return the next offset of each partition of a topic, by number, and notes about skipped records.

    `start` has the offsets at which partitions of all topics continue, also of earlier incarnations.
    `positions` are those of the topic's present incarnation, by partition number. `start_of_topic` is called
    only for a topic that was never read; it may return an offset for NO_PARTITION, which the result then has
    too. Raises TopicChanged if a rule in `rules` is "stop".
    """
    notes: list[str] = []
    start_offsets: Offsets = {}
    has_started = bool(positions) or topic.start_without_partitions() in start
    if not has_started and (
        earlier_incarnations := {
            partition.incarnation
            for partition in start
            if partition.topic == topic.name and partition.partition != NO_PARTITION
        }
    ):
        notes.append(_check_recreated(topic, earlier_incarnations, rules))
    elif not (has_started or (topic.ends and _had_no_partitions(topic, start))):
        start_offsets = start_of_topic(topic)
    next_offsets = {NO_PARTITION: 0} if topic.start_without_partitions() in start_offsets else {}
    for number in sorted(topic.ends):
        partition = TopicPartition(topic.name, topic.incarnation, number)
        first_offset = 0 if has_started else topic.begins[number]
        offset = positions.get(number, start_offsets.get(partition, first_offset))
        next_offsets[number], note = _clamp_offset(topic, number, offset, rules)
        if note:
            notes.append(note)
    return next_offsets, notes


def _had_no_partitions(topic: Topic, start: Offsets) -> bool:
    """Return whether the ingestion started when an earlier incarnation of the topic had no partitions.

    All records of the present incarnation came after that start.
    """
    return any(partition.topic == topic.name and partition.partition == NO_PARTITION for partition in start)


def _is_of_topic(partition: TopicPartition, topic: Topic) -> bool:
    return (partition.topic, partition.incarnation) == (topic.name, topic.incarnation)


def _check_recreated(topic: Topic, earlier_incarnations: set[str], rules: TopicRules) -> str:
    what = (
        f"Topic {topic.name} was deleted and created again: the tables have records of"
        f" {', '.join(sorted(earlier_incarnations))}, and the topic is now {topic.incarnation}."
    )
    if rules.on_recreated == "stop":
        raise TopicChanged(
            what,
            hint='Set on_recreated="start_over" to add all records of the new topic to the tables.',
            reason="recreated",
            subject=topic.name,
        )
    return what


def _check_missing_partitions(topic: Topic, positions: Mapping[int, int], rules: TopicRules) -> str:
    """Return a note about partitions that were read and that the topic no longer has.

    `positions` are the offsets up to which they were read, by number. Raises TopicChanged if the rule is
    "stop". In a landing folder the folder of a partition may be gone or not mounted.
    """
    parts = ", ".join(f"{number} (read up to offset {at})" for number, at in sorted(positions.items()))
    what = f"Topic {topic.name} no longer has partition {parts}"
    if rules.on_reset == "stop":
        raise TopicChanged(
            f"{what}, so it is unknown whether records wait there.",
            hint="Restore the partition; in a landing folder, mount or restore its folder. Or set"
            ' on_reset="continue_at_end" to continue without it.',
            reason="partition_missing",
            subject=f"{topic.name}[{min(positions)}]",
        )
    return f"{what}; the ingestion continues without it."


def _clamp_offset(topic: Topic, number: int, offset: int, rules: TopicRules) -> tuple[int, str | None]:
    """Return the offset at which a partition continues, and a note if it is not `offset`, else None.

    An offset before the partition's begin or after its end is moved to it, or TopicChanged is raised,
    depending on the rules.
    """
    where = f"Topic {topic.name} partition {number}"
    if offset < topic.begins[number]:
        what = f"{where} now begins at {topic.begins[number]}: records {offset} to {topic.begins[number] - 1}"
        if rules.on_lost == "stop":
            raise TopicChanged(
                f"{what} were deleted before they were read.",
                hint='Restore them, or set on_lost="skip" to continue without them.',
                reason="records_deleted",
                subject=f"{topic.name}[{number}]",
            )
        return topic.begins[number], f"{what} were deleted before they were read, and are skipped."
    if offset > topic.ends[number]:
        what = f"{where} ends at {topic.ends[number]}, but it was already read up to offset {offset}"
        if rules.on_reset == "stop":
            raise TopicChanged(
                f"{what}: the partition lost records at its end, or its offsets were reset.",
                hint='Set on_reset="continue_at_end" to continue with the records after that end.',
                reason="end_set_back",
                subject=f"{topic.name}[{number}]",
            )
        return topic.ends[number], f"{what}; the ingestion continues at that end."
    return offset, None


def _limit_ranges(
    waiting: Mapping[TopicPartition, OffsetRange], max_records: int
) -> dict[TopicPartition, OffsetRange]:
    total = sum(map(len, waiting.values()))
    if total <= max_records:
        return dict(waiting)
    ranges: dict[TopicPartition, OffsetRange] = {}
    remaining = max_records
    # The smallest ranges come first: the unused part of their share goes to the others.
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
    """Start at the offsets that a Kafka consumer group has committed, to replace the sink of that group.

    The first record that is read from a partition is the record at the committed offset. The group must have
    no members and no open transaction; otherwise batches fail with `ConsumerGroupActive`. So stop the other
    sink first: then it has committed all that it has written. The group itself is not changed.

    Args:
        group (str): The consumer group of the sink that is replaced: for Kafka Connect
            `connect-<connector>`, otherwise its `group.id`.
        otherwise (Literal["stop", "earliest", "latest"]): The start of a partition for which the group has
            never committed an offset: its first offset (`earliest`), its end (`latest`), or none: the
            ingestion stops with `StartOffsetsMissing`. If the group has committed nothing at all, the
            ingestion always stops.
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
    """Start at given offsets, for example offsets that another sink has recorded in its own store.

    The first record that is read from a partition is the record at the given offset. Works for Kafka topics
    and for the topics of a landing folder.

    Args:
        offsets (Mapping[str, Mapping[int, int]]): The offset of the first record that is read, by topic and
            partition number: `{"orders": {0: 120, 1: 98}}`. The end of a partition is allowed.
        otherwise (Literal["stop", "earliest", "latest"]): The start of a partition without an offset: its
            first offset (`earliest`), its end (`latest`), or none: the ingestion stops with
            `StartOffsetsMissing`. (default: `stop`)

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
                        f"Partition {partition!r} of topic {topic} cannot start at offset {offset!r}.",
                        hint='Give both as integers from 0: {"orders": {0: 120}}. To start at the beginning'
                        " or the end of a partition, leave it out and set otherwise.",
                    )
        _require_otherwise(self.otherwise)


Start = Literal["earliest", "latest"] | datetime | CommittedOffsets | StartingOffsets


def starting_offsets(
    topic: Topic, offsets: Mapping[int, int], otherwise: Otherwise, *, origin: str
) -> dict[TopicPartition, int]:
    """Return the offset of the first record that is read, for all partitions of a topic.

    `offsets` maps partition numbers to offsets. `origin` is their source, for error messages. Raises
    StartOffsetsOutOfRange for offsets outside the retained range and for partitions that the topic does not
    have. Raises StartOffsetsMissing for partitions without an offset if `otherwise` is `stop`.
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
            f"Topic {topic.name} cannot start at {origin}: some partitions have no offset there.",
            partitions=[f"{topic.name}[{number}]" for number in missing],
            hint='Set otherwise="earliest" to read these partitions from their first offset, or'
            ' otherwise="latest" to read only later records.',
        )
    rest = topic.begins if otherwise == "earliest" else topic.ends
    return {
        partition: offsets.get(partition.partition, rest[partition.partition])
        for partition in topic.partitions()
    }


def format_offsets(offsets: Offsets, *, max_partitions: int = 20) -> str:
    """Format offsets as `orders[0] 120, orders[1] 98`.

    After `max_partitions` partitions only the number of the others follows.
    """
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
        return f"{where} does not exist, but offset {offset} is given for it"
    begin, end = topic.begins[number], topic.ends[number]
    if begin == end:
        return f"{where} has no records and its next offset is {end}, but offset {offset} is given for it"
    return f"{where} has offsets {begin} to {end - 1}, but offset {offset} is given for it"


def _out_of_range_hint(topic: Topic, outside: list[int], offsets: Mapping[int, int]) -> str:
    if any(number in topic.ends and offsets[number] < topic.begins[number] for number in outside):
        return (
            "Retention has deleted the records before that range. Load them from another source, then start"
            " at the first retained offset with StartingOffsets."
        )
    return (
        "The offsets may belong to another cluster, or to a topic that was deleted and created again. Give"
        " offsets of this topic with StartingOffsets."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require_otherwise(otherwise: str) -> None:
    if otherwise not in ("stop", "earliest", "latest"):
        raise ConfigurationError(
            f"Unknown otherwise={otherwise!r}.", hint="Set it to stop, earliest or latest."
        )


Times = Mapping[TopicPartition, int]
"""The latest time of the records that were read, by partition, in ms since 1970."""


def merge_latest_times(
    previous_times: Times, batch: Mapping[str, int], topics: Iterable[Topic], *, now_ms: int
) -> dict[TopicPartition, int]:
    """Return the latest time of each partition of the present topics after a batch.

    `batch` has the latest time of the batch's records by `<topic>/<partition>`, in ms since 1970. A later
    time than `now_ms` counts as `now_ms`: otherwise one wrong time would stay the latest for ever.
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
    """Return the time up to which the tables have all records, in ms since 1970, or None if it is unknown.

    The result is the least of the partitions' latest times, but at least `previous_ms`, the result of the
    batch before. As long as one partition has had no record, the result stays `previous_ms`.

    With `idle_after_ms`, a partition does not count if it was read to its end (`reached` has the offsets), it
    has no open transaction, and its latest record is at least that old.
    """
    times: list[int | None] = []
    for topic in topics:
        for partition in topic.partitions():
            latest_time = latest.get(partition)
            # Records of an open transaction may be older than those of other partitions.
            log_end = topic.log_ends.get(partition.partition, topic.ends[partition.partition])
            at_end = reached.get(partition, 0) >= log_end
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
