"""Write Spark frames to the run's branch. Works with Spark Connect and classic sessions, without py4j."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.schema import Schema
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameWriterV2, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, DateType, StructType, TimestampNTZType, TimestampType

from branchlake_dagster.internals.pyspark import (
    get_session_settings,
    set_session_settings,
    unset_session_settings,
)
from branchlake_dagster.spark.session import is_connect, quote_spark_name
from branchlake_dagster.tables.arrow_frames import duplicate_key_error, format_required_rows, null_key_error
from branchlake_dagster.tables.errors import (
    ColumnUnsupported,
    ForeignSession,
    PartitionMismatch,
    UpsertKeyInvalid,
)
from branchlake_dagster.tables.selection import Selection, to_sql_predicate
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import format_names

_SNAPSHOT_PROPERTY = "snapshot-property."
_SESSION_PROPERTY = "spark.sql.iceberg.snapshot-property."
_COPIES_COLUMN = "__branchlake_copies"
_NOT_UNIQUE_MESSAGE = "branchlake: upsert key not unique"
_NULL_KEY_MESSAGE = "branchlake: upsert key is null"
_UNSTABLE_MESSAGE = "branchlake: frame changed while it was written"
OUTSIDE_MESSAGE = "branchlake: row outside the partitions"
_FEW_CANDIDATE_ROWS = 1_000_000
"""The largest number of rows whose keys are read without finding first which files may match.

Spark reads the keys of a million rows in about a second. To find the files, it computes the frame once more.
"""
_settings_lock = threading.Lock()


def spark_arrow_schema(frame: DataFrame, *, table_name: str) -> pa.Schema:
    """Return the frame's schema as Arrow types.

    Spark analyzes the plan and does not execute it. Raises ColumnUnsupported.
    """
    fields = []
    for column in frame.schema:
        try:
            fields += list(to_arrow_schema(StructType([column])))
        except (PySparkException, TypeError) as error:
            raise ColumnUnsupported(
                f"Column {column.name} is {column.dataType.simpleString()}, which the lake cannot store.",
                table=table_name,
                hint="Cast it to text, numbers or timestamps in the asset.",
            ) from error
    return pa.schema(fields)


def require_session_branch(frame: DataFrame, branch_name: str, *, table_name: str) -> None:
    """Raise ForeignSession if the frame's session uses another branch.

    Its write would bypass the run's branch.
    """
    ref = frame.sparkSession.conf.get("spark.sql.catalog.nessie.ref", "unknown")
    if ref != branch_name:
        raise ForeignSession(
            f"The frame belongs to a Spark session on {ref!r}, not on the run's branch.",
            table=table_name,
            branch=branch_name,
            hint="Use the run's session: a parameter `spark: BranchSparkResource`, then spark.spark_session.",
        )


def write_spark_frame(
    frame: DataFrame,
    spec: TableSpec,
    schema: Schema,
    selection: Selection | None,
    properties: Mapping[str, str],
    *,
    candidate_rows: int | None = None,
) -> None:
    """Write `frame` by the spec's write mode to the table.

    Spark computes the frame once, and twice for some upserts with `when_matched="keep"`.

    Some rows may already be written when an error is raised, but only to the run's branch, which will not be
    published.

    Args:
        frame: the rows to write.
        spec: the table and its write mode.
        schema: the table's schema.
        selection: the rows that the write may replace; None means the whole table.
        properties: the properties of the snapshot's summary.
        candidate_rows: the largest number of rows of the table that may have the keys of an upsert. (default:
            unknown)

    Raises:
        PartitionMismatch: a row is outside the selection.
        UpsertKeyInvalid: a key of an upsert is null, not unique, or differs when the frame is computed again.
    """
    column_names = {field.name for field in schema.fields}
    # A column that is null in all rows has no type, and the table may not have that column yet.
    frame = frame.drop(*(name for name in frame.columns if name not in column_names))
    if spec.write_mode == "upsert":
        _upsert_by_keys(frame, spec, schema, selection, properties, candidate_rows)
        return
    if spec.requires_unique_keys:
        valid_rows = _with_unique_keys(frame, spec, schema, selection).drop(_COPIES_COLUMN)
        with _typed_upsert_errors(spec, schema, selection):
            _append_or_replace(valid_rows, spec, schema, selection, properties)
        return
    observed_frame, observation = _observe_rows_outside(frame, schema, selection)
    _append_or_replace(observed_frame, spec, schema, selection, properties)
    if observation is not None and selection is not None:
        # A Connect server sends its observation by the end of the write. On a busy machine its listeners may
        # run too late and send nothing. Then the rows are counted again.
        outside_count = observation.get.get("outside")
        if outside_count is None:
            outside_count = frame.filter(_is_outside(schema, selection)).count()
        if outside_count:
            raise partition_mismatch_error(spec, schema, selection, f"{outside_count} rows")


def _append_or_replace(
    frame: DataFrame,
    spec: TableSpec,
    schema: Schema,
    selection: Selection | None,
    properties: Mapping[str, str],
) -> None:
    """Write the frame by a write mode that matches no rows by keys."""
    writer = _write_to(frame, spec, properties)
    if spec.write_mode == "append":
        writer.append()
    elif spec.write_mode == "replace_table":
        writer.overwrite(F.lit(True))
    else:
        assert selection is not None  # noqa: S101 - the mode implies partitions
        writer.overwrite(F.expr(to_sql_predicate(selection, schema)))


def _observe_rows_outside(
    frame: DataFrame, schema: Schema, selection: Selection | None
) -> tuple[DataFrame, Observation | None]:
    """Return the frame, and an observation that counts rows outside the partitions during the write.

    Without a selection, the frame is returned unchanged, with None.
    """
    if selection is None:
        return frame, None
    observation = Observation()
    outside_count = F.coalesce(F.sum(_is_outside(schema, selection).cast("long")), F.lit(0)).alias("outside")
    return frame.observe(observation, outside_count), observation


def _is_outside(schema: Schema, selection: Selection) -> Column:
    """Return the Spark condition that a row of a table with `schema` is in no selected partition."""
    return ~F.coalesce(F.expr(to_sql_predicate(selection, schema)), F.lit(False))


def _write_to(frame: DataFrame, spec: TableSpec, properties: Mapping[str, str]) -> DataFrameWriterV2:
    writer = frame.writeTo(spec.spark_name)
    for key, value in properties.items():
        writer = writer.option(f"{_SNAPSHOT_PROPERTY}{key}", value)
    return writer


def _upsert_by_keys(
    frame: DataFrame,
    spec: TableSpec,
    schema: Schema,
    selection: Selection | None,
    properties: Mapping[str, str],
    candidate_rows: int | None,
) -> None:
    """Upsert the frame. A null or duplicate key fails the job: Iceberg would insert all its rows.

    With `when_matched="keep"`, Spark only adds data files. If no row of the table can match, it appends the
    frame. Otherwise, it reads the table's key columns in the files of the partitions, and in the files whose
    bounds overlap the time keys of the frame.
    """
    # The window of the assertion shuffles by the keys. The join of the MERGE needs the same shuffle.
    source = _with_unique_keys(frame, spec, schema, selection)
    with _typed_upsert_errors(spec, schema, selection):
        if spec.keeps_matched and candidate_rows == 0:
            _write_to(source.drop(_COPIES_COLUMN), spec, properties).append()
            return
        # Rows with the same keys have the same values in the partition columns that are keys.
        candidates = None if selection is None else selection.limited_to(spec.keys)
        has_few_candidates = candidate_rows is not None and candidate_rows <= _FEW_CANDIDATE_ROWS
        bounds = None
        if spec.keeps_matched and (candidates is None or not has_few_candidates):
            bounds = _time_key_bounds(frame, spec)
            source = source.filter(_within_assertion(bounds))
        join_conditions = [
            f"{spec.spark_name}.{quote_spark_name(key)} = incoming.{quote_spark_name(key)}"
            for key in keys_to_sort_by(spec)
        ]
        if bounds is not None:
            join_conditions += bounds.conditions_on(spec.spark_name)
        if candidates is not None:
            join_conditions.append(f"({to_sql_predicate(candidates, schema, table_alias=spec.spark_name)})")
        columns = {
            quote_spark_name(name): F.col(f"incoming.{quote_spark_name(name)}") for name in frame.columns
        }
        with set_session_properties(frame.sparkSession, properties):
            merge = (
                source.drop(_COPIES_COLUMN)
                .alias("incoming")
                .mergeInto(spec.spark_name, F.expr(" AND ".join(join_conditions)))
            )
            if not spec.keeps_matched:
                merge = merge.whenMatched().update(columns)
            merge.whenNotMatched().insert(columns).merge()


def _with_unique_keys(
    frame: DataFrame, spec: TableSpec, schema: Schema, selection: Selection | None
) -> DataFrame:
    """Return the frame with assertions that fail the Spark job, and with the column `_COPIES_COLUMN`.

    The job fails at a key that is null or occurs twice, and at a row outside the selection. Raises
    UpsertKeyInvalid if the frame lacks a key column.
    """
    require_key_columns(spec, frame.columns)
    copies = F.count(F.lit(1)).over(Window.partitionBy(*map(quote_spark_name, keys_to_sort_by(spec))))
    keys_present = " AND ".join(f"{quote_spark_name(key)} IS NOT NULL" for key in spec.keys)
    assertions = (
        f"assert_true({keys_present}, '{_NULL_KEY_MESSAGE}') IS NULL",
        f"assert_true({_COPIES_COLUMN} = 1, '{_NOT_UNIQUE_MESSAGE}') IS NULL",
    )
    source = frame.withColumn(_COPIES_COLUMN, copies).filter(F.expr(" AND ".join(assertions)))
    if selection is not None:
        source = source.filter(inside_assertion(selection, schema, f"{_COPIES_COLUMN} < 1"))
    return source


def keys_to_sort_by(spec: TableSpec) -> list[str]:
    """Return the keys in the order in which Spark sorts rows by them fastest: partition columns come last.

    The rows of a run have few values in a partition column. Where the first key is equal, Spark compares the
    whole rows, which takes twice as long.
    """
    partition_columns = set(spec.columns_by_dimension.values())
    return sorted(spec.keys, key=lambda key: key in partition_columns)


@contextmanager
def _typed_upsert_errors(spec: TableSpec, schema: Schema, selection: Selection | None) -> Iterator[None]:
    """Convert the failed assertions of an upsert to UpsertKeyInvalid and PartitionMismatch."""
    try:
        yield
    except Exception as error:
        if _NOT_UNIQUE_MESSAGE in str(error):
            raise duplicate_key_error(spec) from error
        if _NULL_KEY_MESSAGE in str(error):
            raise null_key_error(spec, spec.keys) from error
        if OUTSIDE_MESSAGE in str(error):
            raise partition_mismatch_error(spec, schema, selection, "Rows") from error
        if _UNSTABLE_MESSAGE in str(error):
            raise UpsertKeyInvalid(
                "The frame was computed twice, with different keys.",
                table=spec.name,
                hint="Return a frame that is the same each time: without sample(), limit() or random"
                " numbers. Or cache it in the asset.",
                reason="frame_not_stable",
            ) from error
        raise


@dataclass(frozen=True)
class _KeyBounds:
    """The lowest and highest value of each date or timestamp key of a frame, as SQL literals.

    `by_key` lacks keys that are null in all rows. `is_empty` means that the frame has no rows.
    """

    is_empty: bool
    by_key: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def conditions_on(self, table: str) -> list[str]:
        """Return SQL conditions that are true for all rows of a table that may have a key of the frame."""
        if self.is_empty:
            return ["false"]
        return [
            f"{table}.{quote_spark_name(key)} BETWEEN {low} AND {high}"
            for key, (low, high) in self.by_key.items()
        ]


def _time_key_bounds(frame: DataFrame, spec: TableSpec) -> _KeyBounds:
    """Return the bounds of the frame's date and timestamp keys, with which Spark skips files.

    Computes these columns of the frame once more.
    """
    kinds = {key: frame.schema[key].dataType for key in spec.keys}
    times = [
        key for key, kind in kinds.items() if isinstance(kind, DateType | TimestampType | TimestampNTZType)
    ]
    columns = [F.count(F.lit(1)).alias("rows")]
    for number, key in enumerate(times):
        # Numbers, because the text of a timestamp depends on the session's time zone, and is ambiguous when
        # clocks go back.
        value = _as_number(quote_spark_name(key), kinds[key])
        columns += [F.min(value).alias(f"low{number}"), F.max(value).alias(f"high{number}")]
    found = frame.select(*columns).head()
    if found is None or not found["rows"]:
        return _KeyBounds(is_empty=True)
    bounds = {
        key: (_as_literal(found[f"low{number}"], kinds[key]), _as_literal(found[f"high{number}"], kinds[key]))
        for number, key in enumerate(times)
        if found[f"low{number}"] is not None
    }
    return _KeyBounds(is_empty=False, by_key=bounds)


def _as_number(name: str, kind: DataType) -> Column:
    if isinstance(kind, DateType):
        return F.unix_date(name)
    if isinstance(kind, TimestampType):
        return F.unix_micros(name)
    return F.col(name).cast("string")


def _as_literal(value: int | str, kind: DataType) -> str:
    if isinstance(kind, DateType):
        return f"date_from_unix_date({value})"
    if isinstance(kind, TimestampType):
        return f"timestamp_micros({value})"
    return f"TIMESTAMP_NTZ '{value}'"


def _within_assertion(bounds: _KeyBounds) -> Column:
    """Return a filter that fails the Spark job for a row whose keys are outside of the bounds.

    Such a row shows that Spark computed the frame twice with different results. Without the failure, rows
    whose keys are already in the table could be added a second time.
    """
    # Spark moves a filter below everything that does not compute its columns, so that it would see rows that
    # the frame leaves out. The number of copies is computed last.
    # A null key is not within any bounds. Another assertion reports it.
    conditions = [
        f"({quote_spark_name(key)} IS NULL OR {quote_spark_name(key)} BETWEEN {low} AND {high})"
        for key, (low, high) in bounds.by_key.items()
    ]
    within = "false" if bounds.is_empty else " AND ".join(["true", *conditions])
    return F.expr(f"assert_true({_COPIES_COLUMN} < 1 OR ({within}), '{_UNSTABLE_MESSAGE}') IS NULL")


def partition_mismatch_error(
    spec: TableSpec, schema: Schema, selection: Selection | None, rows: str
) -> PartitionMismatch:
    """Return the error for rows outside the run's partitions.

    `rows` is the subject of the message, such as `3 rows`.
    """
    return PartitionMismatch(
        f"{rows} of the frame are outside the run's partitions.",
        table=spec.name,
        hint=format_required_rows(selection, schema) if selection else None,
    )


def inside_assertion(selection: Selection, schema: Schema, is_exempt: str) -> Column:
    """Return a Spark filter that fails the job with OUTSIDE_MESSAGE for a row outside the run's partitions.

    It keeps all rows. Rows for which `is_exempt` holds may be outside.

    Args:
        selection: the run's partitions.
        schema: the schema of the table.
        is_exempt: SQL of the rows that are not checked. It must use a column computed after the frame,
            because Spark moves a filter below everything that does not compute its columns, so that it would
            see rows that the frame leaves out.

    """
    inside = f"coalesce({to_sql_predicate(selection, schema)}, false)"
    return F.expr(f"assert_true(({is_exempt}) OR {inside}, '{OUTSIDE_MESSAGE}') IS NULL")


def require_key_columns(spec: TableSpec, column_names: list[str]) -> None:
    """Raise UpsertKeyInvalid if a key column of the spec is not among `column_names`, the frame's columns."""
    missing_keys = [key for key in spec.keys if key not in column_names]
    if missing_keys:
        raise UpsertKeyInvalid(
            f"The frame lacks {format_names('key column', missing_keys)}.", table=spec.name
        )


@contextmanager
def set_session_properties(session: SparkSession, properties: Mapping[str, str]) -> Iterator[None]:
    """Set snapshot properties in the session while the body runs, because MERGE accepts no write options."""
    setting_names = {key: f"{_SESSION_PROPERTY}{key}" for key in properties}
    with _settings_lock:
        # The session has permanent properties of its own, such as the run id. They are restored afterwards.
        previous_values = _get_settings(session, setting_names.values())
        _change_settings(session, {setting_names[key]: value for key, value in properties.items()})
        try:
            yield
        finally:
            _change_settings(session, previous_values)


def _get_settings(session: SparkSession, names: Collection[str]) -> dict[str, str | None]:
    if is_connect(session):
        return get_session_settings(session, names)
    return {name: session.conf.get(name, None) for name in names}


def _change_settings(session: SparkSession, values: Mapping[str, str | None]) -> None:
    """Set the settings that have a value, and unset those whose value is None."""
    values_to_set = {name: value for name, value in values.items() if value is not None}
    names_to_unset = values.keys() - values_to_set.keys()
    if is_connect(session):
        if values_to_set:
            set_session_settings(session, values_to_set)
        if names_to_unset:
            unset_session_settings(session, names_to_unset)
        return
    for name, value in values_to_set.items():
        session.conf.set(name, value)
    for name in names_to_unset:
        session.conf.unset(name)


def read_spark_frame(
    session: SparkSession, spec: TableSpec, schema: Schema, selection: Selection | None
) -> DataFrame:
    """Return the rows of the selected partitions as a lazy frame, with all columns of the table.

    `schema` is the schema of the table: the filter compares each column by its type. Without `selection`, the
    frame has all rows.
    """
    frame = session.table(spec.spark_name)
    return frame if selection is None else frame.filter(to_sql_predicate(selection, schema))
