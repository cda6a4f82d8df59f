"""Collections of a warehouse in an S3-compatible store: lists, spellings of paths, and deletions by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import urllib3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from branchlake_dagster.garbage_collection import s3_deletion, warehouse_files
from branchlake_dagster.garbage_collection.collection_plan import ExecutedPlan
from branchlake_dagster.garbage_collection.s3_deletion import (
    BatchUnknown,
    S3BatchDeletion,
    S3Keys,
    build_body,
    can_name,
    parse_reply,
    sign_request,
)
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, CollectedLake, open_lake

pytestmark = pytest.mark.long

_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
Send = Callable[..., Any]
Wrap = Callable[[Send], Send]
_SECRET = "secret"


class StoredLake:
    """A lake whose warehouse is `s3a://lake/w`, in a store in this process."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        settings = {
            "warehouse": "s3a://lake/w",
            "s3_endpoint": endpoint,
            "s3_access_key_id": "test",
            "s3_secret_access_key": "test",
        }
        self.lake: CollectedLake = open_lake(folder, settings)
        self.lake.create()
        self.lake.table().append(pa.table({"n": [1, 2]}))
        self.folder = self.lake.table().location().removeprefix("s3a://lake/")

    def execute(self, wrap: Wrap = lambda send: send) -> ExecutedPlan:
        """Plan two days ago and execute now; `wrap` replaces what sends requests of deletions."""
        for key in stored_objects().values():
            key.last_modified = datetime.now(UTC).replace(tzinfo=None) - 20 * DAY
        self.lake.collector(ago=2 * DAY).run()
        collector = self.lake.collector()
        wrap_requests(collector._files, wrap)
        (executed,) = collector.run().executed
        return executed


def stored_objects() -> Any:
    """The objects of the bucket `lake` by key, as the store in this process has them."""
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["lake"].keys


def store(key: str) -> str:
    """Store an object, and return its key."""
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object("lake", key, b"x")
    return key


def keys_below(folder: str) -> set[str]:
    return {key for key in stored_objects() if key.startswith(f"{folder}/")}


def wrap_requests(files: WarehouseFiles, wrap: Wrap) -> None:
    """Replace the function that sends the requests of batched deletions."""
    deletion = files._batch_deletion
    assert deletion is not None
    deletion._pool.request = wrap(deletion._pool.request)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a store in this process."""
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def endpoint(server: str) -> Iterator[str]:
    """The address of the store, which has an empty bucket."""
    client = boto3.client("s3", endpoint_url=server, **_KEYS)
    client.create_bucket(Bucket="lake")
    client.close()
    yield server
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()


@pytest.fixture
def files(endpoint: str) -> WarehouseFiles:
    """The files of a warehouse that has three files."""
    for number in range(3):
        store(f"w/t/data/{number}.parquet")
    settings = {
        "s3.endpoint": endpoint,
        "s3.access-key-id": "test",
        "s3.secret-access-key": "test",
        "s3.force-virtual-addressing": "false",
    }
    return WarehouseFiles("s3://lake/w", settings)


def delete_all(files: WarehouseFiles) -> list[str]:
    """Delete the three files; return their states."""
    ((paths, _),) = files.iter_batches("s3://lake/w/t/")
    return [each.state for each in files.delete(paths)]


@pytest.mark.parametrize(
    "batch_keys",
    [20, pytest.param(s3_deletion.MAX_KEYS, marks=pytest.mark.soak)],  # the same with a thousand files
)
def test_files_are_deleted_by_batches_and_no_folder_is_left(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, batch_keys: int
) -> None:
    """A kept file is spelled in another way than the warehouse; folders of partitions become empty.

    The store does not delete one file. The run reports this file, and a later run deletes it.
    """
    assert s3_deletion.MAX_KEYS == 1_000  # more are an error
    monkeypatch.setattr(warehouse_files, "MAX_KEYS", batch_keys)
    stored = StoredLake(tmp_path, endpoint)
    spelled = f"s3://lake/{stored.folder}/data/n=1%2C2/added.parquet"
    with stored.lake.table().io.new_output(spelled).create() as stream:
        pq.write_table(pa.table({"n": [3]}), stream)
    stored.lake.table().add_files([spelled])
    kept = keys_below(stored.folder)
    data = f"{stored.folder}/data"
    strays = {store(f"{data}/day=a&b <{number % 3}>/{number}.parquet") for number in range(batch_keys + 2)}
    refused = store(f"{data}/day=c/refused.parquet")
    sizes = []

    def refuse(send: Send) -> Send:
        def send_others(method: str, url: str, *, body: bytes, **options: Any) -> Any:
            sizes.append(body.count(b"<Key>"))
            others = body.replace(f"<Object><Key>{refused}</Key></Object>".encode(), b"")
            headers = sign_request(url, others, "us-east-1", S3Keys("test", "test"), datetime.now(UTC))
            reply = send(method, url, **{**options, "body": others, "headers": headers})
            if others != body:
                error = f"<Error><Key>{refused}</Key><Code>SlowDown</Code></Error></DeleteResult>"
                reply._body = reply.data.replace(b"</DeleteResult>", error.encode())
            return reply

        return send_others

    executed = stored.execute(refuse)
    assert (executed.deleted, executed.failed, executed.state) == (len(strays), 1, "executed")
    assert sorted(sizes) == [3, batch_keys]
    (error,) = executed.errors
    assert refused in error
    assert "SlowDown" in error
    assert keys_below(stored.folder) == {*kept, refused}
    if batch_keys == s3_deletion.MAX_KEYS:  # `test_collector.py` shows it without a store
        assert stored.execute().deleted == 1
        assert keys_below(stored.folder) == kept
    assert stored.lake.rows() == [1, 2, 3]


@pytest.mark.parametrize("arrives", [False, True])
def test_a_lost_reply_counts_as_deleted_only_if_the_files_are_gone(
    files: WarehouseFiles, arrives: bool
) -> None:
    def lose(send: Send) -> Send:
        def send_without_reply(method: str, url: str, **options: Any) -> Any:
            if arrives:
                send(method, url, **options)
            raise urllib3.exceptions.ReadTimeoutError(None, url, "no reply")

        return send_without_reply

    wrap_requests(files, lose)
    assert delete_all(files) == 3 * ["deleted" if arrives else "failed"]
    assert len(keys_below("w/t")) == (0 if arrives else 3)


@pytest.mark.parametrize(("status", "state"), [(400, "deleted"), (501, "deleted"), (503, "failed")])
def test_a_store_that_refuses_batches_gets_a_request_for_each_file(
    files: WarehouseFiles, status: int, state: str
) -> None:
    """A store that is too busy does not."""
    wrap_requests(files, lambda _: lambda *_, **__: urllib3.HTTPResponse(status=status, body=b""))
    assert delete_all(files) == 3 * [state]
    assert len(keys_below("w/t") - {"w/t/data/"}) == (0 if state == "deleted" else 3)


def test_files_are_deleted_one_by_one_if_only_pyarrow_trusts_the_store(files: WarehouseFiles) -> None:
    def distrust(_: Send) -> Send:
        def refuse(*_: Any, **__: Any) -> Any:
            raise urllib3.exceptions.SSLError("unknown authority")

        return refuse

    wrap_requests(files, distrust)
    assert delete_all(files) == 3 * ["deleted"]


@pytest.mark.parametrize("token", ["", "token/+="])
def test_requests_are_signed_as_botocore_does(token: str) -> None:
    auth = pytest.importorskip("botocore.auth")  # boto3 needs it
    credentials = pytest.importorskip("botocore.credentials").Credentials("access", _SECRET, token or None)
    url, body, now = "http://127.0.0.1:9000/lake?delete=", build_body(["a b", "<&>"]), datetime.now(UTC)
    headers = sign_request(url, body, "eu-central-1", S3Keys("access", _SECRET, token), now)
    unsigned = {"content-md5": headers["content-md5"]}
    request = pytest.importorskip("botocore.awsrequest").AWSRequest("POST", url, headers=unsigned, data=body)
    request.context |= {"timestamp": headers["x-amz-date"], "payload_signing_enabled": True}
    signer = auth.S3SigV4Auth(credentials, "s3", "eu-central-1")
    signer._modify_request_before_signing(request)
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert headers["authorization"].rpartition("=")[2] == signer.signature(text, request)


@pytest.mark.parametrize(
    "content", [b"", b"<DeleteResult>", b"<Error><Code>InternalError</Code></Error>", b"<html></html>"]
)
def test_an_incomplete_reply_is_unknown(content: bytes) -> None:
    with pytest.raises(BatchUnknown):
        parse_reply(content)


def test_a_key_with_an_error_is_not_deleted() -> None:
    reply = parse_reply(
        b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Deleted><Key> a</Key></Deleted>'
        b"<Deleted><Key>b</Key></Deleted><Error><Key>b</Key></Error></DeleteResult>"
    )
    assert (reply.deleted, dict(reply.errors)) == ({" a"}, {"b": "InternalError"})


@pytest.mark.parametrize(
    ("key", "is_nameable"), [("a é\U0001f600", True), ("a\nb", False), ("\uffff", False)]
)
def test_keys_that_xml_cannot_hold_are_not_named(key: str, is_nameable: bool) -> None:
    assert can_name(key) is is_nameable


@pytest.mark.parametrize(
    ("scheme", "properties", "environment", "exists"),
    [
        ("s3", {"s3.access-key-id": "a", "s3.secret-access-key": "b"}, {}, True),
        ("s3", {}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, True),
        ("s3", {}, {}, False),
        ("s3", {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.role-arn": "r"}, {}, False),
        ("oss", {"s3.access-key-id": "a", "s3.secret-access-key": "b"}, {}, False),
        ("file", {}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, False),
    ],
)
def test_batches_need_keys(
    scheme: str, properties: dict[str, str], environment: dict[str, str], exists: bool
) -> None:
    made = S3BatchDeletion.from_properties(scheme, "lake", properties, environment)
    assert (made is not None) is exists
