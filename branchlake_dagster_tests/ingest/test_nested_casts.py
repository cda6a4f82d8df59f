"""Values of formats with a schema, cast to the columns of a table."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.connect.client import SparkConnectClient
from pyspark.sql.types import ArrayType, DecimalType, IntegerType, LongType, MapType, StringType, StructType

from branchlake_dagster.ingest.binary_formats import Avro, RegistryAvro
from branchlake_dagster.ingest.formats import Decoded
from branchlake_dagster.ingest.nested_casts import is_same_type, match_fields
from branchlake_dagster.ingest.spark_expressions import RecordColumn, split_outer_type
from branchlake_dagster.ingest.writable_columns import MAX_LEVELS


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


def test_a_type_without_fields_is_split() -> None:
    assert split_outer_type("struct<>") == ("struct", [])
    assert split_outer_type("struct<`a`: struct<>, `b`: int>") == (
        "struct",
        [("a", "struct<>"), ("b", "int")],
    )


def test_a_name_that_differs_in_case_is_taken_if_it_is_the_only_one() -> None:
    source = StructType().add("orderId", IntegerType()).add("a", IntegerType()).add("A", IntegerType())
    assert match_fields(source, ["orderid", "a"]) == {"orderid": 0, "a": 1}
    assert match_fields(source, ["orderid", "ORDERID", "A"]) == {"A": 2}
    assert match_fields(StructType().add("a", IntegerType()), ["a", "A"]) == {"a": 0}


def test_types_are_the_same_with_the_same_fields_in_order() -> None:
    inner = StructType().add("a", IntegerType()).add("b", DecimalType(5, 2))
    source = MapType(StringType(), ArrayType(inner))
    assert is_same_type(source, "map<string,array<struct<`a`: int, `b`: decimal(5,2)>>>")
    assert not is_same_type(source, "map<string,array<struct<`b`: decimal(5,2), `a`: int>>>")
    assert not is_same_type(source, "map<string,array<struct<`a`: int>>>")
    assert not is_same_type(source, "map<string,array<struct<`a`: int, `b`: decimal(6,2)>>>")
    assert not is_same_type(LongType(), "int")
    assert not is_same_type(ArrayType(IntegerType()), "int")


def test_values_are_cast_in_as_many_levels_as_a_column_may_have(spark_session: SparkSession) -> None:
    """Spark refused a struct of ten levels in which one number has a smaller type than its column."""
    schema: Any = "int"
    kind, value = "bigint", _avro_long(3)
    for level in range(MAX_LEVELS):
        if level % 5 == 4:
            schema, kind, value = (
                {"type": "array", "items": schema},
                f"array<{kind}>",
                _avro_long(1) + value + b"\x00",
            )
        else:
            field = {"name": "f", "type": ["null", schema]}
            schema = {"type": "record", "name": f"N{level}", "fields": [field]}
            kind, value = f"struct<`f`: {kind}>", _avro_long(1) + value
    avro = Avro(json.dumps({"type": "record", "name": "R", "fields": [{"name": "of", "type": schema}]}))
    [(row, reason)] = _convert(spark_session, avro, {"of": kind}, [value])
    leaf = row["of"]
    for _ in range(MAX_LEVELS):
        leaf = leaf[0]
    assert (leaf, reason) == (3, None)


def test_fields_inside_columns_are_matched_by_name(spark_session: SparkSession) -> None:
    """Fields with other names became null, and two names that differ only in case failed every batch."""
    of = pa.struct([("orderId", pa.int32()), ("a", pa.int32()), ("A", pa.int32())])
    values = {"orderId": 7, "a": 1, "A": 2}
    by_case = _convert_arrow(spark_session, of, values, "struct<`orderid`: bigint, `a`: bigint>")
    assert by_case == [({"orderid": 7, "a": 1}, None)]
    other = _convert_arrow(spark_session, pa.struct([("x", pa.int32())]), {"x": 1}, "struct<`y`: bigint>")
    assert [reason for _, reason in other] == ["conversion"]
    null = _convert_arrow(spark_session, pa.struct([("x", pa.int32())]), None, "struct<`y`: bigint>")
    assert null == [(None, None)]


def test_a_part_of_a_key_that_does_not_fit_is_a_dead_letter(spark_session: SparkSession) -> None:
    of = pa.map_(pa.struct([("a", pa.string()), ("b", pa.string())]), pa.int64())
    kind = "map<struct<`a`: string, `b`: int>,bigint>"
    bad = _convert_arrow(spark_session, of, [({"a": "x", "b": "no number"}, 1)], kind)
    assert [reason for _, reason in bad] == ["conversion"]
    good = _convert_arrow(spark_session, of, [({"a": "x", "b": "2"}, 1)], kind)
    assert [reason for _, reason in good] == [None]


def test_only_the_first_of_several_fields_must_fit(spark_session: SparkSession) -> None:
    row_type = pa.struct([("new", pa.struct([("a", pa.int32())])), ("old", pa.struct([("a", pa.float64())]))])
    columns = [RecordColumn("of", "struct<`a`: bigint>", ("new", "old"))]
    rows = [
        {"new": {"a": 4}, "old": {"a": 2.5}},
        {"new": None, "old": {"a": 2.5}},
        {"new": None, "old": {"a": 2.0}},
    ]
    assert [reason for _, reason in _convert_rows(spark_session, row_type, rows, columns)] == [
        None,
        "conversion",
        None,
    ]


def test_a_schema_may_have_any_number_of_optional_fields(spark_session: SparkSession) -> None:
    """Spark refused the condition that any of a hundred fields has a value."""
    fields = [{"name": f"f{number}", "type": ["null", "int"]} for number in range(200)]
    avro = Avro(json.dumps({"type": "record", "name": "R", "fields": fields}))
    values = [b"\x00" * 200, b"\x00" * 199 + b"\x02\x06", b"\x09"]
    rows = _convert(spark_session, avro, {"f199": "bigint"}, values)
    assert [(row and row["f199"], reason) for row, reason in rows] == [
        (None, None),
        (3, None),
        (None, "format"),
    ]


def test_an_empty_record_beside_a_short_decimal_is_read(spark_session: SparkSession) -> None:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    empty = {"type": "record", "name": "Empty", "fields": []}
    fields = [{"name": "price", "type": price}, {"name": "empty", "type": empty}]
    avro = Avro(json.dumps({"type": "record", "name": "R", "fields": fields}))
    [(row, reason)] = _convert(spark_session, avro, {"price": "decimal(10,2)"}, [_avro_long(1) + b"\x05"])
    assert (row["price"], reason) == (Decimal("0.05"), None)


def test_envelopes_with_different_fields_before_have_different_types(spark_session: SparkSession) -> None:
    """The common type of `before` and `after` was that of another envelope with the same field `after`."""
    after = pa.struct([("id", pa.int32())])
    columns = [RecordColumn("id", "int", ("id",))]
    for before in (pa.int32(), pa.int64()):
        row_type = pa.struct([("before", pa.struct([("id", before)])), ("after", after)])
        rows = [{"before": None, "after": {"id": 5}}]
        result = _convert_rows(spark_session, row_type, rows, columns, F.lit(False))
        assert [(row["id"], reason) for row, reason in result] == [(5, None)]


def test_types_of_all_versions_cost_one_request(
    spark_session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version cost requests for a frame that grew with the versions: five cost seconds for each batch."""
    price = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    versions = {}
    for number in range(1, 6):
        more = [{"name": f"c{number}_{uuid.uuid4().hex}", "type": ["null", "string"]}]
        fields = [{"name": "id", "type": "long"}, {"name": "price", "type": price}, *more]
        versions[number] = json.dumps({"type": "record", "name": "R", "fields": fields})
    avro = RegistryAvro("http://nowhere", "s", lambda url: _registry_json(url, versions))
    frame = spark_session.createDataFrame([(b"x",)], "__value binary")
    columns = [RecordColumn("id", "bigint", ("id",)), RecordColumn("price", "decimal(10,2)", ("price",))]
    requests: list[str] = []
    analyze = SparkConnectClient._analyze
    monkeypatch.setattr(
        SparkConnectClient,
        "_analyze",
        lambda client, method, **more: requests.append(method) or analyze(client, method, **more),
    )
    avro.convert_rows(avro.read(frame), "__row0", columns)
    assert requests == ["schema"]
    avro.convert_rows(avro.read(frame), "__row0", columns)
    assert requests == ["schema"]


def test_a_registry_without_versions_has_no_rows(spark_session: SparkSession) -> None:
    avro = RegistryAvro("http://nowhere", "s", lambda url: _registry_json(url, {}))
    frame = spark_session.createDataFrame([(b"\x00\x00\x00\x00\x01\x02",)], "__value binary")
    [(row, reason)] = _collect(
        avro.convert_rows(avro.read(frame), "__row0", [RecordColumn("id", "bigint", ("id",))])
    )
    assert (row["id"], reason) == (None, "schema")


def _registry_json(url: str, versions: dict[int, str]) -> Any:
    tail = url.rsplit("/", 1)[1]
    return [*versions] if tail == "versions" else {"id": int(tail), "schema": versions[int(tail)]}


def _convert_arrow(session: SparkSession, of: pa.DataType, value: Any, kind: str) -> list[Any]:
    columns = [RecordColumn("of", kind, ("of",))]
    result = _convert_rows(session, pa.struct([("of", of)]), [{"of": value}], columns)
    return [(row["of"].asDict() if isinstance(row["of"], Row) else row["of"], why) for row, why in result]


def _convert_rows(
    session: SparkSession,
    row_type: pa.StructType,
    rows: list[Any],
    columns: list[RecordColumn],
    is_deletion: Expression | None = None,
) -> list[Any]:
    """Convert rows by the columns, as rows that a function has decoded: the rows and the kinds of reasons."""
    decoded = Decoded(lambda values: (pa.nulls(len(values), row_type), values), pa.schema(list(row_type)))
    table = pa.table({"__decoded": pa.array(rows, row_type), "__undecoded": pa.nulls(len(rows), pa.string())})
    frame = session.createDataFrame(table)
    return _collect(decoded.convert_rows(frame, "__row0", columns, is_deletion))


def _convert(session: SparkSession, avro: Avro, kinds: dict[str, str], values: list[bytes]) -> list[Any]:
    columns = [RecordColumn(name, kind, (name,)) for name, kind in kinds.items()]
    frame = session.createDataFrame([(value,) for value in values], "__value binary")
    return _collect(avro.convert_rows(avro.read(frame), "__row0", columns))


def _collect(frame: DataFrame) -> list[Any]:
    rows = frame.select("__row0", "__row0_why").collect()
    return [(row, reason and reason["kind"]) for row, reason in rows]


def _avro_long(number: int) -> bytes:
    """Return the Avro encoding of a small number."""
    return bytes([number << 1])
