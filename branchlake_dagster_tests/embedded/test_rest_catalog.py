"""The embedded Nessie as an Iceberg REST catalogue of an S3 warehouse, and what reads from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import polars as pl
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from pyiceberg.catalog.rest import RestCatalog

from branchlake_dagster.embedded.rest_catalog import catalog_environment, catalog_flags
from branchlake_dagster.lakehouse.lakehouse import Lakehouse, nessie_page_url, rest_catalog_url
from branchlake_dagster.query import connect
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.lakes import copy_jar_lists

SECRET = "t0psecret"


def s3_settings(folder: Path, endpoint: str | None = None, **more: object) -> Settings:
    given = {"s3_access_key_id": "key", "s3_secret_access_key": SECRET, **more}
    return Settings(
        state_dir=folder, session_kind="classic", warehouse="s3://lake/wh", s3_endpoint=endpoint, **given
    )


# -- settings ------------------------------------------------------------------------------------------


def test_a_local_warehouse_is_not_served(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    assert (catalog_flags(settings), catalog_environment(settings)) == ({}, {})


def test_keys_are_in_the_environment_and_in_no_flag(tmp_path: Path) -> None:
    settings = s3_settings(tmp_path, "http://127.0.0.1:9000")
    flags = catalog_flags(settings)
    assert flags["nessie.catalog.warehouses.lake.location"] == "s3://lake/wh"
    assert flags["nessie.catalog.service.s3.default-options.endpoint"] == "http://127.0.0.1:9000"
    assert SECRET not in str(flags)
    assert catalog_environment(settings) == {"LAKESTORE_NAME": "key", "LAKESTORE_SECRET": SECRET}


def test_without_keys_nessie_asks_the_default_chain(tmp_path: Path) -> None:
    settings = s3_settings(tmp_path, s3_access_key_id=None, s3_secret_access_key=None)
    assert (
        catalog_flags(settings)["nessie.catalog.service.s3.default-options.auth-type"] == "APPLICATION_GLOBAL"
    )
    assert catalog_environment(settings) == {}


# -- the real server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_lake(state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    store = boto3.client("s3", endpoint_url=endpoint, **keys)
    store.create_bucket(Bucket="lake")
    store.close()
    folder = tmp_path_factory.mktemp("s3")
    copy_jar_lists(state_dir, folder)
    lake = Lakehouse(s3_settings(folder, endpoint))
    try:
        ensure_main_has_commit(lake.nessie)
        catalog = lake.catalog()
        catalog.create_namespace("shop")
        catalog.create_table("shop.prices", pa.schema([("id", pa.int64())])).append(pa.table({"id": [1, 2]}))
        yield lake
    finally:
        lake.servers.stop_all()
        server.stop()


@pytest.mark.nessie
def test_any_rest_client_reads_main_a_branch_and_a_tag(s3_lake: Lakehouse) -> None:
    nessie = s3_lake.nessie
    nessie.create_branch("run/x", from_ref="main", from_hash=nessie.reference("main").hash)
    s3_lake.catalog("run/x").load_table("shop.prices").append(pa.table({"id": [3]}))
    nessie.create_tag("discarded-x", from_ref="main", from_hash=nessie.reference("run/x").hash)
    endpoints = s3_lake.endpoints(spark=False)
    uri = rest_catalog_url(endpoints, s3_lake.settings)
    found = {}
    for ref in ("", "/run%2Fx", "/discarded-x"):
        client = RestCatalog(
            "rest",
            uri=f"{uri}{ref}",
            token=endpoints.nessie_token,
            **s3_lake.settings.file_io_properties(),
        )
        found[ref] = client.load_table("shop.prices").scan().to_arrow().num_rows
        assert client.list_tables("shop") == [("shop", "prices")]
        client.close()
    assert found == {"": 2, "/run%2Fx": 3, "/discarded-x": 3}


@pytest.mark.nessie
def test_the_settings_of_the_store_reach_duckdb_and_polars(s3_lake: Lakehouse) -> None:
    reader = connect(s3_lake.settings)
    with reader.sql("SELECT sum(id) AS total FROM shop.prices") as result:
        assert result.arrow()["total"].to_pylist() == [3]
    assert reader.polars("shop.prices").select(pl.col("id").sum()).collect(engine="streaming").item() == 3


@pytest.mark.nessie
def test_no_key_is_on_the_command_line_or_in_the_log(s3_lake: Lakehouse) -> None:
    record = s3_lake.servers.status()["nessie"]
    assert record is not None
    assert SECRET not in Path(f"/proc/{record.pid}/cmdline").read_text()
    assert SECRET not in s3_lake.servers.log_path("nessie").read_text()


def test_the_page_is_named_only_where_it_can_be_seen(s3_lake: Lakehouse, lakehouse: Lakehouse) -> None:
    endpoints = s3_lake.endpoints(spark=False)
    if endpoints.nessie_token is None:
        assert nessie_page_url(endpoints, s3_lake.settings) == endpoints.nessie_uri.removesuffix("api/v2")
    guarded = type(endpoints)(endpoints.nessie_uri, None, None, "a token")
    assert "BRANCHLAKE_GUARD_NESSIE=false" in nessie_page_url(guarded, s3_lake.settings)
    assert rest_catalog_url(lakehouse.endpoints(spark=False), lakehouse.settings) == (
        "none: Nessie serves s3:// warehouses only"
    )
