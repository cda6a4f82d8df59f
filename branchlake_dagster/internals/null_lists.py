"""Corrects PyIceberg 0.12, which takes a null list of structs for an empty list.

PyIceberg builds lists of structs and maps with structs anew when it writes and reads files, without the nulls
of the lists and maps themselves (docs/upstream.md).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import ArrowProjectionVisitor
from pyiceberg.types import ListType, MapType

__all__ = ["unsliced_offsets"]

_plain_list, _plain_map = ArrowProjectionVisitor.list, ArrowProjectionVisitor.map


def _project_list(
    self: ArrowProjectionVisitor, list_type: ListType, list_array: pa.Array | None, values: pa.Array | None
) -> pa.Array | None:
    """Return the lists in the requested type. Null lists stay null."""
    lists = _plain_list(self, list_type, list_array, values)
    if lists is None or list_array is None or lists.null_count == list_array.null_count:
        return lists
    return type(lists).from_arrays(
        unsliced_offsets(lists.offsets), lists.values, type=lists.type, mask=list_array.is_null()
    )


def _project_map(
    self: ArrowProjectionVisitor,
    map_type: MapType,
    map_array: pa.Array | None,
    keys: pa.Array | None,
    values: pa.Array | None,
) -> pa.Array | None:
    """Return the maps in the requested type. Null maps stay null."""
    maps = _plain_map(self, map_type, map_array, keys, values)
    if maps is None or map_array is None or maps.null_count == map_array.null_count:
        return maps
    return pa.MapArray.from_arrays(
        unsliced_offsets(maps.offsets), maps.keys, maps.items, type=maps.type, mask=map_array.is_null()
    )


def unsliced_offsets(offsets: pa.Array) -> pa.Array:
    """Return a copy of the offsets of lists. PyArrow cannot combine a mask with a slice of offsets."""
    return pc.add(offsets, pa.scalar(0, offsets.type))


ArrowProjectionVisitor.list = _project_list  # type: ignore[assignment,method-assign]
ArrowProjectionVisitor.map = _project_map  # type: ignore[assignment,method-assign]
