"""Which run or batch a branch belongs to, by its name and by the tags of runs.

The branch of one batch of a live ingestion: its name says whose it is and how old.

No run is called like it, and Nessie tells neither of a branch that has no commit of its own yet. So the name
is `run-{UUIDv7}.{live run}.{Dagster instance}`: that of a writer which died as soon as it had made the branch
says it too.
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
from branchlake_dagster.runs.run_branch import branch_name, run_id_of
from branchlake_dagster.runs.run_tags import opened_by, place_of
from branchlake_dagster.stored_names import RunTag

_CHUNK = 500
"""Values in one query; SQLite takes at most 999."""


def is_retry(run: DagsterRun) -> bool:
    """Whether the run does only a part of its parent's work and relies on the parent's outputs for the rest.

    That is a retry from failure or of chosen steps; a full re-execution has a parent too and is none.
    """
    partial = bool(run.step_keys_to_execute) or run.tags.get(ASSET_RESUME_RETRY_TAG) == "true"
    return run.parent_run_id is not None and partial


def owners(instance: DagsterInstance, branches: Collection[str]) -> dict[str, RunRecord | None]:
    """For each run branch the record of the run it belongs to; None when Dagster knows none.

    That is the newest run at work on it, else the newest of those that worked on it. A retry owns its
    parent's branch from the moment it is created. A constant number of queries per 500 branches.
    """
    records = _family(instance, branches)
    candidates: dict[str, list[RunRecord]] = {}
    for record in records.values():
        candidates.setdefault(_branch_of(record.dagster_run, records), []).append(record)
    return {branch: _newest(branch, candidates.get(branch, [])) for branch in branches}


def owner(instance: DagsterInstance, branch: str) -> DagsterRun | None:
    """The run that `branch` belongs to, as `owners` says."""
    record = owners(instance, [branch])[branch]
    return record.dagster_run if record else None


def runs_on(instance: DagsterInstance, branch: str) -> tuple[DagsterRun, ...]:
    """All runs whose work is on `branch`, oldest first: those it continues, then those that own it."""
    records = _family(instance, [branch])
    found = [record for record in records.values() if _branch_of(record.dagster_run, records) == branch]
    runs = [record.dagster_run for record in sorted(found, key=_age)]
    while runs and (earlier := _continued(instance, runs[0])) is not None:
        runs.insert(0, earlier)
    return tuple(runs)


def continuing_runs(instance: DagsterInstance, branches: Collection[str]) -> Iterator[tuple[str, DagsterRun]]:
    """The branches whose work other runs took over, with those runs, the newest first."""
    for part in _chunks(branches):
        for run in instance.get_runs(RunsFilter(tags={RunTag.CONTINUES: part})):
            place = place_of(run.tags, run.run_id)
            if place is not None and place.continues is not None:
                yield place.continues, run


def _continued(instance: DagsterInstance, run: DagsterRun) -> DagsterRun | None:
    place = place_of(run.tags, run.run_id)
    return instance.get_run_by_id(run_id_of(place.continues)) if place and place.continues else None


def _age(record: RunRecord) -> int:
    return record.storage_id


def _family(instance: DagsterInstance, branches: Collection[str]) -> dict[str, RunRecord]:
    """The runs the branches are named after, runs that opened them, and all their retries, by run id."""
    found: dict[str, RunRecord] = {}
    for part in _chunks(branches):
        found |= _by_id(instance.get_run_records(RunsFilter(tags={RunTag.BRANCH: part})))
    named = {run_id_of(branch) for branch in branches}
    # Seldom any: a run that could not note its branch any more, or that has opened none.
    wanted = named - found.keys()
    older = named | found.keys()
    while wanted or older:
        for part in _chunks(wanted):
            found |= _by_id(instance.get_run_records(RunsFilter(run_ids=part)))
        retries = {
            run_id
            for part in _chunks(older | wanted)
            for run_id in instance.get_run_ids(RunsFilter(tags={PARENT_RUN_ID_TAG: part}))
        }
        wanted, older = retries - found.keys(), set()
    return found


def _by_id(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    return {record.dagster_run.run_id: record for record in records}


def _chunks(values: Collection[str]) -> Iterator[Sequence[str]]:
    rest = iter(values)
    while part := list(islice(rest, _CHUNK)):
        yield part


def _branch_of(run: DagsterRun, records: Mapping[str, RunRecord]) -> str:
    """The branch a run works on: the one it opened; a retry's parent's, until it opened one; else its own."""
    if opened_by(run.tags, run.run_id):
        return run.tags[RunTag.BRANCH]
    parent = records.get(run.parent_run_id or "")
    if parent is not None and is_retry(run):
        return _branch_of(parent.dagster_run, records)
    return branch_name(run.run_id)


def _newest(branch: str, candidates: Sequence[RunRecord]) -> RunRecord | None:
    at_work = [record for record in candidates if not record.dagster_run.is_finished]
    if at_work:
        return max(at_work, key=_age)
    # A retry that failed before it touched the branch changed nothing about it.
    done = [
        record
        for record in candidates
        if (run := record.dagster_run).is_success
        or opened_by(run.tags, run.run_id)
        or branch_name(run.run_id) == branch
    ]
    return max(done, key=_age, default=None)


_UUID = re.compile(reference_names.UUID_PATTERN)
_UNKNOWN = str(UUID(int=0))
_RANDOM_BITS = 76
"""Of a UUIDv7 what is behind the time and the version, the variant included."""


@dataclass(frozen=True)
class BatchBranch:
    """What the name says: the live run and the Dagster instance (empty: not known), and when it was made."""

    run_id: str
    instance: str
    began: datetime

    @classmethod
    def of(cls, reference: str) -> BatchBranch | None:
        """What the name of a branch, or of a tag in its place, says; None: it is no batch's."""
        parts = reference_names.run_of(reference).split(".")
        if len(parts) != 3 or not all(_UUID.fullmatch(part) for part in parts) or parts[0][14] != "7":
            return None
        try:
            began = datetime.fromtimestamp((UUID(parts[0]).int >> 80) / 1000, UTC)
        except (ValueError, OverflowError):
            return None  # after the year 9999
        run_id, instance = ("" if part == _UNKNOWN else part for part in parts[1:])
        return cls(run_id, instance, began)


def batch_branch(run_id: str, instance: str, *, now: datetime, unique: UUID) -> str:
    """The name for a new batch of a live run; `unique` is a random UUID, of which all but the time is taken.

    Of ids that are no UUIDs it says nothing.
    """
    millis = int(now.timestamp() * 1000)
    own = UUID(int=millis << 80 | 7 << _RANDOM_BITS | unique.int & (1 << _RANDOM_BITS) - 1)
    said = (one if _UUID.fullmatch(one) else _UNKNOWN for one in (run_id, instance))
    return branch_name(".".join((str(own), *said)))


def at_work_on(branch: str) -> str:
    """The branch that is named after the run which works on this one: the same, but for a batch's."""
    batch = BatchBranch.of(branch)
    return branch_name(batch.run_id) if batch else branch
