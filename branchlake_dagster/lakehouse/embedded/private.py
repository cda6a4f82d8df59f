"""Folders and files of the state folder that no other account of the machine may read.

The Spark token, the logs (which quote data and paths) and the store are nobody else's business, and whoever
can write to the store can change `main`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError

_OTHERS = 0o077
_OTHER = "Name another folder in BRANCHLAKE_STATE_DIR."


def state_folder(root: Path) -> Path:
    """The state folder, made for its owner alone.

    One that exists keeps its permissions: somebody may have opened it to a group on purpose. What is secret
    is in subfolders made by `private_folder`. Raises ConfigurationError for a file, and for a folder that
    cannot be made or written to.
    """
    require_no_file(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigurationError(
            f"The state folder {root} cannot be made: {error.strerror}.",
            hint=_OTHER,
            reason="not_made",
            subject=str(root),
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The state folder {root} is not writable.",
            hint=_OTHER,
            reason="not_writable",
            subject=str(root),
        )
    return root


def require_no_file(root: Path) -> None:
    """Raise ConfigurationError when the state folder, or a folder that it would be in, is a file."""
    file = next((path for path in (root, *root.parents) if path.is_file()), None)
    if file is not None:
        raise ConfigurationError(
            f"The state folder cannot be {root}: {file} is a file.",
            hint=_OTHER,
            reason="not_a_folder",
            subject=str(file),
        )


def private_folder(folder: Path) -> Path:
    """A folder for its owner alone, also if an older version has made it for everybody."""
    state_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & _OTHERS:
        folder.chmod(0o700)
    return folder


def write_secret(path: Path, text: str) -> None:
    """A file that was never readable by others, not even before it was complete."""
    private_folder(path.parent)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(text)
    scratch.replace(path)
