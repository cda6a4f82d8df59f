"""Publish the rewritten files of one table by one commit on `main`, while other writers continue.

If no commit changed the table since the compaction's branch was created, the branch's state becomes current.
Otherwise the rewritten files are replayed on the newer state, as one snapshot of the operation `replace`. A
partition is skipped, and reported, if a commit on `main` changed its files, or if an open run could not be
published after the compaction.

The commit expects the hash of `main` for which it was planned, and is planned again if the table has changed
meanwhile. Before each plan, the log of `main` is searched for this compaction's commit, in case only the
reply was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from branchlake_dagster.compaction.errors import CompactionContended, CompactionUnknown
from branchlake_dagster.compaction.open_runs import OpenRun, find_run_obstacle, load_open_runs
from branchlake_dagster.compaction.rewritten_files import RewrittenPartition, list_rewritten_partitions
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Put
from branchlake_dagster.publication.compaction_reversal import drop_reversed_compactions
from branchlake_dagster.publication.conflicts import find_overlap
from branchlake_dagster.publication.replay import IcebergTableFormat, ReplayImpossible, StagedState
from branchlake_dagster.publication.table_change import ChangeMode, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind
from branchlake_dagster.wording import CodedReason

_MAX_ATTEMPTS = 5
_MAX_REPLAYED_VERSION = 2
"""The newest format version in which a compaction or a run can be replayed."""


@dataclass(frozen=True)
class RewrittenTable:
    """The rewritten files of one table on a compaction's branch.

    `RowProof.prove` compares their rows with those of `before`; call it before you publish.

    Attributes:
        key: The table's key.
        branch: The name of the compaction's branch. It identifies the commit on `main`.
        base_hash: The hash of `main` from which the branch was created.
        before: The table's content at `base_hash`.
        after: The table's content on the branch.
        partitions: The rewritten partitions.
    """

    key: ContentKey
    branch: str
    base_hash: str
    before: IcebergTable
    after: IcebergTable
    partitions: tuple[RewrittenPartition, ...]


@dataclass(frozen=True)
class TablePublication:
    """The outcome for one table.

    `commit` is the hash of the commit on `main`; None if every partition was skipped. `given_way` has the
    reason for each skipped partition. `committed` are the partitions that the commit rewrote, read from its
    manifests. `is_rebased` is true if the files were replayed on a newer state, or without some partitions.
    """

    commit: str | None
    committed: tuple[RewrittenPartition, ...] = ()
    given_way: Mapping[str, CodedReason] = field(default_factory=dict)
    is_rebased: bool = False


class TablePublisher:
    """Publishes compacted tables of one lake."""

    def __init__(self, client: NessieClient, tables: IcebergTableFormat) -> None:
        self._client = client
        self._tables = tables

    def publish(
        self, rewritten: RewrittenTable, *, fold_deletes_beside_runs: bool = False
    ) -> TablePublication:
        """Publish the rewritten partitions, except those that must be skipped.

        `fold_deletes_beside_runs` also publishes partitions with deleted rows while runs are open. Makes at
        most five attempts. Raises CompactionContended, CompactionUnknown, and the errors of Nessie and of the
        storage.
        """
        unknown_outcome: NessieOutcomeUnknown | None = None
        for _ in range(_MAX_ATTEMPTS):
            try:
                publication = self._try_publish(rewritten, fold_deletes_beside_runs)
            except NessieOutcomeUnknown as error:
                unknown_outcome = unknown_outcome or error
                continue
            except Exception as error:
                if unknown_outcome is None:
                    raise
                raise _unknown_error(rewritten) from error  # the earlier commit may exist
            if publication is None:
                continue
            if unknown_outcome is not None and publication.commit is None:
                raise _unknown_error(rewritten) from unknown_outcome
            return publication
        if unknown_outcome is not None:
            raise _unknown_error(rewritten) from unknown_outcome
        raise CompactionContended(
            f"Main changed {_MAX_ATTEMPTS} times while the compaction was published.",
            table=rewritten.key.name,
            branch=MAIN,
            hint="Nothing was published. Compact the table again when fewer writers are at work.",
        )

    def _try_publish(
        self, rewritten: RewrittenTable, fold_deletes_beside_runs: bool
    ) -> TablePublication | None:
        """Plan and commit once. Return None if `main` has changed the table meanwhile."""
        key = rewritten.key
        if commit := self._find_own_commit(rewritten):
            return self._describe_commit(rewritten, commit)
        main = self._client.contents_at(MAIN, [key])
        current = main.contents.get(key)
        if not isinstance(current, IcebergTable) or current.content_id != rewritten.before.content_id:
            reason = CodedReason("the table was dropped or replaced", "table_gone")
            return TablePublication(None, given_way=_for_all(rewritten, reason))
        given_way = self._find_obstacles(rewritten, current, fold_deletes_beside_runs)
        partitions = [one for one in rewritten.partitions if one.partition not in given_way]
        if not partitions:
            return TablePublication(None, given_way=given_way)
        staged: StagedState | None = None
        if current == rewritten.before and not given_way:
            new_content = replace(rewritten.after, content_id=current.content_id)
        else:
            try:
                staged = self._replay(rewritten, current, partitions)
            except ReplayImpossible:
                reason = CodedReason("main no longer has its files", "files_gone")
                return TablePublication(None, given_way=_for_all(rewritten, reason))
            new_content = self._tables.write(staged, current.content_id)
        try:
            commit = self._client.commit(
                MAIN,
                expected_hash=main.reference.hash,
                operations=[Put(key, new_content)],
                message=f"Compact {key.name}",
                properties={
                    LakeProperty.MAINTENANCE: MaintenanceKind.COMPACTION,
                    LakeProperty.BRANCH: rewritten.branch,
                },
            ).hash
        except NessieOutcomeUnknown:
            raise  # keep the files: the commit may exist, or still arrive
        except NessieConflict:
            self._discard(staged)
            return None
        except Exception:
            self._discard(staged)
            raise
        committed = self._load_partitions(key, current, new_content)
        return TablePublication(commit, committed, given_way, is_rebased=staged is not None)

    def _discard(self, staged: StagedState | None) -> None:
        if staged is not None:
            self._tables.discard(staged)

    def _replay(
        self, rewritten: RewrittenTable, current: IcebergTable, partitions: Sequence[RewrittenPartition]
    ) -> StagedState:
        change = self._build_change(rewritten, partitions)
        return self._tables.replay(
            rewritten.key, change, rewritten.after, self._tables.open(rewritten.key, current)
        )

    def _build_change(
        self, rewritten: RewrittenTable, partitions: Sequence[RewrittenPartition]
    ) -> TableChange:
        """Return the rewriting of `partitions` as a change with one step."""
        branch_change = self._tables.load_change(
            rewritten.key, rewritten.before, rewritten.after, files=False
        )
        step = SnapshotChange(
            rewritten.after.snapshot_id,
            ChangeMode.COMPACT,
            added=tuple(file for one in partitions for file in one.added),
            removed=tuple(file for one in partitions for file in one.removed),
            properties={LakeProperty.MAINTENANCE: MaintenanceKind.COMPACTION},
        )
        return replace(branch_change, steps=(step,))

    # -- skipped partitions ----------------------------------------------------------------------------

    def _find_obstacles(
        self, rewritten: RewrittenTable, current: IcebergTable, fold_deletes_beside_runs: bool
    ) -> dict[str, CodedReason]:
        """Return the reason for each partition that cannot be published.

        The open runs are read last: a run that begins later starts from `main` with the compaction, or is
        rebased on it when it is published. A table that cannot be replayed (format version 3) is published
        with all partitions or none.
        """
        key = rewritten.key
        given_way: dict[str, CodedReason] = {}
        if current != rewritten.before:
            main_change = self._tables.load_change(key, rewritten.before, current)
            main_change = replace(main_change, steps=drop_reversed_compactions(main_change.steps))
            for one in rewritten.partitions:
                if overlap := find_overlap(self._build_change(rewritten, [one]), main_change):
                    given_way[one.partition] = overlap.reason
        open_runs = load_open_runs(self._client, self._tables, key, current)
        is_replayable = self._is_replayable(key, current)
        for one in rewritten.partitions:
            if one.partition in given_way:
                continue
            obstacle = find_run_obstacle(one, open_runs)
            if obstacle is None and open_runs:
                obstacle = _find_irreversible(
                    one, open_runs, is_replayable=is_replayable, may_fold=fold_deletes_beside_runs
                )
            if obstacle is not None:
                given_way[one.partition] = obstacle
        if given_way and not is_replayable and len(given_way) < len(rewritten.partitions):
            reason = CodedReason("another partition was skipped; this table changes whole", "not_separable")
            given_way = {**_for_all(rewritten, reason), **given_way}
        return given_way

    def _is_replayable(self, key: ContentKey, current: IcebergTable) -> bool:
        """Return whether single partitions can be published, and runs rebased: up to format version 2."""
        return self._tables.open(key, current).table.metadata.format_version <= _MAX_REPLAYED_VERSION

    # -- what was committed ----------------------------------------------------------------------------

    def _find_own_commit(self, rewritten: RewrittenTable) -> str | None:
        """Return the hash of this compaction's commit on `main`; None if `main` has no such commit."""
        marker = f"'{LakeProperty.MAINTENANCE}' in commit.properties"
        for entry in self._client.log(MAIN, since=rewritten.base_hash, filter=marker):
            if entry.commit.properties.get(LakeProperty.BRANCH) == rewritten.branch:
                return entry.commit.hash
        return None

    def _describe_commit(self, rewritten: RewrittenTable, commit: str) -> TablePublication:
        """Return the outcome of an earlier attempt, whose reply was lost, from its commit on `main`."""
        key = rewritten.key
        entry = next(iter(self._client.log(f"@{commit}", limit=1)))
        before = self._client.contents(f"@{entry.commit.parent_hashes[0]}", [key])[key]
        after = self._client.contents(f"@{commit}", [key])[key]
        assert isinstance(before, IcebergTable)  # noqa: S101 - the commit changed a table
        assert isinstance(after, IcebergTable)  # noqa: S101
        committed = self._load_partitions(key, before, after)
        names = {one.partition for one in committed}
        reason = CodedReason("it was left out of the commit", "left_out")
        given_way = {name: reason for name in _for_all(rewritten, reason) if name not in names}
        is_rebased = after.metadata_location != rewritten.after.metadata_location
        return TablePublication(commit, committed, given_way, is_rebased)

    def _load_partitions(
        self, key: ContentKey, before: IcebergTable, after: IcebergTable
    ) -> tuple[RewrittenPartition, ...]:
        """Return the partitions that a commit rewrote, from the manifests before and after it."""
        return tuple(list_rewritten_partitions(key.name, self._tables.load_change(key, before, after)))


def _find_irreversible(
    one: RewrittenPartition, open_runs: Sequence[OpenRun], *, is_replayable: bool, may_fold: bool
) -> CodedReason | None:
    """Return why an open run that writes to the table later could not be published; None if it could.

    Nothing may be committed to such a table or partition while any run is open.
    """
    branches = ", ".join(sorted(run.branch for run in open_runs)[:3])
    if not is_replayable:
        sentence = f"the table's format version allows no rebase, and runs are open: {branches}"
        return CodedReason(sentence, "format_version")
    if one.has_folded_deletes and not may_fold:
        sentence = (
            f"deleted rows would come back if a run needed its old files, and runs are open: {branches}"
        )
        return CodedReason(sentence, "runs_open")
    return None


def _for_all(rewritten: RewrittenTable, reason: CodedReason) -> dict[str, CodedReason]:
    return {one.partition: reason for one in rewritten.partitions}


def _unknown_error(rewritten: RewrittenTable) -> CompactionUnknown:
    return CompactionUnknown(
        "The reply of Nessie to the commit of the compaction was lost.",
        table=rewritten.key.name,
        branch=MAIN,
        hint="Repeat the compaction later: if the commit was made, it finds nothing left to do.",
    )
