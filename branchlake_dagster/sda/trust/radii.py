"""Determine the hard-body radius of each object: from a radius table, its radar size class or a default.

The probability of collision grows with the square of the radius. A radius of ten meters for both objects
together overstates it by a factor of up to 2,500 for two pieces of small debris.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.gp.radius_table import RADIUS_COLUMNS

DEFAULT_RADIUS_M = 5.0
"""The radius of an object of unknown size: a satellite ten meters across."""

RADIUS_BY_SIZE = {"SMALL": 0.12, "MEDIUM": 0.45, "LARGE": DEFAULT_RADIUS_M}
"""Radius in meters by size class of Space-Track's satellite catalog.

The classes have radar cross sections below 0.1 m², up to 1 m², and above 1 m². In each class nine tenths of
NASA CARA's estimates from radar cross sections (June 2026) are below this radius.
"""
_SMALL_M2, _MEDIUM_M2 = 0.1, 1.0

FROM_TABLE, FROM_SIZE, FROM_DEFAULT = RADIUS_SOURCES = ("radius table", "size class", "default")
"""The possible sources of a radius."""

_SIZE_COLUMNS = {"sat_no": pl.Int64(), "rcs_size": pl.String(), "rcs_m2": pl.Float64()}


@dataclass(frozen=True)
class ObjectRadii:
    """The radii of objects by catalog number. Without tables every object has the default radius.

    Args:
        default_m: the radius of an object in neither table.
        table: the result of `read_radius_table`.
        sizes: ``sat_no``, ``rcs_size`` (SMALL, MEDIUM or LARGE) and ``rcs_m2`` from the satellite catalog.
            ``rcs_m2`` determines the class where ``rcs_size`` is missing.

    """

    default_m: float = DEFAULT_RADIUS_M
    table: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=RADIUS_COLUMNS))
    sizes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_SIZE_COLUMNS))

    def take(self, sat_nos: npt.NDArray[np.int64]) -> ObjectRadii:
        """Return the radii of the given objects (n,), without the tables' rows of other objects."""
        rows = pl.DataFrame({"sat_no": sat_nos})
        return ObjectRadii(
            self.default_m,
            self.table.join(rows, on="sat_no", how="semi"),
            self.sizes.join(rows, on="sat_no", how="semi", maintain_order="left"),
        )

    def get_radii(self, sat_nos: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Return the radius (m) of each object and its source, one of `RADIUS_SOURCES`.

        The order of preference is: a measured or estimated radius of the table, the size class, the table's
        own default, `default_m`.
        """
        size_radii = self.sizes.select("sat_no", _radius_by_size()).unique("sat_no", keep="last")
        objects = (
            pl.DataFrame({"sat_no": sat_nos.cast(pl.Int64)})
            .join(self.table, on="sat_no", how="left", maintain_order="left")
            .join(size_radii, on="sat_no", how="left", maintain_order="left")
        )
        is_in_table = pl.col("radius_m").is_not_null() & ~pl.col("is_default")
        has_size_class = pl.col("of_size_m").is_not_null()
        uses_table = is_in_table | (pl.col("radius_m").is_not_null() & ~has_size_class)
        rows = objects.select(
            pl.when(uses_table)
            .then("radius_m")
            .otherwise(pl.coalesce("of_size_m", pl.lit(self.default_m)))
            .alias("radius"),
            pl.when(uses_table)
            .then(pl.lit(FROM_TABLE))
            .when(has_size_class)
            .then(pl.lit(FROM_SIZE))
            .otherwise(pl.lit(FROM_DEFAULT))
            .alias("source"),
        )
        return rows["radius"], rows["source"]


def _radius_by_size() -> pl.Expr:
    """Return the radius of an object's size class; null where the satellite catalog states no size."""
    stated_class = pl.col("rcs_size").str.strip_chars().str.to_uppercase()
    cross_section = pl.col("rcs_m2").fill_nan(None)
    measured_class = (
        pl.when(cross_section <= 0)  # Space-Track's catalog has 0 where it states only the class
        .then(None)
        .when(cross_section < _SMALL_M2)
        .then(pl.lit("SMALL"))
        .when(cross_section <= _MEDIUM_M2)
        .then(pl.lit("MEDIUM"))
        .when(cross_section > _MEDIUM_M2)
        .then(pl.lit("LARGE"))
    )
    size_class = (
        pl.when(stated_class.is_in(list(RADIUS_BY_SIZE))).then(stated_class).otherwise(measured_class)
    )
    return size_class.replace_strict(RADIUS_BY_SIZE, default=None, return_dtype=pl.Float64).alias("of_size_m")
