"""Downloads the jars of the embedded servers, and compares each jar with its locked digest.

The Ivy that ships inside pyspark downloads the jars. It verifies the repository's checksums, keeps one copy
in its cache for all projects, and follows the user's `ivysettings.xml`. Versions are locked in this module.

The lock file `jars.sha256` has the SHA-256 digest of each jar that an embedded server may load. It has the
form of `sha256sum`: a line for each jar with its digest, two spaces and its file name. `make lock-jars`
writes it. Each jar is compared with it before the path of the jar is returned.

Hashing all jars takes about half a second, so the digest of a file is remembered with the file's identity:
device, inode, size, modification time and change time. The kernel sets the change time at every write, and no
program can set it back. So a file that was replaced or edited is hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from branchlake_dagster.embedded.java import archives_folder, user_java
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient
from branchlake_dagster.file_lock import file_lock

LOCK_FILE = Path(__file__).with_name("jars.sha256")
_HEADER = "# Written by `make lock-jars`: the SHA-256 of each jar that an embedded server may load.\n"
_LINE = re.compile(r"([0-9a-f]{64})  (\S+\.jar)")


@cache
def packaged_lock() -> Mapping[str, str]:
    """Return the lock file of the package: the SHA-256 digest (64 hex digits) by the file name of a jar.

    Raises ConfigurationError as `read_lock`.
    """
    return MappingProxyType(read_lock(LOCK_FILE))


def read_lock(path: Path) -> dict[str, str]:
    """Return the digests of a lock file by the file name of the jar.

    Raises ConfigurationError if the file is missing, or if a line is not a digest and the name of a jar.
    """
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The lock file of the jars, {path}, cannot be read.",
            hint="Install branchlake_dagster again.",
        ) from error
    digests: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            raise ConfigurationError(
                f"Line {number} of the lock file {path} is not a SHA-256 and the name of another jar.",
                hint="Install branchlake_dagster again; in its repository: git checkout the file.",
            )
        digests[match[2]] = match[1]
    return digests


def format_lock(digests: Mapping[str, str]) -> str:
    """Return the content of a lock file with these digests, sorted by file name."""
    return _HEADER + "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file in hex digits. Reads the whole file. Raises OSError."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


Identity = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, modification time and change time in nanoseconds since 1970."""


class JarRefused(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A jar is not the artifact that the lock file names, so no server loads it.

    Attributes:
        file: The jar.
        expected: The SHA-256 digest in the lock file; None if the lock file does not name the jar.
        actual: The SHA-256 digest of the file.

    """

    def __init__(self, file: Path, expected: str | None, actual: str) -> None:
        if expected is None:
            message = f"The jar {file} is not in the lock file. Its SHA-256 is {actual}."
            hint = (
                "Only jars of the lock file are loaded. If BRANCHLAKE_IVY_SETTINGS resolves other versions or"
                " file names, correct it. If you changed a version in branchlake itself, run: make lock-jars."
            )
        else:
            message = f"The jar {file} has the SHA-256 {actual}, but the lock file expects {expected}."
            hint = (
                "Delete the file and run the command again to download it. If the digest still differs,"
                " the repository or mirror delivers another artifact: do not use it."
            )
        super().__init__(message, hint=hint)
        self.file, self.expected, self.actual = file, expected, actual


def verify_jars(paths: Iterable[Path], lock: Mapping[str, str], *, digest_cache: Path | None = None) -> None:
    """Raise JarRefused unless each jar is in `lock` with its digest.

    `lock` maps file names to SHA-256 digests. `digest_cache` is a file that keeps digests between calls.
    Without it, or if it cannot be read or written, all jars are hashed. Raises OSError for a missing jar.
    """
    stored_digests = _load_digests(digest_cache)
    digests: dict[str, tuple[Identity, str]] = {}
    for path in paths:
        identity = _file_identity(path)
        stored_identity, digest = stored_digests.get(str(path), (None, ""))
        if stored_identity != identity:
            digest = compute_sha256(path)
        expected = lock.get(path.name)
        if digest != expected:
            raise JarRefused(path, expected, digest)
        digests[str(path)] = (identity, digest)
    if digest_cache is not None and any(stored_digests.get(name) != entry for name, entry in digests.items()):
        _save_digests(digest_cache, stored_digests | digests)


def _file_identity(path: Path) -> Identity:
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _load_digests(digest_cache: Path | None) -> dict[str, tuple[Identity, str]]:
    """Return the stored identity and digest of each jar by its path; {} without a readable file."""
    try:
        entries: dict[str, Any] = json.loads(digest_cache.read_text()) if digest_cache else {}
        return {name: (_as_identity(numbers), str(digest)) for name, (numbers, digest) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _as_identity(numbers: Iterable[Any]) -> Identity:
    device, inode, size, modified, changed = (int(number) for number in numbers)
    return (device, inode, size, modified, changed)


def _save_digests(digest_cache: Path, entries: Mapping[str, tuple[Identity, str]]) -> None:
    """Atomic: write the identity and SHA-256 digest of each jar that still exists, by the jar's path.

    An error is ignored: then the digests are computed again at the next start.
    """
    existing = {name: entry for name, entry in entries.items() if Path(name).exists()}
    scratch = digest_cache.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        digest_cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.write_text(json.dumps(existing))
        scratch.replace(digest_cache)


_FREE_BYTES_NEEDED = 1 << 30
_DIGEST_CACHE = "verified-jars.json"
"""The file in the folder of the archives with the digests of jars that were hashed before."""


class DownloadFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Ivy could not download a jar. The message contains Ivy's reason."""


@dataclass(frozen=True)
class Jar:
    """One Maven artifact. `rev` is its version. `megabytes` is the approximate size of its download."""

    org: str
    name: str
    rev: str
    classifier: str | None = None
    megabytes: int = 0

    @property
    def short_name(self) -> str:
        """The name without versions of Spark and Scala, such as `iceberg-spark-runtime`."""
        return re.sub(r"-[\d.]+(_[\d.]+)?$", "", self.name)

    def matches(self, path: Path) -> bool:
        """Return whether a file of Ivy's cache is this artifact, by its name and folders. Nothing is read."""
        suffix = f"-{self.classifier}" if self.classifier else ""
        return path.name == f"{self.name}-{self.rev}{suffix}.jar" and self.org in path.parts


ICEBERG_SPARK = Jar("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0", megabytes=48)
ICEBERG_AWS = Jar("org.apache.iceberg", "iceberg-aws-bundle", "1.12.0", megabytes=69)
SPARK_KAFKA = (
    Jar("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.1.3", megabytes=1),
    # Maven Central has no version 4.1.2 or 4.1.3 of these two. Nothing in them has changed since 4.1.1.
    Jar("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.1.1"),
    Jar("org.apache.spark", "spark-avro_2.13", "4.1.1"),
    Jar("org.apache.kafka", "kafka-clients", "3.9.1", megabytes=10),
    Jar("org.apache.commons", "commons-pool2", "2.12.1"),
)
"""The jars with which Spark reads Kafka and Avro. Always loaded, so that Spark needs no restart for them."""
NESSIE_SERVER = Jar("org.projectnessie.nessie", "nessie-quarkus", "0.99.0", "runner", megabytes=245)


def require_locked(paths: Iterable[Path]) -> None:
    """Raise JarRefused unless each jar is the artifact that the package's lock file names.

    Costs less than a millisecond for jars that were hashed before, and 2 s per GB for others.
    """
    verify_jars(paths, packaged_lock(), digest_cache=archives_folder() / _DIGEST_CACHE)


def ivy_module(jars: Sequence[Jar], *, conf: str = "default->master") -> str:
    """Return the text of an ivy.xml that requests exactly `jars`.

    With `conf="default->default,runtime"` their dependencies are requested too.
    """
    rows = []
    for jar in jars:
        classifier = f' m:classifier="{jar.classifier}"' if jar.classifier else ""
        rows.append(
            f'<dependency org="{jar.org}" name="{jar.name}" rev="{jar.rev}" conf="{conf}">'
            f'<artifact name="{jar.name}" type="jar" ext="jar"{classifier}/></dependency>'
        )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="branchlake" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(rows)}</dependencies></ivy-module>"
    )


def resolve_class_path(
    jar: Jar,
    folder: Path,
    *,
    ivy_settings: Path | None,
    notify: Callable[[str], None],
    verify: Callable[[Iterable[Path]], None] = require_locked,
) -> list[Path]:
    """Return the paths of a jar and all its dependencies, downloaded if necessary.

    `folder` keeps the list of paths, so a second call starts no JVM. The other arguments and the errors are
    those of `resolve_jars`.
    """
    listing = folder / f"{jar.short_name}-{jar.rev}.classpath"
    stored_paths = _read_paths(listing)
    if stored_paths and all(path.exists() for path in stored_paths):
        verify(stored_paths)
        return stored_paths
    folder.mkdir(parents=True, exist_ok=True)
    if ivy_settings or not _is_cached(jar):
        notify(f"Downloading {jar.name} {jar.rev} (about {jar.megabytes} MB) …")
    _require_free_space(Path.home())
    module = folder / f"{jar.short_name}-ivy.xml"
    module.write_text(ivy_module([jar], conf="default->default,runtime"))
    _run_ivy(module, listing, folder, ivy_settings)
    paths = _read_paths(listing)
    verify(paths)
    return paths


def resolve_jars(
    jars: Sequence[Jar],
    folder: Path,
    *,
    ivy_settings: Path | None,
    notify: Callable[[str], None],
    verify: Callable[[Iterable[Path]], None] = require_locked,
) -> dict[Jar, Path]:
    """Return the paths of `jars` in Ivy's cache, downloaded if necessary.

    `folder` keeps the list of paths, so a second call starts no JVM. `notify` gets a message before a
    download. `verify` compares all files with the lock file. Raises DownloadFailed, JarRefused, or
    ConfigurationError if Java is missing or the disk is full.
    """
    listing = folder / "jars.classpath"
    stored_jars = _find_listed_jars(listing, jars)
    if stored_jars:
        verify(stored_jars.values())
        return stored_jars
    folder.mkdir(parents=True, exist_ok=True)
    if ivy_settings or (missing_jars := [jar for jar in jars if not _is_cached(jar)]):
        jars_to_download = jars if ivy_settings else missing_jars
        size = f"about {sum(jar.megabytes for jar in jars_to_download)} MB"
        size += ", unless your Ivy cache has them" if ivy_settings else ""
        notify(f"Downloading {', '.join(f'{jar.name} {jar.rev}' for jar in jars_to_download)} ({size}) …")
    _require_free_space(Path.home())
    module = folder / "ivy.xml"
    module.write_text(ivy_module(jars))
    output = _run_ivy(module, listing, folder, ivy_settings)
    path_by_jar = _find_listed_jars(listing, jars)
    if not path_by_jar:
        raise _download_failed(output)
    verify(path_by_jar.values())
    return path_by_jar


def _run_ivy(module: Path, listing: Path, folder: Path, ivy_settings: Path | None) -> str:
    command = [str(user_java()), "-jar", str(_ivy_jar()), "-warn", "-ivy", str(module)]
    if ivy_settings:
        command += ["-settings", str(ivy_settings)]
    command += ["-cachepath", str(listing)]
    with _lock_ivy():
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    output = result.stdout + result.stderr
    if result.returncode != 0:
        raise _download_failed(output)
    return output


@contextmanager
def _lock_ivy() -> Iterator[None]:
    """Hold a lock, because two Ivy processes would damage each other's report in the cache."""
    home = Path.home() / ".ivy2"
    home.mkdir(exist_ok=True)
    with file_lock(home / "branchlake.lock"):
        yield


def _download_failed(output: str) -> DownloadFailed:
    return DownloadFailed(
        f"Ivy could not download the jars: {_format_ivy_error(output)}",
        hint="Check the connection to Maven Central or name a mirror in BRANCHLAKE_IVY_SETTINGS "
        "(an ivysettings.xml), then run the command again.",
    )


def copy_jars(jars: Mapping[Jar, Path], folder: Path) -> list[Path]:
    """Copy `jars` to `folder` and return the copies, in the same order.

    Their names have no versions, such as `iceberg-spark-runtime.jar`, so deployment files need no version.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for jar, path in jars.items():
        target = folder / f"{jar.short_name}.jar"
        shutil.copyfile(path, target)
        copies.append(target)
    return copies


def spark_home() -> Path:
    """Return the folder of Spark in the installed pyspark, without importing pyspark.

    Raises ConfigurationError if pyspark is not installed.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "pyspark is not installed.", hint="Install it: pip install 'pyspark[connect]'."
        )
    return Path(spec.origin).parent


def _is_cached(jar: Jar) -> bool:
    """Return whether Ivy's default cache has a jar. Not used with the user's own Ivy settings."""
    folder = Path.home() / ".ivy2" / "cache" / jar.org / jar.name / "jars"
    return any(jar.matches(path) for path in folder.glob("*.jar"))


def _ivy_jar() -> Path:
    (jar,) = (spark_home() / "jars").glob("ivy-*.jar")
    return jar


def _find_listed_jars(listing: Path, jars: Sequence[Jar]) -> dict[Jar, Path] | None:
    paths = _read_paths(listing)
    path_by_jar = {jar: path for jar in jars for path in paths if jar.matches(path) and path.exists()}
    return path_by_jar if len(path_by_jar) == len(jars) else None


def _read_paths(listing: Path) -> list[Path]:
    if not listing.exists():
        return []
    return [Path(text) for text in listing.read_text().strip().split(os.pathsep) if text]


def _require_free_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES_NEEDED:
        raise ConfigurationError(
            f"The disk of {folder} has only {free >> 20} MiB free. The jars and the lake need 1 GiB.",
            hint="Free some space, then run the command again.",
            reason="disk_full",
            subject=str(folder),
        )


def _format_ivy_error(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if "not found" in line or "ERROR" in line or "refused" in line
    ]
    return "; ".join(dict.fromkeys(lines[:3])) or output.strip()[-300:] or "no output"
