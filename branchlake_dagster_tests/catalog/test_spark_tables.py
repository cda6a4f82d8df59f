"""One table, two engines: what Spark writes PyIceberg reads and changes, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyiceberg.exceptions import NoSuchIcebergTableError
from pyspark.sql import SparkSession

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable

pytestmark = pytest.mark.spark


@pytest.fixture
def spark(lakehouse: Lakehouse, fresh_branch: str) -> Iterator[SparkSession]:
    session = lakehouse.spark_session(fresh_branch)
    yield session
    session.stop()


@pytest.fixture
def catalog(lakehouse: Lakehouse, client: NessieClient, fresh_branch: str) -> NessieCatalog:
    return NessieCatalog.from_client(client, fresh_branch, lakehouse.settings.warehouse_uri)


def ids(catalog: NessieCatalog, name: str) -> list[int]:
    return sorted(catalog.load_table(name).scan().to_arrow()["id"].to_pylist())


def content_id(client: NessieClient, catalog: NessieCatalog, *name: str) -> str | None:
    content = client.content(catalog.ref, ContentKey(name))
    assert isinstance(content, IcebergTable)
    return content.content_id


def test_a_table_of_sparks(spark: SparkSession, catalog: NessieCatalog, client: NessieClient) -> None:
    spark.sql("CREATE NAMESPACE nessie.s").collect()
    spark.sql("CREATE TABLE nessie.s.t (id bigint, p string) USING iceberg PARTITIONED BY (p)").collect()
    spark.sql("INSERT INTO nessie.s.t VALUES (1, 'a'), (2, 'b')").collect()
    before = content_id(client, catalog, "s", "t")
    table = catalog.load_table("s.t")
    table.append(pa.table({"id": [3], "p": ["c"]}))
    assert content_id(client, catalog, "s", "t") == before
    assert [row.id for row in spark.sql("SELECT id FROM nessie.s.t ORDER BY id").collect()] == [1, 2, 3]
    spark.sql("ALTER TABLE nessie.s.t ADD COLUMN z double").collect()
    spark.sql("INSERT INTO nessie.s.t VALUES (4, 'a', 0.5)").collect()
    table.refresh().overwrite(pa.table({"id": [5], "p": ["b"], "z": [1.5]}), "p == 'b'")
    assert ids(catalog, "s.t") == [1, 3, 4, 5]
    assert spark.sql("SELECT sum(z) AS z FROM nessie.s.t").collect()[0].z == 2.0
    assert catalog.list_namespaces() == [("s",)]


def test_a_table_of_branchlake(spark: SparkSession, catalog: NessieCatalog, client: NessieClient) -> None:
    catalog.create_namespace("o.deep")
    table = catalog.create_table("o.deep.t", pa.schema([("id", pa.int64())]))
    before = content_id(client, catalog, "o", "deep", "t")
    table.append(pa.table({"id": [1, 2]}))
    assert spark.sql("SELECT count(*) AS n FROM nessie.o.deep.t").collect()[0].n == 2
    spark.sql("UPDATE nessie.o.deep.t SET id = id + 10").collect()
    assert ids(catalog, "o.deep.t") == [11, 12]
    assert content_id(client, catalog, "o", "deep", "t") == before
    assert [row.tableName for row in spark.sql("SHOW TABLES IN nessie.o.deep").collect()] == ["t"]


def test_a_view_of_sparks_is_no_table(spark: SparkSession, catalog: NessieCatalog) -> None:
    spark.sql("CREATE NAMESPACE nessie.v").collect()
    spark.sql("CREATE VIEW nessie.v.v AS SELECT 1 AS x").collect()
    with pytest.raises(NoSuchIcebergTableError):
        catalog.load_table("v.v")
    assert catalog.list_tables("v") == []
