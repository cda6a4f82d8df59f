"""The table of kept records, and the removal of those that are too old.

With `keep_value`, each batch appends its records as they were received, in the commit that adds their rows.
The table is partitioned by the day of receipt, so a removal only drops whole files: it reads the manifests
and no data. A table property has the first day that is not removed. The removal is repeated when that day
changes, once a day.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

from pyiceberg.expressions import LessThan
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform

from branchlake_dagster.ingest.batch_commit import BatchTableChange, commit_tables
from branchlake_dagster.ingest.batch_context import BatchContext
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.stored_names import LakeProperty

RECEIVED_AT = "received_at"
"""The column with the time at which the batch of a record began."""
EPOCH = date(1970, 1, 1)
"""The day from which Iceberg counts days."""


def remove_expired_records(
    ingest: Ingest,
    batch_context: BatchContext,
    kept_records: Target,
    *,
    now: datetime,
    tables: IcebergTableFormat,
) -> int:
    """Remove the days of kept records that ended more than `keep_value_days` before `now`.

    Returns the number of removed records. Commits on the branch, or does nothing if the table's property
    shows that an earlier batch of the same day has done so.
    """
    first_day = (now.astimezone(UTC) - timedelta(days=ingest.keep_value_days)).date()
    property_name = LakeProperty.KEPT_SINCE_PREFIX + ingest.name
    if kept_records.table.metadata.properties.get(property_name) == first_day.isoformat():
        return 0
    files = list(_iter_files_before(kept_records.table, first_day))
    commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        [
            BatchTableChange(
                kept_records.identifier,
                kept_records.table,
                snapshot_properties={
                    **batch_context.snapshot_properties,
                    LakeProperty.ASSET: "/".join(kept_records.identifier),
                },
                table_properties={property_name: first_day.isoformat()},
                removed_files=files,
            )
        ],
        ingestion=ingest.name,
        message=f"Ingest {ingest.name}: remove kept records from before {first_day}",
        properties=batch_context.commit_properties,
        tables=tables,
    )
    return sum(file.record_count for file in files)


def _iter_files_before(table: Table, first_day: date) -> Iterator[DataFile]:
    """Yield the files whose partition is a day of receipt before `first_day`. Reads manifests only.

    Files of a partition spec without the day of receipt are left out, because they may hold newer records.
    """
    if table.current_snapshot() is None:
        return
    source_id = table.schema().find_field(RECEIVED_AT).field_id
    day_positions = {
        spec_id: next(
            (
                number
                for number, part in enumerate(spec.fields)
                if part.source_id == source_id and isinstance(part.transform, DayTransform)
            ),
            None,
        )
        for spec_id, spec in table.specs().items()
    }
    older = LessThan(RECEIVED_AT, f"{first_day.isoformat()}T00:00:00+00:00")
    for task in table.scan(row_filter=older).plan_files():
        position = day_positions[task.file.spec_id]
        if position is not None and task.file.partition[position] < (first_day - EPOCH).days:
            yield task.file
