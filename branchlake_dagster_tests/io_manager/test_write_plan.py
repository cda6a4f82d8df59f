"""How a materialization is written, decided from plain values: frame, write mode, table, keys and consumption."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import Table

from branchlake_dagster.errors import ConfigurationError, UnsupportedType, UpsertKeyInvalid
from branchlake_dagster.io_manager import table_writer
from branchlake_dagster.io_manager.table_writer import (
    OutputFrame,
    PreparedWrite,
    WriteRequest,
    convert_frame,
    plan_write,
)
from branchlake_dagster.runs.provenance import output_partition_keys
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster.tables.schemas import plan_schema_changes
from branchlake_dagster.tables.specification import TableSpec, WriteMode
from branchlake_dagster.tables.upsert_engine import SparkReason
from branchlake_dagster_tests.suite.raised import raising

IDENTIFIER = ("shop", "prices")
SCHEMA = pa.schema([("sku", pa.string()), ("day", pa.date32()), ("price", pa.float64())])
ROWS = pa.Table.from_pylist([{"sku": "a", "day": None, "price": 1.0}], schema=SCHEMA)
DAYS = dg.DailyPartitionsDefinition("2026-01-01")
MODES: tuple[WriteMode, ...] = ("append", "upsert", "replace_partitions", "replace_table")


def table_in(folder: Path, rows: pa.Table | None, **properties: str) -> Table:
    catalog = load_catalog("local", type="in-memory", warehouse=f"file://{folder}")
    catalog.create_namespace("shop")
    table = catalog.create_table(IDENTIFIER, SCHEMA, properties=properties)
    if rows is not None:
        table.append(rows)
    return table


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Table | None]:
    """By name: no table, one without rows, one with a row."""
    return {
        "none": None,
        "empty": table_in(tmp_path / "empty", None),
        "filled": table_in(tmp_path / "filled", ROWS),
    }


def request(mode: WriteMode, *, partitioned: bool = False, keys: tuple[str, ...] = ("sku",)) -> WriteRequest:
    columns = {"": "day"} if partitioned else {}
    spec = TableSpec(IDENTIFIER, mode, keys if mode == "upsert" else (), columns)
    return WriteRequest(spec, "run-1", DAYS if partitioned else None, ["2026-01-02"] if partitioned else [])


def consuming(*, whole: bool = False, keys: tuple[str, ...] = ()) -> Any:
    """What a step consumes, as far as a plan asks for it."""
    declaration = SimpleNamespace(patterns=("keys",) if keys else ("rows",))
    consumer = SimpleNamespace(tracks_partitions=False, declaration=declaration)
    return SimpleNamespace(whole=whole, consumer=consumer, replaced_keys=keys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["none", "empty", "filled"])
@pytest.mark.parametrize("partitioned", [False, True], ids=["whole", "day"])
def test_a_plan_of_each_mode(
    tables: dict[str, Table | None], name: str, mode: WriteMode, *, partitioned: bool
) -> None:
    table = tables[name]
    plan = plan_write(request(mode, partitioned=partitioned), SCHEMA, table)
    assert plan.spec.write_mode == mode
    assert plan.existing_table is table
    assert plan.matches_rows == (mode == "upsert" and name == "filled")
    assert not plan.replaces_keys
    assert (plan.selection is not None) == partitioned
    assert [field.name for field in plan.schema.fields] == SCHEMA.names
    created_with_days = table is None and partitioned
    assert (plan.partition_spec != UNPARTITIONED_PARTITION_SPEC) == created_with_days


@pytest.mark.parametrize(("day", "candidate_rows"), [("2026-01-02", 1), ("2026-01-03", 0)])
def test_an_upsert_matches_rows_of_its_partitions_if_the_partition_column_is_a_key(
    tmp_path: Path, day: str, candidate_rows: int
) -> None:
    table = table_in(tmp_path, ROWS.set_column(1, "day", pa.array([date(2026, 1, 2)])))
    by_key = replace(request("upsert", partitioned=True, keys=("day", "sku")), partition_keys=[day])
    assert plan_write(by_key, SCHEMA, table).candidate_rows == candidate_rows
    # The same key may be in a row of another partition.
    elsewhere = replace(request("upsert", partitioned=True), partition_keys=[day])
    assert plan_write(elsewhere, SCHEMA, table).candidate_rows == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_result_computed_from_everything_replaces_the_table(
    tables: dict[str, Table | None], mode: WriteMode
) -> None:
    plan = plan_write(request(mode), SCHEMA, tables["filled"], consuming(whole=True))
    assert plan.spec.write_mode == "replace_table"
    assert not plan.matches_rows


@pytest.mark.parametrize("name", ["none", "filled"])
def test_a_result_of_an_upsert_computed_from_everything_needs_its_keys(
    tables: dict[str, Table | None], name: str
) -> None:
    with raising(UpsertKeyInvalid, table="shop.prices"):
        plan_write(request("upsert", keys=("ean",)), SCHEMA, tables[name], consuming(whole=True))


@pytest.mark.parametrize("name", ["none", "empty", "filled"])
def test_changed_keys_replace_rows_also_where_no_row_can_match(
    tables: dict[str, Table | None], name: str
) -> None:
    plan = plan_write(request("upsert"), SCHEMA, tables[name], consuming(keys=("sku",)))
    assert plan.replaces_keys
    assert plan.matches_rows == (name == "filled")


@pytest.mark.parametrize(
    "value", [ROWS, ROWS.to_pandas(), pl.from_arrow(ROWS)], ids=["arrow", "pandas", "polars"]
)
@pytest.mark.parametrize("name", ["none", "filled"])
def test_frames_become_arrow_rows(tables: dict[str, Table | None], name: str, value: Any) -> None:
    frame = convert_frame(value, request("append"), tables[name])
    assert not frame.is_spark
    assert frame.rows["sku"].to_pylist() == ["a"]
    assert frame.schema.names == SCHEMA.names


@pytest.mark.parametrize(
    "value", [1, "text", {"sku": ["a"]}, [ROWS], pd.Series([1])], ids=lambda one: type(one).__name__
)
def test_another_value_is_refused(value: Any) -> None:
    with raising(UnsupportedType, table="shop.prices"):
        convert_frame(value, request("append"), None)


def test_a_frame_without_a_key_is_refused_before_anything_is_created() -> None:
    with raising(UpsertKeyInvalid, table="shop.prices"):
        plan_write(request("upsert", keys=("ean",)), SCHEMA, None)


STRUCT = pa.struct([("a", pa.int64())])
OTHER_CASE = pa.struct([("a", pa.int64()), ("A", pa.int64())])


@pytest.mark.parametrize(
    "frame",
    [
        pa.schema([("price", pa.float64()), ("Price", pa.float64())]),
        pa.schema([("n", OTHER_CASE)]),
        pa.schema([("n", pa.list_(pa.map_(pa.string(), OTHER_CASE)))]),
    ],
    ids=["column", "field", "deep"],
)
def test_new_columns_that_spark_cannot_distinguish_are_refused(tmp_path: Path, frame: pa.Schema) -> None:
    with raising(SchemaMismatch, table="shop.prices", reason="names_differ_in_case"):
        plan_write(request("append"), frame, None)
    if "n" not in frame.names:
        return
    before = SCHEMA.append(pa.field("n", pa.int64()))
    with raising(SchemaMismatch, table="shop.prices", reason="names_differ_in_case"):
        plan_schema_changes(SCHEMA, pa.schema([*SCHEMA, *frame]), table_name="shop.prices", widen=True)
    for names in (["N"], ["m", "M"]):
        with raising(SchemaMismatch, table="shop.prices", reason="names_differ_in_case"):
            added = [pa.field(name, pa.int64()) for name in names]
            plan_schema_changes(before, pa.schema([*before, *added]), table_name="shop.prices", widen=True)


def test_a_new_field_that_spark_cannot_distinguish_is_refused_and_an_existing_one_stays() -> None:
    with raising(SchemaMismatch, table="shop.prices", reason="names_differ_in_case"):
        plan_schema_changes(
            pa.schema([("n", STRUCT)]), pa.schema([("n", OTHER_CASE)]), table_name="shop.prices", widen=True
        )
    adopted = pa.schema([("price", pa.int64()), ("Price", pa.int64()), ("n", OTHER_CASE)])
    assert plan_schema_changes(adopted, adopted, table_name="shop.prices", widen=True) == []


def test_a_table_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    table = table_in(tmp_path, None, **{"write.format.default": "orc"})
    with raising(ConfigurationError, table="shop.prices"):
        plan_write(request("append"), SCHEMA, table)


@pytest.mark.parametrize(
    ("rows", "changed", "mode", "empty", "spark"),
    [
        (1, None, "upsert", False, False),
        (0, None, "upsert", True, False),
        (0, None, "append", False, False),
        (1, 0, "upsert", True, False),
        (0, 2, "upsert", False, False),
        (1, 10**6, "upsert", False, True),
    ],
)
def test_the_engine_of_arrow_rows(
    tables: dict[str, Table | None],
    rows: int,
    changed: int | None,
    mode: WriteMode,
    *,
    empty: bool,
    spark: bool,
) -> None:
    table = tables["filled"]
    assert table is not None
    plan = plan_write(request(mode), SCHEMA, table)
    keys = None if changed is None else pa.table({"sku": pa.array(map(str, range(changed)), pa.string())})
    prepared = PreparedWrite(plan, table, OutputFrame(ROWS[:rows], SCHEMA), {}, keys)
    assert prepared.is_empty == empty
    reason = table_writer._plan_upsert(prepared) if plan.matches_rows and not empty else None
    assert isinstance(reason, SparkReason) == spark


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (dg.StaticPartitionsDefinition(["it", "de", "fr"]), ("de", "fr", "it")),
        (dg.DailyPartitionsDefinition("30-01-2026", fmt="%d-%m-%Y"), ("30-01-2026", "01-02-2026")),
    ],
)
def test_all_attempts_of_a_step_name_their_partitions_in_the_same_order(
    definition: dg.PartitionsDefinition[str], expected: tuple[str, ...]
) -> None:
    # Dagster keeps keys that are not time windows in a set, whose order differs from process to process.
    is_ordered = isinstance(definition, dg.TimeWindowPartitionsDefinition)
    for keys in (expected,) if is_ordered else (expected, expected[::-1]):
        context: Any = SimpleNamespace(
            has_asset_partitions=True, asset_partition_keys=list(keys), asset_partitions_def=definition
        )
        assert output_partition_keys(context) == expected
