"""Offsets and ranges of topic partitions, topics as they are now, and the offsets that tables record.

What a table says of its offsets: in the summary of each snapshot, and as a property of the table.

The summary is the record that belongs to the rows, and goes back with them when the table is rolled back. It
is lost when snapshots expire. The property stays, and two batches for the same offsets both set it, to
different values, so that only one of them can be published (ADR 33).
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


Offsets = Mapping[TopicPartition, int]
"""By partition the offset that is read next: all before it were read."""


@dataclass(frozen=True)
class OffsetRange:
    """Offsets from `start` up to and without `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(self.end - self.start, 0)


Ranges = Mapping[TopicPartition, OffsetRange]


def merge_offsets(*offset_maps: Offsets) -> dict[TopicPartition, int]:
    """The greatest of each: an older record never takes a partition back."""
    greatest: dict[TopicPartition, int] = {}
    for offsets in offset_maps:
        for partition, offset in offsets.items():
            greatest[partition] = max(offset, greatest.get(partition, 0))
    return greatest


def has_reached(position: Offsets, target: Offsets) -> bool:
    """Whether `position` is as far as `target` in all of its partitions."""
    return all(position.get(partition, 0) >= offset for partition, offset in target.items())


def end_offsets(ranges: Ranges) -> dict[TopicPartition, int]:
    """The offsets after these ranges."""
    return {partition: offset_range.end for partition, offset_range in ranges.items()}


def count_offsets(ranges: Ranges) -> int:
    """How many offsets they span: as many records, or fewer where a log was compacted."""
    return sum(len(offset_range) for offset_range in ranges.values())


def format_ranges(ranges: Ranges, *, max_partitions: int = 5) -> str:
    """`topic[0] 5 to 9, …`, the last offset included."""
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
    """One topic now. `incarnation` is Kafka's topic id: another one after it was deleted and made again.

    Behind the id there may be a number, `…~1`: how often its offsets were set back. Offsets of before and
    after cannot be compared, and the greater one would win.

    `begins` and `ends` are by partition the first offset that is there and the one after the last that a
    reader of committed records may see.
    """

    name: str
    incarnation: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]

    def partitions(self) -> list[TopicPartition]:
        """All of its partitions, in order."""
        return [TopicPartition(self.name, self.incarnation, number) for number in sorted(self.ends)]

    def with_recorded_resets(self, partitions: Iterable[TopicPartition]) -> Topic:
        """The topic with the number of set-backs that tables know of."""
        incarnations = [
            partition.incarnation
            for partition in partitions
            if partition.topic == self.name and _has_same_id(self, partition)
        ]
        return replace(self, incarnation=max(incarnations, key=count_resets)) if incarnations else self

    def after_reset(self) -> Topic:
        """The topic after its offsets were set back once more."""
        return replace(self, incarnation=f"{topic_id(self.incarnation)}~{count_resets(self.incarnation) + 1}")


def topic_id(incarnation: str) -> str:
    """Kafka's id of a topic."""
    return incarnation.partition("~")[0]


def count_resets(incarnation: str) -> int:
    """How often its offsets were set back."""
    return int(incarnation.partition("~")[2] or 0)


def _has_same_id(topic: Topic, partition: TopicPartition) -> bool:
    return topic_id(partition.incarnation) == topic_id(topic.incarnation)


@dataclass(frozen=True)
class TableProgress:
    """The offsets up to which a table holds an ingestion's records, and the batch that said so.

    `valid_through_ms` is the time up to which all records are in the tables, ms since 1970; None as long as
    a partition has had no record. `snapshot_id` is the snapshot that the batch made, None when it made none.
    """

    offsets: Offsets
    commit_id: str
    run_id: str
    valid_through_ms: int | None = None
    snapshot_id: int | None = None
    refill_until: Offsets = field(default_factory=dict)
    """Not empty: the table was rolled back, and takes records again up to here, which the others have."""
    first_offsets: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless that is 0. A table that is rolled back to
    before its first batch is filled again from here."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of a record that was read of each partition, ms since 1970."""
    dead_letter_table_name: str | None = None
    """The dotted name of the ingestion's table of dead letters, which takes part in each of its batches."""

    def to_json(self) -> str:
        """As a property's value."""
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
        """Back again. Raises ValueError, KeyError or TypeError."""
        fields = json.loads(progress_json)
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
        """What a table says that is filled again, and has come to these offsets."""
        return replace(
            self, offsets=offsets, refill_until={} if has_reached(offsets, self.offsets) else self.offsets
        )

    def to_summary(self, ingestion: str) -> dict[str, str]:
        """The entries of a snapshot's summary: the offsets, without what only the property records."""
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
        raise ValueError(f"{topics!r} tells no offsets")
    return {
        TopicPartition(*_parse_topic_key(topic), int(number)): int(offset)
        for topic, partitions in topics.items()
        for number, offset in partitions.items()
    }


def _parse_topic_key(topic_key: str) -> tuple[str, str]:
    name, _, incarnation = topic_key.rpartition("@")
    if not name:
        raise ValueError(f"{topic_key!r} names no topic")
    return name, incarnation


def recorded_ingestions(properties: Mapping[str, str]) -> dict[str, str]:
    """The texts of all ingestions that a table's properties record, by name."""
    return {
        name.removeprefix(LakeProperty.OFFSETS_PREFIX): text
        for name, text in properties.items()
        if name.startswith(LakeProperty.OFFSETS_PREFIX)
    }
