"""Fields are found by their exact name, whatever characters are in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from branchlake_dagster.ingest.formats import REASON_SUFFIX, VALUE_COLUMN, Json
from branchlake_dagster.ingest.spark_expressions import RecordColumn

NAMES = (
    *(
        "it's",
        'a "b"',
        """both ' and \"""",
        "why?",
        "a.b",
        "a[0]",
        "['x']",
        "$",
        "$.v",
        "*",
        " lead",
        "trail ",
    ),
    *(
        "back\\slash",
        "`tick`",
        "Ünï",
        "日本",
        "a'b\"c?d[e].f",
        "tab\there",
        "comma,colon:",
        "new\nline",
        "{}",
    ),
)


def fitted(session: SparkSession, columns: list[RecordColumn], *values: dict[str, Any]) -> list[Row]:
    records = session.createDataFrame(
        [(json.dumps(one).encode(),) for one in values], f"{VALUE_COLUMN} binary"
    )
    form = Json()
    return (
        form.convert_rows(form.read(records), "row", columns).select("row", f"row{REASON_SUFFIX}").collect()
    )


@pytest.mark.spark
def test_a_field_is_converted_whatever_its_name(spark_session: SparkSession) -> None:
    """The text `"7"` for a number fits no whole record, so each field is taken out of it by itself."""
    columns = [
        RecordColumn("n", "int", ("n",)),
        *(RecordColumn(f"c{i}", "int", (one,)) for i, one in enumerate(NAMES)),
    ]
    values = [{"n": "7"}, *({"n": "7", one: str(i)} for i, one in enumerate(NAMES))]
    first, *rest = fitted(spark_session, columns, *values)
    assert first[f"row{REASON_SUFFIX}"] is None
    assert first["row"].asDict() == {"n": 7, **{f"c{i}": None for i in range(len(NAMES))}}
    for i, row in enumerate(rest):
        assert row[f"row{REASON_SUFFIX}"] is None, NAMES[i]
        assert (row["row"]["n"], row["row"][f"c{i}"]) == (7, i), NAMES[i]


@pytest.mark.spark
def test_a_value_that_does_not_fit_is_a_dead_letter_whatever_the_name(spark_session: SparkSession) -> None:
    columns = [RecordColumn(f"c{i}", "int", (one,)) for i, one in enumerate(NAMES)]
    for i, row in enumerate(fitted(spark_session, columns, *({one: "no number"} for one in NAMES))):
        assert row[f"row{REASON_SUFFIX}"]["kind"] == "conversion", NAMES[i]
    good = fitted(spark_session, columns, *({NAMES[0]: "1", one: None} for one in NAMES[1:]))
    assert [row[f"row{REASON_SUFFIX}"] for row in good] == [None] * (len(NAMES) - 1)


@pytest.mark.spark
def test_nested_values_are_converted_whatever_the_name(spark_session: SparkSession) -> None:
    kind = "struct<a: int, b: decimal(10,2)>"
    columns = [
        RecordColumn("n", "int", ("n",)),
        *(RecordColumn(f"c{i}", kind, (one,)) for i, one in enumerate(NAMES)),
    ]
    rows = fitted(spark_session, columns, *({"n": "7", one: {"a": 1, "b": 2.25}} for one in NAMES))
    for i, row in enumerate(rows):
        assert row[f"row{REASON_SUFFIX}"] is None, NAMES[i]
        assert (row["row"][f"c{i}"]["a"], str(row["row"][f"c{i}"]["b"])) == (1, "2.25"), NAMES[i]


@pytest.mark.spark
def test_a_name_that_exists_twice_stops_no_other_record(spark_session: SparkSession) -> None:
    columns = [RecordColumn("n", "int", ("n",)), RecordColumn("c", "struct<a: int>", ("it's",))]
    twice = b"""{"n": "7", "it's": {"a": 1}, "it's": {"a": 2}}"""
    records = spark_session.createDataFrame([(twice,), (b'{"n": "8"}',)], f"{VALUE_COLUMN} binary")
    form = Json()
    rows = (
        form.convert_rows(form.read(records), "row", columns).select("row", f"row{REASON_SUFFIX}").collect()
    )
    assert [row[f"row{REASON_SUFFIX}"] and row[f"row{REASON_SUFFIX}"]["kind"] for row in rows] == [
        "syntax",
        None,
    ]
    texts = form.read(records).select(form.field_text("it's").alias("t")).collect()
    assert texts[1]["t"] is None


@pytest.mark.spark
def test_a_field_is_taken_as_text_whatever_its_name(spark_session: SparkSession) -> None:
    form = Json()
    names = [one for one in NAMES if "." not in one]
    values = [{one: f"route {i}", "up": {one: f"inner {i}"}} for i, one in enumerate(names)]
    records = spark_session.createDataFrame(
        [(json.dumps(one).encode(),) for one in values], f"{VALUE_COLUMN} binary"
    )
    texts = [form.field_text(one).alias(f"t{i}") for i, one in enumerate(names)]
    inner = [form.field_text(f"up.{one}").alias(f"u{i}") for i, one in enumerate(names)]
    for i, row in enumerate(form.read(records).select(*texts, *inner).collect()):
        assert (row[f"t{i}"], row[f"u{i}"]) == (f"route {i}", f"inner {i}"), names[i]
