"""Backups of a real lake with writers at work, and restores from them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.backup.backup_record import list_backups
from branchlake_dagster.backup.errors import BackupDamaged, BackupFailed, NotBackedUpHere, RestoreRefused
from branchlake_dagster.backup.lake_backup import LakeBackup, load_backup
from branchlake_dagster.backup.lake_restore import restore_lake
from branchlake_dagster.catalog import recorded_repositories
from branchlake_dagster.catalog.recorded_repositories import RecordedRepository, load_repositories
from branchlake_dagster.cli.main import main
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.nessie

TABLE = ("shop", "sales")
START = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def count_rows(lake: Lakehouse) -> int:
    return len(lake.catalog("main").load_table(TABLE).scan().to_arrow())


def load_recorded(lake: Lakehouse) -> tuple[RecordedRepository, ...]:
    return load_repositories(PyArrowFileIO(), lake.settings.warehouse_uri)


def clock(first: datetime = START) -> Callable[[], datetime]:
    """Each call is a minute later."""
    times = (first + timedelta(minutes=minute) for minute in range(1000))
    return lambda: next(times)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    settings = Settings(state_dir=tmp_path_factory.mktemp("backup") / "state", session_kind="classic")
    lake = Lakehouse(settings)
    ensure_main_has_commit(lake.nessie)
    catalog = lake.catalog("main")
    catalog.create_namespace(("shop",))
    catalog.create_table(TABLE, schema=rows().schema).append(rows(1, 2))
    home = settings.state_dir / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    yield lake
    lake.servers.stop_all()


@pytest.fixture
def saver(lake: Lakehouse) -> LakeBackup:
    return LakeBackup(lake.settings, lake.settings.state_dir / "dagster", now=clock())


def test_backups_during_writes_are_consistent_and_restorable(
    lake: Lakehouse, saver: LakeBackup, tmp_path: Path
) -> None:
    folder, stop = tmp_path / "backups", threading.Event()
    written: list[int] = []
    created_at = lake.nessie.config().repository_created_at
    assert [one.created_at for one in load_recorded(lake)] == [created_at]

    def write() -> None:
        table = lake.catalog("main").load_table(TABLE)
        while not stop.is_set():
            table.append(rows(len(written)))
            written.append(len(written))

    before = count_rows(lake)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        backups = [saver.make(folder) for _ in range(2)]
    finally:
        stop.set()
        writer.join()
    assert written
    counts = [backup.record.rows for backup in backups]
    assert counts == sorted(counts)
    assert counts[0] >= before
    assert [backup.record.tables for backup in backups] == [1, 1]
    parts = {part.name: part for part in backups[-1].record.parts}
    assert parts["warehouse"].linked_files > 0
    assert parts["dagster"].linked_files == 1

    # Restored, the lake is as the verification saw it, and it can be written.
    home = lake.settings.state_dir / "dagster"
    with raising(RestoreRefused, reason="server_runs"):
        restore_lake(load_backup(folder, lake.settings.state_dir), lake.settings, home)
    lake.servers.stop_all()
    with raising(RestoreRefused, reason="lake_exists"):
        restore_lake(load_backup(folder, lake.settings.state_dir), lake.settings, home)
    restored = restore_lake(backups[0], lake.settings, home, replace=True, now=clock())
    assert len(restored.moved) == len(backups[0].record.parts)
    assert lake.nessie.reference("main").hash == restored.main_hash == backups[0].record.main_hash
    assert count_rows(lake) == counts[0]
    recorded_repositories._recorded.clear()  # as in a new process
    lake.catalog("main").load_table(TABLE).append(rows(7))
    assert count_rows(lake) == counts[0] + 1
    # After a restart and a restore, it is the same repository.
    assert lake.nessie.config().repository_created_at == created_at
    assert [one.created_at for one in load_recorded(lake)] == [created_at]
    for path in restored.moved:
        shutil.rmtree(path)


def test_a_new_repository_has_another_creation_time(lake: Lakehouse, client: NessieClient) -> None:
    assert lake.nessie.config().repository_created_at != client.config().repository_created_at


def test_a_damaged_file_is_found_and_a_table_outside_the_warehouse_is_recorded(
    lake: Lakehouse, saver: LakeBackup, tmp_path: Path
) -> None:
    saver.make(tmp_path, verify=False)
    task = next(iter(lake.catalog("main").load_table(TABLE).scan().plan_files()))
    data_file = Path(task.file.file_path.removeprefix("file://"))
    content = data_file.read_bytes()
    try:
        data_file.write_bytes(content[:-1])
        with raising(BackupDamaged, reason="table_unreadable", table="shop.sales"):
            saver.make(tmp_path, keep=1)
    finally:
        data_file.write_bytes(content)
    # Nothing old was deleted.
    assert len(list_backups(tmp_path)) == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    catalog, location = lake.catalog("main"), f"file://{tmp_path}-elsewhere"
    catalog.create_table(("shop", "far"), schema=rows().schema, location=location).append(rows(1))
    try:
        newest = saver.make(tmp_path, keep=1)
    finally:
        catalog.drop_table(("shop", "far"))
    record = newest.record
    assert (record.inside, record.outside, record.tables) == (("shop.sales",), ("shop.far",), 1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [newest.folder.name]


def test_a_backup_of_another_warehouse_than_that_of_the_tables_fails(lake: Lakehouse, tmp_path: Path) -> None:
    settings = lake.settings.model_copy(update={"warehouse": f"file://{tmp_path}/empty"})
    with raising(BackupDamaged, "BRANCHLAKE_WAREHOUSE", reason="tables_outside", table="shop.sales"):
        LakeBackup(settings, settings.state_dir / "dagster").make(tmp_path / "backups")
    assert [path.name for path in (tmp_path / "backups").iterdir()] == [".lock"]


def test_the_server_of_a_killed_verification_is_stopped_by_the_next_backup(
    lake: Lakehouse, saver: LakeBackup, tmp_path: Path
) -> None:
    code = (
        "import pathlib\n"
        "from branchlake_dagster.backup.lake_backup import LakeBackup\n"
        "from branchlake_dagster.settings import Settings\n"
        f"root = pathlib.Path({str(lake.settings.state_dir)!r})\n"
        "settings = Settings(state_dir=root, session_kind='classic')\n"
        f"LakeBackup(settings, root / 'dagster').make(pathlib.Path({str(tmp_path)!r}))\n"
    )

    def find_server() -> ProcessRecord | None:
        paths = tmp_path.glob("*.verification/run/nessie.json")
        return next(filter(None, map(ProcessRecord.load, paths)), None)

    with subprocess.Popen([sys.executable, "-c", code]) as killed:
        assert holds_within(120, lambda: find_server() is not None, every_s=0.02)
        killed.kill()
    server = find_server()
    assert server is not None
    assert server.is_alive()
    backup = saver.make(tmp_path, verify=False)
    assert not server.is_alive()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", backup.folder.name}


def test_a_restore_to_another_place_is_refused(lake: Lakehouse, saver: LakeBackup, tmp_path: Path) -> None:
    backup = saver.make(tmp_path / "backups", verify=False)
    settings = Settings(state_dir=tmp_path / "other", session_kind="classic")
    with raising(RestoreRefused, str(lake.settings.state_dir), reason="other_place"):
        restore_lake(backup, settings, tmp_path / "other" / "dagster")
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_saved_is_refused(lake: Lakehouse, tmp_path: Path) -> None:
    def make(settings: Settings, folder: Path = tmp_path / "backups") -> None:
        LakeBackup(settings, settings.state_dir / "dagster").make(folder)

    with raising(NotBackedUpHere, reason="other_nessie"):
        make(Settings(state_dir=tmp_path, nessie_uri="http://127.0.0.1:1/api/v2"))
    with raising(NotBackedUpHere, reason="other_warehouse"):
        make(Settings(state_dir=tmp_path, warehouse="s3://bucket/lake"))
    with raising(LakeNotRunning, reason="no_lake"):
        make(Settings(state_dir=tmp_path / "none"))
    with raising(BackupFailed, reason="inside_lake"):
        make(lake.settings, lake.settings.state_dir / "warehouse" / "backups")


def test_an_incomplete_backup_is_not_restored(saver: LakeBackup, tmp_path: Path) -> None:
    backup = saver.make(tmp_path, verify=False)
    shutil.rmtree(backup.folder / "warehouse")
    with raising(BackupDamaged, reason="part_missing"):
        load_backup(backup.folder, Path(backup.record.state_dir))
    (backup.folder / "backup.json").write_text("{}")
    with raising(BackupDamaged, reason="no_record"):
        load_backup(backup.folder, Path(backup.record.state_dir))


def test_the_commands(lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lake.settings.state_dir))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    made = CliRunner().invoke(main, ["backup", str(tmp_path), "--json"], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    assert report["record"]["tables"] == 1
    refused = CliRunner().invoke(main, ["restore", str(tmp_path)])
    assert refused.exit_code == 1
    lake.servers.stop_all()
    done = CliRunner().invoke(main, ["restore", str(tmp_path), "--replace"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert lake.nessie.reference("main").hash == report["record"]["main_hash"]
