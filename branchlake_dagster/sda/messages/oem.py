"""Orbit Ephemeris Messages (CCSDS 502.0-B-3, section 5): their segments, and how they are written.

An ephemeris is a table of positions and velocities of an object over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import numpy as np

from branchlake_dagster.sda.messages.notation import (
    Block,
    Item,
    Notation,
    as_kvn,
    as_xml,
    comment_items,
    format_text,
    format_utc,
    identifier_item,
    time_item,
)
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.inertial import Frame

VERSION = Item("CCSDS_OEM_VERS", "3.0")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AXES = ("X", "Y", "Z", "X_DOT", "Y_DOT", "Z_DOT")


class Method(StrEnum):
    """The method of interpolation between the states of a segment."""

    HERMITE = "HERMITE"
    LAGRANGE = "LAGRANGE"
    LINEAR = "LINEAR"


@dataclass(frozen=True)
class Segment:
    """States at n increasing instants (UTC microseconds), between which a reader may interpolate.

    ``position`` (km) and ``velocity`` (km/s), both (n, 3), are in ``frame``. ``begin`` and ``end`` limit the
    usable time. ``line`` is the line of the file in which the segment begins.
    """

    object_name: str
    object_id: str
    frame: Frame
    micros: Micros
    position: Floats
    velocity: Floats
    begin: int
    end: int
    method: Method = Method.HERMITE
    degree: int = 7
    line: int = 0

    @property
    def points(self) -> int:
        """The number of states that one interpolation uses."""
        return (self.degree + 1) // 2 if self.method is Method.HERMITE else self.degree + 1


def format_oem(
    segments: Sequence[Segment], *, originator: str, created: datetime, notation: Notation, note: str = ""
) -> str:
    """Return one message with the segments. Times are in UTC, to the microsecond.

    Raises:
        NotAMessage: A value cannot be written.
    """
    header = Block(
        "header",
        (
            *(comment_items(note) if note else ()),
            time_item("CREATION_DATE", created),
            identifier_item("ORIGINATOR", originator),
        ),
    )
    if notation is Notation.XML:
        parts = tuple(
            Block("segment", (_metadata(one), Block("data", tuple(_vectors(one))))) for one in segments
        )
        return as_xml(VERSION, Block("oem", (header, Block("body", parts))))
    pieces = [as_kvn(VERSION, header)]
    for one in segments:
        metadata = as_kvn(VERSION, _metadata(one)).split("\n", 1)[1]
        pieces += [f"META_START\n{metadata}META_STOP\n", *_lines(one)]
    return "\n".join(pieces)


def time_of(micros: int) -> datetime:
    """Convert UTC microseconds since 1970 to a datetime."""
    return _EPOCH + timedelta(microseconds=int(micros))


def _metadata(one: Segment) -> Block:
    return Block(
        "metadata",
        (
            Item("OBJECT_NAME", format_text(one.object_name)),
            Item("OBJECT_ID", format_text(one.object_id)),
            Item("CENTER_NAME", "EARTH"),
            Item("REF_FRAME", one.frame.value),
            Item("TIME_SYSTEM", "UTC"),
            time_item("START_TIME", time_of(one.micros[0])),
            time_item("USEABLE_START_TIME", time_of(one.begin)),
            time_item("USEABLE_STOP_TIME", time_of(one.end)),
            time_item("STOP_TIME", time_of(one.micros[-1])),
            Item("INTERPOLATION", one.method.value),
            Item("INTERPOLATION_DEGREE", str(one.degree)),
        ),
    )


def _states(one: Segment) -> Iterator[tuple[str, list[str]]]:
    values = np.concatenate([one.position, one.velocity], axis=1)
    for micros, row in zip(one.micros.tolist(), values.tolist(), strict=True):
        yield format_utc(time_of(micros)), [f"{value:.9f}" for value in row]


def _lines(one: Segment) -> Iterator[str]:
    for epoch, row in _states(one):
        yield f"{epoch} {' '.join(row)}"
    yield ""


def _vectors(one: Segment) -> Iterator[Block]:
    for epoch, row in _states(one):
        values = (
            Item(axis, value, "km" if k < 3 else "km/s")
            for k, (axis, value) in enumerate(zip(_AXES, row, strict=True))
        )
        yield Block("stateVector", (Item("EPOCH", epoch), *values))
