"""The branches on which compactions work: their names, and the removal of abandoned ones.

A branch is named `compact-` and a UUID of version 1, which holds the time of its creation: Nessie records no
age for a branch without commits of its own. A process that was killed leaves its branch behind. Nobody else
writes to it or reads it, so a branch that is older than the longest pass is deleted, by the next compaction
or by whoever calls `remove_abandoned_branches`. Its new files are then unreachable, and the collector of
unreachable files removes them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid1

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieError, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_owner import UUID_PATTERN, branch_filter
from branchlake_dagster.stored_names import ReferencePrefix

ABANDONED_AFTER = timedelta(hours=24)
"""The age at which a branch is certainly not at work any more: no pass may last longer."""
_GREGORIAN_EPOCH = datetime(1582, 10, 15, tzinfo=UTC)


def new_branch_name() -> str:
    """Return a new name. Its UUID has the present time and a random node, not this machine's address."""
    return f"{ReferencePrefix.COMPACTION}{uuid1(node=secrets.randbits(47) | 1 << 40)}"


def branch_created_at(name: str) -> datetime | None:
    """Return when a compaction's branch was created; None if this is not the name of one."""
    if not re.fullmatch(f"{ReferencePrefix.COMPACTION}{UUID_PATTERN}", name):
        return None
    uuid = UUID(name.removeprefix(ReferencePrefix.COMPACTION))
    return _GREGORIAN_EPOCH + timedelta(microseconds=uuid.time // 10) if uuid.version == 1 else None


def remove_abandoned_branches(
    client: NessieClient, *, now: datetime, abandoned_after: timedelta = ABANDONED_AFTER
) -> list[str]:
    """Delete the branches of compactions that began before `abandoned_after`; return their names."""
    removed = []
    for reference in list(client.references(filter=branch_filter(ReferencePrefix.COMPACTION))):
        created_at = branch_created_at(reference.name)
        if created_at is not None and now - created_at > abandoned_after:
            with suppress(NessieConflict, ReferenceNotFound):  # another process was faster
                client.delete_branch(reference.name, expected_hash=reference.hash)
                removed.append(reference.name)
    return removed


@contextmanager
def open_branch(client: NessieClient) -> Iterator[Reference]:
    """Create a branch at the head of `main`, and delete it at the end.

    A branch that cannot be deleted is left to `remove_abandoned_branches`.
    """
    base_hash = client.reference(MAIN).hash
    branch = client.create_branch(new_branch_name(), from_ref=MAIN, from_hash=base_hash)
    try:
        yield branch
    finally:
        with suppress(NessieError):
            head = client.reference(branch.name)
            client.delete_branch(branch.name, expected_hash=head.hash)
