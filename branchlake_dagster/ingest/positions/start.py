"""Where an ingestion starts a topic that it has never read: declarations and pure functions.

The start counts only until the tables have positions. It takes over the position of another sink exactly: the
first record that is read from a partition is the one at its offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.errors import StartOffsetsMissing, StartOffsetsOutOfRange
from branchlake_dagster.ingest.positions.offsets import Offsets, TopicPartition
from branchlake_dagster.ingest.positions.topic import Topic

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
        _require_known(self.otherwise)


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
        for topic, given in self.offsets.items():
            for partition, offset in given.items():
                if not (_is_count(partition) and _is_count(offset)):
                    raise ConfigurationError(
                        f"Topic {topic} cannot start partition {partition!r} at offset {offset!r}.",
                        hint='Both are integers from 0: {"orders": {0: 120}}. To start at an end of the'
                        " partition, leave it out and set otherwise.",
                    )
        _require_known(self.otherwise)


Start = Literal["earliest", "latest"] | datetime | CommittedOffsets | StartingOffsets


def starting_offsets(
    topic: Topic, given: Mapping[int, int], otherwise: Otherwise, *, origin: str
) -> dict[TopicPartition, int]:
    """The offset of the first record that is read, for all partitions of a topic.

    `given` maps partition numbers to offsets; `origin` names their source in errors. Raises
    StartOffsetsOutOfRange for offsets outside the retained range and for partitions that the topic does not
    have, StartOffsetsMissing for partitions without an offset where `otherwise` is `stop`.
    """
    outside = [number for number in sorted(given) if not _is_available(topic, number, given[number])]
    if outside:
        ranges = "; ".join(_range_of(topic, number, given[number]) for number in outside)
        raise StartOffsetsOutOfRange(
            f"Topic {topic.name} cannot start at {origin}: {ranges}.",
            partitions=[f"{topic.name}[{number}]" for number in outside],
            hint=_hint_of(topic, outside, given),
        )
    missing = [number for number in sorted(topic.ends) if number not in given]
    if missing and otherwise == "stop":
        raise StartOffsetsMissing(
            f"Topic {topic.name} cannot start at {origin}: some partitions have none.",
            partitions=[f"{topic.name}[{number}]" for number in missing],
            hint='Choose otherwise="earliest" to read these partitions from their first offset, or'
            ' otherwise="latest" to read only what comes from now on.',
        )
    rest = topic.begins if otherwise == "earliest" else topic.ends
    return {one: given.get(one.partition, rest[one.partition]) for one in topic.partitions()}


def format_offsets(offsets: Offsets, *, most: int = 20) -> str:
    """`orders[0] 120, orders[1] 98`, at most `most` partitions."""
    shown = [f"{one.topic}[{one.partition}] {offset}" for one, offset in sorted(offsets.items())]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _is_available(topic: Topic, number: int, offset: int) -> bool:
    return number in topic.ends and topic.begins[number] <= offset <= topic.ends[number]


def _range_of(topic: Topic, number: int, offset: int) -> str:
    where = f"{topic.name}[{number}]"
    if number not in topic.ends:
        return f"{where} does not exist, and offset {offset} is given for it"
    begin, end = topic.begins[number], topic.ends[number]
    if begin == end:
        return f"{where} has no records, its next offset is {end}, and offset {offset} is given for it"
    return f"{where} has offsets {begin} to {end - 1}, and offset {offset} is given for it"


def _hint_of(topic: Topic, outside: list[int], given: Mapping[int, int]) -> str:
    if any(number in topic.ends and given[number] < topic.begins[number] for number in outside):
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


def _require_known(otherwise: str) -> None:
    if otherwise not in ("stop", "earliest", "latest"):
        raise ConfigurationError(f"Unknown otherwise={otherwise!r}.", hint="stop, earliest, latest")
