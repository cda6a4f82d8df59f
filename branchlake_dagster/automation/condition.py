"""An automation condition that is true while a consumer has something left to consume.

It is a class of this package, like the conditions on publications. So only a sensor that evaluates in the
code server can use it: `publication_automation_sensor()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dagster import AssetKey, AutomationCondition, AutomationContext, AutomationResult

from branchlake_dagster.automation.backlog import ConsumerBacklog, partitions_per_run
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetKeyPartitionKey
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings


def unconsumed_change(settings: Settings | None = None) -> UnconsumedChange:
    """A condition that is true for partitions with published change that the asset has not consumed.

    With `from_start=True` it is true for the first of these partitions only, as many as the backfill policy
    of the asset allows in one run. The others follow after these are published. Partitions whose change
    waits for approval are excluded. The condition stays true until a run that consumed the change is
    published, so combine it:
    `unconsumed_change() & ~AutomationCondition.in_progress() & ~awaiting_verdict()`. Only
    `publication_automation_sensor()` evaluates it; `incremental_sensor()` needs no condition.

    Args:
        settings (Optional[Settings]): The lake. (default: the environment's `BRANCHLAKE_…`)

    Returns:
        AutomationCondition: For assets with `consumes(…)`. On other assets the evaluation raises
            ConfigurationError.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import awaiting_verdict, consumes, table_metadata, unconsumed_change

            @dg.asset(
                deps=["orders"],
                metadata=table_metadata(write_mode="append") | consumes({"orders": "rows"}),
                automation_condition=unconsumed_change()
                & ~dg.AutomationCondition.in_progress()
                & ~awaiting_verdict(),
            )
            def lines(): ...
    """
    return UnconsumedChange(LakehouseResource.from_settings(settings) if settings else LakehouseResource())


@dataclass(frozen=True)
class UnconsumedChange(AutomationCondition[AssetKey]):
    """The condition of `unconsumed_change()`. It needs no cursor, because all positions are in the lake."""

    lake: LakehouseResource = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name in Dagster's UI."""
        return "unconsumed_change"

    @property
    def description(self) -> str:
        """The description in Dagster's UI."""
        return "Has published change that it has not consumed"

    @property
    def requires_cursor(self) -> bool:
        """Always False: the condition stores nothing between evaluations."""
        return False

    def evaluate(self, context: AutomationContext[AssetKey]) -> AutomationResult[AssetKey]:
        """Return the partitions with a backlog that does not wait for approval. Raises ConfigurationError."""
        consumer = self._consumer(context)
        instance = context.asset_graph_view.instance
        per_run = partitions_per_run(context.asset_graph.get(context.key).backfill_policy)
        backlog = ConsumerBacklog(self.lake, consumer, instance=instance, per_run=per_run)
        partitions: set[str | None] = set()
        if backlog.unconsumed.any:
            runs: list[tuple[str | None, ...]] = [(None,)]
            if consumer.tracks_partitions:
                runs = [batch.partitions for batch in backlog.batches]
            held_partitions = backlog.held_partitions(
                [partition for run in runs for partition in run], Approvals(instance)
            ).keys()
            partitions = {partition for run in runs if held_partitions.isdisjoint(run) for partition in run}
        subset = context.asset_graph_view.get_asset_subset_from_asset_partitions(
            context.key,
            {AssetKeyPartitionKey(context.key, partition) for partition in partitions},
            validate_existence=True,
        )
        return AutomationResult(context, context.candidate_subset.compute_intersection(subset))

    def _consumer(self, context: AutomationContext[AssetKey]) -> Consumer:
        key = context.key
        node = context.asset_graph.get(key) if isinstance(key, AssetKey) else None
        declaration = parse_declaration(node.metadata, asset=key.to_user_string()) if node else None
        if node is None or declaration is None:
            raise ConfigurationError(
                f"Asset {key.to_user_string()} has the condition unconsumed_change(), but it does not declare"
                " what it consumes.",
                hint="Add consumes({…}) to its metadata.",
            )
        namespace = self.lake.lakehouse.settings.default_namespace
        return build_consumer(
            node.to_asset_spec(),
            declaration,
            node.partitions_def,
            namespace,
            node.assets_def.get_partition_mapping,
        )
