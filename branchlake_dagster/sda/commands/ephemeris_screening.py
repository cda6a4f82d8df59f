"""Screen the operator's own ephemeris files against the published catalog."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import polars as pl

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.commands.conjunction_list import print_conjunctions
from branchlake_dagster.sda.commands.published_tables import load_published_table
from branchlake_dagster.sda.ephemerides.listing import close_approaches
from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.messages.oem import time_of
from branchlake_dagster.sda.messages.oem_read import ReadEphemeris, read_oem
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 5
_TRACKED = "tracked"
_DAY_MICROS = 86_400_000_000


def screen_files(
    reader: LakeReader,
    files: Sequence[Path],
    *,
    since: datetime | None,
    until: datetime | None,
    within_km: float,
    exclude: Sequence[int],
    max_age_days: float,
    at: str | None,
    as_csv: bool,
    rows: int,
) -> None:
    """Screen files one by one, and print their close approaches with catalog objects.

    Unusable records of the files are reported on standard error. Raises ConfigurationError for a file that is
    too large, has no usable segment, or no states in the interval, and if
    there is no catalog.
    """
    everything = [(path, _read_ephemeris(path)) for path in files]
    catalogue, read_at = _read_catalogue(reader, at)
    parts = []
    for path, read in everything:
        parts.append(_screen_file(path, read, catalogue, since, until, within_km, exclude, max_age_days))
    found = pl.concat(parts).sort("miss_distance_km", "tca")
    if as_csv:
        sys.stdout.write(found.write_csv(datetime_format="%Y-%m-%dT%H:%M:%S%.6fZ"))
    else:
        hidden: tuple[str, ...] = (
            "sat1_source",
            "sat1_object_id",
            "sat2_element_epoch",
            "relative_velocity_r_km_s",
        )
        hidden += ("relative_velocity_t_km_s", "relative_velocity_n_km_s")
        print_conjunctions(found.drop(hidden).rename({"sat1_name": "ephemeris"}), rows)
    click.echo(
        f"{format_count(found.height, 'close approach', 'close approaches')}. Read at {read_at}.", err=True
    )


def _read_ephemeris(path: Path) -> ReadEphemeris:
    limits = ReadLimits()
    if path.stat().st_size > limits.max_bytes:
        raise ConfigurationError(f"{path} has more than {limits.max_bytes:,} bytes.", hint="Divide it.")
    read = read_oem(path.read_bytes(), str(path), limits=limits)
    for row in read.rejected.head(_SHOWN).iter_rows(named=True):
        field = f", {row['field']}" if row["field"] else ""
        click.echo(f"{path}:{row['line_number']}: {row['reason']}{field}: {row['message']}", err=True)
    if read.rejected.height > _SHOWN:
        click.echo(f"{path}: {read.rejected.height - _SHOWN:,} more records are not used.", err=True)
    if not read.segments:
        raise ConfigurationError(
            f"{path} has no segment that can be screened.", hint="The messages above show its errors."
        )
    return read


def _read_catalogue(reader: LakeReader, at: str | None) -> tuple[pl.DataFrame, str]:
    """Read the tracked objects with names, and a label of the state that was read."""
    place = reader.find_state(at=at)
    table = load_published_table(reader, "sda.catalogue", place)
    if table is None:
        raise ConfigurationError(
            f"There is no catalog at {place.label}.",
            table="sda.catalogue",
            hint="Run catalogue_job first, or name a later time with --at.",
            reason="catalogue_missing",
        )
    there = {field.name for field in table.schema().fields}
    texts = [name for name in ("object_name", "object_id") if name in there]
    wanted = ", ".join(["sat_no", "epoch", *ELEMENT_FIELDS, *texts])
    chosen = f"state = '{_TRACKED}'" if "state" in there else "TRUE"
    query = f"SELECT {wanted} FROM sda.catalogue WHERE {chosen} ORDER BY sat_no"  # noqa: S608 - names of ours
    with reader.sql(query, branch=place.ref) as result:
        found = result.polars()
    missing = [pl.lit(None, pl.String).alias(n) for n in ("object_name", "object_id") if n not in texts]
    return found.with_columns(missing), place.label


def _screen_file(
    path: Path,
    read: ReadEphemeris,
    catalogue: pl.DataFrame,
    since: datetime | None,
    until: datetime | None,
    within_km: float,
    exclude: Sequence[int],
    max_age_days: float,
) -> pl.DataFrame:
    own = read.segments[0].object_id.strip().upper()
    itself = catalogue.filter(
        (pl.col("object_id").str.to_uppercase() == own) & ~pl.col("sat_no").is_in(list(exclude))
    )
    for number, name in itself.select("sat_no", "object_name").iter_rows():
        click.echo(
            f"{path}: {number} {name or ''} of the catalogue has the same id, {own}: "
            f"--exclude {number} leaves it out.",
            err=True,
        )
    start, end = read.segments[0].begin, read.segments[-1].end
    if since is not None:
        start = max(start, int(since.timestamp() * 1e6))
    if until is not None:
        end = min(end, int(until.timestamp() * 1e6))
    if start >= end:
        raise ConfigurationError(
            f"{path} has no states between --since and --until.",
            hint=f"Its states are from {time_of(read.segments[0].begin):%Y-%m-%dT%H:%M:%S} to"
            f" {time_of(read.segments[-1].end):%Y-%m-%dT%H:%M:%S} UTC.",
            reason="interval_empty",
            subject=str(path),
        )
    left = catalogue.filter(~pl.col("sat_no").is_in(list(exclude)))
    elements = Elements.from_arrow(left.to_arrow())
    fresh = np.abs(start - elements.epoch_micros) <= max_age_days * _DAY_MICROS
    used = elements.take(np.flatnonzero(fresh))
    found = close_approaches(read, used, start=start, end=end, threshold_km=within_km)
    spans = f"{time_of(start):%Y-%m-%d %H:%M:%S} to {time_of(end):%Y-%m-%d %H:%M:%S} UTC"
    parts = len(read.segments)
    click.echo(
        f"{path}: {spans}, {format_count(parts, 'segment')}, {format_count(len(used), 'object')},"
        f" {within_km:g} km; "
        f"{format_count(int((~fresh).sum()), 'object')} left out with elements older than {max_age_days:g}"
        " days.",
        err=True,
    )
    names = left.select(sat2_object_designator="sat_no", sat2_name="object_name")
    return found.join(names, on="sat2_object_designator", how="left", maintain_order="left")
