"""Offsets and ranges of topic partitions, the present state of topics, and the recorded offsets.

A table records its offsets twice: in the summary of each snapshot, and as a table property. A rollback of the
table takes back the snapshot together with its rows, so the summary always belongs to the rows. But the
summary is lost when the snapshot expires. The property stays. Two batches for the same offsets set the
property to different values, so only one of them can be published (ADR 33).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True, order=True)
class TopicPartition:
    """One partition of one incarnation of a topic."""

    topic: str
    incarnation: str
    partition: int


NO_PARTITION = -1
"""The number under which the start at the end of a topic without partitions is recorded, with offset 0.

Partitions that the topic gets later are read from their first offset. Only landing folders have such topics.
"""

Offsets = Mapping[TopicPartition, int]
"""The next offset to read of each partition: all records before it were read."""


@dataclass(frozen=True)
class OffsetRange:
    """The offsets from `start` to `end`, without `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(self.end - self.start, 0)


Ranges = Mapping[TopicPartition, OffsetRange]
"""The offsets of a batch, by partition. A partition without offsets to read is left out."""


def merge_offsets(*offset_maps: Offsets) -> dict[TopicPartition, int]:
    """Return the greatest offset of each partition, so an older position never moves a partition back."""
    greatest: dict[TopicPartition, int] = {}
    for offsets in offset_maps:
        for partition, offset in offsets.items():
            greatest[partition] = max(offset, greatest.get(partition, 0))
    return greatest


def has_reached(position: Offsets, target: Offsets) -> bool:
    """Return whether `position` is at or after `target` in all partitions of `target`.

    A partition that `position` lacks counts as offset 0.
    """
    return all(position.get(partition, 0) >= offset for partition, offset in target.items())


def end_offsets(ranges: Ranges) -> dict[TopicPartition, int]:
    """Return the offset after the range of each partition."""
    return {partition: offset_range.end for partition, offset_range in ranges.items()}


def count_offsets(ranges: Ranges) -> int:
    """Return the number of offsets in the ranges. A compacted topic has fewer records than offsets."""
    return sum(len(offset_range) for offset_range in ranges.values())


def format_ranges(ranges: Ranges, *, max_partitions: int = 5) -> str:
    """Format ranges as `topic[0] 5 to 9, …`: the first and the last offset of each partition.

    After `max_partitions` partitions only the number of the others follows. Without offsets the text is
    `nothing`.
    """
    texts = [
        f"{partition.topic}[{partition.partition}] {offset_range.start} to {offset_range.end - 1}"
        for partition, offset_range in sorted(ranges.items())
        if offset_range
    ]
    return _join_some(texts, max_partitions) or "nothing"


def _join_some(texts: Iterable[str], max_count: int) -> str:
    shown = list(texts)
    more = f" and {len(shown) - max_count} more" if len(shown) > max_count else ""
    return ", ".join(shown[:max_count]) + more


@dataclass(frozen=True)
class Topic:
    """The present state of one topic.

    `incarnation` is Kafka's topic id, which changes if the topic is deleted and created again. After a reset
    of the topic's offsets it has a suffix with the number of resets: `~1`, `~2`. Offsets before and after a
    reset cannot be compared, so they must not be merged by their maximum.

    `begins` is the first available offset of each partition. `ends` is the offset after the last record that
    a reader of committed records may see. `log_ends` is the offset after the last record, committed or not;
    it has only partitions in which it differs from `ends`, because a transaction is open.
    """

    name: str
    incarnation: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    log_ends: Mapping[int, int] = field(default_factory=dict)

    def partitions(self) -> list[TopicPartition]:
        """Return all partitions of the topic, in the order of their numbers."""
        return [TopicPartition(self.name, self.incarnation, number) for number in sorted(self.ends)]

    def start_without_partitions(self) -> TopicPartition:
        """Return the key under which a start before the topic's first partition is recorded."""
        return TopicPartition(self.name, self.incarnation, NO_PARTITION)

    def with_recorded_resets(self, partitions: Iterable[TopicPartition]) -> Topic:
        """Return the topic with the greatest number of resets that `partitions` have for its topic id.

        `partitions` are those that the tables have recorded. If none has this topic id, the topic is returned
        as it is.
        """
        incarnations = [
            partition.incarnation
            for partition in partitions
            if partition.topic == self.name and _has_same_id(self, partition)
        ]
        return replace(self, incarnation=max(incarnations, key=count_resets)) if incarnations else self

    def after_reset(self) -> Topic:
        """Return the topic with one more reset of its offsets."""
        return replace(self, incarnation=f"{topic_id(self.incarnation)}~{count_resets(self.incarnation) + 1}")


def topic_id(incarnation: str) -> str:
    """Return the topic id of an incarnation: the part before `~`, or all of it."""
    return incarnation.partition("~")[0]


def count_resets(incarnation: str) -> int:
    """Return how often the offsets of the topic were reset: the number after `~` in `incarnation`, or 0."""
    return int(incarnation.partition("~")[2] or 0)


def _has_same_id(topic: Topic, partition: TopicPartition) -> bool:
    return topic_id(partition.incarnation) == topic_id(topic.incarnation)


@dataclass(frozen=True)
class TableProgress:
    """The offsets up to which a table has an ingestion's records, and the batch that recorded them.

    `commit_id` identifies the batch, and `run_id` is the Dagster run that wrote it. `valid_through_ms` is the
    time up to which the tables have all records, in ms since 1970. It is None until every partition has had a
    record. `snapshot_id` is the table's current snapshot after the batch, or None if the table has none.
    """

    offsets: Offsets
    commit_id: str
    run_id: str
    valid_through_ms: int | None = None
    snapshot_id: int | None = None
    refill_until: Offsets = field(default_factory=dict)
    """Empty, unless the table was rolled back and is being filled again. Then these are the offsets that the
    other tables have reached: the table takes records again until them."""
    first_offsets: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless it is 0. A table that is rolled back to before
    its first batch is filled again from here."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of the records that were read, by partition, in ms since 1970."""
    dead_letter_table_name: str | None = None
    """The dotted name of the ingestion's dead letter table, which takes part in each batch."""

    def to_json(self) -> str:
        """Return the progress as JSON, the value of the table property. `from_json` parses it."""
        fields = {
            "topics": _offsets_to_json(self.offsets),
            "commit": self.commit_id,
            "run": self.run_id,
            **({"valid_through_ms": self.valid_through_ms} if self.valid_through_ms is not None else {}),
            **({"at": self.snapshot_id} if self.snapshot_id is not None else {}),
            **({"until": _offsets_to_json(self.refill_until)} if self.refill_until else {}),
            **({"started": _offsets_to_json(self.first_offsets)} if self.first_offsets else {}),
            **({"latest_ms": _offsets_to_json(self.latest_ms)} if self.latest_ms else {}),
            **({"dead_letters": self.dead_letter_table_name} if self.dead_letter_table_name else {}),
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, progress_json: str) -> TableProgress:
        """Parse the JSON of the table property.

        Raises ValueError, KeyError or TypeError if the JSON is damaged.
        """
        try:
            fields = json.loads(progress_json)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
        if not isinstance(fields, dict):
            raise TypeError(f"the JSON is {type(fields).__name__}, not an object")
        valid, snapshot_id = fields.get("valid_through_ms"), fields.get("at")
        offsets, refill_until = (
            _offsets_from_json(fields["topics"]),
            _offsets_from_json(fields.get("until", {})),
        )
        first_offsets, latest_ms = (
            _offsets_from_json(fields.get("started", {})),
            _offsets_from_json(fields.get("latest_ms", {})),
        )
        dead_letter_table_name = fields.get("dead_letters")
        return cls(
            offsets,
            fields["commit"],
            fields["run"],
            valid,
            snapshot_id,
            refill_until,
            first_offsets,
            latest_ms,
            dead_letter_table_name,
        )

    def refilled_to(self, offsets: Offsets) -> TableProgress:
        """Return the progress of a table that is filled again and has reached only `offsets`.

        The offsets of this progress, which the other tables have reached, become `refill_until`. It becomes
        empty if the table has caught up with them.
        """
        return replace(
            self, offsets=offsets, refill_until={} if has_reached(offsets, self.offsets) else self.offsets
        )

    def to_summary(self, ingestion: str) -> dict[str, str]:
        """Return the entries for a snapshot's summary: offsets, id of the batch, and valid-through time.

        Fields that only the table property records are left out. `ingestion` is the name of the ingestion.
        """
        summary_progress = replace(
            self, snapshot_id=None, first_offsets={}, latest_ms={}, dead_letter_table_name=None
        )
        valid = (
            {}
            if self.valid_through_ms is None
            else {LakeProperty.VALID_THROUGH_MS: str(self.valid_through_ms)}
        )
        return {
            LakeProperty.OFFSETS_PREFIX + ingestion: summary_progress.to_json(),
            LakeProperty.COMMIT_ID: self.commit_id,
            **valid,
        }


def _offsets_to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    by_topic: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        by_topic.setdefault(f"{partition.topic}@{partition.incarnation}", {})[str(partition.partition)] = (
            offset
        )
    return by_topic


def _offsets_from_json(topics: Any) -> dict[TopicPartition, int]:
    if not isinstance(topics, dict) or not all(
        isinstance(partitions, dict) for partitions in topics.values()
    ):
        raise ValueError(f"{topics!r} contains no offsets")
    return {
        TopicPartition(*_parse_topic_key(topic), int(number)): int(offset)
        for topic, partitions in topics.items()
        for number, offset in partitions.items()
    }


def _parse_topic_key(topic_key: str) -> tuple[str, str]:
    name, _, incarnation = topic_key.rpartition("@")
    if not name:
        raise ValueError(f"{topic_key!r} contains no topic name")
    return name, incarnation


def recorded_ingestions(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the progress that a table's properties record: JSON strings by the name of the ingestion."""
    return {
        name.removeprefix(LakeProperty.OFFSETS_PREFIX): text
        for name, text in properties.items()
        if name.startswith(LakeProperty.OFFSETS_PREFIX)
    }
