"""Runs that have passed although they were fenced: their branches come back, to be published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from branchlake_dagster.branching.branch.claim import JUDGED_TAGS, pinned_branches
from branchlake_dagster.branching.branch.reference_names import DISCARDED_PREFIX
from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.branching.fencing.discard import give_back
from branchlake_dagster.branching.reaping.rules import Action, Holder, Reaping, RunState
from branchlake_dagster.lakehouse.nessie.client import NessieClient


def give_passed_back(
    client: NessieClient,
    holders: Callable[[Collection[str]], Mapping[str, Holder]],
    *,
    listing: str,
    pinned: str = JUDGED_TAGS,
    dry_run: bool = False,
) -> Iterator[Reaping]:
    """Make the discarded branches again whose run waits for a verdict and that nobody else has in hand.

    `listing` is Nessie's filter for the tags of discarded branches, `pinned` for the pins, `holders` tells
    whose they are. Raises what all raise, before it changed anything.
    """
    found = client.references(filter=listing)
    tags = {branch_name(tag.name.removeprefix(DISCARDED_PREFIX)): tag for tag in found}
    if not tags:
        return
    # Pins after tags, and runs after pins: a publisher pins, then discards, then tells, then unpins.
    pins = set(pinned_branches(client, pinned))
    told = holders(list(tags))
    for branch, tag in tags.items():
        holder = told.get(branch)
        if holder is None or holder.state is not RunState.AWAITING_PUBLICATION:
            continue
        if branch in pins or holder.continued:
            continue
        if dry_run or give_back(client, branch, tag):
            reason = "it was fenced before a verdict was told, and its run has passed"
            yield Reaping(branch, holder.run_id, Action.GIVE_BACK, reason, holder.state)
