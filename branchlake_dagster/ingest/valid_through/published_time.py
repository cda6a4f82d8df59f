"""Up to which time an ingested table is published, from the metadata that a reference has of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from dagster import AssetKey
from pyiceberg.table import Table

from branchlake_dagster.branching.table.spec import identifier_of, table_name
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.errors import PositionLost
from branchlake_dagster.ingest.positions.recorded import Recorded, ingestions_in
from branchlake_dagster.ingest.positions.standing import standing
from branchlake_dagster.ingest.reporting.report import moment
from branchlake_dagster.ingest.running.batch_assets import declared
from branchlake_dagster.ingest.scanning.targets import Identifier, load
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import ContentKey
from branchlake_dagster.publication.rebase.replay import IcebergTables

TableName = str | AssetKey
"""A dotted table name (`raw.orders`), or the key of its asset, also as text (`raw/orders`)."""


@dataclass(frozen=True)
class PublishedTime:
    """Up to which time a table has all records of its ingestions; None if `reason` says why it has not."""

    at: datetime | None
    reason: str
    ingested: bool = True
    """Whether any ingestion is known to fill the table."""

    def reaches(self, wanted: datetime) -> bool:
        """Whether all records of before `wanted` are in the table."""
        return self.at is not None and self.at >= wanted


def identifier_of_table(table: TableName, default_namespace: str) -> Identifier:
    """The parts of a table's name; a name without namespace is in the default one.

    Raises ConfigurationError for what can name no table.
    """
    if isinstance(table, AssetKey):
        return identifier_of(table, default_namespace)
    try:
        parts = table.split("/") if "/" in table else ContentKey.from_path(table).elements
    except ValueError as error:
        raise ConfigurationError(f"{table!r} is not the name of a table.", hint='"raw.orders"') from error
    return identifier_of(AssetKey(list(parts)), default_namespace)


def format_table(table: TableName) -> str:
    """The table as it was written, for names and errors."""
    return table.to_user_string() if isinstance(table, AssetKey) else table


def published_time(
    client: NessieClient, catalog: NessieCatalog, identifier: Identifier, default_namespace: str
) -> PublishedTime:
    """Up to which time the table is published at the catalog's reference. Reads metadata, no data files.

    Several ingestions may fill the table: the earliest of their times counts. The dead letters' table of an
    ingestion has the newest time, because it takes part in each batch. Nessie's errors pass through.
    """
    opened, name = IcebergTables(catalog), table_name(identifier)
    table = load(client, catalog, {name: identifier}, opened)[name]
    if table is None:
        return PublishedTime(None, f"Table {name} does not exist yet")
    times: list[datetime] = []
    for ingestion, dead_letters in _ingestions(identifier, table.metadata.properties, default_namespace):
        tables: dict[str, Table | None] = {name: table}
        if dead_letters is not None and dead_letters != identifier:
            tables |= load(client, catalog, {table_name(dead_letters): dead_letters}, opened)
        try:
            known = standing(ingestion, tables, on_rollback="replay")
        except PositionLost as lost:
            return PublishedTime(None, f"The position of ingestion {ingestion} is lost: {lost.message}")
        if known.replayed:
            back = ", ".join(sorted(known.replayed))
            return PublishedTime(None, f"Ingestion {ingestion} has to fill {back} again after a rollback")
        if known.valid_through_ms is None:
            return PublishedTime(None, f"Ingestion {ingestion} has not recorded a valid-through time yet")
        times.append(moment(known.valid_through_ms))
    if not times:
        return PublishedTime(None, f"No ingestion has recorded a position in table {name}", ingested=False)
    at = min(times)
    return PublishedTime(at, f"Table {name} is published through {at.isoformat()}")


def parse_time(time: datetime | str) -> datetime:
    """A time with its zone. Raises ConfigurationError for text that is no time, and for one without zone."""
    try:
        at = datetime.fromisoformat(time) if isinstance(time, str) else time
    except ValueError as error:
        raise ConfigurationError(f"{time!r} is not an ISO 8601 time.", hint='"2026-11-24T06:00Z"') from error
    if at.tzinfo is None:
        raise ConfigurationError(f"The time {at.isoformat()} has no time zone.", hint='"2026-11-24T06:00Z"')
    return at


def _ingestions(
    identifier: Identifier, properties: dict[str, str], default_namespace: str
) -> Iterator[tuple[str, Identifier | None]]:
    """The ingestions that fill a table, each with its table of dead letters, None if that is not known.

    A table says so itself with its first rows; until then the declarations of this code location count.
    """
    recorded = ingestions_in(properties)
    for name, text in recorded.items():
        try:
            dead_letters = Recorded.from_text(text).dead_letters
        except (ValueError, KeyError, TypeError):
            dead_letters = None  # `standing` reports the damage
        yield name, ContentKey.from_path(dead_letters).elements if dead_letters else None
    for name, ingest in declared.items():
        if name not in recorded and any(
            identifier_of(one.asset, default_namespace) == identifier
            for one in ingest.tables
            if not one.is_family
        ):
            yield name, identifier_of(ingest.dead_letters_asset, default_namespace)
