"""Build the decoded columns of the three message formats, and record why a row is not a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.sensors.native import NATIVE_COLUMNS

Bools = npt.NDArray[np.bool_]

NOT_OF_THE_WIRE = ("window_start", "received_ns")
"""Columns of `NATIVE_COLUMNS` that come from the record, not from the bytes of its value."""


def _schema() -> pa.Schema:
    kinds = {pl.String(): pa.string(), pl.Int64(): pa.int64(), pl.Float64(): pa.float64()}
    native = [(name, kinds[kind]) for name, kind in NATIVE_COLUMNS.items() if name not in NOT_OF_THE_WIRE]
    own = [("obs_id", pa.string()), ("sensor_timestamp", pa.timestamp("us", "UTC"))]
    return pa.schema([*own, *native])


DECODED = _schema()
"""The schema of decoded rows.

It has ``obs_id``, which only telescopes send, ``sensor_timestamp``, which is ``timestamp_ns`` in
microseconds, and `NATIVE_COLUMNS` without `NOT_OF_THE_WIRE`.
"""

WRONG_SIZE, NOT_FINITE = "wrong size", "a value is not finite"
BAD_TIME, BAD_UNCERTAINTY = "timestamp out of range", "uncertainty is not positive"
UNKNOWN_SENSOR, BAD_ANGLE = "unknown sensor", "angle out of range"

LATEST_NS = 2**63 - 1


class Reasons:
    """The reason why each row is not a measurement, or None. The first reason of a row is kept."""

    def __init__(self, rows: int) -> None:
        self.texts: npt.NDArray[np.object_] = np.full(rows, None, dtype=object)

    def add(self, where: Bools, text: str) -> None:
        """Set the reason of the rows `where`, unless they already have one."""
        self.texts[where & (self.texts == None)] = text  # noqa: E711 - element by element

    @property
    def is_valid(self) -> Bools:
        """Which rows (n,) have no reason."""
        return np.asarray(self.texts == None, dtype=np.bool_)  # noqa: E711 - element by element


def one_array(values: pa.Array | pa.ChunkedArray) -> pa.BinaryArray:
    """Return the values as one array of 32-bit binary."""
    found = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(found, pa.ChunkedArray):  # of no chunk, or of more than an array can hold
        found = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)
    return found if found.type == pa.binary() else found.cast(pa.binary())


def split_fixed(values: pa.BinaryArray, layout: np.dtype[Any]) -> tuple[npt.NDArray[np.void], Bools]:
    """Return the k values that have the layout's size as records, and a mask (n,) of these values."""
    right = pc.equal(pc.binary_length(values), layout.itemsize).fill_null(False)
    rows = values.filter(right)
    _, offsets, data = rows.buffers()
    first = np.frombuffer(offsets, np.int32, 1, rows.offset * 4)[0] if len(rows) else 0
    found = np.frombuffer(data, layout, len(rows), int(first)) if len(rows) else np.zeros(0, layout)
    return found, right.to_numpy(zero_copy_only=False)


def build_decoded(
    columns: Mapping[str, Any],
    rows: npt.NDArray[np.int64],
    reasons: Reasons,
    schema: pa.Schema = DECODED,
) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Return a batch with all rows in the columns of `schema`, and the reasons. Rows with a reason are null.

    Args:
        columns: Values by column name, for the rows `rows`. A single text or number is repeated. Columns that
            are missing here are null. ``timestamp_ns`` is required.
        rows: (k,) The rows to which the values belong, in order.
        reasons: The reasons of all n rows.
        schema: The schema of the result. (default: `DECODED`)
    """
    total = len(reasons.texts)
    index = np.zeros(total, dtype=np.int64)
    index[rows] = np.arange(len(rows))
    sound = reasons.is_valid
    taken = pa.array(index, mask=~sound)
    micros = np.asarray(columns["timestamp_ns"]).astype(np.int64) // 1_000
    columns = {**columns, "sensor_timestamp": pa.array(micros).cast(pa.timestamp("us", "UTC"))}
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        if value is None:
            arrays.append(pa.nulls(total, field.type))
        elif isinstance(value, (str, float)):
            same = pa.repeat(pa.scalar(value, field.type), total)
            arrays.append(pc.if_else(pa.array(sound), same, pa.scalar(None, field.type)))
        else:
            made = value if isinstance(value, pa.Array) else pa.array(value)
            made = made if made.type == field.type else made.cast(field.type)
            arrays.append(made.take(taken) if len(made) else pa.nulls(total, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema), pa.array(reasons.texts, pa.string())


def number_texts(prefix: str, *numbers: npt.NDArray[Any]) -> pa.StringArray:
    """Return n texts that join a prefix and numbers by dashes, such as ``prefix-1-2``."""
    parts = [pa.array(one.astype(np.int64)).cast(pa.string()) for one in numbers]
    return pc.binary_join_element_wise(prefix, *parts, "-")


def join_binary(rows: npt.NDArray[np.void], lengths: npt.NDArray[np.int64] | None = None) -> pa.BinaryArray:
    """Return records as binary values. `lengths` (n,) truncates each to its first bytes."""
    size = rows.dtype.itemsize
    if lengths is None:
        lengths = np.full(len(rows), size)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint8).reshape(len(rows), size)
    data = flat[np.arange(size) < lengths[:, None]]
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
