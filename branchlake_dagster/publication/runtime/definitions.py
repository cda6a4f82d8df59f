"""The sensor that publishes and the schedule that reaps, ready to be put into any `Definitions`.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

from itertools import chain

from dagster import (
    AssetSelection,
    DefaultSensorStatus,
    Definitions,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from branchlake_dagster.branching.io.io_manager import NessieBranchIOManager
from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.branching.resources.spark_resource import BranchSparkResource
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.automation.conditions import never_evaluated
from branchlake_dagster.publication.cleanup.dead_writer_sensor import dead_writer_sensor
from branchlake_dagster.publication.cleanup.reaping import reap_job, reap_schedule
from branchlake_dagster.publication.reconcile.reconciler import Reconciler
from branchlake_dagster.publication.runtime.pass_lock import one_pass
from branchlake_dagster.publication.runtime.tick import Tick
from branchlake_dagster.publication.runtime.unbranched import settle_unbranched
from branchlake_dagster.settings import Settings


def branchlake_definitions(
    settings: Settings | None = None, *, lakehouse: LakehouseResource | None = None
) -> Definitions:
    """Everything but the assets: IO manager, session, publication sensor and reaper.

    Put your assets beside it: `Definitions.merge(branchlake_definitions(), Definitions(assets=[…]))`.
    """
    settings = settings or Settings()
    lakehouse = lakehouse or LakehouseResource()
    spark = BranchSparkResource(lakehouse=lakehouse)
    reaper = reap_job()
    return Definitions(
        resources={
            "lakehouse": lakehouse,
            "spark": spark,
            "io_manager": NessieBranchIOManager(lakehouse=lakehouse, spark=spark),
        },
        sensors=[_publication_sensor(settings), dead_writer_sensor(settings)],
        jobs=[reaper],
        schedules=[reap_schedule(reaper, settings)],
    )


_NO_SENSOR = "add publication_automation_sensor() to the definitions."


def _publication_sensor(settings: Settings) -> SensorDefinition:
    @sensor(
        name="publication_sensor",
        minimum_interval_seconds=settings.publish_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Publishes the branches of finished runs whose checks passed; discards the others.",
        # It launches nothing but checks: those of whole tables that a rebase has changed.
        asset_selection=AssetSelection.all_asset_checks(),
    )
    def publication_sensor(
        context: SensorEvaluationContext, lakehouse: LakehouseResource
    ) -> SensorResult | SkipReason:
        with one_pass(lakehouse.lakehouse.settings) as mine:
            if not mine:
                return SkipReason("Another pass over this lake is at work.")
            return _tick(context, lakehouse.lakehouse)

    return publication_sensor


def _tick(context: SensorEvaluationContext, lake: Lakehouse) -> SensorResult | SkipReason:
    """One pass, in less time than Dagster gives a tick."""
    repository = context.repository_def
    assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
    origin = context.code_location_origin
    graph, location = repository.asset_graph, origin.location_name if origin else None
    reconciler = Reconciler.of(lake, context.instance, graph, location=location)
    unbranched = settle_unbranched(lake.nessie, context.instance, graph, lake.settings, location=location)
    for key in never_evaluated(repository):
        context.log.warning(f"{key.to_user_string()} follows publications, but no sensor looks: {_NO_SENSOR}")
    tick = Tick()
    for outcome in chain(reconciler.run(budget_s=lake.settings.publish_budget_s), unbranched):
        if tick.add(outcome):
            context.log.info(str(outcome))
    if tick.check_runs:
        return SensorResult(run_requests=[one.request() for one in tick.check_runs])
    return SkipReason(tick.message())
