"""Names the Nessie references of branchlake, and finds the run and the Dagster instance that own a branch.

A name consists of a prefix and the run's UUID, so that references of users are never taken for branchlake's.
`publish-q3-report` was once deleted as a publication branch, and `run-experiment` would have been reaped. The
branch of one batch of a live ingestion is named `run-{UUIDv7}.{live run}.{Dagster instance}`. No run has this
name, and Nessie records neither an owner nor an age for a branch without commits of its own. So the name
records both, even if the writer died right after creating the branch.

Each of several Dagster instances ends only its own branches. An instance is identified by the id of its run
storage. PyIceberg's commits record the id as a property. Spark overwrites the properties of its commits, so
its snapshot summaries record the id.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from uuid import UUID
from weakref import WeakKeyDictionary

from dagster import DagsterInstance, DagsterRun, RunRecord, RunsFilter

from branchlake_dagster.internals.dagster import (
    ASSET_RESUME_RETRY_TAG,
    PARENT_RUN_ID_TAG,
    load_failed_keys,
)
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import IcebergTable, LogEntry, Put, Reference
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import find_run_location, is_opened_by
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix, RunTag
from branchlake_dagster.tables.errors import InvalidCheckRun
from branchlake_dagster.tables.table_files import FileUnreadable, TableFiles
from branchlake_dagster.wording import format_names

UUID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
"""A regular expression for a UUID in lower case, in the syntax of Python and of Nessie's filters."""
_ALL_PREFIXES = (
    ReferencePrefix.RUN,
    ReferencePrefix.PUBLICATION,
    ReferencePrefix.DISCARDED,
    ReferencePrefix.SWEEPING,
    ReferencePrefix.CLAIM,
)


def _name_pattern(*prefixes: str) -> str:
    return f"^({'|'.join(prefixes)}){UUID_PATTERN}([.]{UUID_PATTERN}[.]{UUID_PATTERN})?$"


def branch_filter(*prefixes: str) -> str:
    """Return Nessie's filter for branches whose name is one of these prefixes plus a run's or batch's id."""
    return f"refType == 'BRANCH' && ref.name.matches('{_name_pattern(*prefixes)}')"


def tag_filter(*prefixes: str) -> str:
    """Return Nessie's filter for tags whose name is one of these prefixes plus a run's or batch's id."""
    return f"refType == 'TAG' && ref.name.matches('{_name_pattern(*prefixes)}')"


def is_own_reference(name: str, *prefixes: str) -> bool:
    """Return whether a reference name is one of branchlake's: a prefix plus the id of a run or batch.

    Without `prefixes`, each of branchlake's prefixes counts.
    """
    return re.fullmatch(_name_pattern(*(prefixes or _ALL_PREFIXES)), name) is not None


def strip_name_prefix(name: str) -> str:
    """Return the id after the prefix of a reference name: the id of a run, or the three ids of a batch."""
    for prefix in _ALL_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


_HASH_PATTERN = re.compile(r"[0-9a-f]{16,64}")


def find_check_reference(run_id: str, tags: Mapping[str, str]) -> str | None:
    """Return the reference `name@hash` that a check run reads; None for every other run.

    Whoever launches the run sets its tags. So only a publication branch at a fixed hash is accepted, because
    a catalog or Spark session at a fixed hash is read-only. A tag that named `main` once let a run write
    there without any check.

    Raises:
        InvalidCheckRun: The tags name another reference, or no hash.
    """
    if RunTag.CHECK_REF not in tags:
        return None
    branch_name, hash_ = tags[RunTag.CHECK_REF], tags.get(RunTag.CHECK_HASH, "")
    if not is_own_reference(branch_name, ReferencePrefix.PUBLICATION) or not _HASH_PATTERN.fullmatch(hash_):
        raise InvalidCheckRun(
            f"The run's tags make it a check run, but {branch_name}@{hash_} is not a prepared publication"
            " state.",
            branch=branch_name,
            run_id=run_id,
            hint=f"Remove the tags {RunTag.CHECK_REF} and {RunTag.CHECK_HASH}, and launch the run again.",
        )
    return f"{branch_name}@{hash_}"


_CHUNK_SIZE = 500
"""The number of values in one query. SQLite allows at most 999."""


def is_retry(instance: DagsterInstance, run: DagsterRun) -> bool:
    """Return whether the run repeats a part of its parent's work and needs the parent's outputs for the rest.

    This is true for a retry from failure, from failed assets, or of selected steps. A full re-execution also
    has a parent, but is not a retry. Cost: no query. For a run that Dagster marked as a retry of
    single assets one query, and a few more if its parent has this mark too.
    """
    if run.parent_run_id is None:
        return False
    return bool(run.step_keys_to_execute) or (
        _marks_asset_retry(run) and not _has_copied_mark(instance, run, run.parent_run_id)
    )


def _marks_asset_retry(run: DagsterRun) -> bool:
    return run.tags.get(ASSET_RESUME_RETRY_TAG) == "true"


def _has_copied_mark(instance: DagsterInstance, run: DagsterRun, parent_run_id: str) -> bool:
    """Return whether the tag that marks a retry of single assets is only a copy of the parent's tag.

    Dagster copies the tag to full re-executions. These select all assets of the parent, also those that the
    parent has finished. If the parent has finished none, both kinds of re-execution do the same.
    """
    parent = instance.get_run_by_id(parent_run_id)
    if parent is None or not _marks_asset_retry(parent) or run.asset_selection != parent.asset_selection:
        return False
    failed = load_failed_keys(instance, parent)
    if failed is None:
        return False
    failed_assets, failed_checks = failed
    return (run.asset_selection or frozenset()) != failed_assets or (
        run.asset_check_selection is not None and run.asset_check_selection != failed_checks
    )


def load_branch_owners(instance: DagsterInstance, branches: Collection[str]) -> dict[str, RunRecord | None]:
    """Load for each run branch the record of its owner; None if Dagster has no such run.

    The owner is the newest active run on the branch, or else the newest run that worked on it. A retry owns
    its parent's branch from its creation. Cost: a constant number of queries per 500 branches.
    """
    records = _load_related_runs(instance, branches)
    candidates: dict[str, list[RunRecord]] = {}
    for record in records.values():
        candidates.setdefault(_branch_of_run(instance, record.dagster_run, records), []).append(record)
    return {branch: _newest_record(branch, candidates.get(branch, [])) for branch in branches}


def load_branch_owner(instance: DagsterInstance, branch: str) -> DagsterRun | None:
    """Load the run that owns `branch`, by the rules of `load_branch_owners`; None if Dagster has none."""
    record = load_branch_owners(instance, [branch])[branch]
    return record.dagster_run if record else None


def load_runs_on_branch(instance: DagsterInstance, branch: str) -> tuple[DagsterRun, ...]:
    """Load all runs whose work is on `branch`, oldest first: the runs that it continues, then its owners."""
    records = _load_related_runs(instance, [branch])
    branch_records = [
        record
        for record in records.values()
        if _branch_of_run(instance, record.dagster_run, records) == branch
    ]
    runs = [record.dagster_run for record in sorted(branch_records, key=_storage_id)]
    while runs and (earlier_run := _load_continued_run(instance, runs[0])) is not None:
        runs.insert(0, earlier_run)
    return tuple(runs)


def iter_continuing_runs(
    instance: DagsterInstance, branches: Collection[str]
) -> Iterator[tuple[str, DagsterRun]]:
    """Yield (branch, run) for each run that continues the work of one of `branches`, newest run first."""
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
    """Load the runs that the branches are named after, the runs that opened them, and all re-executions.

    The result is by run id. It includes re-executions of re-executions.
    """
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


def _branch_of_run(instance: DagsterInstance, run: DagsterRun, records: Mapping[str, RunRecord]) -> str:
    """Return the branch that a run works on.

    This is the branch that it opened; else for a retry the branch of its parent; else the branch that is
    named after the run.
    """
    if is_opened_by(run.tags, run.run_id):
        return run.tags[RunTag.BRANCH]
    parent = records.get(run.parent_run_id or "")
    if parent is not None and is_retry(instance, run):
        return _branch_of_run(instance, parent.dagster_run, records)
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


_UUID_REGEX = re.compile(UUID_PATTERN)
_UNKNOWN_UUID = str(UUID(int=0))
_RANDOM_BITS = 76
"""The number of bits of a UUIDv7 after the time and the version, including the variant."""


@dataclass(frozen=True)
class BatchBranch:
    """The parts of a batch branch's name: the live run, the Dagster instance, and the time of creation.

    `run_id` and `instance` are empty if they are unknown.
    """

    run_id: str
    instance: str
    created_at: datetime

    @classmethod
    def from_name(cls, name: str) -> BatchBranch | None:
        """Parse the name of a branch, or of the tag that replaced it. None if the name is not a batch's."""
        parts = strip_name_prefix(name).split(".")
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
    """Return the name of the run branch of the process that writes `branch`, under which it sends heartbeats.

    For the branch of a batch this is the branch of its live run; otherwise it is `branch` itself.
    """
    batch = BatchBranch.from_name(branch)
    return run_branch_name(batch.run_id) if batch else branch


_MAX_COMMITS = 200
"""The most commits of a branch that are searched for the ids of Dagster instances."""


class Maker(StrEnum):
    """The Dagster instance that made a branch: this instance, another instance, or unknown."""

    HERE = "this instance's"
    ELSEWHERE = "another instance's"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class BranchOrigin:
    """Whether this Dagster instance or another one made a branch or tag.

    `maker` is UNKNOWN if nothing records it, and HERE only if all records name this instance. `instance_ids`
    are the sorted ids that its name, commits and heartbeats record; there may be several.
    """

    maker: Maker = Maker.UNKNOWN
    instance_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.maker is Maker.ELSEWHERE:
            return f"it belongs to {format_names('Dagster instance', self.instance_ids)}"
        return "nothing records which Dagster instance made it"


UNKNOWN_ORIGIN = BranchOrigin()
"""The origin of a branch that was not examined, or that has no record of its instance."""


_ids: WeakKeyDictionary[DagsterInstance, str | None] = WeakKeyDictionary()


def load_instance_id(instance: DagsterInstance) -> str | None:
    """Load the id of the instance's run storage, which is persistent. None if the storage has no id."""
    if instance not in _ids:
        load_storage_id = getattr(instance.run_storage, "get_run_storage_id", None)
        _ids[instance] = str(load_storage_id()) if load_storage_id is not None else None
    return _ids[instance]


class OriginFinder:
    """Finds which Dagster instance made a branch or a tag.

    `own_instance` is the id of the present instance; if it is None, no branch counts as its own. `files`
    reads the table metadata that Spark's commits refer to. Without it, Spark's commits reveal no instance.
    """

    def __init__(
        self, client: NessieClient, own_instance: str | None, files: TableFiles | None = None
    ) -> None:
        self._client = client
        self._own_instance = own_instance
        self._files = files

    def find_origin(
        self,
        ref: Reference,
        *,
        base_hash: str | None = None,
        heartbeat_instances: frozenset[str] = frozenset(),
    ) -> BranchOrigin:
        """Find which Dagster instance made `ref`, which must include its metadata.

        `base_hash` is the commit of `main` that the reference started from; Nessie records this for branches
        but not for tags. `heartbeat_instances` are the ids of the instances that send heartbeats for it. The
        result is HERE only if all records name this instance, and UNKNOWN if there is no record.
        """
        metadata = ref.metadata
        ancestor = base_hash or (metadata.common_ancestor_hash if metadata else None)
        batch = BatchBranch.from_name(ref.name)
        instance_ids = {*heartbeat_instances, batch.instance} - {""} if batch else set(heartbeat_instances)
        if metadata and ancestor and ancestor != ref.hash:
            head_instance = (
                metadata.head_commit.properties.get(LakeProperty.INSTANCE) if metadata.head_commit else None
            )
            instance_ids |= {head_instance} if head_instance else set(self._iter_log_instances(ref, ancestor))
        sorted_ids = tuple(sorted(instance_ids))
        if not sorted_ids:
            return UNKNOWN_ORIGIN
        return BranchOrigin(
            Maker.HERE if sorted_ids == (self._own_instance,) else Maker.ELSEWHERE, sorted_ids
        )

    def _iter_log_instances(self, ref: Reference, ancestor: str) -> Iterator[str]:
        log = self._client.log(f"@{ref.hash}", since=ancestor, limit=_MAX_COMMITS, fetch_operations=True)
        try:
            for entry in log:
                yield from self._iter_entry_instances(entry)
        except ReferenceNotFound:
            return  # its commits cannot be distinguished from main's

    def _iter_entry_instances(self, entry: LogEntry) -> Iterator[str]:
        if commit_instance := entry.commit.properties.get(LakeProperty.INSTANCE):
            yield commit_instance
            return
        for operation in entry.operations:
            content = operation.content if isinstance(operation, Put) else None
            if isinstance(content, IcebergTable) and (snapshot_instance := self._snapshot_instance(content)):
                yield snapshot_instance

    def _snapshot_instance(self, content: IcebergTable) -> str | None:
        if self._files is None:
            return None
        try:
            metadata = self._files.metadata(content.metadata_location)
        except FileUnreadable:
            return None  # no information; without other records the branch is kept
        snapshot = metadata.snapshot_by_id(content.snapshot_id) if metadata else None
        return (
            snapshot.summary.additional_properties.get(LakeProperty.INSTANCE)
            if snapshot and snapshot.summary
            else None
        )
