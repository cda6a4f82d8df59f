"""Random tables written by PyIceberg, and what every value would have to be for a promise to hold."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg import types as ice
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.checks.constraints import (
    Among,
    Both,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    NotNull,
    Promise,
    StartsWith,
)

NAN = float("nan")
NOON = dt.datetime(2026, 8, 8, 12, tzinfo=dt.UTC)
LONG = "é" * 3000
"""6,000 bytes: too long for Arrow to write bounds of the row group."""

KINDS: dict[str, pa.DataType] = {
    "p": pa.string(),
    "i": pa.int32(),
    "l": pa.int64(),
    "f": pa.float32(),
    "d": pa.float64(),
    "m": pa.decimal128(9, 2),
    "s": pa.string(),
    "b": pa.bool_(),
    "day": pa.date32(),
    "at": pa.timestamp("us", tz="UTC"),
}
VALUES: dict[str, list[Any]] = {
    "p": ["a", "b"],
    "i": [-3, 0, 5, 7, 2**24 + 1],
    "l": [-3, 0, 5, 2**53, 2**53 + 1],
    "f": [-1.5, -0.0, 0.0, 0.5, 2.0, NAN, math.inf],
    "d": [-1.5, -0.0, 0.0, 0.1, 2.0, NAN, -math.inf],
    "m": [Decimal("-1.50"), Decimal("0.00"), Decimal("7.25")],
    "s": [
        "",
        "ab",
        "abc",
        "abd",
        "abcdefghijklmnopqrst",
        "abcdefghijklmnopqrsu",
        "\U0010ffff" * 20,
        LONG,
        "é",
    ],
    "b": [True, False],
    "day": [dt.date(2026, 8, 7), dt.date(2026, 8, 8), dt.date(1969, 12, 31)],
    "at": [NOON, NOON + dt.timedelta(microseconds=1), dt.datetime(1969, 12, 31, 23, tzinfo=dt.UTC)],
}
MODES = ["truncate(16)", "truncate(16)", "truncate(1)", "truncate(2)", "full", "counts", "none"]


def catalog(folder: Path) -> SqlCatalog:
    made = SqlCatalog("random", uri="sqlite:///:memory:", warehouse=f"file://{folder}")
    made.create_namespace("n")
    return made


def random_table(made: SqlCatalog, rng: random.Random, name: str) -> Table:
    """Some appends, and between them what happens to tables: evolution, deletes, other metrics."""
    table = made.create_table(
        f"n.{name}",
        pa.schema(list(KINDS.items())),
        properties={"write.parquet.row-group-limit": rng.choice(["2", "1000000"])},
    )
    if rng.random() < 0.5:
        with table.update_spec() as spec:
            spec.add_field(rng.choice(["p", "i", "day", "b", "m", "at"]), IdentityTransform(), "by")
    for _ in range(rng.randint(0, 4)):
        columns = list(VALUES)
        with table.transaction() as change:
            change.set_properties({"write.metadata.metrics.default": rng.choice(MODES)})
        table.append(_rows(table, rng, columns))
        if rng.random() < 0.3:
            table.delete(rng.choice(["i = 5", "s = 'ab'", "b = true"]))
        if rng.random() < 0.5:
            _evolve(table, rng)
    return table


def _rows(table: Table, rng: random.Random, columns: list[str]) -> pa.Table:
    size = rng.choice([1, 1, 3, 8])
    data: dict[str, list[Any]] = {}
    for column in columns:
        pool: list[Any] = rng.sample(VALUES[column], rng.randint(1, len(VALUES[column])))
        pool = rng.choice([pool, pool[:1], pool[:1], [None], [*pool, None]])
        data[column] = [rng.choice(pool) for _ in range(size)]
    if size > 2 and rng.random() < 0.5:
        data["s"] = ["ab"] * 2 + [LONG] * (size - 2)  # with small row groups: some without bounds
    schema = table.schema().as_arrow()
    names = {("l" if name == "el" else name): name for name in schema.names}
    arrays = [
        pa.array(data[old], type=KINDS[old]).cast(schema.field(new).type)
        if old in data
        else pa.array([rng.choice([None, 4]) for _ in range(size)], type=pa.int64())
        for old, new in names.items()
    ]
    return pa.table(arrays, names=list(names.values()))


def _evolve(table: Table, rng: random.Random) -> None:
    names = table.schema().column_names
    what = rng.choice(["add", "rename", "int", "float", "decimal", "spec"])
    if what == "spec":
        taken = {field.source_id for field in table.spec().fields}
        with table.update_spec() as spec:
            if not taken:
                spec.add_field(rng.choice(["p", "i"]), IdentityTransform(), "by_too")
            else:
                spec.remove_field(table.spec().fields[0].name)
        return
    with table.update_schema() as schema:
        if what == "add" and "late" not in names:
            schema.add_column("late", ice.LongType())
        elif what == "rename" and "l" in names:
            schema.rename_column("l", "el")
        elif what == "int":
            schema.update_column("i", ice.LongType())
        elif what == "float":
            schema.update_column("f", ice.DoubleType())
        elif what == "decimal":
            schema.update_column("m", ice.DecimalType(18, 2))


def random_promises(rng: random.Random, column: str) -> list[Promise]:
    """One of each kind that the column's type allows, their values near those in the table."""
    values = VALUES["l" if column in ("el", "late") else column]
    near = [value for value in values if value == value]  # no promise is about NaN
    if column in ("i", "l", "el", "late"):
        near = [*near, 2**24, 2**53 - 1, -4, 100, 0.5, 1e9]
    elif column in ("f", "d"):
        near = [*near, -2, 3, 0.1, 2**24]
    elif column == "m":
        near = [*near, 7, -2, Decimal("7.250"), Decimal("1e3")]
    pick = lambda: rng.choice(near)  # noqa: E731
    found: list[Promise] = [
        NotNull(),
        Compared("=", pick()),
        Compared("!=", pick()),
        Among(tuple(rng.sample(values, 2))),
        Among((pick(),)),
        NotAmong((pick(),)),
    ]
    if column == "b":
        return found[:3]
    if column in ("s", "p"):
        text = pick()
        cut = rng.choice([text[:1], text[:2], text[:17], text])
        return [
            *found,
            StartsWith(cut),
            EndsWith(text[-1:]),
            Length(1, rng.choice([None, 3, 20])),
            Length(2, 2),
        ]
    found += [Compared(sign, pick()) for sign in (">", ">=", "<", "<=")]
    return [*found, Both(Compared(">=", pick()), Compared("<", pick()))]


def keeps(promise: Promise, value: Any) -> bool:
    """Whether a value keeps a promise as Spark has it: null keeps all but one, NaN is above every number."""
    if isinstance(promise, NotNull):
        return value is not None
    if value is None:
        return True
    if isinstance(promise, Both):
        return keeps(promise.low, value) and keeps(promise.high, value)
    if isinstance(promise, Compared):
        return _compares(value, promise)
    if isinstance(promise, Among):
        return any(_compares(value, Compared("=", one)) for one in promise.values)
    if isinstance(promise, NotAmong):
        return all(_compares(value, Compared("!=", one)) for one in promise.values)
    if isinstance(promise, StartsWith):
        return bool(value.startswith(promise.prefix))
    if isinstance(promise, EndsWith):
        return bool(value.endswith(promise.suffix))
    return (promise.low is None or len(value) >= promise.low) and (
        promise.high is None or len(value) <= promise.high
    )


def _compares(value: Any, promise: Compared) -> bool:
    bound = promise.bound
    if isinstance(value, float) or isinstance(bound, float):
        value, bound = float(value), float(bound)
        if math.isnan(value):
            return promise.sign in (">", ">=", "!=")
    signs = {
        "=": value == bound,
        "!=": value != bound,
        ">": value > bound,
        ">=": value >= bound,
        "<": value < bound,
        "<=": value <= bound,
    }
    return signs[promise.sign]
