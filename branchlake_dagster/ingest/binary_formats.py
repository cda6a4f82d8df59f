"""Avro values, plain or in the frame of a schema registry, and Protobuf values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
import requests
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.avro.functions import from_avro

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require
from branchlake_dagster.ingest.errors import KafkaUnavailable
from branchlake_dagster.ingest.formats import VALUE, WHY, Decode, Decoded, enveloped, fit_struct
from branchlake_dagster.ingest.spark_expressions import Column, because, case

_TIMEOUT_S = 10.0
_MAGIC = b"\x00"


@dataclass(frozen=True)
class Avro:
    """Avro values that were written with one known schema, without a frame.

    Examples:
        .. code-block:: python

            Avro('{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}')
    """

    schema: str

    def __post_init__(self) -> None:
        fields_of(self.schema)

    def read(self, records: DataFrame) -> DataFrame:
        """See `Format`."""
        return _read(records, "__avro", F.col(VALUE), self.schema)

    def fit(
        self, frame: DataFrame, row: str, columns: Sequence[Column], gone: Expression | None = None
    ) -> DataFrame:
        """See `Format`."""
        source, names = _inside(F.col("__avro"), self.schema, gone)
        unread = F.col("__avro").isNull(), because("format", "The value is no Avro of the schema.")
        return fit_struct(frame, row, source, names, columns, [unread])

    def text(self, field: str) -> Expression:
        """See `Format`."""
        return _text(F.col("__avro"), self.schema, field)

    def names(self, *, given: bool = False, gone: Expression | None = None) -> None:
        """See `Format`."""

    def field_names(self, *, envelope: bool) -> list[str]:
        """See `Format`."""
        return fields_of(self.schema, "after" if envelope else None)

    def own_text(self, gone: Expression | None) -> None:
        """See `Format`: there is a schema."""

    def struct(self) -> Expression:
        """See `Format`."""
        return F.col("__avro")


@dataclass(frozen=True)
class RegistryAvro:
    """Avro values in Confluent's frame: a zero byte, the schema's id in four bytes, then the value.

    `url` is the registry's; `subject` whose versions are read (default: `<topic>-value` of each topic). Each
    version is fetched once for a batch's start; a record with an id that the subject does not have is a dead
    letter, to be processed again when the registry knows it.

    Examples:
        .. code-block:: python

            RegistryAvro("http://registry:8081", "orders-value")
    """

    url: str
    subject: str
    get: Callable[[str], Any] = field(default=lambda url: _get(url), repr=False, compare=False)

    def schemas(self) -> Mapping[int, str]:
        """The schemas of the subject by id. Raises KafkaUnavailable or ConfigurationError."""
        base = f"{self.url.rstrip('/')}/subjects/{self.subject}/versions"
        found = {}
        for version in self.get(base):
            told = self.get(f"{base}/{version}")
            found[int(told["id"])] = str(told["schema"])
        return found

    def read(self, records: DataFrame) -> DataFrame:
        """See `Format`."""
        value = F.col(VALUE)
        framed = F.octet_length(value).between(6, 1 << 30) & (F.substring(value, 1, 1) == F.lit(_MAGIC))
        number = F.conv(F.hex(F.substring(value, 2, 4)), 16, 10).cast("bigint")
        payload = F.expr(f"substring({VALUE}, 6)")
        frame = records.withColumn("__schema", F.when(framed, number))
        for one, schema in self._known().items():
            mine = F.when(F.col("__schema") == one, payload)
            frame = _read(frame, f"__avro_{one}", mine, schema)
        return frame

    def _known(self) -> Mapping[int, str]:
        # Asked for once a batch: `read` is called before the others, on one object that was `fetched`.
        found: Mapping[int, str] | None = self.__dict__.get("_schemas")
        if found is None:
            found = self.schemas()
            object.__setattr__(self, "_schemas", found)
        return found

    def fresh(self) -> RegistryAvro:
        """The same, asking the registry anew."""
        return RegistryAvro(self.url, self.subject, self.get)

    def fit(
        self, frame: DataFrame, row: str, columns: Sequence[Column], gone: Expression | None = None
    ) -> DataFrame:
        """See `Format`."""
        known = self._known()
        for one, schema in known.items():
            source, names = _inside(F.col(f"__avro_{one}"), schema, gone)
            unread = F.col(f"__avro_{one}").isNull(), because("format", "The value is no Avro of its schema.")
            frame = fit_struct(frame, f"{row}_{one}", source, names, columns, [unread])
        mine = [(F.col("__schema") == one, one) for one in known]
        empty = F.struct(*(F.lit(None).cast(one.kind).alias(one.name) for one in columns))
        rows = case([(which, F.col(f"{row}_{one}")) for which, one in mine], empty)
        strange = F.concat(F.lit("The registry's subject has no schema "), F.col("__schema").cast("string"))
        whys = case(
            [
                (F.col("__schema").isNull(), because("format", "The value has no frame of a registry.")),
                *((which, F.col(f"{row}_{one}{WHY}")) for which, one in mine),
            ],
            because("schema", strange),
        )
        done = frame.withColumn(row, rows).withColumn(f"{row}{WHY}", whys)
        return done.drop(*(f"{row}_{one}{end}" for one in known for end in ("", WHY)))

    def text(self, field: str) -> Expression:
        """See `Format`."""
        found = [_text(F.col(f"__avro_{one}"), schema, field) for one, schema in self._known().items()]
        return F.coalesce(*found, F.lit(None).cast("string"))

    def names(self, *, given: bool = False, gone: Expression | None = None) -> None:
        """See `Format`."""

    def field_names(self, *, envelope: bool) -> list[str]:
        """See `Format`: those of the newest schema."""
        known = self._known()
        return fields_of(known[max(known)], "after" if envelope else None) if known else []

    def own_text(self, gone: Expression | None) -> None:
        """See `Format`: there are schemas."""

    def struct(self) -> Expression:
        """See `Format`: the newest of the schemas is the table's."""
        return F.col(f"__avro_{max(self._known())}")


def fields_of(schema: str, inside: str | None = None) -> list[str]:
    """The fields of a record schema, or of the record `inside` it. Raises ConfigurationError."""
    try:
        told: Any = json.loads(schema)
        if inside is not None:
            told = _record(next(one["type"] for one in told["fields"] if one["name"] == inside))
        return [str(one["name"]) for one in told["fields"]]
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        raise ConfigurationError(
            "An Avro schema of values is a record in JSON.",
            hint='{"type": "record", "name": …, "fields": […]}',
        ) from error


def _record(kind: Any) -> Any:
    """The record of a type that may be a union with null."""
    return next(one for one in kind if isinstance(one, dict)) if isinstance(kind, list) else kind


def _read(frame: DataFrame, name: str, value: Expression, schema: str) -> DataFrame:
    """The frame with a column of records, null where a value is none.

    Spark makes a record of nulls out of what it cannot read.
    """
    raw, read = f"{name}_raw", f"{name}_read"
    frame = frame.withColumn(raw, value)
    frame = frame.withColumn(read, from_avro(F.col(raw), schema, {"mode": "PERMISSIVE"}))
    told = json.loads(schema)["fields"]
    sure = [one["name"] for one in told if not _takes_null(one["type"])]
    if sure:
        fits = F.col(read).getField(sure[0]).isNotNull()
    else:
        nothing = b"".join(bytes([one["type"].index("null") * 2]) for one in told if one["type"] != "null")
        some = [F.col(read).getField(one["name"]).isNotNull() for one in told]
        fits = reduce(lambda a, b: a | b, some, F.col(raw) == F.lit(nothing))
    return frame.withColumn(name, F.when(fits, F.col(read))).drop(raw, read)


def _takes_null(kind: Any) -> bool:
    return kind == "null" or (isinstance(kind, list) and "null" in kind)


def _inside(source: Expression, schema: str, gone: Expression | None) -> tuple[Expression, list[str]]:
    if gone is None:
        return source, fields_of(schema)
    return enveloped(source, gone), fields_of(schema, "after")


def _text(source: Expression, schema: str, field: str) -> Expression:
    if field.split(".")[0] not in fields_of(schema):
        return F.lit(None).cast("string")
    found = source
    for part in field.split("."):
        found = found.getField(part)
    return found.cast("string")


def _get(url: str) -> Any:
    try:
        answer = requests.get(url, timeout=_TIMEOUT_S)
    except requests.RequestException as error:
        raise KafkaUnavailable(
            f"The schema registry did not answer: {type(error).__name__}.",
            hint=f"Is {url} right?",
            reason="registry_away",
            subject=url,
        ) from error
    if answer.status_code >= requests.codes.server_error:
        raise KafkaUnavailable(
            f"The schema registry answered {answer.status_code}.",
            hint=f"It was {url}.",
            reason="registry_status",
            subject=url,
        )
    if not answer.ok:
        raise ConfigurationError(
            f"The schema registry answered {answer.status_code}.",
            hint=f"It was {url}.",
            reason="registry_status",
            subject=url,
        )
    return answer.json()


def protobuf(descriptors: bytes, message: str) -> Decoded:
    """Values that are messages of one type, without a frame.

    Args:
        descriptors (bytes): A file descriptor set, as `protoc --include_imports --descriptor_set_out` writes.
        message (str): The message's full name, `shop.Order`.

    Returns:
        Decoded: The format.

    Raises:
        ConfigurationError: The set is none, or has no such message.
        MissingExtra: `pip install 'branchlake_dagster[kafka]'`

    Examples:
        .. code-block:: python

            reading = protobuf(descriptors, "shop.Order")
            ingest = Ingest(name="orders", topics=["orders"], format=reading, tables=[orders])
    """
    require("kafka", "ptars", wanted_by="Protobuf values")
    handler = _handler(descriptors, message)
    schema: pa.Schema = handler.list_to_record_batch([]).schema
    kind = _signed(pa.struct(list(schema)))
    return Decoded(_decode(descriptors, message, kind), pa.schema(list(kind)))


def _handler(descriptors: bytes, message: str):  # type: ignore[no-untyped-def]
    import ptars
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message import DecodeError

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.Add(file)
        found = pool.FindMessageTypeByName(message)
    except (KeyError, TypeError, DecodeError) as error:
        raise ConfigurationError(
            f"The descriptors have no message {message}.",
            hint="protoc --include_imports --descriptor_set_out=FILE",
            reason="unknown_message",
            subject=message,
        ) from error
    return ptars.HandlerPool([found.file]).get_for_message(found)


def _decode(descriptors: bytes, message: str, kind: pa.StructType) -> Decode:
    made: list[object] = []

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        if not made:
            made.append(_handler(descriptors, message))
        rows = made[0].array_to_record_batch(values).to_struct_array()  # type: ignore[attr-defined]
        return rows.cast(kind), pa.nulls(len(values), pa.string())

    return decode


def _signed(kind: pa.DataType) -> pa.DataType:
    """The type with signed numbers in place of unsigned ones, which neither Spark nor Iceberg has."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _signed(one.type), one.nullable) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(_signed(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_signed(kind.key_type), _signed(kind.item_type))
    return {pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}.get(kind, kind)
