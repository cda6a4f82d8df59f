"""Assets of the registry, in the group ``catalogue``: pulls are merged into one catalog of all objects."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import dagster as dg
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import (
    LakehouseResource,
    WorkerTable,
    column_metadata,
    commit_worker_files,
    table_metadata,
)
from branchlake_dagster.errors import Unsupported
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, ELEMENT_SETS, GROUP, SATELLITE_ENTRIES
from branchlake_dagster.sda.assets.upkeep import OF_SNAPSHOTS, OWNERS
from branchlake_dagster.sda.contracts import (
    CatalogueEntry,
    ElementSet,
    MergeOutcome,
    RegisteredObject,
    Satellite,
)
from branchlake_dagster.sda.partitions import gp_snapshots, pulls_of
from branchlake_dagster.sda.registry.distributed import (
    AUDIT_ROWS,
    CATALOGUE_ROWS,
    COLUMNS_OF_TABLE,
    CURRENT,
    ENTRIES,
    HISTORY,
    HISTORY_ROWS,
    OBJECT_ROWS,
    OBJECTS_BEFORE,
    PULLED,
    MergeReport,
    PulledSnapshots,
    dump_sightings,
    load_sightings,
    merge_pulls,
)
from branchlake_dagster.sda.registry.periods import (
    arrow_schema,
    build_periods,
    period_schema,
    select_dated_entries,
)
from branchlake_dagster.sda.registry.table_files import (
    column_bound,
    delete_files,
    find_foreign_columns,
    list_files,
    open_table,
    partition_value,
)
from branchlake_dagster.sda.shipping import map_in_arrow

OBJECTS = dg.AssetKey(["sda", "objects"])
ELEMENT_HISTORY = dg.AssetKey(["sda", "element_history"])
MERGE_AUDIT = dg.AssetKey(["sda", "catalog_merge_audit"])
SATELLITES = dg.AssetKey(["sda", "satellites"])

_KEYS = {
    CATALOGUE_ROWS: CATALOGUE,
    OBJECT_ROWS: OBJECTS,
    HISTORY_ROWS: ELEMENT_HISTORY,
    AUDIT_ROWS: MERGE_AUDIT,
}
"""The tables by the names of `COLUMNS_OF_TABLE`."""

_SIGHTINGS = "sda.latest_sightings"
"""The entry of a snapshot's summary of `objects` with the latest sightings of its rows."""
_MAX_CHARACTERS = 10_000
"""The length of that entry is limited; without it, a run computes the sightings."""

# The tables that a run read must be unchanged when it is published. Otherwise two concurrent merges would
# each leave out the other's sets, and the check across tables would not cover the combined result.
_SERIALIZABLE: Literal["serializable"] = "serializable"
_EXCLUSIVE = "registry"
"""The name under which runs of the registry exclude each other: they run one after the other."""


@dg.multi_asset(
    name="registry",
    group_name=GROUP,
    partitions_def=gp_snapshots,
    backfill_policy=dg.BackfillPolicy.single_run(),
    ins={
        "element_sets": dg.AssetIn(ELEMENT_SETS),
        "satellite_entries": dg.AssetIn(SATELLITE_ENTRIES),
    },
    outs={
        "catalogue": dg.AssetOut(
            key=CATALOGUE,
            description="Current element set per object of all sources, and the object's state.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(
                write_mode="upsert",
                keys=("sat_no",),
                require_checks=True,
                isolation=_SERIALIZABLE,
                exclusive=_EXCLUSIVE,
            )
            | column_metadata(CatalogueEntry),
        ),
        "objects": dg.AssetOut(
            key=OBJECTS,
            description="Every object: when it was seen, its state and its owner.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(
                write_mode="upsert",
                keys=("sat_no",),
                require_checks=True,
                isolation=_SERIALIZABLE,
                exclusive=_EXCLUSIVE,
            )
            | column_metadata(RegisteredObject),
        ),
        "element_history": dg.AssetOut(
            key=ELEMENT_HISTORY,
            description="Every different element set that any source has issued, as it was first ingested.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            metadata=table_metadata(
                write_mode="append", require_checks=True, isolation=_SERIALIZABLE, exclusive=_EXCLUSIVE
            )
            | column_metadata(ElementSet),
        ),
        "catalog_merge_audit": dg.AssetOut(
            key=MERGE_AUDIT,
            description="The outcome of each pulled element set: winner, losers, conflicts.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            metadata=table_metadata(
                partition_by="snapshot_id", require_checks=True, isolation=_SERIALIZABLE, exclusive=_EXCLUSIVE
            )
            | column_metadata(MergeOutcome),
        ),
    },
)
def registry(
    context: dg.AssetExecutionContext,
    lakehouse: LakehouseResource,
    element_sets: DataFrame,
    satellite_entries: DataFrame,
) -> Iterator[dg.Output[None]]:
    """Merge pulls into the catalog, and record what became of each pulled element set.

    The order in which pulls arrive does not matter. Spark's workers merge the pulls and write the files of
    all tables. Here the files are committed, table by table, if a row changes. Catalog and objects are then
    replaced whole, because the merge has all their rows anyway.
    """
    tables = _RegistryTables(lakehouse, context)
    # If the run covers all partitions that Dagster knows, the inputs are whole tables.
    is_mine = F.col("snapshot_id").isin(pulls_of(context))
    pulls = tables.find_pulls(pulls_of(context))
    report = tables.merge(pulls, element_sets.where(is_mine), satellite_entries.where(is_mine))
    counts = report.counts
    context.log.info(
        f"{counts['pulled']} element sets pulled: {counts['new']} were never seen, {counts['changed_sets']}"
        f" of {counts['catalogue']} objects of the catalogue change, {report.looked_up} were looked up."
    )
    tables.replace(CATALOGUE_ROWS, report, counts["changed_sets"] + counts["withdrawn_sets"])
    yield dg.Output(
        None, "catalogue", metadata={"changed": counts["changed_sets"], "objects": counts["catalogue"]}
    )
    tables.replace(OBJECT_ROWS, report, counts["changed_objects"])
    yield dg.Output(
        None, "objects", metadata={"changed": counts["changed_objects"], "states": report.counts_of("state")}
    )
    tables.append(HISTORY_ROWS, report)
    yield dg.Output(None, "element_history", metadata={"new": counts["new"]})
    tables.replace_snapshots(AUDIT_ROWS, report, pulls_of(context))
    yield dg.Output(
        None,
        "catalog_merge_audit",
        metadata={"outcomes": report.counts_of("outcome"), "conflicts": counts["conflicts"]},
    )


class _RegistryTables:
    """The registry's own tables on the run's branch. Tables that are loaded here enter the run's read set."""

    def __init__(self, lakehouse: LakehouseResource, context: dg.AssetExecutionContext) -> None:
        self._catalog = lakehouse.catalog()
        self._lakehouse = lakehouse
        self._context = context
        self._tables = {
            name: open_table(
                self._catalog,
                tuple(key.path),
                arrow_schema(COLUMNS_OF_TABLE[name]),
                "snapshot_id" if name == AUDIT_ROWS else None,
            )
            for name, key in _KEYS.items()
        }
        for table in self._tables.values():
            self._catalog.record_prefixes(table.metadata)  # workers write files before the first commit

    def find_pulls(self, snapshot_ids: Sequence[str]) -> PulledSnapshots:
        """Find the element sets and entries of these snapshots by the metadata of files. Costs no query."""
        table = self._catalog.load_table(tuple(ELEMENT_SETS.path))
        files = list_files(table, "snapshot_id", snapshot_ids)
        epochs = [column_bound(table, file, "epoch", is_upper=False) for file in files]
        collected_at: dict[str, datetime | None] = {}
        for file in files:
            name, time = partition_value(table, file, "snapshot_id"), _latest_collection(table, file)
            earlier = collected_at.get(name, time)
            collected_at[name] = None if time is None or earlier is None else max(time, earlier)
        entries = self._catalog.load_table(tuple(SATELLITE_ENTRIES.path))
        stated_at = [
            _latest_collection(entries, file) for file in list_files(entries, "snapshot_id", snapshot_ids)
        ]
        return PulledSnapshots(
            collected_at,
            max((time for time in stated_at if time is not None), default=None),
            None if None in epochs else min((epoch for epoch in epochs if epoch is not None), default=None),
        )

    def merge(self, pulls: PulledSnapshots, pulled: DataFrame, entries: DataFrame) -> MergeReport:
        """Merge pulls with the tables. Spark's workers write the results to files."""
        session = pulled.sparkSession

        def read(key: dg.AssetKey, condition: str = "true") -> DataFrame:
            return session.table(f"nessie.{'.'.join(key.path)}").where(condition)

        known_sets = (
            "true" if pulls.first_epoch is None else f"epoch >= timestamp_micros({pulls.first_epoch})"
        )
        stored = {CATALOGUE_ROWS: CURRENT, OBJECT_ROWS: OBJECTS_BEFORE, HISTORY_ROWS: HISTORY}
        inputs = {PULLED: pulled, ENTRIES: entries} | {
            input_name: read(_KEYS[name], known_sets if input_name == HISTORY else "true")
            for name, input_name in stored.items()
            if self._tables[name].current_snapshot() is not None
            # Without pulled sets, no earlier set is asked for.
            and (input_name != HISTORY or pulls.collected_at)
        }
        worker_tables = {
            name: WorkerTable.from_table(table, self._lakehouse.lakehouse.settings)
            for name, table in self._tables.items()
        }
        snapshot = self._tables[OBJECT_ROWS].current_snapshot()
        # Another writer's snapshot has none.
        sightings = snapshot.summary.get(_SIGHTINGS) if snapshot and snapshot.summary else None
        report = merge_pulls(
            inputs,
            pulls,
            worker_tables,
            lambda: read(ELEMENT_SETS),
            load_sightings(sightings) if sightings else None,
        )
        for name, file in report.unused_files:
            delete_files(self._tables[name], [file])
        return report

    def replace(self, name: str, report: MergeReport, changed_rows: int) -> None:
        """Replace all rows of a table, if any row changes. Otherwise delete the files that were written."""
        table = self._tables[name]
        if changed_rows:
            removed = list_files(table)
            if foreign := find_foreign_columns(table, removed, COLUMNS_OF_TABLE[name]):
                raise Unsupported(
                    f"Column {foreign[0]} of table {_KEYS[name].to_user_string()} has values, and the"
                    " registry replaces all rows of this table.",
                    table=".".join(_KEYS[name].path),
                    hint="Keep your own columns in a table of your own, with sat_no as its key.",
                )
            sightings = dump_sightings(report.latest)
            more = (
                {_SIGHTINGS: sightings} if name == OBJECT_ROWS and len(sightings) <= _MAX_CHARACTERS else {}
            )
            self._commit(name, report.files[name], removed, more)
        else:
            delete_files(table, report.files[name])

    def append(self, name: str, report: MergeReport) -> None:
        """Add the new rows of a table."""
        if report.files[name]:
            self._commit(name, report.files[name], [])

    def replace_snapshots(self, name: str, report: MergeReport, snapshot_ids: Sequence[str]) -> None:
        """Replace the rows of these snapshots in a table that is partitioned by them."""
        removed = list_files(self._tables[name], "snapshot_id", snapshot_ids)
        if removed or report.files[name]:
            self._commit(name, report.files[name], removed)

    def _commit(
        self,
        name: str,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        properties: Mapping[str, str] | None = None,
    ) -> None:
        commit_worker_files(
            self._context,
            self._lakehouse,
            self._tables[name],
            key=_KEYS[name],
            added=added,
            removed=removed,
            properties=properties,
        )


def _latest_collection(table: Table, file: DataFile) -> datetime | None:
    micros = column_bound(table, file, "collected_at", is_upper=True)
    return None if micros is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros)


@dg.asset(
    key=SATELLITES,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    ins={"satellite_entries": dg.AssetIn(SATELLITE_ENTRIES, partition_mapping=dg.AllPartitionMapping())},
    metadata=table_metadata(write_mode="replace_table", require_checks=True) | column_metadata(Satellite),
)
def satellites(satellite_entries: DataFrame) -> DataFrame:
    """List each object's owner, launch, decay and size, by the period in which the catalog stated them."""
    by_object = select_dated_entries(satellite_entries).repartition("sat_no")
    return map_in_arrow(by_object, build_periods, period_schema())
