"""The association on Spark's workers, and the envelope that it reads."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.sda.association.arrow import (
    ASSOCIATION_SCHEMA,
    OBSERVATION_INPUT,
    associate_batches,
)
from branchlake_dagster.sda.benchmarks.association import Catalogs, simulate_catalogs
from branchlake_dagster.sda.benchmarks.association_scene import to_envelope
from branchlake_dagster.sda.observations.envelope import build_observations
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.network import Tasking
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.shipping import pickle_by_value
from branchlake_dagster_tests.sda.test_spark import identified, raw_rows
from branchlake_dagster_tests.sda.test_tracks import MODELS

pytestmark = pytest.mark.spark

WINDOW = 900_000_000


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def catalogs() -> Catalogs:
    return simulate_catalogs(150, 8)


@pytest.fixture(scope="module")
def native(catalogs) -> pl.DataFrame:
    start = catalogs.start
    few = Tasking(objects_per_radar=10, objects_per_telescope=10, isl_observers=10)
    return pl.concat(
        [
            simulate(catalogs.truth, kind=kind, start=start, end=start + WINDOW, seed=8, tasking=few)
            for kind in SOURCE_KINDS
        ]
    )


def test_workers_give_the_rows_of_this_process(session, catalogs, native):
    numbered = native.with_columns(observation_id=pl.int_range(pl.len()).cast(pl.String))
    envelope = session.createDataFrame(to_envelope(numbered).select(OBSERVATION_INPUT).to_arrow())
    start = catalogs.start
    function = pickle_by_value(
        associate_batches(catalogs.earlier, catalogs.sigma_km, start, start + WINDOW, MODELS)
    )
    distributed = (
        envelope.repartition("source_id")
        .mapInArrow(function, from_arrow_schema(ASSOCIATION_SCHEMA))
        .toArrow()
    )
    here = pa.Table.from_batches(list(function(envelope.toArrow().to_batches())))
    rows, expected = (pl.DataFrame(table).sort("observation_id") for table in (distributed, here))
    exact = [name for name in expected.columns if name != "normalized_distance"]
    assert rows.select(exact).equals(expected.select(exact))
    distances = (frame["normalized_distance"].to_numpy() for frame in (rows, expected))
    np.testing.assert_allclose(*distances, rtol=1e-6)
    # Every object is named and predicted, and no other fits better.
    assert set(rows["result"]) <= {"confirmed", "uncorrelated"}
    assert (rows["result"] == "confirmed").mean() > 0.97


def test_the_simulated_envelope_is_that_of_the_pipeline(session, catalogs, native):
    objects = pl.DataFrame({"sat_no": catalogs.truth.sat_no}).with_columns(
        state=pl.lit("tracked"), decay_date=pl.lit(None, pl.Date)
    )
    raw = {kind: raw_rows(native, kind) for kind in SOURCE_KINDS}
    observations = build_observations(identified(session, raw, objects), data_mode="SIMULATED")
    piped = pl.DataFrame(observations.select(*OBSERVATION_INPUT).toArrow())
    made = to_envelope(native.with_columns(observation_id=pl.lit(""))).select(OBSERVATION_INPUT)
    order = ["source_kind", "source_id", "sensor_timestamp", "range_km", "ra_deg", "pos_x_km"]
    # Radars and telescopes do not know the object, and number their own tracks.
    left, right = (frame.drop("observation_id", "sat_no", "track_id").sort(order) for frame in (piped, made))
    for name in left.columns:
        if left[name].dtype == pl.Float64:
            # Frames have uncertainties in 32 bits.
            np.testing.assert_allclose(left[name].to_numpy(), right[name].to_numpy(), rtol=1e-7)
        else:
            assert left[name].to_list() == right[name].to_list()
