"""Passes over the same records until their tables are there, and take what the records have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from branchlake_dagster.ingest.batch.before import KnownTables
from branchlake_dagster.ingest.batch.place import Place
from branchlake_dagster.ingest.converting.columns import ddl
from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.converting.types import found_types
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.declaring.routing import route, taken
from branchlake_dagster.ingest.errors import TableTooNarrow
from branchlake_dagster.ingest.scanning.scan import Scanned
from branchlake_dagster.ingest.scanning.targets import Evolving, Target, evolved, prepare
from branchlake_dagster.publication.rebase.replay import IcebergTables

_MOST_TURNS = 8
"""So often tables are evolved for the same records. Two do: for the fields of a sample, for all others."""


@dataclass(frozen=True)
class Settled:
    """The tables as the records want them, and the pass that wrote them all."""

    known: KnownTables
    targets: Sequence[Target]
    scanned: Scanned


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

    `read` is one pass; `incarnations` are Kafka's topic ids by name. Raises TableTooNarrow where records
    still want a wider table in the end, and what `with_new_names` raises.
    """
    renamed, turns, targets = False, 0, targets_of(known, place, frame, reading)
    while True:
        scanned = read(known, targets)
        if not renamed and (names := scanned.names(list(known.ingest.families))):
            renamed = True
            wider = place.with_new_names(known, names, incarnations, tables)
            if len(wider.wanted) > len(known.wanted):
                known, targets = wider, targets_of(wider, place, frame, reading)
                continue
        wants = scanned.evolving()
        if wants and turns < _MOST_TURNS:
            # Of many new fields the first records may have only some, or have them without a value.
            looks = (False, True) if not turns else (True,)
            evolving = (_evolved(frame, known.ingest, reading, targets, wants, whole=one) for one in looks)
            if grown := next(filter(None, evolving), None):
                turns, targets = turns + 1, grown
                continue
        _require_wide_enough(targets, wants)
        return Settled(known, targets, scanned)


def targets_of(known: KnownTables, place: Place, frame: DataFrame | None, reading: Format) -> list[Target]:
    """The targets; tables that are not there are made, of the types that the records of `frame` have."""
    ingest, found = known.ingest, {}
    for name, declared in zip(known.wanted, ingest.tables, strict=False):
        if known.there[name] is None and ingest.create:
            found[name] = (
                place.session().createDataFrame([], ddl(list(declared.columns.items()))).schema
                if declared.columns or frame is None
                else found_types(
                    frame,
                    reading,
                    envelope=ingest.envelope is not None,
                    of=taken(declared, route(ingest, reading)),
                )
            )
    return prepare(ingest, place.catalog, known.there, known.wanted, found)


def _evolved(
    frame: DataFrame,
    ingest: Ingest,
    reading: Format,
    targets: Sequence[Target],
    evolving: Mapping[int, Evolving],
    *,
    whole: bool,
) -> list[Target]:
    """The targets as the records want them; none where that changes nothing. `whole`: by all records."""
    found = list(targets)
    for number, wants in evolving.items():
        declared = targets[number].declared
        assert declared is not None  # noqa: S101 - dead letters take everything
        of = taken(declared, route(ingest, reading))
        new = found_types(frame, reading, envelope=False, only=wants.add, of=of, whole=whole)
        if new.fields or wants.widen or wants.relax:
            found[number] = evolved(targets[number], wants, new)
    return found if any(one is not other for one, other in zip(found, targets, strict=True)) else []


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
