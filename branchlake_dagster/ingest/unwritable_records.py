"""Dead letters of kind `unwritable`: records that fail a batch, written without Spark.

Some records fail in a way that no rule foresees: Spark's Kafka source cannot represent their time, or a
library has a bug. Such a record fails the task that reads it, and so every batch that contains it. So the
batch is divided until the record is alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.expressions import And, EqualTo
from pyiceberg.table import Table

from branchlake_dagster.errors import BranchlakeError, without_credentials
from branchlake_dagster.ingest.batch_tables import DEAD_LETTER_SCHEMA, KEPT_RECORD_SCHEMA
from branchlake_dagster.ingest.errors import TableTooNarrow
from branchlake_dagster.ingest.offsets import Offsets, TopicPartition
from branchlake_dagster.ingest.record_frames import RawRecord, RecordPosition
from branchlake_dagster.ingest.worker_writer import SCHEMA_VERSION
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import Delete, IcebergTable, Operation, Put
from branchlake_dagster.tables.errors import ColumnUnsupported, SchemaMismatch
from branchlake_dagster.wording import format_count

UNWRITABLE = "unwritable"
"""The `error_kind` of dead letters of records that fail a batch even alone."""
_DATA_ERRORS = (ColumnUnsupported, SchemaMismatch, TableTooNarrow)
_OTHER_ERRORS = (OSError, MemoryError, CommitFailedException, CommitStateUnknownException)
_CAUSE = re.compile(
    r"^\s*(?:Caused by: )?((?:[A-Za-z_][\w$]*\.)*[A-Za-z_]\w*(?:Error|Exception)\b.*)$", re.MULTILINE
)
_LAST_FRAME = re.compile(
    r'^[ ]+File "[^"\n]*", line [0-9]+.*\n(?:[ ]+.*\n)*([A-Za-z_][\w.]*(?:: .*)?)$', re.MULTILINE
)
"""The last call of a Python traceback with the lines of its source, and then the exception.

Some exceptions have other names than errors, such as `ArrowInvalid`. Their text may have any further lines.
"""
_MAX_LENGTH = 500
_SHOWN = 3


def is_caused_by_records(error: Exception) -> bool:
    """Return whether the records of a pass may have caused its failure in Spark, a worker or a library.

    False for errors of Kafka, Nessie, a folder or Spark's server and for unknown outcomes: such batches are
    not divided.
    """
    if isinstance(error, BranchlakeError):
        return isinstance(error, _DATA_ERRORS)
    return not isinstance(error, _OTHER_ERRORS)


def error_reason(error: Exception) -> str:
    """Return the innermost cause in an error's text, which may be a stack trace.

    Credentials are removed. The result has one line of at most 500 characters.
    """
    text = str(error)
    python_causes = _LAST_FRAME.findall(text) if "Traceback" in text else []
    causes = python_causes or _CAUSE.findall(text)
    reason = causes[-1] if causes else f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return without_credentials(reason.strip())[:_MAX_LENGTH]


def format_note(unwritable: Mapping[RecordPosition, Exception]) -> str:
    """Format the sentences about unwritable records for the batch's notes and the run's log.

    `unwritable` maps the position of each record, at least one, to its error. The first three positions and
    the cause of the first error are named.
    """
    shown = [
        f"{partition.topic}[{partition.partition}] {offset}"
        for partition, offset in sorted(unwritable)[:_SHOWN]
    ]
    more = ", …" if len(unwritable) > _SHOWN else ""
    reason = error_reason(unwritable[min(unwritable)])
    return (
        f"{format_count(len(unwritable), 'record')} made the batch fail and became dead letters of kind"
        f" {UNWRITABLE}: {', '.join(shown)}{more}. The cause of the first: {reason}"
    )


@dataclass(frozen=True)
class UnwritableRecord:
    """A record that fails a batch even alone. It becomes one dead letter for each of `tables`.

    If `tables` is None, it becomes one dead letter for all tables that take the record. If `tables` is empty,
    it already has a dead letter.
    """

    record: RawRecord
    incarnation: str
    error: Exception
    tables: Sequence[str] | None = None


def build_dead_letters(
    records: Iterable[UnwritableRecord], *, batch_id: str, received_at_us: int
) -> dict[str, pa.Array]:
    """Build the dead letters of these records, as arrays by column name.

    A record has one dead letter for each of its `tables`, or one with a null table if they are None.
    `batch_id` is the id of the batch, and `received_at_us` its start in µs since 1970.
    """
    rows = [
        {
            **_record_columns(unwritable, batch_id, received_at_us),
            "table": table,
            "error_kind": UNWRITABLE,
            "error": error_reason(unwritable.error),
            "reprocessed_in": None,
        }
        for unwritable in records
        for table in ([None] if unwritable.tables is None else unwritable.tables)
    ]
    dead_letters = pa.Table.from_pylist(rows, DEAD_LETTER_SCHEMA).combine_chunks()
    return {name: dead_letters[name].combine_chunks() for name in DEAD_LETTER_SCHEMA.names}


def build_kept_records(
    records: Iterable[UnwritableRecord], *, batch_id: str, received_at_us: int
) -> pa.Table:
    """Build the rows of these records for the table of kept records, one for each record.

    `batch_id` is the id of the batch, and `received_at_us` its start in µs since 1970.
    """
    rows = [_record_columns(one, batch_id, received_at_us) for one in records]
    return pa.Table.from_pylist(rows, KEPT_RECORD_SCHEMA)


def _record_columns(unwritable: UnwritableRecord, batch_id: str, received_at_us: int) -> dict[str, object]:
    """Return the values of the columns that a dead letter and a kept record have in common, by name.

    `batch_id` is the id of the batch, and `received_at_us` its start in µs since 1970.
    """
    record = unwritable.record
    return {
        "topic": record.topic,
        "incarnation": unwritable.incarnation,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_us,
        "key": record.key,
        "value": record.value,
        "headers": [{"key": name, "value": value} for name, value in record.headers],
        "batch": batch_id,
        "received_at": received_at_us,
        "schema_version": SCHEMA_VERSION,
    }


def dead_letter_targets(
    position: RecordPosition,
    min_offsets: Mapping[str, Offsets],
    dead_letter_table: Table | None,
    dead_letter_table_name: str,
) -> Sequence[str] | None:
    """Return the tables that the dead letter of a record is for, or None for all that take the record.

    Returns () if the record already has a dead letter. `min_offsets` has the offsets below which each table
    takes no records. It is empty unless tables are filled again. Then the other tables have the record, or
    it is already a dead letter, so only the tables that are filled again may take it.
    """
    partition, offset = position
    if offset >= min_offsets.get(dead_letter_table_name, {}).get(partition, 0):
        return None
    if dead_letter_table is not None and _has_dead_letter(dead_letter_table, partition, offset):
        return ()
    return [
        name
        for name, table_offsets in min_offsets.items()
        if name != dead_letter_table_name and offset >= table_offsets.get(partition, 0)
    ]


def _has_dead_letter(dead_letter_table: Table, partition: TopicPartition, offset: int) -> bool:
    is_same_record: And | EqualTo = EqualTo("offset", offset)
    for name, value in (
        ("topic", partition.topic),
        ("incarnation", partition.incarnation),
        ("partition", partition.partition),
    ):
        is_same_record = And(is_same_record, EqualTo(name, value))
    return bool(
        dead_letter_table.scan(row_filter=is_same_record, selected_fields=("offset",), limit=1)
        .to_arrow()
        .num_rows
    )


def restore_tables(
    client: NessieClient, branch: str, at_hash: str, *, ingestion: str, properties: Mapping[str, str]
) -> None:
    """Restore the tables of a branch as they were at `at_hash`, in one commit. Drops tables that are newer.

    A failed pass may have created tables and columns for the very record that made it fail.
    """
    changed = client.diff_at(f"{branch}@{at_hash}", branch)
    operations: list[Operation] = []
    for entry in changed.entries:
        if isinstance(entry.from_content, IcebergTable):
            operations.append(Put(entry.key, entry.from_content))
        elif isinstance(entry.to_content, IcebergTable):
            operations.append(Delete(entry.key))
    if operations:
        client.commit(
            branch,
            expected_hash=changed.to_reference.hash,
            operations=operations,
            message=f"Ingest {ingestion}: restore the tables after a failed pass",
            properties=properties,
        )
