"""Launch the first stage of a backfill, approve results between stages, and launch failed partitions again.

Dagster's daemon runs the first stage; the incremental sensor launches the later stages. A stage whose change
is no longer known is rebuilt.

This module has no postponed annotations: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg
from dagster import AssetKey, DagsterInstance
from pydantic import Field

from branchlake_dagster.automation.backfill_progress import Partition, StageProgress
from branchlake_dagster.automation.backlog import iter_consumers
from branchlake_dagster.automation.launch_decision import LaunchOutcome, launch_outcome
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.incremental.consumer_partitions import find_partitions_to_rebuild
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.internals.dagster import PARTITION_TAG, AssetGraph, add_asset_backfill, load_backfill
from branchlake_dagster.runs.approval import approval_names, approve_run, is_on_main
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count, pluralize


def launch_backfill(
    graph: AssetGraph,
    instance: DagsterInstance,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    reason: str,
    base_hash: str,
    approval: bool = False,
    requested_at: float,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Request a Dagster backfill of `root` and return its id.

    `partitions` is None for an asset without partitions. The runs compute their partitions again from all
    rows, whatever was consumed for them before. `reason` is text for people. `base_hash` is the present hash
    of `main`. With `approval`, each stage waits until the results of the stage before it are approved.
    `requested_at` is a POSIX time in seconds. `tags` are additional tags of the backfill and its runs.
    """
    return add_asset_backfill(
        graph,
        instance,
        root,
        partitions,
        tags={RunTag.REBUILD: "true", RunTag.BACKFILL: reason[:200], RunTag.BACKFILL_BASE: base_hash}
        | dict(tags or {})
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED} if approval else {}),
        title=f"Backfill of {root.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )


def launch_again(
    graph: AssetGraph,
    instance: DagsterInstance,
    asset: AssetKey,
    partitions: Sequence[str] | None,
    *,
    backfill_id: str,
    rebuild: bool,
    approval: bool = False,
    requested_at: float,
) -> str:
    """Request a new Dagster backfill for partitions of a stage of backfill `backfill_id`; return its own id.

    Its runs consume the remaining changes. With `rebuild`, they compute their partitions again from all rows.
    With `approval`, the later stages wait until the results are approved. `requested_at` is the time of this
    request, in POSIX seconds.
    """
    reason = f"Retry of backfill {backfill_id}"
    return add_asset_backfill(
        graph,
        instance,
        asset,
        partitions,
        tags={RunTag.RETRY_OF: backfill_id, RunTag.BACKFILL: reason}
        | ({RunTag.REBUILD: "true"} if rebuild else {})
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED, RunTag.FOLLOWS: backfill_id} if approval else {}),
        title=f"{reason}: {asset.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )


@dataclass(frozen=True)
class StageRetry:
    """Partitions of a stage to launch again; `partitions` is (None,) for an asset without partitions.

    With `rebuild`, their runs compute the partitions again from all rows instead of consuming the remaining
    changes. `backfill_id` is the id of the new Dagster backfill, None before it is requested.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    rebuild: bool
    backfill_id: str | None = None


@dataclass(frozen=True)
class LostStage:
    """A stage whose change is no longer known, and the reason. Only a rebuild can compute it again.

    `number` is its position in the order of stages. `partitions` are the partitions that a rebuild has to
    compute; empty if a rebuild does not help.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    reason: str


@dataclass(frozen=True)
class RetryPlan:
    """The stages with partitions to launch again, and the lost stages that will not be rebuilt."""

    launches: tuple[StageRetry, ...] = ()
    lost_stages: tuple[LostStage, ...] = ()


def plan_retry(
    stage_progress: Sequence[StageProgress],
    partitions_to_rebuild: Mapping[AssetKey, Sequence[Partition]],
    *,
    rebuild_lost: bool,
) -> RetryPlan:
    """Decide which partitions of a backfill to launch again.

    Only failed partitions are launched. Stages after a retried stage launch themselves, as after the first
    attempt. `partitions_to_rebuild` maps an asset to the partitions that a rebuild has to compute. With
    `rebuild_lost` they are launched, otherwise they become `lost_stages`. A lost stage that is not among them
    is being rebuilt already.
    """
    launches: list[StageRetry] = []
    lost_stages: list[LostStage] = []
    for progress in stage_progress:
        number, asset = progress.stage.number, progress.stage.asset
        if progress.failed_partitions:
            # The first stage computes its partitions from all rows, as in its first attempt.
            launches.append(StageRetry(number, asset, progress.failed_partitions, rebuild=number == 0))
        if progress.lost_count and asset in partitions_to_rebuild:
            partitions = tuple(partitions_to_rebuild[asset])
            if rebuild_lost and partitions:
                launches.append(StageRetry(number, asset, partitions, rebuild=True))
            else:
                lost_stages.append(LostStage(number, asset, partitions, progress.message))
    return RetryPlan(tuple(launches), tuple(lost_stages))


def find_lost_partitions(
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    stage_progress: Sequence[StageProgress],
    requested_by_asset: Mapping[AssetKey, set[Partition]],
) -> dict[AssetKey, list[Partition]]:
    """Return the partitions that a rebuild has to compute, for each asset whose change is no longer known.

    `requested_by_asset` has the partitions that were launched again and are not computed yet; they are left
    out. An asset is omitted if only these remain. Its list is empty if a rebuild does not help.
    """
    lost_by_asset: dict[AssetKey, list[Partition]] = {}
    for progress in stage_progress:
        if not progress.lost_count:
            continue
        asset = progress.stage.asset
        (consumer,) = iter_consumers(graph, lake.lakehouse.settings.default_namespace, [asset])
        try:
            consumption = Consumption(lake, consumer.consumer, rebuild=True, instance=instance)
            partition_keys: list[Partition] = [None]
            if consumer.consumer.tracks_partitions:
                partition_keys = [*sorted(find_partitions_to_rebuild(consumption))]
        except BranchlakeError:  # for example a missing input column, which the stage's message names
            partition_keys = []
        missing_keys = [key for key in partition_keys if key not in requested_by_asset.get(asset, ())]
        if missing_keys or not partition_keys:
            lost_by_asset[asset] = missing_keys
    return lost_by_asset


def launch_retry(
    graph: AssetGraph, instance: DagsterInstance, backfill_id: str, plan: RetryPlan, requested_at: float
) -> tuple[StageRetry, ...]:
    """Request a Dagster backfill for each launch in the plan; return the launches with their backfill ids."""
    original = load_backfill(instance, backfill_id, graph)
    approval = original is not None and RunTag.APPROVAL in original.tags
    launched_stages: list[StageRetry] = []
    for stage_retry in plan.launches:
        partition_keys = [name for name in stage_retry.partitions if name is not None]
        retry_id = launch_again(
            graph,
            instance,
            stage_retry.asset,
            partition_keys or None,
            backfill_id=backfill_id,
            rebuild=stage_retry.rebuild,
            approval=approval,
            requested_at=requested_at,
        )
        launched_stages.append(
            StageRetry(
                stage_retry.number, stage_retry.asset, stage_retry.partitions, stage_retry.rebuild, retry_id
            )
        )
    return tuple(launched_stages)


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
        """Return a summary for people: approved and unpublished runs by asset, with their partitions."""
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
    """Return which of `runs` an approval under `approval_id` covers; with `assets`, only of these assets.

    Failed and blocked runs are in neither list, because they have no result to approve.
    """
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

    Returns the approved runs, and the runs that may still be published. Safe to repeat. A result that is
    published later needs another approval, because nobody has seen it yet. Raises ConfigurationError for an
    id that Dagster does not know.
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
    """Return a job that approves the published results of a backfill, to launch on Dagster's page.

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
