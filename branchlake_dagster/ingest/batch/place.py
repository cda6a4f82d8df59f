"""Where a batch works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.ingest.batch.before import KnownTables, with_new_names
from branchlake_dagster.ingest.declaring.families import Names
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.replay import IcebergTables


@dataclass(frozen=True)
class Place:
    """Where a batch works: a branch, its catalogue and sessions, and who it is.

    `origin` goes into the summary of each snapshot, `properties` into each commit.
    """

    lake: Lakehouse
    branch: str
    catalog: NessieCatalog
    session: Callable[[], SparkSession]
    run_id: str
    origin: Mapping[str, str]
    properties: Mapping[str, str]
    trims: bool = False
    """Whether old snapshots are taken out of tables that have many. A replay would not carry that."""

    def with_new_names(
        self, known: KnownTables, names: Names, incarnations: Mapping[str, str], tables: IcebergTables
    ) -> KnownTables:
        """`with_new_names` on this branch."""
        space = self.lake.settings.default_namespace
        return with_new_names(known, names, incarnations, self.lake.nessie, self.catalog, space, tables)
