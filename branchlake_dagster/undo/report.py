"""Report an undo in Dagster: on the runs whose publications were undone, and on their assets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dagster import AssetKey, AssetObservation, DagsterInstance, DagsterRun, MetadataValue

from branchlake_dagster.internals.dagster import report_engine_event, report_observations
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.publication.outcome import MainView
from branchlake_dagster.runs.approval import is_on_main
from branchlake_dagster.runs.branch_owner import BatchBranch
from branchlake_dagster.runs.discarding import iter_materializations, load_newest_run_id
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    RunState,
    build_status_tag,
    find_publication,
    find_run_location,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster.tables.specification import find_table_name
from branchlake_dagster.undo.result import Undo

_BATCH_SIZE = 200


def report_undo(instance: DagsterInstance, lake: Lakehouse, undo: Undo) -> int:
    """Report a committed undo on its runs and on each asset and partition that they materialized.

    The newest observation of a partition shows whether `main` has it. Conditions on publications evaluate
    these observations. Partitions that a publication after the undo has materialized are left out. The tag
    `branchlake` of a run becomes `undone`. A live ingestion keeps its tag, because its other batches are
    still on `main`. Runs that this Dagster instance does not have are left out. Idempotent, apart from
    repeated observations. Returns the number of runs on which the undo was reported; 0 if the undo has no
    commit.
    """
    if undo.commit is None:
        return 0
    changed_tables = {table.table for table in undo.tables if table.action != "unchanged"}
    row_counts = MainView(lake).count_rows(changed_tables, undo.commit)
    later_commits = frozenset[str]()
    if not undo.is_new:
        later_commits = frozenset(entry.commit.hash for entry in lake.nessie.log(MAIN, since=undo.commit))
    count = 0
    for publication in undo.publications:
        run = instance.get_run_by_id(publication.run_id)
        if run is None:
            continue
        tables = changed_tables & {*publication.tables}
        observer = _RunObserver(instance, lake, run, undo.commit, tables, row_counts, later_commits)
        _report_publication(instance, run, publication, undo.commit, observer)
        count += 1
    return count


def _report_publication(
    instance: DagsterInstance,
    run: DagsterRun,
    publication: Publication,
    commit: str,
    observer: _RunObserver,
) -> None:
    is_batch = BatchBranch.from_name(publication.branch) is not None
    message = f"Undone by {commit}: main no longer has what this run had published as {publication.hash}."
    metadata = {
        EventMetadata.ON_MAIN: MetadataValue.bool(False),
        EventMetadata.UNDONE_BY: MetadataValue.text(commit),
        EventMetadata.RUN: MetadataValue.dagster_run(run.run_id),
    }
    observations = observer.iter_observations(message, metadata, with_partitions=not is_batch)
    while batch := list(islice(observations, _BATCH_SIZE)):
        report_observations(instance, batch)
    report_engine_event(instance, message, run, metadata)
    if not is_batch:
        reason = shorten_tag_value(f"undone by {commit}")
        instance.add_run_tags(run.run_id, {**build_status_tag(RunState.UNDONE), RunTag.REASON: reason})


@dataclass(frozen=True)
class _RunObserver:
    """Builds the observations of the assets that an undone run had written to `tables`.

    `row_counts` has the rows of each table after the undo, by name. `later_commits` are the commits on `main`
    after the undo, if it was made by an earlier call.
    """

    instance: DagsterInstance
    lake: Lakehouse
    run: DagsterRun
    commit: str
    tables: set[str]
    row_counts: Mapping[str, int | None]
    later_commits: frozenset[str]

    def iter_observations(
        self, message: str, metadata: Mapping[str, Any], *, with_partitions: bool
    ) -> Iterator[AssetObservation]:
        """Yield one observation for each asset and partition that the run, or a continued run, wrote.

        For a partition that another run has materialized since, the observation states whether `main` has the
        result of that run. Without `with_partitions`, each asset gets one observation without a partition.
        """
        seen: set[tuple[AssetKey, str | None]] = set()
        run_ids = _continued_run_ids(self.instance, self.run)
        for run_id in run_ids:
            for key, partition, _ in iter_materializations(self.instance, run_id):
                shown_partition = partition if with_partitions else None
                table = find_table_name(key, self.lake.settings.default_namespace)
                if table not in self.tables or (key, shown_partition) in seen:
                    continue
                newest_run_id = load_newest_run_id(self.instance, key, partition)
                later_metadata: Mapping[str, Any] | None = {}
                if newest_run_id is not None and newest_run_id not in run_ids:
                    later_metadata = self._describe_later_run(newest_run_id)
                if later_metadata is None:
                    continue
                seen.add((key, shown_partition))
                rows = self.row_counts.get(table)
                row_metadata = {} if rows is None else {EventMetadata.TABLE_ROWS: MetadataValue.int(rows)}
                yield AssetObservation(
                    key,
                    partition=shown_partition,
                    description=message,
                    metadata={**metadata, **row_metadata, **later_metadata},
                )

    def _describe_later_run(self, run_id: str) -> Mapping[str, Any] | None:
        """Return metadata of a run that has materialized the partition since the undone run.

        None if that run was published after the undo: then its own report describes the partition.
        """
        run = self.instance.get_run_by_id(run_id)
        if run is None:
            return {}
        location = find_run_location(run.tags, run_id)
        if location is not None and find_publication(run.tags, location.branch) in self.later_commits:
            return None
        return {EventMetadata.ON_MAIN: MetadataValue.bool(is_on_main(run))}


def _continued_run_ids(instance: DagsterInstance, run: DagsterRun) -> Sequence[str]:
    """Return the id of the run, then the ids of the failed runs whose work it took over, newest first."""
    run_ids = [run.run_id]
    current: DagsterRun | None = run
    while current is not None:
        location = find_run_location(current.tags, current.run_id)
        if location is None or location.continues is None:
            break
        run_ids.append(run_id_of_branch(location.continues))
        current = instance.get_run_by_id(run_ids[-1])
    return run_ids
