"""Assets `observations` and `rejected_observations`: measurements of all sensors with the same columns."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Mapping, Sequence

import dagster as dg
from pydantic import Field
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, consumes, rows, table_metadata
from branchlake_dagster.sda.assets.registry import OBJECTS
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts.by_kind import observation_contract, rejected_observation_contract
from branchlake_dagster.sda.contracts.fields import DataMode
from branchlake_dagster.sda.observations.envelope import (
    build_observations,
    build_rejected_observations,
    identify_measurements,
)
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind

GROUP = "observations"
OBSERVATIONS = dg.AssetKey(["sda", "observations"])
REJECTED_OBSERVATIONS = dg.AssetKey(["sda", "rejected_observations"])
_WINDOW_KEYS = ["window_start", "sensor_timestamp", "observation_id"]
"""The window is a key, so that a run looks for its measurements in its own hours only."""
_WRITE_PROPERTIES = {"write.spark.advisory-partition-size-bytes": str(32 << 20)}
"""Several of Spark's tasks write the files of a busy hour: each writes about 32 MB of shuffled rows."""
_REJECTED_KEYS = ["sensor_timestamp", "observation_id"]


def observation_assets(
    kinds: Sequence[SensorKind], default_mode: DataMode = "REAL"
) -> list[dg.AssetsDefinition]:
    """Build the assets `observations` and `rejected_observations` for the given kinds of sensor.

    `default_mode` is the `data_mode` of the observations, unless a run's configuration has another one.
    """

    class ObservationConfig(dg.Config):
        """The run configuration for facts that the records do not contain."""

        data_mode: DataMode = Field(
            default_mode,
            description="Whether the measurements are real, simulated, of a test or an exercise.",
        )

    source_kinds = [kind.source_kind for kind in kinds]
    inputs = {kind.raw_table.path[-1]: dg.AssetIn(kind.raw_table) for kind in kinds}
    inputs |= {"objects": dg.AssetIn(OBJECTS, partition_mapping=whole_catalogue)}
    new_rows = consumes(
        {kind.raw_table: rows(optional=True) for kind in kinds},
        on="sensor_timestamp",
        # A corrected decoder replaces rows of raw tables.
        when_removed="rebuild",
    )
    observation, rejected = observation_contract(source_kinds), rejected_observation_contract(source_kinds)

    def identify(raw: Mapping[str, DataFrame], objects: DataFrame) -> DataFrame:
        by_kind = {kind.source_kind: raw[kind.raw_table.path[-1]] for kind in kinds}
        return identify_measurements(by_kind, objects, kinds)

    # A multi-asset, because `@dg.asset` warns that its backfill policy is a beta feature.
    @dg.multi_asset(
        name="observations",
        group_name=GROUP,
        partitions_def=windows,
        # A backfill is one run. The sensor launches a run for each hour.
        backfill_policy=dg.BackfillPolicy.single_run(),
        ins=inputs,
        outs={
            "observations": dg.AssetOut(
                key=OBSERVATIONS,
                description="Measurements of all sensors with the same columns: ids, values, uncertainties."
                " A measurement is one row, even if it was received several times.",
                owners=OWNERS,
                kinds={"iceberg", "spark"},
                freshness_policy=OF_WINDOWS,
                metadata=table_metadata(
                    write_mode="upsert",
                    keys=_WINDOW_KEYS,
                    when_matched="keep",
                    partition_by="window_start",
                    properties=_WRITE_PROPERTIES,
                    require_checks=True,
                )
                | new_rows
                | column_metadata(observation),
            )
        },
    )
    def observations(config: ObservationConfig, objects: DataFrame, **raw: DataFrame) -> DataFrame:
        """Return accepted measurements of the run's hours as observations.

        `raw` has one frame per kind of sensor, with the raw measurements that no earlier run consumed.
        `objects` are the objects of the registry: a measurement that names an unknown or decayed object is
        rejected.
        """
        return build_observations(identify(raw, objects), data_mode=config.data_mode)

    @dg.asset(
        key=REJECTED_OBSERVATIONS,
        group_name=GROUP,
        owners=OWNERS,
        kinds={"iceberg", "spark"},
        ins=inputs,
        metadata=table_metadata(
            write_mode="upsert",
            keys=_REJECTED_KEYS,
            when_matched="keep",
            layout=["day(sensor_timestamp)"],
            require_checks=True,
        )
        | new_rows
        | column_metadata(rejected),
    )
    def rejected_observations(objects: DataFrame, **raw: DataFrame) -> DataFrame:
        """Return rejected measurements with the reason.

        Reasons are an impossible value, and an unknown or decayed object.
        """
        return build_rejected_observations(identify(raw, objects))

    return [observations, rejected_observations]
