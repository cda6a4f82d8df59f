"""Plan the expiry of snapshots, and commit it: one forward commit on `main` for each table.

The commit puts a new metadata file without the expired snapshots. It deletes no file: the garbage collection
later finds and deletes the files that are not reachable any more.

The commit has no publication id, so readers of publications ignore it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from datetime import UTC, datetime

from pyiceberg.io import FileIO, load_file_io
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.expiry.forward_commit import ForwardCommit, PreparedTable, Unprepared
from branchlake_dagster.expiry.metadata_document import (
    MetadataDocument,
    parse_metadata,
    read_document,
    remove_snapshots,
    write_document,
)
from branchlake_dagster.expiry.result import ExpiredTable, ExpiryPlan, ExpiryResult, PlannedTable
from branchlake_dagster.expiry.retention import ExpiryPolicy, SnapshotRetention, TableRoots, decide_retention
from branchlake_dagster.expiry.roots import LakeRoots, PositionCache, RootedTable, RootsReader
from branchlake_dagster.history.change import from_epoch_ms
from branchlake_dagster.internals.pyiceberg import metadata_version
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import Content, ContentKey, IcebergTable
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.wording import format_count

_FILE_IO_PROPERTIES = ("s3.", "hdfs.", "gcs.", "adls.", "oss.", "client.", "py-io-impl")


class ExpiryInvalid(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The new metadata would lack a snapshot or schema that is needed. Nothing was changed."""


class SnapshotExpirer:
    """Plans and commits the expiry of snapshots on one lake. Several expirers may work at the same time.

    `clock` returns the present time in UTC.
    """

    def __init__(
        self,
        client: NessieClient,
        catalog: NessieCatalog,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._clock = clock
        self._positions = PositionCache()
        self._reader = RootsReader(client, self._find_io, self._positions)

    @classmethod
    def of_lake(cls, lake: Lakehouse) -> SnapshotExpirer:
        """Create the expirer of a lake."""
        return cls(lake.nessie, lake.catalog())

    # -- planning --------------------------------------------------------------------------------------

    def plan(self, tables: Collection[str] | None = None, policy: ExpiryPolicy | None = None) -> ExpiryPlan:
        """Plan the expiry of snapshots. Nothing is changed.

        Args:
            tables: Dotted names of tables on `main`; None for all tables.
            policy: How long snapshots are kept. (default: `ExpiryPolicy()`)

        A table whose metadata cannot be read gets a `PlannedTable` with an error; the others are planned.
        Costs one read of the metadata file of each table on `main`. Raises TableMissing for a name that
        `main` does not have, ConsumersUnreadable, and errors of Nessie.
        """
        policy = policy or ExpiryPolicy()
        now = self._clock()
        main = self._client.reference(MAIN)
        entries = [
            entry
            for entry in self._client.entries(
                main.pinned_ref, filter="entry.contentType == 'ICEBERG_TABLE'", fetch_content=True
            )
            if tables is None or entry.key.name in tables
        ]
        _require_existing(tables or (), {entry.key.name for entry in entries})
        rooted_tables: dict[ContentKey, tuple[RootedTable, int]] = {}
        failed_tables: list[PlannedTable] = []
        for entry in entries:
            if not isinstance(entry.content, IcebergTable):
                continue
            location = entry.content.metadata_location
            try:
                document = read_document(self._find_io(location), location)
            except Exception as error:  # noqa: BLE001 - PyIceberg raises ValueError for an unknown scheme
                failed_tables.append(PlannedTable(entry.key.name, location, error=error))
                continue
            self._positions.add(location, document.properties)
            if document.history.snapshots:
                rooted_tables[entry.key] = (_root(entry.key, entry.content, document), len(document.text))
        roots = self._read_roots(policy, now)
        found_roots = self._reader.find_table_roots(roots, (table for table, _ in rooted_tables.values()))
        planned = [
            _describe_plan(
                table, size, decide_retention(table.history, found_roots[key], policy, _to_ms(now))
            )
            for key, (table, size) in rooted_tables.items()
        ]
        planned = sorted([*planned, *failed_tables], key=lambda table: table.table)
        return ExpiryPlan(main.hash, now, policy, tuple(planned), roots.unreadable_tables)

    def _read_roots(self, policy: ExpiryPolicy, now: datetime) -> LakeRoots:
        roots = self._reader.read(policy, now)
        assert roots is not None  # noqa: S101 - only a deadline ends it early
        return roots

    def _find_io(self, location: str, properties: Mapping[str, str] | None = None) -> FileIO:
        """Return the FileIO for a location. Storage options in a table's `properties` have priority."""
        own = {
            name: value for name, value in (properties or {}).items() if name.startswith(_FILE_IO_PROPERTIES)
        }
        return load_file_io({**self._catalog.properties, **own}, location)

    # -- committing ------------------------------------------------------------------------------------

    def run(
        self, plan: ExpiryPlan, *, report: Callable[[ExpiredTable], None] = lambda _: None
    ) -> ExpiryResult:
        """Remove the snapshots of the plan's tables that expire now by the plan's policy.

        The needed snapshots are determined again, because runs may have begun since the plan was made. Tables
        that could not be planned are tried again. An error of one table is stored in its result, and the
        other tables are processed. `report` is called with the result of each table. Safe to call again after
        any failure. Raises ConsumersUnreadable, and Nessie's errors while references and positions are read.
        """
        roots = self._read_roots(plan.policy, self._clock())
        results: list[ExpiredTable] = []
        for planned in plan.tables:
            if not planned.expired_count and planned.error is None:
                continue
            try:
                result = self.expire_table(ContentKey.from_path(planned.table), roots, plan.policy)
            except Exception as error:  # noqa: BLE001 - PyIceberg raises many classes for damaged metadata
                result = ExpiredTable(planned.table, error=error)
            results.append(result)
            report(result)
        return ExpiryResult(tuple(results), roots.unreadable_tables)

    def expire_table(self, key: ContentKey, roots: LakeRoots, policy: ExpiryPolicy) -> ExpiredTable:
        """Remove the snapshots of one table that expire by `roots` and `policy`, in one commit on `main`.

        Safe to call again after any failure. Raises ExpiryContended, ExpiryUnknown, ExpiryInvalid, and the
        errors of Nessie and of the storage.
        """
        forward = ForwardCommit(self._client, key, lambda content: self._prepare(key, content, roots, policy))
        result, commit = forward.run()
        return replace(result, commit=commit)

    def _prepare(
        self, key: ContentKey, content: Content | None, roots: LakeRoots, policy: ExpiryPolicy
    ) -> PreparedTable[ExpiredTable] | Unprepared[ExpiredTable]:
        """Write the table's metadata without the snapshots that expire now.

        Returns `Unprepared` if no snapshot expires, or if `main` has no such table.
        """
        if not isinstance(content, IcebergTable):
            return Unprepared(ExpiredTable(key.name, is_gone=True))
        location = content.metadata_location
        document = read_document(self._find_io(location), location)
        now_ms = _to_ms(self._clock())
        table = _root(key, content, document)
        table_roots = self._reader.find_table_roots(roots, [table])[key]
        retention = decide_retention(table.history, table_roots, policy, now_ms)
        result = _describe_result(table, document, retention)
        if not retention.expired_ids:
            return Unprepared(result)
        new_content = remove_snapshots(document, retention.kept_ids, now_ms)
        metadata = parse_metadata(location, new_content)
        _require_valid(table, metadata, retention, table_roots)
        new_location = self._write(document, metadata, new_content)
        return PreparedTable(
            content=replace(content, metadata_location=new_location),
            message=f"Expire {format_count(len(retention.expired_ids), 'snapshot')} of {key.name}",
            properties={LakeProperty.EXPIRED_SNAPSHOTS: str(len(retention.expired_ids))},
            discard=lambda: self._discard(new_location),
            result=replace(result, bytes_after=len(new_content)),
        )

    def _write(self, document: MetadataDocument, metadata: TableMetadata, content: bytes) -> str:
        """Write `content` as the table's next metadata file, and return the location of the file.

        `document` is the present metadata file, whose number is increased; `metadata` is the parsed
        `content`. If the write fails, the incomplete file is deleted and the error is raised. Nothing is
        committed.
        """
        self._catalog.record_prefixes(metadata)
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(metadata_version(document.location) + 1)
        try:
            write_document(self._find_io(location, metadata.properties), location, content)
        except Exception:
            self._discard(location)
            raise
        return location

    def _discard(self, location: str) -> None:
        """Delete a metadata file that is not in any commit.

        If that fails, the garbage collection deletes it.
        """
        try:
            self._find_io(location).delete(location)
        except OSError:
            return


def _require_existing(names: Collection[str], existing_names: Set[str]) -> None:
    for name in names:
        if name not in existing_names:
            raise TableMissing(f"Main has no table {name}.", table=name, hint="Check the name.")


def _root(key: ContentKey, content: IcebergTable, document: MetadataDocument) -> RootedTable:
    """Return the table of `document`, the metadata file of `content`, with its history.

    The history's current snapshot is the one that Nessie's content names, if the metadata still has it.
    """
    history = document.history
    if content.snapshot_id != history.current_id and content.snapshot_id in history.by_id:
        history = replace(history, current_id=content.snapshot_id)
    return RootedTable(key, content, document.table_uuid, history)


def _require_valid(
    table: RootedTable, metadata: TableMetadata, retention: SnapshotRetention, roots: TableRoots
) -> None:
    """Raise ExpiryInvalid if the new metadata is not as decided.

    It must have exactly the kept snapshots with their schemas, and all snapshots that something needs.
    PyIceberg has parsed `metadata`, so an error of this package's own writer is noticed.
    """
    new_ids = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    needed_ids = {
        reference.snapshot_id for reference in table.history.references.values()
    } | roots.bases.keys()
    if table.history.current_id is not None:
        needed_ids.add(table.history.current_id)
    if metadata.current_snapshot_id is not None:
        needed_ids.add(metadata.current_snapshot_id)
    needed_ids &= table.history.by_id.keys()
    schema_ids = {schema.schema_id for schema in metadata.schemas}
    lost_schema_ids = {one.schema_id for one in metadata.snapshots if one.schema_id is not None} - schema_ids
    if new_ids != retention.kept_ids or not needed_ids <= new_ids or lost_schema_ids:
        raise ExpiryInvalid(
            "The metadata without the expired snapshots would lack a snapshot or a schema that is needed.",
            table=table.key.name,
            branch=MAIN,
            hint="Nothing was changed. Report this with the table's metadata file.",
        )


def _describe_plan(table: RootedTable, size: int, retention: SnapshotRetention) -> PlannedTable:
    oldest = table.history.by_id.get(retention.oldest_id) if retention.oldest_id is not None else None
    return PlannedTable(
        table=table.key.name,
        metadata_location=table.content.metadata_location,
        snapshot_count=len(table.history.snapshots),
        expired_count=len(retention.expired_ids),
        metadata_bytes=size,
        oldest_id=retention.oldest_id,
        oldest_at=from_epoch_ms(oldest.timestamp_ms) if oldest is not None else None,
        kept_by=retention.kept_by,
        holder=retention.holder,
        given_up=retention.given_up,
    )


def _describe_result(
    table: RootedTable, document: MetadataDocument, retention: SnapshotRetention
) -> ExpiredTable:
    return ExpiredTable(
        table.key.name,
        expired_count=len(retention.expired_ids),
        kept_count=len(retention.kept_ids),
        bytes_before=len(document.text),
        bytes_after=len(document.text),
        given_up=retention.given_up,
    )


def _to_ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
