"""Types inside columns, without Spark. `test_hostile_records.py` casts values."""

from __future__ import annotations

from pyspark.sql.types import ArrayType, DecimalType, IntegerType, LongType, MapType, StringType, StructType

from branchlake_dagster.ingest.nested_casts import is_same_type
from branchlake_dagster.ingest.spark_expressions import split_outer_type


def test_a_type_is_split_at_its_outermost_level() -> None:
    assert split_outer_type("decimal(10,2)") == ("decimal(10,2)", [])
    assert split_outer_type("array<map<string,int>>") == ("array", [("element", "map<string,int>")])
    kind = "struct<`a`: struct<`x,y`: int, `z>`: bigint>, b``: array<string>>".replace("b``", "`b```")
    assert split_outer_type(kind) == (
        "struct",
        [("a", "struct<`x,y`:int,`z>`:bigint>"), ("b`", "array<string>")],
    )
    assert split_outer_type("map<string,struct<`a`: int>>") == (
        "map",
        [("key", "string"), ("value", "struct<`a`:int>")],
    )


def test_types_are_the_same_with_the_same_fields_in_order() -> None:
    inner = StructType().add("a", IntegerType()).add("b", DecimalType(5, 2))
    source = MapType(StringType(), ArrayType(inner))
    assert is_same_type(source, "map<string,array<struct<`a`: int, `b`: decimal(5,2)>>>")
    assert not is_same_type(source, "map<string,array<struct<`b`: decimal(5,2), `a`: int>>>")
    assert not is_same_type(source, "map<string,array<struct<`a`: int>>>")
    assert not is_same_type(source, "map<string,array<struct<`a`: int, `b`: decimal(6,2)>>>")
    assert not is_same_type(LongType(), "int")
    assert not is_same_type(ArrayType(IntegerType()), "int")
