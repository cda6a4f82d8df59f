"""End run branches that will not be published, and restore the branches of runs that have passed.

The rules are explained in docs/adr/0007.

The reaper reads everything before it changes the first branch. If the references, the heartbeats or the runs
cannot be read, nothing is ended. A branch is ended at the hash at which it was judged, so a later write keeps
it. Every branch that is kept has a reason.

A run may end successfully at the moment when its silent writer is declared dead. So the pass finally checks
the discarded branches, and restores those of passed runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from branchlake_dagster.cleanup.reaper_rules import (
    BranchFacts,
    BranchOwner,
    Limits,
    MainHistory,
    OwnerState,
    Reaping,
    ReapingAction,
    decide_publication_branch,
    decide_reaping,
)
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_owner import (
    UNKNOWN_ORIGIN,
    BatchBranch,
    BranchOrigin,
    Maker,
    OriginFinder,
    branch_filter,
    strip_name_prefix,
    writer_branch,
)
from branchlake_dagster.runs.discarding import (
    CLAIM_TAG_FILTER,
    DISCARDED_TAG_FILTER,
    claim_tag_name,
    discard_branch,
    list_claimed_branches,
    release_leftover_claim,
    restore_branch,
)
from branchlake_dagster.runs.failure_detector import Heartbeats, Liveness, judge_by_timestamp, watch_suspects
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import CodedReason


@dataclass(frozen=True)
class ReaperView:
    """The branches, heartbeats and runs that one pass has read and judges.

    `branches` and `owners` are by branch name; branches of unknown runs have no owner. `liveness` has the
    liveness of each heartbeat by branch name, also for branches that no longer exist.
    """

    branches: Mapping[str, Reference]
    liveness: Mapping[str, Mapping[Heartbeat, Liveness]]
    owners: Mapping[str, BranchOwner]
    now: datetime
    claims: frozenset[str] = frozenset()
    """The branches that were claimed before the branches were listed. Some may no longer exist."""
    claimed: frozenset[str] = frozenset()
    """The branches that were claimed before or after the runs were loaded."""

    def is_in_publication(self, branch: str) -> bool:
        """Return whether a publisher has claimed the branch and has not recorded its verdict yet."""
        return branch in self.claimed and not self.owner(branch).has_verdict

    def owner(self, branch: str) -> BranchOwner:
        """Return the owner of a branch. Its state is MISSING if Dagster has no run of the branch."""
        return self.owners.get(branch) or BranchOwner(run_id_of_branch(branch), OwnerState.MISSING)

    def is_run_known(self, branch: str) -> bool:
        """Return whether Dagster has the run of a branch."""
        return self.owner(branch).state is not OwnerState.MISSING

    def heartbeat_instances(self, branch: str) -> frozenset[str]:
        """Return the Dagster instances that send heartbeats for a branch."""
        return frozenset(beat.instance for beat in self.liveness.get(branch, {}) if beat.instance)

    def dead_heartbeats(self, branch: str) -> list[Heartbeat]:
        """Return the heartbeats on a branch whose writers are dead."""
        return [beat for beat, liveness in self.liveness.get(branch, {}).items() if liveness is Liveness.DEAD]


def branch_age(branch: Reference, started_at: datetime | None, now: datetime) -> timedelta | None:
    """Return the time since the branch's own last commit, or since `started_at`, whichever is later.

    `started_at` is when the branch's run or batch started. Returns None if neither time is known. Nessie does
    not record when a branch was created, and the head of a branch without own commits is its base.
    """
    metadata = branch.metadata
    own_commit = metadata.head_commit if metadata and metadata.commits_ahead else None
    signs_of_life = [
        moment for moment in (own_commit.commit_time if own_commit else None, started_at) if moment
    ]
    return now - max(signs_of_life) if signs_of_life else None


def restore_passed_branches(
    client: NessieClient,
    load_owners: Callable[[Collection[str]], Mapping[str, BranchOwner]],
    *,
    tag_filter: str,
    claim_filter: str = CLAIM_TAG_FILTER,
    only: Collection[str] | None = None,
    dry_run: bool = False,
) -> Iterator[Reaping]:
    """Restore the discarded branches of successful runs without a verdict, and yield a decision for each.

    Branches that a publisher has claimed, or whose work a retry has continued, are not restored. `tag_filter`
    is Nessie's filter for the tags of discarded branches, `claim_filter` that for the claims. If `only` is
    given, other branches than these are not restored. `load_owners` loads the owners of branches. Errors of
    reading are raised before anything is changed.
    """
    discarded_tags = client.references(filter=tag_filter)
    tags = {run_branch_name(tag.name.removeprefix(ReferencePrefix.DISCARDED)): tag for tag in discarded_tags}
    if only is not None:
        tags = {branch: tag for branch, tag in tags.items() if branch in only}
    if not tags:
        return
    # The order of reading matters: tags, then claims, then runs. A publisher claims, discards, reports, and
    # then releases its claim.
    claims = set(list_claimed_branches(client, claim_filter))
    branch_owners = load_owners(list(tags))
    for branch, tag in tags.items():
        owner = branch_owners.get(branch)
        if owner is None or owner.state is not OwnerState.AWAITING_PUBLICATION:
            continue
        if branch in claims or owner.is_continued:
            continue
        if dry_run or restore_branch(client, branch, tag):
            reason = CodedReason(
                "it was fenced before it had a verdict, and its run has passed", "run_passed"
            )
            yield Reaping(branch, owner.run_id, ReapingAction.RESTORE, reason, owner.state)


REAPER_BRANCH_FILTER = branch_filter(ReferencePrefix.RUN, ReferencePrefix.PUBLICATION)
"""Nessie's filter for the branches that the reaper judges."""

_MAX_SINGLE_REQUESTS = 200
"""Up to this number, references are requested one at a time; if there are more, all are listed at once."""


class BranchRuns(Protocol):
    """The reaper's interface to Dagster."""

    def owners(self, branches: Collection[str]) -> Mapping[str, BranchOwner]:
        """Load the owner of each branch. Branches of unknown runs are omitted."""

    def reports_after(self, run_id: str, beat: Heartbeat) -> bool:
        """Return whether the run wrote events after the writer of `beat` had become silent."""

    def report_dead(self, run_id: str, message: str) -> None:
        """Mark a run whose process is dead as failed in Dagster, with `message`."""

    def fenced(self, run_id: str, branch: str, reason: str) -> None:
        """Record on a run without a verdict that its branch was discarded. `reason` is the cause.

        A run that has a publisher's verdict, or did not open `branch`, is not changed.
        """


class Reaper:
    """Judges run branches: each is kept, deleted, or discarded (replaced by a tag that keeps its data).

    Also restores discarded branches whose runs have passed and wait for their publication.

    Args:
        client: The Nessie client.
        runs: The interface to Dagster.
        limits: The limits for runs whose tags contain none; with `anyones`, the limits for all runs.
        heartbeats: The storage of heartbeats, if any.
        now: The wall clock.
        monotonic: The clock for watching silent writers, in seconds.
        sleep: Waits for a number of seconds between readings of heartbeats.
        is_on_main: Returns whether a given commit is in `main`'s history.
        ref_filter: Nessie's filter for the branches to judge. It is not used with `only`.
        discarded_filter: Nessie's filter for the tags of discarded branches, which may be restored.
        claim_filter: Nessie's filter for the tags of the publishers' claims.
        instance: The id of this Dagster instance. Branches of other instances are kept.
        files: Reads table metadata, to find the instance that made a branch whose run Dagster does not have.
        only: The branches to judge; None judges all.
        anyones: True if a person has named the branches. Then branches of other instances are judged too, and
            every branch by `limits`.
    """

    def __init__(
        self,
        client: NessieClient,
        runs: BranchRuns,
        limits: Limits,
        *,
        heartbeats: Heartbeats | None,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
        is_on_main: Callable[[str], bool],
        ref_filter: str = REAPER_BRANCH_FILTER,
        discarded_filter: str = DISCARDED_TAG_FILTER,
        claim_filter: str = CLAIM_TAG_FILTER,
        instance: str | None = None,
        files: TableFiles | None = None,
        only: Collection[str] | None = None,
        anyones: bool = False,
    ) -> None:
        self._client = client
        self._runs = runs
        self._limits = limits
        self._heartbeats = heartbeats
        self._now = now
        self._monotonic = monotonic
        self._sleep = sleep
        self._is_on_main = is_on_main
        self._ref_filter = ref_filter
        self._discarded_filter = discarded_filter
        self._claim_filter = claim_filter
        self._instance = instance
        self._origins = OriginFinder(client, instance, files)
        self._only = None if only is None else frozenset(only)
        self._anyones = anyones

    def run(self, *, dry_run: bool = False, dead: Collection[Heartbeat] | None = None) -> Iterator[Reaping]:
        """Run one pass, and yield a decision for each branch, also for branches that are kept.

        Silent writers are watched until each of them is judged, which may take three of their intervals; a
        dry run does not watch. If `dead` is not None, a sensor has watched already: the writers of `dead` are
        dead unless they have sent a heartbeat since, and no other writer is watched.

        All branches, heartbeats and runs are read before the first branch is ended. Raises
        HeartbeatsUnreadable, and the errors of Nessie and Dagster.
        """
        view = self._inspect(watching=not dry_run and dead is None, dead=dead or ())
        decisions = [self._judge(branch, view) for branch in view.branches.values()]
        ended_branches = {branch for branch in view.liveness if branch not in view.branches}
        for decision in decisions:
            result = decision if dry_run else self._end_branch(decision, view.branches[decision.branch])
            if result.deletes_branch:
                ended_branches.add(result.branch)
            if not dry_run:
                self._report_dead_run(result.branch, view, ended_branches)
                if result.action is ReapingAction.DISCARD and view.is_run_known(result.branch):
                    self._runs.fenced(result.run_id, result.branch, result.reason)
            yield result
        if not dry_run:
            # A pass that died before its report to Dagster may have left heartbeats or a claim.
            for branch in view.liveness.keys() - view.branches.keys():
                self._report_dead_run(branch, view, ended_branches)
        discarded_filter = self._discarded_filter
        yield from restore_passed_branches(
            self._client,
            self._runs.owners,
            tag_filter=discarded_filter,
            claim_filter=self._claim_filter,
            only=self._only if self._anyones else None,
            dry_run=dry_run,
        )
        if not dry_run:
            for branch in view.claims & (self._only or view.claims) - (view.branches.keys() - ended_branches):
                self._end_claim(branch, view)

    def _inspect(self, *, watching: bool, dead: Collection[Heartbeat] = ()) -> ReaperView:
        # Claims are read before branches: a claim whose branch is missing afterwards is certainly a leftover.
        claims = frozenset(list_claimed_branches(self._client, self._claim_filter))
        branches = self._list_branches()
        liveness = judge_by_timestamp(self._load_heartbeats(), self._now())
        # A writer that has beaten since it was watched has a different heartbeat, so it does not match.
        liveness |= {beat: Liveness.DEAD for beat in dead if liveness.get(beat) is Liveness.SUSPECT}
        # Another instance's writers are watched by its own reaper.
        suspects = [
            beat
            for beat, state in liveness.items()
            if state is Liveness.SUSPECT and self._is_own_heartbeat(beat)
        ]
        if self._heartbeats and suspects and watching:
            verdicts = watch_suspects(
                self._heartbeats, suspects, monotonic=self._monotonic, sleep=self._sleep
            )
            other_liveness = {
                beat: state
                for beat, state in liveness.items()
                if state is Liveness.ALIVE or not self._is_own_heartbeat(beat)
            }
            liveness = other_liveness | dict(verdicts)
            branches = self._list_branches()
        by_branch: dict[str, dict[Heartbeat, Liveness]] = {}
        for beat, state in liveness.items():
            by_branch.setdefault(beat.branch, {})[beat] = state
        writer_branches = {
            writer_branch(run_branch_name(strip_name_prefix(name)))
            for name in (*branches, *by_branch, *claims)
        }
        owners = self._runs.owners(sorted(writer_branches))
        # Claims are read again: a run that has ended now may have claimed its branch just before it died.
        claimed = claims.union(list_claimed_branches(self._client, self._claim_filter))
        view = ReaperView(branches, by_branch, owners, self._now(), claims, claimed)
        return replace(view, branches=branches | self._load_ages(view))

    def _load_heartbeats(self) -> Sequence[Heartbeat]:
        heartbeats = self._heartbeats.all() if self._heartbeats else ()
        if self._only is None:
            return heartbeats
        wanted_branches = {*self._only, *map(writer_branch, self._only)}
        return [beat for beat in heartbeats if beat.branch in wanted_branches]

    def _list_branches(self, *, metadata: bool = False) -> dict[str, Reference]:
        if self._only is not None:
            return self._load_branches(self._only, metadata=metadata)
        references = self._client.references(filter=self._ref_filter, fetch_metadata=metadata)
        return {ref.name: ref for ref in references}

    def _load_branches(self, names: Collection[str], *, metadata: bool) -> dict[str, Reference]:
        references: dict[str, Reference] = {}
        for name in sorted(names):
            with contextlib.suppress(ReferenceNotFound):
                references[name] = self._client.reference(name, fetch_metadata=metadata)
        return references

    def _load_ages(self, view: ReaperView) -> dict[str, Reference]:
        """Load the metadata of the branches whose age decides, and return them with it, by name.

        These are branches of missing runs, and of active runs that started longer ago than their `max_age`.
        Loading the metadata of all branches would take long.
        """

        def needs_age(name: str) -> bool:
            owner = view.owner(name)
            oldest = view.now - self._limits_of(owner).max_age
            is_young = owner.started_at is not None and owner.started_at >= oldest
            return owner.state is OwnerState.MISSING or (owner.state is OwnerState.ACTIVE and not is_young)

        names_to_load = [
            name for name in view.branches if needs_age(run_branch_name(strip_name_prefix(name)))
        ]
        # A branch that is gone now is noticed again when it is ended.
        is_many = len(names_to_load) > _MAX_SINGLE_REQUESTS
        references = (
            self._list_branches(metadata=True)
            if is_many
            else self._load_branches(names_to_load, metadata=True)
        )
        # Keep the hash from before the runs were loaded, because a write since then must keep the branch.
        existing_names = [name for name in names_to_load if name in references]
        return {
            name: replace(view.branches[name], metadata=references[name].metadata) for name in existing_names
        }

    def _judge(self, branch: Reference, view: ReaperView) -> Reaping:
        if branch.name.startswith(ReferencePrefix.RUN) and (batch := BatchBranch.from_name(branch.name)):
            return self._judge_batch(branch, batch, view)
        liveness = view.liveness.get(branch.name, {})
        publishers = frozenset(state for beat, state in liveness.items() if beat.kind != "run")
        if branch.name.startswith(ReferencePrefix.PUBLICATION):
            run_id = branch.name.removeprefix(ReferencePrefix.PUBLICATION)
            run_branch_exists = run_branch_name(run_id) in view.branches
            owner_state = view.owner(run_branch_name(run_id)).state
            origin = (
                self._find_origin(branch)
                if owner_state is OwnerState.MISSING and not run_branch_exists
                else UNKNOWN_ORIGIN
            )
            action, reason = decide_publication_branch(
                publishers, run_branch_exists=run_branch_exists, state=owner_state, origin=origin
            )
            return Reaping(
                branch.name,
                run_id,
                action,
                reason,
                owner_state,
                instance=self._format_other_instances(origin),
            )
        writers = frozenset(state for beat, state in liveness.items() if beat.kind != "publisher")
        owner = view.owner(branch.name)
        age = branch_age(branch, owner.started_at, view.now)
        origin = UNKNOWN_ORIGIN
        if owner.state is OwnerState.MISSING:
            origin = self._find_origin(branch, heartbeat_instances=view.heartbeat_instances(branch.name))
        facts = BranchFacts(
            owner.state,
            age,
            since_end=view.now - owner.ended_at if owner.ended_at else None,
            # While a run is active, only a publisher inside the run can send heartbeats for its branch.
            writers=frozenset(liveness.values()) if owner.state is OwnerState.ACTIVE else writers,
            publishers=publishers,
            still_reports=self._still_reports(owner, view.dead_heartbeats(branch.name)),
            is_claimed=view.is_in_publication(branch.name),
            has_verdict=owner.has_verdict,
            origin=origin,
            is_on_main=owner.state is OwnerState.PUBLISHED and self._is_on_main(owner.publication),
        )
        action, reason = decide_reaping(facts, self._limits_of(owner))
        heartbeat = ", ".join(sorted(set(liveness.values()))) or "none"
        other_instances = self._format_other_instances(origin)
        return Reaping(
            branch.name, owner.run_id, action, reason, owner.state, age, heartbeat, other_instances
        )

    def _judge_batch(self, branch: Reference, batch: BatchBranch, view: ReaperView) -> Reaping:
        """Judge the branch of a batch of a live ingestion.

        While the live run is active, the rules of its state and heartbeats apply. Afterwards an unfinished
        batch is discarded, unless its branch was written to recently.
        """
        live_branch = writer_branch(branch.name)
        owner, liveness = view.owner(live_branch), view.liveness.get(live_branch, {})
        state = owner.state if owner.state in (OwnerState.ACTIVE, OwnerState.MISSING) else OwnerState.ENDED
        origin = UNKNOWN_ORIGIN
        if state is OwnerState.MISSING:
            origin = self._find_origin(branch, heartbeat_instances=view.heartbeat_instances(live_branch))
        facts = BranchFacts(
            state,
            branch_age(branch, batch.created_at, view.now),
            writers=frozenset(liveness.values()),
            still_reports=self._still_reports(owner, view.dead_heartbeats(live_branch)),
            origin=origin,
        )
        action, reason = decide_reaping(facts, self._limits_of(owner))
        heartbeat = ", ".join(sorted(set(liveness.values()))) or "none"
        other_instances = self._format_other_instances(origin)
        return Reaping(
            branch.name, owner.run_id, action, reason, state, facts.age, heartbeat, other_instances
        )

    def _limits_of(self, owner: BranchOwner) -> Limits:
        """Return the limits that the run has recorded, else those of the reaper.

        If a person has named the branch (`anyones`), the reaper's limits always apply.
        """
        return self._limits if self._anyones else self._limits.for_run(owner.retention)

    def _is_own_heartbeat(self, beat: Heartbeat) -> bool:
        """Return whether the heartbeat may belong to this instance.

        A heartbeat that does not name an instance may belong to any. With `anyones`, every heartbeat counts.
        """
        return self._anyones or not beat.instance or beat.instance == self._instance

    def _find_origin(
        self,
        ref: Reference,
        *,
        base_hash: str | None = None,
        heartbeat_instances: frozenset[str] = frozenset(),
    ) -> BranchOrigin:
        return (
            BranchOrigin(Maker.HERE)
            if self._anyones
            else self._origins.find_origin(ref, base_hash=base_hash, heartbeat_instances=heartbeat_instances)
        )

    def _end_claim(self, branch: str, view: ReaperView) -> None:
        """Delete the claim of a branch that no longer exists, if this Dagster instance made the claim.

        A publisher of another instance may still need its claim.
        """
        if not view.is_run_known(branch):
            try:
                tag = self._client.reference(claim_tag_name(branch), fetch_metadata=True)
            except ReferenceNotFound:
                return
            base_hash = MainHistory(self._client).find_base(tag.pinned_ref)
            if self._find_origin(tag, base_hash=base_hash).maker is not Maker.HERE:
                return
        release_leftover_claim(self._client, branch)

    def _format_other_instances(self, origin: BranchOrigin) -> str:
        return ", ".join(instance_id for instance_id in origin.instance_ids if instance_id != self._instance)

    def _still_reports(self, owner: BranchOwner, dead: Sequence[Heartbeat]) -> bool:
        """Return whether the run of `owner` is active and its executor or another step outlived a writer.

        `dead` are the last heartbeats of the branch's dead writers; False if there are none. Raises
        RunsUnreadable.
        """
        return owner.state is OwnerState.ACTIVE and any(
            self._runs.reports_after(owner.run_id, beat) for beat in dead
        )

    def _end_branch(self, decision: Reaping, branch: Reference) -> Reaping:
        try:
            if decision.action is ReapingAction.DISCARD:
                discard_branch(self._client, branch)
            elif decision.action is ReapingAction.DELETE:
                self._client.delete_branch(branch.name, expected_hash=branch.hash)
        except NessieConflict:
            return replace(
                decision,
                action=ReapingAction.KEEP,
                reason=CodedReason("it was written to during this pass", "written_meanwhile"),
            )
        except ReferenceNotFound:
            return replace(
                decision, reason=CodedReason("another process has deleted it meanwhile", "deleted_meanwhile")
            )
        return decision

    def _report_dead_run(self, branch: str, view: ReaperView, ended_branches: Collection[str]) -> None:
        """Mark a run as failed in Dagster if all its writers are dead, and remove their heartbeats.

        A publisher inside the run counts as a writer. If it had claimed the branch, the branch remains. After
        the end of the run, the next publisher finds out whether `main` has the branch. `ended_branches` are
        the names of the branches that this pass has ended.
        """
        dead = view.dead_heartbeats(branch)
        if not dead or self._heartbeats is None:
            return
        owner = view.owner(branch)
        if owner.state is OwnerState.ACTIVE:
            can_end_run = branch in ended_branches or view.is_in_publication(branch)
            if not can_end_run or len(dead) < len(view.liveness[branch]) or self._still_reports(owner, dead):
                return
            self._runs.report_dead(owner.run_id, _format_silence(dead))
            if branch in ended_branches:
                self._runs.fenced(owner.run_id, branch, _format_silence(dead))
        for beat in dead:
            if owner.state is not OwnerState.MISSING or beat.instance or branch in ended_branches:
                self._heartbeats.remove(beat.branch, beat.writer)


def _format_silence(dead: Sequence[Heartbeat]) -> str:
    writers = ", ".join(sorted(f"process {beat.pid} on {beat.host}" for beat in dead))
    return f"Its writer is dead: no heartbeat of {writers} for {dead[0].max_silence_s:g} s."
