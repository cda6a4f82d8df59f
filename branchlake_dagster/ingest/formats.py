"""How the value of a record is read: JSON, Avro, or what a function on whole Arrow batches makes of it.

Everything is a Spark expression that Spark compiles, or a function of batches; nothing sees one record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import pyarrow as pa
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.spark_expressions import (
    JSON_STRING,
    Column,
    any_of,
    because,
    bound,
    case,
    first_of,
    is_json_object,
    no_reason,
    seldom,
)
from branchlake_dagster.spark.session import quoted

VALUE = "__value"
_CORRUPT = "__corrupt"
WHY = "_why"
"""Behind the name of a column of rows: the column of why there is none."""


class Format(Protocol):
    """How a record's value is read."""

    def read(self, records: DataFrame) -> DataFrame:
        """The records with what `fit` and `text` need; its columns begin with two underscores."""

    def fit(
        self, frame: DataFrame, row: str, columns: Sequence[Column], gone: Expression | None = None
    ) -> DataFrame:
        """The frame with two columns more.

        `row` is a struct of the table's columns, `row` with `WHY` behind it a struct of `kind` and `detail`
        where the value is no such row, else null. With `gone` the row is in an envelope: in its field
        `before` where `gone` holds, else in `after`.
        """

    def text(self, field: str) -> Expression:
        """A field as text; null where it is not there."""

    def names(self, *, given: bool = False, gone: Expression | None = None) -> Expression | None:
        """The names of the fields that a record's row has, as an array; None: `field_names` has them.

        With `given` those that have a value, which costs more. `gone` as for `fit`.
        """

    def field_names(self, *, envelope: bool) -> Sequence[str] | None:
        """The fields that every row has by the schema of the values; None: each record has its own."""

    def own_text(self, gone: Expression | None) -> Expression | None:
        """The row as JSON, `gone` as for `fit`; None: its schema is known, and `struct` has it."""

    def struct(self) -> Expression:
        """The whole value as a struct, where the format has a schema."""


@dataclass(frozen=True)
class Json:
    """One JSON object a record, in UTF-8.

    A field is taken by its exact name, as Spark's `from_json` reads the column's type. What that does not
    take is tried once more as Spark casts it: numbers in text, text of numbers, `true` in text. A field that
    is absent or null is null, and of one that is there twice the last counts. What is no object, has anything
    behind it, or has a field that fits by neither, is a dead letter.

    Whole numbers may be written as `4.0`, and never lose a fraction. Decimals are rounded half up to the
    column's scale. Times are ISO 8601, one without a zone in UTC, or numbers of seconds since 1970 that lie
    before the year 10000. Binary columns take base64. Text columns take anything, as Spark prints it. Inside
    structs, lists and maps values have to be of their types.

    Examples:
        .. code-block:: python

            Ingest(name="orders", topics=["orders"], format=Json(), tables=[orders])
    """

    def read(self, records: DataFrame) -> DataFrame:
        """See `Format`."""
        text = F.col(VALUE).cast("string")
        return records.withColumn("__text", F.when(F.is_valid_utf8(text), text)).withColumn(
            "__not_text", F.col(VALUE).isNotNull() & F.col("__text").isNull()
        )

    def fit(
        self, frame: DataFrame, row: str, columns: Sequence[Column], gone: Expression | None = None
    ) -> DataFrame:
        """See `Format`.

        In steps, a frame each: what several expressions of one frame name, Spark may compute for each of
        them, and for records that need none of it. That was six times slower.
        """
        text, read, times, good, rest = (
            f"{row}_{part}" for part in ("text", "read", "times", "good", "rest")
        )
        fields = {name: one.kind for one in columns for name in one.fields}
        # Spark's reader takes an object for whole whatever is behind it. In another one it has to end.
        inside = ", ".join(f"{quoted(name)}: {_read_as(kind)}" for name, kind in fields.items())
        schema = f"v struct<{inside}>, {_CORRUPT} string"
        options = {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false"}
        frame = frame.withColumn(text, F.concat(F.lit('{"v":'), self.own_text(gone), F.lit("}")))
        taken = F.col(text)
        if any("decimal" in kind for kind in fields.values()):
            taken = F.when(~_takes_minutes(taken), taken)
        frame = frame.withColumn(read, F.from_json(taken, schema, options))
        values = F.col(read).getField("v")
        good_values = F.col(read).getField(_CORRUPT).isNull() & values.isNotNull()
        texts = [name for name, kind in fields.items() if _read_as(kind) != kind]
        if texts:
            found = (_of_text(values.getField(name), fields[name]).alias(name) for name in texts)
            frame = frame.withColumn(times, F.struct(*found))
            for name in texts:
                fits = values.getField(name).isNull() | F.col(times).getField(name).isNotNull()
                good_values = good_values & fits

        def exact(name: str) -> Expression:
            return (F.col(times) if name in texts else values).getField(name)

        frame = frame.withColumn(good, F.coalesce(good_values, F.lit(False)))

        def fitted(name: str, kind: str, variant: Expression) -> Expression:
            cast = _cast(variant, F.col(text), name, kind)
            # Of what fits no whole record the reader keeps parts, also the parts of something nested.
            return cast if kind.startswith(_NESTED) else F.coalesce(exact(name), cast)

        def otherwise(variant: Expression) -> Expression:
            cast = _struct(columns, lambda name, kind: fitted(name, kind, variant))
            own = self.own_text(gone)
            return bound(
                cast, lambda mine: F.struct(mine.alias("row"), self._why(variant, own, mine, columns))
            )

        frame = frame.withColumn(rest, seldom(~F.col(good), F.try_parse_json(F.col(text)), otherwise))
        mine = F.when(F.col(good), _struct(columns, lambda name, _: exact(name))).otherwise(
            F.col(rest).getField("row")
        )
        frame = frame.withColumn(row, mine).withColumn(f"{row}{WHY}", F.col(rest).getField("why"))
        return frame.drop(text, read, times, good, rest)

    def own_text(self, gone: Expression | None) -> Expression:
        """See `Format`. Kafka Connect may have put the envelope into another one."""
        if gone is None:
            return F.col("__text")
        before = F.coalesce(self.text("before"), self.text("payload.before"))
        after = F.coalesce(self.text("after"), self.text("payload.after"))
        return F.when(gone, before).otherwise(after)

    def _why(
        self, variant: Expression, text: Expression, row: Expression, columns: Sequence[Column]
    ) -> Expression:
        lost = F.coalesce(*(_lost(variant, row, one) for one in columns), F.lit(None).cast("string"))
        return (
            F.when(F.col("__not_text"), because("encoding", "The value is no UTF-8."))
            .when(variant.isNull(), because("syntax", "The value is no JSON."))
            .when(~is_json_object(text), because("syntax", "The value is JSON, but no object."))
            .otherwise(F.when(lost.isNotNull(), because("conversion", lost)))
            .alias("why")
        )

    def text(self, field: str) -> Expression:
        """See `Format`. A path of names parted by dots."""
        parts = field.split(".")
        if all(map(_PLAIN_NAME.fullmatch, parts)):
            return F.get_json_object(F.col("__text"), "$" + "".join(f"['{part}']" for part in parts))
        return reduce(_member, parts, F.col("__text"))

    def names(self, *, given: bool = False, gone: Expression | None = None) -> Expression | None:
        """See `Format`: those of the outermost object."""
        text = self.own_text(gone)
        if not given:
            return F.json_object_keys(text)
        values = F.from_json(text, "map<string, string>")
        # What is empty has no type of its own either.
        there = F.map_filter(values, lambda _, value: value.isNotNull() & ~_holds_nothing(value))
        return F.map_keys(there)

    def field_names(self, *, envelope: bool) -> None:
        """See `Format`."""

    def struct(self) -> Expression:
        """See `Format`: it has no schema."""
        raise NotImplementedError


_TIMES = ("timestamp", "timestamp_ntz")
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_NESTED = ("struct<", "array<", "map<")
_LONGEST_REASON = 500
_MOST_DIGITS = 400
"""A decimal has 38; zeros may come before and behind. A double has up to 309 before its point."""
_LONG = "[0-9.][eE][+-]?[0-9]{5}"
"""An exponent of which Spark's reader makes no decimal in bearable time."""
_LONG_IN_QUOTES = r'"\s*[+-]?[0-9.]+[eE][+-]?[0-9]{5,}\s*"'
_SHORTEST_TIME = 8
"""Of what has fewer characters Spark would make a year, and a number means seconds."""


def _holds_nothing(json: Expression) -> Expression:
    """Whether an object or a list has no value, however deep."""
    rest = F.regexp_replace(json, rf"{JSON_STRING}\s*:|null|[\[\]{{}},\s]", "")
    return json.rlike(r"^[\[{]") & (rest == "")


def _read_as(kind: str) -> str:
    """The type as which a field is read first.

    Of numbers Spark's reader makes times that overflow, and of "12" the date of the twelfth day since 1970.
    Decimals are read as such: as text a number has passed through a double, and has lost digits.
    """
    return "string" if kind in (*_TIMES, "date") else kind


def _takes_minutes(json: Expression) -> Expression:
    """Whether Spark's reader would count for minutes to write out a decimal of it, which nothing can stop.

    Numbers alone or in quotes, not what looks like one in a text: hashes have them often.
    """
    bare = F.regexp_replace(json, JSON_STRING, '""').rlike(_LONG)
    return F.coalesce(F.when(json.rlike(_LONG), json.rlike(_LONG_IN_QUOTES) | bare), F.lit(False))


def _of_text(text: Expression, kind: str) -> Expression:
    if kind == "date":
        return F.when(F.length(text) >= _SHORTEST_TIME, text.try_cast("date"))
    return _time(text, kind)


def _too_long(text: Expression) -> Expression:
    """Whether a number has more digits than any decimal, written out or not."""
    return (F.length(text) > _MOST_DIGITS) | text.rlike("[eE][+-]?0*[0-9]{3}")


def _time(text: Expression, kind: str) -> Expression:
    """Text as a time; a wall clock is that of UTC, whatever zone the text is in."""
    return F.when(F.length(text) >= _SHORTEST_TIME, text.try_cast("timestamp")).cast(kind)


def _struct(columns: Sequence[Column], value: Callable[[str, str], Expression]) -> Expression:
    fields = []
    for one in columns:
        found = [value(name, one.kind) for name in one.fields]
        fields.append((F.coalesce(*found) if len(found) > 1 else found[0]).alias(one.name))
    return F.struct(*fields)


_PLAIN_NAME = re.compile(r"[\w$:@/-](?:[\w$:@/ -]*[\w$:@/-])?")
"""Names that a path into JSON or a variant can hold: paths have no escapes for quotes, `?` and brackets."""


def _field(variant: Expression, name: str) -> tuple[Expression, str]:
    """A variant and the path in it at which a field of the record is, by its exact name."""
    if _PLAIN_NAME.fullmatch(name):
        return variant, f"$.v['{name}']"
    return F.try_variant_get(variant, "$.v", "map<string, variant>").getItem(name), "$"


def _member(json: Expression, name: str) -> Expression:
    """A field of a JSON object, as text: what is in quotes without them; null where it is not there."""
    if _PLAIN_NAME.fullmatch(name):
        return F.get_json_object(json, f"$['{name}']")
    return F.from_json(json, "map<string, string>").getItem(name)


def _cast(variant: Expression, text: Expression, name: str, kind: str) -> Expression:
    if kind == "binary":
        return F.lit(None).cast(kind)
    value, path = _field(variant, name)
    if kind.startswith(_NESTED):
        # Cast as a whole, what does not fit inside would be null there, and nobody would know.
        plain = _PLAIN_NAME.fullmatch(name)
        own = (
            F.get_json_object(text, f"$.v['{name}']")
            if plain
            else _member(F.get_json_object(text, "$.v"), name)
        )
        if "decimal" in kind:
            own = F.when(~_takes_minutes(own), own)
        read = F.from_json(
            F.concat(F.lit('{"v":'), own, F.lit("}")),
            f"v {kind}, {_CORRUPT} string",
            {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false"},
        )
        return F.when(read.getField(_CORRUPT).isNull(), read.getField("v"))
    if kind in _TIMES:
        moment = F.try_variant_get(value, path, "timestamp")
        return F.when(F.year(moment).between(1, 9999), moment).cast(kind)
    found = F.try_variant_get(value, path, kind)
    if kind.startswith("decimal"):
        return F.when(~_too_long(F.try_variant_get(value, path, "string")), found)
    if kind not in _WHOLE:
        return found
    fraction = F.try_variant_get(value, path, "double") != found.cast("double")
    # A double has no more than 17 digits; but a text such as "1e-99999999" takes minutes to become a decimal.
    exact = F.when(
        ~_too_long(F.try_variant_get(value, path, "string")),
        F.try_variant_get(value, path, "decimal(38,15)"),
    )
    fraction = F.coalesce(fraction, F.lit(False)) | (exact != found.cast("decimal(38,15)"))
    return F.when(~F.coalesce(fraction, F.lit(False)), found)


def _lost(variant: Expression, row: Expression, one: Column) -> Expression:
    """What to say of a column whose field has a value that is none of its type; null where it fits."""
    there = [F.try_variant_get(*_field(variant, name), "variant") for name in one.fields]
    given = F.coalesce(*there) if len(there) > 1 else there[0]
    bad = row.getField(one.name).isNull() & given.isNotNull() & ~F.is_variant_null(given)
    return F.when(bad, F.lit(f"{one.name} is no {one.kind}."))


def enveloped(source: Expression, gone: Expression) -> Expression:
    """The row's own struct in that of an envelope."""
    return F.when(gone, source.getField("before")).otherwise(source.getField("after"))


def fit_struct(
    frame: DataFrame,
    row: str,
    source: Expression,
    known: Iterable[str],
    columns: Sequence[Column],
    reasons: Sequence[tuple[Expression, Expression]],
) -> DataFrame:
    """`Format.fit` for values that are structs with the fields `known`: by Spark's casts.

    `reasons` are conditions under which there is no row, each with its reason, before those of the casts.
    """
    there = set(known)
    held = f"{row}_held"
    frame = frame.withColumn(held, source)
    value = F.col(held)

    def cast(name: str, kind: str) -> Expression:
        return _try_cast(value.getField(name), kind) if name in there else F.lit(None).cast(kind)

    frame = frame.withColumn(row, _struct(columns, cast))
    lost = [
        (
            _any_given(value, one, there) & F.col(row).getField(one.name).isNull(),
            f"{one.name} is no {one.kind}.",
        )
        for one in columns
        if there.intersection(one.fields)
    ]
    why = case([*reasons, *first_of("conversion", lost)], no_reason())
    return frame.withColumn(f"{row}{WHY}", why).drop(held)


def _try_cast(value: Expression, kind: str) -> Expression:
    """The value in a column's type, null where it does not fit.

    Text such as "1e-99999999" would take minutes to become a decimal. What is not text costs nothing here:
    Spark knows the type when it plans.
    """
    fits = value.try_cast(kind)
    if "decimal" not in kind:
        return fits
    if kind.startswith(_NESTED):
        return F.when(~_takes_minutes(F.to_json(F.struct(value.alias("v")))), fits)
    return F.when((F.typeof(value) != "string") | ~_too_long(value.cast("string")), fits)


def _any_given(value: Expression, one: Column, there: set[str]) -> Expression:
    return any_of(value.getField(name).isNotNull() for name in one.fields if name in there)


Decode = Callable[[pa.BinaryArray], tuple[pa.StructArray, pa.StringArray]]
"""Values to structs, and by value why it has none (null: it has one). Called with whole batches.

Where it raises, it is called again with halves of the batch, down to the value, which becomes a dead letter.
"""


@dataclass(frozen=True)
class Decoded:
    """Values that a function of whole Arrow batches reads: binary formats of one's own, Protobuf.

    `decode` runs on Spark's workers; `schema` is the Arrow type of its structs.

    Examples:
        .. code-block:: python

            Ingest(name="radar", topics=["radar"], format=Decoded(decode_radar, RADAR), tables=[frames])
    """

    decode: Decode
    schema: pa.Schema

    def read(self, records: DataFrame) -> DataFrame:
        """See `Format`."""
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import StringType, StructField, StructType

        kind = from_arrow_type(pa.struct(list(self.schema)))
        extra = [StructField("__decoded", kind), StructField("__undecoded", StringType())]
        return records.mapInArrow(
            _decoding(self.decode, pa.struct(list(self.schema))), StructType([*records.schema.fields, *extra])
        )

    def fit(
        self, frame: DataFrame, row: str, columns: Sequence[Column], gone: Expression | None = None
    ) -> DataFrame:
        """See `Format`."""
        source, names = F.col("__decoded"), self.schema.names
        if gone is not None:
            source, names = enveloped(source, gone), [one.name for one in self.schema.field("after").type]
        undecoded = F.col("__undecoded").isNotNull()
        return fit_struct(
            frame, row, source, names, columns, [(undecoded, because("format", F.col("__undecoded")))]
        )

    def text(self, field: str) -> Expression:
        """See `Format`."""
        found = F.col("__decoded")
        for part in field.split("."):
            found = found.getField(part)
        return found.cast("string")

    def names(self, *, given: bool = False, gone: Expression | None = None) -> None:
        """See `Format`."""

    def field_names(self, *, envelope: bool) -> list[str]:
        """See `Format`."""
        schema = self.schema.field("after").type if envelope else self.schema
        return [one.name for one in schema]

    def own_text(self, gone: Expression | None) -> None:
        """See `Format`: there is a schema."""

    def struct(self) -> Expression:
        """See `Format`."""
        return F.col("__decoded")


def _decoding(
    decode: Decode, kind: pa.StructType
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def decoding(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values = batch.column(batch.schema.get_field_index("__value"))
            rows, reasons = decoded(decode, values, kind)
            columns = [*batch.columns, rows, reasons]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, "__decoded", "__undecoded"])

    return decoding


def decoded(
    decode: Decode, values: pa.BinaryArray, kind: pa.StructType
) -> tuple[pa.StructArray, pa.StringArray]:
    """What `decode` returns; where it raises, that of halves of the batch until the value stands alone."""
    try:
        rows, reasons = decode(values)
        if len(rows) != len(values) or len(reasons) != len(values):
            raise ValueError(f"{len(values)} values gave {len(rows)} rows and {len(reasons)} reasons")
        # Halves are put together below, and have to be of one type.
        return (rows if rows.type == kind else rows.cast(kind)), reasons.cast(pa.string())
    except BaseException as error:  # whatever a user's function raises is about its values
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        if len(values) == 1:
            text = f"The value cannot be decoded: {type(error).__name__}: {error}"[:_LONGEST_REASON]
            return pa.nulls(1, kind), pa.array([text], pa.string())
        half = len(values) // 2
        parts = [decoded(decode, part, kind) for part in (values[:half], values[half:])]
    return pa.concat_arrays([rows for rows, _ in parts]), pa.concat_arrays([why for _, why in parts])


def _is_panic(error: BaseException) -> bool:
    """Whether native code in Rust has panicked, as `ptars` does for a Protobuf length that overflows.

    PyO3 derives that from BaseException, in each library anew.
    """
    return type(error).__module__ == "pyo3_runtime"
