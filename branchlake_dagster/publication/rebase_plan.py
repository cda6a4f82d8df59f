"""Planning one commit on `main` for several candidates: what to put, and whom to refuse and why.

The plan starts from `main` at one hash. Each candidate is added wholly or not at all, on top of those
before it: what nobody touched is taken as the run's branch has it, tables that `main` changed meanwhile
get the run's changes replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    DiffEntry,
    IcebergTable,
    Namespace,
    Operation,
    OtherContent,
    Put,
    Unchanged,
)
from branchlake_dagster.publication.conflicts import mapped, overlap
from branchlake_dagster.publication.ledger import Candidate, NeedsChecks, Published, Refused
from branchlake_dagster.publication.replay import ReplayImpossible, Staged, Tables
from branchlake_dagster.publication.table_change import Mode, TableChange
from branchlake_dagster.runs.leases import Lease, lease_key
from branchlake_dagster.runs.run_branch import run_id_of
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.wording import Reason

Value = Content | Staged | None
"""What a key holds in the plan: as some reference has it, replayed in memory, or nothing."""


class _Stop(Exception):  # noqa: N818 - it never leaves this module
    def __init__(
        self,
        key: ContentKey,
        why: Reason,
        partitions: tuple[str, ...] = (),
        runs: tuple[str, ...] = (),
        *,
        only_expired: bool = False,
    ):
        super().__init__(why)
        self.refused = Refused({key.name: why}, partitions, runs, only_expired)


@dataclass
class CommitPlan:
    """A commit in the making: `main` holds `contents` (of all keys involved) at `onto`."""

    onto: str
    contents: Mapping[ContentKey, Content]
    tables: Tables
    accepted: dict[Candidate, tuple[str, ...]] = field(default_factory=dict)
    """With the tables that were replayed for each."""
    values: dict[ContentKey, Value] = field(default_factory=dict)
    """The keys that change."""
    writers: dict[ContentKey, str] = field(default_factory=dict)
    """The run that changed a key last, within the plan."""
    unchanged: set[ContentKey] = field(default_factory=set)

    def add(
        self, candidate: Candidate, reads: Mapping[ContentKey, Content], *, checked: bool = False
    ) -> Published | Refused | NeedsChecks | None:
        """Add a candidate; None when it is in. `reads` is its read set as it was at its base.

        With `checked`, checks on whole tables will be made (or were) on the result. Published is what
        somebody else has brought to `main` without the publisher and without a merge.
        """
        overlay: dict[ContentKey, Value] = {}
        rebased: list[str] = []
        try:
            if self._all_there(candidate):
                return Published(self.onto, now=False, by_hand=True)
            self._holds(candidate)
            self._same_reads(candidate, reads)
            for entry in candidate.changes:
                overlay[entry.key] = self._value(entry)
                if isinstance(overlay[entry.key], Staged):
                    rebased.append(entry.key.name)
            self._has_namespaces(overlay)
        except _Stop as stop:
            self._forget(overlay)
            return stop.refused
        except Exception:
            self._forget(overlay)
            raise
        replayed = {key for key, value in overlay.items() if isinstance(value, Staged)}
        if not checked and (again := replayed & candidate.table_checks):
            self._forget(overlay)
            return NeedsChecks(tuple(sorted(key.name for key in again)))
        self.accepted[candidate] = tuple(rebased)
        for key, value in overlay.items():
            if value != self._now(key):
                self.values[key] = value
                self.writers[key] = candidate.run_id
        self._must_stay(candidate)
        return None

    def add_reader(self, candidate: Candidate, reads: Mapping[ContentKey, Content]) -> Refused | None:
        """Accept a candidate whose changes come with `add_state`; refused when what it read has changed."""
        try:
            self._holds(candidate)
            self._same_reads(candidate, reads)
        except _Stop as stop:
            return stop.refused
        self.accepted[candidate] = ()
        self._must_stay(candidate)
        return None

    def add_state(self, changes: Sequence[DiffEntry]) -> bool:
        """Add a state that was checked as it is; False, and nothing is added, when `main` moved under it."""
        moved = [entry for entry in changes if self._now(entry.key) != entry.from_content]
        if not all(isinstance(entry.to_content, Namespace) and self._now(entry.key) for entry in moved):
            return False  # a namespace that both made stays as it is
        self.values |= {entry.key: entry.to_content for entry in changes if entry not in moved}
        return True

    def operations(self) -> list[Operation]:
        """The commit's operations; writes the metadata files of replayed tables, all of them or none."""
        try:
            return self._operations()
        except Exception:
            self.discard()  # a store that is full would only get fuller, pass by pass
            raise

    def _operations(self) -> list[Operation]:
        dropped = [self.contents.get(key) for key, value in self.values.items() if value is None]
        gone = {content.content_id for content in dropped if content}
        found: list[Operation] = []
        for key, value in self.values.items():
            current = self.contents.get(key)
            if isinstance(value, Staged):
                found.append(Put(key, self.tables.write(value, current.content_id if current else None)))
            elif value is not None:
                # A table made on a branch gets its id on main when it is put there; a renamed one keeps it.
                own = value.content_id if value.content_id in gone else None
                found.append(Put(key, replace(value, content_id=current.content_id if current else own)))
            elif current is not None:
                found.append(Delete(key))
        kept = self.unchanged - self.values.keys()
        if not found and not kept:
            kept = {key for candidate in self.accepted for key in candidate.keys}
        return found + [Unchanged(key) for key in sorted(kept)]

    def discard(self) -> None:
        """Delete the files that were made for a commit that certainly did not happen."""
        self._forget(self.values)

    def _forget(self, values: Mapping[ContentKey, Value]) -> None:
        for key, value in values.items():
            # A state that others in the plan have built upon shares its files with theirs.
            if isinstance(value, Staged):
                kept = self.values.get(key)
                shared = set(kept.written) if isinstance(kept, Staged) and kept is not value else set()
                value.written[:] = [path for path in value.written if path not in shared]
                self.tables.discard(value)

    def _all_there(self, candidate: Candidate) -> bool:
        """Whether `main` holds the very snapshots of the run, in all its tables: nothing is left to do.

        Commits that were transplanted by hand leave no other trace; replaying them doubled every row.
        """
        found = False
        for entry in candidate.changes:
            if entry.to_content is None and entry.key in self.contents:
                return False  # what the run dropped is still there
            if isinstance(entry.to_content, OtherContent) and not _same(
                entry.to_content, self.contents.get(entry.key)
            ):
                return False  # a view or function of the run has not come with its tables
        for key, before, after in _written_tables(candidate):
            now = self.contents.get(key)
            if now == before or not isinstance(now, IcebergTable):
                return False
            mine = self.tables.change(key, before, after, files=False)
            if not mine.steps or mine.there(self.tables.change(key, before, now, files=False)) != "all":
                return False
            found = True
        return found

    def _now(self, key: ContentKey) -> Value:
        return self.values[key] if key in self.values else self.contents.get(key)

    def _has_namespaces(self, overlay: Mapping[ContentKey, Value]) -> None:
        for key, value in overlay.items():
            home = ContentKey(key.parent) if key.parent else None
            if home and value is not None and (overlay[home] if home in overlay else self._now(home)) is None:
                raise _Stop(key, Reason("its namespace was dropped", "namespace_dropped"))

    def _holds(self, candidate: Candidate) -> None:
        """Refuse a candidate whose lease went to another run: it was silent, and the other one wrote."""
        for name in sorted(candidate.leases):
            now = Lease.of(name, self.contents)
            if now.holder == candidate.branch:
                continue
            why = (
                f"{now.holder} has taken it over with fencing token {now.token}"
                if now.holder
                else "it was never granted to this run"
            )
            runs = (run_id_of(now.holder),) if now.holder else ()
            lost = Reason(
                f"the run may not write {name!r} alone any more: {why}",
                "lease_taken_over" if now.holder else "lease_not_granted",
            )
            raise _Stop(lease_key(name), lost, (), runs)

    def _must_stay(self, candidate: Candidate) -> None:
        """What Nessie holds still, from the plan's hash to the commit."""
        self.unchanged |= (candidate.read_set or frozenset()) | frozenset(map(lease_key, candidate.leases))

    def tokens(self) -> dict[str, str]:
        """The fencing tokens of the accepted, for the commit's properties: `name=token`, by commas."""
        names = sorted({name for one in self.accepted for name in one.leases})
        told = [f"{name}={Lease.of(name, self.contents).token}" for name in names]
        return {LakeProperty.FENCING_TOKEN: ",".join(told)} if told else {}

    def _same_reads(self, candidate: Candidate, reads: Mapping[ContentKey, Content]) -> None:
        for key in sorted(candidate.read_set or ()):
            if self._now(key) != reads.get(key):
                runs = (self.writers[key],) if key in self.writers else ()
                why = "the run has read it, and it has changed since (isolation serializable)"
                raise _Stop(key, Reason(why, "read_and_changed"), (), runs)

    def _value(self, entry: DiffEntry) -> Value:
        """What the key shall hold after the candidate, in a plan where it may hold something newer."""
        key, before, after, now = entry.key, entry.from_content, entry.to_content, self._now(entry.key)
        if now == before:
            return after
        runs = (self.writers[key],) if key in self.writers else ()
        if isinstance(after, Namespace) and isinstance(now, Namespace):
            if before is None or after.properties == now.properties:
                return now  # both made it; the first one's properties stay
            raise _Stop(
                key,
                Reason("both sides changed the namespace's properties", "namespace_properties"),
                (),
                runs,
            )
        if after is None and now is None:
            return None
        if after is None:
            why = "the run dropped or renamed it, and it has changed since"
            raise _Stop(key, Reason(why, "dropped_and_changed"), (), runs)
        if now is None:
            raise _Stop(key, Reason("it was dropped or renamed", "dropped"), (), runs)
        if not isinstance(after, IcebergTable) or not isinstance(now, IcebergTable | Staged):
            why = "both sides changed it, and it is not a table on both"
            raise _Stop(key, Reason(why, "not_a_table"), (), runs)
        if before is not None and not isinstance(before, IcebergTable):
            raise _Stop(key, Reason("it was something else at the run's base", "another_kind"), (), runs)
        return self._replayed(key, before, after, now, runs)

    def _replayed(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable,
        now: IcebergTable | Staged,
        runs: tuple[str, ...],
    ) -> Staged:
        current = self.contents.get(key)
        if before and current and before.content_id != current.content_id:
            raise _Stop(key, Reason("it was dropped and created again", "created_again"), (), runs)
        mine = self.tables.change(key, before, after)
        theirs = self.tables.change(key, before, now, files=not _only_appends(mine))
        if mine.there(theirs):
            why = "a part of the run's changes is on main already: merged by hand"
            raise _Stop(key, Reason(why, "partly_on_main"), (), runs)
        if twice := _same_properties(mine, theirs):
            raise _Stop(key, _met(twice), (), runs)
        recorded = any(
            name.startswith(
                (LakeProperty.CONSUMED, LakeProperty.OFFSETS_PREFIX, LakeProperty.REPROCESSED_PREFIX)
            )
            for name in mine.properties_set
        )
        if recorded and not theirs.complete:
            why = "it was rolled back or replaced, and what the run has recorded as read would hide that"
            raise _Stop(key, Reason(why, "rolled_back"), (), runs)
        mine = mapped(mine, theirs)
        if found := overlap(mine, theirs):
            # The files of a table without partitions have the partition "".
            named = tuple(filter(None, found.partitions))
            raise _Stop(key, found.why, named, found.runs or runs, only_expired=found.only_expired)
        onto = now if isinstance(now, Staged) else self.tables.open(key, now)
        try:
            return self.tables.replay(key, mine, after, onto)
        except ReplayImpossible as error:
            raise _Stop(key, Reason(error.message, "replay_impossible"), (), runs) from error


def _written_tables(
    candidate: Candidate,
) -> Iterator[tuple[ContentKey, IcebergTable | None, IcebergTable]]:
    for entry in candidate.changes:
        before = entry.from_content if isinstance(entry.from_content, IcebergTable) else None
        if isinstance(entry.to_content, IcebergTable):
            yield entry.key, before, entry.to_content


def _same(content: OtherContent, on_main: Content | None) -> bool:
    """Whether `main` holds the same view or function. It may have another id there."""
    return isinstance(on_main, OtherContent) and (content.type, content.payload) == (
        on_main.type,
        on_main.payload,
    )


def _only_appends(change: TableChange) -> bool:
    """Then it does not matter which files `main` changed, and nobody needs to read them."""
    return all(step.mode is Mode.APPEND for step in change.steps)


def _met(name: str) -> Reason:
    """What it means that both sides set a property."""
    if name.startswith(LakeProperty.CONSUMED):
        why = "another run of this consumer was published first: both have consumed the same change"
        return Reason(why, "run_published_first")
    if name.startswith(LakeProperty.OFFSETS_PREFIX):
        why = "another batch of this ingestion was published first: both have read the same offsets"
        return Reason(why, "batch_published_first")
    if name.startswith(LakeProperty.REPROCESSED_PREFIX):
        why = "another run of this ingestion has put dead letters back meanwhile, maybe the same"
        return Reason(why, "dead_letters_reprocessed")
    return Reason(f"both sides set its property {name}", "same_property")


def _same_properties(mine: TableChange, theirs: TableChange) -> str | None:
    ours = {*mine.properties_set, *mine.properties_removed}
    other = {*theirs.properties_set, *theirs.properties_removed}
    same = {name for name in ours & other if mine.properties_set.get(name) != theirs.properties_set.get(name)}
    return min(same, default=None)
