"""The reaper at work: its rules applied with Dagster's knowledge of runs, as a job, a schedule and a command.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from dagster import (
    DagsterInstance,
    DefaultScheduleStatus,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    ScheduleDefinition,
    job,
    op,
)

from branchlake_dagster.branching.reaper import Reaping, RunState, reap
from branchlake_dagster.branching.resource import LakehouseResource
from branchlake_dagster.branching.run_branch import branch_name
from branchlake_dagster.branching.run_tags import judged
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.reconcile import RUN_BRANCHES
from branchlake_dagster.settings import Settings


def reap_job() -> JobDefinition:
    """The job `reap_branches`: one pass, its decisions in the output's metadata."""

    @op(description="Deletes run branches that nobody will publish, by seed 000's rules.")
    def reap_branches_op(context: OpExecutionContext, lakehouse: LakehouseResource) -> None:
        reaped = list(reap_branches(lakehouse.lakehouse, context.instance))
        for one in reaped:
            context.log.info(str(one))
        deleted = [one for one in reaped if one.delete]
        context.add_output_metadata(
            {
                "deleted": MetadataValue.int(len(deleted)),
                "kept": MetadataValue.int(len(reaped) - len(deleted)),
                "branches": MetadataValue.md("\n".join(f"- {one}" for one in reaped) or "no run branches"),
            }
        )

    @job(name="reap_branches", description="Clean-up of abandoned run branches.")
    def reap_branches_job() -> None:
        reap_branches_op()

    return reap_branches_job


def reap_schedule(reaper: JobDefinition, settings: Settings) -> ScheduleDefinition:
    """Runs `reaper` every `reap_interval_min` minutes."""
    minutes = settings.reap_interval_min
    return ScheduleDefinition(
        name="reap_branches_schedule",
        job=reaper,
        cron_schedule="0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
        default_status=DefaultScheduleStatus.RUNNING,
    )


def reap_branches(lake: Lakehouse, instance: DagsterInstance, *, dry_run: bool = False) -> Iterator[Reaping]:
    """Apply the reaper's rules to the lake with Dagster's knowledge of runs."""

    def state_of(run_id: str) -> tuple[RunState, datetime | None]:
        record = instance.get_run_record_by_id(run_id)
        if record is None:
            return RunState.MISSING, None
        run = record.dagster_run
        if not run.is_finished:
            return RunState.ACTIVE, record.create_timestamp
        waits = run.is_success and not judged(run.tags, branch_name(run_id))
        state = RunState.AWAITING_PUBLICATION if waits else RunState.SETTLED
        return state, record.create_timestamp

    return reap(
        lake.nessie,
        listing=RUN_BRANCHES,
        state_of=state_of,
        now=datetime.now(UTC),
        max_age=timedelta(hours=lake.settings.orphan_max_age_h),
        orphan_grace=timedelta(minutes=lake.settings.orphan_grace_min),
        dry_run=dry_run,
    )
