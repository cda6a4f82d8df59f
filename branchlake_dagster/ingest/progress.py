"""How far an ingestion has come, and which dead letters were reprocessed, as its tables record it.

What a table says of dead letters that were put back into it: by which runs, and in which snapshots.

Their offsets are before those that the table has come to, so these do not tell whether the rows are there.
As with these, the property says what was done, and the line of snapshots whether it still is so (ADR 33).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import holds, line, replayed_from, told
from branchlake_dagster.ingest.errors import AnotherIngestion, PositionLost
from branchlake_dagster.ingest.offsets import (
    Offsets,
    Ranges,
    Recorded,
    Topic,
    TopicPartition,
    covers,
    ends,
    ingestions_in,
    merged,
    set_backs,
    topic_id,
)
from branchlake_dagster.ingest.planning import BatchPlan
from branchlake_dagster.stored_names import LakeProperty

OnRollback = Literal["stop", "replay", "skip"]


@dataclass(frozen=True)
class Standing:
    """How far the tables are.

    `position` is where all of them are that were not rolled back. `replayed` has those that were and are to
    be filled again, and from where: of a record before the position only they take anything.
    """

    position: Offsets
    replayed: Mapping[str, Offsets]
    started: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless that is 0."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of a record that was read of each partition, ms since 1970."""
    valid_through_ms: int | None = None
    """The latest valid-through time that a table has recorded, ms since 1970. It does not hold for the tables
    that are filled again."""

    @property
    def start(self) -> Offsets:
        """Where the next batch begins: at the position, or before it for tables that are filled again."""
        found = dict(self.position)
        for offsets in self.replayed.values():
            for one, offset in offsets.items():
                found[one] = min(offset, found.get(one, offset))
        return found

    def floors(self, tables: Iterable[str], ranges: Ranges) -> dict[str, Offsets]:
        """By table the offsets before which it takes nothing, while others are filled again; else nothing.

        Of what is read alone: an older incarnation of a topic had offsets of its own.
        """
        if not self.replayed:
            return {}
        return {
            name: {
                one: offset for one, offset in self.replayed.get(name, self.position).items() if one in ranges
            }
            for name in tables
        }

    def recorded(self, name: str, batch: Recorded, plan: BatchPlan) -> Recorded:
        """What a table says after a batch: as far as all, or as far as one has come that is filled again."""
        again = self.replayed.get(name)
        return batch if again is None else batch.refilled_to(merged(again, plan.passed, ends(plan.ranges)))

    def after(self, plan: BatchPlan) -> Offsets:
        """Where the tables are after a batch that were not rolled back."""
        return merged(self.position, plan.passed, ends(plan.ranges))


def standing(ingestion: str, tables: Mapping[str, Table | None], *, on_rollback: OnRollback) -> Standing:
    """Where the ingestion stands by its tables as one reference has them; None: not there yet.

    Raises PositionLost.
    """
    recorded: dict[str, Recorded] = {}
    behind: dict[str, Offsets] = {}
    for name, table in tables.items():
        if table is None:
            continue
        by_property = _by_property(ingestion, table, name)
        if by_property is not None:
            if not _has(ingestion, table.metadata, by_property):
                again = _rolled_back(ingestion, name, table.metadata, by_property, on_rollback)
                if again is not None:
                    behind[name] = again
            elif by_property.until and on_rollback != "skip":
                behind[name] = by_property.offsets
            # One that is filled again has not come as far as the others, who may all be like it.
            recorded[name] = replace(by_property, offsets=merged(by_property.offsets, by_property.until))
        elif (by_summary := told_by_snapshots(ingestion, table.metadata)) is not None:
            # Another engine has put a table of its own making in its place, rows and all.
            recorded[name] = by_summary
    position = merged(*(one.offsets for one in recorded.values()))
    # Of a partition that a table never told of, nothing was for it.
    replayed = {name: {**position, **offsets} for name, offsets in behind.items()}
    times = [one.valid_through_ms for one in recorded.values() if one.valid_through_ms is not None]
    return Standing(
        position,
        replayed,
        merged(*(one.started for one in recorded.values())),
        merged(*(one.latest_ms for one in recorded.values())),
        max(times, default=None),
    )


def require_replayable(known: Standing, topics: Iterable[Topic]) -> None:
    """Raise PositionLost where a table is to be filled again with records that no topic has any more."""
    there = {one for topic in topics for one in topic.partitions()}
    for name, offsets in known.replayed.items():
        gone = sorted(
            {one.topic for one, at in offsets.items() if one not in there and at < known.position.get(one, 0)}
        )
        if gone:
            raise PositionLost(
                f"The table was rolled back, and its records of topic {', '.join(gone)} cannot be read again:"
                " the topic was deleted or made again since, or is not one of the ingestion's any more.",
                table=name,
                hint='Choose on_rollback="skip" to leave them out, or roll the table forward again.',
                reason="topic_gone",
                subject=", ".join(gone),
            )


def require_alone(ingestion: str, tables: Mapping[str, Table | None], topics: Mapping[str, str]) -> None:
    """Raise AnotherIngestion when somebody else fills one of the tables from one of the topics.

    `topics` are Kafka's ids by name.
    """
    for name, table in tables.items():
        if table is None:
            continue
        for other, text in ingestions_in(table.metadata.properties).items():
            if other == ingestion:
                continue
            try:
                offsets = Recorded.from_text(text).offsets
            except (ValueError, KeyError, TypeError):
                continue  # its own run says so
            shared = sorted(
                {one.topic for one in offsets if topics.get(one.topic) == topic_id(one.incarnation)}
            )
            if shared:
                raise AnotherIngestion(
                    f"Ingestion {other} already fills the table from topic {', '.join(shared)};"
                    f" {ingestion} would add the same records again.",
                    table=name,
                    hint="Use one ingestion, or another table. If the other one is gone for good, remove its"
                    f" table property {LakeProperty.OFFSETS_PREFIX}{other}.",
                    subject=other,
                )


def _by_property(ingestion: str, table: Table, name: str) -> Recorded | None:
    text = table.metadata.properties.get(LakeProperty.OFFSETS_PREFIX + ingestion)
    if text is None:
        return None
    try:
        return Recorded.from_text(text)
    except (ValueError, KeyError, TypeError) as error:
        found = told_by_snapshots(ingestion, table.metadata)
        if found is not None:
            return found
        raise PositionLost(
            f"The table's property {LakeProperty.OFFSETS_PREFIX}{ingestion} cannot be read, and no snapshot"
            " records its offsets.",
            table=name,
            hint="Set the property to the offsets that the table holds. docs/ingestion-reference.md has its"
            " format under Where the offsets are.",
            reason="offsets_unreadable",
        ) from error


def _has(ingestion: str, metadata: TableMetadata, known: Recorded) -> bool:
    """Whether a table still has all that its property says.

    Where the snapshot of that has expired, those that are left say so: had it expired in the line, none from
    before it could be there. One that is was rolled back to, and then the others expired.
    """
    if not holds(metadata, known.at):
        return False
    found, _ = line(metadata)
    if known.at is None or any(known.at in (one.snapshot_id, replayed_from(one)) for one in found):
        return True
    if not any(told(one, LakeProperty.OFFSETS_PREFIX + ingestion) for one in found):
        # One with which letters were put back says how far the table was when they were taken up. Replayed
        # onto a newer batch that has expired since, it says too little.
        return True
    held = told_by_snapshots(ingestion, metadata)
    return held is None or covers(held.offsets, known.offsets)


def told_by_snapshots(ingestion: str, metadata: TableMetadata) -> Recorded | None:
    """What the newest snapshots of a table's line say; None: none says anything.

    One with which letters were put back tells how far the table had come, also through batches that had
    nothing for it. Since it may have been replayed onto newer ones, these count as well.
    """
    found, _ = line(metadata)
    beside: list[Offsets] = []
    last: Recorded | None = None
    for snapshot in reversed(found):
        batch = told(snapshot, LakeProperty.OFFSETS_PREFIX + ingestion)
        text = batch or told(snapshot, LakeProperty.REPROCESSED_PREFIX + ingestion)
        if text is None:
            continue
        try:
            last = Recorded.from_text(text)
        except (ValueError, KeyError, TypeError):
            continue
        beside.append(last.offsets)
        if batch is not None:
            break
    return last and replace(last, offsets=merged(*beside))


def _rolled_back(
    ingestion: str, name: str, metadata: TableMetadata, known: Recorded, on_rollback: OnRollback
) -> Offsets | None:
    """Up to where a table that was rolled back still has the records; None: it is not filled again."""
    if on_rollback == "skip":
        return None
    if on_rollback == "stop":
        raise PositionLost(
            f"The table was rolled back below what ingestion {ingestion} had put into it.",
            table=name,
            hint='Choose with on_rollback="replay" to read the records again into this table alone, or'
            ' with on_rollback="skip" to leave them out.',
            reason="rolled_back",
        )
    held = told_by_snapshots(ingestion, metadata)
    if held is not None:
        since = {one for one in known.offsets if set_backs(one.incarnation)} - held.offsets.keys()
        if since:
            raise PositionLost(
                f"The table was rolled back to before the offsets of topic {min(since).topic} were set back:"
                " which of its records it still holds is not known.",
                table=name,
                hint='Choose on_rollback="skip" to leave them out, or roll the table forward again.',
                reason="offsets_set_back",
            )
        return _all_of(known, held.offsets)
    _, reached = line(metadata)
    if not reached:
        raise PositionLost(
            "The table was rolled back, and the snapshots that tell how far it still is have expired.",
            table=name,
            hint='Choose on_rollback="skip" to leave the records out, or roll the table forward again. Do not'
            " drop it: the new one gets only later records. docs/operations.md shows how to fill one"
            " anew.",
            reason="snapshots_expired",
        )
    return _all_of(known, {})


def _all_of(known: Recorded, held: Offsets) -> Offsets:
    """Of each partition that the table knew: what it holds of it, or where that partition was started."""
    found: dict[TopicPartition, int] = {
        one: held.get(one, known.started.get(one, 0)) for one in merged(known.offsets, known.until)
    }
    return found


@dataclass(frozen=True)
class PutBack:
    """One run that put letters back.

    `at` is the snapshot that had them all, on the run's branch, and `sequence` its number in the order of the
    table's snapshots; None where it is not known: an older release has said so.
    """

    run_id: str
    at: int | None = None
    sequence: int = 0


def put_back(ingestion: str, properties: Mapping[str, str]) -> list[PutBack]:
    """The runs that a table's properties tell of, oldest first."""
    text = properties.get(LakeProperty.REPROCESSED_PREFIX + ingestion)
    if not text:
        return []
    try:
        return [PutBack(one["run"], one["at"], one["sequence"]) for one in json.loads(text)]
    except (ValueError, KeyError, TypeError):
        return [PutBack(text)]  # older releases wrote the run alone


def with_put_back(ingestion: str, metadata: TableMetadata, run: PutBack) -> str:
    """The property's value after one more run.

    Of the others it has those whose snapshots are still there: below one that has expired nobody rolls back.
    """
    there = _in_line(metadata)
    kept = [one for one in put_back(ingestion, metadata.properties) if one.at in there]
    told = [{"run": one.run_id, "at": one.at, "sequence": one.sequence} for one in (*kept, run)]
    return json.dumps(told, separators=(",", ":"))


def require_put_back(
    ingestion: str,
    tables: Mapping[str, Table | None],
    *,
    on_rollback: OnRollback,
    branch: str,
    dead_letters: str,
    again: bool = False,
) -> None:
    """Raise PositionLost where a table does not have any more what was put back into it.

    Reading the topics again does not bring it back: that goes by offsets. `again`: letters are about to be
    put back, which must not be done while the marks of those that were are gone, whatever `on_rollback` is.
    """
    for name, table in tables.items():
        marks = name == dead_letters
        if table is None or (on_rollback == "skip" and not (again and marks)):
            continue
        runs = put_back(ingestion, table.metadata.properties)
        lost = [one for one in runs if not _has_run(table.metadata, one)]
        if lost:
            raise PositionLost(
                (_marks_lost if marks else _rows_lost)(ingestion, table.metadata, lost),
                table=name,
                branch=branch,
                run_id=lost[-1].run_id,
                hint=_FORWARD + (_MARK_AGAIN if marks else _WAIT_AGAIN),
                reason="marks_lost" if marks else "reprocessed_rows_lost",
            )


_FORWARD = "Roll it forward to there if nothing has come since. Otherwise "
_MARK_AGAIN = "mark the letters again, as docs/operations.md shows."
_WAIT_AGAIN = (
    "let these letters wait once more for this table alone, as docs/operations.md shows, or leave the"
    ' rows out with on_rollback="skip". on_rollback="replay" does not bring them back.'
)


def _marks_lost(ingestion: str, metadata: TableMetadata, lost: Sequence[PutBack]) -> str:
    return (
        f"The dead letters' table was rolled back below what marked those that were put back:"
        f" {_runs(metadata, lost)}. Ingestion {ingestion} would put them back a second time."
    )


def _rows_lost(ingestion: str, metadata: TableMetadata, lost: Sequence[PutBack]) -> str:
    held = told_by_snapshots(ingestion, metadata)
    offsets = sorted(held.offsets.items()) if held is not None else []
    until = ", ".join(f"{part.topic}[{part.partition}] {offset}" for part, offset in offsets)
    return (
        f"The table was rolled back below dead letters that ingestion {ingestion} had put back into it:"
        f" {_runs(metadata, lost)}. Of the topics it has what was before {until or 'all that it had read'}."
    )


def _runs(metadata: TableMetadata, lost: Sequence[PutBack]) -> str:
    """By which run and, as this table calls it, in which snapshot."""
    there = {
        number: one.snapshot_id
        for one in metadata.snapshots
        for number in (one.snapshot_id, replayed_from(one))
    }
    told = {one.run_id: there.get(one.at) for one in lost}
    return ", ".join(
        f"run {run} in snapshot {at}" if at is not None else f"run {run} in a snapshot that has expired"
        for run, at in told.items()
    )


def _has_run(metadata: TableMetadata, one: PutBack) -> bool:
    """Whether what was put back is in the table; also where that is not known any more.

    A snapshot that is missing below older ones has not expired, for the line would end there: the table was
    rolled back, and then it expired. On `main` a snapshot has never a smaller number than on the branch.
    """
    if not holds(metadata, one.at):
        return False
    if one.at is None or one.at in _in_line(metadata):
        return True
    found, _ = line(metadata)
    return not any((snapshot.sequence_number or 0) < one.sequence for snapshot in found)


def _in_line(metadata: TableMetadata) -> set[int | None]:
    found, _ = line(metadata)
    return {number for one in found for number in (one.snapshot_id, replayed_from(one))} - {None}
