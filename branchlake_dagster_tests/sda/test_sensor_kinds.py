"""Declarations of kinds of sensor, and the decoders of the two that came after the first three."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.sda.contracts.fields import Contract
from branchlake_dagster.sda.graph.code_location import SENSORS, build_definitions
from branchlake_dagster.sda.sensor_kinds import laser, sweep_radar
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.laser import (
    LASER,
    marini_murray_delay,
    split_normal_points,
)
from branchlake_dagster.sda.sensor_kinds.radar import RADAR
from branchlake_dagster.sda.sensor_kinds.registered import (
    DEFAULT_SENSOR_KINDS,
    SENSOR_KINDS,
    select_sensor_kinds,
    unique_sensor_kinds,
)
from branchlake_dagster.sda.sensor_kinds.sweep_radar import SWEEP, SWEEP_RADAR
from branchlake_dagster.sda.sensors.measurement import Stations
from branchlake_dagster.sda.sensors.models import GEOMETRIES, measurement_model
from branchlake_dagster.sda.wire import columns
from branchlake_dagster.sda.wire.links import LIGHT_M_S
from branchlake_dagster.settings import Settings

PASS = b"""H1 CRD  1 2026  8  8 13
H2 YARRAGADEE 7090  5 13  4
H3 lageos2     9207002 5986    22195  0 1
H4  1 2026  8  8 23 50 17 2026  8  9  0 10  9  0 0 0 0 1 0 2 0
C0 0    532.000 std1 ml1 mcp mt1
20 86000.000   983.70 302.10  17 0
20   120.000   984.00 301.00  18 0
30 86000.000  120.0 45.0 0 1 1
30   120.000  121.0 30.0 0 1 1
11 86010.697640514675 0.043213414280 std1 2  120.0      9     73.0   0.226  -0.915    -57.0   1.8 0
11   124.507921286791 0.042869812000 std1 2  120.0     12       na   0.1    -0.9     -57.0   1.8 0
H8
H9
"""


def sweep(**changes: Any) -> bytes:
    row = np.zeros(1, SWEEP)
    good = {
        "sensor_id": 3,
        "azimuth_deg": 120.5,
        "elevation_deg": 45.25,
        "range_km": 812.5,
        "timestamp_ms": 1_786_000_000_123,
    }
    for name, value in {**good, **changes}.items():
        row[name] = value
    return row.tobytes()


def decoded(kind: SensorKind, *values: bytes | None) -> tuple[list[dict[str, Any]], list[str | None]]:
    rows, reasons = kind.decode(pa.array(values, pa.binary()))
    assert rows.schema == kind.decoded_columns()
    return rows.to_pylist(), reasons.to_pylist()


# -- the sweeping radar --------------------------------------------------------------------------------


def test_a_datagram_of_24_bytes_is_big_endian() -> None:
    value = bytes.fromhex("00000003 42f10000 42350000 444b2000 0000019fd68b1c7b".replace(" ", ""))
    assert len(value) == 24
    (row,), (reason,) = decoded(SWEEP_RADAR, value)
    assert reason is None
    assert row["orig_sensor_id"] == "sweep-03"
    assert (row["azimuth_deg"], row["elevation_deg"], row["range_km"]) == (120.5, 45.25, 812.5)
    assert row["timestamp_ns"] == 0x19FD68B1C7B * 1_000_000
    assert row["track_id"] is None
    assert (row["clock_source"], row["sensor_lat_deg"]) == ("ntp", 41.75)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (sweep()[:23], columns.WRONG_SIZE),
        (sweep() + b"\0", columns.WRONG_SIZE),
        (b"", columns.WRONG_SIZE),
        (None, columns.WRONG_SIZE),
        (sweep(sensor_id=99), columns.UNKNOWN_SENSOR),
        (sweep(sensor_id=0), columns.UNKNOWN_SENSOR),
        (sweep(range_km=math.nan), columns.NOT_FINITE),
        (sweep(range_km=-1.0), sweep_radar.BAD_RANGE),
        (sweep(azimuth_deg=361.0), columns.BAD_ANGLE),
        (sweep(elevation_deg=-91.0), columns.BAD_ANGLE),
        (sweep(timestamp_ms=0), columns.BAD_TIME),
        (sweep(timestamp_ms=2**63), columns.BAD_TIME),
    ],
)
def test_a_damaged_datagram_has_its_reason_and_spoils_no_other(value: bytes | None, reason: str) -> None:
    rows, reasons = decoded(SWEEP_RADAR, sweep(), value, sweep(sensor_id=14))
    assert reasons == [None, reason, None]
    assert [row["orig_sensor_id"] for row in rows] == ["sweep-03", None, "sweep-14"]


# -- the laser -----------------------------------------------------------------------------------------


def test_a_file_of_normal_points_becomes_messages_each_with_what_it_needs() -> None:
    first, second = split_normal_points(PASS)
    assert first.count(b"\n11 ") == second.count(b"\n11 ") == 1
    assert b"983.70" in first
    assert b"984.00" in second
    assert b"H8" not in first


def test_a_normal_point_is_a_range_at_the_instant_of_the_reflection() -> None:
    rows, reasons = decoded(LASER, *split_normal_points(PASS))
    assert reasons == [None, None]
    first, second = rows
    assert first["orig_sensor_id"] == "laser-7090"
    assert (first["sat_no"], first["data_release"], first["bin_rms_ps"], first["ranges"]) == (
        22195,
        0,
        73.0,
        9,
    )
    midnight = int(datetime(2026, 8, 8, tzinfo=UTC).timestamp()) * 1_000_000_000
    assert first["timestamp_ns"] - midnight == pytest.approx(
        (86010.697640514675 + 0.02160670714) * 1e9, abs=50
    )
    assert first["range_m"] == pytest.approx(0.043213414280 * 299_792_458 / 2, abs=1e-6)
    assert second["bin_rms_ps"] is None
    # The session goes on after midnight.
    assert second["timestamp_ns"] > first["timestamp_ns"]
    assert second["timestamp_ns"] - midnight == pytest.approx((86_400 + 124.529356192791) * 1e9, abs=50)
    assert first["track_id"] == second["track_id"]
    assert second["refraction_m"] > first["refraction_m"] > 3.0


def test_an_epoch_may_be_that_of_the_reflection_or_of_the_receipt() -> None:
    (message, _) = split_normal_points(PASS)
    flight_ns = round(0.043213414280 * 1e9)
    texts = [message.replace(b"std1 2 ", b"std1 %d " % event) for event in (2, 1, 0, 5)]
    rows, reasons = decoded(LASER, *texts)
    sent, reflected, received, _ = (row["timestamp_ns"] for row in rows)
    assert sent - reflected == pytest.approx(flight_ns / 2, abs=50)
    assert reflected - received == pytest.approx(flight_ns / 2, abs=50)
    assert reasons == [None, None, None, laser.UNSUPPORTED_EVENT]


def test_the_points_of_a_session_that_is_cut_keep_its_headers() -> None:
    cut = PASS.replace(b"H8\nH9\n", b"")
    other = PASS.replace(b"YARRAGADEE 7090", b"GRAZ       7839").replace(
        b"lageos2     9207002 5986    22195", b"starlette   7501001 1134     7646"
    )
    messages = [*split_normal_points(cut + other)]
    assert messages == [*split_normal_points(PASS), *split_normal_points(other)]
    assert len(messages) == 4


def test_without_weather_or_elevation_the_delay_is_unknown_and_a_removed_one_is_zero() -> None:
    (message, _) = split_normal_points(PASS)
    lines = message.split(b"\n")
    texts = [
        b"\n".join(line for line in lines if not line.startswith(b"20")),
        b"\n".join(line for line in lines if not line.startswith(b"30")),
        message.replace(b" 9  0 0 0 0 1 0 2 0", b" 9  0 1 0 0 1 0 2 0"),
        message.replace(b"\n", b"\r\n"),
    ]
    rows, reasons = decoded(LASER, *texts)
    assert reasons == [None] * 4
    assert [row["refraction_m"] for row in rows[:3]] == [None, None, 0.0]
    assert rows[3]["refraction_m"] == pytest.approx(3.366, abs=0.01)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b" 7090 ", b" 9999 ", columns.UNKNOWN_SENSOR),
        (b" 13  4", b" 13  2", laser.UNSUPPORTED_TIME),
        (b" 1 0 2 0", b" 1 0 1 0", laser.UNSUPPORTED_RANGE),
        (b" 22195 ", b" 0 ", laser.NO_TARGET),
        (b" 8  8 23 50", b" 2 30 23 50", columns.BAD_TIME),
        (b"11 86010.69", b"11 96010.69", columns.BAD_TIME),
        (b"0.043213414280", b"0.0", laser.BAD_FLIGHT),
        (b"0.043213414280", b"soon", laser.NOT_A_POINT),
        (b"H3 lageos2", b"H7 lageos2", laser.NOT_A_POINT),
        (b"\n11 ", b"\n11 1.0 0.1 std 2 1 1 1\n11 ", laser.NOT_A_POINT),
        (b"lageos2", b"lage\xffos", laser.NOT_A_POINT),
    ],
)
def test_a_damaged_normal_point_has_its_reason(before: bytes, after: bytes, reason: str) -> None:
    (message, other) = split_normal_points(PASS)
    assert before in message
    rows, reasons = decoded(LASER, other, message.replace(before, after, 1), None, b"", other)
    assert reasons == [None, reason, laser.NOT_A_POINT, laser.NOT_A_POINT, None]
    assert rows[1]["range_m"] is None


def test_the_delay_by_the_atmosphere_at_the_zenith_is_that_of_mendes_and_pavlis() -> None:
    """Mendes and Pavlis 2004 is another model, in the IERS Conventions 2010; at 532 nm its f is 1.00001."""
    pressure = np.array([800.0, 950.0, 1013.25])
    count = len(pressure)
    found = marini_murray_delay(
        pressure,
        np.full(count, 285.0),
        np.zeros(count),
        np.full(count, np.pi / 2),
        np.full(count, 0.532),
        np.full(count, 45.0),
        np.zeros(count),
    )
    np.testing.assert_allclose(found, 0.002416579 * 1.00001 * pressure, atol=0.005)


def test_the_decoders_take_no_row_at_all() -> None:
    for kind in SENSOR_KINDS:
        rows, reasons = kind.decode(pa.array([], pa.binary()))
        assert (rows.num_rows, len(reasons)) == (0, 0)


# -- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SENSOR_KINDS, ids=lambda kind: kind.name)
def test_the_slope_of_a_model_is_its_derivative(kind: SensorKind) -> None:
    count = 4
    rng = np.random.default_rng(5)
    position = rng.normal(size=(count, 3))
    position *= 7_200 / np.linalg.norm(position, axis=1, keepdims=True)
    velocity = rng.normal(size=(count, 3)) * 4
    stations = Stations(
        np.linspace(-40, 60, count),
        np.linspace(0, 200, count),
        np.zeros(count),
        np.full(count, 1_786_000_000_000_000),
    )
    values, slope = kind.model.predict(position, velocity, stations)
    assert values.shape == (count, kind.model.width)
    # The slope neglects that the light time depends on the state: a share of the ratio of both speeds.
    neglected = 2 * np.linalg.norm(velocity, axis=1).max() / (LIGHT_M_S / 1_000)
    for k in range(6):
        step = np.zeros(6)
        step[k] = 1e-3
        ahead, _ = kind.model.predict(position + step[:3], velocity + step[3:], stations)
        back, _ = kind.model.predict(position - step[:3], velocity - step[3:], stations)
        np.testing.assert_allclose((ahead - back) / 2e-3, slope[:, :, k], rtol=neglected, atol=neglected)


def test_a_model_computes_the_state_of_one_observation() -> None:
    radar, sweep_model, laser_model = (kind.model for kind in (RADAR, SWEEP_RADAR, LASER))
    assert (radar.direction, sweep_model.direction, laser_model.direction) == ((2, 3), (1, 2), None)
    assert [model.has_position for model in (radar, sweep_model, laser_model)] == [True, True, False]
    assert measurement_model(("elevation_deg", "azimuth_deg")).columns == ("azimuth_deg", "elevation_deg")
    for quantities in GEOMETRIES.values():
        names = tuple(one.column for one in quantities)
        assert measurement_model(names[::-1]).columns == names


@pytest.mark.parametrize(
    "measures",
    [
        (),
        ("doppler_hz",),
        ("range_km", "range_km"),
        ("range_km", "ra_deg", "declination_deg"),
        ("range_km", "azimuth_deg"),
        ("pos_x_km", "pos_y_km"),
        ("vel_x_km_s", "vel_y_km_s", "vel_z_km_s"),
    ],
)
def test_what_no_model_can_predict_is_refused(measures: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        measurement_model(measures)


# -- declarations --------------------------------------------------------------------------------------


class WithoutRecord(Contract):
    """Not a raw table."""


@pytest.mark.parametrize(
    "changes",
    [
        {"source_kind": "Radar"},
        {"name": "a-b"},
        {"record_id": ("frame_hash",)},
        {"record_id": ()},
        {"allowed_lateness_s": 0.0},
        {"contract": WithoutRecord},
        {"envelope": {"range_km": "range_m / 1000"}},
        {"envelope": {**RADAR.envelope, "ra_deg": "1.0"}},
        {"measures": ("range_km",)},
    ],
)
def test_a_contradictory_declaration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        replace(RADAR, **changes)


OTHER = replace(RADAR, source_kind="other", name="other")
NOT_A_KIND = "text"


def test_kinds_are_selected_by_name_by_group_and_by_path() -> None:
    assert select_sensor_kinds("") == select_sensor_kinds(" default ") == DEFAULT_SENSOR_KINDS
    assert select_sensor_kinds("all") == SENSOR_KINDS
    assert select_sensor_kinds("laser, radar,laser,") == (LASER, RADAR)
    assert select_sensor_kinds(f"default,{__name__}:OTHER") == (*DEFAULT_SENSOR_KINDS, OTHER)
    for wrong in ("sonar", "nowhere_at_all:X", f"{__name__}:MISSING", f"{__name__}:NOT_A_KIND", ":", ","):
        with pytest.raises(ConfigurationError):
            select_sensor_kinds(wrong)


def test_two_kinds_never_share_a_name() -> None:
    for changes in ({"name": "other"}, {"source_kind": "other"}):
        with pytest.raises(ConfigurationError):
            unique_sensor_kinds([RADAR, replace(RADAR, **changes)])
    with pytest.raises(ConfigurationError):
        unique_sensor_kinds([])


def test_a_registered_kind_from_elsewhere_has_its_tables_jobs_and_sensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(SENSORS, f"all,{__name__}:OTHER")
    repository = build_definitions(Settings(state_dir=tmp_path)).get_repository_def()
    keys = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    names = {"radar", "optical", "links", "sweep_radar", "laser", "other"}
    assert {f"sda/raw_{name}" for name in names} <= keys
    assert {f"ingest_{name}_job" for name in names} <= set(repository.job_names)
    monkeypatch.delenv(SENSORS)
    usual = build_definitions(Settings(state_dir=tmp_path)).get_repository_def()
    assert "sda/raw_laser" not in {key.to_user_string() for key in usual.asset_graph.get_all_asset_keys()}
