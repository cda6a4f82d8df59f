"""Approve the published results of a backfill, so that its next stages launch: by command or as a job.

This module has no postponed annotations: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dagster as dg
from pydantic import Field

from branchlake_dagster.automation.launch_decision import LaunchOutcome, launch_outcome
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import PARTITION_TAG
from branchlake_dagster.runs.approval import approval_names, approve_run, is_on_main
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count, pluralize

_MAY_BE_PUBLISHED = (LaunchOutcome.UNFINISHED, LaunchOutcome.AWAITS_VERDICT)


@dataclass(frozen=True)
class Approval:
    """The runs that an approval covers.

    `approved_runs` are published, and their results are approved. `unpublished_runs` may still be published;
    their results then need another approval.
    """

    approved_runs: tuple[dg.DagsterRun, ...]
    unpublished_runs: tuple[dg.DagsterRun, ...]

    def format_summary(self) -> str:
        """Return a summary for people: each asset with its partitions."""
        summary = "Nothing on main waits for this approval."
        if self.approved_runs:
            summary = (
                f"Approved {format_count(len(self.approved_runs), 'run')}:"
                f" {'; '.join(_format_by_asset(self.approved_runs))}."
            )
        if self.unpublished_runs:
            count = len(self.unpublished_runs)
            runs = f"{format_count(count, 'run')} {pluralize(count, 'is', 'are')} not published yet"
            next_step = f"Approve again once {pluralize(count, 'it is', 'they are')}."
            summary += f" {runs}: {'; '.join(_format_by_asset(self.unpublished_runs))}. {next_step}"
        return summary


def plan_approval(
    runs: Iterable[dg.DagsterRun], approval_id: str, assets: Sequence[dg.AssetKey] = ()
) -> Approval:
    """Select the runs that are approved under `approval_id`; with `assets`, only runs of these assets."""
    requested_runs = [
        run
        for run in runs
        if approval_id in approval_names(run.run_id, run.tags)
        and (not assets or run.asset_selection is None or {*assets} & run.asset_selection)
    ]
    published_runs = tuple(run for run in requested_runs if is_on_main(run))
    # A failed or blocked run has no result to approve. A run that replaces it waits for its own approval.
    unpublished_runs = tuple(
        run
        for run in requested_runs
        if run not in published_runs and launch_outcome(run) in _MAY_BE_PUBLISHED
    )
    return Approval(published_runs, unpublished_runs)


def approve_results(
    instance: dg.DagsterInstance, approval_id: str, assets: Sequence[dg.AssetKey] = ()
) -> Approval:
    """Approve the published results of a backfill, or of one run outside of backfills.

    Safe to repeat. A result that is published later needs another approval, because nobody has seen it yet.
    Raises ConfigurationError for an id that Dagster does not know.
    """
    if instance.get_backfill(approval_id) is None and instance.get_run_by_id(approval_id) is None:
        raise ConfigurationError(
            f"There is no backfill or run {approval_id} in this Dagster instance.",
            hint="`branchlake backfill status` and the last tick of the sensor show the id to approve.",
        )
    runs = instance.get_runs(dg.RunsFilter(tags={RunTag.APPROVAL: APPROVAL_REQUIRED}))
    approval = plan_approval(runs, approval_id, assets)
    for run in approval.approved_runs:
        approve_run(instance, run)
    return approval


def _format_by_asset(runs: Iterable[dg.DagsterRun]) -> list[str]:
    partitions: dict[str, set[str]] = {}
    for run in runs:
        names = ", ".join(sorted(key.to_user_string() for key in run.asset_selection or ())) or run.job_name
        partitions.setdefault(names, set())
        if PARTITION_TAG in run.tags:
            partitions[names].add(run.tags[PARTITION_TAG])
    return [f"{name} {', '.join(sorted(keys))}".strip() for name, keys in sorted(partitions.items())]


class ApproveBackfill(dg.Config):
    """The backfill to approve. Its page and `branchlake backfill status` show its id."""

    backfill: str = Field(description="The id of the backfill, or of a run outside of backfills.")
    assets: list[str] = Field(
        default=[], description="Approve the results of these assets only, such as shop/orders."
    )


def approve_backfill_job(name: str = "approve_backfill") -> dg.JobDefinition:
    """A job that approves the published results of a backfill, to launch on Dagster's page.

    The job does the same as the command `branchlake backfill approve`. Its runs show who approved which
    results. It needs neither the lake nor Spark.

    Args:
        name (str): The job's name. (default: `approve_backfill`)

    Returns:
        JobDefinition: A job with one op. Its configuration takes the backfill's id and, optionally, assets.

    Raises:
        ConfigurationError: In the run, if Dagster does not know the id.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import approve_backfill_job, branchlake_definitions, incremental_sensor

            defs = branchlake_definitions(
                definitions=dg.Definitions(
                    assets=[orders, spent], jobs=[approve_backfill_job()], sensors=[incremental_sensor()]
                )
            )
    """

    @dg.op(
        name=f"{name}_op",
        description="Approves published results of a backfill, so that its next stages launch.",
    )
    def approve_op(context: dg.OpExecutionContext, config: ApproveBackfill) -> None:
        assets = [dg.AssetKey.from_user_string(name) for name in config.assets]
        approval = approve_results(context.instance, config.backfill, assets)
        context.log.info(approval.format_summary())
        context.add_output_metadata(
            {
                "approved": dg.MetadataValue.int(len(approval.approved_runs)),
                "unpublished": dg.MetadataValue.int(len(approval.unpublished_runs)),
                "result": dg.MetadataValue.text(approval.format_summary()),
            }
        )

    @dg.job(name=name, description="Approve published results of a backfill; its next stages then launch.")
    def approve_job() -> None:
        approve_op()

    return approve_job
