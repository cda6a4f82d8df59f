"""The jars of the embedded servers, by coordinates, through the Ivy that ships inside pyspark.

Ivy checks the repository's checksums, keeps one copy in its own cache for all projects and obeys the
user's `ivysettings.xml`: a downloader of our own would do none of it. Versions are locked here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Transient
from branchlake_dagster.lakehouse.embedded.java import user_java

_FREE_BYTES_NEEDED = 1 << 30


class DownloadFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Ivy could not bring a jar; the text holds its reason."""


@dataclass(frozen=True)
class Jar:
    """One artifact in Maven's terms. `megabytes` is how much there is to download."""

    org: str
    name: str
    rev: str
    classifier: str | None = None
    megabytes: int = 0

    @property
    def short_name(self) -> str:
        """The name without the versions of Spark and Scala that some have: `iceberg-spark-runtime`."""
        return re.sub(r"-[\d.]+(_[\d.]+)?$", "", self.name)

    def matches(self, path: Path) -> bool:
        """Whether a file of Ivy's cache is this artifact."""
        return path.name.startswith(f"{self.name}-{self.rev}") and self.org in path.parts


ICEBERG_SPARK = Jar("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0", megabytes=48)
ICEBERG_AWS = Jar("org.apache.iceberg", "iceberg-aws-bundle", "1.12.0", megabytes=69)
NESSIE_SERVER = Jar("org.projectnessie.nessie", "nessie-quarkus", "0.99.0", "runner", megabytes=245)


def ivy_module(jars: Sequence[Jar]) -> str:
    """An ivy.xml that asks for exactly `jars`, without their dependencies (they are self-contained)."""
    rows = []
    for jar in jars:
        classifier = f' m:classifier="{jar.classifier}"' if jar.classifier else ""
        rows.append(
            f'<dependency org="{jar.org}" name="{jar.name}" rev="{jar.rev}" conf="default->master">'
            f'<artifact name="{jar.name}" type="jar" ext="jar"{classifier}/></dependency>'
        )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="branchlake" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(rows)}</dependencies></ivy-module>"
    )


def resolve(
    jars: Sequence[Jar], folder: Path, *, ivy_settings: Path | None, say: Callable[[str], None]
) -> dict[Jar, Path]:
    """Paths of `jars` in Ivy's cache, downloaded if they are not there yet.

    `folder` keeps the answer, so a second call costs no JVM. `say` is told before a download starts.
    Raises DownloadFailed or ConfigurationError (no Java, no room on the disk).
    """
    listing = folder / "jars.classpath"
    known = _read(listing, jars)
    if known:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    if ivy_settings or (absent := [jar for jar in jars if not _cached(jar)]):
        wanted = jars if ivy_settings else absent
        size = f"about {sum(jar.megabytes for jar in wanted)} MB"
        size += ", unless your Ivy has them" if ivy_settings else ""
        say(f"Bringing {', '.join(f'{jar.name} {jar.rev}' for jar in wanted)} ({size}) …")
    _check_room(Path.home())
    module = folder / "ivy.xml"
    module.write_text(ivy_module(jars))
    command = [str(user_java()), "-jar", str(_ivy_jar()), "-warn", "-ivy", str(module)]
    if ivy_settings:
        command += ["-settings", str(ivy_settings)]
    command += ["-cachepath", str(listing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = _read(listing, jars) if done.returncode == 0 else None
    if not found:
        raise DownloadFailed(
            f"Ivy could not bring the jars: {_reason(done.stdout + done.stderr)}",
            hint="Check the connection to Maven Central or name a mirror in BRANCHLAKE_IVY_SETTINGS "
            "(an ivysettings.xml), then run the command again.",
        )
    return found


def copied(jars: Mapping[Jar, Path], folder: Path) -> list[Path]:
    """Copies of `jars` in `folder`, under names without versions, which a deployment's files can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for jar, path in jars.items():
        copy = folder / f"{jar.short_name}.jar"
        shutil.copyfile(path, copy)
        found.append(copy)
    return found


def spark_home() -> Path:
    """The Spark that lies in the installed pyspark, which is not imported for that."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "pyspark is not installed.", hint="Install it: pip install 'pyspark[connect]'."
        )
    return Path(spec.origin).parent


def _cached(jar: Jar) -> bool:
    """Whether Ivy's own cache holds it. Settings of the user's may name another one: not asked then."""
    folder = Path.home() / ".ivy2" / "cache" / jar.org / jar.name / "jars"
    return any(jar.matches(path) for path in folder.glob("*.jar"))


def _ivy_jar() -> Path:
    (jar,) = (spark_home() / "jars").glob("ivy-*.jar")
    return jar


def _read(listing: Path, jars: Sequence[Jar]) -> dict[Jar, Path] | None:
    if not listing.exists():
        return None
    paths = [Path(text) for text in listing.read_text().strip().split(os.pathsep) if text]
    found = {jar: path for jar in jars for path in paths if jar.matches(path) and path.exists()}
    return found if len(found) == len(jars) else None


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES_NEEDED:
        raise ConfigurationError(
            f"Only {free >> 20} MiB are free on the disk of {folder}; the jars and the lake need 1 GiB.",
            hint="Make room, then run the command again.",
        )


def _reason(output: str) -> str:
    lines = [
        line.strip()
        for line in output.splitlines()
        if "not found" in line or "ERROR" in line or "refused" in line
    ]
    return "; ".join(dict.fromkeys(lines[:3])) or output.strip()[-300:] or "no output"
