"""What a user declares of an ingestion, and families of tables that records name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from dagster import AssetKey, FreshnessPolicy

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.formats import Format, Json
from branchlake_dagster.ingest.planning import CommittedOffsets, Start, StartingOffsets, TopicRules
from branchlake_dagster.ingest.progress import OnRollback
from branchlake_dagster.tables.specification import require_parquet

if TYPE_CHECKING:
    from pandera.pyspark import DataFrameModel

_INGESTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
Attribute = Literal["topic", "partition", "offset", "timestamp", "key"]
IngestMode = Literal["append", "upsert", "changes"]
RecordOperation = Literal["insert", "update", "delete"]
Evolution = Literal["add", "widen", "relax"]
_ATTRIBUTES = ("topic", "partition", "offset", "timestamp", "key")
TOMBSTONE = "tombstone"
"""The operation of a record that has a key and no value."""
ROUTE = "{route}"
"""In the last part of a table's key: what is between its other characters, the record says."""
_DEBEZIUM: Mapping[str, RecordOperation] = {"c": "insert", "r": "insert", "u": "update", "d": "delete"}
_OPERATION_WORDS: Mapping[str, RecordOperation] = {
    **dict.fromkeys(("i", "insert", "c", "create", "r", "read"), "insert"),
    **dict.fromkeys(("u", "update", "upsert"), "update"),
    **dict.fromkeys(("d", "delete"), "delete"),
}


@dataclass(frozen=True, kw_only=True)
class IngestTable:
    """A table that an ingestion fills, and which records go into it.

    Args:
        key (str | Sequence[str] | AssetKey): The asset, `raw/orders`; its table has that name. With
            `{route}` in its last part, `raw/{route}`, there is a table for each route that `route` matches.
        columns (Mapping[str, str]): Spark's types by column, `{"id": "bigint", "at": "timestamp"}`. A table
            that is there already wins: its columns are what records are converted to. (default: those of the
            table; one that is not there is made from the types of the first records)
        route (Optional[str]): A regular expression that all of a record's route must match. If it has a
            group, that is what a table is named after instead of the whole route. (default: every record)
        mode (Literal["append", "upsert", "changes"]): Add the rows; or put each in the place of the one with
            the same keys; or do what the record's operation says. (default: `append`)
        keys (Sequence[str]): The columns that identify a row, for `upsert` and `changes`. Where they are
            `attributes`, the record's `key` among them, a record without a value deletes the row.
        required (Sequence[str]): Columns without which a record is a dead letter, beside the keys.
        attributes (Mapping[str, str]): Columns that take something of the record itself: `topic`,
            `partition`, `offset`, `timestamp` or `key`.
        contract (Optional[type[DataFrameModel]]): Promises on each row, as for `pandera_checks`.
        layout (Sequence[str]): As in `table_metadata`, for a table that is made.
        properties (Mapping[str, str]): Iceberg's table properties, likewise.
        description (Optional[str]): The asset's description.
        freshness_policy (Optional[FreshnessPolicy]): How old its newest batch may be, for Dagster's pages.

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

    @property
    def asset(self) -> AssetKey:
        """The asset's key."""
        return to_asset_key(self.key)

    @property
    def keyed_by_record(self) -> bool:
        """Whether the Kafka key of a record identifies its row, alone or with other attributes."""
        attributes = [self.attributes.get(one) for one in self.keys]
        return self.mode != "append" and "key" in attributes and None not in attributes

    @property
    def is_family(self) -> bool:
        """Whether it stands for a table for each route."""
        return ROUTE in self.asset.path[-1]

    def __post_init__(self) -> None:
        table_name = self.asset.to_user_string()
        if table_name.count(ROUTE) > self.is_family:
            raise ConfigurationError(
                f"{ROUTE} can be in the last part of a key, once.",
                table=table_name,
                hint=f'key="raw/{ROUTE}"',
            )
        if self.is_family and self.freshness_policy is not None:
            raise ConfigurationError(
                "Tables that records name have no freshness policy: Dagster learns of them by their rows.",
                table=table_name,
                hint="Declare those that need one: a table that has a key of its own.",
            )
        if self.mode not in ("append", "upsert", "changes"):
            raise ConfigurationError(
                f"Unknown mode {self.mode!r}.", table=table_name, hint="append, upsert, changes"
            )
        if self.mode != "append" and not self.keys:
            raise ConfigurationError(
                f"Mode {self.mode} needs the columns that identify a row.",
                table=table_name,
                hint='keys=["id"]',
            )
        for column, attribute in self.attributes.items():
            if attribute not in _ATTRIBUTES:
                raise ConfigurationError(
                    f"Column {column} wants {attribute!r} of a record.",
                    table=table_name,
                    hint=f"Use one of {', '.join(_ATTRIBUTES)}.",
                )
        require_parquet(
            {str(key): str(value) for key, value in self.properties.items()}, table_name=table_name
        )
        if self.route is not None:
            try:
                re.compile(self.route)
            except re.error as error:
                raise ConfigurationError(
                    f"The route {self.route!r} is no regular expression: {error}.", table=table_name
                ) from error


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """Topics that are read into tables, each batch published in one commit, each record once.

    Args:
        name (str): Its name for ever: the tables keep their offsets under it. Lower case, digits, `_`.
        topics (Sequence[str]): The topics.
        tables (Sequence[IngestTable]): Where their records go; a record may go to several.
        format (Format): How a record's value is read. (default: `Json()`)
        route_by (Optional[str]): What routes are matched with: `topic`, or a field of the record.
            (default: `topic`)
        envelope (Optional[Literal["debezium"]]): What is around the row. (default: nothing)
        operation (Optional[str]): The field that tells a record's operation, for tables of mode `changes`;
            its value is `insert`, `update` or `delete`, or the first letter of one.
        source (Literal["kafka", "landing"]): Where the topics are: on the brokers of the settings, or in the
            landing folder of the settings, which Spark's workers must be able to read. (default: `kafka`)
        start (Literal["earliest", "latest"] | datetime | CommittedOffsets | StartingOffsets): Where a topic
            starts that was never read: at its first offset, at its end, at the first record of a time, at the
            committed offsets of a consumer group, or at given offsets. Not used once the tables have
            positions in the topic. (default: `earliest`)
        most_records (int): Most records of a batch.
        dead_letters (Optional[str]): The asset that takes what cannot be converted. (default:
            `<namespace of the first table>/<name>_dead_letters`)
        tolerance (float): The share of a batch's records that may be dead letters before it is blocked, 0 to
            1. (default: 1.0, all of them)
        on_contract (Literal["dead_letter", "block"]): What becomes of rows that break a table's contract:
            they alone are left out, or the whole batch is blocked.
        on_unrouted (Literal["dead_letter", "skip"]): What becomes of a record that no table takes.
        on_rollback (Literal["stop", "replay", "skip"]): When a table was rolled back: stop, read its records
            again into it alone, or leave them out.
        on_recreated (Literal["stop", "start_over"]): When a topic was deleted and made again.
        on_reset (Literal["stop", "continue_at_end"]): When a topic ends before where it was read to.
        on_lost (Literal["stop", "skip"]): When records were deleted before they were read.
        idle_after (Optional[timedelta]): A partition that was read to its end, and whose latest record is at
            least so old, does not hold the valid-through time back. Longer than records need to get into the
            topic. (default: every partition counts, also one that never had a record)
        create (bool): Whether tables that are not there are made.
        most_tables (int): Most tables that records name, for each key with `{route}`. A record of one more
            is a dead letter.
        most_columns (int): Most columns that `evolve=["add"]`, or what the records of a new table have, may
            bring a table to. Fields beyond them are left out, with a note on the batch.
        keep_snapshots (int): So many stay of a table that has a quarter more, in the live mode: metadata that
            grows with every batch takes longer with every batch. Files stay. Consumers of its changes must
            come by within as many batches.
        evolve (Sequence[Literal["add", "widen", "relax"]]): How a table may change for records that do not
            fit it. `add`: fields that it has no column for become columns: those of JSON objects with the
            first value, those of a schema (Avro, Protobuf, decoded values) at once. `widen`: where a
            number is too large, int becomes bigint, float double, and a decimal gets 38 digits. `relax`: a
            column that must have a value, and has none in a record, need not have one any more. (default:
            such fields are left out, and the others make dead letters)

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

    def __post_init__(self) -> None:
        if not _INGESTION_NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"{self.name!r} cannot name an ingestion.",
                hint="Lower-case letters, digits and _, a letter first, at most 64 of them.",
            )
        if isinstance(self.topics, str) or not self.topics or not self.tables:
            raise ConfigurationError(
                f"Ingestion {self.name} needs a list of topics and of tables.", hint='topics=["orders"]'
            )
        if self.source not in ("kafka", "landing"):
            raise ConfigurationError(f"Unknown source {self.source!r}.", hint="kafka, landing")
        self._require_start()
        keys = [table.asset for table in self.tables]
        if len({*keys, self.dead_letters_asset}) != len(keys) + 1:
            raise ConfigurationError(f"Ingestion {self.name} names a table twice.")
        if not 0 <= self.tolerance <= 1:
            raise ConfigurationError(f"The tolerance {self.tolerance} is no share.", hint="From 0 to 1.")
        if isinstance(self.evolve, str) or not {*self.evolve} <= {"add", "widen", "relax"}:
            raise ConfigurationError(
                f"Tables cannot evolve by {self.evolve!r}.", hint='evolve=["add", "widen", "relax"], or some.'
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
                f"Ingestion {self.name} has tables of mode changes, and no record tells its operation.",
                hint='Name its field, operation="op", or the envelope="debezium".',
            )

    def _require_start(self) -> None:
        """Raise ConfigurationError for a start that this source or these topics do not have."""
        start, subject = self.start, f"Ingestion {self.name}"
        if isinstance(start, CommittedOffsets) and self.source == "landing":
            raise ConfigurationError(
                f"{subject} reads a landing folder, which has no consumer groups.",
                hint='Give the offsets themselves: start=StartingOffsets({"orders": {0: 120}}).',
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
                hint="earliest, latest, a datetime, CommittedOffsets(…) or StartingOffsets(…).",
            )

    @property
    def dead_letters_asset(self) -> AssetKey:
        """The asset of the dead letters."""
        if self.dead_letters is not None:
            return to_asset_key(self.dead_letters)
        namespace = list(self.tables[0].asset.path[:-1])
        return AssetKey([*namespace, f"{self.name}_dead_letters"])

    @property
    def group(self) -> str:
        """The consumer group that tools see."""
        return f"branchlake-{self.name}"

    @property
    def change_rules(self) -> TopicRules:
        """For planning."""
        return TopicRules(self.on_recreated, self.on_reset, self.on_lost)

    @property
    def operations(self) -> Mapping[str, RecordOperation]:
        """What the operation's value means, in lower case."""
        return _DEBEZIUM if self.envelope == "debezium" else _OPERATION_WORDS


def to_asset_key(key: Any) -> AssetKey:
    """An asset's key as users write it: `raw/orders`, a list of parts, or the key itself."""
    if isinstance(key, AssetKey):
        return key
    return AssetKey(key.split("/") if isinstance(key, str) else list(key))


ROUTE_NAME_PATTERN = "[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*"
"""What a record may put into a table's name, and `MAX_ROUTE_NAME_LENGTH` characters of it at most. Two underscores
together are kept for the tables that only branches have."""
MAX_ROUTE_NAME_LENGTH = 128
RouteNames = Mapping[str, Collection[str]]
"""By family, as its key is written, what records have put into the names of its tables."""


@dataclass(frozen=True, kw_only=True)
class FamilyTable(IngestTable):
    """A table of a family: `name` is what the record says, `family` the key with the place for it."""

    name: str
    family: str


@dataclass(frozen=True, kw_only=True)
class ExpandedIngest(Ingest):
    """An ingestion whose families are given apart, and in whose tables are those of them that are known."""

    families: Mapping[str, IngestTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing: the ingestion that it is made of was looked at, and may have no table yet."""

    @property
    def family_tables(self) -> list[FamilyTable]:
        """The tables that records have named."""
        return [one for one in self.tables if isinstance(one, FamilyTable)]


def expand_families(ingest: Ingest, route_names: RouteNames) -> ExpandedIngest:
    """The ingestion with a table for each name, behind those that have a key of their own.

    A name whose table is one of the others', or the dead letters', has none.
    """
    if isinstance(ingest, ExpandedIngest):
        families, fixed_tables = (
            ingest.families,
            [one for one in ingest.tables if not isinstance(one, FamilyTable)],
        )
    else:
        families = {one.asset.to_user_string(): one for one in ingest.tables if one.is_family}
        fixed_tables = [one for one in ingest.tables if not one.is_family]
    used_keys = {ingest.dead_letters_asset, *(one.asset for one in fixed_tables)}
    tables = list(fixed_tables)
    for family, declaration in families.items():
        for name in sorted(route_names.get(family, ())):
            table = _build_family_table(declaration, family, name)
            if table.asset not in used_keys:
                used_keys.add(table.asset)
                tables.append(table)
    ingest_fields = {one.name: getattr(ingest, one.name) for one in fields(Ingest)}
    # The place of the dead letters goes by the first table that was declared.
    ingest_fields |= {"tables": tables, "dead_letters": ingest.dead_letters_asset}
    return ExpandedIngest(**ingest_fields, families=families)


def collect_route_names(tables: Iterable[FamilyTable]) -> dict[str, list[str]]:
    """The names of tables by family."""
    route_names: dict[str, list[str]] = {}
    for table in tables:
        route_names.setdefault(table.family, []).append(table.name)
    return route_names


def format_route_names(route_names: RouteNames) -> str:
    """As a table's property has them."""
    return json.dumps({family: sorted(names) for family, names in sorted(route_names.items())})


def parse_route_names(route_names_json: str) -> dict[str, list[str]]:
    """Back again. Raises ValueError for anything else."""
    parsed_names = json.loads(route_names_json)
    if not isinstance(parsed_names, dict):
        raise ValueError(route_names_json)
    return {str(family): [str(one) for one in names] for family, names in parsed_names.items()}


def _build_family_table(declaration: IngestTable, family: str, name: str) -> FamilyTable:
    table_fields = {one.name: getattr(declaration, one.name) for one in fields(IngestTable)}
    *namespace, name_pattern = declaration.asset.path
    table_fields["key"] = AssetKey([*namespace, name_pattern.replace(ROUTE, name)])
    return FamilyTable(**table_fields, name=name, family=family)
