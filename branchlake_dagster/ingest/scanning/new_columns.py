"""Which fields of records may become columns of a table: a name that it cannot have stops every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyiceberg.table import Table
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType


def possible(
    fields: Iterable[StructField], taken: Iterable[str], most: int
) -> tuple[list[StructField], list[str]]:
    """The fields that can be columns beside those `taken`, at most so many; and the names of the others.

    Spark finds columns whatever case their names are in, Iceberg finds what is inside by its path with dots:
    of `a` and `A`, or of `a.b` and a column `a` with a field `b`, the first one stays.
    """
    used = {name.casefold() for name in taken}
    kept: list[StructField] = []
    left_out: list[str] = []
    for one in fields:
        mine = [path.casefold() for path in _paths(one.name, one.dataType)]
        if len(kept) >= most or len({*mine}) < len(mine) or used.intersection(mine):
            left_out.append(one.name)
        else:
            kept.append(one)
            used.update(mine)
    return kept, left_out


def taken_names(table: Table) -> set[str]:
    """The names that a new column of a table cannot have: of columns, what is in them, and partitions."""
    partitions = {one.name for spec in table.metadata.partition_specs for one in spec.fields}
    return {*table.schema().column_names, *partitions}


def room(table: Table | None, most: int) -> int:
    """How many columns a table may get that is to have at most so many."""
    return max(0, most - (len(table.schema().fields) if table is not None else 0))


def _paths(name: str, kind: DataType) -> Iterator[str]:
    yield name
    if isinstance(kind, StructType):
        for one in kind.fields:
            yield from _paths(f"{name}.{one.name}", one.dataType)
    elif isinstance(kind, ArrayType):
        yield from _paths(f"{name}.element", kind.elementType)
    elif isinstance(kind, MapType):
        yield from _paths(f"{name}.key", kind.keyType)
        yield from _paths(f"{name}.value", kind.valueType)
