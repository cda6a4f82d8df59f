"""Which landing files may go: those whose records are all on `main`, after a time, and never the newest."""

from __future__ import annotations

from collections.abc import Iterable

from branchlake_dagster.ingest.positions.offsets import Offsets, TopicPartition
from branchlake_dagster.ingest.positions.topic import Topic
from branchlake_dagster.receivers.landing import Landing, LandingFile


def least(known: Iterable[Offsets]) -> dict[TopicPartition, int]:
    """Up to where every one of several ingestions has read; what one of them has not begun is left out."""
    every = list(known)
    shared = set.intersection(*(set(one) for one in every)) if every else set()
    return {one: min(offsets[one] for offsets in every) for one in shared}


def remove_read(
    landing: Landing, topics: Iterable[Topic], read: Offsets, *, finished_before: float
) -> list[LandingFile]:
    """Remove the files that are read and were finished before a time (seconds since 1970); say which.

    `read` are offsets that `main` holds, by the incarnation that it has them of: of another one nothing is
    removed. The newest file of a partition stays, for it says where offsets go on.
    """
    removed = []
    for topic in topics:
        for one in topic.partitions():
            cut = _cut(landing.files(one.topic, one.partition), read.get(one, 0), finished_before)
            removed += landing.remove_before(one.topic, one.partition, cut)
    return removed


def _cut(files: list[LandingFile], read: int, finished_before: float) -> int:
    """The first offset that stays."""
    cut = 0
    for file in files:
        if file.last >= read or file.path.stat().st_mtime >= finished_before:
            break
        cut = file.last + 1
    return cut
