"""What a consumer has left to consume of what is on `main`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from dagster import AssetsDefinition, DagsterInstance

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangeLost, ChangeSet, position_text
from branchlake_dagster.incremental.consumer import Consumer, Input
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import declared
from branchlake_dagster.incremental.pending import Batch
from branchlake_dagster.incremental.positions import Consumed
from branchlake_dagster.incremental.step_consumption import consumer_of
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.errors import InputColumnGone, PositionUnreadable, TableMissing
from branchlake_dagster.wording import counted


@dataclass(frozen=True)
class Unconsumed:
    """The change that a consumer has not consumed: `rows` came or went in `files`, since `oldest`.

    `whole`: it has not consumed anything yet, or must begin anew, so nothing is counted. `new`: it is of
    partitions alone that came later than what was consumed, whose rows may be older, or that are computed
    from one that was computed again. `trouble` is why it cannot be told; `waiting` an input that is not
    there. Rows that belong to no partition are not left.
    """

    files: int = 0
    rows: int = 0
    oldest: datetime | None = None
    whole: bool = False
    new: bool = False
    trouble: str | None = None
    waiting: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is something to consume."""
        return self.whole or self.new or self.files > 0

    def age_s(self, now: datetime) -> float:
        """Seconds since the oldest of it was written; 0 without any."""
        return max(0.0, (now - self.oldest).total_seconds()) if self.oldest else 0.0

    def text(self) -> str:
        """For people."""
        if self.trouble or self.waiting:
            return str(self.trouble or self.waiting)
        if self.whole:
            return "everything, for the first time or anew"
        if self.new:
            return "all rows of partitions that are new, defined anew, or computed from a recomputed one"
        return f"{counted(self.rows, 'row')} in {counted(self.files, 'file')}" if self.files else "nothing"


class Standing:
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
            return Unconsumed(waiting=str(error))
        except (ChangeLost, InputColumnGone, PositionUnreadable) as error:
            return Unconsumed(trouble=str(error))

    def require_unconsumed(self) -> Unconsumed:
        """The same. Raises ChangeLost, InputColumnGone, PositionUnreadable or TableMissing."""
        if self._consumer.by_partition and not self.partitions:
            return Unconsumed()
        if self._consumer.by_partition and self._consumption.positions.floor is None:
            return Unconsumed(whole=True)
        if self._consumption.whole:
            return Unconsumed(whole=any(one.table.metadata.snapshots for one in self._inputs()))
        found = _counted(self._changes())
        return replace(found, new=self._consumer.by_partition and not found.files)

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """The partitions that have something left. Raises ChangeLost, PositionUnreadable, TableMissing."""
        return tuple(sorted(self._consumption.pending()))

    @cached_property
    def batches(self) -> list[Batch]:
        """The same by runs that can be launched beside each other, with those that wait for them."""
        return self._consumption.batches(self.partitions, self._per_run)

    def batch_of(self, partition: str) -> Batch:
        """The batch that a partition with something left is in, or waits for."""
        return self._batch_by_partition[partition]

    @cached_property
    def _batch_by_partition(self) -> dict[str, Batch]:
        return {key: one for one in self.batches for key in (*one.partitions, *one.waiting)}

    @property
    def by_partition(self) -> bool:
        """Whether each partition of the consumer has a position of its own."""
        return self._consumer.by_partition

    @property
    def consumed(self) -> Consumed | None:
        """The position of the table as a whole; None before its first run.

        Raises ChangeLost or PositionUnreadable.
        """
        return self._consumption.positions.floor

    def changes_by_partition(
        self, partitions: Sequence[str]
    ) -> dict[str, tuple[Consumed | None, Unconsumed]]:
        """The position of each of these partitions and what it has left. Raises ChangeLost.

        A partition for which nothing was consumed has everything left, of which nothing is counted.
        """
        found = self._consumption.changes_by_partition(partitions) if partitions else {}
        return {
            key: (
                one.consumed,
                Unconsumed(
                    one.files,
                    one.rows,
                    one.oldest,
                    whole=one.consumed is None,
                    new=one.consumed is not None and not one.files,
                ),
            )
            for key, one in found.items()
        }

    def held(
        self, partitions: Sequence[str | None], approvals: Approvals
    ) -> dict[str | None, tuple[str, ...]]:
        """Those of the partitions whose change waits for approval, with the ids under which it is approved.

        None stands for the asset as a whole. Raises ChangeLost, PositionUnreadable, TableMissing.
        """
        if not approvals.any:
            return {}
        found: dict[str | None, set[str]] = {}
        if keys := [one for one in partitions if one is not None]:
            found.update(self._consumption.runs_by_partition(keys, approvals.chosen))
        if None in partitions and (runs := self._consumption.runs(approvals.chosen)):
            found[None] = runs
        return {partition: approvals.names(runs) for partition, runs in found.items()}

    def key(self, partition: str | None = None) -> str:
        """The same for the same state of the inputs and of what was consumed: what is launched once for."""
        found = [partition or "", self._consumer.asset]
        for one in self._inputs():
            found += [one.name, position_text(one.upto)]
        positions = self._consumption.positions
        held = (positions.floor, positions.partitions.get(partition or ""))
        found += [consumed.text() if consumed else "" for consumed in held]
        if partition is not None and self._consumer.in_order:
            found.append(self._consumption.run_before(partition))
        return hashlib.sha256("|".join(found).encode()).hexdigest()[:32]

    def launch_key(self, partition: str | None) -> str:
        """The key of the run that computes a partition with something left: that of the run's first one."""
        if partition is None:
            return self.key()
        together = self.batch_of(partition).partitions
        return self.key(together[0] if partition in together else partition)

    def _inputs(self) -> Collection[Input]:
        return self._consumption.inputs.values()

    def _changes(self) -> list[ChangeSet]:
        return [change for key in self._consumption.inputs for _, change in self._consumption.changes(key)]


def unconsumed(asset: AssetsDefinition, lakehouse: LakehouseResource) -> Unconsumed:
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
        declaration = declared(spec.metadata, asset=spec.key.to_user_string())
        if declaration is not None:
            consumer = consumer_of(
                spec, declaration, asset.partitions_def, namespace, asset.get_partition_mapping
            )
            return Standing(lakehouse, consumer).unconsumed
    raise ConfigurationError(
        f"{', '.join(key.to_user_string() for key in asset.keys)} does not say what it consumes.",
        hint="Add consumes({…}) to its metadata.",
        reason="consumes_nothing",
    )


def _counted(changes: list[ChangeSet]) -> Unconsumed:
    times = [change.oldest for change in changes if not change.empty and change.oldest]
    return Unconsumed(
        files=sum(change.files_changed for change in changes),
        rows=sum(change.rows_changed for change in changes),
        oldest=min(times, default=None),
    )
