"""Passes over the same records until their tables are there, and take what the records have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from branchlake_dagster.ingest.batch_context import KnownTables, Place
from branchlake_dagster.ingest.batch_tables import Evolving, Target, evolved, prepare
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.errors import TableTooNarrow
from branchlake_dagster.ingest.field_types import found_types
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.prepared_records import fields_taken, route, taken
from branchlake_dagster.ingest.scan import Scanned, delete_files
from branchlake_dagster.ingest.spark_expressions import ddl
from branchlake_dagster.ingest.writable_columns import possible, room, taken_names
from branchlake_dagster.publication.replay import IcebergTables
from branchlake_dagster.wording import counted

_MOST_TURNS = 8
"""So often tables are evolved for the same records. Two do: for the fields of a sample, for all others."""

_SHOWN = 5


@dataclass(frozen=True)
class Settled:
    """The tables as the records want them, and the pass that wrote them all."""

    known: KnownTables
    targets: Sequence[Target]
    scanned: Scanned
    left_out: tuple[str, ...] = ()
    """A sentence for each table of the fields that could be no columns of it."""


def settle(
    known: KnownTables,
    place: Place,
    frame: DataFrame,
    reading: Format,
    read: Callable[[KnownTables, Sequence[Target]], Scanned],
    incarnations: Mapping[str, str],
    tables: IcebergTables,
) -> Settled:
    """Read the records of `frame` until a pass wants nothing more of the tables; each pass writes anew.

    The data files of all other passes are deleted, and those of the last one where this raises.

    `read` is one pass; `incarnations` are Kafka's topic ids by name. Raises TableTooNarrow where records
    still want a wider table in the end, and what `with_new_names` raises.
    """
    left_out: dict[str, set[str]] = {}
    renamed, turns, targets = False, 0, targets_of(known, place, frame, reading, left_out)
    while True:
        scanned, read_into, wanted = read(known, targets), targets, False
        try:
            if not renamed and (names := scanned.names(list(known.ingest.families))):
                renamed = True
                # As this attempt has them: loaded anew they might have what an earlier one sends late.
                known = replace(known, there={one.name: one.table for one in targets})
                wider = place.with_new_names(known, names, incarnations, tables)
                if len(wider.wanted) > len(known.wanted):
                    known, targets = wider, targets_of(wider, place, frame, reading, left_out)
                    continue
            wants = scanned.evolving()
            if wants and turns < _MOST_TURNS:
                # Of many new fields the first records may have only some, or have them without a value.
                looks = (False, True) if not turns else (True,)
                evolving = (
                    _evolved(frame, known.ingest, reading, targets, wants, left_out, whole=one)
                    for one in looks
                )
                if grown := next(filter(None, evolving), None):
                    turns, targets = turns + 1, grown
                    continue
            _require_wide_enough(targets, wants)
            wanted = True
            return Settled(known, targets, scanned, _told(left_out))
        finally:
            if not wanted:
                delete_files(scanned, read_into)


def targets_of(
    known: KnownTables,
    place: Place,
    frame: DataFrame | None,
    reading: Format,
    left_out: dict[str, set[str]] | None = None,
) -> list[Target]:
    """The targets; tables that are not there are made, of the types that the records of `frame` have.

    `left_out` gets by table the fields that could be no columns.
    """
    ingest, found = known.ingest, {}
    for name, declared in zip(known.wanted, ingest.tables, strict=False):
        if known.there[name] is not None or not ingest.create:
            continue
        if declared.columns or frame is None:
            found[name] = place.session().createDataFrame([], ddl(list(declared.columns.items()))).schema
            continue
        envelope, of = ingest.envelope is not None, taken(declared, route(ingest, reading))
        types = found_types(frame, reading, envelope=envelope, of=of)
        kept, others = possible(types.fields, declared.attributes, ingest.most_columns)
        found[name] = StructType(kept)
        if left_out is not None:
            left_out.setdefault(name, set()).update(others)
    targets = prepare(ingest, place.catalog, known.there, known.wanted, found)
    wants = _fields_of_schema(ingest, reading, targets) if frame is not None else {}
    if frame is None or not wants:
        return targets
    held: dict[str, set[str]] = {} if left_out is None else left_out
    return _evolved(frame, ingest, reading, targets, wants, held, whole=False) or targets


def _fields_of_schema(ingest: Ingest, reading: Format, targets: Sequence[Target]) -> dict[int, Evolving]:
    """The fields of the values' schema, if they have one, that tables have no columns for; by target."""
    if "add" not in ingest.evolve:
        return {}
    names = reading.field_names(envelope=ingest.envelope is not None)
    others = {ingest.route_by, ingest.operation}
    missing = {
        number: {*(names or ())} - fields_taken(one) - others for number, one in enumerate(targets[:-1])
    }
    return {number: Evolving(add=frozenset(fields)) for number, fields in missing.items() if fields}


def _evolved(
    frame: DataFrame,
    ingest: Ingest,
    reading: Format,
    targets: Sequence[Target],
    evolving: Mapping[int, Evolving],
    left_out: dict[str, set[str]],
    *,
    whole: bool,
) -> list[Target]:
    """The targets as the records want them; none where that changes nothing. `whole`: by all records."""
    found = list(targets)
    for number, wants in evolving.items():
        one = targets[number]
        assert one.declared is not None  # noqa: S101 - dead letters take everything
        of = taken(one.declared, route(ingest, reading))
        names, most = taken_names(one.table), room(one.table, ingest.most_columns)
        used = {name.casefold() for name in names}
        only = {name for name in wants.add if most and name.casefold() not in used}
        new = found_types(frame, reading, envelope=ingest.envelope is not None, only=only, of=of, whole=whole)
        kept, others = possible(new.fields, names, most)
        left_out.setdefault(one.name, set()).update({*others} | (wants.add - only))
        if kept or wants.widen or wants.relax:
            found[number] = evolved(one, wants, StructType(kept))
    return found if any(one is not other for one, other in zip(found, targets, strict=True)) else []


def _told(left_out: Mapping[str, set[str]]) -> tuple[str, ...]:
    """A sentence for each table, with a few of the names."""
    told = []
    for table, names in sorted(left_out.items()):
        if names:
            shown = ", ".join([*sorted(names)[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
            told.append(
                f"{counted(len(names), 'field')} became no column of {table}, which has as many as it may, or"
                f" their names in another case or for something else: {shown}."
            )
    return tuple(told)


def _require_wide_enough(targets: Sequence[Target], wants: Mapping[int, Evolving]) -> None:
    """Raise TableTooNarrow: rows that still want another type or no value were written to no table."""
    for number, want in wants.items():
        if want.widen or want.relax:
            raise TableTooNarrow(
                f"Records do not fit column {', '.join(sorted(want.widen | want.relax))}, although it was"
                " evolved for them.",
                table=targets[number].name,
                hint="Somebody changes the table's columns at the same time, or a type has no wider one."
                " Nothing of the batch is kept.",
            )
