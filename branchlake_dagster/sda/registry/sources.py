"""Who a pull's element sets are from, and whom to believe when two say different things of one instant."""

from __future__ import annotations

import re

import polars as pl

SOURCES = ("18SDS", "ESA_SST", "LEOLABS", "EXOANALYTIC", "NUMERICA", "SIMULATED")
"""By priority at equal epochs: the catalogue of record first, then the survey that sees most of it, then
commercial networks from those with range measurements to those with angles alone. Simulated ones yield."""

_SOURCE_OF_PROVIDER = {
    "18sds": "18SDS",
    "spacetrack": "18SDS",
    "celestrak": "18SDS",
    "esa": "ESA_SST",
    "leolabs": "LEOLABS",
    "exoanalytic": "EXOANALYTIC",
    "numerica": "NUMERICA",
    "sim": "SIMULATED",
}
"""CelesTrak and Space-Track hand on the elements of the 18th Space Defense Squadron."""

_TIME_SUFFIX = re.compile(r"[-_.]?\d{8}(T\d{4,6}Z?)?")


def feed_name(snapshot_id: str) -> str:
    """The series of pulls that a snapshot is one of: its id without the time."""
    return _TIME_SUFFIX.sub("", snapshot_id, count=1) or "unnamed"


def source_name(snapshot_id: str) -> str:
    """The source of a snapshot, by the first word of its id; else it counts as the catalogue of record."""
    return _SOURCE_OF_PROVIDER.get(re.split(r"[-_.]", snapshot_id, maxsplit=1)[0].lower(), SOURCES[0])


def source_rank(column: str = "source") -> pl.Expr:
    """The rank of a source: the smaller is believed; one unknown comes last."""
    ranks = {name: rank for rank, name in enumerate(SOURCES)}
    return pl.col(column).replace_strict(ranks, default=len(SOURCES), return_dtype=pl.Int8)
