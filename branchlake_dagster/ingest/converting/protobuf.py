"""Protobuf values, read by whole batches in native code."""

from __future__ import annotations

import pyarrow as pa

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require
from branchlake_dagster.ingest.converting.formats import Decode, Decoded


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
