"""The tables of a batch on its branch: loaded, made where they are missing, and what is written to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.exceptions import TableAlreadyExistsError
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
from branchlake_dagster.tables.errors import TableMissing
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
"""A record that no table could take: as it was, where it was meant to go, and why it did not."""
Identifier = tuple[str, ...]


class TypesUnknown(IngestError, Terminal):  # noqa: N818
    """A table that is not there has no declared columns: they are found in the records first."""


@dataclass
class Target:
    """A table of the batch as its branch has it."""

    declaration: IngestTable | None
    """None: the dead letters."""
    identifier: Identifier
    table: Table
    columns: tuple[RecordColumn, ...]

    @property
    def name(self) -> str:
        """Its dotted name."""
        return format_table_name(self.identifier)


def table_identifiers(ingest: ExpandedIngest, default_namespace: str) -> dict[str, Identifier]:
    """The tables of an ingestion, the dead letters last, by dotted name."""
    keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
    identifiers = [table_identifier(key, default_namespace) for key in keys]
    return {format_table_name(one): one for one in identifiers}


def load_tables(
    client: NessieClient,
    catalog: NessieCatalog,
    identifiers: Mapping[str, Identifier],
    tables: IcebergTableFormat,
) -> dict[str, Table | None]:
    """The tables as a reference has them; None: not there. One request; `tables` remembers metadata files."""
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
) -> list[Target]:
    """The targets, in the order of `identifiers`: tables are made that are missing.

    `inferred_columns` has by table the columns of a table to be made. Raises TypesUnknown for a table whose
    columns have
    to be found first, TableMissing where none may be made, and ConfigurationError for a table whose files
    cannot be written here.
    """
    targets = []
    for declaration, (name, identifier) in zip([*ingest.tables, None], identifiers.items(), strict=True):
        table = loaded_tables[name]
        if table is None and declaration is not None and not ingest.create:
            raise TableMissing(
                f"Ingestion {ingest.name} may not make tables.",
                table=name,
                branch=catalog.ref,
                hint="Make it, or let the ingestion do so: create=True.",
            )
        if table is None:
            table = _create_table(catalog, identifier, name, declaration, inferred_columns.get(name))
        require_parquet(table.metadata.properties, table_name=name)
        catalog.record_prefixes(table.metadata)
        targets.append(Target(declaration, identifier, table, _field_columns(table, name, declaration)))
    return targets


def _field_columns(table: Table, name: str, declaration: IngestTable | None) -> tuple[RecordColumn, ...]:
    """Those that a record's fields fill."""
    if declaration is None:
        return ()
    all_columns = columns_of(table.schema(), table.metadata.properties, table=name)
    return tuple(one for one in all_columns if one.name not in declaration.attributes)


def _create_table(
    catalog: NessieCatalog,
    identifier: Identifier,
    name: str,
    declaration: IngestTable | None,
    inferred_columns: StructType | None,
) -> Table:
    column_schema = (
        DEAD_LETTER_SCHEMA if declaration is None else _table_schema(declaration, inferred_columns, name)
    )
    layout = ("day(timestamp)",) if declaration is None else tuple(declaration.layout)
    schema = build_iceberg_schema(stored_schema(column_schema, table_name=name), table_name=name)
    spec = build_partition_spec(
        None, {}, schema, table_name=name, layout=tuple(LayoutField.from_declaration(one) for one in layout)
    )
    properties = {} if declaration is None else {str(k): str(v) for k, v in declaration.properties.items()}
    try:
        return catalog.create_table(identifier, schema, partition_spec=spec, properties=properties)
    except TableAlreadyExistsError:
        return catalog.load_table(identifier)


_ATTRIBUTE_TYPES: Mapping[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "key": pa.binary(),
}


def _table_schema(declaration: IngestTable, inferred_columns: StructType | None, name: str) -> pa.Schema:
    if inferred_columns is None:
        raise TypesUnknown("The table is not there, and its columns are not known.", table=name)
    column_schema = to_arrow_schema(inferred_columns)
    attribute_fields = [
        pa.field(column, _ATTRIBUTE_TYPES[attribute])
        for column, attribute in declaration.attributes.items()
        if column not in column_schema.names
    ]
    return pa.schema([*column_schema, *attribute_fields])


@dataclass(frozen=True)
class EvolutionNeeds:
    """What records want of a table: columns for fields, columns of a wider type, columns without a value."""

    add: frozenset[str] = frozenset()
    widen: frozenset[str] = frozenset()
    relax: frozenset[str] = frozenset()


def evolve_target(target: Target, needs: EvolutionNeeds, new_field_types: StructType) -> Target:
    """The target with a table that takes what did not fit; `new_field_types` are the types of the fields to add.

    The same target where that changes nothing.
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
