"""Choose the snapshots that a batch of a live ingestion removes from a table.

Every batch writes the whole metadata of its tables again, so the number of snapshots is bounded while the
ingestion runs. References and consumers' positions are read only if a table has 25 % more snapshots than it
keeps, once for all tables of a batch, and for at most two seconds. If this time passes, nothing is removed;
the next try continues reading.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from pyiceberg.io import load_file_io
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.expiry.retention import (
    MAX_AGE_PROPERTY,
    MIN_SNAPSHOTS_PROPERTY,
    ExpiryPolicy,
    SnapshotFacts,
    TableHistory,
    TableReference,
    decide_retention,
    keep_suffix,
    parse_retention,
)
from branchlake_dagster.expiry.roots import LakeRoots, PositionCache, RootedTable, RootsReader
from branchlake_dagster.history.capture import replayed_from
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable

_log = logging.getLogger(__name__)

_READ_LIMIT_S = 2.0
"""The longest time in seconds that a batch spends on reading positions."""
_ROOTS_AGE_S = 30.0
"""Seconds for which references and positions that were read for one table are used for other tables."""
_PAUSE_S = 300.0
"""Seconds until the next try after a try that removed nothing."""
_POSITION_AGE = timedelta(days=1)
_POSITION_FACTOR = 4
"""Positions of consumers keep at most this many times the number of snapshots that an ingestion keeps."""


def live_policy(keep_count: int) -> ExpiryPolicy:
    """Return the policy for tables of a live ingestion, which keeps the newest `keep_count` snapshots.

    Neither age nor a possible undo keeps snapshots, because an ingestion adds thousands of them an hour. A
    consumer's position keeps its snapshot for one day, and only while it is one of the newest
    4 * `keep_count` snapshots.
    """
    return ExpiryPolicy(
        keep_count=keep_count,
        keep_age=timedelta(0),
        position_age=_POSITION_AGE,
        undo_age=timedelta(0),
        position_count=_POSITION_FACTOR * keep_count,
    )


class LiveTrimmer:
    """Chooses the snapshots that an ingestion's batch removes. Threads may share the object.

    `clock` is the monotonic clock, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cache = PositionCache()
        self._roots: tuple[float, LakeRoots] | None = None
        self._next_try: dict[ContentKey, float] = {}

    def list_expired(
        self,
        client: NessieClient,
        io_properties: Mapping[str, str],
        key: ContentKey,
        content: IcebergTable,
        metadata: TableMetadata,
        keep_count: int,
    ) -> list[int]:
        """Return the ids of the snapshots to remove from a table, sorted.

        The result is empty if the table has at most `keep_count` snapshots plus 25 %, for five minutes after
        a call that removed nothing, and if references or positions cannot be read. Such an error is logged,
        because old snapshots are no reason for a batch to fail.
        """
        now = self._clock()
        if len(metadata.snapshots) <= keep_count + keep_count // 4 or now < self._next_try.get(key, 0.0):
            return []
        self._next_try[key] = now + _PAUSE_S
        try:
            expired_ids = self._decide(client, io_properties, key, content, metadata, keep_count)
        except (BranchlakeError, OSError) as error:
            _log.warning("Old snapshots of %s stay for now: %s", key.name, error)
            return []
        if expired_ids:
            del self._next_try[key]
        return expired_ids

    def _decide(
        self,
        client: NessieClient,
        io_properties: Mapping[str, str],
        key: ContentKey,
        content: IcebergTable,
        metadata: TableMetadata,
        keep_count: int,
    ) -> list[int]:
        now, policy = datetime.now(UTC), live_policy(keep_count)
        reader = RootsReader(
            client, lambda location: load_file_io(dict(io_properties), location), self._cache
        )
        with self._lock:
            roots = self._load_roots(reader, policy, now)
        if roots is None:
            _log.warning("Old snapshots of %s stay for now: reading all positions takes long.", key.name)
            return []
        table = RootedTable(key, content, str(metadata.table_uuid), build_history(metadata))
        table_roots = reader.find_table_roots(roots, [table])[key]
        retention = decide_retention(table.history, table_roots, policy, int(now.timestamp() * 1000))
        for consumer in dict.fromkeys(position.consumer for position in retention.given_up):
            _log.warning(
                "%s must be computed anew: its position in %s is older than the snapshots that a live"
                " ingestion keeps for consumers.",
                consumer,
                key.name,
            )
        return sorted(retention.expired_ids)

    def _load_roots(self, reader: RootsReader, policy: ExpiryPolicy, now: datetime) -> LakeRoots | None:
        began = self._clock()
        if self._roots is not None and began - self._roots[0] < _ROOTS_AGE_S:
            return self._roots[1]
        roots = reader.read(policy, now, deadline=time.monotonic() + _READ_LIMIT_S)
        self._roots = (began, roots) if roots is not None else None
        if roots is not None and roots.unreadable_tables:
            _log.warning(
                "Positions in these tables keep no snapshots, because their metadata files are missing or"
                " damaged: %s.",
                ", ".join(roots.unreadable_tables),
            )
        return roots


def drop_snapshots(metadata: TableMetadata, expired_ids: Collection[int]) -> TableMetadata:
    """Return parsed metadata without the given snapshots, their statistics and their log entries.

    No branch or tag of the table may point to one of these snapshots. Unlike
    `metadata_document.remove_snapshots`, schemas and the metadata log stay unchanged. PyIceberg's
    `RemoveSnapshotsUpdate` is not used: it clears the parent of the oldest snapshot, and leaves a gap in the
    snapshot log if a tag keeps an older snapshot. A query for a time in the gap then gets the tagged state.
    """
    snapshots = [one for one in metadata.snapshots if one.snapshot_id not in expired_ids]
    kept_ids = frozenset(snapshot.snapshot_id for snapshot in snapshots)
    dropped_count = keep_suffix((entry.snapshot_id for entry in metadata.snapshot_log), kept_ids)
    return metadata.model_copy(
        update={
            "snapshots": snapshots,
            "snapshot_log": metadata.snapshot_log[dropped_count:],
            "statistics": [one for one in metadata.statistics if one.snapshot_id in kept_ids],
            "partition_statistics": [
                one for one in metadata.partition_statistics if one.snapshot_id in kept_ids
            ],
        }
    )


@lru_cache(maxsize=8)
def get_trimmer(uri: str) -> LiveTrimmer:  # noqa: ARG001 - the key
    """Return the trimmer of a lake, which all ingestions of this process share. `uri` is Nessie's address."""
    return LiveTrimmer()


def build_history(metadata: TableMetadata) -> TableHistory:
    """Return the snapshots, references and retention properties of parsed metadata."""
    return TableHistory(
        snapshots=[
            SnapshotFacts(
                snapshot.snapshot_id,
                snapshot.parent_snapshot_id,
                snapshot.timestamp_ms,
                replayed_from(snapshot),
            )
            for snapshot in metadata.snapshots
        ],
        current_id=metadata.current_snapshot_id,
        references={
            name: TableReference(
                reference.snapshot_id,
                is_branch=reference.snapshot_ref_type == "branch",
                min_snapshots=reference.min_snapshots_to_keep,
                max_age_ms=reference.max_snapshot_age_ms,
            )
            for name, reference in metadata.refs.items()
        },
        min_snapshots=parse_retention(metadata.properties, MIN_SNAPSHOTS_PROPERTY),
        max_age_ms=parse_retention(metadata.properties, MAX_AGE_PROPERTY),
    )
