"""What a table says of dead letters that were put back into it: by which runs, and in which snapshots.

Their offsets are before those that the table has come to, so these do not tell whether the rows are there.
As with these, the property says what was done, and the line of snapshots whether it still is so (ADR 33).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import holds, line, replayed_from
from branchlake_dagster.history.summary import REPROCESSED
from branchlake_dagster.ingest.errors import PositionLost
from branchlake_dagster.ingest.positions.standing import OnRollback, told_by_snapshots


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
    text = properties.get(REPROCESSED + ingestion)
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
        lost = [one for one in runs if not _has(table.metadata, one)]
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
_MARK_AGAIN = "mark the letters again, as docs/runbook-ingestion.md shows."
_WAIT_AGAIN = (
    "let these letters wait once more for this table alone, as docs/runbook-ingestion.md shows, or leave the"
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


def _has(metadata: TableMetadata, one: PutBack) -> bool:
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
