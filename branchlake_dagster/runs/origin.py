"""Which Dagster instance made a branch: several may work on one lake, and each ends only its own.

An instance is known by the id of its run storage. PyIceberg's commits carry it as a property. Spark
overwrites the properties that one could set on its commits, so there the snapshots' summaries carry it. A
live ingestion's batch has it in the name of its branch.
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
from branchlake_dagster.wording import named

_MOST = 200
"""Commits of a branch that are looked at."""


class Maker(StrEnum):
    """Whose a branch is, of one whose run this instance does not know."""

    HERE = "this instance's"
    ELSEWHERE = "another instance's"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Origin:
    """Who made a branch; `by` are the ids of the instances that its name and its commits name."""

    maker: Maker = Maker.UNKNOWN
    by: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.maker is Maker.ELSEWHERE:
            return f"it belongs to {named('Dagster instance', self.by)}"
        return "nothing says which Dagster instance made it"


UNKNOWN = Origin()
"""Of a branch that nobody has asked about, or of which nothing is known."""


_ids: WeakKeyDictionary[DagsterInstance, str | None] = WeakKeyDictionary()


def instance_id(instance: DagsterInstance) -> str | None:
    """The id of the instance's run storage, which outlives processes; None when the storage has none."""
    if instance not in _ids:
        told = getattr(instance.run_storage, "get_run_storage_id", None)
        _ids[instance] = str(told()) if told is not None else None
    return _ids[instance]


class Makers:
    """Tells who made a branch or a tag. `here` is this instance's id; with None nothing is its own.

    `files` reads the table metadata that Spark's commits name; without it they say nothing.
    """

    def __init__(self, client: NessieClient, here: str | None, files: TableFiles | None = None) -> None:
        self._client = client
        self._here = here
        self._files = files

    def of(self, ref: Reference, *, base: str | None = None, beating: frozenset[str] = frozenset()) -> Origin:
        """Who made `ref`, which has its metadata. `beating` are the instances of those who beat on it.

        `base` is where it left `main`, which Nessie tells of branches but not of tags. It is ours only when
        everything that names an instance names this one.
        """
        metadata = ref.metadata
        ancestor = base or (metadata.common_ancestor_hash if metadata else None)
        batch = BatchBranch.of(ref.name)
        found = {*beating, batch.instance} - {""} if batch else set(beating)
        if metadata and ancestor and ancestor != ref.hash:
            head = (
                metadata.head_commit.properties.get(LakeProperty.INSTANCE) if metadata.head_commit else None
            )
            found |= {head} if head else set(self._named(ref, ancestor))
        by = tuple(sorted(found))
        if not by:
            return UNKNOWN
        return Origin(Maker.HERE if by == (self._here,) else Maker.ELSEWHERE, by)

    def _named(self, ref: Reference, ancestor: str) -> Iterator[str]:
        log = self._client.log(f"@{ref.hash}", since=ancestor, limit=_MOST, fetch_operations=True)
        try:
            for entry in log:
                yield from self._in(entry)
        except ReferenceNotFound:
            return  # its commits cannot be told from main's

    def _in(self, entry: LogEntry) -> Iterator[str]:
        if told := entry.commit.properties.get(LakeProperty.INSTANCE):
            yield told
            return
        for operation in entry.operations:
            content = operation.content if isinstance(operation, Put) else None
            if isinstance(content, IcebergTable) and (said := self._summary(content)):
                yield said

    def _summary(self, content: IcebergTable) -> str | None:
        if self._files is None:
            return None
        try:
            metadata = self._files.metadata(content.metadata_location)
        except FileUnreadable:
            return None  # it says nothing; without another sign the branch stays
        found = metadata.snapshot_by_id(content.snapshot_id) if metadata else None
        return (
            found.summary.additional_properties.get(LakeProperty.INSTANCE)
            if found and found.summary
            else None
        )
