"""Conjunction Data Messages of published close approaches, read back by another library."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from ccsds_ndm.ndm_io import NdmIo

from branchlake_dagster.sda.conjunctions.arrow import as_batch
from branchlake_dagster.sda.conjunctions.listing import build_rows
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span, screen
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.messages.cdm import Party, format_cdm, message_id
from branchlake_dagster.sda.messages.errors import NotAMessage
from branchlake_dagster.sda.messages.notation import LONGEST_LINE, Item, Notation, format_text
from branchlake_dagster.sda.messages.parties import parties_of
from branchlake_dagster.sda.orbits.inertial import Frame, rotate_to_frame
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.assessment import assess_approaches
from branchlake_dagster.sda.trust.differences import rtn_axes
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster_tests.sda.test_assessment import model
from branchlake_dagster_tests.suite.raised import raising

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
BEGIN = int(NOON.timestamp()) * 1_000_000
CREATED = datetime(2026, 8, 8, 12, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def sets() -> pl.DataFrame:
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    return frame.with_columns(source=pl.lit("18SDS"), data_mode=pl.lit("REAL"))


@pytest.fixture(scope="module")
def rows(sets: pl.DataFrame) -> pl.DataFrame:
    elements = Elements.from_arrow(sets.to_arrow())
    span = Span.whole(BEGIN, BEGIN + 120 * MINUTE)
    found = pl.DataFrame(as_batch(screen(elements, span, threshold_km=40.0), elements))
    made = assess_approaches(
        build_rows(found, None, span, 40.0, 14.0), elements, model(elements), ObjectRadii(5.0)
    )
    assert made.filter(pl.col("collision_probability").is_not_null()).height > 5
    return made


@pytest.fixture(scope="module")
def row(rows: pl.DataFrame) -> dict[str, Any]:
    known = rows.filter(pl.col("collision_probability").is_not_null()).sort("miss_distance_km")
    return known.row(0, named=True)


@pytest.fixture(scope="module")
def parties(rows: pl.DataFrame, row: dict[str, Any], sets: pl.DataFrame) -> tuple[Party, Party]:
    mine = rows.filter(event_id=row["event_id"])
    (both,) = parties_of(mine, sets, {row["sat1_object_designator"]: "DEB"})
    assert not isinstance(both, NotAMessage)
    return both


def message(row: dict[str, Any], parties: tuple[Party, Party], notation: Notation, **more: Any) -> str:
    given = {"originator": "ABC", "created": CREATED, **more}
    return format_cdm(row, parties, notation=notation, **given)


def test_teme_becomes_gcrf_as_published_and_as_in_another_library():
    """Vallado et al., AIAA 2006-6753, appendix C; and astropy 8.0.2 (through ITRS, without pole offsets)."""
    position = np.array([[5094.18016210, 6127.64465950, 6380.34453270]])
    velocity = np.array([[-4.746131487, 0.785818041, 5.531931288]])
    for at, r, v, tolerance_km in (
        (
            datetime(2004, 4, 6, 7, 51, 28, 386009, tzinfo=UTC),
            [5102.508958, 6123.011401, 6378.136928],
            [-4.743220157, 0.790536497, 5.533755727],
            5e-6,
        ),
        (
            datetime(2026, 8, 9, 6, tzinfo=UTC),
            [5147.136816432193, 6097.422452022652, 6366.782467423017],
            [-4.726955633643229, 0.814207966343929, 5.544230546702238],
            1e-6,
        ),
    ):
        micros = np.array([round(at.timestamp() * 1e6)])
        found = rotate_to_frame(position, micros, Frame.TEME, Frame.GCRF)
        assert np.abs(found - r).max() < tolerance_km
        assert np.abs(rotate_to_frame(velocity, micros, Frame.TEME, Frame.GCRF) - v).max() < 2e-7
        back = rotate_to_frame(
            rotate_to_frame(found, micros, Frame.GCRF, Frame.EME2000), micros, Frame.EME2000, Frame.TEME
        )
        assert np.abs(back - position).max() < 1e-9
    # The frame bias: 17 to 23 milliarcseconds, so half a metre and more at this distance.
    eme2000 = rotate_to_frame(found, micros, Frame.GCRF, Frame.EME2000)
    assert 3e-4 < np.linalg.norm(eme2000 - found) < 1.2e-3


@pytest.mark.parametrize("notation", Notation)
def test_another_library_reads_what_was_published(notation, row, parties):
    read = NdmIo().from_string(message(row, parties, notation))
    assert (read.header.originator, read.header.message_id) == ("ABC", message_id(row))
    assert read.header.creation_date == "2026-08-08T12:30:00.000000"
    relative = read.body.relative_metadata_data
    assert relative.tca == f"{row['tca']:%Y-%m-%dT%H:%M:%S.%f}"
    assert float(relative.miss_distance.value) == pytest.approx(row["miss_distance_km"] * 1e3, abs=5e-4)
    assert float(relative.relative_speed.value) == pytest.approx(row["relative_speed_km_s"] * 1e3, abs=1e-6)
    assert float(relative.collision_probability) == pytest.approx(row["collision_probability"], rel=1e-6)
    assert relative.collision_probability_method == "FOSTER-1992"
    told = [
        float(getattr(relative.relative_state_vector, f"relative_position_{axis}").value) for axis in "rtn"
    ]
    assert told == pytest.approx([row[f"relative_position_{axis}_km"] * 1e3 for axis in "rtn"], abs=1e-3)
    states = []
    for k, segment in enumerate(read.body.segment, 1):
        meta = segment.metadata
        assert (meta.object_value.value, meta.ref_frame.value) == (f"OBJECT{k}", "GCRF")
        assert meta.object_designator == str(row[f"sat{k}_object_designator"])
        assert re.fullmatch(r"UNKNOWN|\d{4}-\d{3}[A-Z]{1,3}", meta.international_designator)
        assert (meta.covariance_method.value, meta.maneuverable.value) == ("DEFAULT", "N/A")
        vector = segment.data.state_vector
        states.append(
            [float(getattr(vector, name).value) for name in ("x", "y", "z", "x_dot", "y_dot", "z_dot")]
        )
        matrix = segment.data.covariance_matrix
        assert float(matrix.ct_t.value) == pytest.approx((row[f"sat{k}_sigma_t_km"] * 1e3) ** 2, rel=1e-8)
        assert (float(matrix.crdot_rdot.value), matrix.crdot_rdot.units.value) == (0.0, "m**2/s**2")
        assert "no orbit determination" in matrix.comment[0]
    assert read.body.segment[0].metadata.object_type.value == "DEBRIS"
    assert read.body.segment[1].metadata.object_type is None
    # The states in the message are those of the encounter: its relative state comes out of them.
    first, second = np.array(states)
    axes = rtn_axes(first[None, :3], first[None, 3:])[0]
    assert axes @ (second - first)[:3] * 1e3 == pytest.approx(told, abs=0.2)
    speed = [
        float(getattr(relative.relative_state_vector, f"relative_velocity_{axis}").value) for axis in "rtn"
    ]
    assert axes @ (second - first)[3:] * 1e3 == pytest.approx(speed, abs=0.1)


def test_both_notations_keep_the_standards_rules_of_lines(row, parties):
    kvn = message(row, parties, Notation.KVN)
    lines = kvn.splitlines()
    assert lines[0] == "CCSDS_CDM_VERS = 1.0"
    assert max(map(len, [*lines, *message(row, parties, Notation.XML).splitlines()])) <= LONGEST_LINE
    assert all(" " <= one <= "~" for line in lines for one in line)
    values = [line.split(" = ", 1)[1].split(" [")[0] for line in lines if not line.startswith("COMMENT")]
    assert [value for value in values if value != value.upper()] == []
    numbers = [value for value in values if re.fullmatch(r"-?\d+\.\d+", value)]
    assert len(numbers) > 15
    assert max(len(value.strip("-").replace(".", "")) for value in numbers) <= 16
    assert sum(bool(re.match(r"C[RTN](DOT)?_[RTN](DOT)? = ", line)) for line in lines) == 2 * 21


def test_an_unknown_covariance_is_to_be_discounted(row, parties):
    unknown = {**row, "collision_probability": None, "no_probability_because": "no error model"}
    unknown |= {f"sat1_sigma_{axis}_km": None for axis in "rtn"}
    for notation in Notation:
        read = NdmIo().from_string(message(unknown, parties, notation))
        first, second = (segment.data.covariance_matrix for segment in read.body.segment)
        assert float(first.cr_r.value) == float(first.cn_n.value) == 0.0 < float(second.cr_r.value)
        assert "not known" in first.comment[0]
        assert read.body.relative_metadata_data.collision_probability is None
        assert "No probability: no error model." in read.body.relative_metadata_data.comment


HOSTILE = "x<a>&amp;\"'\r\nORIGINATOR = EVIL\nCOMMENT é [km] \x00 ]]>\u2028y"


def test_a_name_adds_no_line_no_tag_and_no_unit(row, parties):
    named = (replace(parties[0], name=HOSTILE, source=HOSTILE, data_mode=HOSTILE), parties[1])
    for notation in Notation:
        # Data mode adds its comment to both.
        plain = message(row, (replace(parties[0], data_mode="TEST"), parties[1]), notation)
        made = message(row, named, notation)
        assert len(made.splitlines()) == len(plain.splitlines())
        read = NdmIo().from_string(made)
        assert read.header.originator == "ABC"
        assert read.body.segment[0].metadata.object_name == format_text(HOSTILE)
    assert not set(format_text(HOSTILE)) & set("\n\r[]=\x00é")
    assert format_text(None) == format_text(" \n ") == "UNKNOWN"
    assert len(format_text("a" * 10_000)) == 120
    for value in ("", "two\nlines", "é", "a" * 300):
        with pytest.raises(NotAMessage):
            Item("OBJECT_NAME", value)


def test_what_is_simulated_says_so(row, parties):
    assert "NOT REAL" not in message(row, parties, Notation.KVN)
    simulated = (parties[0], replace(parties[1], data_mode="SIMULATED"))
    assert "COMMENT NOT REAL: data mode of the element sets is SIMULATED." in message(
        row, simulated, Notation.KVN
    )


def test_what_cannot_be_a_message_is_an_error(row, parties):
    for wrong, reason, keyword in (
        ({"kind": "together"}, "no_closest_approach", None),
        ({"kind": "edge"}, "no_closest_approach", None),
        ({"miss_distance_km": float("nan")}, "number", "MISS_DISTANCE"),
        ({"sat1_sigma_r_km": float("inf")}, "number", "CR_R"),
    ):
        with raising(NotAMessage, reason=reason, subject=keyword):
            message({**row, **wrong}, parties, Notation.KVN)
    for originator in ("", "A\nB = C", "ä", "<x>"):
        with raising(NotAMessage, reason="value", subject="ORIGINATOR"):
            message(row, parties, Notation.XML, originator=originator)


def test_a_message_has_one_id_for_an_event_in_a_list(row, rows):
    assert message_id(row) == message_id(dict(reversed(row.items())))
    assert re.fullmatch(r"[A-Z0-9_-]{1,100}", message_id(row))
    later = row["screened_from"] + timedelta(hours=1)
    assert message_id({**row, "screened_from": later}) != message_id(row)
    assert message_id({**row, "sat2_element_epoch": later}) != message_id(row)
    assert rows.height == len({message_id(one) for one in rows.iter_rows(named=True)})
    # A zone is a way to write a time.
    away = rows.with_columns(pl.col(pl.Datetime).dt.convert_time_zone("Asia/Tokyo"))
    assert message_id(away.filter(event_id=row["event_id"]).row(0, named=True)) == message_id(row)


def test_states_are_those_that_were_screened_or_there_is_no_message(row, rows, sets):
    one = pl.col("sat_no") == row["sat2_object_designator"]
    moved = sets.with_columns(
        mean_anomaly=pl.when(one).then(pl.col("mean_anomaly") + 0.01).otherwise("mean_anomaly")
    )
    mine = rows.filter(event_id=row["event_id"])
    (others,) = parties_of(mine, moved, {})
    assert isinstance(others, NotAMessage)
    assert "others than were screened" in str(others)
    (gone,) = parties_of(mine, sets.filter(~one), {})
    assert isinstance(gone, NotAMessage)
    assert "not in the lake any more" in str(gone)
    # Beside another of the same epoch the right one is found.
    (both,) = parties_of(mine, pl.concat([moved, sets]), {})
    assert not isinstance(both, NotAMessage)
    assert parties_of(rows.clear(), sets, {}) == []
    assert all(not isinstance(each, NotAMessage) for each in parties_of(rows, sets, {}))
