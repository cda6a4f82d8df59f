"""Group ``catalogue``: the registry that pulls are merged into."""

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
"""Objects that are looked up by number; of more all rows are read."""

# What it read must still be so when it is published: two runs that merge at once would each leave out the
# other's sets, and the rule across tables would be checked on neither result.
_SERIALIZABLE: Literal["serializable"] = "serializable"
_EXCLUSIVE = "registry"
"""So they work one after the other, and none in vain."""


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
            description="Every object: when it was seen, what became of it, whose it is.",
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
            description="What became of each pulled element set: winner, losers, conflicts.",
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
    """Merge pulls into the catalogue, in whatever order they come, and say what became of each object.

    Where nothing has changed nothing is written; otherwise catalogue and objects are written whole, as the
    run holds them anyway (`_Tables.changed`).
    """
    tables = _Tables(lakehouse, context.run)
    # Where these are all partitions that Dagster knows, the inputs are whole tables.
    mine = pl.col("snapshot_id").is_in(pulls_of(context))
    pulled = _of_columns(element_sets.filter(mine), PULLED_COLUMNS)
    entries = _of_columns(satellite_entries.filter(mine), DATED_ENTRY_COLUMNS)
    before = tables.read(CATALOGUE, CATALOGUE_COLUMNS)
    objects_before = tables.read(OBJECTS, OBJECT_COLUMNS)
    merged = merge_pulled_sets(before, pulled, tables.all_pulls_of)
    objects = update_objects(objects_before, merged.winners, pulled, entries)
    catalogue = merged.winners.join(objects.select("sat_no", "state"), on="sat_no", how="left").select(
        list(CATALOGUE_COLUMNS)
    )
    changed = _changed(before, catalogue)
    changed_objects = _changed(objects_before, objects)
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
    """The registry's own tables as the run's branch has them; what is read here is in its read set."""

    def __init__(self, lakehouse: LakehouseResource, run: dg.DagsterRun) -> None:
        self._catalog = lakehouse.catalog()
        self._run = run

    def read(
        self,
        key: dg.AssetKey,
        columns: Mapping[str, pl.DataType],
        rows: BooleanExpression | None = None,
    ) -> pl.DataFrame:
        """All rows, or those of a filter; a table that is not there yet has none."""
        try:
            table = self._catalog.load_table(tuple(key.path))
        except NoSuchTableError:
            return pl.DataFrame(schema=columns)
        there = {field.name for field in table.schema().fields}
        scan = table.scan(
            row_filter=rows if rows is not None else AlwaysTrue(),
            selected_fields=tuple(name for name in columns if name in there),
        )
        return _of_columns(pl.DataFrame(pl.from_arrow(scan.to_arrow())), columns)

    def changed(self, key: dg.AssetKey, rows: pl.DataFrame, whole: pl.DataFrame) -> pl.DataFrame | None:
        """Bring a table to `whole`: what is left for the IO manager to upsert, None for nothing.

        The run holds the whole table anyway, and a MERGE in Spark would read it again to write the same
        files. So it is written here, unless it must be made first or gets new columns.
        """
        try:
            table = self._catalog.load_table(tuple(key.path))
        except NoSuchTableError:
            return rows
        names = [field.name for field in table.schema().fields]
        if not rows.height or set(names) != set(whole.columns):
            return rows
        # As the IO manager marks what it writes (docs/architecture.md).
        marks = {
            "branchlake.run_id": self._run.run_id,
            "branchlake.root_run_id": self._run.root_run_id or self._run.run_id,
            "branchlake.asset": key.to_user_string(),
            "branchlake.write_mode": "replace_table",
        }
        table.overwrite(whole.select(names).to_arrow(), snapshot_properties=marks)
        return None

    def all_pulls_of(self, objects: pl.Series) -> pl.DataFrame:
        """All rows of objects in all pulls."""
        chosen = In("sat_no", objects.to_list()) if objects.len() <= _FEW else None
        found = self.read(ELEMENT_SETS, PULLED_COLUMNS, chosen)
        return found.filter(pl.col("sat_no").is_in(objects.implode()))

    def history_since(self, pulled: pl.DataFrame) -> pl.DataFrame:
        """What the history has of the pulled sets' epochs, as `SET_KEY`."""
        columns = {name: PULLED_COLUMNS[name] for name in SET_KEY}
        first = pulled["epoch"].min()
        if not isinstance(first, datetime):
            return pl.DataFrame(schema=columns)
        return self.read(ELEMENT_HISTORY, columns, GreaterThanOrEqual("epoch", first.isoformat()))


def _of_columns(frame: pl.DataFrame, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The columns with their types. Tables of before said neither source nor time of collection.

    Both are in the snapshot's id; where it has no time, the epoch stands for it, which is believed then.
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


def _changed(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Rows of `after` that `before` does not have as they are."""
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
    """Owner, launch, decay and size of each object by the period in which the satellite catalogue said so."""
    by_object = select_dated_entries(satellite_entries).repartition("sat_no")
    return by_object.mapInArrow(carried(build_periods), from_arrow_schema(period_schema()))
