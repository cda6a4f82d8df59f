"""Proofs on tables that Spark writes, against Spark's own counts on them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyspark.sql.types as pst
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.checks.compiler import build_builtin_condition, quote_column
from branchlake_dagster.checks.constraints import (
    Among,
    Both,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    NotNull,
    Promise,
    RowConstraint,
    StartsWith,
    UniqueConstraint,
)
from branchlake_dagster.checks.counting import collect_examples, count_failures
from branchlake_dagster.checks.stored_rows import TableRows, to_spark_schema
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.selection import Selection, TimeRange, Values, to_sql_predicate
from branchlake_dagster_tests.checks.proof.tables import NOON, VALUES, random_promises

pytestmark = pytest.mark.spark

DDL = "p string, i int, l bigint, f float, d double, m decimal(9,2), s string, b boolean, day date, at timestamp"
LAYOUTS = [
    "",
    "PARTITIONED BY (p)",
    "PARTITIONED BY (days(at), bucket(2, l))",
    "PARTITIONED BY (truncate(2, s), f)",
]
SELECTIONS = [
    None,
    Selection(((Values("p", ("a",)),),)),
    Selection(((TimeRange("at", NOON.replace(hour=0), NOON.replace(hour=23)),),)),
]
CHECKS = {
    "=": ("equal_to", "value"),
    "!=": ("not_equal_to", "value"),
    ">": ("greater_than", "min_value"),
    ">=": ("greater_than_or_equal_to", "min_value"),
    "<": ("less_than", "max_value"),
    "<=": ("less_than_or_equal_to", "max_value"),
}


def _in_pandera(promise: Promise) -> tuple[str, dict[str, Any]]:
    """The check that promises this, and its arguments."""
    if isinstance(promise, Compared):
        check, argument = CHECKS[promise.sign]
        return check, {argument: promise.bound}
    if isinstance(promise, Both):
        ends = {"min_value": promise.low.bound, "max_value": promise.high.bound}
        return "in_range", {
            **ends,
            "include_min": promise.low.sign == ">=",
            "include_max": promise.high.sign == "<=",
        }
    if isinstance(promise, Among):
        return "isin", {"allowed_values": promise.values}
    if isinstance(promise, NotAmong):
        return "notin", {"forbidden_values": promise.values}
    if isinstance(promise, StartsWith):
        return "str_startswith", {"string": promise.prefix}
    if isinstance(promise, EndsWith):
        return "str_endswith", {"string": promise.suffix}
    assert isinstance(promise, Length)
    return "str_length", {"min_value": promise.low, "max_value": promise.high}


def _constraint(name: str, column: str, promise: Promise) -> RowConstraint:
    if isinstance(promise, NotNull):
        return RowConstraint(
            name=name,
            columns=(column,),
            description="",
            build_condition=lambda _: quote_column(column).isNotNull(),
            promise=promise,
        )
    built = build_builtin_condition(*_in_pandera(promise), column, None)
    assert built is not None
    _, (_, condition, promised) = built
    return RowConstraint(
        name=name,
        columns=(column,),
        description="",
        build_condition=lambda _: condition(quote_column(column)),
        promise=promised,
    )


def _write(spark: SparkSession, table: str, rng: random.Random) -> None:
    """A table as Spark makes them: row-level deletes, several layouts, evolved columns, metrics turned off."""
    version, layout = rng.choice([2, 3]), rng.choice(LAYOUTS)
    spark.sql(
        f"CREATE TABLE {table} ({DDL}) USING iceberg {layout} TBLPROPERTIES ('format-version'='{version}',"
        " 'write.delete.mode'='merge-on-read', 'write.parquet.row-group-size-bytes'='4096')"
    )
    columns = list(VALUES)
    for number in range(3):
        mode = rng.choice(["truncate(16)", "truncate(2)", "counts", "full"])
        spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('write.metadata.metrics.column.s'='{mode}')")
        rows = []
        pools = {}
        for column in columns:
            pool = rng.sample(VALUES[column], rng.randint(1, len(VALUES[column])))
            pools[column] = rng.choice([pool, pool[:1], [None], [*pool, None]])
        rows = [tuple(rng.choice(pools[column]) for column in columns) for _ in range(rng.choice([1, 3, 8]))]
        spark.createDataFrame(rows, DDL).coalesce(1).writeTo(table).append()
        if number == 0:
            spark.sql(f"DELETE FROM {table} WHERE i = 5 AND b")
            spark.sql(f"ALTER TABLE {table} ALTER COLUMN i TYPE bigint")
            if "f)" not in layout:
                spark.sql(f"ALTER TABLE {table} ALTER COLUMN f TYPE double")
        if number == 1:
            spark.sql(f"ALTER TABLE {table} ALTER COLUMN m TYPE decimal(18,2)")
            spark.sql(f"ALTER TABLE {table} ADD COLUMN late bigint")
            columns_now = ", ".join(columns)
            spark.sql(
                f"INSERT INTO {table} ({columns_now}, late) SELECT {columns_now}, 4 FROM {table} LIMIT 2"
            )
            spark.sql(f"ALTER TABLE {table} DROP COLUMN late")


@pytest.mark.parametrize("seed", range(4))
def test_what_is_proved_of_sparks_tables_is_true(
    lakehouse: Lakehouse, spark_session: SparkSession, namespace: str, seed: int
) -> None:
    rng = random.Random(f"spark {seed}")
    spark_session.sql(f"CREATE NAMESPACE nessie.{namespace}")
    table = f"nessie.{namespace}.t"
    _write(spark_session, table, rng)
    stored = lakehouse.catalog("main").load_table((namespace, "t"))
    assert to_spark_schema(stored.schema()) == spark_session.table(table).schema
    selection = rng.choice(SELECTIONS)
    frame = spark_session.table(table)
    if selection is not None:
        frame = frame.filter(to_sql_predicate(selection, stored.schema()))
    rows = TableRows(StoredRows(stored, selection, "main", lambda: frame), VALUES)
    asked = [
        _constraint(f"{column}_{number}_{again}", column, promise)
        for column in VALUES
        for again in range(4)
        for number, promise in enumerate(random_promises(rng, column))
    ]
    found = {one.name: outcome for one in asked if (outcome := rows.prove(one)) is not None}
    keys = [
        UniqueConstraint(name=f"u{number}", columns=columns, description="")
        for number, columns in enumerate([("i",), ("day", "at"), ("l", "s", "m"), ("d", "i")])
    ]
    found |= {one.name: outcome for one in keys if (outcome := rows.prove(one)) is not None}
    counted = count_failures(frame, [one for one in [*asked, *keys] if one.name in found], view="none")
    for name, outcome in found.items():
        assert counted[name].failing == 0, next(one for one in [*asked, *keys] if one.name == name)
        assert outcome.total in (None, counted[name].total)
        assert outcome.proof is not None
        assert outcome.proof.rows >= (counted[name].total or 0)
    by = Counter(outcome.proof.source for outcome in found.values() if outcome.proof)
    assert by["metadata"] > 20
    spark_session.sql(f"DROP TABLE {table}")
    spark_session.sql(f"DROP NAMESPACE nessie.{namespace}")


def test_conditions_that_spark_cannot_push_down_are_counted(
    spark_session: SparkSession, namespace: str
) -> None:
    """Aggregates over a table in the lake; over a local relation nothing is pushed anywhere."""
    spark_session.sql(f"CREATE NAMESPACE nessie.{namespace}")
    table = f"nessie.{namespace}.t"
    spark_session.sql(f"CREATE TABLE {table} AS SELECT 0.1F AS f, TIMESTAMP '2026-08-08 12:00:00Z' AS at")
    asked = [
        _constraint("float", "f", Compared("=", 0.1)),
        _constraint("empty", "at", Both(Compared(">=", NOON), Compared("<", NOON))),
        _constraint("fine", "f", Compared("<", 0.2)),
    ]
    frame = spark_session.table(table)
    found = count_failures(frame, asked, view="none")
    assert {name: one.failing for name, one in found.items()} == {"float": 1, "empty": 1, "fine": 0}
    shown = collect_examples(frame, asked[:2], examples=1)
    assert shown["float"] == ({"f": "0.1", "at": shown["empty"][0]["at"]},)
    spark_session.sql(f"DROP TABLE {table}")
    spark_session.sql(f"DROP NAMESPACE nessie.{namespace}")


def test_types_are_those_that_spark_shows(
    lakehouse: Lakehouse, spark_session: SparkSession, namespace: str
) -> None:
    spark_session.sql(f"CREATE NAMESPACE nessie.{namespace}")
    table = f"nessie.{namespace}.t"
    spark_session.sql(
        f"CREATE TABLE {table} ({DDL}, n timestamp_ntz, r bigint NOT NULL, y binary, a array<int>,"
        " k map<string, struct<x: int NOT NULL, z: array<decimal(38,3)>>>, st struct<q: date> NOT NULL)"
    )
    stored = lakehouse.catalog("main").load_table((namespace, "t"))
    shown = spark_session.table(table).schema
    assert to_spark_schema(stored.schema()) == shown
    assert isinstance(shown["n"].dataType, pst.TimestampNTZType)
    spark_session.sql(f"DROP TABLE {table}")
    spark_session.sql(f"DROP NAMESPACE nessie.{namespace}")
