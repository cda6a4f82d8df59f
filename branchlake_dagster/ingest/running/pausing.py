"""How long a sensor leaves an ingestion alone whose runs keep failing.

With wrong credentials a run ends within seconds: its sensor started another one every five seconds, all
night. So it did with a batch that the gate blocks, whose steps all succeed. A run that was killed or
interrupted is no such run, however often that happens: what it was at goes on at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import takewhile

import dagster as dg

from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.running.batch_assets import INGESTION_TAG
from branchlake_dagster.runs.discarding import FAILS, FAILS_BY_ITSELF, FAILURE_REASON_TAG
from branchlake_dagster.runs.run_tags import STATUS_TAG

_WAITS_S = (10.0, 30.0, 90.0, 270.0, 600.0)
"""After the second failure in a row (none after the first), the third, …; then always the last of them."""
_SOON_S = 600.0
"""A run that worked for longer has failed for something new."""


def pause(instance: dg.DagsterInstance, ingest: Ingest, job: str, now: float) -> str | None:
    """Why no run is to be started yet: those before it have failed, one after the other. None: one may.

    `now` is a wall clock, seconds since 1970.
    """
    wanted = dg.RunsFilter(job_name=job, tags={INGESTION_TAG: ingest.name})
    newest = instance.get_run_records(wanted, limit=len(_WAITS_S) + 1)
    failed = list(takewhile(lambda one: _failed_soon(one) and _by_itself(one.dagster_run), newest))
    if len(failed) < 2:
        return None
    last, next_at = failed[0], _ended(failed[0]) + _WAITS_S[len(failed) - 2]
    if now >= next_at:
        return None
    count = f"{len(failed)} or more" if len(failed) > len(_WAITS_S) else str(len(failed))
    return (
        f"{count} runs have failed one after the other, run {last.dagster_run.run_id[:8]} last."
        f" The next one starts at {datetime.fromtimestamp(next_at, UTC):%H:%M:%S} UTC;"
        f" to try at once, launch {job}."
    )


def _ended(record: dg.RunRecord) -> float:
    return record.end_time if record.end_time is not None else record.update_timestamp.timestamp()


def _failed_soon(record: dg.RunRecord) -> bool:
    if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
        return False
    ended = _ended(record)
    return ended - (record.start_time if record.start_time is not None else ended) < _SOON_S


def _by_itself(run: dg.DagsterRun) -> bool:
    """Whether it has failed by what it did, or by what its publication found."""
    return run.tags.get(FAILURE_REASON_TAG) in FAILS_BY_ITSELF or run.tags.get(STATUS_TAG) in FAILS
