"""Stores the part of `main`'s log that a process has read in a file, for the next process.

Nessie needs a second to walk 50,000 commits, and more to send them. A commit's hash identifies its whole
history. So the stored history of any commit that `main` still has is valid for the next process. The file is
only a copy: without it, the log is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.errors import ConfigurationError

_HEADER = "branchlake main log 1"
LOG_FOLDER = "run"
"""The folder of the file, in the state folder. It belongs to the owner alone."""


class StoredCommit(NamedTuple):
    """A commit of `main`: the names of the branches that it published, or the heads that it merged.

    `merged_heads` are the hashes of branch heads; they are recorded only for a merge outside branchlake.
    """

    hash: str
    branches: Sequence[str] = ()
    merged_heads: Sequence[str] = ()


@dataclass(frozen=True)
class LogFile:
    """A file with consecutive commits of `main`, oldest first. Several processes may use it.

    `most` is the largest number of commits in the file; only the newest are written.
    """

    path: Path
    most: int = 100_000

    def load(self) -> list[StoredCommit]:
        """Return the stored commits; none if the file is missing, damaged, or of another version."""
        try:
            header, _, content = self.path.read_text().partition("\n")
        except (OSError, ValueError):
            return []
        if header != f"{_HEADER} {_checksum(content)}":
            return []
        return [_parse_line(line) for line in content.splitlines()]

    def save(self, commits: Sequence[StoredCommit]) -> None:
        """Atomic: replace the file with the newest `most` commits of `commits`.

        If the file cannot be written, the old file stays and no error is raised.
        """
        newest = islice(commits, max(0, len(commits) - self.most), None)
        content = "".join(
            f"{one.hash} {','.join(one.branches)} {','.join(one.merged_heads)}\n" for one in newest
        )
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            make_private_folder(self.path.parent)
            scratch.touch(mode=0o600)
            scratch.write_text(f"{_HEADER} {_checksum(content)}\n{content}")
            scratch.replace(self.path)
        except (OSError, ConfigurationError):
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _parse_line(line: str) -> StoredCommit:
    commit_hash, branches, heads = line.split(" ")
    return StoredCommit(
        commit_hash, branches.split(",") if branches else (), heads.split(",") if heads else ()
    )
