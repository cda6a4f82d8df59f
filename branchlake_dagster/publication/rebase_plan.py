"""Plan one commit on `main` for several candidates: its operations, and why a candidate is refused.

The plan starts from `main` at one hash. Each candidate is added completely or not at all, on top of the
candidates before it. Contents that nobody else changed are taken from the run's branch. If `main` changed a
table, the run's changes are replayed on the newer state. `main`'s log names the runs that a refused candidate
conflicts with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    DiffEntry,
    IcebergTable,
    LogEntry,
    Namespace,
    Operation,
    OtherContent,
    Put,
    Unchanged,
)
from branchlake_dagster.publication.compaction_reversal import drop_reversed_compactions, reverse_compactions
from branchlake_dagster.publication.conflicts import find_overlap, map_over_compactions
from branchlake_dagster.publication.ledger import (
    Candidate,
    NeedsChecks,
    Published,
    Refused,
    parse_publications,
)
from branchlake_dagster.publication.replay import ReplayImpossible, StagedState, TableFormat
from branchlake_dagster.publication.table_change import ChangeMode, TableChange
from branchlake_dagster.runs.leases import Lease, lease_key
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty, find_exclusive_property
from branchlake_dagster.wording import CodedReason

PlannedContent = Content | StagedState | None
"""The content of a key in the plan: stored content, a table state that was replayed in memory, or None."""


class _CandidateRefused(Exception):  # noqa: N818 - it never leaves this module
    def __init__(
        self,
        key: ContentKey,
        reason: CodedReason,
        partitions: tuple[str, ...] = (),
        runs: tuple[str, ...] = (),
        *,
        only_expired: bool = False,
    ):
        super().__init__(reason)
        self.refused = Refused({key.name: reason}, partitions, runs, only_expired)


@dataclass
class CommitPlan:
    """A commit in preparation. `contents` are the contents of all involved keys on `main` at `main_hash`.

    `tables` loads and replays the changes of tables.
    """

    main_hash: str
    contents: Mapping[ContentKey, Content]
    tables: TableFormat
    accepted: dict[Candidate, tuple[str, ...]] = field(default_factory=dict)
    """The accepted candidates, each with the names of the tables that were replayed for it."""
    new_contents: dict[ContentKey, PlannedContent] = field(default_factory=dict)
    """The keys that change, with their new contents; None for a key that is deleted."""
    last_writers: dict[ContentKey, str] = field(default_factory=dict)
    """The id of the run that changed a key last within the plan."""
    unchanged_keys: set[ContentKey] = field(default_factory=set)
    """The keys that an accepted candidate needs unchanged: its read set and its leases."""
    _checked_keys: set[ContentKey] = field(default_factory=set)
    """Tables of the candidate being added to which `main` changed no rows since the base, so that the run's
    checks remain valid."""

    def add(
        self, candidate: Candidate, reads: Mapping[ContentKey, Content], *, checked: bool = False
    ) -> Published | Refused | NeedsChecks | None:
        """Add a candidate to the commit. Return None if it was added, else why it was not.

        `reads` are the contents of its read set at its base. Set `checked` if the checks on whole tables
        pass on the result of the plan, before or after this call. Otherwise a candidate that needs these
        checks is not added and gets NeedsChecks. Published means that the changes came to `main` outside
        branchlake and without a merge.
        """
        overlay: dict[ContentKey, PlannedContent] = {}
        rebased_tables: list[str] = []
        self._checked_keys.clear()
        try:
            if self._is_on_main(candidate):
                return Published(self.main_hash, is_new=False, merged_outside=True)
            self._require_leases(candidate)
            self._require_same_reads(candidate, reads)
            for entry in candidate.changes:
                overlay[entry.key] = self._plan_value(entry, candidate)
                if isinstance(overlay[entry.key], StagedState):
                    rebased_tables.append(entry.key.name)
            self._require_namespaces(overlay)
        except _CandidateRefused as stop:
            self._discard_values(overlay)
            return stop.refused
        except Exception:
            self._discard_values(overlay)
            raise
        replayed_keys = {key for key, value in overlay.items() if isinstance(value, StagedState)}
        recheck_keys = replayed_keys & candidate.fully_checked_tables - self._checked_keys
        if not checked and recheck_keys:
            self._discard_values(overlay)
            return NeedsChecks(tuple(sorted(key.name for key in recheck_keys)))
        self.accepted[candidate] = tuple(rebased_tables)
        for key, value in overlay.items():
            if value != self._current_value(key):
                self.new_contents[key] = value
                self.last_writers[key] = candidate.run_id
        self._require_unchanged(candidate)
        return None

    def add_reader(self, candidate: Candidate, reads: Mapping[ContentKey, Content]) -> Refused | None:
        """Accept a candidate without its changes, which `add_state` adds. Return None if it was accepted.

        Returns Refused if rows of a table that it read have changed, or if it has not all of its leases.
        """
        try:
            self._require_leases(candidate)
            self._require_same_reads(candidate, reads)
        except _CandidateRefused as stop:
            return stop.refused
        self.accepted[candidate] = ()
        self._require_unchanged(candidate)
        return None

    def add_state(self, changes: Sequence[DiffEntry]) -> bool:
        """Add the changes of a prepared state that passed its checks; return whether they were added.

        `changes` is the difference between `main` and the state. If `main` has changed one of its keys since,
        nothing is added. A namespace that both sides created does not count; it stays as it is on `main`.
        """
        moved = [entry for entry in changes if self._current_value(entry.key) != entry.from_content]
        if not all(
            isinstance(entry.to_content, Namespace) and self._current_value(entry.key) for entry in moved
        ):
            return False  # a namespace that both sides created stays as it is
        self.new_contents |= {entry.key: entry.to_content for entry in changes if entry not in moved}
        return True

    def build_operations(self) -> list[Operation]:
        """Build the commit's operations, and write the metadata files of replayed tables.

        Either all metadata files are written or none.
        """
        try:
            return self._collect_operations()
        except Exception:
            self.discard()  # otherwise every pass would leave more files in a full store
            raise

    def _collect_operations(self) -> list[Operation]:
        dropped_contents = [
            self.contents.get(key) for key, value in self.new_contents.items() if value is None
        ]
        dropped_ids = {content.content_id for content in dropped_contents if content}
        operations: list[Operation] = []
        for key, value in self.new_contents.items():
            current = self.contents.get(key)
            if isinstance(value, StagedState):
                operations.append(Put(key, self.tables.write(value, current.content_id if current else None)))
            elif value is not None:
                # A table that was created on a branch gets its id on main with the commit; a renamed one
                # keeps its id.
                content_id = value.content_id if value.content_id in dropped_ids else None
                operations.append(
                    Put(key, replace(value, content_id=current.content_id if current else content_id))
                )
            elif current is not None:
                operations.append(Delete(key))
        unchanged_keys = self.unchanged_keys - self.new_contents.keys()
        if not operations and not unchanged_keys:
            unchanged_keys = {key for candidate in self.accepted for key in candidate.keys}
        return operations + [Unchanged(key) for key in sorted(unchanged_keys)]

    def discard(self) -> None:
        """Delete the files that were written for a commit that certainly did not happen."""
        self._discard_values(self.new_contents)

    def _discard_values(self, values: Mapping[ContentKey, PlannedContent]) -> None:
        for key, value in values.items():
            # If later candidates built upon this state, their state shares its files.
            if isinstance(value, StagedState):
                planned_value = self.new_contents.get(key)
                shared_paths = (
                    set(planned_value.written_paths)
                    if isinstance(planned_value, StagedState) and planned_value is not value
                    else set()
                )
                value.written_paths[:] = [path for path in value.written_paths if path not in shared_paths]
                self.tables.discard(value)

    def _is_on_main(self, candidate: Candidate) -> bool:
        """Return whether `main` already contains all changes of the run, without a merge or publication.

        This is so if each table that the run wrote has all snapshots of the run on `main`, perhaps among
        others, and the run's views and drops are on `main` too. Commits that were transplanted outside
        branchlake leave no other trace. Replaying them doubled every row.
        """
        has_tables = False
        for entry in candidate.changes:
            if entry.to_content is None and entry.key in self.contents:
                return False  # main still has what the run dropped
            if isinstance(entry.to_content, OtherContent) and not _is_same_content(
                entry.to_content, self.contents.get(entry.key)
            ):
                return False  # main has the tables of the run, but not its view or function
        for key, before, after in _iter_written_tables(candidate):
            main_content = self.contents.get(key)
            if main_content == before or not isinstance(main_content, IcebergTable):
                return False
            run_change = self.tables.load_change(key, before, after, files=False)
            if (
                not run_change.steps
                or run_change.shared_steps(self.tables.load_change(key, before, main_content, files=False))
                != "all"
            ):
                return False
            has_tables = True
        return has_tables

    def _current_value(self, key: ContentKey) -> PlannedContent:
        return self.new_contents[key] if key in self.new_contents else self.contents.get(key)

    def _require_namespaces(self, overlay: Mapping[ContentKey, PlannedContent]) -> None:
        for key, value in overlay.items():
            namespace_key = ContentKey(key.parent) if key.parent else None
            if (
                namespace_key
                and value is not None
                and (
                    overlay[namespace_key] if namespace_key in overlay else self._current_value(namespace_key)
                )
                is None
            ):
                raise _CandidateRefused(key, CodedReason("its namespace was dropped", "namespace_dropped"))

    def _require_leases(self, candidate: Candidate) -> None:
        """Refuse a candidate that does not hold all of its leases on `main`.

        Either a lease was never granted to it, or another run took it over because the holder was silent.
        """
        for name in sorted(candidate.leases):
            lease = Lease.from_contents(name, self.contents)
            if lease.holder == candidate.branch:
                continue
            why = (
                f"{lease.holder} took over the lease with fencing token {lease.token}"
                if lease.holder
                else "the lease was never granted to this run"
            )
            runs = (run_id_of_branch(lease.holder),) if lease.holder else ()
            reason = CodedReason(
                f"the run no longer holds the lease {name!r}: {why}",
                "lease_taken_over" if lease.holder else "lease_not_granted",
            )
            raise _CandidateRefused(lease_key(name), reason, (), runs)

    def _require_unchanged(self, candidate: Candidate) -> None:
        """Add the candidate's read set and leases to the keys that must not change before the commit."""
        self.unchanged_keys |= (candidate.read_set or frozenset()) | frozenset(
            map(lease_key, candidate.leases)
        )

    def fencing_tokens(self) -> dict[str, str]:
        """Return the commit property with the fencing tokens of the accepted candidates' leases.

        Its value is `name=token,name=token`. Returns an empty mapping if no candidate has a lease.
        """
        names = sorted({name for candidate in self.accepted for name in candidate.leases})
        lease_tokens = [f"{name}={Lease.from_contents(name, self.contents).token}" for name in names]
        return {LakeProperty.FENCING_TOKEN: ",".join(lease_tokens)} if lease_tokens else {}

    def _require_same_reads(self, candidate: Candidate, reads: Mapping[ContentKey, Content]) -> None:
        for key in sorted(candidate.read_set or ()):
            if not self._has_same_rows(key, reads.get(key)):
                runs = (self.last_writers[key],) if key in self.last_writers else ()
                why = "the run read it, and it has changed since (isolation serializable)"
                raise _CandidateRefused(key, CodedReason(why, "read_and_changed"), (), runs)

    def _has_same_rows(self, key: ContentKey, read_content: Content | None) -> bool:
        """Return whether a key still has the rows that a run has read; maintenance changes no rows.

        `read_content` is the content at the run's base; None if the key did not exist.
        """
        current_value = self._current_value(key)
        if current_value == read_content:
            return True
        if not isinstance(read_content, IcebergTable) or not isinstance(
            current_value, IcebergTable | StagedState
        ):
            return False
        main_content = self.contents.get(key)
        if main_content is None or main_content.content_id != read_content.content_id:
            return False
        return self.tables.load_change(key, read_content, current_value).changes_no_rows

    def _plan_value(self, entry: DiffEntry, candidate: Candidate) -> PlannedContent:
        """Return the content of the key in the plan after the candidate's change.

        This is the content on the run's branch, if neither `main` nor an earlier candidate has changed the
        key since the base. Otherwise the run's change to a table is replayed on the newer state. Raises
        _CandidateRefused if this is not possible.
        """
        key, before, after, current_value = (
            entry.key,
            entry.from_content,
            entry.to_content,
            self._current_value(entry.key),
        )
        if current_value == before:
            return after
        runs = (self.last_writers[key],) if key in self.last_writers else ()
        if isinstance(after, Namespace) and isinstance(current_value, Namespace):
            if before is None or after.properties == current_value.properties:
                return current_value  # both created it; the properties of the first one stay
            raise _CandidateRefused(
                key,
                CodedReason("both sides changed the namespace's properties", "namespace_properties"),
                (),
                runs,
            )
        if after is None and current_value is None:
            return None
        is_renamed = isinstance(before, IcebergTable) and _has_new_name(candidate, before)
        if after is None and not is_renamed and self._is_only_maintained(key, before, current_value):
            return None
        if after is None:
            why = "the run dropped or renamed it, and it has changed since"
            raise _CandidateRefused(key, CodedReason(why, "dropped_and_changed"), (), runs)
        if current_value is None:
            raise _CandidateRefused(key, CodedReason("it was dropped or renamed", "dropped"), (), runs)
        if not isinstance(after, IcebergTable) or not isinstance(current_value, IcebergTable | StagedState):
            why = "both sides changed it, and it is not a table on both sides"
            raise _CandidateRefused(key, CodedReason(why, "not_a_table"), (), runs)
        if before is not None and not isinstance(before, IcebergTable):
            raise _CandidateRefused(
                key, CodedReason("it was something else at the run's base", "another_kind"), (), runs
            )
        try:
            return self._replay_table(key, before, after, current_value, runs)
        except _CandidateRefused:
            if before is None or not self._is_only_maintained(key, before, current_value):
                raise
            self._checked_keys.add(key)
            return self._keep_run_state(key, before, after, current_value)

    def _is_only_maintained(
        self, key: ContentKey, before: Content | None, current_value: Content | StagedState | None
    ) -> bool:
        """Return whether only maintenance has changed a table since the run's base.

        Maintenance changes no row, so it must not make a run fail.
        """
        if not isinstance(before, IcebergTable) or not isinstance(current_value, IcebergTable):
            return False
        if current_value.content_id != before.content_id:
            return False
        return self.tables.load_change(key, before, current_value).changes_no_rows

    def _keep_run_state(
        self,
        key: ContentKey,
        before: IcebergTable,
        after: IcebergTable,
        current_value: IcebergTable | StagedState,
    ) -> StagedState | IcebergTable:
        """Return the table as the run left it, if possible with the history of `main`.

        Consumers may have recorded a snapshot of that history as their position. If the run replaced the
        table's history, or the format version is 1, the table has the run's history alone.
        """
        if isinstance(current_value, IcebergTable) and (
            self.tables.load_change(key, before, after, files=False).is_complete
        ):
            target = self.tables.open(key, current_value)
            if grafted_state := self.tables.graft(key, before, after, target):
                return grafted_state
        return after

    def _replay_table(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable,
        current_value: IcebergTable | StagedState,
        runs: tuple[str, ...],
    ) -> StagedState | IcebergTable:
        """Replay the run's changes on the current state of the table.

        `runs` are the ids of the runs that a refusal names if the table's history does not record them.
        Raises _CandidateRefused if the changes conflict.
        """
        main_content = self.contents.get(key)
        if before and main_content and before.content_id != main_content.content_id:
            raise _CandidateRefused(
                key, CodedReason("it was dropped and created again", "created_again"), (), runs
            )
        run_change = self.tables.load_change(key, before, after)
        main_change = self.tables.load_change(
            key, before, current_value, files=not _has_only_appends(run_change)
        )
        if run_change.shared_steps(main_change):
            why = "a part of the run's changes is on main already: it was merged outside branchlake"
            raise _CandidateRefused(key, CodedReason(why, "partly_on_main"), (), runs)
        if property_name := _find_same_property(run_change, main_change):
            raise _CandidateRefused(key, _explain_same_property(property_name), (), runs)
        exclusive = next(filter(None, map(find_exclusive_property, run_change.properties_set)), None)
        if exclusive is not None and not main_change.is_complete:
            raise _CandidateRefused(key, CodedReason(exclusive.rewind_reason, "rolled_back"), (), runs)
        main_change = replace(main_change, steps=drop_reversed_compactions(main_change.steps))
        run_change = map_over_compactions(run_change, main_change)
        run_change = reverse_compactions(run_change, main_change)
        if main_change.is_only_maintenance:
            self._checked_keys.add(key)
        if conflict := find_overlap(run_change, main_change):
            # The files of a table without partitions have the partition "".
            partition_names = tuple(filter(None, conflict.partitions))
            raise _CandidateRefused(
                key,
                conflict.reason,
                partition_names,
                conflict.runs or runs,
                only_expired=conflict.only_expired,
            )
        target = (
            current_value if isinstance(current_value, StagedState) else self.tables.open(key, current_value)
        )
        try:
            return self.tables.replay(key, run_change, after, target)
        except ReplayImpossible as error:
            raise _CandidateRefused(key, CodedReason(error.message, "replay_impossible"), (), runs) from error


def _iter_written_tables(
    candidate: Candidate,
) -> Iterator[tuple[ContentKey, IcebergTable | None, IcebergTable]]:
    for entry in candidate.changes:
        before = entry.from_content if isinstance(entry.from_content, IcebergTable) else None
        if isinstance(entry.to_content, IcebergTable):
            yield entry.key, before, entry.to_content


def _has_new_name(candidate: Candidate, table: IcebergTable) -> bool:
    """Return whether the run renamed the table: a key that is new on its branch has the table's content id.

    `table` is the content at the old key, before the run.
    """
    return any(
        entry.from_content is None
        and isinstance(entry.to_content, IcebergTable)
        and entry.to_content.content_id == table.content_id
        for entry in candidate.changes
    )


def _is_same_content(content: OtherContent, on_main: Content | None) -> bool:
    """Return whether `main` has the same view or function as the run: equal type and equal payload.

    `on_main` is the content of the same key on `main`, or None. The content ids may differ.
    """
    return isinstance(on_main, OtherContent) and (content.type, content.payload) == (
        on_main.type,
        on_main.payload,
    )


def _has_only_appends(change: TableChange) -> bool:
    """Return whether all steps are appends. For these, the files of `main`'s change need not be read."""
    return all(step.mode is ChangeMode.APPEND for step in change.steps)


def _explain_same_property(name: str) -> CodedReason:
    """Return the reason for a refusal because both sides set a property."""
    if (exclusive := find_exclusive_property(name)) is not None:
        return CodedReason(exclusive.conflict_reason, exclusive.conflict_code)
    return CodedReason(f"both sides set its property {name}", "same_property")


def _find_same_property(run_change: TableChange, main_change: TableChange) -> str | None:
    run_names = {*run_change.properties_set, *run_change.properties_removed}
    main_names = {*main_change.properties_set, *main_change.properties_removed}
    differing_names = {
        name
        for name in run_names & main_names
        if run_change.properties_set.get(name) != main_change.properties_set.get(name)
    }
    return min(differing_names, default=None)


_MAX_COMMITS = 2000
"""The most commits, from the newest on, that are searched for the runs of a conflict."""

OUTSIDE_WRITER = "somebody outside branchlake"


def add_culprits(client: NessieClient, candidate: Candidate, refusal: Refused, *, main_hash: str) -> Refused:
    """Return the refusal with the runs that it conflicts with, and with the new names of renamed tables.

    Runs are searched only if the refusal names none: those whose publications changed the tables in conflict,
    and `OUTSIDE_WRITER` for other commits. `main_hash` is the hash of `main` at which the candidate was
    refused. Reads the log since the candidate's base, once.
    """
    old_contents = {entry.key: entry.from_content for entry in candidate.changes}
    key_by_name = {key.name: key for key in (*old_contents, *(candidate.read_set or ()))}
    keys = {key_by_name[name] for name in refusal.conflicts if name in key_by_name}
    entries = list(_iter_commits(client, candidate, main_hash))
    conflicts = dict(refusal.conflicts)
    runs = list(refusal.runs)
    for entry in entries:
        if {LakeProperty.EXPIRY_ID, LakeProperty.MAINTENANCE} & entry.commit.properties.keys():
            continue  # maintenance changed no row
        for key in [key for key in keys if _changes_key(entry, key)]:
            if not refusal.runs:
                runs += [publication.run_id for publication in parse_publications(entry)] or [OUTSIDE_WRITER]
            old_table = old_contents.get(key)
            if isinstance(old_table, IcebergTable) and (new_name := _find_new_name(entry, key, old_table)):
                conflicts[key.name] = CodedReason(f"it was renamed to {new_name}", "renamed")
    return replace(refusal, conflicts=conflicts, runs=tuple(dict.fromkeys(runs)))


def find_origin_commit(client: NessieClient, candidate: Candidate, *, main_hash: str) -> str | None:
    """Return the hash of the oldest commit on `main` that put the candidate's last table as on its branch.

    Returns None if that commit is not among the newest 2,000 commits since the base.
    """
    last_change = next(e for e in reversed(candidate.changes) if isinstance(e.to_content, IcebergTable))
    commit_hash = None
    for entry in _iter_commits(client, candidate, main_hash):
        if any(
            isinstance(operation, Put)
            and operation.key == last_change.key
            and operation.content == last_change.to_content
            for operation in entry.operations
        ):
            commit_hash = entry.commit.hash
    return commit_hash


def _iter_commits(client: NessieClient, candidate: Candidate, main_hash: str) -> Iterator[LogEntry]:
    """Yield the commits of `main` since the candidate's base, newest first, with their operations.

    `main_hash` is the newest commit to yield. Yields at most `_MAX_COMMITS`. Raises ReferenceNotFound if the
    history of `main` does not contain the base.
    """
    return islice(client.log(f"@{main_hash}", since=candidate.base_hash, fetch_operations=True), _MAX_COMMITS)


def _changes_key(entry: LogEntry, key: ContentKey) -> bool:
    return any(isinstance(operation, Put | Delete) and operation.key == key for operation in entry.operations)


def _find_new_name(entry: LogEntry, key: ContentKey, old_table: IcebergTable) -> str | None:
    """Return the new dotted name of a table that a commit renamed; None if the commit did not rename it.

    A commit renames a table if it deletes `key` and puts the table's content id under another key.
    """
    if not any(isinstance(operation, Delete) and operation.key == key for operation in entry.operations):
        return None
    puts = (operation for operation in entry.operations if isinstance(operation, Put))
    return next(
        (operation.key.name for operation in puts if operation.content.content_id == old_table.content_id),
        None,
    )
