"""Asset `conjunctions`: the list of predicted close approaches of all objects in the next hours."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import (
    BranchSparkResource,
    LakehouseResource,
    column_metadata,
    consumes,
    table_metadata,
)
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.assets.registry import OBJECTS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, OBJECT_ERRORS, published_errors
from branchlake_dagster.sda.assets.upkeep import OF_SNAPSHOTS, OWNERS
from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, PAIR
from branchlake_dagster.sda.conjunctions.distributed import list_conjunctions
from branchlake_dagster.sda.conjunctions.listing import CONJUNCTION_SCHEMA, ListBuilder
from branchlake_dagster.sda.conjunctions.rescreening import EarlierLimits, plan
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Kind, Span
from branchlake_dagster.sda.contracts import Conjunction
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import whole_catalogue
from branchlake_dagster.sda.reports.conjunction_report import (
    draw_altitudes,
    draw_distance,
    draw_geometry,
    format_approaches,
    select_top_approaches,
)
from branchlake_dagster.sda.reports.pictures import to_markdown
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.sources import GpSource, snapshot_time
from branchlake_dagster.sda.trust.radii import DEFAULT_RADIUS_M, RADIUS_SOURCES, ObjectRadii

CONJUNCTIONS = dg.AssetKey(["sda", "conjunctions"])
LIST_THRESHOLD_KM = 5.0
HORIZON_H = 24.0
MAX_ELEMENT_AGE_DAYS = 14.0
_DAY_MICROS = 86_400_000_000
_ASSET = "branchlake.asset"
"""The key that branchlake's writes add to a snapshot's summary."""
_EVENT_COLUMNS = (*PAIR, "kind", "tca", "miss_distance_km")
"""The columns by which events of an earlier list are found again."""


class ConjunctionsConfig(dg.Config):
    """The run configuration of the screening: its time span, its threshold, and objects to leave out."""

    horizon_h: float = Field(HORIZON_H, gt=0, le=24 * 14, description="Hours that are screened.")
    threshold_km: float = Field(LIST_THRESHOLD_KM, gt=0, description="Largest miss distance kept, km.")
    max_element_age_days: float = Field(
        MAX_ELEMENT_AGE_DAYS, gt=0, description="Objects with older element sets are left out."
    )
    tasks: int = Field(12, ge=1, description="Spark tasks that the time is divided into.")
    default_radius_m: float = Field(
        DEFAULT_RADIUS_M, gt=0, description="Radius of an object of unknown size, m."
    )


@dg.asset(
    key=CONJUNCTIONS,
    group_name="conjunctions",
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_SNAPSHOTS,
    ins={"changed": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue)},
    deps=[ELEMENT_ERRORS, OBJECT_ERRORS, OBJECTS],
    metadata=table_metadata(write_mode="replace_table", require_checks=True)
    | consumes({CATALOGUE: "rows"}, when_removed="ignore", when_lost="rebuild")
    | column_metadata(Conjunction),
)
def conjunctions(
    context: dg.AssetExecutionContext,
    config: ConjunctionsConfig,
    changed: pa.Table,
    gp: GpSource,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
) -> Iterator[dg.Output[DataFrame]]:
    """List the predicted close approaches of all objects, from the time of the newest GP snapshot on.

    If the catalog changes, only two parts are screened again: pairs with a changed object, and the hours that
    the earlier list did not cover. The result is the same as that of a full screening.
    """
    tables = lakehouse.catalog()
    catalogue = of_tracked(tables.load_table(tuple(CATALOGUE.path)).scan().to_arrow())
    start = newest_collection(catalogue)
    span = Span.whole(start, start + max(1, round(config.horizon_h * 60)) * MINUTE)
    current = Elements.from_arrow(catalogue.sort_by("sat_no"))
    fresh = np.abs(start - current.epoch_micros) <= config.max_element_age_days * _DAY_MICROS
    elements = current.take(np.flatnonzero(fresh))
    # On the run's branch the table may have the list of an earlier attempt of this step.
    earlier = read_earlier_list(spark.spark_session, lakehouse.base_catalog())
    if earlier is not None and not earlier.is_own:
        context.log.warning("Another writer has changed the list's rows, so all pairs are screened again.")
    planned = plan(
        elements,
        span,
        config.threshold_km,
        earlier=None if earlier is None else earlier.select_usable(config.max_element_age_days),
        changed=changed.column("sat_no").unique().to_numpy(),
        parts=config.tasks,
    )
    context.log.info(f"{len(elements):,} objects, {planned.why}, in {len(planned.tasks)} tasks.")
    builder = ListBuilder(
        elements,
        span,
        config.threshold_km,
        config.max_element_age_days,
        planned.rescreening,
        published_errors(tables),
        radii_of(tables, gp, config.default_radius_m).take(elements.sat_no),
    )
    rows = list_conjunctions(
        spark.spark_session, planned, None if earlier is None else earlier.frame, builder
    ).persist()
    try:
        counts = count_rows(rows)
        top_approaches = map_in_arrow(rows, select_top_batches, CONJUNCTION_SCHEMA).toArrow()
        # One file, sorted: the list is read as a whole.
        yield dg.Output(
            rows.repartition(1).sortWithinPartitions("tca", "event_id"),
            metadata={
                "screening": planned.why,
                "objects": len(elements),
                "left_out_as_stale": int((~fresh).sum()),
                **counts,
                **draw_conjunctions(select_top_approaches(pl.DataFrame(top_approaches)), elements, catalogue),
            },
        )
    finally:
        rows.unpersist()


@dataclass(frozen=True)
class EarlierList:
    """The list of the last run.

    ``frame`` has the columns of `LIST_INPUT_SCHEMA` except ``is_earlier``, and ``header`` (at most one row)
    the columns of the table. If ``is_own`` is false, another writer has changed its rows; if ``is_complete``
    is false, the table lacks a column of `ENCOUNTER_SCHEMA`.
    """

    frame: DataFrame
    header: pl.DataFrame
    is_own: bool
    is_complete: bool

    def select_usable(self, max_element_age_days: float) -> EarlierLimits | None:
        """Return the limits of the list for the plan of a screening; None if its rows cannot be reused.

        They cannot be reused if another writer has changed them, if the table lacks a column, or for a reason
        that `list_limits` names.
        """
        if not self.is_own or not self.is_complete:
            return None
        return list_limits(self.header, max_element_age_days)


def read_earlier_list(session: SparkSession, tables: Catalog) -> EarlierList | None:
    """Open the list of the last run. None if it does not exist or cannot be continued.

    Events of a table without ids cannot be continued. `session` reads at the run's branch, and `tables` is
    the catalog at the commit from which the branch started.
    """
    try:
        table = tables.load_table(tuple(CONJUNCTIONS.path))
    except NoSuchTableError:
        return None
    snapshot = table.metadata.current_snapshot_id
    if snapshot is None:
        return None
    # Spark computes the list again if it loses the persisted rows. By then, the run may have replaced the
    # rows of the table, so the snapshot is named.
    stored = session.read.option("versionAsOf", str(snapshot)).table(f"nessie.{'.'.join(CONJUNCTIONS.path)}")
    # The columns of the snapshot: the table may have got others since.
    types, columns = from_arrow_schema(ENCOUNTER_SCHEMA), {*stored.columns}
    if not {"event_id", "first_reported", *_EVENT_COLUMNS} <= columns:
        return None
    frame = stored.select(
        *(
            F.col(field.name) if field.name in columns else F.lit(None).cast(field.dataType).alias(field.name)
            for field in types
        ),
        "event_id",
        "first_reported",
    )
    return EarlierList(
        frame,
        pl.DataFrame(table.scan(limit=1).to_arrow()),
        as_made(table),
        {*ENCOUNTER_SCHEMA.names} <= columns,
    )


def count_rows(rows: DataFrame) -> dict[str, int]:
    """Count close approaches for the asset's page: all, by kind, new ones, and those with a probability.

    The two radii of each row are counted by their source.
    """
    radius_names = {f"radius_by_{source.replace(' ', '_')}": source for source in RADIUS_SOURCES}
    row = rows.agg(
        F.count("*").alias("close_approaches"),
        *(F.count_if(F.col("kind") == kind.value).alias(f"of_kind_{kind.value}") for kind in Kind),
        F.count_if(F.col("first_reported") == F.col("screened_from")).alias("new"),
        *(
            (
                F.count_if(F.col("sat1_radius_source") == source)
                + F.count_if(F.col("sat2_radius_source") == source)
            ).alias(name)
            for name, source in radius_names.items()
        ),
        F.count("collision_probability").alias("with_probability"),
    ).head()
    return {} if row is None else {name: int(count) for name, count in row.asDict().items()}


def select_top_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Select the first encounters of each batch, as `select_top_approaches`. They include those of all."""
    for batch in batches:
        top = select_top_approaches(pl.DataFrame(pl.from_arrow(batch)))
        yield from top.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(CONJUNCTION_SCHEMA).to_batches()


def as_made(table: Table) -> bool:
    """Return whether a branchlake run wrote the current rows of the list's table.

    Compactions (snapshots with the operation `replace`) are skipped, because they change no rows. If another
    writer changed rows, unchanged pairs must not be taken over from the table: a deleted row would be missing
    from every later list.
    """
    known = {one.snapshot_id: one for one in table.metadata.snapshots}
    if table.metadata.current_snapshot_id is None:
        return True  # nothing was ever close
    head = table.metadata.current_snapshot()
    while head is not None and head.summary is not None and head.summary.operation is Operation.REPLACE:
        head = known.get(head.parent_snapshot_id or -1)
    return head is not None and head.summary is not None and _ASSET in head.summary.additional_properties


def radii_of(tables: Catalog, gp: GpSource, default_m: float) -> ObjectRadii:
    """Load the objects' radii from the radius table, if one is configured, and the registry's size columns.

    Args:
        tables: The catalog of the run's branch.
        gp: The resource that reads the radius table.
        default_m: The radius of an object whose size neither source has, m.
    """
    known: dict[str, pl.DataFrame] = {}
    table = gp.radius_table()
    if table is not None:
        known["table"] = table
    with contextlib.suppress(NoSuchTableError):
        objects = tables.load_table(tuple(OBJECTS.path))
        names = ("sat_no", "rcs_size", "rcs_m2")
        if {*names} <= {*objects.schema().column_names}:
            known["sizes"] = pl.DataFrame(objects.scan(selected_fields=names).to_arrow())
    return ObjectRadii(default_m, **known)


def draw_conjunctions(
    first: pl.DataFrame, elements: Elements, catalogue: pa.Table
) -> dict[str, dg.MarkdownMetadataValue]:
    """Return metadata with the first encounters as a table, and charts of altitudes, distance and geometry.

    Args:
        first: The first encounters of the list, as `select_top_approaches` returns them.
        elements: The screened element sets.
        catalogue: The catalog, from which the names of objects are shown.
    """
    shown = {
        "altitudes": dg.MetadataValue.md(to_markdown(draw_altitudes(elements), "Objects by altitude")),
    }
    if first.height:
        names = {}
        if "object_name" in catalogue.column_names:
            columns = (catalogue.column(one).to_pylist() for one in ("sat_no", "object_name"))
            names = dict(zip(*columns, strict=True))
        shown["top_conjunctions"] = dg.MetadataValue.md(format_approaches(first, names))
        nearest = draw_distance(first.row(0, named=True), elements)
        shown["top_distance"] = dg.MetadataValue.md(to_markdown(nearest, "Distance of the first of them"))
        geometry = to_markdown(draw_geometry(first, elements), "Relative geometry of the first of them")
        shown["top_geometry"] = dg.MetadataValue.md(geometry)
    return shown


def newest_collection(catalogue: pa.Table) -> int:
    """Return the newest collection time of a catalog's snapshots, UTC microseconds, cut to a whole minute.

    The time of a snapshot is that in its id, else the ``collected_at`` of its rows, else `REFERENCE_EPOCH`.

    Args:
        catalogue: Rows of the catalog, with ``snapshot_id``. Older tables have no ``collected_at``.
    """
    times = [snapshot_time(name) for name in catalogue.column("snapshot_id").unique().to_pylist()]
    known_times = [time for time in times if time is not None]
    if len(known_times) < len(times) and "collected_at" in catalogue.column_names:
        rows = pl.DataFrame(catalogue.select(["snapshot_id", "collected_at"])).drop_nulls()
        by_snapshot = rows.group_by("snapshot_id").agg(pl.col("collected_at").max())
        known_times += [time for name, time in by_snapshot.iter_rows() if snapshot_time(name) is None]
    return int(max(known_times, default=REFERENCE_EPOCH).timestamp()) // 60 * MINUTE


def list_limits(found: pl.DataFrame, max_element_age_days: float) -> EarlierLimits | None:
    """Return the limits of the earlier list for the plan of a screening; None if it cannot be reused.

    It cannot be reused if it is empty, or if it was made with another `max_element_age_days`, because it then
    left out other objects.

    Args:
        found: A row of the list or all rows. All have the same time and limits.
        max_element_age_days: The limit of the new screening.
    """
    if found.is_empty():
        return None
    first = found.row(0, named=True)
    if first.get("max_element_age_days") != max_element_age_days:
        return None
    at = found.select(pl.col("screened_from", "screened_until").dt.epoch("us"))
    return EarlierLimits(
        int(at["screened_from"][0]), int(at["screened_until"][0]), float(first["threshold_km"])
    )
