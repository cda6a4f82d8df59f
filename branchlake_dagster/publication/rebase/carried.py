"""What a rebase does not carry of a run's change to a table's metadata. Pure functions.

A rebase is built on `main`'s metadata, so what `main` changed stays. Of the run it carries snapshots, columns
with their documentation, and properties. Anything else it would lose without a word, and is refused by name.
"""

from __future__ import annotations

from branchlake_dagster.publication.rebase.changes import TableChange
from branchlake_dagster.wording import Reason

_WRITABLE = 2
"""The newest format version whose manifests PyIceberg writes."""

_OWN = frozenset({"location", "identity"})
"""A table that both sides created has these of the first one."""


def not_carried(mine: TableChange, theirs: TableChange) -> Reason | None:
    """Why a rebase of `mine` onto `theirs` would lose something of `mine`; None when it would not."""
    if theirs.after.format_version > _WRITABLE:
        return Reason(
            f"its format version is {theirs.after.format_version}, and a rebase writes"
            f" version {_WRITABLE} at most (no deletion vectors, no row lineage)",
            "format_version_of_main",
        )
    if mine.expired:
        why = f"the run expired {mine.expired} of its snapshots, which a rebase does not carry"
        return Reason(why, "snapshots_expired")
    if mine.before is None:
        return _created_apart(mine, theirs)
    if mine.after.format_version != mine.before.format_version:
        why = "the run changed its format version, which a rebase does not carry"
        return Reason(why, "format_version_changed")
    was = dict(mine.before.others)
    for name, value in mine.after.others:
        if value != was.get(name):
            why = f"the run changed its {name}, which a rebase does not carry"
            return Reason(why, f"{name.replace(' ', '_')}_changed")
    return None


def _created_apart(mine: TableChange, theirs: TableChange) -> Reason | None:
    """Both sides made the table: what it then is was decided by the first."""
    if mine.after.format_version != theirs.after.format_version:
        return Reason(
            "both sides created it with different format versions", "created_with_other_format_version"
        )
    now = dict(theirs.after.others)
    for name, value in mine.after.others:
        if name not in _OWN and value != now.get(name):
            code = f"created_with_other_{name.replace(' ', '_')}"
            return Reason(f"both sides created it with different {name}", code)
    return None
