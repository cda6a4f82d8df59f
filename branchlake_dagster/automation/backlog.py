"""The assets of a code location that consume changes, and the published changes that they have not consumed.

The automation condition `unconsumed_change()` is a class of this package, like the conditions on
publications. So only a sensor that evaluates in the code server can use it:
`publication_automation_sensor()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from typing import ClassVar

from dagster import (
    AssetKey,
    AssetsDefinition,
    AutomationCondition,
    AutomationContext,
    AutomationResult,
    BackfillPolicy,
    DagsterInstance,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangeLost, ChangeSet, position_to_json
from branchlake_dagster.incremental.consumer_partitions import (
    find_pending_partitions,
    find_predecessor_run,
    load_changes_by_partition,
    load_consumed_runs,
    load_runs_by_partition,
    plan_batches,
)
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import (
    Consumer,
    Identifier,
    UpstreamTable,
    parse_declaration,
)
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord, Unconsumed
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph, AssetKeyPartitionKey, loaded_inputs
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.errors import InputColumnGone, PositionUnreadable, SchemaMismatch, TableMissing
from branchlake_dagster.tables.specification import format_table_name, table_identifier


@dataclass(frozen=True)
class ConsumingAsset:
    """An asset that consumes changes, with its declaration."""

    key: AssetKey
    consumer: Consumer
    per_run: int | None = 1
    """The number of partitions that one run can compute, by its backfill policy; None means any number."""
    whole_inputs: Mapping[AssetKey, Identifier] = field(default_factory=dict)
    """The tables that its runs read whole, without consuming their changes, by asset."""


def iter_consumers(
    graph: AssetGraph, default_namespace: str, selected_keys: Iterable[AssetKey] | None = None
) -> Iterator[ConsumingAsset]:
    """Yield the assets that consume changes, in the order of their keys.

    `selected_keys` restricts them; None means all assets. Raises ConfigurationError if the arguments of an
    asset's `consumes` contradict each other or its table.
    """
    asset_keys = graph.materializable_asset_keys if selected_keys is None else set(selected_keys)
    for key in sorted(asset_keys & graph.materializable_asset_keys):
        node = graph.get(key)
        declaration = parse_declaration(node.metadata, asset=key.to_user_string())
        if declaration is not None:
            spec = node.to_asset_spec()
            get_mapping = node.assets_def.get_partition_mapping
            consumer = build_consumer(spec, declaration, node.partitions_def, default_namespace, get_mapping)
            whole_inputs = {
                input_key: table_identifier(input_key, default_namespace)
                for input_key in sorted(loaded_inputs(graph, key) - consumer.inputs.keys())
            }
            yield ConsumingAsset(key, consumer, partitions_per_run(node.backfill_policy), whole_inputs)


def partitions_per_run(policy: BackfillPolicy | None) -> int | None:
    """Return the number of partitions that a backfill policy allows in one run; None means any number."""
    return policy.max_partitions_per_run if policy is not None else 1


def order_by_inputs(assets: Sequence[ConsumingAsset]) -> list[ConsumingAsset]:
    """Return the assets in an order in which each comes after the assets whose changes it consumes."""
    by_key = {asset.key: asset for asset in assets}
    consumed = {asset.key: by_key.keys() & asset.consumer.declaration.inputs.keys() for asset in assets}
    return [by_key[key] for key in TopologicalSorter(consumed).static_order()]


def find_downstream(assets: Sequence[ConsumingAsset]) -> dict[AssetKey, tuple[AssetKey, ...]]:
    """Map each asset to the assets that the same run can also compute, each after its inputs.

    These are the assets that consume its changes, directly or through each other, and have the same
    partitions and backfill policy. An asset whose partitions are computed in order is not included: it waits
    for its earlier partitions.
    """
    ordered = order_by_inputs(assets)
    downstream: dict[AssetKey, tuple[AssetKey, ...]] = {}
    for asset in ordered:
        changed, followers = {asset.key}, []
        for other in ordered:
            is_same = other.consumer.definition == asset.consumer.definition
            is_alone = other.per_run != asset.per_run or other.consumer.computes_in_order
            if is_same and not is_alone and changed & other.consumer.declaration.inputs.keys():
                changed.add(other.key)
                followers.append(other.key)
        downstream[asset.key] = tuple(followers)
    return downstream


def join_chains(downstream: Mapping[AssetKey, Sequence[AssetKey]]) -> dict[AssetKey, set[AssetKey]]:
    """Map each asset to the set of all assets that are linked to it, itself included.

    `find_downstream` links two assets, in any direction or through others.
    """
    chains: dict[AssetKey, set[AssetKey]] = {}
    for key, followers in downstream.items():
        joined = {key, *followers}
        for other in [*joined]:
            joined |= chains.get(other, set())
        for other in joined:
            chains[other] = joined
    return chains


class ConsumerBacklog:
    """The unconsumed changes of one consumer on `main`. Each result is computed once and then stored.

    `per_run` is the number of partitions that one run can compute; None means any number. `whole_inputs` are
    the tables that a run reads whole, by asset.
    """

    def __init__(
        self,
        lake: LakehouseResource,
        consumer: Consumer,
        *,
        instance: DagsterInstance | None = None,
        per_run: int | None = 1,
        whole_inputs: Mapping[AssetKey, Identifier] | None = None,
    ) -> None:
        self._lake = lake
        self._consumption = Consumption(lake, consumer, instance=instance)
        self._consumer = consumer
        self._per_run = per_run
        self._whole_inputs = whole_inputs or {}

    @cached_property
    def unconsumed(self) -> Unconsumed:
        """The unconsumed change of the whole consumer.

        If the change is unknown, `trouble` or `missing_input` has the reason; no error is raised. A table
        that a run reads whole and that does not exist is a missing input: the run would fail.
        """
        try:
            unconsumed = self.require_unconsumed()
            if unconsumed.has_any:
                self._require_whole_inputs()
            return unconsumed
        except TableMissing as error:
            return Unconsumed(missing_input=str(error))
        except (ChangeLost, InputColumnGone, PositionUnreadable, SchemaMismatch) as error:
            return Unconsumed(trouble=str(error))

    def require_unconsumed(self) -> Unconsumed:
        """Return the unconsumed change of the whole consumer.

        Raises ChangeLost, InputColumnGone, PositionUnreadable, SchemaMismatch or TableMissing if it is
        unknown.
        """
        if self._consumer.tracks_partitions and not self.pending_partitions:
            return Unconsumed()
        if self._consumer.tracks_partitions and self._consumption.positions.common_position is None:
            return Unconsumed(whole=True)
        if self._consumption.whole:
            return Unconsumed(
                whole=any(consumer_input.table.metadata.snapshots for consumer_input in self._inputs())
            )
        change = _count_changes(self._changes())
        must_run = self._consumer.tracks_partitions or self._consumption.skips_lost_changes
        return replace(change, new=must_run and not change.files)

    def _require_whole_inputs(self) -> None:
        """Raise TableMissing if a table that a run reads whole does not exist on `main`."""
        catalog = self._lake.lakehouse.catalog(MAIN)
        for key, identifier in self._whole_inputs.items():
            if not catalog.table_exists(identifier):
                raise TableMissing.of_asset(key.to_user_string(), format_table_name(identifier), MAIN)

    @cached_property
    def pending_partitions(self) -> tuple[str, ...]:
        """The partitions with an unconsumed change, sorted.

        Raises ChangeLost, PositionUnreadable or TableMissing.
        """
        return tuple(sorted(find_pending_partitions(self._consumption)))

    @cached_property
    def batches(self) -> list[PartitionBatch]:
        """The pending partitions as batches for runs that can be launched at the same time.

        Each batch also has the partitions that wait until its run is published.
        """
        return plan_batches(self._consumption, self.pending_partitions, self._per_run)

    def batch_of(self, partition: str) -> PartitionBatch:
        """Return the batch that contains a pending partition, or in which the partition waits.

        Raises KeyError for a partition that is not pending.
        """
        return self._batch_by_partition[partition]

    @cached_property
    def _batch_by_partition(self) -> dict[str, PartitionBatch]:
        return {key: batch for batch in self.batches for key in (*batch.partitions, *batch.waiting)}

    @property
    def inputs(self) -> Collection[AssetKey]:
        """The consumed assets."""
        return self._consumer.inputs.keys()

    @property
    def by_partition(self) -> bool:
        """Whether each partition of the consumer has its own position."""
        return self._consumer.tracks_partitions

    @property
    def common_position(self) -> ConsumptionRecord | None:
        """The record of the common position of all partitions; None if no run has recorded it.

        Raises ChangeLost or PositionUnreadable.
        """
        return self._consumption.positions.common_position

    def changes_by_partition(
        self, partitions: Sequence[str]
    ) -> dict[str, tuple[ConsumptionRecord | None, Unconsumed]]:
        """Return the position and the unconsumed change of each of these partitions. Raises ChangeLost.

        If a partition has consumed nothing yet, its position is None, and its change is `whole` without
        counts.
        """
        return load_changes_by_partition(self._consumption, partitions) if partitions else {}

    def held_partitions(
        self, partitions: Sequence[str | None], approvals: Approvals
    ) -> dict[str | None, tuple[str, ...]]:
        """Map each partition whose change waits for approval to the ids under which to approve it.

        The partition None means the whole asset. Partitions that do not wait are left out. Raises ChangeLost,
        PositionUnreadable or TableMissing.
        """
        if not approvals.has_any:
            return {}
        run_ids: dict[str | None, set[str]] = {}
        if partition_keys := [partition for partition in partitions if partition is not None]:
            run_ids.update(load_runs_by_partition(self._consumption, partition_keys, approvals.filter_runs))
        if None in partitions and (runs := load_consumed_runs(self._consumption, approvals.filter_runs)):
            run_ids[None] = runs
        return {partition: approvals.approval_names(runs) for partition, runs in run_ids.items()}

    def state_key(self, partition: str | None = None) -> str:
        """Return a hash of the present positions of the inputs and of the consumer.

        It changes with each publication of an input or of the partition, and if a column that decides what
        has changed is replaced. One run is launched for each key.
        """
        positions = self._consumption.positions
        consumed_positions = (positions.common_position, positions.partitions.get(partition or ""))
        parts = [partition or "", self._consumer.asset]
        for consumer_input in self._inputs():
            up_to = consumer_input.up_to
            recorded = [record.inputs.get(consumer_input.name) for record in consumed_positions if record]
            if not any(position is not None and up_to.has_other_columns(position) for position in recorded):
                up_to = up_to.with_columns(())  # the keys of versions that did not record columns
            parts += [consumer_input.name, position_to_json(up_to)]
        parts += [consumed.to_json() if consumed else "" for consumed in consumed_positions]
        if partition is not None and self._consumer.computes_in_order:
            parts.append(find_predecessor_run(self._consumption, partition))
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]

    def launch_key(self, partition: str | None) -> str:
        """Return the run key for a pending partition: the state key of the first partition of its run.

        For a partition that waits for an earlier run, it is the partition's own state key.
        """
        if partition is None:
            return self.state_key()
        batch_partitions = self.batch_of(partition).partitions
        return self.state_key(batch_partitions[0] if partition in batch_partitions else partition)

    def _inputs(self) -> Collection[UpstreamTable]:
        return self._consumption.inputs.values()

    def _changes(self) -> list[ChangeSet]:
        return [change for key in self._consumption.inputs for _, change in self._consumption.changes(key)]


def consumer_backlog(asset: AssetsDefinition, lakehouse: LakehouseResource) -> Unconsumed:
    """Return the published change that an asset with `consumes(…)` has not consumed yet.

    For your own schedules and sensors. Launches nothing and reads no row. The changes that running runs
    consume still count until these runs are published.

    Args:
        asset (AssetsDefinition): The asset.
        lakehouse (LakehouseResource): The lake.

    Returns:
        Unconsumed: `has_any` is True if something is left. `rows`, `files` and `age_s(now)` are its size and
            age. `format_summary()` describes it for people, and gives the reason if it is unknown.

    Raises:
        ConfigurationError: The asset consumes no changes.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import LakehouseResource, consumer_backlog

            @dg.schedule(cron_schedule="*/5 * * * *", target=[spent])
            def every_five_minutes(lakehouse: LakehouseResource):
                left = consumer_backlog(spent, lakehouse)
                return dg.RunRequest() if left.has_any else dg.SkipReason(left.format_summary())
    """
    namespace = lakehouse.lakehouse.settings.default_namespace
    for spec in asset.specs:
        declaration = parse_declaration(spec.metadata, asset=spec.key.to_user_string())
        if declaration is not None:
            consumer = build_consumer(
                spec, declaration, asset.partitions_def, namespace, asset.get_partition_mapping
            )
            return ConsumerBacklog(lakehouse, consumer).unconsumed
    raise ConfigurationError(
        f"Asset {', '.join(key.to_user_string() for key in asset.keys)} does not declare what it consumes.",
        hint="Add consumes({…}) to its metadata.",
        reason="consumes_nothing",
    )


def _count_changes(changes: list[ChangeSet]) -> Unconsumed:
    times = [change.oldest for change in changes if not change.empty and change.oldest]
    return Unconsumed(
        files=sum(change.files_changed for change in changes),
        rows=sum(change.rows_changed for change in changes),
        oldest=min(times, default=None),
    )


def unconsumed_change(settings: Settings | None = None) -> UnconsumedChange:
    """Return a condition that is true for partitions with published change that the asset has not consumed.

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

    follows_publications: ClassVar[bool] = True
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
        """Return the partitions with an unconsumed change that does not wait for approval.

        Raises ConfigurationError if the asset does not declare what it consumes.
        """
        consumer = self._consumer(context)
        instance = context.asset_graph_view.instance
        per_run = partitions_per_run(context.asset_graph.get(context.key).backfill_policy)
        backlog = ConsumerBacklog(self.lake, consumer, instance=instance, per_run=per_run)
        partitions: set[str | None] = set()
        if backlog.unconsumed.has_any:
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
