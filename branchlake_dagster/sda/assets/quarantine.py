"""The asset of the catalogue's objects whose propagated states in a window cannot be true."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, GROUP
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import QuarantinedObject
from branchlake_dagster.sda.orbits.plausible import Fault, find_state_faults
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites, time_grid
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.windows import window_of

QUARANTINED_OBJECTS = dg.AssetKey(["sda", "quarantined_objects"])
STEP_S = 60.0
_DAY_MICROS = 86_400e6


@dg.asset(
    key=QUARANTINED_OBJECTS,
    group_name=GROUP,
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "numpy"},
    freshness_policy=OF_WINDOWS,
    ins={"catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue)},
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | column_metadata(QuarantinedObject),
)
def quarantined_objects(context: dg.AssetExecutionContext, catalogue: pa.Table) -> pl.DataFrame:
    """Objects whose states in the window cannot be true; the screening leaves them out.

    SGP4 gives absurd states without an error for elements gone stale. A few of them are no reason to do
    without an hour of all others.
    """
    start, end = window_of(context)
    objects = of_tracked(catalogue)
    found = quarantine(objects, start, end)
    context.log.info(f"{found.height} of {objects.num_rows} tracked objects are quarantined.")
    return found


def of_tracked(catalogue: pa.Table) -> pa.Table:
    """The rows of objects that may be propagated; all of a table of before, which has no states yet."""
    if "state" not in catalogue.column_names:
        return catalogue
    return catalogue.filter(pc.equal(catalogue.column("state"), "tracked"))


def quarantine(catalogue: pa.Table, start: int, end: int) -> pl.DataFrame:
    """Rows of `QuarantinedObject` for a window in UTC microseconds since 1970."""
    catalogue = catalogue.sort_by("sat_no")
    elements = Elements.from_arrow(catalogue)
    instants = time_grid(start, end, STEP_S)
    found = find_state_faults(propagate_satellites(elements.to_satrec_array(), instants), elements)
    rows = np.flatnonzero(~found.plausible_objects)
    at = found.first_faulty_instant()[rows]
    epochs = elements.epoch_micros[rows]

    def numbers(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> pl.Series:
        return pl.Series(values[rows, at], dtype=pl.Float64).fill_nan(None)

    def moments(micros: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pl.Series:
        return pl.Series(micros, dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))

    codes = pl.Series(found.fault[rows, at], dtype=pl.Int64)
    return pl.DataFrame(
        {
            "window_start": moments(np.full(len(rows), start)),
            "sat_no": pl.Series(elements.sat_no[rows], dtype=pl.Int64),
            "reason": codes.replace_strict(
                {int(fault): fault.name.lower() for fault in Fault}, return_dtype=pl.String
            ),
            "at": moments(instants[at]),
            "altitude_km": numbers(found.altitude_km),
            "energy_ratio": numbers(found.energy_ratio),
            "snapshot_id": pl.Series(catalogue.column("snapshot_id").take(pa.array(rows)), dtype=pl.String),
            "element_epoch": moments(epochs),
            "element_age_days": pl.Series((start - epochs) / _DAY_MICROS, dtype=pl.Float64),
        }
    )


def tracked(catalogue: DataFrame) -> DataFrame:
    """The objects of the catalogue that may be propagated."""
    # A table of before has no states; the next pull brings them.
    return catalogue.where("state = 'tracked'") if "state" in catalogue.columns else catalogue


def usable(catalogue: DataFrame, quarantined: DataFrame) -> DataFrame:
    """The tracked objects of the catalogue without a window's quarantined ones."""
    return tracked(catalogue).join(quarantined.select("sat_no"), on="sat_no", how="left_anti")
