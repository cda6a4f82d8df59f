"""Conjunction risks: element sets as in the list of conjunctions, tracks by their own state and covariance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster.sda.benchmarks.whole_history_model import build_error_model
from branchlake_dagster.sda.conjunctions.arrow import as_batch
from branchlake_dagster.sda.conjunctions.hours import OVERLAP, HourOwnership
from branchlake_dagster.sda.conjunctions.risks import (
    RISK_SCHEMA,
    TRACK_ELEMENT_SCHEMA,
    TRACK_STATE_COLUMNS,
    ObjectStates,
    assess_batches,
    assess_table,
    fit_track_elements,
    round_digits,
)
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Kind, Span, screen
from branchlake_dagster.sda.estimation.arrow import COVARIANCE_COLUMNS
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.orbits.element_fitting import fit_elements
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites
from branchlake_dagster.sda.trust.assessment import NO_ENCOUNTER, NO_MODEL, assess_approaches
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster.sda.trust.tables import PublishedErrors
from branchlake_dagster_tests.sda.test_trust import history, joined

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
BEGIN = int(NOON.timestamp()) * 1_000_000
MIDDLE = BEGIN + 30 * MINUTE


@pytest.fixture(scope="module")
def elements() -> Elements:
    frame = simulated_elements(seed=4, objects=400, epoch=NOON - timedelta(days=1)).sort("sat_no")
    return Elements.from_arrow(frame.to_arrow())


@pytest.fixture(scope="module")
def errors() -> PublishedErrors:
    past = joined(history(150, 14, 1.0, 0.01))
    return build_error_model(past).to_published()


@pytest.fixture(scope="module")
def approaches(elements: Elements) -> pa.Table:
    found = screen(elements, Span.whole(BEGIN, BEGIN + 60 * MINUTE), threshold_km=60.0)
    return pa.Table.from_batches([as_batch(found, elements)])


def states_of(elements: Elements, errors: PublishedErrors | None, tracks: pa.Table | None = None):
    nothing = TRACK_ELEMENT_SCHEMA.empty_table()
    return ObjectStates.build(
        elements, nothing if tracks is None else tracks, errors, np.full(len(elements), 5.0)
    )


def track_states(elements: Elements, rows: list[int], covariance: np.ndarray, offset: np.ndarray) -> pa.Table:
    """Preferred tracks at the middle of the hour, joined with element sets, as the asset joins them."""
    few = elements.take(np.array(rows))
    at = propagate_satellites(few.to_satrec_array(), np.array([MIDDLE]))
    state = np.concatenate([at.position[:, 0], at.velocity[:, 0]], axis=1) + offset
    lower = [(i, j) for i in range(6) for j in range(i + 1)]
    return pa.table(
        {
            "sat_no": few.sat_no,
            "track_epoch": pa.array(np.full(len(rows), MIDDLE), pa.timestamp("us", "UTC")),
            **{name: state[:, k] for k, name in enumerate(TRACK_STATE_COLUMNS[2:8])},
            "chi2_per_dof": np.full(len(rows), 0.9),
            **{
                name: np.full(len(rows), covariance[i, j])
                for name, (i, j) in zip(COVARIANCE_COLUMNS, lower, strict=True)
            },
            "element_epoch": pa.array(few.epoch_micros, pa.timestamp("us", "UTC")),
            **{name: few.values[:, k] for k, name in enumerate(ELEMENT_FIELDS)},
        }
    )


def fitted(table: pa.Table) -> pa.Table:
    return pa.Table.from_batches(
        fit_track_elements(table.combine_chunks().to_batches()), schema=TRACK_ELEMENT_SCHEMA
    )


def test_element_sets_are_assessed_as_in_the_list_of_conjunctions(elements, errors, approaches):
    risks = pl.DataFrame(assess_table(approaches, states_of(elements, errors), BEGIN))
    listed = assess_approaches(pl.DataFrame(approaches), elements, errors, ObjectRadii(5.0)).filter(
        pl.col("kind") != Kind.EDGE.value
    )
    assert risks.height == listed.height > 20
    np.testing.assert_allclose(
        risks["collision_probability"].fill_null(-1).to_numpy(),
        listed["collision_probability"].fill_null(-1).to_numpy(),
        rtol=6e-3,
        atol=1e-290,
    )
    assert risks["no_probability_because"].to_list() == listed["no_probability_because"].to_list()
    assert risks["sat1_state_source"].unique().to_list() == ["element set"]


def test_the_window_of_a_risk_has_its_closest_approach(elements, errors, approaches):
    risks = pl.DataFrame(assess_table(approaches, states_of(elements, errors), BEGIN))
    into = risks["tca"] - risks["risk_window_start"]
    assert into.min() >= timedelta(0)
    assert into.max() < timedelta(seconds=30)
    assert risks.unique(["sat1_object_designator", "sat2_object_designator", "tca"]).height == risks.height
    assert (risks["miss_distance_km"].round(3) == risks["miss_distance_km"]).all()


def test_without_an_error_model_only_tracks_give_probabilities(elements, approaches):
    risks = pl.DataFrame(assess_table(approaches, states_of(elements, None), BEGIN))
    assert risks["collision_probability"].null_count() == risks.height
    assert set(risks["no_probability_because"]) <= {NO_MODEL, NO_ENCOUNTER}
    encounter = risks.filter(pl.col("kind") == Kind.ENCOUNTER.value).row(0, named=True)
    numbers = [encounter[f"sat{k}_object_designator"] for k in (1, 2)]
    rows = np.searchsorted(elements.sat_no, numbers).tolist()
    small = np.diag([1e-2, 1e-2, 1e-2, 1e-8, 1e-8, 1e-8])
    tracks = fitted(track_states(elements, rows, small, np.zeros(6)))
    known = pl.DataFrame(assess_table(approaches, states_of(elements, None, tracks), BEGIN)).filter(
        pl.col("collision_probability").is_not_null()
    )
    pairs = known.select("sat1_object_designator", "sat2_object_designator").unique().rows()
    assert pairs == [tuple(numbers)]
    assert known["sat1_state_source"].unique().to_list() == ["track"]


def test_a_preferred_track_moves_the_object(elements):
    offset = np.array([3.0, -2.0, 1.0, 1e-3, 0.0, -1e-3])
    rows = [5, 60, 200]
    tracks = fitted(track_states(elements, rows, np.eye(6), offset))
    states = states_of(elements, None, tracks)
    before, after = (
        propagate_satellites(one.take(np.array(rows)).to_satrec_array(), np.array([MIDDLE])).position[:, 0]
        for one in (elements, states.elements)
    )
    np.testing.assert_allclose(after - before, np.tile(offset[:3], (3, 1)), atol=2e-3)
    others = np.setdiff1d(np.arange(len(elements)), rows)
    np.testing.assert_array_equal(states.elements.values[others], elements.values[others])
    assert (states.track_row >= 0).sum() == 3


def test_the_covariance_of_a_track_is_that_of_states_that_were_drawn_from_it(elements):
    """Monte Carlo: states drawn from the covariance, propagated by SGP4 over 25 minutes."""
    seed = 11
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    root = np.diag([0.4, 0.9, 0.3, 3e-4, 5e-4, 4e-4])
    root[1, 3] = 2e-4
    covariance = root @ root.T
    row = [17]
    states = states_of(elements, None, fitted(track_states(elements, row, covariance, np.zeros(6))))
    instant = np.array([MIDDLE + 25 * MINUTE])
    (computed,) = states.position_covariances(np.array(row), instant)
    one = elements.take(np.array(row))
    at = propagate_satellites(one.to_satrec_array(), np.array([MIDDLE]))
    count = 3_000
    drawn = np.random.default_rng(seed).normal(size=(count, 6)) @ root.T
    many = elements.take(np.full(count, row[0]))
    sets = fit_elements(many, at.position[0, 0] + drawn[:, :3], at.velocity[0, 0] + drawn[:, 3:], int(MIDDLE))
    ends = propagate_satellites(sets.elements.take(np.flatnonzero(sets.is_fitted)).to_satrec_array(), instant)
    sampled = np.cov(ends.position[:, 0].T)
    scale = np.sqrt(np.outer(np.diag(computed), np.diag(computed)))
    np.testing.assert_allclose(sampled / scale, computed / scale, atol=0.1)


def test_the_same_input_in_other_batches_gives_the_same_risks(elements, errors, approaches):
    states = states_of(elements, errors)
    assess = assess_batches(states, BEGIN, lambda risks: risks)
    whole = pa.Table.from_batches(assess(approaches.to_batches()), schema=RISK_SCHEMA)
    parts = pa.Table.from_batches(assess(approaches.to_batches(max_chunksize=7)), schema=RISK_SCHEMA)
    assert parts.equals(whole)
    assert pa.Table.from_batches(assess([]), schema=RISK_SCHEMA).num_rows == 0


def test_tracks_that_no_element_set_can_have_are_left_out(elements):
    table = track_states(elements, [3, 4], np.eye(6), np.array([0, 0, 0, 9.0, 0, 0]))
    assert fitted(table).num_rows == 0
    assert fitted(table.slice(0, 0)).num_rows == 0


def test_numbers_are_rounded_to_significant_digits():
    values = np.array([0.0, 1.23456e-7, 9.9999e-5, np.nan, 1.0, 5e-324])
    rounded = round_digits(values, 3)
    np.testing.assert_array_equal(rounded[[0, 1, 2, 4]], [0.0, 1.23e-7, 1e-4, 1.0])
    assert np.isnan(rounded[3])
    assert rounded[5] >= 0


def geostationary(inclinations_deg: list[float]) -> Elements:
    """Element sets of circular orbits of one revolution per day that cross at their common node."""
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no").head(len(inclinations_deg))
    return Elements.from_arrow(
        frame.with_columns(
            epoch=pl.lit(NOON).cast(frame.schema["epoch"]),
            inclination=pl.Series(inclinations_deg),
            eccentricity=pl.lit(1e-7),
            mean_motion=pl.lit(1.0027),
            ra_of_asc_node=pl.lit(0.0),
            arg_of_pericenter=pl.lit(0.0),
            mean_anomaly=pl.lit(360.0 - 360.0 / 48),  # at the node half an hour later
            bstar=pl.lit(0.0),
        ).to_arrow()
    )


@pytest.mark.parametrize(("inclination", "is_pass"), [(0.5, True), (1.0, True), (2.0, True), (0.01, False)])
def test_a_slow_pass_is_an_encounter(inclination, is_pass, errors):
    """Both ends of its minutes are within the threshold, so that the screening finds the two together."""
    pair = geostationary([0.02, 0.02 + inclination])
    found = screen(pair, Span.whole(BEGIN, BEGIN + 60 * MINUTE), threshold_km=5.0)
    table = pa.Table.from_batches([as_batch(found, pair)])
    assert table.num_rows == 1
    (risk,) = assess_table(table, states_of(pair, errors), BEGIN).to_pylist()
    assert (risk["relative_speed_km_s"] > 0.01) == is_pass
    assert risk["kind"] == (Kind.ENCOUNTER if is_pass else Kind.TOGETHER)
    assert (risk["together_min"] == 0) == is_pass
    assert (risk["no_probability_because"] == NO_ENCOUNTER) != is_pass


def test_a_pass_that_the_end_of_the_hour_cuts_is_no_encounter(errors):
    pair = geostationary([0.02, 1.02])
    found = screen(pair, Span.whole(BEGIN, BEGIN + 29 * MINUTE), threshold_km=20.0)
    table = pa.Table.from_batches([as_batch(found, pair)])
    (risk,) = assess_table(table, states_of(pair, errors), BEGIN).to_pylist()
    assert risk["kind"] == Kind.TOGETHER


NINE, TEN, ELEVEN = (BEGIN + hour * 60 * MINUTE for hour in (-3, -2, -1))
MILLISECOND = 1_000


def risk_rows(times: Mapping[int, int], kind: Kind = Kind.ENCOUNTER) -> pa.Table:
    """Risks of the pairs (n, n + 1) at the times of closest approach by n, rounded as `assess_table` does."""
    rounded = [(time + MILLISECOND // 2) // MILLISECOND * MILLISECOND for time in times.values()]
    return pa.table(
        {
            "sat1_object_designator": pa.array(list(times), pa.int64()),
            "sat2_object_designator": pa.array([number + 1 for number in times], pa.int64()),
            "kind": pa.array([kind.value] * len(times), pa.string()),
            "tca": pa.array(rounded, pa.timestamp("us", "UTC")),
        }
    )


def own_rows(ownership: HourOwnership, times: Mapping[int, int]) -> pa.Table:
    """The rows that an hour owns among approaches that its states put to these times."""
    in_hour = {number: time for number, time in times.items() if ownership.start <= time < ownership.end}
    first = ownership.overlap_task.span.start
    in_overlap = {number: time for number, time in times.items() if first <= time < ownership.start}
    return pa.concat_tables(
        [
            ownership.select_in_hour(risk_rows(in_hour)),
            ownership.select_in_overlap(risk_rows(in_overlap)),
        ]
    )


@pytest.mark.parametrize("largest", [2 * MILLISECOND, 40 * 1_000_000])
def test_one_of_two_hours_owns_an_approach_about_which_they_disagree(largest):
    seed = 7
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    chance = np.random.default_rng(seed)
    true_times = TEN + chance.integers(-largest // 2, largest // 2, 400)
    by_nine, by_ten = (
        dict(enumerate((true_times + chance.integers(-largest // 4, largest // 4, 400)).tolist(), 1))
        for _ in range(2)
    )
    nine = own_rows(HourOwnership.build(NINE, TEN, None), by_nine)
    ten = own_rows(HourOwnership.build(TEN, ELEVEN, nine), by_ten)
    owned = (
        nine.column("sat1_object_designator").to_pylist() + ten.column("sat1_object_designator").to_pylist()
    )
    assert sorted(owned) == sorted(by_nine)
    assert 0 < nine.num_rows < len(owned)
    assert pl.DataFrame(nine)["tca"].dt.epoch("us").max() < TEN
    disagreed = [number for number in by_nine if (by_nine[number] < TEN) != (by_ten[number] < TEN)]
    assert len(disagreed) > 20


def test_the_earlier_hour_takes_only_the_same_approach_of_the_same_pair():
    nine = risk_rows({1: TEN - 100_000, 2: TEN - OVERLAP, 3: TEN - 100_000})
    ownership = HourOwnership.build(TEN, ELEVEN, nine)
    times = {1: TEN + 100_000, 2: TEN + 100_000, 4: TEN + 100_000, 5: TEN + 40 * MINUTE}
    assert own_rows(ownership, times).column("sat1_object_designator").to_pylist() == [2, 4, 5]


def test_minutes_together_belong_to_the_hour_that_counts_them():
    together = {1: TEN - MINUTE, 2: TEN}
    ownership = HourOwnership.build(TEN, ELEVEN, risk_rows(together, Kind.TOGETHER))
    assert ownership.select_in_hour(risk_rows({2: TEN, 3: ELEVEN}, Kind.TOGETHER)).num_rows == 2
    assert ownership.select_in_overlap(risk_rows({1: TEN - MINUTE, 2: TEN}, Kind.TOGETHER)).num_rows == 0


@pytest.mark.parametrize(("earlier_s", "later_s"), [(0.3, -0.3), (-0.3, 0.3), (0.3, 0.3), (-0.3, -0.3)])
def test_states_that_disagree_about_the_hour_give_one_risk(elements, approaches, earlier_s, later_s):
    nearest = pl.DataFrame(approaches).filter(pl.col("kind") == Kind.ENCOUNTER.value).row(0, named=True)
    rows = np.searchsorted(elements.sat_no, [nearest[f"sat{k}_object_designator"] for k in (1, 2)])
    pair = elements.take(rows)
    tca = int(nearest["tca"].timestamp() * 1e6)

    def risks_by(offset_s: float, hour: HourOwnership, parts: Sequence[str]) -> pa.Table:
        # SGP4 of low orbits depends on the time since the epoch only, so the approach moves with the epoch.
        moved = replace(pair, epoch_micros=pair.epoch_micros + TEN - tca + round(offset_s * 1e6))
        tables = []
        for part in parts:
            span = Span.whole(hour.start, hour.end) if part == "hour" else hour.overlap_task.span
            batch = as_batch(screen(moved, span, threshold_km=60.0), moved)
            table = assess_table(pa.Table.from_batches([batch]), states_of(moved, None), hour.start)
            tables.append((hour.select_in_hour if part == "hour" else hour.select_in_overlap)(table))
        return pa.concat_tables(tables)

    nine = risks_by(earlier_s, HourOwnership.build(NINE, TEN, None), ["hour"])
    ten = risks_by(later_s, HourOwnership.build(TEN, ELEVEN, nine), ["hour", "overlap"])
    found = pl.concat(
        [pl.DataFrame(one).with_columns(hour=pl.lit(name)) for name, one in (("nine", nine), ("ten", ten))]
    )
    near = found.filter((pl.col("tca").dt.epoch("us") - TEN).abs() < MINUTE)
    assert near["hour"].to_list() == ["nine" if earlier_s < 0 else "ten"]
