"""Declares which changes an asset consumes.

`consumes` writes the declaration as asset metadata, and `parse_declaration` reads it as a `Declaration`. A
`Consumer` combines the declaration with the asset's table, its partitions and the tables of its inputs.
`UpstreamTable` is the table of one input on the run's branch. `require_columns` checks that the input has the
columns by which the consumer finds changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from dagster import AssetKey, PartitionsDefinition, TimeWindowPartitionsDefinition
from pyiceberg.table import Table
from pyiceberg.types import PrimitiveType, UUIDType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.affected_partitions import Reach, dimension_definitions
from branchlake_dagster.internals.dagster import CoercibleToAssetKey
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.errors import InputColumnGone, SchemaMismatch
from branchlake_dagster.tables.specification import TableSpec, format_table_name, unwrap_metadata

Pattern = Literal["rows", "keys", "range"]
WhenLost = Literal["fail", "rebuild", "skip"]
WhenRemoved = Literal["fail", "apply", "ignore", "deliver", "rebuild"]


@dataclass(frozen=True)
class ConsumedInput:
    """The declaration of one input, created by `rows`, `keys` and `range_`.

    Its `keys` and `on` are names of the input's own columns and replace those of `consumes` for this input.
    """

    pattern: Pattern
    keys: tuple[str, ...] = ()
    on: str | None = None
    optional: bool = False


def rows(*, on: str | None = None, optional: bool = False) -> ConsumedInput:
    """Describe an input for `consumes` from which the asset gets only the changed rows.

    Args:
        on (Optional[str]): The date or time stamp column of this input that decides on the partitions of the
            asset. (default: `on` of `consumes`)
        optional (bool): Whether this input may have no table yet. Then the asset gets an empty frame without
            columns for it. Once the table exists, it is consumed from `start` on: with `beginning`,
            everything is computed anew. At least one input must have a table. (default: False: the run fails)

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, rows

            consumes({"orders": rows(on="ordered_at"), "refunds": rows(on="refunded_at")})
    """
    return ConsumedInput("rows", (), on, optional)


def keys(*columns: str, on: str | None = None) -> ConsumedInput:
    """Describe an input for `consumes` from which the asset gets all rows of the changed keys.

    Args:
        *columns (str): The key columns of this input, in the order of `consumes(keys=[…])`, which names the
            key columns of the asset's own table. (default: the same names)
        on (Optional[str]): As for `rows`.

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, keys

            consumes({"orders": keys("customer_id"), "customers": keys("id")}, keys=["customer_id"])
    """
    return ConsumedInput("keys", columns, on)


def range_(on: str | None = None, *, optional: bool = False) -> ConsumedInput:
    """Describe an input for `consumes` from which the asset gets all rows in the changed ranges.

    Args:
        on (Optional[str]): The date or time stamp column of this input. The changed values of all inputs are
            combined; dates and time stamps can be compared. (default: `on` of `consumes`)
        optional (bool): Whether this input may have no table yet, as for `rows`. (default: False)

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, range_

            consumes({"orders": range_("ordered_at"), "refunds": range_("refunded_at")}, into="day")
    """
    return ConsumedInput("range", (), on, optional)


def consumes(
    inputs: Mapping[CoercibleToAssetKey, Pattern | ConsumedInput],
    *,
    keys: Sequence[str] = (),
    on: str | None = None,
    into: str | None = None,
    from_start: bool = False,
    widen: timedelta | tuple[timedelta, timedelta] | None = None,
    start: str = "beginning",
    when_lost: WhenLost = "fail",
    when_removed: WhenRemoved | None = None,
    commits: bool = False,
) -> dict[str, Any]:
    """Return metadata for `@dg.asset(metadata=…)` that declares how an asset consumes changes of inputs.

    No change is skipped or consumed twice: the asset's table stores the consumed positions, and both are
    published together. The asset's first run, and a run with the run tag `branchlake/rebuild`, consume
    everything and replace the table.

    Args:
        inputs (Mapping[CoercibleToAssetKey, Literal["rows", "keys", "range"] | ConsumedInput]): By upstream
            asset, the pattern by which it is consumed. `rows`: the asset gets only the changed rows, to
            append or merge. `keys`: it gets all rows of the changed keys, and its result replaces the
            target's rows of these keys. `range`: it gets all rows in the changed ranges of `on`, and its
            result replaces the target's rows there. If inputs have different column names, use `rows(…)`,
            `keys(…)` or `range_(…)` to name the columns of one input. All inputs must have the same pattern.
            Inputs that are not listed are loaded as usual.
        keys (Sequence[str]): For `keys`: the key columns of the asset's own table, and of the inputs that do
            not name theirs.
        on (Optional[str]): For `range`, and to find the affected partitions of a partitioned asset: the date
            or time stamp column of the inputs. (default: the name of the asset's own column)
        into (Optional[str]): The column of the asset's table that is computed from `on`. If it is a date
            column, whole days of `on` are replaced. (default: the asset's partition column, else `on`)
        from_start (bool): For `range`: recompute everything from the smallest changed value on. Use it for
            running totals and sessions: a row that comes three days late changes all later results. The asset
            reads earlier rows from its own table. Its partitions must be time windows; they are computed in
            order, each after the one before it is published. (default: False)
        widen (Optional[timedelta | Tuple[timedelta, timedelta]]): How much earlier, and how much later, the
            rows may be that a result depends on. A single value means earlier. Use it for moving averages,
            with `range`, or with `keys` and partitions by time. The asset gets the rows of its partitions or
            ranges and those around them. A changed row affects all results that depend on it. Of the rows
            that the asset returns, only those of its own partitions or ranges are written. A partition
            mapping with offsets does the same in units of windows. (default: none)
        start (str): What a new consumer gets first: `beginning` (everything), `now` (nothing), or an ISO
            time stamp with time zone from which it consumes. (default: `beginning`)
        when_lost (Literal["fail", "rebuild", "skip"]): What to do if an input's change is no longer known,
            because the input was rolled back or created again, or its snapshots have expired.
            (default: `fail`)
        when_removed (Optional[Literal["fail", "apply", "ignore", "deliver", "rebuild"]]): For `rows`: what to
            do if rows of an input were updated or deleted. `apply`, for upserts: the asset gets all rows of
            the changed keys, and its result replaces the table's rows of these keys; the inputs must have the
            columns of the upsert's keys. `fail`: the run fails with RowsRemoved. `ignore`: only added rows
            count. `deliver`: the asset gets added and removed rows, with a column `_change_type` (`INSERT`,
            `DELETE`). `rebuild`: the asset gets all rows, or all rows of the run's partitions, and its result
            replaces the table or these partitions; a run of partitions without updated or deleted rows gets
            its added rows. (default: `apply` for an upsert without `commits`, else `fail`)
        commits (bool): For `rows`: add the columns `_change_ordinal` and `_commit_snapshot_id`, as in
            Iceberg's changelog views, and `_commit_hash`, the commit on `main` that published the row. They
            are null if everything is computed anew. The asset's page lists the commits. (default: False)

    Returns:
        Dict[str, Any]: Metadata. Combine it with that of `table_metadata` by `|`.

    Raises:
        ConfigurationError: The arguments contradict each other.

    Examples:
        .. code-block:: python

            import dagster as dg
            import polars as pl

            from branchlake_dagster import consumes, table_metadata

            @dg.asset(
                metadata=table_metadata(write_mode="upsert", keys=["account"])
                | consumes({"orders": "keys"}, keys=["account"])
            )
            def spent(orders: pl.DataFrame) -> pl.DataFrame:
                return orders.group_by("account").agg(pl.col("price").sum())
    """
    declaration = {
        "inputs": {
            AssetKey.from_coercible(key).to_user_string(): consumed_input
            if isinstance(consumed_input, str)
            else asdict(consumed_input)
            for key, consumed_input in inputs.items()
        },
        "keys": list(keys),
        "on": on,
        "into": into,
        "from_start": from_start,
        "widen": _widen_to_seconds(widen),
        "start": start,
        "when_lost": when_lost,
        "when_removed": when_removed,
        "commits": commits,
    }
    _build_declaration(declaration, "this asset")
    return {AssetMetadata.CONSUMES: declaration}


@dataclass(frozen=True)
class Declaration:
    """The arguments of `consumes`, parsed from asset metadata.

    `inputs` maps each consumed asset to its pattern: `rows`, `keys` or `range`. `widen` has how much earlier
    and how much later the rows may be that a result depends on; both are zero if it is not declared.
    """

    inputs: Mapping[AssetKey, Pattern]
    keys: tuple[str, ...] = ()
    on: str | None = None
    into: str | None = None
    start: str = "beginning"
    when_lost: WhenLost = "fail"
    when_removed: WhenRemoved | None = None
    commits: bool = False
    from_start: bool = False
    widen: tuple[timedelta, timedelta] = (timedelta(), timedelta())
    column_overrides: Mapping[AssetKey, ConsumedInput] = field(default_factory=dict)
    """The inputs that name their own key columns or time column, with these names."""
    optional: frozenset[AssetKey] = frozenset()
    """The inputs that may have no table yet."""
    patterns: frozenset[Pattern] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", frozenset(self.inputs.values()))

    def key_columns_of(self, key: AssetKey) -> tuple[str, ...]:
        """Return the key columns of an input, in the order of `keys`.

        An input that does not name its own columns has the columns of `keys`.
        """
        override = self.column_overrides.get(key)
        return override.keys if override is not None and override.keys else self.keys

    def time_column_of(self, key: AssetKey) -> str | None:
        """Return the date or time stamp column of an input that decides on partitions and ranges.

        None if neither the input nor `consumes` names a column; then the column of the asset's own table
        counts.
        """
        override = self.column_overrides.get(key)
        return override.on if override is not None and override.on is not None else self.on

    def range_column_of(self, key: AssetKey) -> str | None:
        """Return the input column whose changed values are the ranges of the pattern `range`.

        This is the time column of the input, else `into`; None if neither is declared.
        """
        return self.time_column_of(key) or self.into

    @property
    def range_column(self) -> str | None:
        """The column of the asset's own table whose ranges are replaced with the pattern `range`.

        This is `into`, else `on`, else the column that all inputs name themselves. None if there is no such
        column.
        """
        if self.into or self.on:
            return self.into or self.on
        time_columns = {override.on for override in self.column_overrides.values()}
        return (
            time_columns.pop()
            if len(time_columns) == 1 and len(self.column_overrides) == len(self.inputs)
            else None
        )

    @property
    def start_time(self) -> datetime | None:
        """The time from which a new consumer consumes; None if `start` is `beginning` or `now`."""
        return None if self.start in ("beginning", "now") else datetime.fromisoformat(self.start)


def parse_declaration(metadata: Mapping[str, Any], *, asset: str) -> Declaration | None:
    """Return the declaration in an asset's metadata; None if the asset consumes no changes.

    Raises ConfigurationError if the metadata is not a declaration, or if its arguments contradict each other.
    """
    value = unwrap_metadata(metadata.get(AssetMetadata.CONSUMES))
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"Metadata {AssetMetadata.CONSUMES} of asset {asset} is {value!r}.",
            hint="Create it with consumes(…).",
        )
    return _build_declaration(value, asset)


def _build_declaration(values: Mapping[str, Any], asset: str) -> Declaration:
    inputs = {AssetKey.from_user_string(key): _parse_input(value) for key, value in values["inputs"].items()}
    declaration = Declaration(
        {key: consumed_input.pattern for key, consumed_input in inputs.items()},
        tuple(values.get("keys") or ()),
        values.get("on"),
        values.get("into"),
        values.get("start") or "beginning",
        values.get("when_lost") or "fail",
        values.get("when_removed"),
        bool(values.get("commits")),
        bool(values.get("from_start")),
        _widen_from_seconds(values.get("widen")),
        {
            key: consumed_input
            for key, consumed_input in inputs.items()
            if consumed_input.keys or consumed_input.on is not None
        },
        frozenset(key for key, consumed_input in inputs.items() if consumed_input.optional),
    )
    problem = _find_problem(declaration)
    if problem:
        raise ConfigurationError(f"consumes() of {asset}: {problem}")
    return declaration


def _parse_input(value: Any) -> ConsumedInput:
    if isinstance(value, Mapping):
        return ConsumedInput(
            value["pattern"],
            tuple(value.get("keys") or ()),
            value.get("on"),
            bool(value.get("optional")),
        )
    return ConsumedInput(value)


def _widen_to_seconds(widen: timedelta | tuple[timedelta, timedelta] | None) -> list[float]:
    if widen is None:
        return [0.0, 0.0]
    before, after = widen if isinstance(widen, tuple) else (widen, timedelta())
    return [before.total_seconds(), after.total_seconds()]


def _widen_from_seconds(seconds: Sequence[float] | None) -> tuple[timedelta, timedelta]:
    before, after = seconds or (0.0, 0.0)
    return timedelta(seconds=before), timedelta(seconds=after)


def _find_problem(declaration: Declaration) -> str | None:
    choices: tuple[tuple[str, Any, Any], ...] = (
        *(("pattern", pattern, Pattern) for pattern in declaration.inputs.values()),
        ("when_lost", declaration.when_lost, WhenLost),
        *([("when_removed", declaration.when_removed, WhenRemoved)] if declaration.when_removed else []),
    )
    for name, value, allowed in choices:
        if value not in get_args(allowed):
            return f"{name} is {value!r}, but must be one of {', '.join(get_args(allowed))}."
    if not declaration.inputs:
        return "inputs is empty. Name at least one upstream asset."
    if len(declaration.patterns) > 1:
        return "all inputs must have the same pattern."
    if declaration.from_start and "range" not in declaration.patterns:
        return "from_start=True works only with the pattern `range`."
    if min(declaration.widen) < timedelta():
        return "the lengths in widen=… must not be negative."
    if declaration.from_start and any(declaration.widen):
        return "from_start=True cannot be combined with widen=…."
    if declaration.when_removed is not None and "rows" not in declaration.patterns:
        return (
            f"when_removed={declaration.when_removed!r} works only with the pattern `rows`. Other patterns"
            " handle removed rows without it."
        )
    if declaration.when_removed == "apply" and declaration.commits:
        return "when_removed='apply' cannot be combined with commits=True: it also loads unchanged rows."
    if "keys" in declaration.patterns and not declaration.keys:
        return "the pattern `keys` needs keys=[…], the key columns of the asset's own table."
    if len(set(declaration.keys)) < len(declaration.keys):
        return f"keys=[{', '.join(map(repr, declaration.keys))}] names a column twice."
    for key, consumed_input in declaration.column_overrides.items():
        if consumed_input.keys and len(consumed_input.keys) != len(declaration.keys):
            return (
                f"input {key.to_user_string()} names {len(consumed_input.keys)} key columns"
                f" ({', '.join(consumed_input.keys)}), but keys=[…] has {len(declaration.keys)}. Name one"
                " input column for each."
            )
    try:
        start_time = declaration.start_time
    except ValueError:
        return (
            f"start is {declaration.start!r}, but must be `beginning`, `now` or a time stamp such as"
            " 2026-01-31T00:00Z."
        )
    if start_time is not None and start_time.tzinfo is None:
        return f"start is {declaration.start!r}. Add a time zone, such as Z."
    return None


Identifier = tuple[str, ...]


@dataclass(frozen=True)
class Consumer:
    """An asset that consumes changes: its table, its partitions, and the tables of its inputs.

    `asset` is the asset's key as text. `inputs` maps each consumed asset to the identifier of its table.
    `definition` is the asset's partition definition; None for an asset without partitions.
    """

    asset: str
    spec: TableSpec
    declaration: Declaration
    inputs: Mapping[AssetKey, Identifier]
    definition: PartitionsDefinition[str] | None = None
    reaches: Mapping[AssetKey, Reach] = field(default_factory=dict)
    """The reach of each input. An input without an entry has the default: rows of the own window only."""

    @property
    def tracks_partitions(self) -> bool:
        """Whether each partition of the asset has its own position."""
        return self.definition is not None and bool(self.spec.columns_by_dimension)

    @property
    def computes_in_order(self) -> bool:
        """Whether each partition is computed from the previous partition, which must be published first."""
        return self.tracks_partitions and self.declaration.from_start

    def reach_of(self, key: AssetKey) -> Reach:
        """Return how far outside their own window the rows of an input may be on which results depend."""
        return self.reaches.get(key, Reach())

    @property
    def when_removed(self) -> WhenRemoved:
        """What to do with rows that were removed from an input, with the pattern `rows`.

        This is the declared value. The default is `apply` for an upsert without `commits`, else `fail`.
        """
        declared_choice = self.declaration.when_removed
        if declared_choice is not None:
            return declared_choice
        return "apply" if self.spec.write_mode == "upsert" and not self.declaration.commits else "fail"

    def column_of_input(self, key: AssetKey, dimension: str) -> str:
        """Return the input column whose values decide to which key of a partition dimension a row belongs.

        For a dimension of time windows this is the input's time column, if one is declared. Otherwise it is
        the name of the column in the asset's own table. The input may lack the column.
        """
        own_column = self.spec.columns_by_dimension[dimension]
        part = dimension_definitions(self.definition).get(dimension) if self.definition is not None else None
        is_time_window = isinstance(part, TimeWindowPartitionsDefinition)
        return self.declaration.time_column_of(key) or own_column if is_time_window else own_column

    def columns_of_input(self, key: AssetKey, table: Table) -> dict[str, str]:
        """Return the input columns that decide on a row's partition, by dimension.

        Dimensions whose column the input lacks are left out.
        """
        column_names = {field.name for field in table.schema().fields}
        columns = {name: self.column_of_input(key, name) for name in self.spec.columns_by_dimension}
        return {name: column for name, column in columns.items() if column in column_names}

    def deciding_columns(self, key: AssetKey) -> frozenset[str]:
        """Return the names of the input columns that decide what has changed. The input may lack some.

        These are key and range columns, the partition columns of an asset whose partitions have positions of
        their own, and the keys by which an upsert finds the results of removed rows.
        """
        declaration, pattern = self.declaration, self.declaration.inputs[key]
        names: set[str] = set()
        if pattern == "keys":
            names |= {*declaration.key_columns_of(key)}
        if pattern == "range" and (range_column := declaration.range_column_of(key)):
            names.add(range_column)
        if pattern == "rows" and self.when_removed == "apply":
            names |= {*self.spec.keys}
        if self.tracks_partitions:
            names |= {self.column_of_input(key, dimension) for dimension in self.spec.columns_by_dimension}
        return frozenset(names)

    def deciding_column_ids(self, key: AssetKey, table: Table) -> tuple[tuple[str, int], ...]:
        """Return the names and field ids of the `deciding_columns` that the input has, sorted by name."""
        names = self.deciding_columns(key)
        return tuple(
            sorted((field.name, field.field_id) for field in table.schema().fields if field.name in names)
        )


@dataclass(frozen=True)
class UpstreamTable:
    """The table of an input on the run's branch.

    `name` is its dotted name. `up_to` is the position up to which it is consumed: the snapshot of `main`
    where the branch began, and the snapshots that the run itself has added since.
    """

    key: AssetKey
    name: str
    pattern: Pattern
    table: Table
    up_to: Position


def require_columns(consumer: Consumer, key: AssetKey, table: Table) -> None:
    """Raise InputColumnGone if the input `key` lacks a column that the consumer needs to find changes.

    Raise SchemaMismatch if a key column of the pattern `keys` has a type by which rows cannot be selected.

    Required are key columns, a column that `consumes` names for this input, and with the patterns `rows` and
    `keys` the columns that decide on a row's partition. Any other range or partition column is required only
    if the input once had it: an input that never had it lacks it by design, and its rows belong to all
    partitions.
    """
    required, optional = _needed_columns(consumer, key)
    column_names = {field.name for field in table.schema().fields}
    for column in (*required, *optional):
        if column in column_names:
            continue
        field_id = _find_earlier_field_id(table, column)
        if field_id is not None or column in required:
            raise _column_gone_error(consumer, key, table, column, field_id)
    if consumer.declaration.inputs[key] == "keys":
        require_selectable_keys(
            table, consumer.declaration.key_columns_of(key), format_table_name(consumer.inputs[key])
        )


def _needed_columns(consumer: Consumer, key: AssetKey) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that `require_columns` examines: required ones, and the others."""
    declaration = consumer.declaration
    pattern = declaration.inputs[key]
    required = declaration.key_columns_of(key) if pattern == "keys" else ()
    if key in declaration.column_overrides and (time_column := declaration.column_overrides[key].on):
        required = (*required, time_column)
    partition_columns = tuple(
        consumer.column_of_input(key, name) for name in consumer.spec.columns_by_dimension
    )
    if consumer.tracks_partitions and pattern != "range":
        required = (*required, *partition_columns)
    range_column = declaration.range_column_of(key) if pattern == "range" else None
    return required, (*partition_columns, *((range_column,) if range_column else ()))


def require_selectable_keys(table: Table, columns: Iterable[str], name: str) -> None:
    """Raise SchemaMismatch for a key column of an input by whose values PyIceberg cannot select rows.

    These are columns of UUIDs, structs, lists and maps. `name` is the input's dotted table name.
    """
    for column in columns:
        kind = table.schema().find_type(column)
        if isinstance(kind, UUIDType) or not isinstance(kind, PrimitiveType):
            raise SchemaMismatch(
                f"Key column {column} has type {kind}. Rows with changed keys cannot be selected by it.",
                table=name,
                hint="Store the key in a column of text, or of another simple type, and name that column as"
                " the key. Or consume the input by the pattern `range`.",
                reason="column_type",
                subject=column,
            )


def _find_earlier_field_id(table: Table, column: str) -> int | None:
    """Return the id of a column in an earlier schema of the table, or None."""
    schemas = sorted(table.metadata.schemas, key=lambda schema: schema.schema_id, reverse=True)
    field_ids = (field.field_id for schema in schemas for field in schema.fields if field.name == column)
    return next(field_ids, None)


def _column_gone_error(
    consumer: Consumer, key: AssetKey, table: Table, column: str, field_id: int | None
) -> InputColumnGone:
    fields = table.schema().fields
    renamed_to = next((field.name for field in fields if field.field_id == field_id), None)
    what = f"was renamed to {renamed_to}" if renamed_to else "does not exist"
    return InputColumnGone(
        f"Asset {consumer.asset} finds changes of {key.to_user_string()} by column {column}, but the column"
        f" {what}.",
        column=column,
        renamed_to=renamed_to,
        table=format_table_name(consumer.inputs[key]),
        hint=(
            f"Rename the column back. Or name {renamed_to} in the asset's consumes(…), and launch the asset"
            " with the run tag branchlake/rebuild=true."
            if renamed_to
            else "Name one of the input's columns in consumes(…):"
            f" {', '.join(field.name for field in fields)}."
        ),
    )
