"""Sweeping: deleting the files of discarded branches after a grace, with tags in Nessie as the journal.

`discarded-{run}` becomes `sweeping-{run}`, which is the claim against a retry that wants the state back.
Then all references are listed, what none of them reaches is deleted, and the tag goes. A sweep that dies is
resumed by the next one: the tag is still there, and files that are gone already are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from branchlake_dagster.cleanup.main_history import MainHistory
from branchlake_dagster.cleanup.reaper_rules import Owner, RunState
from branchlake_dagster.cleanup.sweep_plan import BaseUnknown, StateUnreadable, SweepPlan, SweepPlanner
from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_names import is_ours, run_of, tags
from branchlake_dagster.runs.claims import claim_tag
from branchlake_dagster.runs.origin import Maker, Makers
from branchlake_dagster.runs.run_branch import branch_name
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import Reason, agree, counted

TAGS = tags(ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING)
"""Nessie's filter for the tags that the sweeper looks at."""

_AT_ONCE = 8
_OURS = (ReferencePrefix.RUN, ReferencePrefix.DISCARDED, ReferencePrefix.CLAIM)
"""References whose own end takes care of the files that they still need."""


_CLAIMED = Reason("somebody else claimed it meanwhile", "claimed_meanwhile")


class FilesNotDeleted(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The store refused to delete a file."""


@dataclass(frozen=True)
class Sweeping:
    """What becomes of a discarded state. `files` and `size` (bytes) are what was, or would be, freed."""

    tag: str
    run_id: str
    done: bool
    reason: Reason
    files: int = 0
    size: int = 0

    def __str__(self) -> str:
        freed = f", {counted(self.files, 'file')}, {self.size / 1e6:.1f} MB" if self.files else ""
        return f"{self.tag}: {'swept' if self.done else 'kept'}, {self.reason}{freed}"


@dataclass(frozen=True)
class _Due:
    """A tag whose time has come, and the base of what it holds; None: it holds nothing to delete."""

    run_id: str
    tag: Reference
    base_hash: str | None
    base_time: datetime | None = None
    recorded_base: str = ""
    """The base that Dagster knows of the run, if any."""


class Sweeper:
    """Sweeps the tags of the Nessie filter `listing` that are older than their grace.

    `grace` holds for runs that recorded none themselves, and for what a person has named.
    `owners(branches)` tells whose state it was, as for the reaper. What none of them holds is swept only if
    Dagster instance `instance` made it, or `anyones`: a person has said so.
    """

    def __init__(
        self,
        client: NessieClient,
        files: TableFiles,
        owners: Callable[[Collection[str]], Mapping[str, Owner]],
        *,
        grace: timedelta,
        now: Callable[[], datetime],
        listing: str = TAGS,
        instance: str | None = None,
        anyones: bool = False,
    ) -> None:
        self._client = client
        self._files = files
        self._owners = owners
        self._grace = grace
        self._now = now
        self._listing = listing
        self._makers = Makers(client, instance, files)
        self._anyones = anyones

    def run(self, *, dry_run: bool = False) -> Iterator[Sweeping]:
        """One pass. Raises, before it deletes a file, what Nessie and `owners` raise."""
        due: list[_Due] = []
        for found in self._due():
            if isinstance(found, Sweeping):
                yield found
            elif dry_run or (claimed := self._claimed(found.tag, found.run_id)) is None:
                due.append(found)
            elif isinstance(claimed, Sweeping):
                yield claimed
            else:
                due.append(replace(found, tag=claimed))
        if due:
            # Only now: whoever copied the state before the claim is in this list.
            references = list(self._client.references(fetch_metadata=True))
            planner = SweepPlanner(self._client, self._files, references)
            for one in due:
                planner.forget(claim_tag(branch_name(one.run_id)))  # it speaks of a branch that is gone
                yield self._sweep(one, planner, dry_run=dry_run)

    # -- what is due -----------------------------------------------------------------------------------

    def _due(self) -> Iterator[_Due | Sweeping]:
        found = {ref.name: ref for ref in self._client.references(filter=self._listing, fetch_metadata=True)}
        if not found:
            return
        owners = self._owners([branch_name(run_of(name)) for name in found])
        history = MainHistory(self._client)
        for name, tag in found.items():
            run_id = run_of(name)
            owner = owners.get(branch_name(run_id))
            if name.startswith(ReferencePrefix.SWEEPING):
                other = found.get(f"{ReferencePrefix.DISCARDED}{run_id}")
                if other is not None and other.hash == tag.hash:
                    continue  # a sweep died while it claimed this; the other tag starts it again
            elif (why := self._too_early(tag, owner)) is not None:
                yield Sweeping(name, run_id, False, why)
                continue
            base = history.base_of(tag.pinned)
            if owner is None and (why := self._not_ours(tag, base)) is not None:
                yield Sweeping(name, run_id, False, why)
                continue
            if base is None:
                unknown = "it shares no commit with main, so its own files are unknown"
                yield Sweeping(name, run_id, False, Reason(unknown, "no_common_commit"))
            elif run_id in history.published_since(base):
                yield _Due(run_id, tag, None)
            else:
                recorded = owner.base_hash if owner is not None else ""
                yield _Due(run_id, tag, base, history.time_of(base), recorded)

    def _too_early(self, tag: Reference, owner: Owner | None) -> Reason | None:
        if owner is not None and owner.state is RunState.ACTIVE:
            return Reason(f"run {owner.run_id} may continue it", "run_may_continue")
        if owner is not None and owner.state is RunState.AWAITING_PUBLICATION and not owner.continued:
            return Reason(f"run {owner.run_id} has passed, so the reaper gives it back", "run_passed")
        head = tag.metadata.head_commit if tag.metadata else None
        signs = [moment for moment in (head.commit_time if head else None, owner and owner.ended) if moment]
        if not signs:
            return Reason("its age is unknown", "age_unknown")
        recorded = None if self._anyones or owner is None else owner.retention
        grace = self._grace if recorded is None else recorded.discard_grace
        left = grace - (self._now() - max(signs))
        if left > timedelta(0):
            hours = f"{left.total_seconds() / 3600:.1f} h"
            return Reason(f"a retry may continue it for another {hours}", "retry_may_continue")
        return None

    def _not_ours(self, tag: Reference, base: str | None) -> Reason | None:
        made = self._makers.of(tag, base=base)
        if self._anyones or made.maker is Maker.HERE:
            return None
        why = f"no run of that id is known, and {made}; `branchlake reap --branch {tag.name}` sweeps it"
        return Reason(why, "made_elsewhere" if made.maker is Maker.ELSEWHERE else "maker_unknown")

    # -- the claim -------------------------------------------------------------------------------------

    def _claimed(self, tag: Reference, run_id: str) -> Reference | Sweeping | None:
        """The tag under its new name; None when it has that already; a Sweeping when others were first."""
        if tag.name.startswith(ReferencePrefix.SWEEPING):
            return None
        name = f"{ReferencePrefix.SWEEPING}{run_id}"
        try:
            mine = self._client.create_tag(name, from_ref=tag.name, from_hash=tag.hash)
        except NessieAlreadyExists:
            mine = self._client.reference(name)
            if mine.hash != tag.hash:
                return Sweeping(
                    tag.name, run_id, False, Reason(f"an older sweep is not done: {name}", "older_sweep")
                )
        except ReferenceNotFound:
            return Sweeping(tag.name, run_id, False, _CLAIMED)
        try:
            self._client.delete_tag(tag.name, expected_hash=tag.hash)
        except (ReferenceNotFound, NessieConflict):
            self._drop(mine)
            return Sweeping(tag.name, run_id, False, _CLAIMED)
        return mine

    def _drop(self, tag: Reference) -> None:
        try:
            self._client.delete_tag(tag.name, expected_hash=tag.hash)
        except ReferenceNotFound:
            return  # another sweep finished it

    # -- the deletion ----------------------------------------------------------------------------------

    def _sweep(self, due: _Due, planner: SweepPlanner, *, dry_run: bool) -> Sweeping:
        plan = SweepPlan()
        reason, code = "nobody needs its files", "unneeded"
        if due.base_hash is None:
            reason, code = "its run was published: its files are main's", "published"
        if due.base_hash is not None:
            try:
                plan = planner.plan(due.tag, due.base_hash, due.base_time, due.recorded_base)
                if not dry_run:
                    self._delete(plan)
            except (StateUnreadable, BaseUnknown, FilesNotDeleted) as error:
                why = Reason(str(error), "not_possible")
                return Sweeping(due.tag.name, due.run_id, False, why)
        strangers = [name for name in plan.held_by if name != MAIN and not is_ours(name, *_OURS)]
        if plan.held_by:
            reason, code = f"the rest is needed by {', '.join(plan.held_by[:5])}", "needed"
        if plan.foreign:
            reason += "; " + _files(plan.foreign, "outside of the tables' folders")
        if plan.borrowed:
            reason += "; " + _files(plan.borrowed, "that the run did not write")
        if not strangers:
            if not dry_run:
                self._drop(due.tag)
            planner.forget(due.tag.name)
        return Sweeping(due.tag.name, due.run_id, not strangers, Reason(reason, code), plan.files, plan.size)

    def _delete(self, plan: SweepPlan) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for phase in plan.phases:
                list(pool.map(self._delete_file, phase))

    def _delete_file(self, location: str) -> None:
        try:
            self._files.delete(location)
        except OSError as error:
            raise FilesNotDeleted(f"{location} could not be deleted: {type(error).__name__}.") from error


def _files(number: int, which: str) -> str:
    return f"{counted(number, 'file')} {which} {agree(number, 'stays', 'stay')}"
