"""Dead letters that are reprocessed, and those that wait while their table is filled again.

Dead letters put back through the input, after whatever kept them out was put right.

Why it may be done twice: a letter is marked with the batch that takes it up (`reprocessed_in`), and only
letters without a mark are taken up. Mark and rows are on one branch, and come to `main` in one commit or not
at all. Of two that take up the same letters at once both rewrite the same data files of the dead letters'
table, and set its property `branchlake.reprocessed.…` to different values: the second one is not published.
An attempt of the same run that comes after one which had committed finds its own property, and does nothing.
Tables that took rows have that property too, with the snapshot: so a roll-back of these, or of the marks, is
seen, by no offset of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_commit import TableChange, commit_tables
from branchlake_dagster.ingest.batch_context import KnownTables, Place, known_tables
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.binary_formats import RegistryAvro
from branchlake_dagster.ingest.declaration import Expanded, Ingest
from branchlake_dagster.ingest.errors import LettersLeftOut, PositionLost
from branchlake_dagster.ingest.offsets import OffsetRange, Offsets, Ranges, Recorded, TopicPartition, topic_id
from branchlake_dagster.ingest.prepared_records import FOR, WAITS
from branchlake_dagster.ingest.progress import OnRollback, put_back, require_put_back, standing
from branchlake_dagster.ingest.scan import FailedScans, Scanned, scan, worker_targets
from branchlake_dagster.ingest.schema_evolution import Settled, settle
from branchlake_dagster.ingest.worker_writer import Work
from branchlake_dagster.publication.replay import IcebergTables
from branchlake_dagster.spark.session import dotted
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.spark_frames import session_properties


@dataclass(frozen=True)
class Chosen:
    """Which dead letters: of these kinds, of this table, received from `since` on and before `until`.

    What is None or empty does not choose. Letters that were taken up before are never chosen.
    """

    kinds: Sequence[str] = ()
    table: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def text(self) -> str:
        """As a tag of a run has it."""
        times = {name: moment and moment.isoformat() for name, moment in self._times().items()}
        return json.dumps({"kinds": list(self.kinds), "table": self.table, **times})

    @classmethod
    def from_text(cls, text: str) -> Chosen:
        """Back again."""
        told = json.loads(text)
        times = {
            name: datetime.fromisoformat(told[name]) if told[name] else None for name in ("since", "until")
        }
        return cls(tuple(told["kinds"]), told["table"], **times)

    def _times(self) -> dict[str, datetime | None]:
        return {"since": self.since, "until": self.until}

    def condition(self, known: KnownTables) -> tuple[str, dict[str, object]]:
        """The condition in SQL, and its arguments.

        Without the letters of tables whose rows take each other's place: a newer record may have.
        """
        ingest = known.ingest
        names = [n for n, one in zip(known.wanted, ingest.tables, strict=False) if one.mode == "append"]
        if self.table is not None and self.table not in names:
            raise ConfigurationError(
                f"Letters of {self.table} cannot be put back by ingestion {ingest.name}.",
                table=self.table,
                hint=f"Name one of its tables of mode append: {', '.join(names) or 'there is none'}. Into the"
                " others a newer record may have been merged since; produce the record again instead.",
                reason="not_reprocessable",
            )
        parts = ["reprocessed_in IS NULL"]
        arguments: dict[str, object] = {}
        wanted = names if self.table is None else [self.table]
        own = " OR ".join(f"table = :table{number}" for number in range(len(wanted)))
        arguments |= {f"table{number}": name for number, name in enumerate(wanted)}
        anyone = "table IS NULL" if self.table is None else "false"
        parts.append(f"({anyone}{' OR ' + own if own else ''})")
        if self.kinds:
            parts.append(f"error_kind IN ({', '.join(f':kind{n}' for n in range(len(self.kinds)))})")
            arguments |= {f"kind{number}": kind for number, kind in enumerate(self.kinds)}
        for sign, name, moment in ((">=", "since", self.since), ("<", "until", self.until)):
            if moment is not None:
                parts.append(f"received_at {sign} :{name}")
                arguments[name] = moment
        return " AND ".join(parts), arguments


@dataclass(frozen=True)
class Reprocessed:
    """What became of the letters that were put back."""

    ingest: Expanded
    targets: Sequence[Target]
    scanned: Scanned


def waiting_letters(
    session: SparkSession, known: KnownTables, chosen: Chosen
) -> list[tuple[str | None, str, int]]:
    """How many letters are chosen, by table and kind."""
    condition, arguments = chosen.condition(known)
    dead = dotted(list(known.wanted.values())[-1])
    told = session.sql(
        f"SELECT table, error_kind, count(*) FROM nessie.{dead} WHERE {condition}"  # noqa: S608 - by name
        " GROUP BY 1, 2 ORDER BY 1, 2",
        args=arguments,
    )
    return [(row[0], row[1], row[2]) for row in told.collect()]


def reprocess_batch(
    ingest: Ingest,
    place: Place,
    chosen: Chosen,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Reprocessed | None:
    """Put the chosen dead letters into their tables on the branch; what fails again is a new dead letter.

    None: the branch has it from an earlier attempt, or there are none. Raises PositionLost while a table is
    rolled back or filled again, which would add the same records, and where letters were marked and are not
    any more; LettersLeftOut; what `settle` raises; and EarlierAttemptLate.
    """
    tables, space = IcebergTables(place.catalog), place.lake.settings.default_namespace
    known = known_tables(ingest, place.lake.nessie, place.catalog, space, tables)
    if known.anchor is None:
        return None
    if any(one.run_id == place.run_id for one in put_back(ingest.name, known.anchor.metadata.properties)):
        return None
    require_put_back(
        ingest.name,
        known.there,
        on_rollback=ingest.on_rollback,
        branch=place.branch,
        dead_letters=known.dead_letters,
        again=True,
    )
    # What is left out on purpose is not read again, so no letter's row comes twice.
    rule: OnRollback = "skip" if ingest.on_rollback == "skip" else "replay"
    before = standing(ingest.name, known.there, on_rollback=rule)
    if again := before.replayed:
        raise PositionLost(
            "The table is to be filled again, which may add what these dead letters would.",
            table=next(iter(again)),
            hint="Let the ingestion read until the table has caught up, then reprocess.",
            reason="replay_pending",
        )
    session = place.session()
    frame = _taken_up(session, known, place, chosen)
    pairs = [tuple(row) for row in frame.select("__topic", "__incarnation").distinct().collect()]
    if not pairs:
        return None
    reading = ingest.format.fresh() if isinstance(ingest.format, RegistryAvro) else ingest.format
    failed_scans = FailedScans()

    def read(known: KnownTables, targets: Sequence[Target]) -> Scanned:
        work = Work(
            place.run_id,
            [topic for topic, _ in pairs],
            [incarnation for _, incarnation in pairs],
            worker_targets(targets, {}),
            place.lake.settings.worker_file_io_properties(),
            int(now().timestamp() * 1_000_000),
            len(known.ingest.families),
            ingest.most_tables,
            ingest.most_columns,
            letters=True,
        )
        with failed_scans.remembering(work, targets[-1].table.io):
            return scan(frame, known.ingest, reading, targets, {}, work)

    ids = {topic: topic_id(incarnation) for topic, incarnation in pairs}
    try:
        settled = settle(known, place, frame, reading, read, ids, tables)
    finally:
        failed_scans.delete_files()
    if left_out := settled.scanned.counts["left_out"]:
        raise LettersLeftOut(
            f"Of {settled.scanned.counts['records']} dead letters {left_out} would give neither a row nor a"
            f" dead letter; ingestion {ingest.name} puts none back.",
            branch=place.branch,
            run_id=place.run_id,
            hint="Choose others with --table, --error-kind or --since, and report this one with its record.",
        )
    _commit(settled, place, before.position, tables)
    return Reprocessed(settled.known.ingest, settled.targets, settled.scanned)


def _taken_up(session: SparkSession, known: KnownTables, place: Place, chosen: Chosen) -> DataFrame:
    """The chosen letters as records, marked on the branch. Also those that an earlier attempt has marked."""
    condition, arguments = chosen.condition(known)
    dead = f"nessie.{dotted(list(known.wanted.values())[-1])}"
    with session_properties(session, {**place.origin, LakeProperty.WRITE_MODE: "upsert"}):
        session.sql(
            f"UPDATE {dead} SET reprocessed_in = :run WHERE {condition}",  # noqa: S608 - by name
            args={**arguments, "run": place.run_id},
        )
    letters = session.table(dead).filter(F.col("reprocessed_in") == place.run_id)
    named = ("topic", "incarnation", "partition", "offset", "timestamp", "key", "value", "headers")
    return letters.select(*(F.col(one).alias(f"__{one}") for one in named), F.col("table").alias(FOR))


def _commit(settled: Settled, place: Place, position: Offsets, tables: IcebergTables) -> None:
    changes, ingest = [], settled.known.ingest
    # A replay would begin before what batches told that had nothing for a table, and their letters are in it.
    upto = {
        LakeProperty.REPROCESSED_PREFIX + ingest.name: Recorded(position, place.run_id, place.run_id).text()
    }
    for number, one in enumerate(settled.targets):
        files, last = settled.scanned.files.get(number, []), one is settled.targets[-1]
        if files or last:
            mode = {LakeProperty.WRITE_MODE: "append", LakeProperty.ASSET: "/".join(one.identifier)}
            told, origin = settled.known.told if last else {}, {**place.origin, **mode, **upto}
            changes.append(
                TableChange(one.identifier, one.table, files, None, origin, told, put_back_by=place.run_id)
            )
    commit_tables(
        place.lake.nessie,
        place.catalog,
        place.branch,
        changes,
        ingestion=ingest.name,
        message=f"Reprocess dead letters of {ingest.name}",
        properties=place.properties,
        tables=tables,
    )


_OF_RECORD = ("topic", "partition", "offset")


def with_waiting(records: DataFrame, dead_letters: Table | None, ranges: Ranges) -> DataFrame:
    """The records, with a column of the tables for which a letter of them waits; "" is one for any table.

    A table that is filled again may take by now what it could not then: its letter would add the row once
    more when it is put back. All letters that wait are read, and those of the ranges count.
    """
    if dead_letters is None:
        return records
    columns = (*_OF_RECORD, "incarnation", "table")
    held = dead_letters.scan(row_filter="reprocessed_in is null", selected_fields=columns).to_arrow()
    parts = [held.filter(_within(held, one, span)) for one, span in ranges.items()]
    letters = pa.concat_tables(parts) if parts else held.slice(0, 0)
    if not letters.num_rows:
        return records
    told = letters.select([*_OF_RECORD]).append_column(WAITS, pc.fill_null(letters["table"], ""))
    grouped = told.group_by([*_OF_RECORD]).aggregate([(WAITS, "list")])
    named = grouped.rename_columns([*(f"_{WAITS}_{one}" for one in _OF_RECORD), WAITS])
    waiting = records.sparkSession.createDataFrame(named)
    same = [F.col(f"__{one}") == F.col(f"_{WAITS}_{one}") for one in _OF_RECORD]
    joined = records.join(F.broadcast(waiting), same, "left")
    return joined.drop(*(f"_{WAITS}_{one}" for one in _OF_RECORD))


def _within(letters: pa.Table, one: TopicPartition, span: OffsetRange) -> pa.ChunkedArray:
    """Of which letters the records are in this range of a partition."""
    conditions = [
        pc.equal(letters["topic"], one.topic),
        pc.equal(letters["incarnation"], one.incarnation),
        pc.equal(letters["partition"], one.partition),
        pc.greater_equal(letters["offset"], span.start),
        pc.less(letters["offset"], span.end),
    ]
    return pc.fill_null(reduce(pc.and_, conditions), fill_value=False)
