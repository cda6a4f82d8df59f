"""A retry of some steps continues where its parent stopped, on the state of the parent's branch."""

from __future__ import annotations

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.branching.branch.claim import is_claimed
from branchlake_dagster.branching.branch.owner import continuing_runs, is_retry, runs_on
from branchlake_dagster.branching.branch.run_branch import branch_name, run_id_of
from branchlake_dagster.branching.branch.run_tags import (
    CONTINUED,
    Place,
    base_hash_of,
    judged,
    place_of,
    publication_of,
)
from branchlake_dagster.branching.errors import RetryNeedsFullRun
from branchlake_dagster.branching.fencing.discard import take_over
from branchlake_dagster.branching.fencing.report_end import report_end
from branchlake_dagster.nessie.client import NessieClient

_HINT = "Re-execute all steps; the new run will start from today's main."


def inherited(client: NessieClient, instance: DagsterInstance, run: DagsterRun) -> Place | None:
    """Take over the work of the run that `run` retries, under `run`'s own branch name.

    None when there is nothing to take over: `run` is no retry, or what it retries touched no table or wrote
    to `main` directly. Raises RetryNeedsFullRun when the work is gone, was published already, or another
    run is at it.
    """
    if not is_retry(run):
        return None
    place = _parents_place(client, instance, run)
    if place is None or place.unbranched:
        return None
    _refuse_company(instance, run, place.branch)
    # Asked after the company: a run that was at work then and has taken over since is seen here.
    _refuse_second(instance, run, place.branch)
    own = branch_name(run.run_id)
    if take_over(client, place.branch, own) is None:
        raise RetryNeedsFullRun(
            "The branch of the run's parent is gone, and with it the outputs that a retry needs.",
            branch=place.branch,
            run_id=run.run_id,
            hint=_HINT,
        )
    report_end(
        instance,
        run_id_of(place.branch),
        place.branch,
        verdict=CONTINUED,
        reason=f"run {run.run_id} continues its work",
    )
    return Place(own, place.base_hash, continues=place.branch)


def _parents_place(client: NessieClient, instance: DagsterInstance, run: DagsterRun) -> Place | None:
    """Where the nearest ancestor worked that opened a branch, going up through retries only."""
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    if parent is None:
        raise RetryNeedsFullRun("Dagster does not know the run's parent.", run_id=run.run_id, hint=_HINT)
    own = branch_name(parent.run_id)
    place = place_of(parent.tags, parent.run_id)
    if place is None and (base := base_hash_of(parent.tags, own)):
        place = Place(own, base)
    if place is None:
        return _parents_place(client, instance, parent) if is_retry(parent) else None
    if publication := publication_of(parent.tags, place.branch):
        raise RetryNeedsFullRun(
            f"The run's parent was published as {publication[:12]}, so there is nothing to continue.",
            branch=place.branch,
            run_id=run.run_id,
            hint=_HINT,
        )
    told = place.unbranched or judged(parent.tags, place.branch)
    if not told and (parent.is_success or is_claimed(client, place.branch)):
        # Its rows may be on `main` already, or come there while the retry works on them too.
        raise RetryNeedsFullRun(
            "The run's parent waits for its verdict, so its work is not free to be continued.",
            branch=place.branch,
            run_id=run.run_id,
            hint="Retry when its verdict is told.",
        )
    return place


def _refuse_second(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """The work is continued once, whatever the references say.

    A clean-up that overlapped with the first retry leaves the parent's tag, and the parent's rows were once
    published by two retries.
    """
    for _, other in continuing_runs(instance, [branch]):
        if other.run_id != run.run_id:
            raise RetryNeedsFullRun(
                "The work of the run's parent was continued by another retry.",
                branch=branch,
                run_id=run.run_id,
                hint=f"Run {other.run_id} continued it: retry that one.",
            )


def _refuse_company(instance: DagsterInstance, run: DagsterRun, branch: str) -> None:
    """Two runs must not take over one branch; the older one may."""
    for other in runs_on(instance, branch):
        if other.run_id == run.run_id:
            return
        if not other.is_finished:
            raise RetryNeedsFullRun(
                f"Run {other.run_id} is at work on the branch of the run's parent.",
                branch=branch,
                run_id=run.run_id,
                hint="Wait for that run.",
            )
