"""Backups and restores of the folders of a stopped lake, without a server."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from branchlake_dagster.backup import lake_backup
from branchlake_dagster.backup.backup_record import Backup, list_backups
from branchlake_dagster.backup.errors import BackupDamaged, BackupFailed, NotBackedUpHere, RestoreRefused
from branchlake_dagster.backup.lake_backup import LakeBackup, load_backup
from branchlake_dagster.backup.lake_folders import list_lake_folders
from branchlake_dagster.backup.lake_restore import RestoredLake, restore_lake
from branchlake_dagster.backup.verification import VerifiedTables
from branchlake_dagster.cli.main import main
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising

START = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)


@dataclass
class StoppedLake:
    """A lake whose Nessie has never run: its folders have one file each."""

    settings: Settings
    home: Path

    @property
    def root(self) -> Path:
        return self.settings.state_dir

    def back_up(self, folder: Path, minute: int, *, verify: bool = False, keep: int | None = None) -> Backup:
        """Back the lake up so many minutes after `START`."""
        saver = LakeBackup(self.settings, self.home, now=lambda: START + timedelta(minutes=minute))
        return saver.make(folder, verify=verify, keep=keep)

    def restore(self, folder: Path) -> RestoredLake:
        backup = load_backup(folder, self.root)
        return restore_lake(backup, self.settings, self.home, replace=True, now=lambda: START)


def make_lake(root: Path, **settings: object) -> StoppedLake:
    lake = StoppedLake(Settings(state_dir=root, session_kind="classic", **settings), root / "dagster")
    for path in (root / "nessie" / "CURRENT", root / "warehouse" / "data", lake.home / "dagster.yaml"):
        path.parent.mkdir(parents=True)
        path.write_text("telemetry:\n  enabled: false\n")
    (root / "run").mkdir(mode=0o700)
    (root / "run" / "lock").touch()
    return lake


@pytest.fixture
def lake(tmp_path: Path) -> StoppedLake:
    return make_lake(tmp_path / "lake")


def read_tree(folder: Path) -> dict[str, bytes | None]:
    """The files below a folder with their contents, and the folders with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def verifying(
    monkeypatch: pytest.MonkeyPatch, *, inside: tuple[str, ...] = (), outside: tuple[str, ...] = ()
) -> None:
    """From now on each verification has this result."""
    result = VerifiedTables("c0ffee", len(inside), inside, outside)
    monkeypatch.setattr(lake_backup, "verify_backup", lambda *_, **__: result)


# -- several lakes in one folder -----------------------------------------------------------------------


def test_lakes_in_one_folder_do_not_delete_or_restore_each_others_backups(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "backups", make_lake(tmp_path / "other")
    verifying(monkeypatch)
    shutil.copystat(lake.root / "warehouse" / "data", other.root / "warehouse" / "data")
    lake.back_up(folder, 0)
    others = other.back_up(folder, 1)
    assert [part.linked_files for part in others.record.parts] == [0, 0, 0]
    second = lake.back_up(folder, 2, verify=True, keep=1)
    assert {part.name: part.linked_files for part in second.record.parts}["warehouse"] == 1
    assert list_backups(folder) == [others.folder, second.folder]
    newest = other.back_up(folder, 3)
    assert load_backup(folder, lake.root) == second
    assert load_backup(folder, other.root) == newest
    assert load_backup(others.folder, lake.root) == others  # named, so the restore judges its place
    with raising(RestoreRefused, str(other.root), reason="other_lake"):
        load_backup(folder, tmp_path / "third")


def test_lakes_in_one_folder_may_have_different_clocks(lake: StoppedLake, tmp_path: Path) -> None:
    folder, other = tmp_path / "backups", make_lake(tmp_path / "other")
    other.back_up(folder, 5)
    first = lake.back_up(folder, 4)
    with raising(BackupFailed, reason="clock"):
        lake.back_up(folder, 4)
    with raising(BackupFailed, reason="clock"):
        lake.back_up(folder, 5)  # the name is taken
    assert load_backup(folder, lake.root) == first


def test_a_newer_backup_without_a_readable_record_is_not_passed_over(
    lake: StoppedLake, tmp_path: Path
) -> None:
    first, second = lake.back_up(tmp_path / "backups", 0), lake.back_up(tmp_path / "backups", 1)
    (second.folder / "backup.json").write_text("{}")
    with raising(BackupDamaged, reason="no_record"):
        load_backup(tmp_path / "backups", lake.root)
    assert load_backup(first.folder, lake.root) == first


def test_a_backup_is_neither_made_nor_looked_for_in_another_backup(lake: StoppedLake, tmp_path: Path) -> None:
    first = lake.back_up(tmp_path / "backups", 0)
    for folder in (first.folder, first.folder / "warehouse" / "new"):
        with raising(BackupFailed, str(folder), reason="inside_backup", subject=str(folder)):
            lake.back_up(folder, 1)
    shutil.copytree(lake.back_up(tmp_path / "backups", 1).folder, first.folder / "2026-11-01T13-00-00Z")
    assert load_backup(first.folder, lake.root) == first


@pytest.mark.parametrize("words", [["backup", "", "--no-verify"], ["restore", ""]])
def test_an_empty_folder_name_is_refused(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """A variable without a value is not the present folder."""
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lake.root))
    monkeypatch.chdir(tmp_path)
    before = read_tree(tmp_path)
    assert CliRunner().invoke(main, words).exit_code == 2
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize("name", ["dagster", "landing"])
def test_a_named_folder_that_does_not_exist_is_not_left_out(tmp_path: Path, name: str) -> None:
    missing = tmp_path / "typo"
    lake = make_lake(tmp_path / "lake", **({"landing": missing} if name == "landing" else {}))
    home = missing if name == "dagster" else lake.home
    with raising(BackupFailed, str(missing), reason="folder_missing", subject=str(missing)):
        LakeBackup(lake.settings, home).make(tmp_path / "backups", verify=False)
    assert not (tmp_path / "backups").exists()


def test_a_folder_that_is_no_longer_named_is_reported(lake: StoppedLake, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(lake.home, home)
    said: list[str] = []
    for number, each in enumerate((home, home, lake.home)):
        moment = START + timedelta(minutes=number)
        saver = LakeBackup(lake.settings, each, say=said.append, now=lambda moment=moment: moment)
        said.clear()
        saver.make(tmp_path / "backups", verify=False)
        assert any(str(home) in line for line in said) == (each != home)


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("name", ["dagster", "warehouse", "landing"])
def test_a_folder_that_is_gone_since_the_last_backup_is_not_left_out(
    lake: StoppedLake, tmp_path: Path, name: str, is_empty: bool
) -> None:
    """The mount point of a disk that is not mounted is an empty folder."""
    (lake.root / "landing").mkdir()
    (lake.root / "landing" / "records").touch()
    first, gone = lake.back_up(tmp_path / "backups", 0), lake.root / name
    shutil.rmtree(gone)
    if is_empty:
        gone.mkdir()
    with raising(BackupFailed, str(gone), reason="folder_gone", subject=str(gone)):
        lake.back_up(tmp_path / "backups", 1)
    assert list_backups(tmp_path / "backups") == [first.folder]
    gone.mkdir(exist_ok=True)
    (gone / "on-purpose").touch()
    lake.back_up(tmp_path / "backups", 2)


# -- tables outside the warehouse ----------------------------------------------------------------------


def test_a_backup_with_a_table_that_is_now_outside_is_kept(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "backups"
    verifying(monkeypatch, inside=("a", "b"))
    first = lake.back_up(folder, 0, verify=True, keep=1)
    verifying(monkeypatch, inside=("a",), outside=("b",))
    second = lake.back_up(folder, 1, verify=True, keep=1)
    assert load_backup(folder, lake.root).record.outside == ("b",)
    third = lake.back_up(folder, 2, verify=True, keep=1)
    assert list_backups(folder) == [first.folder, third.folder]  # only the second had not more than the third
    assert not second.folder.exists()
    verifying(monkeypatch, inside=("a", "b"))
    fourth = lake.back_up(folder, 3, verify=True, keep=1)
    assert list_backups(folder) == [fourth.folder]


def test_the_path_of_the_warehouse_is_taken_literally(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, warehouse="file:///srv/a%20b")
    assert list_lake_folders(settings, tmp_path / "dagster")[-1].path == Path("/srv/a%20b")


def test_landing_files_are_copied_after_the_tables_that_were_ingested_from_them(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    settings.landing_folder.mkdir(parents=True)
    names = [folder.name for folder in list_lake_folders(settings, tmp_path / "dagster")]
    assert names == ["dagster", "nessie", "landing", "warehouse"]


# -- failed backups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full"), BackupDamaged("damaged", hint="none")]
)
def test_a_failed_backup_leaves_nothing(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert len(list(folder.iterdir())) == 2  # the lock and the copies
        raise error

    folder = tmp_path / "backups"
    (lake.root / "warehouse" / "fixed").mkdir(mode=0o500)
    monkeypatch.setattr(lake_backup, "verify_backup", fail)
    with pytest.raises(type(error)):
        lake.back_up(folder, 0, verify=True)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_leftovers_of_killed_backups_are_deleted(lake: StoppedLake, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    for name in ("2026-10-01T00-00-00Z.partial", "2026-10-01T00-00-00Z.verification", "mine.partial"):
        (folder / name / "run").mkdir(parents=True)
    backup = lake.back_up(folder, 0)
    assert {path.name for path in folder.iterdir()} == {".lock", backup.folder.name, "mine.partial"}


def test_a_backup_whose_deletion_was_interrupted_is_not_restored(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "backups"
    verifying(monkeypatch)
    first = lake.back_up(folder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(lake_backup, "remove_folder", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lake.back_up(folder, 1, verify=True, keep=1)
    assert first.folder not in list_backups(folder)
    third = lake.back_up(folder, 2, verify=True, keep=1)
    assert {path.name for path in folder.iterdir()} == {".lock", third.folder.name}


def test_a_damaged_copy_of_the_previous_backup_is_not_linked_again(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (lake.root / "warehouse" / "data").read_text()
    copy = lake.back_up(tmp_path / "backups", 0).folder / "warehouse" / "data"
    status = copy.stat()
    copy.write_text(content.upper())  # of the same length, as after a fault of the disk
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))

    def verify(folder: Path, *_: object, **__: object) -> VerifiedTables:
        if (folder / "warehouse" / "data").read_text() != content:
            raise BackupDamaged("damaged", reason="table_unreadable", table="shop.t")
        return VerifiedTables("c0ffee", 1, ("shop.t",), ())

    monkeypatch.setattr(lake_backup, "verify_backup", verify)
    second = lake.back_up(tmp_path / "backups", 1, verify=True)
    assert (second.folder / "warehouse" / "data").read_text() == content
    assert sum(part.linked_files for part in second.record.parts) == 0
    third = lake.back_up(tmp_path / "backups", 2, verify=True)
    assert sum(part.linked_files for part in third.record.parts) > 0
    # A file of the lake itself that is damaged is no reason to try for ever.
    (lake.root / "warehouse" / "data").write_text("lost")
    with raising(BackupDamaged, reason="table_unreadable"):
        lake.back_up(tmp_path / "backups", 3, verify=True)
    assert len(list_backups(tmp_path / "backups")) == 3


# -- restores ------------------------------------------------------------------------------------------


def test_folders_come_back_with_their_permissions(lake: StoppedLake, tmp_path: Path) -> None:
    empty = lake.root / "warehouse" / "empty"
    empty.mkdir()
    modes = {empty: 0o555, lake.root / "warehouse": 0o2775, lake.root / "nessie": 0o700}
    for path, mode in modes.items():
        path.chmod(mode)
    backup = lake.back_up(tmp_path / "backups", 0)
    assert read_mode(backup.folder) == 0o700
    lake.restore(tmp_path / "backups")
    assert {path: read_mode(path) for path in modes} == modes


def test_a_folder_behind_a_link_is_restored_behind_the_link(lake: StoppedLake, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (lake.root / "warehouse").rename(disk)
    (lake.root / "warehouse").symlink_to(disk)
    lake.back_up(tmp_path / "backups", 0)
    (disk / "data").write_text("changed")
    restored = lake.restore(tmp_path / "backups")
    assert (lake.root / "warehouse").is_symlink()
    assert (disk / "data").read_text() != "changed"
    assert [(path / "data").read_text() for path in restored.moved if path.parent == tmp_path] == ["changed"]


def test_folders_that_contain_each_other_are_refused(lake: StoppedLake, tmp_path: Path) -> None:
    with raising(NotBackedUpHere, reason="nested"):
        LakeBackup(lake.settings, tmp_path).make(tmp_path.parent / "backups", verify=False)
    with raising(NotBackedUpHere, reason="nested"):
        LakeBackup(lake.settings, lake.root / "warehouse").make(tmp_path / "backups", verify=False)
    landing = lake.root / "landing"
    landing.mkdir()
    backup = lake.back_up(tmp_path / "backups", 0)
    landing.rmdir()
    landing.symlink_to(lake.root / "warehouse" / "landing")
    before = read_tree(lake.root)
    with raising(RestoreRefused, reason="nested"):
        restore_lake(backup, lake.settings, lake.home, replace=True)
    assert read_tree(lake.root) == before


def test_a_mount_point_is_not_restored(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.back_up(tmp_path / "backups", 0)
    before = read_tree(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == lake.root / "warehouse")
    with raising(RestoreRefused, str(lake.root / "warehouse"), reason="mount_point"):
        lake.restore(tmp_path / "backups")
    assert read_tree(tmp_path) == before


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", landing=tmp_path / "disk" / "landing")
    (tmp_path / "disk" / "landing").mkdir(parents=True)
    lake.back_up(tmp_path / "backups", 0)
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").touch(mode=0o600)  # a file: nobody, not even root, can create a folder in it
    before = read_tree(tmp_path)
    with raising(RestoreRefused, str(tmp_path / "disk"), reason="not_writable"):
        lake.restore(tmp_path / "backups")
    assert read_tree(tmp_path) == before


def break_rename(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> Callable[[], int]:
    """Fail the rename with this number, and return a function that counts all renames."""
    original_rename = Path.rename
    renames: list[Path] = []

    def rename(path: Path, target: Path) -> Path:
        renames.append(path)
        if len(renames) == number:
            raise error
        return original_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    return lambda: len(renames)


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_a_failed_restore_changes_nothing(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    lake.back_up(tmp_path / "backups", 0)
    (lake.root / "warehouse" / "data").write_text("newer")
    before = read_tree(tmp_path)
    with monkeypatch.context() as patch:
        count_renames = break_rename(patch, number, error)
        with pytest.raises(type(error)):
            lake.restore(tmp_path / "backups")
        assert count_renames() >= number
    assert read_tree(tmp_path) == before
    lake.restore(tmp_path / "backups")
    assert (lake.root / "warehouse" / "data").read_text() != "newer"


def test_a_full_disk_stops_a_restore_before_it_changes_the_lake(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    lake.back_up(tmp_path / "backups", 0)
    before = read_tree(tmp_path)
    monkeypatch.setattr(shutil, "copy2", fill_disk)
    with raising(OSError, errno=errno.ENOSPC):
        lake.restore(tmp_path / "backups")
    assert read_tree(tmp_path) == before


def test_landing_files_are_restored_only_to_the_folder_that_the_lake_uses(tmp_path: Path) -> None:
    """Also on another machine, which has no landing folder yet."""
    elsewhere = tmp_path / "disk" / "landing"
    elsewhere.mkdir(parents=True)
    backup = make_lake(tmp_path / "lake", landing=elsewhere).back_up(tmp_path / "backups", 0)
    elsewhere.rmdir()
    settings = Settings(state_dir=tmp_path / "lake", session_kind="classic")
    before = read_tree(tmp_path)
    with raising(RestoreRefused, str(elsewhere), reason="other_place", subject=str(settings.landing_folder)):
        restore_lake(backup, settings, settings.state_dir / "dagster", replace=True)
    assert read_tree(tmp_path) == before


def test_an_unknown_folder_is_not_restored(lake: StoppedLake, tmp_path: Path) -> None:
    backup = lake.back_up(tmp_path / "backups", 0)
    record = json.loads((backup.folder / "backup.json").read_text())
    record["parts"].append({**record["parts"][0], "name": "more", "source": str(tmp_path / "more")})
    (backup.folder / "backup.json").write_text(json.dumps(record))
    (backup.folder / "more").mkdir()
    before = read_tree(tmp_path)
    with raising(RestoreRefused, reason="unknown_part", subject="more"):
        lake.restore(tmp_path / "backups")
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_backup_that_was_copied_in_part_is_not_restored(
    lake: StoppedLake, tmp_path: Path, damage: str
) -> None:
    backup = lake.back_up(tmp_path / "backups", 0)
    (backup.folder / "dagster" / "of-a-reader.db-shm").write_text("")  # more files do no harm
    lake.restore(tmp_path / "backups")
    copy = backup.folder / "warehouse" / "data"
    copy.unlink() if damage == "missing" else copy.write_bytes(copy.read_bytes()[:-1])
    before = read_tree(tmp_path)
    with raising(BackupDamaged, str(backup.folder), reason="files_missing", subject="warehouse"):
        lake.restore(tmp_path / "backups")
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize("damage", ["dagster.yaml", "history/runs.db"])
def test_a_damaged_dagster_home_is_restored(
    lake: StoppedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lake.root))
    monkeypatch.setenv("DAGSTER_HOME", str(lake.home))
    lake.back_up(tmp_path / "backups", 0)
    before = read_tree(lake.home)
    (lake.home / damage).parent.mkdir(exist_ok=True)
    (lake.home / damage).write_text("{ [ this is neither YAML nor a database" * 100)
    done = CliRunner().invoke(main, ["restore", str(tmp_path / "backups"), "--replace"])
    assert done.exit_code == 0, done.output
    assert read_tree(lake.home) == before
