"""Offsets and ranges of topic partitions, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
