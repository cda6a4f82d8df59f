"""What is known before a batch: the tables, the progress, the topics, and the branch it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from pyiceberg.table import Table
from pyspark.sql import SparkSession

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.ingest.batch_tables import Identifier, identifiers, load
from branchlake_dagster.ingest.declaration import (
    ROUTE,
    Expanded,
    Ingest,
    NamedTable,
    Names,
    expanded,
    names_from,
    names_of,
    names_text,
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
    Standing,
    require_alone,
    require_put_back,
    require_replayable,
    standing,
)
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTables
from branchlake_dagster.stored_names import LakeProperty


@dataclass(frozen=True)
class KnownTables:
    """An ingestion's tables as a reference has them, the dead letters last, by dotted name.

    `there` has None for one that is not there: those with a key of their own, for one that a record has
    named and that was dropped is made again when a record names it.
    """

    ingest: Expanded
    wanted: Mapping[str, Identifier]
    there: Mapping[str, Table | None]

    @property
    def anchor(self) -> Table | None:
        """The dead letters, which take part in each batch."""
        return list(self.there.values())[-1]

    @property
    def dead_letters(self) -> str:
        """The name of that table."""
        return list(self.wanted)[-1]

    @property
    def names(self) -> dict[str, list[str]]:
        """What records have put into the names of tables, by family."""
        return names_of(self.ingest.named)

    def without_unknown_columns(self) -> KnownTables:
        """The same without the tables that are not there yet and whose columns are found in records."""
        full = dict(zip(self.wanted, self.ingest.tables, strict=False))
        kept = {
            name: one
            for name, one in self.wanted.items()
            if self.there[name] is not None or name == self.dead_letters or full[name].columns
        }
        tables = [full[name] for name in kept if name in full]
        return KnownTables(
            replace(self.ingest, tables=tables), kept, {name: self.there[name] for name in kept}
        )

    @property
    def told(self) -> Mapping[str, str]:
        """What the dead letters' table is to say of that; empty where it says so."""
        if not self.ingest.families:
            return {}
        key, text = LakeProperty.TABLES_PREFIX + self.ingest.name, names_text(self.names)
        before = self.anchor.metadata.properties.get(key) if self.anchor is not None else None
        return {} if text == before else {key: text}


@dataclass(frozen=True)
class Before:
    """What is known before a batch."""

    known: KnownTables
    standing: Standing
    topics: Mapping[str, Topic]
    plan: BatchPlan

    @property
    def ingest(self) -> Expanded:
        """The ingestion with all tables that are known."""
        return self.known.ingest

    @property
    def wanted(self) -> Mapping[str, Identifier]:
        """Their identifiers by dotted name, the dead letters last."""
        return self.known.wanted

    @property
    def current(self) -> Offsets:
        """How far the tables are in the topics as they are now: nothing of what was before them."""
        now = {one for topic in self.topics.values() for one in topic.partitions()}
        return {one: offset for one, offset in self.standing.position.items() if one in now}

    @property
    def tables(self) -> Mapping[str, Table | None]:
        """They themselves; None: not there."""
        return self.known.there


def known_tables(
    ingest: Ingest,
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTables | None = None,
) -> KnownTables:
    """The tables of an ingestion at the catalogue's reference; `namespace` is that of keys without one."""
    opened = tables or IcebergTables(catalog)
    fixed = expanded(ingest, {})
    wanted = identifiers(fixed, namespace)
    there = load(client, catalog, wanted, opened)
    known = KnownTables(fixed, wanted, there)
    if not fixed.families:
        return known
    names = _told_names(known)
    if names is None:
        names = _found_names(fixed, client, catalog, namespace, opened)
    return with_names(known, names, client, catalog, namespace, opened)


def with_names(
    known: KnownTables,
    names: Names,
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTables,
    *,
    make: bool = False,
) -> KnownTables:
    """The same with the tables of these names that are there; with `make` also with those that are not."""
    full = expanded(known.ingest, names)
    wanted = identifiers(full, namespace)
    new = {name: one for name, one in wanted.items() if name not in known.there}
    there = {**known.there, **(load(client, catalog, new, tables) if new else {})}
    if not make:
        held = [one for one, name in zip(full.tables, wanted, strict=False) if _stays(one, there[name])]
        full = replace(full, tables=held)
        wanted = identifiers(full, namespace)
    return KnownTables(full, wanted, {name: there[name] for name in wanted})


def _stays(declared: object, table: Table | None) -> bool:
    return table is not None or not isinstance(declared, NamedTable)


def _told_names(known: KnownTables) -> Names | None:
    """What the dead letters' table says; None: nothing, or nothing that can be read."""
    text = (
        known.anchor.metadata.properties.get(LakeProperty.TABLES_PREFIX + known.ingest.name)
        if known.anchor is not None
        else None
    )
    try:
        return names_from(text) if text else None
    except ValueError:
        return None


def _found_names(
    ingest: Expanded, client: NessieClient, catalog: NessieCatalog, namespace: str, tables: IcebergTables
) -> Names:
    """The names of tables that have offsets of the ingestion, of all that have a family's name.

    For an ingestion that begins, or whose dead letters' table was dropped.
    """
    found: dict[str, list[str]] = {}
    for family, declared in ingest.families.items():
        (*home, last), fixed = declared.asset.path, len(declared.asset.path) > 1
        begin, end = last.split(ROUTE)
        space = tuple(home) if fixed else (namespace,)
        for entry in client.entries(catalog.ref, filter=f"size(entry.keyElements) == {len(space) + 1}"):
            *where, name = entry.key.elements
            middle = name[len(begin) : len(name) - len(end)]
            if tuple(where) != space or not middle or name != begin + middle + end:
                continue
            key = ContentKey((*space, name))
            content = client.contents(catalog.ref, [key]).get(key)
            if not isinstance(content, IcebergTable):
                continue
            if (
                LakeProperty.OFFSETS_PREFIX + ingest.name
                in tables.open(key, content).table.metadata.properties
            ):
                found.setdefault(family, []).append(middle)
    return found


def look(
    ingest: Ingest,
    client: NessieClient,
    catalog: NessieCatalog,
    topics: Topics,
    *,
    namespace: str,
    tables: IcebergTables | None = None,
) -> Before:
    """Where an ingestion stands on a reference, and its next batch. Changes nothing.

    Raises PositionLost, TopicChanged, AnotherIngestion, StartOffsetsMissing, StartOffsetsOutOfRange,
    ConsumerGroupActive, KafkaUnavailable or KafkaRefused.
    """
    tables_known = known_tables(ingest, client, catalog, namespace, tables)
    there = tables_known.there
    require_put_back(
        ingest.name,
        there,
        on_rollback=ingest.on_rollback,
        branch=catalog.ref,
        dead_letters=tables_known.dead_letters,
    )
    known = standing(ingest.name, there, on_rollback=ingest.on_rollback)
    described = topics.describe(ingest.topics)
    require_alone(ingest.name, there, {one.name: one.incarnation for one in described.values()})
    now = {name: one.as_recorded(known.position) for name, one in described.items()}
    require_replayable(known, now.values())

    starts = _Starts(ingest, topics)
    plan = plan_batch(
        now.values(),
        known.start,
        starts.of,
        most_records=ingest.most_records,
        rules=ingest.rules,
        started=known.started,
    )
    if starts.notes:
        # Recorded at once, also where nothing waits: the group may be gone by the first record.
        plan = replace(plan, notes=(*starts.notes, *plan.notes), due=True)
    return Before(tables_known, known, now, plan)


class _Starts:
    """Where topics start that no table has a position in. `notes` reports starts at given offsets."""

    def __init__(self, ingest: Ingest, topics: Topics) -> None:
        self._ingest = ingest
        self._topics = topics
        self._committed: Mapping[str, Mapping[int, int]] | None = None
        self.notes: list[str] = []

    def of(self, topic: Topic) -> Offsets:
        """By partition the first offset that is read. Raises as `look`."""
        start = self._ingest.start
        if isinstance(start, CommittedOffsets):
            origin = f"the committed offsets of consumer group {start.group}"
            given = self._committed_by(start.group).get(topic.name, {})
        elif isinstance(start, StartingOffsets):
            origin, given = "the given offsets", start.offsets.get(topic.name, {})
        elif isinstance(start, datetime):
            return self._topics.at_time(topic, start)
        else:
            edge = topic.begins if start == "earliest" else topic.ends
            return {one: edge[one.partition] for one in topic.partitions()}
        offsets = starting_offsets(topic, given, start.otherwise, origin=origin)
        self.notes.append(f"Topic {topic.name} starts at {origin}: {format_offsets(offsets)}.")
        return offsets

    def _committed_by(self, group: str) -> Mapping[str, Mapping[int, int]]:
        if self._committed is None:
            committed = self._topics.committed(group, self._ingest.topics)
            if not any(committed.values()):
                raise StartOffsetsMissing(
                    f"Consumer group {group} has not committed any offset for topic"
                    f" {', '.join(self._ingest.topics)}.",
                    hint="Check the group's name with kafka-consumer-groups.sh --describe. Kafka deletes the"
                    " offsets of a group without members after offsets.retention.minutes.",
                )
            self._committed = committed
        return self._committed


def with_new_names(
    known: KnownTables,
    names: Names,
    incarnations: Mapping[str, str],
    client: NessieClient,
    catalog: NessieCatalog,
    namespace: str,
    tables: IcebergTables,
) -> KnownTables:
    """The tables, and those that records name for the first time, of as many as the ingestion may have.

    `incarnations` are Kafka's topic ids by name. Raises AnotherIngestion where one is there that somebody
    else fills, and PositionLost where one says that this ingestion has filled it, and the dead letters' table
    does not know it.
    """
    ingest = known.ingest
    more: dict[str, list[str]] = {family: list(found) for family, found in known.names.items()}
    for family, found in names.items():
        mine = more.setdefault(family, [])
        mine += sorted({*found} - {*mine})[: max(0, ingest.most_tables - len(mine))]
    grown = with_names(known, more, client, catalog, namespace, tables, make=ingest.create)
    new = {name: grown.there[name] for name in grown.wanted if name not in known.wanted}
    require_alone(ingest.name, new, incarnations)
    for name, table in new.items():
        if table is not None and LakeProperty.OFFSETS_PREFIX + ingest.name in table.metadata.properties:
            raise PositionLost(
                f"The table says that ingestion {ingest.name} has filled it, and {list(known.wanted)[-1]}"
                " does not have it among the ingestion's tables.",
                table=name,
                hint=f"Remove the property {LakeProperty.TABLES_PREFIX}{ingest.name} of the dead letters'"
                " table: the tables are then looked for. Or drop this table.",
                reason="not_among_tables",
            )
    return grown


@dataclass(frozen=True)
class Place:
    """Where a batch works: a branch, its catalogue and sessions, and who it is.

    `origin` goes into the summary of each snapshot, `properties` into each commit.
    """

    lake: Lakehouse
    branch: str
    catalog: NessieCatalog
    session: Callable[[], SparkSession]
    run_id: str
    origin: Mapping[str, str]
    properties: Mapping[str, str]
    trims: bool = False
    """Whether old snapshots are taken out of tables that have many. A replay would not carry that."""

    def with_new_names(
        self, known: KnownTables, names: Names, incarnations: Mapping[str, str], tables: IcebergTables
    ) -> KnownTables:
        """`with_new_names` on this branch."""
        space = self.lake.settings.default_namespace
        return with_new_names(known, names, incarnations, self.lake.nessie, self.catalog, space, tables)
