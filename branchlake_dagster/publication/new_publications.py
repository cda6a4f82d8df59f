"""The publications since a cursor, read from `main`'s log or from the reports in Dagster's event log.

Sensors follow `main`'s log, because they must miss no publication, also of other code locations. Conditions
follow the reports, because Dagster's daemon reads no lake.

The publisher reports one observation per published partition. Reading "everything after the last event id"
would be wrong for two reasons. A database may commit an event after another one with a higher id. And the
same publication may be reported twice: by two publishers in a race, or because one died before it recorded
that it had reported. So each evaluation reads some earlier events again and skips those that it delivered
before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

from dagster import AssetKey, AssetRecordsFilter, DagsterEventType, DagsterInstance, DagsterRun, RunsFilter

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.publication.ledger import Publication, parse_publications
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import find_run_location
from branchlake_dagster.stored_names import EventMetadata

_CHUNK = 500
"""Values in one query; SQLite takes at most 999."""

PartitionsByAsset = Mapping[AssetKey, Set[str | None]]
"""Partition keys by asset; None stands for an asset without partitions."""


def load_branch_partitions(instance: DagsterInstance, branch: str) -> PartitionsByAsset:
    """Load the partitions on a branch, written by the run that opened it and by its retries.

    The result is empty if this instance does not have the run: another Dagster may write to the lake.
    """
    return _load_partitions(instance, load_runs_on_branch(instance, branch))


def load_run_partitions(instance: DagsterInstance, run: DagsterRun) -> PartitionsByAsset:
    """Load the partitions on the branch of this run."""
    branch_name = _continued_branch(run)
    return load_branch_partitions(instance, branch_name) if branch_name else _load_partitions(instance, [run])


def load_asset_partitions(
    instance: DagsterInstance, branches: Iterable[str], key: AssetKey
) -> Mapping[str, Set[str | None]]:
    """Load the partitions of asset `key` on each branch. Branches without any are left out.

    Costs a query per 500 branches, and one for each run that may have written the asset.
    """
    partition_keys: dict[str, Set[str | None]] = {}
    branches_by_run = {run_id_of_branch(branch): branch for branch in branches}
    run_ids = iter(branches_by_run)
    while chunk := list(islice(run_ids, _CHUNK)):
        for run in instance.get_runs(filters=RunsFilter(run_ids=chunk)):
            # A run of a whole job has no selection. The selection of a retry is smaller than its branch.
            may_have = not run.asset_selection or key in run.asset_selection or _continued_branch(run)
            if may_have and (run_partitions := load_run_partitions(instance, run).get(key)):
                partition_keys[branches_by_run[run.run_id]] = run_partitions
    return partition_keys


def _continued_branch(run: DagsterRun) -> str | None:
    """Return the branch that a retry took over from another run; None for most runs, without a search."""
    run_location = find_run_location(run.tags, run.run_id)
    return run_location.branch if run_location and run_location.continues else None


def _load_partitions(instance: DagsterInstance, runs: Iterable[DagsterRun]) -> PartitionsByAsset:
    partition_keys: dict[AssetKey, set[str | None]] = defaultdict(set)
    for run in runs:
        run_partitions = instance.event_log_storage.get_asset_partitions_for_run(
            run.run_id, DagsterEventType.ASSET_MATERIALIZATION
        )
        for key, partitions in run_partitions.items():
            partition_keys[key] |= partitions
    return partition_keys


# -- main's log ----------------------------------------------------------------------------------------

COMMITS_PER_TICK = 100
"""Dagster ends an evaluation after 60 s. The next tick continues after the last commit that was read."""


@dataclass(frozen=True)
class LogBatch:
    """Commits of `main` in the order of the log, the publications in them, and the cursor after them.

    `note` says why the log was not read as usual; empty otherwise.
    """

    entries: Sequence[LogEntry]
    cursor: str
    note: str = ""

    @property
    def publications(self) -> list[Publication]:
        """The publications of these commits, in their order."""
        return [publication for entry in self.entries for publication in parse_publications(entry)]


def read_new_publications(client: NessieClient, cursor: str | None) -> LogBatch:
    """Read the commits on `main` since the commit `cursor`, at most `COMMITS_PER_TICK`.

    None as cursor starts at the current end of the log. If `main`'s history was rewritten, the note says so.
    """
    head = client.reference(MAIN)
    if cursor is None:
        return LogBatch((), head.hash, f"The sensor starts at main's current commit {head.hash[:12]}.")
    if cursor == head.hash:
        return LogBatch((), cursor)
    try:
        entries = list(client.log(head.pinned_ref, since=cursor))
    except ReferenceNotFound:
        return LogBatch(
            (),
            head.hash,
            f"main's log no longer holds commit {cursor[:12]}: its history was rewritten. Publications "
            f"in between are unknown. The sensor starts again at {head.hash[:12]}.",
        )
    next_entries = entries[::-1][:COMMITS_PER_TICK]
    return LogBatch(next_entries, next_entries[-1].commit.hash if next_entries else cursor)


# -- reports in the event log --------------------------------------------------------------------------

REREAD_EVENT_IDS = 1_000
"""The number of event ids that are read again: more than Dagster stores while one insert is under way."""

_PAGE = 1_000

PublicationKey = tuple[str, str | None]
"""(branch and commit on `main`, partition): the same for repeated reports of one publication."""


@dataclass(frozen=True)
class PublicationReport:
    """One observation of a publication in Dagster's event log."""

    storage_id: int
    branch: str
    commit: str
    partition: str | None

    @property
    def key(self) -> PublicationKey:
        """The identity of the publication, which repeated reports share."""
        return f"{self.branch}@{self.commit}", self.partition


def iter_publication_reports(
    instance: DagsterInstance, key: AssetKey, *, after_id: int, last_id: int
) -> Iterator[PublicationReport]:
    """Yield the publications reported for `key` with `after_id` < storage id <= `last_id`, in that order.

    Reports of blocked, refused and discarded runs do not have a publication and are left out, as are
    observations by other writers.
    """
    records_filter = AssetRecordsFilter(
        asset_key=key, after_storage_id=max(after_id, 0), before_storage_id=last_id + 1
    )
    cursor: str | None = None
    while True:
        page = instance.fetch_observations(records_filter, limit=_PAGE, cursor=cursor, ascending=True)
        for record in page.records:
            observation = record.asset_observation
            if observation is None:
                continue
            commit, branch = (
                observation.metadata.get(EventMetadata.PUBLICATION),
                observation.metadata.get(EventMetadata.BRANCH),
            )
            if commit is not None and branch is not None:
                yield PublicationReport(
                    record.storage_id, str(branch.value), str(commit.value), observation.partition
                )
        if not page.has_more:
            return
        cursor = page.cursor


@dataclass(frozen=True)
class ReportCursor:
    """The position in an asset's reports: the last event id, and the keys delivered from the last ids.

    `delivered_keys` covers the last `REREAD_EVENT_IDS` ids.
    """

    last_id: int
    delivered_keys: frozenset[PublicationKey] = field(default_factory=frozenset)

    def to_json(self) -> str:
        """Return the cursor as text for Dagster to store."""
        partitions: dict[str, list[str | None]] = defaultdict(list)
        for publication, partition in sorted(self.delivered_keys, key=str):
            partitions[publication].append(partition)
        return json.dumps({"upto": self.last_id, "passed_on": partitions})

    @classmethod
    def from_json(cls, cursor: str) -> Self:
        """Parse the result of `to_json`."""
        data = json.loads(cursor)
        names: Mapping[str, Sequence[str | None]] = data["passed_on"]
        return cls(data["upto"], frozenset((pub, part) for pub, parts in names.items() for part in parts))


def read_new_reports(
    instance: DagsterInstance, key: AssetKey, last_cursor: ReportCursor | None, *, start_id: int, last_id: int
) -> tuple[list[PublicationReport], ReportCursor]:
    """Return the publications reported since `last_cursor` and up to the event `last_id`, and the new cursor.

    If `last_cursor` is None, reports up to the event `start_id` count as delivered, so history does not
    trigger requests.
    """
    since_id = last_cursor.last_id if last_cursor else start_id
    reports = list(
        iter_publication_reports(instance, key, after_id=since_id - REREAD_EVENT_IDS, last_id=last_id)
    )
    delivered_keys = (
        last_cursor.delivered_keys
        if last_cursor
        else {report.key for report in reports if report.storage_id <= since_id}
    )
    new_reports = {report.key: report for report in reports if report.key not in delivered_keys}
    recent_keys = {report.key for report in reports if report.storage_id > last_id - REREAD_EVENT_IDS}
    return list(new_reports.values()), ReportCursor(last_id, frozenset(recent_keys))
