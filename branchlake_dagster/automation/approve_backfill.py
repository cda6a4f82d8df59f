"""Approving what a backfill has published, so that the stages after it go on: by command, or as a job.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dagster as dg
from pydantic import Field

from branchlake_dagster.automation.launch_decision import Outcome, outcome_of
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import PARTITION_TAG
from branchlake_dagster.runs.approval import approval_names, give_approval, on_main
from branchlake_dagster.runs.run_tags import REQUIRED
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import agree, counted

_MAY_BE_PUBLISHED = (Outcome.UNFINISHED, Outcome.AWAITS_VERDICT)


@dataclass(frozen=True)
class Approval:
    """Runs whose results are approved, and runs that may still be published and then wait for approval."""

    approved: tuple[dg.DagsterRun, ...]
    unpublished: tuple[dg.DagsterRun, ...]

    def text(self) -> str:
        """For people: each asset with its partitions."""
        text = "Nothing on main waits for this approval."
        if self.approved:
            text = f"Approved {counted(len(self.approved), 'run')}: {'; '.join(_by_asset(self.approved))}."
        if self.unpublished:
            number = len(self.unpublished)
            runs = f"{counted(number, 'run')} {agree(number, 'is', 'are')} not published yet"
            then = f"Approve again once {agree(number, 'it is', 'they are')}."
            text += f" {runs}: {'; '.join(_by_asset(self.unpublished))}. {then}"
        return text


def waiting_runs(
    runs: Iterable[dg.DagsterRun], approval_id: str, assets: Sequence[dg.AssetKey] = ()
) -> Approval:
    """Decide which of the runs an approval is about: those under its id, with `assets` only runs of these."""
    waiting = [
        run
        for run in runs
        if approval_id in approval_names(run.run_id, run.tags)
        and (not assets or run.asset_selection is None or {*assets} & run.asset_selection)
    ]
    published = tuple(run for run in waiting if on_main(run))
    # What failed or was blocked has no result that could be approved; a run in its place waits by itself.
    unpublished = tuple(
        run for run in waiting if run not in published and outcome_of(run) in _MAY_BE_PUBLISHED
    )
    return Approval(published, unpublished)


def approve(instance: dg.DagsterInstance, approval_id: str, assets: Sequence[dg.AssetKey] = ()) -> Approval:
    """Approve what is on `main` of a backfill, or of a run outside of backfills that waits for approval.

    What is published later waits for another approval, because nobody has seen it. Safe to repeat. Raises
    ConfigurationError for an id that Dagster does not know.
    """
    if instance.get_backfill(approval_id) is None and instance.get_run_by_id(approval_id) is None:
        raise ConfigurationError(
            f"There is no backfill or run {approval_id} in this Dagster instance.",
            hint="`branchlake backfill status` and the sensor's last tick name the id to approve.",
        )
    waiting = instance.get_runs(dg.RunsFilter(tags={RunTag.APPROVAL: REQUIRED}))
    approval = waiting_runs(waiting, approval_id, assets)
    for run in approval.approved:
        give_approval(instance, run)
    return approval


def _by_asset(runs: Iterable[dg.DagsterRun]) -> list[str]:
    partitions: dict[str, set[str]] = {}
    for run in runs:
        names = ", ".join(sorted(one.to_user_string() for one in run.asset_selection or ())) or run.job_name
        partitions.setdefault(names, set())
        if PARTITION_TAG in run.tags:
            partitions[names].add(run.tags[PARTITION_TAG])
    return [f"{name} {', '.join(sorted(keys))}".strip() for name, keys in sorted(partitions.items())]


class ApproveBackfill(dg.Config):
    """The backfill to approve, as its page or `branchlake backfill status` names it."""

    backfill: str = Field(description="The id of the backfill, or of a run outside of backfills.")
    assets: list[str] = Field(
        default=[], description="Approve the results of these assets only, such as shop/orders."
    )


def approve_backfill_job(name: str = "approve_backfill") -> dg.JobDefinition:
    """A job that approves what a backfill has published, to be launched on Dagster's page.

    The job is what `branchlake backfill approve` is on the command line. Its runs show who approved what. It
    needs neither the lake nor Spark.

    Args:
        name (str): The job's name. (default: `approve_backfill`)

    Returns:
        JobDefinition: One op, whose configuration has the backfill's id and, optionally, assets.

    Raises:
        ConfigurationError: In the run: there is no such backfill or run.

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

    @dg.op(name=f"{name}_op", description="Lets the stages after a backfill's published results go on.")
    def approve_op(context: dg.OpExecutionContext, config: ApproveBackfill) -> None:
        assets = [dg.AssetKey.from_user_string(one) for one in config.assets]
        approval = approve(context.instance, config.backfill, assets)
        context.log.info(approval.text())
        context.add_output_metadata(
            {
                "approved": dg.MetadataValue.int(len(approval.approved)),
                "unpublished": dg.MetadataValue.int(len(approval.unpublished)),
                "result": dg.MetadataValue.text(approval.text()),
            }
        )

    @dg.job(name=name, description="Approve what a backfill has published; the stages after it then launch.")
    def approve_job() -> None:
        approve_op()

    return approve_job
