"""One batch from its plan to its commit on a branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from branchlake_dagster.ingest.batch.before import Before, KnownTables
from branchlake_dagster.ingest.batch.commit import TableChange, commit_tables
from branchlake_dagster.ingest.batch.merge import beside, merge, staging_table, staging_tables
from branchlake_dagster.ingest.batch.place import Place
from branchlake_dagster.ingest.batch.records import Records
from branchlake_dagster.ingest.batch.settle import settle, targets_of
from branchlake_dagster.ingest.batch.waiting import with_waiting
from branchlake_dagster.ingest.converting.avro import RegistryAvro
from branchlake_dagster.ingest.declaring.families import Expanded
from branchlake_dagster.ingest.positions.offsets import Offsets, TopicPartition, in_words
from branchlake_dagster.ingest.positions.planning import BatchPlan
from branchlake_dagster.ingest.positions.recorded import Recorded
from branchlake_dagster.ingest.positions.topic import topic_id
from branchlake_dagster.ingest.scanning.scan import Scanned, scan, worker_targets
from branchlake_dagster.ingest.scanning.targets import Identifier, Target
from branchlake_dagster.ingest.scanning.writer import Work
from branchlake_dagster.lakehouse.nessie.model import Reference
from branchlake_dagster.publication.rebase.replay import IcebergTables


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
    def current(self) -> Offsets:
        """How far the tables are in the topics as they are now: nothing of what was before them."""
        now = {one for topic in self.plan.topics.values() for one in topic.partitions()}
        return {one: offset for one, offset in self.recorded.offsets.items() if one in now}

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
    read again. Raises what `settle` raises; LandingDamaged where files had other records than their names
    say; TopicReplaced and EarlierAttemptLate where the world has changed meanwhile.
    """
    batch = commit_id or str(uuid.uuid4())
    opened = tables or IcebergTables(place.catalog)
    ingest = before.ingest
    reading = ingest.format.fresh() if isinstance(ingest.format, RegistryAvro) else ingest.format
    frame = None
    if before.plan.ranges:
        frame = records.frame(place.session(), before.plan.ranges, tasks=tasks)
    if frame is not None and before.standing.replayed:
        frame = with_waiting(frame, before.known.anchor, before.plan.ranges)
    if frame is None:
        targets = targets_of(before.known, place, None, reading)
        return _committed(before, place, targets, Scanned(), {}, batch, opened)
    staged: dict[int, tuple[Identifier, str]] = {}

    def read(known: KnownTables, targets: Sequence[Target]) -> Scanned:
        nonlocal staged
        staged = {
            number: staging_table(place.catalog, one, batch)
            for number, one in enumerate(targets[:-1])
            if one.declared is not None and one.declared.mode != "append"
        }
        work = Work(
            batch,
            list(ingest.topics),
            [before.plan.topics[name].incarnation for name in ingest.topics],
            worker_targets(
                targets, {number: (text, beside(targets[number])) for number, (_, text) in staged.items()}
            ),
            place.lake.settings.file_io_properties(),
            int(now().timestamp() * 1_000_000),
            len(ingest.families),
            ingest.most_tables,
            ingest.most_columns,
        )
        floors = before.standing.floors([one.name for one in targets], before.plan.ranges)
        return scan(frame, known.ingest, reading, targets, floors, work)

    incarnations = {name: topic_id(topic.incarnation) for name, topic in before.topics.items()}
    with records.reading():
        settled = settle(before.known, place, frame, reading, read, incarnations, opened)
    records.require(before.plan.ranges, settled.scanned.counts["records"])
    before, waiting = replace(before, known=settled.known), {n: one for n, (one, _) in staged.items()}
    return _committed(
        before, place, settled.targets, settled.scanned, waiting, batch, opened, settled.left_out
    )


def _committed(
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    staged: Mapping[int, Identifier],
    batch: str,
    tables: IcebergTables,
    left_out: Sequence[str] = (),
) -> BatchResult:
    notes = (*before.plan.notes, *left_out)
    recorded = Recorded(
        before.standing.after(before.plan), batch, place.run_id, _valid_through(before, scanned)
    )
    head = _commit(before, place, targets, scanned, recorded, staged, tables)
    return BatchResult(batch, before.ingest, before.plan, targets, scanned, recorded, head, notes)


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
    merged_into = [one.identifier for one in targets if one.declared and one.declared.mode != "append"]
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
        # Of an attempt that was given up one may have come late: none must be published.
        dropped=staging_tables(place.lake.nessie, place.branch, merged_into),
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
