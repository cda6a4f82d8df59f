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


def merged(*known: Offsets) -> dict[TopicPartition, int]:
    """The greatest of each: an older record never takes a partition back."""
    found: dict[TopicPartition, int] = {}
    for offsets in known:
        for partition, offset in offsets.items():
            found[partition] = max(offset, found.get(partition, 0))
    return found


def covers(one: Offsets, other: Offsets) -> bool:
    """Whether `one` is as far as `other` in all of its partitions."""
    return all(one.get(partition, 0) >= offset for partition, offset in other.items())


def ends(ranges: Ranges) -> dict[TopicPartition, int]:
    """The offsets after these ranges."""
    return {partition: one.end for partition, one in ranges.items()}


def records(ranges: Ranges) -> int:
    """How many offsets they span: as many records, or fewer where a log was compacted."""
    return sum(len(one) for one in ranges.values())


def in_words(ranges: Ranges, *, most: int = 5) -> str:
    """`topic[0] 5 to 9, …`, the last offset included."""
    told = [
        f"{one.topic}[{one.partition}] {r.start} to {r.end - 1}" for one, r in sorted(ranges.items()) if r
    ]
    return _some(told, most) or "nothing"


def _some(told: Iterable[str], most: int) -> str:
    shown = list(told)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


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

    def as_recorded(self, known: Iterable[TopicPartition]) -> Topic:
        """The topic with the number of set-backs that tables know of."""
        mine = [one.incarnation for one in known if one.topic == self.name and _same_id(self, one)]
        return replace(self, incarnation=max(mine, key=set_backs)) if mine else self

    def set_back(self) -> Topic:
        """The topic after its offsets were set back once more."""
        return replace(self, incarnation=f"{topic_id(self.incarnation)}~{set_backs(self.incarnation) + 1}")


def topic_id(incarnation: str) -> str:
    """Kafka's id of a topic."""
    return incarnation.partition("~")[0]


def set_backs(incarnation: str) -> int:
    """How often its offsets were set back."""
    return int(incarnation.partition("~")[2] or 0)


def _same_id(topic: Topic, one: TopicPartition) -> bool:
    return topic_id(one.incarnation) == topic_id(topic.incarnation)


@dataclass(frozen=True)
class Recorded:
    """The offsets up to which a table holds an ingestion's records, and the batch that said so.

    `valid_through_ms` is the time up to which all records are in the tables, ms since 1970; None as long as
    a partition has had no record. `at` is the snapshot that the batch made, None when it made none.
    """

    offsets: Offsets
    commit_id: str
    run_id: str
    valid_through_ms: int | None = None
    at: int | None = None
    until: Offsets = field(default_factory=dict)
    """Not empty: the table was rolled back, and takes records again up to here, which the others have."""
    started: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless that is 0. A table that is rolled back to
    before its first batch is filled again from here."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of a record that was read of each partition, ms since 1970."""
    dead_letters: str | None = None
    """The dotted name of the ingestion's table of dead letters, which takes part in each of its batches."""

    def text(self) -> str:
        """As a property's value."""
        told = {
            "topics": _by_topic(self.offsets),
            "commit": self.commit_id,
            "run": self.run_id,
            **({"valid_through_ms": self.valid_through_ms} if self.valid_through_ms is not None else {}),
            **({"at": self.at} if self.at is not None else {}),
            **({"until": _by_topic(self.until)} if self.until else {}),
            **({"started": _by_topic(self.started)} if self.started else {}),
            **({"latest_ms": _by_topic(self.latest_ms)} if self.latest_ms else {}),
            **({"dead_letters": self.dead_letters} if self.dead_letters else {}),
        }
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Recorded:
        """Back again. Raises ValueError, KeyError or TypeError."""
        told = json.loads(text)
        valid, at = told.get("valid_through_ms"), told.get("at")
        offsets, until = _offsets(told["topics"]), _offsets(told.get("until", {}))
        started, latest = _offsets(told.get("started", {})), _offsets(told.get("latest_ms", {}))
        letters = told.get("dead_letters")
        return cls(offsets, told["commit"], told["run"], valid, at, until, started, latest, letters)

    def refilled_to(self, offsets: Offsets) -> Recorded:
        """What a table says that is filled again, and has come to these offsets."""
        return replace(self, offsets=offsets, until={} if covers(offsets, self.offsets) else self.offsets)

    def summary(self, ingestion: str) -> dict[str, str]:
        """The entries of a snapshot's summary: the offsets, without what only the property records."""
        lasting = replace(self, at=None, started={}, latest_ms={}, dead_letters=None)
        valid = (
            {}
            if self.valid_through_ms is None
            else {LakeProperty.VALID_THROUGH_MS: str(self.valid_through_ms)}
        )
        return {
            LakeProperty.OFFSETS_PREFIX + ingestion: lasting.text(),
            LakeProperty.COMMIT_ID: self.commit_id,
            **valid,
        }


def _by_topic(offsets: Offsets) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one, offset in sorted(offsets.items()):
        found.setdefault(f"{one.topic}@{one.incarnation}", {})[str(one.partition)] = offset
    return found


def _offsets(topics: Any) -> dict[TopicPartition, int]:
    if not isinstance(topics, dict) or not all(isinstance(one, dict) for one in topics.values()):
        raise ValueError(f"{topics!r} tells no offsets")
    return {
        TopicPartition(*_name_and_id(topic), int(number)): int(offset)
        for topic, partitions in topics.items()
        for number, offset in partitions.items()
    }


def _name_and_id(text: str) -> tuple[str, str]:
    name, _, incarnation = text.rpartition("@")
    if not name:
        raise ValueError(f"{text!r} names no topic")
    return name, incarnation


def ingestions_in(properties: Mapping[str, str]) -> dict[str, str]:
    """The texts of all ingestions that a table's properties record, by name."""
    return {
        name.removeprefix(LakeProperty.OFFSETS_PREFIX): text
        for name, text in properties.items()
        if name.startswith(LakeProperty.OFFSETS_PREFIX)
    }
