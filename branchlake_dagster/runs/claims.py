"""Claim a run branch for publication: the hash that the first publisher reads is final for all publishers.

Creating a reference is an atomic compare-and-set in Nessie. Without a claim, two publishers judged two states
of one branch, one before and one after the late write of a dead run. The second state was merged on top of
the first.
"""

from __future__ import annotations

import contextlib

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_names import tag_filter
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.stored_names import ReferencePrefix

CLAIM_TAG_FILTER = tag_filter(ReferencePrefix.CLAIM)
"""Nessie's filter for the tags of claims."""


def claim_tag_name(branch: str) -> str:
    """Return the name of the tag that claims a run branch."""
    return f"{ReferencePrefix.CLAIM}{run_id_of_branch(branch)}"


def claim_branch(client: NessieClient, branch: Reference) -> tuple[str, bool]:
    """Claim the branch.

    Return the hash to publish, and whether an earlier publisher had claimed it already.
    """
    try:
        return client.create_tag(
            claim_tag_name(branch.name), from_ref=MAIN, from_hash=branch.hash
        ).hash, False
    except NessieAlreadyExists:
        return client.reference(claim_tag_name(branch.name)).hash, True


def is_claimed(client: NessieClient, branch: str) -> bool:
    """Return whether a publisher has claimed the branch."""
    try:
        client.reference(claim_tag_name(branch))
    except ReferenceNotFound:
        return False
    return True


def release_claim(client: NessieClient, branch: str, *, expected_hash: str | None = None) -> None:
    """Delete the claim of a branch that is gone. The reaper deletes claims that are left over.

    `expected_hash` is the probable hash of the claim, which saves a request.
    """
    name = claim_tag_name(branch)
    try:
        if expected_hash is not None:
            with contextlib.suppress(NessieConflict):
                client.delete_tag(name, expected_hash=expected_hash)
                return
        client.delete_tag(name, expected_hash=client.reference(name).hash)
    except (ReferenceNotFound, NessieConflict):
        return  # another publisher was faster


def list_claimed_branches(client: NessieClient, claim_filter: str = CLAIM_TAG_FILTER) -> list[str]:
    """List the branches that a publisher has claimed, including deleted ones.

    `claim_filter` is Nessie's filter.
    """
    claim_tags = client.references(filter=claim_filter)
    return [run_branch_name(tag.name.removeprefix(ReferencePrefix.CLAIM)) for tag in claim_tags]


def release_leftover_claim(client: NessieClient, branch: str) -> None:
    """Delete the claim of a branch if the branch is gone."""
    try:
        client.reference(branch)
    except ReferenceNotFound:
        release_claim(client, branch)
