"""Record the origin of each snapshot, and describe each materialization's snapshot in Dagster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import (
    InputContext,
    MetadataValue,
    OutputContext,
    TableColumn,
    TableColumnConstraints,
    TableSchema,
)
from pyiceberg.table import Table

from branchlake_dagster.internals.dagster import add_loaded_input_metadata
from branchlake_dagster.runs.run_branch import RunBranch
from branchlake_dagster.stored_names import EventMetadata, LakeProperty
from branchlake_dagster.tables.specification import TableSpec

_MAX_LISTED = 20


def build_snapshot_properties(
    *,
    spec: TableSpec,
    asset: str,
    partitions: tuple[str, ...],
    code_version: str | None,
    run: RunBranch | None,
    root_run_id: str | None,
    step: str | None = None,
    attempt: int | None = None,
    replaced: str | None = None,
) -> dict[str, str]:
    """Return the entries that a write adds to a snapshot's summary, all with the prefix `branchlake.`.

    `step` and `attempt` (from 1) distinguish the attempts of one step. `replaced` is the JSON record of the
    replaced rows (`replaced_rows.to_json`).
    """
    partition_text = ",".join(partitions[:_MAX_LISTED]) + (
        f",… {len(partitions)} in all" if len(partitions) > _MAX_LISTED else ""
    )
    entries = {
        LakeProperty.ASSET: asset,
        LakeProperty.WRITE_MODE: spec.write_mode,
        LakeProperty.KEYS: ",".join(spec.keys),
        LakeProperty.PARTITION: partition_text,
        LakeProperty.REPLACED: replaced,
        LakeProperty.CODE_VERSION: code_version,
        LakeProperty.STEP: step,
        LakeProperty.ATTEMPT: str(attempt) if attempt else None,
    }
    if run is not None:
        entries |= {
            LakeProperty.RUN_ID: run.run_id,
            LakeProperty.ROOT_RUN_ID: root_run_id or run.run_id,
            LakeProperty.BASE_HASH: run.open().base_hash,
        }
        entries[LakeProperty.UNBRANCHED] = "true" if run.open().unbranched else None
    return {name: value for name, value in entries.items() if value}


def materialization_metadata(
    table: Table,
    spec: TableSpec,
    run: RunBranch | None,
    *,
    partition_rows: int | None,
    branch_head: str | None = None,
) -> dict[str, Any]:
    """Return Dagster's table metadata plus branch, head, base hash and snapshot id. Reads no data.

    `partition_rows` are the rows of the one written partition; None if several or none were written.
    `branch_head` is the hash of the branch that holds this state of the table.
    """
    snapshot = table.current_snapshot()
    metadata: dict[str, Any] = {
        "dagster/table_name": spec.name,
        "dagster/column_schema": _column_schema(table),
        "dagster/uri": MetadataValue.path(table.location()),
        "dagster/storage_kind": "iceberg",
        EventMetadata.WRITE_MODE: spec.write_mode,
    }
    if (rows := count_rows(table)) is not None:
        metadata[EventMetadata.ROWS_ON_BRANCH] = MetadataValue.int(rows)
    if partition_rows is not None:
        metadata[EventMetadata.PARTITION_ROWS_ON_BRANCH] = MetadataValue.int(partition_rows)
    if snapshot is not None:
        # Text, because snapshot ids exceed the integers of a browser.
        metadata[EventMetadata.SNAPSHOT_ID] = MetadataValue.text(str(snapshot.snapshot_id))
    if run is not None:
        location = run.open()
        metadata[EventMetadata.BRANCH] = MetadataValue.text(location.branch)
        metadata[EventMetadata.BASE_HASH] = MetadataValue.text(location.base_hash)
        if branch_head is not None and not location.unbranched:
            metadata[EventMetadata.BRANCH_HEAD] = MetadataValue.text(branch_head)
            run.note_recorded_head(branch_head)
        if location.unbranched:
            metadata[EventMetadata.UNBRANCHED] = MetadataValue.bool(True)
    return metadata


def count_rows(table: Table) -> int | None:
    """Count the rows of a table from its snapshot's summary. None if the summary does not allow it.

    This is so if the total is missing, or if another engine wrote equality deletes.
    """
    snapshot = table.current_snapshot()
    if snapshot is None:
        return 0
    summary: Mapping[str, str] = snapshot.summary.additional_properties if snapshot.summary else {}
    if "total-records" not in summary or int(summary.get("total-equality-deletes", 0)):
        return None
    return int(summary["total-records"]) - int(summary.get("total-position-deletes", 0))


def _column_schema(table: Table) -> TableSchema:
    return TableSchema(
        columns=[
            TableColumn(
                name=field.name,
                type=str(field.field_type),
                description=field.doc,
                constraints=TableColumnConstraints(nullable=field.optional),
            )
            for field in table.schema().fields
        ]
    )


def output_partition_keys(context: OutputContext) -> tuple[str, ...]:
    """Return the partition keys of this output; empty if the asset is not partitioned."""
    return tuple(context.asset_partition_keys) if context.has_asset_partitions else ()


def report_read(context: InputContext, spec: TableSpec, ref: str) -> None:
    """Add the table and the reference to the input's LOADED_INPUT event.

    These events form a run's read set.
    """
    metadata = {
        EventMetadata.TABLE: MetadataValue.text(spec.name),
        EventMetadata.REF: MetadataValue.text(ref),
    }
    add_loaded_input_metadata(context, metadata)
