"""One batch from its plan to its commit on a branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from branchlake_dagster.ingest.batch.commit import TableChange, commit_tables
from branchlake_dagster.ingest.batch.merge import merge, staging_table
from branchlake_dagster.ingest.batch.records import Records
from branchlake_dagster.ingest.batch.scan import Scanned, scan, worker_targets
from branchlake_dagster.ingest.batch.targets import Evolving, Identifier, Target, evolved, load, prepare
from branchlake_dagster.ingest.batch.writer import Work
from branchlake_dagster.ingest.converting.avro import RegistryAvro
from branchlake_dagster.ingest.converting.columns import ddl
from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.converting.types import found_types
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.kafka.topics import Topics
from branchlake_dagster.ingest.positions.offsets import Offsets, TopicPartition, in_words
from branchlake_dagster.ingest.positions.planning import BatchPlan, plan_batch
from branchlake_dagster.ingest.positions.recorded import Recorded
from branchlake_dagster.ingest.positions.standing import (
    Standing,
    require_alone,
    require_replayable,
    standing,
)
from branchlake_dagster.ingest.positions.topic import Topic
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Reference
from branchlake_dagster.publication.rebase.replay import IcebergTables


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


@dataclass(frozen=True)
class Before:
    """What is known before a batch: the tables, how far they are, the topics, and what comes next."""

    tables: Mapping[str, Table | None]
    standing: Standing
    topics: Mapping[str, Topic]
    plan: BatchPlan


@dataclass(frozen=True)
class BatchResult:
    """What a batch did on its branch."""

    commit_id: str
    plan: BatchPlan
    targets: Sequence[Target]
    scanned: Scanned
    recorded: Recorded
    head: Reference
    notes: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """Records read."""
        return self.scanned.counts["records"]

    @property
    def dead(self) -> int:
        """Dead letters written."""
        return self.scanned.counts["dead"]


def look(
    ingest: Ingest,
    client: NessieClient,
    catalog: NessieCatalog,
    wanted: Mapping[str, Identifier],
    topics: Topics,
    tables: IcebergTables | None = None,
) -> Before:
    """Where an ingestion stands on a reference, and its next batch. Changes nothing.

    Raises PositionLost, TopicChanged, AnotherIngestion, KafkaUnavailable or KafkaRefused.
    """
    there = load(client, catalog, wanted, tables or IcebergTables(catalog))
    known = standing(ingest.name, there, on_rollback=ingest.on_rollback)
    described = topics.describe(ingest.topics)
    require_alone(ingest.name, there, {one.name: one.incarnation for one in described.values()})
    now = {name: one.as_recorded(known.position) for name, one in described.items()}
    require_replayable(known, now.values())

    def first(topic: Topic) -> Offsets:
        if ingest.start == "earliest":
            return {one: topic.begins[one.partition] for one in topic.partitions()}
        if ingest.start == "latest":
            return {one: topic.ends[one.partition] for one in topic.partitions()}
        return topics.at_time(topic, ingest.start)

    plan = plan_batch(now.values(), known.start, first, most_records=ingest.most_records, rules=ingest.rules)
    return Before(there, known, now, plan)


def ingest_batch(
    ingest: Ingest,
    before: Before,
    place: Place,
    records: Records,
    wanted: Mapping[str, Identifier],
    *,
    tasks: int,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    commit_id: str | None = None,
    tables: IcebergTables | None = None,
) -> BatchResult:
    """Read the planned offsets into the tables on the branch, with the offsets, in one commit.

    With tables whose rows are merged there is one commit for each of them before it. Nothing of it is on
    `main`.
    """
    batch = commit_id or str(uuid.uuid4())
    session = place.session()
    frame = records.frame(session, before.plan.ranges, tasks=tasks) if before.plan.ranges else None
    reading = ingest.format.fresh() if isinstance(ingest.format, RegistryAvro) else ingest.format
    found: dict[str, StructType] = {}
    for name, declared in zip(wanted, ingest.tables, strict=False):
        if before.tables[name] is None and ingest.create:
            found[name] = (
                session.createDataFrame([], ddl(list(declared.columns.items()))).schema
                if declared.columns or frame is None
                else found_types(frame, reading, envelope=ingest.envelope is not None)
            )
    targets = prepare(ingest, place.catalog, before.tables, wanted, found)
    scanned, staged = Scanned(), {}
    if frame is not None:
        for attempt in range(2):
            staged = {
                number: staging_table(place.catalog, one)
                for number, one in enumerate(targets[:-1])
                if one.declared is not None and one.declared.mode != "append"
            }
            work = Work(
                batch,
                list(ingest.topics),
                [before.topics[name].incarnation for name in ingest.topics],
                worker_targets(targets, {number: text for number, (_, text) in staged.items()}),
                place.lake.settings.file_io_properties(),
                int(now().timestamp() * 1_000_000),
            )
            floors = before.standing.floors([one.name for one in targets], before.plan.ranges)
            scanned = scan(frame, ingest, reading, targets, floors, work)
            evolving = scanned.evolving()
            # What did not fit does then, and the batch is read again; but for fields that are always null.
            grown = [] if attempt else _evolved(frame, reading, targets, evolving)
            if not grown:
                break
            targets = grown
    recorded = Recorded(
        before.standing.after(before.plan),
        batch,
        place.run_id,
        _valid_through(before, scanned),
    )
    names = {number: identifier for number, (identifier, _) in staged.items()}
    opened = tables or IcebergTables(place.catalog)
    head = _commit(ingest, before, place, targets, scanned, recorded, names, opened)
    return BatchResult(batch, before.plan, targets, scanned, recorded, head, before.plan.notes)


def _evolved(
    frame: DataFrame, reading: Format, targets: Sequence[Target], evolving: Mapping[int, Evolving]
) -> list[Target]:
    """The targets as the records want them; none where that changes nothing."""
    found = list(targets)
    for number, wants in evolving.items():
        new = found_types(frame, reading, envelope=False, only=wants.add)
        if new.fields or wants.widen or wants.relax:
            found[number] = evolved(targets[number], wants, new)
    return found if any(one is not other for one, other in zip(found, targets, strict=True)) else []


def _commit(
    ingest: Ingest,
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    recorded: Recorded,
    staged: Mapping[int, Identifier],
    tables: IcebergTables,
) -> Reference:
    anchor = len(targets) - 1
    changes = []
    for number, one in enumerate(targets):
        files = scanned.files.get(number, [])
        if number in staged or not (files or number == anchor or one.name in before.standing.replayed):
            continue
        # A table that is filled again says how far it is even where there was nothing for it.
        mode = {"branchlake.write_mode": "append", "branchlake.asset": "/".join(one.identifier)}
        changes.append(
            TableChange(
                one.identifier,
                one.table,
                files,
                before.standing.recorded(one.name, recorded, before.plan),
                {**place.origin, **mode},
            )
        )
    if any(scanned.files.get(number) for number in staged):
        _merge_staged(ingest, before, place, targets, scanned, recorded, staged, tables)
    for number in staged:
        one = targets[number]
        if scanned.files.get(number) or one.name in before.standing.replayed:
            fresh = place.catalog.load_table(one.identifier)
            mine = before.standing.recorded(one.name, recorded, before.plan)
            changes.append(TableChange(one.identifier, fresh, (), mine))
    return commit_tables(
        place.lake.nessie,
        place.catalog,
        place.branch,
        changes,
        ingestion=ingest.name,
        message=f"Ingest {ingest.name}: {in_words(before.plan.ranges)}",
        properties=place.properties,
        tables=tables,
        keep=ingest.keep_snapshots if place.trims else None,
        dropped=list(staged.values()),
    )


def _merge_staged(
    ingest: Ingest,
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    recorded: Recorded,
    staged: Mapping[int, Identifier],
    tables: IcebergTables,
) -> None:
    waiting = [
        TableChange(identifier, place.catalog.load_table(identifier), scanned.files[number])
        for number, identifier in staged.items()
        if scanned.files.get(number)
    ]
    commit_tables(
        place.lake.nessie,
        place.catalog,
        place.branch,
        waiting,
        ingestion=ingest.name,
        message=f"Ingest {ingest.name}: rows to merge",
        properties=place.properties,
        tables=tables,
    )
    session = place.session()
    for number, identifier in staged.items():
        if not scanned.files.get(number):
            continue
        one = targets[number]
        assert one.declared is not None  # noqa: S101 - dead letters are not staged
        origin = {
            **place.origin,
            **before.standing.recorded(one.name, recorded, before.plan).summary(ingest.name),
            "branchlake.write_mode": "upsert",
            "branchlake.keys": ",".join(one.declared.keys),
            "branchlake.asset": "/".join(one.identifier),
        }
        merge(session, one, identifier, origin)


def _valid_through(before: Before, scanned: Scanned) -> int | None:
    """The least of the partitions' latest times, ms since 1970; None where one did not take part."""
    every: list[TopicPartition] = [one for topic in before.topics.values() for one in topic.partitions()]
    latest = [scanned.latest.get(f"{one.topic}/{one.partition}") for one in every]
    return min((at for at in latest if at is not None), default=None) if None not in latest else None
