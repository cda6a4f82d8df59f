"""The lock file of the jars: the SHA-256 digest of each jar that an embedded server may load.

The file has the form of `sha256sum`: a line for each jar with its digest, two spaces and its file name.
`make lock-jars` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from branchlake_dagster.errors import ConfigurationError

LOCK_FILE = Path(__file__).with_name("jars.sha256")
_HEADER = "# Written by `make lock-jars`: the SHA-256 of each jar that an embedded server may load.\n"
_LINE = re.compile(r"([0-9a-f]{64})  (\S+\.jar)")


@cache
def packaged_lock() -> Mapping[str, str]:
    """Return the lock that comes with the package: file name of a jar -> SHA-256 in 64 hex digits.

    Raises ConfigurationError as `read_lock`.
    """
    return MappingProxyType(read_lock(LOCK_FILE))


def read_lock(path: Path) -> dict[str, str]:
    """Return the digests of a lock file by the file name of the jar.

    Raises ConfigurationError if the file is missing, or if a line is not a digest and the name of a jar.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The lock file of the jars, {path}, cannot be read.",
            hint="Install branchlake_dagster again.",
        ) from error
    digests: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
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


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file in hex digits. Reads the whole file. Raises OSError."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
