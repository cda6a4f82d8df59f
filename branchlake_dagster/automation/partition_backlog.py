"""Report the backlog of each partition of a consumer, and why no run is launched for it.

Runs that were launched for the present state of the inputs are found by their run keys. A partition that an
unfinished or unjudged run computes is not launched again, because a second run would be refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    MetadataValue,
    PartitionKeyRange,
    PartitionsDefinition,
    RunRecord,
    RunsFilter,
    TableColumn,
    TableRecord,
    TableSchema,
    partition_loading_context,
)

from branchlake_dagster.automation.backlog import ConsumerBacklog
from branchlake_dagster.automation.launch_decision import (
    Attempt,
    AttemptHistory,
    LaunchDecision,
    LaunchOutcome,
    LaunchPolicy,
    RunUnderWay,
    attempt_key,
    decide_launch,
    launch_outcome,
)
from branchlake_dagster.incremental.pending import PartitionBatch
from branchlake_dagster.incremental.positions import ConsumptionRecord, Unconsumed
from branchlake_dagster.internals.dagster import (
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    RUN_KEY_TAG,
    load_planned_assets,
)
from branchlake_dagster.publication.conditions import ABANDONED_AFTER
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    PENDING,
    RunState,
    find_publication,
    find_run_location,
)
from branchlake_dagster.stored_names import EventMetadata, RunTag

_CHUNK = 200
"""The largest number of run keys in one query."""


def iter_histories(instance: DagsterInstance, keys: Iterable[str], retries: int) -> Iterator[AttemptHistory]:
    """Yield an attempt history for each state key, in the order of `keys`. Runs are read lazily, in chunks.

    A published run changes the state of its consumer. If a run with this state key was published and the
    state is the same again, `main` was set back: earlier attempts are ignored, and the state continues under
    a new run key, which has the hash of that publication appended. At most `retries` retries of each state
    are read.
    """
    key_iterator = iter(keys)
    while chunk := [*islice(key_iterator, max(1, _CHUNK // (retries + 1)))]:
        histories_by_key: dict[str, AttemptHistory] = {}
        run_keys = {key: key for key in chunk}
        while run_keys:
            records = _load_newest_runs(
                instance, [name for key in run_keys.values() for name in _attempt_keys(key, retries)]
            )
            next_run_keys: dict[str, str] = {}
            for key, run_key in run_keys.items():
                attempts = [
                    (number, records[name])
                    for number, name in enumerate(_attempt_keys(run_key, retries))
                    if name in records
                ]
                publication_hash = next(
                    (commit_hash for _, record in attempts if (commit_hash := _find_publication(record))),
                    None,
                )
                if publication_hash:
                    next_run_keys[key] = f"{run_key}-{publication_hash[:16]}"
                else:
                    histories_by_key[key] = AttemptHistory(
                        run_key, tuple(to_attempt(*attempt) for attempt in attempts)
                    )
            run_keys = next_run_keys
        yield from (histories_by_key[key] for key in chunk)


def _attempt_keys(key: str, retries: int) -> list[str]:
    return [attempt_key(key, number) for number in range(retries + 1)]


def _load_newest_runs(instance: DagsterInstance, keys: Sequence[str]) -> dict[str, RunRecord]:
    """Return the newest run of each run key. A published run has priority over newer unpublished runs.

    A key can have several runs, because a re-execution has the run key of its parent.
    """
    newest_records: dict[str, RunRecord] = {}
    for start in range(0, len(keys), _CHUNK):
        run_filter = RunsFilter(tags={RUN_KEY_TAG: [*keys[start : start + _CHUNK]]})
        for record in instance.get_run_records(run_filter):  # the newest first
            key = record.dagster_run.tags[RUN_KEY_TAG]
            if key not in newest_records or (
                _find_publication(record) and not _find_publication(newest_records[key])
            ):
                newest_records[key] = record
    return newest_records


def _find_publication(record: RunRecord) -> str | None:
    """Return the hash of the commit on `main` that published the run of `record`, by the run's tags.

    None if the run was not published, or if its publication was undone.
    """
    run = record.dagster_run
    if run.tags.get(RunTag.STATUS) == RunState.UNDONE:
        return None
    location = find_run_location(run.tags, run.run_id)
    return find_publication(run.tags, location.branch) if location is not None else None


def to_attempt(number: int, record: RunRecord) -> Attempt:
    """Return a run record as the attempt with this number; 0 is the first run."""
    outcome = launch_outcome(record.dagster_run)
    ended_at = record.update_timestamp
    if record.end_time is not None and outcome is not LaunchOutcome.UNFINISHED:
        ended_at = datetime.fromtimestamp(record.end_time, UTC)
    elif ended_at.tzinfo is None:
        ended_at = ended_at.replace(tzinfo=UTC)
    reason = record.dagster_run.tags.get(RunTag.REASON, "")
    return Attempt(number, record.dagster_run.run_id, outcome, ended_at, "" if reason == NO_VALUE else reason)


_UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def computed_partitions(
    run: DagsterRun, definition: PartitionsDefinition[str] | None, instance: DagsterInstance
) -> tuple[str | None, ...]:
    """Return the partitions that a run computes: one partition, or all of a range.

    Returns (None,) for a run without partitions, and () for a range if one of its ends no longer exists.
    Without `definition`, the run of a range counts as a run without partitions.
    """
    start, end = run.tags.get(RANGE_START_TAG), run.tags.get(RANGE_END_TAG)
    if definition is None or start is None or end is None:
        return (run.tags.get(PARTITION_TAG),)
    with partition_loading_context(dynamic_partitions_store=instance):
        if not (definition.has_partition_key(start) and definition.has_partition_key(end)):
            return ()
        return (*definition.get_partition_keys_in_range(PartitionKeyRange(start, end)),)


_FAILED_RUNS = 100


@dataclass(frozen=True)
class RecentFailures:
    """The number of failed runs of a partition, and the end of the newest one."""

    count: int
    last_ended_at: datetime


class InFlightRuns:
    """The runs of a Dagster instance that, at `now`, are not finished or have no verdict yet.

    Finished runs that were not updated for `ABANDONED_AFTER` are not included.
    """

    def __init__(self, instance: DagsterInstance, now: datetime) -> None:
        verdict_filter = RunsFilter(tags={RunTag.VERDICT: PENDING}, updated_after=now - ABANDONED_AFTER)
        unfinished_runs = [
            *instance.get_runs(RunsFilter(statuses=_UNFINISHED)),
            *instance.get_runs(verdict_filter),
        ]
        self._instance = instance
        self._now = now
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in unfinished_runs}.values()
        self._assets_by_run: dict[str, Collection[AssetKey]] = {}

    def has_whole_run(self, key: AssetKey) -> bool:
        """Return whether a run computes the whole asset, or a range of its partitions."""
        return self.find_whole_run(key) is not None

    def single_partitions(self, key: AssetKey) -> set[str]:
        """Return the partitions of an asset that runs with one partition each compute."""
        return {*self.runs_by_partition(key)}

    def find_whole_run(self, key: AssetKey) -> RunUnderWay | None:
        """Return a run that computes the whole asset or a range of its partitions, or None."""
        for run in self._runs:
            is_whole = PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            if is_whole and self._computes(run, key):
                return RunUnderWay(run.run_id, is_finished=run.is_finished)
        return None

    def runs_by_partition(self, key: AssetKey) -> dict[str, RunUnderWay]:
        """Map each partition that a run of one partition computes to that run."""
        return {
            run.tags[PARTITION_TAG]: RunUnderWay(run.run_id, is_finished=run.is_finished)
            for run in self._runs
            if PARTITION_TAG in run.tags and self._computes(run, key)
        }

    def partitions_in_flight(
        self, key: AssetKey, definition: PartitionsDefinition[str] | None
    ) -> set[str | None]:
        """Return all partitions of an asset that runs compute, ranges included.

        The set contains None if a run without partitions computes the asset.
        """
        return {
            partition
            for run in self._runs
            if self._computes(run, key)
            for partition in computed_partitions(run, definition, self._instance)
        }

    def applicable_policy(self, policy: LaunchPolicy, inputs: Iterable[AssetKey]) -> LaunchPolicy:
        """Return the policy for a consumer, which may depend on whether a run computes one of its `inputs`.

        A parked run does not count. Looks at the assets of runs only if the policy depends on them.
        """
        if not policy.when_inputs_idle:
            return policy
        runs = [run for run in self._runs if run.tags.get(RunTag.NEXT_ATTEMPT) != RunState.PARKED]
        is_busy = any(self._computes(run, key) for key in inputs for run in runs)
        return policy.while_inputs_are(idle=not is_busy)

    def recent_failures(self, key: AssetKey) -> dict[str, RecentFailures]:
        """Map each partition to its failed runs of the last day.

        A range of partitions counts by its first partition. Reads the newest `_FAILED_RUNS` failed runs.
        """
        failed_runs = self._instance.get_run_records(
            RunsFilter(statuses=[DagsterRunStatus.FAILURE], updated_after=self._now - timedelta(days=1)),
            limit=_FAILED_RUNS,
        )
        failures: dict[str, RecentFailures] = {}
        for record in failed_runs:
            run = record.dagster_run
            partition = run.tags.get(RANGE_START_TAG) or run.tags.get(PARTITION_TAG)
            if partition is None or record.end_time is None or not self._computes(run, key):
                continue
            ended_at = datetime.fromtimestamp(record.end_time, UTC)
            known = failures.get(partition, RecentFailures(0, ended_at))
            failures[partition] = RecentFailures(known.count + 1, max(known.last_ended_at, ended_at))
        return failures

    def _computes(self, run: DagsterRun, key: AssetKey) -> bool:
        if run.asset_selection:
            return key in run.asset_selection
        # A run without a selection computes all assets of its job. Its event log lists them from the start.
        if run.run_id not in self._assets_by_run:
            self._assets_by_run[run.run_id] = load_planned_assets(self._instance, run.run_id)
        return key in self._assets_by_run[run.run_id]


@dataclass(frozen=True)
class PartitionBacklog:
    """The backlog of a partition. `partition` is None for an asset without partitions.

    `position` is None if the partition has consumed nothing yet. `unconsumed` is its remaining change; a file
    with rows of several partitions counts in each of them.
    """

    partition: str | None
    position: ConsumptionRecord | None
    unconsumed: Unconsumed
    decision: LaunchDecision


def launch_decisions(
    asset: AssetKey,
    backlog: ConsumerBacklog,
    instance: DagsterInstance,
    in_flight: InFlightRuns,
    policy: LaunchPolicy,
    now: datetime,
    *,
    approvals: Approvals,
    max_partitions: int | None = None,
) -> list[tuple[str | None, LaunchDecision]]:
    """Return (partition, launch decision) for the first `max_partitions` pending partitions, in key order.

    None for `max_partitions` means all of them. For an asset without partitions, and for an asset whose
    backlog is unknown, the result has one pair, with the partition None. Reads Dagster's runs. Reads nothing
    from the lake that `backlog` has read already.
    """
    unconsumed = backlog.unconsumed
    is_unknown = bool(unconsumed.trouble or unconsumed.missing_input)
    partitions: Sequence[str | None] = [None]
    if backlog.by_partition and not is_unknown:
        partitions = backlog.pending_partitions[:max_partitions]
    if not unconsumed.has_any or is_unknown:
        decision = decide_launch(unconsumed, AttemptHistory(""), None, policy, now)
        return [(partition, decision) for partition in partitions]
    policy = in_flight.applicable_policy(policy, backlog.inputs)
    whole_run, single_runs = in_flight.find_whole_run(asset), in_flight.runs_by_partition(asset)
    batch_by_partition = {key: backlog.batch_of(key) for key in partitions if key is not None}
    launch_keys = [backlog.launch_key(key) for key in partitions]
    batch_partitions = (key for batch in batch_by_partition.values() for key in batch.partitions)
    ids_by_partition = backlog.held_partitions([*dict.fromkeys((*partitions, *batch_partitions))], approvals)
    decisions: list[tuple[str | None, LaunchDecision]] = []
    histories = iter_histories(instance, launch_keys, policy.retries)
    for partition, history in zip(partitions, histories, strict=True):
        batch = batch_by_partition[partition] if partition is not None else PartitionBatch(())
        earlier = batch.partitions[-1] if partition in batch.waiting else ""
        computed_with: tuple[str | None, ...] = (
            (partition,) if earlier or partition is None else batch.partitions
        )
        under_way = whole_run or next((single_runs[key] for key in computed_with if key in single_runs), None)
        approval_ids = tuple(
            dict.fromkeys(name for key in computed_with for name in ids_by_partition.get(key, ()))
        )
        decision = decide_launch(
            unconsumed, history, under_way, policy, now, earlier_partition=earlier, approval_ids=approval_ids
        )
        decisions.append((partition, decision))
    return decisions


def partition_backlogs(
    backlog: ConsumerBacklog, decisions: Sequence[tuple[str | None, LaunchDecision]]
) -> list[PartitionBacklog]:
    """Return the backlog of each partition in `decisions`, in the same order. Raises ChangeLost.

    The cost grows with the number of files in the change: bounds in manifests are compared, and no data file
    is opened.
    """
    unconsumed = backlog.unconsumed
    partition_keys = [partition for partition, _ in decisions if partition is not None]
    changes: dict[str | None, tuple[ConsumptionRecord | None, Unconsumed]] = {}
    changes.update(backlog.changes_by_partition(partition_keys))
    if None in {partition for partition, _ in decisions}:
        is_unknown = unconsumed.trouble or unconsumed.missing_input
        changes[None] = (None if is_unknown else backlog.common_position, unconsumed)
    return [PartitionBacklog(partition, *changes[partition], decision) for partition, decision in decisions]


SHOWN_PARTITIONS = 20
"""The largest number of partitions in the table on an asset's page."""

_SCHEMA = TableSchema(
    [
        TableColumn("partition"),
        TableColumn("left"),
        TableColumn("rows", "int"),
        TableColumn("files", "int"),
        TableColumn("age_s", "float"),
        TableColumn("position"),
        TableColumn("launch"),
    ]
)


def backlog_metadata(
    unconsumed: Unconsumed,
    now: datetime,
    partitions: Sequence[PartitionBacklog] = (),
    partition_count: int | None = None,
    policy: LaunchPolicy | None = None,
) -> Mapping[str, Any]:
    """Return the metadata of an observation: counts of rows and files, the age in seconds, a description.

    `partitions` are the first partitions with a backlog. Each becomes a row of a table, with the reason why
    it is not launched. `partition_count` is the number of all partitions with a backlog; None for an asset
    without partitions. `policy` is the launch policy of the sensor.
    """
    table = [
        _to_table_record(backlog, now, policy or LaunchPolicy()) for backlog in partitions[:SHOWN_PARTITIONS]
    ]
    return {
        EventMetadata.UNCONSUMED_ROWS: MetadataValue.int(unconsumed.rows),
        EventMetadata.UNCONSUMED_FILES: MetadataValue.int(unconsumed.files),
        EventMetadata.UNCONSUMED_AGE_S: MetadataValue.float(round(unconsumed.age_s(now), 1)),
        EventMetadata.UNCONSUMED: MetadataValue.text(unconsumed.format_summary()),
        EventMetadata.UNCONSUMED_PARTITIONS: MetadataValue.table(table, _SCHEMA),
        **(
            {}
            if partition_count is None
            else {EventMetadata.UNCONSUMED_PARTITION_COUNT: MetadataValue.int(partition_count)}
        ),
    }


def format_consumed_position(position: ConsumptionRecord | None) -> str:
    """Return a position for people: the snapshot of each input, and the run that consumed it; else `none`."""
    if position is None:
        return "none"
    inputs = ", ".join(
        f"{name}@{input_position.snapshot_id or 'empty'}"
        for name, input_position in sorted(position.inputs.items())
    )
    return f"{inputs} by run {position.run_id[:8]}" if position.run_id else inputs


def _to_table_record(backlog: PartitionBacklog, now: datetime, policy: LaunchPolicy) -> TableRecord:
    return TableRecord(
        {
            "partition": backlog.partition or "",
            "left": backlog.unconsumed.format_summary(),
            "rows": backlog.unconsumed.rows,
            "files": backlog.unconsumed.files,
            "age_s": round(backlog.unconsumed.age_s(now), 1),
            "position": format_consumed_position(backlog.position),
            "launch": backlog.decision.format_state(policy),
        }
    )
