"""Merge the small manifests of a table into few manifests, in a snapshot that changes no row.

A publication that is rebased adds one manifest for each snapshot that it replays, and every reader of the
table opens all manifests. The merged manifests list the same files with the same sequence numbers. For
consumers and rebases the snapshot is a compaction without files, which they skip.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.expiry.forward_commit import ForwardCommit, PreparedTable, Unprepared
from branchlake_dagster.history.manifests import read_manifests
from branchlake_dagster.internals.pyiceberg import apply_updates, build_manifest_rewrite
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import Content, ContentKey, IcebergTable
from branchlake_dagster.publication.replay import IcebergTableFormat, StagedState

_MAX_FORMAT_VERSION = 2
"""The newest format version whose manifests PyIceberg writes."""


@dataclass(frozen=True)
class RewrittenManifests:
    """The outcome for one table. Counts are of data manifests.

    `commit` is the hash of the commit on `main`. It is None if the table has fewer manifests than the
    minimum, if merging would not reduce their number, if the table's format version is above 2, if `main` has
    no such table any more, or if an error occurred.
    """

    table: str
    commit: str | None = None
    count_before: int = 0
    count_after: int = 0
    error: Exception | None = None


class ManifestRewriter:
    """Merges manifests of tables on `main`. Several rewriters may work at the same time."""

    def __init__(self, client: NessieClient, catalog: NessieCatalog) -> None:
        self._client = client
        self._catalog = catalog
        self._tables = IcebergTableFormat(catalog)

    @classmethod
    def of_lake(cls, lake: Lakehouse) -> ManifestRewriter:
        """Create the rewriter of a lake."""
        return cls(lake.nessie, lake.catalog())

    def run(
        self, tables: Collection[str] | None = None, *, min_count: int = 50
    ) -> tuple[RewrittenManifests, ...]:
        """Merge the manifests of tables that have at least `min_count` data manifests, one commit per table.

        Args:
            tables: Dotted names of tables on `main`; None for all tables. Other names are ignored.
            min_count: Tables with fewer data manifests are not changed.

        Returns one result per table, sorted by key. An error of one table is stored in its result, and the
        other tables are processed. Reads the manifest list of each table, and all manifests of the tables
        that are rewritten.
        """
        entries = self._client.entries(MAIN, filter="entry.contentType == 'ICEBERG_TABLE'")
        keys = sorted(entry.key for entry in entries if tables is None or entry.key.name in tables)
        results = []
        for key in keys:
            try:
                results.append(self.rewrite_table(key, min_count=min_count))
            except Exception as error:  # noqa: BLE001 - PyIceberg raises ValueError where a manifest is missing
                results.append(RewrittenManifests(key.name, error=error))
        return tuple(results)

    def rewrite_table(self, key: ContentKey, *, min_count: int) -> RewrittenManifests:
        """Merge the manifests of one table. Safe to call again after any failure.

        Raises ExpiryContended, ExpiryUnknown, and the errors of Nessie and of the storage.
        """
        forward = ForwardCommit(self._client, key, lambda content: self._prepare(key, content, min_count))
        result, commit = forward.run()
        return replace(result, commit=commit)

    def _prepare(
        self, key: ContentKey, content: Content | None, min_count: int
    ) -> PreparedTable[RewrittenManifests] | Unprepared[RewrittenManifests]:
        if not isinstance(content, IcebergTable):
            return Unprepared(RewrittenManifests(key.name))
        state = self._tables.open(key, content)
        count = _count_data_manifests(state.table)
        result = RewrittenManifests(key.name, count_before=count, count_after=count)
        if count < max(2, min_count) or state.table.metadata.format_version > _MAX_FORMAT_VERSION:
            return Unprepared(result)
        self._catalog.record_prefixes(state.table.metadata)
        staged = StagedState(state.base, state.table)
        try:
            updates = build_manifest_rewrite(state.table, written_paths=staged.written_paths)
            table = state.table
            metadata = apply_updates(table.metadata, updates)
            staged.table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
            new_count = _count_data_manifests(staged.table)
            if new_count >= count:
                self._tables.discard(staged)
                return Unprepared(result)
            new_content = self._tables.write(staged, content.content_id)
        except Exception:
            self._tables.discard(staged)
            raise
        return PreparedTable(
            content=new_content,
            message=f"Merge {count} manifests of {key.name} into {new_count}",
            properties={},
            discard=lambda: self._tables.discard(staged),
            result=replace(result, count_after=new_count),
        )


def _count_data_manifests(table: Table) -> int:
    snapshot = table.metadata.current_snapshot()
    if snapshot is None:
        return 0
    manifests = read_manifests(table.io, snapshot)
    return sum(manifest.content == ManifestContent.DATA for manifest in manifests)
