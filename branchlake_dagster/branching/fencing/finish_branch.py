"""The end of a run's branch, after the publisher's last word on it."""

from __future__ import annotations

from branchlake_dagster.branching.branch.claim import release_claim
from branchlake_dagster.branching.fencing.discard import discard
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference


def finish_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> None:
    """Delete the branch, then its claim. A branch that stays keeps it: somebody has begun with it."""
    if drop_branch(client, branch, keep_data=keep_data):
        release_claim(client, branch.name, at=branch.hash)


def drop_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> bool:
    """Delete the branch at the hash that was judged; whether it is gone.

    `keep_data`: its files are `main`'s now. Otherwise it becomes a tag, until its files are deleted.
    """
    try:
        if keep_data:
            client.delete_branch(branch.name, expected_hash=branch.hash)
        else:
            discard(client, branch)
    except ReferenceNotFound:
        return True  # another publisher was faster
    except NessieConflict:
        # A late writer. The run is over: the next pass finds the verdict told and deletes what is there.
        return False
    return True
