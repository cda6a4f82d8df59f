"""An automation condition that waits until a table is published through a time.

Like the conditions that follow publications it is a class of this package, which only a sensor that evaluates
in the code server sees: `publication_automation_sensor()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from dagster import (
    AutomationCondition,
    AutomationContext,
    AutomationResult,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.valid_through.published_time import (
    DeclaredConsumers,
    PublishedTime,
    TableName,
    format_table,
    identifier_of_table,
    parse_time,
    published_time,
)
from branchlake_dagster.internals.dagster import EntitySubset
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings


def published_through(
    table: TableName,
    time: datetime | str | None = None,
    *,
    allowed_lateness: timedelta = timedelta(0),
    settings: Settings | None = None,
) -> PublishedThrough:
    """True when `main` has all records of a table that are older than a time.

    The table is filled by an ingestion, or consumes the changes of such tables, over any number of stages.
    Without `time` each partition of the asset waits for its own end: the partition of a day is true when the
    ingestion is published through midnight. Compared is the valid-through time that the ingestion records
    with each batch. A consumer has the earliest one of its inputs, as far as it has consumed them: a time
    window with something left ends it at the window's start, or where it was last consumed if that is later.
    No data is read, but for a consumer the manifests of what it has not consumed. False while the table does
    not exist, has no such time yet, or has to be filled or computed again after a rollback. Combine it with
    what makes a request happen once, and put it last: it then looks only at the partitions that the
    conditions before it have left.

    Only `publication_automation_sensor()` evaluates it.

    Args:
        table (str | AssetKey): The table, `raw.orders`, or its asset, `raw/orders`. A consumer that this code
            location does not declare is as far as its last run recorded.
        time (datetime | str | None): A time with its zone, also as ISO 8601 text: `2026-11-24T06:00Z`.
            (default: the end of the partition)
        allowed_lateness (timedelta): Wait until the table is published through so much more than the time,
            for records that reach their topic after records that are younger. (default: 0)
        settings (Optional[Settings]): The lake. (default: the environment's `BRANCHLAKE_…`)

    Returns:
        AutomationCondition: Of any asset or check with `time`; without it of assets that are partitioned by
            time, on any other it is a ConfigurationError.

    Raises:
        ConfigurationError: The time is not ISO 8601 or has no zone, or the name cannot be that of a table.

    Examples:
        .. code-block:: python

            from datetime import timedelta

            import dagster as dg

            from branchlake_dagster import awaiting_verdict, published_through

            Condition = dg.AutomationCondition

            @dg.asset(
                deps=[["raw", "orders"]],
                partitions_def=dg.DailyPartitionsDefinition("2026-11-01"),
                automation_condition=Condition.in_latest_time_window(timedelta(days=3))
                & Condition.missing()
                & ~Condition.in_progress()
                & ~Condition.execution_failed()
                & ~awaiting_verdict()
                & published_through("raw.orders"),
            )
            def revenue(): ...
    """
    at = None if time is None else parse_time(time)
    identifier_of_table(table, "default")
    lake = LakehouseResource.of(settings) if settings else LakehouseResource()
    return PublishedThrough(table, at, allowed_lateness, lake)


@dataclass(frozen=True)
class PublishedThrough(AutomationCondition[Any]):
    """See `published_through()`. It needs no cursor: the table on `main` has the time."""

    table: TableName
    time: datetime | None
    allowed_lateness: timedelta
    lake: LakehouseResource = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Shown in the UI, and part of the condition's identity."""
        time = "partition_end" if self.time is None else self.time.isoformat()
        late = f", allowed_lateness={self.allowed_lateness}" if self.allowed_lateness else ""
        return f"published_through({format_table(self.table)}, {time}{late})"

    @property
    def description(self) -> str:
        """For the UI."""
        until = "the end of the partition" if self.time is None else self.time.isoformat()
        return f"main has all records of {format_table(self.table)} through {until}"

    @property
    def requires_cursor(self) -> bool:
        """Nothing is remembered between evaluations."""
        return False

    def evaluate(self, context: AutomationContext[Any]) -> AutomationResult[Any]:
        """The candidates whose time the table has reached. Raises ConfigurationError, Nessie's errors."""
        candidates = context.candidate_subset
        if candidates.is_empty:
            return AutomationResult(context, candidates)
        if self.time is None:
            require_time_partitions(candidates.partitions_def, context.key.to_user_string())
        published = self._published(context)
        if not published.ingested:
            context.log.warning("%s: %s.", self.name, published.reason)
        return AutomationResult(context, self._reached(context, candidates, published))

    def _published(self, context: AutomationContext[Any]) -> PublishedTime:
        lake = self.lake.lakehouse
        namespace = lake.settings.default_namespace
        identifier = identifier_of_table(self.table, namespace)
        declared = DeclaredConsumers(context.asset_graph, namespace, context.asset_graph_view.instance)
        catalog = lake.catalog(f"{MAIN}@{lake.nessie.reference(MAIN).hash}")
        return published_time(lake.nessie, catalog, identifier, namespace, declared)

    def _reached(
        self, context: AutomationContext[Any], candidates: EntitySubset[Any], published: PublishedTime
    ) -> EntitySubset[Any]:
        if published.at is None:
            return context.get_empty_subset()
        if self.time is not None:
            reached = published.reaches(self.time + self.allowed_lateness)
            return candidates if reached else context.get_empty_subset()
        definition: Any = candidates.partitions_def
        ends = {
            key: definition.time_window_for_partition_key(key).end
            for key in candidates.expensively_compute_partition_keys()
        }
        return candidates.compute_intersection_with_partition_keys(
            {key for key, end in ends.items() if published.reaches(end + self.allowed_lateness)}
        )


def require_time_partitions(definition: PartitionsDefinition[Any] | None, name: str) -> None:
    """Raise ConfigurationError for an asset whose partitions have no end, `name`."""
    by_time = isinstance(definition, TimeWindowPartitionsDefinition) or (
        isinstance(definition, MultiPartitionsDefinition) and definition.has_time_window_dimension
    )
    if not by_time:
        raise ConfigurationError(
            f"{name} is not partitioned by time, so published_through() has no time to wait for.",
            hint='Give one: published_through("raw.orders", "2026-11-24T06:00Z").',
            subject=name,
        )
