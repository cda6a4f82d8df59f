"""The branches of compactions: their names, and the removal of abandoned branches.

A branch is named `compact-` and a UUID of version 1, which contains the time of its creation: Nessie does not
record the age of a branch without commits of its own. A process that is killed leaves its branch behind.
Nobody else writes to this branch or reads it, so `remove_abandoned_branches` deletes it after the duration of
the longest possible pass. Each compaction begins with this call. Then the branch's new files are unreachable,
and the garbage collection deletes them.
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
"""The age at which a branch is abandoned. No pass may last longer."""
_GREGORIAN_EPOCH = datetime(1582, 10, 15, tzinfo=UTC)


def new_branch_name() -> str:
    """Return a new branch name. Its UUID contains the present time, and a random number as its node."""
    return f"{ReferencePrefix.COMPACTION}{uuid1(node=secrets.randbits(47) | 1 << 40)}"


def branch_created_at(name: str) -> datetime | None:
    """Return when a compaction's branch was created; None if `name` is not the name of such a branch."""
    if not re.fullmatch(f"{ReferencePrefix.COMPACTION}{UUID_PATTERN}", name):
        return None
    uuid = UUID(name.removeprefix(ReferencePrefix.COMPACTION))
    return _GREGORIAN_EPOCH + timedelta(microseconds=uuid.time // 10) if uuid.version == 1 else None


def remove_abandoned_branches(
    client: NessieClient, *, now: datetime, abandoned_after: timedelta = ABANDONED_AFTER
) -> list[str]:
    """Delete the branches of compactions that are older than `abandoned_after`. Return the deleted names."""
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
    """Create a branch at the head of `main`, and delete it when the context ends.

    If Nessie refuses the deletion, a later call of `remove_abandoned_branches` deletes the branch.
    """
    base_hash = client.reference(MAIN).hash
    branch = client.create_branch(new_branch_name(), from_ref=MAIN, from_hash=base_hash)
    try:
        yield branch
    finally:
        with suppress(NessieError):
            head = client.reference(branch.name)
            client.delete_branch(branch.name, expected_hash=head.hash)
