from datetime import datetime

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster.tables.partitioning import build_partition_spec, selects_whole_files
from branchlake_dagster.tables.schemas import build_iceberg_schema, stored_schema
from branchlake_dagster.tables.selection import select_partitions
from branchlake_dagster.tables.spark_frames import keys_to_sort_by
from branchlake_dagster.tables.specification import (
    LayoutField,
    parse_preview_rows,
    parse_table_spec,
    require_parquet,
    table_metadata,
)
from branchlake_dagster_tests.suite.raised import raising


def spec(metadata: dict[str, object], *, partitioned: bool = False, path: tuple[str, ...] = ("a", "b")):
    return parse_table_spec(
        dg.AssetKey(list(path)), metadata, default_namespace="lake", partitioned=partitioned
    )


def test_the_key_names_the_table() -> None:
    assert spec({}).identifier == ("a", "b")
    assert spec({}, path=("only",)).identifier == ("lake", "only")
    assert spec({}).spark_name == "nessie.`a`.`b`"


def test_defaults_follow_the_partitions() -> None:
    assert spec({}).write_mode == "replace_table"
    assert spec(table_metadata(partition_by="ts"), partitioned=True).write_mode == "replace_partitions"


def test_spark_sorts_by_partition_columns_last() -> None:
    by_region_and_hour = {"region": "place", "hour": "seen_at"}
    upsert = table_metadata(write_mode="upsert", keys=["seen_at", "id", "place", "part"])
    partitioned = spec(upsert | table_metadata(partition_by=by_region_and_hour), partitioned=True)
    assert keys_to_sort_by(partitioned) == ["id", "part", "seen_at", "place"]
    assert keys_to_sort_by(spec(upsert)) == ["seen_at", "id", "place", "part"]


def test_isolation_is_snapshot_unless_the_asset_asks_for_more() -> None:
    assert spec({}).isolation == "snapshot"
    assert spec(table_metadata(isolation="serializable")).isolation == "serializable"


@pytest.mark.parametrize(
    ("metadata", "partitioned", "reason", "names"),
    [
        (table_metadata(write_mode="upsert"), False, "keys_missing", ["keys="]),
        (
            table_metadata(write_mode="replace_partitions"),
            True,
            "partition_column_missing",
            ["partition_by="],
        ),
        (table_metadata(write_mode="replace_table"), True, "only_last_partition", ["partition_by="]),
        ({}, True, "only_last_partition", ["partition_by="]),
        ({"branchlake/write_mode": "overwrite"}, False, "write_mode", ["overwrite"]),
        ({"partition_expr": 3}, True, "partition_expr", ["3"]),
        ({"branchlake/isolation": "strict"}, False, "isolation", ["strict", "snapshot", "serializable"]),
        ({"branchlake/columns": "frozen"}, False, "columns", ["frozen", "evolve", "freeze"]),
        ({"branchlake/layout": "day"}, False, "layout", ["day"]),
        (table_metadata(layout=["bucket(0, k)"]), False, "layout_width", ["bucket(0, k)"]),
        (table_metadata(layout=["k", f"truncate({2**31}, k)"]), False, "layout_width", ["truncate"]),
        (table_metadata(layout=["day(ts)", "day( ts )"]), False, "layout_twice", ["day(ts)"]),
        (table_metadata(write_mode="upsert", keys=["k", "k"]), False, "keys_twice", ["'k'"]),
        (table_metadata(write_mode="upsert", keys=[None]), False, "keys", ["None"]),
        (table_metadata(partition_by=" "), True, "partition_expr", ["partition_by="]),
        (table_metadata(partition_by={"day": ""}), True, "partition_expr", ["partition_by="]),
        (table_metadata(layout=["days(at)"]), False, "layout_transform", ["days(at)"]),
        (table_metadata(layout=["bucket(-1, k)"]), False, "layout_transform", ["bucket(-1, k)"]),
        (table_metadata(layout=["bucket(k, 16)"]), False, "layout_transform", ["bucket(k, 16)"]),
        ({"branchlake/require_checks": "no"}, False, "require_checks", ["'no'"]),
        (table_metadata(preview_rows=-1), False, "preview_rows", ["-1"]),
        ({"branchlake/preview_rows": "all"}, False, "preview_rows", ["'all'"]),
        ({"branchlake/preview_rows": 2.7}, False, "preview_rows", ["2.7"]),
        ({"branchlake/preview_rows": "3"}, False, "preview_rows", ["'3'"]),
        ({"branchlake/preview_rows": True}, False, "preview_rows", ["True"]),
        ({"branchlake/keys": "id"}, False, "keys", ["'id'"]),
        ({"branchlake/keys": dg.MetadataValue.text("id")}, False, "keys", ["'id'"]),
        ({"branchlake/keys": 3}, False, "keys", ["3"]),
        ({"branchlake/layout": 3}, False, "layout", ["3"]),
        (table_metadata(partition_by={"d": None}), True, "partition_expr", ["None"]),  # type: ignore[dict-item]
        (table_metadata(layout=[""]), False, "layout_column", ["''"]),
        (table_metadata(layout=["year( )"]), False, "layout_column", ["year( )"]),
        (table_metadata(layout=["bucket(16, )"]), False, "layout_column", ["bucket(16, )"]),
        ({"branchlake/properties": ["x"]}, False, "properties", ["x"]),
        (
            table_metadata(properties={"write.parquet.compression-codec": "zstandard"}),
            False,
            "codec",
            ["zstandard", "zstd"],
        ),
    ],
)
def test_contradictions_name_the_table(
    metadata: dict[str, object], partitioned: bool, reason: str, names: list[str]
) -> None:
    with raising(ConfigurationError, *names, table="a.b", reason=reason):
        spec(metadata, partitioned=partitioned)


def test_a_layout_is_columns_and_transforms() -> None:
    found = spec(table_metadata(layout=["k", "day(ts)", "bucket(16, k)", "truncate( 4 ,k )", "odd (name)"]))
    assert [(one.column, one.transform) for one in found.layout] == [
        ("k", None),
        ("ts", "day"),
        ("k", "bucket[16]"),
        ("k", "truncate[4]"),
        ("odd (name)", None),
    ]
    days = dg.DailyPartitionsDefinition(start_date="2026-08-08")
    made = build_partition_spec(days, {"": "ts"}, SCHEMA, table_name="t", layout=found.layout[2:4])
    assert [str(one.transform) for one in made.fields] == ["day", "bucket[16]", "truncate[4]"]
    assert [one.name for one in made.fields] == ["ts_day", "k_bucket", "k_trunc"]
    for wrong, reason, column in (
        (["day(k)"], "layout_type", "k"),
        (["nobody"], "column_missing", "nobody"),
        (["nope(k)"], "column_missing", "nope(k)"),
    ):
        layout = spec(table_metadata(layout=wrong)).layout
        with raising(SchemaMismatch, table="t", reason=reason, subject=column):
            build_partition_spec(None, {}, SCHEMA, table_name="t", layout=layout)


def test_a_layout_does_not_repeat_the_partitions_of_the_asset() -> None:
    days = dg.DailyPartitionsDefinition(start_date="2026-08-08")
    for wrong, columns in ((["day(ts)"], {"": "ts"}), (["k"], {"one": "k"})):
        layout = spec(table_metadata(layout=wrong)).layout
        definition = days if "" in columns else dg.MultiPartitionsDefinition({"one": PARTS, "two": days})
        with raising(SchemaMismatch, table="t", reason="layout_twice"):
            build_partition_spec(definition, columns, SCHEMA, table_name="t", layout=layout)


def test_two_widths_of_one_column_have_names_of_their_own() -> None:
    layout = spec(table_metadata(layout=["bucket(16, k)", "bucket(8, k)"])).layout
    made = build_partition_spec(None, {}, SCHEMA, table_name="t", layout=layout)
    assert [one.name for one in made.fields] == ["k_bucket", "k_bucket_"]


PARTS = dg.StaticPartitionsDefinition(["a", "b"])
SCHEMA = build_iceberg_schema(
    pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("day", pa.date32()), ("k", pa.string())]),
    table_name="t",
)


def cron(schedule: str, timezone: str = "UTC") -> dg.TimeWindowPartitionsDefinition:
    return dg.TimeWindowPartitionsDefinition(
        start=datetime(2026, 8, 8), fmt="%Y-%m-%d-%H:%M", cron_schedule=schedule, timezone=timezone
    )


@pytest.mark.parametrize(
    ("definition", "column", "transform"),
    [
        (dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00"), "ts", HourTransform),
        (dg.DailyPartitionsDefinition(start_date="2026-08-08"), "ts", DayTransform),
        (
            dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Europe/Berlin"),
            "ts",
            HourTransform,
        ),
        (dg.MonthlyPartitionsDefinition(start_date="2026-08-01"), "ts", DayTransform),
        (dg.DailyPartitionsDefinition(start_date="2026-08-08"), "day", IdentityTransform),
        (dg.StaticPartitionsDefinition(["x"]), "k", IdentityTransform),
        # A day that begins at three is no union of UTC's days.
        (dg.DailyPartitionsDefinition(start_date="2026-08-08", hour_offset=3), "ts", HourTransform),
        (cron("0 0 * * 1-5"), "ts", DayTransform),
        (cron("@daily"), "ts", DayTransform),
        (cron("0 5 * * *", "Etc/GMT-5"), "ts", DayTransform),
        (cron("0 */6 * * *"), "ts", HourTransform),
        # A partition for each distinct moment would be a file for each row.
        (cron("*/15 * * * *"), "ts", HourTransform),
        (dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00", minute_offset=10), "ts", HourTransform),
        (
            dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Asia/Kolkata"),
            "ts",
            HourTransform,
        ),
        (
            dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Europe/London"),
            "ts",
            HourTransform,
        ),
    ],
)
def test_the_layout_follows_the_windows(
    definition: dg.PartitionsDefinition[str], column: str, transform: type
) -> None:
    found = build_partition_spec(definition, {"": column}, SCHEMA, table_name="t")
    assert [type(field.transform) for field in found.fields] == [transform]


@pytest.mark.parametrize(
    ("definition", "key", "column", "whole"),
    [
        (dg.HourlyPartitionsDefinition(start_date="2026-08-08-00:00"), "2026-08-08-03:00", "ts", True),
        (dg.DailyPartitionsDefinition(start_date="2026-08-08"), "2026-08-09", "ts", True),
        (dg.DailyPartitionsDefinition(start_date="2026-08-08", hour_offset=3), "2026-08-09", "ts", True),
        (
            dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Europe/Berlin"),
            "2026-10-25",
            "ts",
            True,
        ),
        (
            dg.DailyPartitionsDefinition(start_date="2026-08-08", timezone="Asia/Kolkata"),
            "2026-08-09",
            "ts",
            False,
        ),
        (
            dg.WeeklyPartitionsDefinition(start_date="2026-08-08", timezone="Asia/Kolkata"),
            "2026-08-09",
            "day",
            True,
        ),
        (cron("*/15 * * * *"), "2026-08-08-03:15", "ts", False),
        (dg.StaticPartitionsDefinition(["x"]), "x", "k", True),
    ],
)
def test_where_windows_begin_on_hours_every_partition_is_a_union_of_iceberg_partitions(
    definition: dg.PartitionsDefinition[str], key: str, column: str, whole: bool
) -> None:
    layout = build_partition_spec(definition, {"": column}, SCHEMA, table_name="t")
    selection = select_partitions([key], definition, {"": column}, schema=SCHEMA, table_name="t")
    assert selects_whole_files(selection, SCHEMA, {0: layout}) is whole
    assert not selects_whole_files(selection, SCHEMA, {0: layout, 1: PartitionSpec()})


def test_a_missing_partition_column_is_named() -> None:
    with raising(SchemaMismatch, table="t", reason="column_missing", subject="nowhere"):
        build_partition_spec(dg.StaticPartitionsDefinition(["x"]), {"": "nowhere"}, SCHEMA, table_name="t")


def test_types_the_lake_lacks_are_widened() -> None:
    given = pa.schema(
        [
            pa.field("a", pa.timestamp("ns", tz="Europe/Berlin"), nullable=False),
            pa.field("b", pa.large_string()),
            pa.field("c", pa.dictionary(pa.int8(), pa.string())),
            pa.field("d", pa.uint32()),
            pa.field("e", pa.int8()),
            pa.field("f", pa.list_(pa.large_string())),
        ]
    )
    assert [(field.type, field.nullable) for field in stored_schema(given, table_name="t")] == [
        (pa.timestamp("us", tz="UTC"), True),
        (pa.string(), True),
        (pa.string(), True),
        (pa.int64(), True),
        (pa.int32(), True),
        (pa.list_(pa.field("element", pa.string())), True),
    ]


@pytest.mark.parametrize("file_format", ["orc", "avro", "ORC"])
def test_data_files_of_another_format_than_parquet_are_refused(file_format: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        spec(table_metadata(properties={"write.format.default": file_format}))
    assert raised.value.table == "a.b"
    with pytest.raises(ConfigurationError) as raised:
        require_parquet({"write.format.default": file_format}, table_name="c.d")
    assert raised.value.table == "c.d"


@pytest.mark.parametrize("properties", [{}, {"write.format.default": "PARQUET"}])
def test_parquet_is_what_tables_have(properties: dict[str, str]) -> None:
    require_parquet(properties, table_name="c.d")


@pytest.mark.parametrize("declaration", ["city", " city", "city ", "\tcity\n"])
def test_spaces_around_a_column_of_the_layout_are_ignored(declaration: str) -> None:
    assert LayoutField.from_declaration(declaration) == LayoutField("city")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keys": "id"}, "not_a_list"),
        ({"layout": "day(at)"}, "not_a_list"),
        ({"partition_by": ["day"]}, "not_a_mapping"),
        ({"partition_by": ["ab"]}, "not_a_mapping"),
        ({"keys": 3}, "not_a_list"),
        ({"keys": b"id"}, "not_a_list"),
        ({"properties": ["x"]}, "not_a_mapping"),
    ],
)
def test_a_text_is_not_taken_for_a_list(options: dict[str, object], reason: str) -> None:
    with raising(ConfigurationError, reason=reason, subject=next(iter(options))):
        table_metadata(**options)


def test_an_option_without_entries_is_not_declared() -> None:
    assert table_metadata(keys=None, layout=None) == table_metadata()
    assert table_metadata(keys=iter(()), layout=()) == table_metadata()


def test_an_iterator_is_read_once() -> None:
    lists = table_metadata(keys=["a", "b"], layout=["a", "day(at)"])
    assert table_metadata(keys=iter("ab"), layout=map(str, ["a", "day(at)"])) == lists
    assert spec({"branchlake/keys": np.array(["a", "b"])}).keys == ("a", "b")


@pytest.mark.parametrize("rows", [2, np.int64(2), dg.MetadataValue.int(2)])
def test_the_rows_of_a_preview_may_be_any_whole_number(rows: object) -> None:
    metadata = {"branchlake/preview_rows": rows}
    assert spec(metadata).write_mode == "replace_table"
    assert parse_preview_rows(metadata, 5, "a.b") == 2
    assert parse_preview_rows({}, 5, "a.b") == 5
