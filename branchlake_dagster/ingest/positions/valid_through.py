"""The valid-through time of an ingestion: all records up to it are in the tables. Pure functions.

A partition's records are taken to be in the order of their times. The latest time that was read of each
partition is recorded with the offsets, so that a batch without records of a partition still knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from branchlake_dagster.ingest.positions.offsets import Offsets, TopicPartition
from branchlake_dagster.ingest.positions.topic import Topic

Times = Mapping[TopicPartition, int]
"""By partition the latest time of a record that was read, ms since 1970."""


def latest_times(
    known: Times, batch: Mapping[str, int], topics: Iterable[Topic], *, now_ms: int
) -> dict[TopicPartition, int]:
    """The latest time of each partition after a batch, for the topics as they are now.

    `batch` has the latest times of the batch's records by `<topic>/<partition>`, ms since 1970. A record's
    time counts as `now_ms` at most: one wrong time would otherwise stay the latest for ever.
    """
    latest: dict[TopicPartition, int] = {}
    for topic in topics:
        for one in topic.partitions():
            of_batch = batch.get(f"{one.topic}/{one.partition}")
            times = [known.get(one), None if of_batch is None else min(of_batch, now_ms)]
            if times_read := [at for at in times if at is not None]:
                latest[one] = max(times_read)
    return latest


def valid_through_ms(
    topics: Sequence[Topic],
    latest: Times,
    reached: Offsets,
    before: int | None,
    *,
    now_ms: int,
    idle_after_ms: int | None = None,
) -> int | None:
    """The time up to which the tables have all records, ms since 1970; None if it is not known yet.

    It is the least of the partitions' latest times, and never less than `before`, the time of the batch
    before. A partition of which no record was read keeps it at `before`. With `idle_after_ms` a partition is
    left out that was read to its end (`reached` has the offsets) and whose latest record is at least so old.
    """
    times: list[int | None] = []
    for topic in topics:
        for one in topic.partitions():
            at = latest.get(one)
            at_end = reached.get(one, 0) >= topic.ends[one.partition]
            if idle_after_ms is None or not at_end or (at is not None and at > now_ms - idle_after_ms):
                times.append(at)
    known = [at for at in times if at is not None]
    if not known or len(known) < len(times):
        return before
    return max(min(known), before if before is not None else min(known))
