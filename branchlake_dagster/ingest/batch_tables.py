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
from branchlake_dagster.ingest.declaration import Expanded, IngestTable
from branchlake_dagster.ingest.errors import IngestError
from branchlake_dagster.ingest.spark_expressions import Column, columns_of
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTables
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.tables.partitioning import partition_spec
from branchlake_dagster.tables.schemas import arrow_schema, evolve, iceberg_schema, stored_schema
from branchlake_dagster.tables.specification import LayoutField, identifier_of, require_parquet, table_name

DEAD_LETTERS = pa.schema(
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

    declared: IngestTable | None
    """None: the dead letters."""
    identifier: Identifier
    table: Table
    columns: tuple[Column, ...]

    @property
    def name(self) -> str:
        """Its dotted name."""
        return table_name(self.identifier)


def identifiers(ingest: Expanded, default_namespace: str) -> dict[str, Identifier]:
    """The tables of an ingestion, the dead letters last, by dotted name."""
    keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
    found = [identifier_of(key, default_namespace) for key in keys]
    return {table_name(one): one for one in found}


def load(
    client: NessieClient, catalog: NessieCatalog, wanted: Mapping[str, Identifier], tables: IcebergTables
) -> dict[str, Table | None]:
    """The tables as a reference has them; None: not there. One request; `tables` remembers metadata files."""
    keys = {name: ContentKey(identifier) for name, identifier in wanted.items()}
    seen = client.contents(catalog.ref, list(keys.values()))
    found: dict[str, Table | None] = {}
    for name, key in keys.items():
        content = seen.get(key)
        table = tables.open(key, content).table if isinstance(content, IcebergTable) else None
        found[name] = table and Table(
            key.elements, table.metadata, table.metadata_location, table.io, catalog
        )
    return found


def prepare(
    ingest: Expanded,
    catalog: NessieCatalog,
    known: Mapping[str, Table | None],
    wanted: Mapping[str, Identifier],
    found: Mapping[str, StructType],
) -> list[Target]:
    """The targets, in the order of `wanted`: tables are made that are missing.

    `found` has by table the columns of a table to be made. Raises TypesUnknown for a table whose columns have
    to be found first, TableMissing where none may be made, and ConfigurationError for a table whose files
    cannot be written here.
    """
    targets = []
    for declared, (name, identifier) in zip([*ingest.tables, None], wanted.items(), strict=True):
        table = known[name]
        if table is None and declared is not None and not ingest.create:
            raise TableMissing(
                f"Ingestion {ingest.name} may not make tables.",
                table=name,
                branch=catalog.ref,
                hint="Make it, or let the ingestion do so: create=True.",
            )
        if table is None:
            table = _made(catalog, identifier, name, declared, found.get(name))
        require_parquet(table.metadata.properties, table=name)
        catalog.record_prefixes(table.metadata)
        targets.append(Target(declared, identifier, table, _columns(table, name, declared)))
    return targets


def _columns(table: Table, name: str, declared: IngestTable | None) -> tuple[Column, ...]:
    """Those that a record's fields fill."""
    if declared is None:
        return ()
    every = columns_of(table.schema(), table.metadata.properties, table=name)
    return tuple(one for one in every if one.name not in declared.attributes)


def _made(
    catalog: NessieCatalog,
    identifier: Identifier,
    name: str,
    declared: IngestTable | None,
    found: StructType | None,
) -> Table:
    arrow = DEAD_LETTERS if declared is None else _declared_schema(declared, found, name)
    layout = ("day(timestamp)",) if declared is None else tuple(declared.layout)
    schema = iceberg_schema(stored_schema(arrow, table=name), table=name)
    spec = partition_spec(None, {}, schema, table=name, layout=tuple(LayoutField.of(one) for one in layout))
    properties = {} if declared is None else {str(k): str(v) for k, v in declared.properties.items()}
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


def _declared_schema(declared: IngestTable, found: StructType | None, name: str) -> pa.Schema:
    if found is None:
        raise TypesUnknown("The table is not there, and its columns are not known.", table=name)
    arrow = to_arrow_schema(found)
    extra = [
        pa.field(column, _ATTRIBUTE_TYPES[attribute])
        for column, attribute in declared.attributes.items()
        if column not in arrow.names
    ]
    return pa.schema([*arrow, *extra])


@dataclass(frozen=True)
class Evolving:
    """What records want of a table: columns for fields, columns of a wider type, columns without a value."""

    add: frozenset[str] = frozenset()
    widen: frozenset[str] = frozenset()
    relax: frozenset[str] = frozenset()


def evolved(target: Target, wanted: Evolving, new: StructType) -> Target:
    """The target with a table that takes what did not fit; `new` are the types of the fields to add.

    The same target where that changes nothing.
    """
    table, before = target.table, target.table.schema()
    now = arrow_schema(table.schema(), name=target.name)
    fields = [one for one in to_arrow_schema(new) if one.name not in now.names]
    if fields:
        more = stored_schema(pa.schema(fields), table=target.name)
        table = evolve(table, pa.schema([*now, *more]), name=target.name, widen=False)
    with table.update_schema() as update:
        for column in target.columns:
            if column.name in wanted.widen:
                update.update_column(column.name, field_type=_iceberg_type(column.wider.kind))
            if column.name in wanted.relax:
                update.make_column_optional(column.name)
    if table.schema() == before:
        return target
    return Target(target.declared, target.identifier, table, _columns(table, target.name, target.declared))


def _iceberg_type(kind: str) -> IcebergType:
    plain: Mapping[str, IcebergType] = {"bigint": LongType(), "double": DoubleType()}
    if kind in plain:
        return plain[kind]
    precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
    return DecimalType(int(precision), int(scale))
