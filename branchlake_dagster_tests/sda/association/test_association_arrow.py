"""The function for Spark's workers: any order of the rows and any cut of the input give the same rows."""

import pickle

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from branchlake_dagster.sda.association.arrow import ASSOCIATION_SCHEMA, OBSERVATION_INPUT, associate_batches
from branchlake_dagster.sda.benchmarks.association import Catalogs, count_outcomes, simulate_catalogs
from branchlake_dagster.sda.benchmarks.association_scene import Scene, simulate_scene
from branchlake_dagster.sda.contracts import Observation
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.shipping import pickle_by_value
from branchlake_dagster_tests.sda.association.scenes import MODELS

HALF_HOUR = 1_800_000_000
OBJECTS = 400


@pytest.fixture(scope="module")
def catalogs() -> Catalogs:
    return simulate_catalogs(OBJECTS, 3)


@pytest.fixture(scope="module")
def scene(catalogs) -> Scene:
    return simulate_scene(catalogs.truth, catalogs.start, catalogs.start + HALF_HOUR, seed=3)


def run(
    catalogs: Catalogs, rows: pl.DataFrame, batch_rows: int = 1_000, order: np.ndarray | None = None
) -> pl.DataFrame:
    elements, sigma_km = catalogs.earlier, catalogs.sigma_km
    if order is not None:
        elements, sigma_km = elements.take(order), sigma_km[order]
    function = associate_batches(elements, sigma_km, catalogs.start, catalogs.start + HALF_HOUR, MODELS)
    batches = list(function(rows.to_arrow().to_batches(max_chunksize=batch_rows)))
    return pl.DataFrame(pa.Table.from_batches(batches, ASSOCIATION_SCHEMA))


@pytest.fixture(scope="module")
def whole(catalogs, scene) -> pl.DataFrame:
    return run(catalogs, scene.observations)


def test_each_observation_has_one_row(scene, whole):
    assert sorted(whole["observation_id"]) == sorted(scene.observations["observation_id"])
    assert set(whole["result"]) == {"confirmed", "reassigned", "uncorrelated"}
    is_left = pl.col("result") == "uncorrelated"
    assert whole.filter(is_left == pl.col("sat_no").is_not_null()).is_empty()
    assert whole.filter(is_left == pl.col("reason").is_null()).is_empty()
    assert whole.filter(is_left == pl.col("normalized_distance").is_not_null()).is_empty()
    assert whole["element_age_days"].drop_nulls().is_between(0.0, 0.6).all()


def test_a_simulated_catalog_is_associated_with_the_truth(catalogs, scene, whole):
    for kind in ("all", "radar", "optical", "isl"):
        found = count_outcomes(whole, scene, pl.Series(catalogs.earlier.sat_no), kind)
        assert found["wrong"] == 0
        # Of eccentric orbits the simulated errors are larger than the stated sigmas.
        assert found["uncorrelated_share"] < (0.005 if kind == "all" else 0.03)
        assert found["wrong_tag_corrected_share"] > 0.9
        assert found["clutter_accepted"] <= 1
    assert found["wrong_tags"] > 20
    assert whole["claimed_sat_no"].null_count() > 0


def test_distances_are_those_of_gaussian_errors(catalogs, scene, whole):
    """Errors of the prediction are 1.5 times smaller than assumed, and dominate links of good clocks."""
    links = whole.filter((pl.col("source_kind") == "isl") & (pl.col("result") == "confirmed"))
    # Chi with six degrees of freedom has a median of 2.3.
    assert 1.2 < links["normalized_distance"].median() < 2.4
    assert links["normalized_distance"].quantile(0.99) < 4.5


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_any_order_give_the_same_rows(catalogs, scene, whole, seed):
    generator = np.random.default_rng(seed)
    shuffled = scene.observations[generator.permutation(scene.observations.height).tolist()]
    found = run(catalogs, shuffled, int(generator.integers(1, 400)), generator.permutation(OBJECTS))
    assert found.equals(whole)


def test_sensors_in_separate_calls_give_the_same_rows(catalogs, scene, whole):
    parts = [run(catalogs, part) for part in scene.observations.partition_by("source_id")[:12]]
    found = pl.concat(parts).sort("observation_id")
    same = whole.filter(pl.col("observation_id").is_in(found["observation_id"].implode())).sort(
        "observation_id"
    )
    exact = [name for name in found.columns if name != "normalized_distance"]
    assert found.select(exact).equals(same.select(exact))
    np.testing.assert_allclose(
        found["normalized_distance"].to_numpy(), same["normalized_distance"].to_numpy(), rtol=1e-6
    )


def test_no_observations_give_no_batches(catalogs, scene):
    function = associate_batches(
        catalogs.earlier, catalogs.sigma_km, catalogs.start, catalogs.start + HALF_HOUR, MODELS
    )
    assert list(function(iter([]))) == []
    assert list(function(scene.observations.head(0).to_arrow().to_batches())) == []


def test_without_elements_nothing_is_tested(catalogs, scene):
    nothing = Elements(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 9)))
    empty = catalogs._replace(earlier=nothing, sigma_km=np.zeros((0, 3)))
    found = run(empty, scene.observations)
    claims = found["claimed_sat_no"].is_not_null()
    assert (found.filter(claims)["result"] == "claimed").all()
    assert (found.filter(~claims)["result"] == "uncorrelated").all()


def test_the_function_travels_to_workers(catalogs, scene, whole):
    function = pickle_by_value(
        associate_batches(
            catalogs.earlier, catalogs.sigma_km, catalogs.start, catalogs.start + HALF_HOUR, MODELS
        )
    )
    copy = pickle.loads(cloudpickle.dumps(function))
    batches = list(copy(scene.observations.to_arrow().to_batches()))
    assert pl.DataFrame(pa.Table.from_batches(batches, ASSOCIATION_SCHEMA)).equals(whole)


def test_the_input_is_part_of_the_envelope():
    assert set(OBSERVATION_INPUT) <= set(Observation.to_schema().columns)
