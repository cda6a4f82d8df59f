"""Asset group ``catalogue``: the files of the providers, as rows.

A pull is one downloaded file, and a partition of these assets. It has either element sets (GP data: the
parameters of an object's orbit at one time, its epoch) or satellite catalog entries (name, owner, launch,
decay). The partition key is the pull's snapshot id.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator

import dagster as dg
from pyspark.sql import DataFrame

from branchlake_dagster import BranchSparkResource, column_metadata, table_metadata
from branchlake_dagster.sda.assets.upkeep import OF_SNAPSHOTS, OWNERS
from branchlake_dagster.sda.contracts import ElementSet, RejectedRecord, SatelliteEntry
from branchlake_dagster.sda.partitions import gp_snapshots, pulls_of
from branchlake_dagster.sda.pulls.distributed import parse_pulls
from branchlake_dagster.sda.sources import GpSource

GROUP = "catalogue"
ELEMENT_SETS = dg.AssetKey(["sda", "element_sets"])
REJECTED_RECORDS = dg.AssetKey(["sda", "rejected_records"])
SATELLITE_ENTRIES = dg.AssetKey(["sda", "satellite_entries"])
CATALOGUE = dg.AssetKey(["sda", "catalogue"])


@dg.multi_asset(
    name="gp_ingest",
    group_name=GROUP,
    partitions_def=gp_snapshots,
    # A backfill of many pulls is one run, because all of them change the same catalog.
    backfill_policy=dg.BackfillPolicy.single_run(),
    outs={
        "element_sets": dg.AssetOut(
            key=ELEMENT_SETS,
            description="Element sets of one GP snapshot (CCSDS OMM names and units), one row per object.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(ElementSet),
        ),
        "rejected_records": dg.AssetOut(
            key=REJECTED_RECORDS,
            description="Unusable records of a snapshot, with text, field and reason.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(RejectedRecord),
        ),
        "satellite_entries": dg.AssetOut(
            key=SATELLITE_ENTRIES,
            description="Entries of one satellite catalog, one row per object. GP snapshots have no entries.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(SatelliteEntry),
        ),
    },
)
def gp_ingest(
    context: dg.AssetExecutionContext, gp: GpSource, spark: BranchSparkResource
) -> Iterator[dg.Output[DataFrame]]:
    """Read one file per pull. A damaged record becomes a row of ``rejected_records``.

    A file that cannot be read at all fails the run. Files are fetched and unpacked in the run's process, and
    parsed on Spark's workers.
    """
    files = [(snapshot, gp.read(snapshot)) for snapshot in pulls_of(context)]
    source = ", ".join(file.source for _, file in files)
    with parse_pulls(spark.spark_session, files, gp.limits()) as rows:
        context.log.info(
            f"{source}: element sets {rows.element_set_count}, satellite entries {rows.entry_count}, "
            f"rejected records {sum(rows.reasons.values())}."
        )
        yield dg.Output(
            rows.element_sets, "element_sets", metadata={"source": source, "objects": rows.element_set_count}
        )
        yield dg.Output(
            rows.rejected_records, "rejected_records", metadata={"source": source, "reasons": rows.reasons}
        )
        yield dg.Output(
            rows.satellite_entries,
            "satellite_entries",
            metadata={"source": source, "objects": rows.entry_count},
        )
