"""Asset group ``catalogue``: the files of the providers, as rows.

A pull is one downloaded file, and a partition of these assets. It has either element sets (GP data: the
parameters of an object's orbit at one time, its epoch) or satellite catalog entries (name, owner, launch,
decay). The partition key is the pull's snapshot id.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.upkeep import OF_SNAPSHOTS, OWNERS
from branchlake_dagster.sda.contracts import ElementSet, RejectedRecord, SatelliteEntry
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.rules import REJECTED_COLUMNS
from branchlake_dagster.sda.partitions import gp_snapshots, pulls_of
from branchlake_dagster.sda.registry.merge import PULLED_COLUMNS
from branchlake_dagster.sda.registry.satcat import ENTRY_COLUMNS, is_satcat, read_satcat
from branchlake_dagster.sda.registry.sources import source_name
from branchlake_dagster.sda.sources import GpFile, GpSource

GROUP = "catalogue"
ELEMENT_SETS = dg.AssetKey(["sda", "element_sets"])
REJECTED_RECORDS = dg.AssetKey(["sda", "rejected_records"])
SATELLITE_ENTRIES = dg.AssetKey(["sda", "satellite_entries"])
CATALOGUE = dg.AssetKey(["sda", "catalogue"])

_AT = pl.Datetime("us", "UTC")
_EMPTY = {
    "element_sets": PULLED_COLUMNS,
    "rejected_records": {"snapshot_id": pl.String(), **REJECTED_COLUMNS},
    "satellite_entries": {"snapshot_id": pl.String(), **ENTRY_COLUMNS, "collected_at": _AT},
}


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
            kinds={"iceberg", "polars"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(ElementSet),
        ),
        "rejected_records": dg.AssetOut(
            key=REJECTED_RECORDS,
            description="Unusable records of a snapshot, with text, field and reason.",
            owners=OWNERS,
            kinds={"iceberg", "polars"},
            freshness_policy=OF_SNAPSHOTS,
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(RejectedRecord),
        ),
        "satellite_entries": dg.AssetOut(
            key=SATELLITE_ENTRIES,
            description="Entries of one satellite catalog, one row per object. GP snapshots have no entries.",
            owners=OWNERS,
            kinds={"iceberg", "polars"},
            metadata=table_metadata(partition_by="snapshot_id", require_checks=True)
            | column_metadata(SatelliteEntry),
        ),
    },
)
def gp_ingest(context: dg.AssetExecutionContext, gp: GpSource) -> Iterator[dg.Output[pl.DataFrame]]:
    """Read one file per pull. A damaged record becomes a row of ``rejected_records``.

    A file that cannot be read at all fails the run.
    """
    parts: dict[str, list[pl.DataFrame]] = {name: [pl.DataFrame(schema=c)] for name, c in _EMPTY.items()}
    sources = []
    for snapshot in pulls_of(context):
        file = gp.read(snapshot)
        sources.append(file.source)
        for name, frame in _read(snapshot, file, gp).items():
            parts[name].append(frame.select(pl.col(c).cast(t) for c, t in _EMPTY[name].items()))
    frames = {name: pl.concat(found) for name, found in parts.items()}
    told = ", ".join(f"{name.replace('_', ' ')} {frame.height}" for name, frame in frames.items())
    context.log.info(f"{', '.join(sources)}: {told}.")
    reasons = frames["rejected_records"].group_by("reason").len().sort("reason")
    metadata: dict[str, dict[str, Any]] = {
        "element_sets": {"objects": frames["element_sets"].height},
        "rejected_records": {"reasons": dict(reasons.iter_rows())},
        "satellite_entries": {"objects": frames["satellite_entries"].height},
    }
    for name, frame in frames.items():
        yield dg.Output(frame, name, metadata={"source": ", ".join(sources), **metadata[name]})


def _read(snapshot: str, file: GpFile, gp: GpSource) -> dict[str, pl.DataFrame]:
    key, at = pl.lit(snapshot).alias("snapshot_id"), pl.lit(file.collected_at).alias("collected_at")
    if is_satcat(snapshot):
        entries, rejected = read_satcat(file.content, file.source, gp.limits())
        return {
            "satellite_entries": entries.with_columns(key, at),
            "rejected_records": rejected.with_columns(key),
        }
    parsed = read_catalogue(file.content, file.source, collected_at=file.collected_at, limits=gp.limits())
    source = pl.lit(source_name(snapshot)).alias("source")
    return {
        "element_sets": parsed.elements.with_columns(
            key, at, source, pl.lit(file.data_mode).alias("data_mode")
        ),
        "rejected_records": parsed.rejected.with_columns(key),
    }
