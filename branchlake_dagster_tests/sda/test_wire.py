"""The three formats: what is sent is had again, and whatever else comes has a reason."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.wire import columns, links, optical, radar
from branchlake_dagster.sda.wire.columns import DECODED
from branchlake_dagster.sda.wire.links import LINK, decode_links, encode_links, link_rows
from branchlake_dagster.sda.wire.optical import decode_optical, encode_optical
from branchlake_dagster.sda.wire.radar import RADAR, decode_radar, encode_radar, radar_rows

ENCODE = {"radar": encode_radar, "optical": encode_optical, "isl": encode_links}
DECODE = {"radar": decode_radar, "optical": decode_optical, "isl": decode_links}


@cache
def native(kind: str) -> pl.DataFrame:
    """What the pipeline's own simulation measures in an hour."""
    elements = Elements.from_arrow(
        simulated_elements(seed=1, objects=400, epoch=REFERENCE_EPOCH).to_arrow().sort_by("sat_no")
    )
    start = int(datetime(2026, 8, 8, tzinfo=UTC).timestamp() * 1e6)
    return simulate(elements, kind=kind, start=start, end=start + 3_600_000_000, seed=1)


@pytest.mark.parametrize("kind", ENCODE)
def test_what_is_sent_is_had_again(kind: str) -> None:
    sent = native(kind)
    assert sent.height > 50
    batch, reasons = DECODE[kind](ENCODE[kind](sent))
    assert reasons.null_count == len(reasons) == sent.height
    assert batch.schema == DECODED
    batch.validate(full=True)
    had = pl.DataFrame(pl.from_arrow(batch))
    # A radar and a telescope do not know the object, only their own tracks; 32-bit sigmas are rounded.
    inexact = {"obs_id", "sensor_timestamp", "track_id"} | ({"sat_no"} if kind != "isl" else set())
    exact = [c for c in had.columns if c not in inexact and not c.startswith("sigma")]
    assert had.select(exact).equals(sent.select(exact))
    for name in (c for c in had.columns if c.startswith("sigma")):
        assert np.allclose(had[name].cast(pl.Float64), sent[name], rtol=1e-7, equal_nan=True) or (
            had[name].null_count() == sent[name].null_count() == sent.height
        )
    if kind != "isl":  # a link names its partner, whatever the contact
        assert had["sat_no"].null_count() == sent.height
        tracks = pl.DataFrame({"had": had["track_id"], "sent": sent["track_id"]}).unique()
        assert tracks["had"].is_unique().all()
        assert tracks["sent"].is_unique().all()
    assert had["sensor_timestamp"].dt.timestamp("us").equals(sent["timestamp_ns"] // 1_000, null_equal=True)
    if kind == "optical":
        assert had["obs_id"].n_unique() == sent.height
        assert {uuid.UUID(one).version for one in had["obs_id"]} == {8}


def test_the_layouts_have_the_documented_sizes_and_offsets() -> None:
    assert RADAR.itemsize == 64
    assert LINK.itemsize == 88
    offsets = {name: RADAR.fields[name][1] for name in RADAR.names or ()}
    assert offsets["timestamp_ns"] == 8
    assert offsets["range_m"] == 16
    assert offsets["sigma_range_m"] == 48
    assert offsets["reserved"] == 56


FINITE = st.floats(allow_nan=False, allow_infinity=False)
GOOD = {
    "obs_id": st.uuids().map(str),
    "timestamp_ns": st.integers(1, 2**63 - 1),
    "ra_rad": st.floats(0, 6.283),
    "dec_rad": st.floats(-1.57, 1.57),
    "sigma_arcsec": st.floats(1e-300, 1e300),
    "site_id": st.sampled_from(["optical-01", "optical-08"]),
}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 14),
            st.integers(0, 2**32 - 1),
            st.integers(1, 2**63 - 1),
            st.floats(1e-3, 1e12),
            st.floats(-25_000, 25_000),
            st.floats(0, 2 * np.pi),
            st.floats(-np.pi / 2, np.pi / 2),
            st.floats(0.001953125, 1e6, width=32),
            st.floats(0.001953125, 1e6, width=32),
            st.integers(0, 2**64 - 1),
        ),
        min_size=1,
    )
)
def test_every_good_datagram_is_read_as_it_is(rows: list[tuple[Any, ...]]) -> None:
    sent = np.array(rows, RADAR)
    batch, reasons = decode_radar(columns.join_binary(sent))
    assert reasons.null_count == len(rows)
    for had, row in zip(batch.to_pylist(), rows, strict=True):
        assert had["orig_sensor_id"] == f"radar-{row[0]:02d}"
        assert had["track_id"] == (f"radar-{row[0]:02d}-{row[1]}" if row[1] else None)
        assert had["sat_no"] is None
        assert (had["timestamp_ns"], had["range_m"], had["range_rate_m_s"]) == row[2:5]
        assert (had["az_rad"], had["el_rad"], had["sigma_range_m"], had["sigma_range_rate_m_s"]) == row[5:9]


@given(st.lists(st.fixed_dictionaries(GOOD), min_size=1, max_size=20))
def test_every_good_item_is_read_as_it_is(items: list[dict[str, Any]]) -> None:
    batch, reasons = decode_optical(pa.array([json.dumps(one).encode() for one in items]))
    assert reasons.null_count == len(items)
    for had, item in zip(batch.to_pylist(), items, strict=True):
        same = ("timestamp_ns", "ra_rad", "dec_rad", "sigma_arcsec")
        assert [had[name] for name in same] == [item[name] for name in same]
        assert (had["obs_id"], had["orig_sensor_id"]) == (item["obs_id"], item["site_id"])
        assert (had["clock_source"], had["clock_sync_age_s"], had["sat_no"]) == ("unknown", 0.0, None)


def a_radar(**changes: Any) -> bytes:
    row = radar_rows(native("radar")[:1])
    for name, value in changes.items():
        row[name] = value
    return row.tobytes()


def a_link(**changes: Any) -> bytes:
    row = link_rows(native("isl")[:1])
    for name, value in changes.items():
        row[name] = value
    return row.tobytes()


def an_item(**changes: Any) -> bytes:
    item = json.loads(encode_optical(native("optical")[:1])[0].as_py()) | changes
    return json.dumps({name: value for name, value in item.items() if value is not ...}).encode()


NAN, INF = float("nan"), float("inf")
FAULTS = [
    ("radar", b"", columns.WRONG_SIZE),
    ("radar", a_radar()[:63], columns.WRONG_SIZE),
    ("radar", a_radar() + b"\0", columns.WRONG_SIZE),
    ("radar", a_radar(range_m=NAN), columns.NOT_FINITE),
    ("radar", a_radar(sigma_rate_m_s=INF), columns.NOT_FINITE),
    ("radar", a_radar(array_id=0), columns.UNKNOWN_SENSOR),
    ("radar", a_radar(array_id=2**32 - 1), columns.UNKNOWN_SENSOR),
    ("radar", a_radar(timestamp_ns=0), columns.BAD_TIME),
    ("radar", a_radar(timestamp_ns=2**63), columns.BAD_TIME),
    ("radar", a_radar(range_m=-1.0), radar.BAD_RANGE),
    ("radar", a_radar(range_rate_m_s=-25_001.0), radar.IMPOSSIBLE_RATE),
    ("radar", a_radar(azimuth_rad=7.0), columns.BAD_ANGLE),
    ("radar", a_radar(elevation_rad=-1.6), columns.BAD_ANGLE),
    ("radar", a_radar(sigma_range_m=0.0), columns.BAD_UNCERTAINTY),
    ("isl", a_link()[:10], columns.WRONG_SIZE),
    ("isl", a_link(version=2), links.UNKNOWN_VERSION),
    ("isl", a_link(position_m=NAN), columns.NOT_FINITE),
    ("isl", a_link(since_sync_s=INF), columns.NOT_FINITE),
    ("isl", a_link(timestamp_ns=0), columns.BAD_TIME),
    ("isl", a_link(position_m=1e6), links.BELOW_SURFACE),
    ("isl", a_link(velocity_m_s=1e300), links.FASTER_THAN_LIGHT),
    ("isl", a_link(sigma_position_m=-1), columns.BAD_UNCERTAINTY),
    ("isl", a_link(since_sync_s=-1), links.BAD_AGE),
    ("optical", b"", optical.MALFORMED),
    ("optical", b"\xff\xfe", optical.MALFORMED),
    ("optical", b"[]", optical.MALFORMED),
    ("optical", b"null", optical.MALFORMED),
    ("optical", b"{", optical.MALFORMED),
    ("optical", an_item() + an_item(), optical.MALFORMED),
    ("optical", b'1}\n{"v":2', optical.MALFORMED),
    ("optical", an_item() + b',"v":' + an_item(), optical.MALFORMED),
    ("optical", an_item(timestamp_ns="7"), optical.MALFORMED),
    ("optical", an_item(timestamp_ns=1.5), optical.MALFORMED),
    ("optical", an_item(timestamp_ns=10**30), optical.MALFORMED),
    ("optical", an_item(ra_rad=...), optical.format_missing("ra_rad")),
    ("optical", an_item(obs_id=None), optical.format_missing("obs_id")),
    ("optical", an_item(obs_id="no-uuid"), optical.BAD_ID),
    ("optical", an_item(site_id="optical-99"), columns.UNKNOWN_SENSOR),
    ("optical", an_item(timestamp_ns=0), columns.BAD_TIME),
    ("optical", an_item(dec_rad=1.6), columns.BAD_ANGLE),
    ("optical", an_item(sigma_arcsec=0.0), columns.BAD_UNCERTAINTY),
    ("optical", an_item(clock_sync_age_s=-1.0), optical.BAD_AGE),
]


@pytest.mark.parametrize(("kind", "value", "reason"), FAULTS)
def test_what_is_no_measurement_has_its_reason_and_spoils_no_other(
    kind: str, value: bytes, reason: str
) -> None:
    good = {"radar": a_radar(), "isl": a_link(), "optical": an_item()}[kind]
    batch, reasons = DECODE[kind](pa.array([good, value, good, None]))
    nothing = optical.MALFORMED if kind == "optical" else columns.WRONG_SIZE
    assert reasons.to_pylist() == [None, reason, None, nothing]
    rows = batch.to_pylist()
    assert rows[0] == rows[2]
    assert set(rows[1].values()) == set(rows[3].values()) == {None}


@pytest.mark.parametrize("kind", DECODE)
@given(data=st.data())
def test_no_bytes_break_it(kind: str, data: st.DataObject) -> None:
    good = {"radar": a_radar(), "isl": a_link(), "optical": an_item()}[kind]

    def damaged(pieces: tuple[int, bytes]) -> bytes:
        at, piece = pieces
        return good[:at] + piece + good[at + len(piece) :]

    some = st.tuples(st.integers(0, len(good)), st.binary(max_size=12)).map(damaged)
    values = data.draw(st.lists(st.none() | st.binary(max_size=100) | some | st.just(good), max_size=12))
    batch, reasons = DECODE[kind](pa.array(values, pa.binary()))
    batch.validate(full=True)
    assert batch.num_rows == len(reasons) == len(values)
    for value, reason, row in zip(values, reasons.to_pylist(), batch.to_pylist(), strict=True):
        assert (reason is None) == (row["timestamp_ns"] is not None)
        if value == good:
            assert reason is None


@pytest.mark.parametrize("kind", DECODE)
def test_any_arrow_layout_is_read(kind: str) -> None:
    values = ENCODE[kind](native(kind)[:10])
    whole, _ = DECODE[kind](values)
    for other in (
        pa.chunked_array([values[:3], values[3:]]),
        values.cast(pa.large_binary()),
        pa.concat_arrays([values[5:], values])[5:],
    ):
        assert DECODE[kind](other)[0].equals(whole)
    for empty in (values[:0], pa.chunked_array([], pa.binary()), values[4:4]):
        batch, reasons = DECODE[kind](empty)
        assert batch.num_rows == len(reasons) == 0


def test_a_datagram_without_a_track_number_has_no_track() -> None:
    batch, _ = decode_radar(pa.array([a_radar(target_track_id=0), a_radar(target_track_id=2**31 + 5)]))
    assert batch["sat_no"].to_pylist() == [None, None]
    assert [one and one.rpartition("-")[2] for one in batch["track_id"].to_pylist()] == [None, str(2**31 + 5)]
