"""Errors of frames, and a selection in words for them: never an expression of an engine."""

from __future__ import annotations

from pyiceberg.schema import Schema
from pyiceberg.types import TimestampType

from branchlake_dagster.branching.errors import UpsertKeyInvalid
from branchlake_dagster.branching.table.selection import Selection, Values
from branchlake_dagster.branching.table.spec import TableSpec
from branchlake_dagster.errors import some
from branchlake_dagster.wording import agree


def must_be(selection: Selection, schema: Schema) -> str:
    """Which rows a frame for the selection may have, and how their time stamps are read."""
    naive = [one for one in selection.columns() if isinstance(schema.find_type(one), TimestampType)]
    have, are = agree(len(naive), "has", "have"), agree(len(naive), "it is", "they are")
    rule = (
        f" {', '.join(naive)} {have} no time zone, so {are} read as the clock of UTC: convert local times in"
        " the asset, or give them their zone."
    )
    return f"Its rows must be those where {rows_of(selection)}.{rule if naive else ''}"


def rows_of(selection: Selection) -> str:
    """Which rows a selection holds: the first few of its conditions, with their columns."""
    found = []
    for part in selection.slices:
        words = []
        for one in part:
            if isinstance(one, Values):
                words.append(f"{one.column} is {some(tuple(map(repr, one.values)))}")
            else:
                words.append(f"{one.start.isoformat()} <= {one.column} < {one.end.isoformat()}")
        found.append(" and ".join(words))
    return some(tuple(found)) if found else "no row"


def not_unique(spec: TableSpec) -> UpsertKeyInvalid:
    """The error for keys that are null or occur twice."""
    return UpsertKeyInvalid(
        f"Two rows share a key, or a key is null, in ({', '.join(spec.keys)}).",
        table=spec.name,
        hint="Keep one row per key before returning the frame.",
    )
