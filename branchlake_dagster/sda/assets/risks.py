"""Asset `conjunction_risks`: the close approaches of each hour, with probabilities of collision.

An object's position comes from its fused track (its orbit as estimated from observations) if the track is
preferred, and otherwise from its element set.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from datetime import timedelta

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field
from pyiceberg.catalog import Catalog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import LakehouseResource, column_metadata, consumes, range_, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import MAX_ELEMENT_AGE_DAYS, radii_of
from branchlake_dagster.sda.assets.quarantine import QUARANTINED_OBJECTS, select_usable
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, OBJECT_ERRORS, published_errors
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.conjunctions.distributed import close_approaches
from branchlake_dagster.sda.conjunctions.hours import EARLIER_COLUMNS, HourOwnership
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
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.sda.trust.radii import DEFAULT_RADIUS_M
from branchlake_dagster.sda.windows import window_of

GROUP = "conjunctions"
CONJUNCTION_RISKS = dg.AssetKey(["sda", "conjunction_risks"])
RISK_THRESHOLD_KM = 5.0
_DAY_MICROS = 86_400e6
_HOUR = timedelta(hours=1)


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
        {FUSED_TRACKS: range_(optional=True), QUARANTINED_OBJECTS: range_(optional=True)},
        on="window_start",
        # An hour leaves out the approaches that the hour before has.
        widen=(_HOUR, timedelta()),
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
    when its tracks or those of the hour before change. All numbers are rounded, so that the same
    observations, catalog and error model give the same rows.
    """
    start, end = window_of(context)
    fused_tracks, quarantined_objects = (
        rows_of_hour(one, start) for one in (fused_tracks, quarantined_objects)
    )
    objects = tracked_elements(catalogue, quarantined_objects)
    elements = Elements.from_arrow(objects.select(*Elements.COLUMNS).toArrow().sort_by("sat_no"))
    track_elements = elements_of_tracks(fused_tracks, objects)
    tables = lakehouse.catalog()
    radii, _ = radii_of(tables, gp, config.default_radius_m).get_radii(pl.Series(elements.sat_no))
    states = ObjectStates.build(elements, track_elements, published_errors(tables), radii.to_numpy())
    age_days = np.abs((start + end) // 2 - states.elements.epoch_micros) / _DAY_MICROS
    used = np.flatnonzero((age_days <= config.max_element_age_days) | (states.track_row >= 0))
    screened = states.elements.take(used)
    session, screening = catalogue.sparkSession, Screening.of_all(screened, config.threshold_km)
    tasks = in_parts(Span.whole(start, end), Pairs.ALL, config.tasks)
    ownership = HourOwnership.build(start, end, load_earlier_risks(session, tables, start))
    context.add_output_metadata(
        {
            "screened_objects": len(used),
            "left_out_as_stale": len(elements) - len(used),
            "objects_from_tracks": int((states.track_row >= 0).sum()),
        }
    )
    in_hour, in_overlap = (
        map_in_arrow(
            close_approaches(session, screening, some), assess_batches(states, start, select_own), RISK_SCHEMA
        )
        for some, select_own in (
            (tasks, ownership.select_in_hour),
            ([ownership.overlap_task], ownership.select_in_overlap),
        )
    )
    return in_hour.unionByName(in_overlap)


def rows_of_hour(windowed: DataFrame, start: int) -> DataFrame:
    """Return the rows of one window. A frame without columns, of a table that does not exist, stays as it is.

    `start` is the start of the window, UTC microseconds since 1970.
    """
    if not windowed.columns:
        return windowed
    return windowed.where(F.col("window_start") == F.timestamp_micros(F.lit(start)))


def load_earlier_risks(session: SparkSession, tables: Catalog, start: int) -> pa.Table | None:
    """Load the risks of the hour before `start`: `EARLIER_COLUMNS`. None if the table does not exist.

    `start` is in UTC microseconds since 1970. The run's branch has them as they were published on `main` when
    the run began.
    """
    if not tables.table_exists(tuple(CONJUNCTION_RISKS.path)):
        return None
    risks = session.table(".".join(("nessie", *CONJUNCTION_RISKS.path)))
    hour_before = start - _HOUR // timedelta(microseconds=1)
    return rows_of_hour(risks, hour_before).select(*EARLIER_COLUMNS).toArrow()


def tracked_elements(catalogue: DataFrame, quarantined_objects: DataFrame) -> DataFrame:
    """Return the tracked objects of the catalog without the quarantined ones, if that table exists."""
    if not quarantined_objects.columns:
        quarantined_objects = catalogue.select("sat_no").where("false")
    return select_usable(catalogue, quarantined_objects)


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
    return map_in_arrow(joined, fit_track_elements, TRACK_ELEMENT_SCHEMA).toArrow()
