"""The progress of an ingestion, and the runs that reprocessed dead letters, as its tables record them.

A table records by which runs and in which snapshots dead letters were added to it. Offsets cannot show
whether these rows are there, because the offsets of dead letters are before the table's position. The
property lists the runs, and the table's ancestor snapshots show whether the rows are still there (ADR 33).
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
    """The progress of all tables of an ingestion.

    `position` has the offsets that all tables have reached, except tables that were rolled back.
    `replay_offsets` maps the name of each table that is filled again to the offsets from which it takes
    records again. Only these tables take records before `position`.
    """

    position: Offsets
    replay_offsets: Mapping[str, Offsets]
    first_offsets: Offsets = field(default_factory=dict)
    """The first offset that was read of each partition, unless it is 0."""
    latest_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The latest time of the records that were read, by partition, in ms since 1970."""
    valid_through_ms: int | None = None
    """The latest valid-through time that a table has recorded, in ms since 1970. It does not hold for tables
    that are filled again."""

    @property
    def start(self) -> Offsets:
        """The offsets at which the next batch starts. Before `position` if tables are filled again."""
        start_offsets = dict(self.position)
        for offsets in self.replay_offsets.values():
            for partition, offset in offsets.items():
                start_offsets[partition] = min(offset, start_offsets.get(partition, offset))
        return start_offsets

    def min_offsets(self, tables: Iterable[str], ranges: Ranges) -> dict[str, Offsets]:
        """Return for each table the offsets below which it takes no records: `{table name: offsets}`.

        The result is empty if no table is filled again. It only has partitions of `ranges`, because an older
        incarnation of a topic had other offsets.
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
        """Return the progress that a table records after a batch.

        `batch` is the progress of the whole ingestion after the batch. Most tables record it. A table that is
        filled again records the offsets that it has reached itself.
        """
        replay_offsets = self.replay_offsets.get(name)
        return (
            batch
            if replay_offsets is None
            else batch.refilled_to(
                merge_offsets(replay_offsets, plan.advanced_offsets, end_offsets(plan.ranges))
            )
        )

    def position_after(self, plan: BatchPlan) -> Offsets:
        """Return the offsets that the tables have reached after a batch.

        They do not hold for tables that are filled again.
        """
        return merge_offsets(self.position, plan.advanced_offsets, end_offsets(plan.ranges))


def read_progress(
    ingestion: str, tables: Mapping[str, Table | None], *, on_rollback: OnRollback
) -> IngestionProgress:
    """Return the progress that the tables at one reference record.

    A table is None if it does not exist yet.

    Raises PositionLost if a table was rolled back and `on_rollback` is "stop", or if the offsets of a table
    can no longer be determined.
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
            # A table that is filled again is behind the others. If all tables are, only `refill_until` has
            # the position.
            progress_by_table[name] = replace(
                property_progress,
                offsets=merge_offsets(property_progress.offsets, property_progress.refill_until),
            )
        elif (summary_progress := progress_from_snapshots(ingestion, table.metadata)) is not None:
            # Another engine has replaced the table with one of its own, including the rows.
            progress_by_table[name] = summary_progress
    position = merge_offsets(*(table_progress.offsets for table_progress in progress_by_table.values()))
    # The table has no records of a partition that it has not recorded.
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
    """Raise PositionLost if a table that is filled again needs records of a topic that no longer exists.

    `topics` are the present topics of the ingestion.
    """
    current_partitions = {partition for topic in topics for partition in topic.partitions()}
    for name, offsets in progress.replay_offsets.items():
        gone_topics = sorted(
            {
                partition.topic
                for partition, at in offsets.items()
                if partition not in current_partitions and at < progress.position.get(partition, 0)
            }
        )
        if gone_topics:
            raise PositionLost(
                f"The table was rolled back, and its records of topic {', '.join(gone_topics)} cannot be"
                " read again: the topic was deleted or created again since, or no longer belongs to the"
                " ingestion.",
                table=name,
                hint='Set on_rollback="skip" to leave the records out, or roll the table forward again.',
                reason="topic_gone",
                subject=", ".join(gone_topics),
            )


def require_single_ingestion(
    ingestion: str, tables: Mapping[str, Table | None], topics: Mapping[str, str]
) -> None:
    """Raise AnotherIngestion if another ingestion fills one of the tables from one of the topics.

    `topics` are Kafka's topic ids by name.
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
                continue  # the other ingestion's own run reports the damaged property
            shared_topics = sorted(
                {
                    partition.topic
                    for partition in offsets
                    if topics.get(partition.topic) == topic_id(partition.incarnation)
                }
            )
            if shared_topics:
                raise AnotherIngestion(
                    f"Ingestion {other} already fills the table from topic {', '.join(shared_topics)}."
                    f" Ingestion {ingestion} would add the same records again.",
                    table=name,
                    hint=f"Use only one of the ingestions, or another table. If ingestion {other} is"
                    f" retired, remove its table property {LakeProperty.OFFSETS_PREFIX}{other}.",
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
    """Return whether a table still has all records up to the offsets of its property.

    If the snapshot of the property is missing, the remaining ancestor snapshots decide. If that snapshot had
    expired as an ancestor, all older ancestors would have expired too. If an older ancestor remains, the
    table was rolled back to it, and the newer snapshots expired later.
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
        # A snapshot of reprocessed dead letters records the table's offsets at the time of their selection.
        # If it was replayed onto a newer batch that has expired since, these offsets are too low.
        return True
    summary_progress = progress_from_snapshots(ingestion, metadata)
    return summary_progress is None or has_reached(summary_progress.offsets, table_progress.offsets)


def progress_from_snapshots(ingestion: str, metadata: TableMetadata) -> TableProgress | None:
    """Return the progress that the newest ancestor snapshots of a table record, or None if none does.

    Batches that were undone later do not count. A snapshot of reprocessed dead letters records how far the
    table had come, including batches without records for it. It may have been replayed onto newer batches, so
    their offsets are merged as well.
    """
    ancestors, _ = ancestors_after(metadata)
    offset_maps: list[Offsets] = []
    table_progress: TableProgress | None = None
    undone_ids: set[str] = set()
    for snapshot in reversed(ancestors):
        undone_ids |= {*(summary_value(snapshot, LakeProperty.UNDONE_SNAPSHOTS) or "").split(",")}
        if str(snapshot.snapshot_id) in undone_ids:
            continue  # the table no longer has the rows of this batch
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
    """Return the offsets from which a table that was rolled back is filled again.

    The table still has all records before these offsets. Returns None if `on_rollback` is "skip". Raises
    PositionLost if it is "stop", or if the offsets cannot be determined from the remaining snapshots.
    """
    if on_rollback == "skip":
        return None
    if on_rollback == "stop":
        raise PositionLost(
            f"The table was rolled back: it has lost records that ingestion {ingestion} had written to it.",
            table=name,
            hint='Set on_rollback="replay" to read the records again into this table alone, or'
            ' on_rollback="skip" to leave them out.',
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
                " were reset, so it is unknown which records of the topic it still has.",
                table=name,
                hint='Set on_rollback="skip" to leave the records out, or roll the table forward again.',
                reason="offsets_set_back",
            )
        return _complete_offsets(table_progress, summary_progress.offsets)
    _, is_complete = ancestors_after(metadata)
    if not is_complete:
        raise PositionLost(
            "The table was rolled back, and the snapshots that record its remaining offsets have expired.",
            table=name,
            hint='Set on_rollback="skip" to leave the records out, or roll the table forward again. Do not'
            " drop the table: a new one would get only later records. docs/operations.md shows how to fill"
            " a table again.",
            reason="snapshots_expired",
        )
    return _complete_offsets(table_progress, {})


def _complete_offsets(table_progress: TableProgress, held_offsets: Offsets) -> Offsets:
    """Return an offset for each recorded partition: that of `held_offsets`, else the first one ever read.

    The recorded partitions, and the first offsets (default: 0), are those of `table_progress`.
    """
    offsets: dict[TopicPartition, int] = {
        partition: held_offsets.get(partition, table_progress.first_offsets.get(partition, 0))
        for partition in merge_offsets(table_progress.offsets, table_progress.refill_until)
    }
    return offsets


@dataclass(frozen=True)
class ReprocessingRun:
    """A run that reprocessed dead letters.

    `snapshot_id` is the snapshot on the run's branch that contained all their rows. It is None if the
    property was written by an older release. `sequence_number` is that snapshot's sequence number.
    """

    run_id: str
    snapshot_id: int | None = None
    sequence_number: int = 0


def reprocessing_runs(ingestion: str, properties: Mapping[str, str]) -> list[ReprocessingRun]:
    """Return the reprocessing runs that a table's properties record for an ingestion, oldest first.

    `ingestion` is the ingestion's name. The result is [] if there are none. A value that an older release
    wrote is one run without a snapshot.
    """
    runs_json = properties.get(LakeProperty.REPROCESSED_PREFIX + ingestion)
    if not runs_json:
        return []
    try:
        return [
            ReprocessingRun(entry["run"], entry["at"], entry["sequence"]) for entry in json.loads(runs_json)
        ]
    except (ValueError, KeyError, TypeError):
        return [ReprocessingRun(runs_json)]  # older releases wrote only the run id


def add_reprocessing_run(ingestion: str, metadata: TableMetadata, run: ReprocessingRun) -> str:
    """Return the JSON value of the table's property with the earlier runs and this run.

    An earlier run is left out if its snapshot is no longer an ancestor of the table's current snapshot: no
    rollback can go back to before a snapshot that has expired.
    """
    ancestor_ids = _ancestor_ids(metadata)
    earlier_runs = [
        earlier_run
        for earlier_run in reprocessing_runs(ingestion, metadata.properties)
        if earlier_run.snapshot_id in ancestor_ids
    ]
    entries = [
        {"run": entry_run.run_id, "at": entry_run.snapshot_id, "sequence": entry_run.sequence_number}
        for entry_run in (*earlier_runs, run)
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
    """Raise PositionLost if a table has lost rows or marks of reprocessed dead letters.

    A replay of the topics does not restore such rows, because it goes by offsets. With `is_reprocessing`, the
    marks of earlier reprocessing must be intact whatever `on_rollback` is: otherwise the same dead letters
    would be reprocessed twice. `tables` are the ingestion's tables by dotted name, with None for a table that
    does not exist. With `on_rollback="skip"` lost rows are accepted. `branch` is named in the error.
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


_ROLL_FORWARD_HINT = "Roll the table forward to that snapshot if nothing was written since. Otherwise "
_MARK_AGAIN_HINT = "mark the dead letters again, as docs/operations.md shows."
_WAIT_AGAIN_HINT = (
    "let these dead letters wait again for this table alone, as docs/operations.md shows, or set"
    ' on_rollback="skip" to leave the rows out. on_rollback="replay" does not restore them.'
)


def _format_lost_marks(ingestion: str, metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    return (
        "The dead letter table was rolled back and has lost the marks of reprocessed dead letters:"
        f" {_format_runs(metadata, lost_runs)}. Ingestion {ingestion} would reprocess them a second time."
    )


def _format_lost_rows(ingestion: str, metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    summary_progress = progress_from_snapshots(ingestion, metadata)
    offsets = sorted(summary_progress.offsets.items()) if summary_progress is not None else []
    until = ", ".join(f"{part.topic}[{part.partition}] {offset}" for part, offset in offsets)
    return (
        f"The table was rolled back and has lost rows of dead letters that ingestion {ingestion} had"
        f" reprocessed: {_format_runs(metadata, lost_runs)}. It still has the topics' records before"
        f" {until or 'all offsets that it had read'}."
    )


def _format_runs(metadata: TableMetadata, lost_runs: Sequence[ReprocessingRun]) -> str:
    """Format the lost runs, each with its snapshot in the table of `metadata`, or as expired.

    A rebase gives a snapshot another id. The text has the id on `main`, where the snapshot records its id on
    the run's branch.
    """
    snapshot_ids = {
        number: snapshot.snapshot_id
        for snapshot in metadata.snapshots
        for number in (snapshot.snapshot_id, replayed_from(snapshot))
    }
    run_snapshots = {run.run_id: snapshot_ids.get(run.snapshot_id) for run in lost_runs}
    return ", ".join(
        f"run {run} in snapshot {snapshot_id}"
        if snapshot_id is not None
        else f"run {run} in a snapshot that has expired"
        for run, snapshot_id in run_snapshots.items()
    )


def _holds_run(metadata: TableMetadata, run: ReprocessingRun) -> bool:
    """Return whether the table has the rows of a reprocessing run. Returns True also if that is unknown.

    If the run's snapshot is missing but older ancestors remain, it did not expire as an ancestor: then all
    older ancestors would have expired too. So the table was rolled back, and the snapshot expired later. A
    snapshot never has a smaller sequence number on `main` than on the run's branch.
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
