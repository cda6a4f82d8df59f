"""Format element sets as TLE or OMM text, the inverse of the readers.

Simulated catalogs become real files, so that the readers process them like any other file.
"""

from __future__ import annotations

import string

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.gp.tle import compute_checksums

_ALPHA5_CHARS = [c for c in string.ascii_uppercase if c not in "IO"]
MAX_TLE_SAT_NO = 339_999


def _format_column(pattern: str, values: npt.NDArray[np.generic]) -> pl.Series:
    return pl.Series(np.char.mod(pattern, values).tolist(), dtype=pl.String)


def _format_sat_no(sat_no: npt.NDArray[np.int64]) -> pl.Series:
    """Format a catalog number in five characters, as Alpha-5 from 100000 on."""
    leading = pl.Series(np.array([*"0123456789", *_ALPHA5_CHARS])[sat_no // 10_000].tolist(), dtype=pl.String)
    return leading + _format_column("%04d", sat_no % 10_000)


def _format_exponent_field(values: npt.NDArray[np.float64]) -> pl.Series:
    """Format 0.36362e-3 as `` 36362-3``. The mantissa is in [0.1, 1), not in [1, 10)."""
    magnitude = np.abs(values)
    exponent = np.where(magnitude > 0, np.floor(np.log10(np.maximum(magnitude, 1e-300))) + 1, 0)
    mantissa = np.round(magnitude / 10.0**exponent * 1e5)
    has_carry = mantissa >= 1e5
    mantissa = np.where(has_carry, mantissa / 10, mantissa).astype(np.int64)
    exponent = np.where(has_carry, exponent + 1, exponent).astype(np.int64)
    # The exponent has a single digit, so smaller magnitudes are written as zero.
    is_too_small = exponent < -9
    mantissa, exponent = np.where(is_too_small, 0, mantissa), np.where(is_too_small, 0, exponent)
    sign = pl.Series(np.where((values < 0) & (mantissa > 0), "-", " ").tolist(), dtype=pl.String)
    exponent_sign = pl.Series(np.where(exponent > 0, "+", "-").tolist(), dtype=pl.String)
    return sign + _format_column("%05d", mantissa) + exponent_sign + _format_column("%d", np.abs(exponent))


def format_tle(elements: pl.DataFrame) -> str:
    """Format element sets (``ELEMENT_COLUMNS``) as three-line text.

    Raises:
        ValueError: a catalog number is above 339999, the largest in a TLE.

    """
    sat_no = elements["sat_no"].to_numpy()
    if sat_no.size and int(sat_no.max()) > MAX_TLE_SAT_NO:
        raise ValueError(
            f"A TLE cannot hold catalog number {sat_no.max()}; the largest is {MAX_TLE_SAT_NO}. Use OMM."
        )
    sat_no_field = _format_sat_no(sat_no)
    # The time is rounded to the format's 1e-8 day before it is divided into fields, so that 23:59:59.9999
    # carries into the next day.
    micros = elements["epoch"].dt.epoch("us").to_numpy()
    ticks = (micros + 432) // 864
    rounded = pl.Series((ticks * 864).tolist(), dtype=pl.Int64).cast(pl.Datetime("us"))
    year = (rounded.dt.year() % 100).to_numpy()
    day = rounded.dt.ordinal_day().to_numpy()
    epoch = (
        _format_column("%02d", year)
        + _format_column("%03d", day)
        + "."
        + _format_column("%08d", ticks % 100_000_000)
    )
    designator = elements["object_id"].fill_null("").str.replace(r"^\d\d(\d\d)-", "${1}").str.pad_end(8)
    ndot = elements["mean_motion_dot"].to_numpy()
    ndot_field = pl.Series(np.where(ndot < 0, "-", " ").tolist()) + _format_column(
        "%.8f", np.abs(ndot)
    ).str.slice(1)
    line1 = (
        "1 "
        + sat_no_field
        + elements["classification_type"].fill_null("U")
        + " "
        + designator
        + " "
        + epoch
        + " "
        + ndot_field
        + " "
        + _format_exponent_field(elements["mean_motion_ddot"].to_numpy())
        + " "
        + _format_exponent_field(elements["bstar"].to_numpy())
        + " "
        + elements["ephemeris_type"].cast(pl.String)
        + " "
        + _format_column("%4d", elements["element_set_no"].to_numpy() % 10_000)
    )
    ecc = np.minimum(np.round(elements["eccentricity"].to_numpy() * 1e7), 9_999_999).astype(np.int64)
    line2 = (
        "2 "
        + sat_no_field
        + " "
        + _format_column("%8.4f", elements["inclination"].to_numpy())
        + " "
        + _format_column("%8.4f", elements["ra_of_asc_node"].to_numpy())
        + " "
        + _format_column("%07d", ecc)
        + " "
        + _format_column("%8.4f", elements["arg_of_pericenter"].to_numpy())
        + " "
        + _format_column("%8.4f", elements["mean_anomaly"].to_numpy())
        + " "
        + _format_column("%11.8f", elements["mean_motion"].to_numpy())
        + _format_column("%5d", elements["rev_at_epoch"].to_numpy() % 100_000)
    )
    line1 = line1 + _format_column("%d", compute_checksums(line1))
    line2 = line2 + _format_column("%d", compute_checksums(line2))
    name = elements["object_name"].fill_null("").str.slice(0, 24)
    return "\n".join((name + "\n" + line1 + "\n" + line2).to_list()) + "\n"


def format_omm_json(elements: pl.DataFrame) -> str:
    """Format OMM JSON as CelesTrak does: one array, JSON numbers, ``EPOCH`` without a time zone letter."""
    records = elements.select(
        "object_name",
        "object_id",
        pl.col("epoch").dt.strftime("%Y-%m-%dT%H:%M:%S.%6f"),
        *("mean_motion", "eccentricity", "inclination", "ra_of_asc_node", "arg_of_pericenter"),
        *("mean_anomaly", "ephemeris_type", "classification_type"),
        pl.col("sat_no").alias("norad_cat_id"),
        *("element_set_no", "rev_at_epoch", "bstar", "mean_motion_dot", "mean_motion_ddot"),
    )
    return records.rename(str.upper).write_json()
