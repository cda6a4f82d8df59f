"""Repeated passes over the same records until their tables exist and have all columns for the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from branchlake_dagster.ingest.batch_context import BatchContext, IngestionTables
from branchlake_dagster.ingest.batch_tables import (
    BatchTargets,
    EvolutionNeeds,
    evolve_target,
    prepare_targets,
)
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.errors import ColumnsUnknown, TableTooNarrow
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.prepared_records import mapped_fields, record_route, takes_route
from branchlake_dagster.ingest.scan import ScanResult, delete_files
from branchlake_dagster.ingest.spark_expressions import format_ddl
from branchlake_dagster.ingest.writable_columns import (
    infer_field_types,
    remaining_columns,
    reserved_names,
    select_new_columns,
)
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.wording import format_count

_MAX_EVOLUTIONS = 8
"""Largest number of evolutions for the same records. Usually two suffice: for the fields of a sample, and for
all others."""

_SHOWN = 5
T = TypeVar("T")


@dataclass(frozen=True)
class SchemaEvolution:
    """The evolved tables, and the result of the pass that wrote all records to them."""

    ingestion_tables: IngestionTables
    targets: BatchTargets
    scanned: ScanResult
    left_out: tuple[str, ...] = ()
    """One sentence for each table about fields that could not become columns."""


def evolve_until_stable(
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    frame: DataFrame,
    record_format: Format,
    scan_targets: Callable[[IngestionTables, BatchTargets], ScanResult],
    incarnations: Mapping[str, str],
    tables: IcebergTableFormat,
) -> SchemaEvolution:
    """Repeat the pass over `frame` until the records need no more changes of the tables.

    Each pass writes all records again. The data files of all passes but the last are deleted, and those of
    the last pass too if this function raises. `scan_targets` makes one pass. `incarnations` are Kafka's topic
    ids by name.

    Raises TableTooNarrow if the records still need wider columns in the end, and the errors of
    `with_new_route_names`.
    """
    left_out: dict[str, set[str]] = {}
    names_checked, rounds, targets = (
        False,
        0,
        build_targets(ingestion_tables, batch_context, frame, record_format, left_out),
    )
    while True:
        scanned, pass_targets, keep_files = scan_targets(ingestion_tables, targets), targets, False
        try:
            if not names_checked and (
                route_names := scanned.new_route_names(list(ingestion_tables.ingest.families))
            ):
                names_checked = True
                # Use the tables as this attempt has evolved them. Loaded again, they might contain late
                # commits of an earlier attempt.
                ingestion_tables = replace(
                    ingestion_tables,
                    loaded_tables={target.name: target.table for target in targets},
                )
                wider = batch_context.with_new_route_names(
                    ingestion_tables, route_names, incarnations, tables
                )
                if len(wider.identifiers) > len(ingestion_tables.identifiers):
                    ingestion_tables, targets = (
                        wider,
                        build_targets(wider, batch_context, frame, record_format, left_out),
                    )
                    continue
            needs = scanned.evolution_needs()
            if needs and rounds < _MAX_EVOLUTIONS:
                # The first records may have only some of many new fields, or have them without a value. So
                # the second attempt reads all records.
                passes = (False, True) if not rounds else (True,)
                candidates = (
                    _evolve_targets(
                        frame,
                        ingestion_tables.ingest,
                        record_format,
                        targets,
                        needs,
                        left_out,
                        all_records=all_records,
                    )
                    for all_records in passes
                )
                if grown := next(filter(None, candidates), None):
                    rounds, targets = rounds + 1, grown
                    continue
            _require_wide_enough(targets, needs)
            keep_files = True
            return SchemaEvolution(ingestion_tables, targets, scanned, _format_left_out(left_out))
        finally:
            if not keep_files:
                delete_files(scanned, pass_targets)


def build_targets(
    ingestion_tables: IngestionTables,
    batch_context: BatchContext,
    frame: DataFrame | None,
    record_format: Format,
    left_out: dict[str, set[str]] | None = None,
) -> BatchTargets:
    """Build the targets, and create missing tables on the branch if the ingestion may create tables.

    A created table has the declared columns, or the fields of the records of `frame`. With `evolve="add"`,
    existing tables get columns for the fields of the format's schema, if it has one. The fields that could
    not become columns are added to `left_out`, by table.

    Raises ColumnsUnknown, with the dotted name of its table, if no record has fields for a new table.
    """
    ingest, schemas = ingestion_tables.ingest, {}
    for name, declaration in ingestion_tables.declarations.items():
        if ingestion_tables.loaded_tables[name] is not None or not ingest.create:
            continue
        if declaration.columns or frame is None:
            schemas[name] = (
                batch_context.session()
                .createDataFrame([], format_ddl(list(declaration.columns.items())))
                .schema
            )
            continue
        envelope, condition = (
            ingest.envelope is not None,
            takes_route(declaration, record_route(ingest, record_format)),
        )
        try:
            types = infer_field_types(frame, record_format, has_envelope=envelope, condition=condition)
        except ColumnsUnknown as unknown:
            unknown.table = name
            raise
        fields, others = select_new_columns(types.fields, declaration.attributes, ingest.most_columns)
        schemas[name] = StructType(fields)
        if left_out is not None:
            left_out.setdefault(name, set()).update(others)
    targets = prepare_targets(
        ingest, batch_context.catalog, ingestion_tables.loaded_tables, ingestion_tables.identifiers, schemas
    )
    needs = _missing_fields(ingest, record_format, targets) if frame is not None else {}
    if frame is None or not needs:
        return targets
    omitted_fields: dict[str, set[str]] = {} if left_out is None else left_out
    return (
        _evolve_targets(frame, ingest, record_format, targets, needs, omitted_fields, all_records=False)
        or targets
    )


def run_without_unknown_tables(run: Callable[[IngestionTables], T], ingestion_tables: IngestionTables) -> T:
    """Return the result of `run` with the tables, without new tables whose columns no record shows.

    For passes over some of the records of a batch. Others may have the columns of a new table.
    """
    while True:
        try:
            return run(ingestion_tables)
        except ColumnsUnknown as unknown:
            if unknown.table is None or unknown.table not in ingestion_tables.declarations:
                raise
            ingestion_tables = ingestion_tables.without_tables([unknown.table])


def _missing_fields(
    ingest: Ingest, record_format: Format, targets: BatchTargets
) -> dict[int, EvolutionNeeds]:
    """Return the fields of the format's schema that have no column in a target, by the target's index.

    The result is empty if the ingestion adds no columns, or if the format has no schema, as JSON.
    """
    if "add" not in ingest.evolve:
        return {}
    names = record_format.schema_field_names(has_envelope=ingest.envelope is not None)
    others = {ingest.route_by, ingest.operation}
    missing = {
        number: {*(names or ())} - mapped_fields(target) - others
        for number, target in enumerate(targets.tables)
    }
    return {number: EvolutionNeeds(add=frozenset(fields)) for number, fields in missing.items() if fields}


def _evolve_targets(
    frame: DataFrame,
    ingest: Ingest,
    record_format: Format,
    targets: BatchTargets,
    needs_by_target: Mapping[int, EvolutionNeeds],
    left_out: dict[str, set[str]],
    *,
    all_records: bool,
) -> BatchTargets | None:
    """Return the targets with the changes that the records need; None if nothing changes.

    `needs_by_target` has the needs by the index of the target. With `all_records` the types are inferred from
    all records, otherwise from a sample. The fields that could not become columns are added to `left_out`, by
    table.
    """
    new_targets = list(targets.tables)
    for number, needs in needs_by_target.items():
        target = targets[number]
        assert target.declaration is not None  # noqa: S101 - the dead letter table needs no evolution
        condition = takes_route(target.declaration, record_route(ingest, record_format))
        names, max_columns = (
            reserved_names(target.table),
            remaining_columns(target.table, ingest.most_columns),
        )
        used = {name.casefold() for name in names}
        only_fields = {name for name in needs.add if max_columns and name.casefold() not in used}
        new_types = infer_field_types(
            frame,
            record_format,
            has_envelope=ingest.envelope is not None,
            only_fields=only_fields,
            condition=condition,
            all_records=all_records,
        )
        new_fields, others = select_new_columns(new_types.fields, names, max_columns)
        left_out.setdefault(target.name, set()).update({*others} | (needs.add - only_fields))
        if new_fields or needs.widen or needs.relax:
            new_targets[number] = evolve_target(target, needs, StructType(new_fields))
    if all(new_target is target for new_target, target in zip(new_targets, targets.tables, strict=True)):
        return None
    return replace(targets, tables=tuple(new_targets))


def _format_left_out(left_out: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Format one sentence for each table about its fields that did not become columns."""
    sentences = []
    for table, names in sorted(left_out.items()):
        if names:
            name_list = ", ".join([*sorted(names)[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
            sentences.append(
                f"{format_count(len(names), 'field')} did not become columns of {table}, because the table"
                " has its maximum of columns, or their names are already used in another case or for"
                f" another purpose: {name_list}."
            )
    return tuple(sentences)


def _require_wide_enough(targets: BatchTargets, needs_by_target: Mapping[int, EvolutionNeeds]) -> None:
    """Raise TableTooNarrow if rows still need other column types or nulls: such rows were not written.

    `needs_by_target` has the needs that the last pass counted, by the index of the target in `targets`.
    """
    for number, needs in needs_by_target.items():
        if needs.widen or needs.relax:
            raise TableTooNarrow(
                f"Column {', '.join(sorted(needs.widen | needs.relax))} still cannot hold some records"
                " after schema evolution.",
                table=targets[number].name,
                hint="Another writer may be changing the table's columns at the same time, or the type has"
                " no wider type. The batch was discarded.",
            )
