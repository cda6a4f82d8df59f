"""Tables that records name: which there are is not known before their first records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields

from dagster import AssetKey

from branchlake_dagster.ingest.declaring.declaration import ROUTE, Ingest, IngestTable

NAME = "[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*"
"""What a record may put into a table's name, and `NAME_LENGTH` characters of it at most. Two underscores
together are kept for the tables that only branches have."""
NAME_LENGTH = 128
Names = Mapping[str, Collection[str]]
"""By family, as its key is written, what records have put into the names of its tables."""


@dataclass(frozen=True, kw_only=True)
class NamedTable(IngestTable):
    """A table of a family: `name` is what the record says, `family` the key with the place for it."""

    name: str
    family: str


@dataclass(frozen=True, kw_only=True)
class Expanded(Ingest):
    """An ingestion whose families are given apart, and in whose tables are those of them that are known."""

    families: Mapping[str, IngestTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing: the ingestion that it is made of was looked at, and may have no table yet."""

    @property
    def named(self) -> list[NamedTable]:
        """The tables that records have named."""
        return [one for one in self.tables if isinstance(one, NamedTable)]


def expanded(ingest: Ingest, names: Names) -> Expanded:
    """The ingestion with a table for each name, behind those that have a key of their own.

    A name whose table is one of the others', or the dead letters', has none.
    """
    if isinstance(ingest, Expanded):
        families, fixed = ingest.families, [one for one in ingest.tables if not isinstance(one, NamedTable)]
    else:
        families = {one.asset.to_user_string(): one for one in ingest.tables if one.is_family}
        fixed = [one for one in ingest.tables if not one.is_family]
    taken = {ingest.dead_letters_asset, *(one.asset for one in fixed)}
    tables = list(fixed)
    for family, declared in families.items():
        for name in sorted(names.get(family, ())):
            table = _named(declared, family, name)
            if table.asset not in taken:
                taken.add(table.asset)
                tables.append(table)
    given = {one.name: getattr(ingest, one.name) for one in fields(Ingest)}
    # The place of the dead letters goes by the first table that was declared.
    given |= {"tables": tables, "dead_letters": ingest.dead_letters_asset}
    return Expanded(**given, families=families)


def names_of(tables: Iterable[NamedTable]) -> dict[str, list[str]]:
    """The names of tables by family."""
    found: dict[str, list[str]] = {}
    for one in tables:
        found.setdefault(one.family, []).append(one.name)
    return found


def names_text(names: Names) -> str:
    """As a table's property has them."""
    return json.dumps({family: sorted(found) for family, found in sorted(names.items())})


def names_from(text: str) -> dict[str, list[str]]:
    """Back again. Raises ValueError for anything else."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return {str(family): [str(one) for one in names] for family, names in found.items()}


def _named(declared: IngestTable, family: str, name: str) -> NamedTable:
    given = {one.name: getattr(declared, one.name) for one in fields(IngestTable)}
    *home, last = declared.asset.path
    given["key"] = AssetKey([*home, last.replace(ROUTE, name)])
    return NamedTable(**given, name=name, family=family)
