"""How the in-memory Nessie merges: the changes since the merge base, key by key, as one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from branchlake_dagster_tests.simulation.answers import Key
from branchlake_dagster_tests.simulation.committing import check_namespaces, key_exists, moved
from branchlake_dagster_tests.simulation.history import Changes, Json


@dataclass
class MergePlan:
    """The changes of a merge, the keys it looked at with their modes, and those in conflict."""

    changes: Changes = field(default_factory=Changes)
    modes: dict[Key, str] = field(default_factory=dict)
    conflicts: dict[Key, dict[str, Any]] = field(default_factory=dict)


def plan(
    base: Mapping[Key, Json], source: Mapping[Key, Json], target: Mapping[Key, Json], modes: Mapping[Key, str]
) -> MergePlan:
    """What merging `source`, which started from `base`, does to `target`."""
    made = MergePlan()
    gone = {value["id"]: value for key, value in base.items() if key not in source}
    for key in sorted(base.keys() | source.keys()):
        before, after, now = base.get(key), source.get(key), target.get(key)
        if before == after:
            continue
        mode = made.modes[key] = modes.get(key, "NORMAL")
        if mode == "DROP":
            continue
        if before is None and after is not None and after["id"] in gone:
            # The server takes the new name of a renamed table for one that is there already, and where
            # the value is the old one loses it: only the old name's deletion is merged.
            if after != gone[after["id"]]:
                made.conflicts[key] = key_exists(key)
            continue
        found = moved(key, before, now, absent_is_fine=after is not None)
        if found and mode == "NORMAL" and not _both_made_namespace(found, after, now):
            made.conflicts[key] = found
        if after is None:
            made.changes.deletes.add(key)
        else:
            made.changes.puts[key] = after
    check_namespaces([key for key in made.changes.puts if key not in target], made.changes, target)
    return made


def _both_made_namespace(found: Json, after: Json | None, now: Json | None) -> bool:
    return bool(
        found["conflictType"] == "KEY_EXISTS"
        and after
        and now
        and after["type"] == now["type"] == "NAMESPACE"
    )
