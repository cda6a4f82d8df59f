"""The parts that only Spark can run: the normalisation, the shipped functions."""

import uuid

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.sda.conjunctions.arrow import as_batch
from branchlake_dagster.sda.conjunctions.distributed import close_approaches, close_approaches_here
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span, screen
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, in_parts
from branchlake_dagster.sda.contracts import Observation
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, TRACK_SCHEMA, fuse_batches
from branchlake_dagster.sda.observing import OBSERVATION_NAMESPACE, normalise
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.shipping import carried
from branchlake_dagster_tests.sda.test_tracks import END, SEED, START, catalogue, envelope, fuse

__all__ = ["catalogue"]

pytestmark = pytest.mark.spark

BY = [(name, "ascending") for name in ("sat1_object_designator", "sat2_object_designator", "kind", "tca")]


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def native(catalogue) -> pl.DataFrame:
    elements = Elements.from_arrow(catalogue.to_arrow())
    return pl.concat(
        [simulate(elements, kind=kind, start=START, end=END, seed=SEED) for kind in SOURCE_KINDS]
    )


@pytest.fixture(scope="module")
def normalised(session, native):
    return normalise(session.createDataFrame(native.to_arrow()))


def test_normalisation_gives_uuid5_units_and_skew(native, normalised):
    rows = pl.DataFrame(pl.from_arrow(normalised.toArrow()))
    assert rows.height == native.height
    assert rows["observation_id"].n_unique() == rows.height
    for kind in SOURCE_KINDS:
        given = native.filter(pl.col("source_kind") == kind).row(0, named=True)
        name = f"{kind}|{given['orig_sensor_id']}|{given['track_id']}|{given['timestamp_ns']}"
        (row,) = rows.filter(
            pl.col("observation_id") == str(uuid.uuid5(OBSERVATION_NAMESPACE, name))
        ).to_dicts()
        assert row["sat_no"] == given["sat_no"]
        skew = {
            "radar": 1e-6,
            "optical": 0.010 + 0.001 * (given["clock_sync_age_s"] // 60),
            "isl": 1e-4 * given["clock_sync_age_s"],
        }
        assert row["max_skew_s"] == pytest.approx(skew[kind])
    usual = envelope(native).sort("sat_no", "sensor_timestamp", "source_kind")
    same = rows.sort("sat_no", "sensor_timestamp", "source_kind")
    for column in usual.columns:
        if usual.schema[column] == pl.Float64:
            np.testing.assert_allclose(same[column].to_numpy(), usual[column].to_numpy(), rtol=1e-12)


def test_the_envelope_is_its_contract_column_by_column(normalised):
    promised = Observation.to_schema().columns
    assert [(one.name, one.dataType) for one in normalised.schema] == [
        (name, column.dtype.type) for name, column in promised.items()
    ]


def test_tracks_over_spark_are_those_of_the_function(session, native, normalised, catalogue):
    elements = session.createDataFrame(catalogue.select(ELEMENT_INPUT).to_arrow())
    joined = normalised.join(elements, on="sat_no").repartition("sat_no")
    tracks = joined.mapInArrow(carried(fuse_batches(START, END)), from_arrow_schema(TRACK_SCHEMA)).toArrow()
    expected = fuse(native, catalogue)
    assert tracks.num_rows == expected.num_rows
    x = tracks.sort_by("sat_no").column("x_km").to_numpy()
    np.testing.assert_allclose(x, expected.column("x_km").to_numpy(), atol=1e-6)


def test_screening_over_spark(session, catalogue):
    elements = Elements.from_arrow(catalogue.to_arrow())
    span = Span.whole(START, START + 60 * MINUTE)
    screening = Screening.of_all(elements, 50.0)
    found = close_approaches(session, screening, in_parts(span, Pairs.ALL, 3)).toArrow()
    expected = pa.Table.from_batches([as_batch(screen(elements, span, threshold_km=50.0), elements)])
    assert expected.num_rows > 0
    assert found.sort_by(BY) == expected.sort_by(BY)
    here = close_approaches_here(screening, in_parts(span, Pairs.ALL, 3))
    assert here.sort_by(BY) == expected.sort_by(BY)
