"""Group ``fused_tracks``: one estimated state per object and window."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import column_metadata, consumes, table_metadata
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.observations import OBSERVATIONS
from branchlake_dagster.sda.assets.quarantine import tracked
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import FusedTrack
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, TRACK_SCHEMA, fuse_batches
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.shipping import carried
from branchlake_dagster.sda.windows import window_of

FUSED_TRACKS = dg.AssetKey(["sda", "fused_tracks"])


@dg.asset(
    key=FUSED_TRACKS,
    group_name="fused_tracks",
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_WINDOWS,
    ins={
        "observations": dg.AssetIn(OBSERVATIONS),
        "associations": dg.AssetIn(ASSOCIATIONS),
        "catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue),
    },
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | consumes({ASSOCIATIONS: "range"}, on="sensor_timestamp")
    | column_metadata(FusedTrack),
)
def fused_tracks(
    context: dg.AssetExecutionContext,
    observations: DataFrame,
    associations: DataFrame,
    catalogue: DataFrame,
) -> DataFrame:
    """State and covariance of each object that the window's associated observations determine.

    Observations with the result `claimed` are not used, because their object has no usable prediction.
    """
    start, end = window_of(context)
    assigned = associations.where("result IN ('confirmed', 'reassigned')").select("observation_id", "sat_no")
    joined = (
        observations.drop("sat_no")
        .join(assigned, on="observation_id")
        .join(tracked(catalogue).select(*ELEMENT_INPUT), on="sat_no")
    )
    return joined.repartition("sat_no").mapInArrow(
        carried(fuse_batches(start, end)), from_arrow_schema(TRACK_SCHEMA)
    )
