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

from branchlake_dagster.history.capture import (
    ancestors_after,
    contains_snapshot,
    replayed_from,
    summary_value,
)
from branchlake_dagster.ingest.errors import AnotherIngestion, PositionLost
from branchlake_dagster.ingest.offsets import (
    Offsets,
    Ranges,
    TableProgress,
    Topic,
    TopicPartition,
    count_resets,
    end_offsets,
    has_reached,
    merge_offsets,
    recorded_ingestions,
    topic_id,
)
from branchlake_dagster.ingest.planning import BatchPlan
from branchlake_dagster.stored_names import LakeProperty

OnRollback = Literal["stop", "replay", "skip"]


@dataclass(frozen=True)
class IngestionProgress:
    """How far the tables are.

    `position` is where all of them are that were not rolled back. `replay_offsets` has those that were and
    are to be filled again, and from where: of a record before the position only they take anything.
    """

    position: Offsets
    replay_offsets: Mapping[str, Offsets]
    first_offsets: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless that is 0."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of a record that was read of each partition, ms since 1970."""
    valid_through_ms: int | None = None
    """The latest valid-through time that a table has recorded, ms since 1970. It does not hold for the tables
    that are filled again."""

    @property
    def start(self) -> Offsets:
        """Where the next batch begins: at the position, or before it for tables that are filled again."""
        start_offsets = dict(self.position)
        for offsets in self.replay_offsets.values():
            for partition, offset in offsets.items():
                start_offsets[partition] = min(offset, start_offsets.get(partition, offset))
        return start_offsets

    def min_offsets(self, tables: Iterable[str], ranges: Ranges) -> dict[str, Offsets]:
        """By table the offsets before which it takes nothing, while others are filled again; else nothing.

        Of what is read alone: an older incarnation of a topic had offsets of its own.
        """
        if not self.replay_offsets:
            return {}
        return {
            name: {
                partition: offset
                for partition, offset in self.replay_offsets.get(name, self.position).items()
                if partition in ranges
            }
            for name in tables
        }

    def table_progress(self, name: str, batch: TableProgress, plan: BatchPlan) -> TableProgress:
        """What a table says after a batch: as far as all, or as far as one has come that is filled again."""
        replay_offsets = self.replay_offsets.get(name)
        return (
            batch
            if replay_offsets is None
            else batch.refilled_to(
                merge_offsets(replay_offsets, plan.advanced_offsets, end_offsets(plan.ranges))
            )
        )

    def position_after(self, plan: BatchPlan) -> Offsets:
        """Where the tables are after a batch that were not rolled back."""
        return merge_offsets(self.position, plan.advanced_offsets, end_offsets(plan.ranges))


def read_progress(
    ingestion: str, tables: Mapping[str, Table | None], *, on_rollback: OnRollback
) -> IngestionProgress:
    """Where the ingestion stands by its tables as one reference has them; None: not there yet.

    Raises PositionLost.
    """
    progress_by_table: dict[str, TableProgress] = {}
    rollback_offsets: dict[str, Offsets] = {}
    for name, table in tables.items():
        if table is None:
            continue
        property_progress = _progress_from_property(ingestion, table, name)
        if property_progress is not None:
            if not _holds_progress(ingestion, table.metadata, property_progress):
                table_offsets = _offsets_to_replay(
                    ingestion, name, table.metadata, property_progress, on_rollback
                )
                if table_offsets is not None:
                    rollback_offsets[name] = table_offsets
            elif property_progress.refill_until and on_rollback != "skip":
                rollback_offsets[name] = property_progress.offsets
            # One that is filled again has not come as far as the others, who may all be like it.
            progress_by_table[name] = replace(
                property_progress,
                offsets=merge_offsets(property_progress.offsets, property_progress.refill_until),
            )
        elif (summary_progress := progress_from_snapshots(ingestion, table.metadata)) is not None:
            # Another engine has put a table of its own making in its place, rows and all.
            progress_by_table[name] = summary_progress
    position = merge_offsets(*(table_progress.offsets for table_progress in progress_by_table.values()))
    # Of a partition that a table never told of, nothing was for it.
    replay_offsets = {name: {**position, **offsets} for name, offsets in rollback_offsets.items()}
    times = [
        table_progress.valid_through_ms
        for table_progress in progress_by_table.values()
        if table_progress.valid_through_ms is not None
    ]
    return IngestionProgress(
        position,
        replay_offsets,
        merge_offsets(*(table_progress.first_offsets for table_progress in progress_by_table.values())),
        merge_offsets(*(table_progress.latest_ms for table_progress in progress_by_table.values())),
        max(times, default=None),
    )


def require_replayable(progress: IngestionProgress, topics: Iterable[Topic]) -> None:
    """Raise PositionLost where a table is to be filled again with records that no topic has any more."""
    current_partitions = {one for topic in topics for one in topic.partitions()}
    for name, offsets in progress.replay_offsets.items():
        gone_topics = sorted(
            {
                one.topic
                for one, at in offsets.items()
                if one not in current_partitions and at < progress.position.get(one, 0)
            }
        )
        if gone_topics:
            raise PositionLost(
                f"The table was rolled back, and its records of topic {', '.join(gone_topics)} cannot be"
                " read again:"
                " the topic was deleted or made again since, or is not one of the ingestion's any more.",
                table=name,
                hint='Choose on_rollback="skip" to leave them out, or roll the table forward again.',
                reason="topic_gone",
                subject=", ".join(gone_topics),
            )


def require_single_ingestion(
    ingestion: str, tables: Mapping[str, Table | None], topics: Mapping[str, str]
) -> None:
    """Raise AnotherIngestion when somebody else fills one of the tables from one of the topics.

    `topics` are Kafka's ids by name.
    """
    for name, table in tables.items():
        if table is None:
            continue
        for other, progress_json in recorded_ingestions(table.metadata.properties).items():
            if other == ingestion:
                continue
            try:
                offsets = TableProgress.from_json(progress_json).offsets
            except (ValueError, KeyError, TypeError):
                continue  # its own run says so
            shared_topics = sorted(
                {
                    partition.topic
                    for partition in offsets
                    if topics.get(partition.topic) == topic_id(partition.incarnation)
                }
            )
            if shared_topics:
                raise AnotherIngestion(
                    f"Ingestion {other} already fills the table from topic {', '.join(shared_topics)};"
                    f" {ingestion} would add the same records again.",
                    table=name,
                    hint="Use one ingestion, or another table. If the other one is gone for good, remove its"
                    f" table property {LakeProperty.OFFSETS_PREFIX}{other}.",
                    subject=other,
                )


def _progress_from_property(ingestion: str, table: Table, name: str) -> TableProgress | None:
    progress_json = table.metadata.properties.get(LakeProperty.OFFSETS_PREFIX + ingestion)
    if progress_json is None:
        return None
    try:
        return TableProgress.from_json(progress_json)
    except (ValueError, KeyError, TypeError) as error:
        summary_progress = progress_from_snapshots(ingestion, table.metadata)
        if summary_progress is not None:
            return summary_progress
        raise PositionLost(
            f"The table's property {LakeProperty.OFFSETS_PREFIX}{ingestion} cannot be read, and no snapshot"
            " records its offsets.",
            table=name,
            hint="Set the property to the offsets that the table holds. docs/ingestion-reference.md has its"
            " format under Where the offsets are.",
            reason="offsets_unreadable",
        ) from error


def _holds_progress(ingestion: str, metadata: TableMetadata, table_progress: TableProgress) -> bool:
    """Whether a table still has all that its property says.

    Where the snapshot of that has expired, those that are left say so: had it expired in the line, none from
    before it could be there. One that is was rolled back to, and then the others expired.
    """
    if not contains_snapshot(metadata, table_progress.snapshot_id):
        return False
    ancestors, _ = ancestors_after(metadata)
    if table_progress.snapshot_id is None or any(
        table_progress.snapshot_id in (snapshot.snapshot_id, replayed_from(snapshot))
        for snapshot in ancestors
    ):
        return True
    if not any(summary_value(snapshot, LakeProperty.OFFSETS_PREFIX + ingestion) for snapshot in ancestors):
        # One with which letters were put back says how far the table was when they were taken up. Replayed
        # onto a newer batch that has expired since, it says too little.
        return True
    summary_progress = progress_from_snapshots(ingestion, metadata)
    return summary_progress is None or has_reached(summary_progress.offsets, table_progress.offsets)


def progress_from_snapshots(ingestion: str, metadata: TableMetadata) -> TableProgress | None:
    """What the newest snapshots of a table's line say; None: none says anything.

    One with which letters were put back tells how far the table had come, also through batches that had
    nothing for it. Since it may have been replayed onto newer ones, these count as well.
    """
    ancestors, _ = ancestors_after(metadata)
    offset_maps: list[Offsets] = []
    table_progress: TableProgress | None = None
    for snapshot in reversed(ancestors):
        batch_json = summary_value(snapshot, LakeProperty.OFFSETS_PREFIX + ingestion)
        progress_json = batch_json or summary_value(snapshot, LakeProperty.REPROCESSED_PREFIX + ingestion)
        if progress_json is None:
            continue
        try:
            table_progress = TableProgress.from_json(progress_json)
        except (ValueError, KeyError, TypeError):
            continue
        offset_maps.append(table_progress.offsets)
        if batch_json is not None:
            break
    return table_progress and replace(table_progress, offsets=merge_offsets(*offset_maps))


def _offsets_to_replay(
    ingestion: str, name: str, metadata: TableMetadata, table_progress: TableProgress, on_rollback: OnRollback
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
    summary_progress = progress_from_snapshots(ingestion, metadata)
    if summary_progress is not None:
        reset_partitions = {
            partition for partition in table_progress.offsets if count_resets(partition.incarnation)
        } - summary_progress.offsets.keys()
        if reset_partitions:
            raise PositionLost(
                f"The table was rolled back to before the offsets of topic {min(reset_partitions).topic}"
                " were set back:"
                " which of its records it still holds is not known.",
                table=name,
                hint='Choose on_rollback="skip" to leave them out, or roll the table forward again.',
                reason="offsets_set_back",
            )
        return _complete_offsets(table_progress, summary_progress.offsets)
    _, is_complete = ancestors_after(metadata)
    if not is_complete:
        raise PositionLost(
            "The table was rolled back, and the snapshots that tell how far it still is have expired.",
            table=name,
            hint='Choose on_rollback="skip" to leave the records out, or roll the table forward again. Do not'
            " drop it: the new one gets only later records. docs/operations.md shows how to fill one"
            " anew.",
            reason="snapshots_expired",
        )
    return _complete_offsets(table_progress, {})


def _complete_offsets(table_progress: TableProgress, held_offsets: Offsets) -> Offsets:
    """Of each partition that the table knew: what it holds of it, or where that partition was started."""
    offsets: dict[TopicPartition, int] = {
        partition: held_offsets.get(partition, table_progress.first_offsets.get(partition, 0))
        for partition in merge_offsets(table_progress.offsets, table_progress.refill_until)
    }
    return offsets


@dataclass(frozen=True)
class ReprocessingRun:
    """One run that put letters back.

    `snapshot_id` is the snapshot that had them all, on the run's branch, and `sequence_number` its number in
    the order of the table's snapshots; None where it is not known: an older release has said so.
    """

    run_id: str
    snapshot_id: int | None = None
    sequence_number: int = 0


def reprocessing_runs(ingestion: str, properties: Mapping[str, str]) -> list[ReprocessingRun]:
    """The runs that a table's properties tell of, oldest first."""
    runs_json = properties.get(LakeProperty.REPROCESSED_PREFIX + ingestion)
    if not runs_json:
        return []
    try:
        return [
            ReprocessingRun(entry["run"], entry["at"], entry["sequence"]) for entry in json.loads(runs_json)
        ]
    except (ValueError, KeyError, TypeError):
        return [ReprocessingRun(runs_json)]  # older releases wrote the run alone


def add_reprocessing_run(ingestion: str, metadata: TableMetadata, run: ReprocessingRun) -> str:
    """The property's value after one more run.

    Of the others it has those whose snapshots are still there: below one that has expired nobody rolls back.
    """
    ancestor_ids = _ancestor_ids(metadata)
    earlier_runs = [
        one for one in reprocessing_runs(ingestion, metadata.properties) if one.snapshot_id in ancestor_ids
    ]
    entries = [
        {"run": one.run_id, "at": one.snapshot_id, "sequence": one.sequence_number}
        for one in (*earlier_runs, run)
    ]
    return json.dumps(entries, separators=(",", ":"))


def require_reprocessed_rows(
    ingestion: str,
    tables: Mapping[str, Table | None],
    *,
    on_rollback: OnRollback,
    branch: str,
    dead_letter_table_name: str,
    is_reprocessing: bool = False,
) -> None:
    """Raise PositionLost where a table does not have any more what was put back into it.

    Reading the topics again does not bring it back: that goes by offsets. `is_reprocessing`: letters are
    about to be
    put back, which must not be done while the marks of those that were are gone, whatever `on_rollback` is.
    """
    for name, table in tables.items():
        is_dead_letters = name == dead_letter_table_name
        if table is None or (on_rollback == "skip" and not (is_reprocessing and is_dead_letters)):
            continue
        runs = reprocessing_runs(ingestion, table.metadata.properties)
        lost_runs = [run for run in runs if not _holds_run(table.metadata, run)]
        if lost_runs:
            raise PositionLost(
                (_format_lost_marks if is_dead_letters else _format_lost_rows)(
                    ingestion, table.metadata, lost_runs
                ),
                table=name,
                branch=branch,
                run_id=lost_runs[-1].run_id,
                hint=_ROLL_FORWARD_HINT + (_MARK_AGAIN_HINT if is_dead_letters else _WAIT_AGAIN_HINT),
                reason="marks_lost" if is_dead_letters else "reprocessed_rows_lost",
            )


_ROLL_FORWARD_HINT = "Roll it forward to there if nothing has come since. Otherwise "
_MARK_AGAIN_HINT = "mark the letters again, as docs/operations.md shows."
_WAIT_AGAIN_HINT = (
    "let these letters wait once more for this table alone, as docs/operations.md shows, or leave the"
    ' rows out with on_rollback="skip". on_rollback="replay" does not bring them back.'
)


def _format_lost_marks(ingestion: str, metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    return (
        f"The dead letters' table was rolled back below what marked those that were put back:"
        f" {_format_runs(metadata, lost_runs)}. Ingestion {ingestion} would put them back a second time."
    )


def _format_lost_rows(ingestion: str, metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    summary_progress = progress_from_snapshots(ingestion, metadata)
    offsets = sorted(summary_progress.offsets.items()) if summary_progress is not None else []
    until = ", ".join(f"{part.topic}[{part.partition}] {offset}" for part, offset in offsets)
    return (
        f"The table was rolled back below dead letters that ingestion {ingestion} had put back into it:"
        f" {_format_runs(metadata, lost_runs)}. Of the topics it has what was before"
        f" {until or 'all that it had read'}."
    )


def _format_runs(metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    """By which run and, as this table calls it, in which snapshot."""
    snapshot_ids = {
        number: one.snapshot_id
        for one in metadata.snapshots
        for number in (one.snapshot_id, replayed_from(one))
    }
    run_snapshots = {one.run_id: snapshot_ids.get(one.snapshot_id) for one in lost_runs}
    return ", ".join(
        f"run {run} in snapshot {snapshot_id}"
        if snapshot_id is not None
        else f"run {run} in a snapshot that has expired"
        for run, snapshot_id in run_snapshots.items()
    )


def _holds_run(metadata: TableMetadata, run: ReprocessingRun) -> bool:
    """Whether what was put back is in the table; also where that is not known any more.

    A snapshot that is missing below older ones has not expired, for the line would end there: the table was
    rolled back, and then it expired. On `main` a snapshot has never a smaller number than on the branch.
    """
    if not contains_snapshot(metadata, run.snapshot_id):
        return False
    if run.snapshot_id is None or run.snapshot_id in _ancestor_ids(metadata):
        return True
    ancestors, _ = ancestors_after(metadata)
    return not any((snapshot.sequence_number or 0) < run.sequence_number for snapshot in ancestors)


def _ancestor_ids(metadata: TableMetadata) -> set[int | None]:
    ancestors, _ = ancestors_after(metadata)
    return {
        number for snapshot in ancestors for number in (snapshot.snapshot_id, replayed_from(snapshot))
    } - {None}
