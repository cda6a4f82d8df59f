"""The classes with which users declare an ingestion, and the expansion of table families.

A family is a declaration with `{route}` in its key. It stands for one table per route of the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from dagster import AssetKey, FreshnessPolicy

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.formats import Format, Json
from branchlake_dagster.ingest.planning import CommittedOffsets, Start, StartingOffsets, TopicRules
from branchlake_dagster.ingest.progress import OnRollback
from branchlake_dagster.stored_names import KEPT_RECORDS_SUFFIX
from branchlake_dagster.tables.specification import (
    LayoutField,
    parse_layout,
    require_distinct_keys,
    require_parquet,
)

if TYPE_CHECKING:
    from pandera.pyspark import DataFrameModel

_INGESTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
Attribute = Literal["topic", "partition", "offset", "timestamp", "key", "digest"]
IngestMode = Literal["append", "upsert", "changes"]
RecordOperation = Literal["insert", "update", "delete"]
Evolution = Literal["add", "widen", "relax"]
TOMBSTONE = "tombstone"
"""The operation of a record that has a key and no value."""
ROUTE = "{route}"
"""The placeholder in the last part of a table's key. The route of a record replaces it."""
_MAX_KEPT_DAYS = 36_500
_VALUES_BY_OPTION: Mapping[str, tuple[str | None, ...]] = {
    "envelope": ("debezium", None),
    "source": ("kafka", "landing"),
    "on_contract": ("dead_letter", "block"),
    "on_unrouted": ("dead_letter", "skip"),
    "on_rollback": get_args(OnRollback),
    "on_recreated": ("stop", "start_over"),
    "on_reset": ("stop", "continue_at_end"),
    "on_lost": ("stop", "skip"),
}
"""The values that an option of an ingestion may have. A misspelled "stop" must not skip records."""
_DEBEZIUM: Mapping[str, RecordOperation] = {"c": "insert", "r": "insert", "u": "update", "d": "delete"}
_OPERATION_WORDS: Mapping[str, RecordOperation] = {
    **dict.fromkeys(("i", "insert", "c", "create", "r", "read"), "insert"),
    **dict.fromkeys(("u", "update", "upsert"), "update"),
    **dict.fromkeys(("d", "delete"), "delete"),
}


@dataclass(frozen=True, kw_only=True)
class IngestTable:
    """The declaration of a table that an ingestion fills, and of the records that go into it.

    Args:
        key (str | Sequence[str] | AssetKey): The asset key, such as `raw/orders`; it also names the table.
            With `{route}` in its last part (`raw/{route}`), each route that `route` matches has a table.
        columns (Mapping[str, str]): Spark types by column, `{"id": "bigint", "at": "timestamp"}`, for a table
            that is created. Records are always converted to the columns of the existing table. (default: the
            types of the first records)
        route (Optional[str]): A regular expression that the whole route of a record must match. If it has a
            group, the group names the table instead of the whole route. (default: every record)
        mode (Literal["append", "upsert", "changes"]): `append` adds the rows, `upsert` replaces rows with the
            same keys, and `changes` follows the record's operation. (default: `append`)
        keys (Sequence[str]): The columns that identify a row, for `upsert` and `changes`. If all keys are
            `attributes` and the record's `key` is one of them, a record without a value deletes the row.
        required (Sequence[str]): Columns that must have a value, in addition to the keys. A record without
            one of them is a dead letter.
        attributes (Mapping[str, str]): Columns that are not filled from the record's value, each with its
            source: `topic`, `partition`, `offset`, `timestamp` or `key` of the record, or `digest`, the
            SHA-256 digest of its value in hexadecimal. Example: `{"record_offset": "offset"}`.
        contract (Optional[type[DataFrameModel]]): The contract of each row, as for `pandera_checks`.
        layout (Sequence[str]): Partition transforms of a table that is created, as in `table_metadata`.
        properties (Mapping[str, str]): Iceberg table properties of a table that is created.
        description (Optional[str]): The asset's description.
        freshness_policy (Optional[FreshnessPolicy]): How old the newest batch may be, for Dagster's pages.
        days_from (Optional[date]): The first day, in UTC, of the asset `<key>/days`. It has a partition for
            each day, which is materialized when a published batch has changed rows of that day. `layout`
            must have `day(column)` or `hour(column)`. (default: no such asset)

    Examples:
        .. code-block:: python

            orders = IngestTable(
                key="raw/orders",
                columns={"id": "bigint", "price": "decimal(10,2)", "at": "timestamp"},
                layout=["day(at)"],
            )
    """

    key: str | Sequence[str] | AssetKey
    columns: Mapping[str, str] = field(default_factory=dict)
    route: str | None = None
    mode: IngestMode = "append"
    keys: Sequence[str] = ()
    required: Sequence[str] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    contract: type[DataFrameModel[Any]] | None = None
    layout: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    description: str | None = None
    freshness_policy: FreshnessPolicy | None = None
    days_from: date | None = None

    @property
    def asset(self) -> AssetKey:
        """The asset key of the table; for a family, the key with `{route}`."""
        return to_asset_key(self.key)

    @property
    def keyed_by_record(self) -> bool:
        """Whether `keys` has only columns of `attributes`, among them the Kafka key of the record.

        Then a record without a value still identifies a row, which it deletes. Always False for `append`.
        """
        attributes = [self.attributes.get(one) for one in self.keys]
        return self.mode != "append" and "key" in attributes and None not in attributes

    @property
    def is_family(self) -> bool:
        """Whether the declaration is a family: its key has `{route}`, and it stands for a table per route."""
        return ROUTE in self.asset.path[-1]

    def __post_init__(self) -> None:
        table_name = self.asset.to_user_string()
        if table_name.count(ROUTE) > self.is_family:
            raise ConfigurationError(
                f"A key can contain {ROUTE} only once, in its last part.",
                table=table_name,
                hint=f'key="raw/{ROUTE}"',
            )
        if self.is_family and self.freshness_policy is not None:
            raise ConfigurationError(
                "A family of tables cannot have a freshness policy: its tables have no asset definitions.",
                table=table_name,
                hint="Declare each table that needs a freshness policy with its own key, without {route}.",
            )
        layout_fields = parse_layout(self.layout, table_name=table_name)
        if self.days_from is not None:
            self._require_days(layout_fields, table_name)
        if self.mode not in ("append", "upsert", "changes"):
            raise ConfigurationError(
                f"Unknown mode {self.mode!r}.", table=table_name, hint="Use append, upsert or changes."
            )
        if self.mode != "append" and not self.keys:
            raise ConfigurationError(
                f"Mode {self.mode} needs the columns that identify a row.",
                table=table_name,
                hint='keys=["id"]',
            )
        require_distinct_keys(self.keys, table_name=table_name)
        for column, attribute in self.attributes.items():
            if attribute not in get_args(Attribute):
                raise ConfigurationError(
                    f"Column {column} has the unknown record attribute {attribute!r}.",
                    table=table_name,
                    hint=f"Use one of {', '.join(get_args(Attribute))}.",
                )
        require_parquet(
            {str(key): str(value) for key, value in self.properties.items()}, table_name=table_name
        )
        if self.route is not None:
            try:
                re.compile(self.route)
            except re.error as error:
                raise ConfigurationError(
                    f"The route {self.route!r} is not a valid regular expression: {error}.", table=table_name
                ) from error

    def _require_days(self, layout_fields: Iterable[LayoutField], table_name: str) -> None:
        """Raise ConfigurationError for a family, or if the layout has neither days nor hours.

        `layout_fields` is the parsed layout, and `table_name` the name of the table in the error.
        """
        if self.is_family:
            raise ConfigurationError(
                "A family of tables cannot report days: its tables have no asset definitions.",
                table=table_name,
                hint="Declare each table whose days are needed with its own key, without {route}.",
                reason="days_of_family",
            )
        transforms = {layout_field.transform for layout_field in layout_fields}
        if transforms.isdisjoint({"day", "hour"}):
            raise ConfigurationError(
                "days_from needs a table whose files are partitioned by day or hour.",
                table=table_name,
                hint='Add the time of the event to the layout: layout=["day(at)"].',
                reason="days_without_layout",
            )


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """An ingestion reads topics into tables: each batch is published in one commit, each record exactly once.

    Args:
        name (str): The permanent name: the tables store their offsets under it. Lower-case letters, digits,
            `_`.
        topics (Sequence[str]): The topics.
        tables (Sequence[IngestTable]): The tables to fill. A record may go to several tables.
        format (Format): How a record's value is read. (default: `Json()`)
        route_by (Optional[str]): The route of a record: `topic`, or the name of one of its fields.
            (default: `topic`)
        envelope (Optional[Literal["debezium"]]): The envelope around the row. (default: none)
        operation (Optional[str]): The field with a record's operation, for tables of mode `changes`. Its
            value is `insert` (also `create` or `read`), `update` (also `upsert`) or `delete`, or the first
            letter of one (`u` is `update`), in upper or lower case.
        source (Literal["kafka", "landing"]): Where the topics are: on the brokers of the settings, or in the
            landing folder of the settings, which Spark's workers must be able to read. (default: `kafka`)
        start (Literal["earliest", "latest"] | datetime | CommittedOffsets | StartingOffsets): The start of a
            topic that was never read: its first offset, its end, the first record since a time, the committed
            offsets of a consumer group, or given offsets. A time without a zone is in UTC. Ignored once the
            tables have offsets of the topic. (default: `earliest`)
        most_records (int): Maximum number of records in a batch.
        dead_letters (Optional[str]): The asset of records that cannot be converted. (default:
            `<namespace of the first table>/<name>_dead_letters`)
        tolerance (float): The share of dead letters in a batch, from 0 to 1, above which the batch is
            blocked. (default: 1.0, never blocked)
        on_contract (Literal["dead_letter", "block"]): A row that breaks the table's contract becomes a dead
            letter, or blocks the whole batch.
        on_unrouted (Literal["dead_letter", "skip"]): A record that no table takes becomes a dead letter, or
            is left out.
        on_rollback (Literal["stop", "replay", "skip"]): If a table was rolled back: stop, read its records
            again into this table only, or leave them out.
        on_recreated (Literal["stop", "start_over"]): If a topic was deleted and created again: stop, or read
            the new topic from its start.
        on_reset (Literal["stop", "continue_at_end"]): If a topic ends before the offset up to which it was
            read, or lacks a partition that was read: stop, or continue at its end, and without the partition.
        on_lost (Literal["stop", "skip"]): If records were deleted before they were read: stop, or skip them.
        idle_after (Optional[timedelta]): A partition does not hold the valid-through time back if it was read
            to its end, has no open transaction, and its latest record is at least this old. Choose a longer
            time than records need to reach the topic. (default: every partition counts, even one that never
            had a record)
        create (bool): Whether missing tables are created.
        most_tables (int): Maximum number of tables that records may name, for each key with `{route}`. A
            record for one more table is a dead letter.
        most_columns (int): Maximum number of columns to which records may extend a table. Further fields are
            left out, and the batch has a note.
        keep_snapshots (int): Number of snapshots of a table that a live run keeps. It removes older ones when
            the table has a quarter more: every commit rewrites the metadata, which would grow with each
            batch. Data files are not removed. Snapshots since a consumer's position are kept too, if the
            snapshot at the position is less than a day old and one of the newest four times this number.
        evolve (Sequence[Literal["add", "widen", "relax"]]): How a table may change for records that do not
            fit. `add`: fields without a column become columns; fields of JSON objects with their first value,
            fields of a schema (Avro, Protobuf, decoded values) at once. `widen`: for numbers that are too
            large, int becomes bigint, float becomes double, and a decimal gets 38 digits. `relax`: a required
            column accepts null once a record has no value for it. (default: fields without a column are left
            out, and other records that do not fit become dead letters)
        keep_value (bool): Whether the bytes of each record are kept, with its key, headers and position, in
            the table `<name>_kept_records` beside the dead letters, in the commit of its rows. `branchlake
            reprocess --from-raw` decodes them again.
        keep_value_days (int): Number of days that such bytes are kept. Older ones are removed by whole days
            (UTC) of their receipt.

    Examples:
        .. code-block:: python

            from branchlake_dagster import Ingest, IngestTable, branchlake_definitions, ingest_definitions

            orders = Ingest(
                name="orders",
                topics=["orders"],
                tables=[IngestTable(key="raw/orders", columns={"id": "bigint", "price": "double"})],
            )
            defs = branchlake_definitions(definitions=ingest_definitions(orders))
    """

    name: str
    topics: Sequence[str]
    tables: Sequence[IngestTable]
    format: Format = field(default_factory=Json)
    route_by: str = "topic"
    envelope: Literal["debezium"] | None = None
    operation: str | None = None
    source: Literal["kafka", "landing"] = "kafka"
    start: Start = "earliest"
    most_records: int = 500_000
    dead_letters: str | Sequence[str] | AssetKey | None = None
    tolerance: float = 1.0
    on_contract: Literal["dead_letter", "block"] = "dead_letter"
    on_unrouted: Literal["dead_letter", "skip"] = "dead_letter"
    on_rollback: OnRollback = "stop"
    on_recreated: Literal["stop", "start_over"] = "stop"
    on_reset: Literal["stop", "continue_at_end"] = "stop"
    on_lost: Literal["stop", "skip"] = "stop"
    idle_after: timedelta | None = None
    keep_snapshots: int = 2_000
    create: bool = True
    most_tables: int = 50
    most_columns: int = 1_000
    evolve: Sequence[Evolution] = ()
    keep_value: bool = False
    keep_value_days: int = 30

    def __post_init__(self) -> None:
        if not _INGESTION_NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"{self.name!r} cannot name an ingestion.",
                hint="Use at most 64 lower-case letters, digits and _, and begin with a letter.",
            )
        if isinstance(self.topics, str) or not self.topics or not self.tables:
            raise ConfigurationError(
                f"Ingestion {self.name} needs a list of topics and of tables.", hint='topics=["orders"]'
            )
        for option, values in _VALUES_BY_OPTION.items():
            if getattr(self, option) not in values:
                raise ConfigurationError(
                    f"Ingestion {self.name} has {option}={getattr(self, option)!r}.",
                    hint=f"Use {' or '.join('None' if value is None else value for value in values)}.",
                    reason="unknown_value",
                    subject=option,
                )
        self._require_start()
        if isinstance(self.start, datetime) and self.start.tzinfo is None:
            object.__setattr__(self, "start", self.start.replace(tzinfo=UTC))
        if len({*self.all_assets}) != len(self.all_assets):
            raise ConfigurationError(f"Ingestion {self.name} declares the same table twice.")
        if not 0 <= self.tolerance <= 1:
            raise ConfigurationError(f"The tolerance {self.tolerance} is not a share.", hint="Use 0 to 1.")
        if isinstance(self.evolve, str) or not {*self.evolve} <= {"add", "widen", "relax"}:
            raise ConfigurationError(
                f"Tables cannot evolve by {self.evolve!r}.", hint='Use a list of "add", "widen" and "relax".'
            )
        if not 1 <= self.keep_value_days <= _MAX_KEPT_DAYS:
            raise ConfigurationError(
                f"Ingestion {self.name} has keep_value_days={self.keep_value_days}. It must be"
                f" from 1 to {_MAX_KEPT_DAYS:,}.",
                hint="Use keep_value=False to keep nothing.",
            )
        if self.most_records < 1:
            raise ConfigurationError("A batch needs at least one record.", hint="most_records=500_000")
        if self.idle_after is not None and self.idle_after <= timedelta(0):
            raise ConfigurationError(
                f"Ingestion {self.name} has idle_after={self.idle_after}, which is not a time span.",
                hint="idle_after=timedelta(minutes=10)",
            )
        changes = any(table.mode == "changes" for table in self.tables)
        if changes and not (self.operation or self.envelope):
            raise ConfigurationError(
                f"Ingestion {self.name} has tables of mode changes, but not the records' operation.",
                hint='Set the field, operation="op", or set envelope="debezium".',
            )

    def _require_start(self) -> None:
        """Raise ConfigurationError if the start does not fit the source or the topics."""
        start, subject = self.start, f"Ingestion {self.name}"
        if isinstance(start, CommittedOffsets) and self.source == "landing":
            raise ConfigurationError(
                f"{subject} reads a landing folder, which has no consumer groups.",
                hint='Set the offsets directly: start=StartingOffsets({"orders": {0: 120}}).',
            )
        if isinstance(start, StartingOffsets):
            if unknown_topics := sorted({*start.offsets} - {*self.topics}):
                raise ConfigurationError(
                    f"{subject} has starting offsets for topic {', '.join(unknown_topics)}, which it does"
                    " not read.",
                    hint=f"Its topics are {', '.join(self.topics)}.",
                )
        elif not isinstance(start, CommittedOffsets | datetime) and start not in ("earliest", "latest"):
            raise ConfigurationError(
                f"{subject} has the unknown start {start!r}.",
                hint="Use earliest, latest, a datetime, CommittedOffsets(…) or StartingOffsets(…).",
            )

    @property
    def dead_letters_asset(self) -> AssetKey:
        """The asset key of the dead letters: `dead_letters`, or `<name>_dead_letters` by default."""
        if self.dead_letters is not None:
            return to_asset_key(self.dead_letters)
        namespace = list(self.tables[0].asset.path[:-1])
        return AssetKey([*namespace, f"{self.name}_dead_letters"])

    @property
    def kept_records_asset(self) -> AssetKey | None:
        """The asset key of the kept records, in the dead letters' namespace; None without `keep_value`."""
        if not self.keep_value:
            return None
        return AssetKey([*self.dead_letters_asset.path[:-1], f"{self.name}{KEPT_RECORDS_SUFFIX}"])

    @property
    def all_assets(self) -> list[AssetKey]:
        """The asset keys of the tables, then of the dead letters, then of the kept records, if any.

        A family that was not expanded has one key, with `{route}` in it.
        """
        assets = [*(table.asset for table in self.tables), self.dead_letters_asset]
        return assets if self.kept_records_asset is None else [*assets, self.kept_records_asset]

    @property
    def group(self) -> str:
        """The Kafka consumer group that gets the offsets of the tables, so that tools can show the lag."""
        return f"branchlake-{self.name}"

    @property
    def change_rules(self) -> TopicRules:
        """The options `on_recreated`, `on_reset` and `on_lost`, as `plan_batch` needs them."""
        return TopicRules(self.on_recreated, self.on_reset, self.on_lost)

    @property
    def operations(self) -> Mapping[str, RecordOperation]:
        """The operation for each known value of the operation field. The values are in lower case."""
        return _DEBEZIUM if self.envelope == "debezium" else _OPERATION_WORDS


def to_asset_key(key: Any) -> AssetKey:
    """Convert a key as users write it to an AssetKey: `raw/orders`, a list of parts, or an AssetKey."""
    if isinstance(key, AssetKey):
        return key
    return AssetKey(key.split("/") if isinstance(key, str) else list(key))


ROUTE_NAME_PATTERN = "[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*"
"""A valid route name, of at most `MAX_ROUTE_NAME_LENGTH` characters.

Two consecutive underscores are reserved for staging tables, which exist only on branches.
"""
MAX_ROUTE_NAME_LENGTH = 128
RouteNames = Mapping[str, Collection[str]]
"""Route names by family. A family is identified by its key as text, such as `raw/{route}`."""


@dataclass(frozen=True, kw_only=True)
class FamilyTable(IngestTable):
    """A table of a family. `name` is its route name, and `family` is the key of the family as text.

    For example, `orders` and `raw/{route}` belong to the table with the key `raw/orders`.
    """

    name: str
    family: str


@dataclass(frozen=True, kw_only=True)
class ExpandedIngest(Ingest):
    """An ingestion whose `tables` have a `FamilyTable` for each known route name instead of the families.

    `families` has the replaced declarations, by their key as text (`raw/{route}`).
    """

    families: Mapping[str, IngestTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Skip the validation: the original ingestion was validated, and there may be no table yet."""

    @property
    def family_tables(self) -> list[FamilyTable]:
        """The tables that belong to families: one for each known route name."""
        return [one for one in self.tables if isinstance(one, FamilyTable)]


def expand_families(ingest: Ingest, route_names: RouteNames) -> ExpandedIngest:
    """Replace the families of an ingestion by a table for each route name, after the declared tables.

    A route name is skipped if its table would be a declared table, the dead letters, the kept records, or
    already the table of another family.
    """
    if isinstance(ingest, ExpandedIngest):
        families, fixed_tables = (
            ingest.families,
            [one for one in ingest.tables if not isinstance(one, FamilyTable)],
        )
    else:
        families = {one.asset.to_user_string(): one for one in ingest.tables if one.is_family}
        fixed_tables = [one for one in ingest.tables if not one.is_family]
    # A route could otherwise give a table the name of one that the ingestion has for itself.
    used_keys = {
        ingest.dead_letters_asset,
        ingest.kept_records_asset,
        *(one.asset for one in fixed_tables),
    }
    tables = list(fixed_tables)
    for family, declaration in families.items():
        for name in sorted(route_names.get(family, ())):
            table = _build_family_table(declaration, family, name)
            if table.asset not in used_keys:
                used_keys.add(table.asset)
                tables.append(table)
    ingest_fields = {one.name: getattr(ingest, one.name) for one in fields(Ingest)}
    # The default namespace of the dead letters is that of the first declared table, which may be a family.
    ingest_fields |= {"tables": tables, "dead_letters": ingest.dead_letters_asset}
    return ExpandedIngest(**ingest_fields, families=families)


def collect_route_names(tables: Iterable[FamilyTable]) -> dict[str, list[str]]:
    """Return the route names of the tables, by the key of their family (`raw/{route}`)."""
    route_names: dict[str, list[str]] = {}
    for table in tables:
        route_names.setdefault(table.family, []).append(table.name)
    return route_names


def format_route_names(route_names: RouteNames) -> str:
    """Format route names as JSON for a table property."""
    return json.dumps({family: sorted(names) for family, names in sorted(route_names.items())})


def parse_route_names(route_names_json: str) -> dict[str, list[str]]:
    """Parse the JSON of `format_route_names`. Raises ValueError if it is invalid."""
    parsed_names = json.loads(route_names_json)
    if not isinstance(parsed_names, dict):
        raise ValueError(route_names_json)
    return {str(family): [str(one) for one in names] for family, names in parsed_names.items()}


def _build_family_table(declaration: IngestTable, family: str, name: str) -> FamilyTable:
    table_fields = {one.name: getattr(declaration, one.name) for one in fields(IngestTable)}
    *namespace, name_pattern = declaration.asset.path
    table_fields["key"] = AssetKey([*namespace, name_pattern.replace(ROUTE, name)])
    return FamilyTable(**table_fields, name=name, family=family)
