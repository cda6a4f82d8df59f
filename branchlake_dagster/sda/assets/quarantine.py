"""The asset of the catalogue's objects whose propagated states in a window cannot be true."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, GROUP
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import QuarantinedObject
from branchlake_dagster.sda.orbits.quarantine import QUARANTINE_INPUT, QUARANTINE_SCHEMA, quarantine_batches
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.shipping import carried
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
    """Objects whose states in the window cannot be true; the screening leaves them out.

    SGP4 gives absurd states without an error for elements gone stale. A few of them are no reason to do
    without an hour of all others.
    """
    start, end = window_of(context)
    # A published catalogue is few files, which would be few tasks.
    objects = tracked(catalogue).select(*QUARANTINE_INPUT).repartition("sat_no")
    return objects.mapInArrow(carried(quarantine_batches(start, end)), from_arrow_schema(QUARANTINE_SCHEMA))


def of_tracked(catalogue: pa.Table) -> pa.Table:
    """The rows of objects that may be propagated; all of a table of before, which has no states yet."""
    if "state" not in catalogue.column_names:
        return catalogue
    return catalogue.filter(pc.equal(catalogue.column("state"), "tracked"))


def tracked(catalogue: DataFrame) -> DataFrame:
    """The objects of the catalogue that may be propagated."""
    # A table of before has no states; the next pull brings them.
    return catalogue.where("state = 'tracked'") if "state" in catalogue.columns else catalogue


def usable(catalogue: DataFrame, quarantined: DataFrame) -> DataFrame:
    """The tracked objects of the catalogue without a window's quarantined ones."""
    return tracked(catalogue).join(quarantined.select("sat_no"), on="sat_no", how="left_anti")
