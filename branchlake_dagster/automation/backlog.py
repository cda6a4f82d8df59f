"""What a consumer has left to consume of what is on `main`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from dagster import AssetsDefinition, DagsterInstance

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangeLost, ChangeSet, position_to_json
from branchlake_dagster.incremental.consumer import Consumer, UpstreamTable
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.errors import InputColumnGone, PositionUnreadable, TableMissing
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class Unconsumed:
    """The change that a consumer has not consumed: `rows` came or went in `files`, since `oldest`.

    `whole`: it has not consumed anything yet, or must begin anew, so nothing is counted. `new`: it is of
    partitions alone that came later than what was consumed, whose rows may be older, or that are computed
    from one that was computed again. `trouble` is why it cannot be told; `missing_input` an input that is not
    there. Rows that belong to no partition are not left.
    """

    files: int = 0
    rows: int = 0
    oldest: datetime | None = None
    whole: bool = False
    new: bool = False
    trouble: str | None = None
    missing_input: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is something to consume."""
        return self.whole or self.new or self.files > 0

    def age_s(self, now: datetime) -> float:
        """Seconds since the oldest of it was written; 0 without any."""
        return max(0.0, (now - self.oldest).total_seconds()) if self.oldest else 0.0

    def text(self) -> str:
        """For people."""
        if self.trouble or self.missing_input:
            return str(self.trouble or self.missing_input)
        if self.whole:
            return "everything, for the first time or anew"
        if self.new:
            return "all rows of partitions that are new, defined anew, or computed from a recomputed one"
        return (
            f"{format_count(self.rows, 'row')} in {format_count(self.files, 'file')}"
            if self.files
            else "nothing"
        )


class ConsumerBacklog:
    """Where one consumer stands on `main` now. Each question is answered once.

    `per_run` is how many partitions one run can compute; None: any number.
    """

    def __init__(
        self,
        lake: LakehouseResource,
        consumer: Consumer,
        *,
        instance: DagsterInstance | None = None,
        per_run: int | None = 1,
    ) -> None:
        self._consumption = Consumption(lake, consumer, instance=instance)
        self._consumer = consumer
        self._per_run = per_run

    @cached_property
    def unconsumed(self) -> Unconsumed:
        """What is left for the consumer as a whole; why it cannot be told is in it."""
        try:
            return self.require_unconsumed()
        except TableMissing as error:
            return Unconsumed(missing_input=str(error))
        except (ChangeLost, InputColumnGone, PositionUnreadable) as error:
            return Unconsumed(trouble=str(error))

    def require_unconsumed(self) -> Unconsumed:
        """The same. Raises ChangeLost, InputColumnGone, PositionUnreadable or TableMissing."""
        if self._consumer.tracks_partitions and not self.pending_partitions:
            return Unconsumed()
        if self._consumer.tracks_partitions and self._consumption.positions.common_position is None:
            return Unconsumed(whole=True)
        if self._consumption.whole:
            return Unconsumed(
                whole=any(consumer_input.table.metadata.snapshots for consumer_input in self._inputs())
            )
        change = _count_changes(self._changes())
        return replace(change, new=self._consumer.tracks_partitions and not change.files)

    @cached_property
    def pending_partitions(self) -> tuple[str, ...]:
        """The partitions that have something left. Raises ChangeLost, PositionUnreadable, TableMissing."""
        return tuple(sorted(self._consumption.pending_partitions()))

    @cached_property
    def batches(self) -> list[PartitionBatch]:
        """The same by runs that can be launched beside each other, with those that wait for them."""
        return self._consumption.plan_batches(self.pending_partitions, self._per_run)

    def batch_of(self, partition: str) -> PartitionBatch:
        """The batch that a partition with something left is in, or waits for."""
        return self._batch_by_partition[partition]

    @cached_property
    def _batch_by_partition(self) -> dict[str, PartitionBatch]:
        return {key: batch for batch in self.batches for key in (*batch.partitions, *batch.waiting)}

    @property
    def by_partition(self) -> bool:
        """Whether each partition of the consumer has a position of its own."""
        return self._consumer.tracks_partitions

    @property
    def common_position(self) -> ConsumptionRecord | None:
        """The position of the table as a whole; None before its first run.

        Raises ChangeLost or PositionUnreadable.
        """
        return self._consumption.positions.common_position

    def changes_by_partition(
        self, partitions: Sequence[str]
    ) -> dict[str, tuple[ConsumptionRecord | None, Unconsumed]]:
        """The position of each of these partitions and what it has left. Raises ChangeLost.

        A partition for which nothing was consumed has everything left, of which nothing is counted.
        """
        changes = self._consumption.changes_by_partition(partitions) if partitions else {}
        return {
            key: (
                change.record,
                Unconsumed(
                    change.files,
                    change.rows,
                    change.oldest,
                    whole=change.record is None,
                    new=change.record is not None and not change.files,
                ),
            )
            for key, change in changes.items()
        }

    def held_partitions(
        self, partitions: Sequence[str | None], approvals: Approvals
    ) -> dict[str | None, tuple[str, ...]]:
        """Those of the partitions whose change waits for approval, with the ids under which it is approved.

        None stands for the asset as a whole. Raises ChangeLost, PositionUnreadable, TableMissing.
        """
        if not approvals.has_any:
            return {}
        run_ids: dict[str | None, set[str]] = {}
        if partition_keys := [partition for partition in partitions if partition is not None]:
            run_ids.update(self._consumption.runs_by_partition(partition_keys, approvals.filter_runs))
        if None in partitions and (runs := self._consumption.consumed_run_ids(approvals.filter_runs)):
            run_ids[None] = runs
        return {partition: approvals.approval_names(runs) for partition, runs in run_ids.items()}

    def state_key(self, partition: str | None = None) -> str:
        """The same for the same state of the inputs and of what was consumed: what is launched once for."""
        parts = [partition or "", self._consumer.asset]
        for consumer_input in self._inputs():
            parts += [consumer_input.name, position_to_json(consumer_input.up_to)]
        positions = self._consumption.positions
        consumed_positions = (positions.common_position, positions.partitions.get(partition or ""))
        parts += [consumed.to_json() if consumed else "" for consumed in consumed_positions]
        if partition is not None and self._consumer.computes_in_order:
            parts.append(self._consumption.predecessor_run(partition))
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]

    def launch_key(self, partition: str | None) -> str:
        """The key of the run that computes a partition with something left: that of the run's first one."""
        if partition is None:
            return self.state_key()
        batch_partitions = self.batch_of(partition).partitions
        return self.state_key(batch_partitions[0] if partition in batch_partitions else partition)

    def _inputs(self) -> Collection[UpstreamTable]:
        return self._consumption.inputs.values()

    def _changes(self) -> list[ChangeSet]:
        return [change for key in self._consumption.inputs for _, change in self._consumption.changes(key)]


def consumer_backlog(asset: AssetsDefinition, lakehouse: LakehouseResource) -> Unconsumed:
    """What an asset with `consumes(…)` has left of what is on `main`, for schedules and sensors of one's own.

    Nothing is launched, and no row is read. Runs under way count for nothing: what they consume is left until
    they are published.

    Args:
        asset (AssetsDefinition): The asset.
        lakehouse (LakehouseResource): The lake.

    Returns:
        Unconsumed: `any` says whether there is something, `rows`, `files` and `age_s(now)` how much and
            since when, `text()` all of it in words, also why it cannot be told.

    Raises:
        ConfigurationError: The asset consumes no changes.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import LakehouseResource, unconsumed

            @dg.schedule(cron_schedule="*/5 * * * *", target=[spent])
            def every_five_minutes(lakehouse: LakehouseResource):
                left = unconsumed(spent, lakehouse)
                return dg.RunRequest() if left.any else dg.SkipReason(left.text())
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
        f"{', '.join(key.to_user_string() for key in asset.keys)} does not say what it consumes.",
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
