"""The state folder of an embedded lake: whose lake is in it, and who may read it.

Iceberg's metadata name their files by absolute paths. In a copy of a state folder they point to the original:
reads return the original's rows, and clean-up would delete the original's files. In a folder that was moved
they point to nothing. The folder is therefore recorded in itself at the first start.

Subfolders with secrets are readable for their owner alone: the Spark token, the logs (which quote data and
paths) and the store. Whoever can write to the store can change `main`.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal

_OTHERS_MASK = 0o077
_OTHER_FOLDER_HINT = "Name another folder in BRANCHLAKE_STATE_DIR."


def make_state_folder(root: Path) -> Path:
    """The state folder, made for its owner alone.

    One that exists keeps its permissions: somebody may have opened it to a group on purpose. What is secret
    is in subfolders made by `make_private_folder`. Raises ConfigurationError for a file, and for a folder
    that cannot be made or written to.
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
            hint=_OTHER_FOLDER_HINT,
            reason="not_made",
            subject=str(root),
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The state folder {root} is not writable.",
            hint=_OTHER_FOLDER_HINT,
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
            hint=_OTHER_FOLDER_HINT,
            reason="not_a_folder",
            subject=str(file),
        )


def make_private_folder(folder: Path) -> Path:
    """A folder for its owner alone, also if an older version has made it for everybody."""
    make_state_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & _OTHERS_MASK:
        folder.chmod(0o700)
    return folder


def write_secret(path: Path, secret: str) -> None:
    """A file that was never readable by others, not even before it was complete."""
    make_private_folder(path.parent)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(secret)
    scratch.replace(path)


_LOCATION_FILE = "lake.json"


class LakeNotRunning(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The lake's embedded Nessie does not run, and whoever asks only wants to read."""


class LakeMoved(ConfigurationError):  # noqa: N818
    """The state folder was moved or copied; its tables point to where it was."""


def has_lake(root: Path) -> bool:
    """Whether an embedded Nessie has ever kept its data in the state folder."""
    return (root / "nessie").is_dir()


def build_not_running(root: Path) -> LakeNotRunning:
    """Why nothing can be read, with the command that helps."""
    if has_lake(root):
        return LakeNotRunning(
            f"The lake in {root} is not running.",
            hint=f"Start it: BRANCHLAKE_STATE_DIR={root} branchlake up",
            reason="stopped",
            subject=str(root),
        )
    return LakeNotRunning(
        f"There is no lake in {root}.",
        hint="Name the lake's folder in BRANCHLAKE_STATE_DIR or its server in BRANCHLAKE_NESSIE_URI. "
        "`branchlake up` makes a new lake.",
        reason="no_lake",
        subject=str(root),
    )


def require_location(root: Path, *, tables_elsewhere: bool) -> None:
    """Raise LakeMoved when the lake in `root` was made in another folder; nothing is written.

    With `tables_elsewhere`, in a warehouse of their own, it may be moved. A copy is refused all the same: its
    clean-up would delete the original's files.
    """
    recorded_root = _load_location(root)
    if recorded_root is None or recorded_root == root or _is_same_folder(recorded_root, root):
        return
    if recorded_root.exists():
        raise LakeMoved(
            f"{root} is a copy of the lake in {recorded_root}: its tables point to files there.",
            hint=f"Use the original: BRANCHLAKE_STATE_DIR={recorded_root}",
            reason="copied",
            subject=str(root),
        )
    if tables_elsewhere:
        return
    raise LakeMoved(
        f"The lake in {root} was moved from {recorded_root}: its tables point to files there.",
        hint=f"Let the old name lead to it and use that: ln -s {root} {recorded_root};"
        f" BRANCHLAKE_STATE_DIR={recorded_root}",
        reason="moved",
        subject=str(root),
    )


def record_location(root: Path) -> None:
    """Remember that the lake is in `root`."""
    if _load_location(root) != root:
        scratch = make_state_folder(root) / f"{_LOCATION_FILE}.{os.getpid()}.tmp"
        scratch.write_text(json.dumps({"state_dir": str(root)}))
        scratch.replace(root / _LOCATION_FILE)


def _load_location(root: Path) -> Path | None:
    try:
        return Path(json.loads((root / _LOCATION_FILE).read_text())["state_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_same_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False
