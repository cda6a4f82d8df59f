r"""The sensor kind of laser stations, which measure distances by the time of flight of light.

Stations send normal points: averages of many single ranges, in the Consolidated Laser Ranging Data format
(CRD) of the ILRS. Source: Ricklefs and Moore, Consolidated Laser Ranging Data Format, versions 1.00 (27 June
2008) and 2.01. A message is the text of one normal point: a record ``11`` with the records that it needs, in
any order. `split_normal_points` divides a file into such messages.

=======  ========================================================================================
record   fields that are read
=======  ========================================================================================
``H2``   pad number of the station (``7090`` is ``laser-7090``), time scale: UTC (3, 4, 7)
``H3``   catalog number of the target (NORAD), which becomes the claim of the observation
``H4``   day of the session, data release, whether refraction is already removed, type of range: two-way
``C0``   wavelength in nm; 532 without this record
``20``   pressure (mbar), temperature (K), relative humidity (%)
``30``   azimuth and elevation (degrees)
``11``   second of the day, time of flight (s), epoch event, number of ranges, RMS of the bin (ps)
=======  ========================================================================================

The time of an observation is that of the reflection. At this time, half of the time of flight equals the
geometric range to micrometers. The delay by the atmosphere is computed by the formula of Marini and Murray
(1973, in the IERS Conventions 1996). It needs the records ``20`` and ``30``; without them, 5 m are subtracted
and the standard deviation of the range is 3.2 m.

One standard deviation is at least 1 m, although the error of a normal point is only centimeters. The larger
value covers the error of the estimation, whose two-body model is linear. For 215 simulated objects, the
median squared Mahalanobis distance of the estimate from the truth was 16 with a minimum of 0.2 m, and 3.9
with 1 m; its expected value is 5.3. The value also covers the distance of the reflector from the center of
mass.

For real stations the error is larger: `orbits.frames` assumes UT1 equal to UTC and neglects polar motion, and
the coordinates below are rounded to about 10 m. So ranges of real stations can improve a track only with
Earth orientation parameters and coordinates of SLRF.

A range alone does not determine a position. So the association only tests the claimed object.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import optional_column, required_column
from branchlake_dagster.sda.contracts.raw import OnGround
from branchlake_dagster.sda.sensor_kinds.declaration import ON_GROUND, SensorKind, decoded_columns
from branchlake_dagster.sda.sensors.network import Site
from branchlake_dagster.sda.wire.columns import (
    BAD_TIME,
    NOT_FINITE,
    UNKNOWN_SENSOR,
    Reasons,
    build_decoded,
    one_array,
)
from branchlake_dagster.sda.wire.links import LIGHT_M_S

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STATIONS = (
    Site("laser-7090", -29.0464, 115.3467, 0.24),
    Site("laser-7105", 39.0206, -76.8277, 0.02),
    Site("laser-7110", 32.8917, -116.4227, 1.84),
    Site("laser-7501", -25.8897, 27.6861, 1.41),
    Site("laser-7810", 46.8772, 7.4652, 0.95),
    Site("laser-7825", -35.3161, 149.0099, 0.81),
    Site("laser-7839", 47.0671, 15.4933, 0.54),
    Site("laser-7840", 50.8674, 0.3361, 0.08),
    Site("laser-7941", 40.6486, 16.7046, 0.54),
    Site("laser-8834", 49.1444, 12.8780, 0.67),
)
"""Stations by pad number, with coordinates rounded to about 10 m.

They are Yarragadee, Greenbelt, Monument Peak, Hartebeesthoek, Zimmerwald, Mount Stromlo, Graz, Herstmonceux,
Matera and Wettzell.
"""

NOT_A_POINT = "not the text of one normal point"
UNSUPPORTED_TIME, UNSUPPORTED_RANGE = "time scale is not UTC", "range is not two-way"
UNSUPPORTED_EVENT, NO_TARGET = "epoch event is not of the ground or the reflection", "target has no number"
BAD_FLIGHT = "time of flight is not positive"

_MAX_COUNT = 1e15
"""The largest whole number that is accepted. Larger ones are damaged."""

DEFAULT_WAVELENGTH_NM = 532.0
_NUMBER = r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?"
_PATTERNS = {
    "H2": r"(?P<pad>\d{4}) +\d{1,2} +\d{1,2} +(?P<scale>\d{1,2})\b",
    "H3": r"\S+ +\d+ +\d+ +(?P<sat_no>\d{1,9})\b",
    "H4": r"\d+ +(?P<year>\d{4}) +(?P<month>\d{1,2}) +(?P<day>\d{1,2})"
    r" +(?P<hour>\d{1,2}) +(?P<minute>\d{1,2}) +(?P<second>\d{1,2})(?: +-?\d+){6}"
    r" +(?P<release>\d+) +(?P<refracted>\d)(?: +\d){4} +(?P<range_type>\d)\b",
    "C0": rf"\d+ +(?P<wavelength>{_NUMBER})",
    "11": rf"(?P<sod>{_NUMBER}) +(?P<flight>{_NUMBER}) +\S+ +(?P<event>\d+)"
    r" +\S+ +(?P<ranges>\S+) +(?P<rms>\S+)",
    "20": rf"{_NUMBER} +(?P<pressure>{_NUMBER}) +(?P<temperature>{_NUMBER}) +(?P<humidity>{_NUMBER})",
    "30": rf"{_NUMBER} +{_NUMBER} +(?P<elevation>{_NUMBER})",
}
_NAMED_FIRST = {"H2": r"\S.*? +"}
_REQUIRED = ("H2", "H3", "H4", "11")
_DAY_S = 86_400
_PADS = pa.array([int(site.sensor_id.removeprefix("laser-")) for site in STATIONS])
_NAMES = pa.array([site.sensor_id for site in STATIONS])
_PLACES = np.array([[site.lat_deg, site.lon_deg, site.alt_km] for site in STATIONS])


class RawLaser(OnGround):
    """A normal point of a laser ranging station."""

    sat_no: T.LongType = required_column("Catalog number of the target, as the station names it.", ge=1)
    data_release: T.LongType = required_column("Release of the data: 0 is the first.", ge=0)
    time_of_flight_s: T.DoubleType = required_column("Two-way time of flight, as measured.", "s", gt=0.0)
    range_m: T.DoubleType = required_column("Half of the time of flight as a distance.", "m", gt=0.0)
    refraction_m: T.DoubleType = optional_column("Delay by the atmosphere that the range contains.", "m")
    bin_rms_ps: T.DoubleType = optional_column(
        "Scatter of the single times of flight of the normal point.", "ps", ge=0.0
    )
    ranges: T.LongType = optional_column("Number of single ranges.", ge=0)
    pressure_mbar: T.DoubleType = optional_column("Pressure at the station.", "mbar")
    temperature_k: T.DoubleType = optional_column("Temperature at the station.", "K")
    humidity_percent: T.DoubleType = optional_column("Relative humidity at the station.", "%")
    elevation_deg: T.DoubleType = optional_column("Elevation to which the station pointed.", "deg")


def split_normal_points(crd: bytes) -> Iterator[bytes]:
    """Yield a message for each record ``11`` of a file, with its headers and the nearest ``20`` and ``30``.

    A session ends at its ``H8``, or at the next header of a station, target or session, if the file is
    truncated. Comments are dropped. A point without headers is yielded, too; decoding rejects it.
    """
    headers: dict[str, str] = {}
    points: list[tuple[float, str]] = []
    around: dict[str, list[tuple[float, str]]] = {"20": [], "30": []}
    for line in [*crd.decode("ascii", "replace").splitlines(), "H8"]:
        name = line[:2].upper()
        if name in _SESSION_ENDS and points:
            for second, text in points:
                nearest = [
                    min(lines, key=lambda one: abs(one[0] - second))[1] for lines in around.values() if lines
                ]
                yield "\n".join([*headers.values(), *nearest, text]).encode()
            points = []
        if name in _SESSION_ENDS:
            around = {"20": [], "30": []}
            headers.pop("C0", None)
        if name in ("H2", "H3", "H4", "C0"):
            headers[name] = line.strip()
        elif name == "11" or name in around:
            try:
                second = float(line.split()[1])
            except (ValueError, IndexError):
                second = float("nan")
            (points if name == "11" else around[name]).append((second, line.strip()))


_SESSION_ENDS = ("H1", "H2", "H3", "H4", "H8")


def decode_laser(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode messages to one row each, and return each row's error (null if it is a measurement)."""
    values = one_array(values)
    reasons = Reasons(len(values))
    texts, readable = _texts(values)
    is_present: dict[str, Bools] = {}
    fields: dict[str, pa.Array] = {}
    for record, pattern in _PATTERNS.items():
        whole = rf"(?im)^{record} +{_NAMED_FIRST.get(record, '')}{pattern}"
        found = pc.extract_regex(texts, whole)
        is_present[record] = _bools(pc.is_valid(found))
        fields |= {one.name: pc.struct_field(found, one.name) for one in found.type}
    points = pc.count_substring_regex(texts, r"(?m)^11 ").to_numpy(zero_copy_only=False)
    reasons.add(
        ~(readable & (points == 1) & np.all([is_present[one] for one in _REQUIRED], axis=0)), NOT_A_POINT
    )
    number = {name: _floats(column) for name, column in fields.items()}
    # A damaged record may have 400 digits: they must not wrap around.
    whole_number = {
        name: np.nan_to_num(column).clip(-_MAX_COUNT, _MAX_COUNT).astype(np.int64)
        for name, column in number.items()
    }
    start_s = number["hour"] * 3_600 + number["minute"] * 60 + number["second"]
    day, is_date = _days(whole_number["year"], whole_number["month"], whole_number["day"])
    flight = number["flight"]
    # After midnight, the seconds of a session count from the new day.
    day = day + (number["sod"] < start_s - _DAY_S / 2)
    event = whole_number["event"]
    after_s = np.where(event == 1, 0.0, np.where(event == 2, flight / 2, -flight / 2))
    with np.errstate(invalid="ignore", over="ignore"):
        nanoseconds = np.nan_to_num(np.rint((number["sod"] + after_s) * 1e9), posinf=0.0, neginf=0.0)
        sane = (number["sod"] >= 0) & (number["sod"] < _DAY_S + 1)
        nanoseconds = np.where(sane, nanoseconds, 0.0).astype(np.int64)
        station = pc.index_in(pa.array(whole_number["pad"]), _PADS)
        faults = {
            UNKNOWN_SENSOR: _bools(pc.is_null(station)),
            UNSUPPORTED_TIME: ~np.isin(whole_number["scale"], (3, 4, 7)),
            UNSUPPORTED_RANGE: whole_number["range_type"] != 2,
            UNSUPPORTED_EVENT: ~np.isin(event, (0, 1, 2)),
            NO_TARGET: whole_number["sat_no"] < 1,
            NOT_FINITE: ~(np.isfinite(flight) & np.isfinite(number["sod"])),
            BAD_TIME: ~(is_date & sane & (day > 0)),
            BAD_FLIGHT: ~((flight > 0) & (flight < 10)),
        }
    for text, fault in faults.items():
        reasons.add(np.asarray(fault), text)
    site = pc.fill_null(station, 0).to_numpy(zero_copy_only=False)
    place = _PLACES[site]
    columns = {
        "orig_sensor_id": _NAMES.take(pa.array(site)),
        "track_id": _session_names(fields),
        "timestamp_ns": day * (_DAY_S * 1_000_000_000) + nanoseconds,
        "clock_source": "gps",
        "clock_sync_age_s": 0.0,
        **{name: place[:, k] for k, name in enumerate(ON_GROUND)},
        "sat_no": whole_number["sat_no"],
        "data_release": whole_number["release"],
        "time_of_flight_s": flight,
        "range_m": flight * (LIGHT_M_S / 2),
        "refraction_m": pa.array(_refraction(number, place), from_pandas=True),
        "bin_rms_ps": pa.array(np.where(number["rms"] >= 0, number["rms"], np.nan), from_pandas=True),
        "ranges": pa.array(
            whole_number["ranges"], mask=~(number["ranges"] >= 0) | (number["ranges"] >= _MAX_COUNT)
        ),
        "pressure_mbar": pa.array(number["pressure"], from_pandas=True),
        "temperature_k": pa.array(number["temperature"], from_pandas=True),
        "humidity_percent": pa.array(number["humidity"], from_pandas=True),
        "elevation_deg": pa.array(number["elevation"], from_pandas=True),
    }
    return build_decoded(columns, np.arange(len(values)), reasons, decoded_columns(RawLaser))


def marini_murray_delay(
    pressure_mbar: Floats,
    temperature_k: Floats,
    humidity_percent: Floats,
    elevation_rad: Floats,
    wavelength_um: Floats,
    lat_deg: Floats,
    alt_km: Floats,
) -> Floats:
    """Return the one-way delay (n,) of light by the atmosphere, as a distance in m.

    All arguments are (n,). The formula holds down to 10 degrees of elevation.
    """
    double = np.cos(2 * np.radians(lat_deg))
    celsius = temperature_k - 273.15
    vapor = humidity_percent / 100 * 6.11 * 10 ** (7.5 * celsius / (237.3 + celsius))
    scale = 1.163 - 0.00968 * double - 0.00104 * temperature_k + 0.00001435 * pressure_mbar
    straight = 0.002357 * pressure_mbar + 0.000141 * vapor
    bent = 1.084e-8 * pressure_mbar * temperature_k * scale + 4.734e-8 * (
        pressure_mbar**2 / temperature_k
    ) * 2 / (3 - 1 / scale)
    dispersion = 0.9650 + 0.0164 / wavelength_um**2 + 0.000228 / wavelength_um**4
    sine = np.sin(elevation_rad)
    gravity = 1 - 0.0026 * double - 0.00031 * alt_km
    return np.asarray(
        dispersion / gravity * (straight + bent) / (sine + bent / (straight + bent) / (sine + 0.01))
    )


def _refraction(number: dict[str, Floats], place: Floats) -> Floats:
    """Return the atmospheric delay (n,) that ranges contain, in m.

    It is 0 if the station has already removed it, and NaN if it is unknown.
    """
    pressure, kelvin, humidity = (number[name] for name in ("pressure", "temperature", "humidity"))
    with np.errstate(all="ignore"):
        elevation = np.radians(number["elevation"])
        weather = (pressure > 300) & (pressure < 1_100) & (kelvin > 200) & (kelvin < 340) & (humidity >= 0)
        is_known = weather & (humidity <= 100) & (elevation >= np.radians(10)) & (elevation <= np.pi / 2)
        wavelength = np.nan_to_num(number["wavelength"], nan=DEFAULT_WAVELENGTH_NM)
        is_known &= (wavelength > 300) & (wavelength < 2_000)
        delay = marini_murray_delay(
            pressure, kelvin, humidity, elevation, wavelength / 1e3, place[:, 0], place[:, 2]
        )
    return np.where(number["refracted"] == 1, 0.0, np.where(is_known, delay, np.nan))


def _session_names(fields: dict[str, pa.Array]) -> pa.Array:
    """Return the name (n,) of each session, which is the track: station, target and start."""
    parts = [fields[name] for name in ("pad", "sat_no", "year", "month", "day", "hour", "minute", "second")]
    return pc.binary_join_element_wise("laser", *parts, "-")


def _texts(values: pa.BinaryArray) -> tuple[pa.StringArray, Bools]:
    """Return the values as text with single line breaks, and which of them are ASCII."""
    filled = pc.fill_null(values, b"")
    is_text = _bools(
        pc.invert(pc.match_substring_regex(filled.cast(pa.binary()), r"[^\x09\x0a\x0d\x20-\x7e]"))
    )
    clean = pc.if_else(pa.array(is_text), filled, pa.scalar(b"", pa.binary())).cast(pa.string())
    return pc.replace_substring(clean, "\r", ""), is_text & _bools(pc.is_valid(values))


def _days(
    year: npt.NDArray[np.int64], month: npt.NDArray[np.int64], day: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], Bools]:
    """Return days (n,) since 1970, and which of the dates exist."""
    is_possible = (year >= 1970) & (year < 2200) & (month >= 1) & (month <= 12) & (day >= 1)
    months = np.where(is_possible, (year - 1970) * 12 + month - 1, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    next_first = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return first + np.where(is_possible, day - 1, 0), is_possible & (day <= next_first - first)


def _floats(texts: pa.Array) -> Floats:
    """Return numbers (n,). Texts that are not numbers, such as ``na``, are NaN."""
    is_number = pc.fill_null(pc.match_substring_regex(texts, rf"^{_NUMBER}$"), False)
    numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.string())).cast(pa.float64())
    return np.asarray(numbers.to_numpy(zero_copy_only=False), np.float64)


def _bools(column: pa.Array) -> Bools:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)


LASER = SensorKind(
    source_kind="laser",
    name="laser",
    decode=decode_laser,
    contract=RawLaser,
    # The same normal point is in several files. A corrected one has another release, so it is another record.
    record_id=("sat_no", "timestamp_ns", "data_release"),
    claim="sat_no",
    measures=("range_km",),
    envelope={
        **ON_GROUND,
        "range_km": "(range_m - coalesce(refraction_m, 5.0D)) / 1000",
        "range_unc_km": f"sqrt(pow({LIGHT_M_S / 2e12}D * coalesce(bin_rms_ps, 200.0D), 2)"
        " + CASE WHEN refraction_m IS NULL THEN 10.0D ELSE 1.0D END) / 1000",
    },
    # Stations deliver normal points within a day.
    allowed_lateness_s=86_400.0,
)
