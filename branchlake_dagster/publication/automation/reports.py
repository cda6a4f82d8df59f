"""What the publisher told an asset in Dagster's event log, read in steps: each publication once.

The publisher reports an observation per published partition. Two things make "everything after the last
id" the wrong question. A database may commit an event after another one with a higher id. And a publisher
that died between telling and noting that it told, or two publishers in a race, tell the same publication
twice. So each step reads a little of the past again and knows by name what it has passed on already.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from dagster import AssetKey, AssetRecordsFilter, DagsterInstance

from branchlake_dagster.publication.ledger.report_metadata import BRANCH, PUBLICATION

LOOK_BACK = 1_000
"""How many event ids are read again: more than Dagster stores while one insert is under way."""

_PAGE = 1_000

Name = tuple[str, str | None]
"""(branch and commit on `main`, partition): the same however often it is told."""


@dataclass(frozen=True)
class Report:
    """One observation of a publication: its place in the event log, and what was published as what."""

    storage_id: int
    branch: str
    commit: str
    partition: str | None

    @property
    def name(self) -> Name:
        """What makes it the same as another telling."""
        return f"{self.branch}@{self.commit}", self.partition


def reports(instance: DagsterInstance, key: AssetKey, *, after: int, upto: int) -> Iterator[Report]:
    """The publications told to `key` with `after` < storage id <= `upto`, in that order.

    What was told of blocked, refused and discarded runs has no publication and is left out, as are
    observations of others.
    """
    wanted = AssetRecordsFilter(asset_key=key, after_storage_id=max(after, 0), before_storage_id=upto + 1)
    cursor: str | None = None
    while True:
        page = instance.fetch_observations(wanted, limit=_PAGE, cursor=cursor, ascending=True)
        for record in page.records:
            observation = record.asset_observation
            if observation is None:
                continue
            commit, branch = observation.metadata.get(PUBLICATION), observation.metadata.get(BRANCH)
            if commit is not None and branch is not None:
                yield Report(record.storage_id, str(branch.value), str(commit.value), observation.partition)
        if not page.has_more:
            return
        cursor = page.cursor


@dataclass(frozen=True)
class Position:
    """How far an asset was read: up to this id, and the names passed on from the last `LOOK_BACK` ids."""

    upto: int
    passed_on: frozenset[Name] = field(default_factory=frozenset)

    def to_text(self) -> str:
        """A cursor for Dagster to keep."""
        partitions: dict[str, list[str | None]] = defaultdict(list)
        for publication, partition in sorted(self.passed_on, key=str):
            partitions[publication].append(partition)
        return json.dumps({"upto": self.upto, "passed_on": partitions})

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The reverse of `to_text`."""
        found = json.loads(text)
        names: Mapping[str, Sequence[str | None]] = found["passed_on"]
        return cls(found["upto"], frozenset((pub, part) for pub, parts in names.items() for part in parts))


def next_reports(
    instance: DagsterInstance, key: AssetKey, last: Position | None, *, start: int, upto: int
) -> tuple[list[Report], Position]:
    """The publications told since `last` and up to the event `upto`, and the position after them.

    Without a `last` position what was told up to the event `start` counts as passed on: history does not
    fire.
    """
    since = last.upto if last else start
    read = list(reports(instance, key, after=since - LOOK_BACK, upto=upto))
    known = last.passed_on if last else {telling.name for telling in read if telling.storage_id <= since}
    new = {telling.name: telling for telling in read if telling.name not in known}
    recent = {telling.name for telling in read if telling.storage_id > upto - LOOK_BACK}
    return list(new.values()), Position(upto, frozenset(recent))
