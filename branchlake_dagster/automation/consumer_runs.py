"""Find the runs that were launched for a state of a consumer's inputs, by their run keys.

Find the partitions that unfinished or unjudged runs compute. A second run would be refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    PartitionKeyRange,
    PartitionsDefinition,
    RunRecord,
    RunsFilter,
    partition_loading_context,
)

from branchlake_dagster.automation.launch_decision import (
    Attempt,
    AttemptHistory,
    LaunchOutcome,
    RunUnderWay,
    attempt_key,
    launch_outcome,
)
from branchlake_dagster.internals.dagster import (
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    RUN_KEY_TAG,
    load_planned_assets,
)
from branchlake_dagster.publication.conditions import ABANDONED_AFTER
from branchlake_dagster.runs.run_tags import NO_VALUE, PENDING, find_publication, find_run_location
from branchlake_dagster.stored_names import RunTag

_CHUNK = 200
"""The largest number of run keys in one query."""


def iter_histories(instance: DagsterInstance, keys: Iterable[str], retries: int) -> Iterator[AttemptHistory]:
    """Yield the attempts for each state key, in the order of `keys`. Runs are read lazily, in chunks.

    A published run changes the state of its consumer. If a run with this state key was published and the
    state is the same again, `main` was set back: earlier attempts are ignored, and the state continues under
    a new key. At most `retries` retries of each state are read.
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
    """Return the newest run of each run key. A published run wins over newer ones that were not published.

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
    """Return the commit on `main` that published the run; None if it was not published."""
    run = record.dagster_run
    location = find_run_location(run.tags, run.run_id)
    return find_publication(run.tags, location.branch) if location is not None else None


def to_attempt(number: int, record: RunRecord) -> Attempt:
    """Return the outcome of a run that was launched as attempt `number`, counted from 0."""
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
    """
    start, end = run.tags.get(RANGE_START_TAG), run.tags.get(RANGE_END_TAG)
    if definition is None or start is None or end is None:
        return (run.tags.get(PARTITION_TAG),)
    with partition_loading_context(dynamic_partitions_store=instance):
        if not (definition.has_partition_key(start) and definition.has_partition_key(end)):
            return ()
        return (*definition.get_partition_keys_in_range(PartitionKeyRange(start, end)),)


class InFlightRuns:
    """The runs of a Dagster instance that are not finished or not judged at `now`."""

    def __init__(self, instance: DagsterInstance, now: datetime) -> None:
        verdict_filter = RunsFilter(tags={RunTag.VERDICT: PENDING}, updated_after=now - ABANDONED_AFTER)
        unfinished_runs = [
            *instance.get_runs(RunsFilter(statuses=_UNFINISHED)),
            *instance.get_runs(verdict_filter),
        ]
        self._instance = instance
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in unfinished_runs}.values()
        self._assets_by_run: dict[str, Collection[AssetKey]] = {}

    def has_whole_run(self, key: AssetKey) -> bool:
        """Return whether a run computes the whole asset, or a range of its partitions."""
        return self.find_whole_run(key) is not None

    def single_partitions(self, key: AssetKey) -> set[str]:
        """Return the partitions of an asset that runs of one partition compute."""
        return {*self.runs_by_partition(key)}

    def find_whole_run(self, key: AssetKey) -> RunUnderWay | None:
        """Return a run that computes the whole asset or a range of its partitions, or None."""
        for run in self._runs:
            is_whole = PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            if is_whole and self._computes(run, key):
                return RunUnderWay(run.run_id, is_finished=run.is_finished)
        return None

    def runs_by_partition(self, key: AssetKey) -> dict[str, RunUnderWay]:
        """Return one run for each partition of an asset that a run of one partition computes."""
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

    def _computes(self, run: DagsterRun, key: AssetKey) -> bool:
        if run.asset_selection:
            return key in run.asset_selection
        # A run without a selection computes all assets of its job. Its event log lists them from the start.
        if run.run_id not in self._assets_by_run:
            self._assets_by_run[run.run_id] = load_planned_assets(self._instance, run.run_id)
        return key in self._assets_by_run[run.run_id]
