import dagster as dg
import pyarrow as pa
import pytest
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.branching.layout import partition_spec
from branchlake_dagster.branching.schema import iceberg_schema, normalised
from branchlake_dagster.branching.tables import table_metadata, table_spec
from branchlake_dagster.lakehouse.errors import ConfigurationError


def spec(metadata: dict[str, object], *, partitioned: bool = False, path: tuple[str, ...] = ("a", "b")):
    return table_spec(dg.AssetKey(list(path)), metadata, default_namespace="lake", partitioned=partitioned)


def test_the_key_names_the_table() -> None:
    assert spec({}).identifier == ("a", "b")
    assert spec({}, path=("only",)).identifier == ("lake", "only")
    assert spec({}).spark_name == "nessie.`a`.`b`"


def test_defaults_follow_the_partitions() -> None:
    assert spec({}).write_mode == "replace_table"
    assert spec(table_metadata(partition_by="ts"), partitioned=True).write_mode == "replace_partitions"


def test_isolation_is_snapshot_unless_the_asset_asks_for_more() -> None:
    assert spec({}).isolation == "snapshot"
    assert spec(table_metadata(isolation="serializable")).isolation == "serializable"


@pytest.mark.parametrize(
    ("metadata", "partitioned", "told"),
    [
        (table_metadata(write_mode="upsert"), False, "needs keys"),
        (table_metadata(write_mode="replace_partitions"), True, "needs a partition column"),
        (table_metadata(write_mode="replace_table"), True, "only its last partition"),
        ({}, True, "only its last partition"),
        ({"branchlake/write_mode": "overwrite"}, False, "Unknown write mode"),
        ({"partition_expr": 3}, True, "partition_expr"),
        ({"branchlake/isolation": "strict"}, False, "Unknown isolation 'strict'. .*snapshot or serializable"),
    ],
)
def test_contradictions_name_the_table(metadata: dict[str, object], partitioned: bool, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        spec(metadata, partitioned=partitioned)
    assert caught.value.table == "a.b"


SCHEMA = iceberg_schema(
    pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("day", pa.date32()), ("k", pa.string())])
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
        (
            dg.TimeWindowPartitionsDefinition(
                start="2026-08-08", fmt="%Y-%m-%d", cron_schedule="*/15 * * * *"
            ),
            "ts",
            IdentityTransform,
        ),
    ],
)
def test_every_dagster_partition_is_a_union_of_iceberg_partitions(
    definition: dg.PartitionsDefinition[str], column: str, transform: type
) -> None:
    found = partition_spec(definition, {"": column}, SCHEMA, table="t")
    assert [type(field.transform) for field in found.fields] == [transform]


def test_a_missing_partition_column_is_named() -> None:
    with pytest.raises(SchemaMismatch, match="nowhere"):
        partition_spec(dg.StaticPartitionsDefinition(["x"]), {"": "nowhere"}, SCHEMA, table="t")


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
    assert [(field.type, field.nullable) for field in normalised(given)] == [
        (pa.timestamp("us", tz="UTC"), True),
        (pa.string(), True),
        (pa.string(), True),
        (pa.int64(), True),
        (pa.int32(), True),
        (pa.list_(pa.field("element", pa.string())), True),
    ]
