"""Names with every character that SQL, paths or dotted names take for their own, in both engines."""

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path, quote_spark_string
from branchlake_dagster.tables.specification import format_table_name, table_identifier, table_metadata
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite.raised import raising

ODD = ["a b", "we`ird", "dots.in.it", "quo'te", 'dou"ble', "back\\slash", "Ünï {} [] $ ; -- /* x"]


def test_quoting() -> None:
    assert quote_spark_name("we`ird.x") == "`we``ird.x`"
    assert quote_spark_path(("nessie", "a", "b.c")) == "`nessie`.`a`.`b.c`"
    assert quote_spark_string("o'hare\\") == "'o\\'hare\\\\'"


def test_a_dotted_name_is_read_back() -> None:
    assert ContentKey.from_path(format_table_name(("n", "a.b`c"))) == ("n", "a.b`c")


@pytest.mark.parametrize(
    "part", ["..", ".", "", "a/b", "../x", "/", "a\0", "a\nb", "a\x1db", "a@main", "a#b", "a?b", "\x85"]
)
def test_a_key_part_that_can_name_no_table_is_refused(part: str) -> None:
    for path in ([part], ["ns", part], [part, "t"]):
        with raising(ConfigurationError, reason="key_part", subject=part):
            table_identifier(dg.AssetKey(path), "lake")


def test_two_dots_write_nothing(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "..", "..", "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, t) as p:
        before = p.branches()
        p.run(ok=False)
        p.failed_with(ConfigurationError, f"Asset '{namespace}/../../t'", "key part '..'")
        assert p.branches() == before


@pytest.mark.spark
@pytest.mark.parametrize("write_mode", ["replace_partitions", "upsert", "append"])
@pytest.mark.parametrize("engine", ["polars", "spark"])
def test_odd_names_of_tables_and_columns(
    lakehouse: Lakehouse, namespace: str, engine: str, write_mode: str
) -> None:
    key = dg.AssetKey([namespace, "dots.in.it"])
    metadata = table_metadata(
        write_mode=write_mode,
        keys=ODD if write_mode == "upsert" else (),
        partition_by="we`ird",
        require_checks=False,
    )
    kinds = dg.StaticPartitionsDefinition(ODD)

    def frame(partition: str) -> pl.DataFrame:
        return pl.DataFrame({name: [partition] for name in ODD})

    @dg.asset(key=key, partitions_def=kinds, metadata=metadata)
    def by_polars(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return frame(context.partition_key)

    @dg.asset(key=key, partitions_def=kinds, metadata=metadata)
    def by_spark(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.createDataFrame(frame(context.partition_key).to_arrow())

    seen = []
    free = table_metadata(partition_by="p")  # neither writes anything

    @dg.asset(key=[namespace, "seen"], partitions_def=kinds, ins={"t": dg.AssetIn(key)}, metadata=free)
    def seen_by_polars(t: pl.DataFrame) -> None:
        seen.append(t.rows())

    @dg.asset(key=[namespace, "sparkled"], partitions_def=kinds, ins={"t": dg.AssetIn(key)}, metadata=free)
    def seen_by_spark(t: DataFrame) -> None:
        seen.append([tuple(row) for row in t.collect()])

    with project(lakehouse, by_polars if engine == "polars" else by_spark) as p:
        for kind in ODD[1:4]:
            assert p.settle(p.run(partition=kind)).state is RunState.PUBLISHED
    with project(lakehouse, by_polars, seen_by_polars, seen_by_spark) as p:
        for reader in ("seen", "sparkled"):
            p.run(dg.AssetKey([namespace, reader]), partition=ODD[3])
    assert seen == [[(ODD[3],) * len(ODD)]] * 2
