"""Protobuf values, read by whole batches in native code."""

from __future__ import annotations

from collections.abc import Iterator

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
    return Decoded(_decode(descriptors, message, pa.struct(list(schema))), schema)


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
        ) from error
    return ptars.HandlerPool([found.file]).get_for_message(found)


def _decode(descriptors: bytes, message: str, kind: pa.StructType) -> Decode:
    made: list[object] = []

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        if not made:
            made.append(_handler(descriptors, message))
        handler = made[0]
        try:
            rows = handler.array_to_record_batch(values).to_struct_array()  # type: ignore[attr-defined]
            return rows.cast(kind), pa.nulls(len(values), pa.string())
        except Exception:  # noqa: BLE001 - whichever of ptars: one of the values is no message
            return _one_by_one(handler, values, kind)

    return decode


def _one_by_one(
    handler: object, values: pa.BinaryArray, kind: pa.StructType
) -> tuple[pa.StructArray, pa.StringArray]:
    """A batch with something in it that is no message: halves of it until that is alone."""
    rows: list[pa.StructArray] = []
    reasons: list[pa.Array] = []
    for part, read in _parts(handler, values):
        rows.append(pa.nulls(len(part), kind) if read is None else read.cast(kind))
        reasons.append(
            pa.array(["The value is no message of its type."])
            if read is None
            else pa.nulls(len(part), pa.string())
        )
    return pa.concat_arrays(rows), pa.concat_arrays(reasons)


def _parts(handler: object, values: pa.BinaryArray) -> Iterator[tuple[pa.BinaryArray, pa.StructArray | None]]:
    waiting = [values]
    while waiting:
        part = waiting.pop()
        try:
            yield part, handler.array_to_record_batch(part).to_struct_array()  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - as above
            if len(part) == 1:
                yield part, None
                continue
            half = len(part) // 2
            waiting += [part.slice(half), part.slice(0, half)]
