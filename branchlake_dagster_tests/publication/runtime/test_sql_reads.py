"""Reads by SQL and through the catalogue are in a serializable run's read set, on the real stack."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr as pyspark_expr

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project

pytestmark = pytest.mark.spark

STRICT = table_metadata(isolation="serializable", require_checks=False)
LOOSE = table_metadata(require_checks=False)


def by_sql(spark: SparkSession, table: str) -> Any:
    return spark.sql(f"SELECT max(n) AS n FROM nessie.{table}").collect()[0].n


def seeded(namespace: str, *names: str) -> list[dg.AssetsDefinition]:
    """Tables of one row, n = 0, by assets of other names that write them by SQL."""

    def seed(name: str) -> dg.AssetsDefinition:
        @dg.asset(key=[namespace, name], metadata=LOOSE)
        def made() -> pl.DataFrame:
            return pl.DataFrame({"n": [0]})

        return made

    return [seed(name) for name in names]


def seed(lake: Lakehouse, namespace: str, *names: str) -> None:
    """Tables of one row, n = 0, that somebody outside branchlake has made."""
    catalog = lake.catalog()
    catalog.create_namespace(namespace)
    row = pa.table({"n": pa.array([0], pa.int64())})
    for name in names:
        catalog.create_table((namespace, name), row.schema).append(row)


def settled(p: Project, run_id: str) -> RunState:
    return p.settle(run_id).state


def noted(p: Project, run_id: str, name: str = EventMetadata.READ_TABLES) -> list[str]:
    """What the run's engine events list, sorted."""
    found: list[str] = []
    for record in p.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        data: Any = record.dagster_event.event_specific_data
        if name in data.metadata:
            found += json.loads(data.metadata[name].value)
    return sorted(found)


def skew(lakehouse: Lakehouse, namespace: str, metadata: Any, read: str) -> list[RunState]:
    """Two runs, each of which reads what the other writes: of both, one must come first."""

    def other(name: str, of: str) -> dg.AssetsDefinition:
        @dg.asset(key=[namespace, name], metadata=metadata)
        def made(lakehouse: LakehouseResource, spark: BranchSparkResource) -> pl.DataFrame:
            if read == "sql":
                n = by_sql(spark.spark_session, f"{namespace}.{of}")
            elif read == "catalog":
                n = lakehouse.catalog().load_table((namespace, of)).scan().to_arrow()["n"][0].as_py()
            else:
                frame = spark.spark_session.table(f"nessie.{namespace}.{of}")
                n = frame.selectExpr("max(n) AS n").toPandas()["n"][0]
            return pl.DataFrame({"n": [int(n) + 1]})

        return made

    seed(lakehouse, namespace, "a", "b")
    with project(lakehouse, other("a", "b"), other("b", "a")) as p:
        runs = [p.run(dg.AssetKey([namespace, name])) for name in ("a", "b")]
        return [settled(p, run) for run in runs]


@pytest.mark.parametrize("read", ["sql", "table", "catalog"])
def test_write_skew_of_runs_that_read_by_themselves_is_refused(
    lakehouse: Lakehouse, namespace: str, read: str
) -> None:
    assert skew(lakehouse, namespace, STRICT, read) == [
        RunState.PUBLISHED,
        RunState.REFUSED,
    ]


def test_under_snapshot_isolation_it_is_allowed(lakehouse: Lakehouse, namespace: str) -> None:
    assert skew(lakehouse, namespace, LOOSE, "sql") == [
        RunState.PUBLISHED,
        RunState.PUBLISHED,
    ]


FORMS: dict[str, str] = {
    "join": "SELECT * FROM {a} JOIN {b} USING (n)",
    "subqueries": "SELECT (SELECT max(n) FROM {a}) FROM range(1) WHERE EXISTS (SELECT 1 FROM {b})",
    "with": "WITH c AS (SELECT * FROM {a}), d AS (SELECT * FROM {b}) SELECT * FROM c, d",
    "count from metadata": "SELECT count(*) FROM {a} UNION ALL SELECT count(*) FROM {b}",
    "time travel": "SELECT * FROM {a} TIMESTAMP AS OF now() UNION SELECT * FROM {b}",
    "metadata tables": "SELECT file_path FROM {a}.files UNION SELECT path FROM {b}.manifests",
    "another reference": "SELECT * FROM {b} UNION SELECT * FROM nessie.{namespace}.`{a_on_main}`",
    "insert": "INSERT INTO {sink} SELECT a.n FROM {a} a, {b} b",
    "create": "CREATE TABLE {made} AS SELECT a.n FROM {a} a, {b} b",
    "merge": "MERGE INTO {b} t USING {a} s ON t.n = s.n WHEN NOT MATCHED THEN INSERT *",
    "delete": "DELETE FROM {b} WHERE n IN (SELECT n + 7 FROM {a})",
    "cache": "CACHE TABLE cached AS SELECT a.n FROM {a} a, {b} b",
    "update": "UPDATE {b} SET n = 3 WHERE EXISTS (SELECT 1 FROM {a} WHERE n > 5)",
    "words that look like a plan": "SELECT '\n== Optimized Logical Plan ==\n' FROM {a}, {b}",
}


def frames(spark: SparkSession, a: str, b: str, form: str) -> None:
    """The same without SQL."""
    match form:
        case "view":
            spark.table(a).createOrReplaceTempView("v")
            spark.sql("CREATE TEMPORARY VIEW w AS SELECT v.n FROM v, " + b)
            spark.sql("SELECT * FROM w").collect()
        case "frame in sql":
            spark.sql(
                "SELECT * FROM {df} JOIN {other} USING (n)", df=spark.table(a), other=spark.table(b)
            ).count()
        case "arguments":
            spark.sql(f"SELECT * FROM IDENTIFIER(:t), {b}", args={"t": a}).toArrow()
        case "reader":
            spark.read.format("iceberg").load(a).union(spark.read.table(b)).isEmpty()
        case "writer":
            spark.table(a).join(spark.table(b), "n").writeTo(f"{a}_copy").create()
        case "merge":
            spark.table(a).alias("s").mergeInto(
                b, pyspark_expr(f"s.n = {b}.n")
            ).whenNotMatched().insertAll().merge()
        case "checkpoint":
            spark.table(a).join(spark.table(b), "n").localCheckpoint()
        case "namespace":
            spark.sql(f"USE {a.rpartition('.')[0]}")
            spark.sql(f"SELECT * FROM {a.rpartition('.')[2]}, {b.rpartition('.')[2]}").collect()
        case "catalog":
            spark.catalog.tableExists(a)
            spark.sql(f"DESCRIBE TABLE {b}").collect()
        case "clone":
            spark.cloneSession().sql(f"SELECT * FROM {a}, {b}").collect()
        case "iterator":
            list(spark.sql(f"SELECT * FROM {a}, {b}").toLocalIterator())


FRAMES = [
    "view",
    "frame in sql",
    "arguments",
    "reader",
    "writer",
    "merge",
    "checkpoint",
    "namespace",
    "catalog",
]
FRAMES += ["clone", "iterator"]
FORMS_PER_STEP = 5


def test_whatever_the_form_what_is_read_is_noted(lakehouse: Lakehouse, namespace: str) -> None:
    """A step reads in several forms, in each of them two tables of its own."""
    home = f"nessie.{namespace}"
    reads: list[Callable[[SparkSession, str, str], object]] = []

    def by_statement(text: str, number: int) -> None:
        def read(spark: SparkSession, a: str, b: str) -> None:
            names = {"a": a, "b": b, "sink": f"{home}.sink", "made": f"{home}.made{number}"}
            name_on_main = f"{a.rpartition('.')[2]}@main"
            spark.sql(text.format(namespace=namespace, a_on_main=name_on_main, **names)).collect()

        reads.append(read)

    def by_frames(form: str) -> None:
        reads.append(lambda spark, a, b: frames(spark, a, b, form))

    for number, text in enumerate(FORMS.values()):
        by_statement(text, number)
    for form in FRAMES:
        by_frames(form)
    pairs = [(f"a{number}", f"b{number}") for number in range(FORMS_PER_STEP)]

    def strict(
        name: str, chosen: Sequence[Callable[[SparkSession, str, str], object]]
    ) -> dg.AssetsDefinition:
        @dg.asset(key=[namespace, name], metadata=STRICT)
        def step(spark: BranchSparkResource) -> None:
            for read, (a, b) in zip(chosen, pairs, strict=False):
                read(spark.spark_session, f"{home}.{a}", f"{home}.{b}")

        return step

    parts = [reads[at : at + FORMS_PER_STEP] for at in range(0, len(reads), FORMS_PER_STEP)]
    assets = [strict(f"step{number}", part) for number, part in enumerate(parts)]
    seed(lakehouse, namespace, "sink", *(name for pair in pairs for name in pair))
    with project(lakehouse, *assets) as p:
        run_id = p.run()
        by_step: dict[str, set[str]] = {}
        for record in p.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
            data: Any = record.dagster_event.event_specific_data
            if EventMetadata.READ_TABLES in data.metadata:
                step = (record.step_key or "").removeprefix(f"{namespace}__")
                by_step.setdefault(step, set()).update(
                    json.loads(data.metadata[EventMetadata.READ_TABLES].value)
                )
        assert by_step == {
            f"step{number}": {f"{namespace}.{name}" for pair in pairs[: len(part)] for name in pair}
            for number, part in enumerate(parts)
        }
        assert noted(p, run_id, EventMetadata.UNNAMED_READS) == []


def test_what_cannot_be_known_blocks_a_serializable_asset(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], metadata=STRICT)
    def t(spark: BranchSparkResource) -> pl.DataFrame:
        spark.spark_session.sql(f"CALL nessie.system.ancestors_of('{namespace}.a')").collect()
        spark.spark_session.sql(f"BEGIN SELECT * FROM nessie.{namespace}.a; END").collect()
        return pl.DataFrame({"n": [1]})

    seed(lakehouse, namespace, "a")
    with project(lakehouse, t) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.BLOCKED
        assert outcome.codes == ("reads_unknown",)


def test_an_upsert_does_not_read_its_target_but_what_it_is_made_from(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Whether it overlaps with what others did to the target is for its keys to say."""

    @dg.asset(
        key=[namespace, "t"],
        metadata=table_metadata(
            write_mode="upsert", keys=["n"], isolation="serializable", require_checks=False
        ),
    )
    def t(spark: BranchSparkResource) -> DataFrame:
        return spark.spark_session.table(f"nessie.{namespace}.a")

    seed(lakehouse, namespace, "a")
    with project(lakehouse, t) as p:
        for _ in range(2):
            run_id = p.run()
            assert noted(p, run_id) == [f"{namespace}.a"]
            assert settled(p, run_id) is RunState.PUBLISHED


def test_a_step_that_dies_has_reported_its_reads(lakehouse: Lakehouse, namespace: str) -> None:
    """Its retry may not read it again, and has seen it all the same."""
    attempts = []

    @dg.asset(key=[namespace, "t"], metadata=STRICT, retry_policy=dg.RetryPolicy(max_retries=1))
    def t(spark: BranchSparkResource) -> pl.DataFrame:
        attempts.append(1)
        if len(attempts) == 1:
            by_sql(spark.spark_session, f"{namespace}.a")
            raise RuntimeError("once")
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, *seeded(namespace, "a")) as p:
        settled(p, p.run())
        key = dg.AssetKey([namespace, "a"])
        with project(lakehouse, t) as q:
            run_id = q.run()
            assert noted(q, run_id) == [f"{namespace}.a"]
            settled(p, p.run(key))
            assert settled(q, run_id) is RunState.REFUSED


def test_reads_in_a_thread_of_the_assets_own_are_noted(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], metadata=STRICT)
    def t(spark: BranchSparkResource) -> pl.DataFrame:
        session = spark.spark_session
        thread = threading.Thread(target=by_sql, args=(session, f"{namespace}.a"))
        thread.start()
        thread.join()
        return pl.DataFrame({"n": [1]})

    seed(lakehouse, namespace, "a")
    with project(lakehouse, t) as p:
        run_id = p.run()
        assert noted(p, run_id) == [f"{namespace}.a"]


def test_other_assets_are_not_watched(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "loose"], metadata=LOOSE)
    def loose(spark: BranchSparkResource, lakehouse: LakehouseResource) -> pl.DataFrame:
        by_sql(spark.spark_session, f"{namespace}.a")
        lakehouse.catalog().load_table((namespace, "a"))
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "strict"], metadata=STRICT)
    def strict() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    seed(lakehouse, namespace, "a")
    with project(lakehouse, loose, strict) as p:
        assert noted(p, p.run()) == []
