"""Report the backlog of every table on `main` that recorded positions in its inputs.

Only the lake is read, not definitions. So consumers of all code locations are included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import Transient
from branchlake_dagster.history.capture import capture_change, contains_snapshot, result_rolled_back_error
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position, from_epoch_ms
from branchlake_dagster.incremental.positions import (
    ConsumptionRecord,
    Positions,
    read_positions,
    recorded_time,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieError, NessieUnauthorized
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.tables.errors import PositionUnreadable


@dataclass(frozen=True)
class InputBacklog:
    """The position of a table in one input, and the change that it has not consumed.

    `position` counts for the whole table; `partitions_ahead` is the number of partitions that have consumed
    more. `change` is None if the remaining change is unknown; `trouble` is the reason.
    """

    table: str
    input: str
    run_id: str
    position: Position
    partitions_ahead: int
    change: ChangeSet | None
    trouble: str | None = None
    valid_through: datetime | None = None
    """The time up to which the table has all records, as its runs recorded it; None if it is unknown."""

    def oldest_age_s(self, now: datetime) -> float | None:
        """Return the age of the oldest unconsumed change in seconds; None if nothing is left or known."""
        oldest = self.change.oldest if self.change is not None and not self.change.empty else None
        return None if oldest is None else max(0.0, (now - oldest).total_seconds())


@dataclass(frozen=True)
class UnreadableTable:
    """A table whose properties cannot be read, with the reason. It may or may not be a consumer."""

    table: str
    trouble: str


@dataclass(frozen=True)
class TablePositions:
    """A table on `main` with its recorded positions; they are empty if it consumes no changes."""

    name: str
    metadata: TableMetadata
    positions: Positions


def iter_recorded_positions(lake: Lakehouse) -> Iterator[TablePositions | UnreadableTable]:
    """Yield the recorded positions of every table on `main`, or the reason why a table cannot be read.

    Reads the metadata of each table. Raises NessieError if Nessie does not answer.
    """
    catalog = lake.catalog(MAIN)
    for entry in lake.nessie.entries(MAIN, fetch_content=True):
        if not isinstance(entry.content, IcebergTable):
            continue
        table_name = entry.key.name
        try:
            metadata = catalog.table_of(entry.key.elements, entry.content).metadata
            positions = read_positions(metadata.properties, table=table_name)
        except NessieError:
            raise
        except PositionUnreadable as error:
            yield UnreadableTable(table_name, str(error))
        except Exception as error:  # noqa: BLE001 - a store and a metadata file may raise anything
            yield UnreadableTable(table_name, _format_metadata_error(error))
        else:
            yield TablePositions(table_name, metadata, positions)


def iter_input_backlogs(lake: Lakehouse) -> Iterator[InputBacklog | UnreadableTable]:
    """Yield the backlog of each consumer table and input on `main`.

    An unreadable table is yielded with the reason and does not affect other tables. Raises NessieError if
    Nessie does not answer.
    """
    catalog = lake.catalog(MAIN)
    for table in iter_recorded_positions(lake):
        if isinstance(table, UnreadableTable):
            yield table
        elif position_record := _table_position(table.positions):
            valid_through = recorded_time(table.metadata, table.name)
            for input_name, position in sorted(position_record.inputs.items()):
                backlog = _load_input_backlog(
                    catalog,
                    table.name,
                    input_name,
                    position,
                    position_record,
                    len(table.positions.partitions),
                )
                if not contains_snapshot(table.metadata, position_record.snapshot_id):
                    backlog = replace(
                        backlog, change=None, trouble=result_rolled_back_error(table.name).message
                    )
                yield replace(
                    backlog,
                    valid_through=from_epoch_ms(valid_through.ms) if valid_through is not None else None,
                )


def _table_position(positions: Positions) -> ConsumptionRecord | None:
    """Return the common record of a table; if there is none, the record of its first partition by name.

    The common record is the record for all partitions without their own entry. None if the table has neither.
    """
    if positions.common_position is not None:
        return positions.common_position
    return next((positions.partitions[name] for name in sorted(positions.partitions)), None)


def _load_input_backlog(
    catalog: NessieCatalog,
    table: str,
    input_name: str,
    position: Position,
    position_record: ConsumptionRecord,
    partitions_ahead: int,
) -> InputBacklog:
    change, trouble = None, None
    try:
        change = capture_change(
            catalog.load_table(tuple(ContentKey.from_path(input_name))), position, name=input_name
        )
    except NoSuchTableError:
        trouble = "The table of the input no longer exists."
    except ChangeLost as lost:
        trouble = str(lost)
    except Exception as error:
        if isinstance(error, Transient | NessieUnauthorized):
            raise  # Nessie does not answer or refuses the token
        trouble = f"Input {input_name}: {_format_metadata_error(error)}"
    return InputBacklog(
        table, input_name, position_record.run_id, position, partitions_ahead, change, trouble
    )


def _format_metadata_error(error: Exception) -> str:
    return f"its metadata cannot be read ({type(error).__name__}: {error})"
