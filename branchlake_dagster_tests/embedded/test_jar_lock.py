"""Jars are compared with the lock file before a server loads them."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import pytest

from branchlake_dagster.cli.lock_jars import compute_digests
from branchlake_dagster.embedded import jars as verification
from branchlake_dagster.embedded.jars import (
    ICEBERG_AWS,
    ICEBERG_SPARK,
    LOCK_FILE,
    NESSIE_SERVER,
    SPARK_KAFKA,
    Jar,
    JarRefused,
    format_lock,
    packaged_lock,
    read_lock,
    resolve_class_path,
    resolve_jars,
    verify_jars,
)
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.errors import ConfigurationError, Terminal
from branchlake_dagster.ingest.embedded_kafka import BROKER, BROKER_LOGGING
from branchlake_dagster.settings import Settings

ROOT = Path(__file__).parents[2]
POOL = Jar("org.apache.commons", "commons-pool2", "2.12.1")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.0.jar"
    path.write_bytes(b"jar")
    return path


@pytest.fixture
def lock() -> dict[str, str]:
    return {"thing-1.0.jar": sha256(b"jar")}


# -- verification --------------------------------------------------------------------------------------


def test_a_locked_jar_is_accepted(jar: Path, lock: dict[str, str]) -> None:
    verify_jars([jar], lock)


def test_a_jar_with_other_bytes_is_refused(jar: Path, lock: dict[str, str]) -> None:
    jar.write_bytes(b"JAR")
    with pytest.raises(JarRefused) as caught:
        verify_jars([jar], lock)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, Terminal)
    assert (error.file, error.expected, error.actual) == (jar, sha256(b"jar"), sha256(b"JAR"))
    assert str(jar) in error.message
    assert error.hint


def test_a_jar_that_the_lock_does_not_name_is_refused(jar: Path) -> None:
    with pytest.raises(JarRefused) as caught:
        verify_jars([jar], {"other-1.0.jar": sha256(b"jar")})
    assert (caught.value.expected, caught.value.actual) == (None, sha256(b"jar"))


def test_a_jar_is_hashed_once_per_file_state(
    jar: Path, lock: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = jar.parent / "cache" / "digests.json"
    verify_jars([jar], lock, digest_cache=memory)
    with monkeypatch.context() as patched:
        patched.setattr(verification, "compute_sha256", lambda path: pytest.fail(f"{path} was hashed again"))
        verify_jars([jar], lock, digest_cache=memory)
    with pytest.raises(JarRefused):
        verify_jars([jar], {"thing-1.0.jar": sha256(b"another release")}, digest_cache=memory)


def test_an_edit_that_restores_size_and_time_is_noticed(jar: Path, lock: dict[str, str]) -> None:
    memory = jar.parent / "digests.json"
    verify_jars([jar], lock, digest_cache=memory)
    before = jar.stat()
    jar.write_bytes(b"JAR")
    os.utime(jar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (jar.stat().st_size, jar.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(JarRefused):
        verify_jars([jar], lock, digest_cache=memory)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"x": 1}', '{"x": [[1, 2], "d"]}', '{"x": [null, null]}'], ids=repr
)
def test_a_damaged_memory_costs_only_the_hashing(jar: Path, lock: dict[str, str], content: str) -> None:
    memory = jar.parent / "digests.json"
    memory.write_text(content)
    verify_jars([jar], lock, digest_cache=memory)
    assert str(jar) in memory.read_text()


def test_a_memory_that_cannot_be_written_is_no_error(jar: Path, lock: dict[str, str]) -> None:
    verify_jars([jar], lock, digest_cache=jar / "below-a-file" / "digests.json")


def test_the_memory_forgets_jars_that_are_gone(jar: Path, lock: dict[str, str]) -> None:
    memory, other = jar.parent / "digests.json", jar.with_name("other-1.0.jar")
    other.write_bytes(b"other")
    verify_jars([jar, other], {**lock, other.name: sha256(b"other")}, digest_cache=memory)
    other.unlink()
    jar.write_bytes(b"jar")  # another state of the file, so that the memory is written
    verify_jars([jar], lock, digest_cache=memory)
    assert str(other) not in memory.read_text()


def test_no_server_starts_with_a_jar_that_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cached = []
    for one in (ICEBERG_SPARK, *SPARK_KAFKA, NESSIE_SERVER):
        path = tmp_path / one.org / f"{one.name}-{one.rev}.jar"
        if one.classifier:
            path = path.with_name(f"{one.name}-{one.rev}-{one.classifier}.jar")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"changed in the cache")
        cached.append(path)
    state = tmp_path / "state"
    (state / "jars").mkdir(parents=True)
    (state / "jars" / "jars.classpath").write_text(os.pathsep.join(map(str, cached)))
    with pytest.raises(JarRefused):
        EmbeddedServers(Settings(state_dir=state)).endpoints()
    assert not (state / "logs").exists()


# -- the lock file -------------------------------------------------------------------------------------


def test_the_lock_file_survives_writing_and_reading(tmp_path: Path) -> None:
    digests = {"b-1.jar": "0" * 64, "a-1.jar": "f" * 64}
    (tmp_path / "lock").write_text(format_lock(digests))
    assert read_lock(tmp_path / "lock") == digests


@pytest.mark.parametrize("line", ["x", f"{'0' * 63}  a.jar", f"{'0' * 64} a.jar", f"{'0' * 64}  b.jar\n" * 2])
def test_a_damaged_lock_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock").write_text(line)
    with pytest.raises(ConfigurationError):
        read_lock(tmp_path / "lock")
    with pytest.raises(ConfigurationError):
        read_lock(tmp_path / "absent")


@pytest.mark.parametrize(
    "one",
    [ICEBERG_SPARK, ICEBERG_AWS, *SPARK_KAFKA, NESSIE_SERVER, BROKER, BROKER_LOGGING],
    ids=lambda one: one.name,
)
def test_every_jar_of_the_servers_is_locked(one: Jar) -> None:
    suffix = f"-{one.classifier}" if one.classifier else ""
    assert f"{one.name}-{one.rev}{suffix}.jar" in packaged_lock()


def test_the_lock_file_contains_no_host() -> None:
    assert not re.search(r"https?:|www\.|\.org/|\.com/", LOCK_FILE.read_text())


def test_a_released_artifact_may_not_change_in_the_lock(jar: Path, lock: dict[str, str]) -> None:
    assert compute_digests([jar], {}) == lock
    assert compute_digests([jar], lock) == lock
    with pytest.raises(JarRefused):
        compute_digests([jar], {"thing-1.0.jar": sha256(b"another")})


def test_a_wheel_carries_every_file_of_the_package() -> None:
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    package = ROOT / "branchlake_dagster"
    patterns = parser["options.package_data"]["branchlake_dagster"].split()
    carried = {path for pattern in patterns for path in package.glob(pattern)}
    others = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert others - carried == set()


# -- Ivy -----------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Jar, bytes], Path]:
    """Puts a jar into a repository of this test; returns the settings of an Ivy that knows no other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        f"""<ivysettings>
          <caches defaultCacheDir="{tmp_path}/cache"/>
          <settings defaultResolver="mirror"/>
          <resolvers><ibiblio name="mirror" m2compatible="true" root="file://{tmp_path}/repository/"/></resolvers>
        </ivysettings>"""
    )

    def deliver(jar: Jar, content: bytes) -> Path:
        folder = tmp_path / "repository" / jar.org.replace(".", "/") / jar.name / jar.rev
        folder.mkdir(parents=True)
        (folder / f"{jar.name}-{jar.rev}.jar").write_bytes(content)
        (folder / f"{jar.name}-{jar.rev}.pom").write_text(
            f"<project><modelVersion>4.0.0</modelVersion><groupId>{jar.org}</groupId>"
            f"<artifactId>{jar.name}</artifactId><version>{jar.rev}</version></project>"
        )
        return settings

    return deliver


def test_a_mirror_that_delivers_another_artifact_is_refused(
    mirror: Callable[[Jar, bytes], Path], tmp_path: Path
) -> None:
    settings = mirror(POOL, b"not what Apache released")
    for _ in range(2):  # as downloaded, and as found in the cache
        with pytest.raises(JarRefused) as caught:
            resolve_jars([POOL], tmp_path / "jars", ivy_settings=settings, notify=lambda _: None)
        assert caught.value.file.name == "commons-pool2-2.12.1.jar"
        assert caught.value.expected == packaged_lock()["commons-pool2-2.12.1.jar"]
        assert caught.value.actual == sha256(b"not what Apache released")


def test_a_dependency_that_is_not_locked_is_refused(
    mirror: Callable[[Jar, bytes], Path], tmp_path: Path
) -> None:
    unknown = Jar("org.example", "thing", "1.0")
    settings = mirror(unknown, b"jar")
    for _ in range(2):
        with pytest.raises(JarRefused) as caught:
            resolve_class_path(unknown, tmp_path / "jars", ivy_settings=settings, notify=lambda _: None)
        assert caught.value.expected is None


def test_a_jar_matches_its_own_version_only(tmp_path: Path) -> None:
    jar, runner = Jar("org.example", "thing", "1.1"), Jar("org.example", "thing", "1.1", "runner")
    folder = tmp_path / "org.example" / "thing" / "jars"

    assert jar.matches(folder / "thing-1.1.jar")
    assert runner.matches(folder / "thing-1.1-runner.jar")
    for name in ("thing-1.10.jar", "thing-1.1.1.jar", "thing-1.1-sources.jar", "thing-1.1-runner.jar"):
        assert not jar.matches(folder / name), name
    assert not runner.matches(folder / "thing-1.1.jar")
