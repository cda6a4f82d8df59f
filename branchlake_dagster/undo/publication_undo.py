"""Plan and commit the undo of publications: one commit on `main` over all of their tables.

The commit expects the hash of `main` that it was planned for. If `main` has changed one of its tables
meanwhile, the undo is planned again. Before each plan, the log of `main` is searched for an earlier undo of
the same publications, so an undo is made once even if the reply to its commit was lost. Only metadata is
read and written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown, ReferenceNotFound
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    DiffEntry,
    IcebergTable,
    LogEntry,
    Namespace,
    Operation,
    Put,
)
from branchlake_dagster.publication.ledger import (
    Publication,
    is_namespace_change,
    list_undone_publications,
    parse_publications,
)
from branchlake_dagster.publication.replay import IcebergTableFormat, StagedState
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.runs.provenance import count_rows
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.find_publication import PublicationNotFound
from branchlake_dagster.undo.own_change import build_own_change, join_own_changes
from branchlake_dagster.undo.result import Undo, UndoneTable, build_refusal, describe_table
from branchlake_dagster.undo.table_state import (
    build_undone_state,
    find_missing_file,
    require_restorable,
    require_reversible,
)
from branchlake_dagster.undo.table_undo import SPEC_CHANGED, plan_table_undo
from branchlake_dagster.undo.undo_plan import Dependency, DependencyFound, OwnChange
from branchlake_dagster.wording import CodedReason, format_names

_MAX_ATTEMPTS = 5
_TABLES_AT_ONCE = 8


class UndoContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Other writers changed the same tables during each of five attempts; nothing was undone."""


class UndoUnknown(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """The reply to the undo's commit was lost, and `main` does not show yet whether it was made."""


@dataclass
class _Plan:
    """An undo in preparation, on `main` at `main_hash`."""

    main_hash: str
    contents: Mapping[ContentKey, Content]
    """The contents of the publications' keys and of their namespaces on `main`."""
    new_contents: dict[ContentKey, Content | None] = field(default_factory=dict)
    """The contents of changed keys after the undo; None for a key that is deleted."""
    states: list[StagedState] = field(default_factory=list)
    tables: list[UndoneTable] = field(default_factory=list)
    dependencies: list[Dependency] = field(default_factory=list)
    superseding_ids: set[int] = field(default_factory=set)
    """The ids of snapshots of later publications that have replaced rows of the undone publications."""
    own_ids: set[int] = field(default_factory=set)
    """The ids of the snapshots of the undone publications."""
    namespace_properties: dict[ContentKey, Mapping[str, str]] = field(default_factory=dict)
    """The properties of namespaces that the undone publications dropped."""

    def build_operations(self) -> list[Operation]:
        """Build the operations of the commit. They create namespaces again that were dropped since."""
        operations: list[Operation] = []
        dropped_namespaces = {
            namespace
            for key, content in self.new_contents.items()
            for namespace in key.ancestors
            if content is not None and namespace not in self.contents
        }
        operations += [
            Put(key, Namespace(None, key.elements, self.namespace_properties.get(key, {})))
            for key in sorted(dropped_namespaces)
        ]
        for key, content in sorted(self.new_contents.items()):
            operations.append(Delete(key) if content is None else Put(key, content))
        return operations


@dataclass(frozen=True)
class _KeyHistory:
    """The changes of one key by the undone publications.

    `before` is the content before the first of these publications, `after` the content after the last of
    them. `commits` are the changes of the key, oldest first, each with its publication.
    """

    key: ContentKey
    before: Content | None
    after: Content | None
    commits: tuple[tuple[Publication, DiffEntry], ...]
    is_renamed: bool = False
    """Whether one of the commits renamed the content from or to this key."""

    @property
    def is_one_table(self) -> bool:
        """Whether the key had the same table before and after each of the commits."""
        contents = [
            content for _, entry in self.commits for content in (entry.from_content, entry.to_content)
        ]
        return all(isinstance(content, IcebergTable) for content in contents) and not self.is_interrupted

    @property
    def is_interrupted(self) -> bool:
        """Whether the key had different content ids after the commits and before each later commit.

        A drop, or another table created under the key, changes the id.
        """
        # Publications of one commit share its change of the key.
        entries = list({publication.hash: entry for publication, entry in self.commits}.values())
        later_contents = [entry.to_content for entry in entries]
        later_contents += [entry.from_content for entry in entries[1:]]
        ids = {content.content_id if content is not None else None for content in later_contents}
        return len(ids) > 1


class PublicationUndo:
    """Undoes publications of one lake."""

    def __init__(self, client: NessieClient, tables: IcebergTableFormat) -> None:
        self._client = client
        self._tables = tables
        self._changes: dict[str, tuple[DiffEntry, ...]] = {}
        """The changes of each commit that was read, by commit hash."""
        self._members: dict[str, list[Publication]] = {}
        """The publications of each commit that was read, by commit hash."""

    @classmethod
    def of_lake(cls, lake: Lakehouse) -> PublicationUndo:
        """Build the object for the Iceberg tables of a lake."""
        return cls(lake.nessie, IcebergTableFormat(lake.catalog(), SnapshotFiles()))

    def plan(
        self, publication: Publication, *, with_followers: bool = False, keep_positions: bool = False
    ) -> Undo:
        """Return what `undo` would do now, and leave `main` unchanged.

        If the publication cannot be undone alone, the result has `dependencies`, and nothing is raised. If it
        is undone already, the result is that undo. Raises PublicationNotFound if `main` was set back to
        before the publication, and the errors of Nessie and of the storage.
        """
        undos = self._earlier_undos(publication)
        if earlier := self._find_own_undo(publication, undos):
            return earlier
        publications, plan = self._plan_with_followers(publication, undos, with_followers, keep_positions)
        self._discard(plan)
        return Undo(publications, tuple(plan.tables), dependencies=tuple(plan.dependencies))

    def undo(
        self, publication: Publication, *, with_followers: bool = False, keep_positions: bool = False
    ) -> Undo:
        """Undo a publication on `main`. Safe to call again after any failure.

        With `with_followers`, later publications that build on it are undone by the same commit. With
        `keep_positions`, consumers and ingestions do not read again what the publication had read.

        Returns the committed undo. If an earlier call has made it, `is_new` is False.

        Raises UndoRefused if the publication cannot be undone, or not alone; PublicationNotFound if `main`
        was set back to before it; UndoContended; UndoUnknown; and the errors of Nessie and of the storage.
        """
        unknown_outcome: NessieOutcomeUnknown | None = None
        where = {"branch": MAIN, "run_id": publication.run_id, "table": ", ".join(publication.tables)}
        for _ in range(_MAX_ATTEMPTS):
            try:
                done = self._try_undo(publication, with_followers, keep_positions)
            except NessieOutcomeUnknown as error:
                unknown_outcome = unknown_outcome or error
                continue
            except Exception as error:
                if unknown_outcome is None:
                    raise
                raise _unknown_error(where) from error  # the earlier commit may exist, whatever failed now
            if done is not None:
                return done if unknown_outcome is None else replace(done, is_new=True)
        if unknown_outcome is not None:
            raise _unknown_error(where) from unknown_outcome
        raise UndoContended(
            f"Main changed {_MAX_ATTEMPTS} times while the undo was planned.",
            hint="Nothing was undone. Repeat the command, or stop the other writers of the tables first.",
            **where,
        )

    def _try_undo(self, publication: Publication, with_followers: bool, keep_positions: bool) -> Undo | None:
        """Plan and commit once. Return None if `main` has changed one of the keys meanwhile."""
        undos = self._earlier_undos(publication)
        if earlier := self._find_own_undo(publication, undos):
            return earlier
        publications, plan = self._plan_with_followers(publication, undos, with_followers, keep_positions)
        if plan.dependencies:
            self._discard(plan)
            raise build_refusal(publication, plan.dependencies)
        if not plan.new_contents:
            # Perhaps the undo was committed after the log was read.
            earlier = self._find_own_undo(publication, self._earlier_undos(publication))
            return earlier or Undo(publications, tuple(plan.tables))
        try:
            commit = self._client.commit(
                MAIN,
                expected_hash=plan.main_hash,
                operations=plan.build_operations(),
                message=_message(publications),
                properties=_properties(publications, plan.superseding_ids),
            ).hash
        except NessieOutcomeUnknown:
            raise  # keep the files: the commit may exist, or still arrive
        except NessieConflict:
            self._discard(plan)
            return None
        except Exception:
            self._discard(plan)
            raise
        return Undo(publications, tuple(plan.tables), commit)

    def _earlier_undos(self, publication: Publication) -> list[LogEntry]:
        """Return the commits on `main` since a publication that undid publications, newest first.

        Raises PublicationNotFound if `main` no longer contains the publication.
        """
        marker = f"'{LakeProperty.UNDONE_PUBLICATIONS}' in commit.properties"
        try:
            return list(self._client.log(MAIN, since=publication.hash, filter=marker))
        except ReferenceNotFound as error:
            raise PublicationNotFound(
                "Main no longer has the publication: main was set back meanwhile.",
                run_id=publication.run_id,
                hint="There is nothing to undo.",
            ) from error

    def _find_own_undo(self, publication: Publication, undos: Sequence[LogEntry]) -> Undo | None:
        """Return the undo of the publication among the commits `undos`; None if it was not undone.

        The row counts of its tables are None.
        """
        for entry in undos:
            undone_ids = list_undone_publications(entry)
            if publication.publication_id not in undone_ids:
                continue
            later_members = self._later_publications(publication)
            members = [member for member in later_members if member.publication_id in undone_ids]
            tables = [
                UndoneTable(change.key.name, _describe_change(change), removed_rows=None, restored_rows=None)
                for change in self._load_changes(entry.commit.hash)
                if not is_namespace_change(change)
            ]
            return Undo((*members, publication), tuple(tables), entry.commit.hash, is_new=False)
        return None

    def _plan_with_followers(
        self,
        publication: Publication,
        undos: Sequence[LogEntry],
        with_followers: bool,
        keep_positions: bool,
    ) -> tuple[tuple[Publication, ...], _Plan]:
        """Plan the undo, and return the publications to undo, newest first, with the plan.

        A dependency is a reason why a table's change cannot be undone alone. With followers, the later
        publications that the dependencies name are undone too, and the undo is planned again, until no
        dependency is left, one names no run, or no publication can be added. The remaining dependencies are
        in the plan. `undos` are the earlier undos on `main`. With `keep_positions`, the positions of
        consumers and ingestions stay.
        """
        undone_ids = {name for entry in undos for name in list_undone_publications(entry)}
        publications: tuple[Publication, ...] = (publication,)
        while True:
            plan = self._plan(publications, keep_positions)
            plan.dependencies += _find_hidden_rows(publications, plan.own_ids, undos)
            if not (plan.dependencies and with_followers):
                return publications, plan
            run_ids = {run_id for dependency in plan.dependencies for run_id in dependency.run_ids}
            tables = {dependency.table for dependency in plan.dependencies}
            known_ids = {member.publication_id for member in publications}
            later_members = [
                member
                for member in (*self._later_publications(publication), *self._other_members(publication))
                if member.publication_id in known_ids
                or (
                    run_ids & {member.run_id, member.root_run_id}
                    and tables & {*member.tables}
                    and member.publication_id not in undone_ids
                    and not member.damaged_properties
                )
            ]
            has_unnamed = any(not dependency.run_ids for dependency in plan.dependencies)
            if has_unnamed or len(later_members) + 1 == len(publications):
                return publications, plan
            self._discard(plan)
            publications = (*later_members, publication)

    def _later_publications(self, publication: Publication) -> Iterator[Publication]:
        """Yield the publications on `main` after the commit of the given publication, newest first."""
        for entry in self._client.log(MAIN, since=publication.hash):
            yield from parse_publications(entry)

    def _other_members(self, publication: Publication) -> list[Publication]:
        """Return the other publications of the same commit."""
        return [member for member in self._members.get(publication.hash, ()) if member != publication]

    def _plan(self, publications: Sequence[Publication], keep_positions: bool) -> _Plan:
        histories = self._load_histories(publications)
        keys = {history.key for history in histories}
        namespace_keys = {namespace for key in keys for namespace in key.ancestors}
        main = self._client.contents_at(MAIN, sorted(keys | namespace_keys))
        plan = _Plan(main.reference.hash, main.contents)
        plan.namespace_properties = {
            entry.key: entry.from_content.properties
            for publication in publications
            for entry in self._load_changes(publication.hash)
            if isinstance(entry.from_content, Namespace) and entry.to_content is None
        }
        try:
            with ThreadPoolExecutor(_TABLES_AT_ONCE) as pool:
                answers = list(
                    pool.map(lambda history: self._plan_key(history, plan, keep_positions), histories)
                )
        except Exception:
            self._discard(plan)
            raise
        for answer in answers:
            if isinstance(answer, UndoneTable):
                plan.tables.append(answer)
            # If all tables are gone, nothing is left. Otherwise the undo of a drop would bring rows back.
            elif answer.reason.code != _GONE or plan.new_contents:
                plan.dependencies.append(self._name_writers(answer, publications))
            else:
                plan.tables.append(UndoneTable(answer.table, "unchanged"))
        return plan

    def _name_writers(self, dependency: Dependency, publications: Sequence[Publication]) -> Dependency:
        """Return the dependency with the runs that published the table later, if it names no run itself.

        This applies only to the reasons in `_NAMED_BY_TABLE`. Other dependencies are returned unchanged.
        """
        if dependency.reason.code not in _NAMED_BY_TABLE or dependency.run_ids:
            return dependency
        run_ids = [
            member.run_id
            for member in self._later_publications(publications[-1])
            if dependency.table in member.tables
        ]
        return replace(dependency, run_ids=tuple(dict.fromkeys(run_ids)))

    def _load_histories(self, publications: Sequence[Publication]) -> list[_KeyHistory]:
        commits: dict[ContentKey, list[tuple[Publication, DiffEntry]]] = {}
        renamed_keys: set[ContentKey] = set()
        for publication in reversed(publications):
            changes = self._load_changes(publication.hash)
            renamed_keys |= _renamed_keys(changes)
            for entry in changes:
                if not is_namespace_change(entry) and entry.key.name in publication.tables:
                    commits.setdefault(entry.key, []).append((publication, entry))
        return [
            _KeyHistory(
                key,
                entries[0][1].from_content,
                entries[-1][1].to_content,
                tuple(entries),
                key in renamed_keys,
            )
            for key, entries in sorted(commits.items())
        ]

    def _load_changes(self, commit: str) -> tuple[DiffEntry, ...]:
        if commit not in self._changes:
            entry = next(iter(self._client.log(f"@{commit}", limit=1)))
            parent = entry.commit.parent_hashes[0]
            self._members[commit] = parse_publications(entry)
            self._changes[commit] = tuple(self._client.diff(f"@{parent}", f"@{commit}"))
        return self._changes[commit]

    def _plan_key(self, history: _KeyHistory, plan: _Plan, keep_positions: bool) -> UndoneTable | Dependency:
        """Plan the undo of one key.

        A publication whose states were deleted after the history horizon is not undone. If a file of the
        present state is missing, the error is raised.
        """
        try:
            return self._plan_known_key(history, plan, keep_positions)
        except FileNotFoundError as error:
            current = plan.contents.get(history.key)
            if not isinstance(current, IcebergTable):
                reason = CodedReason(f"its files cannot be read any more ({error})", "files_gone")
            elif self._is_readable(history.key, current):
                reason = CodedReason(f"its earlier states were deleted ({error})", "history_lost")
            else:
                raise
            return Dependency(history.key.name, reason)

    def _is_readable(self, key: ContentKey, content: IcebergTable) -> bool:
        """Return whether all files of the table's current snapshot exist."""
        try:
            return find_missing_file(self._tables.open(key, content).table) is None
        except FileNotFoundError:
            return False

    def _plan_known_key(
        self, history: _KeyHistory, plan: _Plan, keep_positions: bool
    ) -> UndoneTable | Dependency:
        """Plan the undo of one key. Raises FileNotFoundError if a file of an earlier state is missing."""
        key, current = history.key, plan.contents.get(history.key)
        name, after = key.name, history.after
        if current == after and not history.is_one_table:
            remaining = self._remaining_members(history)
            if not remaining:
                return self._plan_content(history, plan)
            if not (history.before is None and isinstance(current, IcebergTable)):
                reason = CodedReason(
                    "its commit has several publications, which all created or dropped it", "shared_commit"
                )
                return Dependency(name, reason, run_ids=tuple(member.run_id for member in remaining))
        if isinstance(after, IcebergTable) and isinstance(current, IcebergTable):
            if after.content_id != current.content_id:
                return self._explain_absence(history)
            if history.is_renamed or history.is_interrupted:
                reason = CodedReason(
                    "the publication renamed or dropped it, and it has changed since", "renamed"
                )
                return Dependency(name, reason)
            try:
                return self._plan_table(history, current, keep_positions, plan)
            except DependencyFound as found:
                return found.dependency
        if isinstance(after, IcebergTable) and current is None:
            return self._explain_absence(history)
        reason = CodedReason("it was created, dropped or changed since", "changed_since")
        return Dependency(name, reason)

    def _remaining_members(self, history: _KeyHistory) -> list[Publication]:
        """Return the publications of the same commits that changed the key and are not undone."""
        undone = [publication for publication, _ in history.commits]
        return [
            member
            for publication in undone
            for member in self._members[publication.hash]
            if member not in undone and history.key.name in member.tables
        ]

    def _explain_absence(self, history: _KeyHistory) -> Dependency:
        """Return a dependency for a table that is no longer at its key: it was renamed, or else dropped."""
        content_id = history.after.content_id if history.after else None
        entries = self._client.entries(MAIN)
        if any(entry.content_id == content_id for entry in entries):
            reason = CodedReason("it was renamed since", "renamed")
        else:
            reason = CodedReason("it was dropped since", _GONE)
        return Dependency(history.key.name, reason)

    def _plan_content(self, history: _KeyHistory, plan: _Plan) -> UndoneTable | Dependency:
        """Plan the undo of a created or dropped table, or of a view, which is unchanged since.

        Sets the earlier content in the plan. The undo of a renaming removes and restores no rows. Returns a
        dependency if a file of that content is missing.
        """
        key, before = history.key, history.before
        if before is None:
            plan.new_contents[key] = None
            stored_content = None if history.is_renamed else plan.contents.get(key)
            file_count, row_count = self._count_stored(key, stored_content)
            return UndoneTable(key.name, "dropped", removed_files=file_count, removed_rows=row_count)
        if isinstance(before, IcebergTable):
            error = find_missing_file(self._tables.open(key, before).table)
            if error is not None:
                reason = CodedReason(f"its files cannot be read any more ({error})", "files_gone")
                return Dependency(key.name, reason)
        current = plan.contents.get(key)
        content_id = current.content_id if current else before.content_id if history.is_renamed else None
        plan.new_contents[key] = replace(before, content_id=content_id)
        file_count, row_count = self._count_stored(key, None if history.is_renamed else before)
        return UndoneTable(key.name, "restored", restored_files=file_count, restored_rows=row_count)

    def _count_stored(self, key: ContentKey, content: Content | None) -> tuple[int, int | None]:
        """Return the numbers of data files and rows of a whole table; no files and None if they are unknown.

        Both are zero for a view, and without content. A damaged table must not prevent its undo.
        """
        if not isinstance(content, IcebergTable):
            return 0, 0
        try:
            table = self._tables.open(key, content).table
        except (OSError, BranchlakeError):
            return 0, None
        snapshot = table.current_snapshot()
        summary = snapshot.summary.additional_properties if snapshot and snapshot.summary else {}
        return int(summary.get("total-data-files", 0)), count_rows(table)

    def _plan_table(
        self, history: _KeyHistory, current: IcebergTable, keep_positions: bool, plan: _Plan
    ) -> UndoneTable:
        key, name = history.key, history.key.name
        before = history.before if isinstance(history.before, IcebergTable) else None
        target = self._tables.open(key, current)
        old_table = self._tables.open(key, before).table if before is not None else None
        own = self._load_own_change(history)
        undo = plan_table_undo(
            name,
            self._tables.load_change(key, before, current),
            own,
            target.table.metadata.properties,
            keep_positions=keep_positions,
        )
        if undo.restores_spec and self._has_changed_spec_since(history, current):
            raise DependencyFound(Dependency(name, SPEC_CHANGED))
        if (undo.restored or undo.restored_deletes) and old_table is not None:
            require_restorable(name, undo, old_table)
        if undo.reversals:
            require_reversible(name, undo, target.table)
        undone_table = describe_table(name, undo)
        plan.superseding_ids |= {*undo.superseding_ids}
        plan.own_ids |= own.snapshot_ids
        if undo.changes_anything:
            ids = _join_ids([publication for publication, _ in history.commits])
            state = build_undone_state(name, target, undo, old_table, {LakeProperty.UNDONE_PUBLICATIONS: ids})
            plan.states.append(state)
            plan.new_contents[key] = self._tables.write(state, current.content_id)
        return undone_table

    def _has_changed_spec_since(self, history: _KeyHistory, current: IcebergTable) -> bool:
        """Return whether another commit since the publications gave the table another partition spec.

        `current` is the table on `main`. Its spec alone does not show that: a later commit may have set the
        earlier spec, and another one the publication's again. Reads the log of `main` since the first of the
        publications.
        """
        own_hashes = {publication.hash for publication, _ in history.commits}
        first_hash = history.commits[0][0].hash
        return any(
            isinstance(operation, Put)
            and operation.key == history.key
            and isinstance(operation.content, IcebergTable)
            and operation.content.spec_id != current.spec_id
            for entry in self._client.log(MAIN, since=first_hash, fetch_operations=True)
            if entry.commit.hash not in own_hashes
            for operation in entry.operations
        )

    def _load_own_change(self, history: _KeyHistory) -> OwnChange:
        """Load the snapshots, properties and columns that the undone publications changed in one table.

        Raises DependencyFound if they cannot be separated from those of other publications.
        """
        own_changes = []
        for publication, entry in history.commits:
            assert isinstance(entry.to_content, IcebergTable)  # noqa: S101 - only tables have snapshots
            before = entry.from_content if isinstance(entry.from_content, IcebergTable) else None
            old = self._tables.open(history.key, before).table if before is not None else None
            new = self._tables.open(history.key, entry.to_content).table
            change = self._tables.load_change(history.key, before, entry.to_content, files=False)
            others = [
                member
                for member in self._members[publication.hash]
                if member != publication and history.key.name in member.tables
            ]
            own_changes.append(build_own_change(history.key.name, publication, others, change, old, new))
        return join_own_changes(history.key.name, own_changes)

    def _discard(self, plan: _Plan) -> None:
        """Delete the files that were written for a commit that certainly does not exist."""
        for state in plan.states:
            self._tables.discard(state)
        plan.states.clear()


def _unknown_error(where: Mapping[str, str]) -> UndoUnknown:
    return UndoUnknown(
        "Nessie did not answer to the commit of the undo.",
        hint="Repeat the command: it finds the commit on main if it was made.",
        **where,
    )


_GONE = "dropped_since"
_NAMED_BY_TABLE = frozenset({"changed_since", "renamed", "positions_moved", SPEC_CHANGED.code, _GONE})
"""The codes of dependencies for which every later publication of the table counts as the cause."""


def _describe_change(change: DiffEntry) -> str:
    if change.to_content is None:
        return "dropped"
    return "restored" if change.from_content is None else "changed"


def _renamed_keys(changes: Collection[DiffEntry]) -> set[ContentKey]:
    """Return one set with the old and the new key of each content that a commit renamed.

    A content is renamed if its id disappears under one key and appears under another.
    """
    old_ids = {
        entry.from_content.content_id for entry in changes if entry.from_content and not entry.to_content
    }
    new_ids = {
        entry.to_content.content_id for entry in changes if entry.to_content and not entry.from_content
    }
    renamed_ids = old_ids & new_ids
    return {
        entry.key
        for entry in changes
        for content in (entry.from_content, entry.to_content)
        if content is not None and content.content_id in renamed_ids
    }


def _join_ids(publications: Sequence[Publication]) -> str:
    return ",".join(publication.publication_id for publication in publications)


def _find_hidden_rows(
    publications: Sequence[Publication], own_ids: Collection[int], undos: Sequence[LogEntry]
) -> Iterator[Dependency]:
    """Yield dependencies if the publications had replaced rows of a publication that was undone since.

    The undo of this replacement would bring the undone rows back. `own_ids` are the snapshots of the
    publications, and `undos` the commits of earlier undos. Each such undo gives one dependency per table.
    """
    names = {str(snapshot_id) for snapshot_id in own_ids}
    tables = {table for publication in publications for table in publication.tables}
    for entry in undos:
        if names & {*_list_property(entry, LakeProperty.UNDONE_SUPERSEDED_BY)}:
            reason = CodedReason(
                f"it replaced rows of a publication that was undone since, as {entry.commit.hash}",
                "hides_undone_rows",
            )
            yield from (Dependency(table, reason) for table in sorted(tables))


def _list_property(entry: LogEntry, name: str) -> list[str]:
    return [item for item in entry.commit.properties.get(name, "").split(",") if item]


def _properties(publications: Sequence[Publication], superseding_ids: Collection[int]) -> dict[str, str]:
    """Return the properties of the undo's commit.

    They have no publication id, so that readers of the ledger do not take the commit for a publication.
    """
    properties = {
        LakeProperty.UNDONE_PUBLICATIONS: _join_ids(publications),
        LakeProperty.UNDONE_RUNS: ",".join(publication.run_id for publication in publications),
    }
    if superseding_ids:
        properties[LakeProperty.UNDONE_SUPERSEDED_BY] = ",".join(map(str, sorted(superseding_ids)))
    return properties


def _message(publications: Sequence[Publication]) -> str:
    tables = ", ".join(dict.fromkeys(table for publication in publications for table in publication.tables))
    run_ids = list(dict.fromkeys(publication.run_id for publication in publications))
    return f"Undo the publication of {tables} by {format_names('run', run_ids)}"
