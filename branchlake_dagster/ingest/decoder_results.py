"""Checks of what a function that decodes Arrow batches of values has returned.

Such functions are written by users or in native code. A result that Spark would misread, or that says nothing
about a value, must not become a row.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_MAX_REASON_LENGTH = 500
_NO_RESULT = "The decoder returned neither a row nor a reason for the value."


def check_decoded(
    rows: pa.Array | pa.ChunkedArray,
    reasons: pa.Array | pa.ChunkedArray,
    values: pa.BinaryArray,
    kind: pa.StructType,
) -> tuple[pa.StructArray, pa.StringArray]:
    """Return the result of a decoder for `values`, with rows of type `kind`.

    A value without a row and without a reason gets a reason, unless the value is null. Raises ValueError or
    an error of Arrow for a result of another length, for rows without any field of `kind`, for a null in a
    field that has no nulls, and for reasons that are not text.
    """
    if len(rows) != len(values) or len(reasons) != len(values):
        raise ValueError(f"{len(values)} values gave {len(rows)} rows and {len(reasons)} reasons")
    rows, reasons = _one_array(rows), _one_array(reasons).cast(pa.string())
    if rows.type != kind:
        # The cast matches fields by name, and fills missing fields with null.
        names = {one.name for one in rows.type} if pa.types.is_struct(rows.type) else set()
        if names and len(kind) and names.isdisjoint(one.name for one in kind):
            raise ValueError(f"the rows have none of the schema's fields: {rows.type}")
        rows = rows.cast(kind)
    if (path := _forbidden_null(rows)) is not None:
        raise ValueError(f"field {path} is null, but its schema allows no nulls")
    reasons.validate(full=True)
    if rows.null_count:
        is_silent = pc.and_(pc.and_(rows.is_null(), reasons.is_null()), values.is_valid())
        reasons = pc.if_else(is_silent, _NO_RESULT, reasons)
    return rows, reasons


def failure_reason(error: BaseException) -> str:
    """Return the reason of a dead letter whose value made the decoder raise this error.

    The text of an error is the decoder's own: it may fail itself, or contain halves of characters.
    """
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - any error of the user's own class
        message = type(error).__name__
    text = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return f"The value cannot be decoded: {text}"[:_MAX_REASON_LENGTH]


def _one_array(result: pa.Array | pa.ChunkedArray) -> pa.Array:
    return result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result


def _forbidden_null(array: pa.Array, path: str = "") -> str | None:
    """Return the path of a field that has a null although its type allows none; None if there is none.

    Spark trusts the type and does not look for nulls in such a field. Costs nothing for a type that allows
    nulls everywhere, as those of Protobuf do.
    """
    kind = array.type
    if not _forbids_nulls(kind):
        return None
    present = array.drop_null() if array.null_count else array
    if pa.types.is_struct(kind):
        # The children of `field` are those of the slice.
        parts = [(one, present.field(number), f"{path}.{one.name}") for number, one in enumerate(kind)]
    elif pa.types.is_map(kind):
        start, end = _value_range(present)
        parts = [
            (kind.key_field, present.keys.slice(start, end - start), f"{path}.key"),
            (kind.item_field, present.items.slice(start, end - start), f"{path}.value"),
        ]
    else:
        parts = [(kind.value_field, present.flatten(), f"{path}.element")]
    for field, child, child_path in parts:
        if not field.nullable and child.null_count:
            return child_path.removeprefix(".")
        if (found := _forbidden_null(child, child_path)) is not None:
            return found
    return None


def _value_range(maps: pa.MapArray) -> tuple[int, int]:
    """Return the range of the entries of maps in their arrays of keys and values."""
    return (maps.offsets[0].as_py(), maps.offsets[-1].as_py()) if len(maps) else (0, 0)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _forbids_nulls(kind: pa.DataType) -> bool:
    """Return whether a type has a field without nulls, at any level. Keys of maps never have nulls."""
    if pa.types.is_struct(kind):
        fields = list(kind)
    elif pa.types.is_map(kind):
        if not kind.item_field.nullable or _forbids_nulls(kind.key_type):
            return True
        fields = [kind.item_field]
    elif _is_list(kind):
        fields = [kind.value_field]
    else:
        return False
    return any(not one.nullable or _forbids_nulls(one.type) for one in fields)
