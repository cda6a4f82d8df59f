"""Packing a stopped lake with its Dagster home into one file, and opening a copy of it anywhere.

Iceberg's metadata, manifests and the commits of Nessie hold absolute locations. In Nessie they are part of what the
hash of a commit is computed from, and these hashes are in tags, branches and Dagster's database. So locations cannot
be rewritten when the lake is unpacked, manifests or not: every hash would change. The locations must be valid on every
machine and in several checkouts at once instead. Those of an S3 warehouse are: `s3://baseline/warehouse/…` names no
machine, and the server behind it is a setting. The suite has that server (moto, inside the test's process). A folder
that is the same everywhere, such as one in `/tmp`, would be shared by concurrent sessions.

Measured with ten times as many processes at work as cores: unpacking takes 2.5 s of CPU (13 s), finding the jars 3 s,
starting the real Nessie on the unpacked store 14 s. `Settings.lake_id` depends on the warehouse alone here, so the tags
of old runs name the unpacked lake as well. What this way does not cover is a warehouse in local files.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import sqlite3
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from branchlake_dagster.settings import Settings

STORED = Path(__file__).with_name("stored.tar.xz")
EXPECTED = Path(__file__).with_name("expected.json")
BUCKET = "baseline"
"""A name of its own: servers of one process share their buckets."""
WAREHOUSE = f"s3://{BUCKET}/warehouse"
_KEY = "baseline"
_FOLDERS = ("nessie", "dagster", "landing")
"""Of the state folder. Its other folders hold processes, logs, jars and its own path."""
_OBJECTS = "objects/"
_UNNEEDED = ("-wal", "-shm", "LOG", "LOG.old", "LOCK", ".preparing")
_LEFT_OUT = {"dagster/.telemetry", "dagster/storage", "dagster/.logs_queue"}
"""Folders: what steps have printed, and what Dagster counts."""
_FOREVER_H = 24.0 * 36_500


@contextmanager
def object_store() -> Iterator[str]:
    """An empty S3 bucket in this process; the address of its server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    requests, before = logging.getLogger("werkzeug"), logging.getLogger("werkzeug").level
    requests.setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with client_of(endpoint) as client:
            client.create_bucket(Bucket=BUCKET)
            _empty(client)  # an earlier server of this process had it, too
        yield endpoint
    finally:
        server.stop()
        requests.setLevel(before)


@contextmanager
def settings_of(state_dir: Path, endpoint: str, **more: Any) -> Iterator[Settings]:
    """The settings of the lake in a state folder, and the environment from which all of this process reads them.

    Nothing that the lake keeps for a while ever ends: the fixture gets older than any grace.
    """
    given: dict[str, Any] = {
        "state_dir": state_dir,
        "warehouse": WAREHOUSE,
        "s3_endpoint": endpoint,
        "s3_access_key_id": _KEY,
        "s3_secret_access_key": _KEY,
        "discard_grace_h": _FOREVER_H,
        "orphan_max_age_h": _FOREVER_H,
        "publish_in_run": False,
        **more,
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in given.items():
            environment.setenv(f"BRANCHLAKE_{name.upper()}", str(value))
        environment.setenv("DAGSTER_HOME", str(state_dir / "dagster"))
        yield Settings()


def without_secrets(settings: Settings) -> Settings:
    """The settings as a code location stores them; the secrets come from the environment."""
    return settings.model_copy(update=dict.fromkeys(Settings.secret_names()))


def pack(state_dir: Path, endpoint: str, target: Path) -> None:
    """Write a stopped lake into one archive. What names this machine in Dagster's databases is left out."""
    found: dict[str, bytes] = {}
    for folder in _FOLDERS:
        for path in sorted((state_dir / folder).rglob("*")):
            name = path.relative_to(state_dir).as_posix()
            if path.is_dir() or name.endswith(_UNNEEDED) or any(name.startswith(one) for one in _LEFT_OUT):
                continue
            if path.suffix == ".db":
                _leave_paths_out(path, state_dir)
            found[name] = path.read_bytes()
    with client_of(endpoint) as client:
        for name in _objects(client):
            found[_OBJECTS + name] = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    named = [
        name for name, content in found.items() if any(one.encode() in content for one in _paths(state_dir))
    ]
    assert not named, named
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name, content in sorted(found.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _paths(state_dir: Path) -> list[str]:
    """Folders of this machine, the longest first."""
    folders = {
        str(Path(__file__).parents[2]),
        str(state_dir.parent),
        sys.prefix,
        sys.base_prefix,
        str(Path.home()),
    }
    return sorted((f"{one}/" for one in folders), key=len, reverse=True)


def _leave_paths_out(database: Path, state_dir: Path) -> None:
    """Shorten the paths in the stack traces that Dagster has stored."""
    with closing(sqlite3.connect(database)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [
                row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[2] == "TEXT"
            ]
            for column, folder in itertools.product(columns, _paths(state_dir)):
                connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, '')", (folder,))
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")


def unpack(state_dir: Path, endpoint: str, source: Path = STORED) -> None:
    """Make the lake again: the folders below `state_dir`, the objects on the server."""
    with tarfile.open(source) as archive, client_of(endpoint) as client:
        for member in archive:
            opened = archive.extractfile(member)
            assert opened is not None, member.name
            content = opened.read()
            if member.name.startswith(_OBJECTS):
                client.put_object(Bucket=BUCKET, Key=member.name.removeprefix(_OBJECTS), Body=content)
            else:
                path = state_dir / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    for folder, _, _ in os.walk(state_dir):
        Path(folder).chmod(0o700)


def objects(endpoint: str) -> Mapping[str, bytes]:
    """All objects of the bucket by name."""
    with client_of(endpoint) as client:
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in _objects(client)}


@contextmanager
def client_of(endpoint: str) -> Iterator[Any]:
    """A client of the object store."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=_KEY,
        aws_secret_access_key=_KEY,
        region_name="us-east-1",
    )
    try:
        yield client
    finally:
        client.close()


def _objects(client: Any) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def _empty(client: Any) -> None:
    for name in _objects(client):
        client.delete_object(Bucket=BUCKET, Key=name)
