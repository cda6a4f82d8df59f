"""How an asset says that it consumes changes: metadata on the asset, read back as a `Declaration`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from dagster import AssetKey

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import CoercibleToAssetKey
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import unwrap_metadata

Pattern = Literal["rows", "keys", "range"]
WhenLost = Literal["fail", "rebuild", "skip"]
WhenRemoved = Literal["fail", "apply", "ignore", "deliver"]


@dataclass(frozen=True)
class ConsumedInput:
    """How one input is consumed, with the names that its columns have there.

    Made by `rows`, `keys` and `range_`. `keys` and `on` take the place of those of `consumes` for this input.
    """

    pattern: Pattern
    keys: tuple[str, ...] = ()
    on: str | None = None


def rows(*, on: str | None = None) -> ConsumedInput:
    """An input for `consumes` of which the asset gets the changed rows alone.

    Args:
        on (Optional[str]): The date or time stamp column of this input that decides on the partitions of the
            asset. (default: as `consumes` says)

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, rows

            consumes({"orders": rows(on="ordered_at"), "refunds": rows(on="refunded_at")})
    """
    return ConsumedInput("rows", (), on)


def keys(*columns: str, on: str | None = None) -> ConsumedInput:
    """An input for `consumes` of which the asset gets all rows of the changed keys.

    Args:
        *columns (str): The key columns of this input, in the sequence of `consumes(keys=[…])`, which are
            those of the asset's own table. (default: the same names)
        on (Optional[str]): As for `rows`.

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, keys

            consumes({"orders": keys("customer_id"), "customers": keys("id")}, keys=["customer_id"])
    """
    return ConsumedInput("keys", columns, on)


def range_(on: str | None = None) -> ConsumedInput:
    """An input for `consumes` of which the asset gets all rows in the changed ranges.

    Args:
        on (Optional[str]): The date or time stamp column of this input. The changed values of all inputs are
            put together, as dates and time stamps are compared. (default: as `consumes` says)

    Returns:
        ConsumedInput: For the mapping that `consumes` takes.

    Examples:
        .. code-block:: python

            from branchlake_dagster import consumes, range_

            consumes({"orders": range_("ordered_at"), "refunds": range_("refunded_at")}, into="day")
    """
    return ConsumedInput("range", (), on)


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
    """Asset metadata for `@dg.asset(metadata=…)`: which inputs it consumes by their changes, and how.

    What it has consumed is stored with its table and published with it, so no change is skipped or taken
    twice. Its first run, and one with the run tag `branchlake/rebuild`, get everything and replace the table.

    Args:
        inputs (Mapping[CoercibleToAssetKey, Literal["rows", "keys", "range"] | ConsumedInput]): By upstream
            asset what the asset gets of it. `rows`: the changed rows alone, to append or to merge. `keys`:
            all rows of the changed keys, whose result replaces the target's rows of these keys. `range`: all
            rows in the changed ranges of `on`, whose result replaces the target's rows there. Where inputs
            name their columns differently, `rows(…)`, `keys(…)` and `range_(…)` name those of one input. All
            inputs have the same pattern. Inputs that are not named are read as usual.
        keys (Sequence[str]): For `keys`: the columns of the asset's own table, and of the inputs that do not
            name theirs.
        on (Optional[str]): For `range`, and to find the affected partitions of a partitioned asset: the date
            or time stamp column of the inputs. (default: the name of the asset's own column)
        into (Optional[str]): The column of the asset's table that `on` becomes. A date column takes whole
            days of it. (default: the asset's partition column, else `on`)
        from_start (bool): For `range`: recompute from the smallest changed value on, not only where rows have
            changed. For running totals and sessions: a row that comes three days late changes all that
            follows. The asset reads earlier rows from its own table. Partitions must be in time; they are
            computed in order, each when the one before it is published. (default: False)
        widen (Optional[timedelta | Tuple[timedelta, timedelta]]): How much earlier, and how much later, the
            rows may be on which a result depends; one value alone: earlier. For moving averages and the like,
            with `range`, or with `keys` and partitions in time. The asset gets the rows of its partitions or
            ranges and those beside them, a changed row leads to all results that depend on it, and of what
            the asset returns only the rows of its own partitions or ranges are written. A partition mapping
            with offsets does the same by windows. (default: none)
        start (str): What a new consumer gets first: `beginning` (everything), `now` (nothing), or an ISO
            time stamp with zone, from which on it consumes. (default: `beginning`)
        when_lost (Literal["fail", "rebuild", "skip"]): When an input's change cannot be told any more,
            because it was rolled back, created again, or its snapshots have expired. (default: `fail`)
        when_removed (Optional[Literal["fail", "apply", "ignore", "deliver"]]): For `rows`, when rows of an
            input were updated or deleted. `apply`, for upserts: the asset gets all rows of the changed keys,
            and its result replaces the table's rows of these keys; the inputs must have the columns of the
            upsert's keys. `fail`: the run fails with RowsRemoved. `ignore`: only the rows that came count.
            `deliver`: the asset gets both with a column `_change_type` (`INSERT`, `DELETE`).
            (default: `apply` for an upsert without `commits`, else `fail`)
        commits (bool): For `rows`: add the columns `_change_ordinal` and `_commit_snapshot_id`, as Iceberg's
            changelog views have them, and `_commit_hash`, the commit on `main` that published the row; null
            where everything is computed anew. The asset's page names the commits. (default: False)

    Returns:
        Dict[str, Any]: Metadata, to be joined with that of `table_metadata` by `|`.

    Raises:
        ConfigurationError: It contradicts itself.

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
    """What `consumes` said."""

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
    """The inputs that name columns of their own."""
    patterns: frozenset[Pattern] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", frozenset(self.inputs.values()))

    def key_columns_of(self, key: AssetKey) -> tuple[str, ...]:
        """The columns of an input that hold the keys, in the sequence of `keys`."""
        override = self.column_overrides.get(key)
        return override.keys if override is not None and override.keys else self.keys

    def time_column_of(self, key: AssetKey) -> str | None:
        """The column of an input whose values in time decide on partitions and ranges, if it is named."""
        override = self.column_overrides.get(key)
        return override.on if override is not None and override.on is not None else self.on

    def range_column_of(self, key: AssetKey) -> str | None:
        """The column of an input that the pattern `range` is about."""
        return self.time_column_of(key) or self.into

    @property
    def range_column(self) -> str | None:
        """The column of the asset's own table that the pattern `range` is about."""
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
        """From when on a new consumer consumes; None: from the beginning, or from now."""
        return None if self.start in ("beginning", "now") else datetime.fromisoformat(self.start)


def parse_declaration(metadata: Mapping[str, Any], *, asset: str) -> Declaration | None:
    """What an asset's metadata says; None when it consumes no changes. Raises ConfigurationError."""
    value = unwrap_metadata(metadata.get(AssetMetadata.CONSUMES))
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{AssetMetadata.CONSUMES} of {asset} is {value!r}.", hint="Use consumes(…)."
        )
    return _build_declaration(value, asset)


def _build_declaration(values: Mapping[str, Any], asset: str) -> Declaration:
    inputs = {AssetKey.from_user_string(key): _parse_input(how) for key, how in values["inputs"].items()}
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
    )
    problem = _find_problem(declaration)
    if problem:
        raise ConfigurationError(f"consumes() of {asset}: {problem}")
    return declaration


def _parse_input(value: Any) -> ConsumedInput:
    if isinstance(value, Mapping):
        return ConsumedInput(value["pattern"], tuple(value.get("keys") or ()), value.get("on"))
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
            return f"{name} is {value!r}; it is one of {', '.join(get_args(allowed))}."
    if not declaration.inputs:
        return "it names no input."
    if len(declaration.patterns) > 1:
        return "its inputs have different patterns, and one result cannot replace keys and ranges at once."
    if declaration.from_start and "range" not in declaration.patterns:
        return "from_start=True is for the pattern `range`."
    if min(declaration.widen) < timedelta():
        return "widen=… is how much earlier and later rows may be, so it cannot be negative."
    if declaration.from_start and any(declaration.widen):
        return "from_start=True recomputes all that follows; it takes no widen=…."
    if declaration.when_removed is not None and "rows" not in declaration.patterns:
        return f"when_removed={declaration.when_removed!r} is for the pattern `rows`; the others follow by themselves."
    if declaration.when_removed == "apply" and declaration.commits:
        return (
            "when_removed='apply' gives rows that no commit has changed, so commits=True has nothing to say."
        )
    if "keys" in declaration.patterns and not declaration.keys:
        return "the pattern `keys` needs keys=[…], the columns of the asset's own table."
    for key, consumed_input in declaration.column_overrides.items():
        if consumed_input.keys and len(consumed_input.keys) != len(declaration.keys):
            return (
                f"{key.to_user_string()} names the keys {', '.join(consumed_input.keys)}, and keys=[…] has"
                f" {len(declaration.keys)}: each of its columns needs one of the input."
            )
    try:
        start_time = declaration.start_time
    except ValueError:
        return f"start is {declaration.start!r}; it is `beginning`, `now` or a time stamp such as 2026-01-31T00:00Z."
    if start_time is not None and start_time.tzinfo is None:
        return f"start is {declaration.start!r}, without a time zone."
    return None
