"""Avro values, plain or in the frame of a schema registry, and Protobuf values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import requests
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.avro.functions import from_avro
from pyspark.sql.types import DataType, StructType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.avro_schemas import (
    MAX_DECIMAL_DIGITS,
    describe_unreadable,
    find_field_record,
    is_decimal,
    max_fixed_digits,
)
from branchlake_dagster.ingest.errors import KafkaUnavailable
from branchlake_dagster.ingest.formats import (
    REASON_SUFFIX,
    VALUE_COLUMN,
    Decoded,
    DecodeFunction,
    StructRows,
    convert_struct_rows,
    row_in_envelope,
    row_type_in_envelope,
)
from branchlake_dagster.ingest.nested_casts import cast_nested, format_type, lost_part
from branchlake_dagster.ingest.spark_expressions import (
    RecordColumn,
    any_of,
    build_case,
    build_reason,
    with_columns,
)
from branchlake_dagster.spark.session import quote_spark_name

_TIMEOUT_S = 10.0
_MAGIC = b"\x00"
_TYPE_KEYS = ("type", "fields", "items", "values")
"""The keys of an Avro schema under which types are nested."""
_LONG_DIGITS = 18
"""The longest precision of decimals that Spark stores in 64 bits."""


@dataclass(frozen=True)
class Avro:
    """Reads Avro values that were written with one known schema, without a frame.

    `schema` is the Avro schema as JSON. Raises ConfigurationError if it is not the schema of a record, or if
    Spark cannot read it.

    Examples:
        .. code-block:: python

            Avro('{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}')
    """

    schema: str

    def __post_init__(self) -> None:
        _require_readable(self.schema)

    def read(self, records: DataFrame) -> DataFrame:
        """Add `__avro`, the decoded record; null if the value is not Avro of the schema."""
        return _with_avro_columns(records, {"__avro": (F.col(VALUE_COLUMN), self.schema)})

    def convert_rows(
        self,
        frame: DataFrame,
        row_column: str,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None = None,
    ) -> DataFrame:
        """Add the converted row, and the reason if there is none, as `Format.convert_rows` describes.

        The reason has the kind `format` if the value is not Avro, or `conversion` if a cast failed.
        """
        source, row_type = _select_row(frame.sparkSession, F.col("__avro"), self.schema, is_deletion)
        unread = F.col("__avro").isNull(), build_reason("format", "The value is not Avro of the schema.")
        return convert_struct_rows(frame, [StructRows(row_column, source, row_type, [unread])], columns)

    def field_text(self, field: str) -> Expression:
        """Return a field as text; null if the schema does not have it. Dots separate the names of a path."""
        return _field_text(F.col("__avro"), self.schema, field)

    def record_field_names(self, *, with_values: bool = False, is_deletion: Expression | None = None) -> None:
        """Return None for all arguments, because the schema has the names, see `schema_field_names`."""

    def schema_field_names(self, *, has_envelope: bool) -> list[str]:
        """Return the names of the fields of the schema, or with `has_envelope` of its field `after`."""
        return _row_field_names(self.schema, has_envelope=has_envelope)

    def row_json(self, is_deletion: Expression | None) -> None:
        """Return None, because a row of a format with a schema is not available as JSON."""

    def value_struct(self, *, has_envelope: bool) -> Expression:  # noqa: ARG002 - part of the interface
        """Return the decoded record, which is null for a value that is not Avro of the schema."""
        return F.col("__avro")


@dataclass(frozen=True)
class RegistryAvro:
    """Reads Avro values in Confluent's frame: a zero byte, the schema id in four bytes, then the value.

    `url` is the address of the schema registry, and `subject` the subject whose versions are read, usually
    `<topic>-value`. All versions are fetched once at the start of each batch. A record whose schema id is not
    in the subject becomes a dead letter; reprocess it when the schema is registered under the subject.

    Examples:
        .. code-block:: python

            RegistryAvro("http://registry:8081", "orders-value")
    """

    url: str
    subject: str
    get: Callable[[str], Any] = field(default=lambda url: _get_json(url), repr=False, compare=False)

    def load_schemas(self) -> Mapping[int, str]:
        """Load the schemas of all versions of the subject, as JSON by schema id.

        Raises KafkaUnavailable if the registry does not answer, or ConfigurationError if it refuses.
        """
        base = f"{self.url.rstrip('/')}/subjects/{self.subject}/versions"
        schemas = {}
        for version in self.get(base):
            version_json = self.get(f"{base}/{version}")
            schemas[int(version_json["id"])] = str(version_json["schema"])
        return schemas

    def read(self, records: DataFrame) -> DataFrame:
        """Add `__schema`, the schema id of each value, and for each schema a column of decoded records.

        The schema id is null for a value without the frame. Loads the schemas from the registry if this
        object has not loaded them yet.
        """
        value = F.col(VALUE_COLUMN)
        framed = F.octet_length(value).between(6, 1 << 30) & (F.substring(value, 1, 1) == F.lit(_MAGIC))
        schema_id_column = F.conv(F.hex(F.substring(value, 2, 4)), 16, 10).cast("bigint")
        payload = F.expr(f"substring({VALUE_COLUMN}, 6)")
        frame = records.withColumn("__schema", F.when(framed, schema_id_column))
        schemas = self._schemas_by_id()
        payloads = {
            f"__avro_{schema_id}": (F.when(F.col("__schema") == schema_id, payload), schema)
            for schema_id, schema in schemas.items()
        }
        return _with_avro_columns(frame, payloads)

    def _schemas_by_id(self) -> Mapping[int, str]:
        """Return the readable schemas by their ids."""
        return self._load_versions()[0]

    def _unreadable_versions(self) -> Mapping[int, str]:
        """Return why a version's schema cannot be read, by schema id."""
        return self._load_versions()[1]

    def _load_versions(self) -> tuple[Mapping[int, str], Mapping[int, str]]:
        # Loaded once for each batch, which uses one object made by `with_empty_cache`.
        versions: tuple[Mapping[int, str], Mapping[int, str]] | None = self.__dict__.get("_versions")
        if versions is None:
            versions = _divide_readable(self.load_schemas())
            object.__setattr__(self, "_versions", versions)
        return versions

    def with_empty_cache(self) -> RegistryAvro:
        """Return a copy of the format that loads the schemas again when they are needed."""
        return RegistryAvro(self.url, self.subject, self.get)

    def convert_rows(
        self,
        frame: DataFrame,
        row_column: str,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None = None,
    ) -> DataFrame:
        """Add the converted row, and the reason if there is none, as `Format.convert_rows` describes.

        The reason has the kind `format` without a valid frame or value, `schema` for an unknown schema id or
        a schema that Spark cannot read, or `conversion` if a cast failed.
        """
        rows_by_schema, problems = self._select_rows(frame.sparkSession, is_deletion)
        unread_reason = build_reason("format", "The value is not Avro of its schema.")
        struct_rows = [
            StructRows(
                f"{row_column}_{schema_id}",
                source,
                row_type,
                [(F.col(f"__avro_{schema_id}").isNull(), unread_reason)],
            )
            for schema_id, (source, row_type) in rows_by_schema.items()
        ]
        frame = convert_struct_rows(frame, struct_rows, columns, is_only_schema=False)
        schema_conditions = [(F.col("__schema") == one, one) for one in rows_by_schema]
        null_row = F.struct(*(F.lit(None).cast(one.kind).alias(one.name) for one in columns))
        rows = build_case(
            [(which, F.col(f"{row_column}_{one}")) for which, one in schema_conditions], null_row
        )
        unknown_schema = F.concat(
            F.lit("The registry's subject has no schema "), F.col("__schema").cast("string")
        )
        reasons = build_case(
            [
                (
                    F.col("__schema").isNull(),
                    build_reason("format", "The value has no schema registry frame."),
                ),
                *((which, F.col(f"{row_column}_{one}{REASON_SUFFIX}")) for which, one in schema_conditions),
                *(
                    (F.col("__schema") == one, build_reason("schema", F.lit(problem)))
                    for one, problem in problems.items()
                ),
            ],
            build_reason("schema", unknown_schema),
        )
        result = frame.withColumn(row_column, rows).withColumn(f"{row_column}{REASON_SUFFIX}", reasons)
        return result.drop(
            *(f"{row_column}_{one}{end}" for one in rows_by_schema for end in ("", REASON_SUFFIX))
        )

    def _select_rows(
        self, session: SparkSession, is_deletion: Expression | None
    ) -> tuple[Mapping[int, tuple[Expression, StructType]], Mapping[int, str]]:
        """Return the row and its type by schema id, and why other schemas have no rows.

        `is_deletion` is the condition of a deletion in an envelope, or None without an envelope. Raises
        ConfigurationError if no schema has the envelope.
        """
        rows: dict[int, tuple[Expression, StructType]] = {}
        problems = dict(self._unreadable_versions())
        refusal: ConfigurationError | None = None
        schemas = self._schemas_by_id()
        _load_record_types(session, schemas.values())
        for schema_id, schema in schemas.items():
            try:
                rows[schema_id] = _select_row(session, F.col(f"__avro_{schema_id}"), schema, is_deletion)
            except ConfigurationError as error:
                refusal = error
                problems[schema_id] = f"Schema {schema_id} has no rows. {error.message}"
        if refusal is not None and not rows:
            raise refusal
        return rows, problems

    def field_text(self, field: str) -> Expression:
        """Return a field as text; null if the record's schema does not have it.

        Dots separate the names of a path.
        """
        field_texts = [
            _field_text(F.col(f"__avro_{one}"), schema, field)
            for one, schema in self._schemas_by_id().items()
        ]
        return F.coalesce(*field_texts, F.lit(None).cast("string"))

    def record_field_names(self, *, with_values: bool = False, is_deletion: Expression | None = None) -> None:
        """Return None for all arguments, because the schemas have the names, see `schema_field_names`."""

    def schema_field_names(self, *, has_envelope: bool) -> list[str]:
        """Return the names of the fields of the newest schema, that with the greatest id.

        With `has_envelope` these are the fields of `after` in the newest schema that has the envelope.
        Returns [] without any schema.
        """
        newest = self._find_newest(has_envelope=has_envelope)
        if newest is None:
            return []
        return _row_field_names(self._schemas_by_id()[newest], has_envelope=has_envelope)

    def _find_newest(self, *, has_envelope: bool) -> int | None:
        """Return the greatest schema id, with `has_envelope` of the schemas that have the envelope.

        Returns None without any schema. Raises ConfigurationError if no schema has the envelope.
        """
        refusal: ConfigurationError | None = None
        for schema_id, schema in sorted(self._schemas_by_id().items(), reverse=True):
            try:
                _row_field_names(schema, has_envelope=has_envelope)
            except ConfigurationError as error:
                refusal = error
            else:
                return schema_id
        if refusal is not None:
            raise refusal
        return None

    def row_json(self, is_deletion: Expression | None) -> None:
        """Return None, because a row of a format with schemas is not available as JSON."""

    def value_struct(self, *, has_envelope: bool) -> Expression:
        """Return the decoded record, for records of the newest schema; null for all others.

        With `has_envelope` it is the newest schema that has the envelope.
        """
        return F.col(f"__avro_{self._find_newest(has_envelope=has_envelope)}")


def _divide_readable(schemas: Mapping[int, str]) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the schemas that Spark can read, and why it cannot read each of the others, both by schema id.

    `schemas` are those of all versions of a subject. Not readable are, for example, a schema that is not an
    Avro record, and a record that contains itself. Records with such a schema become dead letters of kind
    `schema`. Raises ConfigurationError if none of the schemas can be read.
    """
    readable: dict[int, str] = {}
    problems: dict[int, str] = {}
    refusal: ConfigurationError | None = None
    for schema_id, schema in schemas.items():
        try:
            _require_readable(schema)
        except ConfigurationError as error:
            refusal = error
            problems[schema_id] = f"Schema {schema_id} cannot be read. {error.message}"
        else:
            readable[schema_id] = schema
    if refusal is not None and not readable:
        raise refusal
    return readable, problems


def _require_readable(schema: str) -> None:
    """Raise ConfigurationError if a schema is not that of a record, or if Spark cannot read its values."""
    avro_field_names(schema)
    if problem := describe_unreadable(schema):
        raise ConfigurationError(
            f"Spark cannot read the Avro schema of the values. {problem}",
            hint="Change the schema, or decode the values with Decoded.",
            reason="schema_unreadable",
        )


def avro_field_names(schema: str, record_field: str | None = None) -> list[str]:
    """Return the field names of a record schema in JSON, or of the record in its field `record_field`.

    Raises ConfigurationError if the schema is not a record in JSON, or does not have that field.
    """
    try:
        parsed_schema: Any = json.loads(schema)
        if record_field is not None:
            parsed_schema = find_field_record(parsed_schema, record_field)
        return [str(one["name"]) for one in parsed_schema["fields"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            "The Avro schema of the values is not a record in JSON, or lacks a field of the envelope.",
            hint='Write it as {"type": "record", "name": …, "fields": […]}.',
        ) from error


def _with_avro_columns(frame: DataFrame, values: Mapping[str, tuple[Expression, str]]) -> DataFrame:
    """Add columns with decoded records, null if the value is not valid Avro.

    `values` has the expression of the values and their schema by the name of the column.

    Spark decodes an invalid value to a record of nulls, so such a record counts as invalid unless the value
    is the encoding of nulls. A value is invalid too if a decimal has more digits than its precision allows.
    """
    schemas = {name: schema for name, (_, schema) in values.items()}
    checked_schemas = {name: with_long_decimals(schema) for name, schema in schemas.items()}
    long_schemas = [schema for name, schema in checked_schemas.items() if schema != schemas[name]]
    record_types = _load_record_types(frame.sparkSession, [*schemas.values(), *long_schemas])
    frame = with_columns(frame, {f"{name}_raw": value for name, (value, _) in values.items()})
    frame = with_columns(
        frame,
        {
            f"{name}_read": _read_avro(F.col(f"{name}_raw"), schema)
            for name, schema in checked_schemas.items()
        },
    )
    records = {}
    for name, schema in schemas.items():
        fits, result = _is_valid_record(f"{name}_raw", f"{name}_read", schema), F.col(f"{name}_read")
        if checked_schemas[name] != schema:
            source, kind = record_types[checked_schemas[name]], format_type(record_types[schema])
            read_value = quote_spark_name(f"{name}_read")
            fits = fits & ~F.expr(lost_part(read_value, source, kind, _shorten_decimal))
            result = F.expr(cast_nested(read_value, source, kind, _shorten_decimal))
        records[name] = F.when(fits, result)
    return with_columns(frame, records).drop(
        *(f"{name}_{end}" for name in schemas for end in ("raw", "read"))
    )


def _is_valid_record(raw_column: str, read_column: str, schema: str) -> Expression:
    avro_fields = json.loads(schema)["fields"]
    required_names = [one["name"] for one in avro_fields if not _accepts_null(one["type"])]
    if required_names:
        return F.col(read_column).getField(required_names[0]).isNotNull()
    null_record = b"".join(
        bytes([one["type"].index("null") * 2]) for one in avro_fields if one["type"] != "null"
    )
    has_value = [F.col(read_column).getField(one["name"]).isNotNull() for one in avro_fields]
    return any_of([F.col(raw_column) == F.lit(null_record), *has_value])


def _read_avro(value: Expression, schema: str) -> Expression:
    return from_avro(value, schema, {"mode": "PERMISSIVE"})


def _shorten_decimal(value: str, _: DataType, kind: str) -> str:
    return f"TRY_CAST({value} AS {kind})"


_record_types: dict[str, StructType] = {}


def _load_record_types(session: SparkSession, schemas: Iterable[str]) -> Mapping[str, StructType]:
    """Return the types of the records that Spark reads with Avro schemas, by schema.

    Costs one request to Spark for all schemas that this process has not loaded yet.
    """
    new_schemas = [schema for schema in dict.fromkeys(schemas) if schema not in _record_types]
    if new_schemas:
        null_value = F.lit(None).cast("binary")
        records = [_read_avro(null_value, one).alias(str(number)) for number, one in enumerate(new_schemas)]
        fields = session.range(0).select(*records).schema.fields
        for schema, record in zip(new_schemas, fields, strict=True):
            assert isinstance(record.dataType, StructType)  # noqa: S101 - schemas of records
            _record_types[schema] = record.dataType
    return _record_types


def with_long_decimals(schema: str) -> str:
    """Return an Avro schema with a longer precision for decimals that Spark would read as 64 bits.

    Spark ignores the other bits of such a decimal: a value of nine bytes became another number without an
    error. Values have the same encoding in both schemas. Returns the schema unchanged without such decimals.
    """
    parsed_schema = json.loads(schema)
    long_schema = _with_long_decimals(parsed_schema)
    return schema if long_schema == parsed_schema else json.dumps(long_schema)


def _with_long_decimals(avro_type: Any) -> Any:
    if isinstance(avro_type, list):
        return [_with_long_decimals(one) for one in avro_type]
    if not isinstance(avro_type, dict):
        return avro_type
    if not is_decimal(avro_type):
        return {
            key: _with_long_decimals(part) if key in _TYPE_KEYS else part for key, part in avro_type.items()
        }
    # Up to eight bytes fit Spark's 64 bits.
    max_digits = min(MAX_DECIMAL_DIGITS, max_fixed_digits(avro_type.get("size")))
    is_short = avro_type["precision"] <= _LONG_DIGITS and max_digits > _LONG_DIGITS
    return {**avro_type, "precision": max_digits} if is_short else avro_type


def _accepts_null(avro_type: Any) -> bool:
    return avro_type == "null" or (isinstance(avro_type, list) and "null" in avro_type)


def _row_field_names(schema: str, *, has_envelope: bool) -> list[str]:
    """Return the field names of the row in a record schema, with `has_envelope` of its field `after`.

    Raises ConfigurationError if the schema does not have the envelope: the fields `before` and `after` must
    be records with the same fields.
    """
    if not has_envelope:
        return avro_field_names(schema)
    names = avro_field_names(schema, "after")
    if names != avro_field_names(schema, "before"):
        raise ConfigurationError(
            "The fields before and after of the Avro schema are different records.",
            hint="Remove envelope from the Ingest unless the values are Debezium's.",
            reason="envelope_differs",
        )
    return names


def _select_row(
    session: SparkSession, source: Expression, schema: str, is_deletion: Expression | None
) -> tuple[Expression, StructType]:
    """Return the expression and the type of the row in a record, which is an envelope with `is_deletion`."""
    record_type = _load_record_types(session, [schema])[schema]
    if is_deletion is None:
        return source, record_type
    _row_field_names(schema, has_envelope=True)
    return row_in_envelope(source, is_deletion), row_type_in_envelope(session, record_type)


def _field_text(source: Expression, schema: str, field: str) -> Expression:
    if field.split(".")[0] not in avro_field_names(schema):
        return F.lit(None).cast("string")
    field_value = source
    for part in field.split("."):
        field_value = field_value.getField(part)
    return field_value.cast("string")


def _get_json(url: str) -> Any:
    try:
        answer = requests.get(url, timeout=_TIMEOUT_S)
    except requests.RequestException as error:
        raise KafkaUnavailable(
            f"The schema registry did not answer at {url}: {type(error).__name__}.",
            hint="Check the URL of RegistryAvro, and that the registry runs.",
            reason="registry_away",
            subject=url,
        ) from error
    if answer.status_code >= requests.codes.server_error:
        raise KafkaUnavailable(
            f"The schema registry answered {answer.status_code} at {url}.",
            hint="Look at the registry's log; the batch is tried again.",
            reason="registry_status",
            subject=url,
        )
    if not answer.ok:
        raise ConfigurationError(
            f"The schema registry answered {answer.status_code} at {url}.",
            hint="Check the URL and the subject of RegistryAvro.",
            reason="registry_status",
            subject=url,
        )
    return answer.json()


def protobuf(descriptors: bytes, message: str) -> Decoded:
    """Build the format of Protobuf values that are messages of one type, without a frame.

    Args:
        descriptors (bytes): A file descriptor set, as `protoc --include_imports --descriptor_set_out` writes.
        message (str): The full name of the message, such as `shop.Order`.

    Returns:
        Decoded: The format, for `Ingest(format=…)`.

    Raises:
        ConfigurationError: The bytes are not a file descriptor set, or it does not have the message.
        MissingExtra: `pip install 'branchlake_dagster[kafka]'`

    Examples:
        .. code-block:: python

            reading = protobuf(descriptors, "shop.Order")
            ingest = Ingest(name="orders", topics=["orders"], format=reading, tables=[orders])
    """
    require_modules("kafka", "ptars", needed_by="Protobuf values")
    handler = _load_message_handler(descriptors, message)
    schema: pa.Schema = handler.list_to_record_batch([]).schema
    kind = _to_signed_type(pa.struct(list(schema)))
    return Decoded(_build_decoder(descriptors, message, kind), pa.schema(list(kind)))


def _load_message_handler(descriptors: bytes, message: str):  # type: ignore[no-untyped-def]
    import ptars
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message import DecodeError

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.Add(file)
        message_type = pool.FindMessageTypeByName(message)
    except (KeyError, TypeError, DecodeError) as error:
        raise ConfigurationError(
            f"The file descriptor set does not have message {message}, or is not valid.",
            hint="Create the set with protoc --include_imports --descriptor_set_out=FILE.",
            reason="unknown_message",
            subject=message,
        ) from error
    # Spark has no nanoseconds, and with them every time after the year 2262 would be the last one they hold.
    units = ptars.PtarsConfig(timestamp_unit="us", time_unit="us", duration_unit="us")
    return ptars.HandlerPool([message_type.file], config=units).get_for_message(message_type)


def _build_decoder(descriptors: bytes, message: str, kind: pa.StructType) -> DecodeFunction:
    handlers: list[object] = []

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        if not handlers:
            handlers.append(_load_message_handler(descriptors, message))
        rows = handlers[0].array_to_record_batch(values).to_struct_array()  # type: ignore[attr-defined]
        return rows.cast(kind), pa.nulls(len(values), pa.string())

    return decode


def _to_signed_type(kind: pa.DataType) -> pa.DataType:
    """Replace `uint32` by `int64` and `uint64` by `decimal(20, 0)`, also inside structs, lists and maps.

    Neither Spark nor Iceberg has unsigned integers. Protobuf has no smaller ones, so other types are returned
    unchanged.
    """
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _to_signed_type(one.type), one.nullable) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(_to_signed_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_to_signed_type(kind.key_type), _to_signed_type(kind.item_type))
    return {pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}.get(kind, kind)
