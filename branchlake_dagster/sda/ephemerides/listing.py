"""Screen a read ephemeris against a catalog, and return the close approaches as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from branchlake_dagster.sda.ephemerides.screening import screen_tracks
from branchlake_dagster.sda.ephemerides.track import tracks_of
from branchlake_dagster.sda.messages.oem_read import ReadEphemeris
from branchlake_dagster.sda.orbits.propagation import Elements

SOURCE = "ephemeris"
_MOMENT = pl.Datetime("us", "UTC")
_DAY_MICROS = 86_400_000_000


def close_approaches(
    read: ReadEphemeris, elements: Elements, *, start: int, end: int, threshold_km: float
) -> pl.DataFrame:
    """Return close approaches with the columns of the conjunction list, nearest first.

    Object 1 is the ephemeris.

    Args:
        read: An ephemeris with at least one segment.
        elements: The element sets of the catalog's objects, without the ephemeris' own object.
        start: The start of the screening, UTC microseconds since 1970.
        end: The end of the screening.
        threshold_km: The largest distance that counts.
    """
    tracks = tracks_of(read.segments)
    found = screen_tracks(tracks, elements, start, end, threshold_km=threshold_km)
    epoch = elements.epoch_micros[found.second]
    columns: dict[str, pl.Series] = {
        "kind": pl.Series([str(kind) for kind in found.kinds], dtype=pl.String),
        "tca": pl.Series(found.tca_micros, dtype=pl.Int64).cast(_MOMENT),
        "miss_distance_km": pl.Series(found.miss_km, dtype=pl.Float64),
        "relative_speed_km_s": pl.Series(np.linalg.norm(found.velocity, axis=1), dtype=pl.Float64),
        "sat2_object_designator": pl.Series(elements.sat_no[found.second], dtype=pl.Int64),
        "together_min": pl.Series(found.minutes, dtype=pl.Int64),
    }
    for name, values, unit in (("position", found.position, "km"), ("velocity", found.velocity, "km_s")):
        columns |= {
            f"relative_{name}_{axis}_{unit}": pl.Series(values[:, k], dtype=pl.Float64)
            for k, axis in enumerate("rtn")
        }
    columns |= {
        "sat2_element_epoch": pl.Series(epoch, dtype=pl.Int64).cast(_MOMENT),
        "sat2_element_age_days": pl.Series((found.tca_micros - epoch) / _DAY_MICROS, dtype=pl.Float64),
    }
    one = read.segments[0]
    return (
        pl.DataFrame(columns)
        .select(
            pl.lit(SOURCE).alias("sat1_source"),
            pl.lit(one.object_name).alias("sat1_name"),
            pl.lit(one.object_id).alias("sat1_object_id"),
            pl.all(),
        )
        .sort("miss_distance_km", "tca", "sat2_object_designator")
    )


def screened_file(
    name: str,
    read: ReadEphemeris,
    catalogue: pl.DataFrame,
    *,
    threshold_km: float,
    max_element_age_days: float,
    exclude: Sequence[int],
) -> pl.DataFrame:
    """Screen one file over its whole usable time. Return rows of `EphemerisConjunction`.

    Args:
        name: The name of the file.
        read: The ephemeris, with at least one segment.
        catalogue: The columns `Elements.COLUMNS`, and, if they exist, ``object_name`` and ``object_id``. The
            object with the file's own id is left out.
        threshold_km: The largest distance that counts.
        max_element_age_days: Objects whose element sets differ from the start by more days are left out.
        exclude: Catalog numbers to leave out.
    """
    start, end = read.segments[0].begin, read.segments[-1].end
    missing = [
        pl.lit(None, pl.String).alias(n) for n in ("object_name", "object_id") if n not in catalogue.columns
    ]
    others = catalogue.with_columns(missing).filter(
        ~pl.col("sat_no").is_in(list(exclude))
        & (pl.col("object_id").str.to_uppercase() != read.segments[0].object_id.strip().upper()).fill_null(
            True
        )
        & ((start - pl.col("epoch").dt.epoch("us")).abs() <= max_element_age_days * _DAY_MICROS)
    )
    elements = Elements.from_arrow(others.to_arrow())
    found = close_approaches(read, elements, start=start, end=end, threshold_km=threshold_km)
    names = others.select(sat2_object_designator="sat_no", sat2_name="object_name")
    return found.join(names, on="sat2_object_designator", how="left", maintain_order="left").select(
        pl.lit(name).alias("ephemeris"),
        pl.all(),
        pl.lit(start).cast(_MOMENT).alias("screened_from"),
        pl.lit(end).cast(_MOMENT).alias("screened_until"),
        pl.lit(threshold_km).alias("threshold_km"),
    )
