"""The outcome of one pass for a run, and its report on the run and on its assets in Dagster's UI."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from cachetools import LRUCache, cachedmethod
from cachetools.keys import hashkey
from dagster import (
    AssetCheckKey,
    AssetKey,
    AssetObservation,
    DagsterInstance,
    DagsterRun,
    MetadataValue,
    RunRequest,
    RunsFilter,
)
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.internals.dagster import report_engine_event, report_observations
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse, commit_page_url
from branchlake_dagster.nessie.model import ContentKey, Reference
from branchlake_dagster.publication.verdict import RunEvidence, Verdict, WrittenPartition
from branchlake_dagster.runs.branch_owner import load_branch_owners
from branchlake_dagster.runs.discarding import restore_materializations, revoke_materializations
from branchlake_dagster.runs.provenance import count_rows
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    RunState,
    build_status_tag,
    is_opened_by,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import EventMetadata, RunTag


@dataclass(frozen=True)
class CheckRun:
    """A Dagster run to be launched for these (asset, check) pairs only. `key` is its run key."""

    key: str
    checks: tuple[tuple[str, str], ...]
    branch: str
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        names = ", ".join(f"{check} on {asset}" for asset, check in self.checks)
        return f"requests {names} on {self.branch}, because main has changed"

    def to_run_request(self) -> RunRequest:
        """Return the run as a sensor's request."""
        return RunRequest(
            run_key=self.key,
            tags=dict(self.tags),
            asset_check_keys=[
                AssetCheckKey(AssetKey.from_user_string(asset), name) for asset, name in self.checks
            ],
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one pass for one branch.

    `detail` explains the state. `publication` is the commit on `main`, and `tables` are the dotted names of
    the tables that it published. `check_run` is the check run that must be launched before a rebased state
    can be published. `next_step` is the advice for a run that was not published. `codes` has the causes in
    snake case, such as `check_failed` or `same_files`.
    """

    branch: str
    run_id: str
    state: RunState
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()
    check_run: CheckRun | None = None
    next_step: str = ""
    codes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the run is in its state: the reasons of the verdict if it blocks the run, else the detail."""
        blocked = self.state is RunState.BLOCKED and self.verdict is not None
        return self.verdict.reasons if blocked and self.verdict is not None else (self.detail,)

    def __str__(self) -> str:
        return f"{self.branch}: {self.state}, {self.detail}"


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended, with the name of its branch."""

    branch: str
    run: DagsterRun


def find_ended_runs(
    instance: DagsterInstance, branches: Sequence[Reference], *, location: str | None
) -> tuple[list[EndedRun], list[Outcome]]:
    """Return the ended runs of a code location with their branches, and outcomes for the other branches.

    The other branches belong to unknown or active runs, or to another code location. With None as `location`,
    the runs of all code locations are returned. Runs are ordered by their end, oldest first: the oldest run
    has waited longest, and a later run has seen more of other runs' changes.
    """
    ended_runs: list[tuple[float, int, EndedRun]] = []
    other_outcomes: list[Outcome] = []
    records = load_branch_owners(instance, [branch.name for branch in branches])
    for branch in branches:
        record = records[branch.name]
        if record is None:
            detail = "Dagster does not know the run; left to the reaper"
            other_outcomes.append(
                Outcome(branch.name, run_id_of_branch(branch.name), RunState.UNKNOWN_RUN, detail)
            )
            continue
        run = record.dagster_run
        if (other_name := find_other_location(run, location)) is not None:
            detail = f"the run belongs to code location {other_name}, whose own sensor judges it"
        elif not run.is_finished:
            detail = f"the run is {run.status.value.lower()}"
        else:
            ended_runs.append((record.end_time or 0.0, record.storage_id, EndedRun(branch.name, run)))
            continue
        other_outcomes.append(Outcome(branch.name, run.run_id, RunState.WAITING, detail))
    ended_runs.sort(key=lambda item: item[:2])
    return [item for _, _, item in ended_runs], other_outcomes


def find_other_location(run: DagsterRun, location: str | None) -> str | None:
    """Return the name of the run's code location if it is not `location`, else None.

    Also None if `location` is None or the run has no code location. Only a run's own code location has the
    definitions of its checks.
    """
    origin = run.remote_job_origin
    if location is None or origin is None:
        return None
    location_name = origin.repository_origin.code_location_origin.location_name
    return None if location_name == location else location_name


_log = logging.getLogger(__name__)


_CACHED_COUNTS = 200


class MainView:
    """Reads row counts of `main`, and links to commits.

    Counts at a commit are cached, as it never changes. Safe for several threads.
    """

    def __init__(self, lake: Lakehouse) -> None:
        self._lake = lake
        self._row_counts: LRUCache[tuple[object, ...], int | None] = LRUCache(_CACHED_COUNTS)
        self._lock = threading.Lock()

    def count_rows(self, tables: Collection[str], commit: str | None) -> Mapping[str, int | None]:
        """Count the rows of each table on `main` at `commit` (None: now), by dotted table name.

        The count is 0 if the table does not exist. It is None if the metadata does not contain it or the
        table cannot be read; then a warning is logged.
        """
        count = self._count if commit is None else partial(self._count_cached, commit=commit)
        return {table: count(table) for table in tables}

    def find_commit_url(self, commit: str) -> str | None:
        """Return the address of a commit's web page; None if a browser could not open it."""
        return commit_page_url(self._lake.endpoints(spark=False), self._lake.settings, commit)

    @cachedmethod(
        lambda self: self._row_counts,
        key=lambda _, table, commit: hashkey(table, commit),
        lock=lambda self: self._lock,
    )
    def _count_cached(self, table: str, commit: str) -> int | None:
        return self._count(table, commit)

    def _count(self, table: str, commit: str | None = None) -> int | None:
        catalog = self._lake.catalog(f"{MAIN}@{commit}" if commit else MAIN)
        try:
            return count_rows(catalog.load_table(ContentKey.from_path(table).elements))
        except NoSuchTableError:
            return 0
        except Exception as error:  # noqa: BLE001 - the outcome is reported without counts
            _log.warning("The rows of %s on main could not be counted: %s", table, error)
            return None


_MAX_EXAMPLES = 200
_BATCH_SIZE = 100
"""The number of partitions that are reported in one call to Dagster, which takes 0.03 s with SQLite."""


_UNJUDGED = (RunState.FAILED, RunState.CANCELED, RunState.INTERRUPTED)
"""Runs that ended before the gate could judge them."""


@dataclass(frozen=True)
class RunReport:
    """The report of one run.

    `publication` is the commit on `main`. `merged_outside` is true if the commit was made outside branchlake.
    `rebased` are the tables whose changes were replayed for it. Without a publication, `why` or the reasons
    of the verdict explain it, and the branch stays for `retention_hours` for debugging. `message` replaces
    the sentence that is built from these fields. `on_main` is true if `main` has the rows nevertheless:
    merged outside branchlake, or written directly. `next_step` is a sentence that advises what to do.
    `took_s` are the seconds from reading the branch to the publication. `at` is the current time as a POSIX
    time stamp.
    """

    run: DagsterRun
    evidence: RunEvidence
    verdict: Verdict
    branch: str
    status: RunState
    took_s: float
    at: float
    publication: str | None = None
    merged_outside: bool = False
    rebased: tuple[str, ...] = ()
    why: str | None = None
    message: str | None = None
    retention_hours: float = 0.0
    on_main: bool = False
    next_step: str = ""

    @property
    def is_revoked(self) -> bool:
        """Whether the run materialized something that `main` does not have."""
        is_on_main = self.status in (RunState.PUBLISHED, RunState.UNCHANGED)
        return not (is_on_main or self.publication or self.on_main)

    def format_sentence(self) -> str:
        """Format the outcome of the run as one or more sentences."""
        if self.message:
            return self.message
        if self.publication and self.merged_outside:
            return f"On main already: its branch was merged outside branchlake, as {self.publication}."
        if self.publication:
            verb = "was" if len(self.rebased) == 1 else "were"
            rebase_note = (
                f" {_join_words(self.rebased)} {verb} rebased on newer changes of main."
                if self.rebased
                else ""
            )
            return f"Published as {self.publication}.{rebase_note}"
        retention_note = (
            f" Its branch {self.branch} is kept for {self.retention_hours:g} h."
            if self.retention_hours
            else ""
        )
        advice = f" {self.next_step}" if self.next_step else ""
        return f"Not published: {self.reason().rstrip('.')}.{retention_note}{advice}"

    def reason(self) -> str:
        """Return why the run is not published, without the counts of its checks."""
        return self.why or "; ".join(self.verdict.reasons) or self.verdict.format_summary()

    def shown_verdict(self) -> str:
        """Return the decision of the gate.

        If the gate did not decide why the run is not published, return the status of the run instead.
        """
        refused = self.status is RunState.REFUSED and not self.verdict.blocked
        shows_status = refused or self.status in _UNJUDGED
        return str(self.status if shows_status else self.verdict.decision)

    def tags(self) -> Mapping[str, str]:
        """Return the tags to set on the run."""
        tags = {**build_status_tag(self.status), RunTag.VERDICT: self.shown_verdict()}
        if self.publication:
            return {**tags, RunTag.PUBLICATION: self.publication}
        reason = self.why or "; ".join(self.verdict.reasons)
        return {**tags, RunTag.REASON: shorten_tag_value(reason)} if reason else tags


def report_outcome(
    instance: DagsterInstance,
    report: RunReport,
    main_view: MainView | None,
    *,
    has_time: Callable[[], bool] = lambda: True,
) -> int:
    """Report an outcome to the run's log, its tags and each written asset.

    Idempotent: repeated calls report everything once. Returns the number of partitions that are not reported
    yet; 0 means that the report is complete. If `has_time` returns False, the call records in a tag how many
    are reported; the next call continues after them. The other tags are set last, so they mark a complete
    report. Of an unpublished run at most 200 partitions are reported. If `report.is_revoked`, all
    partitions that the run materialized count as failed in Dagster (see `revoke_materializations`).
    """
    tags, run_id = report.tags(), report.run.run_id
    # Not `get_run_by_id`, which also inspects the columns of Dagster's table.
    current = next(iter(instance.get_runs(RunsFilter(run_ids=[run_id]))), None)
    current_tags = current.tags if current is not None else {}
    if current is not None and tags.items() <= current_tags.items():
        return 0
    # Automation follows these reports, so every published partition is reported. For others, examples
    # suffice. An asset whose key cannot name a table has no data in the lake, so nothing is reported on it.
    lake_partitions = (
        (key, written)
        for key, written in report.evidence.written_partitions.items()
        if _table_name(report, key[0]) is not None
    )
    partitions = list(islice(lake_partitions, None if report.publication else _MAX_EXAMPLES))
    reported_count = _count_reported(current_tags, run_id)
    run_metadata = _build_run_metadata(report, main_view)
    # Assets of other IO managers have no table, and so no rows on main.
    tables = {
        table
        for (asset, _), written in partitions
        if (table := _table_name(report, asset)) is not None
        and (written.rows is not None or table in report.evidence.write_set)
    }
    row_counts = _load_row_counts(report, tables, main_view)
    written_run_ids = {written.run_id for written in report.evidence.written_partitions.values()}
    if report.is_revoked:
        revoke_materializations(instance, report.run, written_run_ids)
    elif report.publication:
        restore_materializations(instance, report.run, written_run_ids)
    message = report.format_sentence()

    def build_observation(asset: str, partition: str | None, written: WrittenPartition) -> AssetObservation:
        asset_metadata = _build_asset_metadata(
            report, asset, partition, written, row_counts.get(_table_name(report, asset) or "")
        )
        key = AssetKey.from_user_string(asset)
        return AssetObservation(
            key, partition=partition, description=message, metadata={**run_metadata, **asset_metadata}
        )

    for number in range(reported_count, len(partitions), _BATCH_SIZE):
        if number > reported_count and not has_time():
            instance.add_run_tags(run_id, {RunTag.REPORTED: str(number)})
            return len(partitions) - number
        batch = partitions[number : number + _BATCH_SIZE]
        report_observations(instance, [build_observation(*key, written) for key, written in batch])
    report_engine_event(instance, message, report.run, run_metadata)
    # Tags of a failed attempt are no longer true. Dagster cannot remove a tag, so they get a null value.
    cleared_tags = {
        name: NO_VALUE
        for name in (RunTag.REASON, RunTag.NEXT_ATTEMPT)
        if current_tags.get(name, NO_VALUE) != NO_VALUE
    }
    instance.add_run_tags(run_id, {**cleared_tags, **tags})
    return 0


def _table_name(report: RunReport, asset: str) -> str | None:
    return report.evidence.rules[asset].table


def _load_row_counts(
    report: RunReport, tables: Collection[str], main_view: MainView | None
) -> Mapping[str, int | None]:
    """Return the number of rows of each table on `main` by dotted table name; None if it is unknown.

    If branchlake merged the branch, the run's own counts are valid for tables that were not rebased. All
    other counts are read from `main`; without `main_view` they are None.
    """
    row_counts: dict[str, int | None] = {}
    if report.publication and not report.merged_outside and not report.on_main:
        for (asset, _), written in sorted(
            report.evidence.written_partitions.items(), key=lambda entry: entry[1].timestamp
        ):
            table = _table_name(report, asset)
            if table is not None and table not in report.rebased and written.rows is not None:
                row_counts[table] = written.rows
    uncounted_tables = [table for table in tables if table not in row_counts]
    return {
        **(
            main_view.count_rows(uncounted_tables, report.publication)
            if main_view
            else dict.fromkeys(uncounted_tables)
        ),
        **row_counts,
    }


def _count_reported(tags: Mapping[str, str], run_id: str) -> int:
    """Return how many partitions an incomplete earlier call has reported, as the run's own tag records.

    `tags` are the run's tags. Returns 0 if the tag is missing, damaged, or inherited from another run.
    """
    count = tags.get(RunTag.REPORTED, "") if is_opened_by(tags, run_id) else ""
    return int(count) if count.isdigit() else 0


def _build_run_metadata(report: RunReport, main_view: MainView | None) -> dict[str, Any]:
    """Build the metadata that is reported on each asset of the run and in its log, by name.

    If `main_view` is None, the link to the commit is omitted.
    """
    verdict = report.verdict
    metadata: dict[str, Any] = {
        EventMetadata.ON_MAIN: MetadataValue.bool(not report.is_revoked),
        EventMetadata.VERDICT: MetadataValue.text(report.shown_verdict()),
        EventMetadata.CHECKS: MetadataValue.text(f"{verdict.checks_passed}/{verdict.checks_total} passed"),
        EventMetadata.BRANCH: MetadataValue.text(report.branch),
        EventMetadata.RUN: MetadataValue.dagster_run(report.run.run_id),
        EventMetadata.PUBLISHER_S: MetadataValue.float(round(report.took_s, 4)),
    }
    if report.publication:
        metadata[EventMetadata.PUBLICATION] = MetadataValue.text(report.publication)
        metadata[EventMetadata.TABLES] = MetadataValue.text(", ".join(sorted(report.evidence.write_set)))
        if main_view and (page := main_view.find_commit_url(report.publication)):
            metadata[EventMetadata.COMMIT_PAGE] = MetadataValue.url(page)
    if report.rebased:
        metadata[EventMetadata.REBASED] = MetadataValue.text(", ".join(report.rebased))
    warnings = [f"warning: {text}" for text in verdict.warnings]
    if lines := [report.why] if report.why else [*verdict.reasons, *warnings]:
        metadata[EventMetadata.REASONS] = MetadataValue.md("\n".join(f"- {line}" for line in lines))
    return metadata


def _build_asset_metadata(
    report: RunReport, asset: str, partition: str | None, written: WrittenPartition, rows: int | None
) -> dict[str, Any]:
    """Build the metadata that is reported on one partition of one asset, such as its row counts on `main`.

    `rows` is the row count of the whole table on `main`; None if it is unknown.
    """
    metadata: dict[str, Any] = {}
    if rows is not None:
        metadata[EventMetadata.TABLE_ROWS] = MetadataValue.int(rows)
    is_unrebased = written.is_whole_partition or _table_name(report, asset) not in report.rebased
    if report.publication and is_unrebased and written.partition_rows is not None:
        metadata[EventMetadata.PARTITION_ROWS] = MetadataValue.int(written.partition_rows)
    if report.publication and written.timestamp:
        metadata[EventMetadata.PUBLICATION_DELAY_S] = MetadataValue.float(
            round(max(0.0, report.at - written.timestamp), 3)
        )
    if report.publication and written.preview:
        metadata[EventMetadata.PREVIEW] = MetadataValue.md(written.preview)
    failing_counts = [
        evaluation.failing_rows
        for ((asset_name, _), partition_key), evaluation in report.evidence.evaluations.items()
        if asset_name == asset and partition_key in (partition, None) and evaluation.failing_rows is not None
    ]
    if failing_counts:
        metadata[EventMetadata.FAILING_ROWS] = MetadataValue.int(sum(failing_counts))
    return metadata


def _join_words(texts: Sequence[str]) -> str:
    """Join at least one name as `a`, `a and b` or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
