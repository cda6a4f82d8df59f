"""One batch from its plan to its commit on a branch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce

from pyiceberg.table import Table
from pyspark.sql import DataFrame

from branchlake_dagster.ingest.batch_commit import (
    TableChange,
    beside,
    commit_tables,
    merge,
    staging_table,
    staging_tables,
)
from branchlake_dagster.ingest.batch_context import Before, KnownTables, Place
from branchlake_dagster.ingest.batch_tables import Identifier, Target
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import Expanded
from branchlake_dagster.ingest.division import Position, divide, joined, without
from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import Offsets, Ranges, Recorded, in_words, merged, topic_id
from branchlake_dagster.ingest.planning import BatchPlan, latest_times, narrowed, valid_through_ms
from branchlake_dagster.ingest.record_frames import RECORD_SCHEMA, Records
from branchlake_dagster.ingest.reprocessing import with_waiting
from branchlake_dagster.ingest.scan import (
    FailedScans,
    Scanned,
    delete_files,
    delete_staging_metadata,
    deleted_on_failure,
    scan,
    worker_targets,
)
from branchlake_dagster.ingest.schema_evolution import Settled, settle, targets_of
from branchlake_dagster.ingest.unwritable_records import (
    UNWRITABLE,
    UnwritableRecord,
    due_tables,
    is_caused_by_records,
    letters_of,
    note_of,
    reason_of,
    restore_tables,
)
from branchlake_dagster.ingest.worker_writer import Work, dead_letter_files
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.replay import IcebergTables
from branchlake_dagster.stored_names import LakeProperty


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
    read again. Records that fail it become dead letters: it is divided until each stands alone, in at most
    `MOST_PASSES` passes, and perhaps only its first part is written. Files that no table keeps are deleted:
    data files of earlier passes, of rows that were merged, of scans that failed, and of a batch that has
    certainly failed; the metadata of the tables in which rows were staged, once the branch has dropped them.

    Raises what `settle` raises; LandingDamaged where files had other records than their names say;
    TopicReplaced and EarlierAttemptLate where the world has changed meanwhile.
    """
    batch = commit_id or str(uuid.uuid4())
    opened = tables or IcebergTables(place.catalog)
    ingest = before.ingest
    reading = ingest.format.fresh() if isinstance(ingest.format, RegistryAvro) else ingest.format
    started_us = int(now().timestamp() * 1_000_000)
    if not before.plan.ranges:
        targets = targets_of(before.known, place, None, reading)
        return _committed(before, place, targets, Scanned(), {}, [], batch, opened, started_us=started_us)
    passes = _Passes(before, place, records, reading, tasks, batch, started_us, opened)
    # A pass may make tables and columns. Before the first one, for the case that its records fail it.
    start = place.lake.nessie.reference(place.branch).hash
    try:
        passed = passes.over([before.plan.ranges], before.known)
    except Exception as error:
        if not is_caused_by_records(error):
            raise
        before, passed = _divided(before, passes, start, error)
    finally:
        passes.failed_scans.delete_files()
    settled = passed.settled
    scanned, written = settled.scanned, settled.targets
    with deleted_on_failure(scanned, written):
        records.require(before.plan.ranges, scanned.counts["records"])
    before, notes = replace(before, known=settled.known), (*settled.left_out, *passed.notes)
    # Those of staging tables may be in a commit on the branch, which is swept when it is discarded.
    with deleted_on_failure(scanned, written, {*scanned.files} - {*passed.staged}):
        result = _committed(
            before,
            place,
            written,
            scanned,
            passed.staged,
            passes.staging,
            batch,
            opened,
            notes,
            started_us=started_us,
        )
    delete_files(scanned, written, {*passed.staged})
    delete_staging_metadata(passes.staging)
    return result


@dataclass(frozen=True)
class _Passed:
    """A pass that succeeded; `staged` has by target the table in which its rows wait to be merged."""

    settled: Settled
    staged: Mapping[int, Identifier]
    notes: tuple[str, ...] = ()


class _Passes:
    """Passes over some of a batch's records."""

    def __init__(
        self,
        before: Before,
        place: Place,
        records: Records,
        reading: Format,
        tasks: int,
        batch: str,
        started_us: int,
        tables: IcebergTables,
    ) -> None:
        self._before = before
        self._place = place
        self._records = records
        self._reading = reading
        self._tasks = tasks
        self._batch = batch
        self._started_us = started_us
        self._tables = tables
        self.staging: list[Table] = []
        """The staging tables that all passes created, as they were then, and with what was appended since."""
        self.failed_scans = FailedScans()

    def over(self, pieces: Sequence[Ranges], known: KnownTables) -> _Passed:
        """Write the records of these ranges into the tables. Nothing is committed but tables and columns."""
        frames = [self._records.frame(self._place.session(), one, tasks=self._tasks) for one in pieces]
        frame = reduce(DataFrame.unionAll, frames)
        if self._before.standing.replayed:
            frame = with_waiting(frame, self._before.known.anchor, joined(pieces))
        return self._over(frame, known)

    def over_one_without_value(self) -> None:
        """Make a pass over one record that is no different from a tombstone.

        If it fails too, not the records are the cause but Spark, the warehouse or a table's declaration.
        """
        one = min(self._before.plan.ranges)
        record = (one.topic, one.partition, self._before.plan.ranges[one].start, None, None, None, None)
        frame = self._place.session().createDataFrame([record], RECORD_SCHEMA)
        tried = self._over(frame, self._before.known.without_unknown_columns()).settled
        delete_files(tried.scanned, tried.targets)

    def _over(self, frame: DataFrame, known: KnownTables) -> _Passed:
        staged: dict[int, tuple[Identifier, Table]] = {}

        def read(known: KnownTables, targets: Sequence[Target]) -> Scanned:
            nonlocal staged
            staged = {
                number: staging_table(self._place.catalog, one, self._batch)
                for number, one in enumerate(targets[:-1])
                if one.declared is not None and one.declared.mode != "append"
            }
            self.staging += [table for _, table in staged.values()]
            beside_rows = {
                number: (table.metadata.model_dump_json(), beside(targets[number]))
                for number, (_, table) in staged.items()
            }
            work = self._work(targets, beside_rows)
            floors = self.floors([one.name for one in targets])
            with self.failed_scans.remembering(work, targets[-1].table.io):
                return scan(frame, known.ingest, self._reading, targets, floors, work)

        topics = self._before.topics
        incarnations = {name: topic_id(topic.incarnation) for name, topic in topics.items()}
        with self._records.reading():
            settled = settle(known, self._place, frame, self._reading, read, incarnations, self._tables)
        return _Passed(settled, {number: identifier for number, (identifier, _) in staged.items()})

    def of_dead_letters_alone(self) -> _Passed:
        """A pass over nothing."""
        known = self._before.known.without_unknown_columns()
        targets = targets_of(known, self._place, None, self._reading)
        return _Passed(Settled(known, targets, Scanned()), {})

    def floors(self, tables: Sequence[str]) -> dict[str, Offsets]:
        """See `Standing.floors`."""
        return self._before.standing.floors(tables, self._before.plan.ranges)

    def _work(self, targets: Sequence[Target], staged: Mapping[int, tuple[str, Mapping[str, str]]]) -> Work:
        ingest, plan = self._before.ingest, self._before.plan
        return Work(
            self._batch,
            list(ingest.topics),
            [plan.topics[name].incarnation for name in ingest.topics],
            worker_targets(targets, staged),
            self._place.lake.settings.worker_file_io_properties(),
            self._started_us,
            len(ingest.families),
            ingest.most_tables,
            ingest.most_columns,
        )

    def restore(self, at_hash: str) -> None:
        """Undo what a pass has made of tables and columns."""
        restore_tables(
            self._place.lake.nessie,
            self._place.branch,
            at_hash,
            ingestion=self._before.ingest.name,
            properties=self._place.properties,
        )

    def with_letters(self, passed: _Passed, unwritable: Mapping[Position, Exception]) -> _Passed:
        """The pass and the dead letters of records that it did not read."""
        if not unwritable:
            return passed
        targets, scanned = passed.settled.targets, passed.settled.scanned
        dead, dead_name = passed.settled.known.anchor, targets[-1].name
        floors = self.floors([one.name for one in targets])
        raw = {(one.topic, one.partition, one.offset): one for one in self._records.fetch(unwritable)}
        letters = [
            UnwritableRecord(
                raw[one.topic, one.partition, offset],
                one.incarnation,
                error,
                due_tables((one, offset), floors, dead, dead_name),
            )
            for (one, offset), error in sorted(unwritable.items(), key=lambda item: item[0])
        ]
        columns = letters_of(letters, batch=self._batch, received_at_us=self._started_us)
        count = len(columns["offset"])
        if count:
            files = dead_letter_files(self._work(targets, {}), columns, count)
            scanned.files.setdefault(len(targets) - 1, []).extend(files)
        scanned.counts.update({"records": len(letters), "dead": count, f"dead/{UNWRITABLE}": count})
        return replace(passed, notes=(note_of(unwritable),))


def _divided(before: Before, passes: _Passes, start: str, error: Exception) -> tuple[Before, _Passed]:
    """The batch without the records that fail it, which become dead letters; perhaps only its first part.

    `start` is the branch's hash before the first pass, `error` what that one failed with. Raises `error`
    where a pass over one harmless record fails too, and where no part of the batch can be written.
    """
    # A table that no pass has written may be declared wrongly: each record fails alone, and none is at fault.
    proved = len(before.known.without_unknown_columns().wanted) == len(before.known.wanted)

    def error_of(ranges: Ranges) -> Exception | None:
        nonlocal proved
        try:
            tried = passes.over([ranges], before.known).settled
            delete_files(tried.scanned, tried.targets)
            proved = True
        except ColumnsUnknown:
            return None  # these records alone make no table, and together with the others they may
        except Exception as failure:
            if not is_caused_by_records(failure):
                raise
            return failure
        finally:
            passes.restore(start)
        return None

    passes.restore(start)
    try:
        passes.over_one_without_value()
    except Exception as other:
        error.add_note(f"A pass over one record without a value failed too: {reason_of(other)}")
        raise error from other
    finally:
        passes.restore(start)
    division = divide(before.plan.ranges, error_of)
    if not proved:
        raise error
    for parts in (division.resolved, division.resolved[:1]):
        ranges = joined(parts)
        unwritable = {one: cause for one, cause in division.unwritable.items() if _is_in(one, ranges)}
        pieces = without(ranges, unwritable)
        try:
            passed = passes.over(pieces, before.known) if pieces else passes.of_dead_letters_alone()
        except Exception as failure:
            passes.restore(start)
            if not is_caused_by_records(failure):
                raise
            continue
        before = replace(before, plan=narrowed(before.plan, ranges))
        with deleted_on_failure(passed.settled.scanned, passed.settled.targets):
            return before, passes.with_letters(passed, unwritable)
    raise error


def _is_in(position: Position, ranges: Ranges) -> bool:
    span = ranges.get(position[0])
    return span is not None and span.start <= position[1] < span.end


def _committed(
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    staged: Mapping[int, Identifier],
    staging: list[Table],
    batch: str,
    tables: IcebergTables,
    more_notes: Sequence[str] = (),
    *,
    started_us: int,
) -> BatchResult:
    notes = (*before.plan.notes, *more_notes)
    recorded = _recorded(before, scanned, batch, place.run_id, now_ms=started_us // 1000)
    head = _commit(before, place, targets, scanned, recorded, staged, staging, tables)
    return BatchResult(batch, before.ingest, before.plan, targets, scanned, recorded, head, notes)


def _commit(
    before: Before,
    place: Place,
    targets: Sequence[Target],
    scanned: Scanned,
    recorded: Recorded,
    staged: Mapping[int, Identifier],
    staging: list[Table],
    tables: IcebergTables,
) -> Reference:
    anchor, ingest = len(targets) - 1, before.ingest
    changes = []
    for number, one in enumerate(targets):
        files = scanned.files.get(number, [])
        if number in staged or not (files or number == anchor or one.name in before.standing.replayed):
            continue
        # A table that is filled again says how far it is even where there was nothing for it.
        mode = {LakeProperty.WRITE_MODE: "append", LakeProperty.ASSET: "/".join(one.identifier)}
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
        staging += _merge_staged(before, place, targets, scanned, recorded, staged, tables)
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
) -> list[Table]:
    """Append the staged rows to their tables and merge these; the staging tables with what was appended."""
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
    filled = [place.catalog.load_table(one.identifier) for one in waiting]
    session = place.session()
    for number, identifier in staged.items():
        if not scanned.files.get(number):
            continue
        one = targets[number]
        assert one.declared is not None  # noqa: S101 - dead letters are not staged
        origin = {
            **place.origin,
            **before.standing.recorded(one.name, recorded, before.plan).summary(before.ingest.name),
            LakeProperty.WRITE_MODE: "upsert",
            LakeProperty.KEYS: ",".join(one.declared.keys),
            LakeProperty.ASSET: "/".join(one.identifier),
        }
        merge(session, one, identifier, origin)
    return filled


def _recorded(before: Before, scanned: Scanned, batch: str, run_id: str, *, now_ms: int) -> Recorded:
    """What the tables record after the batch; `now_ms` is the time at which it began, ms since 1970."""
    known, plan, idle_after = before.standing, before.plan, before.ingest.idle_after
    reached, topics = known.after(plan), list(plan.topics.values())
    latest = latest_times(known.latest_ms, scanned.latest, topics, now_ms=now_ms)
    through = valid_through_ms(
        topics,
        latest,
        reached,
        known.valid_through_ms,
        now_ms=now_ms,
        idle_after_ms=None if idle_after is None else int(idle_after.total_seconds() * 1000),
    )
    return Recorded(
        reached,
        batch,
        run_id,
        through,
        started=merged(known.started, plan.started),
        latest_ms=latest,
        dead_letters=before.known.dead_letters,
    )
