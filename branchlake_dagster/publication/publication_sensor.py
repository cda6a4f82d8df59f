"""The publication sensor: it publishes run branches that passed their checks and discards the others.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

from itertools import chain

from dagster import (
    AssetSelection,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.conditions import never_evaluated
from branchlake_dagster.publication.pass_lock import acquire_pass_lock
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.tick_report import BackfillWatch, TickReport
from branchlake_dagster.publication.unbranched import judge_unbranched_runs
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings

_PATIENCE_S = 5.0
"""Seconds to wait for runs that publish themselves. Longer than their own wait, so that they do not starve
the sensor."""
_NO_SENSOR_HINT = "Add publication_automation_sensor() to the definitions."


def publication_sensor(
    settings: Settings, lakehouse_key: str = "lakehouse", prefix: str = ""
) -> SensorDefinition:
    """Build the sensor that makes one pass over the lake's run branches per tick.

    `lakehouse_key` is the resource key of the lake. `prefix` is put before the sensor's name.
    """
    backfills = BackfillWatch()

    @sensor(
        name=f"{prefix}publication_sensor",
        required_resource_keys={lakehouse_key},
        minimum_interval_seconds=settings.publish_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Publishes the branches of finished runs whose checks passed; discards the others.",
        # The sensor launches only checks: those of whole tables that a rebase has changed.
        asset_selection=AssetSelection.all_asset_checks(),
    )
    def publication_sensor_(context: SensorEvaluationContext, **_: object) -> SensorResult | SkipReason:
        # `_`: when a test calls the sensor like a function, Dagster also passes the resources by name.
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        with acquire_pass_lock(resource.lakehouse.settings, patience_s=_PATIENCE_S) as is_acquired:
            if not is_acquired:
                busy = "Another pass over this lake is running."
                return SensorResult(skip_reason=SkipReason(busy), cursor="another pass is running")
            return _run_tick(context, resource.lakehouse, backfills)

    return publication_sensor_


def _run_tick(
    context: SensorEvaluationContext, lake: Lakehouse, backfills: BackfillWatch
) -> SensorResult | SkipReason:
    """Make one pass within less time than Dagster gives a tick."""
    repository = context.repository_def
    assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
    origin = context.code_location_origin
    graph, location = repository.asset_graph, origin.location_name if origin else None
    reconciler = Reconciler.from_lake(lake, context.instance, graph, location=location)
    unbranched_outcomes = judge_unbranched_runs(lake, context.instance, graph, location=location)
    for key in never_evaluated(repository):
        context.log.warning(
            f"{key.to_user_string()} follows publications, but no sensor evaluates it: {_NO_SENSOR_HINT}"
        )
    for message in backfills.fail_unpublished(context.instance, graph):
        context.log.warning(message)
    tick_report = TickReport()
    for outcome in chain(
        reconciler.reconcile_branches(budget_s=lake.settings.publish_budget_s), unbranched_outcomes
    ):
        if tick_report.add(outcome):
            context.log.info(str(outcome))
    if tick_report.check_runs:
        requests = [check_run.to_run_request() for check_run in tick_report.check_runs]
        return SensorResult(run_requests=requests, cursor=tick_report.format_row())
    return SensorResult(skip_reason=SkipReason(tick_report.format_message()), cursor=tick_report.format_row())
