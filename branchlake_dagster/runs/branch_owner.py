"""Find the run or batch that a branch belongs to, by the branch's name and the tags of runs.

The branch of one batch of a live ingestion is named `run-{UUIDv7}.{live run}.{Dagster instance}`. No run has
this name, and Nessie records neither an owner nor an age for a branch without commits of its own. So the name
records both, even if the writer died right after creating the branch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from uuid import UUID

from dagster import DagsterInstance, DagsterRun, RunRecord, RunsFilter

from branchlake_dagster.internals.dagster import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG
from branchlake_dagster.runs import branch_names as reference_names
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import find_run_location, is_opened_by
from branchlake_dagster.stored_names import RunTag

_CHUNK_SIZE = 500
"""The number of values in one query. SQLite allows at most 999."""


def is_retry(run: DagsterRun) -> bool:
    """Return whether the run repeats a part of its parent's work and needs the parent's outputs for the rest.

    This is true for a retry from failure or of selected steps. A full re-execution also has a parent, but is
    not a retry.
    """
    partial = bool(run.step_keys_to_execute) or run.tags.get(ASSET_RESUME_RETRY_TAG) == "true"
    return run.parent_run_id is not None and partial


def load_branch_owners(instance: DagsterInstance, branches: Collection[str]) -> dict[str, RunRecord | None]:
    """Load for each run branch the record of its owner; None if Dagster has no such run.

    The owner is the newest active run on the branch, or else the newest run that worked on it. A retry owns
    its parent's branch from its creation. Cost: a constant number of queries per 500 branches.
    """
    records = _load_related_runs(instance, branches)
    candidates: dict[str, list[RunRecord]] = {}
    for record in records.values():
        candidates.setdefault(_branch_of_run(record.dagster_run, records), []).append(record)
    return {branch: _newest_record(branch, candidates.get(branch, [])) for branch in branches}


def load_branch_owner(instance: DagsterInstance, branch: str) -> DagsterRun | None:
    """Load the run that `branch` belongs to, by the rules of `load_branch_owners`."""
    record = load_branch_owners(instance, [branch])[branch]
    return record.dagster_run if record else None


def load_runs_on_branch(instance: DagsterInstance, branch: str) -> tuple[DagsterRun, ...]:
    """Load all runs whose work is on `branch`, oldest first: the runs that it continues, then its owners."""
    records = _load_related_runs(instance, [branch])
    branch_records = [
        record for record in records.values() if _branch_of_run(record.dagster_run, records) == branch
    ]
    runs = [record.dagster_run for record in sorted(branch_records, key=_storage_id)]
    while runs and (earlier_run := _load_continued_run(instance, runs[0])) is not None:
        runs.insert(0, earlier_run)
    return tuple(runs)


def iter_continuing_runs(
    instance: DagsterInstance, branches: Collection[str]
) -> Iterator[tuple[str, DagsterRun]]:
    """Iterate over the branches that other runs took over, with those runs, newest first."""
    for chunk in _iter_chunks(branches):
        for run in instance.get_runs(RunsFilter(tags={RunTag.CONTINUES: chunk})):
            location = find_run_location(run.tags, run.run_id)
            if location is not None and location.continues is not None:
                yield location.continues, run


def _load_continued_run(instance: DagsterInstance, run: DagsterRun) -> DagsterRun | None:
    location = find_run_location(run.tags, run.run_id)
    return (
        instance.get_run_by_id(run_id_of_branch(location.continues))
        if location and location.continues
        else None
    )


def _storage_id(record: RunRecord) -> int:
    return record.storage_id


def _load_related_runs(instance: DagsterInstance, branches: Collection[str]) -> dict[str, RunRecord]:
    """Load the runs that branches are named after, the runs that opened them, and all retries, by run id."""
    records: dict[str, RunRecord] = {}
    for chunk in _iter_chunks(branches):
        records |= _index_by_run_id(instance.get_run_records(RunsFilter(tags={RunTag.BRANCH: chunk})))
    named_run_ids = {run_id_of_branch(branch) for branch in branches}
    # Rare: runs that could not record their branch, or that have opened none.
    missing_run_ids = named_run_ids - records.keys()
    parent_run_ids = named_run_ids | records.keys()
    while missing_run_ids or parent_run_ids:
        for chunk in _iter_chunks(missing_run_ids):
            records |= _index_by_run_id(instance.get_run_records(RunsFilter(run_ids=chunk)))
        retry_run_ids = {
            run_id
            for part in _iter_chunks(parent_run_ids | missing_run_ids)
            for run_id in instance.get_run_ids(RunsFilter(tags={PARENT_RUN_ID_TAG: part}))
        }
        missing_run_ids, parent_run_ids = retry_run_ids - records.keys(), set()
    return records


def _index_by_run_id(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    return {record.dagster_run.run_id: record for record in records}


def _iter_chunks(values: Collection[str]) -> Iterator[Sequence[str]]:
    remaining_values = iter(values)
    while chunk := list(islice(remaining_values, _CHUNK_SIZE)):
        yield chunk


def _branch_of_run(run: DagsterRun, records: Mapping[str, RunRecord]) -> str:
    """Return the branch that a run works on: the one that it opened, or a retry's parent's, or its own."""
    if is_opened_by(run.tags, run.run_id):
        return run.tags[RunTag.BRANCH]
    parent = records.get(run.parent_run_id or "")
    if parent is not None and is_retry(run):
        return _branch_of_run(parent.dagster_run, records)
    return run_branch_name(run.run_id)


def _newest_record(branch: str, candidates: Sequence[RunRecord]) -> RunRecord | None:
    active_records = [record for record in candidates if not record.dagster_run.is_finished]
    if active_records:
        return max(active_records, key=_storage_id)
    # A retry that failed before it opened the branch did not change it.
    finished_records = [
        record
        for record in candidates
        if (run := record.dagster_run).is_success
        or is_opened_by(run.tags, run.run_id)
        or run_branch_name(run.run_id) == branch
    ]
    return max(finished_records, key=_storage_id, default=None)


_UUID_REGEX = re.compile(reference_names.UUID_PATTERN)
_UNKNOWN_UUID = str(UUID(int=0))
_RANDOM_BITS = 76
"""The number of bits of a UUIDv7 after the time and the version, including the variant."""


@dataclass(frozen=True)
class BatchBranch:
    """The content of a batch branch's name: the live run, the Dagster instance, and the time of creation.

    `run_id` and `instance` are empty if they are unknown.
    """

    run_id: str
    instance: str
    created_at: datetime

    @classmethod
    def from_name(cls, name: str) -> BatchBranch | None:
        """Parse the name of a branch, or of the tag that replaced it. None if the name is not a batch's."""
        parts = reference_names.strip_name_prefix(name).split(".")
        if len(parts) != 3 or not all(_UUID_REGEX.fullmatch(part) for part in parts) or parts[0][14] != "7":
            return None
        try:
            created_at = datetime.fromtimestamp((UUID(parts[0]).int >> 80) / 1000, UTC)
        except (ValueError, OverflowError):
            return None  # after the year 9999
        run_id, instance = ("" if part == _UNKNOWN_UUID else part for part in parts[1:])
        return cls(run_id, instance, created_at)


def build_batch_branch_name(run_id: str, instance: str, *, now: datetime, random_id: UUID) -> str:
    """Return the name for a new batch of a live run.

    `random_id` is a random UUID; its time bits are replaced by `now`. A `run_id` or `instance` that is not a
    UUID is recorded as unknown.
    """
    millis = int(now.timestamp() * 1000)
    batch_id = UUID(int=millis << 80 | 7 << _RANDOM_BITS | random_id.int & (1 << _RANDOM_BITS) - 1)
    id_parts = (id_ if _UUID_REGEX.fullmatch(id_) else _UNKNOWN_UUID for id_ in (run_id, instance))
    return run_branch_name(".".join((str(batch_id), *id_parts)))


def writer_branch(branch: str) -> str:
    """Return the branch named after the run that works on `branch`.

    It differs from `branch` for batches only.
    """
    batch = BatchBranch.from_name(branch)
    return run_branch_name(batch.run_id) if batch else branch
