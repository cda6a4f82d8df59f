"""Runs that have passed although they were fenced: their branches come back, to be published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from branchlake_dagster.branching.branch.claim import CLAIM_TAGS, claimed_branches
from branchlake_dagster.branching.branch.reference_names import DISCARDED_PREFIX
from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.branching.fencing.discard import give_back
from branchlake_dagster.branching.reaping.rules import Owner, Reaping, ReapingAction, RunState
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.wording import Reason


def give_passed_back(
    client: NessieClient,
    owners: Callable[[Collection[str]], Mapping[str, Owner]],
    *,
    listing: str,
    claimed: str = CLAIM_TAGS,
    dry_run: bool = False,
) -> Iterator[Reaping]:
    """Make the discarded branches again whose run waits for a verdict and that nobody else has in hand.

    `listing` is Nessie's filter for the tags of discarded branches, `claimed` for the claims, `owners` tells
    whose they are. Raises what all raise, before it changed anything.
    """
    found = client.references(filter=listing)
    tags = {branch_name(tag.name.removeprefix(DISCARDED_PREFIX)): tag for tag in found}
    if not tags:
        return
    # Claims after tags, and runs after claims: a publisher claims, discards, reports and then releases
    # its claim.
    claims = set(claimed_branches(client, claimed))
    told = owners(list(tags))
    for branch, tag in tags.items():
        owner = told.get(branch)
        if owner is None or owner.state is not RunState.AWAITING_PUBLICATION:
            continue
        if branch in claims or owner.continued:
            continue
        if dry_run or give_back(client, branch, tag):
            why = Reason("it was fenced before a verdict was told, and its run has passed", "run_passed")
            yield Reaping(branch, owner.run_id, ReapingAction.GIVE_BACK, why, owner.state)
