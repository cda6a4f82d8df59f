"""A topic as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from branchlake_dagster.ingest.positions.offsets import TopicPartition


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
