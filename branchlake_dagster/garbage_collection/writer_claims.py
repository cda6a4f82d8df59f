"""Find the files that a living writer may have written and not committed yet.

A writer's heartbeats contain the start of its process and its branch. It wrote no file before its process
started, nor before the commit from which its branch started. So it may have written every file that is
younger than both. Its branch may not exist: before the run's first access to a table, in runs that only read,
and in live ingestions, whose batches have branches of their own. Then only the start of the process counts.
If neither time is known, the writer may have written any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieNotFound, ReferenceNotFound
from branchlake_dagster.runs.failure_detector import (
    Heartbeats,
    Liveness,
    judge_by_timestamp,
    watch_suspects,
)
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.wording import format_count

CLOCK_TOLERANCE = timedelta(hours=1)
"""The clocks of the writer, of Nessie and of the store may differ by this much."""


@dataclass(frozen=True)
class WriterClaim:
    """The files that a living writer may have written.

    It may have written each file that was changed at `since` or later; if `since` is None, any file.
    """

    branch: str
    writer: str
    since: datetime | None = None


def find_living_writers(
    store: Heartbeats,
    now: datetime,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Heartbeat]:
    """Return the heartbeats of all writers that are not proved dead. Raises HeartbeatsUnreadable.

    If the time of a heartbeat is stale, waits about three heartbeat intervals to see whether the writer
    sends another heartbeat. `progress` is called with a sentence before the heartbeats are read and before
    waiting.
    """
    progress("Reading heartbeats.")
    verdicts = judge_by_timestamp(store.all(), now)
    suspects = [beat for beat, liveness in verdicts.items() if liveness is Liveness.SUSPECT]
    if suspects:
        seconds = max(beat.max_silence_s for beat in suspects)
        progress(f"Watching {format_count(len(suspects), 'silent writer')} for {seconds:.0f} s.")
    watched = watch_suspects(store, suspects, monotonic=monotonic, sleep=sleep)
    return [
        *(beat for beat, liveness in verdicts.items() if liveness is Liveness.ALIVE),
        *(beat for beat, liveness in watched.items() if liveness is not Liveness.DEAD),
    ]


def load_claims(client: NessieClient, writers: Iterable[Heartbeat], now: datetime) -> list[WriterClaim]:
    """Return the claim of each writer. Raises NessieError. Costs two requests per branch of a writer."""
    bases: dict[str, datetime | None] = {}
    result = []
    for beat in writers:
        if beat.branch not in bases:
            bases[beat.branch] = _load_base_time(client, beat.branch)
        times = [time for time in (bases[beat.branch], _find_start(beat, now)) if time is not None]
        result.append(WriterClaim(beat.branch, beat.writer, max(times) - CLOCK_TOLERANCE if times else None))
    return result


def _find_start(beat: Heartbeat, now: datetime) -> datetime | None:
    """Return the start of the writer's process; None if it is unknown.

    The writer's clock may be ahead. So the result is the earlier of the recorded start, and of `now` minus
    the age that the process had at its last heartbeat. If the recorded start is after the last heartbeat, the
    clock was set back in between, and the result is None.
    """
    if beat.started_at is None or beat.written_at is None or beat.started_at > beat.written_at:
        return None
    return min(beat.started_at, now - (beat.written_at - beat.started_at))


def _load_base_time(client: NessieClient, branch: str) -> datetime | None:
    """Return the time of the commit from which a branch started; None if the branch or commit is missing."""
    try:
        head = client.reference(branch, fetch_metadata=True)
        base_hash = head.metadata.common_ancestor_hash if head.metadata else None
        base = next(iter(client.log(f"@{base_hash}", limit=1)), None) if base_hash is not None else None
    except (ReferenceNotFound, NessieNotFound):
        return None
    return base.commit.commit_time if base is not None else None


def earliest_claim(claims: Sequence[WriterClaim], now: datetime) -> datetime | None:
    """Return the time from which on every file is claimed; None if there are no claims.

    The result is `datetime.min` if a writer claims files of any age.
    """
    if not claims:
        return None
    times = [claim.since for claim in claims]
    earliest = datetime.min.replace(tzinfo=now.tzinfo)
    return earliest if None in times else min(time for time in times if time is not None)
