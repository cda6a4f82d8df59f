"""Group ``catalogue``: GP snapshots, their rejected records, and the current element set per object."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator

import dagster as dg
import polars as pl
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.fusion.assets.upkeep import OF_SNAPSHOTS, OWNERS
from branchlake_dagster.fusion.contracts import ElementSet, RejectedRecord
from branchlake_dagster.fusion.gp.read import read_catalogue
from branchlake_dagster.fusion.partitions import gp_snapshots
from branchlake_dagster.fusion.sources import GpSource

GROUP = "catalogue"
ELEMENT_SETS = dg.AssetKey(["sda", "element_sets"])
REJECTED_RECORDS = dg.AssetKey(["sda", "rejected_records"])
CATALOGUE = dg.AssetKey(["sda", "catalogue"])
CATALOGUE_TABLE = "nessie.sda.catalogue"


@dg.multi_asset(
    name="gp_ingest",
    group_name=GROUP,
    partitions_def=gp_snapshots,
    outs={
        "element_sets": dg.AssetOut(
            key=ELEMENT_SETS,
            description="Element sets of one GP snapshot (CCSDS OMM names and units), one row per object.",
            owners=OWNERS,
            kinds={"iceberg", "polars"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(ElementSet),
        ),
        "rejected_records": dg.AssetOut(
            key=REJECTED_RECORDS,
            description="Records of a GP snapshot that are no usable element set, with text and reason.",
            owners=OWNERS,
            kinds={"iceberg", "polars"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(RejectedRecord),
        ),
    },
)
def gp_ingest(context: dg.AssetExecutionContext, gp: GpSource) -> Iterator[dg.Output[pl.DataFrame]]:
    """Read one GP file. A damaged record is a row of ``rejected_records``, a damaged file an error."""
    snapshot = context.partition_key
    file = gp.read(snapshot)
    parsed = read_catalogue(file.content, file.source, collected_at=file.collected_at, limits=gp.limits())
    context.log.info(
        f"{file.source}: element sets {parsed.elements.height}, rejected records {parsed.rejected.height}."
    )
    key = pl.lit(snapshot).alias("snapshot_id")
    yield dg.Output(
        parsed.elements.select(key, pl.all(), pl.lit(file.data_mode).alias("data_mode")),
        "element_sets",
        metadata={"source": file.source, "objects": parsed.elements.height},
    )
    reasons = parsed.rejected.group_by("reason").len().sort("reason")
    yield dg.Output(
        parsed.rejected.select(key, pl.all()),
        "rejected_records",
        metadata={"source": file.source, "reasons": dict(reasons.iter_rows())},
    )


@dg.asset(
    key=CATALOGUE,
    group_name=GROUP,
    partitions_def=gp_snapshots,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_SNAPSHOTS,
    metadata=table_metadata(write_mode="upsert", keys=("sat_no",), require_checks=True)
    | column_metadata(ElementSet),
)
def catalogue(element_sets: DataFrame) -> DataFrame:
    """Current element set per object: the newest epoch wins, in whatever order snapshots arrive.

    Only rows that change something are handed to the upsert: from one snapshot to the next most objects
    keep their elements. An equal epoch replaces only within the same snapshot, which is a corrected file.
    """
    return newer_than(element_sets, _current(element_sets.sparkSession))


def _current(session: SparkSession) -> DataFrame | None:
    """The catalogue on the run's branch; the input's own session stands there."""
    return session.table(CATALOGUE_TABLE) if session.catalog.tableExists(CATALOGUE_TABLE) else None


def newer_than(element_sets: DataFrame, current: DataFrame | None) -> DataFrame:
    """The element sets that the current catalogue lacks or holds with an older epoch."""
    if current is None:
        return element_sets
    known = current.select(
        "sat_no", F.col("epoch").alias("known_epoch"), F.col("snapshot_id").alias("known_snapshot")
    )
    newer = F.col("known_epoch").isNull() | (F.col("epoch") > F.col("known_epoch"))
    corrected = (F.col("epoch") == F.col("known_epoch")) & (F.col("snapshot_id") == F.col("known_snapshot"))
    return (
        element_sets.join(known, on="sat_no", how="left")
        .where(newer | corrected)
        .select(*element_sets.columns)
    )
