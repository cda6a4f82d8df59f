"""Every table on `main` that says it was computed from changes, and what it has left of them.

It needs no definitions, only the lake, so also consumers of other code locations are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import Transient
from branchlake_dagster.history.capture import capture, holds, rolled_back
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position, moment
from branchlake_dagster.incremental.positions import Consumed, Positions, read, recorded_time
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieError, NessieUnauthorized
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.tables.errors import PositionUnreadable


@dataclass(frozen=True)
class TableStanding:
    """How far a table has consumed one input, as a whole; `ahead` are the partitions that are further.

    `change` is what it has left, None when that cannot be told, for which `trouble` says why.
    """

    table: str
    input: str
    run_id: str
    position: Position
    ahead: int
    change: ChangeSet | None
    trouble: str | None = None
    valid_through: datetime | None = None
    """Up to which time the table has all records, as its runs recorded it; None if that is not known."""

    def oldest_s(self, now: datetime) -> float | None:
        """The age of the oldest change that is left, in seconds; None without any."""
        oldest = self.change.oldest if self.change is not None and not self.change.empty else None
        return None if oldest is None else max(0.0, (now - oldest).total_seconds())


@dataclass(frozen=True)
class Unreadable:
    """A table of which not even its properties can be read, and why; it may be a consumer or not."""

    table: str
    trouble: str


@dataclass(frozen=True)
class TablePositions:
    """A table on `main` with the positions recorded in it; they are empty if it consumes no changes."""

    name: str
    metadata: TableMetadata
    positions: Positions


def recorded_positions(lake: Lakehouse) -> Iterator[TablePositions | Unreadable]:
    """The recorded positions of every table on `main`; of a table that cannot be read, the reason.

    Reads the metadata of each table. Raises NessieError if Nessie does not answer.
    """
    catalog = lake.catalog(MAIN)
    for entry in lake.nessie.entries(MAIN, fetch_content=True):
        if not isinstance(entry.content, IcebergTable):
            continue
        name = entry.key.name
        try:
            metadata = catalog.table_of(entry.key.elements, entry.content).metadata
            positions = read(metadata.properties, table=name)
        except NessieError:
            raise
        except PositionUnreadable as error:
            yield Unreadable(name, str(error))
        except Exception as error:  # noqa: BLE001 - a store and a metadata file may raise anything
            yield Unreadable(name, _in_words(error))
        else:
            yield TablePositions(name, metadata, positions)


def standings(lake: Lakehouse) -> Iterator[TableStanding | Unreadable]:
    """By table and input. What is wrong with one table is told and stops no other."""
    catalog = lake.catalog(MAIN)
    for table in recorded_positions(lake):
        if isinstance(table, Unreadable):
            yield table
        elif consumed := _whole(table.positions):
            time = recorded_time(table.metadata, table.name)
            for name, position in sorted(consumed.inputs.items()):
                found = _standing(
                    catalog, table.name, name, position, consumed, len(table.positions.partitions)
                )
                if not holds(table.metadata, consumed.at):
                    found = replace(found, change=None, trouble=rolled_back(table.name).message)
                yield replace(found, valid_through=moment(time.ms) if time is not None else None)


def _whole(positions: Positions) -> Consumed | None:
    """What counts for the table as a whole; before its first, what the first partition says."""
    if positions.floor is not None:
        return positions.floor
    return next((positions.partitions[name] for name in sorted(positions.partitions)), None)


def _standing(
    catalog: NessieCatalog, table: str, name: str, position: Position, consumed: Consumed, ahead: int
) -> TableStanding:
    change, trouble = None, None
    try:
        change = capture(catalog.load_table(tuple(ContentKey.from_path(name))), position, name=name)
    except NoSuchTableError:
        trouble = "The input has no table any more."
    except ChangeLost as lost:
        trouble = str(lost)
    except Exception as error:
        if isinstance(error, Transient | NessieUnauthorized):
            raise  # it is Nessie that does not answer
        trouble = f"Of the input: {_in_words(error)}"
    return TableStanding(table, name, consumed.run_id, position, ahead, change, trouble)


def _in_words(error: Exception) -> str:
    return f"its metadata cannot be read ({type(error).__name__}: {error})"
