"""Asset `conjunctions`: the list of predicted close approaches of all objects in the next hours."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import contextlib
from collections.abc import Sequence

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

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
from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA
from branchlake_dagster.sda.conjunctions.distributed import close_approaches, close_approaches_here
from branchlake_dagster.sda.conjunctions.identity import identified
from branchlake_dagster.sda.conjunctions.rescreening import Earlier, Plan, plan
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
from branchlake_dagster.sda.sources import GpSource, snapshot_time
from branchlake_dagster.sda.trust.assessment import assess_approaches
from branchlake_dagster.sda.trust.radii import DEFAULT_RADIUS_M, RADIUS_SOURCES, ObjectRadii

CONJUNCTIONS = dg.AssetKey(["sda", "conjunctions"])
LIST_THRESHOLD_KM = 5.0
HORIZON_H = 24.0
MAX_ELEMENT_AGE_DAYS = 14.0
_DAY_MICROS = 86_400_000_000
_ASSET = "branchlake.asset"
"""The key that branchlake's writes add to a snapshot's summary."""


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
    kinds={"iceberg", "numpy"},
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
) -> pl.DataFrame:
    """List the predicted close approaches of all objects, from the time of the newest GP snapshot on.

    If the catalog changes, only two parts are screened again: pairs with a changed object, and the hours that
    the earlier list did not cover. The result is the same as that of a full screening.
    """
    tables = lakehouse.catalog()
    catalogue = of_tracked(tables.load_table(tuple(CATALOGUE.path)).scan().to_arrow())
    start = newest_snapshot(catalogue.column("snapshot_id").unique().to_pylist())
    span = Span.whole(start, start + max(1, round(config.horizon_h * 60)) * MINUTE)
    current = Elements.from_arrow(catalogue.sort_by("sat_no"))
    fresh = start - current.epoch_micros <= config.max_element_age_days * _DAY_MICROS
    elements = current.take(np.flatnonzero(fresh))
    earlier, ours = None, True
    with contextlib.suppress(NoSuchTableError):
        table = tables.load_table(tuple(CONJUNCTIONS.path))
        earlier, ours = pl.DataFrame(table.scan().to_arrow()), as_made(table)
    if not ours:
        context.log.warning("Another writer has changed the list's rows, so all pairs are screened again.")
    # Rows of a list that lacks a column cannot be kept.
    whole = earlier is not None and ours and set(ENCOUNTER_SCHEMA.names) <= set(earlier.columns)
    planned = plan(
        elements,
        span,
        config.threshold_km,
        earlier=earlier_list(earlier if whole else None, config.max_element_age_days),
        changed=changed.column("sat_no").unique().to_numpy(),
        parts=config.tasks,
    )
    context.log.info(f"{len(elements):,} objects, {planned.why}, in {len(planned.tasks)} tasks.")
    if planned.few:
        found = close_approaches_here(planned.screening, planned.tasks)
    else:
        found = close_approaches(spark.spark_session, planned.screening, planned.tasks).toArrow()
    rows = with_kept(pl.DataFrame(found), earlier, planned)
    result = assess_approaches(
        listed(rows, earlier, span, config.threshold_km, config.max_element_age_days),
        elements,
        published_errors(tables),
        radii_of(tables, gp, config.default_radius_m),
    )
    context.add_output_metadata(
        {
            "screening": planned.why,
            "objects": len(elements),
            "left_out_as_stale": int((~fresh).sum()),
            "close_approaches": result.height,
            **{f"of_kind_{kind.value}": int((result["kind"] == kind.value).sum()) for kind in Kind},
            "new": int((result["first_reported"] == result["screened_from"]).sum()),
            **{
                f"radius_by_{source.replace(' ', '_')}": sum(
                    int((result[f"sat{k}_radius_source"] == source).sum()) for k in (1, 2)
                )
                for source in RADIUS_SOURCES
            },
            "with_probability": int(result["collision_probability"].is_not_null().sum()),
            **pictures(result, elements, catalogue),
        }
    )
    return result


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


def with_kept(found: pl.DataFrame, earlier: pl.DataFrame | None, planned: Plan) -> pl.DataFrame:
    """Return the approaches found now, and the rows of the earlier list that are the same in the new one."""
    if earlier is None or not len(planned.kept):
        return found
    kept = earlier[planned.kept].select(pl.col(name).cast(kind) for name, kind in found.schema.items())
    return pl.concat([found, kept])


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


def pictures(
    result: pl.DataFrame, elements: Elements, catalogue: pa.Table
) -> dict[str, dg.MarkdownMetadataValue]:
    """Return metadata with the top of the list as a table, and charts of altitudes, distance and geometry."""
    shown = {
        "altitudes": dg.MetadataValue.md(to_markdown(draw_altitudes(elements), "Objects by altitude")),
    }
    first = select_top_approaches(result)
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


def newest_snapshot(names: Sequence[str]) -> int:
    """Return the newest collection time among GP snapshot names, in UTC microseconds, cut to a whole minute.

    Names without a time count as `REFERENCE_EPOCH`.
    """
    newest = max((snapshot_time(name) or REFERENCE_EPOCH for name in names), default=REFERENCE_EPOCH)
    return int(newest.timestamp()) // 60 * MINUTE


def earlier_list(found: pl.DataFrame | None, max_element_age_days: float) -> Earlier | None:
    """Return the earlier list for the planning of a screening, or None if its rows cannot be kept.

    Rows cannot be kept if the table is empty, or if it was made with another `max_element_age_days`: it then
    left out other objects.
    """
    if found is None or found.is_empty():
        return None
    first = found.row(0, named=True)
    if first.get("max_element_age_days") != max_element_age_days:
        return None
    at = found.select(pl.col("tca", "screened_from", "screened_until").dt.epoch("us"))
    return Earlier(
        int(at["screened_from"][0]),
        int(at["screened_until"][0]),
        float(first["threshold_km"]),
        found.select("sat1_object_designator", "sat2_object_designator").to_numpy(),
        at["tca"].to_numpy(),
        (found["kind"] == Kind.TOGETHER.value).to_numpy(),
    )


def listed(
    found: pl.DataFrame,
    earlier: pl.DataFrame | None,
    span: Span,
    threshold_km: float,
    max_element_age_days: float = MAX_ELEMENT_AGE_DAYS,
) -> pl.DataFrame:
    """Return close approaches with the columns of `Conjunction`, sorted by time and event id.

    Args:
        found: Close approaches with the columns of `ENCOUNTER_SCHEMA`.
        earlier: The rows of the earlier list, from which known events keep their ids; or None.
        span: The screened time.
        threshold_km: The largest miss distance, km. It becomes a column.
        max_element_age_days: The largest age of an element set, days. It becomes a column.
    """
    moment = pl.Datetime("us", "UTC")
    begin, end = (pl.lit(one).cast(moment) for one in (span.start, span.end))
    age = [
        ((pl.col("tca") - pl.col(f"sat{k}_element_epoch")).dt.total_microseconds() / _DAY_MICROS).alias(
            f"sat{k}_element_age_days"
        )
        for k in (1, 2)
    ]
    named = identified(found.with_columns(pl.col(pl.Datetime).cast(moment)), earlier, reported=begin)
    return named.select(
        *found.columns,
        "event_id",
        *age,
        "first_reported",
        "previous_miss_distance_km",
        begin.alias("screened_from"),
        end.alias("screened_until"),
        pl.lit(threshold_km).alias("threshold_km"),
        pl.lit(max_element_age_days).alias("max_element_age_days"),
    ).sort("tca", "event_id")
