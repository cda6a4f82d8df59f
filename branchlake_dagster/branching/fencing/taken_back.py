"""A run that is not published has materialised nothing that `main` has, and must not look as though it had.

Dagster keeps the materialisations of its steps, whatever becomes of the run. A blocked partition counted as
filled, so a backfill of what was "failed and missing" went round it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
)

from branchlake_dagster.branching.branch.run_tags import FAILED_BY_TAG, PUBLISHER, Status
from branchlake_dagster.internals.dagster import report_planned_again

FAILS = (Status.BLOCKED, Status.REFUSED)
"""What makes a run fail whose steps have all succeeded."""

FAILURE_REASON_TAG = "dagster/failure_reason"
FAILS_BY_ITSELF = {"STEP_FAILURE", "RUN_EXCEPTION", "JOB_INITIALIZATION_FAILURE", "START_TIMEOUT"}
"""What Dagster says there of runs that would fail again; of one that was interrupted it says another, of one
whose process was gone none."""

_PAGE = 1_000


def failure(reason: str, next_step: str = "") -> str:
    """The message with which an unpublished run fails; `next_step` is a sentence on what to do."""
    return f"Not published: {reason.rstrip('.')}. main is as it was. {next_step}".rstrip()


def fail_unpublished(instance: DagsterInstance, run_id: str, reason: str, next_step: str = "") -> None:
    """Let a run that succeeded and is not published fail with `reason`. Doing it twice does it once."""
    run = instance.get_run_by_id(run_id)
    if run is not None and run.is_success:
        instance.add_run_tags(run_id, {FAILED_BY_TAG: PUBLISHER})
        instance.report_run_failed(run, failure(reason, next_step))


def status_without_verdict(run: DagsterRun) -> Status:
    """The word for a run that is not published and that the gate has not judged: how it ended.

    A run that Dagster takes for running, or that succeeded, is `discarded`: only its branch was ended.
    """
    if run.status is DagsterRunStatus.CANCELED:
        return Status.CANCELED
    if run.status is not DagsterRunStatus.FAILURE:
        return Status.DISCARDED
    by_publisher = run.tags.get(FAILED_BY_TAG) == PUBLISHER
    by_itself = run.tags.get(FAILURE_REASON_TAG) in FAILS_BY_ITSELF
    return Status.FAILED if by_publisher or by_itself else Status.INTERRUPTED


def take_back(instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]) -> None:
    """Let the partitions that `run_ids` have materialised count as failed, once `run` has failed.

    `run_ids` are the run itself and those whose work it continued. A partition that another run has
    materialised since is left as that run left it. Doing it twice shows the same as doing it once.
    """
    for run_id in run_ids:
        for key, partition, step in materialised(instance, run_id):
            if newest_run(instance, key, partition) == run_id:
                report_planned_again(instance, run, key, partition, step)


def materialised(instance: DagsterInstance, run_id: str) -> Iterator[tuple[AssetKey, str | None, str | None]]:
    """What a run has materialised, once each, with the step that did."""
    found: dict[tuple[AssetKey, str | None], str | None] = {}
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(
            run_id, cursor=cursor, of_type=DagsterEventType.ASSET_MATERIALIZATION, limit=_PAGE
        )
        for record in page.records:
            made = record.asset_materialization
            if made is not None:
                found[made.asset_key, made.partition] = record.event_log_entry.step_key
        if not page.has_more:
            break
        cursor = page.cursor
    return ((key, partition, step) for (key, partition), step in found.items())


def newest_run(instance: DagsterInstance, key: AssetKey, partition: str | None) -> str | None:
    """The run that materialised a partition last."""
    wanted = AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None)
    records = instance.fetch_materializations(wanted, limit=1).records
    return records[0].run_id if records else None
