"""What `main` held at a time."""

from __future__ import annotations

from datetime import datetime

from branchlake_dagster.changes.capture import position_of
from branchlake_dagster.changes.model import Position
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.nessie.model import ContentKey, IcebergTable


def position_at(lake: Lakehouse, identifier: tuple[str, ...], at: datetime) -> Position | None:
    """Where a table of `main` stood at a time; None: there was no such table.

    Reads the log back to then.
    """
    key = ContentKey(identifier)
    for entry in lake.nessie.log(MAIN):
        made = entry.commit.commit_time
        if made is not None and made <= at:
            ref = f"{MAIN}@{entry.commit.hash}"
            found = lake.nessie.contents(ref, [key]).get(key)
            if not isinstance(found, IcebergTable):
                return None
            return position_of(lake.catalog(ref).table_of(identifier, found))
    return None
