"""The valid-through time of a table that is computed from changes. Pure functions over recorded times.

All rows are in the table that come from records older than that time and that belong to partitions before
it. Times are in ms since 1970.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import ancestors_after, replayed_from
from branchlake_dagster.stored_names import LakeProperty

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_epoch_ms(time: datetime) -> int:
    """A time in ms since 1970, never later than it is."""
    return (time - _EPOCH) // timedelta(milliseconds=1)


@dataclass(frozen=True)
class InputTime:
    """Up to which time an input has all records, and what they come from.

    `sources` are the ingested tables and, for each consumer between, which partitions it has
    (`with_partitions`).
    """

    ms: int
    sources: frozenset[str]

    def with_partitions(self, name: str, coverage: Mapping[str, Any]) -> InputTime:
        """The same for a consumer's table with the partitions of a `coverage`, when the last one ends aside.

        With another first window or other keys it gets rows that are older than times recorded before.
        """
        if not coverage:
            return self
        scope = {
            dimension: value.split("/")[0] if isinstance(value, str) else value
            for dimension, value in coverage.items()
        }
        scope_json = json.dumps(scope, sort_keys=True)
        source = f"{name}:{hashlib.sha256(scope_json.encode()).hexdigest()[:16]}"
        return InputTime(self.ms, self.sources | {source})


@dataclass(frozen=True)
class ValidThrough:
    """What a run of a consumer records: the time of its inputs, and that of the table after the run.

    `table_ms` is None if the run left a partition without any known time. `sources` are those of the inputs:
    with others, neither time holds.
    """

    inputs_ms: int
    table_ms: int | None
    sources: frozenset[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        table = {} if self.table_ms is None else {"table_ms": self.table_ms}
        return {"inputs_ms": self.inputs_ms, **table, "sources": sorted(self.sources)}

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> ValidThrough:
        """Back again; KeyError or TypeError for something else."""
        return cls(recorded["inputs_ms"], recorded.get("table_ms"), frozenset(recorded["sources"]))


@dataclass(frozen=True)
class UnconsumedPart:
    """A partition with something left to consume, or a table without partitions.

    `start_ms` is the start of its time window, None if it has none. `consumed_ms` is the time of the inputs
    when they were last consumed for it, None if that is not known.
    """

    start_ms: int | None
    consumed_ms: int | None

    @property
    def valid_through_ms(self) -> int | None:
        """The time before which the part lacks no row: none is before its window."""
        return max((at for at in (self.start_ms, self.consumed_ms) if at is not None), default=None)


def earliest_time(inputs: Iterable[InputTime | None]) -> InputTime | None:
    """The time of several inputs, which is the earliest one; None if one has none."""
    times: list[InputTime] = []
    for time in inputs:
        if time is None:
            return None
        times.append(time)
    if not times:
        return None
    return InputTime(min(one.ms for one in times), frozenset[str]().union(*(one.sources for one in times)))


def table_time_ms(inputs_ms: int, unconsumed: Iterable[UnconsumedPart], end_ms: int | None) -> int | None:
    """The valid-through time of a consumer's table; None if an unconsumed part has none.

    `inputs_ms` is the time of its inputs. `end_ms` is the end of its last time window, None for a table
    without time windows: rows after that belong to partitions that do not exist yet.
    """
    times = [inputs_ms] if end_ms is None else [inputs_ms, end_ms]
    for part in unconsumed:
        at = part.valid_through_ms
        if at is None:
            return None
        times.append(at)
    return min(times)


def ingested_time(metadata: TableMetadata, name: str) -> InputTime | None:
    """The time that the ingestions of a table have recorded in it, from its properties alone.

    None if no ingestion fills the table, if one has recorded no time or fills the table again, or if the
    table was rolled back. The batches since the last one with rows for the table are not in it, so the table
    may be further.
    """
    times: list[int] = []
    for key, value in metadata.properties.items():
        if not key.startswith(LakeProperty.OFFSETS_PREFIX):
            continue
        try:
            recorded = json.loads(value)
            snapshot_id, until, ms = (
                recorded.get("at"),
                recorded.get("until"),
                recorded.get("valid_through_ms"),
            )
        except (ValueError, AttributeError):
            return None
        if ms is None or until or not _is_ancestor(metadata, snapshot_id):
            return None
        times.append(ms)
    return InputTime(min(times), frozenset({name})) if times else None


def _is_ancestor(metadata: TableMetadata, snapshot_id: int | None) -> bool:
    ancestors, _ = ancestors_after(metadata)
    return snapshot_id is None or any(
        snapshot_id in (ancestor.snapshot_id, replayed_from(ancestor)) for ancestor in ancestors
    )
