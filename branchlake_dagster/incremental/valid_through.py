"""Computes the valid-through time of a table that is computed from changes, from recorded times.

The table contains all rows that come from records older than this time and that belong to windows before it.
All times are in ms since 1970.
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
    """Convert a time to ms since 1970, rounded down."""
    return (time - _EPOCH) // timedelta(milliseconds=1)


@dataclass(frozen=True)
class InputTime:
    """The time up to which an input is complete, and the sources of its records.

    `sources` are the ingested tables and, for each consumer in between, its partitions (see
    `with_partitions`).
    """

    ms: int
    sources: frozenset[str]

    def with_partitions(self, name: str, coverage: Mapping[str, Any]) -> InputTime:
        """Return the time with the partitions of a consumer's table added to its sources.

        `name` is the consumer's table and `coverage` a result of `partition_coverage`; if it is empty, the
        time is returned unchanged. The end of the last window is ignored. A consumer whose first window or
        keys have changed gets rows that are older than its earlier recorded times. It then has another
        source, and times with other sources are not compared.
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
    """The times that a run of a consumer records: of its inputs, and of its table after the run.

    `table_ms` is None if the run left a partition whose time is not known. `sources` are those of the inputs.
    If the sources have changed since, neither time counts.
    """

    inputs_ms: int
    table_ms: int | None
    sources: frozenset[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the times as a value for JSON."""
        table = {} if self.table_ms is None else {"table_ms": self.table_ms}
        return {"inputs_ms": self.inputs_ms, **table, "sources": sorted(self.sources)}

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> ValidThrough:
        """Parse the result of `as_dict`. Raises KeyError if a required field is missing.

        Raises TypeError if `recorded` is not a mapping, and ValueError for a time that no calendar has.
        """
        inputs_ms, table_ms, sources = recorded["inputs_ms"], recorded.get("table_ms"), recorded["sources"]
        if not all(map(_is_time, (inputs_ms, 0 if table_ms is None else table_ms))):
            raise ValueError(f"{recorded!r} has a time that is not in the years 1 to 9999")
        return cls(inputs_ms, table_ms, frozenset(sources))


_YEAR_1_MS, _YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000


def _is_time(ms: object) -> bool:
    """Whether a recorded value is a time in ms since 1970 that a datetime can hold."""
    return type(ms) is int and _YEAR_1_MS <= ms < _YEAR_10000_MS


@dataclass(frozen=True)
class UnconsumedPart:
    """A partition that still has something to consume, or a table without partitions that does.

    `start_ms` is the start of the partition's time window, or None if it has none. `consumed_ms` is the time
    of the inputs when they were last consumed for it, or None if it is not known.
    """

    start_ms: int | None
    consumed_ms: int | None

    @property
    def valid_through_ms(self) -> int | None:
        """The time before which no row is missing; None if neither time is known.

        This is the later of the two times, because rows of a partition are not older than its window.
        """
        return max((at for at in (self.start_ms, self.consumed_ms) if at is not None), default=None)


def earliest_time(inputs: Iterable[InputTime | None]) -> InputTime | None:
    """Return the earliest time of several inputs with the sources of all of them.

    None if one of the inputs has no time, or if there are no inputs.
    """
    times: list[InputTime] = []
    for time in inputs:
        if time is None:
            return None
        times.append(time)
    if not times:
        return None
    return InputTime(
        min(part.ms for part in times), frozenset[str]().union(*(part.sources for part in times))
    )


def table_time_ms(inputs_ms: int, unconsumed: Iterable[UnconsumedPart], end_ms: int | None) -> int | None:
    """Return the valid-through time of a consumer's table, or None if an unconsumed part has no time.

    `inputs_ms` is the time of its inputs. `end_ms` is the end of its last time window, or None for a table
    without time windows: later rows belong to partitions that do not exist yet.
    """
    times = [inputs_ms] if end_ms is None else [inputs_ms, end_ms]
    for part in unconsumed:
        at = part.valid_through_ms
        if at is None:
            return None
        times.append(at)
    return min(times)


def ingested_time(metadata: TableMetadata, name: str) -> InputTime | None:
    """Return the time that the ingestions of a table have recorded in its properties.

    None if no ingestion fills the table, if an ingestion has recorded no time or is filling the table again,
    or if the table was rolled back. Batches without rows for the table are not recorded in it, so the table
    may be complete up to a later time. `name` is the dotted name of the table, the source of the time.
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
        except (ValueError, AttributeError, RecursionError):
            return None
        if not _is_time(ms) or until or not _is_ancestor(metadata, snapshot_id):
            return None
        times.append(ms)
    return InputTime(min(times), frozenset({name})) if times else None


def _is_ancestor(metadata: TableMetadata, snapshot_id: int | None) -> bool:
    ancestors, _ = ancestors_after(metadata)
    return snapshot_id is None or any(
        snapshot_id in (ancestor.snapshot_id, replayed_from(ancestor)) for ancestor in ancestors
    )
