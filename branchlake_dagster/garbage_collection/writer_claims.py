"""Find the files that a living writer may have written and not committed yet.

A writer names its branch in its heartbeats. It wrote no file for that branch before the commit from which
the branch started. So it may have written every file that is younger, and every file of the tables that
the branch has changed. A writer whose branch is unknown may have written any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from branchlake_dagster.garbage_collection.location_keys import canonical_location
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieNotFound, ReferenceNotFound
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.runs.failure_detector import (
    Heartbeats,
    Liveness,
    judge_by_timestamp,
    watch_suspects,
)
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.tables.table_files import table_root

CLOCK_TOLERANCE = timedelta(hours=1)
"""The clocks of Nessie and of the store may differ by this much."""


@dataclass(frozen=True)
class WriterClaim:
    """The files that a living writer may have written.

    `since` is the time from which on it may have written any file; None if it may have written files of any
    age. `folders` are canonical folders of tables whose files it may have written at any time.
    """

    branch: str
    writer: str
    since: datetime | None = None
    folders: frozenset[str] = frozenset()


def find_living_writers(
    store: Heartbeats,
    now: datetime,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[Heartbeat]:
    """Return the writers that are not proved dead. Raises HeartbeatsUnreadable.

    Waits about three heartbeat intervals if the time of a heartbeat is stale.
    """
    verdicts = judge_by_timestamp(store.all(), now)
    suspects = [beat for beat, liveness in verdicts.items() if liveness is Liveness.SUSPECT]
    watched = watch_suspects(store, suspects, monotonic=monotonic, sleep=sleep)
    return [
        *(beat for beat, liveness in verdicts.items() if liveness is Liveness.ALIVE),
        *(beat for beat, liveness in watched.items() if liveness is not Liveness.DEAD),
    ]


def load_claims(client: NessieClient, writers: Iterable[Heartbeat]) -> list[WriterClaim]:
    """Return what each writer claims. Raises NessieError. Costs three requests per branch."""
    claims: dict[str, WriterClaim] = {}
    result = []
    for beat in writers:
        if beat.branch not in claims:
            claims[beat.branch] = _load_branch_claim(client, beat.branch)
        claim = claims[beat.branch]
        result.append(WriterClaim(beat.branch, beat.writer, claim.since, claim.folders))
    return result


def _load_branch_claim(client: NessieClient, branch: str) -> WriterClaim:
    try:
        head = client.reference(branch, fetch_metadata=True)
        base_hash = head.metadata.common_ancestor_hash if head.metadata else None
        if base_hash is None:
            return WriterClaim(branch, "")
        changes = client.diff(f"@{base_hash}", f"@{head.hash}") if base_hash != head.hash else ()
        folders = {
            canonical_location(table_root(content.metadata_location))
            for change in changes
            for content in (change.from_content, change.to_content)
            if isinstance(content, IcebergTable)
        }
        base = next(iter(client.log(f"@{base_hash}", limit=1)), None)
        since = base.commit.commit_time if base is not None else None
    except (ReferenceNotFound, NessieNotFound):
        return WriterClaim(branch, "")
    return WriterClaim(branch, "", since and since - CLOCK_TOLERANCE, frozenset(folders))


def earliest_claim(claims: Sequence[WriterClaim], now: datetime) -> datetime | None:
    """Return the time from which on any file is claimed; None if no file is claimed by its time alone.

    The result is the earliest possible time if a writer claims files of any age.
    """
    if not claims:
        return None
    times = [claim.since for claim in claims]
    earliest = datetime.min.replace(tzinfo=now.tzinfo)
    return earliest if None in times else min(time for time in times if time is not None)
