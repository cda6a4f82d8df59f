"""`branchlake fetch --prepare`: when the servers are rehearsed, and what happens where that is not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from branchlake_dagster.cli import server_starts as rehearsal
from branchlake_dagster.cli.main import main
from branchlake_dagster.embedded.java import archives_folder, bundled_java, find_archive
from branchlake_dagster.embedded.process import ServerDidNotStart
from branchlake_dagster.embedded.servers import NESSIE, SPARK, EmbeddedServers
from branchlake_dagster.settings import Settings


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
    found = {name: find_archive(name, bundled_java(), []) for name in (NESSIE, SPARK)}
    monkeypatch.setattr(EmbeddedServers, "archives", lambda _: found)
    monkeypatch.setattr(EmbeddedServers, "fetch_jars", lambda *_, **__: {})


def scratch_files() -> list[Path]:
    archives = EmbeddedServers(Settings()).archives().values()
    return [Path(archive.record_options()[-1].partition("=")[2]) for archive in archives]


def test_the_servers_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsals: list[Path] = []

    def rehearse(_: Settings, folder: Path) -> None:
        rehearsals.append(folder)
        for path in scratch_files():
            path.write_bytes(b"classes")

    monkeypatch.setattr(rehearsal, "_rehearse_start", rehearse)
    told: list[str] = []
    made = rehearsal.prepare_starts(Settings(), say=told.append)
    assert {path.name.partition("-")[0] for path in made} == {NESSIE, SPARK}
    assert all(path.read_bytes() == b"classes" for path in made)
    assert len(told) > 0
    assert rehearsal.prepare_starts(Settings(), say=pytest.fail) == []
    made[0].write_bytes(b"damaged")
    assert rehearsal.prepare_starts(Settings(), say=told.append) == [made[0]]
    assert len(rehearsals) == 2
    assert not any(folder.exists() for folder in rehearsals)


def test_a_server_that_writes_no_archive_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Java without an archive of its own does."""
    monkeypatch.setattr(rehearsal, "_rehearse_start", lambda *_: None)
    assert rehearsal.prepare_starts(Settings(), say=lambda _: None) == []


def test_without_prepare_there_is_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_rehearse_start", lambda *_: pytest.fail("rehearsed"))
    done = CliRunner().invoke(main, ["fetch"])
    assert (done.exit_code, done.output) == (0, "")
    assert not archives_folder().exists()


@pytest.mark.parametrize(
    "error", [OSError(13, "Permission denied"), ServerDidNotStart("nessie ended: ERROR", hint="Its log: x")]
)
def test_setting_up_does_not_fail_for_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def rehearse(*_: object) -> None:
        raise error

    monkeypatch.setattr(rehearsal, "_rehearse_start", rehearse)
    done = CliRunner().invoke(main, ["fetch", "--prepare"])
    assert done.exit_code == 0
    assert str(error) in done.output
    assert archives_folder().is_dir()
