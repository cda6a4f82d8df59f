"""Group ``observations``: simulated native measurements and their normalised envelope."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import dagster as dg
import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import Observation, SensorObservation
from branchlake_dagster.sda.observing import normalise
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import whole_catalogue, windows_by_kind
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.windows import window_of

GROUP = "observations"
SENSOR_OBSERVATIONS = dg.AssetKey(["sda", "sensor_observations"])
OBSERVATIONS = dg.AssetKey(["sda", "observations"])
_BY_WINDOW_AND_KIND = {"window": "window_start", "source_kind": "source_kind"}


class SimulationConfig(dg.Config):
    """Seed of the simulated sensors; the same seed, window and source kind give the same measurements."""

    seed: int = 2026


@dg.asset(
    key=SENSOR_OBSERVATIONS,
    group_name=GROUP,
    partitions_def=windows_by_kind,
    owners=OWNERS,
    kinds={"iceberg", "numpy"},
    freshness_policy=OF_WINDOWS,
    ins={"catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue)},
    metadata=table_metadata(partition_by=_BY_WINDOW_AND_KIND, require_checks=True)
    | column_metadata(SensorObservation),
)
def sensor_observations(
    context: dg.AssetExecutionContext, config: SimulationConfig, catalogue: pa.Table
) -> pl.DataFrame:
    """Native measurements of catalogue objects by one kind of sensor in one window (simulated)."""
    key = context.partition_key
    assert isinstance(key, dg.MultiPartitionKey)  # noqa: S101 - by the asset's definition
    start, end = window_of(context)
    elements = Elements.from_arrow(of_tracked(catalogue).sort_by("sat_no"))
    kind = key.keys_by_dimension["source_kind"]
    return simulate(elements, kind=kind, start=start, end=end, seed=config.seed)


@dg.asset(
    key=OBSERVATIONS,
    group_name=GROUP,
    partitions_def=windows_by_kind,
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    freshness_policy=OF_WINDOWS,
    metadata=table_metadata(partition_by=_BY_WINDOW_AND_KIND, require_checks=True)
    | column_metadata(Observation),
)
def observations(sensor_observations: DataFrame) -> DataFrame:
    """Observations in one envelope for all kinds: ids, units, uncertainties and clock quality."""
    return normalise(sensor_observations)
