"""Read an Orbit Ephemeris Message to segments that can be interpolated, and rejected records.

A damaged line becomes a rejected record and a gap, across which nothing is interpolated. A segment that
cannot be used as it declares (another center, frame or time system, or too few states for its degree) is
rejected as a whole.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import erfa
import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.messages.errors import UnreadableMessage
from branchlake_dagster.sda.messages.oem import Method, Segment
from branchlake_dagster.sda.messages.oem_parts import FIELDS, Metadata, Parts, parts_of
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.inertial import Frame
from branchlake_dagster.sda.orbits.plausible import MAX_DISPLACEMENT_ERROR
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2

FRAMES = {
    "TEME": Frame.TEME,
    "EME2000": Frame.EME2000,
    "J2000": Frame.EME2000,
    "GCRF": Frame.GCRF,
    "ICRF": Frame.GCRF,
}
"""The supported values of REF_FRAME.

ICRF with the Earth as its center is GCRF. Earth-fixed frames are not supported, because they need Earth
orientation parameters.
"""
TIME_SYSTEMS = ("UTC", "TAI", "TT", "GPS")
MAX_DEGREE = 15
_DEFAULT = (Method.HERMITE, 7)
"""The interpolation of messages that recommend none. It uses the velocities, which every message has."""
_VERSIONS = ("1.0", "2.0", "3.0")
_EPOCHS = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%jT%H:%M:%S%.f")
_NEAREST_KM, _FURTHEST_KM, _FASTEST_KM_S = 6_300.0, 2_000_000.0, 20.0
_STRAY_FLOOR_KM = 1.0
_FIRST_YEAR, _LAST_YEAR = 1957, 2100
_MAX_RAW_CHARS = 4_096
_DAY_MICROS = 86_400_000_000
_GPS_FROM_TAI, _TT_FROM_TAI = 19_000_000, -32_184_000

REJECTED_COLUMNS: dict[str, pl.DataType] = {
    "line_number": pl.Int64(),
    "object_name": pl.String(),
    "raw_text": pl.String(),
    "reason": pl.String(),
    "field": pl.String(),
    "message": pl.String(),
}


class Reason(StrEnum):
    """The reason why a record is not used. A record is a line with a state, or a segment."""

    TRUNCATED = "truncated"
    FIELD = "field"
    ORDER = "order"
    DISPLACEMENT = "displacement"
    METADATA = "metadata"
    UNSUPPORTED = "unsupported"
    TOO_FEW = "too_few_records"


@dataclass(frozen=True)
class ReadEphemeris:
    """The usable segments of a file, ordered by time, and ``rejected`` with `REJECTED_COLUMNS`."""

    segments: list[Segment]
    rejected: pl.DataFrame


class _Refused(Exception):  # noqa: N818 - not for callers
    def __init__(self, reason: Reason, field: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.field = reason, field


def read_oem(content: bytes, source: str, *, limits: ReadLimits | None = None) -> ReadEphemeris:
    """Read one Orbit Ephemeris Message in KVN or XML, plain or gzipped. Covariances are ignored.

    Raises:
        UnreadableMessage: The file as a whole is empty, too large, damaged, of several objects or time
            systems, of an unknown version, or not such a message.
    """
    parts = parts_of(content, source, limits or ReadLimits())
    if parts.version not in _VERSIONS:
        raise UnreadableMessage(
            f"Ephemeris file {source} is of version {parts.version[:20]!r}.",
            hint=f"Read are {', '.join(_VERSIONS)}.",
            reason="version",
            subject=source,
        )
    if len({one.values.get("OBJECT_ID", "").upper() for one in parts.segments}) > 1:
        raise UnreadableMessage(
            f"Ephemeris file {source} is of several objects, which a message may not be.", hint="Divide it."
        )
    systems = {one.values.get("TIME_SYSTEM", "").upper() for one in parts.segments}
    if len(systems) > 1:
        raise UnreadableMessage(
            f"Ephemeris file {source} has several time systems, which a message may not.",
            hint="Divide it.",
        )
    return _Reading(parts).finish()


class _Reading:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._segments: list[Segment] = []
        self._rejected: list[dict[str, Any]] = []

    def finish(self) -> ReadEphemeris:
        by_segment = self._parts.states.partition_by("segment", as_dict=True, maintain_order=True)
        for number, metadata in enumerate(self._parts.segments, 1):
            states = by_segment.get((number,), self._parts.states.clear())
            try:
                self._read(metadata, states)
            except _Refused as refused:
                shown = " ".join(f"{k}={v}" for k, v in metadata.values.items())
                self._reject(metadata.line, metadata, shown, refused.reason, refused.field, str(refused))
        segments: list[Segment] = []
        for one in sorted(self._segments, key=lambda one: (one.begin, one.end)):
            if segments and one.begin < segments[-1].end:
                why = "what the segment may be used for overlaps with another's"
                metadata = Metadata(one.line, {"OBJECT_NAME": one.object_name})
                self._reject(one.line, metadata, "", Reason.METADATA, "useable_start_time", why)
            else:
                segments.append(one)
        rejected = pl.DataFrame(self._rejected, schema=REJECTED_COLUMNS, orient="row")
        return ReadEphemeris(segments, rejected.sort("line_number"))

    def _reject(
        self, line: int, metadata: Metadata, raw: str, reason: Reason, field: str | None, message: str
    ) -> None:
        self._rejected.append(
            {
                "line_number": line,
                "object_name": metadata.values.get("OBJECT_NAME", "")[:_MAX_RAW_CHARS],
                "raw_text": raw[:_MAX_RAW_CHARS],
                "reason": reason.value,
                "field": field,
                "message": message[:_MAX_RAW_CHARS],
            }
        )

    def _read(self, metadata: Metadata, states: pl.DataFrame) -> None:
        frame, system, method, degree = _parse_metadata(metadata)
        typed = _parse_states(states)
        for row in typed.filter(pl.col("why").is_not_null()).iter_rows(named=True):
            reason = Reason.TRUNCATED if row["broken"] else Reason.FIELD
            self._reject(row["line_number"], metadata, row["raw_text"], reason, row["field"], row["why"])
        good = typed["why"].is_null().to_numpy()
        values = typed.select(FIELDS[1:]).to_numpy()
        micros = np.where(good, typed["epoch"].dt.epoch("us").fill_null(0).to_numpy(), 0)
        micros = to_utc(micros, system)
        for k, (reason, field, why) in _find_misfits(micros, values, good).items():
            good[k] = False
            row = typed.row(k, named=True)
            self._reject(row["line_number"], metadata, row["raw_text"], reason, field, why)
        begin, end = _usable_span(metadata, system)
        # A rejected line ends an interval that can be interpolated.
        runs = np.split(np.arange(len(good)), np.flatnonzero(~good))
        for run in runs:
            rows = run[good[run]]
            if not len(rows):
                continue
            one = Segment(
                metadata.values["OBJECT_NAME"],
                metadata.values["OBJECT_ID"],
                frame,
                micros[rows],
                values[rows, :3],
                values[rows, 3:],
                max(begin, int(micros[rows[0]])),
                min(end, int(micros[rows[-1]])),
                method,
                degree,
                metadata.line,
            )
            if len(rows) < max(one.points, 2):
                line = int(typed["line_number"][int(rows[0])])
                why = f"{len(rows)} states in a row, {method} of degree {degree} takes {one.points}"
                self._reject(line, metadata, "", Reason.TOO_FEW, None, why)
            elif one.begin < one.end:
                self._segments.append(one)
        if not good.any():
            raise _Refused(Reason.TOO_FEW, "epoch", "the segment has no state that can be used")


def _parse_metadata(metadata: Metadata) -> tuple[Frame, str, Method, int]:
    values = metadata.values
    if metadata.repeated:
        raise _Refused(Reason.METADATA, metadata.repeated.lower(), f"{metadata.repeated} stands twice")
    needed = (
        "OBJECT_NAME",
        "OBJECT_ID",
        "CENTER_NAME",
        "REF_FRAME",
        "TIME_SYSTEM",
        "START_TIME",
        "STOP_TIME",
    )
    for name in needed:
        if not values.get(name):
            raise _Refused(Reason.METADATA, name.lower(), f"{name} is missing")
    if values["CENTER_NAME"].upper() != "EARTH":
        raise _unsupported(values, "CENTER_NAME", ["EARTH"])
    frame = FRAMES.get(values["REF_FRAME"].upper())
    if frame is None:
        raise _unsupported(values, "REF_FRAME", FRAMES)
    system = values["TIME_SYSTEM"].upper()
    if system not in TIME_SYSTEMS:
        raise _unsupported(values, "TIME_SYSTEM", TIME_SYSTEMS)
    if "INTERPOLATION" not in values:
        return frame, system, *_DEFAULT
    try:
        method = Method(values["INTERPOLATION"].upper())
    except ValueError:
        raise _unsupported(values, "INTERPOLATION", Method) from None
    degree_text = values.get("INTERPOLATION_DEGREE", "")
    if not degree_text.isascii() or not degree_text.isdigit() or not 1 <= int(degree_text[:9]) <= MAX_DEGREE:
        raise _Refused(
            Reason.UNSUPPORTED,
            "interpolation_degree",
            f"INTERPOLATION_DEGREE is {degree_text or 'missing'}, expected 1 to {MAX_DEGREE}",
        )
    degree = 1 if method is Method.LINEAR else int(degree_text)
    # Whole states (position and velocity) give an odd degree; an even degree is rounded up.
    return frame, system, method, degree + 1 - degree % 2 if method is Method.HERMITE else degree


def _unsupported(values: dict[str, str], name: str, allowed: Any) -> _Refused:
    words = ", ".join(str(one) for one in allowed)
    return _Refused(Reason.UNSUPPORTED, name.lower(), f"{name} is {values[name]}, read are {words}")


def _parse_states(states: pl.DataFrame) -> pl.DataFrame:
    """Convert epochs and numbers. Unusable lines get ``why``, and ``field`` if one column is the reason."""
    epoch_text = pl.col("epoch").str.replace("Z$", "")
    parsed = states.with_columns(
        pl.coalesce(epoch_text.str.to_datetime(f, time_unit="us", strict=False) for f in _EPOCHS).alias("at"),
        *(pl.col(name).cast(pl.Float64, strict=False).alias(f"{name}_value") for name in FIELDS[1:]),
    )
    # Microseconds since 1970 cannot represent a leap second.
    leap = epoch_text.str.contains(r":60(\.\d*)?$")
    wrong_time = pl.col("at").is_null() | leap | ~pl.col("at").dt.year().is_between(_FIRST_YEAR, _LAST_YEAR)
    radius, speed = (
        pl.sum_horizontal(pl.col(f"{axis}{dot}_value") ** 2 for axis in "xyz").sqrt() for dot in ("", "_dot")
    )
    checks: list[tuple[str, pl.Expr, str | pl.Expr]] = [
        ("epoch", wrong_time, pl.format("EPOCH={} is no time", pl.col("epoch").fill_null("nothing"))),
        *(
            (
                name,
                ~pl.col(f"{name}_value").is_finite().fill_null(False),
                pl.format("{}={} is no number", pl.lit(name.upper()), pl.col(name).fill_null("nothing")),
            )
            for name in FIELDS[1:]
        ),
        (
            "x",
            ~radius.is_between(_NEAREST_KM, _FURTHEST_KM),
            pl.format("{} km from the Earth's centre cannot be; positions are in km", radius),
        ),
        (
            "x_dot",
            speed > _FASTEST_KM_S,
            pl.format("{} km/s cannot be; velocities are in km/s", speed),
        ),
    ]
    broken = pl.col("broken").is_not_null()
    return parsed.select(
        "line_number",
        "raw_text",
        "broken",
        pl.col("at").alias("epoch"),
        *(pl.col(f"{name}_value").alias(name) for name in FIELDS[1:]),
        field=pl.when(~broken).then(
            pl.coalesce(pl.when(wrong).then(pl.lit(name)) for name, wrong, _ in checks)
        ),
        why=pl.when(broken)
        .then(pl.col("broken"))
        .otherwise(pl.coalesce(pl.when(wrong).then(message) for _, wrong, message in checks)),
    )


def _find_misfits(
    micros: Micros, values: Floats, good: npt.NDArray[np.bool_]
) -> dict[int, tuple[Reason, str, str]]:
    """Return the rows that do not fit the rows around them, with the reason.

    Of a damaged state, only its row.
    """
    found: dict[int, tuple[Reason, str, str]] = {}

    def reject(rows: npt.NDArray[np.int64], reason: Reason, field: str, why: str) -> None:
        found.update((int(row), (reason, field, why)) for row in rows)

    rows = np.flatnonzero(good)
    at = micros[rows]
    # If an epoch is after the next one, and the next one is after the previous one, this epoch is wrong.
    ahead = np.zeros(len(rows), np.bool_)
    ahead[1:-1] = (at[1:-1] > at[2:]) & (at[:-2] < at[2:])
    reject(rows[ahead], Reason.ORDER, "epoch", "the epoch is after the one of the next line")
    rows, at = rows[~ahead], at[~ahead]
    late = np.ones(len(rows), np.bool_)
    late[1:] = at[1:] > np.maximum.accumulate(at)[:-1]
    reject(rows[~late], Reason.ORDER, "epoch", "the epoch is not after the ones of the lines before it")
    rows = rows[late]
    # Only adjacent lines are compared.
    wrong = _is_displaced(micros[rows], values[rows]) & (np.diff(rows) == 1)
    alone = np.zeros(len(rows), np.bool_)
    alone[1:-1] = wrong[:-1] & wrong[1:]
    why = "the positions of this line and its neighbours are not what their velocities say"
    reject(rows[alone], Reason.DISPLACEMENT, "x", why)
    jumps = wrong & ~alone[:-1] & ~alone[1:]
    reject(rows[1:][jumps], Reason.DISPLACEMENT, "x", why)
    return found


def _is_displaced(micros: Micros, values: Floats) -> npt.NDArray[np.bool_]:
    """Return whether the displacement between two neighbors (n - 1,) differs from that by their velocities.

    The displacement by the velocities is their corrected trapezoid with the two-body acceleration.
    """
    h = (np.diff(micros) / 1e6)[:, None]
    r, v = values[:, :3], values[:, 3:]
    a = -MU_KM3_S2 * r / np.linalg.norm(r, axis=1, keepdims=True) ** 3
    integrated = h / 2 * (v[:-1] + v[1:]) + h**2 / 12 * (a[:-1] - a[1:])
    stray = np.linalg.norm(np.diff(r, axis=0) - integrated, axis=1)
    # The error of the trapezoid rule is h^5/720 times the fourth derivative of the velocity.
    radius = np.minimum(*(np.linalg.norm(part, axis=1) for part in (r[:-1], r[1:])))
    speed = np.maximum(*(np.linalg.norm(part, axis=1) for part in (v[:-1], v[1:])))
    rest = h[:, 0] ** 5 / 720 * speed * (MU_KM3_S2 / radius**3) ** 2
    return np.asarray(
        stray > MAX_DISPLACEMENT_ERROR * np.linalg.norm(integrated, axis=1) + _STRAY_FLOOR_KM + rest
    )


def _usable_span(metadata: Metadata, system: str) -> tuple[int, int]:
    """Return the start and the end of a segment's usable time, UTC microseconds."""
    found = []
    for edge in ("START", "STOP"):
        name = f"USEABLE_{edge}_TIME" if metadata.values.get(f"USEABLE_{edge}_TIME") else f"{edge}_TIME"
        time_text = metadata.values[name].removesuffix("Z")
        series = pl.Series([time_text], dtype=pl.String)
        parsed = [series.str.to_datetime(f, time_unit="us", strict=False)[0] for f in _EPOCHS]
        time = next((one for one in parsed if isinstance(one, datetime)), None)
        if time is None:
            raise _Refused(Reason.METADATA, name.lower(), f"{name}={time_text} is no time")
        at = np.array([round(time.replace(tzinfo=UTC).timestamp() * 1e6)], np.int64)
        found.append(int(to_utc(at, system)[0]))
    if found[0] >= found[1]:
        raise _Refused(Reason.METADATA, "stop_time", "the segment ends before it begins")
    return found[0], found[1]


def to_utc(micros: Micros, system: str) -> Micros:
    """Convert instants of another time system to UTC.

    Both are counted as if they were UTC's microseconds since 1970. `system` is one of `TIME_SYSTEMS`.
    """
    if system == "UTC":
        return micros
    tai = micros + {"TAI": 0, "GPS": _GPS_FROM_TAI, "TT": _TT_FROM_TAI}[system]
    # Near a leap second the first estimate may be on the wrong side of it, so the difference is read twice.
    return tai - _tai_from_utc(tai - _tai_from_utc(tai))


def _tai_from_utc(micros: Micros) -> Micros:
    """Return TAI minus UTC at instants of UTC, microseconds."""
    days, member = np.unique(micros // _DAY_MICROS, return_inverse=True)
    with warnings.catch_warnings():
        # After the announced leap seconds, the last known difference is used.
        warnings.simplefilter("ignore", erfa.ErfaWarning)
        year, month, day, _ = erfa.jd2cal(2_440_587.5 + days, 0.0)
        found = erfa.dat(year, month, day, 0.0)
    return np.asarray(np.round(found * 1e6)[member], np.int64)
