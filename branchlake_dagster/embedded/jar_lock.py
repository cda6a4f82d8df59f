"""The lock file of the jars: the SHA-256 digest of each jar that an embedded server may load.

The file has the form of `sha256sum`: a line for each jar with its digest, two spaces and its file name.
`make lock-jars` writes it. Jars are compared with it before a server loads them.

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
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal

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
    """Return the remembered identity and digest of each jar by its path; empty for a damaged file."""
    try:
        entries: dict[str, Any] = json.loads(digest_cache.read_text()) if digest_cache else {}
        return {name: (_as_identity(numbers), str(digest)) for name, (numbers, digest) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _as_identity(numbers: Iterable[Any]) -> Identity:
    device, inode, size, modified, changed = (int(number) for number in numbers)
    return (device, inode, size, modified, changed)


def _save_digests(digest_cache: Path, entries: Mapping[str, tuple[Identity, str]]) -> None:
    """Write the entries of jars that still exist. An error is ignored; it only costs time later."""
    existing = {name: entry for name, entry in entries.items() if Path(name).exists()}
    scratch = digest_cache.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        digest_cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.write_text(json.dumps(existing))
        scratch.replace(digest_cache)
