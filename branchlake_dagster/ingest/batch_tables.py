"""The target tables of a batch: how they are loaded, created and evolved on the batch's branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.table import Table
from pyiceberg.types import DecimalType, DoubleType, IcebergType, LongType
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import Terminal
from branchlake_dagster.ingest.declaration import ExpandedIngest, IngestTable
from branchlake_dagster.ingest.errors import IngestError
from branchlake_dagster.ingest.spark_expressions import RecordColumn, columns_of
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.tables.errors import TableMissing, name_in_use_error, no_namespace_error
from branchlake_dagster.tables.partitioning import build_partition_spec
from branchlake_dagster.tables.schemas import (
    build_iceberg_schema,
    evolve_table,
    stored_schema,
    table_arrow_schema,
)
from branchlake_dagster.tables.specification import (
    LayoutField,
    format_table_name,
    require_parquet,
    table_identifier,
)

DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("incarnation", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        pa.field("table", pa.string()),
        pa.field("error_kind", pa.string()),
        pa.field("error", pa.string()),
        pa.field("batch", pa.string()),
        pa.field("received_at", pa.timestamp("us", "UTC")),
        pa.field("schema_version", pa.int32()),
        pa.field("reprocessed_in", pa.string()),
    ]
)
"""Columns of a dead letter: the unchanged record, the table that it was meant for, and the error."""
KEPT_RECORD_SCHEMA = pa.schema(
    [
        *(DEAD_LETTER_SCHEMA.field(name) for name in ("topic", "incarnation", "partition", "offset")),
        *(DEAD_LETTER_SCHEMA.field(name) for name in ("timestamp", "key", "value", "headers")),
        *(DEAD_LETTER_SCHEMA.field(name) for name in ("batch", "received_at", "schema_version")),
    ]
)
"""Columns of a kept record: the unchanged record, and the batch that read it."""
_RECORD_TABLES = {
    "dead letters": (DEAD_LETTER_SCHEMA, "day(timestamp)"),
    "kept records": (KEPT_RECORD_SCHEMA, "day(received_at)"),
}
"""Schema and layout of the tables that hold whole records."""
Identifier = tuple[str, ...]


class TypesUnknown(IngestError, Terminal):  # noqa: N818
    """A table that must be created has no declared columns, and no records to infer them from."""


@dataclass
class Target:
    """A table that a batch writes to, in its present state on the batch's branch.

    `columns` are the columns that are filled from fields of records, without those of attributes.
    """

    declaration: IngestTable | None
    """The declaration of the table; None for the dead letters and the kept records."""
    identifier: Identifier
    table: Table
    columns: tuple[RecordColumn, ...]

    @property
    def name(self) -> str:
        """The dotted name of the table."""
        return format_table_name(self.identifier)


@dataclass(frozen=True)
class BatchTargets:
    """The targets of a batch: the ingestion's tables, its dead letters and its kept records.

    The number of a target, by which the workers and the scan name it, is its index: first the tables, then
    the dead letters, then the kept records. Iteration yields the targets in the order of their numbers.
    `kept_records` is None for an ingestion without `keep_value`.
    """

    tables: tuple[Target, ...]
    dead_letters: Target
    kept_records: Target | None = None

    @property
    def dead_letter_number(self) -> int:
        """The index of the dead letters."""
        return len(self.tables)

    @property
    def kept_records_number(self) -> int | None:
        """The index of the kept records; None if there is no such table."""
        return None if self.kept_records is None else len(self.tables) + 1

    def __len__(self) -> int:
        return self.dead_letter_number + (1 if self.kept_records is None else 2)

    def __iter__(self) -> Iterator[Target]:
        yield from self.tables
        yield self.dead_letters
        if self.kept_records is not None:
            yield self.kept_records

    def __getitem__(self, number: int) -> Target:
        targets = (*self.tables, self.dead_letters, *filter(None, [self.kept_records]))
        return targets[number]

    @property
    def declarations(self) -> dict[str, IngestTable]:
        """The declarations of the tables by dotted name, without the dead letters and kept records."""
        return {target.name: target.declaration for target in self.tables if target.declaration is not None}

    @property
    def names(self) -> list[str]:
        """The dotted names of all targets, in the order of their numbers."""
        return [target.name for target in self]


def table_identifiers(ingest: ExpandedIngest, default_namespace: str) -> dict[str, Identifier]:
    """Return the identifiers of an ingestion's tables by dotted name, in the order of `Ingest.all_assets`.

    `default_namespace` is the namespace of tables whose asset keys have only one part.
    """
    identifiers = [table_identifier(key, default_namespace) for key in ingest.all_assets]
    return {format_table_name(one): one for one in identifiers}


def load_tables(
    client: NessieClient,
    catalog: NessieCatalog,
    identifiers: Mapping[str, Identifier],
    tables: IcebergTableFormat,
) -> dict[str, Table | None]:
    """Load tables at the catalog's reference, by the same names; None for a table that does not exist.

    Nessie gets one request. `tables` caches the metadata files that it reads.
    """
    keys = {name: ContentKey(identifier) for name, identifier in identifiers.items()}
    contents_by_key = client.contents(catalog.ref, list(keys.values()))
    loaded_tables: dict[str, Table | None] = {}
    for name, key in keys.items():
        content = contents_by_key.get(key)
        table = tables.open(key, content).table if isinstance(content, IcebergTable) else None
        loaded_tables[name] = table and Table(
            key.elements, table.metadata, table.metadata_location, table.io, catalog
        )
    return loaded_tables


def prepare_targets(
    ingest: ExpandedIngest,
    catalog: NessieCatalog,
    loaded_tables: Mapping[str, Table | None],
    identifiers: Mapping[str, Identifier],
    inferred_columns: Mapping[str, StructType],
) -> BatchTargets:
    """Create missing tables on the branch, and return the batch's targets in the order of `identifiers`.

    `inferred_columns` maps the name of a table to create to its columns. Raises TypesUnknown if a table to
    create is not in `inferred_columns`, TableMissing if the ingestion must not create tables, and
    ConfigurationError if a table has a file format that the workers cannot write.
    """
    targets = []
    count = len(ingest.tables)
    declarations: list[IngestTable | None] = [*ingest.tables, *[None] * (len(identifiers) - count)]
    for number, (declaration, (name, identifier)) in enumerate(
        zip(declarations, identifiers.items(), strict=True)
    ):
        table = loaded_tables[name]
        if table is None and declaration is not None and not ingest.create:
            raise TableMissing(
                f"The table does not exist, and ingestion {ingest.name} must not create tables.",
                table=name,
                branch=catalog.ref,
                hint="Create the table, or let the ingestion create it: Ingest(create=True).",
            )
        if table is None and declaration is not None:
            table = _create_table(catalog, identifier, name, declaration, inferred_columns.get(name))
        elif table is None:
            schema, layout = _RECORD_TABLES["dead letters" if number == count else "kept records"]
            table = _create_with_layout(catalog, identifier, name, schema, (layout,), {})
        require_parquet(table.metadata.properties, table_name=name)
        catalog.record_prefixes(table.metadata)
        targets.append(Target(declaration, identifier, table, _field_columns(table, name, declaration)))
    return BatchTargets(tuple(targets[:count]), targets[count], next(iter(targets[count + 1 :]), None))


def _field_columns(table: Table, name: str, declaration: IngestTable | None) -> tuple[RecordColumn, ...]:
    """Return the columns that are filled from fields of a record, not from its attributes.

    `declaration` is None for the dead letters and the kept records; the result is then empty.
    """
    if declaration is None:
        return ()
    all_columns = columns_of(table.schema(), table.metadata.properties, table=name)
    return tuple(one for one in all_columns if one.name not in declaration.attributes)


def _create_table(
    catalog: NessieCatalog,
    identifier: Identifier,
    name: str,
    declaration: IngestTable,
    inferred_columns: StructType | None,
) -> Table:
    properties = {str(key): str(value) for key, value in declaration.properties.items()}
    column_schema = _table_schema(declaration, inferred_columns, name)
    return _create_with_layout(catalog, identifier, name, column_schema, declaration.layout, properties)


def _create_with_layout(
    catalog: NessieCatalog,
    identifier: Identifier,
    name: str,
    column_schema: pa.Schema,
    layout: Sequence[str],
    properties: Mapping[str, str],
) -> Table:
    schema = build_iceberg_schema(stored_schema(column_schema, table_name=name), table_name=name)
    spec = build_partition_spec(
        None, {}, schema, table_name=name, layout=tuple(LayoutField.from_declaration(one) for one in layout)
    )
    try:
        return catalog.create_table(identifier, schema, partition_spec=spec, properties=dict(properties))
    except TableAlreadyExistsError as exists:
        try:
            return catalog.load_table(identifier)
        except NoSuchTableError:
            raise name_in_use_error(name) from exists
    except NoSuchNamespaceError as error:  # missing namespaces are created
        raise no_namespace_error(name) from error


_ATTRIBUTE_TYPES: Mapping[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "key": pa.binary(),
    "digest": pa.string(),
}


def _table_schema(declaration: IngestTable, inferred_columns: StructType | None, name: str) -> pa.Schema:
    if inferred_columns is None:
        raise TypesUnknown("The table does not exist, and its columns are not known yet.", table=name)
    column_schema = to_arrow_schema(inferred_columns)
    attribute_fields = [
        pa.field(column, _ATTRIBUTE_TYPES[attribute])
        for column, attribute in declaration.attributes.items()
        if column not in column_schema.names
    ]
    return pa.schema([*column_schema, *attribute_fields])


@dataclass(frozen=True)
class EvolutionNeeds:
    """The changes that records need in a table.

    `add` are fields that need a column, `widen` columns that need a wider type, and `relax` required columns
    that need to accept null.
    """

    add: frozenset[str] = frozenset()
    widen: frozenset[str] = frozenset()
    relax: frozenset[str] = frozenset()


def evolve_target(target: Target, needs: EvolutionNeeds, new_field_types: StructType) -> Target:
    """Change the schema of the target's table as the records need it, and return the new target.

    `new_field_types` are the types of the fields to add. Returns the same target if the schema does not
    change.
    """
    table, old_schema = target.table, target.table.schema()
    current_schema = table_arrow_schema(table.schema(), table_name=target.name)
    fields = [one for one in to_arrow_schema(new_field_types) if one.name not in current_schema.names]
    if fields:
        added_schema = stored_schema(pa.schema(fields), table_name=target.name)
        table = evolve_table(
            table, pa.schema([*current_schema, *added_schema]), table_name=target.name, widen=False
        )
    with table.update_schema() as update:
        for column in target.columns:
            if column.name in needs.widen:
                update.update_column(column.name, field_type=_iceberg_type(column.wider.kind))
            if column.name in needs.relax:
                update.make_column_optional(column.name)
    if table.schema() == old_schema:
        return target
    return Target(
        target.declaration, target.identifier, table, _field_columns(table, target.name, target.declaration)
    )


def _iceberg_type(kind: str) -> IcebergType:
    plain: Mapping[str, IcebergType] = {"bigint": LongType(), "double": DoubleType()}
    if kind in plain:
        return plain[kind]
    precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
    return DecimalType(int(precision), int(scale))
