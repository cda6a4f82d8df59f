"""What a server's JVM has loaded and checked once, kept in a file that the next one maps: half of its start.

A JVM writes such an archive itself when it ends. When it starts, it leaves one of another JVM or of other
jars aside, with a line in the server's log, and takes the classes from the jars. But Java 17 ends at once
with one that was cut off or damaged; so the checksum of an archive is in its name, and is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.file_lock import file_lock

_AOT_SINCE = 25
"""The first Java that makes a cache for that in one go. It needs no archive of the JDK's own below it."""
_UNUSED_DAYS = 30
_SUFFIX = ".jsa"


@dataclass(frozen=True)
class Archive:
    """The archive of one server as it is started with one JVM and certain jars, be it there or not.

    `stem` is what its name begins with, in the folder of the archives.
    """

    stem: Path
    ahead_of_time: bool

    def find_file(self) -> Path | None:
        """Its file, when there is one and it is whole: 0.2 s of reading."""
        for path in self._list_files():
            with contextlib.suppress(OSError):  # it is gone since, or not for us to read
                if path.stem == f"{self.stem.name}-{_file_checksum(path)}":
                    return path
        return None

    def use_options(self) -> list[str]:
        """Options of a JVM that is to use it; none while there is no archive."""
        path = self.find_file()
        if path is None:
            return []
        with contextlib.suppress(OSError):  # not ours
            os.utime(path)  # what is in use is not cleared away
        return [f"-XX:{'AOTCache' if self.ahead_of_time else 'SharedArchiveFile'}={path}"]

    def record_options(self) -> list[str]:
        """Options of a JVM that is to write it when it ends, under another name until `store_recording`.

        It ends later for it, by ten seconds and more. It needs no second compiler, as nothing is repeated.
        """
        name = "AOTCacheOutput" if self.ahead_of_time else "ArchiveClassesAtExit"
        return ["-XX:TieredStopAtLevel=1", f"-XX:{name}={self._scratch}"]

    def store_recording(self) -> Path | None:
        """Give what this process's JVM has recorded its name. None when it has written nothing."""
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


def _file_checksum(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def archives_folder() -> Path:
    """Where they are: in the user's cache, as the jars are. Whoever has several lakes makes them once."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "branchlake"


def find_archive(name: str, java: Path, jars: Sequence[Path]) -> Archive | None:
    """The archive of server `name`, run by `java` with `jars`. None for a Java that does not say what it is.

    Another version of the JVM, or another jar or place of one, is another archive.
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
    """One process at a time makes archives; what nobody has used for a month goes. Raises OSError."""
    folder = make_private_folder(archives_folder())
    with file_lock(folder / "lock"):
        oldest = time.time() - _UNUSED_DAYS * 24 * 3600
        for path in folder.iterdir():
            # With the lock held, a scratch file is that of a process that died.
            if path.suffix == ".tmp" or (path.suffix == _SUFFIX and path.stat().st_mtime < oldest):
                path.unlink(missing_ok=True)
        yield
