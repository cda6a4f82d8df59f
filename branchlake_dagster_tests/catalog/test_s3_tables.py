"""Tables in an S3-compatible store, through PyArrow."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import ChangeLost, LossReason
from branchlake_dagster.history.manifests import OwnFilesCache
from branchlake_dagster.nessie import NessieClient

KEYS = {"s3.access-key-id": "test", "s3.secret-access-key": "test", "s3.region": "us-east-1"}


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    store = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    store.create_bucket(Bucket="lake")
    store.close()
    yield endpoint
    server.stop()


def _catalog(client: NessieClient, branch: str, endpoint: str) -> NessieCatalog:
    options = {"s3.endpoint": endpoint, "s3.force-virtual-addressing": "false", **KEYS}
    return NessieCatalog.from_client(client, branch, "s3://lake/warehouse", **options)


def test_tables_in_s3(client: NessieClient, fresh_branch: str, s3_endpoint: str) -> None:
    catalog = _catalog(client, fresh_branch, s3_endpoint)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", pa.schema([("id", pa.int64())]))
    assert table.location().startswith("s3://lake/warehouse/db/t_")
    table.append(pa.table({"id": [1, 2]}))
    table.overwrite(pa.table({"id": [3]}), "id == 1")
    loaded = catalog.load_table("db.t")
    assert sorted(loaded.scan().to_arrow()["id"].to_pylist()) == [2, 3]
    catalog.rename_table("db.t", "db.u")
    catalog.drop_table("db.u")
    # A dropped table leaves its files for other references.
    assert catalog.register_table("db.back", loaded.metadata_location).scan().to_arrow().num_rows == 2


def test_a_change_whose_manifest_is_gone_is_lost(
    client: NessieClient, fresh_branch: str, s3_endpoint: str
) -> None:
    """PyArrow's file system has errors of its own for a key that is not there."""
    catalog = _catalog(client, fresh_branch, s3_endpoint)
    catalog.create_namespace("gone")
    table = catalog.create_table("gone.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1]}))
    since = current_position(table)
    table.append(pa.table({"id": [2]}))
    snapshot = table.metadata.current_snapshot()
    assert snapshot is not None
    manifest = next(
        one for one in snapshot.manifests(table.io) if one.added_snapshot_id == snapshot.snapshot_id
    )
    table.io.delete(manifest.manifest_path)
    with pytest.raises(ChangeLost) as caught:
        capture_change(catalog.load_table("gone.t"), since, name="gone.t", cache=OwnFilesCache())
    assert caught.value.loss is LossReason.FILES_GONE
