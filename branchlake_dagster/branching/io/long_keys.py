"""Partition keys that are too long for a folder: their tables keep their files in folders of no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote_plus

from pyiceberg.table import Table, TableProperties

from branchlake_dagster.branching.table.selection import Selection, Values

_LONGEST = 255
"""Bytes of a folder's name on the file systems there are; Iceberg calls folders `column=value`."""

_WITHOUT_VALUES = {
    TableProperties.OBJECT_STORE_ENABLED: "true",
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: "false",
}


def properties(selection: Selection | None) -> Mapping[str, str]:
    """What a table must be told so that it can hold the selection; usually nothing.

    Both engines follow these properties of Iceberg's.
    """
    long = selection is not None and any(map(_too_long, _folders(selection)))
    return _WITHOUT_VALUES if long else {}


def make_room(table: Table, selection: Selection | None) -> Table:
    """The table, told so. Files that are there stay where they are."""
    wanted = properties(selection)
    if all(table.properties.get(name) == value for name, value in wanted.items()):
        return table
    with table.transaction() as transaction:
        transaction.set_properties(dict(wanted))
    return table.refresh()


def _folders(selection: Selection) -> set[str]:
    conditions = {one for part in selection.slices for one in part if isinstance(one, Values)}
    return {f"{quote_plus(one.column)}={quote_plus(value)}" for one in conditions for value in one.values}


def _too_long(folder: str) -> bool:
    return len(folder.encode()) > _LONGEST
