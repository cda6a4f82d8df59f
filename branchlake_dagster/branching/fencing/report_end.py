"""Telling a run that its branch has ended otherwise than by a verdict: it must not look pending for ever."""

from __future__ import annotations

from dagster import DagsterInstance

from branchlake_dagster.branching.branch.run_tags import (
    CONTINUED,
    NEXT_ATTEMPT_TAG,
    NONE,
    REASON_TAG,
    STATUS_TAG,
    UNJUDGED,
    VERDICT_TAG,
    Status,
    place_of,
    shortened,
)
from branchlake_dagster.branching.fencing.taken_back import status_without_verdict, take_back


def report_end(
    instance: DagsterInstance,
    run_id: str,
    branch: str,
    *,
    verdict: str,
    reason: str,
    status: Status | None = None,
) -> bool:
    """Show `verdict` and `reason` on a run that opened `branch` and has no verdict; whether it was shown.

    `status` is the word in the run list, by default how the run ended. It is no publisher's word: should the
    run pass after all, it is judged as though nothing had been said.
    """
    run = instance.get_run_by_id(run_id)
    place = place_of(run.tags, run_id) if run else None
    if run is None or place is None or place.branch != branch:
        return False
    told = run.tags.get(VERDICT_TAG)
    if told not in UNJUDGED or told == verdict:
        return False
    instance.report_engine_event(f"Not published: {reason.rstrip('.')}.", run)
    aside = {NEXT_ATTEMPT_TAG: NONE} if NEXT_ATTEMPT_TAG in run.tags else {}
    status = Status.CONTINUED if verdict == CONTINUED else status or status_without_verdict(run)
    shown = {STATUS_TAG: str(status), VERDICT_TAG: verdict, REASON_TAG: shortened(reason)}
    instance.add_run_tags(run_id, {**shown, **aside})
    if status is not Status.CONTINUED:
        take_back(instance, run, [run_id])
    return True
