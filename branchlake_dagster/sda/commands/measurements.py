"""`branchlake sda observations` and `branchlake sda tracks`: list measurements and estimated orbits."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from branchlake_dagster.cli.command_settings import load_command_settings
from branchlake_dagster.cli.option_types import Moment
from branchlake_dagster.sda.commands.catalog_number import CATALOG_NUMBER
from branchlake_dagster.wording import format_count, format_printable

if TYPE_CHECKING:
    import polars as pl

    from branchlake_dagster.sda.commands.measurement_list import MeasurementListing

_ROWS = 50
_OBSERVATION_COLUMNS = {
    "sensor_timestamp": "measured",
    "source_kind": "kind",
    "source_id": "sensor",
    "track_id": "track",
    "sat_no": "claimed object",
    "associated_sat_no": "object",
    "association_result": "result",
    "association_reason": "reason",
    "normalized_distance": "distance, sigma",
    "candidates": "candidates",
    "observation_id": "observation",
}
_TRACK_COLUMNS = {
    "epoch": "epoch",
    "sat_no": "object",
    "source": "source",
    "is_preferred": "preferred",
    "position_sigma_km": "sigma, km",
    "catalogue_miss_km": "from catalog, km",
    "chi2_per_dof": "chi2 per dof",
}
"""Columns of the tables and their headings. Columns that a table does not have are left out."""


def _common_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option(
            "--object", "objects", type=CATALOG_NUMBER, multiple=True, help="Catalog number; may be repeated."
        ),
        click.option("--since", type=Moment(), help="At or after this time."),
        click.option("--until", type=Moment(), help="Before this time."),
        click.option(
            "--limit",
            type=click.IntRange(min=0),
            help=f"Most rows; 0: all. Default: {_ROWS} in a table, else all.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print all columns as JSON."),
        click.option("--csv", "as_csv", is_flag=True, help="Print all columns as CSV."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_common_options
@click.option("--kind", "kinds", multiple=True, help="Kind of sensor, such as radar; may be repeated.")
@click.option("--sensor", "sensors", multiple=True, help="Sensor (source_id); may be repeated.")
@click.option(
    "--uncorrelated", is_flag=True, help="Only those that belong to no object. --object: the claimed one."
)
def observations(
    objects: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    kinds: tuple[str, ...],
    sensors: tuple[str, ...],
    uncorrelated: bool,
) -> None:
    """List observations with the objects that they are associated with.

    Without times: those of the newest hour. Starts nothing and changes nothing.

    \b
    branchlake sda observations --object 25544 --since 2026-08-11T12:00 --until 2026-08-11T13:00
    branchlake sda observations --sensor radar-03 --uncorrelated --csv > uncorrelated.csv
    """
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.measurement_list import (
        MeasurementFilter,
        observation_columns,
        read_observations,
    )

    wanted = MeasurementFilter(objects, kinds, sensors, since, until)
    reader = connect(load_command_settings(None).settings)
    listing = read_observations(reader, wanted, only_uncorrelated=uncorrelated)
    _print(
        listing,
        "observation",
        _OBSERVATION_COLUMNS,
        observation_columns,
        limit=limit,
        as_json=as_json,
        as_csv=as_csv,
    )


@click.command()
@_common_options
@click.option("--kind", "kinds", multiple=True, help="Tracks that used this kind of sensor, such as radar.")
@click.option("--preferred", is_flag=True, help="Only tracks that are preferred to the element set.")
def tracks(
    objects: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    kinds: tuple[str, ...],
    preferred: bool,
) -> None:
    """List fused tracks: states of objects estimated from observations.

    Without times: those of the newest hour. Starts nothing and changes nothing.

    \b
    branchlake sda tracks --object 25544 --since 2026-08-11 --json
    """
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.measurement_list import (
        MeasurementFilter,
        MeasurementListing,
        read_tracks,
        track_columns,
        with_position_sigma,
    )

    wanted = MeasurementFilter(objects, kinds, (), since, until)
    reader = connect(load_command_settings(None).settings)
    listing = read_tracks(reader, wanted, only_preferred=preferred)
    if listing.rows is not None:
        listing = MeasurementListing(with_position_sigma(listing.rows), listing.label)
    _print(listing, "track", _TRACK_COLUMNS, track_columns, limit=limit, as_json=as_json, as_csv=as_csv)


def _print(
    listing: MeasurementListing,
    noun: str,
    columns: dict[str, str],
    columns_of_csv: Callable[[], list[str]],
    *,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    from branchlake_dagster.sda.commands.row_output import print_csv, print_csv_header, rows_to_json

    if as_json and as_csv:
        raise click.UsageError("Give only one of --json and --csv.")
    rows = listing.rows
    if rows is None:
        if as_json:
            click.echo("[]")
        elif as_csv:
            print_csv_header(columns_of_csv())
        click.echo(f"No {noun} was published yet. Read at {listing.label}.", err=True)
        return
    shown = rows.head(limit) if limit else rows
    if as_json:
        click.echo(json.dumps(rows_to_json(shown), indent=2))
    elif as_csv:
        print_csv(shown)
    else:
        _print_table(shown.head(_ROWS) if limit is None else shown, columns)
    click.echo(f"{format_count(rows.height, noun)}. Read at {listing.label}.", err=True)


def _print_table(rows: pl.DataFrame, columns: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from branchlake_dagster.sda.commands.row_output import print_table

    # For each kind of sensor there is a column with the number of its observations.
    counts = {name: name.removeprefix("n_") for name in rows.columns if name.startswith("n_")}
    columns = {**columns, **counts}
    names = [name for name in columns if name in rows.columns]
    table = Table(show_edge=False, pad_edge=False)
    for name in names:
        is_number = rows.schema[name].is_numeric() and not name.endswith("sat_no")
        table.add_column(columns[name], justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows.iter_rows(named=True):
        table.add_row(*(Text(_format_cell(row[name])) for name in names))
    print_table(table)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{value:.3f}" if isinstance(value, float) else format_printable(str(value))
