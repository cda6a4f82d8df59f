"""What is said of a close approach: a function of its row, its element sets and the published error model."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.assets.trust import draw_growth
from branchlake_dagster.sda.benchmarks.whole_history_model import build_error_model
from branchlake_dagster.sda.conjunctions.arrow import as_batch
from branchlake_dagster.sda.conjunctions.listing import build_rows
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span, screen
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites
from branchlake_dagster.sda.reports.conjunction_report import (
    draw_altitudes,
    draw_distance,
    draw_geometry,
    format_approaches,
    select_top_approaches,
)
from branchlake_dagster.sda.reports.pictures import to_png
from branchlake_dagster.sda.trust.assessment import (
    ASSESSMENT_COLUMNS,
    NO_ENCOUNTER,
    NO_MODEL,
    TOO_OLD,
    TOO_SLOW,
    assess_approaches,
)
from branchlake_dagster.sda.trust.classes import CLASSES
from branchlake_dagster.sda.trust.differences import DAY_MICROS, rtn_axes
from branchlake_dagster.sda.trust.probability import build_encounter_plane, collision_probability
from branchlake_dagster.sda.trust.radii import FROM_SIZE, ObjectRadii
from branchlake_dagster.sda.trust.tables import COVARIANCE_SOURCE, PublishedErrors
from branchlake_dagster_tests.sda.test_trust import history, joined, manoeuvred
from branchlake_dagster_tests.sda.whole_history_tables import element_errors, element_jumps, object_errors

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
BEGIN = int(NOON.timestamp()) * 1_000_000


@pytest.fixture(scope="module")
def elements() -> Elements:
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    return Elements.from_arrow(frame.to_arrow())


@pytest.fixture(scope="module")
def found(elements: Elements) -> pl.DataFrame:
    span = Span.whole(BEGIN, BEGIN + 120 * MINUTE)
    rows = as_batch(screen(elements, span, threshold_km=40.0), elements)
    return build_rows(pl.DataFrame(rows), None, span, 40.0, 14.0)


def model(elements: Elements, *, until_days: float = 14.0) -> PublishedErrors:
    """Kilometres by class, and a factor for every third object."""
    n = len(CLASSES)
    some = elements.sat_no[::3]
    return PublishedErrors(
        np.full((n, 3), 0.1),
        np.tile([0.1, 2.0, 0.2], (n, 1)),
        np.ones((n, 3)),
        np.full(n, until_days),
        some,
        np.tile([1.0, 3.0, 0.5], (len(some), 1)),
        "a model",
    )


def test_a_row_is_assessed_by_itself(elements, found):
    whole = assess_approaches(found, elements, model(elements), ObjectRadii(5.0))
    assert found.height > 30
    assert set(whole.columns) - set(found.columns) == set(ASSESSMENT_COLUMNS)
    half = found.gather_every(2)
    assert assess_approaches(half, elements, model(elements), ObjectRadii(5.0)).equals(whole.gather_every(2))
    assert (
        assess_approaches(found.clear(), elements, model(elements), ObjectRadii(5.0)).schema == whole.schema
    )
    # Objects that are not in a row change nothing in it.
    here = np.unique(half.select("sat1_object_designator", "sat2_object_designator").to_numpy())
    fewer = elements.take(np.flatnonzero(np.isin(elements.sat_no, here)))
    assert assess_approaches(half, fewer, model(elements), ObjectRadii(5.0)).equals(whole.gather_every(2))


def test_the_probability_is_that_of_both_covariances_in_one_frame(elements, found):
    wide = replace(model(elements), sigma0=np.full((len(CLASSES), 3), 4.0))
    rows = assess_approaches(found, elements, wide, ObjectRadii(250.0)).filter(
        pl.col("collision_probability") > 1e-12
    )
    assert rows.height > 10
    for row in rows.head(12).iter_rows(named=True):
        numbers = [row[f"sat{k}_object_designator"] for k in (1, 2)]
        pair = elements.take(np.searchsorted(elements.sat_no, numbers))
        tca = int(row["tca"].timestamp()) * 1_000_000 + row["tca"].microsecond
        states = propagate_satellites(pair.to_satrec_array(), np.array([tca]))
        combined = np.zeros((3, 3))
        for k in (0, 1):
            axes = rtn_axes(states.position[k], states.velocity[k])[0]
            sigma = np.array([row[f"sat{k + 1}_sigma_{axis}_km"] for axis in "rtn"])
            combined += axes.T @ np.diag(sigma**2) @ axes
        plane = build_encounter_plane(
            states.position[1] - states.position[0], states.velocity[1] - states.velocity[0], combined[None]
        )
        assert plane.sigma[0] == pytest.approx([row["sigma_minor_km"], row["sigma_major_km"]], rel=1e-3)
        assert collision_probability(plane, 0.5)[0] == pytest.approx(row["collision_probability"], rel=1e-2)
        assert row["collision_probability"] <= row["max_collision_probability"]
        assert row["covariance_source"] == COVARIANCE_SOURCE
        assert row["no_probability_because"] is None


def test_the_probability_is_of_the_two_objects_own_radii(elements, found):
    wide = replace(model(elements), sigma0=np.full((len(CLASSES), 3), 4.0))
    small = ObjectRadii(sizes=pl.DataFrame({"sat_no": elements.sat_no, "rcs_size": "SMALL", "rcs_m2": None}))
    large, debris = (assess_approaches(found, elements, wide, one) for one in (ObjectRadii(5.0), small))
    assert debris["hard_body_radius_m"].unique().to_list() == [0.24]
    assert (debris["sat1_radius_source"] == FROM_SIZE).all()
    likely = (large["collision_probability"] > 1e-12).fill_null(False)
    assert likely.sum() > 10
    ratio = large.filter(likely)["collision_probability"] / debris.filter(likely)["collision_probability"]
    assert ratio.to_numpy() == pytest.approx((10.0 / 0.24) ** 2, rel=0.01)


def test_sigmas_are_of_the_age_the_class_and_the_object(elements):
    expected = model(elements)
    at = elements.epoch_micros + np.where(np.arange(len(elements)) % 2, 2, -2) * DAY_MICROS
    sigma = expected.position_sigma(elements, at)
    assert sigma[0] == pytest.approx([0.3, 3 * 4.1, 0.25])
    assert sigma[1] == pytest.approx([0.3, 4.1, 0.5]), "an object that the model does not have"
    assert np.isnan(expected.position_sigma(elements, elements.epoch_micros + 15 * DAY_MICROS)).all()


def test_what_has_no_probability_says_why(elements, found):
    without = assess_approaches(found, elements, None, ObjectRadii(5.0))
    assert without["no_probability_because"].unique().to_list() == [NO_MODEL]
    always = {one for one in ASSESSMENT_COLUMNS if "radius" in one} | {"no_probability_because"}
    nothing = [one for one in ASSESSMENT_COLUMNS if one not in always]
    assert without.select(pl.col(nothing).null_count()).row(0) == (found.height,) * len(nothing)
    old = assess_approaches(found, elements, model(elements, until_days=1e-6), ObjectRadii(5.0))
    assert set(old["no_probability_because"]) <= {TOO_OLD, NO_ENCOUNTER, None}
    assert TOO_OLD in old["no_probability_because"].to_list()
    changed = found.with_columns(
        kind=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("together")).otherwise(pl.lit("encounter")),
        **{
            f"relative_velocity_{axis}_km_s": pl.when(pl.int_range(pl.len()) <= 1)
            .then(0.002)
            .otherwise(f"relative_velocity_{axis}_km_s")
            for axis in "rtn"
        },
    )
    told = assess_approaches(changed, elements, model(elements), ObjectRadii(5.0))
    assert told["no_probability_because"][:2].to_list() == [NO_ENCOUNTER, TOO_SLOW]
    assert told["collision_probability"][:2].to_list() == [None, None]
    missing = told["collision_probability"].is_null()
    assert (missing == told["no_probability_because"].is_not_null()).all()


def test_a_published_model_is_read_as_it_was_computed():
    parts = manoeuvred(history(150, 14, 1.0, 0.01), 6, 3, 0.02)
    sets = joined(parts)
    made = build_error_model(sets)
    named = element_errors(made, sets).with_columns(error_model_id=pl.lit("20260808T120000Z-0"))
    read = PublishedErrors.from_tables(named, object_errors(made).reverse())
    at = sets.epoch_micros + 3 * DAY_MICROS
    owner = np.searchsorted(made.sat_no, sets.sat_no)
    classes = made.classes[owner]
    wanted = made.growth.sigma_at(classes, np.full(len(sets), 3.0)) * made.factors[owner]
    assert np.allclose(read.position_sigma(sets, at), wanted[:, :3], rtol=1e-12)
    assert read.model_id == "20260808T120000Z-0"
    (jump,) = element_jumps(made, sets).iter_rows(named=True)
    assert (jump["sat_no"], jump["kind"], jump["taken_for"]) == (4, "manoeuvre", None)
    assert jump["semi_major_axis_change_km"] < -1.0
    (axes,) = draw_growth(element_errors(made, sets)).axes
    assert sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o") >= 4


def test_pictures_are_sound_and_within_their_frame(elements, found):
    rows = select_top_approaches(assess_approaches(found, elements, model(elements), ObjectRadii(5.0)), 5)
    assert rows.height == 5
    assert rows["collision_probability"].is_sorted(descending=True)
    text = format_approaches(rows, {int(rows["sat1_object_designator"][0]): "A | B"})
    assert len(text.splitlines()) == 7
    assert len({line.count("|") for line in text.splitlines()}) == 1, "a name does not break the table"
    for figure in (draw_altitudes(elements), draw_distance(rows.row(0, named=True), elements)):
        (axes,) = figure.axes
        assert max(len(line.get_xdata()) for line in axes.lines) > 50
        assert to_png(figure).startswith(b"\x89PNG")


def test_the_geometry_of_the_first_is_drawn_to_scale(elements, found):
    rows = select_top_approaches(assess_approaches(found, elements, model(elements), ObjectRadii(5.0)), 5)
    assert rows.height == 5
    figure = draw_geometry(rows, elements)
    to_png(figure)
    for axes, axis in zip(figure.axes, "rn", strict=True):
        assert axes.get_aspect() == 1
        assert axes.get_xlim() == axes.get_ylim()
        points = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "o"]
        true = rows.select("relative_position_t_km", f"relative_position_{axis}_km").to_numpy()
        assert np.allclose(points, true)
        assert len(axes.patches) == 5
    # An ellipse's half axes are within the errors of both objects together.
    for row, ellipse in zip(rows.iter_rows(named=True), figure.axes[0].patches, strict=True):
        parts = [row[f"sat{k}_sigma_{axis}_km"] for k in (1, 2) for axis in "rtn"]
        assert max(parts[:2]) * 0.98 <= ellipse.width / 2 <= np.linalg.norm(parts) * 1.02
    unknown = assess_approaches(rows.select(found.columns), elements, None, ObjectRadii(5.0))
    assert not draw_geometry(unknown, elements).axes[0].patches
    to_png(draw_geometry(unknown.clear(), elements))
