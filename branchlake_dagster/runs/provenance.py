"""What each snapshot says about its origin, and what each materialisation says about its snapshot."""

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

_MANY = 20


def snapshot_properties(
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
    """The entries our writes add to an Iceberg snapshot's summary, all prefixed `branchlake.`.

    `step` and `attempt` (from 1) tell the writes of one step's attempts from each other. `replaced` is the
    record of the predicate that was replaced, see `branching.replaced`.
    """
    listed = ",".join(partitions[:_MANY]) + (
        f",… {len(partitions)} in all" if len(partitions) > _MANY else ""
    )
    found = {
        LakeProperty.ASSET: asset,
        LakeProperty.WRITE_MODE: spec.write_mode,
        LakeProperty.KEYS: ",".join(spec.keys),
        LakeProperty.PARTITION: listed,
        LakeProperty.REPLACED: replaced,
        LakeProperty.CODE_VERSION: code_version,
        LakeProperty.STEP: step,
        LakeProperty.ATTEMPT: str(attempt) if attempt else None,
    }
    if run is not None:
        found |= {
            LakeProperty.RUN_ID: run.run_id,
            LakeProperty.ROOT_RUN_ID: root_run_id or run.run_id,
            LakeProperty.BASE_HASH: run.open().base_hash,
        }
        found[LakeProperty.UNBRANCHED] = "true" if run.open().unbranched else None
    return {name: value for name, value in found.items() if value}


def materialisation_metadata(
    table: Table,
    spec: TableSpec,
    run: RunBranch | None,
    *,
    partition_rows: int | None,
    branch_head: str | None = None,
) -> dict[str, Any]:
    """Dagster's standard table metadata plus branch, its head, base hash and snapshot id; reads no data.

    `partition_rows`: the rows of the one partition that was written; None if there are several or none.
    `branch_head`: the hash of the branch that holds this state of the table.
    """
    snapshot = table.current_snapshot()
    found: dict[str, Any] = {
        "dagster/table_name": spec.name,
        "dagster/column_schema": _column_schema(table),
        "dagster/uri": MetadataValue.path(table.location()),
        "dagster/storage_kind": "iceberg",
        EventMetadata.WRITE_MODE: spec.write_mode,
    }
    if (rows := row_count(table)) is not None:
        found[EventMetadata.ROWS_ON_BRANCH] = MetadataValue.int(rows)
    if partition_rows is not None:
        found[EventMetadata.PARTITION_ROWS_ON_BRANCH] = MetadataValue.int(partition_rows)
    if snapshot is not None:
        # As text: the ids exceed what the browser's numbers hold.
        found[EventMetadata.SNAPSHOT_ID] = MetadataValue.text(str(snapshot.snapshot_id))
    if run is not None:
        place = run.open()
        found[EventMetadata.BRANCH] = MetadataValue.text(place.branch)
        found[EventMetadata.BASE_HASH] = MetadataValue.text(place.base_hash)
        if branch_head is not None and not place.unbranched:
            found[EventMetadata.BRANCH_HEAD] = MetadataValue.text(branch_head)
            run.head_recorded(branch_head)
        if place.unbranched:
            found[EventMetadata.UNBRANCHED] = MetadataValue.bool(True)
    return found


def row_count(table: Table) -> int | None:
    """The rows of a table, from its snapshot's summary; None where another engine left equality deletes."""
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


def asset_partitions(context: OutputContext) -> tuple[str, ...]:
    """The partition keys this output covers; empty when the asset is not partitioned."""
    return tuple(context.asset_partition_keys) if context.has_asset_partitions else ()


def report_read(context: InputContext, spec: TableSpec, ref: str) -> None:
    """Let the input's LOADED_INPUT event say which table was read and where: a run's read set."""
    told = {EventMetadata.TABLE: MetadataValue.text(spec.name), EventMetadata.REF: MetadataValue.text(ref)}
    add_loaded_input_metadata(context, told)
