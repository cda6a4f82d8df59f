"""Derive the source of a pull from its snapshot id, and rank sources that disagree about one epoch."""

from __future__ import annotations

import re

import polars as pl

SOURCES = ("18SDS", "ESA_SST", "LEOLABS", "EXOANALYTIC", "NUMERICA", "SIMULATED")
"""Sources by priority at equal epochs. The catalog of record comes first, then the survey that observes
most of it. Commercial networks follow: those with range measurements before those with angles only. Simulated
sources come last."""

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
"""CelesTrak and Space-Track distribute the elements of the 18th Space Defense Squadron."""

_TIME_SUFFIX = re.compile(r"[-_.]?\d{8}(T\d{4,6}Z?)?")


def feed_name(snapshot_id: str) -> str:
    """Return the feed of a snapshot: its id without the time."""
    return _TIME_SUFFIX.sub("", snapshot_id, count=1) or "unnamed"


def source_name(snapshot_id: str) -> str:
    """Return the source of a snapshot by the first word of its id; the default is the first of `SOURCES`."""
    return _SOURCE_OF_PROVIDER.get(re.split(r"[-_.]", snapshot_id, maxsplit=1)[0].lower(), SOURCES[0])


def source_rank(column: str = "source") -> pl.Expr:
    """Return the rank of a source: the smallest rank wins, and unknown sources come last."""
    ranks = {name: rank for rank, name in enumerate(SOURCES)}
    return pl.col(column).replace_strict(ranks, default=len(SOURCES), return_dtype=pl.Int8)
