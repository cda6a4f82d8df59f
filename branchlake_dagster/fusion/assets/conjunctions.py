"""Group ``conjunctions``: close approaches within a window."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.fusion.assets.catalogue import CATALOGUE
from branchlake_dagster.fusion.assets.quarantine import QUARANTINED_OBJECTS, usable
from branchlake_dagster.fusion.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.fusion.conjunctions.arrow import CANDIDATE_SCHEMA, screen_batches
from branchlake_dagster.fusion.conjunctions.screening import STEP_S, THRESHOLD_KM
from branchlake_dagster.fusion.contracts import ConjunctionCandidate
from branchlake_dagster.fusion.orbits.propagation import Elements
from branchlake_dagster.fusion.partitions import whole_catalogue, windows
from branchlake_dagster.fusion.shipping import carried
from branchlake_dagster.fusion.windows import window_of

CONJUNCTION_CANDIDATES = dg.AssetKey(["sda", "conjunction_candidates"])


class ScreeningConfig(dg.Config):
    """What counts as a close approach and how the window is divided."""

    threshold_km: float = Field(THRESHOLD_KM, gt=0, description="Largest miss distance kept, km.")
    chunks: int = Field(4, ge=1, description="Spark tasks a window is divided into.")


@dg.asset(
    key=CONJUNCTION_CANDIDATES,
    group_name="conjunctions",
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_WINDOWS,
    ins={
        "catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue),
        "quarantined_objects": dg.AssetIn(QUARANTINED_OBJECTS),
    },
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | column_metadata(ConjunctionCandidate),
)
def conjunction_candidates(
    context: dg.AssetExecutionContext,
    config: ScreeningConfig,
    catalogue: DataFrame,
    quarantined_objects: DataFrame,
) -> DataFrame:
    """Encounters of all catalogue objects closer than the threshold, by their element sets alone."""
    start, end = window_of(context)
    objects = usable(catalogue, quarantined_objects)
    elements = Elements.from_arrow(objects.select(*Elements.COLUMNS).toArrow().sort_by("sat_no"))
    cells = -(-(end - start) // round(STEP_S * 1e6))
    size = -(-cells // config.chunks)
    ranges = [(first, min(size, cells - first)) for first in range(0, cells, size)]
    frame = catalogue.sparkSession.createDataFrame(ranges, "first_cell long, cells long")
    screened = screen_batches(elements, start=start, step_s=STEP_S, threshold_km=config.threshold_km)
    return frame.repartition(len(ranges), "first_cell").mapInArrow(
        carried(screened), from_arrow_schema(CANDIDATE_SCHEMA)
    )
