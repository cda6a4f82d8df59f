"""The input of a batch: the ingestion's tables, progress and topics, and the branch that it writes to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from pyiceberg.table import Table
from pyspark.sql import SparkSession

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.ingest.batch_tables import Identifier, load_tables, table_identifiers
from branchlake_dagster.ingest.declaration import (
    ROUTE,
    ExpandedIngest,
    FamilyTable,
    Ingest,
    IngestTable,
    RouteNames,
    collect_route_names,
    expand_families,
    format_route_names,
    parse_route_names,
)
from branchlake_dagster.ingest.errors import PositionLost, StartOffsetsMissing
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.offsets import Offsets, Topic
from branchlake_dagster.ingest.planning import (
    BatchPlan,
    CommittedOffsets,
    StartingOffsets,
    format_offsets,
    plan_batch,
    starting_offsets,
)
from branchlake_dagster.ingest.progress import (
    IngestionProgress,
    read_progress,
    require_replayable,
    require_reprocessed_rows,
    require_single_ingestion,
)
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True)
class IngestionTables:
    """The tables of an ingestion at one Nessie reference, by dotted name, in the order of `all_assets`.

    `loaded_tables` maps a name to the table, or to None if the table does not exist yet. Declared tables, the
    dead letters and the kept records can be None. A table of a family that does not exist is left out, unless
    `with_route_names` got `create_missing`; the next record that names it creates it again.
    """

    ingest: ExpandedIngest
    identifiers: Mapping[str, Identifier]
    loaded_tables: Mapping[str, Table | None]

    @property
    def dead_letter_table(self) -> Table | None:
        """The table of dead letters, which every batch changes; None if it does not exist yet."""
        return self.loaded_tables[self.dead_letter_table_name]

    @property
    def dead_letter_table_name(self) -> str:
        """The dotted name of the table of dead letters."""
        return list(self.identifiers)[len(self.ingest.tables)]

    @property
    def dead_letter_identifier(self) -> Identifier:
        """The identifier of the table of dead letters."""
        return self.identifiers[self.dead_letter_table_name]

    @property
    def kept_record_table_name(self) -> str | None:
        """The dotted name of the table of kept records; None for an ingestion without `keep_value`."""
        return next(iter(list(self.identifiers)[len(self.ingest.tables) + 1 :]), None)

    @property
    def kept_record_table(self) -> Table | None:
        """The table of kept records; None without `keep_value`, or if it does not exist yet."""
        name = self.kept_record_table_name
        return None if name is None else self.loaded_tables[name]

    @property
    def declarations(self) -> dict[str, IngestTable]:
        """The declarations of the tables by dotted name, without dead letters and kept records."""
        names = list(self.identifiers)[: len(self.ingest.tables)]
        return dict(zip(names, self.ingest.tables, strict=True))

    @property
    def route_names(self) -> dict[str, list[str]]:
        """The known route names, by the key of their family (`raw/{route}`)."""
        return collect_route_names(self.ingest.family_tables)

    def without_unknown_columns(self) -> IngestionTables:
        """Return these tables without those that do not exist yet and whose columns are not declared.

        The columns of such a table can only be inferred from records.
        """
        unknown_tables = {
            name
            for name, declaration in self.declarations.items()
            if self.loaded_tables[name] is None and not declaration.columns
        }
        return self.without_tables(unknown_tables)

    def without_tables(self, names: Collection[str]) -> IngestionTables:
        """Return these tables without those with the dotted `names`, which must be declared ones."""
        declarations = self.declarations
        kept_identifiers = {name: one for name, one in self.identifiers.items() if name not in names}
        tables = [declarations[name] for name in kept_identifiers if name in declarations]
        return IngestionTables(
            replace(self.ingest, tables=tables),
            kept_identifiers,
            {name: self.loaded_tables[name] for name in kept_identifiers},
        )

    @property
    def changed_properties(self) -> Mapping[str, str]:
        """The property to set on the table of dead letters: the JSON of all route names, by property name.

        Empty if the table already has this value, or if the ingestion has no families.
        """
        if not self.ingest.families:
            return {}
        key, route_names_json = (
            LakeProperty.TABLES_PREFIX + self.ingest.name,
            format_route_names(self.route_names),
        )
        stored_json = (
            self.dead_letter_table.metadata.properties.get(key)
            if self.dead_letter_table is not None
            else None
        )
        return {} if route_names_json == stored_json else {key: route_names_json}


@dataclass(frozen=True)
class PlannedBatch:
    """The next batch of an ingestion: its plan, and the tables, progress and topics that it is based on."""

    ingestion_tables: IngestionTables
    progress: IngestionProgress
    topics: Mapping[str, Topic]
    plan: BatchPlan

    @property
    def ingest(self) -> ExpandedIngest:
        """The ingestion with the known tables of its families."""
        return self.ingestion_tables.ingest

    @property
    def identifiers(self) -> Mapping[str, Identifier]:
        """The identifiers of the ingestion's tables by dotted name, in the order of `all_assets`."""
        return self.ingestion_tables.identifiers

    @property
    def current_offsets(self) -> Offsets:
        """The next offset of each partition before the batch; earlier records were ingested or skipped.

        Partitions of earlier incarnations of the topics are left out.
        """
        current_partitions = {one for topic in self.topics.values() for one in topic.partitions()}
        return {one: offset for one, offset in self.progress.position.items() if one in current_partitions}

    @property
    def loaded_tables(self) -> Mapping[str, Table | None]:
        """The tables by dotted name; None for a table that does not exist yet."""
        return self.ingestion_tables.loaded_tables


def load_ingestion_tables(
    ingest: Ingest,
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTableFormat | None = None,
) -> IngestionTables:
    """Load an ingestion's tables at the catalog's reference, including the known tables of its families.

    `namespace` is the namespace of tables whose key has only one part.
    """
    iceberg_tables = tables or IcebergTableFormat(catalog)
    expanded_ingest = expand_families(ingest, {})
    identifiers_by_name = table_identifiers(expanded_ingest, namespace)
    loaded_tables = load_tables(client, catalog, identifiers_by_name, iceberg_tables)
    ingestion_tables = IngestionTables(expanded_ingest, identifiers_by_name, loaded_tables)
    if not expanded_ingest.families:
        return ingestion_tables
    route_names = _recorded_route_names(ingestion_tables)
    if route_names is None:
        route_names = _find_route_names(expanded_ingest, client, catalog, namespace, iceberg_tables)
    return with_route_names(ingestion_tables, route_names, client, catalog, namespace, iceberg_tables)


def with_route_names(
    ingestion_tables: IngestionTables,
    route_names: RouteNames,
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTableFormat,
    *,
    create_missing: bool = False,
) -> IngestionTables:
    """Return `ingestion_tables` with the tables of these route names added.

    With `create_missing`, tables that do not exist are added too, as None, and the batch creates them.
    Without it, they are left out.
    """
    expanded_ingest = expand_families(ingestion_tables.ingest, route_names)
    identifiers_by_name = table_identifiers(expanded_ingest, namespace)
    new_identifiers = {
        name: one for name, one in identifiers_by_name.items() if name not in ingestion_tables.loaded_tables
    }
    loaded_tables = {
        **ingestion_tables.loaded_tables,
        **(load_tables(client, catalog, new_identifiers, tables) if new_identifiers else {}),
    }
    if not create_missing:
        remaining_tables = [
            one
            for name, one in IngestionTables(
                expanded_ingest, identifiers_by_name, loaded_tables
            ).declarations.items()
            if _is_needed(one, loaded_tables[name])
        ]
        expanded_ingest = replace(expanded_ingest, tables=remaining_tables)
        identifiers_by_name = table_identifiers(expanded_ingest, namespace)
    return IngestionTables(
        expanded_ingest, identifiers_by_name, {name: loaded_tables[name] for name in identifiers_by_name}
    )


def _is_needed(declaration: object, table: Table | None) -> bool:
    return table is not None or not isinstance(declaration, FamilyTable)


def _recorded_route_names(ingestion_tables: IngestionTables) -> RouteNames | None:
    """Read the route names from the table of dead letters. None if it has none or they cannot be parsed."""
    property_value = (
        ingestion_tables.dead_letter_table.metadata.properties.get(
            LakeProperty.TABLES_PREFIX + ingestion_tables.ingest.name
        )
        if ingestion_tables.dead_letter_table is not None
        else None
    )
    try:
        return parse_route_names(property_value) if property_value else None
    except ValueError:
        return None


def _find_route_names(
    ingest: ExpandedIngest,
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTableFormat,
) -> RouteNames:
    """Search the catalog for tables that match a family's key and that this ingestion has filled.

    This is needed for a new ingestion, and after the table of dead letters was dropped. It loads each table
    whose name matches.
    """
    route_names: dict[str, list[str]] = {}
    for family, declaration in ingest.families.items():
        *key_namespace, name_pattern = declaration.asset.path
        prefix, suffix = name_pattern.split(ROUTE)
        family_namespace = tuple(key_namespace) or (namespace,)
        for entry in client.entries(
            catalog.ref, filter=f"size(entry.keyElements) == {len(family_namespace) + 1}"
        ):
            *entry_namespace, name = entry.key.elements
            route_name = name[len(prefix) : len(name) - len(suffix)]
            if (
                tuple(entry_namespace) != family_namespace
                or not route_name
                or name != prefix + route_name + suffix
            ):
                continue
            key = ContentKey((*family_namespace, name))
            content = client.contents(catalog.ref, [key]).get(key)
            if not isinstance(content, IcebergTable):
                continue
            if (
                LakeProperty.OFFSETS_PREFIX + ingest.name
                in tables.open(key, content).table.metadata.properties
            ):
                route_names.setdefault(family, []).append(route_name)
    return route_names


def plan_next_batch(
    ingest: Ingest,
    client: NessieClient,
    catalog: NessieCatalog,
    topics: Topics,
    *,
    namespace: str,
    tables: IcebergTableFormat | None = None,
) -> PlannedBatch:
    """Read the ingestion's progress at the catalog's reference and plan its next batch. Changes nothing.

    Raises PositionLost, TopicChanged, AnotherIngestion, StartOffsetsMissing, StartOffsetsOutOfRange,
    ConsumerGroupActive, and the errors of `topics`: KafkaUnavailable, KafkaRefused or LandingUnavailable.
    """
    ingestion_tables = load_ingestion_tables(ingest, client, catalog, namespace, tables)
    loaded_tables = ingestion_tables.loaded_tables
    require_reprocessed_rows(
        ingest.name,
        loaded_tables,
        on_rollback=ingest.on_rollback,
        branch=catalog.ref,
        dead_letter_table_name=ingestion_tables.dead_letter_table_name,
    )
    progress = read_progress(ingest.name, loaded_tables, on_rollback=ingest.on_rollback)
    topics_by_name = topics.describe(ingest.topics)
    require_single_ingestion(
        ingest.name, loaded_tables, {one.name: one.incarnation for one in topics_by_name.values()}
    )
    current_topics = {
        name: one.with_recorded_resets(progress.position) for name, one in topics_by_name.items()
    }
    require_replayable(progress, current_topics.values())

    topic_starts = _TopicStarts(ingest, topics)
    plan = plan_batch(
        current_topics.values(),
        progress.start,
        topic_starts.first_offsets,
        max_records=ingest.most_records,
        rules=ingest.change_rules,
        first_offsets=progress.first_offsets,
    )
    if topic_starts.must_record:
        # Even if no records wait: the topic's end moves when its first record arrives, and Kafka may delete
        # the group.
        plan = replace(plan, notes=(*topic_starts.notes, *plan.notes), must_record=True)
    return PlannedBatch(ingestion_tables, progress, current_topics, plan)


class _TopicStarts:
    """Finds the first offsets of topics that were never read, by the ingestion's `start`.

    `notes` gets a sentence for each topic that starts at committed or given offsets. `must_record` becomes
    True if a topic would start at other offsets when it is planned again later.
    """

    def __init__(self, ingest: Ingest, topics: Topics) -> None:
        self._ingest = ingest
        self._topics = topics
        self._committed: Mapping[str, Mapping[int, int]] | None = None
        self.notes: list[str] = []
        self.must_record = False

    def first_offsets(self, topic: Topic) -> Offsets:
        """Return the first offset to read of each partition.

        Raises StartOffsetsMissing, StartOffsetsOutOfRange, ConsumerGroupActive, KafkaUnavailable,
        KafkaRefused, or ConfigurationError if the source has no consumer groups.
        """
        start = self._ingest.start
        if not topic.ends and start == "latest":
            # Otherwise the records before the first batch would be passed over, although they came after the
            # start. With other starts, a topic without partitions can start later.
            self.must_record = True
            return {topic.start_without_partitions(): 0}
        self.must_record = self.must_record or (start != "earliest" and bool(topic.ends))
        if isinstance(start, CommittedOffsets):
            origin = f"the committed offsets of consumer group {start.group}"
            given_offsets = self._committed_by(start.group).get(topic.name, {})
        elif isinstance(start, StartingOffsets):
            origin, given_offsets = "the given offsets", start.offsets.get(topic.name, {})
        elif isinstance(start, datetime):
            return self._topics.offsets_at_time(topic, start)
        else:
            edge_offsets = topic.begins if start == "earliest" else topic.ends
            return {one: edge_offsets[one.partition] for one in topic.partitions()}
        offsets = starting_offsets(topic, given_offsets, start.otherwise, origin=origin)
        self.notes.append(f"Topic {topic.name} starts at {origin}: {format_offsets(offsets)}.")
        return offsets

    def _committed_by(self, group: str) -> Mapping[str, Mapping[int, int]]:
        if self._committed is None:
            committed = self._topics.committed_offsets(group, self._ingest.topics)
            if not any(committed.values()):
                raise StartOffsetsMissing(
                    f"Consumer group {group} has not committed any offset for topic"
                    f" {', '.join(self._ingest.topics)}.",
                    hint="Check the group's name with kafka-consumer-groups.sh --describe. Kafka deletes the"
                    " offsets of a group without members after offsets.retention.minutes.",
                )
            self._committed = committed
        return self._committed


def with_new_route_names(
    ingestion_tables: IngestionTables,
    route_names: RouteNames,
    incarnations: Mapping[str, str],
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTableFormat,
) -> IngestionTables:
    """Return `ingestion_tables` with the tables of new route names added, up to `most_tables` per family.

    `route_names` are the names that records have; names beyond that limit are ignored. `incarnations` are
    Kafka's topic ids by topic name. Raises AnotherIngestion if another ingestion fills a new table from the
    same topic. Raises PositionLost if a new table already has offsets of this ingestion, although the table
    of dead letters does not list it.
    """
    ingest = ingestion_tables.ingest
    all_names: dict[str, list[str]] = {
        family: list(names) for family, names in ingestion_tables.route_names.items()
    }
    for family, new_names in route_names.items():
        family_names = all_names.setdefault(family, [])
        family_names += sorted({*new_names} - {*family_names})[
            : max(0, ingest.most_tables - len(family_names))
        ]
    extended_tables = with_route_names(
        ingestion_tables, all_names, client, catalog, namespace, tables, create_missing=ingest.create
    )
    new_tables = {
        name: extended_tables.loaded_tables[name]
        for name in extended_tables.identifiers
        if name not in ingestion_tables.identifiers
    }
    require_single_ingestion(ingest.name, new_tables, incarnations)
    for name, table in new_tables.items():
        if table is not None and LakeProperty.OFFSETS_PREFIX + ingest.name in table.metadata.properties:
            raise PositionLost(
                f"The table has offsets of ingestion {ingest.name}, but"
                f" {ingestion_tables.dead_letter_table_name} does not list it among the ingestion's tables.",
                table=name,
                hint=f"Remove the property {LakeProperty.TABLES_PREFIX}{ingest.name} from the table of dead"
                " letters, so that the next batch searches for the tables. Or drop this table.",
                reason="not_among_tables",
            )
    return extended_tables


@dataclass(frozen=True)
class BatchContext:
    """The branch that a batch writes to, with its catalog and Spark session, and the run that writes.

    `session` is a function that returns the Spark session of the branch.
    `snapshot_properties` are added to the summary of each snapshot, `commit_properties` to each Nessie
    commit.
    """

    lake: Lakehouse
    branch: str
    catalog: NessieCatalog
    session: Callable[[], SparkSession]
    run_id: str
    snapshot_properties: Mapping[str, str]
    commit_properties: Mapping[str, str]
    expires_snapshots: bool = False
    """Whether the batch removes old snapshots of its tables. Such a batch cannot be replayed onto `main`."""

    def with_new_route_names(
        self,
        ingestion_tables: IngestionTables,
        route_names: RouteNames,
        incarnations: Mapping[str, str],
        tables: IcebergTableFormat,
    ) -> IngestionTables:
        """Return `ingestion_tables` with the tables of new route names added, on this branch.

        The arguments and errors are those of the function `with_new_route_names`.
        """
        default_namespace = self.lake.settings.default_namespace
        return with_new_route_names(
            ingestion_tables,
            route_names,
            incarnations,
            self.lake.nessie,
            self.catalog,
            default_namespace,
            tables,
        )
