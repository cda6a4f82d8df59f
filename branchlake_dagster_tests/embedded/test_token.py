"""The embedded Nessie's token: made, asked for, and used by both engines."""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64decode, urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import requests

from branchlake_dagster.embedded import state_folder
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.conftest import LAKES
from branchlake_dagster_tests.suite.lakes import copy_jar_lists


def test_openssl_agrees_with_the_signature(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here; the server's own test decides")
    made = state_folder.create_credentials()
    signed, _, signature = made.token.rpartition(".")
    (tmp_path / "key.der").write_bytes(b64decode(made.public_key))
    (tmp_path / "signature").write_bytes(urlsafe_b64decode(signature + "=="))
    (tmp_path / "signed").write_text(signed)
    command = [openssl, "dgst", "-sha256", "-verify", "key.der", "-keyform", "DER", "-signature", "signature"]
    done = subprocess.run([*command, "signed"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Verified OK", done.stderr


@pytest.mark.long
def test_credentials_are_kept_and_printed_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "run" / "nessie.token"
    made = state_folder.ensure_credentials(path)
    assert state_folder.ensure_credentials(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.token not in repr(made)
    for damaged in ('{"token": 1, "public_key": null}', "{"):  # the last one is cut off
        path.write_text(damaged)
        assert state_folder.find_credentials(path) is None
    assert state_folder.ensure_credentials(path) != made
    assert set(json.loads(path.read_text())) == {"token", "public_key"}


@pytest.fixture(scope="module")
def guarded(state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    folder = tmp_path_factory.mktemp("guarded")
    copy_jar_lists(state_dir, folder)
    lake = Lakehouse(Settings(state_dir=folder, guard_nessie=True))
    try:
        ensure_main_has_commit(lake.nessie)
        yield lake
    finally:
        lake.servers.stop_all()


@pytest.mark.spark
def test_without_the_token_nobody_reads_or_commits(
    guarded: Lakehouse, namespace: str, pytestconfig: pytest.Config
) -> None:
    uri = guarded.endpoints(spark=False).nessie_uri
    for wrong in (
        None,
        "no.to.ken",
        state_folder.create_credentials().token,
    ):  # the last one is signed by somebody else
        with NessieClient(uri, token=wrong) as client, pytest.raises(NessieUnauthorized):
            client.reference("main")
        headers = {} if wrong is None else {"Authorization": f"Bearer {wrong}"}
        answer = requests.post(f"{uri}/trees/main/history/commit", json={}, headers=headers, timeout=9)
        assert answer.status_code == requests.codes.unauthorized

    catalog = guarded.catalog()
    catalog.create_namespace((namespace,))
    catalog.create_table((namespace, "t"), pa.schema([("n", pa.int64())])).append(pa.table({"n": [1]}))
    # The shared Spark server: each session gets the token of its own lake.
    lakes = pytestconfig.stash[LAKES]
    lakes.lend_spark(guarded.settings.state_dir)
    session = guarded.spark_session()
    session.sql(f"INSERT INTO nessie.{namespace}.t VALUES (2)")
    assert sorted(row.n for row in session.table(f"nessie.{namespace}.t").collect()) == [1, 2]
    session.stop()
    lakes.take_spark_back(guarded.settings.state_dir)

    again = Lakehouse(guarded.settings)  # another process of the same account
    assert again.nessie.reference("main").hash == guarded.nessie.reference("main").hash
    guarded.servers.stop_all()
    assert guarded.catalog().load_table((namespace, "t")).scan().to_arrow().num_rows == 2


@pytest.mark.nessie
def test_no_command_line_and_no_log_shows_the_token(guarded: Lakehouse) -> None:
    secret = guarded.endpoints(spark=False).nessie_token
    assert secret
    shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "quarkus.oidc.public-key" in shown
    assert secret not in shown
    assert secret not in guarded.servers.log_path("nessie").read_text()
