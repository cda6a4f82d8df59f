"""The time through which a table is published, and an automation condition that waits for it.

The condition is a class of this package, like the conditions that follow publications. So only a sensor that
evaluates in the code server can use it: `publication_automation_sensor()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from dagster import (
    AssetKey,
    AutomationCondition,
    AutomationContext,
    AutomationResult,
    DagsterInstance,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.table import Table

from branchlake_dagster.automation.backlog import iter_consumers
from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.capture import capture_change, contains_snapshot, current_position
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position
from branchlake_dagster.incremental.affected_partitions import partition_coverage
from branchlake_dagster.incremental.declaration import Consumer, UpstreamTable, require_columns
from branchlake_dagster.incremental.pending import (
    ConsumerState,
    compute_valid_through,
    unconsumed_partitions,
    windows_end_ms,
)
from branchlake_dagster.incremental.positions import fit_positions, read_positions, recorded_time
from branchlake_dagster.incremental.valid_through import InputTime, to_epoch_ms
from branchlake_dagster.ingest.batch_assets import ingests_by_name
from branchlake_dagster.ingest.batch_report import to_utc_datetime
from branchlake_dagster.ingest.batch_tables import Identifier, load_tables
from branchlake_dagster.ingest.errors import PositionLost
from branchlake_dagster.ingest.offsets import TableProgress, recorded_ingestions
from branchlake_dagster.ingest.progress import read_progress
from branchlake_dagster.internals.dagster import AssetGraph, EntitySubset
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import InputColumnGone, PositionUnreadable, SchemaMismatch
from branchlake_dagster.tables.specification import format_table_name, table_identifier

TableName = str | AssetKey
"""A dotted table name (`raw.orders`), the key of the table's asset, or that key as text (`raw/orders`)."""


@dataclass(frozen=True)
class PublishedTime:
    """The time up to which a table has all records of its ingestions, or of the tables that it consumes.

    `at` is None if there is no such time. `reason` is part of a sentence: the time, or why there is none.
    """

    at: datetime | None
    reason: str
    ingested: bool = True
    """False if no ingestion is known that fills the table, or one of the inputs from which it is computed."""
    sources: frozenset[str] = frozenset()
    """The ingested tables from which the records come, and partitions of consumers in between (`InputTime`).

    Empty if `at` is None."""

    @property
    def input_time(self) -> InputTime | None:
        """The time as an `InputTime`, for a table that consumes this table; None if there is no time."""
        return None if self.at is None else InputTime(to_epoch_ms(self.at), self.sources)

    def reaches(self, wanted: datetime) -> bool:
        """Return whether the table has all records before `wanted`. False if its time is not known."""
        return self.at is not None and self.at >= wanted


@dataclass(frozen=True)
class DeclaredConsumers:
    """The consumers that a code location declares, by table.

    `graph` has their assets. `instance` is needed for consumers with dynamic partitions.
    """

    graph: AssetGraph
    default_namespace: str
    instance: DagsterInstance | None = None

    def find_consumer(self, identifier: Identifier) -> Consumer | None:
        """Return the consumer that computes a table, or None if this code location declares none.

        Raises ConfigurationError if the consumer's declaration contradicts itself.
        """
        keys = [AssetKey(list(identifier))]
        if identifier[:-1] == (self.default_namespace,):
            keys.append(AssetKey(identifier[-1:]))
        return next(
            (
                table_consumer.consumer
                for table_consumer in iter_consumers(self.graph, self.default_namespace, keys)
            ),
            None,
        )


def identifier_of_table(table: TableName, default_namespace: str) -> Identifier:
    """Return the parts of a table's name. A name without a namespace is in the default namespace.

    Raises ConfigurationError if `table` cannot be the name of a table.
    """
    if isinstance(table, AssetKey):
        return table_identifier(table, default_namespace)
    try:
        parts = table.split("/") if "/" in table else ContentKey.from_path(table).elements
    except ValueError as error:
        raise ConfigurationError(f"{table!r} is not the name of a table.", hint='"raw.orders"') from error
    return table_identifier(AssetKey(list(parts)), default_namespace)


def format_table(table: TableName) -> str:
    """Return the table's name as the user wrote it; for an AssetKey, the key as text (`raw/orders`)."""
    return table.to_user_string() if isinstance(table, AssetKey) else table


def published_time(
    client: NessieClient,
    catalog: NessieCatalog,
    identifier: Identifier,
    default_namespace: str,
    declared_consumers: DeclaredConsumers | None = None,
) -> PublishedTime:
    """Return the time through which the table is published at the catalog's reference.

    If several ingestions fill the table, the earliest of their times counts. The dead letter table of an
    ingestion has the newest time, because it takes part in each batch. A table that is computed from changes
    has the time of its inputs, as far as it has consumed them. If `declared_consumers` does not have its
    consumer, the time that its runs recorded counts.

    Cost: loads each table in the chain of consumers once, and reads metadata but no data files. The backlog
    of a consumer is computed from manifests, as in its sensor. Pass a catalog at one commit, so that all
    tables are of the same state. Nessie's errors pass through.
    """
    iceberg_tables = IcebergTableFormat(catalog)
    reader = TimeReader(
        lambda wanted: load_tables(client, catalog, wanted, iceberg_tables),
        default_namespace,
        declared_consumers.find_consumer if declared_consumers is not None else lambda _: None,
        declared_consumers.instance if declared_consumers is not None else None,
    )
    return reader.published_time(identifier)


@dataclass
class TimeReader:
    """Finds the valid-through times of tables at one commit, and reads each table of a chain once.

    `load_tables` loads tables by name, with None for a table that does not exist. `consumer_of` returns the
    declared consumer that computes a table.
    """

    load_tables: Callable[[Mapping[str, Identifier]], Mapping[str, Table | None]]
    default_namespace: str
    consumer_of: Callable[[Identifier], Consumer | None]
    instance: DagsterInstance | None = None
    _times: dict[Identifier, PublishedTime] = field(default_factory=dict, init=False)

    def published_time(self, identifier: Identifier) -> PublishedTime:
        """Return the time through which a table is published, with the reason if there is none.

        Each table is read once. A table `identifier` that does not exist has no time.
        """
        if identifier not in self._times:
            name = format_table_name(identifier)
            # Tables of several code locations might be computed from each other. This entry ends the
            # recursion.
            self._times[identifier] = PublishedTime(None, f"Table {name} is computed from itself")
            self._times[identifier] = self._read(identifier, name)
        return self._times[identifier]

    def _read(self, identifier: Identifier, name: str) -> PublishedTime:
        table = self.load_tables({name: identifier})[name]
        if table is None:
            return PublishedTime(None, f"Table {name} does not exist yet")
        ingested = self._ingestion_time(identifier, name, table)
        if ingested is not None:
            return ingested
        consumer = self.consumer_of(identifier)
        return (
            self._recorded_time(name, table)
            if consumer is None
            else self._consumed_time(consumer, name, table)
        )

    def _ingestion_time(self, identifier: Identifier, name: str, table: Table) -> PublishedTime | None:
        """Return the earliest time of the ingestions that fill the table, or None if no ingestion fills it.

        There is no time, but a reason, if the time of one of them is not recorded, if its position is lost,
        or if it must fill tables again.
        """
        times: list[datetime] = []
        properties = table.metadata.properties
        for ingestion, dead_letter_identifier in _iter_ingestions(
            identifier, properties, self.default_namespace
        ):
            tables: dict[str, Table | None] = {name: table}
            if dead_letter_identifier is not None and dead_letter_identifier != identifier:
                tables |= self.load_tables(
                    {format_table_name(dead_letter_identifier): dead_letter_identifier}
                )
            try:
                progress = read_progress(ingestion, tables, on_rollback="replay")
            except PositionLost as lost:
                return PublishedTime(None, f"The position of ingestion {ingestion} is lost: {lost.message}")
            if progress.replay_offsets:
                refill_tables = ", ".join(sorted(progress.replay_offsets))
                return PublishedTime(
                    None, f"Ingestion {ingestion} must fill {refill_tables} again after a rollback"
                )
            if progress.valid_through_ms is None:
                return PublishedTime(None, f"Ingestion {ingestion} has not recorded a valid-through time yet")
            times.append(to_utc_datetime(progress.valid_through_ms))
        return _build_published_time(name, min(times), frozenset({name})) if times else None

    def _recorded_time(self, name: str, table: Table) -> PublishedTime:
        """Return the time that the runs of a consumer in another code location recorded."""
        properties = table.metadata.properties
        if not any(
            key == LakeProperty.CONSUMED or key.startswith(f"{LakeProperty.CONSUMED}.") for key in properties
        ):
            reason = f"Neither an ingestion nor a consumer has recorded a position in table {name}"
            return PublishedTime(None, reason, ingested=False)
        input_time = recorded_time(table.metadata, name)
        if input_time is None:
            reason = (
                f"The runs of table {name} have not recorded a valid-through time, or the table was rolled"
                " back"
            )
            return PublishedTime(None, reason)
        return _build_published_time(name, to_utc_datetime(input_time.ms), input_time.sources)

    def _consumed_time(self, consumer: Consumer, name: str, table: Table) -> PublishedTime:
        """Return the time of a consumer that this code location declares."""
        tables = self.load_tables(
            {format_table_name(identifier): identifier for identifier in consumer.inputs.values()}
        )
        times = {
            key: self.published_time(identifier)
            for key, identifier in consumer.inputs.items()
            if key not in consumer.declaration.optional or tables[format_table_name(identifier)] is not None
        }
        for key, time in times.items():
            if time.at is None:
                reason = f"Table {name} consumes {key.to_user_string()}: {time.reason}"
                return PublishedTime(None, reason, time.ingested)
        try:
            input_time = _consumer_time(consumer, table, tables, times, self.instance)
        except (ChangeLost, InputColumnGone, PositionUnreadable, SchemaMismatch) as error:
            return PublishedTime(None, f"It is not known what table {name} has consumed: {error.message}")
        if isinstance(input_time, str):
            return PublishedTime(None, f"Table {name} {input_time}")
        return _build_published_time(name, to_utc_datetime(input_time.ms), input_time.sources)


def _consumer_time(
    consumer: Consumer,
    table: Table,
    input_tables: Mapping[str, Table | None],
    times: Mapping[AssetKey, PublishedTime],
    instance: DagsterInstance | None,
) -> InputTime | str:
    """Return the valid-through time of a consumer, or why it has none, as the end of a sentence.

    `input_tables` has the tables of the inputs by dotted name, and `times` the time of each input. Raises
    ChangeLost, InputColumnGone, PositionUnreadable or SchemaMismatch.
    """
    recorded = read_positions(table.metadata.properties, table=consumer.spec.name)
    positions = fit_positions(recorded, consumer).without_lost(
        lambda at: contains_snapshot(table.metadata, at)
    )
    if positions.restart_reason:
        return f"must be computed anew: {positions.restart_reason}"
    if positions.common_position is None and not positions.partitions:
        return "has not recorded yet what it has consumed"
    inputs = [
        _build_upstream(consumer, key, input_tables[format_table_name(consumer.inputs[key])]) for key in times
    ]
    changes: dict[tuple[str, Position | None], ChangeSet] = {}

    def change_since(upstream: UpstreamTable, since: Position | None) -> ChangeSet:
        if (upstream.name, since) not in changes:
            changes[upstream.name, since] = capture_change(upstream.table, since, name=upstream.name)
        return changes[upstream.name, since]

    backlog = ConsumerState(consumer, positions, inputs, change_since, instance)
    end_ms = windows_end_ms(consumer)
    input_times = {key: time.input_time for key, time in times.items()}
    backlog_time = compute_valid_through(backlog, input_times, unconsumed_partitions(backlog), end_ms)
    if backlog_time is None or backlog_time.table_ms is None:
        return "has a backlog, and has not recorded up to which time it has consumed its inputs"
    parts = consumer.definition if consumer.tracks_partitions else None
    covered_partitions = partition_coverage(parts, instance=instance) if parts is not None else {}
    return InputTime(backlog_time.table_ms, backlog_time.sources).with_partitions(
        consumer.spec.name, covered_partitions
    )


def _build_upstream(consumer: Consumer, key: AssetKey, table: Table | None) -> UpstreamTable:
    assert table is not None  # noqa: S101 - its time is known
    require_columns(consumer, key, table)
    pattern = consumer.declaration.inputs[key]
    return UpstreamTable(
        key, format_table_name(consumer.inputs[key]), pattern, table, current_position(table)
    )


def _build_published_time(name: str, at: datetime, sources: frozenset[str]) -> PublishedTime:
    return PublishedTime(at, f"Table {name} is published through {at.isoformat()}", sources=sources)


def parse_time(time: datetime | str) -> datetime:
    """Return a time with its zone. Raises ConfigurationError for invalid text or a time without a zone."""
    try:
        at = datetime.fromisoformat(time) if isinstance(time, str) else time
    except ValueError as error:
        raise ConfigurationError(f"{time!r} is not an ISO 8601 time.", hint='"2026-11-24T06:00Z"') from error
    if at.tzinfo is None:
        raise ConfigurationError(f"The time {at.isoformat()} has no time zone.", hint='"2026-11-24T06:00Z"')
    return at


def _iter_ingestions(
    identifier: Identifier, properties: dict[str, str], default_namespace: str
) -> Iterator[tuple[str, Identifier | None]]:
    """Iterate over the ingestions that fill a table: the name, and the identifier of the dead letter table.

    The identifier is None if it is not known. Ingestions that have already written rows are found in the
    table's properties. The others are found in the declarations of this code location.
    """
    recorded = recorded_ingestions(properties)
    for name, progress_json in recorded.items():
        try:
            dead_letter_table_name = TableProgress.from_json(progress_json).dead_letter_table_name
        except (ValueError, KeyError, TypeError):
            dead_letter_table_name = None  # `read_progress` reports the damage
        yield name, ContentKey.from_path(dead_letter_table_name).elements if dead_letter_table_name else None
    for name, ingest in ingests_by_name.items():
        if name not in recorded and any(
            table_identifier(table.asset, default_namespace) == identifier
            for table in ingest.tables
            if not table.is_family
        ):
            yield name, table_identifier(ingest.dead_letters_asset, default_namespace)


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
    table is published through midnight.

    The condition compares the valid-through time that the ingestion records with each batch. A consumer has
    the earliest time of its inputs, as far as it has consumed them. If a time window still has a backlog, the
    time is the start of that window, or the time up to which it was last consumed if that is later.

    The condition is false while the table does not exist, has no such time yet, or must be filled or computed
    again after a rollback. It reads no data, but for a consumer the manifests of its backlog. Combine it with
    a condition that makes the request happen once, and put it last: then it only evaluates the partitions
    that the other conditions have left.

    Only `publication_automation_sensor()` evaluates it.

    Args:
        table (str | AssetKey): The table, `raw.orders`, or its asset, `raw/orders`. For a consumer that this
            code location does not declare, the time that its last run recorded counts.
        time (datetime | str | None): A time with its zone, also as ISO 8601 text: `2026-11-24T06:00Z`.
            (default: the end of the partition)
        allowed_lateness (timedelta): Wait until the table is published through this much more than the time,
            for records that reach their topic after younger records. (default: 0)
        settings (Optional[Settings]): The lake. (default: the environment's `BRANCHLAKE_…`)

    Returns:
        AutomationCondition: With `time`, for any asset or check. Without `time`, for assets that are
            partitioned by time; for any other asset the evaluation raises ConfigurationError.

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
    lake = LakehouseResource.from_settings(settings) if settings else LakehouseResource()
    return PublishedThrough(table, at, allowed_lateness, lake)


@dataclass(frozen=True)
class PublishedThrough(AutomationCondition[Any]):
    """The condition of `published_through()`.

    It needs no cursor, because the table on `main` has the time.
    """

    table: TableName
    time: datetime | None
    allowed_lateness: timedelta
    lake: LakehouseResource = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the name that the UI shows. It is part of the condition's identity."""
        time = "partition_end" if self.time is None else self.time.isoformat()
        late = f", allowed_lateness={self.allowed_lateness}" if self.allowed_lateness else ""
        return f"published_through({format_table(self.table)}, {time}{late})"

    @property
    def description(self) -> str:
        """What the UI shows as the condition's description."""
        until = "the end of the partition" if self.time is None else self.time.isoformat()
        return f"main has all records of {format_table(self.table)} through {until}"

    @property
    def requires_cursor(self) -> bool:
        """Return False: nothing is remembered between evaluations."""
        return False

    def evaluate(self, context: AutomationContext[Any]) -> AutomationResult[Any]:
        """Return those candidate partitions for which the table has reached the time.

        Without partitions, the asset itself is the candidate. Raises ConfigurationError or Nessie's errors.
        """
        candidates = context.candidate_subset
        if candidates.is_empty:
            return AutomationResult(context, candidates)
        if self.time is None:
            require_time_partitions(candidates.partitions_def, context.key.to_user_string())
        published = self._published(context)
        if not published.ingested:
            context.log.warning("%s: %s.", self.name, published.reason)
        return AutomationResult(context, self._reached_candidates(context, candidates, published))

    def _published(self, context: AutomationContext[Any]) -> PublishedTime:
        lake = self.lake.lakehouse
        namespace = lake.settings.default_namespace
        identifier = identifier_of_table(self.table, namespace)
        declared_consumers = DeclaredConsumers(
            context.asset_graph, namespace, context.asset_graph_view.instance
        )
        catalog = lake.catalog(f"{MAIN}@{lake.nessie.reference(MAIN).hash}")
        return published_time(lake.nessie, catalog, identifier, namespace, declared_consumers)

    def _reached_candidates(
        self, context: AutomationContext[Any], candidates: EntitySubset[Any], published: PublishedTime
    ) -> EntitySubset[Any]:
        if published.at is None:
            return context.get_empty_subset()
        if self.time is not None:
            is_reached = published.reaches(self.time + self.allowed_lateness)
            return candidates if is_reached else context.get_empty_subset()
        definition: Any = candidates.partitions_def
        end_times = {
            key: definition.time_window_for_partition_key(key).end
            for key in candidates.expensively_compute_partition_keys()
        }
        return candidates.compute_intersection_with_partition_keys(
            {key for key, end in end_times.items() if published.reaches(end + self.allowed_lateness)}
        )


def require_time_partitions(definition: PartitionsDefinition[Any] | None, name: str) -> None:
    """Raise ConfigurationError if the partitions of the asset `name` have no end time.

    `definition` is None for an asset without partitions, which has no end time either.
    """
    has_time_windows = isinstance(definition, TimeWindowPartitionsDefinition) or (
        isinstance(definition, MultiPartitionsDefinition) and definition.has_time_window_dimension
    )
    if not has_time_windows:
        raise ConfigurationError(
            f"{name} is not partitioned by time, so published_through() has no time to wait for.",
            hint='Pass a time: published_through("raw.orders", "2026-11-24T06:00Z").',
            subject=name,
        )
