"""Whether a lake is in the state folder, and whether it is still the folder that its tables point to.

Iceberg's metadata name their files by absolute paths. In a copy of a state folder they point to the original:
what is read is the original's, and clean-up would delete the original's files. In one that was moved they
point to nothing. So the folder is noted in it at the first start.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.lakehouse.embedded.private import state_folder

_NOTE = "lake.json"


class LakeNotRunning(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The lake's embedded Nessie does not run, and whoever asks only wants to read."""


class LakeMoved(ConfigurationError):  # noqa: N818
    """The state folder was moved or copied; its tables point to where it was."""


def has_lake(root: Path) -> bool:
    """Whether an embedded Nessie has ever kept its data in the state folder."""
    return (root / "nessie").is_dir()


def not_running(root: Path) -> LakeNotRunning:
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


def require_place(root: Path, *, tables_elsewhere: bool) -> None:
    """Raise LakeMoved when the lake in `root` was made in another folder; nothing is written.

    With `tables_elsewhere`, in a warehouse of their own, it may be moved. A copy is refused all the same: its
    clean-up would delete the original's files.
    """
    made = _noted(root)
    if made is None or made == root or _same(made, root):
        return
    if made.exists():
        raise LakeMoved(
            f"{root} is a copy of the lake in {made}: its tables point to files there.",
            hint=f"Use the original: BRANCHLAKE_STATE_DIR={made}",
            reason="copied",
            subject=str(root),
        )
    if tables_elsewhere:
        return
    raise LakeMoved(
        f"The lake in {root} was moved from {made}: its tables point to files there.",
        hint=f"Let the old name lead to it and use that: ln -s {root} {made}; BRANCHLAKE_STATE_DIR={made}",
        reason="moved",
        subject=str(root),
    )


def note_place(root: Path) -> None:
    """Remember that the lake is in `root`."""
    if _noted(root) != root:
        scratch = state_folder(root) / f"{_NOTE}.{os.getpid()}.tmp"
        scratch.write_text(json.dumps({"state_dir": str(root)}))
        scratch.replace(root / _NOTE)


def _noted(root: Path) -> Path | None:
    try:
        return Path(json.loads((root / _NOTE).read_text())["state_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
