"""Delete the files of discarded branches after a grace period, with tags in Nessie as the journal.

`discarded-{run}` is renamed to `sweeping-{run}`. This is the claim against a retry that wants the state back.
Then all references are listed, the files that none of them reaches are deleted, and the tag is deleted. An
interrupted sweep is resumed by the next one: the tag still exists, and missing files are not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from branchlake_dagster.cleanup.reaper_rules import BranchOwner, MainHistory, OwnerState
from branchlake_dagster.cleanup.sweep_plan import BaseUnknown, StateUnreadable, SweepPlan, SweepPlanner
from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.branch_owner import (
    Maker,
    OriginFinder,
    is_own_reference,
    strip_name_prefix,
    tag_filter,
)
from branchlake_dagster.runs.discarding import claim_tag_name, sweeping_tag_name
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import CodedReason, format_count, pluralize

SWEEPER_TAG_FILTER = tag_filter(ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING)
"""Nessie's filter for the tags that the sweeper examines."""

_DELETE_THREADS = 8
_SELF_CLEANING_PREFIXES = (ReferencePrefix.RUN, ReferencePrefix.DISCARDED, ReferencePrefix.CLAIM)
"""Prefixes of references whose later cleanup also deletes the files that they still need.

A tag is kept only if other references than these and `main` need its files.
"""


_CLAIMED_REASON = CodedReason("another process has claimed it meanwhile", "claimed_meanwhile")


class FilesNotDeleted(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The storage refused to delete a file of a discarded branch.

    Other files may have been deleted. The next sweep continues.
    """


@dataclass(frozen=True)
class Sweeping:
    """The outcome of a sweep for one tag of a discarded branch.

    `done` is true if the tag was deleted, and false if it was kept, for the `reason`. `files` and `size` are
    the number and the bytes of the files that were deleted; in a dry run, that would be deleted.
    """

    tag: str
    run_id: str
    done: bool
    reason: CodedReason
    files: int = 0
    size: int = 0

    def __str__(self) -> str:
        freed = f", {format_count(self.files, 'file')}, {self.size / 1e6:.1f} MB" if self.files else ""
        return f"{self.tag}: {'swept' if self.done else 'kept'}, {self.reason}{freed}"


@dataclass(frozen=True)
class _DueTag:
    """A tag to sweep, with the commit of `main` that its branch started from.

    `base_hash` is None if the run was published, so that only the tag is deleted. `base_time` is the time of
    that commit.
    """

    run_id: str
    tag: Reference
    base_hash: str | None
    base_time: datetime | None = None
    recorded_base: str = ""
    """The base hash that the run's tags record; empty if they record none."""


class Sweeper:
    """Sweeps the tags of the Nessie filter `ref_filter` that are older than their grace period.

    `grace` applies to runs that have not recorded a grace period, and to tags that a person has named.
    `load_owners` loads the owners of branches by branch name, without branches of unknown runs. A tag without
    an owner is swept only if the Dagster instance with the id `instance` made it, or if `anyones` is true
    because a person has named the tag.
    """

    def __init__(
        self,
        client: NessieClient,
        files: TableFiles,
        load_owners: Callable[[Collection[str]], Mapping[str, BranchOwner]],
        *,
        grace: timedelta,
        now: Callable[[], datetime],
        ref_filter: str = SWEEPER_TAG_FILTER,
        instance: str | None = None,
        anyones: bool = False,
    ) -> None:
        self._client = client
        self._files = files
        self._load_owners = load_owners
        self._grace = grace
        self._now = now
        self._ref_filter = ref_filter
        self._origins = OriginFinder(client, instance, files)
        self._anyones = anyones

    def run(self, *, dry_run: bool = False) -> Iterator[Sweeping]:
        """Run one pass, and yield an outcome for each tag, also for tags that are kept.

        All tags and owners are read before the first file is deleted. Errors of Nessie and of `load_owners`
        are raised; the next pass continues an interrupted sweep. A dry run changes nothing.
        """
        due_tags: list[_DueTag] = []
        for candidate in self._find_due_tags():
            if isinstance(candidate, Sweeping):
                yield candidate
            elif dry_run or (claim := self._claim_tag(candidate.tag, candidate.run_id)) is None:
                due_tags.append(candidate)
            elif isinstance(claim, Sweeping):
                yield claim
            else:
                due_tags.append(replace(candidate, tag=claim))
        if due_tags:
            # List the references after the claims, so that the list has every earlier copy of a state.
            references = list(self._client.references(fetch_metadata=True))
            planner = SweepPlanner(self._client, self._files, references)
            for due_tag in due_tags:
                planner.forget_reference(
                    claim_tag_name(run_branch_name(due_tag.run_id))
                )  # its branch is gone
                yield self._sweep(due_tag, planner, dry_run=dry_run)

    # -- due tags --------------------------------------------------------------------------------------

    def _find_due_tags(self) -> Iterator[_DueTag | Sweeping]:
        tags_by_name = {
            ref.name: ref for ref in self._client.references(filter=self._ref_filter, fetch_metadata=True)
        }
        if not tags_by_name:
            return
        owners = self._load_owners([run_branch_name(strip_name_prefix(name)) for name in tags_by_name])
        history = MainHistory(self._client)
        for name, tag in tags_by_name.items():
            run_id = strip_name_prefix(name)
            owner = owners.get(run_branch_name(run_id))
            if name.startswith(ReferencePrefix.SWEEPING):
                discarded_tag = tags_by_name.get(f"{ReferencePrefix.DISCARDED}{run_id}")
                if discarded_tag is not None and discarded_tag.hash == tag.hash:
                    continue  # a sweep died during its claim; the other tag starts it again
            elif (reason := self._early_reason(tag, owner)) is not None:
                yield Sweeping(name, run_id, False, reason)
                continue
            base_hash = history.find_base(tag.pinned_ref)
            if owner is None and (reason := self._foreign_reason(tag, base_hash)) is not None:
                yield Sweeping(name, run_id, False, reason)
                continue
            if base_hash is None:
                sentence = "it shares no commit with main, so its own files are unknown"
                yield Sweeping(name, run_id, False, CodedReason(sentence, "no_common_commit"))
            elif run_id in history.run_ids_published_since(base_hash):
                yield _DueTag(run_id, tag, None)
            else:
                recorded_base = owner.base_hash if owner is not None else ""
                yield _DueTag(run_id, tag, base_hash, history.commit_time(base_hash), recorded_base)

    def _early_reason(self, tag: Reference, owner: BranchOwner | None) -> CodedReason | None:
        if owner is not None and owner.state is OwnerState.ACTIVE:
            return CodedReason(f"run {owner.run_id} may continue it", "run_may_continue")
        if owner is not None and owner.state is OwnerState.AWAITING_PUBLICATION and not owner.is_continued:
            return CodedReason(f"run {owner.run_id} has passed, so the reaper restores it", "run_passed")
        head = tag.metadata.head_commit if tag.metadata else None
        signs_of_life = [
            moment for moment in (head.commit_time if head else None, owner and owner.ended_at) if moment
        ]
        if not signs_of_life:
            return CodedReason("its age is unknown", "age_unknown")
        recorded_retention = None if self._anyones or owner is None else owner.retention
        grace = self._grace if recorded_retention is None else recorded_retention.discard_grace
        remaining = grace - (self._now() - max(signs_of_life))
        if remaining > timedelta(0):
            hours = f"{remaining.total_seconds() / 3600:.1f} h"
            return CodedReason(f"a retry may continue it for another {hours}", "retry_may_continue")
        return None

    def _foreign_reason(self, tag: Reference, base_hash: str | None) -> CodedReason | None:
        origin = self._origins.find_origin(tag, base_hash=base_hash)
        if self._anyones or origin.maker is Maker.HERE:
            return None
        sentence = (
            f"no run of that id is known, and {origin}; `branchlake reap --branch {tag.name}` sweeps it"
        )
        return CodedReason(sentence, "made_elsewhere" if origin.maker is Maker.ELSEWHERE else "maker_unknown")

    # -- the claim -------------------------------------------------------------------------------------

    def _claim_tag(self, tag: Reference, run_id: str) -> Reference | Sweeping | None:
        """Claim the tag by renaming it to `sweeping-…`.

        Returns the new tag; None if the tag has this name already; or the outcome "kept" if another process
        has claimed the tag, or an older sweep of the run is not complete.
        """
        if tag.name.startswith(ReferencePrefix.SWEEPING):
            return None
        name = sweeping_tag_name(run_branch_name(run_id))
        try:
            sweeping_tag = self._client.create_tag(name, from_ref=tag.name, from_hash=tag.hash)
        except NessieAlreadyExists:
            sweeping_tag = self._client.reference(name)
            if sweeping_tag.hash != tag.hash:
                return Sweeping(
                    tag.name,
                    run_id,
                    False,
                    CodedReason(f"an older sweep is not complete: {name}", "older_sweep"),
                )
        except ReferenceNotFound:
            return Sweeping(tag.name, run_id, False, _CLAIMED_REASON)
        try:
            self._client.delete_tag(tag.name, expected_hash=tag.hash)
        except (ReferenceNotFound, NessieConflict):
            self._delete_tag(sweeping_tag)
            return Sweeping(tag.name, run_id, False, _CLAIMED_REASON)
        return sweeping_tag

    def _delete_tag(self, tag: Reference) -> None:
        try:
            self._client.delete_tag(tag.name, expected_hash=tag.hash)
        except ReferenceNotFound:
            return  # another sweep finished it

    # -- the deletion ----------------------------------------------------------------------------------

    def _sweep(self, due_tag: _DueTag, planner: SweepPlanner, *, dry_run: bool) -> Sweeping:
        plan = SweepPlan()
        reason, code = "nobody needs its files", "unneeded"
        if due_tag.base_hash is None:
            reason, code = "its run was published: its files are main's", "published"
        if due_tag.base_hash is not None:
            try:
                plan = planner.plan(due_tag.tag, due_tag.base_hash, due_tag.base_time, due_tag.recorded_base)
                if not dry_run:
                    self._delete_files(plan)
            except (StateUnreadable, BaseUnknown, FilesNotDeleted) as error:
                failure = CodedReason(str(error), "not_possible")
                return Sweeping(due_tag.tag.name, due_tag.run_id, False, failure)
        other_holders = [
            name
            for name in plan.held_by
            if name != MAIN and not is_own_reference(name, *_SELF_CLEANING_PREFIXES)
        ]
        if plan.held_by:
            reason, code = f"the rest is needed by {', '.join(plan.held_by[:5])}", "needed"
        if plan.outside_files:
            reason += "; " + _format_kept_files(plan.outside_files, "outside of the tables' folders")
        if plan.borrowed_files:
            reason += "; " + _format_kept_files(plan.borrowed_files, "that the run did not write")
        if not other_holders:
            if not dry_run:
                self._delete_tag(due_tag.tag)
            planner.forget_reference(due_tag.tag.name)
        return Sweeping(
            due_tag.tag.name,
            due_tag.run_id,
            not other_holders,
            CodedReason(reason, code),
            plan.file_count,
            plan.size_bytes,
        )

    def _delete_files(self, plan: SweepPlan) -> None:
        with ThreadPoolExecutor(_DELETE_THREADS) as pool:
            for phase in plan.phases:
                list(pool.map(self._delete_file, phase))

    def _delete_file(self, location: str) -> None:
        try:
            self._files.delete(location)
        except OSError as error:
            raise FilesNotDeleted(f"File {location} could not be deleted: {type(error).__name__}.") from error


def _format_kept_files(number: int, which: str) -> str:
    return f"{format_count(number, 'file')} {which} {pluralize(number, 'stays', 'stay')}"
