import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from branchlake_dagster.sda.estimation.arrow import (
    COVARIANCE_COLUMNS,
    ELEMENT_INPUT,
    fuse_batches,
    track_schema,
)
from branchlake_dagster.sda.estimation.prior import ElementPrior
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.sensors.hashing import draw_normal, draw_uniform
from branchlake_dagster.sda.sensors.native import NATIVE_COLUMNS, SOURCE_KINDS
from branchlake_dagster.sda.sensors.network import CATALOGUE_TIMING_SIGMA_S, Noise, Tasking
from branchlake_dagster.sda.sensors.simulate import simulate

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))
END = START + 3_600_000_000
SEED = 7
MODELS = measurement_models(DEFAULT_SENSOR_KINDS)
TRACK_SCHEMA = track_schema(list(MODELS))


@pytest.fixture(scope="module")
def catalogue() -> pl.DataFrame:
    frame = simulated_elements(seed=3, objects=400, epoch=REFERENCE_EPOCH)
    return frame.with_columns(snapshot_id=pl.lit("sim-test"))


@pytest.fixture(scope="module")
def native(catalogue) -> pl.DataFrame:
    elements = Elements.from_arrow(catalogue.to_arrow())
    return pl.concat(
        [simulate(elements, kind=kind, start=START, end=END, seed=SEED) for kind in SOURCE_KINDS]
    )


def envelope(native: pl.DataFrame) -> pl.DataFrame:
    """The normalised columns the fusion reads, as the Spark normalisation makes them."""
    degrees = 180 / np.pi
    c = pl.col
    return native.select(
        "sat_no",
        "source_kind",
        "sensor_lat_deg",
        "sensor_lon_deg",
        "sensor_alt_km",
        sensor_timestamp=(c("timestamp_ns") // 1000).cast(pl.Datetime("us", "UTC")),
        range_km=c("range_m") / 1e3,
        range_unc_km=c("sigma_range_m") / 1e3,
        range_rate_km_s=c("range_rate_m_s") / 1e3,
        range_rate_unc_km_s=c("sigma_range_rate_m_s") / 1e3,
        azimuth_deg=c("az_rad") * degrees,
        azimuth_unc_deg=c("sigma_angle_rad") * degrees / c("el_rad").cos(),
        elevation_deg=c("el_rad") * degrees,
        elevation_unc_deg=c("sigma_angle_rad") * degrees,
        ra_deg=c("ra_rad") * degrees,
        ra_unc_deg=c("sigma_arcsec") / 3600 / c("dec_rad").cos(),
        declination_deg=c("dec_rad") * degrees,
        declination_unc_deg=c("sigma_arcsec") / 3600,
        position_unc_km=c("sigma_position_m") / 1e3,
        velocity_unc_km_s=c("sigma_velocity_m_s") / 1e3,
        **{f"pos_{a}_km": c(f"{a}_m") / 1e3 for a in "xyz"},
        **{f"vel_{a}_km_s": c(f"v{a}_m_s") / 1e3 for a in "xyz"},
    )


def fuse(
    native: pl.DataFrame, catalogue: pl.DataFrame, batch_rows: int = 1000, prior: ElementPrior | None = None
) -> pa.Table:
    joined = envelope(native).join(catalogue.select(ELEMENT_INPUT), on="sat_no").to_arrow()
    batches = list(fuse_batches(START, END, MODELS, prior)(joined.to_batches(max_chunksize=batch_rows)))
    return pa.Table.from_batches(batches, schema=TRACK_SCHEMA)


def test_simulation_is_deterministic_and_within_the_window(catalogue, native):
    elements = Elements.from_arrow(catalogue.to_arrow())
    again = simulate(elements, kind="radar", start=START, end=END, seed=SEED)
    radar = native.filter(pl.col("source_kind") == "radar")
    assert again.equals(radar)
    assert not simulate(elements, kind="radar", start=START, end=END, seed=SEED + 1).equals(radar)
    assert native.schema == pl.Schema(NATIVE_COLUMNS)
    assert native["timestamp_ns"].is_between(START * 1000, END * 1000, closed="left").all()
    assert native.unique(["orig_sensor_id", "track_id", "timestamp_ns"]).height == native.height
    assert set(native["source_kind"].unique()) == set(SOURCE_KINDS)
    assert (radar["el_rad"] > 0).all()


def test_capacity_bounds_the_rows(catalogue):
    elements = Elements.from_arrow(catalogue.to_arrow())
    few = Tasking(objects_per_radar=2)
    rows = simulate(elements, kind="radar", start=START, end=END, seed=1, tasking=few)
    assert rows.height <= 14 * 2 * few.samples_per_track
    assert rows.group_by("orig_sensor_id").agg(pl.col("sat_no").n_unique())["sat_no"].max() <= 2


def test_an_empty_catalogue_has_no_observations():
    nothing = Elements(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 9)))
    for kind in SOURCE_KINDS:
        assert simulate(nothing, kind=kind, start=START, end=END, seed=1).is_empty()
    with pytest.raises(KeyError):
        simulate(nothing, kind="sonar", start=START, end=END, seed=1)


def test_hashed_numbers_depend_on_the_key_alone():
    keys = np.arange(1, 20_001)
    drawn = draw_normal(keys, 5)
    assert abs(drawn.mean()) < 0.03
    assert abs(drawn.std() - 1) < 0.03
    np.testing.assert_array_equal(draw_normal(keys[100:110], 5), drawn[100:110])
    assert 0 < draw_uniform(keys, 1).min() < draw_uniform(keys, 1).max() < 1


def test_tracks_recover_the_true_offset_within_their_covariance(catalogue, native):
    """The known truth: each object runs early or late by a known time."""
    tracks = fuse(native, catalogue)
    assert tracks.schema == TRACK_SCHEMA
    assert tracks.num_rows > 250
    elements = Elements.from_arrow(catalogue.to_arrow())
    rows = np.searchsorted(elements.sat_no, tracks.column("sat_no").to_numpy())
    late = np.clip(draw_normal(elements.sat_no, SEED, 77), -4, 4)[rows] * CATALOGUE_TIMING_SIGMA_S
    middle = propagate_satellites(elements.to_satrec_array(), np.array([(START + END) // 2]))
    r, v = middle.position[rows, 0], middle.velocity[rows, 0]
    acceleration = -398_600.4418 * r / np.linalg.norm(r, axis=1, keepdims=True) ** 3
    names = [f"{a}_km" for a in "xyz"] + [f"{a}_dot_km_s" for a in "xyz"]
    state = np.stack([tracks.column(n).to_numpy() for n in names], axis=1)
    truth = np.concatenate([r + v * late[:, None], v + acceleration * late[:, None]], axis=1)
    covariance = np.zeros((len(rows), 6, 6))
    lower = [(i, j) for i in range(6) for j in range(i + 1)]
    for (i, j), name in zip(lower, COVARIANCE_COLUMNS, strict=True):
        covariance[:, i, j] = covariance[:, j, i] = tracks.column(name).to_numpy()
    error = state - truth
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(covariance), error)
    # Chi-squared with six degrees of freedom: median 5.35, 99 % below 16.8.
    assert 4.5 < np.median(distance) < 6.2
    assert np.percentile(distance, 95) < 16
    assert 0.9 < np.median(tracks.column("chi2_per_dof").to_numpy()) < 1.1
    # Few objects are observed from all over their orbit, but most are known better than the catalogue's error.
    assert np.median(np.linalg.norm(error[:, :3], axis=1)) < 0.2


def test_a_track_does_not_depend_on_batches_or_other_objects(catalogue, native):
    whole = fuse(native, catalogue)
    chopped = fuse(native.sample(fraction=1.0, shuffle=True, seed=1), catalogue, batch_rows=37)
    assert chopped.num_rows == whole.num_rows
    one = int(whole.column("sat_no")[5].as_py())
    alone = fuse(native.filter(pl.col("sat_no") == one), catalogue)
    for table in (chopped.slice(5, 1), alone):
        assert table.column("x_km")[0].as_py() == pytest.approx(whole.column("x_km")[5].as_py(), abs=1e-6)


def test_an_undetermined_object_gets_no_track(catalogue, native):
    optical = native.filter(pl.col("source_kind") == "optical")
    one = optical["sat_no"][0]
    twice = optical.filter(pl.col("sat_no") == one).head(2)
    assert fuse(twice, catalogue).num_rows == 0
    # Three directions within a second determine no orbit.
    burst = pl.concat([twice.head(1)] * 4).with_columns(
        timestamp_ns=pl.col("timestamp_ns") + pl.int_range(4) * 100_000_000
    )
    assert fuse(burst, catalogue).num_rows == 0


@pytest.mark.parametrize("sigma", [1e-200, 1e-100])
def test_an_uncertainty_that_overflows_harms_no_other_object(catalogue, native, sigma):
    optical = native.filter(pl.col("source_kind") == "optical")
    one = optical["sat_no"][0]
    native = native.filter((pl.col("sat_no") == one) | (pl.col("sat_no") % 5 == 0))
    expected = fuse(native.filter(pl.col("sat_no") != one), catalogue)
    is_broken = (pl.col("sat_no") == one) & (pl.col("source_kind") == "optical")
    broken = native.with_columns(sigma_arcsec=pl.when(is_broken).then(sigma).otherwise("sigma_arcsec"))
    tracks = fuse(broken, catalogue)
    others = tracks.filter(pc.field("sat_no") != one)
    assert others.column("sat_no").equals(expected.column("sat_no"))


def test_no_observations_give_no_batches():
    assert list(fuse_batches(START, END, MODELS)(iter([]))) == []


def test_stated_noise_is_the_noise(catalogue):
    """Twice the sensors' noise under the same statement must show in the residuals."""
    elements = Elements.from_arrow(catalogue.to_arrow())
    loud = Noise(range_m=30, range_rate_m_s=0.1, angle_rad=6e-4)
    rows = simulate(elements, kind="radar", start=START, end=END, seed=SEED, noise=loud).with_columns(
        sigma_range_m=pl.lit(15.0), sigma_range_rate_m_s=pl.lit(0.05), sigma_angle_rad=pl.lit(3e-4)
    )
    assert 3.5 < np.median(fuse(rows, catalogue).column("chi2_per_dof").to_numpy()) < 4.5
