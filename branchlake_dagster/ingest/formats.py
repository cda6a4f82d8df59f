"""Formats of record values: the interface, JSON, and values that a function of Arrow batches decodes.

Each format is a Spark expression that Spark compiles, or a function of batches; no Python code runs per
record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Protocol

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, FractionalType, NullType, StringType, StructField, StructType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.decoder_results import check_decoded, failure_reason
from branchlake_dagster.ingest.nested_casts import (
    NESTED_TYPES,
    cast_nested,
    format_type,
    lost_part,
    null_of,
    select_field,
)
from branchlake_dagster.ingest.spark_expressions import (
    JSON_STRING,
    RecordColumn,
    any_of,
    any_value,
    bind_value,
    build_case,
    build_reason,
    first_reason,
    interpret_when,
    is_json_object,
    matches_whole,
    no_reason,
    split_nested_type,
    with_columns,
)
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_string

VALUE_COLUMN = "__value"
_CORRUPT_FIELD = "__corrupt"
REASON_SUFFIX = "_why"
"""Suffix of a rows column: the column `__row0_why` has the reasons why records have no row in `__row0`."""


class Format(Protocol):
    """A format of record values: reads their bytes and converts them to rows with Spark expressions."""

    def read(self, records: DataFrame) -> DataFrame:
        """Return the frame with the columns that the other methods need added.

        Their names begin with two underscores. The bytes of the value are in the column `__value`.
        """

    def convert_rows(
        self,
        frame: DataFrame,
        row_column: str,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None = None,
    ) -> DataFrame:
        """Add two columns: the converted row, and the reason if the value cannot be converted.

        The column `row_column` is a struct of the table's columns. The second column has the same name with
        `REASON_SUFFIX`: a struct of `kind` and `detail`, or null if the row is valid. With `is_deletion` the
        row is in an envelope: in its field `before` if `is_deletion` is true, else in its field `after`.
        """

    def field_text(self, field: str) -> Expression:
        """Return a field as text; null if the record does not have it. Dots separate the names of a path."""

    def record_field_names(
        self, *, with_values: bool = False, is_deletion: Expression | None = None
    ) -> Expression | None:
        """Return the expression of the names of the fields in a record's row, an array of text.

        Returns None if the format has a schema; then `schema_field_names` has the names. With `with_values`
        the array has only fields with a value, which costs more. For `is_deletion` see `convert_rows`.
        """

    def schema_field_names(self, *, has_envelope: bool) -> Sequence[str] | None:
        """Return the names of the fields in the schema of a row; None if the format has no schema.

        With `has_envelope` these are the fields of the envelope's field `after`.
        """

    def row_json(self, is_deletion: Expression | None) -> Expression | None:
        """Return the expression of the row as JSON text; None if the format has a schema.

        For `is_deletion` see `convert_rows`.
        """

    def value_struct(self, *, has_envelope: bool) -> Expression:
        """Return the expression of the whole value as a struct. Only a format with a schema has this.

        With `has_envelope` the struct has the field `after`.
        """


@dataclass(frozen=True)
class Json:
    """Reads values that are one JSON object in UTF-8.

    A field is matched by its exact name and read as Spark's `from_json` reads the column's type. If that
    fails, the value is cast once more: numbers in text, text for numbers, `true` in text. A field that is
    missing or null is null; of a repeated field the last value counts. A value becomes a dead letter if it is
    not an object, if anything follows the object, or if a field can be neither read nor cast.

    Integers may be written as `4.0`; a number with a fraction does not fit an integer column. Decimals are
    rounded half up to the column's scale. Times are ISO 8601 (UTC if they have no zone), or seconds since
    1970 before the year 10000. A time of day without a date is not a time, and a decimal in text may have
    commas only between groups of three digits: `"1,234.50"`, but not `"9,90"`. Binary columns take base64.
    Text columns take any value, as Spark prints it. Half of a character (a lone surrogate) is
    not text. Values inside structs, lists and maps must have exactly their declared types.

    Examples:
        .. code-block:: python

            Ingest(name="orders", topics=["orders"], format=Json(), tables=[orders])
    """

    def read(self, records: DataFrame) -> DataFrame:
        """Add `__text`, the value as text, and `__not_text`, which is true for values that are not Unicode.

        These are bytes that are not UTF-8, and escapes of half a character, which Spark would replace by `?`.
        """
        value_text = F.col(VALUE_COLUMN).cast("string")
        is_text = F.is_valid_utf8(value_text) & ~_has_lone_surrogate(value_text)
        return records.withColumn("__text", F.when(is_text, value_text)).withColumn(
            "__not_text", F.col(VALUE_COLUMN).isNotNull() & F.col("__text").isNull()
        )

    def convert_rows(
        self,
        frame: DataFrame,
        row_column: str,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None = None,
    ) -> DataFrame:
        """Add the converted row, and the reason if there is none, as `Format.convert_rows` describes.

        Each step is a frame of its own. Spark may compute an expression again for each other expression that
        uses it in the same frame, even for records that do not need it, which was six times slower.
        """
        text_column, read_column, times_column, good_column, rest_column = (
            f"{row_column}_{part}" for part in ("text", "read", "times", "good", "rest")
        )
        fields = {name: one.kind for one in columns for name in one.fields}
        # Spark's reader ignores text after an object. Inside another object such text is an error.
        row_fields = ", ".join(
            f"{quote_spark_name(name)}: {_reader_type(kind)}" for name, kind in fields.items()
        )
        schema = f"v struct<{row_fields}>, {_CORRUPT_FIELD} string"
        frame = frame.withColumn(
            text_column, F.concat(F.lit('{"v":'), self.row_json(is_deletion), F.lit("}"))
        )
        reader_input = F.col(text_column)
        if any("decimal" in kind for kind in fields.values()):
            is_misread = _is_slow_decimal(reader_input) | reader_input.rlike(_QUOTED_COMMA_NUMBER)
            reader_input = F.when(~is_misread, reader_input)
        frame = frame.withColumn(read_column, F.from_json(reader_input, schema, _READER_OPTIONS))
        values = F.col(read_column).getField("v")
        good_values = F.col(read_column).getField(_CORRUPT_FIELD).isNull() & values.isNotNull()
        time_fields = [name for name, kind in fields.items() if _reader_type(kind) != kind]
        if time_fields:
            parsed_times = (
                _parse_time_text(values.getField(name), fields[name]).alias(name) for name in time_fields
            )
            frame = frame.withColumn(times_column, F.struct(*parsed_times))
            for name in time_fields:
                is_valid = values.getField(name).isNull() | F.col(times_column).getField(name).isNotNull()
                good_values = good_values & is_valid

        nested_fields = {name: kind for name, kind in fields.items() if _has_strict_texts(kind)}
        if nested_fields:
            types = (f"{quote_spark_name(name)}: {kind}" for name, kind in nested_fields.items())
            row_type = f"struct<{', '.join(types)}>"
            good_values = good_values & ~_has_misread_text(reader_input, row_type)

        def exact_field(name: str) -> Expression:
            return (F.col(times_column) if name in time_fields else values).getField(name)

        frame = frame.withColumn(good_column, F.coalesce(good_values, F.lit(False)))

        def convert_field(name: str, spark_type: str, variant: Expression) -> Expression:
            cast_value = _cast_variant_field(variant, F.col(text_column), name, spark_type)
            # Of a corrupt record the reader keeps the parts that it could read, even parts of nested values.
            return (
                cast_value
                if spark_type.startswith(_NESTED_TYPES)
                else F.coalesce(exact_field(name), cast_value)
            )

        def cast_each_field(variant: Expression) -> Expression:
            cast_struct = _build_struct(columns, lambda name, kind: convert_field(name, kind, variant))
            row_json = self.row_json(is_deletion)
            return bind_value(
                cast_struct,
                lambda cast_row: F.struct(
                    cast_row.alias("row"), self._reason_struct(variant, row_json, cast_row, columns)
                ),
            )

        frame = frame.withColumn(
            rest_column,
            interpret_when(~F.col(good_column), F.try_parse_json(F.col(text_column)), cast_each_field),
        )
        row_struct = F.when(
            F.col(good_column), _build_struct(columns, lambda name, _: exact_field(name))
        ).otherwise(F.col(rest_column).getField("row"))
        frame = frame.withColumn(row_column, row_struct).withColumn(
            f"{row_column}{REASON_SUFFIX}", F.col(rest_column).getField("why")
        )
        return frame.drop(text_column, read_column, times_column, good_column, rest_column)

    def row_json(self, is_deletion: Expression | None) -> Expression:
        """Return the JSON text of the row: the whole value, or the envelope's `before` or `after`.

        Kafka Connect may have put the envelope inside another envelope, in its field `payload`.
        """
        if is_deletion is None:
            return F.col("__text")
        before = F.coalesce(self.field_text("before"), self.field_text("payload.before"))
        after = F.coalesce(self.field_text("after"), self.field_text("payload.after"))
        return F.when(is_deletion, before).otherwise(after)

    def _reason_struct(
        self, variant: Expression, row_json: Expression, cast_row: Expression, columns: Sequence[RecordColumn]
    ) -> Expression:
        lost_detail = F.coalesce(
            *(_conversion_detail(variant, cast_row, one) for one in columns), F.lit(None).cast("string")
        )
        encoding_detail = F.when(
            F.is_valid_utf8(F.col(VALUE_COLUMN).cast("string")),
            F.lit("The value has half of a character (a lone surrogate)."),
        ).otherwise(F.lit("The value is not valid UTF-8."))
        return (
            F.when(F.col("__not_text"), build_reason("encoding", encoding_detail))
            .when(variant.isNull(), build_reason("syntax", "The value is not valid JSON."))
            .when(~is_json_object(row_json), build_reason("syntax", "The value is JSON, but not an object."))
            .otherwise(F.when(lost_detail.isNotNull(), build_reason("conversion", lost_detail)))
            .alias("why")
        )

    def field_text(self, field: str) -> Expression:
        """Return a field as text; null if the record does not have it. Dots separate the names of a path."""
        parts = field.split(".")
        if all(map(_PLAIN_NAME.fullmatch, parts)):
            return F.get_json_object(F.col("__text"), "$" + "".join(f"['{part}']" for part in parts))
        return reduce(_member_text, parts, F.col("__text"))

    def record_field_names(
        self, *, with_values: bool = False, is_deletion: Expression | None = None
    ) -> Expression | None:
        """Return the names of the fields of the row's outermost object, as an array.

        With `with_values` fields are left out whose value is null or an object or list without any value.
        """
        row_json = self.row_json(is_deletion)
        if not with_values:
            return F.json_object_keys(row_json)
        values = F.from_json(row_json, "map<string, string>")
        # An empty object or list does not determine a type either.
        filled_fields = F.map_filter(values, lambda _, value: value.isNotNull() & ~_is_empty_json(value))
        return F.map_keys(filled_fields)

    def schema_field_names(self, *, has_envelope: bool) -> None:
        """Return None, because JSON has no schema."""

    def value_struct(self, *, has_envelope: bool) -> Expression:
        """Raise NotImplementedError, because JSON has no schema."""
        raise NotImplementedError


_READER_OPTIONS = {"columnNameOfCorruptRecord": _CORRUPT_FIELD, "allowSingleQuotes": "false"}
_TIME_TYPES = ("timestamp", "timestamp_ntz")
_INTEGER_TYPES = ("tinyint", "smallint", "int", "bigint")
_NESTED_TYPES = ("struct<", "array<", "map<")
_STRICT_TYPES = (*_TIME_TYPES, "date", "decimal")
_MAX_DIGITS = 400
"""Number of characters above which a number is not cast to a decimal.

A decimal has 38 digits, and may have more zeros. A double has up to 309 digits before its point."""
_LONG_DECIMAL_EXPONENT = "[eE][+-]?0*[0-9]{3}"
_LONG_EXPONENT = "[0-9.][eE][+-]?[0-9]{5}"
"""An exponent with which Spark's reader takes minutes to build a decimal."""
_QUOTED_LONG_EXPONENT = r'"\s*[+-]?[0-9.]+[eE][+-]?[0-9]{5,}\s*"'
_GROUPED_NUMBER = r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:[.][0-9]*)?(?:[eE][+-]?[0-9]+)?"
_QUOTED_COMMA_NUMBER = rf'(?<=[:,\[]\s{{0,20}})"(?!\s*{_GROUPED_NUMBER}\s*")\s*[+-]?[0-9.]*,[0-9.,]*\s*"'
"""A number in quotes with commas that do not separate groups of digits. Spark's reader removes all commas."""
_TIME_OF_DAY = r"^[\x00-\x20]*(?:T|[0-9]+:)"
"""A time without a date. Spark takes the present day for it."""
_DATE_ALONE = r"^\s*[+-]?[0-9]{1,7}-[0-9]{1,2}-[0-9]{1,2}\s*$"
_SURROGATE = r"\\u[dD][89a-fA-F]"
_SHORTEST_TIME = 8
"""Least number of characters of a time. Spark reads a shorter text as a year, but here it means seconds."""


def _is_empty_json(json: Expression) -> Expression:
    """Whether a JSON text is an object or a list without a value at any level."""
    rest = F.regexp_replace(json, rf"{JSON_STRING}\s*:|null|[\[\]{{}},\s]", "")
    return json.rlike(r"^[\[{]") & (rest == "")


def _reader_type(kind: str) -> str:
    """Return the type with which Spark's JSON reader reads a field first.

    Times and dates are read as text: the reader would turn large numbers into overflowing times, and "12"
    into the twelfth day after 1970. Decimals are read directly, because text of a number has passed through a
    double and lost digits.
    """
    return "string" if kind in (*_TIME_TYPES, "date") else kind


def _has_strict_texts(kind: str) -> bool:
    """Whether a nested type has dates, times or decimals, which Spark's reader reads from other texts too."""
    return kind.startswith(_NESTED_TYPES) and any(
        leaf.startswith(_STRICT_TYPES) for _, leaf in split_nested_type(kind)[1]
    )


def _has_misread_text(json: Expression, kind: str) -> Expression:
    """Whether the reader reads other values than those in the text of a date, time or decimal.

    `json` is an object whose field `v` has the type `kind`. Only values inside structs, lists and maps of `v`
    are inspected.
    """
    text_kind, leaves = split_nested_type(kind)
    text_values = F.from_json(json, f"v {text_kind}", {"allowSingleQuotes": "false"}).getField("v")
    return any_of(
        any_value(text_values, steps, partial(_is_misread, kind=leaf))
        for steps, leaf in leaves
        if leaf.startswith(_STRICT_TYPES)
    )


def _is_misread(text: Expression, *, kind: str) -> Expression:
    if kind == "date":
        return ~_is_date_text(text)
    if kind in _TIME_TYPES:
        return text.rlike(_TIME_OF_DAY)
    return text.contains(",") & ~matches_whole(text, rf"\s*{_GROUPED_NUMBER}\s*")


def _is_slow_decimal(json: Expression) -> Expression:
    """Whether the JSON has a number that Spark's reader would take minutes to expand to a decimal.

    Nothing can interrupt the reader. A number counts only by itself, bare or in quotes: a longer text, such
    as a hash, often contains something that looks like such a number.
    """
    bare = F.regexp_replace(json, JSON_STRING, '""').rlike(_LONG_EXPONENT)
    return F.coalesce(
        F.when(json.rlike(_LONG_EXPONENT), json.rlike(_QUOTED_LONG_EXPONENT) | bare), F.lit(False)
    )


def _parse_time_text(time_text: Expression, kind: str) -> Expression:
    if kind == "date":
        is_date = (F.length(time_text) >= _SHORTEST_TIME) & _is_date_text(time_text)
        return F.when(is_date, time_text.try_cast("date"))
    return _parse_timestamp(time_text, kind)


def _has_too_many_digits(number_text: Expression) -> Expression:
    """Whether a number has too many digits for a decimal, written out or by its exponent."""
    return (F.length(number_text) > _MAX_DIGITS) | number_text.rlike(_LONG_DECIMAL_EXPONENT)


def _parse_timestamp(time_text: Expression, kind: str) -> Expression:
    """Parse text as a time of type `kind`: `timestamp`, or `timestamp_ntz`, which has the time in UTC.

    The result is null for text that is not a time.
    """
    is_time = (F.length(time_text) >= _SHORTEST_TIME) & ~time_text.rlike(_TIME_OF_DAY)
    return F.when(is_time, time_text.try_cast("timestamp")).cast(kind)


def _is_date_text(text: Expression) -> Expression:
    """Whether text is a date, or a time. Spark also takes other text after a date, and a number of days."""
    return text.rlike(_DATE_ALONE) | (~text.rlike(_TIME_OF_DAY) & text.try_cast("timestamp").isNotNull())


def _has_lone_surrogate(json: Expression) -> Expression:
    """Whether a JSON text escapes one half of a character without the other, which no encoding can hold."""
    rest = F.regexp_replace(json, r"\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w", "")
    # Nearly all records end at the first condition, which needs no regular expression.
    return json.contains("\\u") & json.rlike(_SURROGATE) & rest.rlike(_SURROGATE)


def _build_struct(
    columns: Sequence[RecordColumn], build_value: Callable[[str, str], Expression]
) -> Expression:
    fields = []
    for column in columns:
        candidates = [build_value(name, column.kind) for name in column.fields]
        fields.append((F.coalesce(*candidates) if len(candidates) > 1 else candidates[0]).alias(column.name))
    return F.struct(*fields)


_PLAIN_NAME = re.compile(r"[\w$:@/-](?:[\w$:@/ -]*[\w$:@/-])?")
"""Names that a path into JSON or a variant can contain. Paths cannot escape quotes, `?` and brackets."""


def _field_path(variant: Expression, name: str) -> tuple[Expression, str]:
    """Return a variant and the path in it to the record's field with exactly this name."""
    if _PLAIN_NAME.fullmatch(name):
        return variant, f"$.v['{name}']"
    return F.try_variant_get(variant, "$.v", "map<string, variant>").getItem(name), "$"


def _member_text(json: Expression, name: str) -> Expression:
    """Return a Spark expression for a member of a JSON object as text, without the quotes of a string.

    It is null if the object does not have the member.
    """
    if _PLAIN_NAME.fullmatch(name):
        return F.get_json_object(json, f"$['{name}']")
    return F.from_json(json, "map<string, string>").getItem(name)


def _cast_variant_field(variant: Expression, wrapped_json: Expression, name: str, kind: str) -> Expression:
    if kind == "binary":
        return F.lit(None).cast(kind)
    value, path = _field_path(variant, name)
    if kind.startswith(_NESTED_TYPES):
        # A cast of the whole value would silently turn parts that do not fit into null.
        is_plain = _PLAIN_NAME.fullmatch(name)
        field_json = (
            F.get_json_object(wrapped_json, f"$.v['{name}']")
            if is_plain
            else _member_text(F.get_json_object(wrapped_json, "$.v"), name)
        )
        if "decimal" in kind:
            field_json = F.when(~_is_slow_decimal(field_json), field_json)
        wrapped_field = F.concat(F.lit('{"v":'), field_json, F.lit("}"))
        parsed_struct = F.from_json(
            wrapped_field,
            f"v {kind}, {_CORRUPT_FIELD} string",
            _READER_OPTIONS,
        )
        is_good = parsed_struct.getField(_CORRUPT_FIELD).isNull()
        if _has_strict_texts(kind):
            is_good = is_good & ~_has_misread_text(wrapped_field, kind)
        return F.when(is_good, parsed_struct.getField("v"))
    if kind in _TIME_TYPES:
        timestamp = F.try_variant_get(value, path, "timestamp")
        is_time = F.year(timestamp).between(1, 9999) & ~F.try_variant_get(value, path, "string").rlike(
            _TIME_OF_DAY
        )
        return F.when(is_time, timestamp).cast(kind)
    if kind == "date":
        date_text = F.try_variant_get(value, path, "string")
        return F.when(_is_date_text(date_text), F.try_variant_get(value, path, kind))
    cast_value = F.try_variant_get(value, path, kind)
    if kind.startswith("decimal"):
        return F.when(~_has_too_many_digits(F.try_variant_get(value, path, "string")), cast_value)
    if kind not in _INTEGER_TYPES:
        return cast_value
    has_fraction = F.try_variant_get(value, path, "double") != cast_value.cast("double")
    # A double has at most 17 digits. A text such as "1e-99999999" takes minutes to become a decimal.
    exact_decimal = F.when(
        ~_has_too_many_digits(F.try_variant_get(value, path, "string")),
        F.try_variant_get(value, path, "decimal(38,15)"),
    )
    has_fraction = F.coalesce(has_fraction, F.lit(False)) | (
        exact_decimal != cast_value.cast("decimal(38,15)")
    )
    return F.when(~F.coalesce(has_fraction, F.lit(False)), cast_value)


def _conversion_detail(variant: Expression, row: Expression, column: RecordColumn) -> Expression:
    """Return the message for a column whose field has a value that does not fit its type; null if it fits.

    `variant` has the record's row as it was read, and `row` is the converted row. A value that does not fit
    is null in the converted row only.
    """
    field_variants = [F.try_variant_get(*_field_path(variant, name), "variant") for name in column.fields]
    field_value = F.coalesce(*field_variants) if len(field_variants) > 1 else field_variants[0]
    is_lost = row.getField(column.name).isNull() & field_value.isNotNull() & ~F.is_variant_null(field_value)
    return F.when(is_lost, F.lit(f"{column.name} is not a valid {column.kind}."))


def row_in_envelope(source: Expression, is_deletion: Expression) -> Expression:
    """Return the struct of the row in an envelope: its field `before` for a deletion, else `after`.

    `source` is the struct of the envelope. `is_deletion` is a condition.
    """
    return F.when(is_deletion, source.getField("before")).otherwise(source.getField("after"))


def row_type_in_envelope(session: SparkSession, envelope: StructType) -> StructType:
    """Return the type of the structs of `row_in_envelope`.

    Costs a request to Spark for the first use of an envelope whose fields `before` and `after` have different
    types: Spark gives them a common type. Raises ConfigurationError for a struct that is not an envelope.
    """
    sides = [field for field in envelope.fields if field.name in _ENVELOPE_FIELDS]
    if len(sides) < len(_ENVELOPE_FIELDS) or not isinstance(envelope["after"].dataType, StructType):
        raise ConfigurationError(
            "The schema of the values lacks a field of the envelope, or its field after is not a record.",
            hint="Remove Ingest(envelope=…), or use a schema with the fields before and after.",
        )
    before, after = (format_type(envelope[name].dataType) for name in _ENVELOPE_FIELDS)
    if before == after:
        return envelope["after"].dataType
    if (before, after) not in _common_types:
        nulls = (F.expr(null_of(format_type(side.dataType))).alias(side.name) for side in sides)
        row = row_in_envelope(F.struct(*nulls), F.lit(True))
        row_type = session.range(0).select(row).schema[0].dataType
        assert isinstance(row_type, StructType)  # noqa: S101 - a common type of two structs
        _common_types[before, after] = row_type
    return _common_types[before, after]


_ENVELOPE_FIELDS = ("before", "after")
_common_types: dict[tuple[str, str], StructType] = {}


@dataclass(frozen=True)
class StructRows:
    """Decoded structs of one type that become rows in the column `row_column`.

    `source` is the expression of the structs. `reasons` are pairs of a condition under which a record has
    no row, and the reason. They precede the reasons of failed casts.
    """

    row_column: str
    source: Expression
    source_type: StructType
    reasons: Sequence[tuple[Expression, Expression]]


def convert_struct_rows(
    frame: DataFrame,
    struct_rows: Sequence[StructRows],
    columns: Sequence[RecordColumn],
    *,
    is_only_schema: bool = True,
) -> DataFrame:
    """Convert structs to rows by Spark's casts, for each of `struct_rows` as `Format.convert_rows` requires.

    Raises ConfigurationError if a field has a type that Spark does not cast to the column's type. Without
    `is_only_schema`, other records have other schemas, so only the records of this schema have no row.

    All structs are converted in three frames: with frames for each, Spark would plan sixty frames of twenty
    schemas.
    """
    session = frame.sparkSession
    casts = [_StructCasts(one, columns, session) for one in struct_rows]
    if is_only_schema:
        for one in casts:
            _require_casts(session, columns, one.types)
    frame = with_columns(frame, {one.source_column: one.rows.source for one in casts})
    frame = with_columns(frame, {one.rows.row_column: one.row() for one in casts})
    frame = with_columns(frame, {f"{one.rows.row_column}{REASON_SUFFIX}": one.reason() for one in casts})
    return frame.drop(*(one.source_column for one in casts))


class _StructCasts:
    """The casts of structs of one type to the columns of a table."""

    def __init__(self, rows: StructRows, columns: Sequence[RecordColumn], session: SparkSession) -> None:
        self.rows, self._columns, self._session = rows, columns, session
        self.source_column = f"{rows.row_column}_held"
        fields = rows.source_type.fields
        self.types = {field.name: field.dataType for field in fields}
        self._values = {
            field.name: select_field(quote_spark_name(self.source_column), rows.source_type, number)
            for number, field in enumerate(fields)
        }

    def row(self) -> Expression:
        """Return the struct of the columns, with null for parts that do not fit."""
        return _build_struct(self._columns, self._cast_field)

    def reason(self) -> Expression:
        """Return the reason why a record has no row, from the structs and the column of `row`."""
        lost_values = [
            (self._is_lost(one), f"{one.name} is not a valid {one.kind}.")
            for one in self._columns
            if self.types.keys() & {*one.fields}
        ]
        return build_case([*self.rows.reasons, *first_reason("conversion", lost_values)], no_reason())

    def _cast_value(self, value: str, source: DataType, kind: str) -> str:
        is_allowed = _is_cast_allowed(self._session, source, kind)
        return _try_cast(value, source, kind) if is_allowed else null_of(kind)

    def _cast_field(self, name: str, kind: str) -> Expression:
        if name not in self.types:
            return F.expr(null_of(kind))
        return F.expr(cast_nested(self._values[name], self.types[name], kind, self._cast_value))

    def _is_lost(self, column: RecordColumn) -> Expression:
        names = [name for name in column.fields if name in self.types]
        is_present = any_of(F.expr(f"{self._values[name]} IS NOT NULL") for name in names)
        lost = is_present & F.col(self.rows.row_column).getField(column.name).isNull()
        if not column.kind.startswith(_NESTED_TYPES):
            return lost
        lost_parts = []
        for number, name in enumerate(names):
            # The column gets the first field that is not null.
            earlier = [f"{self._values[one]} IS NULL" for one in names[:number]]
            part = lost_part(self._values[name], self.types[name], column.kind, self._cast_value)
            lost_parts.append(F.expr(" AND ".join([*earlier, part])))
        return any_of([lost, *lost_parts])


def _require_casts(
    session: SparkSession, columns: Sequence[RecordColumn], types: Mapping[str, DataType]
) -> None:
    """Raise ConfigurationError if Spark does not cast a field to the type of its column.

    `types` has the types of the fields by name. Structs, lists and maps are not checked.
    """
    for column in columns:
        for name in column.fields:
            source = types.get(name)
            if source is None or isinstance(source, NESTED_TYPES) or column.kind.startswith(_NESTED_TYPES):
                continue
            if not _is_cast_allowed(session, source, column.kind):
                raise ConfigurationError(
                    f"Column {column.name} has type {column.kind}, but field {name} has type"
                    f" {source.simpleString()}, which Spark does not cast to it.",
                    hint="Give the column another type, or decode the values with Decoded.",
                    reason="cast_unsupported",
                    subject=column.name,
                )


_allowed_casts: dict[tuple[str, str], bool] = {}


def _is_cast_allowed(session: SparkSession, source: DataType, kind: str) -> bool:
    """Return whether Spark casts values of a type to a type that is not a struct, list or map.

    Costs a request to Spark for the first use of two types.
    """
    if kind == "string" or isinstance(source, NullType | StringType):
        return True
    types = source.simpleString(), kind
    if types[0] == kind:
        return True
    if types not in _allowed_casts:
        try:
            _ = session.range(0).select(F.expr(_try_cast(null_of(format_type(source)), source, kind))).schema
            _allowed_casts[types] = True
        except AnalysisException:
            _allowed_casts[types] = False
    return _allowed_casts[types]


def _try_cast(value: str, source: DataType, kind: str) -> str:
    """Cast an SQL expression to a column's type, not a struct, list or map; null if it does not fit.

    Null too are text such as "1e-99999999", which would take minutes to become a decimal, times without a
    date, and numbers with a fraction in columns of whole numbers.
    """
    fits = f"TRY_CAST({value} AS {kind})"
    if kind in _INTEGER_TYPES and isinstance(source, FractionalType):
        has_fraction = f"CAST({fits} AS double) != TRY_CAST({value} AS double)"
        return f"IF(coalesce({has_fraction}, FALSE), NULL, {fits})"
    if not isinstance(source, StringType):
        return fits
    if kind in (*_TIME_TYPES, "date"):
        is_fitting = f"NOT rlike({value}, {quote_spark_string(_TIME_OF_DAY)})"
        if kind == "date":
            is_date = f"rlike({value}, {quote_spark_string(_DATE_ALONE)})"
            is_fitting = f"{is_date} OR ({is_fitting} AND TRY_CAST({value} AS timestamp) IS NOT NULL)"
    elif kind.startswith("decimal"):
        has_exponent = f"rlike({value}, {quote_spark_string(_LONG_DECIMAL_EXPONENT)})"
        is_fitting = f"NOT (length({value}) > {_MAX_DIGITS} OR {has_exponent})"
    else:
        return fits
    return f"IF({is_fitting}, {fits}, NULL)"


DecodeFunction = Callable[[pa.BinaryArray], tuple[pa.StructArray, pa.StringArray]]
"""Decodes a whole batch of values: returns a struct for each value, and a reason for each value without one.

The reason is null for a decoded value. A value without a row and without a reason becomes a dead letter. If
the function raises or returns something else, it is called again with halves of the batch, down to single
values; a value that fails alone becomes a dead letter.
"""


@dataclass(frozen=True)
class Decoded:
    """Reads values with a function of whole Arrow batches, for your own binary formats and for Protobuf.

    `decode` runs on Spark's workers; `schema` is the Arrow schema of the structs that it returns.

    Examples:
        .. code-block:: python

            Ingest(name="radar", topics=["radar"], format=Decoded(decode_radar, RADAR), tables=[frames])
    """

    decode: DecodeFunction
    schema: pa.Schema

    def read(self, records: DataFrame) -> DataFrame:
        """Add `__decoded`, the struct of each value, and `__undecoded`, why the value was not decoded.

        Both come from the function `decode`. `__undecoded` is null for a decoded value. Only the values are
        sent to Python and not the whole records: their headers would cost more than everything else.
        """
        kind = StructType([StructField("row", self._spark_type()), StructField("reason", StringType())])
        # PySpark's stubs do not know that the result may be a struct.
        decoder = arrow_udf(  # type: ignore[call-overload]
            _build_decoder(self.decode, pa.struct(list(self.schema))), kind
        )
        # Otherwise Spark may call it once for each column that uses its result.
        decoded = records.withColumn("__result", decoder.asNondeterministic()(VALUE_COLUMN))
        result = F.col("__result")
        return decoded.select(
            *records.columns,
            result.getField("row").alias("__decoded"),
            result.getField("reason").alias("__undecoded"),
        )

    def convert_rows(
        self,
        frame: DataFrame,
        row_column: str,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None = None,
    ) -> DataFrame:
        """Add the converted row, and the reason if there is none, as `Format.convert_rows` describes.

        The reason has the kind `format` if the value was not decoded, or `conversion` if a cast failed.
        """
        source, source_type = F.col("__decoded"), self._spark_type()
        if is_deletion is not None:
            source = row_in_envelope(source, is_deletion)
            source_type = row_type_in_envelope(frame.sparkSession, source_type)
        undecoded = F.col("__undecoded").isNotNull(), build_reason("format", F.col("__undecoded"))
        rows = StructRows(row_column, source, source_type, [undecoded])
        return convert_struct_rows(frame, [rows], columns)

    def _spark_type(self) -> StructType:
        """Return the type of the decoded structs in Spark."""
        from pyspark.sql.pandas.types import from_arrow_type

        kind = from_arrow_type(pa.struct(list(self.schema)))
        assert isinstance(kind, StructType)  # noqa: S101 - the type of a struct
        return kind

    def field_text(self, field: str) -> Expression:
        """Return a field of the decoded struct as text. Dots separate the names of a path."""
        field_value = F.col("__decoded")
        for part in field.split("."):
            field_value = field_value.getField(part)
        return field_value.cast("string")

    def record_field_names(self, *, with_values: bool = False, is_deletion: Expression | None = None) -> None:
        """Return None for all arguments, because the schema has the names, see `schema_field_names`."""

    def schema_field_names(self, *, has_envelope: bool) -> list[str]:
        """Return the names of the fields of `schema`, or with `has_envelope` of its field `after`."""
        schema = self.schema.field("after").type if has_envelope else self.schema
        return [one.name for one in schema]

    def row_json(self, is_deletion: Expression | None) -> None:
        """Return None, because a row of a format with a schema is not available as JSON."""

    def value_struct(self, *, has_envelope: bool) -> Expression:  # noqa: ARG002 - part of the interface
        """Return the decoded struct, which is null for a value that was not decoded."""
        return F.col("__decoded")


def _build_decoder(decode: DecodeFunction, kind: pa.StructType) -> Callable[[pa.Array], pa.Array]:
    """Build the function for `arrow_udf` that decodes values. Its structs have a row and a reason."""

    def decode_array(values: pa.Array) -> pa.Array:
        return pa.StructArray.from_arrays(list(decode_values(decode, values, kind)), ["row", "reason"])

    return decode_array


def decode_values(
    decode: DecodeFunction, values: pa.BinaryArray, kind: pa.StructType
) -> tuple[pa.StructArray, pa.StringArray]:
    """Call `decode`. If it raises, call it again with halves of the batch, down to single values.

    Returns a struct and a reason for each value. A single value that raises gets a null struct and a
    reason. An error for an empty batch is ignored. A result that `check_decoded` refuses counts as an error.
    """
    try:
        return check_decoded(*decode(values), values, kind)
    except BaseException as error:  # any error of a user's function is about its values
        if not isinstance(error, Exception | SystemExit) and not _is_panic(error):
            raise
        if len(values) == 0:
            return pa.nulls(0, kind), pa.array([], pa.string())
        if len(values) == 1:
            return pa.nulls(1, kind), pa.array([failure_reason(error)], pa.string())
        half = len(values) // 2
        parts = [decode_values(decode, part, kind) for part in (values[:half], values[half:])]
    return pa.concat_arrays([rows for rows, _ in parts]), pa.concat_arrays([why for _, why in parts])


def _is_panic(error: BaseException) -> bool:
    """Whether native Rust code has panicked, as `ptars` does for a Protobuf length that overflows.

    Each PyO3 library has its own panic class, derived from BaseException.
    """
    return type(error).__module__ == "pyo3_runtime"
