"""Group ``observations``: the measurements of all sensors in one envelope, and those that are rejected."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from typing import Literal

import dagster as dg
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, consumes, rows, table_metadata
from branchlake_dagster.sda.assets.raw import RAW_LINKS, RAW_OPTICAL, RAW_RADAR
from branchlake_dagster.sda.assets.registry import OBJECTS
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import Observation, RejectedObservation
from branchlake_dagster.sda.observations.envelope import (
    build_observations,
    build_rejected_observations,
    identify_measurements,
)
from branchlake_dagster.sda.partitions import whole_catalogue, windows

GROUP = "observations"
OBSERVATIONS = dg.AssetKey(["sda", "observations"])
REJECTED_OBSERVATIONS = dg.AssetKey(["sda", "rejected_observations"])
_INPUTS = {
    "raw_radar": dg.AssetIn(RAW_RADAR),
    "raw_optical": dg.AssetIn(RAW_OPTICAL),
    "raw_links": dg.AssetIn(RAW_LINKS),
    "objects": dg.AssetIn(OBJECTS, partition_mapping=whole_catalogue),
}
_NEW_ROWS = consumes(
    dict.fromkeys((RAW_RADAR, RAW_OPTICAL, RAW_LINKS), rows(optional=True)),
    on="sensor_timestamp",
    when_removed="fail",
)
_KEYS = ["sensor_timestamp", "observation_id"]


class ObservationConfig(dg.Config):
    """The run configuration for facts that the records do not contain.

    Attributes:
        data_mode: whether the measurements are real, simulated, of a test or of an exercise.

    """

    data_mode: Literal["REAL", "SIMULATED", "TEST", "EXERCISE"] = "REAL"


# A multi-asset, because `@dg.asset` warns that its backfill policy is a beta.
@dg.multi_asset(
    name="observations",
    group_name=GROUP,
    partitions_def=windows,
    # A backfill is one run. The sensor launches a run for each hour.
    backfill_policy=dg.BackfillPolicy.single_run(),
    ins=_INPUTS,
    outs={
        "observations": dg.AssetOut(
            key=OBSERVATIONS,
            description="Measurements of all sensors in one envelope: ids, units, uncertainties, clocks."
            " Each is one row, however often it was received.",
            owners=OWNERS,
            kinds={"iceberg", "spark"},
            freshness_policy=OF_WINDOWS,
            metadata=table_metadata(
                write_mode="upsert",
                keys=_KEYS,
                when_matched="keep",
                partition_by="window_start",
                require_checks=True,
            )
            | _NEW_ROWS
            | column_metadata(Observation),
        )
    },
)
def observations(
    config: ObservationConfig,
    raw_radar: DataFrame,
    raw_optical: DataFrame,
    raw_links: DataFrame,
    objects: DataFrame,
) -> DataFrame:
    """Return the observations among the new raw measurements of the run's hours."""
    measurements = identify_measurements(
        {"radar": raw_radar, "optical": raw_optical, "isl": raw_links}, objects
    )
    return build_observations(measurements, data_mode=config.data_mode)


@dg.asset(
    key=REJECTED_OBSERVATIONS,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    ins=_INPUTS,
    metadata=table_metadata(
        write_mode="upsert",
        keys=_KEYS,
        when_matched="keep",
        layout=["day(sensor_timestamp)"],
        require_checks=True,
    )
    | _NEW_ROWS
    | column_metadata(RejectedObservation),
)
def rejected_observations(
    raw_radar: DataFrame, raw_optical: DataFrame, raw_links: DataFrame, objects: DataFrame
) -> DataFrame:
    """Rejected measurements, each with the reason: impossible, or of an unknown or decayed object."""
    measurements = identify_measurements(
        {"radar": raw_radar, "optical": raw_optical, "isl": raw_links}, objects
    )
    return build_rejected_observations(measurements)
