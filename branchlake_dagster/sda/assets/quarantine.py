"""Asset `quarantined_objects`: catalog objects whose predicted positions in an hour cannot be true."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, GROUP
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import QuarantinedObject
from branchlake_dagster.sda.orbits.quarantine import QUARANTINE_INPUT, QUARANTINE_SCHEMA, quarantine_batches
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.windows import window_of

QUARANTINED_OBJECTS = dg.AssetKey(["sda", "quarantined_objects"])


@dg.asset(
    key=QUARANTINED_OBJECTS,
    group_name=GROUP,
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_WINDOWS,
    ins={"catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue)},
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | column_metadata(QuarantinedObject),
)
def quarantined_objects(context: dg.AssetExecutionContext, catalogue: DataFrame) -> DataFrame:
    """List the objects whose predicted states in the window cannot be true. The screening leaves them out.

    SGP4, the standard model that predicts positions from element sets, returns absurd states without an error
    if the elements are too old. A few such objects do not block the hour's results for all others.
    """
    start, end = window_of(context)
    # A published catalog has few files, which would give few tasks.
    objects = select_tracked(catalogue).select(*QUARANTINE_INPUT).repartition("sat_no")
    return map_in_arrow(objects, quarantine_batches(start, end), QUARANTINE_SCHEMA)


def of_tracked(catalogue: pa.Table) -> pa.Table:
    """Return the catalog rows with the state `select_tracked`, whose positions may be predicted.

    A table that was written before the column `state` existed is returned whole.
    """
    if "state" not in catalogue.column_names:
        return catalogue
    return catalogue.filter(pc.equal(catalogue.column("state"), "tracked"))


def select_tracked(catalogue: DataFrame) -> DataFrame:
    """Return the catalog rows with the state `select_tracked`, as `of_tracked` does for an Arrow table."""
    # A table that was written before this column existed has no states; the next pull adds them.
    return catalogue.where("state = 'tracked'") if "state" in catalogue.columns else catalogue


def select_usable(catalogue: DataFrame, quarantined: DataFrame) -> DataFrame:
    """Return the tracked objects of the catalog without those that are quarantined in a window."""
    return select_tracked(catalogue).join(quarantined.select("sat_no"), on="sat_no", how="left_anti")
