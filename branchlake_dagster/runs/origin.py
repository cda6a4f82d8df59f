"""Find the Dagster instance that made a branch, because each of several instances ends only its own branches.

An instance is identified by the id of its run storage. PyIceberg's commits record the id as a property. Spark
overwrites the properties of its commits, so its snapshot summaries record the id. The branch of a live
ingestion's batch has the id in its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakKeyDictionary

from dagster import DagsterInstance

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import IcebergTable, LogEntry, Put, Reference
from branchlake_dagster.runs.branch_owner import BatchBranch
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.table_files import FileUnreadable, TableFiles
from branchlake_dagster.wording import format_names

_MAX_COMMITS = 200
"""The most commits of a branch that are read."""


class Maker(StrEnum):
    """Who made a branch whose run this instance does not know."""

    HERE = "this instance's"
    ELSEWHERE = "another instance's"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class BranchOrigin:
    """Who made a branch. `instance_ids` are the instances that its name, commits and heartbeats record."""

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
    """Finds who made a branch or a tag.

    `own_instance` is this instance's id; if it is None, no branch is its own.

    `files` reads the table metadata that Spark's commits refer to. Without it, Spark's commits reveal no
    instance.
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
        """Find who made `ref`, which must include its metadata.

        `base_hash` is where the reference left `main`; Nessie knows this for branches but not for tags.
        `heartbeat_instances` are the instances that send heartbeats for it. The reference is this instance's
        own only if all records name this instance.
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
