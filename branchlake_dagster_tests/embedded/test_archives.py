"""Archives of loaded classes: which one is whose, what a JVM is told, what becomes of one that is no good."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.jars import ICEBERG_AWS, ICEBERG_SPARK, NESSIE_SERVER
from branchlake_dagster.embedded.java import (
    Archive,
    archives_folder,
    bundled_java,
    find_archive,
    lock_archives,
    user_java,
)
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.embedded.servers import NESSIE, SPARK, EmbeddedServers
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache, in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return archives_folder()


def java_that_says(folder: Path, release: str | None) -> Path:
    (folder / "bin").mkdir(parents=True)
    if release is not None:
        (folder / "release").write_text(release)
    return folder / "bin" / "java"


def jar(folder: Path, name: str = "a.jar", content: bytes = b"jar") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def kept(archive: Archive | None, content: bytes = b"classes") -> Archive:
    assert archive is not None
    with lock_archives():
        Path(archive.record_options()[-1].partition("=")[2]).write_bytes(content)
        assert archive.store_recording()
    return archive


def file_of(archive: Archive) -> Path:
    found = archive.find_file()
    assert found is not None
    return found


# -- which one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "recorded", "used"),
    [
        ("17.0.15", "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="),
        ("24", "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="),
        ("25.0.2", "-XX:AOTCacheOutput=", "-XX:AOTCache="),
    ],
)
def test_the_options_are_those_of_the_java(tmp_path: Path, version: str, recorded: str, used: str) -> None:
    java = java_that_says(tmp_path / "java", f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    archive = find_archive("nessie", java, [jar(tmp_path)])
    assert archive is not None
    assert archive.record_options()[-1].startswith(f"{recorded}{archives_folder()}/nessie-")
    assert archive.use_options() == []
    kept(archive)
    assert archive.use_options() == [f"{used}{archive.find_file()}"]


def test_another_jvm_server_or_jar_is_another_archive(tmp_path: Path) -> None:
    old = java_that_says(tmp_path / "old", 'JAVA_VERSION="17.0.1"\n')
    new = java_that_says(tmp_path / "new", 'JAVA_VERSION="17.0.2"\n')
    one, same_size = jar(tmp_path, "one.jar"), jar(tmp_path, "two.jar")
    os.utime(one, (1, 1))
    found = [
        find_archive("nessie", old, [one]),
        find_archive("spark", old, [one]),
        find_archive("nessie", new, [one]),
        find_archive("nessie", old, [same_size]),
        find_archive("nessie", old, [one, same_size]),
    ]
    os.utime(one, (2, 2))  # another build under the old name
    found.append(find_archive("nessie", old, [one]))
    assert len({archive.stem for archive in found if archive}) == len(found)
    assert find_archive("nessie", old, [one]) == found[-1]
    (tmp_path / "old" / "release").write_text('JAVA_VERSION="17.0.3"\n')  # brought up to date in its place
    assert find_archive("nessie", old, [one]) not in found


@pytest.mark.parametrize("release", [None, "", "nothing of use"])
def test_a_java_that_does_not_say_what_it_is_has_none(tmp_path: Path, release: str | None) -> None:
    assert find_archive("spark", java_that_says(tmp_path / "java", release), [jar(tmp_path)]) is None


def test_a_jar_that_does_not_exist_has_none(tmp_path: Path) -> None:
    java = java_that_says(tmp_path / "java", 'JAVA_VERSION="17"\n')
    assert find_archive("spark", java, [tmp_path / "gone.jar"]) is None


# -- making one ----------------------------------------------------------------------------------------


def test_an_archive_has_its_name_only_when_it_is_whole(tmp_path: Path, cache: Path) -> None:
    archive = find_archive("nessie", java_that_says(tmp_path / "java", 'JAVA_VERSION="17"\n'), [])
    assert archive is not None
    scratch = Path(archive.record_options()[-1].partition("=")[2])
    assert (scratch.parent, scratch.suffix) == (cache, ".tmp")
    with lock_archives():
        assert archive.store_recording() is None  # the JVM was killed, or the disk is full
        scratch.write_bytes(b"half")
        assert archive.use_options() == []
        assert archive.store_recording() == archive.find_file()
    assert file_of(archive).read_bytes() == b"half"
    assert [path.name for path in cache.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize("content", [b"", b"class", b"Classes", b"classes!"])
def test_one_that_was_cut_off_or_changed_is_not_used_and_is_made_anew(tmp_path: Path, content: bytes) -> None:
    """Java 17 ends with SIGBUS or SIGSEGV when it is given one."""
    archive = kept(find_archive("spark", java_that_says(tmp_path / "java", 'JAVA_VERSION="17"\n'), []))
    path = file_of(archive)
    path.write_bytes(content)
    assert archive.use_options() == []
    kept(archive, b"new")
    assert file_of(archive).read_bytes() == b"new"
    assert not path.exists()


def test_what_a_dead_process_or_nobody_needs_is_cleared_away(cache: Path, tmp_path: Path) -> None:
    java = java_that_says(tmp_path / "java", 'JAVA_VERSION="17"\n')
    used, unused = (file_of(kept(find_archive(name, java, []))) for name in ("nessie", "spark"))
    for path in (used, unused):
        os.utime(path, (1, 1))
    (cache / "spark-1.99.tmp").touch()
    (cache / "of-somebody-else").touch()
    os.utime(cache / "of-somebody-else", (1, 1))
    archive = find_archive("nessie", java, [])
    assert archive is not None
    assert archive.use_options()
    with lock_archives():
        assert {path.name for path in cache.iterdir()} == {used.name, "lock", "of-somebody-else"}
    assert cache.stat().st_mode & 0o777 == 0o700


def test_only_one_at_a_time_makes_them() -> None:
    inside = threading.Event()

    def other() -> None:
        with lock_archives():
            inside.set()

    thread = threading.Thread(target=other)
    with lock_archives():
        thread.start()
        assert not inside.wait(0.2)
    thread.join()
    assert inside.is_set()


# -- what the servers are told -------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and environments of the servers that would have been started."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def note(
        name: str, command: list[str], *, environment: dict[str, str], port: int, **_: object
    ) -> ProcessRecord:
        found.append((command, environment))
        return ProcessRecord(name, 1, 0.0, port)

    monkeypatch.setattr(process, "launch_server", note)
    return found


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmbeddedServers]:
    """Makes servers for which the jars need not be brought."""
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    jars = {one: jar(tmp_path, f"{one.name}.jar") for one in (ICEBERG_SPARK, ICEBERG_AWS, NESSIE_SERVER)}
    monkeypatch.setattr(EmbeddedServers, "fetch_jars", lambda *_, **__: jars)

    def make(*, recording: bool = False, **settings: str) -> EmbeddedServers:
        return EmbeddedServers(Settings(state_dir=tmp_path / "a state", **settings), recording=recording)

    return make


def launch(these: EmbeddedServers) -> None:
    these._launch_nessie(these.fetch_jars(), 1)
    these._launch_spark(these.fetch_jars(), 1)


def driver_options(command: list[str]) -> str:
    return command[command.index("--driver-java-options") + 1]


def test_a_first_start_does_without(
    servers: Callable[..., EmbeddedServers], launched: list[tuple[list[str], dict[str, str]]], cache: Path
) -> None:
    launch(servers())
    (nessie, _), (spark, _) = launched
    assert not [word for word in (*nessie, *spark) if str(cache) in word]
    assert "-XX:TieredStopAtLevel=1" in nessie


@pytest.mark.parametrize(("cores", "has_second"), [(1, False), (2, False), (3, True), (None, False)])
def test_spark_has_the_second_compiler_where_it_takes_no_time_from_queries(
    servers: Callable[..., EmbeddedServers],
    launched: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    cores: int | None,
    has_second: bool,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    launch(servers())
    launch(servers(spark_master="spark://cluster.example:7077"))
    options = [driver_options(command) for command, _ in launched[1::2]]
    assert ["TieredStopAtLevel=1" not in found for found in options] == [has_second, True]
    assert ["ReservedCodeCacheSize" in found for found in options] == [not has_second, False]


def test_spark_has_the_users_options_last(
    servers: Callable[..., EmbeddedServers],
    launched: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = """-XX:TieredStopAtLevel=4 "-Da=b c" '-Dq="x"'"""
    expected = r'''"-XX:TieredStopAtLevel=4" "-Da=b c" "-Dq=\"x\""'''
    launch(servers(spark_java_options=own))
    assert driver_options(launched[-1][0]).endswith(f" {expected}")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    launch(servers(spark_java_options=own))
    assert driver_options(launched[-1][0]) == expected


def test_archives_that_exist_are_used_and_others_recorded(
    servers: Callable[..., EmbeddedServers], launched: list[tuple[list[str], dict[str, str]]]
) -> None:
    there = servers().archives()
    assert set(there) == {NESSIE, SPARK}
    for archive in there.values():
        kept(archive)
    launch(servers())
    (nessie, _), (spark, _) = launched
    assert set(there[NESSIE].use_options()) < set(nessie[: nessie.index("-jar")])
    assert f'"{there[SPARK].use_options()[0]}"' in driver_options(spark)
    launched.clear()
    launch(servers(recording=True))
    (nessie, _), (spark, _) = launched
    assert set(there[NESSIE].record_options()) < set(nessie[: nessie.index("-jar")])
    assert f'"{there[SPARK].record_options()[-1]}"' in driver_options(spark)
    assert there[SPARK].use_options()[0] not in driver_options(spark)


class Killed(BaseException):
    """The process that starts the servers is killed."""


def test_a_server_is_recorded_before_the_next_one_is_started(
    servers: Callable[..., EmbeddedServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, *_: object, port: int, **__: object) -> ProcessRecord:
        if name == SPARK:
            raise Killed
        return ProcessRecord(name, os.getpid(), 0.0, port)

    monkeypatch.setattr(process, "launch_server", start)
    embedded = servers()
    with pytest.raises(Killed):
        embedded.endpoints()
    record = ProcessRecord.load(embedded._record_path(NESSIE))
    assert record is not None
    assert record.pid == os.getpid()


def test_what_is_not_ours_to_start_has_no_archive(servers: Callable[..., EmbeddedServers]) -> None:
    assert set(servers(session_kind="classic").archives()) == {NESSIE}
    assert set(servers(nessie_uri="http://n.example/api/v2").archives()) == {SPARK}


def test_spark_finds_the_jars_on_its_class_path(
    servers: Callable[..., EmbeddedServers], launched: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    """What `--jars` brings is loaded by another class loader, whose classes an archive cannot have."""
    jars = [str(tmp_path / f"{one.name}.jar") for one in (ICEBERG_SPARK, ICEBERG_AWS)]
    launch(servers())
    command, environment = launched[-1]
    assert command[command.index("--driver-class-path") + 1] == ":".join(jars)
    assert "--jars" not in command
    assert not Path(environment["SPARK_CONF_DIR"]).exists()  # one with files would keep the archive out
    # The log's configuration comes another way; the folder's name has a blank.
    log = (tmp_path / "a state" / "spark" / "conf" / "log4j2.properties").as_uri()
    assert f'"-Dlog4j2.configurationFile={log}"' in driver_options(command)
    launch(servers(spark_master="spark://cluster.example:7077"))
    command, _ = launched[-1]
    assert command[command.index("--jars") + 1] == ",".join(jars)  # executors have no class path of ours


def test_a_configuration_of_the_users_is_left_alone(
    servers: Callable[..., EmbeddedServers],
    launched: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It may set the driver's options, which ours would override."""
    kept(servers().archives()[SPARK])
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    launch(servers())
    command, environment = launched[-1]
    assert environment["SPARK_CONF_DIR"] == str(tmp_path)
    assert "--driver-java-options" not in command


# -- JVMs ----------------------------------------------------------------------------------------------


def runs(java: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The same on the way in and out: a JVM takes an archive only for the class path that it was made with.
    command = [str(java), *options, "--list-modules"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("java", [user_java, bundled_java], ids=["of Spark", "of Nessie"])
def test_a_jvm_takes_what_it_has_recorded_and_starts_without_what_is_gone(java: Callable[[], Path]) -> None:
    archive = find_archive("test", java(), [])
    assert archive is not None
    with lock_archives():
        assert runs(java(), *archive.record_options()).returncode == 0
        if not archive.store_recording():
            pytest.skip("this Java has no archive of its own to build on")
    options = archive.use_options()
    assert runs(java(), *options).returncode == 0
    file_of(archive).unlink()  # since somebody looked
    assert runs(java(), *options).returncode == 0


@pytest.mark.nessie
def test_a_recorded_nessie_is_mapped_by_the_next_one(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state", session_kind="classic")
    recording = EmbeddedServers(settings, volatile=True, recording=True)
    archive = recording.archives()[NESSIE]
    with lock_archives():
        recording.endpoints()
        record = recording.status()[NESSIE]
        assert record is not None
        process.stop_process(record, grace_s=240)
        path = archive.store_recording()
    servers = EmbeddedServers(settings, volatile=True)
    servers.endpoints()
    try:
        record = servers.status()[NESSIE]
        assert record is not None
        assert str(path) in Path(f"/proc/{record.pid}/maps").read_text()
    finally:
        servers.stop_all()


def test_a_cache_that_cannot_be_written_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raising(ConfigurationError, reason="not_a_folder", subject=str(tmp_path / "file")), lock_archives():
        pass
