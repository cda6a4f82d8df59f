"""Fields are found by their exact name, whatever characters are in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from branchlake_dagster.ingest.formats import VALUE, WHY, Json
from branchlake_dagster.ingest.spark_expressions import Column

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


def fitted(session: SparkSession, columns: list[Column], *values: dict[str, Any]) -> list[Row]:
    records = session.createDataFrame([(json.dumps(one).encode(),) for one in values], f"{VALUE} binary")
    form = Json()
    return form.fit(form.read(records), "row", columns).select("row", f"row{WHY}").collect()


@pytest.mark.spark
def test_a_field_is_converted_whatever_its_name(spark_session: SparkSession) -> None:
    """The text `"7"` for a number fits no whole record, so each field is taken out of it by itself."""
    columns = [Column("n", "int", ("n",)), *(Column(f"c{i}", "int", (one,)) for i, one in enumerate(NAMES))]
    values = [{"n": "7"}, *({"n": "7", one: str(i)} for i, one in enumerate(NAMES))]
    first, *rest = fitted(spark_session, columns, *values)
    assert first[f"row{WHY}"] is None
    assert first["row"].asDict() == {"n": 7, **{f"c{i}": None for i in range(len(NAMES))}}
    for i, row in enumerate(rest):
        assert row[f"row{WHY}"] is None, NAMES[i]
        assert (row["row"]["n"], row["row"][f"c{i}"]) == (7, i), NAMES[i]


@pytest.mark.spark
def test_a_value_that_does_not_fit_is_a_dead_letter_whatever_the_name(spark_session: SparkSession) -> None:
    columns = [Column(f"c{i}", "int", (one,)) for i, one in enumerate(NAMES)]
    for i, row in enumerate(fitted(spark_session, columns, *({one: "no number"} for one in NAMES))):
        assert row[f"row{WHY}"]["kind"] == "conversion", NAMES[i]
    good = fitted(spark_session, columns, *({NAMES[0]: "1", one: None} for one in NAMES[1:]))
    assert [row[f"row{WHY}"] for row in good] == [None] * (len(NAMES) - 1)


@pytest.mark.spark
def test_nested_values_are_converted_whatever_the_name(spark_session: SparkSession) -> None:
    kind = "struct<a: int, b: decimal(10,2)>"
    columns = [
        Column("n", "int", ("n",)),
        *(Column(f"c{i}", kind, (one,)) for i, one in enumerate(NAMES)),
    ]
    rows = fitted(spark_session, columns, *({"n": "7", one: {"a": 1, "b": 2.25}} for one in NAMES))
    for i, row in enumerate(rows):
        assert row[f"row{WHY}"] is None, NAMES[i]
        assert (row["row"][f"c{i}"]["a"], str(row["row"][f"c{i}"]["b"])) == (1, "2.25"), NAMES[i]


@pytest.mark.spark
def test_a_name_that_is_there_twice_stops_no_other_record(spark_session: SparkSession) -> None:
    columns = [Column("n", "int", ("n",)), Column("c", "struct<a: int>", ("it's",))]
    twice = b"""{"n": "7", "it's": {"a": 1}, "it's": {"a": 2}}"""
    records = spark_session.createDataFrame([(twice,), (b'{"n": "8"}',)], f"{VALUE} binary")
    form = Json()
    rows = form.fit(form.read(records), "row", columns).select("row", f"row{WHY}").collect()
    assert [row[f"row{WHY}"] and row[f"row{WHY}"]["kind"] for row in rows] == ["syntax", None]
    texts = form.read(records).select(form.text("it's").alias("t")).collect()
    assert texts[1]["t"] is None


@pytest.mark.spark
def test_a_field_is_taken_as_text_whatever_its_name(spark_session: SparkSession) -> None:
    form = Json()
    names = [one for one in NAMES if "." not in one]
    values = [{one: f"route {i}", "up": {one: f"inner {i}"}} for i, one in enumerate(names)]
    records = spark_session.createDataFrame(
        [(json.dumps(one).encode(),) for one in values], f"{VALUE} binary"
    )
    texts = [form.text(one).alias(f"t{i}") for i, one in enumerate(names)]
    inner = [form.text(f"up.{one}").alias(f"u{i}") for i, one in enumerate(names)]
    for i, row in enumerate(form.read(records).select(*texts, *inner).collect()):
        assert (row[f"t{i}"], row[f"u{i}"]) == (f"route {i}", f"inner {i}"), names[i]
