"""Asset `conjunction_risks`: the close approaches of each hour, with probabilities of collision.

An object's position comes from its fused track (its orbit as estimated from observations) if the track is
preferred, and otherwise from its element set.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import LakehouseResource, column_metadata, consumes, range_, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import MAX_ELEMENT_AGE_DAYS, radii_of
from branchlake_dagster.sda.assets.quarantine import QUARANTINED_OBJECTS, usable
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, OBJECT_ERRORS, published_errors
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.conjunctions.distributed import close_approaches
from branchlake_dagster.sda.conjunctions.risks import (
    RISK_SCHEMA,
    TRACK_ELEMENT_SCHEMA,
    TRACK_STATE_COLUMNS,
    ObjectStates,
    assess_batches,
    fit_track_elements,
)
from branchlake_dagster.sda.conjunctions.screening import Span
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, in_parts
from branchlake_dagster.sda.contracts import ConjunctionRisk
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.shipping import carried
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.sda.trust.radii import DEFAULT_RADIUS_M
from branchlake_dagster.sda.windows import window_of

GROUP = "conjunctions"
CONJUNCTION_RISKS = dg.AssetKey(["sda", "conjunction_risks"])
RISK_THRESHOLD_KM = 5.0
_DAY_MICROS = 86_400e6


class RiskConfig(dg.Config):
    """The run configuration: which approaches and objects count, and how the hour is divided into tasks."""

    threshold_km: float = Field(RISK_THRESHOLD_KM, gt=0, description="Largest miss distance kept, km.")
    max_element_age_days: float = Field(
        MAX_ELEMENT_AGE_DAYS,
        gt=0,
        description="Objects with older element sets are left out, unless they have a track.",
    )
    default_radius_m: float = Field(
        DEFAULT_RADIUS_M, gt=0, description="Radius of an object of unknown size, m."
    )
    tasks: int = Field(4, ge=1, description="Spark tasks that the hour is divided into.")


@dg.asset(
    key=CONJUNCTION_RISKS,
    group_name=GROUP,
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_WINDOWS,
    ins={
        "fused_tracks": dg.AssetIn(FUSED_TRACKS),
        "quarantined_objects": dg.AssetIn(QUARANTINED_OBJECTS),
        "catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue),
    },
    deps=[ELEMENT_ERRORS, OBJECT_ERRORS],
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | consumes(
        {FUSED_TRACKS: range_(optional=True), QUARANTINED_OBJECTS: range_(optional=True)}, on="window_start"
    )
    | column_metadata(ConjunctionRisk),
)
def conjunction_risks(
    context: dg.AssetExecutionContext,
    config: RiskConfig,
    fused_tracks: DataFrame,
    quarantined_objects: DataFrame,
    catalogue: DataFrame,
    lakehouse: LakehouseResource,
    gp: GpSource,
) -> DataFrame:
    """List pairs of objects that come close in the hour, with the probability of a collision.

    Positions come from preferred tracks, and otherwise from element sets. The whole hour is computed again
    when its tracks change. All numbers are rounded, so that the same observations, catalog and error model
    give the same rows.
    """
    start, end = window_of(context)
    objects = tracked_elements(catalogue, quarantined_objects)
    elements = Elements.from_arrow(objects.select(*Elements.COLUMNS).toArrow().sort_by("sat_no"))
    track_elements = elements_of_tracks(fused_tracks, objects)
    tables = lakehouse.catalog()
    radii, _ = radii_of(tables, gp, config.default_radius_m).get_radii(pl.Series(elements.sat_no))
    states = ObjectStates.build(elements, track_elements, published_errors(tables), radii.to_numpy())
    age_days = np.abs((start + end) // 2 - states.elements.epoch_micros) / _DAY_MICROS
    used = np.flatnonzero((age_days <= config.max_element_age_days) | (states.track_row >= 0))
    screened = states.elements.take(used)
    tasks = in_parts(Span.whole(start, end), Pairs.ALL, config.tasks)
    approaches = close_approaches(
        catalogue.sparkSession, Screening.of_all(screened, config.threshold_km), tasks
    )
    context.add_output_metadata(
        {
            "screened_objects": len(used),
            "left_out_as_stale": len(elements) - len(used),
            "objects_from_tracks": int((states.track_row >= 0).sum()),
        }
    )
    assess = carried(assess_batches(states, start))
    return approaches.mapInArrow(assess, from_arrow_schema(RISK_SCHEMA))


def tracked_elements(catalogue: DataFrame, quarantined_objects: DataFrame) -> DataFrame:
    """Return the tracked objects of the catalog without the quarantined ones, if that table exists."""
    if not quarantined_objects.columns:
        quarantined_objects = catalogue.select("sat_no").where("false")
    return usable(catalogue, quarantined_objects)


def elements_of_tracks(fused_tracks: DataFrame, objects: DataFrame) -> pa.Table:
    """Return element sets (`TRACK_ELEMENT_SCHEMA`) that are fitted to the preferred tracks.

    Args:
        fused_tracks: The hour's tracks.
        objects: The catalog's element sets. A track of an object that is not among them is left out.
    """
    # A table from before this column existed has no preferred tracks; the next run of its hour adds them.
    if "is_preferred" not in fused_tracks.columns:
        return TRACK_ELEMENT_SCHEMA.empty_table()
    states = fused_tracks.where("is_preferred").select(*TRACK_STATE_COLUMNS)
    joined = states.withColumnRenamed("epoch", "track_epoch").join(
        objects.withColumnRenamed("epoch", "element_epoch").select(
            "sat_no", "element_epoch", *ELEMENT_FIELDS
        ),
        on="sat_no",
    )
    return joined.mapInArrow(carried(fit_track_elements), from_arrow_schema(TRACK_ELEMENT_SCHEMA)).toArrow()
