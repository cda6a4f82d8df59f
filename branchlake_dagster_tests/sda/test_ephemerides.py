"""Own ephemerides: written, read back by another library and by us, and screened against a catalogue."""

from __future__ import annotations

import gzip
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from ccsds_ndm.mapping import NDMFileFormats
from ccsds_ndm.ndm_io import NdmIo
from hypothesis import given, settings
from hypothesis import strategies as st

from branchlake_dagster import column_metadata
from branchlake_dagster.sda.assets.ephemerides import files_of
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Encounters, Kind, Span, screen
from branchlake_dagster.sda.contracts import EphemerisConjunction
from branchlake_dagster.sda.ephemerides.listing import screened_file
from branchlake_dagster.sda.ephemerides.screening import screen_tracks
from branchlake_dagster.sda.ephemerides.track import Track, tracks_of
from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.messages.errors import NotAMessage, UnreadableMessage
from branchlake_dagster.sda.messages.notation import Notation
from branchlake_dagster.sda.messages.oem import Method, Segment, format_oem
from branchlake_dagster.sda.messages.oem_read import read_oem, to_utc
from branchlake_dagster.sda.orbits.inertial import Frame, rotate_to_frame
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites
from branchlake_dagster.tables.schemas import format_type, stored_type
from branchlake_dagster_tests.suite.raised import raising

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
BEGIN = int(NOON.timestamp()) * 1_000_000
HOURS = 3
END = BEGIN + HOURS * 60 * MINUTE
THRESHOLD_KM = 60.0
KINDS = list(Kind)


@pytest.fixture(scope="module")
def elements() -> Elements:
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    return Elements.from_arrow(frame.to_arrow())


@pytest.fixture(scope="module")
def whole(elements: Elements) -> Encounters:
    return screen(elements, Span.whole(BEGIN, END), threshold_km=THRESHOLD_KM)


@pytest.fixture(scope="module")
def one(whole: Encounters) -> int:
    """The row with the most close approaches."""
    return int(np.bincount(np.concatenate([whole.first, whole.second])).argmax())


def segment(
    elements: Elements,
    row: int,
    *,
    begin: int = BEGIN,
    end: int = END,
    step_s: float = 60.0,
    margin: int = 10,
    frame: Frame = Frame.TEME,
    **more: Any,
) -> Segment:
    step = round(step_s * 1e6)
    micros = np.arange(begin - margin * step, end + margin * step + 1, step, dtype=np.int64)
    states = propagate_satellites(elements.take(np.array([row])).to_satrec_array(), micros)
    position, velocity = (
        rotate_to_frame(values[0], micros, Frame.TEME, frame) for values in (states.position, states.velocity)
    )
    how = {"method": Method.LAGRANGE, "degree": 8, **more}
    return Segment("A <SAT> & B", "2020-001A", frame, micros, position, velocity, begin, end, **how)


def message(*segments: Segment, notation: Notation = Notation.KVN) -> bytes:
    made = format_oem(segments, originator="ABC", created=NOON, notation=notation, note="a note")
    return made.encode("ascii")


def others(elements: Elements, row: int) -> tuple[Elements, np.ndarray]:
    rows = np.delete(np.arange(len(elements)), row)
    return elements.take(rows), rows


def of_one(whole: Encounters, row: int) -> dict[tuple[int, str], list[tuple[int, float, float, int]]]:
    """By the other row and kind: times, distances, speeds and minutes."""
    found: dict[tuple[int, str], list[tuple[int, float, float, int]]] = {}
    for k, kind in enumerate(whole.kinds):
        first, second = int(whole.first[k]), int(whole.second[k])
        if row in (first, second):
            other = second if row == first else first
            speed = float(np.linalg.norm(whole.velocity[k]))
            told = (int(whole.tca_micros[k]), float(whole.miss_km[k]), speed, int(whole.minutes[k]))
            found.setdefault((other, str(kind)), []).append(told)
    return found


def same(
    mine: Encounters, rows: np.ndarray, wanted: dict[tuple[int, str], Any], km: float = 1e-3, s: float = 0.01
) -> None:
    found = of_one(replace(mine, second=rows[mine.second]), -1)
    assert {key: len(values) for key, values in found.items()} == {
        key: len(values) for key, values in wanted.items()
    }
    for key, values in wanted.items():
        for told, true in zip(sorted(found[key]), sorted(values), strict=True):
            # When two that are docked are closest is a matter of rounding.
            assert key[1] == "together" or abs(told[0] - true[0]) <= max(s, km / max(true[2], 1e-3)) * 1e6, (
                key
            )
            assert abs(told[1] - true[1]) <= km, key
            assert (abs(told[2] - true[2]) < 2e-3, told[3]) == (True, true[3]), key


# -- screening -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", Frame)
@pytest.mark.parametrize("notation", Notation)
def test_an_ephemeris_of_an_element_set_has_the_close_approaches_of_the_element_set(
    elements, whole, one, frame, notation
):
    read = read_oem(message(segment(elements, one, frame=frame), notation=notation), "a file")
    assert read.rejected.is_empty()
    rest, rows = others(elements, one)
    mine = screen_tracks(tracks_of(read.segments), rest, BEGIN, END, threshold_km=THRESHOLD_KM)
    wanted = of_one(whole, one)
    assert sum(len(values) for values in wanted.values()) > 10
    same(mine, rows, wanted)


@pytest.mark.long
def test_every_object_of_all_has_its_own(elements, whole):
    """Docked ones and deep space too; what the sieve would lose is missed here."""
    for row in range(0, len(elements), 7):
        track = Track.from_segment(segment(elements, row))
        rest, rows = others(elements, row)
        mine = screen_tracks([track], rest, BEGIN, END, threshold_km=THRESHOLD_KM)
        same(mine, rows, of_one(whole, row), km=0.02, s=0.05)


@pytest.mark.long
def test_it_is_what_dense_sampling_finds_also_under_thrust(elements, one):
    """No sieve, a state each second; the ephemeris pushes itself off its orbit by a centimetre a second²."""
    flown = segment(elements, one)
    t = (flown.micros - BEGIN)[:, None] / 1e6
    push = np.array([6e-6, -4e-6, 8e-6])
    burns = np.clip(t, 0, 1200)
    way = push * (burns**2 / 2 + burns * np.maximum(t - 1200, 0))
    flown = replace(flown, position=flown.position + way, velocity=flown.velocity + push * burns)
    track = Track.from_segment(flown)
    rest, _ = others(elements, one)
    mine = screen_tracks([track], rest, BEGIN, END, threshold_km=THRESHOLD_KM)
    instants = np.arange(BEGIN, END + 1, 1_000_000, dtype=np.int64)
    own, _ = track.at(instants)
    found = set()
    for begin in range(0, len(instants) - 1, 600):
        few = slice(begin, begin + 602)
        states = propagate_satellites(rest.to_satrec_array(), instants[few])
        distance = np.linalg.norm(states.position - own[few], axis=2)
        rows, at = np.nonzero(
            (distance[:, 1:-1] <= distance[:, :-2])
            & (distance[:, 1:-1] < distance[:, 2:])
            & (distance[:, 1:-1] < THRESHOLD_KM - 15)
        )
        found |= {(int(row), begin + int(k) + 1) for row, k in zip(rows, at, strict=True)}
    assert len(found) >= 5
    told = {
        (int(row), int(at))
        for row, at in zip(mine.second, (mine.tca_micros - BEGIN) // 1_000_000, strict=True)
    }
    lost = {(row, at) for row, at in found if not {(row, at + k) for k in (-2, -1, 0, 1, 2)} & told}
    assert not lost
    own, _ = track.at(mine.tca_micros)
    for k in range(len(mine.tca_micros)):
        state = propagate_satellites(
            rest.take(mine.second[k : k + 1]).to_satrec_array(), mine.tca_micros[k : k + 1]
        )
        assert np.linalg.norm(state.position[0, 0] - own[k]) == pytest.approx(mine.miss_km[k], abs=1e-9)


def test_a_gap_is_not_crossed_and_segments_that_touch_are_one(elements, whole, one):
    middle = BEGIN + 80 * MINUTE
    rest, rows = others(elements, one)
    touching = [segment(elements, one, end=middle), segment(elements, one, begin=middle)]
    mine = screen_tracks(tracks_of(touching), rest, BEGIN, END, threshold_km=THRESHOLD_KM)
    same(mine, rows, of_one(whole, one))
    # A gap that begins seconds before an encounter.
    near = [
        tca for (_, kind), values in of_one(whole, one).items() if kind == "encounter" for tca, *_ in values
    ]
    middle = (
        min((tca for tca in near if tca < END - 60 * MINUTE), key=lambda tca: tca % MINUTE) // MINUTE * MINUTE
    )
    gap = [segment(elements, one, end=middle), segment(elements, one, begin=middle + 40 * MINUTE)]
    apart = screen_tracks(tracks_of(gap), rest, BEGIN, END, threshold_km=THRESHOLD_KM)
    inside = (apart.tca_micros > middle) & (apart.tca_micros < middle + 40 * MINUTE)
    assert not inside.any()
    parts = [Span.whole(BEGIN, middle), Span.whole(middle + 40 * MINUTE, END)]
    both = [of_one(screen(elements, span, threshold_km=THRESHOLD_KM), one) for span in parts]
    edges = sum(len(v) for part in both for (_, kind), v in part.items() if kind == "edge")
    assert edges == sum(kind is Kind.EDGE for kind in apart.kinds) > 0
    encounters = sum(len(v) for part in both for (_, kind), v in part.items() if kind == "encounter")
    assert encounters == sum(kind is Kind.ENCOUNTER for kind in apart.kinds)


def test_a_close_approach_at_the_instant_that_two_segments_share_is_reported_once(elements, whole, one):
    met = next(
        k
        for k, kind in enumerate(whole.kinds)
        if kind is Kind.ENCOUNTER and one in (whole.first[k], whole.second[k])
    )
    for shift in (-400_000, -1, 0, 1, 400_000):
        middle = int(whole.tca_micros[met]) + shift
        parts = [segment(elements, one, end=middle), segment(elements, one, begin=middle)]
        rest, rows = others(elements, one)
        mine = screen_tracks(tracks_of(parts), rest, BEGIN, END, threshold_km=THRESHOLD_KM)
        same(mine, rows, of_one(whole, one))


def test_only_what_may_be_used_and_what_is_asked_for_is_screened(elements, one):
    rest, _ = others(elements, one)
    late = segment(elements, one, begin=BEGIN + 90 * MINUTE + 1_234_567)
    mine = screen_tracks([Track.from_segment(late)], rest, BEGIN, END, threshold_km=THRESHOLD_KM)
    assert mine.tca_micros.min() >= BEGIN + 90 * MINUTE + 1_234_567
    nothing = screen_tracks(
        [Track.from_segment(late)], rest, BEGIN, BEGIN + 90 * MINUTE, threshold_km=THRESHOLD_KM
    )
    assert len(nothing.first) == 0
    assert len(screen_tracks([], rest, BEGIN, END, threshold_km=5.0).first) == 0
    assert (
        len(
            screen_tracks(
                [Track.from_segment(late)], rest.take(np.zeros(0, np.int64)), BEGIN, END, threshold_km=5
            ).first
        )
        == 0
    )


# -- interpolation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "degree"),
    [
        (Method.HERMITE, 3),
        (Method.HERMITE, 7),
        (Method.LAGRANGE, 3),
        (Method.LAGRANGE, 8),
        (Method.LINEAR, 1),
    ],
)
def test_a_polynomial_of_the_degree_is_met_exactly_and_its_acceleration_bounded(method, degree):
    rng = np.random.default_rng(5)
    micros = np.cumsum(rng.integers(20, 90, 40)) * 1_000_000 + BEGIN
    scale = (micros[-1] - micros[0]) / 1e6
    terms = rng.normal(size=(degree + 1, 3)) * 100
    curve = np.polynomial.Polynomial

    def at(when, order=0):
        x = (when - micros[0]) / 1e6 / scale
        return (
            np.stack(
                [curve(terms[:, k]).deriv(order)(x) if order else curve(terms[:, k])(x) for k in range(3)], 1
            )
            / scale**order
        )

    made = Segment(
        "a",
        "b",
        Frame.TEME,
        micros,
        at(micros),
        at(micros, 1),
        int(micros[0]),
        int(micros[-1]),
        method,
        degree,
    )
    track = Track.from_segment(made)
    when = np.linspace(micros[0], micros[-1], 1_001).astype(np.int64)
    position, velocity = track.at(when)
    assert np.abs(position - at(when)).max() < 1e-8
    assert np.abs(velocity - at(when, 1)).max() < 1e-8
    bound, leaps, jumps = track.bounds()
    piece = np.clip(np.searchsorted(micros, when, side="right") - 1, 0, len(micros) - 2)
    if degree > 1:
        size = np.linalg.norm(at(when, 2), axis=1)
        assert (size <= bound[piece] * (1 + 1e-6) + 1e-12).all()
        assert bound.max() < 3 * size.max()
    assert max(jumps.max(), leaps.max()) < 1e-8
    assert np.isnan(track.at(np.array([micros[0] - 1, micros[-1] + 1]))[0]).all()


def test_states_that_do_not_suit_their_degree_are_an_error(elements):
    made = segment(elements, 3, end=BEGIN + 60 * MINUTE, degree=15)
    Track.from_segment(made)
    crowded = made.micros.copy()
    crowded[1::2] = crowded[::2][: len(crowded[1::2])] + 1
    with raising(UnreadableMessage, "2026-08-08T1", reason="interpolation", subject=made.object_name):
        Track.from_segment(replace(made, micros=crowded))
    noisy = made.position + np.random.default_rng(1).normal(size=made.position.shape) * 100
    with raising(UnreadableMessage, "LAGRANGE", 15, reason="interpolation", subject=made.object_name):
        Track.from_segment(replace(made, position=noisy))


# -- reading and writing -------------------------------------------------------------------------------


@pytest.mark.parametrize("notation", Notation)
def test_another_library_reads_ours_and_we_read_what_it_writes(elements, notation):
    parts = [
        segment(elements, 3, end=BEGIN + 20 * MINUTE, frame=Frame.EME2000),
        segment(
            elements, 3, begin=BEGIN + 20 * MINUTE, end=BEGIN + 50 * MINUTE, frame=Frame.EME2000, degree=5
        ),
    ]
    theirs = NdmIo().from_string(message(*parts, notation=notation).decode())
    assert (theirs.header.originator, len(theirs.body.segment)) == ("ABC", 2)
    for mine, read in zip(parts, theirs.body.segment, strict=True):
        meta = read.metadata
        assert (meta.object_name, meta.object_id, meta.ref_frame) == ("A <SAT> & B", "2020-001A", "EME2000")
        assert (meta.interpolation, int(meta.interpolation_degree)) == ("LAGRANGE", mine.degree)
        vectors = read.data.state_vector
        assert len(vectors) == len(mine.micros)
        told = [
            [float(getattr(one, name).value) for name in ("x", "y", "z", "x_dot", "y_dot", "z_dot")]
            for one in vectors
        ]
        assert np.abs(np.array(told) - np.hstack([mine.position, mine.velocity])).max() < 1e-9
        assert (
            vectors[0].epoch
            == f"{NOON + timedelta(microseconds=int(mine.micros[0]) - BEGIN):%Y-%m-%dT%H:%M:%S.%f}"
        )
    for form in (NDMFileFormats.KVN, NDMFileFormats.XML):
        read = read_oem(NdmIo().to_string(theirs, form).encode(), "theirs")
        assert read.rejected.is_empty(), read.rejected
        assert len(read.segments) == 2
        for mine, back in zip(parts, read.segments, strict=True):
            assert (back.micros == mine.micros).all()
            assert np.abs(back.position - mine.position).max() < 1e-9
            assert (back.begin, back.end, back.frame, back.degree) == (
                mine.begin,
                mine.end,
                mine.frame,
                mine.degree,
            )


def test_time_systems_are_brought_to_utc():
    at = np.array([BEGIN], np.int64)
    # In 2026 as since 2017: TAI - UTC is 37 s; GPS is 19 s behind TAI, TT 32.184 s ahead of it.
    assert [(BEGIN - int(to_utc(at, name)[0])) for name in ("UTC", "TAI", "GPS", "TT")] == [
        0,
        37_000_000,
        18_000_000,
        69_184_000,
    ]
    before = np.array([int(datetime(2016, 12, 31, 12, tzinfo=UTC).timestamp()) * 1_000_000])
    assert before[0] - to_utc(before, "TAI")[0] == 36_000_000
    fine = BEGIN + np.arange(0, 86_400_000_000, 7_777_777_777, dtype=np.int64)
    assert (fine - to_utc(fine, "GPS") == 18_000_000).all()


def kvn(lines: list[str], **changed: str | None) -> bytes:
    meta: dict[str, str | None] = {
        "OBJECT_NAME": "X",
        "OBJECT_ID": "1998-067A",
        "CENTER_NAME": "EARTH",
        "REF_FRAME": "TEME",
        "TIME_SYSTEM": "UTC",
        "START_TIME": "2026-08-08T12:00:00",
        "STOP_TIME": "2026-08-08T14:00:00",
    } | changed
    told = "\n".join(f"{name} = {value}" for name, value in meta.items() if value is not None)
    head = "CCSDS_OEM_VERS = 2.0\nCREATION_DATE = 2026-08-08T00:00:00\nORIGINATOR = X\n"
    return f"{head}META_START\n{told}\nMETA_STOP\n".encode() + "\n".join(lines).encode() + b"\n"


@pytest.fixture(scope="module")
def lines(elements: Elements) -> list[str]:
    made = message(segment(elements, 3, end=BEGIN + 60 * MINUTE, margin=0)).decode()
    return [line for line in made.splitlines() if line[:1].isdigit()]


def edited(line: str, place: int, value: str) -> str:
    parts = line.split()
    parts[place] = value
    return " ".join(parts)


@pytest.mark.parametrize(
    ("place", "value", "reason", "field"),
    [
        (0, "2026-02-30T12:10:00", "field", "epoch"),
        (0, "2026-08-08T12:10:60", "field", "epoch"),
        (0, "1026-08-08T12:10:00", "field", "epoch"),
        (0, "nonsense", "field", "epoch"),
        (0, "2026-08-08T12:09:00", "order", "epoch"),
        (0, "2026-08-08T11:00:00", "order", "epoch"),
        (0, "2099-08-08T11:00:00", "order", "epoch"),
        (1, "NaN", "field", "x"),
        (2, "inf", "field", "y"),
        (3, "1e400", "field", "z"),
        (4, "0x10", "field", "x_dot"),
        (5, "7,5", "field", "y_dot"),
        (1, "7000000.0", "field", "x"),
        (6, "7500.0", "field", "x_dot"),
        (1, "6900.0", "displacement", "x"),
        (6, "1.0 2.0", "truncated", None),
    ],
)
def test_a_damaged_line_is_a_record_and_a_hole_and_its_neighbours_are_unharmed(
    lines, place, value, reason, field
):
    broken = [*lines[:20], edited(lines[20], place, value), *lines[21:]]
    read = read_oem(kvn(broken), "a file")
    assert read.rejected.select("line_number", "reason", "field", "object_name").rows() == [
        (33, reason, field, "X")
    ], read.rejected.rows()
    assert read.rejected["raw_text"][0] == broken[20]
    before, after = read.segments
    assert (len(before.micros), len(after.micros)) == (20, 40)
    assert (before.end, after.begin) == (BEGIN + 19 * MINUTE, BEGIN + 21 * MINUTE)


@pytest.mark.parametrize(
    ("changed", "reason", "field"),
    [
        ({"CENTER_NAME": "MARS"}, "unsupported", "center_name"),
        ({"REF_FRAME": "ITRF2014"}, "unsupported", "ref_frame"),
        ({"TIME_SYSTEM": "TDB"}, "unsupported", "time_system"),
        ({"TIME_SYSTEM": None}, "metadata", "time_system"),
        ({"OBJECT_NAME": ""}, "metadata", "object_name"),
        ({"INTERPOLATION": "SPLINE", "INTERPOLATION_DEGREE": "3"}, "unsupported", "interpolation"),
        ({"INTERPOLATION": "LAGRANGE"}, "unsupported", "interpolation_degree"),
        ({"INTERPOLATION": "LAGRANGE", "INTERPOLATION_DEGREE": "99"}, "unsupported", "interpolation_degree"),
        ({"INTERPOLATION": "LAGRANGE", "INTERPOLATION_DEGREE": "٣"}, "unsupported", "interpolation_degree"),
        ({"START_TIME": "soon"}, "metadata", "start_time"),
        ({"STOP_TIME": "2026-08-08T11:00:00"}, "metadata", "stop_time"),
        ({"OBJECT_ID": "A\nOBJECT_ID = B"}, "metadata", "object_id"),
    ],
)
def test_a_segment_that_cannot_be_used_is_a_record(lines, changed, reason, field):
    read = read_oem(kvn(lines, **changed), "a file")
    assert read.segments == []
    assert read.rejected.select("line_number", "reason", "field").rows() == [(4, reason, field)]


def test_too_few_states_for_the_degree_are_no_segment(lines):
    how = {"INTERPOLATION": "LAGRANGE", "INTERPOLATION_DEGREE": "8"}
    assert len(read_oem(kvn(lines[:9], **how), "a file").segments) == 1
    read = read_oem(kvn(lines[:8], **how), "a file")
    assert (read.segments, read.rejected["reason"].to_list()) == ([], ["too_few_records"])
    assert read_oem(kvn([]), "a file").rejected["reason"].to_list() == ["too_few_records"]


@pytest.mark.long
def test_a_jump_ends_what_is_interpolated(elements, lines):
    moved = [edited(line, 1, f"{float(line.split()[1]) + 50:.6f}") for line in lines[30:]]
    read = read_oem(kvn([*lines[:30], *moved]), "a file")
    assert read.rejected["reason"].to_list() == ["displacement"]
    assert [len(one.micros) for one in read.segments] == [30, 30]
    # Hundreds of thousands of repeated lines cost no more than as many good ones.
    many = read_oem(kvn([*lines, *lines[-1:] * 200_000]), "a file")
    assert many.rejected["reason"].value_counts().rows() == [("order", 200_000)]
    assert len(many.segments[0].micros) == len(lines)


def test_what_is_read_is_what_the_file_may_be_used_for(lines):
    span = {"USEABLE_START_TIME": "2026-220T12:10:30.5Z", "USEABLE_STOP_TIME": "2026-08-08T12:50:00"}
    (read,) = read_oem(
        kvn(["COMMENT x", "", *lines, "COVARIANCE_START", "EPOCH = x", "1.0", "COVARIANCE_STOP"], **span), "f"
    ).segments
    assert (read.begin, read.end) == (BEGIN + 10 * MINUTE + 30_500_000, BEGIN + 50 * MINUTE)
    assert (read.method, read.degree) == (Method.HERMITE, 7)
    for ending in ("\r\n", "\r"):
        again = read_oem(kvn(lines, **span).replace(b"\n", ending.encode()), "f").segments[0]
        assert (again.micros == read.micros).all()
    (again,) = read_oem(gzip.compress(kvn(lines, **span)), "f").segments
    assert (again.position == read.position).all()


XML_BOMB = (
    b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><oem version="2.0">&c;</oem>'
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"hello", "beginning"),
        (b"CCSDS_OEM_VERS = 2.0\n", "no_segment"),
        (b"CCSDS_OMM_VERS = 2.0\n", "beginning"),
        (b"CCSDS_OEM_VERS = 9.0\nMETA_START\nMETA_STOP\n", "version"),
        (b"<a/>", "no_oem"),
        (b"<oem version='2.0'><body>", "not_xml"),
        (b"<oem version='2.0'>" + b"<a>" * 100, "depth"),
        (XML_BOMB, "dtd"),
        (b"<ndm><oem version='2.0'/><oem version='2.0'/></ndm>", "several"),
        (gzip.compress(b"x" * 5_000_000), "damaged"),
        (gzip.compress(b"x" * 5_000)[:-10], "damaged"),
        (b"META_START\n" * 20_000, "beginning"),
        (b"CCSDS_OEM_VERS = 2.0\n" + b"META_START\nMETA_STOP\n" * 20_000, "too_many_segments"),
        (b"\x00\xff" * 1_000, "beginning"),
    ],
    # Not by its bytes: gzip's have the time in them, and two workers would collect different tests.
    ids=lambda one: one if isinstance(one, str) else "file",
)
def test_a_file_that_is_no_ephemeris_is_an_error_that_says_why(content, reason):
    with raising(UnreadableMessage, reason=reason, subject="a file"):
        read_oem(content, "a file", limits=ReadLimits(max_bytes=1_000_000))


def test_a_cut_file_is_used_as_far_as_it_goes(elements):
    whole = message(segment(elements, 3))
    half = whole[: len(whole) // 2]
    read = read_oem(half, "a file")
    assert read.rejected.height <= 1
    assert read.segments[0].end < END
    xml = message(segment(elements, 3), notation=Notation.XML)
    with raising(UnreadableMessage, reason="not_xml", subject="a file"):
        read_oem(xml[: len(xml) // 2], "a file")


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 20_000), data=st.binary(max_size=40), xml=st.booleans())
def test_a_changed_file_is_read_refused_or_reported(place, data, xml):
    frame = simulated_elements(seed=4, objects=5, epoch=NOON).sort("sat_no")
    made = segment(Elements.from_arrow(frame.to_arrow()), 1, end=BEGIN + 30 * MINUTE)
    whole = message(made, notation=Notation.XML if xml else Notation.KVN)
    at = place % len(whole)
    try:
        read = read_oem(whole[:at] + data + whole[at + len(data) :], "a file")
    except UnreadableMessage:
        return
    for one in read.segments:
        assert (np.diff(one.micros) > 0).all()
        assert np.isfinite(one.position).all()
        try:
            position, _ = Track.from_segment(one).at(np.linspace(one.begin, one.end, 50).astype(np.int64))
        except UnreadableMessage:
            continue
        assert np.isfinite(position).all()
    assert all(first.end <= second.begin for first, second in pairwise(read.segments))


def test_a_name_cannot_add_a_line_to_what_is_written(elements):
    made = segment(elements, 3, end=BEGIN + 10 * MINUTE)
    hostile = replace(made, object_name="A\nMETA_STOP\n]]><x> é =", object_id="\n")
    for notation in Notation:
        (read,) = read_oem(message(hostile, notation=notation), "a file").segments
        assert (read.object_id, len(read.micros)) == ("UNKNOWN", len(made.micros))
        assert "\n" not in read.object_name
        assert len(message(hostile, notation=notation).splitlines()) == len(
            message(made, notation=notation).splitlines()
        )
    with pytest.raises(NotAMessage):
        format_oem([made], originator="A\nB", created=NOON, notation=Notation.KVN)


def test_a_folder_is_screened_into_a_table(elements, whole, one, tmp_path):
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    itself = frame["object_id"][one]
    flown = replace(segment(elements, one), object_id=itself.lower())
    (tmp_path / "a.oem").write_bytes(message(flown))
    (tmp_path / "b.xml.gz").write_bytes(gzip.compress(message(flown, notation=Notation.XML)))
    (tmp_path / "notes.txt").write_text("no ephemeris")
    paths = files_of(str(tmp_path))
    assert [path.name for path in paths] == ["a.oem", "b.xml.gz"]
    how: dict[str, Any] = {"threshold_km": THRESHOLD_KM, "max_element_age_days": 14.0}
    reads = [read_oem(path.read_bytes(), path.name) for path in paths]
    first, second = (screened_file("a", read, frame, exclude=[], **how) for read in reads)
    assert first.equals(second)
    assert first.height == sum(len(values) for values in of_one(whole, one).values())
    assert set(first["sat1_source"]) == {"ephemeris"}
    assert first["sat2_name"].null_count() == 0
    left = int(first["sat2_object_designator"][0])
    fewer = screened_file("a", reads[0], frame, exclude=[left], **how)
    assert fewer.height == first.filter(pl.col("sat2_object_designator") != left).height < first.height
    columns = {
        one.name: one.type for one in column_metadata(EphemerisConjunction)["dagster/column_schema"].columns
    }
    schema = first.clear().to_arrow().schema
    assert list(columns.items()) == [
        (one.name, format_type(stored_type(one.type, one.name, ""), table_name="")) for one in schema
    ]
    for empty in (tmp_path / "none", tmp_path / "a.oem"):
        with raising(UnreadableMessage, reason="no_file", subject=str(empty)):
            files_of(str(empty))
