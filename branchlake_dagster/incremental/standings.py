"""Every table on `main` that says it was computed from changes, and what it has left of them.

It needs no definitions, only the lake, so also consumers of other code locations are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.branching.consuming.positions import Consumed, Positions, read
from branchlake_dagster.branching.errors import PositionUnreadable
from branchlake_dagster.changes.capture import capture
from branchlake_dagster.changes.errors import ChangeLost
from branchlake_dagster.changes.model import ChangeSet, Position
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable


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

    def oldest_s(self, now: datetime) -> float | None:
        """The age of the oldest change that is left, in seconds; None without any."""
        oldest = self.change.oldest if self.change is not None and not self.change.empty else None
        return None if oldest is None else max(0.0, (now - oldest).total_seconds())


def standings(lake: Lakehouse) -> Iterator[TableStanding | str]:
    """By table and input; a sentence instead for a table whose properties cannot be read."""
    catalog = lake.catalog(MAIN)
    for entry in lake.nessie.entries(MAIN, fetch_content=True):
        if not isinstance(entry.content, IcebergTable):
            continue
        table = catalog.table_of(entry.key.elements, entry.content)
        try:
            positions = read(table.metadata.properties, table=entry.key.name)
        except PositionUnreadable as error:
            yield str(error)
            continue
        if consumed := _whole(positions):
            for name, position in sorted(consumed.inputs.items()):
                yield _standing(catalog, entry.key.name, name, position, consumed, len(positions.partitions))


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
    return TableStanding(table, name, consumed.run_id, position, ahead, change, trouble)
