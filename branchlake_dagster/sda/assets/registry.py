"""Assets of the registry, in the group ``catalogue``: pulls are merged into one catalog of all objects."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Literal

import dagster as dg
import polars as pl
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, GreaterThanOrEqual, In
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import LakehouseResource, column_metadata, table_metadata
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
from branchlake_dagster.sda.registry.life_cycle import OBJECT_COLUMNS, update_objects
from branchlake_dagster.sda.registry.merge import PULLED_COLUMNS, SET_KEY, merge_pulled_sets, select_new_sets
from branchlake_dagster.sda.registry.periods import (
    DATED_ENTRY_COLUMNS,
    build_periods,
    period_schema,
    select_dated_entries,
)
from branchlake_dagster.sda.registry.sources import source_name
from branchlake_dagster.sda.shipping import carried
from branchlake_dagster.sda.sources import snapshot_time

OBJECTS = dg.AssetKey(["sda", "objects"])
ELEMENT_HISTORY = dg.AssetKey(["sda", "element_history"])
MERGE_AUDIT = dg.AssetKey(["sda", "catalog_merge_audit"])
SATELLITES = dg.AssetKey(["sda", "satellites"])

CATALOGUE_COLUMNS = {**PULLED_COLUMNS, "state": pl.String()}
_FEW = 2_000
"""The largest number of objects that are looked up by catalog number. For more, all rows are read."""

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
            kinds={"iceberg", "polars"},
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
            kinds={"iceberg", "polars"},
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
            kinds={"iceberg", "polars"},
            metadata=table_metadata(
                write_mode="append", require_checks=True, isolation=_SERIALIZABLE, exclusive=_EXCLUSIVE
            )
            | column_metadata(ElementSet),
        ),
        "catalog_merge_audit": dg.AssetOut(
            key=MERGE_AUDIT,
            description="The outcome of each pulled element set: winner, losers, conflicts.",
            owners=OWNERS,
            kinds={"iceberg", "polars"},
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
    element_sets: pl.DataFrame,
    satellite_entries: pl.DataFrame,
) -> Iterator[dg.Output[pl.DataFrame | None]]:
    """Merge pulls into the catalog, and record what became of each pulled element set.

    The order in which pulls arrive does not matter. Tables without changes are not written. Otherwise catalog
    and objects are written whole, because the run holds all rows anyway (`_Tables.changed`).
    """
    tables = _Tables(lakehouse, context.run)
    # If the run covers all partitions that Dagster knows, the inputs are whole tables.
    mine = pl.col("snapshot_id").is_in(pulls_of(context))
    pulled = _conform_columns(element_sets.filter(mine), PULLED_COLUMNS)
    entries = _conform_columns(satellite_entries.filter(mine), DATED_ENTRY_COLUMNS)
    before = tables.read(CATALOGUE, CATALOGUE_COLUMNS)
    objects_before = tables.read(OBJECTS, OBJECT_COLUMNS)
    merged = merge_pulled_sets(before, pulled, tables.all_pulls_of)
    objects = update_objects(objects_before, merged.winners, pulled, entries)
    catalogue = merged.winners.join(objects.select("sat_no", "state"), on="sat_no", how="left").select(
        list(CATALOGUE_COLUMNS)
    )
    changed = _changed_rows(before, catalogue)
    changed_objects = _changed_rows(objects_before, objects)
    news = select_new_sets(tables.history_since(pulled), pulled)
    outcomes = merged.audit.group_by("outcome").len().sort("outcome")
    states = objects.group_by("state").len().sort("state")
    context.log.info(
        f"{pulled.height} element sets pulled: {news.height} were never seen, {changed.height} of "
        f"{catalogue.height} objects of the catalogue change, {merged.lookup_count} were looked up."
    )
    yield dg.Output(
        tables.changed(CATALOGUE, changed, catalogue),
        "catalogue",
        metadata={"changed": changed.height, "objects": catalogue.height},
    )
    yield dg.Output(
        tables.changed(OBJECTS, changed_objects, objects),
        "objects",
        metadata={"changed": changed_objects.height, "states": dict(states.iter_rows())},
    )
    yield dg.Output(news, "element_history", metadata={"new": news.height})
    yield dg.Output(
        merged.audit,
        "catalog_merge_audit",
        metadata={
            "outcomes": dict(outcomes.iter_rows()),
            "conflicts": int(merged.audit["conflict"].sum()),
        },
    )


class _Tables:
    """The registry's own tables on the run's branch. Tables that are read here enter the run's read set."""

    def __init__(self, lakehouse: LakehouseResource, run: dg.DagsterRun) -> None:
        self._catalog = lakehouse.catalog()
        self._run = run

    def read(
        self,
        key: dg.AssetKey,
        columns: Mapping[str, pl.DataType],
        rows: BooleanExpression | None = None,
    ) -> pl.DataFrame:
        """Return all rows, or those of a filter. A table that does not exist yet gives an empty frame."""
        try:
            table = self._catalog.load_table(tuple(key.path))
        except NoSuchTableError:
            return pl.DataFrame(schema=columns)
        there = {field.name for field in table.schema().fields}
        scan = table.scan(
            row_filter=rows if rows is not None else AlwaysTrue(),
            selected_fields=tuple(name for name in columns if name in there),
        )
        return _conform_columns(pl.DataFrame(pl.from_arrow(scan.to_arrow())), columns)

    def changed(self, key: dg.AssetKey, rows: pl.DataFrame, whole: pl.DataFrame) -> pl.DataFrame | None:
        """Bring a table to the rows `whole`. Return the rows that the IO manager must upsert, or None.

        `rows` are the rows of `whole` that differ from the table. The run holds the whole table anyway, and a
        MERGE in Spark would read it again to write the same files. So the table is overwritten here. If the
        table does not exist, gets new columns, or has no changed rows, `rows` is returned for the IO manager.
        """
        try:
            table = self._catalog.load_table(tuple(key.path))
        except NoSuchTableError:
            return rows
        names = [field.name for field in table.schema().fields]
        if not rows.height or set(names) != set(whole.columns):
            return rows
        # The snapshot properties that the IO manager also sets (docs/architecture.md).
        marks = {
            "branchlake.run_id": self._run.run_id,
            "branchlake.root_run_id": self._run.root_run_id or self._run.run_id,
            "branchlake.asset": key.to_user_string(),
            "branchlake.write_mode": "replace_table",
        }
        table.overwrite(whole.select(names).to_arrow(), snapshot_properties=marks)
        return None

    def all_pulls_of(self, objects: pl.Series) -> pl.DataFrame:
        """Return all element sets of the given catalog numbers, from all pulls."""
        chosen = In("sat_no", objects.to_list()) if objects.len() <= _FEW else None
        found = self.read(ELEMENT_SETS, PULLED_COLUMNS, chosen)
        return found.filter(pl.col("sat_no").is_in(objects.implode()))

    def history_since(self, pulled: pl.DataFrame) -> pl.DataFrame:
        """Return the keys (`SET_KEY`) of the stored history from the earliest pulled epoch on."""
        columns = {name: PULLED_COLUMNS[name] for name in SET_KEY}
        first = pulled["epoch"].min()
        if not isinstance(first, datetime):
            return pl.DataFrame(schema=columns)
        return self.read(ELEMENT_HISTORY, columns, GreaterThanOrEqual("epoch", first.isoformat()))


def _conform_columns(frame: pl.DataFrame, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return a frame with exactly these columns and types.

    Older tables have neither `source` nor `collected_at`. Both are derived from the snapshot's id. If the id
    has no time, the epoch is used as the time of collection.
    """
    absent = [pl.lit(None, dtype=kind).alias(n) for n, kind in columns.items() if n not in frame.columns]
    frame = frame.with_columns(absent).select(pl.col(n).cast(kind) for n, kind in columns.items())
    if (
        not {"collected_at", "snapshot_id", "source"} <= columns.keys()
        or not frame["collected_at"].null_count()
    ):
        return frame
    ids = frame["snapshot_id"].unique().to_list()
    times = {one: snapshot_time(one) for one in ids}
    made = pl.col("snapshot_id").replace_strict(times, return_dtype=columns["collected_at"])
    whose = pl.col("snapshot_id").replace_strict(
        {one: source_name(one) for one in ids}, return_dtype=pl.String
    )
    return frame.with_columns(
        collected_at=pl.coalesce("collected_at", made, "epoch"), source=pl.coalesce("source", whose)
    )


def _changed_rows(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `after` that `before` does not contain with equal values."""
    return after.join(before, on=after.columns, how="anti", nulls_equal=True)


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
    return by_object.mapInArrow(carried(build_periods), from_arrow_schema(period_schema()))
