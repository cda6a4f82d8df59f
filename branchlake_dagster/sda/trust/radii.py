"""The hard-body radius of each object: from a radius table, else from its radar size class, else a default.

The probability of collision grows with the square of the radius. Ten meters for both objects together
overstate it by up to 2,500 for two pieces of small debris.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from branchlake_dagster.sda.registry.radius_table import RADIUS_COLUMNS

DEFAULT_RADIUS_M = 5.0
"""Of an object whose size nobody states: a satellite of ten meters across."""

RADIUS_BY_SIZE = {"SMALL": 0.12, "MEDIUM": 0.45, "LARGE": DEFAULT_RADIUS_M}
"""Meters by size class of Space-Track's satellite catalog: radar cross section below 0.1, to 1, above 1 m².

Nine tenths of NASA CARA's estimates from radar cross sections (June 2026) are below, within each class.
"""
_SMALL_M2, _MEDIUM_M2 = 0.1, 1.0

FROM_TABLE, FROM_SIZE, FROM_DEFAULT = RADIUS_SOURCES = ("radius table", "size class", "default")
"""Where a radius is from."""

_SIZE_COLUMNS = {"sat_no": pl.Int64(), "rcs_size": pl.String(), "rcs_m2": pl.Float64()}


@dataclass(frozen=True)
class ObjectRadii:
    """Looks radii up by catalog number. Without tables every object has the default.

    Args:
        default_m: of an object that neither table knows.
        table: as `read_radius_table` returns it.
        sizes: ``sat_no``, and what the satellite catalog says: ``rcs_size`` (SMALL, MEDIUM or LARGE) and
            ``rcs_m2``, from which the class follows where it is not stated.

    """

    default_m: float = DEFAULT_RADIUS_M
    table: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=RADIUS_COLUMNS))
    sizes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_SIZE_COLUMNS))

    def get_radii(self, sat_nos: pl.Series) -> tuple[pl.Series, pl.Series]:
        """The radius (m) of each object and where it is from, one of `RADIUS_SOURCES`.

        A measured or estimated radius of the table comes before the size class, the table's own default after
        it.
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
    """The radius of an object's size class; null where the satellite catalog states no size."""
    stated_class = pl.col("rcs_size").str.strip_chars().str.to_uppercase()
    cross_section = pl.col("rcs_m2").fill_nan(None)
    measured_class = (
        pl.when(cross_section <= 0)  # Space-Track's catalog has 0 where it states the class only
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
