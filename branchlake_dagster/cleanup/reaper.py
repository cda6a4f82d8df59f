"""Reaping: ending run branches that nobody will publish, and giving back those whose run has passed.

The rules: docs/adr/0007.

Everything is looked up before the first branch is touched: when a page of the listing, the heartbeats or the
runs cannot be read, nothing is ended. A branch is ended by the hash it was judged at, so a write in between
keeps it. Whatever is kept has its reason.

A run may end well in the moment in which its silent writer is taken for dead. So the pass looks once more
at what is fenced, and gives the branches of passed runs back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from branchlake_dagster.cleanup.main_history import MainHistory
from branchlake_dagster.cleanup.reaper_rules import (
    Facts,
    Limits,
    Owner,
    Reaping,
    ReapingAction,
    RunState,
    decide,
    decide_publication,
)
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_names import branches, run_of
from branchlake_dagster.runs.branch_owner import BatchBranch, at_work_on
from branchlake_dagster.runs.claims import CLAIM_TAGS, claim_tag, claimed_branches, release_leftover_claim
from branchlake_dagster.runs.discarding import DISCARDED_TAGS, discard, give_back
from branchlake_dagster.runs.failure_detector import Heartbeats, Liveness, by_timestamp, watch
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.runs.origin import UNKNOWN, Maker, Makers, Origin
from branchlake_dagster.runs.run_branch import branch_name, run_id_of
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import Reason


@dataclass(frozen=True)
class Seen:
    """What is known. `pulses` are by branch, also of those that are gone."""

    branches: Mapping[str, Reference]
    pulses: Mapping[str, Mapping[Heartbeat, Liveness]]
    owners: Mapping[str, Owner]
    moment: datetime
    claims: frozenset[str] = frozenset()
    """The branches, gone ones too, that were claimed before they were listed."""
    claimed: frozenset[str] = frozenset()
    """The branches that were claimed before or after the runs were looked up."""

    def in_publication(self, branch: str) -> bool:
        """Whether a publisher has claimed the branch and not told yet how it ended."""
        return branch in self.claimed and not self.owner(branch).told

    def owner(self, branch: str) -> Owner:
        """The run of a branch; one that is missing, where Dagster knows none."""
        return self.owners.get(branch) or Owner(run_id_of(branch), RunState.MISSING)

    def run_known(self, branch: str) -> bool:
        """Whether Dagster knows the run of a branch."""
        return self.owner(branch).state is not RunState.MISSING

    def instances(self, branch: str) -> frozenset[str]:
        """The Dagster instances of those who beat on a branch."""
        return frozenset(beat.instance for beat in self.pulses.get(branch, {}) if beat.instance)

    def dead(self, branch: str) -> list[Heartbeat]:
        """The heartbeats on a branch whose writers are dead."""
        return [beat for beat, pulse in self.pulses.get(branch, {}).items() if pulse is Liveness.DEAD]


def age_of(branch: Reference, started: datetime | None, now: datetime) -> timedelta | None:
    """Time since the branch's own last commit, or since `started`, when its run or batch began.

    Nessie keeps no creation time of a branch; a branch without commits has its base's head commit.
    """
    metadata = branch.metadata
    own = metadata.head_commit if metadata and metadata.commits_ahead else None
    signs = [moment for moment in (own.commit_time if own else None, started) if moment]
    return now - max(signs) if signs else None


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
    tags = {branch_name(tag.name.removeprefix(ReferencePrefix.DISCARDED)): tag for tag in found}
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


OUR_BRANCHES = branches(ReferencePrefix.RUN, ReferencePrefix.PUBLICATION)
"""Nessie's filter for the branches that the reaper looks at."""

_MANY = 200
"""More references than these are listed, fewer are asked for one by one."""


class Runs(Protocol):
    """What the reaper asks of Dagster, and tells it."""

    def owners(self, branches: Collection[str]) -> Mapping[str, Owner]:
        """The run of each branch; branches of unknown runs are left out."""

    def reports_after(self, run_id: str, beat: Heartbeat) -> bool:
        """Whether the run still wrote events after its writer's last beat."""

    def report_dead(self, run_id: str, message: str) -> None:
        """End a run whose process is dead."""

    def fenced(self, run_id: str, branch: str, reason: str) -> None:
        """Show on a run that has no verdict that its branch was discarded, and why."""


class Reaper:
    """Judges the branches of the Nessie filter `listing` and ends those that the rules allow.

    `fenced` is the filter for the tags of discarded branches, which come back when their run has passed,
    `claims` for those of the publishers' claims. `makers` tells whose a branch is of which Dagster knows no
    run; `instance` is the id of this Dagster instance. What another one made is left to it, unless
    `anyones`: a person has named it. `limits` hold for runs that recorded none themselves, and for what a
    person has named. With `only` nothing but these branches is looked at.

    `now` is the wall clock, `monotonic` and `sleep` are for watching silent writers. `is_on_main` returns
    whether `main`'s history holds a commit.
    """

    def __init__(
        self,
        client: NessieClient,
        runs: Runs,
        limits: Limits,
        *,
        heartbeats: Heartbeats | None,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
        is_on_main: Callable[[str], bool],
        listing: str = OUR_BRANCHES,
        fenced: str = DISCARDED_TAGS,
        claims: str = CLAIM_TAGS,
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
        self._listing = listing
        self._fenced = fenced
        self._claims = claims
        self._instance = instance
        self._makers = Makers(client, instance, files)
        self._only = None if only is None else frozenset(only)
        self._anyones = anyones

    def run(self, *, dry_run: bool = False, dead: Collection[Heartbeat] | None = None) -> Iterator[Reaping]:
        """One pass. With suspects it waits once until they can be told from the dead; a dry run does not.

        With `dead`, somebody has watched already: of the suspects these are dead, and no other is watched.

        Raises HeartbeatsUnreadable and whatever Nessie and Dagster raise, before anything was ended.
        """
        seen = self._look(watching=not dry_run and dead is None, dead=dead or ())
        decisions = [self._judge(branch, seen) for branch in seen.branches.values()]
        ended = {branch for branch in seen.pulses if branch not in seen.branches}
        for decision in decisions:
            done = decision if dry_run else self._end(decision, seen.branches[decision.branch])
            if done.delete:
                ended.add(done.branch)
            if not dry_run:
                self._report_dead(done.branch, seen, ended)
                if done.action is ReapingAction.DISCARD and seen.run_known(done.branch):
                    self._runs.fenced(done.run_id, done.branch, done.reason)
            yield done
        if not dry_run:
            # A pass that died before it told Dagster left the heartbeat of the dead behind, or a claim.
            for branch in seen.pulses.keys() - seen.branches.keys():
                self._report_dead(branch, seen, ended)
        fenced = self._fenced
        yield from give_passed_back(
            self._client, self._runs.owners, listing=fenced, claimed=self._claims, dry_run=dry_run
        )
        if not dry_run:
            for branch in seen.claims & (self._only or seen.claims) - (seen.branches.keys() - ended):
                self._end_claim(branch, seen)

    def _look(self, *, watching: bool, dead: Collection[Heartbeat] = ()) -> Seen:
        # Claims before branches: one whose branch is missing afterwards is a leftover for certain.
        claims = frozenset(claimed_branches(self._client, self._claims))
        branches = self._list()
        pulses = by_timestamp(self._beats(), self._now())
        # Of one that has beaten since it was watched the beat is another.
        pulses |= {beat: Liveness.DEAD for beat in dead if pulses.get(beat) is Liveness.SUSPECT}
        # Another instance's writers are watched by its own reaper.
        suspects = [b for b, pulse in pulses.items() if pulse is Liveness.SUSPECT and self._mine(b)]
        if self._heartbeats and suspects and watching:
            settled = watch(self._heartbeats, suspects, monotonic=self._monotonic, sleep=self._sleep)
            others = {b: pulse for b, pulse in pulses.items() if pulse is Liveness.ALIVE or not self._mine(b)}
            pulses = others | dict(settled)
            branches = self._list()
        by_branch: dict[str, dict[Heartbeat, Liveness]] = {}
        for beat, pulse in pulses.items():
            by_branch.setdefault(beat.branch, {})[beat] = pulse
        runs = {at_work_on(branch_name(run_of(name))) for name in (*branches, *by_branch, *claims)}
        owners = self._runs.owners(sorted(runs))
        # And once more: a run that has ended claims nothing, but it may just have done so and died.
        claimed = claims.union(claimed_branches(self._client, self._claims))
        seen = Seen(branches, by_branch, owners, self._now(), claims, claimed)
        return replace(seen, branches=branches | self._with_ages(seen))

    def _beats(self) -> Sequence[Heartbeat]:
        found = self._heartbeats.all() if self._heartbeats else ()
        if self._only is None:
            return found
        named = {*self._only, *map(at_work_on, self._only)}
        return [beat for beat in found if beat.branch in named]

    def _list(self, *, metadata: bool = False) -> dict[str, Reference]:
        if self._only is not None:
            return self._each(self._only, metadata=metadata)
        found = self._client.references(filter=self._listing, fetch_metadata=metadata)
        return {ref.name: ref for ref in found}

    def _each(self, names: Collection[str], *, metadata: bool) -> dict[str, Reference]:
        found: dict[str, Reference] = {}
        for name in sorted(names):
            with contextlib.suppress(ReferenceNotFound):
                found[name] = self._client.reference(name, fetch_metadata=metadata)
        return found

    def _with_ages(self, seen: Seen) -> dict[str, Reference]:
        """The branches whose last commit matters, with metadata: asking for that of all takes long."""

        def matters(name: str) -> bool:
            owner = seen.owner(name)
            oldest = seen.moment - self._limits_of(owner).max_age
            young = owner.started is not None and owner.started >= oldest
            return owner.state is RunState.MISSING or (owner.state is RunState.ACTIVE and not young)

        wanted = [name for name in seen.branches if matters(branch_name(run_of(name)))]
        # One that is gone is found gone again when it is its turn.
        many = len(wanted) > _MANY
        found = self._list(metadata=True) if many else self._each(wanted, metadata=True)
        # Still at the hash of before the runs were looked up: a write since then must keep the branch.
        both = [name for name in wanted if name in found]
        return {name: replace(seen.branches[name], metadata=found[name].metadata) for name in both}

    def _judge(self, branch: Reference, seen: Seen) -> Reaping:
        if branch.name.startswith(ReferencePrefix.RUN) and (batch := BatchBranch.of(branch.name)):
            return self._judge_batch(branch, batch, seen)
        here = seen.pulses.get(branch.name, {})
        publishers = frozenset(pulse for beat, pulse in here.items() if beat.kind != "run")
        if branch.name.startswith(ReferencePrefix.PUBLICATION):
            run_id = branch.name.removeprefix(ReferencePrefix.PUBLICATION)
            waits = branch_name(run_id) in seen.branches
            state = seen.owner(branch_name(run_id)).state
            made = self._made(branch) if state is RunState.MISSING and not waits else UNKNOWN
            action, reason = decide_publication(publishers, run_branch_exists=waits, state=state, made=made)
            return Reaping(branch.name, run_id, action, reason, state, instance=self._other(made))
        writers = frozenset(pulse for beat, pulse in here.items() if beat.kind != "publisher")
        owner = seen.owner(branch.name)
        age = age_of(branch, owner.started, seen.moment)
        made = UNKNOWN
        if owner.state is RunState.MISSING:
            made = self._made(branch, beating=seen.instances(branch.name))
        facts = Facts(
            owner.state,
            age,
            since_end=seen.moment - owner.ended if owner.ended else None,
            # Of a run at work only a publisher inside the run itself can beat.
            writers=frozenset(here.values()) if owner.state is RunState.ACTIVE else writers,
            publishers=publishers,
            reports=self._reports(owner, seen.dead(branch.name)),
            claimed=seen.in_publication(branch.name),
            told=owner.told,
            made=made,
            on_main=owner.state is RunState.PUBLISHED and self._is_on_main(owner.publication),
        )
        action, reason = decide(facts, self._limits_of(owner))
        heartbeat = ", ".join(sorted(set(here.values()))) or "none"
        other = self._other(made)
        return Reaping(branch.name, owner.run_id, action, reason, owner.state, age, heartbeat, other)

    def _judge_batch(self, branch: Reference, batch: BatchBranch, seen: Seen) -> Reaping:
        """Of a live run that is at work, as its own branch would be; of any other one, nobody works on it."""
        home = at_work_on(branch.name)
        live, here = seen.owner(home), seen.pulses.get(home, {})
        state = live.state if live.state in (RunState.ACTIVE, RunState.MISSING) else RunState.ENDED
        made = UNKNOWN
        if state is RunState.MISSING:
            made = self._made(branch, beating=seen.instances(home))
        facts = Facts(
            state,
            age_of(branch, batch.began, seen.moment),
            writers=frozenset(here.values()),
            reports=self._reports(live, seen.dead(home)),
            made=made,
        )
        action, reason = decide(facts, self._limits_of(live))
        heartbeat = ", ".join(sorted(set(here.values()))) or "none"
        other = self._other(made)
        return Reaping(branch.name, live.run_id, action, reason, state, facts.age, heartbeat, other)

    def _limits_of(self, owner: Owner) -> Limits:
        """The limits that hold for the branch of this run: its own, unless a person has named the branch."""
        return self._limits if self._anyones else self._limits.for_run(owner.retention)

    def _mine(self, beat: Heartbeat) -> bool:
        """Whether the beat may be of this instance; one that names none may be anybody's."""
        return self._anyones or not beat.instance or beat.instance == self._instance

    def _made(
        self, ref: Reference, *, base: str | None = None, beating: frozenset[str] = frozenset()
    ) -> Origin:
        return Origin(Maker.HERE) if self._anyones else self._makers.of(ref, base=base, beating=beating)

    def _end_claim(self, branch: str, seen: Seen) -> None:
        """Delete a claim without a branch, if it is ours: another instance's publisher may not be done."""
        if not seen.run_known(branch):
            try:
                tag = self._client.reference(claim_tag(branch), fetch_metadata=True)
            except ReferenceNotFound:
                return
            base = MainHistory(self._client).base_of(tag.pinned)
            if self._made(tag, base=base).maker is not Maker.HERE:
                return
        release_leftover_claim(self._client, branch)

    def _other(self, made: Origin) -> str:
        return ", ".join(one for one in made.by if one != self._instance)

    def _reports(self, owner: Owner, dead: Sequence[Heartbeat]) -> bool:
        """Whether the run writes events although a writer of it is dead: its steps are own processes."""
        return owner.state is RunState.ACTIVE and any(
            self._runs.reports_after(owner.run_id, beat) for beat in dead
        )

    def _end(self, decision: Reaping, branch: Reference) -> Reaping:
        try:
            if decision.action is ReapingAction.DISCARD:
                discard(self._client, branch)
            elif decision.action is ReapingAction.DELETE:
                self._client.delete_branch(branch.name, expected_hash=branch.hash)
        except NessieConflict:
            return replace(
                decision,
                action=ReapingAction.KEEP,
                reason=Reason("it was written to while we looked", "written_meanwhile"),
            )
        except ReferenceNotFound:
            return replace(decision, reason=Reason("somebody else deleted it meanwhile", "deleted_meanwhile"))
        return decision

    def _report_dead(self, branch: str, seen: Seen, ended: Collection[str]) -> None:
        """Tell Dagster of a run whose only writers are dead, and forget their heartbeats.

        A publisher inside the run counts as its writer. If it had claimed the branch, that stays: when the
        run has ended, the next publisher finds out how far it came.
        """
        dead = seen.dead(branch)
        if not dead or self._heartbeats is None:
            return
        owner = seen.owner(branch)
        if owner.state is RunState.ACTIVE:
            settled = branch in ended or seen.in_publication(branch)
            if not settled or len(dead) < len(seen.pulses[branch]) or self._reports(owner, dead):
                return
            self._runs.report_dead(owner.run_id, _silence_of(dead))
            if branch in ended:
                self._runs.fenced(owner.run_id, branch, _silence_of(dead))
        for beat in dead:
            if owner.state is not RunState.MISSING or beat.instance or branch in ended:
                self._heartbeats.remove(beat.branch, beat.writer)


def _silence_of(dead: Sequence[Heartbeat]) -> str:
    writers = ", ".join(sorted(f"process {beat.pid} on {beat.host}" for beat in dead))
    return f"Its writer is dead: no heartbeat of {writers} for {dead[0].silent_s:g} s."
