"""The files of a batch in its tables, with the offsets: one commit on the batch's branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import AddSnapshotUpdate, RemoveSnapshotsUpdate, SetPropertiesUpdate, TableUpdate

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.history.capture import line
from branchlake_dagster.history.summary import OFFSETS, REPROCESSED
from branchlake_dagster.ingest.errors import EarlierAttemptLate
from branchlake_dagster.ingest.positions.put_back import PutBack, with_put_back
from branchlake_dagster.ingest.positions.recorded import Recorded
from branchlake_dagster.ingest.scanning.targets import Identifier
from branchlake_dagster.internals.pyiceberg import applied, snapshot_of
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, Put, Reference
from branchlake_dagster.nessie.model import Operation as NessieOperation
from branchlake_dagster.publication.replay import IcebergTables, Staged
from branchlake_dagster.tables.specification import table_name


@dataclass(frozen=True)
class TableChange:
    """What a batch does to one table.

    `recorded` are its offsets afterwards, None for a table that records none; `origin` goes into the summary
    of its snapshot beside them, and `properties` are set on the table. `put_back_by` is the run whose dead
    letters are put back into it, or marked in it.
    """

    identifier: Identifier
    table: Table
    files: Sequence[DataFile] = ()
    recorded: Recorded | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    put_back_by: str | None = None

    def told(self, ingestion: str) -> list[str]:
        """The properties that it sets."""
        offsets = [OFFSETS + ingestion] if self.recorded else []
        return [*self.properties, *offsets, *([REPROCESSED + ingestion] if self.put_back_by else [])]


def commit_tables(
    client: NessieClient,
    catalog: NessieCatalog,
    branch: str,
    changes: Sequence[TableChange],
    *,
    ingestion: str,
    message: str,
    properties: Mapping[str, str],
    tables: IcebergTables,
    keep: int | None = None,
    dropped: Sequence[Identifier] = (),
) -> Reference:
    """Commit the files and offsets of all tables at once, and forget the tables that are `dropped`.

    Of tables without files the offsets alone; with `keep` so many snapshots stay of one that has a quarter
    more. The branch as it is then. Raises EarlierAttemptLate where the branch has, since a table was loaded,
    come to say something else of what is set on it here. Nessie's errors pass through; nothing is left of a
    commit that certainly did not happen but data files.
    """
    keys = [ContentKey(one.identifier) for one in changes]
    gone = [ContentKey(one) for one in dropped]
    seen = client.contents_at(branch, [*keys, *gone])
    operations: list[NessieOperation] = [Delete(key) for key in gone if key in seen.contents]
    staged: list[Staged] = []
    try:
        for key, change in zip(keys, changes, strict=True):
            content = seen.contents.get(key)
            assert isinstance(content, IcebergTable)  # noqa: S101 - it was loaded or made on this branch
            table = change.table
            if content.metadata_location != table.metadata_location:
                table = catalog.table_of(key, content)
                _require_unsaid(change, table, ingestion, branch)
            one = _staged(table, change, ingestion, keep)
            staged.append(one)
            operations.append(Put(key, tables.write(one, content.content_id)))
        result = client.commit(
            branch,
            expected_hash=seen.reference.hash,
            operations=operations,
            message=message,
            properties=properties,
        )
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            for one in staged:
                tables.discard(one)
        raise
    return replace(seen.reference, hash=result.hash)


def _require_unsaid(change: TableChange, now: Table, ingestion: str, branch: str) -> None:
    """Raise EarlierAttemptLate where an attempt that was given up has committed since: no other one may.

    Its rows would stay under ours, which has read the same records.
    """
    told = change.told(ingestion)
    if any(now.metadata.properties.get(one) != change.table.metadata.properties.get(one) for one in told):
        raise EarlierAttemptLate(
            f"An earlier attempt of ingestion {ingestion} has committed its batch after this one had begun.",
            table=table_name(change.identifier),
            branch=branch,
            hint="Nothing of this attempt was committed. The next attempt of the step takes the earlier one's"
            " back and begins anew; where the step has no retry, retry the run from its failure.",
        )


def _outgrown(metadata: TableMetadata, keep: int) -> list[int]:
    """The oldest snapshots of the line, beyond those that are kept; none that a reference names."""
    if len(metadata.snapshots) <= keep + keep // 4:
        return []
    found, _ = line(metadata)
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    return [one.snapshot_id for one in found[:-keep] if one.snapshot_id not in named]


def _staged(table: Table, change: TableChange, ingestion: str, keep: int | None) -> Staged:
    recorded = change.recorded
    written: list[str] = []
    updates: tuple[TableUpdate, ...] = ()
    now = table.metadata.current_snapshot()
    if change.files:
        updates = snapshot_of(
            table,
            added=change.files,
            removed=(),
            operation=Operation.APPEND,
            properties={**change.origin, **(recorded.summary(ingestion) if recorded else {})},
            written=written,
        )
        now = next(one for one in updates if isinstance(one, AddSnapshotUpdate)).snapshot
    at = now.snapshot_id if now else None
    if recorded is not None:
        text = replace(recorded, at=at).text()
        updates += (SetPropertiesUpdate(updates={OFFSETS + ingestion: text}),)
    if change.put_back_by is not None:
        run = PutBack(change.put_back_by, at, (now.sequence_number or 0) if now else 0)
        text = with_put_back(ingestion, table.metadata, run)
        updates += (SetPropertiesUpdate(updates={REPROCESSED + ingestion: text}),)
    if change.files and keep is not None and (old := _outgrown(table.metadata, keep)):
        updates += (RemoveSnapshotsUpdate(snapshot_ids=old),)
    if change.properties:
        updates += (SetPropertiesUpdate(updates=dict(change.properties)),)
    metadata = applied(table.metadata, updates)
    state = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
    return Staged(table, state, written)
