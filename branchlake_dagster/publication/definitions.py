"""Everything of a code location except the assets, ready to be merged into any `Definitions`."""

from __future__ import annotations

from dagster import Definitions, Executor, ExecutorDefinition, multi_or_in_process_executor

from branchlake_dagster.internals.dagster import with_executor
from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
from branchlake_dagster.publication.cleanup_jobs import dead_writer_sensor, reap_job, reap_schedule
from branchlake_dagster.publication.publication_sensor import publication_sensor
from branchlake_dagster.publication.publish_at_end import publish_at_end
from branchlake_dagster.publication.validation import validate_definitions
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.settings import Settings


def branchlake_definitions(
    settings: Settings | None = None,
    definitions: Definitions | None = None,
    *,
    lakehouse: LakehouseResource | None = None,
    name: str | None = None,
    lakehouse_key: str | None = None,
    spark_key: str | None = None,
    io_manager_key: str | None = None,
) -> Definitions:
    """Create the definitions of a lake: IO manager, Spark session, publication sensor and reaper.

    With `definitions` the result contains them, and mistakes in the assets of this lake are errors at load
    time instead of blocked runs later. Runs then judge and publish themselves at their end, because the
    executor is wrapped in `publish_at_end`. Without `definitions` the result can be merged into any other
    `Definitions`; the publication sensor then judges and publishes all runs.

    Args:
        settings (Optional[Settings]): The lake's settings; they apply to every resource. (default: those of
            `lakehouse`, else those of the environment, `BRANCHLAKE_…`)
        definitions (Optional[Definitions]): Your assets, checks, jobs, schedules, sensors and other
            resources.
        lakehouse (Optional[LakehouseResource]): The lake's resource, if its fields come from `dg.EnvVar`.
        name (Optional[str]): The lake's name, if one code location has several lakes. It comes before the
            names of sensors, job and schedule, and before the default resource keys (`archive_io_manager`).
        lakehouse_key (Optional[str]): The resource key of the lake. (default: `lakehouse`)
        spark_key (Optional[str]): The resource key of the run's Spark session. (default: `spark`)
        io_manager_key (Optional[str]): The resource key of the IO manager. (default: `io_manager`, the key of
            all assets that do not name one)

    Returns:
        Definitions: Those of the lake, merged with `definitions` if given.

    Raises:
        ConfigurationError: Assets in `definitions` could not be written or published; the message names each.

    Warns:
        DefinitionsWarning: A check of a partitioned asset does not have a `partitions_def`, so it reads the
            whole table on every run; the setting `unpartitioned_checks` makes this an error, or allows it.
            Or an asset has a metadata key that branchlake does not read.

    Examples:
        .. code-block:: python

            import dagster as dg
            import polars as pl

            from branchlake_dagster import Settings, branchlake_definitions, sql_check

            @dg.asset
            def prices() -> pl.DataFrame:
                return pl.DataFrame({"item": ["a", "b"], "eur": [1.0, 2.5]})

            positive = sql_check(prices, "positive", "SELECT * FROM {this} WHERE eur <= 0")

            defs = branchlake_definitions(
                Settings(default_namespace="shop"),
                dg.Definitions(assets=[prices], asset_checks=[positive]),
            )
    """
    if lakehouse is None:
        settings = settings or Settings()
        lakehouse = LakehouseResource.from_settings(settings)
    elif settings is None:
        settings = lakehouse.effective()
    prefix = f"{name}_" if name else ""
    lakehouse_key = lakehouse_key or f"{prefix}lakehouse"
    io_manager_key = io_manager_key or f"{prefix}io_manager"
    spark = BranchSparkResource(lakehouse=lakehouse)
    reaper = reap_job(lakehouse_key, prefix)
    own_definitions = Definitions(
        resources={
            lakehouse_key: lakehouse,
            spark_key or f"{prefix}spark": spark,
            io_manager_key: NessieBranchIOManager(lakehouse=lakehouse, spark=spark),
        },
        sensors=[
            publication_sensor(settings, lakehouse_key, prefix),
            dead_writer_sensor(settings, lakehouse_key, prefix),
        ],
        jobs=[reaper],
        schedules=[reap_schedule(reaper, settings)],
    )
    if definitions is None:
        return own_definitions
    all_definitions = Definitions.merge(own_definitions, definitions)
    validate_definitions(
        all_definitions,
        io_manager_key=io_manager_key,
        default_namespace=settings.default_namespace,
        require_checks=settings.require_checks,
        unpartitioned_checks=settings.unpartitioned_checks,
    )
    return with_executor(
        all_definitions, publish_at_end(_get_executor(definitions), lakehouse_key=lakehouse_key)
    )


def _get_executor(definitions: Definitions) -> ExecutorDefinition:
    executor = definitions.executor
    if isinstance(executor, Executor):
        executor_definition: ExecutorDefinition = ExecutorDefinition.hardcoded_executor(executor)
        return executor_definition
    default_executor: ExecutorDefinition = multi_or_in_process_executor
    return executor or default_executor
