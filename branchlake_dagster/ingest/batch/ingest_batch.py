"""One batch from its plan to its commit on a branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.ingest.batch.before import Before, KnownTables, with_new_names
from branchlake_dagster.ingest.batch.commit import TableChange, commit_tables
from branchlake_dagster.ingest.batch.merge import merge, staging_table
from branchlake_dagster.ingest.batch.records import Records
from branchlake_dagster.ingest.converting.avro import RegistryAvro
from branchlake_dagster.ingest.converting.columns import ddl
from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.converting.types import found_types
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.declaring.families import Expanded, Names
from branchlake_dagster.ingest.declaring.routing import route, taken
from branchlake_dagster.ingest.positions.offsets import TopicPartition, in_words
from branchlake_dagster.ingest.positions.planning import BatchPlan
from branchlake_dagster.ingest.positions.recorded import Recorded
from branchlake_dagster.ingest.scanning.scan import Scanned, scan, worker_targets
from branchlake_dagster.ingest.scanning.targets import Evolving, Identifier, Target, evolved, prepare
from branchlake_dagster.ingest.scanning.writer import Work
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.lakehouse.nessie.model import Reference
from branchlake_dagster.publication.rebase.replay import IcebergTables

_MOST_TURNS = 8
"""So often the tables are evolved within a batch; each turn adds a column or more, or is the last."""


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


@dataclass(frozen=True)
class BatchResult:
    """What a batch did on its branch."""

    commit_id: str
    ingest: Expanded
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


def ingest_batch(
    before: Before,
    place: Place,
    records: Records,
    *,
    tasks: int,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    commit_id: str | None = None,
    tables: IcebergTables | None = None,
) -> BatchResult:
    """Read the planned offsets into the tables on the branch, with the offsets, in one commit.

    With tables whose rows are merged there is one commit for each of them before it. Nothing of it is on
    `main`. Where records want other columns, or tables that are not known, those are made and the batch is
    read again. Raises LandingDamaged where files had other records than their names say.
    """
    batch = commit_id or str(uuid.uuid4())
    opened = tables or IcebergTables(place.catalog)
    ingest = before.ingest
    reading = ingest.format.fresh() if isinstance(ingest.format, RegistryAvro) else ingest.format
    frame = None
    if before.plan.ranges:
        frame = records.frame(place.session(), before.plan.ranges, tasks=tasks)
    with records.reading():
        targets = targets_of(before.known, place, frame, reading)
    if frame is None:
        return _committed(before, place, targets, Scanned(), {}, batch, opened)
    renamed, grown = False, 0
    while True:
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
            len(ingest.families),
            ingest.most_tables,
        )
        floors = before.standing.floors([one.name for one in targets], before.plan.ranges)
        with records.reading():
            scanned = scan(frame, before.ingest, reading, targets, floors, work)
        if not renamed and (names := scanned.names(list(ingest.families))):
            renamed = True
            topics = {name: topic.incarnation for name, topic in before.topics.items()}
            known = place.with_new_names(before.known, names, topics, opened)
            if len(known.wanted) > len(before.wanted):
                before = replace(before, known=known)
                targets = targets_of(known, place, frame, reading)
                continue
        # Of many new fields the first records may have only some. Fields that are always null stay out.
        if grown < _MOST_TURNS and (
            evolved_targets := _evolved(frame, before.ingest, reading, targets, scanned.evolving())
        ):
            grown, targets = grown + 1, evolved_targets
            continue
        break
    records.require(before.plan.ranges, scanned.counts["records"])
    identifiers_of_staged = {number: identifier for number, (identifier, _) in staged.items()}
    return _committed(before, place, targets, scanned, identifiers_of_staged, batch, opened)


def targets_of(known: KnownTables, place: Place, frame: DataFrame | None, reading: Format) -> list[Target]:
    """The targets; tables that are not there are made, of the types that the records of `frame` have."""
    ingest, found = known.ingest, {}
    for name, declared in zip(known.wanted, ingest.tables, strict=False):
        if known.there[name] is None and ingest.create:
            found[name] = (
                place.session().createDataFrame([], ddl(list(declared.columns.items()))).schema
                if declared.columns or frame is None
                else found_types(
                    frame,
                    reading,
                    envelope=ingest.envelope is not None,
                    of=taken(declared, route(ingest, reading)),
                )
            )
    return prepare(ingest, place.catalog, known.there, known.wanted, found)


def _committed(
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    staged: Mapping[int, Identifier],
    batch: str,
    tables: IcebergTables,
) -> BatchResult:
    recorded = Recorded(
        before.standing.after(before.plan), batch, place.run_id, _valid_through(before, scanned)
    )
    head = _commit(before, place, targets, scanned, recorded, staged, tables)
    return BatchResult(batch, before.ingest, before.plan, targets, scanned, recorded, head, before.plan.notes)


def _evolved(
    frame: DataFrame,
    ingest: Ingest,
    reading: Format,
    targets: Sequence[Target],
    evolving: Mapping[int, Evolving],
) -> list[Target]:
    """The targets as the records want them; none where that changes nothing."""
    found = list(targets)
    for number, wants in evolving.items():
        declared = targets[number].declared
        assert declared is not None  # noqa: S101 - dead letters take everything
        of = taken(declared, route(ingest, reading))
        new = found_types(frame, reading, envelope=False, only=wants.add, of=of)
        if new.fields or wants.widen or wants.relax:
            found[number] = evolved(targets[number], wants, new)
    return found if any(one is not other for one, other in zip(found, targets, strict=True)) else []


def _commit(
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    recorded: Recorded,
    staged: Mapping[int, Identifier],
    tables: IcebergTables,
) -> Reference:
    anchor, ingest = len(targets) - 1, before.ingest
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
                before.known.told if number == anchor else {},
            )
        )
    if any(scanned.files.get(number) for number in staged):
        _merge_staged(before, place, targets, scanned, recorded, staged, tables)
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
        ingestion=before.ingest.name,
        message=f"Ingest {before.ingest.name}: rows to merge",
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
            **before.standing.recorded(one.name, recorded, before.plan).summary(before.ingest.name),
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
